"""Turns COPY's binary format into Arrow batches. Every value is moved once, from the wire to Arrow's memory.

One pass over a piece measures it and checks every length. So memory is allocated once, and the second pass needs no
checks of its own. A column's type is data, so two kernels read every table. A type without a kernel here is sent as its
text and read by the kernels that read the stream's.

The binary value must equal the text value: byte for byte the one that the stream has. The format:
https://www.postgresql.org/docs/current/sql-copy.html. Each value's layout is defined by its type's `send` function.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.capture.postgres import values
from tailrace.capture.postgres.batches import UnfitCells, convert_noting_unfit, unfit_column
from tailrace.capture.postgres.invalid_text import TEXT_HINT, TextHandling, check_text
from tailrace.capture.postgres.types import UNFIT_HINT, arrow_type
from tailrace.capture.postgres.values import (
    FIRST_DAY,
    FIRST_INSTANT,
    LAST_DAY,
    LAST_INSTANT,
    NULL,
    Bytes,
    Cells,
    ConvertedColumn,
    Ints,
    Word,
    u16,
    u32,
    u64,
)
from tailrace.errors import SourceError, ValueUnfit
from tailrace.kernels import copy_bytes, kernel
from tailrace.model.schema import Column, TableSchema

CTID = Column(name="ctid", source_type="tid", type=pa.string())
"""Location of a row in its table. No table has a column of its own of that name."""

# How a column is sent. PRINTED is the text of any type.
PRINTED, BOOL, INT2, INT4, INT8, OID, FLOAT4, FLOAT8, DATE, INSTANT, DECIMAL, BYTES, JSONB, UUID = range(14)

KINDS = {
    16: BOOL, 21: INT2, 23: INT4, 20: INT8, 26: OID, 700: FLOAT4, 701: FLOAT8, 1082: DATE, 1114: INSTANT, 1184: INSTANT,
    1700: DECIMAL, 17: BYTES, 25: BYTES, 1042: BYTES, 1043: BYTES, 19: BYTES, 114: BYTES, 3802: JSONB, 2950: UUID,
}  # fmt: skip
"""By a type's number. `"char"` is not among them: its byte is not text."""
_ANY = -1
_SENT = np.array([_ANY, 1, 2, 4, 8, 4, 4, 8, 4, 8, _ANY, _ANY, _ANY, 16], np.int64)
"""By kind: size of a value on the wire, in bytes."""
_KEPT = {INT2: 2, INT4: 4, INT8: 8, OID: 8, FLOAT4: 4, FLOAT8: 8, DATE: 4, INSTANT: 8, DECIMAL: 16}
"""By kind: size of a value in Arrow, for kinds of a fixed size."""
_UUID_TEXT = 36

SIGNATURE = b"PGCOPY\n\xff\r\n\0"
_HEAD_SIZE = len(SIGNATURE) + 8
_END = 0xFFFF
_MISSING = 0xFFFFFFFF
_ALIGNED = 64
_COPY_BYTES_MIN = 16
"""Shorter values are moved as if they had this length."""
_SPARE = 16
"""Bytes after a column's last that are ours, as short moves write beyond the end."""

_DAYS_TO_2000 = 10_957
_MICROS_TO_2000 = _DAYS_TO_2000 * 86_400 * 1_000_000
_INT4_MAX, _INT8_MAX = (1 << 31) - 1, (1 << 63) - 1
_NAN4, _NAN8 = 0x7FC00000, 0x7FF8 << 48
_INFINITE4, _INFINITE8 = 0x7F800000, 0x7FF0 << 48
_NEGATIVE = 0x4000
_SMALL = np.uint64(1_800_000_000_000_000)
"""Below it a word can be multiplied by 10,000 and have a digit added."""
_LARGE = np.uint64((1 << 63) - 1)
_TOO_LARGE = np.uint64(1 << 63)
_TENS = np.array([1, 10, 100, 1_000, 10_000], np.uint64)
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)

_FITS, _ABSENT, _UNFIT, _BROKEN = 0, 1, 2, 3


def binary_kind(number: int, modifier: int, wanted: pa.DataType) -> int:
    """Return how a column of this type number is sent, to become this Arrow type."""
    kind = KINDS.get(number, PRINTED)
    if arrow_type(number, modifier) != wanted or (kind == DECIMAL and not pa.types.is_decimal(wanted)):
        return PRINTED
    return kind


