"""What a runtime hands out, and how windows become batches of a bounded size.

Columnar throughout: a window is cut by slicing its columns, and nothing is looked at row by row. A window is cut at the
end of a transaction. Only where a single one is larger than a batch, and the caller takes it in parts, is one cut
inside: then the part is an open window, as a source gives one that is too large to hold, and moves no position. Never
between the two rows of a key that changed: `Event.row_write` looks from the first to the second.
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
    """What becomes of a transaction that is larger than a batch."""

    WHOLE = "whole"
    """Its batch is larger than the limits say."""
    SPLIT = "split"
    """It comes in parts."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How large a batch becomes, and how long one is waited for."""

    rows: int = 65_536
    bytes: int = 64 << 20
    """In memory, about."""
    seconds: float = 0.0
    """How long rows wait for more of them; 0: not at all, which still joins what has come meanwhile."""
    transactions: Transactions = Transactions.WHOLE
    transaction_bytes: int = 1 << 30
    """The largest transaction that is gathered to be handed out whole."""

    def __post_init__(self) -> None:
        for what in ("rows", "bytes", "transaction_bytes"):
            require_integer(what, getattr(self, what), least=1)
        require_seconds("seconds", self.seconds)
        require_instance(
            "transactions", self.transactions, Transactions, "Give `Transactions.WHOLE` or `Transactions.SPLIT`."
        )


@dataclass(frozen=True, eq=False)
class Ack:
    """The token that a batch is acknowledged with: once, and only to whom gave it out."""

    runtime: uuid.UUID
    number: int


def ack_error(ack: object, runtime: uuid.UUID) -> AckRefused:
    """Why a token does not count."""
    if not isinstance(ack, Ack):
        why = "that is no token"
    elif ack.runtime != runtime:
        why = "the token is of another runtime"
    else:
        why = "the token was used, or its batch is not the one under way"
    return AckRefused(why, hint="Acknowledge each batch once, with its own `ack`, before the next `poll()`.")


class BatchKind(enum.Enum):
    """Where a batch comes from."""

    STREAM = "stream"
    SNAPSHOT = "snapshot"
    INJECTED = "injected"
    """By `enqueue`: it carries no position, so it needs no acknowledgement."""
    EMPTY = "empty"
    """Nothing came in time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Whole transactions, in order, or a part of one; or rows that a snapshot read; or nothing.

    `window` says which positions it lies between, and `batches` are the rows, each of one table in one shape.
    """

    kind: BatchKind
    window: AnyWindow
    ack: Ack | None = field(default=None, repr=False)
    """None where there is nothing to acknowledge."""

    @property
    def batches(self) -> tuple[ChangeBatch, ...]:
        return self.window.batches

    @property
    def rows(self) -> int:
        return self.window.rows

    @property
    def transactions(self) -> int:
        """How many end in it."""
        return self.window.transactions

    @property
    def partial(self) -> bool:
        """Whether its rows belong to one transaction that goes on in the next batch. Acknowledging it moves nothing."""
        return self.window.open

    @property
    def restarts(self) -> bool:
        """Whether it begins a transaction. Parts of one that were handed out before, and not finished, come again."""
        return not self.window.continues

    @property
    def end(self) -> Position:
        """The position behind it."""
        return self.window.end

    def __len__(self) -> int:
        return self.rows

    def with_rows(self, batches: Sequence[ChangeBatch]) -> Batch:
        """The same batch with some of its tables only."""
        window = replace(self.window, batches=tuple(batches), rows=sum(map(len, batches)))
        return replace(self, window=window)

    def events(self) -> Iterator[Event]:
        """The rows one by one, in order."""
        if len(self.batches) == 1:
            return self.batches[0].events()
        return heapq.merge(*(batch.events() for batch in self.batches), key=lambda event: event.seq)


def empty_batch(at: Position) -> Batch:
    """Nothing came."""
    return Batch(kind=BatchKind.EMPTY, window=Window(start=at, end=at))


def window_bytes(window: AnyWindow) -> int:
    return sum(batch.data.nbytes for batch in window.batches)


def number_from(window: AnyWindow, first: int) -> AnyWindow:
    """The window with `_seq` counting from `first`."""
    by = first - first_seq(window) if window.batches else 0
    if not by:
        return window
    moved = []
    for batch in window.batches:
        place = batch.data.schema.get_field_index(change.SEQ)
        moved_seqs = _seqs(batch) + by
        # Not `compute.add`: without pandas it looks for pandas at every call.
        seqs = pa.Array.from_buffers(pa.int64(), len(batch), [None, pa.py_buffer(moved_seqs)])
        data = batch.data.set_column(place, batch.data.schema.field(place), seqs)
        ends = (batch.ends[0] + by, batch.ends[1] + by) if batch.ends else None
        moved.append(replace(batch, data=data, ends=ends))
    return replace(window, batches=tuple(moved))


