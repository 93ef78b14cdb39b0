"""What rules do to one column: an array to an array of as many rows. Null stays null."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.errors import ConfigError
from tailrace.transforms.transform_errors import RowFaults, find_faults_by_halves

ColumnResult = tuple[pa.Array, RowFaults]
"""The values, and what failed; those are null."""

TYPES: dict[str, pa.DataType] = {
    "bool": pa.bool_(), "int16": pa.int16(), "int32": pa.int32(), "int64": pa.int64(), "float32": pa.float32(),
    "float64": pa.float64(), "string": pa.string(), "binary": pa.binary(), "date": pa.date32(),
    "time": pa.time64("us"), "timestamp": pa.timestamp("us"), "timestamptz": pa.timestamp("us", "UTC"),
}  # fmt: skip
"""The types a rule can name; and `decimal(precision, scale)`."""


# Given as Arrow's own: for a value of Python's it looks for pandas, each time.
_NONE, _NULL_TEXT = pa.scalar(0, pa.int32()), pa.scalar(None, pa.string())
_MIDNIGHT, _DAY_US = pa.scalar(0, pa.int64()), pa.scalar(86_400_000_000, pa.int64())
MAX_ASCII = 127
WIDEST = 76
"""Digits of Arrow's widest decimals: any of ours, with any of our scales."""


def parse_type(name: str) -> pa.DataType:
    """The type that a rule names."""
    if name in TYPES:
        return TYPES[name]
    found = re.fullmatch(r"decimal\(\s*([0-9]{1,2})\s*,\s*([0-9]{1,2})\s*\)", name)
    if found and 1 <= int(found.group(1)) <= 38 and int(found.group(2)) <= int(found.group(1)):
        return pa.decimal128(int(found.group(1)), int(found.group(2)))
    raise ConfigError(
        f"`{name}` is no type", hint=f"There are {', '.join(TYPES)} and decimal(precision, scale), up to 38 digits."
    )


def type_name(kind: pa.DataType) -> str:
    """The type as a rule names it."""
    known = (name for name, one in TYPES.items() if one == kind)
    return next(known, str(kind).replace("decimal128", "decimal"))


def is_textual(kind: pa.DataType) -> bool:
    """Whether every value of the type can be printed as a text."""
    return not pa.types.is_nested(kind)


def as_text(values: pa.Array) -> pa.Array:
    return values if pa.types.is_string(values.type) else values.cast(pa.string())


def mask(values: pa.Array, keep_first: int, keep_last: int, char: str) -> pa.Array:
    """All characters but some at the ends become `char`; of a text that would be left whole, all do."""
    text = as_text(values)
    stars = _masked_bytes(text, keep_first, keep_last, char)
    if stars is None:
        stars = _masked_characters(text, keep_first, keep_last, char)
    return pc.if_else(pc.is_valid(text), stars, _NULL_TEXT) if text.null_count else stars


def _masked_bytes(text: pa.Array, keep_first: int, keep_last: int, char: str) -> pa.Array | None:
    """Where each character is one byte, as most are that are masked: texts keep their places, and only their ends are
    copied, which takes a fraction of what Arrow's functions take to put new ones together. None: some are longer."""
    _, offsets, letters = text.buffers()
    if not len(text) or letters is None or not char.isascii():
        return None
    places = np.frombuffer(offsets, np.int32)[text.offset : text.offset + len(text) + 1]
    given = np.frombuffer(letters, np.uint8)[places[0] : places[-1]]
    if given.size and given.max() > MAX_ASCII:
        return None
    places = places - places[0]
    buffer = pa.allocate_buffer(given.size)
    made = np.frombuffer(buffer, np.uint8)
    made[:] = ord(char)
    begins, ends = places[:-1], places[1:]
    hidden = ends - begins > keep_first + keep_last
    if not hidden.all():
        begins, ends = begins[hidden], ends[hidden]
    for at in (*(begins + n for n in range(keep_first)), *(ends - n for n in range(1, keep_last + 1))):
        made[at] = given[at]
    return pa.Array.from_buffers(pa.string(), len(text), [None, pa.py_buffer(places), buffer])


