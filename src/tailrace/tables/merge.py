"""Folded rows as a Delta table takes them: those that come in, and the merge as delta-rs wants it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable

from tailrace.model.schema import TableSchema
from tailrace.tables.fold import UPSERT, Folded, folded_schema, key_ordinals
from tailrace.tables.lookup import merge_source


def merge_of(
    schema: TableSchema, table: DeltaTable, rows: pa.Table, properties: CommitProperties
) -> Callable[[], object]:
    """The merge, ready to run."""
    source, kept = merge_source(schema, table, rows)
    names = [quoted(column.name) for column in schema.columns]
    fresh = {name: f"s.c{i}" for i, name in enumerate(names)}
    over = {
        name: f"CASE WHEN s.k{i} THEN t.{name} ELSE s.c{i} END" if i in kept else fresh[name]
        for i, name in enumerate(names)
    }
    keys = key_ordinals(schema)
    # What is streamed is not looked at for file pruning, but pruning cannot print a list as SQL.
    streamed = any(pa.types.is_nested(schema.columns[i].type) for i in keys)
    merger = table.merge(
        source,
        predicate=" AND ".join(f"t.{names[i]} = s.c{i}" for i in keys),
        source_alias="s",
        target_alias="t",
        streamed_exec=streamed,
        commit_properties=properties,
    )
    merger = merger.when_matched_delete("s.op = 1").when_matched_update(over, "s.op = 0")
    return merger.when_not_matched_insert(fresh, "s.op = 0").execute


def quoted(name: str) -> str:
    """A column's name as SQL, verbatim."""
    return '"' + name.replace('"', '""') + '"'


def operations(folded: Folded) -> Any:
    """What is done with each row."""
    return folded.rows.column("op").to_numpy()


def upserts_of(schema: TableSchema, folded: Folded) -> pa.Table:
    """The rows that come in, as the table's own columns; a keyless row as often as it came."""
    copies = np.where(operations(folded) == UPSERT, folded.rows.column("copies").to_numpy(), 0)
    places = pa.array(np.repeat(np.arange(copies.size), copies))
    rows = folded.rows.select(range(len(schema.columns))).take(places)
    return pa.Table.from_arrays(rows.columns, schema=pa.schema(schema.row_fields()))


def whole_rows(schema: TableSchema, rows: pa.Table) -> Folded:
    """Rows as a table has them, folded: each comes in under its key, whatever was there."""
    fields, size = folded_schema(schema), rows.num_rows
    own = [rows.column(column.name).cast(column.type) for column in schema.columns]
    rest = [
        pa.array(np.full(size, UPSERT, np.int8)), pa.nulls(size, fields.field("absent").type),
        pa.nulls(size, fields.field("base").type), pa.array(np.zeros(size, np.bool_)),
        pa.array(np.ones(size, np.int64)),
    ]  # fmt: skip
    return Folded(truncated=False, rows=pa.Table.from_arrays([*own, *rest], schema=fields))
