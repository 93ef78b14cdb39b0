"""Folded rows as a Delta table takes them, and those that come in."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.model.schema import TableSchema
from tailrace.tables.base import Cursor
from tailrace.tables.fold import UPSERT, Folded, folded_schema
from tailrace.tables.formed import loaded
from tailrace.tables.forms import Form, Origin, TableMode


def operations(folded: Folded) -> Any:
    """What is done with each row."""
    return folded.rows.column("op").to_numpy()


def rows_to_put(form: Form, schema: TableSchema, rows: pa.Table, here: Cursor) -> Folded:
    """Whole rows of the source as a table of the form takes them that is put right where it stands."""
    assert form.mode is TableMode.MIRROR, "only the last state of a row can be put right"
    stored = form.stored(schema)
    origin = Origin(seq=here.seq, position=str(here.position), read_at=time.time_ns() // 1000)
    own = loaded(form, schema, rows.to_batches(), origin)
    return whole_rows(stored, pa.Table.from_batches(own, pa.schema(stored.row_fields())))


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
