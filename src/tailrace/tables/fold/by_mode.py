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
from tailrace.tables.delta.diff import Keeping
from tailrace.tables.evolve.schema_plan import Recast
from tailrace.tables.fold.fold import (
    MARK,
    UPSERT,
    Batch,
    Ended,
    Folded,
    as_type,
    fold,
    folded_rows,
    operation_codes,
    refuse_unfit,
)
from tailrace.tables.fold.row_states import States
from tailrace.tables.fold.row_versions import fold_versions
from tailrace.tables.spec import CURRENT, PLAIN, VALID_FROM, VALID_TO, Form, Origin, TableMode


def fold_into(form: Form, schema: TableSchema, changes: pa.Table, *, rereads: bool = False) -> Folded:
    """Changes of the source's shape as what a table of the form must do about them, in its own shape. `rereads` is as
    `fold` has it; a version is never read again, for what it comes from is of the past."""
    if form == PLAIN:
        return fold(schema, changes, rereads=rereads)
    stored = form.stored(schema)
    if form.mode is TableMode.HISTORY:
        return fold_versions(form, schema, stored, changes)
    if form.mode is TableMode.APPEND:
        return _fold_changes(form, schema, stored, changes)
    if form.soft_delete:
        return _fold_marked(form, schema, stored, changes, rereads)
    return _fold_widened(form, schema, changes, rereads)


def _fold_widened(form: Form, schema: TableSchema, changes: pa.Table, rereads: bool) -> Folded:
    """As any mirror: what the form adds are columns that every change brings."""
    # No source can have a name with a zero in it, so none is in the way.
    wide = tuple(replace(column, name=f"\0{column.name}") for column in form.added)
    for inner, column in zip(wide, form.added, strict=True):
        changes = changes.append_column(inner.name, changes.column(column.name))
    return fold(replace(schema, columns=(*schema.columns, *wide), facts=None), changes, rereads=rereads)


def _fold_changes(form: Form, schema: TableSchema, stored: TableSchema, changes: pa.Table) -> Folded:
    """Every change as a row."""
    size = changes.num_rows
    batch = Batch(schema, changes, operation_codes(changes), empty_before=False)
    refuse_unfit(batch, [np.arange(size)] * len(batch.own), np.ones(size, np.bool_))
    added = [_column(changes, column) for column in form.added]
    at = [column.name for column in form.added].index(change.UNCHANGED)
    added[at] = _renamed(form, added[at])
    return Folded(truncated=False, rows=folded_rows(stored, [*batch.own, *added], np.full(size, UPSERT, np.int8)))


def _column(changes: pa.Table, column: Column) -> Any:
    if column.name not in changes.column_names:
        return pa.nulls(changes.num_rows, column.type)
    return as_type(changes.column(column.name), column.type)


def _renamed(form: Form, unchanged: Any) -> Any:
    """Lists of columns, by their names in the lake."""
    if not form.columns or unchanged.null_count == len(unchanged):
        return unchanged
    lists = unchanged.combine_chunks()
    old, new = (pa.array(names, pa.string()) for names in zip(*form.columns, strict=True))
    at = pc.index_in(lists.flatten(), value_set=old)
    names = pc.coalesce(new.take(at), lists.flatten())
    counts = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])
    return pa.ListArray.from_arrays(pa.array(offsets), names, mask=lists.is_null())


def _fold_marked(form: Form, schema: TableSchema, stored: TableSchema, changes: pa.Table, rereads: bool) -> Folded:
    """The last state of each key, alive or not."""
    states = States(schema, changes, rereads=rereads)
    last = np.full(int(states.key.max(initial=-1)) + 1, -1, np.int64)
    last[states.key] = np.arange(len(states))
    which = np.sort(last[last >= 0])
    gone = ~states.alive[which]
    # A row that was alive in this batch must be found as deleted, so it comes in; of one that was not, whether it is
    # in the table is not known, and if it is not there is nothing to mark.
    only_marked = gone & (states.prev[which] < 0)
    operations = np.where(only_marked, MARK, UPSERT).astype(np.int8)
    added = [
        pa.array(gone) if column.name == form.mark else _column(changes, column).take(pa.array(states.row[which]))
        for column in form.added
    ]
    rows = states.rows(which, stored, added, operations)
    if (at := states.truncated_at) is None:
        return Folded(truncated=False, rows=rows)
    values = {column.name: changes.column(column.name)[at] for column in form.added if column.name != form.mark}
    tx = changes.column(change.TX)[at].as_py()
    return Folded(truncated=False, rows=rows, ended=Ended(values={form.mark: pa.scalar(True), **values}, tx=tx))


def loaded(
    form: Form, schema: TableSchema, batches: Iterable[pa.RecordBatch], origin: Origin
) -> Iterator[pa.RecordBatch]:
    """Rows that a load reads, in the table's own shape."""
    if form == PLAIN:
        yield from batches
        return
    said: Mapping[str, Any] = {
        change.OP: Operation.READ.value,
        change.SEQ: origin.seq,
        change.POSITION: origin.position,
        form.mark: False,
        VALID_FROM: origin.read_at,
        CURRENT: True,
    }
    fields = pa.schema(form.stored(schema).row_fields())
    for batch in batches:
        added = [pa.repeat(_scalar(column, said), batch.num_rows) for column in form.added]
        yield pa.RecordBatch.from_arrays([*batch.columns, *added], schema=fields)


def keeping(form: Form, origin: Origin, clock: int) -> Keeping | None:
    """What becomes of rows that a load does not find any more; None for a table that does not keep them."""
    if form.soft_delete:
        said = {
            form.mark: True,
            change.OP: Operation.DELETE.value,
            change.SEQ: origin.seq,
            change.POSITION: origin.position,
        }
        values = {column.name: _scalar(column, said) for column in form.added}
        return Keeping(flag=form.mark, past=True, replaces=True, values=values)
    if form.mode is not TableMode.HISTORY:
        return None
    types = {column.name: column.type for column in form.added}
    here = pa.scalar(max(clock, origin.read_at), types[VALID_TO])
    values = {VALID_TO: here, CURRENT: pa.scalar(False)}
    return Keeping(flag=CURRENT, past=False, replaces=False, values=values, least={VALID_FROM: here})


def compared(form: Form, schema: TableSchema) -> tuple[TableSchema, tuple[Column, ...]]:
    """Of the table's own shape what decides whether a row that a load has read is in it, and the other columns."""
    stored, counts = form.stored(schema), len(schema.columns) + form.soft_delete
    return replace(stored, columns=stored.columns[:counts], facts=None), stored.columns[counts:]


def recast_into(form: Form, recast: Recast) -> Recast:
    """The same for the lake table's own shape."""
    if form == PLAIN:
        return recast
    # A change tells what it brought: a column that came later is not among it.
    filled = () if form.mode is TableMode.APPEND else recast.filled
    return Recast(
        schema=form.stored(recast.schema),
        added=tuple(map(form.name_of, recast.added)),
        renamed=tuple((form.name_of(old), form.name_of(new)) for old, new in recast.renamed),
        filled=tuple((form.name_of(name), value) for name, value in filled),
        dropped=tuple(map(form.name_of, recast.dropped)),
        aside=tuple(map(form.name_of, recast.aside)),
    )


def _scalar(column: Column, said: Mapping[str, Any]) -> pa.Scalar:
    return pa.scalar(said.get(column.name), column.type)
