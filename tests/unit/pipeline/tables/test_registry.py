"""Managed tables: what each has applied, and what it may do next."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tailrace.capture.postgres.chunks import ChunkKind, Plan
from tailrace.changelog.read.reader import ChangeLog
from tailrace.model.position import Lsn
from tailrace.pipeline.points.consistent_point import build_point
from tailrace.pipeline.report import TableState
from tailrace.pipeline.tables import registry as registry_module
from tailrace.pipeline.tables.managed_table import BatchEnd
from tailrace.pipeline.tables.registry import TableRegistry
from tailrace.tables.location import LakeLayout
from tailrace.tasks.load_store import LoadRecord
from tests.support.changes import SHOP, insert
from tests.support.logs import Diary, inserts
from tests.support.quiet import Quiet


def test_a_micro_batch_is_limited_only_if_more_commits_existed_when_it_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "ROWS_PER_BATCH_MAX", 2)
    diary = Diary(tmp_path / "log")
    for number in range(3):
        diary.commit(inserts(number))
    registry = TableRegistry(ChangeLog.open(diary.path), LakeLayout(root=tmp_path / "lake"))
    assert registry.next_batch_end(0) == BatchEnd(end=2, has_backlog=True)
    assert registry.next_batch_end(2) == BatchEnd(end=3, has_backlog=False)
    assert registry.next_batch_end(3) == BatchEnd(end=3, has_backlog=False)
    diary.commit(inserts(9))
    diary.close()
    assert registry.next_batch_end(2) == BatchEnd(end=4, has_backlog=False), "later commits are in a later plan"


def test_a_table_with_a_refetched_row_is_in_no_point_until_the_log_has_passed_the_read(tmp_path: Path) -> None:
    quiet = Quiet(tmp_path)
    quiet.diary.commit()
    quiet.reload([{"id": 1, "n": 1}], "first")
    registry = quiet.registry()
    registry.load_store.record_ahead_range("first", Lsn(quiet.applied_position.position.value + 150))
    managed = registry.add(SHOP.table)  # as a new process finds it after the refetch
    assert (managed.ahead_of_position, registry.next_range(managed, registry.index.last_commit), managed.state) == (
        True,
        None,
        TableState.CATCHING_UP,
    )
    assert (build_point(registry, registry.index.last_commit), registry.waits_for_log(managed)) == (None, True)
    quiet.commit(insert(2, n=2))
    quiet.diary.commit()
    quiet.apply()
    registry = quiet.registry()
    managed = registry.add(SHOP.table)
    assert registry.next_range(managed, registry.index.last_commit) is None
    assert (managed.ahead_of_position, managed.state) == (False, TableState.LIVE)
    assert build_point(registry, registry.index.last_commit) is not None


def test_a_load_that_ends_while_status_reads_it_counts_as_ended(tmp_path: Path) -> None:
    """As `tailrace status` may see it while a pipeline runs."""
    quiet = Quiet(tmp_path)
    quiet.diary.commit()
    quiet.reload([{"id": 1, "n": 1}], "first")
    registry = quiet.registry()
    record = LoadRecord(
        id="first",
        plan=Plan(schema=SHOP, leaves=(), cut=ChunkKind.KEY, chunks=()),
        snapshot_position=quiet.applied_position.position,
    )
    registry.load_store.begin(record)
    managed = registry.add(SHOP.table)
    assert managed.catch_up_load == record.id
    registry.load_store.end(record)
    assert (registry.next_range(managed, registry.index.last_commit), managed.state) == (None, TableState.LIVE)


def test_a_table_restored_from_an_older_copy_applies_what_it_lacks_from_the_log(tmp_path: Path) -> None:
    quiet = Quiet(tmp_path)
    quiet.load([{"id": 1, "n": 1}])
    path = quiet.settings.tables.layout.path(SHOP.table)
    shutil.copytree(path, tmp_path / "copy")
    quiet.commit(insert(2, n=2))
    quiet.apply()
    shutil.rmtree(path)
    shutil.copytree(tmp_path / "copy", path)
    quiet.commit(insert(3, n=3))
    quiet.apply()
    assert sorted(row["n"] for row in quiet.content()) == [1, 2, 3]


def test_a_table_ahead_of_a_log_restored_from_an_older_copy_is_left_alone(tmp_path: Path) -> None:
    quiet = Quiet(tmp_path)
    quiet.load([{"id": 1, "n": 1}])
    quiet.commit(insert(2, n=2))
    quiet.apply()
    quiet.diary.close()
    newest = max((quiet.settings.log.path / "hot").iterdir())
    newest.unlink()
    managed = quiet.registry().add(SHOP.table)
    assert (managed.state, managed.error and managed.error.code) == (TableState.FAILED, "table-ahead")
    assert managed.error is not None
    assert managed.error.hint
