"""A running load: its record, its unread and staged chunks, and its progress."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from tailrace.capture.postgres.chunks import Chunk
from tailrace.capture.postgres.snapshot import ExactSnapshot
from tailrace.errors import SourceRewritten, TailraceError
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId
from tailrace.pipeline.report import LoadResult, LoadStatus, TableState
from tailrace.pipeline.tables.managed_table import ManagedTable
from tailrace.tables.spec import LoadOrigin
from tailrace.tasks.load_store import LoadHold, LoadMode, LoadRecord, StagedChunk

RETRY_SECONDS, RETRY_SECONDS_MAX = 0.5, 15.0
LOOK_SECONDS = 0.3
"""Seconds between two looks for work."""


@dataclass
class SharedSnapshot:
    """An open exported snapshot, and the number of loads that read in it."""

    snapshot: ExactSnapshot
    opened_at: float = field(default_factory=time.monotonic)
    users: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def acquire(self) -> None:
        """Add one user."""
        with self.lock:
            self.users += 1

    def release(self) -> None:
        """Remove one user; the last one closes the snapshot."""
        with self.lock:
            self.users -= 1
            if self.users == 0:
                self.snapshot.__exit__()


@dataclass
class RunningLoad:
    """One running load."""

    managed: ManagedTable
    record: LoadRecord
    unread_chunks: deque[Chunk]
    staged: dict[int, StagedChunk]
    shared_snapshot: SharedSnapshot | None
    began_at: float = field(default_factory=time.monotonic)
    progress_files: dict[int, Path] = field(default_factory=dict)
    tries: dict[int, int] = field(default_factory=dict)
    not_before: float = 0.0
    files_checked_at: float = field(default_factory=time.monotonic)
    """Time when the table's files were last checked against the plan."""
    committing: bool = False
    dropped: bool = False
    rows_at_start: int = 0
    """Rows staged before the load began in this process; the rate counts from here."""
    state_before: TableState = TableState.NEW
    """State that the table returns to if the load fails."""
    error_before: TailraceError | None = None
    """Error of the table before the load, if it was blocked."""
    barrier_position: Lsn | None = None
    """Position that a chunk's own snapshot must have reached, once known (see `ChunkReaders._await_barrier`)."""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    barrier_lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def is_complete(self) -> bool:
        """True if every chunk of the plan is staged."""
        return len(self.staged) == len(self.record.plan.chunks)

    @property
    def mode(self) -> LoadMode:
        return self.record.request.mode if self.record.request else LoadMode.REPLACE

    @property
    def where(self) -> str | None:
        return self.record.request.where if self.record.request else None

    @property
    def origin(self) -> LoadOrigin:
        """Values of the metadata columns for the rows that the load reads."""
        here = self.managed.load_floor
        return LoadOrigin(
            seq=here.seq if here else 0,
            position=str(self.record.log_needed_after),
            read_at=int(self.record.begun_at * 1_000_000),
        )

    def release_snapshot(self) -> None:
        with self.lock:  # only the first caller releases it
            shared, self.shared_snapshot = self.shared_snapshot, None
        if shared is not None:
            shared.release()

    def status(self, *, held: bool, backing_off: bool) -> LoadStatus:
        """Return the load's progress; the time left is estimated from the rate in this process."""
        staged, progress_files = list(self.staged.values()), list(self.progress_files.values())
        rows = sum(chunk.rows for chunk in staged) + sum(map(_progress_rows, progress_files))
        fresh, seconds = rows - self.rows_at_start, time.monotonic() - self.began_at
        rate = fresh / seconds if seconds else 0.0
        read = sum(chunk.bytes for chunk in self.record.plan.chunks if chunk.number in self.staged)
        total = max(self.record.plan.bytes, 1)
        # By rows if the source has an estimate, else by bytes.
        expected = self.managed.rows_estimated or 0
        seconds_left = (expected - rows) / rate if rate > 0 and expected > rows else None
        if seconds_left is None and read and fresh and rate > 0:
            seconds_left = (total - read) / read * seconds
        awaits_barrier = self.shared_snapshot is None and self.barrier_position is None and bool(progress_files)
        stage = "paused" if held else "landing" if self.is_complete else "waiting" if awaits_barrier else "reading"
        return LoadStatus(
            stage=stage,
            way=self._way,
            mode=self.mode.value,
            chunks=len(self.record.plan.chunks),
            chunks_done=len(staged),
            rows=rows,
            bytes=read,
            bytes_total=self.record.plan.bytes,
            seconds=round(seconds, 1),
            rows_per_second=round(rate, 1),
            seconds_left=None if seconds_left is None or held else round(seconds_left, 1),
            backing_off=backing_off,
        )

    def result(self) -> LoadResult:
        """Return the result of the committed load. The rate counts only rows read in this process."""
        rows, seconds = sum(staged.rows for staged in self.staged.values()), time.monotonic() - self.began_at
        return LoadResult(
            landed_at=time.time(),
            mode=self.mode.value,
            way=self._way,
            rows=rows,
            bytes=self.record.plan.bytes,
            seconds=round(seconds, 1),
            rows_per_second=round((rows - self.rows_at_start) / seconds, 1),
        )

    @property
    def _way(self) -> str:
        """`exact` if all chunks are, or were, read in the exported snapshot; else `chunked`."""
        exact = self.is_complete and all(
            staged.seen_until == self.record.snapshot_position for staged in self.staged.values()
        )
        return "exact" if self.shared_snapshot or exact else "chunked"


