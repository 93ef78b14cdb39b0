"""The one capture loop: poll, sink, record, confirm, in that order.

The order is the delivery guarantee. Changes are durable at the sink first, then the position is saved, and only then
may the source discard its log. So a crash repeats a batch and never skips one. A batch stays the same until it is
acknowledged, and nothing is handed out before it, so a failed batch cannot be passed. A broken source is opened again;
rows that were read and not acknowledged are repeated. The same happens after a call that was interrupted, as by a
signal's handler or Ctrl-C: only what was saved counts.

In a pipeline the change log is the sink and stores the position, in one commit. Otherwise a checkpoint store does. The
order is the same in both cases; `_turn` and `_settle` define it. docs/decisions/0016-one-runtime.md lists all
invariants. The file is long because it has everything that keeps the order, and nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeAlias, cast

from tailrace import failpoints
from tailrace.capture.port import HasTimeline, Scannable, Stream
from tailrace.errors import (
    ConfigError,
    RuleInvalid,
    RuntimeRefused,
    SinkError,
    SinkRejected,
    StateError,
    TailraceError,
    TransformFailed,
    Unacknowledged,
)
from tailrace.model.batch import AnyWindow, ChangeBatch, Window
from tailrace.model.event import Event
from tailrace.model.position import ZERO
from tailrace.model.position_kinds import P, Position, bytes_between, covers
from tailrace.model.schema import TableId
from tailrace.runtime import observers as facts
from tailrace.runtime.handle import Control, require_distinct_tables
from tailrace.runtime.injected_changes import InjectedChanges
from tailrace.runtime.intake import ReconnectingStream, StreamSource
from tailrace.runtime.observers import Health, Observer, ObserverList, Status, assess_health, to_tailrace_error
from tailrace.runtime.output_batch import (
    Ack,
    Batch,
    BatchKind,
    Limits,
    WindowSchemaRecorder,
    ack_error,
    empty_batch,
    last_transaction,
    number_from,
    split_accepted,
)
from tailrace.runtime.position_store import CheckpointPositionStore, PositionStore, ResumePoint
from tailrace.runtime.runtime_state import Drained, Progress, State
from tailrace.runtime.sinks import Rejected, Sink, require_rejected, require_sink
from tailrace.runtime.snapshots import SnapshotRunner
from tailrace.runtime.startup import prepare_start, require_arguments
from tailrace.runtime.transform_runner import Transform, TransformRunner, transform_window
from tailrace.runtime.window_buffer import WindowBuffer
from tailrace.state.checkpoint import CheckpointStore
from tailrace.state.schema_history import SchemaHistory
from tailrace.transforms.rules import RulesInput
from tailrace.validation import require_callable, require_integer, require_seconds

if TYPE_CHECKING:
    from tailrace.transforms.transform_plan import OnDeadLetter, TransformPlan

log = logging.getLogger(__name__)

IDLE_SECONDS_MAX = 10.0
IDLE_BYTES_MAX = 16 << 20
"""Bytes of log after which a quiet source's position is saved."""
READ_SECONDS = 0.25
RETRY_SECONDS = 300.0
STALLED_SECONDS = 60.0
SCAN_SECONDS = 0.05
"""Seconds between two checks for whether a snapshot may begin."""
INJECTED_LEFT = "injected rows were not delivered: they are lost unless this runtime is started again"
OnRejected: TypeAlias = Callable[[Sequence[Rejected]], None]


