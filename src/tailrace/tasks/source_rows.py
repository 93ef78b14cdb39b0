"""Rows read from the source again, by key, in a task."""

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
"""For a commit to be seen that is in the log."""


def refetch_changed_rows(work: ApplyWork, changes: pa.Table, keys: pa.Table) -> pa.Table:
    return refetch_rows(work, pc.unique(changes.column(change.TX)).to_pylist(), keys)


def refetch_rows(work: ApplyWork, transactions: Sequence[int], keys: pa.Table) -> pa.Table:
    """The rows as the source has them now, these transactions included.

    That they may be newer than the table will say is on record before the commit.
    """
    assert work.reader is not None, "whoever calls has one"
    form, shape = work.location.spec, work.schema
    keys = keys.rename_columns([name for name in shape.names if name in shape.key])
    rows, seen = fetch_rows(work.reader, shape, keys, transactions)
    if work.expected.load is not None:
        LoadStore(work.log).record_refetch(work.expected.load, work.position_after.position, seen)
    return rows.rename_columns([form.lake_name(name) for name in rows.column_names])


def fetch_rows(
    source: SnapshotReader, shape: TableSchema, keys: pa.Table, transactions: Sequence[int]
) -> tuple[pa.Table, Lsn]:
    """The rows with these keys, once the transactions are seen; and what everything seen ended at or before."""
    deadline = time.monotonic() + SEEN_SECONDS_MAX
    while time.monotonic() < deadline:
        with source as reader:
            reader.lock_schema(shape)
            if reader.sees_all(transactions):
                rows = pa.Table.from_batches(reader.rows_by_key(shape, keys), pa.schema(shape.row_fields()))
                return rows, reader.position()
        time.sleep(SEEN_PAUSE_SECONDS)
    raise SourceSlow(
        "a commit is in the server's log and cannot be seen yet",
        table=shape.table,
        hint="It is tried again. Does the commit wait for a synchronous standby? See pg_stat_activity.",
    )
