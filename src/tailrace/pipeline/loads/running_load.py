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
from tailrace.pipeline.report import LoadDone, LoadStatus, TableState
from tailrace.pipeline.tables.registry import TableLife
from tailrace.tables.spec import Origin
from tailrace.tasks.load_store import Hold, LoadMode, Seed, StagedChunk

RETRY_SECONDS, RETRY_SECONDS_MAX = 0.5, 15.0
LOOK_SECONDS = 0.3
"""Between two looks at what there is to do."""


@dataclass
class Shared:
    """An exported snapshot that is open, and the loads that read in it."""

    snapshot: ExactSnapshot
    opened_at: float = field(default_factory=time.monotonic)
    users: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def join(self) -> None:
        """One load more."""
        with self.lock:
            self.users += 1

    def leave(self) -> None:
        """One load less; the last one closes it."""
        with self.lock:
            self.users -= 1
            if self.users == 0:
                self.snapshot.__exit__()


@dataclass
class Load:
    """One load under way."""

    life: TableLife
    seed: Seed
    todo: deque[Chunk]
    staged: dict[int, StagedChunk]
    shared: Shared | None
    began_at: float = field(default_factory=time.monotonic)
    reading: dict[int, Path] = field(default_factory=dict)
    tries: dict[int, int] = field(default_factory=dict)
    not_before: float = 0.0
    looked_at: float = field(default_factory=time.monotonic)
    """When it was last seen that the table is what the plan was made for."""
    landing: bool = False
    dropped: bool = False
    found_rows: int = 0
    """When it began in this process; the rate counts from here."""
    state_before: TableState = TableState.NEW
    """What the table goes back to if the load comes to nothing,"""
    stopped_by: TailraceError | None = None
    """and what it stood still for, if it did."""
    at_least: Lsn | None = None
    """What a snapshot of a chunk's own must have reached, once that is known: see `Reading._barred`."""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    barring: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def complete(self) -> bool:
        """Whether every chunk of the plan is in."""
        return len(self.staged) == len(self.seed.plan.chunks)

    @property
    def mode(self) -> LoadMode:
        return self.seed.wish.mode if self.seed.wish else LoadMode.REPLACE

    @property
    def where(self) -> str | None:
        return self.seed.wish.where if self.seed.wish else None

    @property
    def origin(self) -> Origin:
        """What rows that it reads say of where they come from, where the table's form asks for that."""
        here = self.life.loading
        return Origin(
            seq=here.seq if here else 0, position=str(self.seed.floor), read_at=int(self.seed.made_at * 1_000_000)
        )

    def leave_snapshot(self) -> None:
        with self.lock:  # once, whoever comes first
            shared, self.shared = self.shared, None
        if shared is not None:
            shared.leave()

    def status(self, *, held: bool, backing_off: bool) -> LoadStatus:
        """How it stands. What is left is told at the pace of what was read in this process."""
        staged, notes = list(self.staged.values()), list(self.reading.values())
        rows = sum(chunk.rows for chunk in staged) + sum(map(_noted_rows, notes))
        fresh, seconds = rows - self.found_rows, time.monotonic() - self.began_at
        rate = fresh / seconds if seconds else 0.0
        read = sum(chunk.bytes for chunk in self.seed.plan.chunks if chunk.number in self.staged)
        total = max(self.seed.plan.bytes, 1)
        # By rows where the source knows how many there are.
        expected = self.life.rows_estimated or 0
        left = (expected - rows) / rate if rate > 0 and expected > rows else None
        if left is None and read and fresh and rate > 0:
            left = (total - read) / read * seconds
        barred = self.shared is None and self.at_least is None and bool(notes)
        stage = "paused" if held else "landing" if self.complete else "waiting" if barred else "reading"
        return LoadStatus(
            stage=stage,
            way=self._way,
            mode=self.mode.value,
            chunks=len(self.seed.plan.chunks),
            chunks_done=len(staged),
            rows=rows,
            bytes=read,
            bytes_total=self.seed.plan.bytes,
            seconds=round(seconds, 1),
            rows_per_second=round(rate, 1),
            seconds_left=None if left is None or held else round(left, 1),
            backing_off=backing_off,
        )

    def done(self) -> LoadDone:
        """What it came to, now that it has landed. The rate is that of what was read in this process."""
        rows, seconds = sum(staged.rows for staged in self.staged.values()), time.monotonic() - self.began_at
        return LoadDone(
            landed_at=time.time(),
            mode=self.mode.value,
            way=self._way,
            rows=rows,
            bytes=self.seed.plan.bytes,
            seconds=round(seconds, 1),
            rows_per_second=round((rows - self.found_rows) / seconds, 1),
        )

    @property
    def _way(self) -> str:
        """`exact` if all of it is, or was, read in the exported snapshot."""
        exact = self.complete and all(staged.seen == self.seed.point for staged in self.staged.values())
        return "exact" if self.shared or exact else "chunked"


class UnderWay:
    """The loads under way, shared by those who look and those who read."""

    def __init__(self, scratch: Path, held: dict[TableId, Hold]) -> None:
        self.lock = threading.Lock()
        """For the dictionary, and for what is left to read of each."""
        self.loads: dict[TableId, Load] = {}
        self.held = held
        """What a person has decided, as it was last looked at."""
        self._scratch = scratch
        self._turn = 0

    def next(self) -> tuple[Load, Chunk] | None:
        """A chunk to read, the tables taking turns."""
        with self.lock:
            now = time.monotonic()
            ready = [
                load
                for table, load in sorted(self.loads.items())
                if load.todo and table not in self.held and now >= load.not_before and not load.dropped
            ]
            if not ready:
                return None
            self._turn += 1
            load = ready[self._turn % len(ready)]
            chunk = load.todo.popleft()
            load.reading[chunk.number] = self._scratch / f"load-{load.seed.id}-{chunk.number}.json"
            return load, chunk

    def drop(self, load: Load) -> bool:
        """Take a load out for good, so that the table is as it was; False if that was done already."""
        life = load.life
        with self.lock:
            if load.dropped:
                return False
            load.dropped = True
            del self.loads[life.table]
            life.loading = life.load = None
            if life.state is TableState.SEEDING:
                life.fall_back(load.state_before, load.stopped_by)
            return True

    def tell(self, load: Load, status: LoadStatus) -> None:
        """Say how a load stands, unless it is over."""
        with self.lock:
            if self.loads.get(load.life.table) is load:
                load.life.load = status


def _noted_rows(note: Path) -> int:
    try:
        return int(json.loads(note.read_bytes())["rows"])
    except (OSError, ValueError, KeyError):
        return 0


def was_changed(table: TableId) -> SourceRewritten:
    """What a load is told whose table is not what its plan was made for."""
    return SourceRewritten("the table was changed while it was read", table=table)


def pause(tries: int) -> float:
    """How long to wait after so many failures."""
    return float(min(RETRY_SECONDS * 2 ** min(tries, 10), RETRY_SECONDS_MAX))
