"""Fold changes, and complete rows of a load, as the table's mode needs them.

The result does not depend on how the changes were split into batches. A mode that keeps the past keeps the same past
for a row that was inserted and deleted in one batch or in two.

Pure: no Spark, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.model import change
from tailrace.model.change import Operation
from tailrace.model.schema import Column, TableSchema
from tailrace.tables.delta.diff import RetirementRule
from tailrace.tables.evolve.schema_plan import Recast
from tailrace.tables.fold.fold import FoldInput, as_type, fold, operation_codes, refuse_unfit
from tailrace.tables.fold.folded_changes import MARK_DELETED, UPSERT, FoldedChanges, TruncateEffect, folded_rows
from tailrace.tables.fold.row_states import RowStates
from tailrace.tables.fold.row_versions import fold_versions
from tailrace.tables.spec import CURRENT, PLAIN_MIRROR, VALID_FROM, VALID_TO, LoadOrigin, TableMode, TableSpec


def fold_by_mode(
    spec: TableSpec, schema: TableSchema, changes: pa.Table, *, can_refetch: bool = False
) -> FoldedChanges:
    """Fold changes of the source's schema into rows of the table's own schema.

    `can_refetch` is as in `fold`. A history never refetches, because its versions are made from past values.
    """
    if spec == PLAIN_MIRROR:
        return fold(schema, changes, can_refetch=can_refetch)
    stored = spec.stored_schema(schema)
    if spec.mode is TableMode.HISTORY:
        return fold_versions(spec, schema, stored, changes)
    if spec.mode is TableMode.APPEND:
        return _fold_changes(spec, schema, stored, changes)
    if spec.soft_delete:
        return _fold_marked(spec, schema, stored, changes, can_refetch)
    return _fold_widened(spec, schema, changes, can_refetch)


def _fold_widened(spec: TableSpec, schema: TableSchema, changes: pa.Table, can_refetch: bool) -> FoldedChanges:
    """Fold as a plain mirror in which every change has the added columns too."""
    # No source column can have a zero byte in its name, so these names are free.
    wide = tuple(replace(column, name=f"\0{column.name}") for column in spec.added_columns)
    for inner, column in zip(wide, spec.added_columns, strict=True):
        changes = changes.append_column(inner.name, changes.column(column.name))
    return fold(replace(schema, columns=(*schema.columns, *wide), facts=None), changes, can_refetch=can_refetch)


def _fold_changes(spec: TableSpec, schema: TableSchema, stored: TableSchema, changes: pa.Table) -> FoldedChanges:
    """Return every change as a row."""
    size = changes.num_rows
    batch = FoldInput(schema, changes, operation_codes(changes), empty_before=False)
    refuse_unfit(batch, [np.arange(size)] * len(batch.own), np.ones(size, np.bool_))
    added = [_column(changes, column) for column in spec.added_columns]
    index = [column.name for column in spec.added_columns].index(change.UNCHANGED)
    added[index] = _renamed(spec, added[index])
    return FoldedChanges(
        truncated=False, rows=folded_rows(stored, [*batch.own, *added], np.full(size, UPSERT, np.int8))
    )


def _column(changes: pa.Table, column: Column) -> Any:
    if column.name not in changes.column_names:
        return pa.nulls(changes.num_rows, column.type)
    return as_type(changes.column(column.name), column.type)


def _renamed(spec: TableSpec, unchanged: Any) -> Any:
    """Return `_unchanged` with the columns' lake names."""
    if not spec.renamed_columns or unchanged.null_count == len(unchanged):
        return unchanged
    lists = unchanged.combine_chunks()
    old, new = (pa.array(names, pa.string()) for names in zip(*spec.renamed_columns, strict=True))
    indices = pc.index_in(lists.flatten(), value_set=old)
    names = pc.coalesce(new.take(indices), lists.flatten())
    counts = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])
    return pa.ListArray.from_arrays(pa.array(offsets), names, mask=lists.is_null())


