"""Those who read: each one chunk after the other, in a Spark task each.

There are as many as `load.connections` allows: that number is all the sessions that ever read rows at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from tailrace.capture.postgres.chunks import Chunk
from tailrace.capture.postgres.source import PostgresCapture
from tailrace.errors import TailraceError
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId
from tailrace.pipeline.config.settings import LoadSettings
from tailrace.pipeline.loads.load_commit import Run, run_one
from tailrace.pipeline.loads.running_load import LOOK_SECONDS, Load, Shared, UnderWay
from tailrace.pipeline.loads.throttle import Throttle
from tailrace.storage.files import LogPath
from tailrace.tables.staging import discard
from tailrace.tasks.work import ChunkWork, load_chunk

Failed = Callable[[Load, Chunk, TailraceError, Shared | None], None]
"""Told of a chunk that is still to be read, why it was not, and the exported snapshot it was read in if it was."""


class Reading:
    """Reads the chunks of the loads under way."""

    def __init__(
        self,
        settings: LoadSettings,
        source: PostgresCapture,
        log: LogPath,
        under_way: UnderWay,
        throttle: Throttle,
        *,
        run: Run,
        failed: Failed,
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

    def read(self, number: int) -> None:
        """Read one chunk after the other, until told to stop. `number` counts the readers from 0."""
        while not self._stopping.is_set():
            if number >= self._throttle.allowed or (picked := self._under_way.next()) is None:
                self._stopping.wait(LOOK_SECONDS)
                continue
            self._read(*picked)
            if self._throttle.rest_seconds:
                self._stopping.wait(self._throttle.rest_seconds)

    def _read(self, load: Load, chunk: Chunk) -> None:
        shared = load.shared
        seconds = self._settings.chunk_timeout
        if shared is not None:
            reader = shared.snapshot.reader(seconds)
        elif (at_least := self._barred(load, chunk)) is not None:
            reader = self._source.chunk_reader(seconds, at_least)
        else:
            return
        work = ChunkWork(
            schema=load.seed.plan.schema,
            chunk=chunk,
            condition=load.where,
            reader=reader,
            lake=load.life.place.staging,
            log=self._log,
            seed=load.seed.id,
            progress=load.reading[chunk.number],
            form=load.seed.form,
            origin=load.origin,
            numbered=load.life.place.catalog is not None,
            file_bytes=load.life.place.file_bytes,
            letters=self._sets_aside(load.life.table),
        )
        outcome = run_one(self._run, load_chunk, work, load.life)
        with self._under_way.lock:
            progress = load.reading.pop(chunk.number)
            progress.unlink(missing_ok=True)
            if load.dropped:
                with suppress(TailraceError):
                    discard(load.life.place.staging, load.seed.id)
                return
            if self._stopping.is_set():
                load.todo.append(chunk)
                return
            if outcome.staged is not None:
                load.staged[chunk.number] = outcome.staged
                load.tries = {}
                if not load.life.state.broken:  # else that is what it stands still for
                    load.life.error = None
                return
            load.todo.appendleft(chunk)
        assert outcome.error is not None, "neither staged nor failed"
        self._failed(load, chunk, outcome.error, shared)

    def _barred(self, load: Load, chunk: Chunk) -> Lsn | None:
        """What a snapshot of a chunk's own must have reached; None if that is not known, and the chunk is put back.

        Before the first one, wait for every transaction that is open now: the exported snapshot, or one of an earlier
        process, may have seen a commit that waits for a synchronous standby, and no snapshot of now does.
        """
        at_least: Lsn | None = None
        failure: TailraceError | None = None
        try:
            with load.barring:
                if load.at_least is None:
                    noted = self._source.begin_chunks(lambda: self._stopping.is_set() or load.dropped)
                    load.at_least = None if noted is None else noted.upto
                at_least = load.at_least
        except TailraceError as error:
            failure = error
        if at_least is None:
            with self._under_way.lock:
                load.reading.pop(chunk.number)
                load.todo.appendleft(chunk)
        if failure is not None:
            self._failed(load, chunk, failure, None)
        return at_least
