"""Turn changes into DataFrame rows, with typed columns or as an envelope.

Typed rows have the change's own columns first, then the table's. The columns are those of one view over every schema
that the table had when the DataFrame was created (`changelog/read/merged_schema.py` has the rules). A row of a later
schema that the view cannot hold is never delivered in part. The planner stops before it, or it is delivered whole in a
column of its own.

Envelope rows have the same columns for all tables: the change's own, the table's name, and the row as one value.
"""

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
"""Name of the column for a whole row as one value. It is null where the DataFrame's own columns hold the row."""


def typed_fields(schema: TableSchema, *, with_row: bool) -> pa.Schema:
    """Return the columns of the DataFrame.

    No field is declared as never null, because Spark takes no such field from Python.
    """
    fields = [pa.field(field.name, field.type) for field in schema.change_schema()]
    if not schema.key and not schema.former_key:  # a struct without fields
        fields = [field for field in fields if field.name != change.MOVED_FROM]
    fields.insert(2, pa.field(change.COMMIT, pa.int64()))
    return pa.schema([*fields, pa.field(ROW, VARIANT)] if with_row else fields)


def typed_rows(batch: ChangeBatch, schema: TableSchema, commits: Int64Array) -> dict[str, pa.Array]:
    """Return the rows of a batch in a schema, by column. Columns that are left out are null throughout."""
    extra = {}
    if not fits_schema(batch.schema, schema):
        extra[ROW] = row_values(batch)
        batch = _fitting(batch, schema)
    data = conform_to_schema(batch, schema).data
    return {change.COMMIT: pa.array(commits)} | {name: data.column(name) for name in data.schema.names} | extra


def row_values(batch: ChangeBatch) -> pa.StructArray:
    """Return each row as one value; null for a TRUNCATE."""
    columns = [batch.data.column(change.stored_name(name)) for name in batch.schema.names]
    missing = pa.compute.equal(batch.data.column(change.OP), "truncate") if batch.truncates else None
    return objects(batch.schema.names, columns, missing)


def _fitting(batch: ChangeBatch, schema: TableSchema) -> ChangeBatch:
    """Return the batch without the columns that the schema cannot hold."""
    known = {column.name: column.type for column in schema.columns}
    kept = tuple(
        column for column in batch.schema.columns if column.name in known and can_hold(known[column.name], column.type)
    )
    names = {change.stored_name(column.name) for column in kept}
    always = {field.name for field in change.REQUIRED} | set(change.OPTIONAL)
    data = batch.data.select([name for name in batch.data.schema.names if name in always | names])
    for name in (change.BEFORE, change.MOVED_FROM):
        i = data.schema.get_field_index(name)
        if i >= 0:
            data = data.set_column(i, name, _only(data.column(i), names))
    return replace(batch, schema=replace(batch.schema, columns=kept), data=data)


def _only(structs: pa.StructArray, names: set[str]) -> pa.StructArray:
    fields = [field for field in structs.type if field.name in names]
    parts = [pa.compute.struct_field(structs, field.name) for field in fields]
    if not fields:
        return pa.nulls(len(structs), pa.struct([]))
    return pa.StructArray.from_arrays(parts, fields=fields, mask=structs.is_null())


SCHEMA, TABLE = "_schema", "_table"


def envelope_fields() -> pa.Schema:
    """Return the columns of the DataFrame, which are the same for all tables."""
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
    """Return the rows of a batch, by column. Columns that are left out are null throughout."""
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
    """Return the structs with the columns' own names. Those in the log may have one underscore more."""
    stored = {change.stored_name(name): name for name in own}
    names = [field.name for field in structs.type]
    columns = [pc.struct_field(structs, name) for name in names]
    return objects([stored[name] for name in names], columns, structs.is_null())
