"""What runs inside Spark tasks: loading a table, and applying a stretch of the log to one.

Work is plain data and an outcome is plain data; a row never passes the driver. A task may be run twice: the
table's own position makes the second run do nothing. One table's failure is an outcome, not an exception, so
it holds back only that table.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from tailrace import failpoints
from tailrace.capture.base import TableReader
from tailrace.changelog import files
from tailrace.changelog.index import Slice
from tailrace.changelog.reader import ChangeLog
from tailrace.errors import TableFailed, TailraceError
from tailrace.model import change
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId, TableSchema
from tailrace.tables.base import Cursor
from tailrace.tables.delta import DeltaRsTable
from tailrace.tables.fold import fold
from tailrace.tables.shapes import unusable

PROGRESS_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class LoadWork:
    """Read one table of a snapshot into its lake table."""

    table: TableId
    reader: TableReader
    lake: Path
    log_id: str
    cursor: Cursor
    progress: Path
    """Where to note how many rows are in."""


@dataclass(frozen=True, kw_only=True)
class ApplyWork:
    """Apply one table's slices of the log, in order, in one commit of its lake table."""

    table: TableId
    log: Path
    lake: Path
    log_id: str
    slices: tuple[Slice, ...]
    """Which rows; where they lie is looked up when they are read, for the log may be sealed meanwhile."""
    shape: TableSchema
    expected: Cursor
    cursor: Cursor


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a piece of work."""

    table: TableId
    rows: int = 0
    seconds: float = 0.0
    cursor: Cursor | None = None
    schema: TableSchema | None = None
    error: TailraceError | None = None


def load_table(work: LoadWork) -> Outcome:
    """The first load, or a replacement: one commit holds all rows and the position they stand for."""
    started = time.monotonic()
    try:
        with work.reader as reader:
            failpoints.hit("load.snapshot_open")
            schema = reader.describe(work.table)
            rows = _noted(reader.rows(schema), work.progress)
            failpoints.hit("load.before_commit")
            count = DeltaRsTable(work.lake, work.log_id).load(schema, rows, work.cursor)
            failpoints.hit("load.after_commit")
    except Exception as error:  # the task's boundary: the table fails, the others go on
        return Outcome(table=work.table, error=_as_ours(error))
    return Outcome(
        table=work.table, rows=count, seconds=time.monotonic() - started, cursor=work.cursor, schema=schema
    )


def _noted(batches: Iterator[pa.RecordBatch], note: Path) -> Iterator[pa.RecordBatch]:
    """The batches, with a note of how far they are now and then."""
    rows, due = 0, 0.0
    for batch in batches:
        rows += batch.num_rows
        if time.monotonic() >= due:
            files.replace(note, json.dumps({"rows": rows}).encode())
            due = time.monotonic() + PROGRESS_SECONDS
        yield batch


def apply_changes(work: ApplyWork) -> Outcome:
    """Fold the slices to the last state of each key and merge that, with the new position, in one commit."""
    started = time.monotonic()
    failpoints.hit("apply.before_table")
    try:
        table = DeltaRsTable(work.lake, work.log_id)
        changes = _changes(work)
        # Where nothing is left to write the position is still committed: the driver goes on from it.
        table.apply(work.shape, fold(work.shape, changes), work.expected, work.cursor, touch=True)
    except Exception as error:  # the task's boundary: the table fails, the others go on
        return Outcome(table=work.table, error=_as_ours(error))
    return Outcome(
        table=work.table,
        rows=changes.num_rows,
        seconds=time.monotonic() - started,
        cursor=work.cursor,
        schema=work.shape,
    )


def _changes(work: ApplyWork) -> pa.Table:
    """The changes the table has not covered, in order."""
    log = ChangeLog.open(work.log)
    pieces = [pa.RecordBatch.from_pylist([], work.shape.change_schema())]
    seq = work.expected.seq
    for item in work.slices:
        for batch in log.read(
            item.first, item.last, tables=[item.table], after_seq=seq, to_seq=item.last_seq
        ):
            data = _after(batch.completed(), work.expected.position)
            if data.num_rows:
                if error := unusable(work.shape, batch.schema, item.first):
                    raise error
                pieces.append(data)
        seq = max(seq, item.last_seq)
    return pa.Table.from_batches(pieces)


def _after(data: pa.RecordBatch, position: Lsn) -> pa.RecordBatch:
    """The rows whose transaction ended after the position: a load has seen the others."""
    positions = data.column(change.POSITION)
    if Lsn.parse(positions[0].as_py()) > position:  # rows come in the order of the source's log
        return data
    later = [text for text in pc.unique(positions).to_pylist() if Lsn.parse(text) > position]
    return data.filter(pc.is_in(positions, pa.array(later, pa.string())))


def _as_ours(error: Exception) -> TailraceError:
    """Any failure as an error that can be shown; a defect of ours says so."""
    if isinstance(error, TailraceError):
        return error
    return TableFailed(
        f"unexpected {type(error).__name__}: {str(error)[:300]}",
        hint="Run again; if it comes back, report it with the file status/spark.log of the log.",
    )
