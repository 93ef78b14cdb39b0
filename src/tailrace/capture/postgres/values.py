"""Converts text values, as PostgreSQL prints them, to typed Arrow columns.

There is one pass per column, and no object per value. A *cell* is a range of a byte buffer: a start and a length, or
`NULL` / `ABSENT` (not sent) as the length. A value is converted exactly or it is reported unfit; a cell is never turned
into null because it could not be read. Stream and snapshot both use these functions, so their values are equal by
construction.

Documented rules: timestamp and date `infinity` become the last, `-infinity` the first instant of the years 1 to 9999.
Every finite value that Arrow's type can hold is kept, years before 1 and after 9999 too.

The file is longer than most because it has the kernels of all kinds of values together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.kernels import copy_bytes, kernel

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Word = Any
"""A number inside a kernel, where Python's and numpy's integers are the same."""

NULL, ABSENT = -1, -2
"""Lengths that mark a null and an unsent value."""

_NULL, _VALID, _UNFIT = 0, 1, 2
_COPY_BYTES_MIN = 16
"""Shorter values are copied faster byte by byte than by a call."""

SECOND = 1_000_000
DAY = 86_400 * SECOND
FIRST_DAY, LAST_DAY = -719_162, 2_932_896  # 0001-01-01 and 9999-12-31, in days from 1970
FIRST_INSTANT, LAST_INSTANT = FIRST_DAY * DAY, (LAST_DAY + 1) * DAY - 1
_UNCOMMON = -(1 << 63)
_DAY_LIMIT = 106_751_991  # the last day whose first instant fits 64 bits of microseconds
_INSTANT_LIMIT = (1 << 63) - 1
_DATE_LIMIT = 1 << 31  # days that fit 32 bits


# An unsigned index cannot count from the end, so no check is made, and all bytes of a number are loaded at once.
@kernel
def u16(b: Bytes, i: Word) -> Word:
    k = np.uint64(i)
    return (np.int64(b[k]) << 8) | np.int64(b[k + np.uint64(1)])


@kernel
def u32(b: Bytes, i: Word) -> Word:
    k = np.uint64(i)
    high = (np.int64(b[k]) << 24) | (np.int64(b[k + np.uint64(1)]) << 16)
    return high | (np.int64(b[k + np.uint64(2)]) << 8) | np.int64(b[k + np.uint64(3)])


@kernel
def u64(b: Bytes, i: Word) -> Word:
    return (u32(b, i) << 32) | u32(b, i + 4)


@kernel
def _integers(b: Bytes, at: Ints, size: Ints, out: Any, state: Bytes, low: Word, high: Word) -> None:
    for r in range(at.size):
        n = size[r]
        if n < 0:
            continue
        i, end = at[r], at[r] + n
        negative = n > 0 and b[i] == 45
        if negative:
            i += 1
        # The value is built below zero, where 64 bits reach one further: -2**63 has no positive twin.
        value, good = np.int64(0), i < end and end - i <= 19
        while i < end:
            digit = np.int64(b[i]) - 48
            if digit < 0 or digit > 9:
                good = False
                break
            value = value * 10 - digit
            i += 1
        # Nineteen digits overflow at most once, and then to above zero.
        good = good and value <= 0
        if not negative:
            good = good and (value != low or low != -(1 << 63))
            value = -value
        if good and low <= value <= high:
            out[r] = value
            state[r] = _VALID
        else:
            state[r] = _UNFIT


@kernel
def _booleans(b: Bytes, at: Ints, size: Ints, out: Bytes, state: Bytes) -> None:
    for r in range(at.size):
        if size[r] < 0:
            continue
        first = b[at[r]] if size[r] == 1 else 0
        out[r] = first == 116
        state[r] = _VALID if first == 116 or first == 102 else _UNFIT


@kernel
def _decimals(b: Bytes, at: Ints, size: Ints, out: Any, state: Bytes, precision: Word, scale: Word) -> None:
    """Write decimals as 128-bit little-endian two's complement; `out` has two unsigned words per row."""
    mask = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    for r in range(at.size):
        n = size[r]
        if n < 0:
            continue
        i, end = at[r], at[r] + n
        negative = n > 0 and b[i] == 45
        if negative:
            i += 1
        low, high = np.uint64(0), np.uint64(0)
        first, digits, fraction, seen_point, good = i, 0, 0, False, i < end
        padding = 0
        while good and (i < end or padding > 0):
            if i < end:
                c = b[i]
                i += 1
                if c == 46 and not seen_point:
                    seen_point = True
                    good = i - 1 > first and i < end
                    continue
                if c < 48 or c > 57:
                    good = False
                    break
                digit = np.uint64(c - 48)
                if seen_point:
                    fraction += 1
                if i == end:
                    padding = scale - fraction
            else:
                digit = np.uint64(0)
                padding -= 1
            if digits > 0 or digit != 0:
                digits += 1
            # (high, low) = (high, low) * 10 + digit, in 32-bit halves.
            part = (low & mask) * np.uint64(10) + digit
            upper = (low >> half) * np.uint64(10) + (part >> half)
            low = (part & mask) | ((upper & mask) << half)
            high = high * np.uint64(10) + (upper >> half)
            if digits > precision:
                good = False
        if not good or fraction > scale:
            state[r] = _UNFIT
            continue
        if negative:
            low = ~low + np.uint64(1)
            high = ~high + (np.uint64(1) if low == 0 else np.uint64(0))
        out[2 * r] = low
        out[2 * r + 1] = high
        state[r] = _VALID


