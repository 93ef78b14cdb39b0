"""Snapshots inside the runtime: bulk, before the stream; or incremental, chunks between batches of the stream.

A row that was read is never older than what was handed out before it, so whoever keeps the last state of each key is
never set back: a chunk is read in a snapshot that sees every transaction that was handed out, and until all its rows
are, nothing else is. Whatever a row shows that the stream has not told yet, the stream tells after it.

Rows go through the rules after the cursor was taken of them: it is a key of the source, whatever rules make of keys.
The cursor is part of the place: it moves when rows are acknowledged. A snapshot that breaks goes on behind it, or
begins again where its source cannot do that. One beside the stream never holds the stream up: it waits by itself, and
is given up if that lasts too long, or if waiting does not help. An order to stop it is heard before it is taken up.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.capture.port import Scan, Scannable, ScanPiece
from tailrace.errors import SourceSlow, SourceUnreachable, TailraceError, Unsupported
from tailrace.model import change
from tailrace.model.batch import AnyWindow, ChangeBatch, Window
from tailrace.model.change import Operation
from tailrace.model.position_kinds import Position
from tailrace.model.schema import TableId
from tailrace.runtime.handle import Control, SnapshotRequest
from tailrace.runtime.intake import Outage
from tailrace.runtime.observers import Lost, ObserverList, SnapshotBegun, SnapshotEnded, TableRead
from tailrace.runtime.output_batch import Limits, slice_window, window_bytes
from tailrace.runtime.position_store import ResumePoint
from tailrace.runtime.snapshot_job import SnapshotJob
from tailrace.runtime.transform_runner import TransformRunner
from tailrace.transforms.row_images import renumber

log = logging.getLogger(__name__)

RETRIED_ERRORS = (SourceUnreachable, SourceSlow)
"""What a snapshot that was asked for is begun again after."""


PROGRESS_SAVE_SECONDS = 10.0
"""How often the cursor is saved while rules leave nothing of what is read."""


class SaveResumePoint(Protocol):
    """Makes a place durable."""

    def __call__(self, place: ResumePoint, *, moved: bool) -> None:
        """`moved`: whether the source has given something since the place before, and not only a promise."""


@dataclass
class PieceDelivery:
    """A piece on its way out: its rows as the rules show them, and how many are handed out and acknowledged."""

    piece: ScanPiece
    window: AnyWindow
    source_rows: npt.NDArray[np.int64]
    """Which row of the piece each was, in order."""
    acknowledged: int = 0
    handed_out_until: int = 0

    def hand_out(self, limits: Limits) -> AnyWindow:
        """As many of the rows as a batch holds."""
        size = max(1, window_bytes(self.window))
        room = max(1, min(limits.rows, limits.bytes * self.window.rows // size))
        self.handed_out_until = min(self.acknowledged + room, self.window.rows)
        return slice_window(self.window, self.acknowledged, self.handed_out_until)

    @property
    def handed_out(self) -> AnyWindow | None:
        """What of it is handed out and not acknowledged."""
        return (
            slice_window(self.window, self.acknowledged, self.handed_out_until)
            if self.acknowledged < self.handed_out_until
            else None
        )

    def scan_record_after(self, rows: int) -> Mapping[str, Any]:
        """The scan's record once so many more are acknowledged."""
        after = self.acknowledged + rows
        if after >= self.window.rows:
            return self.piece.record(len(self.piece.data))
        # A row that rules have made two of is done when both are.
        whole = min(int(self.source_rows[after - 1]) + 1, int(self.source_rows[after])) if after else 0
        return self.piece.record(whole)


