"""A pipeline whose tasks run in this process, so that tests can act between chunks.

Everything is real except Spark: capture runs in a thread, loads and apply run as in `tailrace run`, and each task is
pickled and run in the calling thread. If Spark's connector is the engine under test, it still does its part.
"""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from tailrace.changelog.read.index import LogIndex
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write.log_lease import LogLease
from tailrace.errors import TailraceError
from tailrace.pipeline.apply import dead_letter_replay, schema_watch
from tailrace.pipeline.apply.applier import Applier
from tailrace.pipeline.capture import log_capture
from tailrace.pipeline.capture.log_capture import LogCapture
from tailrace.pipeline.capture.source_factory import open_source, open_source_for_log
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.pipeline.config.settings_file import load_settings
from tailrace.pipeline.loads import load_scheduler
from tailrace.pipeline.points.consistent_point import build_point
from tailrace.pipeline.report import TableState
from tailrace.pipeline.status import APPLIER_LEASE
from tailrace.pipeline.tables.managed_table import ManagedTable
from tailrace.runtime import loop
from tailrace.tasks.work import ChunkWork, Outcome
from tests.support.engines import IS_SPARK, engine_lines, spark_engine
from tests.support.pipelines import COME_SECONDS_MAX, Pipeline, eventually

CHUNK_BYTES = 64 << 10
"""Chunk size far below what settings allow, so that small tables have many chunks."""
LOADED_SECONDS_MAX = 1200.0 if IS_SPARK else 300.0
_WAITS = {
    (load_scheduler, "TABLES_SECONDS"): 0.3, (schema_watch, "LOOK_SECONDS"): 0.3, (log_capture, "PUBLISH_SECONDS"): 0.2,
    (loop, "IDLE_SECONDS_MAX"): 0.5, (dead_letter_replay, "LOOK_SECONDS"): 0.1,
}  # fmt: skip
"""Polling intervals in seconds, shortened while a scene runs."""

Hook = Callable[[ChunkWork], None]


class Local(Applier):
    """An applier without Spark; `before` and `after` are called around every chunk, in the thread that reads it."""

    by_hand: bool = False
    """True if only the test itself applies to loaded tables."""
    before: Hook | None = None
    after: Hook | None = None
    chunks: list[tuple[str, int]]

    def start(self) -> None:
        self.chunks = []
        self._in_background(self.load_scheduler.run)
        for number in range(self._settings.load.connections):
            self._in_background(lambda number=number: self.load_scheduler.chunk_readers.run_reader(number))  # type: ignore[misc] # bound early
        self._in_background(self._apply)
        self.start_dead_letter_replay()

    def _apply(self) -> None:
        while not self._stopping.wait(0.1):
            if not self.by_hand:
                self._advance(self._applying_tables(), self.registry.refresh_index())

    def _run(self, task: Callable[..., Outcome], works: Sequence[Any]) -> list[Outcome]:
        if self._settings.tables.engine == "spark" and (engine := spark_engine()).handles(task):
            return engine.run(task, works)
        outcomes = []
        for work in works:
            sent = pickle.loads(pickle.dumps(work))
            if isinstance(sent, ChunkWork) and self.before is not None:
                self.before(sent)
            outcomes.append(task(sent))
            if isinstance(sent, ChunkWork):
                self.chunks.append((sent.schema.table.name, sent.chunk.number))
                if self.after is not None:
                    self.after(sent)
        return outcomes