@kernel
def _number(b: Bytes, i: Word, end: Word) -> tuple[Word, Word]:
    """Return the value of the digits from `i` on, and where they end."""
    value = np.int64(0)
    start = i
    while i < end and i - start < 9 and 48 <= b[i] <= 57:
        value = value * 10 + np.int64(b[i] - 48)
        i += 1
    return value, i


@kernel
def _days(year: Word, month: Word, day: Word) -> Word:
    """Return days from 1970 in the proleptic Gregorian calendar. Year 0 is 1 BC."""
    y = year - 1 if month <= 2 else year
    era = y // 400  # rounds down, before year 0 too
    of_era = y - era * 400
    of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5 + day - 1
    return era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468


@kernel
def _is_word(b: Bytes, at: Word, size: Word, word: Bytes) -> bool:
    if size != word.size:
        return False
    for j in range(size):
        if b[at + j] != word[j]:
            return False
    return True


@kernel
def _date_at(b: Bytes, i: Word, end: Word) -> tuple[bool, Word, Word]:
    """Return whether a date is at `i`, its packed days, and its end.

    Packed are year, month and day; BC is not considered yet.
    """
    year, j = _number(b, i, end)
    if j == i or j >= end or b[j] != 45:
        return False, 0, i
    month, k = _number(b, j + 1, end)
    if k != j + 3 or k >= end or b[k] != 45:
        return False, 0, i
    day, m = _number(b, k + 1, end)
    if m != k + 3:
        return False, 0, i
    return True, year * 10_000 + month * 100 + day, m


@kernel
def _ends_in_bc(b: Bytes, i: Word, end: Word) -> bool:
    return bool(end - i == 3 and b[i] == 32 and b[i + 1] == 66 and b[i + 2] == 67)


@kernel
def _is_day(year: Word, month: Word, day: Word) -> bool:
    """Return whether the calendar has this day."""
    if month < 1 or month > 12 or day < 1 or day > 31:
        return False
    if day <= 28:
        return True
    if month == 2:
        return bool(day == 29 and year % 4 == 0 and (year % 100 != 0 or year % 400 == 0))
    return bool(day <= 30 or not (month == 4 or month == 6 or month == 9 or month == 11))


@kernel
def _packed_days(packed: Word, bc: bool) -> tuple[bool, Word]:
    """Return whether there is such a day, and its number."""
    year = packed // 10_000
    if bc:
        year = 1 - year
    month, day = packed // 100 % 100, packed % 100
    return _is_day(year, month, day), _days(year, month, day)


@kernel
def _dates(b: Bytes, at: Ints, size: Ints, out: Any, state: Bytes, infinity: Bytes, minus: Bytes) -> None:
    for r in range(at.size):
        n = size[r]
        if n < 0:
            continue
        if _is_word(b, at[r], n, infinity):
            out[r] = LAST_DAY
            state[r] = _VALID
            continue
        if _is_word(b, at[r], n, minus):
            out[r] = FIRST_DAY
            state[r] = _VALID
            continue
        end = at[r] + n
        good, packed, i = _date_at(b, at[r], end)
        bc = good and _ends_in_bc(b, i, end)
        good = good and (bc or i == end)
        exists, days = _packed_days(packed, bc)
        if good and exists and -_DATE_LIMIT <= days < _DATE_LIMIT:
            out[r] = days
            state[r] = _VALID
        else:
            state[r] = _UNFIT


