"""What lake tables tell the log they need: what they lack, and nothing that they will be given otherwise."""

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
from tailrace.pipeline.config.settings import load_settings
from tailrace.pipeline.report import TableState
from tailrace.pipeline.tables import retention_holds
from tailrace.pipeline.tables.managed_table import ManagedTable
from tailrace.pipeline.tables.registry import TableRegistry
from tailrace.pipeline.tables.retention_holds import RetentionHolds, release_unwanted
from tailrace.tables.location import LakeLayout, TableLocation
from tailrace.tables.port import AppliedPosition
from tests.support.changes import SHOP
from tests.support.logs import OTHER, STEP, THIRD, Diary, inserts, quick_folder, seal

THINGS = SHOP.table


@pytest.fixture
def diary(tmp_path: Path) -> Iterator[Diary]:
    """A log of four commits: rows 1 and 2, row 3 of the other table, row 4, and one without rows."""
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
    found = TableRegistry(ChangeLog.open(diary.path), LakeLayout(root=tmp_path / "lake"))
    found.refresh_index()
    return found


def at(commit: int, seq: int) -> AppliedPosition:
    return AppliedPosition(commit=commit, seq=seq, position=Lsn(commit * STEP))


def live(
    registry: TableRegistry, cursor: AppliedPosition | None, state: TableState = TableState.CATCHING_UP
) -> ManagedTable:
    managed = ManagedTable(
        THINGS,
        TableLocation(path=Path("lake"), log_id=registry.log.log_id),
        state=state,
        applied_position=cursor,
        schema=SHOP,
    )
    registry.tables[THINGS] = managed
    return managed


def speaker_of(registry: TableRegistry) -> RetentionHolds:
    made = RetentionHolds(registry)
    made.enable()
    return made


def said(registry: TableRegistry) -> TableProgress | None:
    speaker_of(registry).publish()
    found = consumers.read_table_progress(registry.log.path)
    return found[0] if found else None


def test_nothing_is_said_before_the_tables_are_known(registry: TableRegistry) -> None:
    before = TableProgress(table=THINGS, numbers=(1,), commit=1, seq=2)
    write_table_progress(registry.log.path, [before])
    RetentionHolds(registry).publish(now=True)
    assert consumers.read_table_progress(registry.log.path) == [before], (
        "a source that did not answer takes nothing from its tables"
    )


def test_a_table_that_is_behind_holds_what_it_lacks(registry: TableRegistry) -> None:
    live(registry, at(1, 2))
    assert said(registry) == TableProgress(table=THINGS, numbers=(1,), commit=1, seq=2)


def test_a_loads_point_past_the_logs_commits_covers_them(registry: TableRegistry) -> None:
    live(registry, AppliedPosition(commit=1, seq=2, position=Lsn(2 * STEP + 50)))
    assert said(registry) == TableProgress(table=THINGS, numbers=(1,), commit=2, seq=3)


def test_a_table_that_lacks_nothing_is_as_far_as_the_log(registry: TableRegistry) -> None:
    live(registry, at(3, 4), TableState.LIVE)
    assert said(registry) == TableProgress(table=THINGS, numbers=(1,), commit=4, seq=4)


def test_a_failed_table_goes_on_holding(registry: TableRegistry) -> None:
    managed = live(registry, at(1, 2))
    managed.fail(SchemaChanged("a column was added"))
    hint = said(registry)
    assert hint is not None
    assert hint.seq == 2


def test_a_table_that_cannot_be_read_holds_what_it_held_before(registry: TableRegistry) -> None:
    before = TableProgress(table=THINGS, numbers=(1,), commit=1, seq=2)
    write_table_progress(registry.log.path, [before])
    managed = live(registry, None)
    managed.fail(TableUnusable("the folder cannot be read"))
    speaker = speaker_of(registry)
    for _ in range(2):
        speaker.publish(now=True)
        assert consumers.read_table_progress(registry.log.path) == [before]


def test_a_table_that_is_not_loaded_yet_holds_nothing(registry: TableRegistry) -> None:
    write_table_progress(registry.log.path, [TableProgress(table=THINGS, numbers=(1,), commit=0, seq=0)])
    live(registry, None, TableState.NEW)
    assert said(registry) is None


def test_a_table_that_is_being_loaded_holds_what_comes_after_its_snapshot(registry: TableRegistry) -> None:
    managed = live(registry, None, TableState.SEEDING)
    managed.load_floor = at(2, 3)
    assert said(registry) == TableProgress(table=THINGS, numbers=(1,), commit=2, seq=3)


def test_a_live_table_that_is_loaded_again_holds_what_it_would_go_on_with(registry: TableRegistry) -> None:
    managed = live(registry, at(1, 2))
    managed.load_floor = at(2, 3)
    managed.record_commit(at(1, 2), SHOP)  # it goes on meanwhile
    assert said(registry) == TableProgress(table=THINGS, numbers=(1,), commit=1, seq=2)
    managed.record_commit(at(3, 4), SHOP)
    assert said(registry) == TableProgress(table=THINGS, numbers=(1,), commit=2, seq=3)


