"""A source in memory, with the promises of a database. For tests, and for changes made by a program.

Order: transactions arrive whole, in the order of `commit`, at most `window_transactions_max` to a window. One of more
than `part_rows_max` rows arrives in open windows of that many rows, as a database delivers one too large to hold.

Repetition: a stream yields nothing that ended at or before the requested position, and everything after it, however
often it is read.

Durability: a transaction stays until a position at or after its end is confirmed; then it is removed. A request for
anything before that position is `PositionLost`. Nothing survives the process.

Threads: any thread may call `commit`, `quiet` and `break_next_read`; one thread uses a stream. A stream that failed
stays failed: it must be opened again, as a broken connection must.
"""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.capture.memory.memory_tables import MemoryScan, MemoryScanProgress, MemoryTables
from tailrace.capture.port import Capabilities, Lag, SourceId, Stream, TableSnapshot
from tailrace.errors import ConfigError, PositionLost, TailraceError, Unsupported
from tailrace.model import change
from tailrace.model.batch import ChangeBatch, Window
from tailrace.model.change import Operation
from tailrace.model.position import ZERO, Lsn
from tailrace.model.schema import TableId, TableSchema, unknown_column_error, wrong_type_error
from tailrace.validation import require_instance, require_integer

_TRANSACTION_BYTES = 64
"""Size of a transaction in the log, apart from its rows."""


def batch_of(schema: TableSchema, *rows: tuple[Operation, Mapping[str, Any]]) -> ChangeBatch:
    """Return a batch of operations and values, in order: `batch_of(orders, (Operation.INSERT, {"id": 1}))`."""
    require_instance("schema", schema, TableSchema, "Give the table's schema first: `batch_of(orders, …)`.")
    for row in rows:
        _require_row(schema, row)
    stored = [
        {field.name: 0 for field in change.REQUIRED}
        | {change.POSITION: "", change.OP: operation.value}
        | {change.stored_name(name): values.get(name) for name in schema.names}
        for operation, values in rows
    ]
    fields = [field for field in schema.change_schema() if field.name not in change.OPTIONAL]
    truncates = sum(operation is Operation.TRUNCATE for operation, _ in rows)
    try:
        data = pa.RecordBatch.from_pylist(stored, schema=pa.schema(fields))
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise wrong_type_error(schema) from error
    return ChangeBatch(schema=schema, data=data, truncates=truncates)


def _require_row(schema: TableSchema, row: object) -> None:
    match row:
        case (Operation(), Mapping() as values):
            unknown = [str(name) for name in values if name not in schema.names]
        case _:
            raise ConfigError(
                "a row is not a pair of an operation and values",
                found=type(row).__name__,
                hint='Give `(Operation.INSERT, {"id": 1})` for each.',
            )
    if unknown:
        raise unknown_column_error(schema, unknown)


@dataclass(frozen=True, kw_only=True)
class _MemoryTransaction:
    number: int
    end: Lsn
    committed_at: int
    batches: tuple[ChangeBatch, ...]

    @property
    def rows(self) -> int:
        return sum(len(batch) for batch in self.batches)

    def part_end(self, begin: int, rows: int) -> int:
        """Return the end of a part of that many rows. The two rows of a key move stay together."""
        end, index = begin + rows, 0
        for batch in self.batches:
            at, index = end - index, index + len(batch)
            has_row = 0 <= at < len(batch) and change.MOVED_FROM in batch.data.schema.names
            if has_row and batch.data.column(change.MOVED_FROM)[at].is_valid:
                return end - 1 if rows > 1 else end + 1
        return end

    def stamped(self, first_seq: int, begin: int, end: int, *, is_open: bool) -> Iterator[ChangeBatch]:
        """Yield its rows from `begin` to `end` as the port requires.

        They are numbered batch after batch, and have their position and transaction as far as a reader can know them.
        """
        index = 0
        for batch in self.batches:
            low, high = max(begin - index, 0), min(end - index, len(batch))
            if low < high:
                yield self._stamp(_slice(batch, low, high), first_seq + index + low - begin, index + low, is_open)
            index += len(batch)

    def _stamp(self, batch: ChangeBatch, seq: int, index: int, is_open: bool) -> ChangeBatch:
        n = len(batch)
        stamps = {
            change.SEQ: pa.array(np.arange(seq, seq + n), pa.int64()),
            change.POSITION: pa.repeat(pa.scalar(str(self.end), pa.string()), n),
            change.TX: pa.repeat(pa.scalar(self.number, pa.int64()), n),
            change.TX_INDEX: pa.array(np.arange(index, index + n), pa.int32()),
            change.COMMITTED_AT: pa.repeat(pa.scalar(self.committed_at, pa.timestamp("us", "UTC")), n),
        }
        fields = [field for field in batch.data.schema if not (is_open and field.name == change.POSITION)]
        columns = [stamps.get(field.name, batch.data.column(field.name)) for field in fields]
        return replace(batch, data=pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields)))


