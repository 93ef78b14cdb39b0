"""Windows of changes made up in memory, with the columns and the buffers that a capture hands to the log.

They represent the output of a decoder. It converts the cells of all tables at once, type by type, and a batch has
slices of that; optional columns that are null throughout are left out. In a small window the rows of the tables
take turns, as they do in a log of small transactions. A long one has values as a table of a shop has them: some
repeat, most do not, and deletes have nothing but the key.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.capture.port import SourceId
from tailrace.model import change
from tailrace.model.batch import ChangeBatch, Window
from tailrace.model.position import ZERO, Lsn
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
    """Return this many tables of one schema."""
    return [
        TableSchema(
            table=TableId("public", f"orders_{number}"),
            relation=16384 + number,
            columns=COLUMNS,
            key=("id",),
            identity=Identity.KEY,
        )
        for number in range(tables)
    ]


def window(schemas: list[TableSchema], start: Lsn, first_id: int, rows_per_table: int) -> Window:
    """A window of inserts that touches all of the tables; no two have the same values."""
    rows = rows_per_table * len(schemas)
    end = Lsn(start.value + WAL_BYTES_PER_ROW * rows)
    seqs = np.arange(rows).reshape(rows_per_table, len(schemas)).T.reshape(-1)
    columns = _columns(seqs, end, first_id)
    batches = []
    for place, schema in enumerate(schemas):
        mine = [column.slice(place * rows_per_table, rows_per_table) for column in columns]
        batches.append(
            ChangeBatch(
                schema=schema,
                data=pa.RecordBatch.from_arrays(mine, schema=_fields(schema)),
                ends=(place, place + (rows_per_table - 1) * len(schemas)),
            )
        )
    return Window(
        start=start,
        end=end,
        transactions=rows_per_table,
        rows=rows,
        last_committed_at=BEGAN_AT + first_id,
        batches=tuple(batches),
    )


def _columns(seqs: np.ndarray, end: Lsn, first_id: int) -> list[pa.Array]:
    """Of all rows, table by table."""
    ids = seqs + first_id
    times = pa.array(BEGAN_AT + ids).view(pa.timestamp("us", "UTC"))
    return [
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


@functools.cache
def _fields(schema: TableSchema) -> pa.Schema:
    """Return the fields of a batch: one object for all batches of a schema."""
    return pa.schema([field for field in schema.change_schema() if field.name not in change.OPTIONAL])


ROWS_PER_TRANSACTION = 10
ROWS_PER_BATCH = 250_000
_OPERATIONS = pa.array(["insert", "update", "delete"])
INSERTED, UPDATED, DELETED = range(3)
_STATUSES = pa.array(["new", "paid", "packed", "shipped", "delivered", "returned", "cancelled"])
_WORDS_MAX = 5_000


def long_window(schema: TableSchema, start: Lsn, first_id: int, rows: int, random: np.random.Generator) -> Window:
    """A window of one table: 70 % inserts, 20 % updates of older rows, 10 % deletes."""
    operations = random.choice(3, rows, p=[0.7, 0.2, 0.1])
    fresh = first_id + np.arange(rows)
    ids = np.where(operations == INSERTED, fresh, random.integers(1, first_id + 1, rows))
    return changes_window(schema, start, first_id, operations, ids, random)


def changes_window(
    schema: TableSchema,
    start: Lsn,
    first_seq: int,
    operations: np.ndarray,
    ids: np.ndarray,
    random: np.random.Generator,
) -> Window:
    """A window of these changes to one table; of a deleted row there is nothing but the key."""
    rows = len(ids)
    seqs = np.arange(rows)
    transactions = seqs // ROWS_PER_TRANSACTION
    ends = start.value + (transactions + 1) * WAL_BYTES_PER_ROW * ROWS_PER_TRANSACTION
    times = BEGAN_AT + (first_seq + transactions * ROWS_PER_TRANSACTION) * 100
    gone = operations == DELETED
    columns = [
        _OPERATIONS.take(pa.array(operations)),
        pa.array(seqs),
        _positions(ends),
        pa.array(first_seq + transactions),
        pa.array((seqs % ROWS_PER_TRANSACTION).astype(np.int32)),
        pa.array(times).view(pa.timestamp("us", "UTC")),
        pa.array(ids),
        pa.array(random.integers(1, 1_000_000, rows).astype(np.int32), mask=gone),
        _STATUSES.take(pa.array(random.integers(0, len(_STATUSES), rows), mask=gone)),
        _amounts(random.integers(100, 10_000_000, rows), gone),
        _notes(random, rows, gone),
        pa.array(times - random.integers(0, 10**12, rows), mask=gone).view(pa.timestamp("us", "UTC")),
        pa.array(random.random(rows) < 0.5, mask=gone),
        pa.array(random.random(rows) * 1000, mask=gone),
    ]
    data = pa.RecordBatch.from_arrays(columns, schema=_fields(schema))
    return Window(
        start=start,
        end=Lsn(int(ends[-1])),
        transactions=int(transactions[-1]) + 1,
        rows=rows,
        last_committed_at=int(times[-1]),
        batches=(ChangeBatch(schema=schema, data=data),),
    )


def rows_of_table(schema: TableSchema, rows: int, random: np.random.Generator) -> Iterator[pa.RecordBatch]:
    """Rows with such values and the keys from 1 on, as a load has them."""
    for first in range(1, rows + 1, ROWS_PER_BATCH):
        ids = np.arange(first, min(first + ROWS_PER_BATCH, rows + 1))
        window = changes_window(schema, ZERO, first, np.full(len(ids), INSERTED), ids, random)
        yield window.batches[0].data.select(schema.names)


def _positions(ends: np.ndarray) -> pa.Array:
    """The end of each row's transaction, as the server prints it."""
    each, place = np.unique(ends, return_inverse=True)
    return pa.array([str(Lsn(end)) for end in each.tolist()]).take(pa.array(place))


def _amounts(cents: np.ndarray, gone: np.ndarray) -> pa.Array:
    whole = pa.array(cents, mask=gone).cast(pa.decimal128(19, 0))
    return pc.divide(whole.cast(pa.decimal128(21, 2)), pa.scalar(100, pa.decimal128(3, 0))).cast(
        pa.decimal128(12, 2), safe=False
    )


def _notes(random: np.random.Generator, rows: int, gone: np.ndarray) -> pa.Array:
    """Four words out of some thousands: hardly one note comes twice."""
    words = pa.array([f"{number * 2654435761 % 2**32:x}" for number in range(_WORDS_MAX)])
    some = [words.take(pa.array(random.integers(0, _WORDS_MAX, rows), mask=gone)) for _ in range(4)]
    return pc.binary_join_element_wise(*some, " ")
