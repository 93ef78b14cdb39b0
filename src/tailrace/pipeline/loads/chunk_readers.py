"""Those who read: each one chunk after the other, in a Spark task each.

There are as many as `load.connections` allows: that number is all the sessions that ever read rows at once.
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
"""Told of a chunk that is still to be read, why it was not, and the exported snapshot it was read in if it was."""


class ChunkReaders:
    """Reads the chunks of the loads under way."""

    def __init__(
        self,
        settings: LoadSettings,
        source: PostgresCapture,
        log: LogPath,
        under_way: RunningLoads,
        throttle: Throttle,
        *,
        run: RunTasks,
        failed: ChunkFailedCallback,
        stopping: threading.Event,
        sets_aside: Callable[[TableId], bool],
    ) -> None:
        self._settings = settings
        self._source = source
        self._log = log
        self._under_way = under_way
        self._throttle = throttle
        self._run = run
        self._failed = failed
        self._stopping = stopping
        self._sets_aside = sets_aside

    def run_reader(self, number: int) -> None:
        """Read one chunk after the other, until told to stop. `number` counts the readers from 0."""
        while not self._stopping.is_set():
            if number >= self._throttle.allowed or (picked := self._under_way.next_chunk()) is None:
                self._stopping.wait(LOOK_SECONDS)
                continue
            self._read(*picked)
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
            dead_letters_enabled=self._sets_aside(load.managed.table),
        )
        outcome = run_task(self._run, load_chunk, work, load.managed)
        with self._under_way.lock:
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
                if not load.managed.state.is_blocked:  # else that is what it stands still for
                    load.managed.error = None
                return
            load.unread_chunks.appendleft(chunk)
        assert outcome.error is not None, "neither staged nor failed"
        self._failed(load, chunk, outcome.error, shared)

    def _await_barrier(self, load: RunningLoad, chunk: Chunk) -> Lsn | None:
        """What a snapshot of a chunk's own must have reached; None if that is not known, and the chunk is put back.

        Before the first one, wait for every transaction that is open now: the exported snapshot, or one of an earlier
        process, may have seen a commit that waits for a synchronous standby, and no snapshot of now does.
        """
        at_least: Lsn | None = None
        failure: TailraceError | None = None
        try:
            with load.barrier_lock:
                if load.barrier_position is None:
                    noted = self._source.wait_for_writers(lambda: self._stopping.is_set() or load.dropped)
                    load.barrier_position = None if noted is None else noted.ceiling
                at_least = load.barrier_position
        except TailraceError as error:
            failure = error
        if at_least is None:
            with self._under_way.lock:
                load.progress_files.pop(chunk.number)
                load.unread_chunks.appendleft(chunk)
        if failure is not None:
            self._failed(load, chunk, failure, None)
        return at_least


CHANGED_SECONDS = 10.0
"""Between two looks at a table."""


class FileWatch:
    """Asked again and again by one thread; never keeps it waiting."""

    def __init__(self, source: PostgresCapture, spawn: Callable[[Callable[[], None]], object]) -> None:
        self._source = source
        self._spawn = spawn
        self._looking = False
        self._found: deque[RunningLoad] = deque()

    def changed(self, loads: Sequence[RunningLoad]) -> list[RunningLoad]:
        """The loads whose tables were seen to lie in other files; looks again at those of `loads` where that is due."""
        due = [load for load in loads if time.monotonic() >= load.files_checked_at + CHANGED_SECONDS]
        if due and not self._looking:
            self._looking = True
            self._spawn(partial(self._look, due))
        return [self._found.popleft() for _ in range(len(self._found))]

    def _look(self, loads: list[RunningLoad]) -> None:
        try:
            for load in loads:
                load.files_checked_at = time.monotonic()
                with suppress(TailraceError):  # a source that is gone is heard of by those who read
                    if not self._source.is_unchanged(load.record.plan):
                        self._found.append(load)
        finally:
            self._looking = False
