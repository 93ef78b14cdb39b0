"""Merge all versions of a table's schema into one view, by stated rules.

1. Columns go by name. First are those of the newest version, in its order, then those that only older versions have,
   with the newer version's first.
2. A column that a version does not have is null in that version's rows.
3. Where versions differ in a column's type, the view has the narrowest type that holds every value of each exactly.
   That is the wider integer, the wider float, or a decimal with room for both. If no such type exists it is text:
   numbers, dates and times as Arrow writes them, bytes as `\\x` and hexadecimal digits, lists as JSON.
4. The key is the newest version's. `_moved_from` has the columns of every version's key, because a row's old key is
   named by the key that it had.

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
    """Return the schema of the view over these versions, oldest first."""
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
    """Return the narrowest type that holds every value of both exactly.

    It is text if no other type does.
    """
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
    """Return true if `wider` can hold every value of `narrower`, by the third rule."""
    return bool(_common(wider, narrower) == wider)


def fits_schema(version: TableSchema, view: TableSchema) -> bool:
    """Return true if rows of a version fit into a view and lose nothing.

    Rows of each version that the view was made of do.
    """
    known = {column.name: column.type for column in view.columns}
    return {*version.key} <= {*view.key, *view.former_key} and all(
        column.name in known and can_hold(known[column.name], column.type) for column in version.columns
    )


def conform_to_schema(batch: ChangeBatch, view: TableSchema) -> ChangeBatch:
    """Return the same rows with the view's schema."""
    if batch.schema == view:
        return batch
    fields = view.change_schema()
    names = set(batch.data.schema.names)
    columns = [
        _cast(batch.data.column(field.name), field.type) if field.name in names else pa.nulls(len(batch), field.type)
        for field in fields
    ]
    return replace(batch, schema=view, data=pa.RecordBatch.from_arrays(columns, schema=fields))


def _cast(column: pa.Array, target: pa.DataType) -> pa.Array:
    if column.type == target:
        return column
    if pa.types.is_struct(target):
        indexes = {column.type.field(index).name: index for index in range(column.type.num_fields)}
        parts = [
            _cast(pc.struct_field(column, indexes[field.name]), field.type)
            if field.name in indexes
            else pa.nulls(len(column), field.type)
            for field in target
        ]
        return pa.StructArray.from_arrays(parts, fields=list(target), mask=column.is_null())
    if pa.types.is_string(target) and (pa.types.is_binary(column.type) or pa.types.is_nested(column.type)):
        return pa.array([_text(value) for value in python_values(column)], pa.string())
    return column.cast(target)


def _text(value: object) -> str | None:
    if value is None:
        return None
    return "\\x" + value.hex() if isinstance(value, bytes) else json.dumps(value, default=str)
