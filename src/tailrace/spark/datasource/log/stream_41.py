"""The stream for Spark 4.1, which does not say where it is.

The stream's offset is the one that Spark got last, or the end of the micro-batch that Spark planned last. Spark asks
how far to read only when that batch is done. After a restart neither is known until the first micro-batch is planned.
So that one extends to the log's newest commit with requested rows. If an obstacle lies before that commit, the error is
raised before any of these rows are delivered. Trimmed rows count too: Spark may have read them, and an offset before
its own would take it back. There are no limits, because Spark would take one micro-batch for all there is
(`availableNow`).
"""

from __future__ import annotations

from pyspark.sql.datasource import InputPartition

from tailrace.changelog.read.offsets import LogOffset
from tailrace.spark.datasource.log.log_stream import LogStream, Offset
from tailrace.spark.datasource.option_values import without_traceback


class Spark41StreamReader(LogStream):
    """The stream for a Spark without admission control."""

    _last_offset: Offset | None = None
    _caught_up = False

    def initialOffset(self) -> Offset:
        self._last_offset = super().initialOffset()
        return self._last_offset

    def latestOffset(self) -> Offset:  # type: ignore[override] # as Spark 4.1 has it
        with without_traceback:
            return self._newest()

    def _newest(self) -> Offset:
        planner = self._opened()
        if self._capture is not None and not self._caught_up:
            # The first micro-batch has all there was when the query began: it may be the only one.
            self._capture.catch_up()
            self._caught_up = True
        if self._last_offset is not None:
            return self._latest(self._last_offset, limited=False)
        # Spark says with the first micro-batch what is done; there may be no such batch.
        self._stored_consumer(LogOffset(0))
        return self._offset(LogOffset(planner.newest_matching()))

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        with without_traceback:
            self._acknowledge(self._log_offset(start), at_once=True)
            self._last_offset = max(start, end, key=self._log_offset)
        return super().partitions(start, end)
