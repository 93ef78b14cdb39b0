"""What a task of `format("cdc")` does with a change log: read its rows, and give them the DataFrame's columns."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pyarrow as pa

from tailrace.changelog.read.commit_lookup import CommitLookup
from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import LogForeign
from tailrace.model import change
from tailrace.spark.datasource.log.change_feed import feed_rows
from tailrace.spark.datasource.log.envelope_rows import envelope_rows
from tailrace.spark.datasource.log.log_options import RowFormat
from tailrace.spark.datasource.log.log_plan import LogPart
from tailrace.spark.datasource.log.log_schema import LogFrame
from tailrace.spark.datasource.log.typed_rows import typed_rows
from tailrace.storage import files

_LOGS_MAX = 4


def read_part(frame: LogFrame, part: LogPart, fields: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of the part, with exactly these fields."""
    options = frame.options
    log = _open(options.log, options.endpoint, options.region, part.log_id)
    for columns in _columns(frame, part, log):
        rows = len(next(iter(columns.values())))
        if rows:
            yield pa.RecordBatch.from_arrays(
                [_column(columns.get(field.name), field.type, rows) for field in fields], schema=fields
            )


@functools.lru_cache(_LOGS_MAX)
def _open(path: str, endpoint: str | None, region: str | None, log_id: str) -> ChangeLog:
    """A worker runs one task after the other: what it knows of the log is kept."""
    log = ChangeLog.open(files.parse_log_path(path, endpoint=endpoint, region=region))
    if log.log_id != log_id:
        raise LogForeign(
            "another log lies here than where the work was planned",
            log=path,
            hint="The log must lie on storage that driver and executors share, under the same path.",
        )
    return log


def _columns(frame: LogFrame, part: LogPart, log: ChangeLog) -> Iterator[dict[str, pa.Array]]:
    found = log.read(part.first, part.last, tables=part.tables, after_seq=part.after_seq, to_seq=part.to_seq)
    batches = filter(frame.options.matches_rows, found)
    commits = CommitLookup(log, part.first)
    if frame.options.row_format is RowFormat.CHANGELOG:
        assert frame.schema is not None, "of one table"
        yield from feed_rows(batches, frame.schema, commits)
        return
    for batch in batches:
        numbers = commits.commits_of(batch.data.column(change.SEQ).to_numpy())
        yield envelope_rows(batch, numbers) if frame.schema is None else typed_rows(batch, frame.schema, numbers)


def _column(found: pa.Array | None, kind: pa.DataType, rows: int) -> pa.Array:
    if found is None:
        return pa.nulls(rows, kind)
    return found if found.type == kind else found.cast(kind)
