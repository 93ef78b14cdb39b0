"""Reader threads of loads. Each reads one chunk after another, each chunk in its own Spark task.

There are `load.connections` readers, so no more sessions than that ever read rows of the source at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from tailrace.capture.postgres.chunks import Chunk
from tailrace.capture.postgres.source import PostgresCapture
from tailrace.errors import TailraceError
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId
from tailrace.pipeline.config.settings import LoadSettings
from tailrace.pipeline.loads.load_commit import RunTasks, run_task
from tailrace.pipeline.loads.running_load import LOOK_SECONDS, RunningLoad, RunningLoads, SharedSnapshot
from tailrace.pipeline.loads.throttle import Throttle
from tailrace.storage.files import LogPath
from tailrace.tables.staging import discard
from tailrace.tasks.load import load_chunk
from tailrace.tasks.work import ChunkWork

ChunkFailedCallback = Callable[[RunningLoad, Chunk, TailraceError, SharedSnapshot | None], None]
"""Called with a failed chunk, its error, and its exported snapshot, if any."""


class ChunkReaders:
    """Reads the chunks of the running loads."""

    def __init__(
        self,
        settings: LoadSettings,
        source: PostgresCapture,
        log: LogPath,
        running_loads: RunningLoads,
        throttle: Throttle,
        *,
        run: RunTasks,
        failed: ChunkFailedCallback,
        stopping: threading.Event,
        dead_letters_enabled: Callable[[TableId], bool],
    ) -> None:
        self._settings = settings
        self._source = source
        self._log = log
        self._running_loads = running_loads
        self._throttle = throttle
        self._run = run
        self._failed = failed
        self._stopping = stopping
        self._dead_letters_enabled = dead_letters_enabled

    def run_reader(self, number: int) -> None:
        """Read one chunk after another until the process stops. `number` counts the readers from 0."""
        while not self._stopping.is_set():
            if number >= self._throttle.allowed or (next_chunk := self._running_loads.next_chunk()) is None:
                self._stopping.wait(LOOK_SECONDS)
                continue
            self._read(*next_chunk)
            if self._throttle.rest_seconds:
                self._stopping.wait(self._throttle.rest_seconds)

    def _read(self, load: RunningLoad, chunk: Chunk) -> None:
        shared = load.shared_snapshot
        seconds = self._settings.chunk_timeout
        if shared is not None:
            reader = shared.snapshot.reader(seconds)
        elif (at_least := self._await_barrier(load, chunk)) is not None:
            reader = self._source.chunk_reader(seconds, at_least)
        else:
            return
        work = ChunkWork(
            schema=load.record.plan.schema,
            chunk=chunk,
            condition=load.where,
            reader=reader,
            table_path=load.managed.location.staging,
            log=self._log,
            load_id=load.record.id,
            progress_file=load.progress_files[chunk.number],
            spec=load.record.spec,
            origin=load.origin,
            has_field_ids=load.managed.location.catalog is not None,
            file_bytes=load.managed.location.file_bytes,
            dead_letters_enabled=self._dead_letters_enabled(load.managed.table),
        )
        outcome = run_task(self._run, load_chunk, work, load.managed)
        with self._running_loads.lock:
            progress = load.progress_files.pop(chunk.number)
            progress.unlink(missing_ok=True)
            if load.dropped:
                with suppress(TailraceError):
                    discard(load.managed.location.staging, load.record.id)
                return
            if self._stopping.is_set():
                load.unread_chunks.append(chunk)
                return
            if outcome.staged is not None:
                load.staged[chunk.number] = outcome.staged
                load.tries = {}
                if not load.managed.state.is_blocked:  # a blocked table keeps the error that stopped it
                    load.managed.error = None
                return
            load.unread_chunks.appendleft(chunk)
        assert outcome.error is not None, "neither staged nor failed"
        self._failed(load, chunk, outcome.error, shared)

    def _await_barrier(self, load: RunningLoad, chunk: Chunk) -> Lsn | None:
        """Return the position that a chunk's own snapshot must have reached.

        Before the first such chunk, wait for every transaction that is open now. The exported snapshot, or one of an
        earlier process, may have seen a commit that waits for a synchronous standby; a new snapshot would not see it.
        None: the position is not known, and the chunk was put back.
        """
        at_least: Lsn | None = None
        failure: TailraceError | None = None
        try:
            with load.barrier_lock:
                if load.barrier_position is None:
                    barrier = self._source.wait_for_writers(lambda: self._stopping.is_set() or load.dropped)
                    load.barrier_position = None if barrier is None else barrier.ceiling
                at_least = load.barrier_position
        except TailraceError as error:
            failure = error
        if at_least is None:
            with self._running_loads.lock:
                load.progress_files.pop(chunk.number)
                load.unread_chunks.appendleft(chunk)
        if failure is not None:
            self._failed(load, chunk, failure, None)
        return at_least


CHANGED_SECONDS = 10.0
"""Seconds between two checks of a table."""


class FileWatch:
    """Watches whether tables that are being loaded still have the files of their plans.

    It checks in a thread of its own: the server makes the check wait while somebody holds a lock on the table. Neither
    other loads nor load requests may wait with it. One thread calls `changed` again and again, and never waits.
    """

    def __init__(self, source: PostgresCapture, spawn: Callable[[Callable[[], None]], object]) -> None:
        self._source = source
        self._spawn = spawn
        self._checking = False
        self._changed: deque[RunningLoad] = deque()

    def changed(self, loads: Sequence[RunningLoad]) -> list[RunningLoad]:
        """Return the loads whose tables were found in other files. Start a check of those of `loads` that are due."""
        due = [load for load in loads if time.monotonic() >= load.files_checked_at + CHANGED_SECONDS]
        if due and not self._checking:
            self._checking = True
            self._spawn(partial(self._check, due))
        return [self._changed.popleft() for _ in range(len(self._changed))]

    def _check(self, loads: list[RunningLoad]) -> None:
        try:
            for load in loads:
                load.files_checked_at = time.monotonic()
                with suppress(TailraceError):  # the readers report a source that is gone
                    if not self._source.is_unchanged(load.record.plan):
                        self._changed.append(load)
        finally:
            self._checking = False
