"""Changes of many tables in one shape: a change's own columns, the table's name, and the row as one value."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.changelog.read.commit_lookup import Int64Array
from tailrace.model import change
from tailrace.model.batch import ChangeBatch
from tailrace.spark.datasource.log.typed_rows import ROW, row_values
from tailrace.spark.datasource.log.variant_rows import VARIANT, objects

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
