"""One view over all versions of a table's shape, by stated rules.

1. Columns go by name. First come those of the newest version, in its order, then those that only older versions
   have, those of the newer version first.
2. A column that a version does not have is null in that version's rows.
3. Where versions differ in a column's type, the view's is the narrowest that holds every value of each exactly:
   the wider integer, the wider float, a decimal with room for both. Where there is none it is text: numbers, dates and
   times as Arrow writes them, bytes as `\\x` and hexadecimal digits, lists as JSON.
4. The key is the newest version's. `_moved_from` has the columns of every version's key: a row's old key is told by
   the one that it had.

`_before` and `_moved_from` follow the same rules. Nothing else about a row changes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.model.batch import ChangeBatch
from tailrace.model.event import python_values
from tailrace.model.schema import Column, TableSchema

DECIMAL_DIGITS_MAX = 38


def merged_schema(versions: Sequence[TableSchema]) -> TableSchema:
    """The shape of the view over these versions, given oldest first."""
    newest = versions[-1]
    names: dict[str, Column] = {}
    for version in reversed(versions):
        for column in version.columns:
            names.setdefault(column.name, column)
    columns = tuple(
        replace(column, type=functools.reduce(_common, _types_of(column.name, versions))) for column in names.values()
    )
    keys = dict.fromkeys(name for version in reversed(versions) for name in version.key)
    return replace(newest, columns=columns, former_key=tuple(name for name in keys if name not in newest.key))


def _types_of(name: str, versions: Sequence[TableSchema]) -> list[pa.DataType]:
    return [column.type for version in versions for column in version.columns if column.name == name]


def _common(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """The narrowest type that holds every value of both exactly; text if there is none."""
    if one == other:
        return one
    for same in (pa.types.is_signed_integer, pa.types.is_floating):
        if same(one) and same(other):
            return one if one.bit_width >= other.bit_width else other
    if pa.types.is_decimal(one) and pa.types.is_decimal(other):
        scale = max(one.scale, other.scale)
        digits = max(one.precision - one.scale, other.precision - other.scale) + scale
        if digits <= DECIMAL_DIGITS_MAX:
            return pa.decimal128(digits, scale)
    if pa.types.is_list(one) and pa.types.is_list(other):
        return pa.list_(_common(one.value_type, other.value_type))
    return pa.string()


def can_hold(wider: pa.DataType, narrower: pa.DataType) -> bool:
    """Whether a column of the one type can take every value of the other, by the third rule."""
    return bool(_common(wider, narrower) == wider)


def fits_schema(version: TableSchema, shape: TableSchema) -> bool:
    """Whether rows of a version can come in a view, and nothing of them is lost. Each that it was made of can."""
    known = {column.name: column.type for column in shape.columns}
    return {*version.key} <= {*shape.key, *shape.former_key} and all(
        column.name in known and can_hold(known[column.name], column.type) for column in version.columns
    )


def conform_to_schema(batch: ChangeBatch, shape: TableSchema) -> ChangeBatch:
    """The same rows in the view's shape."""
    if batch.schema == shape:
        return batch
    fields = shape.change_schema()
    names = set(batch.data.schema.names)
    columns = [
        _cast(batch.data.column(field.name), field.type) if field.name in names else pa.nulls(len(batch), field.type)
        for field in fields
    ]
    return replace(batch, schema=shape, data=pa.RecordBatch.from_arrays(columns, schema=fields))


def _cast(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    if column.type == wanted:
        return column
    if pa.types.is_struct(wanted):
        have = {column.type.field(place).name: place for place in range(column.type.num_fields)}
        parts = [
            _cast(pc.struct_field(column, have[field.name]), field.type)
            if field.name in have
            else pa.nulls(len(column), field.type)
            for field in wanted
        ]
        return pa.StructArray.from_arrays(parts, fields=list(wanted), mask=column.is_null())
    if pa.types.is_string(wanted) and (pa.types.is_binary(column.type) or pa.types.is_nested(column.type)):
        return pa.array([_text(value) for value in python_values(column)], pa.string())
    return column.cast(wanted)


def _text(value: object) -> str | None:
    if value is None:
        return None
    return "\\x" + value.hex() if isinstance(value, bytes) else json.dumps(value, default=str)
