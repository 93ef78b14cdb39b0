"""A consistent point has the version of every table at its commit, and the reason for every missing one."""

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
    """Two tables that have applied a whole log of two commits; only the first has rows in it."""
    with quick_folder(tmp_path) as folder:
        diary = Diary(folder / "log")
        diary.commit(inserts(1, 2), at=200)
        diary.commit(inserts(3), at=150)
        diary.close()
        registry = TableRegistry(ChangeLog.open(diary.path), LakeLayout(root=tmp_path / "lake"))
        commit = registry.refresh_index()
        applied_position = AppliedPosition(
            commit=commit, seq=registry.index.next_seq(commit) - 1, position=registry.index.end_of(commit)
        )
        for table, version in ((SHOP.table, 3), (OTHER, 8)):
            registry.tables[table] = ManagedTable(
                table,
                TableLocation(path=tmp_path / "lake" / table.name, log_id=registry.log.log_id),
                state=TableState.LIVE,
                applied_position=applied_position,
                schema=SHOP,
                lake_version=version,
            )
        registry.tables[OTHER].schema = replace(SHOP, table=OTHER, relation=99)
        yield registry


def test_a_point_has_the_version_of_every_table_at_the_commit(registry: TableRegistry) -> None:
    point = build_point(registry, registry.index.last_commit)
    assert point is not None
    assert (point.versions, point.missing) == ({SHOP.table: 3, OTHER: 8}, {})


def test_the_time_of_a_point_is_the_newest_commit_time_not_the_last(registry: TableRegistry) -> None:
    point = build_point(registry, registry.index.last_commit)
    assert point is not None
    assert point.committed_at == 200


def test_the_source_time_of_a_load_counts_only_while_its_table_is_in_the_point(registry: TableRegistry) -> None:
    """Loaded rows may be newer than everything in the log."""
    registry.tables[OTHER].loaded_at = 300
    point = build_point(registry, registry.index.last_commit)
    assert point is not None
    assert point.committed_at == 300
    fail(registry.tables[OTHER])
    point = build_point(registry, registry.index.last_commit)
    assert point is not None
    assert (list(point.versions), point.committed_at) == ([SHOP.table], 200)


def test_the_source_time_of_a_load_is_known_to_the_next_process(registry: TableRegistry) -> None:
    managed = registry.tables[OTHER]
    assert managed.applied_position is not None
    managed.applied_position = replace(managed.applied_position, load="a-load")
    registry.load_store.record_ahead_range("a-load", ZERO, time=300)
    registry.update_repair_state(managed)
    assert managed.loaded_at == 300


def set_position(managed: ManagedTable, position: Lsn, seq: int) -> None:
    assert managed.applied_position is not None
    managed.applied_position = replace(managed.applied_position, position=position, seq=seq, commit=0)


def fail(managed: ManagedTable) -> None:
    managed.fail(TableUnusable("it is full", hint="Make room."))


@pytest.mark.parametrize(
    ("change", "state", "why"),
    [
        (lambda managed: managed.lock.acquire(), "live", "it was busy"),
        (lambda managed: set_position(managed, ZERO, 0), "live", "it was behind the others"),
        (lambda managed: set_position(managed, Lsn(1 << 60), 99), "live", "it was ahead of the others"),
        (lambda managed: setattr(managed, "catch_up_load", "a-load"), "live", "it was just loaded, and its catch-up"),
        (lambda managed: setattr(managed, "apply_suspended", True), "live", "it waits for its running load"),
        (lambda managed: setattr(managed, "lake_version", None), "live", "its folder is gone"),
        (lambda managed: setattr(managed, "applied_position", None), "live", "it is not loaded yet"),
        (lambda managed: setattr(managed, "state", TableState.SEEDING), "seeding", "it is being loaded"),
        (lambda managed: setattr(managed, "state", TableState.PAUSED), "paused", "it is paused"),
        (lambda managed: setattr(managed, "state", TableState.LOADED), "loaded", "it was loaded once"),
        (fail, "failed", "table-unusable"),
    ],
    ids=[
        "busy",
        "behind",
        "ahead",
        "catching up",
        "suspended",
        "no folder",
        "not loaded",
        "loading",
        "paused",
        "load only",
        "failed",
    ],
)
def test_a_table_that_is_not_at_the_commit_is_missing_and_holds_back_no_other(
    registry: TableRegistry, change: Callable[[ManagedTable], object], state: str, why: str
) -> None:
    change(registry.tables[SHOP.table])
    point = build_point(registry, registry.index.last_commit)
    assert point is not None
    assert point.versions == {OTHER: 8}
    absence = point.missing[SHOP.table]
    assert (list(point.missing), absence.state) == ([SHOP.table], state)
    assert absence.why.startswith(why)
    assert absence.is_temporary == (state == "live")


def test_a_table_behind_the_commit_is_missing_but_one_without_later_rows_is_not(registry: TableRegistry) -> None:
    index = registry.index
    for managed in registry.tables.values():
        set_position(managed, index.end_of(1), index.next_seq(1) - 1)
    first, last = build_point(registry, 1), build_point(registry, 2)
    assert first is not None
    assert last is not None
    assert first.versions == {SHOP.table: 3, OTHER: 8}
    assert last.versions == {OTHER: 8}, "it has no row in the second commit"


def test_without_any_table_there_is_no_point_and_a_table_that_never_existed_is_not_missing(
    registry: TableRegistry,
) -> None:
    registry.tables[SHOP.table].missing_at_source, registry.tables[SHOP.table].state = True, TableState.NEW
    point = build_point(registry, registry.index.last_commit)
    assert point is not None
    assert point.missing == {}
    fail(registry.tables[OTHER])
    assert build_point(registry, registry.index.last_commit) is None


def test_a_table_without_a_folder_is_missing_and_its_lock_is_released(registry: TableRegistry) -> None:
    """A folder without a table has no version, and its lock is free afterwards."""
    registry.tables[OTHER].lake_version = None
    point = build_point(registry, registry.index.last_commit)
    assert point is not None
    assert point.missing == {OTHER: Absence(state="live", why="its folder is gone")}
    assert registry.tables[OTHER].lock.acquire(blocking=False)
