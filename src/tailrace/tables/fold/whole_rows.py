"""Folded rows as a Delta table takes them, and those that come in."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.model import change
from tailrace.model.schema import TableSchema
from tailrace.tables.fold.by_mode import with_added_columns
from tailrace.tables.fold.fold import END_VERSION, UPSERT, FoldedChanges, as_type, folded_rows, folded_schema
from tailrace.tables.port import AppliedPosition
from tailrace.tables.spec import CURRENT, TIME, VALID_FROM, VALID_TO, LoadOrigin, TableMode, TableSpec


def operations(folded: FoldedChanges) -> Any:
    """What is done with each row."""
    return folded.rows.column("op").to_numpy()


def fold_for_upsert(
    form: TableSpec, schema: TableSchema, rows: pa.Table, here: AppliedPosition, said: pa.Table | None = None
) -> FoldedChanges:
    """Whole rows of the source as a table of the form takes them that is put right where it stands; for a table of
    versions `said` has what the change that made each says of itself."""
    assert form.mode is not TableMode.APPEND, "what a change was cannot be put right"
    stored = form.stored_schema(schema)
    if form.mode is TableMode.HISTORY:
        assert said is not None, "a version says what made it"
        return _versions_to_put(form, stored, rows, _told(said, here))
    origin = LoadOrigin(seq=here.seq, position=str(here.position), read_at=time.time_ns() // 1000)
    own = with_added_columns(form, schema, rows.to_batches(), origin)
    return whole_rows(stored, pa.Table.from_batches(own, pa.schema(stored.row_fields())))


def _told(said: pa.Table, here: AppliedPosition) -> pa.Table:
    """The same, where rows that a load has read are told from changes: they have no number of the log, nor a
    transaction. A number below zero stands for that, another one for every load."""
    seqs, made = said.column(change.SEQ), as_type(said.column(change.COMMITTED_AT), TIME).cast(pa.int64())
    read = pc.less(seqs, 0)
    said = said.set_column(said.column_names.index(change.SEQ), change.SEQ, pc.if_else(read, here.seq, seqs))
    txs = pc.if_else(read, pc.negate(made), said.column(change.TX))
    return said.set_column(said.column_names.index(change.TX), change.TX, txs)


def _versions_to_put(form: TableSpec, stored: TableSchema, rows: pa.Table, said: pa.Table) -> FoldedChanges:
    """Each as the version that its change has made, and the end of the one before. A change's version that is there
    already is replaced, for it is of the same transaction."""
    size, made = rows.num_rows, said.column(change.COMMITTED_AT)
    none, times = pa.nulls(size, TIME), as_type(made, TIME)
    came = {VALID_FROM: times, VALID_TO: none, CURRENT: pa.array(np.ones(size, np.bool_))}
    ends = {VALID_FROM: none, VALID_TO: times, CURRENT: pa.array(np.zeros(size, np.bool_))}

    def folded(own: dict[str, Any], operation: int) -> pa.Table:
        added = [
            own[one.name] if one.name in own else as_type(said.column(one.name), one.type) for one in form.added_columns
        ]
        return folded_rows(stored, [*rows.columns, *added], np.full(size, operation, np.int8))

    clock = max(times.cast(pa.int64()).to_pylist(), default=0)
    return FoldedChanges(
        truncated=False, rows=pa.concat_tables([folded(came, UPSERT), folded(ends, END_VERSION)]), latest_time=clock
    )


def whole_rows(schema: TableSchema, rows: pa.Table) -> FoldedChanges:
    """Rows as a table has them, folded: each comes in under its key, whatever was there."""
    fields, size = folded_schema(schema), rows.num_rows
    own = [rows.column(column.name).cast(column.type) for column in schema.columns]
    rest = [
        pa.array(np.full(size, UPSERT, np.int8)),
        pa.nulls(size, fields.field("absent").type),
        pa.nulls(size, fields.field("base").type),
        pa.array(np.zeros(size, np.bool_)),
        pa.array(np.ones(size, np.int64)),
    ]
    return FoldedChanges(truncated=False, rows=pa.Table.from_arrays([*own, *rest], schema=fields))
