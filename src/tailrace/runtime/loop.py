"""The one loop: poll, sink, record, confirm, in that order.

The order is the delivery guarantee. Changes are durable at the sink, then the place is, and only then may the source
discard its own, so a crash repeats a batch and never skips one. A batch stays the same until it is acknowledged, and
nothing is handed out in front of it; so one that failed can not be passed. A source that breaks is opened again; what
was read and not acknowledged comes again. So it is after a call that was left in its middle, as a signal's handler or
Ctrl-C leaves it: what is on record counts, and nothing that was on its way.

In a pipeline the change log is the sink and keeps the place, in one commit; otherwise a checkpoint store does. What is
never different is the order, which stands in `_turn` and `_settle`. docs/decisions/0016-one-runtime.md has the whole
list of what must stay true. The file is long because all that holds the order, and nothing else, stands in it.
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
"""A quiet source's position is recorded at least this often."""
READ_SECONDS = 0.25
RETRY_SECONDS = 300.0
STALLED_SECONDS = 60.0
SCAN_SECONDS = 0.05
"""Between two looks for whether a snapshot may begin."""
INJECTED_LEFT = "rows that were injected were not delivered: they are lost unless this runtime is started again"
OnRejected: TypeAlias = Callable[[Sequence[Rejected]], None]