def _masked_characters(text: pa.Array, keep_first: int, keep_last: int, char: str) -> pa.Array:
    length = pc.utf8_length(text)
    hidden = pc.subtract(length, pa.scalar(keep_first + keep_last, pa.int32()))
    short = pc.less_equal(hidden, pa.scalar(0, pa.int32()))
    some_short = bool(pc.any(short).as_py())
    counts = pc.if_else(short, length, hidden) if some_short else hidden
    # What lies under a null is looked at as well, and may be anything.
    parts = [pc.binary_repeat(pa.scalar(char), pc.fill_null(counts, _NONE) if counts.null_count else counts)]
    empty = pa.scalar("")
    if keep_first:
        head = pc.utf8_slice_codeunits(text, 0, keep_first)
        parts.insert(0, pc.if_else(short, empty, head) if some_short else head)
    if keep_last:
        tail = pc.utf8_slice_codeunits(text, -keep_last)
        parts.append(pc.if_else(short, empty, tail) if some_short else tail)
    return pc.binary_join_element_wise(*parts, empty) if len(parts) > 1 else parts[0]


def redact(values: pa.Array, text: str) -> pa.Array:
    """One text wherever there is a value."""
    return pc.if_else(pc.is_valid(values), pa.scalar(text), pa.scalar(None, pa.string()))


def truncate(values: pa.Array, length: int) -> pa.Array:
    """The first so many characters, or bytes."""
    if pa.types.is_binary(values.type):
        return pc.binary_slice(values, 0, length)
    return pc.utf8_slice_codeunits(values, 0, length)


def try_by_halves(
    work: Callable[[pa.Array], pa.Array], values: pa.Array, kind: pa.DataType, said: Callable[[Exception], str]
) -> ColumnResult:
    """Work that may fail for some values: those are null. `said` makes words of what Arrow raises."""
    parts, faults = find_faults_by_halves(
        lambda begin, size: work(values.slice(begin, size)), 0, len(values), lambda size: pa.nulls(size, kind), said
    )
    return parts[0] if len(parts) == 1 else pa.concat_arrays(parts), faults


def cast(values: pa.Array, kind: pa.DataType, what: str = "the value") -> ColumnResult:
    """Values of another type; those that it cannot hold fail."""
    return try_by_halves(
        lambda some: cast_checked(some, kind), values, kind, lambda _: f"{what} does not fit {type_name(kind)}"
    )


def cast_checked(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Values of another type; an error of Arrow's if it cannot hold one of them. Its own cast wraps a decimal around
    that is too large for more digits behind the point, makes infinity of a large float, true of any number, and times
    of numbers that are none."""
    given = values.type
    if pa.types.is_decimal(kind) and (pa.types.is_decimal(given) or pa.types.is_integer(given)):
        return values.cast(pa.decimal256(WIDEST, kind.scale)).cast(kind)
    made = values.cast(kind)
    if pa.types.is_floating(kind) and not pa.types.is_integer(given):
        text = pa.types.is_string(given)
        endless = pc.match_substring_regex(values, "(?i)inf") if text else pc.is_inf(values.cast(pa.float64()))
        _require(pc.or_kleene(pc.invert(pc.is_inf(made)), endless))
    elif pa.types.is_boolean(kind) and (pa.types.is_integer(given) or pa.types.is_floating(given)):
        _require(pc.equal(made.cast(given), values))
    elif pa.types.is_time(kind) and pa.types.is_integer(given):
        _require(pc.and_(pc.greater_equal(values, _MIDNIGHT), pc.less(values, _DAY_US)))
    return made


def _require(fits: pa.Array) -> None:
    if pc.all(fits).as_py() is False:
        raise pa.ArrowInvalid("a value does not fit")


def to_scalar(value: bool | int | Decimal | str | None, kind: pa.DataType | None) -> pa.Scalar:
    """A value that a rule names, of a type if that is given."""
    try:
        if kind is None:
            return pa.scalar(value)
        if isinstance(value, str) and not pa.types.is_string(kind):
            return cast_checked(pa.array([value]), kind)[0]
        if isinstance(value, int | Decimal) and not isinstance(value, bool):
            if pa.types.is_string(kind):
                return pa.scalar(str(value))
            if pa.types.is_floating(kind):
                return cast_checked(pa.array([str(value)]), kind)[0]
            if pa.types.is_decimal(kind):
                return pa.scalar(Decimal(value), kind)
            if Decimal(value).adjusted() > WIDEST or int(value) != value:
                raise ValueError("Arrow would cut it off, or has no such number")
            return pa.scalar(int(value), kind)
        return pa.scalar(value, kind)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        if kind is None:
            hint = "Name the type that it is to have, for example `type: decimal(38, 0)`."
            raise ConfigError("a value is of no type that a column has", hint=hint) from None
        said = f"a value is none of the type {type_name(kind)}"
        raise ConfigError(said, hint="Write one that is, or another `type`.") from None


def repeat_value(value: pa.Scalar, rows: int) -> pa.Array:
    """One value in every row."""
    return pa.array([value.as_py()], value.type).take(pa.array(np.zeros(rows, np.int64)))
