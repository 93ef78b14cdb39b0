"""Folded rows as a Delta table takes them: those that come in, and the merge as delta-rs wants it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable
from deltalake.table import TableMerger

from tailrace.model import change
from tailrace.model.schema import TableSchema
from tailrace.tables.fold import UPSERT, Folded, folded_schema, key_ordinals
from tailrace.tables.forms import CURRENT, DELETED, VALID_TO, Form, TableMode
from tailrace.tables.lookup import merge_source


def merge_of(
    form: Form, schema: TableSchema, table: DeltaTable, folded: Folded, properties: CommitProperties
) -> Callable[[], object]:
    """The merge of rows of the table's own shape, ready to run."""
    if form.mode is TableMode.HISTORY:
        return _merge_versions(schema, table, folded, properties)
    source, kept = merge_source(schema, table, folded.rows)
    names = [quoted(column.name) for column in schema.columns]
    fresh = {name: f"s.c{i}" for i, name in enumerate(names)}
    over = {
        name: f"CASE WHEN s.k{i} THEN t.{name} ELSE s.c{i} END" if i in kept else fresh[name]
        for i, name in enumerate(names)
    }
    merger = _merger(schema, table, source, properties)
    if form.soft_delete:
        there = f"NOT t.{quoted(DELETED)}"
        said = {quoted(column.name): fresh[quoted(column.name)] for column in form.added}
        merger = merger.when_matched_update(said, f"s.op = 3 AND {there}")
        if folded.ended is not None:
            ended = {quoted(name): _literal(value) for name, value in folded.ended.values.items()}
            merger = merger.when_not_matched_by_source_update(ended, there)
    merger = merger.when_matched_delete("s.op = 1").when_matched_update(over, "s.op = 0")
    return merger.when_not_matched_insert(fresh, "s.op = 0").execute


def _merge_versions(
    schema: TableSchema, table: DeltaTable, folded: Folded, properties: CommitProperties
) -> Callable[[], object]:
    """What comes in stands beside what is there; of that only current versions end, or go if what ends them is the
    transaction that they are from."""
    source, _ = merge_source(schema, table, folded.rows, only=CURRENT)
    names = [quoted(column.name) for column in schema.columns]
    fresh = {name: f"s.c{i}" for i, name in enumerate(names)}
    tx, current = quoted(change.TX), f"t.{quoted(CURRENT)}"
    merger = _merger(schema, table, source, properties, beside=f" AND {current} AND s.op = 2")
    merger = merger.when_matched_delete(f"t.{tx} = {fresh[tx]}")
    merger = merger.when_matched_update({quoted(VALID_TO): fresh[quoted(VALID_TO)], quoted(CURRENT): "false"})
    if folded.ended is not None:
        ended = {quoted(name): _literal(value) for name, value in folded.ended.values.items()}
        merger = merger.when_not_matched_by_source_delete(f"{current} AND t.{tx} = {folded.ended.tx}")
        merger = merger.when_not_matched_by_source_update(ended, current)
    return merger.when_not_matched_insert(fresh, "s.op = 0").execute


def _merger(
    schema: TableSchema, table: DeltaTable, source: pa.Table, properties: CommitProperties, *, beside: str = ""
) -> TableMerger:
    keys = key_ordinals(schema)
    # What is streamed is not looked at for file pruning, but pruning cannot print a list as SQL.
    streamed = any(pa.types.is_nested(schema.columns[i].type) for i in keys)
    return table.merge(
        source,
        predicate=" AND ".join(f"t.{quoted(schema.columns[i].name)} = s.c{i}" for i in keys) + beside,
        source_alias="s",
        target_alias="t",
        streamed_exec=streamed,
        commit_properties=properties,
    )


def _literal(value: pa.Scalar) -> str:
    """A value as SQL."""
    if pa.types.is_timestamp(value.type):
        return f"arrow_cast({value.value}, 'Timestamp(Microsecond, Some(\"UTC\"))')"
    if pa.types.is_boolean(value.type):
        return str(value.as_py()).lower()
    said = value.as_py()
    return str(said) if isinstance(said, int) else "'" + str(said).replace("'", "''") + "'"


def only_new(form: Form, folded: Folded) -> bool:
    """Whether no row of the table is touched: rows with a key may be there already, new versions are not."""
    if folded.ended is not None:
        return False
    new = form.mode is TableMode.HISTORY and bool((operations(folded) == UPSERT).all()) and not folded.partial
    return new or not folded.rows.num_rows


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
