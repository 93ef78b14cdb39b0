"""Read the rows of a change log in Spark tasks, with the DataFrame's columns."""

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
    """Yield the rows of a part, with exactly these fields."""
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
    """Open the log and keep it, for a worker runs one task after the other."""
    log = ChangeLog.open(files.parse_log_path(path, endpoint=endpoint, region=region))
    if log.log_id != log_id:
        raise LogForeign(
            "the log is not the one that the work was planned for",
            log=path,
            hint="Keep the log on storage that driver and executors share, under the same path.",
        )
    return log


def _columns(frame: LogFrame, part: LogPart, log: ChangeLog) -> Iterator[dict[str, pa.Array]]:
    batches_read = log.read(part.first, part.last, tables=part.tables, after_seq=part.after_seq, to_seq=part.to_seq)
    batches = filter(frame.options.matches_rows, batches_read)
    commits = CommitLookup(log, part.first)
    if frame.options.row_format is RowFormat.CHANGELOG:
        assert frame.schema is not None, "a change feed has one table"
        yield from feed_rows(batches, frame.schema, commits)
        return
    for batch in batches:
        numbers = commits.commits_of(batch.data.column(change.SEQ).to_numpy())
        yield envelope_rows(batch, numbers) if frame.schema is None else typed_rows(batch, frame.schema, numbers)


def _column(column: pa.Array | None, kind: pa.DataType, rows: int) -> pa.Array:
    if column is None:
        return pa.nulls(rows, kind)
    return column if column.type == kind else column.cast(kind)


class LogBatchReader(DataSourceReader):
    """`spark.read.format("cdc")` of a change log: the changes of a range, by commit, position or time.

    It holds plain data only, because Spark pickles it. The range's start and end are resolved when it is planned.
    """

    def __init__(self, frame: LogFrame, schema: StructType) -> None:
        self._frame = frame
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        with without_traceback:
            return self._planned()

    def _planned(self) -> list[InputPartition]:
        options, planner = self._frame.options, LogPlanner(self._frame)
        begin = planner.start_offset()
        end = ending_offset(planner.log, options.end, planner.tables(planner.newest()))
        if planner.with_last_seq(end) < planner.with_last_seq(begin):
            raise ConfigError(
                "the range ends before it begins",
                start=options.start,
                end=options.end,
                hint="Set `endingPosition` to one that does not lie before `startingPosition`.",
            )
        # An end inside a commit is a row of the commit after `end.commit`.
        last, to_seq = (end.commit + 1, end.seq) if end.seq else (end.commit, SEQ_MAX)
        return [InputPartition(part) for part in planner.plan_parts(begin, last, to_seq)] if last > begin.commit else []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if partition.value is None:  # Spark's own partition, where there are none
            return iter(())
        return read_part(self._frame, partition.value, arrow_schema(self._schema))
