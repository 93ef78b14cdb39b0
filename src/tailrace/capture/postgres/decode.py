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
from typing import Any

import numpy as np

from tailrace.capture.postgres.batches import FULL_BEFORE, MOVED, Rows, batch_of
from tailrace.capture.postgres.values import Bytes, Ints, Word, u16, u32, u64
from tailrace.errors import ProtocolViolation
from tailrace.kernels import kernel
from tailrace.model.batch import ChangeBatch, Window
from tailrace.model.change import Operation
from tailrace.model.position import Lsn
from tailrace.model.schema import TableSchema

BATCH_BYTES_MAX = 256 << 20
"""Of wire bytes: keeps a string column of one batch under Arrow's 2 GiB even where a value is repeated."""
EPOCH_2000 = 946_684_800_000_000

_INSERT, _UPDATE, _DELETE = Operation.INSERT.code, Operation.UPDATE.code, Operation.DELETE.code
_TRUNCATE = Operation.TRUNCATE.code


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
    columns = u16(b, i)
    i += 2
    for _ in range(columns):
        if i >= end:
            return -1
        kind = b[i]
        i += 1
        if kind == 116:  # never binary: it is not asked for, and no kernel reads it
            if i + 4 > end:
                return -1
            size = u32(b, i)
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
            new_size = u32(b, i)
            i += 4
        if old_kind == 116:
            old_size = u32(b, j)
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
            if end - i < 21 or inside:
                return rows, txs, m * 4 + 2
            inside, tx_rows, index = True, rows, 0
            tx_time[txs] = u64(b, i + 9) + EPOCH_2000
            # 32 bits on the wire; the epoch is the one that brings it nearest to the last id seen.
            xid = (xid_near & ~np.int64(0xFFFFFFFF)) | u32(b, i + 17)
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
            finish = u64(b, i + 10)
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
            slot = _slot_of(oids, slots, u32(b, i + 1))
            if slot < 0:
                return rows, txs, m * 4 + 1
            q = i + 5
            old, new, full = -1, -1, False
            if b[q] == 75 or b[q] == 79:  # Key or Old
                old, full = q + 1, b[q] == 79
                q = _skip_tuple(b, old, end)
                if q < 0 or u16(b, old) != columns[slot]:
                    return rows, txs, m * 4 + 2
            if kind != 68:
                if q >= end or b[q] != 78:
                    return rows, txs, m * 4 + 2
                new = q + 1
                q = _skip_tuple(b, new, end)
                if q < 0 or u16(b, new) != columns[slot]:
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
            row_moved[rows] = (MOVED if moved else 0) | (FULL_BEFORE if full and kind == 85 else 0)
            row_tx[rows], row_index[rows] = txs, index
            rows += 1
            index += 1
        elif kind == 84:
            if not inside or end - i < 6:
                return rows, txs, m * 4 + 2
            count = u32(b, i + 1)
            if end - i < 6 + 4 * count:
                return rows, txs, m * 4 + 2
            for k in range(count):
                slot = _slot_of(oids, slots, u32(b, i + 6 + 4 * k))
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
        batches = tuple(self._batches(b, rows))
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
    ) -> tuple[Rows, int]:
        before = dict(self._slot_of_oid)
        new_oid, new_slot = self._announced(b, starts, special)
        oids = np.array(sorted(self._slot_of_oid), np.int64)
        slots = np.array([before.get(int(oid), -1) for oid in oids], np.int64)
        columns = np.array([len(schema.columns) for schema in self._schemas], np.int64)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(columns)])
        keys = np.array([name in schema.key for schema in self._schemas for name in schema.names], np.uint8)
        made = Rows(
            np.empty(rows_max, np.int32), np.empty(rows_max, np.int8), np.empty(rows_max, np.int64),
            np.empty(rows_max, np.int64), np.empty(rows_max, np.uint8), np.empty(rows_max, np.int32),
            np.empty(rows_max, np.int32),
            np.empty(messages + 1, np.uint64), np.empty(messages + 1, np.int64), np.empty(messages + 1, np.int64),
        )  # fmt: skip
        rows, txs, wrong = _assign(
            b, starts, messages, _signed(after.value), self._xid_near, oids, slots,
            new_oid, new_slot, columns, offsets, keys, made.slot, made.op, made.new, made.old,
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

    def _batches(self, b: Bytes, rows: Rows) -> Iterator[ChangeBatch]:
        order = np.argsort(rows.slot, kind="stable")
        slots, first = np.unique(rows.slot[order], return_index=True)
        for slot, begin, end in zip(slots, first, np.append(first, order.size)[1:], strict=True):
            yield from self._split(b, self._schemas[slot], rows, order[begin:end])

    def _split(self, b: Bytes, schema: TableSchema, rows: Rows, picked: Ints) -> Iterator[ChangeBatch]:
        """One batch, or several where a single one would be too large for Arrow's offsets."""
        if b.size <= BATCH_BYTES_MAX:
            yield batch_of(b, schema, rows, picked)
            return
        places = np.maximum(rows.new[picked], rows.old[picked])
        cuts = np.flatnonzero(np.diff(places // BATCH_BYTES_MAX)) + 1
        for piece in np.split(picked, cuts):
            yield batch_of(b, schema, rows, piece)


def _signed(word: int) -> int:
    """The same 64 bits as the kernels see them."""
    return word - (1 << 64) if word >= 1 << 63 else word
