"""`spark.readStream.format("cdc")`: the commits of a change log as micro-batches, as large as the query says.

Since 4.2 Spark says where it is when it asks how far to go. `stream_41.py` is for Spark 4.1.
"""

from __future__ import annotations

from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from tailrace.changelog.read.offsets import LogOffset
from tailrace.spark.datasource.log.log_stream import LogStream, Offset
from tailrace.spark.datasource.option_values import without_traceback


class LogStreamReader(LogStream, SupportsTriggerAvailableNow):
    """The stream for a Spark with admission control."""

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        with without_traceback:
            return self._latest(start, limited=not isinstance(limit, ReadAllAvailable))

    def getDefaultReadLimit(self) -> ReadLimit:
        options = self._frame.options
        if options.rows_max is not None:
            return ReadMaxRows(options.rows_max)
        return ReadAllAvailable() if options.bytes_max is None else ReadMaxBytes(options.bytes_max)

    def prepareForTriggerAvailableNow(self) -> None:
        with without_traceback:
            planner = self._opened()
            if self._capture is not None:
                self._capture.catch_up()
            self._target = planner.newest()

    def reportLatestOffset(self) -> Offset:
        return self._offset(LogOffset(self._opened().newest()))
