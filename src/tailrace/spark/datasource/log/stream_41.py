"""The same for Spark 4.1, which asks how far to go and does not say where it is.

The place is what Spark was told last, or the end of the micro-batch it planned last: it asks again only when that is
done. After a restart neither is known until the first micro-batch is planned, so that one goes to the log's newest
commit with rows of ours; should there be something in its way, that is the error before anything of it is delivered.
Rows that are gone count too: Spark may have read them, and an offset before its own would lead it back. There are no
limits: Spark would take one micro-batch for all there is (`availableNow`).
"""

from __future__ import annotations

from pyspark.sql.datasource import InputPartition

from tailrace.changelog.read.offsets import LogOffset
from tailrace.spark.datasource.log.log_stream import LogStream, Offset
from tailrace.spark.datasource.option_values import without_traceback


class Spark41StreamReader(LogStream):
    """The log, for a Spark without admission control."""

    _at: Offset | None = None
    _caught_up = False

    def initialOffset(self) -> Offset:
        self._at = super().initialOffset()
        return self._at

    def latestOffset(self) -> Offset:  # type: ignore[override] # as Spark 4.1 has it
        with without_traceback:
            return self._newest()

    def _newest(self) -> Offset:
        view = self._opened()
        if self._capture is not None and not self._caught_up:
            # What was there when the query began is in its first micro-batch: nobody says whether it is the only one.
            self._capture.catch_up()
            self._caught_up = True
        if self._at is not None:
            return self._latest(self._at, limited=False)
        self._stored_consumer(
            LogOffset(0)
        )  # what is done Spark tells with the first micro-batch; it may be that there is none
        return self._offset(LogOffset(view.newest_matching()))

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        with without_traceback:
            self._acknowledge(self._place(start), at_once=True)
            self._at = max(start, end, key=self._place)
        return super().partitions(start, end)
