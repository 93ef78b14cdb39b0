"""Batches that a runtime hands out, and how windows become batches of a bounded size.

Everything is columnar: a window is cut by slicing its columns, never row by row. It is cut at the end of a transaction.
A single transaction is cut only if it is larger than a batch and the caller takes it in parts. The part is then an open
window, like one of a source that cannot hold a whole transaction, and moves no position. The two rows of a key move are
never separated: `Event.row_write` needs both.
"""

from __future__ import annotations

import enum
import heapq
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.errors import AckRefused
from tailrace.model import change
from tailrace.model.batch import AnyWindow, ChangeBatch, Window
from tailrace.model.change import Operation
from tailrace.model.event import Event
from tailrace.model.position_kinds import Position, parse_position, position_type_of
from tailrace.model.schema import TableId, TableSchema
from tailrace.model.system_streams import is_system
from tailrace.runtime.observers import ObserverList, SchemaSeen
from tailrace.state.recorded_stream import SchemaRecorder
from tailrace.state.schema_history import SchemaHistory
from tailrace.validation import require_instance, require_integer, require_seconds


class Transactions(enum.Enum):
    """Ways to hand out a transaction that is larger than a batch."""

    WHOLE = "whole"
    """In one batch, larger than the limits."""
    SPLIT = "split"
    """In parts."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The size of a batch, and how long to wait for rows."""

    rows: int = 65_536
    bytes: int = 64 << 20
    """Approximate size in memory."""
    seconds: float = 0.0
    """Time that rows wait for more rows. At 0 a batch still joins what has arrived meanwhile."""
    transactions: Transactions = Transactions.WHOLE
    transaction_bytes: int = 1 << 30
    """The largest transaction that is gathered to be handed out whole."""

    def __post_init__(self) -> None:
        for what in ("rows", "bytes", "transaction_bytes"):
            require_integer(what, getattr(self, what), least=1)
        require_seconds("seconds", self.seconds)
        require_instance(
            "transactions", self.transactions, Transactions, "Pass `Transactions.WHOLE` or `Transactions.SPLIT`."
        )


@dataclass(frozen=True, eq=False)
class Ack:
    """The token that acknowledges a batch, once, to the runtime that handed it out."""

    runtime: uuid.UUID
    number: int


def ack_error(ack: object, runtime: uuid.UUID) -> AckRefused:
    """Return the error that says why a token is refused."""
    if not isinstance(ack, Ack):
        why = "value is not an ack token"
    elif ack.runtime != runtime:
        why = "ack token belongs to another runtime"
    else:
        why = "ack token was used, or its batch is not the current one"
    return AckRefused(why, hint="Acknowledge each batch once, with its own `ack`, before the next `poll()`.")


class BatchKind(enum.Enum):
    """The origin of a batch."""

    STREAM = "stream"
    SNAPSHOT = "snapshot"
    INJECTED = "injected"
    """Rows of `enqueue`: they have no position, so they need no acknowledgement."""
    EMPTY = "empty"
    """No rows arrived in time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Whole transactions in order, a part of one, rows of a snapshot, or nothing.

    `window` has the positions it lies between. `batches` are the rows, each of one table with one schema.
    """

    kind: BatchKind
    window: AnyWindow
    ack: Ack | None = field(default=None, repr=False)
    """The token for `commit`; None if there is nothing to acknowledge."""

    @property
    def batches(self) -> tuple[ChangeBatch, ...]:
        return self.window.batches

    @property
    def rows(self) -> int:
        return self.window.rows

    @property
    def transactions(self) -> int:
        """Number of transactions that end in the batch."""
        return self.window.transactions

    @property
    def partial(self) -> bool:
        """True if its transaction continues in the next batch. Acknowledging it moves no position."""
        return self.window.open

    @property
    def restarts(self) -> bool:
        """True if it begins a transaction. Parts handed out before without an end are repeated."""
        return not self.window.continues

    @property
    def end(self) -> Position:
        """The position after the batch."""
        return self.window.end

    def __len__(self) -> int:
        return self.rows

    def with_rows(self, batches: Sequence[ChangeBatch]) -> Batch:
        """Return the batch with only these change batches."""
        window = replace(self.window, batches=tuple(batches), rows=sum(map(len, batches)))
        return replace(self, window=window)

    def events(self) -> Iterator[Event]:
        """Yield the rows one by one, in order."""
        if len(self.batches) == 1:
            return self.batches[0].events()
        return heapq.merge(*(batch.events() for batch in self.batches), key=lambda event: event.seq)


