"""Changes, and rows that a load reads, as a table of a form takes them.

The result does not depend on how the changes were cut into batches: a form that keeps the past keeps the same past
whether a row that came and went did so in one batch or in two.

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
from tailrace.tables.fold.fold import (
    MARK_DELETED,
    UPSERT,
    FoldedChanges,
    FoldInput,
    TruncateEffect,
    as_type,
    fold,
    folded_rows,
    operation_codes,
    refuse_unfit,
)
from tailrace.tables.fold.row_states import RowStates
from tailrace.tables.fold.row_versions import fold_versions
from tailrace.tables.spec import CURRENT, PLAIN_MIRROR, VALID_FROM, VALID_TO, LoadOrigin, TableMode, TableSpec


def fold_by_mode(form: TableSpec, schema: TableSchema, changes: pa.Table, *, rereads: bool = False) -> FoldedChanges:
    """Changes of the source's shape as what a table of the form must do about them, in its own shape. `rereads` is as
    `fold` has it; a version is never read again, for what it comes from is of the past."""
    if form == PLAIN_MIRROR:
        return fold(schema, changes, rereads=rereads)
    stored = form.stored_schema(schema)
    if form.mode is TableMode.HISTORY:
        return fold_versions(form, schema, stored, changes)
    if form.mode is TableMode.APPEND:
        return _fold_changes(form, schema, stored, changes)
    if form.soft_delete:
        return _fold_marked(form, schema, stored, changes, rereads)
    return _fold_widened(form, schema, changes, rereads)


def _fold_widened(form: TableSpec, schema: TableSchema, changes: pa.Table, rereads: bool) -> FoldedChanges:
    """As any mirror: what the form adds are columns that every change brings."""
    # No source can have a name with a zero in it, so none is in the way.
    wide = tuple(replace(column, name=f"\0{column.name}") for column in form.added_columns)
    for inner, column in zip(wide, form.added_columns, strict=True):
        changes = changes.append_column(inner.name, changes.column(column.name))
    return fold(replace(schema, columns=(*schema.columns, *wide), facts=None), changes, rereads=rereads)


def _fold_changes(form: TableSpec, schema: TableSchema, stored: TableSchema, changes: pa.Table) -> FoldedChanges:
    """Every change as a row."""
    size = changes.num_rows
    batch = FoldInput(schema, changes, operation_codes(changes), empty_before=False)
    refuse_unfit(batch, [np.arange(size)] * len(batch.own), np.ones(size, np.bool_))
    added = [_column(changes, column) for column in form.added_columns]
    at = [column.name for column in form.added_columns].index(change.UNCHANGED)
    added[at] = _renamed(form, added[at])
    return FoldedChanges(
        truncated=False, rows=folded_rows(stored, [*batch.own, *added], np.full(size, UPSERT, np.int8))
    )


def _column(changes: pa.Table, column: Column) -> Any:
    if column.name not in changes.column_names:
        return pa.nulls(changes.num_rows, column.type)
    return as_type(changes.column(column.name), column.type)


def _renamed(form: TableSpec, unchanged: Any) -> Any:
    """Lists of columns, by their names in the lake."""
    if not form.renamed_columns or unchanged.null_count == len(unchanged):
        return unchanged
    lists = unchanged.combine_chunks()
    old, new = (pa.array(names, pa.string()) for names in zip(*form.renamed_columns, strict=True))
    at = pc.index_in(lists.flatten(), value_set=old)
    names = pc.coalesce(new.take(at), lists.flatten())
    counts = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])
    return pa.ListArray.from_arrays(pa.array(offsets), names, mask=lists.is_null())


def _fold_marked(
    form: TableSpec, schema: TableSchema, stored: TableSchema, changes: pa.Table, rereads: bool
) -> FoldedChanges:
    """The last state of each key, alive or not."""
    states = RowStates(schema, changes, rereads=rereads)
    last = np.full(int(states.key.max(initial=-1)) + 1, -1, np.int64)
    last[states.key] = np.arange(len(states))
    which = np.sort(last[last >= 0])
    gone = ~states.alive[which]
    # A row that was alive in this batch must be found as deleted, so it comes in; of one that was not, whether it is
    # in the table is not known, and if it is not there is nothing to mark.
    only_marked = gone & (states.prev[which] < 0)
    operations = np.where(only_marked, MARK_DELETED, UPSERT).astype(np.int8)
    added = [
        pa.array(gone)
        if column.name == form.deleted_column
        else _column(changes, column).take(pa.array(states.row[which]))
        for column in form.added_columns
    ]
    rows = states.rows(which, stored, added, operations)
    if (at := states.truncated_at) is None:
        return FoldedChanges(truncated=False, rows=rows)
    values = {
        column.name: changes.column(column.name)[at]
        for column in form.added_columns
        if column.name != form.deleted_column
    }
    tx = changes.column(change.TX)[at].as_py()
    return FoldedChanges(
        truncated=False,
        rows=rows,
        truncate_effect=TruncateEffect(values={form.deleted_column: pa.scalar(True), **values}, tx=tx),
    )


def with_added_columns(
    form: TableSpec, schema: TableSchema, batches: Iterable[pa.RecordBatch], origin: LoadOrigin
) -> Iterator[pa.RecordBatch]:
    """Rows that a load reads, in the table's own shape."""
    if form == PLAIN_MIRROR:
        yield from batches
        return
    said: Mapping[str, Any] = {
        change.OP: Operation.READ.value,
        change.SEQ: origin.seq,
        change.POSITION: origin.position,
        form.deleted_column: False,
        VALID_FROM: origin.read_at,
        CURRENT: True,
    }
    fields = pa.schema(form.stored_schema(schema).row_fields())
    for batch in batches:
        added = [pa.repeat(_scalar(column, said), batch.num_rows) for column in form.added_columns]
        yield pa.RecordBatch.from_arrays([*batch.columns, *added], schema=fields)