def _slice(batch: ChangeBatch, begin: int, end: int) -> ChangeBatch:
    if end - begin == len(batch):
        return batch
    data = batch.data.slice(begin, end - begin)
    names = set(data.schema.names)
    operations = data.column(change.OP).to_pylist()
    unfit = data.column(change.UNFIT).to_pylist() if change.UNFIT in names else []
    return replace(
        batch,
        data=data,
        truncates=operations.count(Operation.TRUNCATE.value),
        moves=len(data) - data.column(change.MOVED_FROM).null_count if change.MOVED_FROM in names else 0,
        unfit=sum(len(cells or ()) for cells in unfit),
    )


class MemoryCapture:
    """A log of transactions in memory."""

    capabilities = Capabilities(live=True, snapshot=False, lag=True)

    def __init__(
        self,
        *,
        window_transactions_max: int = 1,
        part_rows_max: int | None = None,
        keep_tables: bool = False,
        chunk_rows: int = 100,
    ) -> None:
        """Create an empty log. With `keep_tables` its tables can be scanned, `chunk_rows` rows to a chunk."""
        require_integer("window_transactions_max", window_transactions_max, least=1)
        require_integer("chunk_rows", chunk_rows, least=1)
        if part_rows_max is not None:
            require_integer("part_rows_max", part_rows_max, least=1)
        self.identity = SourceId(kind="memory", system=uuid.uuid4().hex, database="", timeline=1)
        self.window_transactions_max, self.part_rows_max = window_transactions_max, part_rows_max
        self._kept: deque[_MemoryTransaction] = deque()
        self._tables = MemoryTables() if keep_tables else None
        self._chunk_rows = chunk_rows
        self.hidden_transactions: set[int] = set()
        """Transactions that are in the stream, and that no snapshot sees."""
        self._count = 0
        self._end = self._confirmed = ZERO
        self._faults: deque[TailraceError] = deque()
        self._changed = threading.Condition()

    @property
    def confirmed(self) -> Lsn:
        """The position that a reader has confirmed as durable; everything up to here is gone."""
        return self._confirmed

    @property
    def end(self) -> Lsn:
        """The current end of the log."""
        return self._end

    def commit(self, *batches: ChangeBatch) -> Lsn:
        """Add one transaction and return the position after it.

        `_seq`, `_tx` and the other metadata columns are assigned here; their values in the batches are ignored.
        """
        for batch in batches:
            require_instance("batches", batch, ChangeBatch, "Give the result of `batch_of(…)`.")
        if not batches or not all(len(batch) for batch in batches):
            raise ConfigError("a transaction needs changes", hint="Use `quiet` to move the log without changes.")
        size = _TRANSACTION_BYTES + sum(batch.data.nbytes for batch in batches)
        with self._changed:
            self._count += 1
            if self._tables is not None:
                self._tables.apply(batches)
            self._end = Lsn(self._end.value + size)
            self._kept.append(
                _MemoryTransaction(
                    number=self._count, end=self._end, committed_at=time.time_ns() // 1000, batches=batches
                )
            )
            self._changed.notify_all()
            return self._end

    def quiet(self, size_bytes: int) -> Lsn:
        """Move the log on without a change, as writes to uncaptured tables do. Return its end."""
        require_integer("size_bytes", size_bytes, least=0)
        with self._changed:
            self._end = Lsn(self._end.value + size_bytes)
            return self._end

    def break_next_read(self, error: TailraceError) -> None:
        """Make the next read, or the one under way, fail with this error. Faults queue up: one per stream."""
        require_instance("error", error, TailraceError, 'Give an error of Tailrace: `SourceUnreachable("…")`.')
        with self._changed:
            self._faults.append(error)
            self._changed.notify_all()

    def identify(self) -> SourceId:
        return self.identity

    def prepare(self, position: Lsn | None, origin: SourceId | None = None) -> Lsn | None:
        """Do nothing, for nothing needs preparing; a new stream begins with everything that is kept."""
        if position is None:
            return self._confirmed
        with self._changed:
            self._require_kept(position)
        return None

    def live(self, after: Lsn) -> Stream:
        with self._changed:
            self._require_kept(after)
        return _MemoryStream(self)

    def snapshot(self) -> AbstractContextManager[TableSnapshot]:
        self.capabilities.require("snapshot")
        raise AssertionError("an absent capability was granted")

    def scan(self, tables: Sequence[TableId], *, live: bool, where: str | None = None) -> MemoryScan:
        if where is not None:
            raise Unsupported("this source supports no conditions", hint="Read all rows.")
        progress = MemoryScanProgress(tables=tuple(tables), incremental=live)
        return MemoryScan(progress, self._view, self.hidden_transactions, self._chunk_rows, fresh=True)

    def resume_scan(self, record: Mapping[str, Any]) -> MemoryScan | None:
        progress = MemoryScanProgress.from_json(record)
        tables, _ = self._view()
        if not all(tables.get(table).schema.key for table in progress.tables[progress.table_index :]):
            return None
        return MemoryScan(progress, self._view, self.hidden_transactions, self._chunk_rows, fresh=False)

    def _view(self) -> tuple[MemoryTables, Lsn]:
        if self._tables is None:
            raise Unsupported(
                "this source does not know the rows of its tables", hint="Create it with `keep_tables=True`."
            )
        with self._changed:
            return self._tables.copy(), self._end

    def lag(self) -> Lag:
        with self._changed:
            return Lag(end=self._end, confirmed=self._confirmed, retained_bytes=self._end - self._confirmed)

    # Only streams call the methods below.

    def _require_kept(self, after: Lsn) -> None:
        if after < self._confirmed:
            raise PositionLost(
                "the source discarded the changes after this position",
                position=after,
                confirmed=self._confirmed,
                hint="Start again: a confirmed position cannot be taken back.",
            )
        if after > self._end:
            raise PositionLost(
                "the position is after the end of the source log",
                position=after,
                end=self._end,
                hint="It belongs to another source. Start again.",
            )

    def _take(self, after: Lsn, wait_seconds: float, delivered: int) -> Window | None:
        """Return the next window after the position, and after `delivered` rows of the transaction there."""
        with self._changed:
            self._require_kept(after)
            self._changed.wait_for(lambda: self._faults or (self._kept and self._kept[-1].end > after), wait_seconds)
            if self._faults:
                raise self._faults.popleft()
            behind = itertools.dropwhile(lambda kept: kept.end <= after, self._kept)
            picked = list(itertools.islice(behind, self.window_transactions_max))
            if not picked:
                return Window(start=after, end=self._end) if self._end > after else None
        part = self.part_rows_max
        if part is not None and (end := picked[0].part_end(delivered, part)) < picked[0].rows:
            return _open_window(after, picked[0], delivered, end)
        small = itertools.takewhile(lambda later: part is None or later.rows <= part, picked[1:])
        return _window(after, [picked[0], *small], delivered)

    def _bytes_after(self, position: Lsn) -> int:
        return max(0, self._kept[-1].end - position) if self._kept else 0

    def _release(self, position: Lsn) -> None:
        with self._changed:
            if position > self._end:
                raise ConfigError(
                    "a position was confirmed that was never delivered",
                    position=position,
                    end=self._end,
                    hint="Confirm the `end` of a window.",
                )
            self._confirmed = max(self._confirmed, position)
            while self._kept and self._kept[0].end <= self._confirmed:
                self._kept.popleft()


