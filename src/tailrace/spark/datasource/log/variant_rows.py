"""Encode rows as VARIANT values, column by column, without a Python object for each row.

A value has the layout of Spark's `VariantUtil` and the Parquet specification. Here every object has the same fields,
those of a table, so the dictionary of names is made once. Offsets are three bytes wide, which is all that Spark takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.errors import ValueUnfit

VARIANT = pa.struct([
    pa.field("value", pa.binary(), nullable=False),
    # By this mark Spark distinguishes it from any other struct.
    pa.field("metadata", pa.binary(), nullable=False, metadata={b"variant": b"true"}),
])  # fmt: skip
VALUE_BYTES_MAX = (1 << 24) - 1
"""Maximal size of one row. Spark takes no more."""
_OFFSET_BYTES = 3
_NULL, _TRUE, _FALSE = b"\x00", b"\x04", b"\x08"
_BINARY, _STRING = b"\x3c", b"\x40"
_DECIMAL = b"\x28"
_FIXED = {
    pa.int8(): b"\x0c", pa.int16(): b"\x10", pa.int32(): b"\x14", pa.int64(): b"\x18", pa.float32(): b"\x38",
    pa.float64(): b"\x1c", pa.date32(): b"\x2c", pa.timestamp("us", "UTC"): b"\x30", pa.timestamp("us"): b"\x34",
}  # fmt: skip
"""First byte of a value, by type. Arrow's own bytes follow."""

Bytes = npt.NDArray[np.uint8]


def objects(names: Sequence[str], columns: Sequence[pa.Array], missing: pa.Array | None = None) -> pa.StructArray:
    """Return one object for each row, with these fields; null where the row is missing."""
    rows = len(columns[0])
    order = sorted(range(len(names)), key=lambda i: names[i].encode())
    values = [_encoded(columns[i]) for i in order]
    lengths = np.zeros((rows, len(values) + 1), np.int64)
    for i, value in enumerate(values):
        lengths[:, i + 1] = pc.binary_length(value).to_numpy()
    offsets = lengths.cumsum(axis=1)
    _refuse_large(offsets)
    whole = pc.binary_join_element_wise(
        pa.scalar(_object_head(len(names)), pa.binary()), _little_endian(offsets), *values, pa.scalar(b"", pa.binary())
    )
    metadata = pa.repeat(pa.scalar(_dictionary([names[i] for i in order]), pa.binary()), rows)
    return pa.StructArray.from_arrays([whole, metadata], fields=list(VARIANT), mask=missing)


def _encoded(column: pa.Array) -> pa.Array:
    """Return each value of a column as the bytes of a variant."""
    kind = column.type
    if pa.types.is_boolean(kind):
        values = pc.if_else(column, pa.scalar(_TRUE, pa.binary()), pa.scalar(_FALSE, pa.binary()))
    elif kind in _FIXED:
        values = _fixed(_FIXED[kind], column, kind.bit_width // 8)
    elif pa.types.is_decimal128(kind):
        values = _fixed(_DECIMAL + bytes([kind.scale]), column, kind.bit_width // 8)
    elif pa.types.is_binary(kind):
        values = _sized(_BINARY, column)
    elif pa.types.is_list(kind):
        values = pa.array(map(_array, _lists(column)), pa.binary())
    else:
        values = _sized(_STRING, column.cast(pa.string()).cast(pa.binary()))
    return pc.fill_null(values, pa.scalar(_NULL, pa.binary())) if values.null_count else values


def _fixed(head: bytes, column: pa.Array, width: int) -> pa.Array:
    rows = len(column)
    encoded = np.empty((rows, len(head) + width), np.uint8)
    encoded[:, : len(head)] = np.frombuffer(head, np.uint8)
    stored = np.frombuffer(column.buffers()[1], np.uint8)[column.offset * width : (column.offset + rows) * width]
    encoded[:, len(head) :] = stored.reshape(rows, width)
    return _only_valid(_as_binary(encoded), column)


def _sized(head: bytes, column: pa.Array) -> pa.Array:
    """Return values with their length in front, as types of variable length need it."""
    lengths = pc.binary_length(column).fill_null(0).to_numpy().astype("<u4")
    sizes = _as_binary(lengths.view(np.uint8).reshape(len(column), 4))
    return pc.binary_join_element_wise(pa.scalar(head, pa.binary()), sizes, column, pa.scalar(b"", pa.binary()))


def _lists(column: pa.Array) -> list[list[bytes] | None]:
    encoded = pa.ListArray.from_arrays(_offsets(column), _encoded(column.flatten()), mask=column.is_null())
    values: list[list[bytes] | None] = encoded.to_pylist()
    return values


def _offsets(column: pa.Array) -> pa.Array:
    """Return offsets into the flattened values.

    The flattened values leave out null lists, and rows that are not in a slice.
    """
    lengths = pc.list_value_length(column).fill_null(0).to_numpy()
    return pa.array(np.concatenate([[0], lengths.cumsum()]), pa.int32())


def _array(elements: list[bytes] | None) -> bytes | None:
    if elements is None:
        return None
    offsets = np.array([0, *map(len, elements)], np.int64).cumsum()
    _refuse_large(offsets)
    large = len(elements) > 255
    head = bytes([(large << 4) | ((_OFFSET_BYTES - 1) << 2) | 3]) + len(elements).to_bytes(4 if large else 1, "little")
    return head + _three_bytes(offsets).tobytes() + b"".join(elements)


def _object_head(fields: int) -> bytes:
    large, id_bytes = fields > 255, 1 if fields <= 256 else 2
    first = (large << 6) | ((id_bytes - 1) << 4) | ((_OFFSET_BYTES - 1) << 2) | 2
    ids = b"".join(number.to_bytes(id_bytes, "little") for number in range(fields))
    return bytes([first]) + fields.to_bytes(4 if large else 1, "little") + ids


def _dictionary(names: Sequence[str]) -> bytes:
    """Return the encoded names, ordered by the numbers that fields use for them."""
    texts = [name.encode() for name in names]
    offsets = np.array([0, *map(len, texts)], np.int64).cumsum()
    sorted_version_1 = 0x11 | ((_OFFSET_BYTES - 1) << 6)
    counted = len(names).to_bytes(_OFFSET_BYTES, "little")
    return bytes([sorted_version_1]) + counted + _three_bytes(offsets).tobytes() + b"".join(texts)


def _refuse_large(offsets: npt.NDArray[np.int64]) -> None:
    if int(offsets.max(initial=0)) > VALUE_BYTES_MAX:
        raise ValueUnfit(
            "a row is too large for VARIANT",
            bytes_max=VALUE_BYTES_MAX,
            hint="Read its table alone, with typed columns: give `table` instead of `tables`.",
        )


def _little_endian(offsets: npt.NDArray[np.int64]) -> pa.Array:
    return _as_binary(_three_bytes(offsets).reshape(len(offsets), -1))


def _three_bytes(offsets: npt.NDArray[np.int64]) -> Bytes:
    wide = np.ascontiguousarray(offsets.astype("<u4")).view(np.uint8).reshape(*offsets.shape, 4)
    return np.ascontiguousarray(wide[..., :_OFFSET_BYTES])


def _as_binary(rows: Bytes) -> pa.Array:
    """Return rows of bytes, all of one length, as Arrow's binary."""
    count, width = rows.shape
    offsets = np.arange(count + 1, dtype=np.int32) * width
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(rows)])


def _only_valid(values: pa.Array, column: pa.Array) -> pa.Array:
    return pc.if_else(column.is_valid(), values, pa.scalar(None, pa.binary())) if column.null_count else values
