"""The stream that wakes the work: its rows say how far the log has grown, and carry no data.

Offsets are commit numbers. Where a table stands is the table's own business, so a lost checkpoint only means
being woken once more. A micro-batch covers a bounded number of rows; it always ends on a commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import LongType, StructField, StructType

from tailrace.changelog.reader import ChangeLog

FORMAT = "tailrace-wake"
ROWS_MAX = 500_000
"""In one micro-batch, unless a single commit has more."""


class WakeSource(DataSource):
    """`format("tailrace-wake")`, options `log` (folder) and `after` (commit)."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return StructType([StructField("commit", LongType())])

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return WakeReader(self.options["log"], int(self.options["after"]))


class WakeReader(DataSourceStreamReader):
    """Plain data only: Spark pickles it and runs its methods in other processes."""

    def __init__(self, log: str, after: int) -> None:
        self._path = log
        self._after = after
        self._log: ChangeLog | None = None

    def initialOffset(self) -> dict[str, int]:
        return {"commit": self._after}

    def latestOffset(self, start: dict[str, int], limit: object) -> dict[str, int]:
        if self._log is None:
            self._log = ChangeLog.open(Path(self._path))
        end = self._log.bounded(start["commit"], ROWS_MAX)
        return {"commit": end}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition(end["commit"])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"commit": pa.array([partition.value], pa.int64())})

    def commit(self, end: dict[str, int]) -> None:
        """Nothing to release: each table's own commit is the acknowledgement."""
