"""Work on single columns: an array to an array of the same length. Null stays null."""

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
"""The values, and the faults; faulty values are null."""

TYPES: dict[str, pa.DataType] = {
    "bool": pa.bool_(), "int16": pa.int16(), "int32": pa.int32(), "int64": pa.int64(), "float32": pa.float32(),
    "float64": pa.float64(), "string": pa.string(), "binary": pa.binary(), "date": pa.date32(),
    "time": pa.time64("us"), "timestamp": pa.timestamp("us"), "timestamptz": pa.timestamp("us", "UTC"),
}  # fmt: skip
"""The types that a rule can name, besides `decimal(precision, scale)`."""


# Arrow scalars: for a Python value Arrow looks for pandas at every call.
_NONE, _NULL_TEXT = pa.scalar(0, pa.int32()), pa.scalar(None, pa.string())
_MIDNIGHT, _DAY_US = pa.scalar(0, pa.int64()), pa.scalar(86_400_000_000, pa.int64())
MAX_ASCII = 127
WIDEST = 76
"""Digits of Arrow's widest decimals, which hold any of ours with any of our scales."""


def parse_type(name: str) -> pa.DataType:
    """Return the type that a rule names."""
    if name in TYPES:
        return TYPES[name]
    match = re.fullmatch(r"decimal\(\s*([0-9]{1,2})\s*,\s*([0-9]{1,2})\s*\)", name)
    if match and 1 <= int(match.group(1)) <= 38 and int(match.group(2)) <= int(match.group(1)):
        return pa.decimal128(int(match.group(1)), int(match.group(2)))
    raise ConfigError(
        f"`{name}` is not a type", hint=f"Use one of {', '.join(TYPES)} or decimal(precision, scale), up to 38 digits."
    )


def type_name(kind: pa.DataType) -> str:
    """Return the type's name in rules."""
    known = (name for name, type_ in TYPES.items() if type_ == kind)
    return next(known, str(kind).replace("decimal128", "decimal"))


def is_textual(kind: pa.DataType) -> bool:
    """Return whether every value of the type can be printed as a string."""
    return not pa.types.is_nested(kind)


def as_text(values: pa.Array) -> pa.Array:
    return values if pa.types.is_string(values.type) else values.cast(pa.string())


def mask(values: pa.Array, keep_first: int, keep_last: int, char: str) -> pa.Array:
    """Mask all characters except some at the ends; mask short strings completely."""
    text = as_text(values)
    stars = _masked_bytes(text, keep_first, keep_last, char)
    if stars is None:
        stars = _masked_characters(text, keep_first, keep_last, char)
    return pc.if_else(pc.is_valid(text), stars, _NULL_TEXT) if text.null_count else stars


def _masked_bytes(text: pa.Array, keep_first: int, keep_last: int, char: str) -> pa.Array | None:
    """Mask strings of single-byte characters; return None if some are longer.

    Most masked strings are such. They keep their offsets, and only their ends are copied, which takes a fraction of the
    time that Arrow's functions need to join new strings.
    """
    _, offset_buffer, characters = text.buffers()
    if not len(text) or characters is None or not char.isascii():
        return None
    offsets = np.frombuffer(offset_buffer, np.int32)[text.offset : text.offset + len(text) + 1]
    source = np.frombuffer(characters, np.uint8)[offsets[0] : offsets[-1]]
    if source.size and source.max() > MAX_ASCII:
        return None
    offsets = offsets - offsets[0]
    buffer = pa.allocate_buffer(source.size)
    masked = np.frombuffer(buffer, np.uint8)
    masked[:] = ord(char)
    begins, ends = offsets[:-1], offsets[1:]
    hidden = ends - begins > keep_first + keep_last
    if not hidden.all():
        begins, ends = begins[hidden], ends[hidden]
    for positions in (*(begins + n for n in range(keep_first)), *(ends - n for n in range(1, keep_last + 1))):
        masked[positions] = source[positions]
    return pa.Array.from_buffers(pa.string(), len(text), [None, pa.py_buffer(offsets), buffer])