def test_a_table_that_is_loaded_anew_no_longer_needs_what_its_old_rows_lacked(registry: TableRegistry) -> None:
    managed = live(registry, at(1, 2), TableState.NEW)
    assert said(registry) is None
    managed.load_floor = at(4, 4)
    hint = said(registry)
    assert hint is not None
    assert hint.commit == 4


def test_a_table_that_is_loaded_once_holds_what_its_load_is_brought_to_one_moment_by(registry: TableRegistry) -> None:
    managed = live(registry, at(1, 2))
    managed.load_only, managed.catch_up_load = True, "load"
    assert said(registry) == TableProgress(table=THINGS, numbers=(1,), commit=1, seq=2)
    managed.state, managed.catch_up_load = TableState.LOADED, None
    assert said(registry) is None


def test_a_table_that_is_not_there_any_more_holds_nothing(registry: TableRegistry) -> None:
    write_table_progress(
        registry.log.path, [TableProgress(table=TableId("public", "dropped"), numbers=(7,), commit=0, seq=0)]
    )
    live(registry, at(3, 4), TableState.LIVE)
    speaker_of(registry).publish()
    assert [hint.table for hint in consumers.read_table_progress(registry.log.path)] == [THINGS]


def test_tables_speak_at_most_every_few_seconds_unless_it_matters(
    registry: TableRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    managed = live(registry, at(1, 2))
    speaker = speaker_of(registry)
    speaker.publish()
    managed.record_commit(at(3, 4), SHOP)
    speaker.publish()
    assert consumers.read_table_progress(registry.log.path)[0].seq == 2
    speaker.publish(now=True)
    assert consumers.read_table_progress(registry.log.path)[0].seq == 4
    monkeypatch.setattr(retention_holds, "PUBLISH_SECONDS", 0.0)
    managed.applied_position = at(1, 2)
    speaker.publish(now=True)
    managed.record_commit(at(3, 4), SHOP)
    speaker.publish()
    assert consumers.read_table_progress(registry.log.path)[0].seq == 4


def test_a_failed_table_whose_rows_were_let_go_needs_a_snapshot(registry: TableRegistry, diary: Diary) -> None:
    managed = live(registry, at(1, 2))
    managed.fail(SchemaChanged("a column was added"))
    speaker = speaker_of(registry)
    speaker.publish()
    seal(diary.path)
    with Sealer(diary.path) as sealer:
        assert trim(sealer, RetentionPolicy(age_seconds=0.0)).detached == ()
        assert sealer.log.files(1), "it still holds"
        assert trim(sealer, RetentionPolicy(age_seconds=None, max_bytes=100)).detached == ("public.things",)
    registry.refresh_index()
    speaker.publish(now=True)
    assert managed.state is TableState.NEEDS_SNAPSHOT
    assert managed.error is not None
    assert managed.error.code == "log-trimmed"
    assert "loaded anew" in managed.error.hint
    (table,) = log_actions.readers(diary.path)
    assert (table.name, table.state, table.held_bytes) == ("public.things", "detached", 0)


def test_a_table_of_which_the_log_had_no_rows_holds_those_that_come(diary: Diary) -> None:
    third = TableProgress(table=THIRD.table, numbers=(), commit=4, seq=4)
    write_table_progress(diary.path, [third])
    diary.commit(inserts(5, schema=THIRD), inserts(6))
    seal(diary.path)
    with Sealer(diary.path) as sealer:
        trim(sealer, RetentionPolicy(age_seconds=0.0))
        assert len(sealer.log.files("sales.third")) == 1
        assert sealer.log.files("public.things") == []
    assert log_actions.readers(diary.path)[0].behind_rows == 1


def test_a_reader_by_name_also_holds_rows_of_the_table_made_again(diary: Diary) -> None:
    list(ChangeLog.open(diary.path).follow(table="public.things", consumer="reader"))
    again = replace(SHOP, relation=SHOP.relation + 1)
    diary.commit(inserts(9, schema=again))
    seal(diary.path)
    with Sealer(diary.path) as sealer:
        trim(sealer, RetentionPolicy(age_seconds=0.0))
    found = ChangeLog.open(diary.path).follow(table="public.things", consumer="reader")
    assert [batch.data.column("id").to_pylist() for batch in found] == [[9]]


def grown(log: Path) -> LogIndex:
    made = LogIndex(ChangeLog.open(log))
    made.grow()
    return made


def test_being_woken_passes_over_commits_that_are_gone(diary: Diary) -> None:
    seal(diary.path)
    diary.commit(inserts(5))
    with Sealer(diary.path) as sealer:
        trim(sealer, RetentionPolicy(age_seconds=0.0))
    index = grown(diary.path)
    assert index.first_commit == 5
    assert index.furthest_commit(1, 500_000) == 5, "a quiet table stands where it last had a change"
    assert index.furthest_commit(5, 500_000) == 5
    seal(diary.path)
    with Sealer(diary.path) as sealer:
        trim(sealer, RetentionPolicy(age_seconds=0.0))
    assert grown(diary.path).furthest_commit(0, 500_000) == 5


def test_a_capture_lets_go_for_tables_that_its_settings_no_longer_name(diary: Diary, tmp_path: Path) -> None:
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