class CdcRuntime(Generic[P]):
    """Captures the changes of a source for a sink. One thread drives it; `control` is for the others."""

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
        on_letter: OnDeadLetter | None = None,
        transform: Transform | None = None,
        observers: Sequence[Observer] = (),
        retry_seconds_max: float = RETRY_SECONDS,
        stalled_seconds: float = STALLED_SECONDS,
        idle_seconds_max: float | None = None,
    ) -> None:
        """`transforms` are declared rules; `on_letter` takes the rows that they set aside. `transform` comes after. A
        quiet source's position is recorded after `idle_seconds_max` (10), so that it can discard its log."""
        idle_seconds = IDLE_SECONDS_MAX if idle_seconds_max is None else idle_seconds_max
        require_arguments(
            source,
            checkpoint,
            schema_history,
            limits=limits,
            target=target,
            observers=observers,
            functions={"on_letter": on_letter, "transform": transform},
            seconds={
                "retry_seconds_max": retry_seconds_max,
                "stalled_seconds": stalled_seconds,
                "idle_seconds_max": idle_seconds,
            },
        )
        self._source = source
        self._keeper = checkpoint if isinstance(checkpoint, PositionStore) else CheckpointPositionStore(checkpoint, key)
        self._snapshot_tables, self._incremental = (
            require_distinct_tables(snapshot_tables),
            require_distinct_tables(incremental_snapshot),
        )
        if self._keeper.takes_windows and (snapshot_tables or incremental_snapshot):
            raise ConfigError("a log does not keep a snapshot's place", hint="Use a checkpoint store beside the sink.")
        self._limits = limits or Limits()
        self._target = target
        self._stalled_seconds = stalled_seconds
        self._idle_seconds = idle_seconds
        self._id, self._number = uuid.uuid4(), 0
        self._tell = ObserverList(observers)
        self._rules = TransformRunner(transforms, on_letter, self._tell)
        self._intake = ReconnectingStream(
            source,
            retry_seconds_max,
            through=self._rules.transform_stream,
            dropped=self._on_dropped,
            lost=self._on_lost,
            opened=self._on_opened,
        )
        self._raw = self._keeper.takes_windows
        self._buffer = WindowBuffer(self._limits, as_they_come=self._raw)
        self._history = schema_history
        self._shapes = WindowSchemaRecorder(schema_history, self._tell)
        self._snapshots = SnapshotRunner(
            source,
            self._rules,
            self._tell,
            retry_seconds_max=retry_seconds_max,
            stream_lost=lambda: self._intake.outage is not None,
        )
        self._injected = InjectedChanges(self._rules, as_they_come=self._raw)
        self._place: ResumePoint | None = None
        self._given: Batch | None = None
        self._taken: AnyWindow = Window(start=ZERO, end=ZERO)
        """What was given, as the source had it."""
        self._raised: TailraceError | None = None
        """What the last poll has failed at."""
        self._held: tuple[BatchKind, AnyWindow] | None = None
        """What is handed out next: the schema history, or the transform, has failed at it, or the first rows of it
        are acknowledged."""
        self._transform = transform
        self._given_at = self._polled_at = self._last_commit = time.monotonic()
        self._part_rows = 0
        """Acknowledged, of a transaction of which the rest is to come."""
        self._rest_rows = 0
        """Handed out, and not among the first rows that were acknowledged: they are handed out again."""
        self._begins_again = False
        """Whether a transaction that was handed out in part is to come again: no chunk takes its numbers."""
        self._cut_off = False
        """Whether a call was left in its middle: what is in memory may be half of a step."""
        self._was_paused = False
        self._more_told = False
        """Whether the sink's last flush was told that more is waiting. If nothing comes, it is flushed once more."""
        self.state = State.IDLE
        self.progress = Progress()
        self.control = Control(
            self._status,
            snapshots=isinstance(source, Scannable) and not self._raw,
            under_way=lambda: self._snapshots.id,
        )

    # The place.

    @property
    def position(self) -> P:
        """Everything up to here was acknowledged, and is durable."""
        return cast("P", self._here.position)  # it is of the source's kind: `begin` and `Intake` refuse another

    @property
    def rows_committed(self) -> int:
        """How many rows were acknowledged, by this runtime and those before it under the same key."""
        return self._here.rows

    @property
    def caught_up(self) -> bool:
        """Whether everything up to the target was acknowledged."""
        if self._target is None:
            return False
        place = self._place if not self._raw else self._keeper.load()
        return place is not None and covers(place.position, self._target)

    @property
    def _here(self) -> ResumePoint:
        if self._place is None:
            raise RuntimeRefused("it was not started", hint="Call `start()` first.")
        return self._place

    @property
    def _next_seq(self) -> int:
        """`_seq` of the next row that is handed out."""
        return self._here.next_seq + self._part_rows

    # Starting and stopping.

    def start(self) -> None:
        """Find the place, get the source ready, take up a snapshot that was under way. If it fails, call it again."""
        if self.state in (State.RUNNING, State.STOPPING):
            raise RuntimeRefused(f"it is {self.state.value}", hint="Wait until it is stopped.")
        try:
            self._rules.require_ready()
            place, resumed = prepare_start(
                self._source, self._keeper, self._history, self._snapshots, self._snapshot_tables, self._incremental
            )
        except BaseException as error:
            self._snapshots.close()
            self.state = State.IDLE
            if isinstance(error, Exception):
                self._tell(facts.StartFailed(error=to_tailrace_error(error)))
            raise
        self._place, self._given, self._part_rows, self._rest_rows = place, None, 0, 0
        self._begins_again = self._more_told = self._cut_off = False
        self._buffer.reset(place.position)
        self._intake.outage = self._raised = None
        self._given_at = self._polled_at = self._last_commit = time.monotonic()
        self.state = State.RUNNING
        self._tell(
            facts.Started(
                position=place.position, rows=place.rows, resumed=resumed, snapshot=place.snapshot_job is not None
            )
        )

    def stop(self) -> None:
        """Stop, unless something is not acknowledged."""
        self._require_running()
        handed = self._handed_out
        injected = self._injected.rows
        if handed or injected or self._part_rows:
            raise Unacknowledged(
                "something is not acknowledged",
                handed_out=handed,
                injected=injected,
                in_part=self._part_rows,
                hint="Acknowledge the batch, or call `drain_and_stop()` or `force_stop()`, which give back what is "
                "not delivered.",
            )
        self._snapshots.finish(self._here, self._save)
        self._let_go()

    def force_stop(self) -> Drained:
        """Stop now; what is not acknowledged."""
        self._require_running()
        if self._held is not None:
            self._buffer.put_back(self._held[1])
        if self._cut_off:
            self._injected.put_back()
        whole, parts = self._buffer.drain(self._next_seq + (self._given.rows if self._given is not None else 0))
        drained = Drained(in_flight=self._given, buffered=whole, pending=parts, injected=self._injected.drain())
        # What was injected comes nowhere else: whoever stops gets it, whatever fails meanwhile.
        self._attempt(lambda: self._snapshots.finish(self._here, self._save))
        self._attempt(self._let_go)
        return drained

    def drain_and_stop(self) -> Drained:
        """Acknowledge the batch that is under way, then stop; what else is not acknowledged."""
        self._require_running()
        self._take_up_again()
        if self._given is not None:
            self.commit(self._given.ack)
        return self.force_stop()

    def _let_go(self) -> None:
        self.state = State.STOPPING
        left = self._handed_out
        if self._cut_off:
            self._injected.put_back()
        try:
            try:
                self._snapshots.close()
            finally:
                self._intake.close()
        finally:
            self.progress.rows -= self._part_rows  # they come again
            self._given, self._held, self._part_rows, self._rest_rows = None, None, 0, 0
            self.state = State.STOPPED
        self._rules.report_unmatched()
        place, injected = self._here, self._injected.rows
        if injected:
            log.warning(INJECTED_LEFT, extra={"rows": injected})
        self._tell(facts.Stopped(position=place.position, rows=place.rows, unacknowledged=left, injected=injected))

    def _attempt(self, step: Callable[[], None]) -> None:
        """Where something else matters more than that it fails: that is told."""
        try:
            step()
        except Exception as error:  # a boundary: what is under way goes on
            self._tell(facts.Failed(error=to_tailrace_error(error)))

    def _take_up_again(self) -> None:
        """Go on after a call that was left in its middle. What is on record counts; all else comes again, as after a
        crash, and is acknowledged by another token."""
        if not self._cut_off:
            return
        self._injected.put_back()
        self._intake.close()
        self.progress.rows -= self._part_rows
        self._given, self._held, self._part_rows, self._rest_rows, self._begins_again = None, None, 0, 0, False
        found = self._keeper.load()
        if found is not None:
            here = self._here
            self._place = replace(here, position=found.position) if self._raw else replace(found, source=here.source)
        self._buffer.reset(self.position)
        place = self._snapshots.recover_from_interrupt(self._here)
        if place != self._place:
            self._save(place, moved=False)
        self._cut_off = False

    @property
    def _handed_out(self) -> int:
        """How many rows were, and are not acknowledged."""
        given = self._given
        return max(given.rows if given else 0, self._rest_rows)

    def _require_running(self) -> None:
        if self.state is not State.RUNNING:
            raise RuntimeRefused(f"it is {self.state.value}, not running", hint="Call `start()` first.")

    # Handing out.

    def poll(self, wait_seconds: float | None = None) -> Batch:
        """The next batch, or the same one while it is not acknowledged; an empty one if nothing came in time."""
        self._require_running()
        wait = READ_SECONDS if wait_seconds is None else require_seconds("wait_seconds", wait_seconds)
        self._polled_at = time.monotonic()
        try:
            self._take_up_again()
            if self._given is not None:
                return self._given
            self._injected.confirm_taken()
            batch = self._looked_for(wait)
        except Exception as error:  # whatever it is, and whoever's: nothing is handed out
            self._raised = to_tailrace_error(error)
            if isinstance(error, (TransformFailed, RuleInvalid)):
                said = {name: str(error.fields.get(name, "")) for name in ("rule", "table")}
                self._tell(facts.RuleHalted(**said, error=error))
            self._tell(facts.PollFailed(error=self._raised))
            raise
        if not self._was_paused:
            self._raised = None
        self._cut_off = False
        return batch

    def _looked_for(self, wait: float) -> Batch:
        """The next batch, with a note that it is on its way until the caller has it."""
        self._cut_off = True
        try:
            return self._next_batch(wait)
        except Exception as error:
            # What is ours is raised between steps, and rows that the caller's own code has failed at are held.
            self._cut_off = not isinstance(error, TailraceError) and self._held is None
            raise

    def _next_batch(self, wait: float) -> Batch:
        if self._is_paused(wait):
            return empty_batch(self.position)
        if self._held is not None:
            return self._give(*self._held)
        if injected := self._injected.next():
            return self._injection(injected)
        if (scanned := self._next_scanned(wait)) is not None:
            return self._give(BatchKind.SNAPSHOT, scanned)
        if self._snapshots.blocks_stream:
            time.sleep(min(wait, SCAN_SECONDS))
            return empty_batch(self.position)
        window = self._next_window(wait)
        if window is None:
            return empty_batch(self.position)
        self._snapshots.note_delivered(window)
        return self._give(BatchKind.STREAM, window)

    def _is_paused(self, wait_seconds: float) -> bool:
        self._note_pause()
        if self._was_paused:
            self.control.wait(wait_seconds)
            self._note_pause()
        return self._was_paused

    def _note_pause(self) -> None:
        was, self._was_paused = self._was_paused, self.control.paused
        if was != self._was_paused:
            self._tell(facts.Paused() if self._was_paused else facts.Resumed())

    def _injection(self, batches: tuple[ChangeBatch, ...]) -> Batch:
        window = Window(start=self.position, end=self.position, batches=batches, rows=sum(map(len, batches)))
        try:
            batch = Batch(kind=BatchKind.INJECTED, window=transform_window(window, self._transform))
        except BaseException:
            self._injected.put_back()
            raise
        self._tell(facts.Delivered(kind=batch.kind.value, rows=batch.rows, end=batch.end))
        return batch

    def _give(self, kind: BatchKind, window: AnyWindow) -> Batch:
        if not self._raw and window.batches:
            window = number_from(window, self._next_seq)
        self._held = kind, window  # and it stays so if the history or the transform fails: nothing passes it
        self._shapes.record_schemas(window)
        shown = transform_window(window, self._transform)
        self._held, self._taken = None, window
        self._number += 1
        self._given = Batch(kind=kind, window=shown, ack=Ack(self._id, self._number))
        self._given_at = time.monotonic()
        if self._tell:
            self._tell(facts.Delivered(kind=kind.value, rows=window.rows, end=window.end))
        return self._given

    def _next_scanned(self, wait_seconds: float) -> AnyWindow | None:
        """Rows that a snapshot reads. One that breaks before the stream is taken up again like a stream; one beside it
        waits by itself."""
        if self._part_rows or self._rest_rows or self._begins_again:
            return None  # whatever came now would have the numbers of what was handed out and comes again
        if not self._intake.wait_for_retry(wait_seconds):
            return None
        try:
            self._settle_snapshots()
            scanned = self._snapshots.next(self._here, self._limits, wait_seconds)
            if self._snapshots.is_over:
                self._settle_snapshots()  # whoever stops once nothing comes has it on record
        except (TransformFailed, RuleInvalid, SinkError, StateError) as error:  # not the source's: tried again
            self._intake.handle_error(error, keep=True)
            return None
        except TailraceError as error:
            self._snapshots.drop_reader()
            if not self._snapshots.is_incremental:
                self._intake.handle_error(error)
            elif not self._snapshots.should_retry(error):
                self._save(replace(self._here, snapshot_job=None), moved=False)
                self._snapshots.give_up(error)
            return None
        if scanned is not None:
            self._intake.note_source_answered()
        return scanned

    def _settle_snapshots(self) -> None:
        saved = self._snapshots.save_progress(self._here, self.control, self._save)
        if saved and not self._buffer and not self._buffer.has_open_transaction:
            self._buffer.reset(self.position)  # a snapshot that begins again moves it

    def _next_window(self, wait_seconds: float) -> AnyWindow | None:
        """What the next batch holds: what has come, and what comes while there is room and time."""
        until = time.monotonic() + (0.0 if self._buffer else wait_seconds)
        while not self._buffer.full:
            had = bool(self._buffer)
            try:
                if self._read(max(0.0, until - time.monotonic())) is None:
                    break
            except TailraceError:
                if not self._buffer:
                    raise
                break  # what came before it is handed out first; it is met again
            if self._buffer and not had:
                until = time.monotonic() + self._limits.seconds
            elif not self._buffer and time.monotonic() >= until:
                break  # a transaction is gathered that has not ended
        found = self._buffer.next(self._next_seq)
        if found is not None and not found.rows and not self._raw:
            try:
                self._settle(found)  # a transaction of which all rows were acknowledged has ended
            except BaseException:
                if self._part_rows:
                    self._buffer.put_back(found)
                raise
            return None
        return found

    def _read(self, wait_seconds: float) -> AnyWindow | None:
        """Take one window from the source into the buffer; None if there was none with anything in it."""
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

    # Acknowledging.

    def commit(self, ack: Ack | None, rows: int | None = None) -> None:
        """Acknowledge a batch, or its first rows: the rest is handed out next. What was given must be durable.

        None, the token of a batch that carries no position, needs no acknowledgement, and gets none.
        """
        self._require_running()
        if ack is None:
            return
        self._take_up_again()
        given = self._given
        if given is None or ack != given.ack:
            raise ack_error(ack, self._id)
        count = given.rows if rows is None else require_integer("rows", rows, least=0)
        if count > given.rows or (self._raw and count != given.rows):
            raise ConfigError(
                "so many rows of the batch cannot be accepted",
                rows=count,
                batch=given.rows,
                hint="All of them, or, where no log keeps the place, fewer.",
            )
        if not count and given.rows:
            return
        before = given, self._place, self._part_rows
        self._cut_off = True
        try:
            if given.kind is BatchKind.SNAPSHOT:
                self._settle_scanned(count)
            else:
                self._settle_first(self._taken, count)
        except Exception as error:
            undone = before == (self._given, self._place, self._part_rows)
            self._cut_off = not (undone or isinstance(error, TailraceError))
            raise
        self._cut_off = False

    def _settle_scanned(self, rows: int) -> None:
        self._save(self._snapshots.resume_point_after(self._here, rows))
        failpoints.hit("runtime.scan_saved")
        self.progress.rows += rows
        rest = self._snapshots.acknowledge(rows)
        self._held = None if rest is None else (BatchKind.SNAPSHOT, rest)
        self._rest_rows = 0 if rest is None else rest.rows
        self._given = None
        if self._tell:
            self._tell(facts.Committed(position=self.position, rows=self._here.rows))
        self._snapshots.end_if_acknowledged()

    def _settle_first(self, window: AnyWindow, rows: int) -> None:
        """Acknowledge the first rows of a window: whole transactions move the position, a part of one does not."""
        if rows >= window.rows:
            self._settle(window)
            return
        taken, rest = split_accepted(window, rows)
        try:
            self._buffer.put_back(rest)  # before the source is told: a stream that breaks there goes on behind it
            for part in taken:
                self._record(part)
        except BaseException:
            if self._given is not None:
                self._buffer.undo_put_back(rest)  # nothing was acknowledged
            raise
        self._rest_rows = max(self._rest_rows, rest.rows)
        failpoints.hit("runtime.prefix_saved")
        if not taken[0].open:
            self._release(taken[0].end)

    def _settle(self, window: AnyWindow) -> None:
        """What the sink has, on record; then the source may forget it."""
        self._record(window)
        if not window.open:
            self._release(window.end)

    def _record(self, window: AnyWindow) -> None:
        """Make it durable that the sink has it. A part of a transaction moves no position: it is only counted."""
        if window.open:
            self._part_rows += window.rows
        else:
            place = self._here
            self._save(
                replace(
                    place,
                    position=window.end,
                    rows=place.rows + self._part_rows + window.rows,
                    transactions=place.transactions + window.transactions,
                    transaction=place.transaction if self._raw else last_transaction(window, place.transaction),
                )
            )
            self._part_rows = 0
            self._begins_again &= window.is_empty
            self._last_commit = time.monotonic()
        self._count(window)

    def _release(self, position: Position) -> None:
        failpoints.hit("capture.before_confirm")
        self._intake.confirm(position)  # only now may the server drop its log
        failpoints.hit("capture.after_confirm")
        if self._tell:
            self._tell(facts.Committed(position=position, rows=self._here.rows))

    def _save(self, place: ResumePoint, *, moved: bool = True) -> None:
        self._keeper.save(place)
        self._place = place
        self._intake.note_written(moved=moved)

    def _count(self, window: AnyWindow) -> None:
        self._given = None
        self._rest_rows = max(0, self._rest_rows - window.rows)
        self.progress.transactions += window.transactions
        self.progress.rows += window.rows
        self.progress.windows += 1
        if not self._intake.outage:
            self.progress.last_error = None

    # What happens to the stream.

    def _on_opened(self, stream: Stream, after: Position) -> None:
        self._shapes.restart()
        place = self._here
        if place.source is not None and isinstance(stream, HasTimeline):
            self._place = replace(place, source=replace(place.source, timeline=stream.timeline))
        self._tell(facts.StreamOpened(after=after))

    def _on_dropped(self) -> None:
        """The stream is closed: what had not come whole comes again."""
        if self._buffer.handle_stream_loss(self.position):
            self._begins_again |= bool(self._part_rows or self._rest_rows)
            self.progress.rows -= self._part_rows
            self._part_rows = self._rest_rows = 0

    def _on_lost(self, error: TailraceError, wait_seconds: float) -> None:
        self.progress.last_error, self.progress.reconnects = error, self._intake.reconnects
        self._tell(facts.Lost(code=error.code, reason=error.message, wait_seconds=wait_seconds))

    # The whole loop, for those who bring a sink.

    def run(
        self, sink: Sink, stop: threading.Event | Callable[[], bool], *, on_rejected: OnRejected | None = None
    ) -> None:
        """Poll, write, flush, commit, until told to stop; a source that is lost, and a sink that takes nothing for a
        while, are waited out. Rows that the sink does not take go to `on_rejected`, or end it."""
        require_sink("sink", sink)
        stopping = stop.is_set if isinstance(stop, threading.Event) else stop
        require_callable("stop", stopping, "Give a `threading.Event`, or a function that says whether to stop.")
        if on_rejected is not None:
            require_callable("on_rejected", on_rejected, "Give a function of the rows: `on_rejected=function`.")
        keeps: object = self._keeper
        if self._raw and sink is not keeps:
            raise ConfigError(
                "the log keeps the place of another sink", hint="Give the runtime and `run` the same `LogSink`."
            )
        if self.state is not State.RUNNING:
            self.start()
        try:
            while not stopping():
                self._turn(sink, on_rejected)
        except BaseException as error:
            self._attempt(self._let_go)
            if isinstance(error, Exception):
                self._tell(facts.Failed(error=to_tailrace_error(error)))
            raise
        self._snapshots.finish(self._here, self._save)
        self._let_go()

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
            elif resting := self._more_told and self._is_last:
                self._flush(sink)
        except BaseException as error:
            if batch is not None and batch.kind is BatchKind.INJECTED:
                self._injected.put_back()
            if not isinstance(error, TailraceError):
                raise
            waits = self._given is not None or self._held is not None
            keep = waits or resting or bool(self._injected)  # it is not the stream that has failed
            if waits and self._raw:  # of a transaction that came in parts the log may have some: it begins again
                self._given, self._held, keep = None, None, False
            self._intake.handle_error(error, keep=keep)

    def _deliver(self, batch: Batch, sink: Sink, on_rejected: OnRejected | None) -> None:
        rejected = require_rejected(sink.write(batch))
        failpoints.hit("runtime.sink_written")
        if rejected:
            tables = tuple(dict.fromkeys(row.table for row in rejected))
            self._tell(facts.RowsRejected(rows=len(rejected), tables=tables, reason=rejected[0].reason))
            if on_rejected is None:
                raise SinkRejected(
                    "the sink does not take some of the rows",
                    rows=len(rejected),
                    reason=rejected[0].reason,
                    hint="Mend the sink, or give `run` an `on_rejected` that sets them aside.",
                )
            on_rejected(rejected)
        self._flush(sink)
        failpoints.hit("runtime.sink_flushed")
        self.commit(batch.ack)

    def _flush(self, sink: Sink) -> None:
        last = self._is_last
        sink.flush(last)
        self._more_told = not last

    @property
    def _is_last(self) -> bool:
        """Whether nothing more is known to be there."""
        return not self._buffer and not self._intake.has_read_ahead and not self._snapshots.under_way

    # From outside.

    def enqueue(self, changes: ChangeBatch | Event) -> None:
        """Inject changes of one's own: the next poll hands them out. They carry no position and are not kept."""
        self._require_running()
        self._injected.add(changes)

    def health(self) -> Health:
        """How it is, and what to do about it."""
        now = time.monotonic()
        given = self._given
        return assess_health(
            state=None if self.state is State.RUNNING else self.state.value,
            paused=self.control.paused,
            error=self._trouble,
            unacknowledged=given.rows if given else None,
            given_seconds=now - self._given_at,
            polled_seconds=now - self._polled_at,
            quiet_seconds=now - self._last_commit,
            reading=self._snapshots.under_way,
            limit_seconds=self._stalled_seconds,
        )

    @property
    def _trouble(self) -> TailraceError | None:
        outage = self._intake.outage
        if outage is None and self._raised is None:
            outage = self._snapshots.outage
        return outage.error if outage is not None else self._raised

    def _status(self) -> Status:
        place = self._place
        return Status(
            state=self.state.value,
            paused=self.control.paused,
            position=str(place.position) if place else None,
            rows=place.rows if place else 0,
            transactions=place.transactions if place else 0,
            unacknowledged=self._handed_out + self._part_rows,
            buffered=self._buffer.rows,
            injected=self._injected.rows,
            reconnects=self._intake.reconnects,
            snapshot=self._snapshots.summary,
            health=self.health(),
        )