class Scene:
    """One pipeline, whose capture runs as long as the scene; its loader runs while `loader` is open."""

    def __init__(self, folder: Path, url: str, *, tables: str = '["public.*"]', source: str = "", **load: Any) -> None:
        self.pipeline = Pipeline(folder, url, tables=tables, extra=source)
        self.pipeline.file.write_text(self.pipeline.file.read_text() + engine_lines())
        settings = load_settings(self.pipeline.file)
        overrides = {"chunk": CHUNK_BYTES, "throttle": False, "connections": 1, **load}
        if standby := overrides.pop("standby", None):
            overrides["secret_standby"] = SecretStr(standby)
        self.settings: PipelineSettings = settings.model_copy(
            update={"load": settings.load.model_copy(update=overrides)}
        )
        self.read_settings()
        self._stop = threading.Event()
        self._capture: threading.Thread | None = None
        self._failed: list[TailraceError] = []

    def read_settings(self) -> Scene:
        """Read the settings file as it is now, as the base of `set_tables`."""
        self._file = self.pipeline.file.read_text()
        return self.set_tables()

    def set_tables(self, *lines: str) -> Scene:
        """Put these lines below `tables:`, instead of earlier ones; the next loader uses them."""
        self.pipeline.file.write_text(self._file + "".join(f"  {line}\n" for line in lines))
        tables = load_settings(self.pipeline.file).tables
        self.settings = self.settings.model_copy(update={"tables": tables})
        return self

    def __enter__(self) -> Scene:
        with ExitStack() as undo:
            patch = undo.enter_context(pytest.MonkeyPatch.context())
            for (module, name), seconds in _WAITS.items():
                patch.setattr(module, name, seconds)
            self.begin_capture()
            self._undo = undo.pop_all()  # from here on, `__exit__` undoes them
        return self

    def begin_capture(self) -> None:
        self._stop.clear()
        capture_side = LogCapture(self.settings, until_caught_up=False)

        def capture() -> None:
            try:
                capture_side.run(self._stop.is_set)
            except TailraceError as error:
                self._failed.append(error)

        self._capture = threading.Thread(target=capture, daemon=True)
        self._capture.start()

    def __exit__(self, *_: object) -> None:
        with self._undo:
            self.stop_capture()
        assert not self._failed, self._failed

    def stop_capture(self) -> None:
        """Stop the capture, so that nothing writes the log until `begin_capture`."""
        self._stop.set()
        assert self._capture is not None
        self._capture.join(COME_SECONDS_MAX)
        assert not self._capture.is_alive(), "the capture does not stop"

    @contextmanager
    def loader(self, before: Hook | None = None, after: Hook | None = None) -> Iterator[Local]:
        """Run an applier that loads and applies, until the block is left."""
        log = ChangeLog.open(self.settings.log.path)
        source = open_source_for_log(self.settings, log, loads=True)
        lease = LogLease(log.path, APPLIER_LEASE)
        applying = Local(self.settings, log, source)
        applying.before, applying.after = before, after
        try:
            applying.discover()
            applying.start()
            try:
                yield applying
            finally:
                applying.stop()
        finally:
            lease.release()

    def wait_for_capture(self) -> None:
        """Wait until the log has everything that was committed at the source until now."""
        log = ChangeLog.open(self.settings.log.path)
        horizon, index = open_source(self.settings, log.log_id).committed_until(), LogIndex(log)

        def reached() -> bool:
            index.grow()
            return index.position >= horizon

        assert eventually(reached, pause=0.05)

    def settled(self, applying: Local) -> bool:
        """Wait until every table that can apply has everything committed until now; return whether that was reached."""
        applying.check()
        horizon = applying._source.committed_until()
        deadline = time.monotonic() + LOADED_SECONDS_MAX
        while time.monotonic() < deadline:
            applying.check()
            applying.registry.refresh_index()
            if applying.registry.index.position >= horizon and applying.is_caught_up(
                applying.registry.index.last_commit
            ):
                return True
            time.sleep(0.05)
        return False

    def record_point(self, applying: Local) -> None:
        """Record a consistent point, once no work on any table runs."""
        assert self.settled(applying)
        deadline = time.monotonic() + LOADED_SECONDS_MAX
        while (point := build_point(applying.registry, applying.registry.refresh_index())) is None or any(
            absence.is_temporary for absence in point.missing.values()
        ):
            assert time.monotonic() < deadline, "all tables are at rest"
            time.sleep(0.02)
        applying._ledger.record(point)

    def assert_equal(self, applying: Local, *tables: str) -> None:
        assert self.settled(applying), {
            str(managed.table): (managed.state, managed.error) for managed in managed_tables(applying)
        }
        self.pipeline.assert_equal(*tables)


def managed_tables(applying: Local) -> list[ManagedTable]:
    return list(applying.registry.tables.values())


def managed_table(applying: Local, table: str) -> ManagedTable:
    return next(managed for managed in managed_tables(applying) if managed.table.name == table)


def rows_of(applying: Local, table: str) -> int:
    return managed_table(applying, table).location.open().rows()


def once(action: Callable[[], None], *, at: int = 0) -> Hook:
    """Return a hook that acts at the n-th chunk it sees."""
    chunks_seen = itertools.count()  # several may read at once

    def hook(_: ChunkWork) -> None:
        if next(chunks_seen) == at:
            action()

    return hook


def wait_for_state(applying: Local, table: str, *states: TableState, seconds: float = COME_SECONDS_MAX) -> None:
    assert eventually(lambda: managed_table(applying, table).state in states, seconds=seconds, pause=0.05), (
        managed_table(applying, table).state,
        managed_table(applying, table).error,
    )