# --- kernels -----------------------------------------------------------------------------------------------


@kernel
def _i16(b: Bytes, i: Word) -> Word:
    return (u16(b, i) ^ 0x8000) - 0x8000


@kernel
def _i32(b: Bytes, i: Word) -> Word:
    return (u32(b, i) ^ 0x80000000) - 0x80000000


@kernel
def _measure(b: Bytes, at: Word, end: Word, sent: Ints, totals: Ints) -> Word:
    """Return the number of rows, -1 if malformed.

    `totals` gets each column's bytes, and in its last entry 1 if COPY's end is there.
    """
    columns, rows, i = sent.size, 0, at
    while i < end:
        if i + 2 > end:
            return -1
        fields = u16(b, i)
        i += 2
        if fields != columns:
            if fields != _END or i != end:
                return -1
            totals[columns] = 1
            break
        for c in range(columns):
            if i + 4 > end:
                return -1
            n = u32(b, i)
            i += 4
            if n == _MISSING:
                continue
            if n > end - i or (n != sent[c] and sent[c] >= 0):
                return -1
            totals[c] += n
            i += n
        rows += 1
    return rows


@kernel
def _move(b: Bytes, i: Word, n: Word, room: Bytes, j: Word) -> None:
    """Copy bytes to their final offset. The `_SPARE` bytes after them may be overwritten."""
    if n > _COPY_BYTES_MIN:
        copy_bytes(room.ctypes.data + j, b.ctypes.data + i, n)
    elif i + _COPY_BYTES_MIN <= b.size:
        copy_bytes(room.ctypes.data + j, b.ctypes.data + i, _COPY_BYTES_MIN)
    else:
        for k in range(n):
            room[j + k] = b[i + k]


@kernel
def _scaled(high: Word, low: Word, times: Word, more: Word) -> tuple[Word, Word]:
    """Return a two-word number times `times` plus `more`.

    The upper word is `_TOO_LARGE` if the result is 2**127 or above.
    """
    if high == 0 and low < _SMALL:
        return np.uint64(0), low * times + more
    if high > _LARGE // times:
        return _TOO_LARGE, np.uint64(0)
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    part = (low & mask) * times + more
    upper = (low >> half) * times + (part >> half)
    return high * times + (upper >> half), (part & mask) | ((upper & mask) << half)


@kernel
def _decimal(b: Bytes, i: Word, n: Word, scale: Word, high_limit: Word, low_limit: Word) -> tuple[Word, Word, Word]:
    """Return whether a numeric can be read and fits, and its 128 bits.

    Its digits are in base 10,000, the first of them times 10,000 ** weight; trailing zeros are left out.
    """
    nothing = np.uint64(0)
    if n < 8 or n != 8 + 2 * u16(b, i):
        return _BROKEN, nothing, nothing
    digits, sign, places = u16(b, i), u16(b, i + 4), u16(b, i + 6)
    weight = _i16(b, i + 2)
    # Any other sign is that of a NaN or of an infinity.
    if (sign != 0 and sign != _NEGATIVE) or places > scale:
        return _UNFIT, nothing, nothing
    if digits == 0:
        return _FITS, nothing, nothing
    zeros = scale + 4 * (weight - digits + 1)
    if zeros <= -4:
        return _UNFIT, nothing, nothing
    high, low = np.uint64(0), np.uint64(0)
    for k in range(digits):
        digit = np.uint64(u16(b, i + 8 + 2 * k))
        if digit >= _TENS[4]:
            return _BROKEN, nothing, nothing
        times = _TENS[4]
        if zeros < 0 and k == digits - 1:  # the last digit extends beyond the last decimal digit
            times = _TENS[4 + zeros]
            if digit % _TENS[-zeros] != 0:
                return _UNFIT, nothing, nothing
            digit //= _TENS[-zeros]
        high, low = _scaled(high, low, times, digit)
    while zeros > 0 and high != _TOO_LARGE and (high != 0 or low != 0):
        high, low = _scaled(high, low, _TENS[min(zeros, 4)], nothing)
        zeros -= 4
    if high > high_limit or (high == high_limit and low >= low_limit):
        return _UNFIT, nothing, nothing
    if sign == _NEGATIVE:
        low = ~low + np.uint64(1)
        high = ~high + (np.uint64(1) if low == 0 else np.uint64(0))
    return _FITS, high, low


