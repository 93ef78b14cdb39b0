"""Number rows: two rows have the same number exactly if they are equal.

Null equals null and NaN equals NaN. As an *image* a row is compared by its bits, so 0.0 is not -0.0. As a *key* they
are one value, because the source's unique index and every engine's join treat them as one. All code that compares rows
uses this module, so the fold and the tables never disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Ints = npt.NDArray[np.int64]

_INT64_MAX = (1 << 63) - 1
_OFFSETS_32_BYTES_MAX = 1 << 30
"""Size of text above which it gets 64-bit offsets before its chunks are combined. Arrow's limit is twice that."""


@dataclass(frozen=True, kw_only=True)
class NumberedRows:
    """One number per row, each below `limit`.

    `limit` is at most a small multiple of the row count.
    """

    numbers: Ints
    limit: int


def key_numbers(columns: Sequence[Any]) -> NumberedRows:
    """Number rows by key."""
    return _combined([_codes(one_array(column), signed_zero=False) for column in columns])


def image_numbers(columns: Sequence[Any]) -> NumberedRows:
    """Number rows by all their values."""
    return _combined([_codes(one_array(column), signed_zero=True) for column in columns])


def one_array(column: Any) -> Any:
    """Return the column as one array, with offsets wide enough for it."""
    if isinstance(column, pa.ChunkedArray):
        wide = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}.get(column.type)
        if wide is not None and column.nbytes > _OFFSETS_32_BYTES_MAX:
            column = column.cast(wide)
        return column.combine_chunks()
    return column


def _combined(parts: list[NumberedRows]) -> NumberedRows:
    numbers, limit = parts[0].numbers, parts[0].limit
    for part in parts[1:]:
        if limit * part.limit > _INT64_MAX:
            dense = _dense(numbers)
            numbers, limit = dense.numbers, dense.limit
        numbers, limit = numbers * part.limit + part.numbers, limit * part.limit
    whole = NumberedRows(numbers=numbers, limit=limit)
    return whole if limit <= _spread_max(numbers.size) else _dense(numbers)


def _spread_max(rows: int) -> int:
    return 4 * rows + 1024


def _dense(values: Ints) -> NumberedRows:
    """Renumber from zero. Values that are close together keep their distances, without hashing."""
    if values.size:
        low, high = int(values.min()), int(values.max())
        if high - low < _spread_max(values.size):
            return NumberedRows(numbers=values - low, limit=high - low + 1)
    return _encoded(pa.array(values))


def _encoded(column: Any) -> NumberedRows:
    encoded = column.dictionary_encode()
    numbers = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    if encoded.null_count:
        numbers += 1
    return NumberedRows(numbers=numbers, limit=len(encoded.dictionary) + 1)


def _codes(column: Any, *, signed_zero: bool) -> NumberedRows:
    """Number one column's values; null has a number of its own."""
    kind = column.type
    if pa.types.is_string_view(kind):
        return _encoded(column.cast(pa.string()))
    if pa.types.is_binary_view(kind):
        return _encoded(column.cast(pa.binary()))
    if pa.types.is_floating(kind):
        return _with_nulls(column, _dense(float_bits(column, signed_zero)))
    if pa.types.is_list(kind):
        return _with_nulls(column, _list_codes(column, signed_zero))
    if pa.types.is_struct(kind):
        fields = [_codes(pc.struct_field(column, [i]), signed_zero=signed_zero) for i in range(kind.num_fields)]
        return _with_nulls(column, _combined(fields))
    bits = integer_bits(column)
    return _encoded(column) if bits is None else _with_nulls(column, _dense(bits))


def integer_bits(column: Any) -> Ints | None:
    """Return the values of an integer-based type, nulls as zero; None for any other type."""
    kind = column.type
    if pa.types.is_timestamp(kind):
        column = column.view(pa.int64())
    elif pa.types.is_date32(kind):
        column = column.view(pa.int32())
    elif not pa.types.is_signed_integer(kind):
        return None
    if column.null_count:
        column = column.fill_null(0)
    values: Ints = column.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    return values


def float_bits(column: Any, signed_zero: bool) -> Ints:
    """Return the values' bits as doubles, one pattern for every NaN; nulls as zero."""
    values = column.fill_null(0.0).to_numpy(zero_copy_only=False).astype(np.float64)
    values[np.isnan(values)] = np.nan
    if not signed_zero:
        values += 0.0  # -0.0 + 0.0 is 0.0
    bits: Ints = values.view(np.int64)
    return bits


def _list_codes(column: Any, signed_zero: bool) -> NumberedRows:
    """Number lists by their elements' numbers: those bytes, dictionary-encoded."""
    elements = _codes(column.values, signed_zero=signed_zero).numbers
    bounds = column.offsets.to_numpy().astype(np.int64) * elements.itemsize
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(np.ascontiguousarray(elements))]
    return _encoded(pa.Array.from_buffers(pa.large_binary(), len(column), buffers))


def _with_nulls(column: Any, values: NumberedRows) -> NumberedRows:
    if not column.null_count:
        return values
    nulls = column.is_null().to_numpy(zero_copy_only=False)
    return NumberedRows(numbers=np.where(nulls, 0, values.numbers + 1), limit=values.limit + 1)
