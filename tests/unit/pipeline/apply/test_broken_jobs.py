"""Spark jobs that break because a worker was killed: tables resume from their own commits.

Everything is real except Spark: tasks run in this process, and a broken job raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tailrace.changelog.read.reader import ChangeLog
from tailrace.model.schema import TableId, TableSchema
from tailrace.pipeline.apply import applier as applying_module
from tailrace.pipeline.apply.compaction import Compactor
from tailrace.pipeline.capture.source_factory import open_source
from tailrace.pipeline.points.consistent_point import build_point
from tailrace.pipeline.report import TableState
from tailrace.pipeline.tables.managed_table import ManagedTable
from tailrace.tasks.apply import apply_changes
from tailrace.tasks.work import ApplyWork, Outcome
from tests.support.changes import insert
from tests.support.loads import Local
from tests.support.quiet import FULL, NARROW, THINGS, Quiet

OTHERS = TableId("public", "others")
Task = Callable[..., Outcome]


class Broken(Exception):
    """Stands for Spark's error about a job whose worker was killed."""


class Breaking(Local):
    """Breaks the next `breaks` jobs after their tasks have run."""

    breaks = 0
    killer: TableId | None = None
    """Table whose task kills its worker and never finishes."""

    def _run(self, task: Task, works: Sequence[Any]) -> list[Outcome]:
        others = [work for work in works if not isinstance(work, ApplyWork) or work.table != self.killer]
        outcomes = super()._run(task, others)
        if self.breaks or len(others) < len(works):
            self.breaks = max(0, self.breaks - 1)
            raise Broken
        return outcomes


@contextmanager
def process(quiet: Quiet) -> Iterator[Breaking]:
    log = ChangeLog.open(quiet.settings.log.path)
    applying = Breaking(quiet.settings, log, open_source(quiet.settings, log.log_id))
    try:
        applying.registry.refresh_index()
        yield applying
    finally:
        applying.stop()


@pytest.fixture
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Quiet:
    monkeypatch.setattr(applying_module, "RETRY_SECONDS", 0.001)
    quiet = Quiet(tmp_path)
    quiet.diary.commit()
    quiet.reload([{"id": 1, "n": 1}], "first", FULL)
    return quiet


def commit(quiet: Quiet, key: int, schema: TableSchema = FULL) -> None:
    """Commit one row."""
    quiet.commit(insert(key, n=key), schema=schema)


def apply_all(applying: Local) -> None:
    applying._bring_tables_to(applying.registry.refresh_index())


def assert_complete(quiet: Quiet, managed: ManagedTable, *keys: int) -> None:
    assert (managed.state, managed.error) == (TableState.LIVE, None)
    assert quiet.ns() == {key: key for key in keys}
    assert managed.applied_position == quiet.applied_position


def test_a_commit_of_a_broken_job_is_found_and_apply_continues_from_it(quiet: Quiet) -> None:
    commit(quiet, 2)
    with process(quiet) as applying:
        managed = applying.registry.add(THINGS)
        applying.breaks = 1
        apply_all(applying)
        assert_complete(quiet, managed, 1, 2)
        commit(quiet, 3)
        apply_all(applying)
        assert_complete(quiet, managed, 1, 2, 3)


def test_a_recast_of_a_broken_job_is_found_and_apply_continues_from_it(quiet: Quiet) -> None:
    commit(quiet, 2, NARROW)
    with process(quiet) as applying:
        managed = applying.registry.add(THINGS)
        applying.breaks = 2
        apply_all(applying)
        assert_complete(quiet, managed, 1, 2)


def test_a_task_that_commits_after_its_job_broke_off_stops_nothing(quiet: Quiet) -> None:
    commit(quiet, 2)
    with process(quiet) as applying:
        managed = applying.registry.add(THINGS)
        late: list[ApplyWork] = []

        class Slow(Breaking):
            def _run(self, task: Task, works: Sequence[Any]) -> list[Outcome]:
                if not late:
                    late.extend(works)
                    raise Broken
                if len(late) == 1:  # just before the task that was sent after it
                    late.append(late[0])
                    assert apply_changes(late[0]).error is None
                return Local._run(self, task, works)

        applying.__class__ = Slow
        apply_all(applying)
        assert len(late) == 2
        assert_complete(quiet, managed, 1, 2)


def test_a_table_whose_task_kills_its_worker_holds_back_only_itself(
    quiet: Quiet, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(quiet, 2)
    with process(quiet) as applying:
        managed = applying.registry.add(THINGS)
        applying.killer = OTHERS
        other = ManagedTable(OTHERS, managed.location, state=TableState.CATCHING_UP)
        other.applied_position, other.schema = managed.applied_position, managed.schema
        applying.registry.tables[OTHERS] = other
        numbers = applying.registry.log_numbers(managed)
        monkeypatch.setattr(applying.registry, "log_numbers", lambda _: numbers)  # both read the same of the log
        monkeypatch.setattr(applying.registry, "refresh_from_table", lambda _: None)  # the other has no folder
        apply_all(applying)
        assert_complete(quiet, managed, 1, 2)
        assert other.state is TableState.FAILED
        assert other.error is not None
        assert other.error.code == "unexpected"


def test_a_foreign_write_during_a_broken_job_still_stops_the_table(quiet: Quiet) -> None:
    before = quiet.table.version()
    commit(quiet, 2)
    quiet.apply()
    with process(quiet) as applying:
        managed = applying.registry.add(THINGS)
        commit(quiet, 3)
        applying.breaks = 1
        opened = quiet.table.opened()
        assert before is not None
        opened.table.restore(before)
        apply_all(applying)
        assert managed.state is TableState.FAILED
        assert managed.error is not None
        assert managed.error.code == "foreign-write"


def test_a_table_is_in_no_point_while_a_task_of_a_broken_job_may_still_commit(quiet: Quiet) -> None:
    commit(quiet, 2)
    with process(quiet) as applying:
        registry = applying.registry
        managed = registry.add(THINGS)
        applying.breaks = 1
        apply_all(applying)
        assert build_point(registry, registry.index.last_commit) is None
        applying.advance_skipped()
        assert build_point(registry, registry.index.last_commit) is None
        managed.outcome_unknown_until = 1e-9  # as if that long had passed
        applying.advance_skipped()
        assert build_point(registry, registry.index.last_commit) is not None


def test_a_broken_compaction_job_stops_nothing(quiet: Quiet) -> None:
    with process(quiet) as applying:
        managed = applying.registry.add(THINGS)
        for key in range(2, 12):
            commit(quiet, key)
            apply_all(applying)
        compactor = Compactor(
            quiet.settings.tables.upkeep,
            applying.registry,
            run=applying._run,
            advance=applying._advance_one,
            stopping=applying._stopping,
        )
        applying.breaks = 1
        outcome = compactor._compact(managed)
        assert outcome is not None
        assert outcome.error is not None
        commit(quiet, 12)
        apply_all(applying)
        assert_complete(quiet, managed, *range(1, 13))
        assert len(quiet.table.files()) < 8, "the files were compacted nevertheless"
