"""The merge of folded rows into a Delta table, as delta-rs takes it."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable

from tailrace.model.schema import TableSchema
from tailrace.tables.fold import key_ordinals
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