def number_in_sequence(windows: Sequence[AnyWindow], first: int) -> list[AnyWindow]:
    """The windows with `_seq` counting from `first` through all of them."""
    found = []
    for window in windows:
        found.append(number_from(window, first))
        first += window.rows
    return found


def join_windows(windows: Sequence[AnyWindow]) -> AnyWindow:
    """Windows that follow each other, in their numbers too, as one; only the first may continue a transaction, and
    none is open."""
    if len(windows) == 1:
        return windows[0]
    first, last = windows[0], windows[-1]
    ended = [window.last_committed_at for window in windows if window.last_committed_at is not None]
    return replace(
        first,
        end=last.end,
        batches=tuple(batch for window in windows for batch in window.batches),
        transactions=sum(window.transactions for window in windows),
        rows=sum(window.rows for window in windows),
        last_committed_at=max(ended, default=None),
    )


def join_parts(parts: Sequence[AnyWindow], last: AnyWindow) -> AnyWindow:
    """A transaction that came in parts, with all that came with its end, as a window that continues nothing."""
    if not parts:
        return last
    assert last.continued_end is not None, "what finishes a transaction says where it ended"
    position = str(last.continued_end)
    *parts, last = number_in_sequence([*parts, last], 0)
    batches = [_placed(batch, position) for part in parts for batch in part.batches]
    return replace(
        last,
        continues=False,
        continued_end=None,
        batches=(*batches, *last.batches),
        rows=last.rows + sum(part.rows for part in parts),
    )


def split_off_transaction_end(window: AnyWindow) -> tuple[AnyWindow, ...]:
    """The window in two, where nothing of the transaction that it finishes is left but the news that it has ended."""
    ended = window.continued_end
    if ended is None or not window.rows or _position_of(window, first_seq(window)) == ended:
        return (window,)
    rest = replace(window, start=ended, transactions=window.transactions - 1, continues=False, continued_end=None)
    return replace(window, end=ended, batches=(), rows=0, transactions=1, last_committed_at=None), rest


def _placed(batch: ChangeBatch, position: str) -> ChangeBatch:
    """The rows of a part, now that it is known where their transaction ended."""
    names = [field.name for field in change.REQUIRED]
    at = names.index(change.POSITION)
    column = pa.repeat(pa.scalar(position, pa.string()), len(batch))
    return replace(batch, data=batch.data.add_column(at, change.REQUIRED[at], column))


