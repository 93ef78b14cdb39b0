"""What changes weigh, as the files of a table would: so that what is written for them can be held against it.

Only the table's own columns count, not what a change says besides (its position, what the row was before). Some of the
rows are encoded and compressed as a table's files are, and the others taken to be like them: that is cheap, and about
right. A weight is for people; nothing else hangs on it, so it never fails.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from tailrace.model.schema import TableSchema
from tailrace.tables.staging import COMPRESSION, dictionary_columns

SAMPLE_ROWS = 1024


class SizeEstimate:
    """Of changes of one shape, as the log's reader completes them; they are added one batch after the other."""

    def __init__(self, shape: TableSchema) -> None:
        self._columns = len(shape.columns)
        self._fields = pa.schema([(str(number), column.type) for number, column in enumerate(shape.columns)])
        self._sample: list[pa.Table] = []
        self._sampled = 0
        self._memory = 0

    def add(self, changes: pa.Table | pa.RecordBatch) -> None:
        """Count some changes in."""
        own = pa.table(changes.columns[-self._columns :], schema=self._fields) if self._columns else None
        if own is None or not own.num_rows:
            return
        self._memory += own.nbytes
        if self._sampled < SAMPLE_ROWS:
            self._sample.append(own.slice(0, SAMPLE_ROWS - self._sampled))
            self._sampled += self._sample[-1].num_rows

    @property
    def bytes(self) -> int:
        """Of all that was added."""
        some = pa.concat_tables(self._sample) if self._sample else None
        if some is None or not some.nbytes:
            return self._memory
        try:
            return max(_encoded(some) * self._memory // int(some.nbytes), 1)
        except (pa.ArrowException, OSError):  # a type that has no place in a file
            return self._memory


def estimate_bytes(shape: TableSchema, changes: pa.Table) -> int:
    """Of changes that are all at hand."""
    weight = SizeEstimate(shape)
    weight.add(changes)
    return weight.bytes


def _encoded(rows: pa.Table) -> int:
    """What the values take in a file, without its head and foot: those a table has once for very many rows."""
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
