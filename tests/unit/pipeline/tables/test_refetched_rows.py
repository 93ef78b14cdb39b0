"""Tables that must read rows from the source, which does not answer; and what is on record of rows that were read.

Everything is real but for Spark: the tasks run here, and the source is a port that nobody listens at.
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
    """Knows how often it had work done."""

    runs = 0

    def _run(self, task: Callable[..., Outcome], works: Sequence[Any]) -> list[Outcome]:
        self.runs += 1
        return super()._run(task, works)


@contextmanager
def process(quiet: Quiet) -> Iterator[Counting]:
    """What applies, without any of its threads: the test says when."""
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


def lacking(folder: Path) -> Quiet:
    """A table that lacks a row which the log has a partial change of."""
    quiet = loaded(folder)
    quiet.commit(update(2, unchanged=BIG, n=2))
    return quiet


def advance(applying: Local, managed: ManagedTable) -> None:
    applying._advance([managed], applying.registry.refresh_index())


@pytest.mark.parametrize("mode", ["initial", "schema_only"])
def test_a_source_that_does_not_answer_fails_no_table_that_must_read_a_row(tmp_path: Path, mode: str) -> None:
    quiet = lacking(tmp_path)
    with process(quiet) as applying:
        managed = applying.registry.add(THINGS, mode=mode)
        started = time.monotonic()
        for _ in range(RETRIES_MAX + 2):
            managed.not_before = min(managed.not_before, time.monotonic())  # as if that long had passed
            advance(applying, managed)
        assert time.monotonic() - started < RETRIES_MAX * applying_module.SOURCE_SECONDS, "nobody rests in between"
        assert managed.error is not None
        assert (managed.error.code, managed.state, managed.failures) == (
            "source-unreachable",
            TableState.CATCHING_UP,
            0,
        )
        assert managed.not_before > time.monotonic()


def test_a_table_that_waits_for_the_source_is_left_to_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applying_module, "SOURCE_SECONDS", 0.01)
    with process(lacking(tmp_path)) as applying:
        managed = applying.registry.add(THINGS, mode="schema_only")
        applying._bring_tables_to(applying.registry.refresh_index())
        assert applying.runs == 1
        time.sleep(0.02)
        applying._bring_tables_to(applying.registry.refresh_index())
        assert applying.runs == 1, "no micro-batch waits for the source again"
        applying.advance_skipped()
        assert applying.runs == 2
        assert managed.state is TableState.CATCHING_UP


def test_a_table_that_is_never_loaded_is_at_no_point_while_a_row_is_newer_than_it(tmp_path: Path) -> None:
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
        seen = Lsn(end.value + 150)
        registry.load_store.record_refetch("first", Lsn(end.value + 100), seen)  # as the task does, before its commit
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


def healed(folder: Path) -> tuple[Quiet, Lsn]:
    """Versions before a row was read again, and one with it; what the reading saw."""
    quiet = loaded(folder)
    for number in (2, 3):
        quiet.commit(insert(number, n=number))
        quiet.apply()
    at = quiet.commit(insert(4, n=4))
    seen = Lsn(at.value + 150)
    LoadStore(quiet.settings.log.path).record_refetch("first", at, seen)
    quiet.apply()
    return quiet, seen


def test_versions_before_a_row_was_read_again_are_a_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiet, seen = healed(tmp_path)
    code, err = rebuild(quiet, capsys, "--from-version", "3")
    assert (code, f"some of its rows are newer than others, up to {seen}" in err) == (ExitCode.CONFIG, True)
    code, found = rebuild(quiet, capsys)
    assert (code, found["base_version"], found["changes"]) == (ExitCode.OK, 2, 1)


def test_a_quiet_table_is_whole_once_the_log_has_passed_what_was_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet, _ = healed(tmp_path)
    quiet.diary.commit()
    quiet.diary.commit()
    code, found = rebuild(quiet, capsys)
    assert (code, found["base_version"]) == (ExitCode.OK, 3)


def test_what_is_known_of_a_load_lasts_as_long_as_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = loaded(tmp_path)
    quiet.commit(insert(2, n=2))
    quiet.apply()
    record = quiet.settings.log.path / "seed" / "landed" / "first.json"
    os.utime(str(record), (time.time() - REMEMBERED_SECONDS - 60,) * 2)
    keeping = quiet.load_keeper()
    keeping._registry.add(THINGS)
    LoadStore(quiet.settings.log.path).remove_leftovers(keeping.loads_in_use)
    code, _ = rebuild(quiet, capsys)
    assert code == ExitCode.OK


def test_nothing_is_forgotten_while_a_table_does_not_say_where_it_stands(tmp_path: Path) -> None:
    quiet = loaded(tmp_path)
    keeping = quiet.load_keeper()
    assert keeping.loads_in_use == set()
    managed = keeping._registry.add(TableId("public", "others"))
    assert keeping.loads_in_use == set(), "one that is not there comes from none"
    managed.fail(BaseRowMissing("it cannot be read", hint="Mend it."))
    assert keeping.loads_in_use is None


def test_a_log_that_grows_meanwhile_does_not_make_a_table_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = loaded(tmp_path)
    registry = quiet.registry()
    managed = registry.add(SHOP.table)
    assert managed.applied_position is not None
    registry.load_store.record_refetch(
        "first", managed.applied_position.position, Lsn(managed.applied_position.position.value + 50)
    )
    registry.update_repair_state(managed)
    look = registry.pending

    def grown(*arguments: Any) -> Any:
        found = look(*arguments)
        quiet.commit(update(1, n=5))
        registry.refresh_index()
        return found

    monkeypatch.setattr(registry, "pending", grown)
    assert not registry._has_caught_up(managed)


def test_a_part_that_is_loaded_leaves_rows_as_new_as_they_were(tmp_path: Path) -> None:
    quiet = loaded(tmp_path)
    registry = quiet.registry()
    managed = registry.add(THINGS)
    assert managed.applied_position is not None
    healed_at = Lsn(managed.applied_position.position.value + 500)
    registry.load_store.record_refetch("first", managed.applied_position.position, healed_at)
    registry.update_repair_state(managed)
    plan = Plan(schema=SHOP, leaves=(), cut=ChunkKind.KEY, chunks=())
    seed = LoadRecord(
        plan=plan,
        snapshot_position=managed.applied_position.position,
        request=LoadRequest(table=THINGS, where="id = 9"),
    )
    part = RunningLoad(managed=managed, record=seed, unread_chunks=deque(), staged={}, shared_snapshot=None)
    assert newest_row_position(registry, part, managed.applied_position.position) == healed_at
