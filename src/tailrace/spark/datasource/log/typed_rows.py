"""Changes of one table with its columns: what a change carries first, then the table's own.

The columns are those of one view over every shape that the table had when the DataFrame was made
(`changelog/read/merged_schema.py` has the rules). A row of a shape that came later and that the view cannot hold
never comes in a part of itself: whoever plans stops before it, or it comes whole in a column of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.changelog.read.commit_lookup import Int64Array
from tailrace.changelog.read.merged_schema import can_hold, conform_to_schema, fits_schema
from tailrace.model import change
from tailrace.model.batch import ChangeBatch
from tailrace.model.schema import TableSchema
from tailrace.spark.datasource.log.variant_rows import VARIANT, objects

ROW = "_row"
"""A whole row as one value, null where the DataFrame's own columns hold it."""


def typed_fields(shape: TableSchema, *, with_row: bool) -> pa.Schema:
    """The columns of the DataFrame. Nothing is declared as never null: Spark takes no such field from Python."""
    fields = [pa.field(field.name, field.type) for field in shape.change_schema()]
    if not shape.key and not shape.former_key:  # a struct without fields
        fields = [field for field in fields if field.name != change.MOVED_FROM]
    fields.insert(2, pa.field(change.COMMIT, pa.int64()))
    return pa.schema([*fields, pa.field(ROW, VARIANT)] if with_row else fields)


def typed_rows(batch: ChangeBatch, shape: TableSchema, commits: Int64Array) -> dict[str, pa.Array]:
    """The rows of a batch in that shape, by column; columns that are left out are null throughout."""
    found = {}
    if not fits_schema(batch.schema, shape):
        found[ROW] = row_values(batch)
        batch = _fitting(batch, shape)
    data = conform_to_schema(batch, shape).data
    return {change.COMMIT: pa.array(commits)} | {name: data.column(name) for name in data.schema.names} | found


def row_values(batch: ChangeBatch) -> pa.StructArray:
    """Each row as one value; none for a TRUNCATE."""
    columns = [batch.data.column(change.stored_name(name)) for name in batch.schema.names]
    missing = pa.compute.equal(batch.data.column(change.OP), "truncate") if batch.truncates else None
    return objects(batch.schema.names, columns, missing)


def _fitting(batch: ChangeBatch, shape: TableSchema) -> ChangeBatch:
    """The batch without what the shape has no place for."""
    known = {column.name: column.type for column in shape.columns}
    kept = tuple(
        column for column in batch.schema.columns if column.name in known and can_hold(known[column.name], column.type)
    )
    names = {change.stored_name(column.name) for column in kept}
    always = {field.name for field in change.REQUIRED} | set(change.OPTIONAL)
    data = batch.data.select([name for name in batch.data.schema.names if name in always | names])
    for name in (change.BEFORE, change.MOVED_FROM):
        place = data.schema.get_field_index(name)
        if place >= 0:
            data = data.set_column(place, name, _only(data.column(place), names))
    return replace(batch, schema=replace(batch.schema, columns=kept), data=data)


def _only(structs: pa.StructArray, names: set[str]) -> pa.StructArray:
    fields = [field for field in structs.type if field.name in names]
    parts = [pa.compute.struct_field(structs, field.name) for field in fields]
    if not fields:
        return pa.nulls(len(structs), pa.struct([]))
    return pa.StructArray.from_arrays(parts, fields=fields, mask=structs.is_null())


SCHEMA, TABLE = "_schema", "_table"


def envelope_fields() -> pa.Schema:
    """The columns of the DataFrame, whatever the tables look like."""
    always = [pa.field(field.name, field.type) for field in change.REQUIRED]
    always.insert(2, pa.field(change.COMMIT, pa.int64()))
    return pa.schema(
        [
            *always,
            pa.field(SCHEMA, pa.string()),
            pa.field(TABLE, pa.string()),
            pa.field(ROW, VARIANT),
            pa.field(change.UNCHANGED, pa.list_(pa.string())),
            pa.field(change.BEFORE, VARIANT),
            pa.field(change.MOVED_FROM, VARIANT),
            pa.field(change.UNFIT, change.UNFIT_TYPE),
        ]
    )


def envelope_rows(batch: ChangeBatch, commits: Int64Array) -> dict[str, pa.Array]:
    """The rows of a batch, by column; columns that are left out are null throughout."""
    data, rows, table = batch.data, len(batch), batch.schema.table
    plain = {*(field.name for field in change.REQUIRED), change.UNCHANGED, change.UNFIT}
    structs = {change.BEFORE: batch.schema.names, change.MOVED_FROM: batch.schema.key}
    return {
        **{name: data.column(name) for name in data.schema.names if name in plain},
        **{name: _as_object(data.column(name), own) for name, own in structs.items() if name in data.schema.names},
        change.COMMIT: pa.array(commits),
        SCHEMA: pa.repeat(pa.scalar(table.schema, pa.string()), rows),
        TABLE: pa.repeat(pa.scalar(table.name, pa.string()), rows),
        ROW: row_values(batch),
    }


def _as_object(structs: pa.StructArray, own: Sequence[str]) -> pa.StructArray:
    """With the columns' own names: those in the log may bear an underscore more."""
    stored = {change.stored_name(name): name for name in own}
    names = [field.name for field in structs.type]
    columns = [pc.struct_field(structs, name) for name in names]
    return objects([stored[name] for name in names], columns, structs.is_null())
