"""A load under way: its record, what is left to read, what is in, and how that looks from outside."""

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
"""Between two looks at what there is to do."""


@dataclass
class SharedSnapshot:
    """An exported snapshot that is open, and the loads that read in it."""

    snapshot: ExactSnapshot
    opened_at: float = field(default_factory=time.monotonic)
    users: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def acquire(self) -> None:
        """One load more."""
        with self.lock:
            self.users += 1

    def release(self) -> None:
        """One load less; the last one closes it."""
        with self.lock:
            self.users -= 1
            if self.users == 0:
                self.snapshot.__exit__()


@dataclass
class RunningLoad:
    """One load under way."""

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
    """When it was last seen that the table is what the plan was made for."""
    committing: bool = False
    dropped: bool = False
    rows_at_start: int = 0
    """When it began in this process; the rate counts from here."""
    state_before: TableState = TableState.NEW
    """What the table goes back to if the load comes to nothing,"""
    error_before: TailraceError | None = None
    """and what it stood still for, if it did."""
    barrier_position: Lsn | None = None
    """What a snapshot of a chunk's own must have reached, once that is known: see `Reading._barred`."""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    barrier_lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def is_complete(self) -> bool:
        """Whether every chunk of the plan is in."""
        return len(self.staged) == len(self.record.plan.chunks)

    @property
    def mode(self) -> LoadMode:
        return self.record.request.mode if self.record.request else LoadMode.REPLACE

    @property
    def where(self) -> str | None:
        return self.record.request.where if self.record.request else None

    @property
    def origin(self) -> LoadOrigin:
        """What rows that it reads say of where they come from, where the table's form asks for that."""
        here = self.managed.load_floor
        return LoadOrigin(
            seq=here.seq if here else 0,
            position=str(self.record.log_needed_after),
            read_at=int(self.record.begun_at * 1_000_000),
        )

    def release_snapshot(self) -> None:
        with self.lock:  # once, whoever comes first
            shared, self.shared_snapshot = self.shared_snapshot, None
        if shared is not None:
            shared.release()

    def status(self, *, held: bool, backing_off: bool) -> LoadStatus:
        """How it stands. What is left is told at the pace of what was read in this process."""
        staged, notes = list(self.staged.values()), list(self.progress_files.values())
        rows = sum(chunk.rows for chunk in staged) + sum(map(_noted_rows, notes))
        fresh, seconds = rows - self.rows_at_start, time.monotonic() - self.began_at
        rate = fresh / seconds if seconds else 0.0
        read = sum(chunk.bytes for chunk in self.record.plan.chunks if chunk.number in self.staged)
        total = max(self.record.plan.bytes, 1)
        # By rows where the source knows how many there are.
        expected = self.managed.rows_estimated or 0
        left = (expected - rows) / rate if rate > 0 and expected > rows else None
        if left is None and read and fresh and rate > 0:
            left = (total - read) / read * seconds
        barred = self.shared_snapshot is None and self.barrier_position is None and bool(notes)
        stage = "paused" if held else "landing" if self.is_complete else "waiting" if barred else "reading"
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
            seconds_left=None if left is None or held else round(left, 1),
            backing_off=backing_off,
        )

    def result(self) -> LoadResult:
        """What it came to, now that it has landed. The rate is that of what was read in this process."""
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
        """`exact` if all of it is, or was, read in the exported snapshot."""
        exact = self.is_complete and all(
            staged.seen_until == self.record.snapshot_position for staged in self.staged.values()
        )
        return "exact" if self.shared_snapshot or exact else "chunked"


class RunningLoads:
    """The loads under way, shared by those who look and those who read."""

    def __init__(self, scratch: Path, held: dict[TableId, LoadHold]) -> None:
        self.lock = threading.Lock()
        """For the dictionary, and for what is left to read of each."""
        self.loads: dict[TableId, RunningLoad] = {}
        self.holds = held
        """What a person has decided, as it was last looked at."""
        self._scratch = scratch
        self._turn = 0

    def next_chunk(self) -> tuple[RunningLoad, Chunk] | None:
        """A chunk to read, the tables taking turns."""
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
        """Take a load out for good, so that the table is as it was; False if that was done already."""
        life = load.managed
        with self.lock:
            if load.dropped:
                return False
            load.dropped = True
            del self.loads[life.table]
            life.load_floor = life.load_status = None
            if life.state is TableState.SEEDING:
                life.restore_state(load.state_before, load.error_before)
            return True

    def publish_status(self, load: RunningLoad, status: LoadStatus) -> None:
        """Say how a load stands, unless it is over."""
        with self.lock:
            if self.loads.get(load.managed.table) is load:
                load.managed.load_status = status


def _noted_rows(note: Path) -> int:
    try:
        return int(json.loads(note.read_bytes())["rows"])
    except (OSError, ValueError, KeyError):
        return 0


def table_changed_error(table: TableId) -> SourceRewritten:
    """What a load is told whose table is not what its plan was made for."""
    return SourceRewritten("the table was changed while it was read", table=table)


def retry_pause(tries: int) -> float:
    """How long to wait after so many failures."""
    return float(min(RETRY_SECONDS * 2 ** min(tries, 10), RETRY_SECONDS_MAX))
