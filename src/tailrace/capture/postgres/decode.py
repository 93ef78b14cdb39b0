"""Decodes pgoutput messages to columnar batches: bytes in, Arrow out, no socket and no clock.

The input is messages end to end: whole transactions, or a part of one that is too large to hold. There are three
compiled passes. *Survey* finds the few messages that need Python: a relation's description, an application's own
message. *Assign* gives every change its row: table, operation, transaction, the offsets of its tuples. *Cells* (in
`batches.py`) finds every value. Then all columns of one type are converted in one pass. Types and offsets are data: one
kernel serves every table.

What must hold: rows keep the order of the wire. A transaction gives the same rows in parts as whole. One that ends at
or before `after` is dropped whole. Any bytes give rows or a `ProtocolViolation`, never a read outside the buffer. A key
move becomes two neighbouring rows, the delete of the old key and the insert of the new. A message that an application
wrote is a row of the `message` stream; outside of a transaction it counts as one of its own.

The file is longer than most, and `_assign` longer than a screen. Both are one walk over the bytes, and the meaning of a
message depends on the messages before it.

The messages: https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.capture.postgres.batches import (
    FULL_BEFORE,
    MOVED,
    TableLayout,
    WindowRows,
    build_batches,
    build_message_batch,
)
from tailrace.capture.postgres.invalid_text import TextHandling
from tailrace.capture.postgres.values import Bytes, Ints, Word, u16, u32, u64
from tailrace.capture.postgres.wire import CLOCK_SIZE
from tailrace.errors import ProtocolViolation
from tailrace.kernels import kernel
from tailrace.model.batch import ChangeBatch, Window
from tailrace.model.change import Operation
from tailrace.model.position import Lsn
from tailrace.model.schema import TableSchema
from tailrace.model.system_streams import MESSAGE_STREAM

BATCH_BYTES_MAX = 256 << 20
"""Limit of a batch in wire bytes.

Keeps a string column under Arrow's 2 GiB even where a value is repeated.
"""
BATCH_CELLS_MAX = 4 << 20
"""Limit of a batch in cells.

A value takes 16 bytes while it is looked for, and a null takes one on the wire.
"""
PREFIXES_MAX = 1024
"""Number of message prefixes for which the answer of `wanted` is cached."""
Describe = Callable[[Sequence[bytes]], Sequence[TableSchema]]
EPOCH_2000 = 946_684_800_000_000

_INSERT, _UPDATE, _DELETE = Operation.INSERT.code, Operation.UPDATE.code, Operation.DELETE.code
_TRUNCATE, _MESSAGE = Operation.TRUNCATE.code, Operation.MESSAGE.code
_MESSAGE_SLOT = 0
"""The slot of the `message` stream among the schemas."""

# Indices of the state of the transaction under way; a decoder carries it from one part to the next.
_INSIDE = 0
"""1 while a transaction is under way."""
_INDEX = 1
"""Number of its rows so far."""
_FINAL, _TIME, _XID = 2, 3, 4
"""From its beginning: where its commit is, its time, and its id. The id outlasts the transaction."""

# Rows of the arrays that the kernels fill, one column for each change or transaction.
_SLOT, _OP, _HOW, _TX, _TX_INDEX = 0, 1, 2, 3, 4
_NEW, _OLD = 0, 1
_TX_END, _TX_TIME, _TX_ID = 0, 1, 2

# Rows of the arrays in which the kernels look tables up.
_OID, _SLOT_OF = 0, 1
_COLUMNS, _KEYS_AT = 0, 1

_UNKNOWN, _MALFORMED = -1, -2
"""Codes that a kernel returns instead of a count: undescribed table, invalid bytes."""


@kernel
def _survey(b: Bytes, starts: Ints, messages: Word, special: Ints) -> tuple[Word, Word]:
    """Find the messages that need Python, and the most rows the rest can make."""
    found, rows = 0, 0
    for m in range(messages):
        kind = b[starts[m]]
        if kind == 73 or kind == 68:  # Insert, Delete
            rows += 1
        elif kind == 85:  # Update: two rows if the key moved
            rows += 2
        elif kind == 84:  # Truncate: a row a table
            rows += (starts[m + 1] - starts[m]) // 4
        elif kind == 82 or kind == 77:  # Relation, Message
            if found < special.size:
                special[found] = m
            found += 1
            rows += kind == 77
    return found, rows


@kernel
def _skip_tuple(b: Bytes, i: Word, end: Word) -> Word:
    """Return where the tuple at `i` ends; -1 if it does not end before `end`."""
    if i + 2 > end:
        return -1
    columns = u16(b, i)
    i += 2
    for _ in range(columns):
        if i >= end:
            return -1
        kind = b[i]
        i += 1
        if kind == 116:  # never binary: it is not requested, and no kernel reads it
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
def _key_moved(b: Bytes, new: Word, old: Word, keys: Bytes, begin: Word, end: Word) -> bool:
    """Return whether a key column differs between the two tuples. An unsent value counts as the same.

    `keys[begin:end]` marks the columns of the key.
    """
    i, j = new + 2, old + 2
    for c in range(begin, end):
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
        if keys[c] and new_kind != 117:
            if new_kind != old_kind or new_size != old_size:
                return True
            for k in range(new_size):
                if b[i + k] != b[j + k]:
                    return True
        i += new_size
        j += old_size
    return False


@kernel
def _slot_of(known: Ints, oid: Word) -> Word:
    """Return the slot of the table's current schema; -1 if it has not been described."""
    low, high = 0, known.shape[1]
    while low < high:
        middle = (low + high) // 2
        if known[_OID, middle] < oid:
            low = middle + 1
        else:
            high = middle
    return known[_SLOT_OF, low] if low < known.shape[1] and known[_OID, low] == oid else _UNKNOWN