@kernel
def _print_uuid(b: Bytes, i: Word, room: Bytes, j: Word) -> None:
    for k in range(16):
        if k == 4 or k == 6 or k == 8 or k == 10:
            room[j] = 45
            j += 1
        room[j] = _HEX[b[i + k] >> 4]
        room[j + 1] = _HEX[b[i + k] & 15]
        j += 2


@kernel
def _fill(
    b: Bytes,
    at: Word,
    rows: Word,
    kinds: Ints,
    scales: Ints,
    limits: Any,
    valid: Ints,
    places: Ints,
    data: Ints,
    room: Bytes,
    shorts: Any,
    halves: Any,
    words: Any,
    naturals: Any,
    cell_at: Ints,
    cell_size: Ints,
    nulls: Ints,
    unfit: Ints,
) -> bool:
    """Write the values of measured rows to their columns; return whether all could be read.

    `shorts`, `halves`, `words` and, unsigned, `naturals` are `room` in units of 2, 4, 8 and 8 bytes. `valid` has where
    the bits for a column's nulls begin. `places` has where its values, offsets or cells begin, in units of their own
    size, and `data` where its bytes do. `nulls` counts, and `unfit` has the first row whose value its column's type
    cannot hold.
    """
    i = at
    for r in range(rows):
        i += 2
        for c in range(kinds.size):
            n = u32(b, i)
            i += 4
            kind, place, what = kinds[c], places[c] + r, _FITS
            if n == _MISSING:
                what, n = _ABSENT, 0
            elif kind == INT8:
                words[place] = u64(b, i)
            elif kind == INT4:
                halves[place] = _i32(b, i)
            elif kind == BYTES:
                begin = halves[place]
                _move(b, i, n, room, data[c] + begin)
                halves[place + 1] = begin + n
            elif kind == INSTANT:
                instant = u64(b, i)
                if instant == _INT8_MAX:
                    words[place] = LAST_INSTANT
                elif instant == -_INT8_MAX - 1:
                    words[place] = FIRST_INSTANT
                elif instant > _INT8_MAX - _MICROS_TO_2000:
                    what = _UNFIT
                else:
                    words[place] = instant + _MICROS_TO_2000
            elif kind == DECIMAL:
                what, high, low = _decimal(b, i, n, scales[c], limits[2 * c], limits[2 * c + 1])
                if what == _FITS:
                    naturals[place + r] = low
                    naturals[place + r + 1] = high
            elif kind == BOOL:
                if b[i] != 0:
                    room[places[c] + (r >> 3)] |= 1 << (r & 7)
            elif kind == FLOAT8:
                bits = u64(b, i)
                words[place] = _NAN8 if bits & _INT8_MAX > _INFINITE8 else bits
            elif kind == FLOAT4:
                bits = _i32(b, i)
                halves[place] = _NAN4 if bits & _INT4_MAX > _INFINITE4 else bits
            elif kind == DATE:
                day = _i32(b, i)
                if day == _INT4_MAX:
                    halves[place] = LAST_DAY
                elif day == -_INT4_MAX - 1:
                    halves[place] = FIRST_DAY
                elif day > _INT4_MAX - _DAYS_TO_2000:
                    what = _UNFIT
                else:
                    halves[place] = day + _DAYS_TO_2000
            elif kind == UUID:
                _print_uuid(b, i, room, data[c] + halves[place])
                halves[place + 1] = halves[place] + _UUID_TEXT
            elif kind == JSONB:  # its text, preceded by the version of its format
                if n == 0 or b[i] != 1:
                    return False
                begin = halves[place]
                _move(b, i + 1, n - 1, room, data[c] + begin)
                halves[place + 1] = begin + n - 1
            elif kind == INT2:
                shorts[place] = _i16(b, i)
            elif kind == OID:
                words[place] = u32(b, i)
            else:
                cell_at[place] = i
                cell_size[place] = n
            if what != _FITS:
                if what == _BROKEN:
                    return False
                if what == _UNFIT and unfit[c] < 0:
                    unfit[c] = r
                nulls[c] += 1
                room[valid[c] + (r >> 3)] &= ~(1 << (r & 7)) & 255
                if kind in (INT8, INSTANT, FLOAT8, OID):
                    words[place] = 0
                elif kind in (INT4, FLOAT4, DATE):
                    halves[place] = 0
                elif kind in (BYTES, UUID, JSONB):
                    halves[place + 1] = halves[place]
                elif kind == INT2:
                    shorts[place] = 0
                elif kind == DECIMAL:
                    words[place + r] = 0
                    words[place + r + 1] = 0
                elif kind == PRINTED:
                    cell_size[place] = NULL
            i += n
    return True