@kernel
def _time_at(b: Bytes, i: Word, end: Word) -> tuple[bool, Word, Word]:
    """Parse HH:MM:SS[.ffffff] at `i`: microseconds of the day and where it ends."""
    hour, j = _number(b, i, end)
    if j != i + 2 or j >= end or b[j] != 58:
        return False, 0, i
    minute, k = _number(b, j + 1, end)
    if k != j + 3 or k >= end or b[k] != 58:
        return False, 0, i
    second, m = _number(b, k + 1, end)
    if m != k + 3 or hour > 23 or minute > 59 or second > 59:
        return False, 0, i
    micros = np.int64(0)
    if m < end and b[m] == 46:
        micros, p = _number(b, m + 1, end)
        if p == m + 1 or p > m + 7:
            return False, 0, i
        for _ in range(6 - (p - m - 1)):
            micros = micros * 10
        m = p
    return True, ((hour * 60 + minute) * 60 + second) * SECOND + micros, m


@kernel
def _zone_at(b: Bytes, i: Word, end: Word) -> tuple[bool, Word, Word]:
    """Parse +HH[:MM[:SS]] at `i`: seconds east and where it ends; without a zone, zero."""
    if i >= end or (b[i] != 43 and b[i] != 45):
        return True, 0, i
    sign = 1 if b[i] == 43 else -1
    seconds, unit, i = np.int64(0), 3600, i + 1
    while unit > 0:
        part, j = _number(b, i, end)
        if j != i + 2:
            return False, 0, i
        seconds += part * unit
        unit //= 60
        i = j
        if unit > 0 and i < end and b[i] == 58:
            i += 1
        else:
            break
    return True, sign * seconds, i


@kernel
def _two(b: Bytes, i: Word) -> Word:
    """Parse two digits. Anything else is negative or too large for any part of a date."""
    tens, ones = np.int64(b[i]) - 48, np.int64(b[i + 1]) - 48
    return tens * 10 + ones if 0 <= tens <= 9 and 0 <= ones <= 9 else -10_000


@kernel
def _common_timestamp(b: Bytes, i: Word, n: Word) -> Word:
    """Parse `YYYY-MM-DD HH:MM:SS[.ffffff][+00]` fast; `_UNCOMMON` for any other text."""
    if n < 19 or b[i + 4] != 45 or b[i + 7] != 45 or b[i + 10] != 32 or b[i + 13] != 58 or b[i + 16] != 58:
        return _UNCOMMON
    year = _two(b, i) * 100 + _two(b, i + 2)
    month, day, hour = _two(b, i + 5), _two(b, i + 8), _two(b, i + 11)
    minute, second = _two(b, i + 14), _two(b, i + 17)
    if year < 0 or hour < 0 or hour > 23 or minute < 0 or minute > 59 or second < 0 or second > 59:
        return _UNCOMMON
    if not _is_day(year, month, day):
        return _UNCOMMON
    j, end, micros = i + 19, i + n, np.int64(0)
    if j < end and b[j] == 46:
        j += 1
        unit = 100_000
        while j < end and unit > 0 and 48 <= b[j] <= 57:
            micros += (np.int64(b[j]) - 48) * unit
            unit //= 10
            j += 1
        if j == i + 20:
            return _UNCOMMON
    if j != end and not (end - j == 3 and b[j] == 43 and b[j + 1] == 48 and b[j + 2] == 48):
        return _UNCOMMON
    return _days(year, month, day) * DAY + ((hour * 60 + minute) * 60 + second) * SECOND + micros