def split_to_limits(window: AnyWindow, limits: Limits, size: int) -> tuple[AnyWindow, AnyWindow | None]:
    """As much of the window, which has so many bytes, as a batch holds, and the rest."""
    room = max(1, min(limits.rows, limits.bytes * window.rows // max(size, 1)))
    if window.rows <= room:
        return window, None
    if window.open:
        return split_at_row(window, _beside_moves(window, room))
    ends = _ends(window)
    fitting = int(np.searchsorted(ends, room, side="right"))
    if fitting:
        return split_at_row(window, int(ends[fitting - 1]))
    if limits.transactions is Transactions.SPLIT:
        return split_at_row(window, _beside_moves(window, room))
    return split_at_row(window, int(ends[0]))


def _beside_moves(window: AnyWindow, rows: int) -> int:
    """So many rows, or one less, or more: the delete of an old key stays with the row that was moved."""
    seq = first_seq(window) + rows
    for batch in window.batches:
        at = int(np.searchsorted(_seqs(batch), seq)) if batch.moves else len(batch)
        if at < len(batch) and _seqs(batch)[at] == seq and batch.data.column(change.MOVED_FROM)[at].is_valid:
            return rows - 1 if rows > 1 else rows + 1
    return rows


def split_at_row(window: AnyWindow, rows: int) -> tuple[AnyWindow, AnyWindow | None]:
    """The first rows of a window and the rest: whole transactions, or an open window with a part of the first one."""
    if rows >= window.rows:
        return window, None
    first = first_seq(window)
    head, tail = _before(window.batches, first + rows), _from(window.batches, first + rows)
    if window.open:
        return (
            replace(window, batches=head, rows=rows),
            replace(window, batches=tail, rows=window.rows - rows, continues=True),
        )
    ends = _ends(window)
    done = int(np.searchsorted(ends, rows, side="right"))
    if done and ends[done - 1] == rows:
        position = _position_of(window, first + rows - 1)
        begun = replace(
            window, end=position, batches=head, rows=rows, transactions=done, last_committed_at=_newest(head)
        )
        rest = replace(
            window,
            start=position,
            batches=tail,
            rows=window.rows - rows,
            last_committed_at=_newest(tail),
            transactions=max(window.transactions - done, 1),
            continues=False,
            continued_end=None,
        )
        return begun, rest
    assert not done, "whole transactions are cut off first"
    ended = _position_of(window, first + int(ends[0]) - 1)
    begun = replace(
        window,
        end=window.start,
        batches=tuple(map(_unplaced, head)),
        rows=rows,
        transactions=0,
        open=True,
        last_committed_at=None,
        continued_end=None,
    )
    rest = replace(window, batches=tail, rows=window.rows - rows, continues=True, continued_end=ended)
    return begun, rest


def slice_window(window: AnyWindow, begin: int, end: int) -> AnyWindow:
    """Some rows of a window that is of no transaction."""
    if not begin and end >= window.rows:
        return window
    first = first_seq(window)
    batches = _before(_from(window.batches, first + begin), first + end)
    return replace(window, batches=batches, rows=end - begin)


def split_accepted(window: AnyWindow, rows: int) -> tuple[list[AnyWindow], AnyWindow]:
    """The first rows of a window, fewer than all: whole transactions, then a part of one; and the rest."""
    ends = _ends(window) if not window.open else np.empty(0, np.int64)
    done = int(np.searchsorted(ends, rows, side="right"))
    whole = int(ends[done - 1]) if done else 0
    found: list[AnyWindow] = []
    rest: AnyWindow | None = window
    for count in (whole, rows - whole):
        if count and rest is not None:
            part, rest = split_at_row(rest, count)
            found.append(part)
    assert rest is not None, "fewer rows than the window has"
    return found, rest


def _unplaced(batch: ChangeBatch) -> ChangeBatch:
    kept = [name for name in batch.data.schema.names if name != change.POSITION]
    return replace(batch, data=batch.data.select(kept))


def first_seq(window: AnyWindow) -> int:
    """`_seq` of its first row."""
    return min(int(_seqs(batch)[0]) for batch in window.batches)


def last_transaction(window: AnyWindow, otherwise: int | None) -> int | None:
    """Of its last row, if it has rows."""
    last = max(window.batches, key=lambda batch: int(_seqs(batch)[-1]), default=None)
    return otherwise if last is None else int(last.data.column(change.TX)[-1].as_py())


def _seqs(batch: ChangeBatch) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = batch.data.column(change.SEQ).to_numpy()
    return found


def _ends(window: AnyWindow) -> npt.NDArray[np.int64]:
    """After how many rows each transaction of a window ends. Rows of one are neighbours."""
    first = first_seq(window)
    numbers = np.empty(window.rows, np.int64)
    indexes = np.empty(window.rows, np.int64)
    for batch in window.batches:
        rows = _seqs(batch) - first
        numbers[rows] = batch.data.column(change.TX).to_numpy()
        indexes[rows] = batch.data.column(change.TX_INDEX).to_numpy()
    # Two rows of one may have the same index, where a rule has made them of one change; going back, it is another one.
    begins = (numbers[1:] != numbers[:-1]) | (indexes[1:] < indexes[:-1])
    return np.append(np.flatnonzero(begins) + 1, window.rows)


def _position_of(window: AnyWindow, seq: int) -> Position:
    """Where a row's transaction ended."""
    for batch in window.batches:
        seqs = _seqs(batch)
        at = int(np.searchsorted(seqs, seq))
        if at < len(seqs) and seqs[at] == seq:
            return parse_position(position_type_of(window.end), batch.data.column(change.POSITION)[at].as_py())
    raise AssertionError("rows are numbered without a gap")


def _newest(batches: Sequence[ChangeBatch]) -> int:
    """When the newest of these rows was committed."""
    return max(int(pc.max(batch.data.column(change.COMMITTED_AT)).value) for batch in batches)


def _before(batches: Sequence[ChangeBatch], seq: int) -> tuple[ChangeBatch, ...]:
    sliced = (slice_batch(batch, 0, int(np.searchsorted(_seqs(batch), seq))) for batch in batches)
    return tuple(batch for batch in sliced if len(batch))


def _from(batches: Sequence[ChangeBatch], seq: int) -> tuple[ChangeBatch, ...]:
    sliced = (slice_batch(batch, int(np.searchsorted(_seqs(batch), seq)), len(batch)) for batch in batches)
    return tuple(batch for batch in sliced if len(batch))


def slice_batch(batch: ChangeBatch, begin: int, end: int) -> ChangeBatch:
    """Some of the rows, with what is known of them counted again where it is not zero."""
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
    """Tells the history, and observers."""

    def __init__(self, history: SchemaHistory | None, tell: ObserverList) -> None:
        self._history, self._tell = history, tell
        self._feed = SchemaRecorder(history) if history is not None else None
        self._seen: dict[TableId, TableSchema] = {}

    def restart(self) -> None:
        """Rows come again, and with them shapes of before."""
        if self._history is not None:
            self._feed = SchemaRecorder(self._history)

    def record_schemas(self, window: AnyWindow) -> None:
        """To be called before anyone is given the window."""
        if self._feed is not None:
            self._feed.record_window(window)
        if not self._tell:
            return
        for batch in window.batches:
            shape = batch.schema
            known = self._seen.get(shape.table)
            if known is not shape:
                self._seen[shape.table] = shape
                if known != shape and not is_system(shape):
                    self._tell(SchemaSeen(table=shape.table, columns=len(shape.columns)))
