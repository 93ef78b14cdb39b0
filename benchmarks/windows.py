"""Windows of changes made up in memory, with the columns and the buffers that a capture hands to the log.

They stand for what a decoder yields: every batch has arrays of its own, fresh from memory, in the table's
shape; optional columns that are null throughout are left out; the rows of the tables take turns, as they do
in a log of small transactions.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tailrace.capture.base import SourceId
from tailrace.model import change
from tailrace.model.batch import ChangeBatch, Window
from tailrace.model.position import Lsn
from tailrace.model.schema import Column, Identity, TableId, TableSchema

SOURCE = SourceId(kind="memory", system="bench", database="bench", timeline=1)
# The columns of `orders` in pg-stream.
COLUMNS = (
    Column(name="id", source_type="bigint", type=pa.int64()),
    Column(name="customer_id", source_type="integer", type=pa.int32()),
    Column(name="status", source_type="text", type=pa.string()),
    Column(name="amount", source_type="numeric(12,2)", type=pa.decimal128(12, 2)),
    Column(name="note", source_type="text", type=pa.string()),
    Column(name="created_at", source_type="timestamp with time zone", type=pa.timestamp("us", "UTC")),
    Column(name="flag", source_type="boolean", type=pa.bool_()),
    Column(name="score", source_type="double precision", type=pa.float64()),
)
WAL_BYTES_PER_ROW = 200
BEGAN_AT = 1_700_000_000_000_000


def table_schemas(tables: int) -> list[TableSchema]:
    """So many tables of one shape."""
    return [
        TableSchema(
            table=TableId("public", f"orders_{number}"), relation=16384 + number, columns=COLUMNS, key=("id",),
            identity=Identity.KEY,
        )
        for number in range(tables)
    ]  # fmt: skip


def window(schemas: list[TableSchema], start: Lsn, first_id: int, rows_per_table: int) -> Window:
    """A window of inserts that touches all of the tables; no two have the same values."""
    rows = rows_per_table * len(schemas)
    end = Lsn(start.value + WAL_BYTES_PER_ROW * rows)
    return Window(
        start=start, end=end, transactions=rows_per_table, rows=rows, last_committed_at=BEGAN_AT + first_id,
        batches=tuple(
            _batch(schema, np.arange(rows_per_table) * len(schemas) + place, end, first_id)
            for place, schema in enumerate(schemas)
        ),
    )  # fmt: skip


def _batch(schema: TableSchema, seqs: np.ndarray, end: Lsn, first_id: int) -> ChangeBatch:
    ids = seqs + first_id
    times = pa.array(BEGAN_AT + ids).view(pa.timestamp("us", "UTC"))
    columns = [
        pa.array(["insert"] * len(ids)),
        pa.array(seqs),
        pa.array([str(end)] * len(ids)),
        pa.array(ids),
        pa.array(np.zeros(len(ids), np.int32)),
        times,
        pa.array(ids),
        pa.array((ids % 10_000).astype(np.int32)),
        pa.array([f"status-{number % 7}" for number in ids.tolist()]),
        pa.array((ids % 100_000) / 100.0).cast(pa.decimal128(12, 2)),
        pa.array([f"some note text number {number}" for number in ids.tolist()]),
        times,
        pa.array(ids % 2 == 0),
        pa.array(ids * 1.5),
    ]
    fields = [field for field in schema.change_schema() if field.name not in change.OPTIONAL]
    return ChangeBatch(schema=schema, data=pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields)))