def empty_batch(at: Position) -> Batch:
    """Return a batch without rows."""
    return Batch(kind=BatchKind.EMPTY, window=Window(start=at, end=at))


def window_bytes(window: AnyWindow) -> int:
    return sum(batch.data.nbytes for batch in window.batches)


def number_from(window: AnyWindow, first: int) -> AnyWindow:
    """Return the window with `_seq` counted from `first`."""
    by = first - first_seq(window) if window.batches else 0
    if not by:
        return window
    moved = []
    for batch in window.batches:
        index = batch.data.schema.get_field_index(change.SEQ)
        moved_seqs = _seqs(batch) + by
        # Not `compute.add`: without pandas it looks for pandas at every call.
        seqs = pa.Array.from_buffers(pa.int64(), len(batch), [None, pa.py_buffer(moved_seqs)])
        data = batch.data.set_column(index, batch.data.schema.field(index), seqs)
        ends = (batch.ends[0] + by, batch.ends[1] + by) if batch.ends else None
        moved.append(replace(batch, data=data, ends=ends))
    return replace(window, batches=tuple(moved))


def number_in_sequence(windows: Sequence[AnyWindow], first: int) -> list[AnyWindow]:
    """Return the windows with `_seq` counted from `first` through all of them."""
    numbered = []
    for window in windows:
        numbered.append(number_from(window, first))
        first += window.rows
    return numbered


def join_windows(windows: Sequence[AnyWindow]) -> AnyWindow:
    """Return consecutive windows, also consecutive in number, as one window.

    Only the first may continue a transaction, and none is open.
    """
    if len(windows) == 1:
        return windows[0]
    first, last = windows[0], windows[-1]
    committed = [window.last_committed_at for window in windows if window.last_committed_at is not None]
    return replace(
        first,
        end=last.end,
        batches=tuple(batch for window in windows for batch in window.batches),
        transactions=sum(window.transactions for window in windows),
        rows=sum(window.rows for window in windows),
        last_committed_at=max(committed, default=None),
    )


def join_parts(parts: Sequence[AnyWindow], last: AnyWindow) -> AnyWindow:
    """Return a transaction's parts and its last window as one window that continues nothing."""
    if not parts:
        return last
    assert last.continued_end is not None, "a window that ends a transaction has its end"
    position = str(last.continued_end)
    *parts, last = number_in_sequence([*parts, last], 0)
    batches = [_with_position(batch, position) for part in parts for batch in part.batches]
    return replace(
        last,
        continues=False,
        continued_end=None,
        batches=(*batches, *last.batches),
        rows=last.rows + sum(part.rows for part in parts),
    )


def split_off_transaction_end(window: AnyWindow) -> tuple[AnyWindow, ...]:
    """Split off the end of a transaction if none of its rows are left.

    The first window of two then only reports that the transaction has ended.
    """
    ended = window.continued_end
    if ended is None or not window.rows or _position_of(window, first_seq(window)) == ended:
        return (window,)
    rest = replace(window, start=ended, transactions=window.transactions - 1, continues=False, continued_end=None)
    return replace(window, end=ended, batches=(), rows=0, transactions=1, last_committed_at=None), rest


def _with_position(batch: ChangeBatch, position: str) -> ChangeBatch:
    """Return a part's rows with the position of their transaction's end."""
    names = [field.name for field in change.REQUIRED]
    at = names.index(change.POSITION)
    column = pa.repeat(pa.scalar(position, pa.string()), len(batch))
    return replace(batch, data=batch.data.add_column(at, change.REQUIRED[at], column))


