"""Snapshots in a runtime: bulk, before the stream, or incremental, in chunks between batches.

A row that was read is never older than what was handed out before it, so a reader that keeps the last state per key
never goes back in time. A chunk is read in a snapshot that sees every transaction handed out so far. Until all its rows
are handed out, nothing else is. Whatever a row shows before the stream does, the stream sends after it.

A row passes the rules after its scan record was taken: the record has a key of the source, whatever the rules make of
keys. The record is part of the resume point, and moves when rows are acknowledged. A broken snapshot continues after
it, or begins again where the source cannot continue. A snapshot during the stream never blocks the stream: it waits
alone, and is given up if that takes too long or if waiting does not help. A request to stop it is handled before it is
opened again.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import pyarrow.compute as pc

from tailrace.capture.port import Scan, Scannable, ScanPiece
from tailrace.errors import SourceSlow, SourceUnreachable, TailraceError, Unsupported
from tailrace.model import change
from tailrace.model.batch import AnyWindow
from tailrace.model.schema import TableId
from tailrace.runtime.handle import Control, SnapshotRequest
from tailrace.runtime.intake import Outage
from tailrace.runtime.observers import Lost, ObserverList, SnapshotBegun, SnapshotEnded, TableRead
from tailrace.runtime.output_batch import Limits
from tailrace.runtime.piece_delivery import PieceDelivery, window_of_piece
from tailrace.runtime.position_store import ResumePoint
from tailrace.runtime.snapshot_job import SnapshotJob
from tailrace.runtime.transform_runner import TransformRunner
from tailrace.transforms.row_images import renumber

log = logging.getLogger(__name__)

RETRIED_ERRORS = (SourceUnreachable, SourceSlow)
"""Errors after which a requested snapshot is tried again."""
PROGRESS_SAVE_SECONDS = 10.0
"""Seconds between two saves while the rules leave no row of what is read."""


class SaveResumePoint(Protocol):
    """A function that makes a resume point durable."""

    def __call__(self, point: ResumePoint, *, moved: bool) -> None:
        """Save the point.

        `moved` is true if the source has delivered something since the last one, and not only announced it.
        """


class SnapshotRunner:
    """Runs the snapshot under way, if there is one."""

    def __init__(
        self,
        source: object,
        rules: TransformRunner,
        observers: ObserverList,
        *,
        retry_seconds_max: float,
        stream_lost: Callable[[], bool],
    ) -> None:
        self._source, self._rules, self._notify = source, rules, observers
        self._retry_seconds_max, self._stream_lost = retry_seconds_max, stream_lost
        self.outage: Outage | None = None
        """Why a requested snapshot, or one during the stream, waits."""
        self._job: SnapshotJob | None = None
        self._scan: Scan | None = None
        self._piece: ScanPiece | None = None
        """A piece that has not passed the rules. If they halt, it is tried again."""
        self._delivery: PieceDelivery | None = None
        self._dropped_since: float | None = None
        """Since when rows were read of which the rules left none, unsaved."""
        self._in_chunk = False
        self._streams_turn = False
        self._ended = False
        """True once its last rows are acknowledged and that is saved."""
        self._delivered: set[int] = set()
        """Transactions handed out since a snapshot was last seen to include all of them."""
        self._tables_done = 0

    @property
    def under_way(self) -> bool:
        return self._job is not None

    @property
    def id(self) -> str | None:
        """Id of the snapshot under way."""
        return job.id if (job := self._job) is not None else None

    @property
    def is_incremental(self) -> bool:
        """True if a snapshot is under way during the stream."""
        return self._job is not None and self._job.incremental

    @property
    def blocks_stream(self) -> bool:
        """True if the stream waits for the snapshot, or for its current chunk."""
        return self._job is not None and (not self._job.incremental or self._in_chunk)

    @property
    def is_over(self) -> bool:
        """True if nothing is left to read and every row is acknowledged."""
        return self._scan is not None and not self._in_chunk and self._scan.done

    @property
    def summary(self) -> str | None:
        """Progress in words."""
        job = self._job
        if job is None:
            return None
        kind = "incremental" if job.incremental else "bulk"
        return f"{kind} {job.id}: {self._tables_done} of {len(job.tables)} tables, {job.rows:,} rows"

    # Begin.

    def begin(self, point: ResumePoint, tables: Sequence[TableId], *, live: bool) -> ResumePoint:
        """Begin a snapshot; return the point to save before its first row.

        A bulk snapshot decides where the stream begins.
        """
        started = self._begin_scan(point, tables, live=live)
        self._report_begun(resumed=False)
        return started

    def resume(self, saved: ResumePoint) -> ResumePoint:
        """Continue the point's snapshot, or begin it again; return the point to save."""
        point, resumed = self._resume_scan(saved)
        self._report_begun(resumed=resumed)
        return point

    def _begin_scan(
        self,
        point: ResumePoint,
        tables: Sequence[TableId],
        *,
        live: bool,
        where: str | None = None,
        snapshot_id: str | None = None,
    ) -> ResumePoint:
        job = SnapshotJob(id=snapshot_id or uuid.uuid4().hex[:12], tables=tuple(tables), incremental=live, where=where)
        self._scan = self._scannable.scan(job.tables, live=live, where=where)
        self._start(replace(job, scan_record=self._scan.record()))
        return self._with_job(point if live else replace(point, position=self._scan.start))

    def _resume_scan(self, point: ResumePoint) -> tuple[ResumePoint, bool]:
        """Return the point to save, and whether the snapshot continues."""
        assert point.snapshot_job is not None, "there is one"
        job = SnapshotJob.from_json(point.snapshot_job)
        assert job.scan_record is not None, "it was begun"
        self._job = job
        self._scan = self._scannable.resume_scan(job.scan_record)
        if self._scan is None:
            log.warning(
                "source cannot continue a snapshot: it begins again",
                extra={"snapshot": job.id, "tables": len(job.tables), "rows": job.rows},
            )
            return self._begin_scan(point, job.tables, live=job.incremental, where=job.where, snapshot_id=job.id), False
        self._start(job)
        return point, True

    @property
    def _scannable(self) -> Scannable:
        if not isinstance(self._source, Scannable):
            raise Unsupported("source cannot read tables", hint="Start the runtime without a snapshot.")
        return self._source

    def _start(self, job: SnapshotJob) -> None:
        self._job, self._tables_done = job, 0
        self._forget_rows()
        self._streams_turn = False

    def _report_begun(self, *, resumed: bool) -> None:
        job = self._job
        assert job is not None, "one is under way"
        self._notify(SnapshotBegun(id=job.id, tables=job.tables, incremental=job.incremental, resumed=resumed))

    def _with_job(self, point: ResumePoint) -> ResumePoint:
        return replace(point, snapshot_job=self._job.to_json() if self._job else None)

    # Continue and end.

    def save_progress(self, point: ResumePoint, control: Control, save: SaveResumePoint) -> bool:
        """Save the point if a snapshot ended, stopped or begins; return whether it was saved.

        If it cannot be saved, none of that has happened, and the next call tries again.
        """
        for cancelled in control.take_cancelled():
            self._notify(SnapshotEnded(id=cancelled, rows=0, stopped=True))
        stopped = self._job is not None and control.is_cancelled(self._job.id)
        if stopped or self.is_over:
            save(replace(point, snapshot_job=None), moved=False)
            self._end(stopped=stopped)
        elif self._job is None:
            return self._begin_next_request(point, control, save)
        elif self._scan is None and not self._waiting:
            self._reopen(point, save)
        elif self._dropped_since is not None and time.monotonic() - self._dropped_since >= PROGRESS_SAVE_SECONDS:
            save(self._with_job(point), moved=True)
            self._dropped_since, self.outage = None, None
        else:
            return False
        return True

    @property
    def _waiting(self) -> bool:
        return self.outage is not None and time.monotonic() < self.outage.retry_at

    def _begin_next_request(self, point: ResumePoint, control: Control, save: SaveResumePoint) -> bool:
        if self._waiting:
            return False
        request = control.next_request()
        if request is None:
            self.outage = None  # the request that waited was stopped
            return False
        try:
            return self._begin_request(point, request, control, save)
        finally:
            control.clear_starting()

    def _begin_request(
        self, point: ResumePoint, request: SnapshotRequest, control: Control, save: SaveResumePoint
    ) -> bool:
        """Begin a requested snapshot. A failure does not disturb the stream."""
        try:
            # A former process may have handed out rows of the stream: a chunk must not use their numbers.
            started = self._begin_scan(
                point.with_seqs_skipped(), request.tables, live=True, where=request.where, snapshot_id=request.id
            )
        except TailraceError as error:
            self._close_scan()
            self._job = None
            if isinstance(error, RETRIED_ERRORS) and self.should_retry(error):
                control.put_back_request(request)
            else:
                self.close()
                self._report_failure(request.id, 0, error)
            return False
        except BaseException:
            self.close()
            control.put_back_request(request)
            raise
        try:
            save(started, moved=False)
        except BaseException:
            self.close()
            control.put_back_request(request)
            raise
        self.outage = None
        self._report_begun(resumed=False)
        return True

    def _reopen(self, saved: ResumePoint, save: SaveResumePoint) -> None:
        point, resumed = self._resume_scan(saved)
        try:
            save(point, moved=False)
        except BaseException:
            self._close_scan()  # a scan that began again is not the saved one
            raise
        self._report_begun(resumed=resumed)

    def finish(self, point: ResumePoint, save: SaveResumePoint) -> None:
        """Save the end of a finished snapshot before a stop.

        The next start then need not know of it.
        """
        if not self.is_over:
            return
        try:
            save(replace(point, snapshot_job=None), moved=False)
        except TailraceError as error:
            fields = {"code": error.code, "reason": error.message}
            log.warning("end of a snapshot could not be saved: the next start continues it", extra=fields)
            return
        self._end(stopped=False)

    def end_if_acknowledged(self) -> None:
        """End the snapshot if its last rows were just acknowledged."""
        if self._ended:
            self._end(stopped=False)

    def _end(self, *, stopped: bool) -> None:
        assert self._job is not None, "one is under way"
        job = self._job
        self.close()
        self._notify(SnapshotEnded(id=job.id, rows=job.rows, stopped=stopped))

    def drop_reader(self) -> None:
        """Drop a lost reader. The snapshot continues after the acknowledged rows."""
        self._close_scan()
        self._forget_rows()

    def recover_from_interrupt(self, point: ResumePoint) -> ResumePoint:
        """Return to the saved point after an interrupted call; return the point to save.

        The snapshot continues under numbers that no row was handed out with.
        """
        self.drop_reader()
        if self._job is None or point.snapshot_job is None:
            if self._job is not None:
                self._end(stopped=False)  # its end was the last thing saved
            return replace(point, snapshot_job=None)
        return point.with_seqs_skipped()

    def should_retry(self, error: TailraceError) -> bool:
        """Return whether a snapshot during the stream is tried again after the error.

        Else it must be given up. While the stream is lost too, only the stream's outage decides how long to wait.
        """
        self.outage = Outage.after(self.outage, error)
        if self.outage.must_raise(self._retry_seconds_max) and not (
            self._stream_lost() and isinstance(error, RETRIED_ERRORS)
        ):
            return False
        fields = {"code": error.code, "reason": error.message, "wait": self.outage.pause_seconds}
        log.warning("snapshot broken, trying again; the stream continues", extra=fields)
        self._notify(Lost(code=error.code, reason=error.message, wait_seconds=self.outage.pause_seconds))
        return True

    def give_up(self, error: TailraceError) -> None:
        """Drop the snapshot because of the error. The saved point no longer has it."""
        assert self._job is not None, "one is under way"
        job = self._job
        self.close()
        self._report_failure(job.id, job.rows, error)

    def _report_failure(self, snapshot: str, rows: int, error: TailraceError) -> None:
        fields = {"snapshot": snapshot, "code": error.code, "reason": error.headline, "hint": error.hint}
        log.error("snapshot failed, the stream continues", extra=fields)
        self._notify(SnapshotEnded(id=snapshot, rows=rows, stopped=True, error=error))

    def next(self, point: ResumePoint, limits: Limits, wait_seconds: float) -> AnyWindow | None:
        """Return rows to hand out now, or None.

        None means that it is the stream's turn, or that there are no rows yet. Rows that the rules drop are skipped for
        at most `wait_seconds`.
        """
        until = time.monotonic() + wait_seconds
        while self._delivery is None:
            if not self._read(limits.rows):
                return None
            self._apply_rules(point)
            if self._delivery is None and time.monotonic() >= until:
                return None
        self.outage = None
        return self._delivery.hand_out(limits)

    def _read(self, rows_max: int) -> bool:
        """Read a piece unless there is one; return False if there is none now."""
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

    def _apply_rules(self, point: ResumePoint) -> None:
        """Apply the rules to the piece and prepare its delivery. If they halt, the piece stays."""
        assert self._piece is not None, "a piece was read"
        read = window_of_piece(self._piece, point.position)
        batches = self._rules.transform_batches(read.batches)
        piece, self._piece = self._piece, None
        if not batches:
            assert self._job is not None, "a piece belongs to a snapshot"
            self._job = replace(self._job, scan_record=piece.record(len(piece.data)))
            self._dropped_since = self._dropped_since or time.monotonic()
            self._finish_piece(piece)
            return
        sources = np.sort(np.concatenate([batch.data.column(change.SEQ).to_numpy() for batch in batches]))
        if len(batches) > 1 or batches[0] is not read.batches[0]:
            batches = renumber(batches)
        self._delivery = PieceDelivery(piece, replace(read, batches=batches, rows=sources.size), sources)

    def _finish_piece(self, piece: ScanPiece) -> None:
        """Note that all rows of a piece are acknowledged or dropped."""
        assert self._job is not None, "a piece belongs to a snapshot"
        if piece.table_done:
            self._tables_done += 1
            self._notify(TableRead(id=self._job.id, table=piece.schema.table))

    def note_delivered(self, window: AnyWindow) -> None:
        """Note transactions about to be handed out: the next chunk's snapshot must see them."""
        if self._job is not None and self._job.incremental:
            for batch in window.batches:
                self._delivered.update(pc.unique(batch.data.column(change.TX)).to_pylist())

    def resume_point_after(self, point: ResumePoint, rows: int) -> ResumePoint:
        """Return the point to save before the first `rows` handed-out rows are acknowledged."""
        job = self._job_after(rows)
        return replace(point, rows=point.rows + rows, snapshot_job=None if self._ends_with(rows) else job.to_json())

    def _ends_with(self, rows: int) -> bool:
        """Return whether these are known to be the snapshot's last rows.

        If the tables after them turn out to be empty, only further reading shows it.
        """
        assert self._job is not None, "rows of it were handed out"
        assert self._delivery is not None, "these"
        last = self._delivery.piece.table_done and self._delivery.piece.schema.table == self._job.tables[-1]
        return last and self._delivery.acknowledged + rows >= self._delivery.window.rows

    def _job_after(self, rows: int) -> SnapshotJob:
        assert self._job is not None, "rows of it were handed out"
        assert self._delivery is not None, "these"
        return replace(self._job, rows=self._job.rows + rows, scan_record=self._delivery.scan_record_after(rows))

    def acknowledge(self, rows: int) -> AnyWindow | None:
        """Note that the point is saved; return the rest of what was handed out."""
        self._ended = self._ends_with(rows)
        self._job, delivery = self._job_after(rows), self._delivery
        assert delivery is not None, "rows of it were handed out"
        delivery.acknowledged += rows
        self._dropped_since = None
        if delivery.acknowledged >= delivery.window.rows:
            self._delivery = None
            self._finish_piece(delivery.piece)
        return delivery.handed_out

    def close(self) -> None:
        """Forget the snapshot. The saved point still has it."""
        self._close_scan()
        self._job = self.outage = None
        self._ended = False
        self._forget_rows()
        self._delivered.clear()

    def _forget_rows(self) -> None:
        self._piece, self._delivery, self._dropped_since, self._in_chunk = None, None, None, False

    def _close_scan(self) -> None:
        scan, self._scan = self._scan, None
        if scan is not None:
            scan.close()
