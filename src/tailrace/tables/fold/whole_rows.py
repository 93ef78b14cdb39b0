"""Fold whole rows, which need no values from the table."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.model import change
from tailrace.model.schema import TableSchema
from tailrace.tables.fold.by_mode import with_added_columns
from tailrace.tables.fold.fold import as_type
from tailrace.tables.fold.folded_changes import END_VERSION, UPSERT, FoldedChanges, folded_rows, folded_schema
from tailrace.tables.port import AppliedPosition
from tailrace.tables.spec import CURRENT, TIME, VALID_FROM, VALID_TO, LoadOrigin, TableMode, TableSpec


def operations(folded: FoldedChanges) -> Any:
    """Return the `op` of each folded row."""
    return folded.rows.column("op").to_numpy()


def fold_for_upsert(
    spec: TableSpec, schema: TableSchema, rows: pa.Table, here: AppliedPosition, metadata: pa.Table | None = None
) -> FoldedChanges:
    """Fold whole source rows that repair a table at its position.

    For a history, `metadata` has the metadata columns of the change that made each row.
    """
    assert spec.mode is not TableMode.APPEND, "stored changes cannot be repaired"
    stored = spec.stored_schema(schema)
    if spec.mode is TableMode.HISTORY:
        assert metadata is not None, "a version needs its change's metadata"
        return _fold_versions(spec, stored, rows, _mark_loaded(metadata, here))
    origin = LoadOrigin(seq=here.seq, position=str(here.position), read_at=time.time_ns() // 1000)
    own = with_added_columns(spec, schema, rows.to_batches(), origin)
    return whole_rows(stored, pa.Table.from_batches(own, pa.schema(stored.row_fields())))


def _mark_loaded(metadata: pa.Table, here: AppliedPosition) -> pa.Table:
    """Return the metadata with a `_seq` and `_tx` for rows that a load has read.

    Such rows have no log number and no transaction, but a `_seq` below zero. They get the table's `_seq`, and a
    negative `_tx` that differs for every load, so that they are not taken for changes.
    """
    seqs, committed = metadata.column(change.SEQ), as_type(metadata.column(change.COMMITTED_AT), TIME).cast(pa.int64())
    loaded = pc.less(seqs, 0)
    metadata = metadata.set_column(
        metadata.column_names.index(change.SEQ), change.SEQ, pc.if_else(loaded, here.seq, seqs)
    )
    txs = pc.if_else(loaded, pc.negate(committed), metadata.column(change.TX))
    return metadata.set_column(metadata.column_names.index(change.TX), change.TX, txs)


def _fold_versions(spec: TableSpec, stored: TableSchema, rows: pa.Table, metadata: pa.Table) -> FoldedChanges:
    """Fold each row as its change's version, and end the version before.

    If the change's version is in the table already it is replaced, because it is of the same transaction.
    """
    size, made = rows.num_rows, metadata.column(change.COMMITTED_AT)
    no_times, times = pa.nulls(size, TIME), as_type(made, TIME)
    begin_columns = {VALID_FROM: times, VALID_TO: no_times, CURRENT: pa.array(np.ones(size, np.bool_))}
    end_columns = {VALID_FROM: no_times, VALID_TO: times, CURRENT: pa.array(np.zeros(size, np.bool_))}

    def folded(values: dict[str, Any], operation: int) -> pa.Table:
        added = [
            values[column.name] if column.name in values else as_type(metadata.column(column.name), column.type)
            for column in spec.added_columns
        ]
        return folded_rows(stored, [*rows.columns, *added], np.full(size, operation, np.int8))

    clock = max(times.cast(pa.int64()).to_pylist(), default=0)
    return FoldedChanges(
        truncated=False,
        rows=pa.concat_tables([folded(begin_columns, UPSERT), folded(end_columns, END_VERSION)]),
        latest_time=clock,
    )


def whole_rows(schema: TableSchema, rows: pa.Table) -> FoldedChanges:
    """Fold rows as a table has them: each replaces the row under its key."""
    arrow_schema, size = folded_schema(schema), rows.num_rows
    own = [rows.column(column.name).cast(column.type) for column in schema.columns]
    rest = [
        pa.array(np.full(size, UPSERT, np.int8)),
        pa.nulls(size, arrow_schema.field("absent").type),
        pa.nulls(size, arrow_schema.field("base").type),
        pa.array(np.zeros(size, np.bool_)),
        pa.array(np.ones(size, np.int64)),
    ]
    return FoldedChanges(truncated=False, rows=pa.Table.from_arrays([*own, *rest], schema=arrow_schema))