@kernel
def _timestamps(b: Bytes, at: Ints, size: Ints, out: Any, state: Bytes, infinity: Bytes, minus: Bytes) -> None:
    for r in range(at.size):
        n = size[r]
        if n < 0:
            continue
        common = _common_timestamp(b, at[r], n)
        if common != _UNCOMMON:
            out[r] = common
            state[r] = _VALID
            continue
        state[r] = _UNFIT
        if _is_word(b, at[r], n, infinity):
            out[r] = LAST_INSTANT
            state[r] = _VALID
            continue
        if _is_word(b, at[r], n, minus):
            out[r] = FIRST_INSTANT
            state[r] = _VALID
            continue
        end = at[r] + n
        good, packed, i = _date_at(b, at[r], end)
        if not good or i >= end or b[i] != 32:
            continue
        good, micros, i = _time_at(b, i + 1, end)
        if not good:
            continue
        good, east, i = _zone_at(b, i, end)
        bc = good and _ends_in_bc(b, i, end)
        if not good or (not bc and i != end):
            continue
        good, days = _packed_days(packed, bc)
        micros -= east * SECOND
        if good and -_DAY_LIMIT < days <= _DAY_LIMIT and days * DAY <= _INSTANT_LIMIT - max(micros, 0):
            out[r] = days * DAY + micros
            state[r] = _VALID


@kernel
def _offsets(size: Ints, out: Any) -> Word:
    total = np.int64(0)
    out[0] = 0
    for r in range(size.size):
        if size[r] > 0:
            total += size[r]
        out[r + 1] = total
    return total


@kernel
def _gather(b: Bytes, at: Ints, size: Ints, offsets: Any, out: Bytes, state: Bytes) -> None:
    source, to = b.ctypes.data, out.ctypes.data
    for r in range(at.size):
        n = size[r]
        if n < 0:
            continue
        state[r] = _VALID
        if n <= _COPY_BYTES_MIN:
            i, j = at[r], np.int64(offsets[r])
            for k in range(n):
                out[j + k] = b[i + k]
        else:
            copy_bytes(to + offsets[r], source + at[r], n)


@kernel
def _hex_digit(c: Word) -> Word:
    if 48 <= c <= 57:
        return c - 48
    if 97 <= c <= 102:
        return c - 87
    return -1


@kernel
def _binaries(b: Bytes, at: Ints, size: Ints, offsets: Any, out: Bytes, state: Bytes) -> None:
    r"""Convert bytea in hex: `\x` and two digits a byte. `offsets` is filled here."""
    j = np.int64(0)
    offsets[0] = 0
    for r in range(at.size):
        n = size[r]
        if n >= 0:
            i = at[r]
            good = n >= 2 and n % 2 == 0 and b[i] == 92 and b[i + 1] == 120
            kept = j
            k = i + 2
            while good and k < i + n:
                high, low = _hex_digit(np.int64(b[k])), _hex_digit(np.int64(b[k + 1]))
                good = high >= 0 and low >= 0
                out[j] = (high << 4 | low) & 255
                j += 1
                k += 2
            if not good:
                j = kept
            state[r] = _VALID if good else _UNFIT
        offsets[r + 1] = j


@kernel
def _elements(
    b: Bytes, at: Ints, size: Ints, text: Bytes, cell_at: Ints, cell_size: Ints, offsets: Any, state: Bytes
) -> Word:
    """Convert one-dimensional array literals to cells over `text`, which receives the unquoted elements.

    Nested arrays and explicit lower bounds are unfit. Returns the number of cells. `text`, `cell_at` and `cell_size`
    must be as long as all the literals together: an element takes a byte at least.
    """
    cells, w = np.int64(0), np.int64(0)
    offsets[0] = 0
    for r in range(at.size):
        n = size[r]
        if n >= 0:
            i, end = at[r] + 1, at[r] + n - 1
            good = n >= 2 and b[at[r]] == 123 and b[end] == 125
            kept_cells, kept_w = cells, w
            while good and i < end:
                start, quoted = w, b[i] == 34
                if quoted:
                    i += 1
                    while i < end and b[i] != 34:
                        if b[i] == 92:
                            i += 1
                            if i >= end:
                                break
                        text[w] = b[i]
                        w += 1
                        i += 1
                    good = i < end
                    i += 1
                else:
                    while i < end and b[i] != 44:
                        if b[i] == 123 or b[i] == 125 or b[i] == 34:
                            good = False
                            break
                        if b[i] == 92:
                            i += 1
                            if i >= end:
                                good = False
                                break
                        text[w] = b[i]
                        w += 1
                        i += 1
                    good = good and w > start
                if not good:
                    break
                cell_at[cells] = start
                cell_size[cells] = w - start
                if not quoted and w - start == 4:
                    if text[start] == 78 and text[start + 1] == 85 and text[start + 2] == 76 and text[start + 3] == 76:
                        cell_size[cells] = -1
                cells += 1
                if i < end:
                    good = b[i] == 44 and i + 1 < end
                    i += 1
            if good:
                state[r] = _VALID
            else:
                cells, w = kept_cells, kept_w
                state[r] = _UNFIT
        offsets[r + 1] = cells
    return cells