@kernel
def _begin(b: Bytes, i: Word, under_way: Ints) -> None:
    under_way[_INSIDE] = 1
    under_way[_FINAL] = u64(b, i + 1)
    under_way[_TIME] = u64(b, i + 9) + EPOCH_2000
    # 32 bits on the wire; the epoch is the one that brings it nearest to the last id seen.
    near = under_way[_XID]
    xid = (near & ~np.int64(0xFFFFFFFF)) | u32(b, i + 17)
    if xid - near > 1 << 31:
        xid -= 1 << 32
    elif near - xid > 1 << 31:
        xid += 1 << 32
    under_way[_XID] = xid


@kernel
def _put(what: Any, where: Ints, row: Word, slot: Word, op: Word, how: Word, tx: Word, index: Word) -> None:
    what[_SLOT, row] = slot
    what[_OP, row] = op
    what[_HOW, row] = how
    what[_TX, row] = tx
    what[_TX_INDEX, row] = index
    where[_NEW, row] = where[_OLD, row] = -1


@kernel
def _tuples(b: Bytes, i: Word, end: Word, columns: Word) -> tuple[Word, Word, Word]:
    """Return the offsets of the change's old and new row at `i`, and `FULL_BEFORE`.

    An offset is -1 if the row was not sent.

    `FULL_BEFORE` is set for an update that has its whole old row. `_MALFORMED` if the tuples do not fit there, or do
    not have that many columns.
    """
    q, old, new, how = i + 5, -1, -1, 0
    if b[q] == 75 or b[q] == 79:  # Key or Old
        old, how = q + 1, FULL_BEFORE if b[q] == 79 and b[i] == 85 else 0
        q = _skip_tuple(b, old, end)
        if q < 0 or u16(b, old) != columns:
            return old, new, _MALFORMED
    if b[i] == 68:
        return old, new, how if old >= 0 else _MALFORMED
    if q >= end or b[q] != 78:
        return old, new, _MALFORMED
    new = q + 1
    q = _skip_tuple(b, new, end)
    return old, new, how if q >= 0 and u16(b, new) == columns else _MALFORMED


@kernel
def _truncate(
    b: Bytes, i: Word, end: Word, known: Ints, what: Any, where: Ints, rows: Word, tx: Word, first: Word
) -> Word:
    """Return the number of rows after the truncate at `i`, or an error code. It makes one row per table."""
    if end - i < 6 or end - i < 6 + 4 * u32(b, i + 1):
        return _MALFORMED
    for k in range(u32(b, i + 1)):
        slot = _slot_of(known, u32(b, i + 6 + 4 * k))
        if slot < 0:
            return _UNKNOWN
        if k >= known.shape[1]:  # one is named twice: four bytes would make rows of any number of columns
            return _MALFORMED
        _put(what, where, rows, slot, _TRUNCATE, 0, tx, rows - first)
        rows += 1
    return rows


@kernel
def _message(b: Bytes, i: Word, end: Word, inside: bool) -> tuple[Word, Word]:
    """Return where prefix and content of the message at `i` begin; or `_MALFORMED`, twice."""
    prefix = i + 10
    at = prefix
    while at < end and b[at] != 0:
        at += 1
    content, end = at + 5, end if inside else end - CLOCK_SIZE
    if content > end or content + u32(b, at + 1) > end or (b[i + 1] & 1 != 0) != inside:
        return _MALFORMED, _MALFORMED
    return prefix, content