# --- batches -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ColumnBuffers:
    """The offsets of one batch's columns in the memory that they share."""

    memory: pa.Buffer
    valid: Ints
    places: Ints
    """In bytes; for a printed column the index of its first cell."""
    data: Ints


@dataclass(frozen=True)
class _Filled:
    """The same columns with their values. Printed ones stay in the buffer they arrived in."""

    laid: _ColumnBuffers
    room: Bytes
    printed: Cells
    nulls: Ints
    unfit: Ints

    def cells(self, c: int, rows: int) -> Cells:
        """Return the cells of a printed column."""
        some = slice(int(self.laid.places[c]), int(self.laid.places[c]) + rows)
        return Cells(self.printed.buffer, self.printed.at[some], self.printed.size[some])


class BinaryRows:
    """Reads pieces of a table's copy, one after the other. `kinds` says how each column is sent."""

    def __init__(self, schema: TableSchema, kinds: Sequence[int], text: TextHandling = TextHandling.SOUND) -> None:
        self._schema, self._text = schema, text
        self._fields = pa.schema(schema.row_fields())
        self._kinds = np.array(kinds, np.int64)
        self._sent = _SENT[self._kinds]
        types = [column.type for column in schema.columns]
        decimals = [kind if pa.types.is_decimal(kind) else None for kind in types]
        self._scales = np.array([kind.scale if kind else 0 for kind in decimals], np.int64)
        limits = [divmod(10**kind.precision, 1 << 64) if kind else (0, 0) for kind in decimals]
        self._limits = np.array(limits, np.uint64).reshape(-1)

    def batches(self, pieces: Iterable[tuple[Bytes, int]]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of pieces with whole rows. The first piece begins with COPY's head, the last has its end."""
        for found in self._measured(pieces):
            yield self._batch(*found)

    def marked(self, pieces: Iterable[tuple[Bytes, int]]) -> Iterator[tuple[pa.RecordBatch, pa.Array]]:
        """Yield all rows and their `_unfit`, where every column is printed. Unfit values are null in the rows."""
        assert (self._kinds == PRINTED).all(), "the text of an unfit value is needed"
        for buffer, at, rows, totals in self._measured(pieces):
            filled, unfit = self._filled(buffer, at, rows, totals), list[UnfitCells]()
            found = [
                convert_noting_unfit(filled.cells(c, rows), column, column.name, unfit, self._text)
                for c, column in enumerate(self._schema.columns)
            ]
            yield pa.RecordBatch.from_arrays(found, schema=self._fields), unfit_column(unfit, rows)

    def _measured(self, pieces: Iterable[tuple[Bytes, int]]) -> Iterator[tuple[Bytes, int, int, Ints]]:
        begun = ended = False
        for buffer, size in pieces:
            at = 0 if begun else self._after_head(buffer, size)
            begun = True
            totals = np.zeros(self._kinds.size + 1, np.int64)
            rows = _measure(buffer, at, size, self._sent, totals)
            if rows < 0 or ended:
                raise self._unreadable()
            ended = bool(totals[-1])
            if rows:
                yield buffer, at, rows, totals
        if not ended:
            raise self._unreadable()

    def _after_head(self, buffer: Bytes, size: int) -> int:
        head = buffer[: min(size, _HEAD_SIZE)].tobytes()
        # Flags would mean an unknown format. What follows them may be skipped.
        end = _HEAD_SIZE + int.from_bytes(head[-4:], "big")
        if head[:-4] != SIGNATURE + bytes(4) or end > size:
            raise self._unreadable()
        return end

    def _filled(self, b: Bytes, at: int, rows: int, totals: Ints) -> _Filled:
        laid = self._lay_out(rows, totals)
        room = np.frombuffer(laid.memory, np.uint8)
        printed = int(np.count_nonzero(self._kinds == PRINTED)) * rows
        cell_at, cell_size = np.empty(printed, np.int64), np.empty(printed, np.int64)
        nulls, unfit = np.zeros(self._kinds.size, np.int64), np.full(self._kinds.size, -1, np.int64)
        if not _fill(
            b,
            at,
            rows,
            self._kinds,
            self._scales,
            self._limits,
            laid.valid,
            laid.places // _UNITS[self._kinds],
            laid.data,
            room,
            room.view(np.int16),
            room.view(np.int32),
            room.view(np.int64),
            room.view(np.uint64),
            cell_at,
            cell_size,
            nulls,
            unfit,
        ):
            raise self._unreadable()
        return _Filled(laid, room, Cells(b, cell_at, cell_size), nulls, unfit)

    def _batch(self, b: Bytes, at: int, rows: int, totals: Ints) -> pa.RecordBatch:
        filled = self._filled(b, at, rows, totals)
        found: list[pa.Array] = []
        for c, column in enumerate(self._schema.columns):
            if self._kinds[c] == PRINTED:
                typed = values.convert_cells(filled.cells(c, rows), column.type)
            else:
                first = np.array([filled.unfit[c]] if filled.unfit[c] >= 0 else [], np.int64)
                typed = ConvertedColumn(self._column(filled.laid, filled.room, c, rows, int(filled.nulls[c])), first)
            typed = check_text(typed, self._text)
            found.append(typed.column)
            if typed.unfit.size:
                raise self._unfit(column, found[0], int(typed.unfit[0]))
        if not found:  # then nothing else would say how many rows there are
            return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))
        return pa.RecordBatch.from_arrays(found, schema=self._fields)

    def _lay_out(self, rows: int, totals: Ints) -> _ColumnBuffers:
        """Return one piece of memory for all columns, every part aligned as Arrow wants it."""
        columns, end, cells = self._kinds.size, 0, 0
        valid, places, data = (np.zeros(columns, np.int64) for _ in range(3))
        bits = -(-rows // 8)

        def taken(size: int) -> int:
            nonlocal end
            at, end = end, end + -(-size // _ALIGNED) * _ALIGNED
            return at

        for c, kind in enumerate(self._kinds.tolist()):
            valid[c] = taken(bits)
            if kind == PRINTED:
                places[c] = cells
                cells += rows
            elif kind == BOOL:
                places[c] = taken(bits)
            elif kind in _KEPT:
                places[c] = taken(_KEPT[kind] * rows)
            else:
                places[c] = taken(4 * (rows + 1))
                size = int(totals[c]) // 16 * _UUID_TEXT if kind == UUID else int(totals[c])
                data[c] = taken(size + _SPARE)
        memory = pa.allocate_buffer(end)
        room = np.frombuffer(memory, np.uint8)
        for c, kind in enumerate(self._kinds.tolist()):
            room[valid[c] : valid[c] + bits] = 255
            if kind == BOOL:
                room[places[c] : places[c] + bits] = 0
            elif kind != PRINTED and kind not in _KEPT:
                room[places[c] : places[c] + 4] = 0
        return _ColumnBuffers(memory, valid, places, data)

    def _column(self, laid: _ColumnBuffers, room: Bytes, c: int, rows: int, nulls: int) -> pa.Array:
        kind, place = int(self._kinds[c]), int(laid.places[c])
        buffers = [laid.memory.slice(int(laid.valid[c]), -(-rows // 8)) if nulls else None]
        if kind == BOOL:
            buffers.append(laid.memory.slice(place, -(-rows // 8)))
        elif kind in _KEPT:
            buffers.append(laid.memory.slice(place, _KEPT[kind] * rows))
        else:
            size = int(room[place + 4 * rows : place + 4 * rows + 4].view(np.int32)[0])
            buffers += [laid.memory.slice(place, 4 * (rows + 1)), laid.memory.slice(int(laid.data[c]), size)]
        return pa.Array.from_buffers(self._schema.columns[c].type, rows, buffers, nulls)

    def _unreadable(self) -> SourceError:
        return SourceError(
            "the server's copy cannot be read", table=self._schema.table, hint="Report it with the server's version."
        )

    def _unfit(self, column: Column, first: pa.Array, row: int) -> ValueUnfit:
        place = {"ctid": first[row].as_py()} if self._schema.columns[0] is CTID else {}
        return ValueUnfit(
            "a value does not fit its column's type",
            table=self._schema.table,
            column=column.name,
            type=column.source_type,
            **place,
            hint=TEXT_HINT if pa.types.is_string(column.type) else UNFIT_HINT,
        )


_UNITS: npt.NDArray[np.int64] = np.array([1, 1, 2, 4, 8, 8, 4, 8, 4, 8, 8, 4, 4, 4], np.int64)
"""By kind: the unit in which the kernel counts a column's offset."""