@kernel
def _spread(offsets: Any, child_state: Bytes, state: Bytes) -> None:
    """Mark an array with an unfit element as unfit."""
    for r in range(state.size):
        for k in range(offsets[r], offsets[r + 1]):
            if child_state[k] == _UNFIT:
                state[r] = _UNFIT


@dataclass(frozen=True)
class Cells:
    """One column's cells over a buffer."""

    buffer: Bytes
    at: Ints
    size: Ints

    def __len__(self) -> int:
        return int(self.at.size)


@dataclass(frozen=True)
class ConvertedColumn:
    """A column, and the rows whose text its type cannot hold (null there)."""

    column: pa.Array
    unfit: npt.NDArray[np.int64]


_INTEGERS: dict[pa.DataType, type[np.signedinteger[Any]]] = {
    pa.int16(): np.int16,
    pa.int32(): np.int32,
    pa.int64(): np.int64,
}
_LIMITS = {number: (np.iinfo(number).min, np.iinfo(number).max) for number in _INTEGERS.values()}
_INFINITY = np.frombuffer(b"infinity", np.uint8)
_MINUS_INFINITY = np.frombuffer(b"-infinity", np.uint8)
_NOTHING = np.empty(0, np.int64)


@kernel
def _bitmap(state: Bytes, out: Bytes) -> Word:
    """Build Arrow's validity bits; return how many are not set."""
    missing = 0
    for r in range(state.size):
        if state[r] == _VALID:
            out[r >> 3] |= 1 << (r & 7)
        else:
            missing += 1
    return missing


