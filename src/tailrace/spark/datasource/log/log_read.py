"""`spark.read.format("cdc")` of a change log: the changes of a range, by commit, position or time."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from tailrace.changelog.read.offsets import ending_offset
from tailrace.changelog.read.reader import SEQ_MAX
from tailrace.errors import ConfigError
from tailrace.spark.datasource.log.log_part import read_part
from tailrace.spark.datasource.log.log_plan import LogPlanner
from tailrace.spark.datasource.log.log_schema import LogFrame
from tailrace.spark.datasource.plain_errors import without_traceback
from tailrace.spark.session.arrow_types import arrow_schema


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