@kernel
def _assign(
    b: Bytes,
    starts: Ints,
    messages: Word,
    after: Word,
    under_way: Ints,
    known: Ints,
    announced: Ints,
    shapes: Ints,
    keys: Bytes,
    what: Any,
    where: Ints,
    ended: Ints,
) -> tuple[Word, Word, Word]:
    """Return rows made, transactions that ended and are kept, and the first error.

    The error is -1 if there is none, else message * 4 plus 1 or 2, for `_UNKNOWN` or `_MALFORMED`.

    The messages may begin and end inside a transaction, which is then `under_way`. The branch for row changes is
    written out here. A function of that length would have the references to all its arrays counted at each call, which
    doubles the time of this loop.
    """
    known = known.copy()
    rows, txs, heard = 0, 0, 0
    continued = under_way[_INSIDE] != 0
    # The first row of the transaction under way. Before the first one here if it has rows already, so that `rows -
    # first` is always the row's index in its transaction.
    first = -under_way[_INDEX] if continued else 0
    ended[_TX_TIME, 0], ended[_TX_ID, 0] = under_way[_TIME], under_way[_XID]
    for m in range(messages):
        i, end = starts[m], starts[m + 1]
        kind, inside, made = b[i], under_way[_INSIDE] != 0, rows
        if kind == 73 or kind == 85 or kind == 68:  # Insert, Update, Delete
            slot = _slot_of(known, u32(b, i + 1)) if inside and end - i >= 8 else _MALFORMED
            if slot < 0:
                return rows, txs, m * 4 - slot
            columns, keys_at = shapes[_COLUMNS, slot], shapes[_KEYS_AT, slot]
            old, new, how = _tuples(b, i, end, columns)
            if how < 0:
                return rows, txs, m * 4 - how
            op = _INSERT if kind == 73 else _UPDATE if kind == 85 else _DELETE
            if kind == 85 and old >= 0 and _key_moved(b, new, old, keys, keys_at, keys_at + columns):
                _put(what, where, rows, slot, _DELETE, 0, txs, rows - first)
                where[_OLD, rows] = old
                rows += 1
                op, how = _INSERT, how | MOVED
            _put(what, where, rows, slot, op, how, txs, rows - first)
            where[_NEW, rows], where[_OLD, rows] = new, old
            made = rows + 1
        elif kind == 66:  # Begin
            if inside or end - i < 21:
                made = _MALFORMED
            else:
                _begin(b, i, under_way)
                first = rows
                ended[_TX_TIME, txs], ended[_TX_ID, txs] = under_way[_TIME], under_way[_XID]
        elif kind == 67:  # Commit
            finish = u64(b, i + 10) if inside and end - i >= 26 else 0
            over = np.uint64(finish) <= np.uint64(after)
            # A decision made from its beginning must not differ from its end: rows would be lost or doubled.
            if finish == 0 or (continued and over != _is_over(under_way, after)):
                made = _MALFORMED
            elif over:
                made = max(first, 0)
            else:
                ended[_TX_END, txs] = finish
                txs += 1
            under_way[_INSIDE], continued = 0, False
        elif kind == 84:  # Truncate
            made = _truncate(b, i, end, known, what, where, rows, txs, first) if inside else _MALFORMED
        elif kind == 82:  # Relation
            known[_SLOT_OF, np.searchsorted(known[_OID], announced[_OID, heard])] = announced[_SLOT_OF, heard]
            heard += 1
        elif kind == 77:  # Message
            prefix, content = _message(b, i, end, inside)
            wanted = announced[_SLOT_OF, heard] == _MESSAGE_SLOT
            heard += 1
            if prefix < 0:
                made = _MALFORMED
            elif wanted and (inside or np.uint64(u64(b, i + 2)) > np.uint64(after)):
                if not inside:
                    ended[_TX_END, txs], ended[_TX_ID, txs] = u64(b, i + 2), 0
                    ended[_TX_TIME, txs] = u64(b, end - CLOCK_SIZE) + EPOCH_2000
                    first = rows
                _put(what, where, rows, _MESSAGE_SLOT, _MESSAGE, 0, txs, rows - first)
                where[_NEW, rows], where[_OLD, rows] = prefix, content
                made = rows + 1
                txs += not inside
        elif kind != 79 and kind != 89:  # Origin and Type carry no row
            made = _MALFORMED
        if made < 0:
            return rows, txs, m * 4 - made
        rows = made
    under_way[_INDEX] = rows - first
    return rows, txs, -1


