"""Snapshots inside the runtime: bulk, before the stream; or incremental, chunks between batches of the stream.

A row that was read is never older than what was handed out before it, so whoever keeps the last state of each key is
never set back: a chunk is read in a snapshot that sees every transaction that was handed out, and until all its rows
are, nothing else is. Whatever a row shows that the stream has not told yet, the stream tells after it.

Rows go through the rules after the cursor was taken of them: it is a key of the source, whatever rules make of keys.
The cursor is part of the place: it moves when rows are acknowledged. A snapshot that breaks goes on behind it, or
begins again where its source cannot do that.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.capture.base import Scan, Scannable, ScanPiece
from tailrace.errors import ConfigError, Remedy, SourceSlow, SourceUnreachable, TailraceError, Unsupported
from tailrace.model import change
from tailrace.model.batch import ChangeBatch, Window
from tailrace.model.change import Operation
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId
from tailrace.runtime.batch import Limits, bytes_of, some_of
from tailrace.runtime.control import Control, Wish
from tailrace.runtime.keeping import Place
from tailrace.runtime.observing import SnapshotBegun, SnapshotEnded, TableRead, Telling
from tailrace.runtime.ruling import Ruling
from tailrace.transforms.numbering import numbered_anew

log = logging.getLogger(__name__)

WAITED_FOR = (SourceUnreachable, SourceSlow)
"""What a snapshot that was asked for is begun again after."""


PASSED_SECONDS = 10.0
"""How often the cursor is saved while rules leave nothing of what is read."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A snapshot: what is read, and how far it is."""

    id: str
    tables: tuple[TableId, ...]
    live: bool
    where: str | None
    rows: int = 0
    cursor: Mapping[str, Any] | None = None
    """The source's own record."""

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id, "tables": [[table.schema, table.name] for table in self.tables], "live": self.live,
            "where": self.where, "rows": self.rows, "cursor": self.cursor,
        }  # fmt: skip

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Job:
        return cls(
            id=stored["id"], tables=tuple(TableId(*names) for names in stored["tables"]), live=stored["live"],
            where=stored["where"], rows=stored["rows"], cursor=stored["cursor"],
        )  # fmt: skip


