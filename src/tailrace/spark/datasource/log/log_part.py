"""What a task of `format("cdc")` does with a change log: read its rows, and give them the DataFrame's columns."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from tailrace.changelog.read.commit_lookup import CommitLookup
from tailrace.changelog.read.offsets import ending_offset
from tailrace.changelog.read.reader import SEQ_MAX, ChangeLog
from tailrace.errors import ConfigError, LogForeign
from tailrace.model import change
from tailrace.spark.datasource.log.change_feed import feed_rows
from tailrace.spark.datasource.log.log_options import RowFormat
from tailrace.spark.datasource.log.log_plan import LogPart, LogPlanner
from tailrace.spark.datasource.log.log_schema import LogFrame
from tailrace.spark.datasource.log.typed_rows import envelope_rows, typed_rows
from tailrace.spark.datasource.option_values import without_traceback
from tailrace.spark.session.arrow_types import arrow_schema
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


class LogBatchReader(DataSourceReader):
    """Plain data only: Spark pickles it. Where the range begins and ends is found out when it is planned."""

    def __init__(self, frame: LogFrame, schema: StructType) -> None:
        self._frame = frame
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        with without_traceback:
            return self._planned()

    def _planned(self) -> list[InputPartition]:
        options, view = self._frame.options, LogPlanner(self._frame)
        begin = view.start_offset()
        end = ending_offset(view.log, options.end, view.tables(view.newest()))
        if view.with_last_seq(end) < view.with_last_seq(begin):
            raise ConfigError(
                "the range ends before it begins",
                start=options.start,
                end=options.end,
                hint="`endingPosition` must not lie before `startingPosition`.",
            )
        # An end inside of a commit is a row of the next one.
        last, to_seq = (end.commit + 1, end.seq) if end.seq else (end.commit, SEQ_MAX)
        return [InputPartition(part) for part in view.plan_parts(begin, last, to_seq)] if last > begin.commit else []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if partition.value is None:  # Spark's own, where there are none
            return iter(())
        return read_part(self._frame, partition.value, arrow_schema(self._schema))