@kernel
def _is_over(under_way: Ints, after: Word) -> bool:
    """Return whether the transaction under way ends at or before `after`. Its beginning says so.

    That is where its commit record begins, and `after` is never inside a record.
    """
    return bool(np.uint64(under_way[_FINAL]) < np.uint64(after))


class Decoder:
    """Decodes what one connection sends.

    It remembers the schema of each relation and, for a transaction that arrives in parts, what its beginning said. A
    new connection begins with a new decoder, and so does one whose bytes were refused.

    `describe` turns relation messages into schemas; it may read the catalogue, so the caller provides it. `wanted`
    decides by its prefix whether an application's message is kept.
    """

    def __init__(
        self,
        describe: Describe,
        xid_near: int = 0,
        wanted: Callable[[str], bool] | None = None,
        text: TextHandling = TextHandling.SOUND,
    ) -> None:
        self._describe, self._text = describe, text
        self._wanted = functools.lru_cache(PREFIXES_MAX)(wanted) if wanted else None
        self._kinds: dict[pa.DataType, int] = {}
        self._shapes = [TableLayout(MESSAGE_STREAM, self._kinds)]
        self._layout = _layout(self._shapes)
        self._slot_of_oid: dict[int, int] = {}
        self._under_way = np.zeros(5, np.int64)
        self._under_way[_XID] = xid_near
        self._delivered = False
        """True if rows of the transaction under way have been delivered in an open window."""

    @property
    def inside(self) -> bool:
        """True if the last decoded part left a transaction open."""
        return bool(self._under_way[_INSIDE])

    def decode(self, b: Bytes, starts: Ints, messages: int, after: Lsn, end: Lsn) -> Window:
        """Return the window of these messages.

        They end on a transaction boundary, and begin on one or where the last part ended.
        """
        rows, txs = self._assign(b, starts, messages, after)
        if rows.tx_end is None:
            raise _violation("malformed message", messages, after)
        continues, self._delivered = self._delivered, False
        continued_end = Lsn(int(rows.tx_end[0])) if continues else None
        if continued_end is not None and continued_end > end:
            raise _violation("a transaction ends after those that follow it", messages, after)
        return Window(
            start=after,
            end=end,
            batches=tuple(self._batches(b, rows)),
            transactions=txs,
            rows=int(rows.slot.size),
            last_committed_at=int(rows.tx_time[:txs].max()) if txs else None,
            continues=continues,
            continued_end=continued_end,
        )

    def decode_part(self, b: Bytes, starts: Ints, messages: int, after: Lsn) -> Window | None:
        """Return the open window of these messages. All are of one transaction that does not end among them.

        None if they make no row, as in every part of a transaction that ends at or before `after`.
        """
        rows, txs = self._assign(b, starts, messages, after)
        if not self.inside or txs:
            raise _violation("malformed message", messages, after)
        if not rows.slot.size or _is_over(self._under_way, _signed(after.value)):
            return None
        continues, self._delivered = self._delivered, True
        return Window(
            start=after,
            end=after,
            batches=tuple(self._batches(b, rows)),
            rows=int(rows.slot.size),
            open=True,
            continues=continues,
        )

    def _assign(self, b: Bytes, starts: Ints, messages: int, after: Lsn) -> tuple[WindowRows, int]:
        special = np.empty(1024, np.int64)
        found, rows_max = _survey(b, starts, messages, special)
        if found > special.size:
            special = np.empty(found, np.int64)
            _survey(b, starts, messages, special)
        before = dict(self._slot_of_oid)
        announced = self._announced(b, starts, special[:found])
        oids = sorted(self._slot_of_oid)
        known = np.array([oids, [before.get(oid, -1) for oid in oids]], np.int64)
        shapes, keys = self._layout
        what, where = np.empty((5, rows_max), np.int32), np.empty((2, rows_max), np.int64)
        ended = np.empty((3, messages + 1), np.int64)
        rows, txs, error = _assign(
            b,
            starts,
            messages,
            _signed(after.value),
            self._under_way,
            known,
            announced,
            shapes,
            keys,
            what,
            where,
            ended,
        )
        if error >= 0:
            raise _violation(
                "a change arrived before its table was described" if error % 4 == -_UNKNOWN else "malformed message",
                error // 4,
                after,
            )
        what, where = what[:, :rows], where[:, :rows]
        rows_made = WindowRows(
            slot=what[_SLOT],
            op=what[_OP],
            flags=what[_HOW],
            tx=what[_TX],
            index=what[_TX_INDEX],
            new=where[_NEW],
            old=where[_OLD],
            tx_end=None if self.inside else ended[_TX_END].view(np.uint64),
            tx_time=ended[_TX_TIME],
            tx_id=ended[_TX_ID],
        )
        return rows_made, int(txs)

    def _announced(self, b: Bytes, starts: Ints, special: Ints) -> Ints:
        """Learn the schemas described in this window; a schema seen before keeps its slot."""
        announced = np.full((2, special.size), _MESSAGE_SLOT, np.int64)
        kinds = b[starts[special]]
        if self._wanted:
            for k in np.flatnonzero(kinds == 77):
                if not self._wanted(_prefix(b[starts[special[k]] : starts[special[k] + 1]])):
                    announced[_SLOT_OF, k] = _UNKNOWN
        relations = np.flatnonzero(kinds == 82)
        messages = [b[starts[m] : starts[m + 1]].tobytes() for m in special[relations]]
        for k, schema in zip(relations, self._describe(messages) if messages else (), strict=True):
            known = self._slot_of_oid.get(schema.relation)
            if known is None or not self._shapes[known].schema.covers(schema):
                known = len(self._shapes)
                self._shapes.append(TableLayout(schema, self._kinds))
            self._slot_of_oid[schema.relation] = known
            announced[_OID, k], announced[_SLOT_OF, k] = schema.relation, known
        if relations.size:
            self._layout = _layout(self._shapes)
        return announced

    def _batches(self, b: Bytes, rows: WindowRows) -> Iterator[ChangeBatch]:
        """Yield a batch for each table and schema, as many at once as possible.

        Several batches, where one would be too large for Arrow's offsets or for memory.
        """
        order = np.argsort(rows.slot, kind="stable")
        slots = rows.slot[order]
        types = list(self._kinds)
        message_count = int(np.searchsorted(slots, _MESSAGE_SLOT, side="right"))
        if message_count:
            yield build_message_batch(b, self._shapes[_MESSAGE_SLOT], rows, order[:message_count], self._text)
            order, slots = order[message_count:], slots[message_count:]
        if b.size > BATCH_BYTES_MAX or order.size * int(self._layout[0][_COLUMNS].max(initial=1)) > BATCH_CELLS_MAX:
            yield from self._large_batches(b, rows, order, slots, types)
        elif order.size:
            cuts = np.concatenate([[0], np.flatnonzero(slots[1:] != slots[:-1]) + 1, [order.size]])
            layouts = [self._shapes[slot] for slot in slots[cuts[:-1]].tolist()]
            yield from build_batches(b, layouts, types, rows, order, cuts, self._text)

    def _large_batches(
        self, b: Bytes, rows: WindowRows, order: Ints, slots: npt.NDArray[np.int32], types: list[pa.DataType]
    ) -> Iterator[ChangeBatch]:
        # Where a batch has to begin because of its size: pieces of the cells found so far, and of the bytes.
        piece = np.cumsum(self._layout[0][_COLUMNS][slots]) // BATCH_CELLS_MAX
        if b.size > BATCH_BYTES_MAX:
            # A truncate has no tuple: -1 in both.
            piece = piece + np.maximum(0, np.maximum(rows.new, rows.old)[order]) // BATCH_BYTES_MAX
        new_piece = np.diff(piece, prepend=-1) != 0
        begins = np.flatnonzero((np.diff(slots, prepend=-1) != 0) | new_piece)
        groups = np.flatnonzero(new_piece[begins])
        for low, high in itertools.pairwise([*groups.tolist(), begins.size]):
            end = begins[high] if high < begins.size else order.size
            cuts = np.append(begins[low:high], end)
            layouts = [self._shapes[slot] for slot in slots[begins[low:high]]]
            yield from build_batches(b, layouts, types, rows, order[cuts[0] : end], cuts - cuts[0], self._text)


def _layout(layouts: Sequence[TableLayout]) -> tuple[Ints, Bytes]:
    """Return the layout of all schemas for the kernels.

    It has column counts, where keys begin, and which columns are keys.
    """
    schemas = [layout.schema for layout in layouts]
    columns = [len(schema.columns) for schema in schemas]
    keys = np.array([name in schema.key for schema in schemas for name in schema.names], np.uint8)
    return np.array([columns, np.cumsum([0, *columns])[:-1]], np.int64), keys


def _prefix(message: Bytes) -> str:
    return message[10:].tobytes().partition(b"\0")[0].decode(errors="replace")


def _signed(word: int) -> int:
    """Return the same 64 bits as the kernels see them."""
    return word - (1 << 64) if word >= 1 << 63 else word


def _violation(what: str, number: int, after: Lsn) -> ProtocolViolation:
    return ProtocolViolation(
        what,
        number=number,
        after=after,
        hint="Restart the capture; if it happens again, report it with a recording (docs/guides/testing.md).",
    )