@dataclass
class Given:
    """A piece on its way out: its rows as the rules show them, and how many are handed out and acknowledged."""

    piece: ScanPiece
    window: Window
    sources: npt.NDArray[np.int64]
    """Which row of the piece each was, in order."""
    done: int = 0
    upto: int = 0

    def hand_out(self, limits: Limits) -> Window:
        """As many of the rows as a batch holds."""
        size = max(1, bytes_of(self.window))
        room = max(1, min(limits.rows, limits.bytes * self.window.rows // size))
        self.upto = min(self.done + room, self.window.rows)
        return some_of(self.window, self.done, self.upto)

    @property
    def handed_out(self) -> Window | None:
        """What of it is handed out and not acknowledged."""
        return some_of(self.window, self.done, self.upto) if self.done < self.upto else None

    def record(self, rows: int) -> Mapping[str, Any]:
        """The scan's record once so many more are acknowledged."""
        after = self.done + rows
        if after >= self.window.rows:
            return self.piece.record(len(self.piece.data))
        # A row that rules have made two of is done when both are.
        whole = min(int(self.sources[after - 1]) + 1, int(self.sources[after])) if after else 0
        return self.piece.record(whole)


class Snapshots:
    """The snapshot under way, if there is one."""

    def __init__(self, source: object, rules: Ruling, tell: Telling) -> None:
        self._source, self._rules, self._tell = source, rules, tell
        self._job: Job | None = None
        self._scan: Scan | None = None
        self._piece: ScanPiece | None = None
        """Read, and not through the rules yet: what they halt at is tried again."""
        self._given: Given | None = None
        self._passed_since: float | None = None
        """Since when rows were read of which nothing is left, and that is not on record."""
        self._in_chunk = False
        self._streams_turn = False
        self._delivered: set[int] = set()
        """Transactions handed out since a snapshot was last seen to see all of them."""
        self._tables_done = 0

    @property
    def under_way(self) -> bool:
        return self._job is not None

    @property
    def blocks_stream(self) -> bool:
        """Whether the stream waits until it is over, or until its chunk is."""
        return self._job is not None and (not self._job.live or self._in_chunk)

    @property
    def told(self) -> str | None:
        """How far it is, in words."""
        job = self._job
        if job is None:
            return None
        kind = "incremental" if job.live else "bulk"
        return f"{kind} {job.id}: {self._tables_done} of {len(job.tables)} tables, {job.rows:,} rows"

    # Beginning.

    def begin(self, place: Place, tables: Sequence[TableId], *, live: bool) -> Place:
        """Begin one; the place to save before its first row. A bulk one decides where the stream begins."""
        begun = self._begun(place, tables, live=live)
        self._tell_begun(resumed=False)
        return begun

    def resume(self, place: Place) -> Place:
        """Go on with the one that the place tells of, or begin it anew; the place to save."""
        found, resumed = self._resumed(place)
        self._tell_begun(resumed=resumed)
        return found

    def _begun(
        self, place: Place, tables: Sequence[TableId], *, live: bool, where: str | None = None, named: str | None = None
    ) -> Place:  # fmt: skip
        job = Job(id=named or uuid.uuid4().hex[:12], tables=tuple(tables), live=live, where=where)
        self._scan = self._scannable.scan(job.tables, live=live, where=where)
        self._start(replace(job, cursor=self._scan.record()))
        return self._recorded(place if live else replace(place, position=self._scan.start))

    def _resumed(self, place: Place) -> tuple[Place, bool]:
        """The place to save, and whether it goes on."""
        assert place.scan is not None, "there is one"
        job = Job.from_json(place.scan)
        assert job.cursor is not None, "it was begun"
        self._job = job
        self._scan = self._scannable.resume_scan(job.cursor)
        if self._scan is None:
            log.warning(
                "the source cannot go on with a snapshot: it begins again",
                extra={"snapshot": job.id, "tables": len(job.tables), "rows": job.rows},
            )
            return self._begun(place, job.tables, live=job.live, where=job.where, named=job.id), False
        self._start(job)
        return place, True

    @property
    def _scannable(self) -> Scannable:
        if not isinstance(self._source, Scannable):
            raise Unsupported("this source cannot read tables", hint="Start it without a snapshot.")
        return self._source

    def _start(self, job: Job) -> None:
        self._job, self._tables_done = job, 0
        self._forget_rows()
        self._streams_turn = False

    def _tell_begun(self, *, resumed: bool) -> None:
        job = self._job
        assert job is not None, "one is under way"
        self._tell(SnapshotBegun(id=job.id, tables=job.tables, incremental=job.live, resumed=resumed))

    def _recorded(self, place: Place) -> Place:
        return replace(place, scan=self._job.to_json() if self._job else None)

    # Going on.

    def settle(self, place: Place, control: Control, save: Callable[[Place], None]) -> bool:
        """Save the place because a snapshot is over, was given up, or is about to begin; whether it was. If it cannot
        be saved, nothing of that has happened, and it is tried again."""
        if self._job is None:
            wish = control.next_wish()
            return wish is not None and self._fulfil(place, wish, control, save)
        if self._scan is None:
            self._take_up(place, save)
        elif (stopped := control.is_given_up(self._job.id)) or (not self._in_chunk and self._scan.done):
            save(replace(place, scan=None))
            self._end(stopped=stopped)
        elif self._passed_since is not None and time.monotonic() - self._passed_since >= PASSED_SECONDS:
            save(self._recorded(place))
            self._passed_since = None
        else:
            return False
        return True

    def _fulfil(self, place: Place, wish: Wish, control: Control, save: Callable[[Place], None]) -> bool:
        """Begin what was asked for. What cannot be begun does not disturb the stream."""
        try:
            begun = self._begun(place, wish.tables, live=True, where=wish.where, named=wish.id)
        except WAITED_FOR:
            control.put_back(wish)
            raise
        except TailraceError as error:
            self.close()
            self._say_failed(wish.id, 0, error)
            return False
        try:
            save(begun)
        except BaseException:
            self.close()
            control.put_back(wish)
            raise
        self._tell_begun(resumed=False)
        return True

    def _take_up(self, place: Place, save: Callable[[Place], None]) -> None:
        found, resumed = self._resumed(place)
        try:
            save(found)
        except BaseException:
            self._let_go()  # one that began anew is not the one on record
            raise
        self._tell_begun(resumed=resumed)

    def _end(self, *, stopped: bool) -> None:
        assert self._job is not None, "one is under way"
        job = self._job
        self.close()
        self._tell(SnapshotEnded(id=job.id, rows=job.rows, stopped=stopped))

    def broke(self, error: TailraceError) -> bool:
        """What it is read with is gone: it goes on behind what was acknowledged. Whether it does not: one beside the
        stream is to be given up where trying again would not help."""
        self._let_go()
        self._forget_rows()
        return self._job is not None and self._job.live and error.remedy is not Remedy.RETRY

    def give_up(self, error: TailraceError) -> None:
        """Forget it because of the error; the place does not tell of it any more."""
        assert self._job is not None, "one is under way"
        job = self._job
        self.close()
        self._say_failed(job.id, job.rows, error)

    def _say_failed(self, snapshot: str, rows: int, error: TailraceError) -> None:
        said = {"snapshot": snapshot, "code": error.code, "reason": error.headline, "hint": error.hint}
        log.error("a snapshot failed, the stream goes on", extra=said)
        self._tell(SnapshotEnded(id=snapshot, rows=rows, stopped=True, error=error))

    def next(self, place: Place, limits: Limits, wait_seconds: float) -> Window | None:
        """Rows to hand out now; None if the stream is to be asked, or nothing is there yet. Rows that the rules leave
        nothing of are passed, for so long."""
        until = time.monotonic() + wait_seconds
        while self._given is None:
            if not self._read(limits.rows):
                return None
            self._sift(place)
            if self._given is None and time.monotonic() >= until:
                return None
        return self._given.hand_out(limits)

    def _read(self, rows_max: int) -> bool:
        """Have a piece; False if there is none now."""
        while self._piece is None:
            if self._scan is None or self._job is None:
                return False
            if not self._in_chunk:
                if self._scan.done or (self._job.live and self._streams_turn):
                    self._streams_turn = False
                    return False
                if not self._scan.begin(self._delivered):
                    return False
                self._delivered.clear()
                self._in_chunk = True
            piece = self._scan.next(rows_max)
            if piece is None:
                self._in_chunk, self._streams_turn = False, True
            elif len(piece.data):
                self._piece = piece
        return True

    def _sift(self, place: Place) -> None:
        """What the rules leave of the piece, to be given out; it stays where it is if they halt."""
        assert self._piece is not None, "one was read"
        read = _window(self._piece, place.position)
        batches = self._rules.sifted(read.batches)
        piece, self._piece = self._piece, None
        if not batches:
            assert self._job is not None, "it is of one"
            self._job = replace(self._job, cursor=piece.record(len(piece.data)))
            self._passed_since = self._passed_since or time.monotonic()
            self._pass(piece)
            return
        sources = np.sort(np.concatenate([batch.data.column(change.SEQ).to_numpy() for batch in batches]))
        if len(batches) > 1 or batches[0] is not read.batches[0]:
            batches = numbered_anew(batches)
        self._given = Given(piece, replace(read, batches=batches, rows=sources.size), sources)

    def _pass(self, piece: ScanPiece) -> None:
        """All its rows are acknowledged, or there is nothing to acknowledge of it."""
        assert self._job is not None, "it is of one"
        if piece.table_done:
            self._tables_done += 1
            self._tell(TableRead(id=self._job.id, table=piece.schema.table))

    def delivering(self, window: Window) -> None:
        """Transactions that are about to be handed out, by which the next chunk's snapshot is to be judged."""
        if self._job is not None and self._job.live:
            for batch in window.batches:
                self._delivered.update(pc.unique(batch.data.column(change.TX)).to_pylist())

    def place_after(self, place: Place, rows: int) -> Place:
        """The place to save for the first rows of what was handed out to be acknowledged."""
        job = self._job_after(rows)
        return replace(place, rows=place.rows + rows, scan=job.to_json())

    def _job_after(self, rows: int) -> Job:
        assert self._job is not None, "rows of it were handed out"
        assert self._given is not None, "these"
        return replace(self._job, rows=self._job.rows + rows, cursor=self._given.record(rows))

    def acknowledged(self, rows: int) -> Window | None:
        """That place is saved; the rest of what was handed out."""
        self._job, given = self._job_after(rows), self._given
        assert given is not None, "rows of it were handed out"
        given.done += rows
        self._passed_since = None
        if given.done >= given.window.rows:
            self._given = None
            self._pass(given.piece)
        return given.handed_out

    def close(self) -> None:
        """Forget it; the place still tells of it."""
        self._let_go()
        self._job = None
        self._forget_rows()
        self._delivered.clear()

    def _forget_rows(self) -> None:
        self._piece, self._given, self._passed_since, self._in_chunk = None, None, None, False

    def _let_go(self) -> None:
        scan, self._scan = self._scan, None
        if scan is not None:
            scan.close()


def _window(piece: ScanPiece, at: Lsn) -> Window:
    """Rows that were read as changes: `read`, of no transaction, at the position that they were seen at."""
    count, now = len(piece.data), time.time_ns() // 1000
    always = {
        change.OP: pa.repeat(pa.scalar(Operation.READ.value, pa.string()), count),
        change.SEQ: pa.array(np.arange(count), pa.int64()),
        change.POSITION: pa.repeat(pa.scalar(str(piece.position), pa.string()), count),
        change.TX: pa.repeat(pa.scalar(0, pa.int64()), count),
        change.TX_INDEX: pa.array(np.arange(count), pa.int32()),
        change.COMMITTED_AT: pa.repeat(pa.scalar(now, pa.timestamp("us", "UTC")), count),
    }
    own = [pa.field(change.stored_name(column.name), column.type) for column in piece.schema.columns]
    data = pa.RecordBatch.from_arrays(
        [*(always[field.name] for field in change.ALWAYS), *piece.data.columns],
        schema=pa.schema([*change.ALWAYS, *own]),
    )
    batch = ChangeBatch(schema=piece.schema, data=data)
    return Window(start=at, end=at, batches=(batch,), rows=count)


def require_sound(place: Place | None, bulk: Sequence[TableId], live: Sequence[TableId]) -> None:
    """Refuse settings that do not go together, or not with the snapshot that the place tells of."""
    if bulk and live:
        raise ConfigError(
            "`snapshot_tables` and `incremental_snapshot` do not go together",
            hint="Read tables before the stream, or beside it: give one of the two.",
        )
    if place is None or place.scan is None:
        return
    job = Job.from_json(place.scan)
    if job.live:
        return
    if live:
        raise ConfigError(
            "the checkpoint is in the middle of a snapshot that comes before the stream, and goes on as one",
            hint="Give `snapshot_tables` until it is over, then `control.snapshot` for an incremental one.",
        )
    if not bulk:
        raise ConfigError(
            "the checkpoint is in the middle of a snapshot, and no snapshot tables are named",
            tables=", ".join(map(str, job.tables)), hint="Name the same `snapshot_tables` until it is over.",
        )  # fmt: skip
    if set(bulk) != set(job.tables):
        raise ConfigError(
            "the checkpoint is in the middle of a snapshot of other tables",
            tables=", ".join(map(str, job.tables)), hint="Name the same `snapshot_tables` until it is over.",
        )  # fmt: skip
