"""Small, pure steps that rows go through between a file of the log and a reader."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.changelog.schemas import Version
from tailrace.model import change
from tailrace.model.batch import ChangeBatch
from tailrace.model.change import Operation
from tailrace.model.position import Lsn
from tailrace.model.schema import TableSchema


def complete(data: pa.RecordBatch, version: Version) -> pa.RecordBatch:
    """The rows as the version's shape has them: columns that were left out are put back as nulls."""
    names = set(data.schema.names)
    columns = [
        data.column(field.name) if field.name in names else pa.nulls(data.num_rows, field.type)
        for field in version.arrow
    ]
    return pa.RecordBatch.from_arrays(columns, schema=version.arrow)


def counted(schema: TableSchema, data: pa.RecordBatch) -> ChangeBatch:
    """Rows as a batch, with what a batch knows of its rows counted anew."""
    moved, unfit = data.column(change.MOVED_FROM), data.column(change.UNFIT)
    truncates = pc.sum(pc.equal(data.column(change.OP), Operation.TRUNCATE.value)).as_py()
    return ChangeBatch(
        schema=schema,
        data=data,
        moves=len(moved) - moved.null_count,
        truncates=truncates or 0,
        unfit=0 if unfit.null_count == len(unfit) else pc.sum(pc.list_value_length(unfit)).as_py(),
    )


def between(batch: ChangeBatch, after_seq: int, to_seq: int) -> ChangeBatch:
    """The rows of a batch after a `_seq` and up to another; mostly all of them."""
    seqs = batch.data.column(change.SEQ).to_numpy()
    begin, end = np.searchsorted(seqs, [after_seq, to_seq], side="right").tolist()
    return batch if end - begin == len(seqs) else counted(batch.schema, batch.data.slice(begin, end - begin))


def after_position(batch: ChangeBatch, position: Lsn) -> ChangeBatch:
    """The rows whose transaction ended after a position; all of them, from the first commit past it on."""
    texts = batch.data.column(change.POSITION)
    if Lsn.parse(texts[0].as_py()) > position:
        return batch
    later = [text for text in pc.unique(texts).to_pylist() if Lsn.parse(text) > position]
    return counted(batch.schema, batch.data.filter(pc.is_in(texts, pa.array(later, pa.string()))))


def rebased(data: pa.RecordBatch, base: int) -> pa.RecordBatch:
    """Rows with `_seq` counted in the log instead of in the window they came in."""
    place = data.schema.get_field_index(change.SEQ)
    seqs = data.column(place).to_numpy() + base
    return data.set_column(place, data.schema.field(place), pa.array(seqs))


def with_position(data: pa.RecordBatch, version: Version, position: str) -> pa.RecordBatch:
    """Rows that were written before their transaction's end was known, with its position."""
    field = version.arrow.field(change.POSITION)
    return data.append_column(field, pa.repeat(pa.scalar(position, field.type), data.num_rows))