def _validity(state: Bytes) -> tuple[pa.Buffer | None, int]:
    bits = np.zeros((state.size + 7) // 8, np.uint8)
    missing = _bitmap(state, bits)
    return (pa.py_buffer(bits), missing) if missing else (None, 0)


def text_column(cells: Cells) -> pa.StringArray:
    """Return the cells as strings."""
    column, _ = _text(cells, pa.string())
    return column


def _text(cells: Cells, kind: pa.DataType) -> tuple[pa.Array, Bytes]:
    n = len(cells)
    offsets = np.empty(n + 1, np.int32)
    out = np.empty(_offsets(cells.size, offsets), np.uint8)
    state = np.zeros(n, np.uint8)
    _gather(cells.buffer, cells.at, cells.size, offsets, out, state)
    bitmap, missing = _validity(state)
    return pa.Array.from_buffers(kind, n, [bitmap, pa.py_buffer(offsets), pa.py_buffer(out)], missing), state


def _fixed(kind: pa.DataType, out: npt.NDArray[Any], state: Bytes) -> pa.Array:
    bitmap, missing = _validity(state)
    return pa.Array.from_buffers(kind, state.size, [bitmap, pa.py_buffer(out)], missing)


def _scalars(cells: Cells, kind: pa.DataType) -> tuple[pa.Array, Bytes]:
    n = len(cells)
    b, at, size = cells.buffer, cells.at, cells.size
    state = np.zeros(n, np.uint8)
    if kind in _INTEGERS:
        number = _INTEGERS[kind]
        out: npt.NDArray[Any] = np.zeros(n, number)
        _integers(b, at, size, out, state, *_LIMITS[number])
    elif pa.types.is_decimal(kind):
        out = np.zeros(2 * n, np.uint64)
        _decimals(b, at, size, out, state, kind.precision, kind.scale)
    elif pa.types.is_date32(kind):
        out = np.zeros(n, np.int32)
        _dates(b, at, size, out, state, _INFINITY, _MINUS_INFINITY)
    elif pa.types.is_timestamp(kind):
        out = np.zeros(n, np.int64)
        _timestamps(b, at, size, out, state, _INFINITY, _MINUS_INFINITY)
    elif pa.types.is_boolean(kind):
        flags = np.zeros(n, np.uint8)
        _booleans(b, at, size, flags, state)
        out = np.packbits(flags, bitorder="little")
    elif pa.types.is_floating(kind):
        return _floats(cells, kind)
    else:
        raise TypeError(f"no kernel reads {kind}")
    return _fixed(kind, out, state), state


def _floats(cells: Cells, kind: pa.DataType) -> tuple[pa.Array, Bytes]:
    column, state = _text(cells, pa.string())
    try:
        return pc.cast(column, kind), state
    except pa.ArrowInvalid:
        # One invalid value fails the whole cast. A server never sends one, so values are then cast one by one.
        pieces = []
        for place in range(len(column)):
            try:
                pieces.append(pc.cast(column[place : place + 1], kind))
            except pa.ArrowInvalid:
                pieces.append(pa.nulls(1, kind))
                state[place] = _UNFIT
        return pa.concat_arrays(pieces), state


def _binary(cells: Cells) -> tuple[pa.Array, Bytes]:
    n = len(cells)
    offsets, state = np.empty(n + 1, np.int32), np.zeros(n, np.uint8)
    out = np.empty(int(np.maximum(cells.size, 0).sum()) // 2, np.uint8)
    _binaries(cells.buffer, cells.at, cells.size, offsets, out, state)
    bitmap, missing = _validity(state)
    return pa.Array.from_buffers(pa.binary(), n, [bitmap, pa.py_buffer(offsets), pa.py_buffer(out)], missing), state


def _lists(cells: Cells, kind: pa.ListType) -> tuple[pa.Array, Bytes]:
    n = len(cells)
    room = int(np.maximum(cells.size, 0).sum())
    text, child_at, child_size = np.empty(room, np.uint8), np.empty(room, np.int64), np.empty(room, np.int64)
    offsets, state = np.empty(n + 1, np.int32), np.zeros(n, np.uint8)
    count = _elements(cells.buffer, cells.at, cells.size, text, child_at, child_size, offsets, state)
    children, child_state = _column(Cells(text, child_at[:count], child_size[:count]), kind.value_type)
    _spread(offsets, child_state, state)
    bitmap, missing = _validity(state)
    return pa.Array.from_buffers(kind, n, [bitmap, pa.py_buffer(offsets)], missing, children=[children]), state


def _column(cells: Cells, kind: pa.DataType) -> tuple[pa.Array, Bytes]:
    if pa.types.is_string(kind):
        return _text(cells, kind)
    if pa.types.is_binary(kind):
        return _binary(cells)
    if pa.types.is_list(kind):
        return _lists(cells, kind)
    return _scalars(cells, kind)


def convert_cells(cells: Cells, kind: pa.DataType) -> ConvertedColumn:
    """Return the cells as a column of the given type."""
    column, state = _column(cells, kind)
    # An unfit cell is null in the column, so a column without nulls has none.
    unfit = np.flatnonzero(state == _UNFIT) if column.null_count else _NOTHING
    return ConvertedColumn(column, unfit)


def parse_value(text: str, kind: pa.DataType) -> pa.Scalar | None:
    """Return the value of a text that the server printed. None if the type cannot hold it."""
    content = text.encode()
    cells = Cells(np.frombuffer(content + bytes(16), np.uint8), np.zeros(1, np.int64), np.array([len(content)]))
    found = convert_cells(cells, kind)
    return None if found.unfit.size else found.column[0]


def format_positions(positions: npt.NDArray[np.uint64]) -> pa.StringArray:
    """Return log sequence numbers as the server prints them, e.g. `16/B374D848`."""
    n = positions.size
    offsets, out = np.empty(n + 1, np.int32), np.empty(17 * n, np.uint8)
    _format_positions(positions, offsets, out)
    return pa.StringArray.from_buffers(n, pa.py_buffer(offsets), pa.py_buffer(out[: offsets[n]]))


@kernel
def _format_positions(positions: Any, offsets: Any, out: Bytes) -> None:
    w = 0
    offsets[0] = 0
    for r in range(positions.size):
        for part in range(2):
            word = (positions[r] >> np.uint64(32)) if part == 0 else (positions[r] & np.uint64(0xFFFFFFFF))
            digits = 1
            while digits < 8 and (word >> np.uint64(4 * digits)) != 0:
                digits += 1
            for d in range(digits - 1, -1, -1):
                nibble = np.int64((word >> np.uint64(4 * d)) & np.uint64(15))
                out[w] = nibble + 48 if nibble < 10 else nibble + 55
                w += 1
            if part == 0:
                out[w] = 47
                w += 1
        offsets[r + 1] = w
