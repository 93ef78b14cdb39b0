"""A point has the version of every table that is there, and says of every other why it is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import TableUnusable
from tailrace.model.position import ZERO, Lsn
from tailrace.model.schema import TableId
from tailrace.pipeline.points.consistent_point import build_point
from tailrace.pipeline.points.ledger import Absence
from tailrace.pipeline.report import TableState
from tailrace.pipeline.tables.managed_table import ManagedTable
from tailrace.pipeline.tables.registry import TableRegistry
from tailrace.tables.location import LakeLayout, TableLocation
from tailrace.tables.port import AppliedPosition
from tests.support.changes import SHOP
from tests.support.logs import Diary, inserts, quick_folder

OTHER = TableId("public", "others")


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[TableRegistry]:
    """Two tables that have applied all of a log of two commits; only the first has rows in it."""
    with quick_folder(tmp_path) as folder:
        diary = Diary(folder / "log")
        diary.commit(inserts(1, 2), at=200)
        diary.commit(inserts(3), at=150)
        diary.close()
        found = TableRegistry(ChangeLog.open(diary.path), LakeLayout(root=tmp_path / "lake"))
        commit = found.refresh_index()
        there = AppliedPosition(
            commit=commit, seq=found.index.next_seq(commit) - 1, position=found.index.end_of(commit)
        )
        for table, version in ((SHOP.table, 3), (OTHER, 8)):
            found.tables[table] = ManagedTable(
                table,
                TableLocation(path=tmp_path / "lake" / table.name, log_id=found.log.log_id),
                state=TableState.LIVE,
                applied_position=there,
                schema=SHOP,
                lake_version=version,
            )
        found.tables[OTHER].schema = replace(SHOP, table=OTHER, relation=99)
        yield found


def test_a_point_has_the_version_of_every_table_that_is_there(registry: TableRegistry) -> None:
    point = build_point(registry, registry.index.last_commit)
    assert point is not None
    assert (point.versions, point.missing) == ({SHOP.table: 3, OTHER: 8}, {})


def test_a_point_bears_the_newest_time_of_the_log_up_to_there_not_the_last(registry: TableRegistry) -> None:
    point = build_point(registry, registry.index.last_commit)
    assert point is not None
    assert point.committed_at == 200


def test_what_was_loaded_counts_as_of_the_sources_clock_then_and_only_where_it_is_there(
    registry: TableRegistry,
) -> None:
    """Rows that were loaded may be younger than all that the log has."""
    registry.tables[OTHER].loaded_at = 300
    point = build_point(registry, registry.index.last_commit)
    assert point is not None
    assert point.committed_at == 300
    fail(registry.tables[OTHER])
    point = build_point(registry, registry.index.last_commit)
    assert point is not None
    assert (list(point.versions), point.committed_at) == ([SHOP.table], 200)


def test_the_sources_time_of_a_load_is_known_to_the_next_process(registry: TableRegistry) -> None:
    managed = registry.tables[OTHER]
    assert managed.applied_position is not None
    managed.applied_position = replace(managed.applied_position, load="a-load")
    registry.load_store.record_ahead_range("a-load", ZERO, time=300)
    registry.update_repair_state(managed)
    assert managed.loaded_at == 300


def stand(managed: ManagedTable, position: Lsn, seq: int) -> None:
    assert managed.applied_position is not None
    managed.applied_position = replace(managed.applied_position, position=position, seq=seq, commit=0)


def fail(managed: ManagedTable) -> None:
    managed.fail(TableUnusable("it is full", hint="Make room."))


@pytest.mark.parametrize(
    ("become", "state", "why"),
    [
        (lambda managed: managed.lock.acquire(), "live", "it was busy"),
        (lambda managed: stand(managed, ZERO, 0), "live", "it was behind the others"),
        (lambda managed: stand(managed, Lsn(1 << 60), 99), "live", "it was ahead of the others"),
        (lambda managed: setattr(managed, "catch_up_load", "a-load"), "live", "it was just loaded, and its catch-up"),
        (lambda managed: setattr(managed, "apply_suspended", True), "live", "it waits for its running load"),
        (lambda managed: setattr(managed, "lake_version", None), "live", "its folder is gone"),
        (lambda managed: setattr(managed, "applied_position", None), "live", "it is not loaded yet"),
        (lambda managed: setattr(managed, "state", TableState.SEEDING), "seeding", "it is being loaded"),
        (lambda managed: setattr(managed, "state", TableState.PAUSED), "paused", "it is paused"),
        (lambda managed: setattr(managed, "state", TableState.LOADED), "loaded", "it was loaded once"),
        (fail, "failed", "table-unusable"),
    ],
    ids=["busy", "behind", "ahead", "replayed", "halted", "gone", "bare", "seeding", "paused", "once", "failed"],
)
def test_a_table_that_is_not_there_is_left_out_and_holds_back_no_other(
    registry: TableRegistry, become: Callable[[ManagedTable], object], state: str, why: str
) -> None:
    become(registry.tables[SHOP.table])
    point = build_point(registry, registry.index.last_commit)
    assert point is not None
    assert point.versions == {OTHER: 8}
    absence = point.missing[SHOP.table]
    assert (list(point.missing), absence.state) == ([SHOP.table], state)
    assert absence.why.startswith(why)
    assert absence.is_temporary == (state == "live")


def test_a_table_of_an_earlier_commit_is_at_no_later_point_but_a_quiet_one_is(registry: TableRegistry) -> None:
    index = registry.index
    for managed in registry.tables.values():
        stand(managed, index.end_of(1), index.next_seq(1) - 1)
    first, last = build_point(registry, 1), build_point(registry, 2)
    assert first is not None
    assert last is not None
    assert first.versions == {SHOP.table: 3, OTHER: 8}
    assert last.versions == {OTHER: 8}, "it has no row in the second commit"


def test_where_no_table_is_there_is_no_point_and_one_that_never_was_is_not_missing(registry: TableRegistry) -> None:
    registry.tables[SHOP.table].missing_at_source, registry.tables[SHOP.table].state = True, TableState.NEW
    point = build_point(registry, registry.index.last_commit)
    assert point is not None
    assert point.missing == {}
    fail(registry.tables[OTHER])
    assert build_point(registry, registry.index.last_commit) is None


def test_a_table_is_asked_for_its_version_once(registry: TableRegistry) -> None:
    """A folder without a table tells of none; nobody is kept out of it afterwards."""
    registry.tables[OTHER].lake_version = None
    point = build_point(registry, registry.index.last_commit)
    assert point is not None
    assert point.missing == {OTHER: Absence(state="live", why="its folder is gone")}
    assert registry.tables[OTHER].lock.acquire(blocking=False)
