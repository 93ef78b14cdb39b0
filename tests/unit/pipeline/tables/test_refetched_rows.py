"""Tables that must refetch rows from an unreachable source, and the records of refetched rows.

Everything is real except Spark: tasks run in this process, and the source is a port without a listener.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tailrace.capture.postgres.chunks import ChunkKind, Plan
from tailrace.changelog.read.reader import ChangeLog
from tailrace.cli.main import main
from tailrace.errors import BaseRowMissing, ExitCode
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId
from tailrace.pipeline.apply import applier as applying_module
from tailrace.pipeline.capture.source_factory import open_source
from tailrace.pipeline.loads.load_commit import newest_row_position
from tailrace.pipeline.loads.running_load import RunningLoad
from tailrace.pipeline.points.consistent_point import build_point
from tailrace.pipeline.report import TableState
from tailrace.pipeline.tables.managed_table import RETRIES_MAX, ManagedTable
from tailrace.tasks.load_store import REMEMBERED_SECONDS, LoadRecord, LoadRequest, LoadStore
from tailrace.tasks.work import Outcome
from tests.support.changes import SHOP, insert, update
from tests.support.loads import Local
from tests.support.quiet import THINGS, Quiet

BIG = ("big",)


class Counting(Local):
    """Counts how often it ran tasks."""

    runs = 0

    def _run(self, task: Callable[..., Outcome], works: Sequence[Any]) -> list[Outcome]:
        self.runs += 1
        return super()._run(task, works)


@contextmanager
def process(quiet: Quiet) -> Iterator[Counting]:
    """Run an applier without its threads; the test calls its steps."""
    log = ChangeLog.open(quiet.settings.log.path)
    applying = Counting(quiet.settings, log, open_source(quiet.settings, log.log_id))
    try:
        applying.registry.refresh_index()
        yield applying
    finally:
        applying.stop()


def loaded(folder: Path) -> Quiet:
    quiet = Quiet(folder)
    quiet.diary.commit()
    quiet.reload([{"id": 1, "n": 1}], "first")
    return quiet


def with_partial_change(folder: Path) -> Quiet:
    """Return a table that lacks a row for which the log has a partial change."""
    quiet = loaded(folder)
    quiet.commit(update(2, unchanged=BIG, n=2))
    return quiet


def advance(applying: Local, managed: ManagedTable) -> None:
    applying._advance([managed], applying.registry.refresh_index())


@pytest.mark.parametrize("mode", ["initial", "schema_only"])
def test_a_table_that_must_refetch_a_row_waits_for_an_unreachable_source(tmp_path: Path, mode: str) -> None:
    quiet = with_partial_change(tmp_path)
    with process(quiet) as applying:
        managed = applying.registry.add(THINGS, mode=mode)
        started = time.monotonic()
        for _ in range(RETRIES_MAX + 2):
            managed.not_before = min(managed.not_before, time.monotonic())  # as if that long had passed
            advance(applying, managed)
        assert time.monotonic() - started < RETRIES_MAX * applying_module.SOURCE_SECONDS, "no pause in between"
        assert managed.error is not None
        assert (managed.error.code, managed.state, managed.failures) == (
            "source-unreachable",
            TableState.CATCHING_UP,
            0,
        )
        assert managed.not_before > time.monotonic()


def test_a_table_that_waits_for_the_source_is_not_tried_by_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applying_module, "SOURCE_SECONDS", 0.01)
    with process(with_partial_change(tmp_path)) as applying:
        managed = applying.registry.add(THINGS, mode="schema_only")
        applying._bring_tables_to(applying.registry.refresh_index())
        assert applying.runs == 1
        time.sleep(0.02)
        applying._bring_tables_to(applying.registry.refresh_index())
        assert applying.runs == 1, "no micro-batch waits for the source again"
        applying.advance_skipped()
        assert applying.runs == 2
        assert managed.state is TableState.CATCHING_UP


def test_an_unloaded_table_is_in_no_point_while_a_refetched_row_is_newer(tmp_path: Path) -> None:
    quiet = loaded(tmp_path)
    quiet.commit(insert(2, n=2))
    with process(quiet) as applying:
        registry = applying.registry
        managed = registry.add(THINGS, mode="schema_only")
        advance(applying, managed)
        assert managed.state is TableState.LIVE
        assert build_point(registry, registry.index.last_commit) is not None
        end = quiet.commit(insert(3, n=3))
        quiet.diary.commit()
        seen_until = Lsn(end.value + 150)
        registry.load_store.record_refetch(
            "first", Lsn(end.value + 100), seen_until
        )  # as the task does, before its commit
        advance(applying, managed)
        assert (managed.repairing, managed.state) == (True, TableState.CATCHING_UP)
        assert build_point(registry, registry.index.last_commit) is None
        quiet.diary.commit()
        advance(applying, managed)
        assert (managed.ahead_of_position, managed.state) == (False, TableState.LIVE)
        assert build_point(registry, registry.index.last_commit) is not None


def rebuild(quiet: Quiet, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = main(["rebuild", str(quiet.file), "public.things", *arguments, "--json"])
    printed = capsys.readouterr()
    return code, json.loads(printed.out) if code == ExitCode.OK else printed.err


def refetched(folder: Path) -> tuple[Quiet, Lsn]:
    """Return a table with versions before and after a refetch, and the position that the refetch saw."""
    quiet = loaded(folder)
    for number in (2, 3):
        quiet.commit(insert(number, n=number))
        quiet.apply()
    at = quiet.commit(insert(4, n=4))
    seen_until = Lsn(at.value + 150)
    LoadStore(quiet.settings.log.path).record_refetch("first", at, seen_until)
    quiet.apply()
    return quiet, seen_until


def test_versions_before_a_refetch_can_be_the_base_of_a_rebuild(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet, seen_until = refetched(tmp_path)
    code, err = rebuild(quiet, capsys, "--from-version", "3")
    assert (code, f"some of its rows are newer than others, up to {seen_until}" in err) == (ExitCode.CONFIG, True)
    code, found = rebuild(quiet, capsys)
    assert (code, found["base_version"], found["changes"]) == (ExitCode.OK, 2, 1)


def test_the_version_of_a_refetch_is_a_base_once_the_log_has_passed_the_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet, _ = refetched(tmp_path)
    quiet.diary.commit()
    quiet.diary.commit()
    code, found = rebuild(quiet, capsys)
    assert (code, found["base_version"]) == (ExitCode.OK, 3)


def test_the_record_of_a_load_is_kept_as_long_as_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = loaded(tmp_path)
    quiet.commit(insert(2, n=2))
    quiet.apply()
    record = quiet.settings.log.path / "seed" / "landed" / "first.json"
    os.utime(str(record), (time.time() - REMEMBERED_SECONDS - 60,) * 2)
    keeper = quiet.load_keeper()
    keeper._registry.add(THINGS)
    LoadStore(quiet.settings.log.path).remove_leftovers(keeper.loads_in_use)
    code, _ = rebuild(quiet, capsys)
    assert code == ExitCode.OK


def test_no_load_record_is_removed_while_an_applied_position_is_unknown(tmp_path: Path) -> None:
    quiet = loaded(tmp_path)
    keeper = quiet.load_keeper()
    assert keeper.loads_in_use == set()
    managed = keeper._registry.add(TableId("public", "others"))
    assert keeper.loads_in_use == set(), "a table that does not exist comes from no load"
    managed.fail(BaseRowMissing("it cannot be read", hint="Mend it."))
    assert keeper.loads_in_use is None


def test_a_log_that_grows_meanwhile_does_not_end_the_catch_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = loaded(tmp_path)
    registry = quiet.registry()
    managed = registry.add(SHOP.table)
    assert managed.applied_position is not None
    registry.load_store.record_refetch(
        "first", managed.applied_position.position, Lsn(managed.applied_position.position.value + 50)
    )
    registry.update_repair_state(managed)
    pending = registry.pending

    def pending_and_grow(*arguments: Any) -> Any:
        found = pending(*arguments)
        quiet.commit(update(1, n=5))
        registry.refresh_index()
        return found

    monkeypatch.setattr(registry, "pending", pending_and_grow)
    assert not registry._has_caught_up(managed)


def test_a_partial_load_keeps_the_position_of_earlier_refetched_rows(tmp_path: Path) -> None:
    quiet = loaded(tmp_path)
    registry = quiet.registry()
    managed = registry.add(THINGS)
    assert managed.applied_position is not None
    refetched_until = Lsn(managed.applied_position.position.value + 500)
    registry.load_store.record_refetch("first", managed.applied_position.position, refetched_until)
    registry.update_repair_state(managed)
    plan = Plan(schema=SHOP, leaves=(), cut=ChunkKind.KEY, chunks=())
    record = LoadRecord(
        plan=plan,
        snapshot_position=managed.applied_position.position,
        request=LoadRequest(table=THINGS, where="id = 9"),
    )
    partial_load = RunningLoad(managed=managed, record=record, unread_chunks=deque(), staged={}, shared_snapshot=None)
    assert newest_row_position(registry, partial_load, managed.applied_position.position) == refetched_until
