"""pgoutput messages to columnar batches: bytes in, Arrow out, no socket and no clock.

The input is whole transactions laid end to end. Three compiled passes: *survey* finds the few messages that
need Python (a relation's description), *assign* gives every change its row (table, operation, transaction,
where its tuples lie), *cells* finds every value. Then each column is converted in one pass. Types and offsets
are data: one kernel serves every table.

What must hold: rows keep the order of the wire; a transaction that ends at or before `after` is dropped
whole; any bytes give rows or a `ProtocolViolation`, never a read outside the buffer. A primary-key change
becomes two neighbouring rows, the delete of the old key and the insert of the new.

The messages: https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.capture.postgres import values
from tailrace.capture.postgres.values import ABSENT, NULL, Bytes, Cells, Ints, Word
from tailrace.errors import ProtocolViolation
from tailrace.kernels import kernel
from tailrace.model import change
from tailrace.model.batch import ChangeBatch, Window
from tailrace.model.change import OPERATION_NAMES, Operation
from tailrace.model.position import Lsn
from tailrace.model.schema import TableSchema

COLUMNS_MAX = 1700
"""PostgreSQL allows 1,600 columns."""
BATCH_BYTES_MAX = 256 << 20
"""Of wire bytes: keeps a string column of one batch under Arrow's 2 GiB even where a value is repeated."""
EPOCH_2000 = 946_684_800_000_000

_INSERT, _UPDATE, _DELETE = Operation.INSERT.code, Operation.UPDATE.code, Operation.DELETE.code
_TRUNCATE = Operation.TRUNCATE.code
_UNKNOWN_RELATION, _MALFORMED = -1, -2


@kernel
def _u16(b: Bytes, i: Word) -> Word:
    return (np.int64(b[i]) << 8) | np.int64(b[i + 1])


@kernel
def _u32(b: Bytes, i: Word) -> Word:
    return (_u16(b, i) << 16) | _u16(b, i + 2)


@kernel
def _u64(b: Bytes, i: Word) -> Word:
    return (_u32(b, i) << 32) | _u32(b, i + 4)


@kernel
def _survey(b: Bytes, starts: Ints, messages: Word, special: Ints) -> tuple[Word, Word]:
    """Messages that need Python, and how many rows the rest can make at most."""
    found, rows = 0, 0
    for m in range(messages):
        kind = b[starts[m]]
        if kind == 73 or kind == 68:  # Insert, Delete
            rows += 1
        elif kind == 85:  # Update: two rows if the key moved
            rows += 2
        elif kind == 84:  # Truncate: a row a table
            rows += (starts[m + 1] - starts[m]) // 4
        elif kind == 82:  # Relation
            if found < special.size:
                special[found] = m
            found += 1
    return found, rows


@kernel
def _skip_tuple(b: Bytes, i: Word, end: Word) -> Word:
    """Where the tuple at `i` ends, or -1 if it does not end before `end`."""
    if i + 2 > end:
        return -1
    columns = _u16(b, i)
    i += 2
    for _ in range(columns):
        if i >= end:
            return -1
        kind = b[i]
        i += 1
        if kind == 116 or kind == 98:
            if i + 4 > end:
                return -1
            size = _u32(b, i)
            i += 4 + size
            if i > end:
                return -1
        elif kind != 110 and kind != 117:
            return -1
    return i


@kernel
def _key_moved(b: Bytes, new: Word, old: Word, is_key: Bytes) -> bool:
    """Whether a key column differs between the two tuples; a value not sent again is the same."""
    i, j = new + 2, old + 2
    for c in range(is_key.size):
        new_kind, old_kind = b[i], b[j]
        i += 1
        j += 1
        new_size, old_size = np.int64(0), np.int64(0)
        if new_kind == 116:
            new_size = _u32(b, i)
            i += 4
        if old_kind == 116:
            old_size = _u32(b, j)
            j += 4
        if is_key[c] and new_kind != 117:
            if new_kind != old_kind or new_size != old_size:
                return True
            for k in range(new_size):
                if b[i + k] != b[j + k]:
                    return True
        i += new_size
        j += old_size
    return False


