"""Holds of lake tables on the log: the rows they lack, unless a load will read them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tailrace.changelog.maintain.retention import RetentionPolicy, trim
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.read import consumers
from tailrace.changelog.read.consumers import TableProgress, write_table_progress
from tailrace.changelog.read.index import LogIndex
from tailrace.changelog.read.reader import ChangeLog
from tailrace.control import log_actions
from tailrace.errors import SchemaChanged, TableUnusable
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId
from tailrace.pipeline.config.settings_file import load_settings
from tailrace.pipeline.report import TableState
from tailrace.pipeline.tables import retention_holds
from tailrace.pipeline.tables.managed_table import ManagedTable
from tailrace.pipeline.tables.registry import TRIMMED_HINT, TableRegistry
from tailrace.pipeline.tables.retention_holds import RetentionHolds, release_unwanted
from tailrace.tables.location import LakeLayout, TableLocation
from tailrace.tables.port import AppliedPosition
from tests.support.changes import SHOP
from tests.support.logs import OTHER, STEP, THIRD, Diary, inserts, quick_folder, seal

THINGS = SHOP.table


@pytest.fixture
def diary(tmp_path: Path) -> Iterator[Diary]:
    """A log of four commits: rows 1 and 2, row 3 of another table, row 4, and a commit without rows."""
    with quick_folder(tmp_path) as folder:
        diary = Diary(folder / "log")
        diary.commit(inserts(1, 2))
        diary.commit(inserts(3, schema=OTHER))
        diary.commit(inserts(4))
        diary.commit()
        yield diary
        diary.close()


@pytest.fixture
def registry(diary: Diary, tmp_path: Path) -> TableRegistry:
    registry = TableRegistry(ChangeLog.open(diary.path), LakeLayout(root=tmp_path / "lake"))
    registry.refresh_index()
    return registry


def at(commit: int, seq: int) -> AppliedPosition:
    return AppliedPosition(commit=commit, seq=seq, position=Lsn(commit * STEP))


def live(
    registry: TableRegistry, applied_position: AppliedPosition | None, state: TableState = TableState.CATCHING_UP
) -> ManagedTable:
    managed = ManagedTable(
        THINGS,
        TableLocation(path=Path("lake"), log_id=registry.log.log_id),
        state=state,
        applied_position=applied_position,
        schema=SHOP,
    )
    registry.tables[THINGS] = managed
    return managed


def enabled_holds(registry: TableRegistry) -> RetentionHolds:
    holds = RetentionHolds(registry)
    holds.enable()
    return holds


def published(registry: TableRegistry) -> TableProgress | None:
    enabled_holds(registry).publish()
    records = consumers.read_table_progress(registry.log.path)
    return records[0] if records else None


def test_nothing_is_published_before_the_tables_are_known(registry: TableRegistry) -> None:
    before = TableProgress(table=THINGS, numbers=(1,), commit=1, seq=2)
    write_table_progress(registry.log.path, [before])
    RetentionHolds(registry).publish(now=True)
    assert consumers.read_table_progress(registry.log.path) == [before], (
        "while the source does not answer, its tables keep their holds"
    )


def test_a_table_that_is_behind_holds_the_rows_it_lacks(registry: TableRegistry) -> None:
    live(registry, at(1, 2))
    assert published(registry) == TableProgress(table=THINGS, numbers=(1,), commit=1, seq=2)


def test_commits_before_a_load_point_count_as_applied(registry: TableRegistry) -> None:
    live(registry, AppliedPosition(commit=1, seq=2, position=Lsn(2 * STEP + 50)))
    assert published(registry) == TableProgress(table=THINGS, numbers=(1,), commit=2, seq=3)


def test_a_table_that_lacks_nothing_is_at_the_end_of_the_log(registry: TableRegistry) -> None:
    live(registry, at(3, 4), TableState.LIVE)
    assert published(registry) == TableProgress(table=THINGS, numbers=(1,), commit=4, seq=4)


def test_a_failed_table_keeps_its_hold(registry: TableRegistry) -> None:
    managed = live(registry, at(1, 2))
    managed.fail(SchemaChanged("a column was added"))
    progress = published(registry)
    assert progress is not None
    assert progress.seq == 2


def test_a_table_that_cannot_be_read_keeps_its_earlier_hold(registry: TableRegistry) -> None:
    before = TableProgress(table=THINGS, numbers=(1,), commit=1, seq=2)
    write_table_progress(registry.log.path, [before])
    managed = live(registry, None)
    managed.fail(TableUnusable("the folder cannot be read"))
    holds = enabled_holds(registry)
    for _ in range(2):
        holds.publish(now=True)
        assert consumers.read_table_progress(registry.log.path) == [before]


def test_a_table_that_is_not_loaded_yet_holds_nothing(registry: TableRegistry) -> None:
    write_table_progress(registry.log.path, [TableProgress(table=THINGS, numbers=(1,), commit=0, seq=0)])
    live(registry, None, TableState.NEW)
    assert published(registry) is None


def test_a_table_that_is_being_loaded_holds_rows_after_its_snapshot(registry: TableRegistry) -> None:
    managed = live(registry, None, TableState.SEEDING)
    managed.load_floor = at(2, 3)
    assert published(registry) == TableProgress(table=THINGS, numbers=(1,), commit=2, seq=3)


def test_a_live_table_that_is_being_reloaded_also_holds_the_rows_it_lacks(registry: TableRegistry) -> None:
    managed = live(registry, at(1, 2))
    managed.load_floor = at(2, 3)
    managed.record_commit(at(1, 2), SHOP)  # it applies meanwhile
    assert published(registry) == TableProgress(table=THINGS, numbers=(1,), commit=1, seq=2)
    managed.record_commit(at(3, 4), SHOP)
    assert published(registry) == TableProgress(table=THINGS, numbers=(1,), commit=2, seq=3)


def test_a_new_table_that_is_being_loaded_does_not_hold_rows_its_old_content_lacked(registry: TableRegistry) -> None:
    managed = live(registry, at(1, 2), TableState.NEW)
    assert published(registry) is None
    managed.load_floor = at(4, 4)
    progress = published(registry)
    assert progress is not None
    assert progress.commit == 4


def test_a_table_that_is_only_loaded_holds_the_rows_of_its_catch_up(registry: TableRegistry) -> None:
    managed = live(registry, at(1, 2))
    managed.load_only, managed.catch_up_load = True, "load"
    assert published(registry) == TableProgress(table=THINGS, numbers=(1,), commit=1, seq=2)
    managed.state, managed.catch_up_load = TableState.LOADED, None
    assert published(registry) is None


def test_a_table_that_no_longer_exists_holds_nothing(registry: TableRegistry) -> None:
    write_table_progress(
        registry.log.path, [TableProgress(table=TableId("public", "dropped"), numbers=(7,), commit=0, seq=0)]
    )
    live(registry, at(3, 4), TableState.LIVE)
    enabled_holds(registry).publish()
    assert [progress.table for progress in consumers.read_table_progress(registry.log.path)] == [THINGS]


def test_progress_is_published_every_few_seconds_unless_forced(
    registry: TableRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    managed = live(registry, at(1, 2))
    holds = enabled_holds(registry)
    holds.publish()
    managed.record_commit(at(3, 4), SHOP)
    holds.publish()
    assert consumers.read_table_progress(registry.log.path)[0].seq == 2
    holds.publish(now=True)
    assert consumers.read_table_progress(registry.log.path)[0].seq == 4
    monkeypatch.setattr(retention_holds, "PUBLISH_SECONDS", 0.0)
    managed.applied_position = at(1, 2)
    holds.publish(now=True)
    managed.record_commit(at(3, 4), SHOP)
    holds.publish()
    assert consumers.read_table_progress(registry.log.path)[0].seq == 4


def test_a_failed_table_whose_rows_were_trimmed_needs_a_snapshot(registry: TableRegistry, diary: Diary) -> None:
    managed = live(registry, at(1, 2))
    managed.fail(SchemaChanged("a column was added"))
    holds = enabled_holds(registry)
    holds.publish()
    seal(diary.path)
    with Sealer(diary.path) as sealer:
        assert trim(sealer, RetentionPolicy(age_seconds=0.0)).detached == ()
        assert sealer.log.files(1), "the hold keeps it"
        assert trim(sealer, RetentionPolicy(age_seconds=None, max_bytes=100)).detached == ("public.things",)
    registry.refresh_index()
    holds.publish(now=True)
    assert managed.state is TableState.NEEDS_SNAPSHOT
    assert managed.error is not None
    assert managed.error.code == "log-trimmed"
    assert managed.error.hint == TRIMMED_HINT
    (table,) = log_actions.readers(diary.path)
    assert (table.name, table.state, table.held_bytes) == ("public.things", "detached", 0)


def test_a_table_without_rows_in_the_log_holds_later_ones(diary: Diary) -> None:
    third = TableProgress(table=THIRD.table, numbers=(), commit=4, seq=4)
    write_table_progress(diary.path, [third])
    diary.commit(inserts(5, schema=THIRD), inserts(6))
    seal(diary.path)
    with Sealer(diary.path) as sealer:
        trim(sealer, RetentionPolicy(age_seconds=0.0))
        assert len(sealer.log.files("sales.third")) == 1
        assert sealer.log.files("public.things") == []
    assert log_actions.readers(diary.path)[0].behind_rows == 1


def test_a_consumer_of_a_table_name_also_holds_rows_of_a_recreated_table(diary: Diary) -> None:
    list(ChangeLog.open(diary.path).follow(table="public.things", consumer="reader"))
    again = replace(SHOP, relation=SHOP.relation + 1)
    diary.commit(inserts(9, schema=again))
    seal(diary.path)
    with Sealer(diary.path) as sealer:
        trim(sealer, RetentionPolicy(age_seconds=0.0))
    found = ChangeLog.open(diary.path).follow(table="public.things", consumer="reader")
    assert [batch.data.column("id").to_pylist() for batch in found] == [[9]]


def fresh_index(log: Path) -> LogIndex:
    index = LogIndex(ChangeLog.open(log))
    index.grow()
    return index


def test_a_micro_batch_skips_trimmed_commits(diary: Diary) -> None:
    seal(diary.path)
    diary.commit(inserts(5))
    with Sealer(diary.path) as sealer:
        trim(sealer, RetentionPolicy(age_seconds=0.0))
    index = fresh_index(diary.path)
    assert index.first_commit == 5
    assert index.furthest_commit(1, 500_000) == 5, "a quiet table is where it last had a change"
    assert index.furthest_commit(5, 500_000) == 5
    seal(diary.path)
    with Sealer(diary.path) as sealer:
        trim(sealer, RetentionPolicy(age_seconds=0.0))
    assert fresh_index(diary.path).furthest_commit(0, 500_000) == 5


def test_a_capture_removes_holds_of_tables_that_its_settings_no_longer_name(diary: Diary, tmp_path: Path) -> None:
    kept, dropped = (
        TableProgress(table=TableId("public", name), numbers=(number,), commit=1, seq=1)
        for number, name in enumerate(("things", "other"), 1)
    )
    write_table_progress(diary.path, [kept, dropped])
    file = tmp_path / "tailrace.yaml"
    file.write_text(
        "name: shop\nsource:\n  url: postgresql://host/db\n  tables: ['public.*']\n  exclude: [public.other]\n"
        f"log: {diary.path}\ntables: {{path: ./lake}}\n"
    )
    release_unwanted(load_settings(file))
    assert consumers.read_table_progress(diary.path) == [kept]