class CdcRuntime(Generic[P]):
    """Captures the changes of a source for a sink. One thread runs it; others use `control`."""

    def __init__(
        self,
        source: StreamSource[P],
        checkpoint: CheckpointStore | PositionStore,
        schema_history: SchemaHistory | None = None,
        *,
        key: str = "default",
        snapshot_tables: Sequence[TableId] = (),
        incremental_snapshot: Sequence[TableId] = (),
        limits: Limits | None = None,
        target: P | None = None,
        transforms: RulesInput | TransformPlan | None = None,
        on_dead_letter: OnDeadLetter | None = None,
        transform: Transform | None = None,
        observers: Sequence[Observer] = (),
        retry_seconds_max: float = RETRY_SECONDS,
        stalled_seconds: float = STALLED_SECONDS,
        idle_seconds_max: float | None = None,
    ) -> None:
        """Create a runtime; `start` or `run` starts it.

        `transforms` are declared rules; `on_dead_letter` receives the rows that they reject. `transform` is applied
        after them. A quiet source's position is saved every `idle_seconds_max` (10) seconds, so that the source can
        discard its log.
        """
        idle_seconds = IDLE_SECONDS_MAX if idle_seconds_max is None else idle_seconds_max
        require_arguments(
            source,
            checkpoint,
            schema_history,
            limits=limits,
            target=target,
            observers=observers,
            functions={"on_dead_letter": on_dead_letter, "transform": transform},
            seconds={
                "retry_seconds_max": retry_seconds_max,
                "stalled_seconds": stalled_seconds,
                "idle_seconds_max": idle_seconds,
            },
        )
        self._source = source
        self._positions = (
            checkpoint if isinstance(checkpoint, PositionStore) else CheckpointPositionStore(checkpoint, key)
        )
        self._snapshot_tables, self._incremental = (
            require_distinct_tables(snapshot_tables),
            require_distinct_tables(incremental_snapshot),
        )
        if self._positions.takes_windows and (snapshot_tables or incremental_snapshot):
            raise ConfigError("change log cannot store a snapshot's progress", hint="Use a checkpoint store.")
        self._limits = limits or Limits()
        self._target = target
        self._stalled_seconds = stalled_seconds
        self._idle_seconds = idle_seconds
        self._id, self._number = uuid.uuid4(), 0
        self._notify = ObserverList(observers)
        self._rules = TransformRunner(transforms, on_dead_letter, self._notify)
        self._intake = ReconnectingStream(
            source,
            retry_seconds_max,
            through=self._rules.transform_stream,
            dropped=self._on_dropped,
            lost=self._on_lost,
            opened=self._on_opened,
        )
        self._raw = self._positions.takes_windows
        self._buffer = WindowBuffer(self._limits, as_they_come=self._raw)
        self._history = schema_history
        self._schemas = WindowSchemaRecorder(schema_history, self._notify)
        self._snapshots = SnapshotRunner(
            source,
            self._rules,
            self._notify,
            retry_seconds_max=retry_seconds_max,
            stream_lost=lambda: self._intake.outage is not None,
        )
        self._injected = InjectedChanges(self._rules, as_they_come=self._raw)
        self._point: ResumePoint | None = None
        self._in_flight: Batch | None = None
        self._source_window: AnyWindow = Window(start=ZERO, end=ZERO)
        """The window of the batch in flight, as the source sent it."""
        self._poll_error: TailraceError | None = None
        """The error of the last poll."""
        self._next_out: tuple[BatchKind, AnyWindow] | None = None
        """Rows to hand out next, before anything else.

        The schema history or the transform failed on them, or rows before them were acknowledged alone.
        """
        self._transform = transform
        self._handed_out_at = self._polled_at = self._last_commit = time.monotonic()
        self._part_rows = 0
        """Acknowledged rows of a transaction that has not ended."""
        self._rest_rows = 0
        """Rows to hand out again: only the rows before them were acknowledged."""
        self._transaction_repeats = False
        """True if a transaction handed out in part is repeated. No chunk may use its numbers."""
        self._interrupted = False
        """True if a call was interrupted. Memory may then have half of a step."""
        self._was_paused = False
        self._more_reported = False
        """True if the sink's last flush was not `caught_up`. If nothing follows, it is flushed once more."""
        self.state = State.IDLE
        self.progress = Progress()
        self.control = Control(
            self._status,
            snapshots=isinstance(source, Scannable) and not self._raw,
            under_way=lambda: self._snapshots.id,
        )

    # Position.

    @property
    def position(self) -> P:
        """The position up to which everything is acknowledged and durable."""
        return cast(
            "P", self._current.position
        )  # of the source's kind: `prepare_start` and `ReconnectingStream` refuse others

    @property
    def rows_committed(self) -> int:
        """Rows acknowledged by this runtime and by those before it under the same key."""
        return self._current.rows

    @property
    def caught_up(self) -> bool:
        """True if everything up to the target was acknowledged."""
        if self._target is None:
            return False
        point = self._point if not self._raw else self._positions.load()
        return point is not None and covers(point.position, self._target)

    @property
    def _current(self) -> ResumePoint:
        if self._point is None:
            raise RuntimeRefused("runtime is not started", hint="Call `start()` first.")
        return self._point

    @property
    def _next_seq(self) -> int:
        """`_seq` of the next row to hand out."""
        return self._current.next_seq + self._part_rows

    # Start and stop.

    def start(self) -> None:
        """Load the position, prepare the source, and resume a snapshot. If it fails, call it again."""
        if self.state in (State.RUNNING, State.STOPPING):
            raise RuntimeRefused(f"runtime is {self.state.value}", hint="Wait until it is stopped.")
        try:
            self._rules.require_ready()
            point, resumed = prepare_start(
                self._source, self._positions, self._history, self._snapshots, self._snapshot_tables, self._incremental
            )
        except BaseException as error:
            self._snapshots.close()
            self.state = State.IDLE
            if isinstance(error, Exception):
                self._notify(facts.StartFailed(error=to_tailrace_error(error)))
            raise
        self._point, self._in_flight, self._part_rows, self._rest_rows = point, None, 0, 0
        self._transaction_repeats = self._more_reported = self._interrupted = False
        self._buffer.reset(point.position)
        self._intake.outage = self._poll_error = None
        self._handed_out_at = self._polled_at = self._last_commit = time.monotonic()
        self.state = State.RUNNING
        self._notify(
            facts.Started(
                position=point.position, rows=point.rows, resumed=resumed, snapshot=point.snapshot_job is not None
            )
        )

    def stop(self) -> None:
        """Stop; refuse while rows are not acknowledged."""
        self._require_running()
        handed = self._handed_out
        injected = self._injected.rows
        if handed or injected or self._part_rows:
            raise Unacknowledged(
                "rows are not acknowledged",
                handed_out=handed,
                injected=injected,
                in_part=self._part_rows,
                hint="Acknowledge the batch, or call `drain_and_stop()` or `force_stop()`, which return what is not "
                "delivered.",
            )
        self._snapshots.finish(self._current, self._save)
        self._shut_down()

    def force_stop(self) -> Drained:
        """Stop now; return what is not acknowledged."""
        self._require_running()
        if self._next_out is not None:
            self._buffer.put_back(self._next_out[1])
        if self._interrupted:
            self._injected.put_back()
        whole, parts = self._buffer.drain(self._next_seq + (self._in_flight.rows if self._in_flight is not None else 0))
        drained = Drained(in_flight=self._in_flight, buffered=whole, pending=parts, injected=self._injected.drain())
        # Injected rows exist nowhere else: the caller must get them, whatever fails from here on.
        self._attempt(lambda: self._snapshots.finish(self._current, self._save))
        self._attempt(self._shut_down)
        return drained

    def drain_and_stop(self) -> Drained:
        """Acknowledge the current batch, then stop; return what else is not acknowledged."""
        self._require_running()
        self._recover_from_interrupt()
        if self._in_flight is not None:
            self.commit(self._in_flight.ack)
        return self.force_stop()

    def _shut_down(self) -> None:
        self.state = State.STOPPING
        unacknowledged = self._handed_out
        if self._interrupted:
            self._injected.put_back()
        try:
            try:
                self._snapshots.close()
            finally:
                self._intake.close()
        finally:
            self.progress.rows -= self._part_rows  # the source repeats them
            self._in_flight, self._next_out, self._part_rows, self._rest_rows = None, None, 0, 0
            self.state = State.STOPPED
        self._rules.report_unmatched()
        point, injected = self._current, self._injected.rows
        if injected:
            log.warning(INJECTED_LEFT, extra={"rows": injected})
        self._notify(
            facts.Stopped(position=point.position, rows=point.rows, unacknowledged=unacknowledged, injected=injected)
        )

    def _attempt(self, step: Callable[[], None]) -> None:
        """Run a step; report its failure without raising, because something else matters more."""
        try:
            step()
        except Exception as error:  # a boundary: the caller continues
            self._notify(facts.Failed(error=to_tailrace_error(error)))

    def _recover_from_interrupt(self) -> None:
        """Recover after an interrupted call.

        Only what was saved counts. The source repeats all else, as after a crash, and it is acknowledged by another
        token.
        """
        if not self._interrupted:
            return
        self._injected.put_back()
        self._intake.close()
        self.progress.rows -= self._part_rows
        self._in_flight, self._next_out, self._part_rows, self._rest_rows, self._transaction_repeats = (
            None,
            None,
            0,
            0,
            False,
        )
        saved = self._positions.load()
        if saved is not None:
            current = self._current
            self._point = (
                replace(current, position=saved.position) if self._raw else replace(saved, source=current.source)
            )
        self._buffer.reset(self.position)
        point = self._snapshots.recover_from_interrupt(self._current)
        if point != self._point:
            self._save(point, moved=False)
        self._interrupted = False

    @property
    def _handed_out(self) -> int:
        """Number of rows handed out and not acknowledged."""
        batch = self._in_flight
        return max(batch.rows if batch else 0, self._rest_rows)

    def _require_running(self) -> None:
        if self.state is not State.RUNNING:
            raise RuntimeRefused(f"runtime is {self.state.value}, not running", hint="Call `start()` first.")

    # Hand out.

    def poll(self, wait_seconds: float | None = None) -> Batch:
        """Return the next batch, or the same one until it is acknowledged.

        It is empty if no rows arrived within the wait.
        """
        self._require_running()
        wait = READ_SECONDS if wait_seconds is None else require_seconds("wait_seconds", wait_seconds)
        self._polled_at = time.monotonic()
        try:
            self._recover_from_interrupt()
            if self._in_flight is not None:
                return self._in_flight
            self._injected.confirm_taken()
            batch = self._next_batch_guarded(wait)
        except Exception as error:  # any failure, also of the caller's code: nothing is handed out
            self._poll_error = to_tailrace_error(error)
            if isinstance(error, (TransformFailed, RuleInvalid)):
                fields = {name: str(error.fields.get(name, "")) for name in ("rule", "table")}
                self._notify(facts.RuleHalted(**fields, error=error))
            self._notify(facts.PollFailed(error=self._poll_error))
            raise
        if not self._was_paused:
            self._poll_error = None
        self._interrupted = False
        return batch

    def _next_batch_guarded(self, wait: float) -> Batch:
        """Return the next batch, and count as interrupted until the caller has it."""
        self._interrupted = True
        try:
            return self._next_batch(wait)
        except Exception as error:
            # Our errors are raised between steps. Rows that the caller's code failed on are kept for the next poll.
            self._interrupted = not isinstance(error, TailraceError) and self._next_out is None
            raise

    def _next_batch(self, wait: float) -> Batch:
        if self._is_paused(wait):
            return empty_batch(self.position)
        if self._next_out is not None:
            return self._hand_out(*self._next_out)
        if injected := self._injected.next():
            return self._injected_batch(injected)
        if (scanned := self._next_scanned(wait)) is not None:
            return self._hand_out(BatchKind.SNAPSHOT, scanned)
        if self._snapshots.blocks_stream:
            time.sleep(min(wait, SCAN_SECONDS))
            return empty_batch(self.position)
        window = self._next_window(wait)
        if window is None:
            return empty_batch(self.position)
        self._snapshots.note_delivered(window)
        return self._hand_out(BatchKind.STREAM, window)

    def _is_paused(self, wait_seconds: float) -> bool:
        self._note_pause()
        if self._was_paused:
            self.control.wait(wait_seconds)
            self._note_pause()
        return self._was_paused

    def _note_pause(self) -> None:
        was, self._was_paused = self._was_paused, self.control.paused
        if was != self._was_paused:
            self._notify(facts.Paused() if self._was_paused else facts.Resumed())

    def _injected_batch(self, batches: tuple[ChangeBatch, ...]) -> Batch:
        window = Window(start=self.position, end=self.position, batches=batches, rows=sum(map(len, batches)))
        try:
            batch = Batch(kind=BatchKind.INJECTED, window=transform_window(window, self._transform))
        except BaseException:
            self._injected.put_back()
            raise
        self._notify(facts.Delivered(kind=batch.kind.value, rows=batch.rows, end=batch.end))
        return batch

    def _hand_out(self, kind: BatchKind, window: AnyWindow) -> Batch:
        if not self._raw and window.batches:
            window = number_from(window, self._next_seq)
        self._next_out = kind, window  # stays if the history or the transform fails: nothing passes it
        self._schemas.record_schemas(window)
        shown = transform_window(window, self._transform)
        self._next_out, self._source_window = None, window
        self._number += 1
        self._in_flight = Batch(kind=kind, window=shown, ack=Ack(self._id, self._number))
        self._handed_out_at = time.monotonic()
        if self._notify:
            self._notify(facts.Delivered(kind=kind.value, rows=window.rows, end=window.end))
        return self._in_flight

    def _next_scanned(self, wait_seconds: float) -> AnyWindow | None:
        """Return rows that a snapshot reads, if there are any.

        A broken snapshot before the stream is opened again like a stream. One during the stream waits alone.
        """
        if self._part_rows or self._rest_rows or self._transaction_repeats:
            return None  # rows of a chunk would get the numbers of handed-out rows that are repeated
        if not self._intake.wait_for_retry(wait_seconds):
            return None
        try:
            self._settle_snapshots()
            scanned = self._snapshots.next(self._current, self._limits, wait_seconds)
            if self._snapshots.is_over:
                self._settle_snapshots()  # saved now, for a caller that stops at the first empty batch
        except (
            TransformFailed,
            RuleInvalid,
            SinkError,
            StateError,
        ) as error:  # not the source's error: keep the stream and retry
            self._intake.handle_error(error, keep=True)
            return None
        except TailraceError as error:
            self._snapshots.drop_reader()
            if not self._snapshots.is_incremental:
                self._intake.handle_error(error)
            elif not self._snapshots.should_retry(error):
                self._save(replace(self._current, snapshot_job=None), moved=False)
                self._snapshots.give_up(error)
            return None
        if scanned is not None:
            self._intake.note_source_answered()
        return scanned

    def _settle_snapshots(self) -> None:
        saved = self._snapshots.save_progress(self._current, self.control, self._save)
        if saved and not self._buffer and not self._buffer.has_open_transaction:
            self._buffer.reset(self.position)  # a snapshot that begins again moves it

    def _next_window(self, wait_seconds: float) -> AnyWindow | None:
        """Return the next batch's rows, with more while there is room and time."""
        until = time.monotonic() + (0.0 if self._buffer else wait_seconds)
        while not self._buffer.full:
            had = bool(self._buffer)
            try:
                if self._read(max(0.0, until - time.monotonic())) is None:
                    break
            except TailraceError:
                if not self._buffer:
                    raise
                break  # rows read before the error go first; the next read raises it again
            if self._buffer and not had:
                until = time.monotonic() + self._limits.seconds
            elif not self._buffer and time.monotonic() >= until:
                break  # an unfinished transaction is being gathered
        window = self._buffer.next(self._next_seq)
        if window is not None and not window.rows and not self._raw:
            try:
                self._settle(window)  # all its rows are acknowledged: only its end is left
            except BaseException:
                if self._part_rows:
                    self._buffer.put_back(window)
                raise
            return None
        return window

    def _read(self, wait_seconds: float) -> AnyWindow | None:
        """Read one window into the buffer; return None if there was none with content."""
        window = self._intake.read(self._buffer.read_until, self.position, wait_seconds)
        if window is None:
            return None
        failpoints.hit("capture.piece_read" if window.open else "capture.window_read")
        if not covers(self.progress.source_end, window.end):
            self.progress.source_end = window.end
        if not window.is_empty:
            self._buffer.add(window)
            return window
        if (
            not self._buffer
            and not self._part_rows
            and not self._buffer.has_open_transaction
            and self._idle_due(window)
        ):
            self._settle(window)
            self._buffer.read_until = window.end
        return None

    def _idle_due(self, window: AnyWindow) -> bool:
        target = self._target
        reached = target is not None and covers(window.end, target) and not covers(window.start, target)
        long_ago = time.monotonic() - self._last_commit >= self._idle_seconds
        return reached or long_ago or bytes_between(window.start, window.end) >= IDLE_BYTES_MAX

    # Acknowledge.

    def commit(self, ack: Ack | None, rows: int | None = None) -> None:
        """Acknowledge a batch, or its first rows; the rest is handed out next.

        The acknowledged rows must be durable. A batch without a position has None as its token: it needs no
        acknowledgement, and None is ignored.
        """
        self._require_running()
        if ack is None:
            return
        self._recover_from_interrupt()
        batch = self._in_flight
        if batch is None or ack != batch.ack:
            raise ack_error(ack, self._id)
        count = batch.rows if rows is None else require_integer("rows", rows, least=0)
        if count > batch.rows or (self._raw and count != batch.rows):
            raise ConfigError(
                "number of rows cannot be acknowledged",
                rows=count,
                batch=batch.rows,
                hint="Acknowledge all rows of the batch, or fewer where a checkpoint store keeps the position.",
            )
        if not count and batch.rows:
            return
        before = batch, self._point, self._part_rows
        self._interrupted = True
        try:
            if batch.kind is BatchKind.SNAPSHOT:
                self._settle_scanned(count)
            else:
                self._settle_first(self._source_window, count)
        except Exception as error:
            undone = before == (self._in_flight, self._point, self._part_rows)
            self._interrupted = not (undone or isinstance(error, TailraceError))
            raise
        self._interrupted = False

    def _settle_scanned(self, rows: int) -> None:
        self._save(self._snapshots.resume_point_after(self._current, rows))
        failpoints.hit("runtime.scan_saved")
        self.progress.rows += rows
        rest = self._snapshots.acknowledge(rows)
        self._next_out = None if rest is None else (BatchKind.SNAPSHOT, rest)
        self._rest_rows = 0 if rest is None else rest.rows
        self._in_flight = None
        if self._notify:
            self._notify(facts.Committed(position=self.position, rows=self._current.rows))
        self._snapshots.end_if_acknowledged()

    def _settle_first(self, window: AnyWindow, rows: int) -> None:
        """Acknowledge a window's first rows: whole transactions move the position, a part does not."""
        if rows >= window.rows:
            self._settle(window)
            return
        taken, rest = split_accepted(window, rows)
        try:
            self._buffer.put_back(rest)  # before the source confirms: a stream that breaks there continues after it
            for part in taken:
                self._record(part)
        except BaseException:
            if self._in_flight is not None:
                self._buffer.undo_put_back(rest)  # nothing was acknowledged
            raise
        self._rest_rows = max(self._rest_rows, rest.rows)
        failpoints.hit("runtime.prefix_saved")
        if not taken[0].open:
            self._release(taken[0].end)

    def _settle(self, window: AnyWindow) -> None:
        """Save what the sink has; then the source may discard it."""
        self._record(window)
        if not window.open:
            self._release(window.end)

    def _record(self, window: AnyWindow) -> None:
        """Save that the sink has the window. A part of a transaction is only counted."""
        if window.open:
            self._part_rows += window.rows
        else:
            point = self._current
            self._save(
                replace(
                    point,
                    position=window.end,
                    rows=point.rows + self._part_rows + window.rows,
                    transactions=point.transactions + window.transactions,
                    transaction=point.transaction if self._raw else last_transaction(window, point.transaction),
                )
            )
            self._part_rows = 0
            self._transaction_repeats &= window.is_empty
            self._last_commit = time.monotonic()
        self._count(window)

    def _release(self, position: Position) -> None:
        failpoints.hit("capture.before_confirm")
        self._intake.confirm(position)  # only now may the server drop its log
        failpoints.hit("capture.after_confirm")
        if self._notify:
            self._notify(facts.Committed(position=position, rows=self._current.rows))

    def _save(self, point: ResumePoint, *, moved: bool = True) -> None:
        self._positions.save(point)
        self._point = point
        self._intake.note_written(moved=moved)

    def _count(self, window: AnyWindow) -> None:
        self._in_flight = None
        self._rest_rows = max(0, self._rest_rows - window.rows)
        self.progress.transactions += window.transactions
        self.progress.rows += window.rows
        self.progress.windows += 1
        if not self._intake.outage:
            self.progress.last_error = None

    # Callbacks of the stream.

    def _on_opened(self, stream: Stream, after: Position) -> None:
        self._schemas.restart()
        point = self._current
        if point.source is not None and isinstance(stream, HasTimeline):
            self._point = replace(point, source=replace(point.source, timeline=stream.timeline))
        self._notify(facts.StreamOpened(after=after))

    def _on_dropped(self) -> None:
        """Handle a closed stream: the source repeats what was not complete."""
        if self._buffer.handle_stream_loss(self.position):
            self._transaction_repeats |= bool(self._part_rows or self._rest_rows)
            self.progress.rows -= self._part_rows
            self._part_rows = self._rest_rows = 0

    def _on_lost(self, error: TailraceError, wait_seconds: float) -> None:
        self.progress.last_error, self.progress.reconnects = error, self._intake.reconnects
        self._notify(facts.Lost(code=error.code, reason=error.message, wait_seconds=wait_seconds))

    # The whole loop, for callers with a sink.

    def run(
        self, sink: Sink, stop: threading.Event | Callable[[], bool], *, on_rejected: OnRejected | None = None
    ) -> None:
        """Poll, write, flush and commit until `stop` is set.

        A lost source, and a sink that fails for a while, are retried. Rows that the sink rejects go to `on_rejected`,
        or end the loop.
        """
        require_sink("sink", sink)
        stopping = stop.is_set if isinstance(stop, threading.Event) else stop
        require_callable("stop", stopping, "Pass a `threading.Event`, or a function that returns whether to stop.")
        if on_rejected is not None:
            require_callable("on_rejected", on_rejected, "Pass a function that takes the rows: `on_rejected=function`.")
        positions: object = self._positions
        if self._raw and sink is not positions:
            raise ConfigError(
                "sink is not the log that stores the position",
                hint="Pass the same `LogSink` to the runtime and to `run`.",
            )
        if self.state is not State.RUNNING:
            self.start()
        try:
            while not stopping():
                self._turn(sink, on_rejected)
        except BaseException as error:
            self._attempt(self._shut_down)
            if isinstance(error, Exception):
                self._notify(facts.Failed(error=to_tailrace_error(error)))
            raise
        self._snapshots.finish(self._current, self._save)
        self._shut_down()

    def _turn(self, sink: Sink, on_rejected: OnRejected | None) -> None:
        batch: Batch | None = None
        resting = False
        try:
            if not self._intake.wait_for_retry(READ_SECONDS):
                return
            batch = self.poll()
            if self._intake.outage is None:
                self.progress.last_error = None
            if batch.kind is not BatchKind.EMPTY:
                self._deliver(batch, sink, on_rejected)
            elif resting := self._more_reported and self._is_last:
                self._flush(sink)
        except BaseException as error:
            if batch is not None and batch.kind is BatchKind.INJECTED:
                self._injected.put_back()
            if not isinstance(error, TailraceError):
                raise
            waits = self._in_flight is not None or self._next_out is not None
            keep = waits or resting or bool(self._injected)  # the stream did not fail
            if waits and self._raw:  # the log may have parts of the transaction: it begins again
                self._in_flight, self._next_out, keep = None, None, False
            self._intake.handle_error(error, keep=keep)

    def _deliver(self, batch: Batch, sink: Sink, on_rejected: OnRejected | None) -> None:
        rejected = require_rejected(sink.write(batch))
        failpoints.hit("runtime.sink_written")
        if rejected:
            tables = tuple(dict.fromkeys(row.table for row in rejected))
            self._notify(facts.RowsRejected(rows=len(rejected), tables=tables, reason=rejected[0].reason))
            if on_rejected is None:
                raise SinkRejected(
                    "sink rejected some rows",
                    rows=len(rejected),
                    reason=rejected[0].reason,
                    hint="Fix the sink, or pass an `on_rejected` to `run` that stores them.",
                )
            on_rejected(rejected)
        self._flush(sink)
        failpoints.hit("runtime.sink_flushed")
        self.commit(batch.ack)

    def _flush(self, sink: Sink) -> None:
        last = self._is_last
        sink.flush(last)
        self._more_reported = not last

    @property
    def _is_last(self) -> bool:
        """True if nothing more is known to be waiting."""
        return not self._buffer and not self._intake.has_read_ahead and not self._snapshots.under_way

    # For callers.

    def enqueue(self, changes: ChangeBatch | Event) -> None:
        """Inject changes: the next poll hands them out. They have no position and are not stored."""
        self._require_running()
        self._injected.add(changes)

    def health(self) -> Health:
        """Return the runtime's health, and what to do about it."""
        now = time.monotonic()
        batch = self._in_flight
        return assess_health(
            state=None if self.state is State.RUNNING else self.state.value,
            paused=self.control.paused,
            error=self._trouble,
            unacknowledged=batch.rows if batch else None,
            given_seconds=now - self._handed_out_at,
            polled_seconds=now - self._polled_at,
            quiet_seconds=now - self._last_commit,
            reading=self._snapshots.under_way,
            limit_seconds=self._stalled_seconds,
        )

    @property
    def _trouble(self) -> TailraceError | None:
        outage = self._intake.outage
        if outage is None and self._poll_error is None:
            outage = self._snapshots.outage
        return outage.error if outage is not None else self._poll_error

    def _status(self) -> Status:
        point = self._point
        return Status(
            state=self.state.value,
            paused=self.control.paused,
            position=str(point.position) if point else None,
            rows=point.rows if point else 0,
            transactions=point.transactions if point else 0,
            unacknowledged=self._handed_out + self._part_rows,
            buffered=self._buffer.rows,
            injected=self._injected.rows,
            reconnects=self._intake.reconnects,
            snapshot=self._snapshots.summary,
            health=self.health(),
        )
