"""A value as the server prints it against a value as Arrow holds it, by rules written down once more.

The rules are those of docs/reference/types.md. Text is read with Python's own `int`, `float` and `Decimal` and with
the calendar below, never with the product's kernels.
"""

from __future__ import annotations

import itertools
import re
import struct
from decimal import Decimal
from typing import Any

import pyarrow as pa

_DAY = re.compile(r"(\d+)-(\d\d)-(\d\d)( BC)?")
_MOMENT = re.compile(r"(\d+)-(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?(?:\+00)?( BC)?")
_DAY_MICROSECONDS = 86_400_000_000
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896
"""Of the years 1 and 9999: where the infinities stand."""


class Unfit(Exception):
    """The column's type has no place for the value."""


def plain(array: pa.Array) -> list[Any]:
    """The values as Python has them; dates and moments as numbers, since Python's end at the year 9999."""
    kind = array.type
    if pa.types.is_date32(kind):
        found = array.view(pa.int32()).to_pylist()
    elif pa.types.is_timestamp(kind):
        found = array.view(pa.int64()).to_pylist()
    elif pa.types.is_list(kind):
        offsets, flat = array.offsets.to_pylist(), plain(array.values)
        found = [flat[low:high] for low, high in itertools.pairwise(offsets)]
        return [value if valid else None for value, valid in zip(found, array.is_valid().to_pylist(), strict=True)]
    elif pa.types.is_struct(kind):
        fields = {field.name: plain(array.field(place)) for place, field in enumerate(kind)}
        return [
            {name: values[n] for name, values in fields.items()} if valid else None
            for n, valid in enumerate(array.is_valid().to_pylist())
        ]
    else:
        found = array.to_pylist()
    return list(found)


def expected(text: str, kind: pa.DataType) -> Any:
    """The value that the text must have become; `Unfit` if the type has no place for it."""
    if pa.types.is_string(kind):
        return text
    if pa.types.is_boolean(kind):
        return {"t": True, "f": False}[text]
    if pa.types.is_integer(kind):
        return int(text)
    if pa.types.is_float32(kind):
        return _single(text)
    if pa.types.is_float64(kind):
        return float(text)
    if pa.types.is_decimal(kind):
        found = Decimal(text)
        if not found.is_finite():
            raise Unfit
        return found
    if pa.types.is_binary(kind):
        assert text.startswith("\\x"), text
        return bytes.fromhex(text[2:])
    if pa.types.is_date32(kind):
        return _days(text)
    if pa.types.is_timestamp(kind):
        return _microseconds(text)
    if pa.types.is_list(kind):
        return [None if item is None else expected(item, kind.value_type) for item in elements(text)]
    raise NotImplementedError(f"the oracle has no rule for {kind}: write one from docs/reference/types.md")


def same(one: Any, other: Any) -> bool:
    """Whether two values are one; of floats every bit counts, but one NaN is like another."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return struct.pack("d", one) == struct.pack("d", other) or (one != one and other != other)
    return type(one) is type(other) and bool(one == other)


def _single(text: str) -> float:
    """The nearest float of 32 bits, rounded once: by way of a double it could be rounded twice."""
    if text.lstrip("-") in ("NaN", "Infinity"):
        return float(text)
    exact = Decimal(text)
    near = struct.unpack("f", struct.pack("f", float(text)))[0]
    bits = struct.unpack("i", struct.pack("f", near))[0]
    around = [struct.unpack("f", struct.pack("i", bits + step))[0] for step in (0, -1, 1) if near]
    return float(min(around, key=lambda each: abs(Decimal(each) - exact))) if around else near


def _days_from_civil(year: int, month: int, day: int) -> int:
    """Days since 1970 in the proleptic Gregorian calendar, where year 0 is 1 BC."""
    cycle, year_of_cycle = divmod(year - 1, 400)
    leaps = year_of_cycle // 4 - year_of_cycle // 100
    lengths = [31, 29 if (year % 4 == 0 and year % 100 != 0) or year % 400 == 0 else 28, 31, 30, 31, 30]
    lengths += [31, 31, 30, 31, 30]
    days = cycle * 146_097 + year_of_cycle * 365 + leaps + sum(lengths[: month - 1]) + day - 1
    return days + _FIRST_DAY


def _days(text: str) -> int:
    if text == "infinity":
        return _LAST_DAY
    if text == "-infinity":
        return _FIRST_DAY
    found = _DAY.fullmatch(text)
    assert found, text
    year = int(found.group(1))
    return _days_from_civil(1 - year if found.group(4) else year, int(found.group(2)), int(found.group(3)))


def _microseconds(text: str) -> int:
    if text == "infinity":
        return (_LAST_DAY + 1) * _DAY_MICROSECONDS - 1
    if text == "-infinity":
        return _FIRST_DAY * _DAY_MICROSECONDS
    found = _MOMENT.fullmatch(text)
    assert found, text
    year, month, day, hour, minute, second = (int(found.group(n)) for n in range(1, 7))
    days = _days_from_civil(1 - year if found.group(8) else year, month, day)
    whole = ((days * 24 + hour) * 60 + minute) * 60 + second
    since = whole * 1_000_000 + int((found.group(7) or "").ljust(6, "0"))
    if since >= 1 << 63:
        raise Unfit
    return since


def elements(text: str) -> list[str | None]:
    """The elements of an array of one dimension that begins at 1; any other is `Unfit`."""
    if text.startswith(("[", "{{")):
        raise Unfit
    assert text.startswith("{"), text
    assert text.endswith("}"), text
    found: list[str | None] = []
    at = 1
    while text[at] != "}":
        if text[at] == '"':
            item, at = _quoted_element(text, at + 1)
            found.append(item)
        else:
            end = min(place for place in (text.find(",", at), len(text) - 1) if place >= 0)
            found.append(None if text[at:end] == "NULL" else text[at:end])
            at = end
        at += text[at] == ","
    assert at == len(text) - 1, text
    return found


def _quoted_element(text: str, at: int) -> tuple[str, int]:
    letters = []
    while text[at] != '"':
        at += text[at] == "\\"
        letters.append(text[at])
        at += 1
    return "".join(letters), at + 1