def split_to_limits(window: AnyWindow, limits: Limits, size: int) -> tuple[AnyWindow, AnyWindow | None]:
    """Split a window of `size` bytes into what a batch holds and the rest."""
    room = max(1, min(limits.rows, limits.bytes * window.rows // max(size, 1)))
    if window.rows <= room:
        return window, None
    if window.open:
        return split_at_row(window, _keep_moves_together(window, room))
    ends = _transaction_ends(window)
    fitting = int(np.searchsorted(ends, room, side="right"))
    if fitting:
        return split_at_row(window, int(ends[fitting - 1]))
    if limits.transactions is Transactions.SPLIT:
        return split_at_row(window, _keep_moves_together(window, room))
    return split_at_row(window, int(ends[0]))


def _keep_moves_together(window: AnyWindow, rows: int) -> int:
    """Return `rows`, or one more or less, to keep a key move's rows together."""
    seq = first_seq(window) + rows
    for batch in window.batches:
        at = int(np.searchsorted(_seqs(batch), seq)) if batch.moves else len(batch)
        if at < len(batch) and _seqs(batch)[at] == seq and batch.data.column(change.MOVED_FROM)[at].is_valid:
            return rows - 1 if rows > 1 else rows + 1
    return rows


def split_at_row(window: AnyWindow, rows: int) -> tuple[AnyWindow, AnyWindow | None]:
    """Split a window after so many rows.

    The first part has whole transactions, or it is an open window with a part of the first one.
    """
    if rows >= window.rows:
        return window, None
    first = first_seq(window)
    head, tail = _rows_before(window.batches, first + rows), _rows_from(window.batches, first + rows)
    if window.open:
        return (
            replace(window, batches=head, rows=rows),
            replace(window, batches=tail, rows=window.rows - rows, continues=True),
        )
    ends = _transaction_ends(window)
    done = int(np.searchsorted(ends, rows, side="right"))
    if done and ends[done - 1] == rows:
        position = _position_of(window, first + rows - 1)
        first_part = replace(
            window,
            end=position,
            batches=head,
            rows=rows,
            transactions=done,
            last_committed_at=_newest_commit_time(head),
        )
        rest = replace(
            window,
            start=position,
            batches=tail,
            rows=window.rows - rows,
            last_committed_at=_newest_commit_time(tail),
            transactions=max(window.transactions - done, 1),
            continues=False,
            continued_end=None,
        )
        return first_part, rest
    assert not done, "whole transactions are cut off first"
    ended = _position_of(window, first + int(ends[0]) - 1)
    first_part = replace(
        window,
        end=window.start,
        batches=tuple(map(_without_position, head)),
        rows=rows,
        transactions=0,
        open=True,
        last_committed_at=None,
        continued_end=None,
    )
    rest = replace(window, batches=tail, rows=window.rows - rows, continues=True, continued_end=ended)
    return first_part, rest


def slice_window(window: AnyWindow, begin: int, end: int) -> AnyWindow:
    """Return some rows of a window that belongs to no transaction."""
    if not begin and end >= window.rows:
        return window
    first = first_seq(window)
    batches = _rows_before(_rows_from(window.batches, first + begin), first + end)
    return replace(window, batches=batches, rows=end - begin)


def split_accepted(window: AnyWindow, rows: int) -> tuple[list[AnyWindow], AnyWindow]:
    """Split off the accepted rows, fewer than all; return them and the rest.

    The accepted ones are whole transactions, then a part of one.
    """
    ends = _transaction_ends(window) if not window.open else np.empty(0, np.int64)
    done = int(np.searchsorted(ends, rows, side="right"))
    whole = int(ends[done - 1]) if done else 0
    parts: list[AnyWindow] = []
    rest: AnyWindow | None = window
    for count in (whole, rows - whole):
        if count and rest is not None:
            part, rest = split_at_row(rest, count)
            parts.append(part)
    assert rest is not None, "fewer rows than the window has"
    return parts, rest


def _without_position(batch: ChangeBatch) -> ChangeBatch:
    kept = [name for name in batch.data.schema.names if name != change.POSITION]
    return replace(batch, data=batch.data.select(kept))


def first_seq(window: AnyWindow) -> int:
    """Return `_seq` of the window's first row."""
    return min(int(_seqs(batch)[0]) for batch in window.batches)


def last_transaction(window: AnyWindow, otherwise: int | None) -> int | None:
    """Return the transaction of the window's last row, or `otherwise` if it has no rows."""
    last = max(window.batches, key=lambda batch: int(_seqs(batch)[-1]), default=None)
    return otherwise if last is None else int(last.data.column(change.TX)[-1].as_py())


def _seqs(batch: ChangeBatch) -> npt.NDArray[np.int64]:
    seqs: npt.NDArray[np.int64] = batch.data.column(change.SEQ).to_numpy()
    return seqs


def _transaction_ends(window: AnyWindow) -> npt.NDArray[np.int64]:
    """Return the row counts at which transactions end. A transaction's rows are adjacent."""
    first = first_seq(window)
    numbers = np.empty(window.rows, np.int64)
    indexes = np.empty(window.rows, np.int64)
    for batch in window.batches:
        rows = _seqs(batch) - first
        numbers[rows] = batch.data.column(change.TX).to_numpy()
        indexes[rows] = batch.data.column(change.TX_INDEX).to_numpy()
    # Two rows may have the same index, where a rule made them of one change. A smaller index is another transaction.
    begins = (numbers[1:] != numbers[:-1]) | (indexes[1:] < indexes[:-1])
    return np.append(np.flatnonzero(begins) + 1, window.rows)


def _position_of(window: AnyWindow, seq: int) -> Position:
    """Return the position where a row's transaction ended."""
    for batch in window.batches:
        seqs = _seqs(batch)
        at = int(np.searchsorted(seqs, seq))
        if at < len(seqs) and seqs[at] == seq:
            return parse_position(position_type_of(window.end), batch.data.column(change.POSITION)[at].as_py())
    raise AssertionError("rows are numbered without a gap")


def _newest_commit_time(batches: Sequence[ChangeBatch]) -> int:
    """Return the latest commit time of these rows, in microseconds."""
    return max(int(pc.max(batch.data.column(change.COMMITTED_AT)).value) for batch in batches)


def _rows_before(batches: Sequence[ChangeBatch], seq: int) -> tuple[ChangeBatch, ...]:
    sliced = (slice_batch(batch, 0, int(np.searchsorted(_seqs(batch), seq))) for batch in batches)
    return tuple(batch for batch in sliced if len(batch))


def _rows_from(batches: Sequence[ChangeBatch], seq: int) -> tuple[ChangeBatch, ...]:
    sliced = (slice_batch(batch, int(np.searchsorted(_seqs(batch), seq)), len(batch)) for batch in batches)
    return tuple(batch for batch in sliced if len(batch))


def slice_batch(batch: ChangeBatch, begin: int, end: int) -> ChangeBatch:
    """Return some of the rows, with the batch's counts adjusted.

    A count of zero stays zero, so only the others are computed.
    """
    if end - begin == len(batch):
        return batch
    data = batch.data.slice(begin, max(end - begin, 0))
    return replace(
        batch,
        data=data,
        ends=None,
        moves=len(data) - data.column(change.MOVED_FROM).null_count if batch.moves else 0,
        truncates=_count(data, Operation.TRUNCATE) if batch.truncates else 0,
        unfit=int(pc.sum(pc.list_value_length(data.column(change.UNFIT))).as_py() or 0) if batch.unfit else 0,
    )


def _count(data: pa.RecordBatch, operation: Operation) -> int:
    return int(pc.sum(pc.equal(data.column(change.OP), operation.value)).as_py() or 0)


class WindowSchemaRecorder:
    """Records the schemas of windows in the history and reports new ones to observers.

    Each schema is in the history before its first row is delivered.
    """

    def __init__(self, history: SchemaHistory | None, observers: ObserverList) -> None:
        self._history, self._notify = history, observers
        self._recorder = SchemaRecorder(history) if history is not None else None
        self._seen: dict[TableId, TableSchema] = {}

    def restart(self) -> None:
        """Begin again after a new stream: it repeats rows, and so their older schemas."""
        if self._history is not None:
            self._recorder = SchemaRecorder(self._history)

    def record_schemas(self, window: AnyWindow) -> None:
        """Record the window's schemas. Call it before the window is handed to anyone."""
        if self._recorder is not None:
            self._recorder.record_window(window)
        if not self._notify:
            return
        for batch in window.batches:
            schema = batch.schema
            known = self._seen.get(schema.table)
            if known is not schema:
                self._seen[schema.table] = schema
                if known != schema and not is_system(schema):
                    self._notify(SchemaSeen(table=schema.table, columns=len(schema.columns)))