def _masked_characters(text: pa.Array, keep_first: int, keep_last: int, char: str) -> pa.Array:
    length = pc.utf8_length(text)
    hidden = pc.subtract(length, pa.scalar(keep_first + keep_last, pa.int32()))
    short = pc.less_equal(hidden, pa.scalar(0, pa.int32()))
    some_short = bool(pc.any(short).as_py())
    counts = pc.if_else(short, length, hidden) if some_short else hidden
    # The function also reads what is stored under a null, which may be anything.
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
    """Replace every value that is not null by one text."""
    return pc.if_else(pc.is_valid(values), pa.scalar(text), pa.scalar(None, pa.string()))


def truncate(values: pa.Array, length: int) -> pa.Array:
    """Return the first characters, or bytes, of each value."""
    if pa.types.is_binary(values.type):
        return pc.binary_slice(values, 0, length)
    return pc.utf8_slice_codeunits(values, 0, length)


def try_by_halves(
    work: Callable[[pa.Array], pa.Array], values: pa.Array, kind: pa.DataType, explain: Callable[[Exception], str]
) -> ColumnResult:
    """Run work that may fail for some values, which become null.

    `explain` makes the reason of Arrow's exception.
    """
    parts, faults = find_faults_by_halves(
        lambda begin, size: work(values.slice(begin, size)), 0, len(values), lambda size: pa.nulls(size, kind), explain
    )
    return parts[0] if len(parts) == 1 else pa.concat_arrays(parts), faults


def cast(values: pa.Array, kind: pa.DataType, what: str = "the value") -> ColumnResult:
    """Cast to another type; values that do not fit fail."""
    return try_by_halves(
        lambda part: cast_checked(part, kind), values, kind, lambda _: f"{what} does not fit {type_name(kind)}"
    )


def cast_checked(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast to another type; raise an Arrow error if a value does not fit.

    Arrow's own cast has gaps. It wraps a decimal that is too large for more fractional digits. It makes infinity of a
    large float, true of any number, and times of numbers that are none.
    """
    source_type = values.type
    if pa.types.is_decimal(kind) and (pa.types.is_decimal(source_type) or pa.types.is_integer(source_type)):
        return values.cast(pa.decimal256(WIDEST, kind.scale)).cast(kind)
    result = values.cast(kind)
    if pa.types.is_floating(kind) and not pa.types.is_integer(source_type):
        text = pa.types.is_string(source_type)
        was_infinite = pc.match_substring_regex(values, "(?i)inf") if text else pc.is_inf(values.cast(pa.float64()))
        _require(pc.or_kleene(pc.invert(pc.is_inf(result)), was_infinite))
    elif pa.types.is_boolean(kind) and (pa.types.is_integer(source_type) or pa.types.is_floating(source_type)):
        _require(pc.equal(result.cast(source_type), values))
    elif pa.types.is_time(kind) and pa.types.is_integer(source_type):
        _require(pc.and_(pc.greater_equal(values, _MIDNIGHT), pc.less(values, _DAY_US)))
    return result


def _require(fits: pa.Array) -> None:
    if pc.all(fits).as_py() is False:
        raise pa.ArrowInvalid("a value does not fit")


def to_scalar(value: bool | int | Decimal | str | None, kind: pa.DataType | None) -> pa.Scalar:
    """Return a value that a rule names, as the type if one is given."""
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
                raise ValueError("Arrow would truncate it, or has no such number")
            return pa.scalar(int(value), kind)
        return pa.scalar(value, kind)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        if kind is None:
            hint = "Name its type, for example `type: decimal(38, 0)`."
            raise ConfigError("value fits no column type", hint=hint) from None
        message = f"value is not of the type {type_name(kind)}"
        raise ConfigError(message, hint="Write another value, or another `type`.") from None


def repeat_value(value: pa.Scalar, rows: int) -> pa.Array:
    """Return one value for every row."""
    return pa.array([value.as_py()], value.type).take(pa.array(np.zeros(rows, np.int64)))