class RunningLoads:
    """The running loads, shared by the scheduler and the chunk readers."""

    def __init__(self, scratch: Path, holds: dict[TableId, LoadHold]) -> None:
        self.lock = threading.Lock()
        """Lock of the dictionary, and of the unread chunks of each load."""
        self.loads: dict[TableId, RunningLoad] = {}
        self.holds = holds
        """Holds of persons, as last read."""
        self._scratch = scratch
        self._turn = 0

    def next_chunk(self) -> tuple[RunningLoad, Chunk] | None:
        """Return a chunk to read, with the tables taking turns."""
        with self.lock:
            now = time.monotonic()
            ready = [
                load
                for table, load in sorted(self.loads.items())
                if load.unread_chunks and table not in self.holds and now >= load.not_before and not load.dropped
            ]
            if not ready:
                return None
            self._turn += 1
            load = ready[self._turn % len(ready)]
            chunk = load.unread_chunks.popleft()
            load.progress_files[chunk.number] = self._scratch / f"load-{load.record.id}-{chunk.number}.json"
            return load, chunk

    def drop(self, load: RunningLoad) -> bool:
        """Remove a load and restore the table's state; return False if that was done already."""
        managed = load.managed
        with self.lock:
            if load.dropped:
                return False
            load.dropped = True
            del self.loads[managed.table]
            managed.load_floor = managed.load_status = None
            if managed.state is TableState.SEEDING:
                managed.restore_state(load.state_before, load.error_before)
            return True

    def publish_status(self, load: RunningLoad, status: LoadStatus) -> None:
        """Publish a load's progress, unless the load has ended."""
        with self.lock:
            if self.loads.get(load.managed.table) is load:
                load.managed.load_status = status


def _progress_rows(progress_file: Path) -> int:
    try:
        return int(json.loads(progress_file.read_bytes())["rows"])
    except (OSError, ValueError, KeyError):
        return 0


def table_changed_error(table: TableId) -> SourceRewritten:
    """Return the error of a load whose table no longer matches its plan."""
    return SourceRewritten("the table was changed while it was read", table=table)


def retry_pause(tries: int) -> float:
    """Return the seconds to wait after this many failures."""
    return float(min(RETRY_SECONDS * 2 ** min(tries, 10), RETRY_SECONDS_MAX))