@kernel
def _slot_of(oids: Ints, slots: Ints, oid: Word) -> Word:
    low, high = 0, oids.size
    while low < high:
        middle = (low + high) // 2
        if oids[middle] < oid:
            low = middle + 1
        else:
            high = middle
    return slots[low] if low < oids.size and oids[low] == oid else -1


@kernel
def _assign(
    b: Bytes,
    starts: Ints,
    messages: Word,
    after: Word,
    xid_near: Word,
    oids: Ints,
    slots: Ints,
    new_at: Ints,
    new_oid: Ints,
    new_slot: Ints,
    columns: Ints,
    key_offsets: Ints,
    keys: Bytes,
    row_slot: Any,
    row_op: Any,
    row_new: Ints,
    row_old: Ints,
    row_moved: Any,
    row_tx: Any,
    row_index: Any,
    tx_end: Any,
    tx_time: Ints,
    tx_id: Ints,
) -> tuple[Word, Word, Word]:
    """Rows made, transactions kept, and where it went wrong (-1: nowhere; else message * 4 - code)."""
    slots = slots.copy()
    rows, txs, announced = 0, 0, 0
    tx_rows, inside, index = 0, False, 0
    for m in range(messages):
        i, end = starts[m], starts[m + 1]
        kind = b[i]
        if kind == 66:
            if end - i < 21:
                return rows, txs, m * 4 + 2
            inside, tx_rows, index = True, rows, 0
            tx_time[txs] = _u64(b, i + 9) + EPOCH_2000
            # 32 bits on the wire; the epoch is the one that brings it nearest to the last id seen.
            xid = (xid_near & ~np.int64(0xFFFFFFFF)) | _u32(b, i + 17)
            if xid - xid_near > 1 << 31:
                xid -= 1 << 32
            elif xid_near - xid > 1 << 31:
                xid += 1 << 32
            xid_near = xid
            tx_id[txs] = xid
        elif kind == 67:
            if end - i < 26 or not inside:
                return rows, txs, m * 4 + 2
            inside = False
            finish = _u64(b, i + 10)
            if np.uint64(finish) <= np.uint64(after):
                rows = tx_rows
            else:
                tx_end[txs] = np.uint64(finish)
                txs += 1
        elif kind == 82:
            place = np.searchsorted(oids, new_oid[announced])
            slots[place] = new_slot[announced]
            announced += 1
        elif kind == 73 or kind == 85 or kind == 68:
            if not inside or end - i < 8:
                return rows, txs, m * 4 + 2
            slot = _slot_of(oids, slots, _u32(b, i + 1))
            if slot < 0:
                return rows, txs, m * 4 + 1
            q = i + 5
            old, new, full = -1, -1, False
            if b[q] == 75 or b[q] == 79:  # Key or Old
                old, full = q + 1, b[q] == 79
                q = _skip_tuple(b, old, end)
                if q < 0 or _u16(b, old) != columns[slot]:
                    return rows, txs, m * 4 + 2
            if kind != 68:
                if q >= end or b[q] != 78:
                    return rows, txs, m * 4 + 2
                new = q + 1
                q = _skip_tuple(b, new, end)
                if q < 0 or _u16(b, new) != columns[slot]:
                    return rows, txs, m * 4 + 2
            elif old < 0:
                return rows, txs, m * 4 + 2
            is_key = keys[key_offsets[slot] : key_offsets[slot] + columns[slot]]
            moved = kind == 85 and old >= 0 and _key_moved(b, new, old, is_key)
            if moved:
                row_slot[rows], row_op[rows], row_new[rows], row_old[rows] = slot, _DELETE, -1, old
                row_moved[rows], row_tx[rows], row_index[rows] = 0, txs, index
                rows += 1
                index += 1
            row_op[rows] = _INSERT if kind == 73 or moved else (_UPDATE if kind == 85 else _DELETE)
            row_slot[rows], row_new[rows], row_old[rows] = slot, new, old
            row_moved[rows] = (1 if moved else 0) | (2 if full and kind == 85 else 0)
            row_tx[rows], row_index[rows] = txs, index
            rows += 1
            index += 1
        elif kind == 84:
            if not inside or end - i < 6:
                return rows, txs, m * 4 + 2
            count = _u32(b, i + 1)
            if end - i < 6 + 4 * count:
                return rows, txs, m * 4 + 2
            for k in range(count):
                slot = _slot_of(oids, slots, _u32(b, i + 6 + 4 * k))
                if slot < 0:
                    return rows, txs, m * 4 + 1
                row_slot[rows], row_op[rows], row_new[rows], row_old[rows] = slot, _TRUNCATE, -1, -1
                row_moved[rows], row_tx[rows], row_index[rows] = 0, txs, index
                rows += 1
                index += 1
        elif kind != 79 and kind != 89 and kind != 77:  # Origin, Type and Message carry no row
            return rows, txs, m * 4 + 2
    if inside:
        return rows, txs, messages * 4 + 2
    return rows, txs, -1


