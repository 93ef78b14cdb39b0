"""Refetch rows from the source by key, in a Spark task.

A row is read only once the source shows every transaction it is read for. The row may be newer than the table's
applied position; that is recorded before the commit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.capture.postgres.snapshot import SnapshotReader
from tailrace.errors import SourceSlow
from tailrace.model import change
from tailrace.model.position import Lsn
from tailrace.model.schema import TableSchema
from tailrace.tasks.load_store import LoadStore
from tailrace.tasks.work import ApplyWork

SEEN_SECONDS_MAX, SEEN_PAUSE_SECONDS = 20.0, 0.2
"""Limits of the wait until the source shows a transaction that the log already has."""


def refetch_changed_rows(work: ApplyWork, changes: pa.Table, keys: pa.Table) -> pa.Table:
    return refetch_rows(work, pc.unique(changes.column(change.TX)).to_pylist(), keys)


def refetch_rows(work: ApplyWork, transactions: Sequence[int], keys: pa.Table) -> pa.Table:
    """Return the rows as the source has them now, with these transactions included.

    The rows may be newer than the table's position after the commit. Record that before the commit.
    """
    assert work.reader is not None, "only called with a reader"
    spec, schema = work.location.spec, work.schema
    keys = keys.rename_columns([name for name in schema.names if name in schema.key])
    rows, seen_until = fetch_rows(work.reader, schema, keys, transactions)
    if work.expected.load is not None:
        LoadStore(work.log).record_refetch(work.expected.load, work.position_after.position, seen_until)
    return rows.rename_columns([spec.lake_name(name) for name in rows.column_names])


def fetch_rows(
    source: SnapshotReader, schema: TableSchema, keys: pa.Table, transactions: Sequence[int]
) -> tuple[pa.Table, Lsn]:
    """Return the rows with these keys once the source shows the transactions, and a position.

    Everything that the read saw was committed at or before that position.
    """
    deadline = time.monotonic() + SEEN_SECONDS_MAX
    while time.monotonic() < deadline:
        with source as reader:
            reader.lock_schema(schema)
            if reader.sees_all(transactions):
                rows = pa.Table.from_batches(reader.rows_by_key(schema, keys), pa.schema(schema.row_fields()))
                return rows, reader.position()
        time.sleep(SEEN_PAUSE_SECONDS)
    raise SourceSlow(
        "a transaction in the source log is not visible in the source yet",
        table=schema.table,
        hint="Wait: the read is tried again. If it keeps failing, see in pg_stat_activity whether the commit waits for "
        "a synchronous standby.",
    )