def _fold_marked(
    spec: TableSpec, schema: TableSchema, stored: TableSchema, changes: pa.Table, can_refetch: bool
) -> FoldedChanges:
    """Return the last state of each key, deleted keys included."""
    states = RowStates(schema, changes, can_refetch=can_refetch)
    last = np.full(int(states.key.max(initial=-1)) + 1, -1, np.int64)
    last[states.key] = np.arange(len(states))
    final = np.sort(last[last >= 0])
    deleted = ~states.alive[final]
    # A deleted row that existed in this batch is inserted with its mark. For any other it is unknown whether the table
    # has the row; if it has not, there is nothing to mark.
    only_marked = deleted & (states.prev[final] < 0)
    operations = np.where(only_marked, MARK_DELETED, UPSERT).astype(np.int8)
    added = [
        pa.array(deleted)
        if column.name == spec.deleted_column
        else _column(changes, column).take(pa.array(states.row[final]))
        for column in spec.added_columns
    ]
    rows = states.rows(final, stored, added, operations)
    if (truncate := states.truncated_at) is None:
        return FoldedChanges(truncated=False, rows=rows)
    values = {
        column.name: changes.column(column.name)[truncate]
        for column in spec.added_columns
        if column.name != spec.deleted_column
    }
    tx = changes.column(change.TX)[truncate].as_py()
    return FoldedChanges(
        truncated=False,
        rows=rows,
        truncate_effect=TruncateEffect(values={spec.deleted_column: pa.scalar(True), **values}, tx=tx),
    )


def with_added_columns(
    spec: TableSpec, schema: TableSchema, batches: Iterable[pa.RecordBatch], origin: LoadOrigin
) -> Iterator[pa.RecordBatch]:
    """Yield a load's rows in the table's own schema."""
    if spec == PLAIN_MIRROR:
        yield from batches
        return
    values: Mapping[str, Any] = {
        change.OP: Operation.READ.value,
        change.SEQ: origin.seq,
        change.POSITION: origin.position,
        spec.deleted_column: False,
        VALID_FROM: origin.read_at,
        CURRENT: True,
    }
    arrow_schema = pa.schema(spec.stored_schema(schema).row_fields())
    for batch in batches:
        added = [pa.repeat(_scalar(column, values), batch.num_rows) for column in spec.added_columns]
        yield pa.RecordBatch.from_arrays([*batch.columns, *added], schema=arrow_schema)


def retirement_rule(spec: TableSpec, origin: LoadOrigin, clock: int) -> RetirementRule | None:
    """Return how to retire rows that a load no longer finds.

    None for a table that does not keep them.
    """
    if spec.soft_delete:
        marks = {
            spec.deleted_column: True,
            change.OP: Operation.DELETE.value,
            change.SEQ: origin.seq,
            change.POSITION: origin.position,
        }
        values = {column.name: _scalar(column, marks) for column in spec.added_columns}
        return RetirementRule(flag=spec.deleted_column, retired_value=True, replaces=True, values=values)
    if spec.mode is not TableMode.HISTORY:
        return None
    types = {column.name: column.type for column in spec.added_columns}
    ended_at = pa.scalar(max(clock, origin.read_at), types[VALID_TO])
    values = {VALID_TO: ended_at, CURRENT: pa.scalar(False)}
    return RetirementRule(
        flag=CURRENT, retired_value=False, replaces=False, values=values, least={VALID_FROM: ended_at}
    )


def split_compared(spec: TableSpec, schema: TableSchema) -> tuple[TableSchema, tuple[Column, ...]]:
    """Split the table's own schema into columns that a load compares, and the others."""
    stored, count = spec.stored_schema(schema), len(schema.columns) + spec.soft_delete
    return replace(stored, columns=stored.columns[:count], facts=None), stored.columns[count:]


def recast_for_spec(spec: TableSpec, recast: Recast) -> Recast:
    """Return the recast for the lake table's own schema."""
    if spec == PLAIN_MIRROR:
        return recast
    # A stored change has only what the source sent then, so a later column stays null in it.
    backfilled = () if spec.mode is TableMode.APPEND else recast.backfilled
    return Recast(
        schema=spec.stored_schema(recast.schema),
        added=tuple(map(spec.lake_name, recast.added)),
        renamed=tuple((spec.lake_name(old), spec.lake_name(new)) for old, new in recast.renamed),
        backfilled=tuple((spec.lake_name(name), value) for name, value in backfilled),
        dropped=tuple(map(spec.lake_name, recast.dropped)),
        kept_apart=tuple(map(spec.lake_name, recast.kept_apart)),
    )


def _scalar(column: Column, values: Mapping[str, Any]) -> pa.Scalar:
    return pa.scalar(values.get(column.name), column.type)
