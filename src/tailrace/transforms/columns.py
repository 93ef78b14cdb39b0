"""What rules do to one column: an array to an array of as many rows. Null stays null."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.errors import ConfigError

Mask = npt.NDArray[np.bool_]
Worked = tuple[pa.Array, Mask | None]
"""The values, and the rows that failed; those are null."""

TYPES: dict[str, pa.DataType] = {
    "bool": pa.bool_(), "int16": pa.int16(), "int32": pa.int32(), "int64": pa.int64(), "float32": pa.float32(),
    "float64": pa.float64(), "string": pa.string(), "binary": pa.binary(), "date": pa.date32(),
    "time": pa.time64("us"), "timestamp": pa.timestamp("us"), "timestamptz": pa.timestamp("us", "UTC"),
}  # fmt: skip
"""The types a rule can name; and `decimal(precision, scale)`."""


# Given as Arrow's own: for a value of Python's it looks for pandas, each time.
_NONE, _NULL_TEXT = pa.scalar(0, pa.int32()), pa.scalar(None, pa.string())


def type_named(name: str) -> pa.DataType:
    """The type that a rule names."""
    if name in TYPES:
        return TYPES[name]
    found = re.fullmatch(r"decimal\(\s*([0-9]{1,2})\s*,\s*([0-9]{1,2})\s*\)", name)
    if found and 1 <= int(found.group(1)) <= 38 and int(found.group(2)) <= int(found.group(1)):
        return pa.decimal128(int(found.group(1)), int(found.group(2)))
    raise ConfigError(
        f"`{name}` is no type", hint=f"There are {', '.join(TYPES)} and decimal(precision, scale), up to 38 digits."
    )


def is_textual(kind: pa.DataType) -> bool:
    """Whether every value of the type can be printed as a text."""
    return not pa.types.is_nested(kind)


def as_text(values: pa.Array) -> pa.Array:
    return values if pa.types.is_string(values.type) else values.cast(pa.string())


def mask(values: pa.Array, keep_first: int, keep_last: int, char: str) -> pa.Array:
    """All characters but some at the ends become `char`; of a text that would be left whole, all do."""
    text = as_text(values)
    length = pc.utf8_length(text)
    hidden = pc.subtract(length, pa.scalar(keep_first + keep_last, pa.int32()))
    short = pc.less_equal(hidden, pa.scalar(0, pa.int32()))
    some_short = bool(pc.any(short).as_py())
    counts = pc.if_else(short, length, hidden) if some_short else hidden
    # What lies under a null is looked at as well, and may be anything.
    stars = pc.binary_repeat(pa.scalar(char), pc.fill_null(counts, _NONE) if counts.null_count else counts)
    if not keep_first and not keep_last:
        return pc.if_else(pc.is_valid(text), stars, _NULL_TEXT) if text.null_count else stars
    empty = pa.scalar("")
    head = pc.utf8_slice_codeunits(text, 0, keep_first) if keep_first else empty
    tail = pc.utf8_slice_codeunits(text, -keep_last) if keep_last else empty
    if some_short:
        head, tail = (pc.if_else(short, empty, end) for end in (head, tail))
    return pc.binary_join_element_wise(head, stars, tail, empty)


def redact(values: pa.Array, text: str) -> pa.Array:
    """One text wherever there is a value."""
    return pc.if_else(pc.is_valid(values), pa.scalar(text), pa.scalar(None, pa.string()))


def truncate(values: pa.Array, length: int) -> pa.Array:
    """The first so many characters, or bytes."""
    if pa.types.is_binary(values.type):
        return pc.binary_slice(values, 0, length)
    return pc.utf8_slice_codeunits(values, 0, length)


def tried(work: Callable[[pa.Array], pa.Array], values: pa.Array, kind: pa.DataType) -> Worked:
    """Work that may fail for some values: those are found by halves, and are null. Failing is rare."""
    try:
        return work(values), None
    except (pa.ArrowException, OverflowError, ValueError):
        pass
    if len(values) <= 1:
        return pa.nulls(len(values), kind), np.ones(len(values), np.bool_)
    half = len(values) // 2
    (left, bad_left), (right, bad_right) = (
        tried(work, part, kind) for part in (values.slice(0, half), values.slice(half))
    )
    failed = np.zeros(len(values), np.bool_)
    failed[:half] = False if bad_left is None else bad_left
    failed[half:] = False if bad_right is None else bad_right
    return pa.concat_arrays([left, right]), failed


def cast(values: pa.Array, kind: pa.DataType) -> Worked:
    """Values of another type; those that it cannot hold exactly fail."""
    return tried(lambda some: some.cast(kind), values, kind)


def scalar(value: bool | int | Decimal | str | None, kind: pa.DataType | None) -> pa.Scalar:
    """A value that a rule names, of a type if that is given."""
    try:
        if kind is None:
            return pa.scalar(value)
        if isinstance(value, str) and not pa.types.is_string(kind):
            return pa.scalar(value).cast(kind)
        if isinstance(value, int | Decimal) and not isinstance(value, bool):
            if pa.types.is_string(kind):
                return pa.scalar(str(value))
            if pa.types.is_floating(kind):
                return pa.scalar(float(value), kind)
            if pa.types.is_decimal(kind):
                return pa.scalar(Decimal(value), kind)
            return pa.scalar(int(value) if int(value) == value else value, kind)
        return pa.scalar(value, kind)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        raise ConfigError(f"a value is none of the type {kind}", hint="Write one that is, or another `type`.") from None


def repeated(value: pa.Scalar, rows: int) -> pa.Array:
    """One value in every row."""
    return pa.array([value.as_py()], value.type).take(pa.array(np.zeros(rows, np.int64)))
