"""Estimate the size that changes would have in a table's files.

The estimate can be compared with the bytes that are written for the changes. Only the table's own columns count, not a
change's metadata or its old row. A sample of the rows is encoded and compressed as a table's files are. The other rows
are assumed to be like the sample: that is cheap, and about right. The estimate is for people only, so it never fails.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from tailrace.model.schema import TableSchema
from tailrace.tables.staging import COMPRESSION, dictionary_columns

SAMPLE_ROWS = 1024


class SizeEstimate:
    """Estimate for changes of one schema, added batch by batch."""

    def __init__(self, schema: TableSchema) -> None:
        self._columns = len(schema.columns)
        self._fields = pa.schema([(str(number), column.type) for number, column in enumerate(schema.columns)])
        self._sample: list[pa.Table] = []
        self._sampled = 0
        self._memory = 0

    def add(self, changes: pa.Table | pa.RecordBatch) -> None:
        """Add a batch of changes."""
        own = pa.table(changes.columns[-self._columns :], schema=self._fields) if self._columns else None
        if own is None or not own.num_rows:
            return
        self._memory += own.nbytes
        if self._sampled < SAMPLE_ROWS:
            self._sample.append(own.slice(0, SAMPLE_ROWS - self._sampled))
            self._sampled += self._sample[-1].num_rows

    @property
    def bytes(self) -> int:
        """The estimated size of all changes added."""
        sample = pa.concat_tables(self._sample) if self._sample else None
        if sample is None or not sample.nbytes:
            return self._memory
        try:
            return max(_encoded_bytes(sample) * self._memory // int(sample.nbytes), 1)
        except (pa.ArrowException, OSError):  # a type that Parquet cannot store
            return self._memory


def estimate_bytes(schema: TableSchema, changes: pa.Table) -> int:
    """Estimate the size of changes that are all at hand."""
    estimate = SizeEstimate(schema)
    estimate.add(changes)
    return estimate.bytes


def _encoded_bytes(rows: pa.Table) -> int:
    """Return the encoded size of the values, without the file's header and footer."""
    with pq.ParquetWriter(
        pa.BufferOutputStream(),
        rows.schema,
        compression=COMPRESSION,
        use_dictionary=dictionary_columns(rows),
        write_statistics=False,
    ) as writer:
        writer.write_table(rows)
    group = writer.writer.metadata.row_group(0)
    return sum(group.column(number).total_compressed_size for number in range(group.num_columns))