def retirement_rule(form: TableSpec, origin: LoadOrigin, clock: int) -> RetirementRule | None:
    """What becomes of rows that a load does not find any more; None for a table that does not keep them."""
    if form.soft_delete:
        said = {
            form.deleted_column: True,
            change.OP: Operation.DELETE.value,
            change.SEQ: origin.seq,
            change.POSITION: origin.position,
        }
        values = {column.name: _scalar(column, said) for column in form.added_columns}
        return RetirementRule(flag=form.deleted_column, retired_value=True, replaces=True, values=values)
    if form.mode is not TableMode.HISTORY:
        return None
    types = {column.name: column.type for column in form.added_columns}
    here = pa.scalar(max(clock, origin.read_at), types[VALID_TO])
    values = {VALID_TO: here, CURRENT: pa.scalar(False)}
    return RetirementRule(flag=CURRENT, retired_value=False, replaces=False, values=values, least={VALID_FROM: here})


def split_compared(form: TableSpec, schema: TableSchema) -> tuple[TableSchema, tuple[Column, ...]]:
    """Of the table's own shape what decides whether a row that a load has read is in it, and the other columns."""
    stored, counts = form.stored_schema(schema), len(schema.columns) + form.soft_delete
    return replace(stored, columns=stored.columns[:counts], facts=None), stored.columns[counts:]


def recast_for_spec(form: TableSpec, recast: Recast) -> Recast:
    """The same for the lake table's own shape."""
    if form == PLAIN_MIRROR:
        return recast
    # A change tells what it brought: a column that came later is not among it.
    filled = () if form.mode is TableMode.APPEND else recast.backfilled
    return Recast(
        schema=form.stored_schema(recast.schema),
        added=tuple(map(form.lake_name, recast.added)),
        renamed=tuple((form.lake_name(old), form.lake_name(new)) for old, new in recast.renamed),
        backfilled=tuple((form.lake_name(name), value) for name, value in filled),
        dropped=tuple(map(form.lake_name, recast.dropped)),
        kept_apart=tuple(map(form.lake_name, recast.kept_apart)),
    )


def _scalar(column: Column, said: Mapping[str, Any]) -> pa.Scalar:
    return pa.scalar(said.get(column.name), column.type)