class SnapshotRunner:
    """The snapshot under way, if there is one."""

    def __init__(
        self,
        source: object,
        rules: TransformRunner,
        tell: ObserverList,
        *,
        retry_seconds_max: float,
        stream_lost: Callable[[], bool],
    ) -> None:
        self._source, self._rules, self._tell = source, rules, tell
        self._retry_seconds_max, self._stream_lost = retry_seconds_max, stream_lost
        self.outage: Outage | None = None
        """What one beside the stream waits for, or one that was asked for."""
        self._job: SnapshotJob | None = None
        self._scan: Scan | None = None
        self._piece: ScanPiece | None = None
        """Read, and not through the rules yet: what they halt at is tried again."""
        self._given: PieceDelivery | None = None
        self._passed_since: float | None = None
        """Since when rows were read of which nothing is left, and that is not on record."""
        self._in_chunk = False
        self._streams_turn = False
        self._ended = False
        """Whether its last rows are acknowledged, and that is on record."""
        self._delivered: set[int] = set()
        """Transactions handed out since a snapshot was last seen to see all of them."""
        self._tables_done = 0

    @property
    def under_way(self) -> bool:
        return self._job is not None

    @property
    def id(self) -> str | None:
        """Of the one under way."""
        return job.id if (job := self._job) is not None else None

    @property
    def is_incremental(self) -> bool:
        """Whether one is under way beside the stream."""
        return self._job is not None and self._job.incremental

    @property
    def blocks_stream(self) -> bool:
        """Whether the stream waits until it is over, or until its chunk is."""
        return self._job is not None and (not self._job.incremental or self._in_chunk)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to read, and all that was read is acknowledged."""
        return self._scan is not None and not self._in_chunk and self._scan.done

    @property
    def summary(self) -> str | None:
        """How far it is, in words."""
        job = self._job
        if job is None:
            return None
        kind = "incremental" if job.incremental else "bulk"
        return f"{kind} {job.id}: {self._tables_done} of {len(job.tables)} tables, {job.rows:,} rows"

    # Beginning.

    def begin(self, place: ResumePoint, tables: Sequence[TableId], *, live: bool) -> ResumePoint:
        """Begin one; the place to save before its first row. A bulk one decides where the stream begins."""
        begun = self._begun(place, tables, live=live)
        self._tell_begun(resumed=False)
        return begun

    def resume(self, place: ResumePoint) -> ResumePoint:
        """Go on with the one that the place tells of, or begin it anew; the place to save."""
        found, resumed = self._resumed(place)
        self._tell_begun(resumed=resumed)
        return found

    def _begun(
        self,
        place: ResumePoint,
        tables: Sequence[TableId],
        *,
        live: bool,
        where: str | None = None,
        named: str | None = None,
    ) -> ResumePoint:
        job = SnapshotJob(id=named or uuid.uuid4().hex[:12], tables=tuple(tables), incremental=live, where=where)
        self._scan = self._scannable.scan(job.tables, live=live, where=where)
        self._start(replace(job, scan_record=self._scan.record()))
        return self._recorded(place if live else replace(place, position=self._scan.start))

    def _resumed(self, place: ResumePoint) -> tuple[ResumePoint, bool]:
        """The place to save, and whether it goes on."""
        assert place.snapshot_job is not None, "there is one"
        job = SnapshotJob.from_json(place.snapshot_job)
        assert job.scan_record is not None, "it was begun"
        self._job = job
        self._scan = self._scannable.resume_scan(job.scan_record)
        if self._scan is None:
            log.warning(
                "the source cannot go on with a snapshot: it begins again",
                extra={"snapshot": job.id, "tables": len(job.tables), "rows": job.rows},
            )
            return self._begun(place, job.tables, live=job.incremental, where=job.where, named=job.id), False
        self._start(job)
        return place, True

    @property
    def _scannable(self) -> Scannable:
        if not isinstance(self._source, Scannable):
            raise Unsupported("this source cannot read tables", hint="Start it without a snapshot.")
        return self._source

    def _start(self, job: SnapshotJob) -> None:
        self._job, self._tables_done = job, 0
        self._forget_rows()
        self._streams_turn = False

    def _tell_begun(self, *, resumed: bool) -> None:
        job = self._job
        assert job is not None, "one is under way"
        self._tell(SnapshotBegun(id=job.id, tables=job.tables, incremental=job.incremental, resumed=resumed))

    def _recorded(self, place: ResumePoint) -> ResumePoint:
        return replace(place, snapshot_job=self._job.to_json() if self._job else None)

    # Going on.

    def save_progress(self, place: ResumePoint, control: Control, save: SaveResumePoint) -> bool:
        """Save the place because a snapshot is over, was given up, or is about to begin; whether it was. If it cannot
        be saved, nothing of that has happened, and it is tried again."""
        for given_up in control.take_cancelled():
            self._tell(SnapshotEnded(id=given_up, rows=0, stopped=True))
        stopped = self._job is not None and control.is_cancelled(self._job.id)
        if stopped or self.is_over:
            save(replace(place, snapshot_job=None), moved=False)
            self._end(stopped=stopped)
        elif self._job is None:
            return self._next_wish(place, control, save)
        elif self._scan is None and not self._waiting:
            self._take_up(place, save)
        elif self._passed_since is not None and time.monotonic() - self._passed_since >= PROGRESS_SAVE_SECONDS:
            save(self._recorded(place), moved=True)
            self._passed_since, self.outage = None, None
        else:
            return False
        return True

    @property
    def _waiting(self) -> bool:
        return self.outage is not None and time.monotonic() < self.outage.retry_at

    def _next_wish(self, place: ResumePoint, control: Control, save: SaveResumePoint) -> bool:
        if self._waiting:
            return False
        wish = control.next_request()
        if wish is None:
            self.outage = None  # whoever waited was told to stop
            return False
        try:
            return self._fulfil(place, wish, control, save)
        finally:
            control.clear_starting()

    def _fulfil(self, place: ResumePoint, wish: SnapshotRequest, control: Control, save: SaveResumePoint) -> bool:
        """Begin what was asked for. What cannot be begun does not disturb the stream."""
        try:
            # The stream's rows that a process before this one has handed out are not to come under a chunk's numbers.
            begun = self._begun(place.with_seqs_skipped(), wish.tables, live=True, where=wish.where, named=wish.id)
        except TailraceError as error:
            self._let_go()
            self._job = None
            if isinstance(error, RETRIED_ERRORS) and self.should_retry(error):
                control.put_back_request(wish)
            else:
                self.close()
                self._say_failed(wish.id, 0, error)
            return False
        except BaseException:
            self.close()
            control.put_back_request(wish)
            raise
        try:
            save(begun, moved=False)
        except BaseException:
            self.close()
            control.put_back_request(wish)
            raise
        self.outage = None
        self._tell_begun(resumed=False)
        return True

    def _take_up(self, place: ResumePoint, save: SaveResumePoint) -> None:
        found, resumed = self._resumed(place)
        try:
            save(found, moved=False)
        except BaseException:
            self._let_go()  # one that began anew is not the one on record
            raise
        self._tell_begun(resumed=resumed)

    def finish(self, place: ResumePoint, save: SaveResumePoint) -> None:
        """Have it on record before a stop if it is over: the next start need not know of it."""
        if not self.is_over:
            return
        try:
            save(replace(place, snapshot_job=None), moved=False)
        except TailraceError as error:
            said = {"code": error.code, "reason": error.message}
            log.warning("the end of a snapshot could not be saved: the next start goes on with it", extra=said)
            return
        self._end(stopped=False)

    def end_if_acknowledged(self) -> None:
        """Forget it if its last rows were just acknowledged."""
        if self._ended:
            self._end(stopped=False)

    def _end(self, *, stopped: bool) -> None:
        assert self._job is not None, "one is under way"
        job = self._job
        self.close()
        self._tell(SnapshotEnded(id=job.id, rows=job.rows, stopped=stopped))

    def drop_reader(self) -> None:
        """What it is read with is gone: it goes on behind what was acknowledged."""
        self._let_go()
        self._forget_rows()

    def recover_from_interrupt(self, place: ResumePoint) -> ResumePoint:
        """Whoever drives it was stopped in the middle of something. It goes on as the place has it on record, under
        numbers that no row was handed out with; the place to save."""
        self.drop_reader()
        if self._job is None or place.snapshot_job is None:
            if self._job is not None:
                self._end(stopped=False)  # that it is over was the last that was saved
            return replace(place, snapshot_job=None)
        return place.with_seqs_skipped()

    def should_retry(self, error: TailraceError) -> bool:
        """Whether one that does not hold up the stream is tried again after the error; else it is to be given up. While
        the stream is lost too, only that decides how long to wait."""
        self.outage = Outage.after(self.outage, error)
        if self.outage.must_raise(self._retry_seconds_max) and not (
            self._stream_lost() and isinstance(error, RETRIED_ERRORS)
        ):
            return False
        said = {"code": error.code, "reason": error.message, "wait": self.outage.pause_seconds}
        log.warning("a snapshot is broken, trying again; the stream goes on", extra=said)
        self._tell(Lost(code=error.code, reason=error.message, wait_seconds=self.outage.pause_seconds))
        return True

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

    def next(self, place: ResumePoint, limits: Limits, wait_seconds: float) -> AnyWindow | None:
        """Rows to hand out now; None if the stream is to be asked, or nothing is there yet. Rows that the rules leave
        nothing of are passed, for so long."""
        until = time.monotonic() + wait_seconds
        while self._given is None:
            if not self._read(limits.rows):
                return None
            self._sift(place)
            if self._given is None and time.monotonic() >= until:
                return None
        self.outage = None
        return self._given.hand_out(limits)

    def _read(self, rows_max: int) -> bool:
        """Have a piece; False if there is none now."""
        while self._piece is None:
            if self._scan is None or self._job is None:
                return False
            if not self._in_chunk:
                if self._scan.done or (self._job.incremental and self._streams_turn):
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

    def _sift(self, place: ResumePoint) -> None:
        """What the rules leave of the piece, to be given out; it stays where it is if they halt."""
        assert self._piece is not None, "one was read"
        read = _window(self._piece, place.position)
        batches = self._rules.transform_batches(read.batches)
        piece, self._piece = self._piece, None
        if not batches:
            assert self._job is not None, "it is of one"
            self._job = replace(self._job, scan_record=piece.record(len(piece.data)))
            self._passed_since = self._passed_since or time.monotonic()
            self._pass(piece)
            return
        sources = np.sort(np.concatenate([batch.data.column(change.SEQ).to_numpy() for batch in batches]))
        if len(batches) > 1 or batches[0] is not read.batches[0]:
            batches = renumber(batches)
        self._given = PieceDelivery(piece, replace(read, batches=batches, rows=sources.size), sources)

    def _pass(self, piece: ScanPiece) -> None:
        """All its rows are acknowledged, or there is nothing to acknowledge of it."""
        assert self._job is not None, "it is of one"
        if piece.table_done:
            self._tables_done += 1
            self._tell(TableRead(id=self._job.id, table=piece.schema.table))

    def note_delivered(self, window: AnyWindow) -> None:
        """Transactions that are about to be handed out, by which the next chunk's snapshot is to be judged."""
        if self._job is not None and self._job.incremental:
            for batch in window.batches:
                self._delivered.update(pc.unique(batch.data.column(change.TX)).to_pylist())

    def resume_point_after(self, place: ResumePoint, rows: int) -> ResumePoint:
        """The place to save for the first rows of what was handed out to be acknowledged."""
        job = self._job_after(rows)
        return replace(place, rows=place.rows + rows, snapshot_job=None if self._ends_with(rows) else job.to_json())

    def _ends_with(self, rows: int) -> bool:
        """Whether these are known to be the last of all: where nothing comes behind them, only reading on tells."""
        assert self._job is not None, "rows of it were handed out"
        assert self._given is not None, "these"
        last = self._given.piece.table_done and self._given.piece.schema.table == self._job.tables[-1]
        return last and self._given.acknowledged + rows >= self._given.window.rows

    def _job_after(self, rows: int) -> SnapshotJob:
        assert self._job is not None, "rows of it were handed out"
        assert self._given is not None, "these"
        return replace(self._job, rows=self._job.rows + rows, scan_record=self._given.scan_record_after(rows))

    def acknowledge(self, rows: int) -> AnyWindow | None:
        """That place is saved; the rest of what was handed out."""
        self._ended = self._ends_with(rows)
        self._job, given = self._job_after(rows), self._given
        assert given is not None, "rows of it were handed out"
        given.acknowledged += rows
        self._passed_since = None
        if given.acknowledged >= given.window.rows:
            self._given = None
            self._pass(given.piece)
        return given.handed_out

    def close(self) -> None:
        """Forget it; the place still tells of it."""
        self._let_go()
        self._job = self.outage = None
        self._ended = False
        self._forget_rows()
        self._delivered.clear()

    def _forget_rows(self) -> None:
        self._piece, self._given, self._passed_since, self._in_chunk = None, None, None, False

    def _let_go(self) -> None:
        scan, self._scan = self._scan, None
        if scan is not None:
            scan.close()


def _window(piece: ScanPiece, at: Position) -> AnyWindow:
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
        [*(always[field.name] for field in change.REQUIRED), *piece.data.columns],
        schema=pa.schema([*change.REQUIRED, *own]),
    )
    batch = ChangeBatch(schema=piece.schema, data=data)
    return Window(start=at, end=at, batches=(batch,), rows=count)
