"""A Python data source that does nothing but hand Arrow to Spark: what `spark_source.py` compares with.

Its one micro-batch is the batch of an Arrow file, again and again, from the page cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType


class BareSource(DataSource):
    """`format("bare")`, with the options `file`, `times` and `partitions`."""

    @classmethod
    def name(cls) -> str:
        return "bare"

    def schema(self) -> StructType:
        with pa.memory_map(self.options["file"]) as file:
            return from_arrow_schema(pa.ipc.open_file(file).schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 # Spark's name
        return BareReader(self.options["file"], int(self.options["times"]), int(self.options["partitions"]))


class BareReader(DataSourceStreamReader):
    """One micro-batch."""

    def __init__(self, file: str, times: int, partitions: int) -> None:
        self._file, self._times, self._partitions = file, times, partitions

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 # Spark's name
        return {"done": 0}

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override] # noqa: N802 # Spark's name; the plain form
        return {"done": 1}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        share = [self._times // self._partitions] * self._partitions
        share[0] += self._times - sum(share)
        return [InputPartition(times) for times in share]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        with pa.memory_map(self._file) as file:
            batch = pa.ipc.open_file(file).get_batch(0)
            for _ in range(partition.value):
                yield batch