@kernel
def _cells(b: Bytes, first: Ints, second: Ints, columns: Word, at: Any, size: Any) -> None:
    """Every value of the rows: from the tuple at `first`, and what it leaves out from the one at `second`.

    `second` matters where the server sent the old row too: a large value that did not change stands only there.
    """
    for r in range(first.size):
        if first[r] < 0:
            for c in range(columns):
                size[c, r] = NULL
            continue
        i = first[r] + 2
        absent = 0
        for c in range(columns):
            kind = b[i]
            i += 1
            if kind == 116 or kind == 98:
                n = _u32(b, i)
                at[c, r] = i + 4
                size[c, r] = n
                i += 4 + n
            elif kind == 110:
                size[c, r] = NULL
            else:
                size[c, r] = ABSENT
                absent += 1
        if absent and second[r] >= 0:
            i = second[r] + 2
            for c in range(columns):
                kind = b[i]
                i += 1
                n = np.int64(0)
                if kind == 116 or kind == 98:
                    n = _u32(b, i)
                    i += 4
                    if size[c, r] == ABSENT:
                        at[c, r] = i
                        size[c, r] = n
                i += n


@kernel
def _absent(size: Any, rows: Any, columns: Any) -> Word:
    """The (row, column) pairs whose value was not sent, in row order; filled only as far as there is room."""
    found = 0
    for r in range(size.shape[1]):
        for c in range(size.shape[0]):
            if size[c, r] == ABSENT:
                if found < rows.size:
                    rows[found] = r
                    columns[found] = c
                found += 1
    return found


@dataclass(frozen=True)
class _Rows:
    """What `_assign` found, one entry a row, and what is known of the transactions."""

    slot: npt.NDArray[np.int32]
    op: npt.NDArray[np.int8]
    new: Ints
    old: Ints
    moved: npt.NDArray[np.uint8]
    tx: npt.NDArray[np.int32]
    index: npt.NDArray[np.int32]
    tx_end: npt.NDArray[np.uint64]
    tx_time: Ints
    tx_id: Ints

    def first(self, rows: int) -> _Rows:
        """What was filled of the room that was made."""
        return _Rows(
            self.slot[:rows], self.op[:rows], self.new[:rows], self.old[:rows], self.moved[:rows], self.tx[:rows],
            self.index[:rows], self.tx_end, self.tx_time, self.tx_id,
        )  # fmt: skip


_MOVED, _FULL_BEFORE = 1, 2