def _window(after: Lsn, picked: list[_MemoryTransaction], delivered: int) -> Window:
    """Return a window of these transactions, the first without the rows already delivered."""
    batches: list[ChangeBatch] = []
    rows = 0
    for transaction in picked:
        begin = delivered if transaction is picked[0] else 0
        batches += transaction.stamped(rows, begin, transaction.rows, is_open=False)
        rows += transaction.rows - begin
    return Window(
        start=after,
        end=picked[-1].end,
        batches=tuple(batches),
        transactions=len(picked),
        rows=rows,
        last_committed_at=max(transaction.committed_at for transaction in picked),
        continues=delivered > 0,
        continued_end=picked[0].end if delivered else None,
    )


def _open_window(after: Lsn, transaction: _MemoryTransaction, begin: int, end: int) -> Window:
    return Window(
        start=after,
        end=after,
        batches=tuple(transaction.stamped(0, begin, end, is_open=True)),
        rows=end - begin,
        open=True,
        continues=begin > 0,
    )


class _MemoryStream:
    """One reader's stream of the source."""

    def __init__(self, source: MemoryCapture) -> None:
        self._source = source
        self._failure: TailraceError | None = None
        self._closed = False
        self._read_upto = ZERO
        self._delivered = 0
        """Rows of the transaction under way that open windows have delivered."""

    def read(self, after: Lsn, wait_seconds: float) -> Window | None:
        self._require_open()
        if self._failure is not None:
            raise self._failure
        try:
            window = self._source._take(after, wait_seconds, self._delivered)
            if window is not None:
                self._read_upto = window.end
                self._delivered = self._delivered + window.rows if window.open else 0
            return window
        except TailraceError as error:
            self._failure = error
            raise

    def confirm(self, position: Lsn) -> None:
        self._require_open()
        self._source._release(position)

    @property
    def held_bytes(self) -> int:
        """Bytes that the source holds after the last position read."""
        return self._source._bytes_after(self._read_upto)

    def close(self) -> None:
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError("the stream is closed")