class Decoder:
    """Decodes windows of one connection; remembers which relation has which shape.

    `describe` turns a relation message into a shape; it may look into the catalogue, so it is the caller's.
    """

    def __init__(self, describe: Callable[[bytes], TableSchema], xid_near: int = 0) -> None:
        self._describe = describe
        self._schemas: list[TableSchema] = []
        self._slot_of_oid: dict[int, int] = {}
        self._xid_near = xid_near

    def decode(self, b: Bytes, starts: Ints, messages: int, after: Lsn, end: Lsn) -> Window:
        """The window that these messages make; they begin and end on transaction boundaries."""
        special = np.empty(1024, np.int64)
        found, rows_max = _survey(b, starts, messages, special)
        if found > special.size:
            special = np.empty(found, np.int64)
            _survey(b, starts, messages, special)
        rows, txs = self._assign(b, starts, messages, after, special[:found], rows_max)
        batches = tuple(self._batches(b, starts, messages, rows))
        return Window(
            start=after,
            end=end,
            batches=batches,
            transactions=txs,
            rows=int(rows.slot.size),
            last_committed_at=int(rows.tx_time[txs - 1]) if txs else None,
        )

    def _assign(
        self, b: Bytes, starts: Ints, messages: int, after: Lsn, special: Ints, rows_max: int
    ) -> tuple[_Rows, int]:
        before = dict(self._slot_of_oid)
        new_oid, new_slot = self._announced(b, starts, special)
        oids = np.array(sorted(self._slot_of_oid), np.int64)
        slots = np.array([before.get(int(oid), -1) for oid in oids], np.int64)
        columns = np.array([len(schema.columns) for schema in self._schemas], np.int64)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(columns)])
        keys = np.array([name in schema.key for schema in self._schemas for name in schema.names], np.uint8)
        made = _Rows(
            np.empty(rows_max, np.int32), np.empty(rows_max, np.int8), np.empty(rows_max, np.int64),
            np.empty(rows_max, np.int64), np.empty(rows_max, np.uint8), np.empty(rows_max, np.int32),
            np.empty(rows_max, np.int32),
            np.empty(messages + 1, np.uint64), np.empty(messages + 1, np.int64), np.empty(messages + 1, np.int64),
        )  # fmt: skip
        rows, txs, wrong = _assign(
            b, starts, messages, _signed(after.value), self._xid_near, oids, slots,
            special, new_oid, new_slot, columns, offsets, keys, made.slot, made.op, made.new, made.old,
            made.moved, made.tx, made.index, made.tx_end, made.tx_time, made.tx_id,
        )  # fmt: skip
        if wrong >= 0:
            raise ProtocolViolation(
                "a change came before its table was described" if wrong % 4 == 1 else "malformed message",
                number=wrong // 4,
                after=after,
                hint="Restart the capture; if it comes again, report it with the server's version.",
            )
        if txs:
            self._xid_near = int(made.tx_id[txs - 1])
        return made.first(rows), txs

    def _announced(self, b: Bytes, starts: Ints, special: Ints) -> tuple[Ints, Ints]:
        """Learn the shapes described in this window; a shape seen before keeps its slot."""
        oids, slots = np.empty(special.size, np.int64), np.empty(special.size, np.int64)
        for k, m in enumerate(special):
            message = b[starts[m] : starts[m + 1]].tobytes()
            schema = self._describe(message)
            known = self._slot_of_oid.get(schema.relation)
            if known is None or self._schemas[known] != schema:
                known = len(self._schemas)
                self._schemas.append(schema)
            self._slot_of_oid[schema.relation] = known
            oids[k], slots[k] = schema.relation, known
        return oids, slots

    def _batches(self, b: Bytes, starts: Ints, messages: int, rows: _Rows) -> Iterator[ChangeBatch]:
        order = np.argsort(rows.slot, kind="stable")
        slots, first = np.unique(rows.slot[order], return_index=True)
        for slot, begin, end in zip(slots, first, [*first[1:], order.size], strict=True):
            yield from self._split(b, self._schemas[slot], rows, order[begin:end])

    def _split(self, b: Bytes, schema: TableSchema, rows: _Rows, picked: Ints) -> Iterator[ChangeBatch]:
        """One batch, or several where a single one would be too large for Arrow's offsets."""
        if b.size <= BATCH_BYTES_MAX:
            yield _batch(b, schema, rows, picked)
            return
        places = np.maximum(rows.new[picked], rows.old[picked])
        cuts = np.flatnonzero(np.diff(places // BATCH_BYTES_MAX)) + 1
        for piece in np.split(picked, cuts):
            yield _batch(b, schema, rows, piece)


def _signed(word: int) -> int:
    """The same 64 bits as the kernels see them."""
    return word - (1 << 64) if word >= 1 << 63 else word


def _find_cells(b: Bytes, schema: TableSchema, first: Ints, second: Ints) -> tuple[list[Cells], Any]:
    columns, n = len(schema.columns), first.size
    at, size = np.zeros((columns, n), np.int64), np.empty((columns, n), np.int64)
    _cells(b, first, second, columns, at, size)
    return [Cells(b, at[c], size[c]) for c in range(columns)], size


def _batch(b: Bytes, schema: TableSchema, rows: _Rows, picked: Ints) -> ChangeBatch:
    new, old, moved = rows.new[picked], rows.old[picked], rows.moved[picked]
    main = np.where(new >= 0, new, old)
    cells, size = _find_cells(b, schema, main, np.where(new >= 0, old, -1))
    tx = rows.tx[picked]
    columns: dict[str, pa.Array] = {
        change.OP: OPERATION_NAMES.take(pa.array(rows.op[picked])),
        change.SEQ: pa.array(picked),
        change.POSITION: values.format_positions(rows.tx_end[tx]),
        change.TX: pa.array(rows.tx_id[tx]),
        change.TX_INDEX: pa.array(rows.index[picked]),
        change.COMMITTED_AT: pa.array(rows.tx_time[tx]).view(pa.timestamp("us", "UTC")),
    }
    own, unfit = typed_columns(schema, cells)
    columns |= _optional(b, schema, size, old, moved)
    if unfit:
        columns[change.UNFIT] = unfit_column(schema, cells, unfit, len(picked))
    columns |= own
    fields = schema.change_schema()
    data = pa.RecordBatch.from_arrays(
        [columns[name] for name in fields.names if name in columns],
        schema=pa.schema([field for field in fields if field.name in columns]),
    )
    return ChangeBatch(
        schema=schema,
        data=data,
        moves=int(np.count_nonzero(moved & _MOVED)),
        truncates=int(np.count_nonzero(rows.op[picked] == _TRUNCATE)),
        unfit=sum(len(u) for u in unfit.values()),
    )


def typed_columns(schema: TableSchema, cells: list[Cells]) -> tuple[dict[str, pa.Array], dict[int, Ints]]:
    """The table's own columns under their stored names, and the rows that did not fit, by column."""
    own, unfit = {}, {}
    for c, (column, cell) in enumerate(zip(schema.columns, cells, strict=True)):
        converted = values.typed(cell, column.type)
        own[change.stored_name(column.name)] = converted.column
        if converted.unfit.size:
            unfit[c] = converted.unfit
    return own, unfit


def unfit_column(schema: TableSchema, cells: list[Cells], unfit: dict[int, Ints], rows: int) -> pa.Array:
    """`_unfit`: the exact text of what a column's type cannot hold. Rare, so plain Python."""
    found: dict[int, list[dict[str, str]]] = {}
    for c, places in unfit.items():
        texts = values.text_column(Cells(cells[c].buffer, cells[c].at[places], cells[c].size[places]))
        for row, text in zip(places.tolist(), texts.to_pylist(), strict=True):
            found.setdefault(row, []).append({"column": schema.columns[c].name, "text": text})
    return pa.array([found.get(row) for row in range(rows)], change.UNFIT_TYPE)


def _optional(b: Bytes, schema: TableSchema, size: Any, old: Ints, moved: Any) -> dict[str, pa.Array]:
    """The columns that most batches do not need; absent when null throughout."""
    found: dict[str, pa.Array] = {}
    none = np.empty(0, np.int32)
    count = _absent(size, none, none)
    if count:
        rows, which = np.empty(count, np.int32), np.empty(count, np.int32)
        _absent(size, rows, which)
        found[change.UNCHANGED] = _names_per_row(schema, rows, which, old.size)
    full = moved & _FULL_BEFORE != 0
    if full.any():
        found[change.BEFORE] = _struct(b, schema, np.where(full, old, -1), schema.names)
    gone = moved & _MOVED != 0
    if gone.any():
        found[change.MOVED_FROM] = _struct(b, schema, np.where(gone, old, -1), schema.key)
    return found


def _names_per_row(schema: TableSchema, rows: Any, which: Any, n: int) -> pa.Array:
    counts = np.bincount(rows, minlength=n)
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])
    names = pa.array(schema.names, pa.string()).take(pa.array(which))
    return pa.ListArray.from_arrays(pa.array(offsets), names, mask=pa.array(counts == 0))


def _struct(b: Bytes, schema: TableSchema, tuples: Ints, names: Any) -> pa.Array:
    """The old tuple as a struct of the named columns; null where there is none."""
    cells, _ = _find_cells(b, schema, tuples, np.full(tuples.size, -1, np.int64))
    picked = [c for c, column in enumerate(schema.columns) if column.name in names]
    return pa.StructArray.from_arrays(
        [values.typed(cells[c], schema.columns[c].type).column for c in picked],
        fields=[pa.field(change.stored_name(schema.columns[c].name), schema.columns[c].type) for c in picked],
        mask=pa.array(tuples < 0),
    )
