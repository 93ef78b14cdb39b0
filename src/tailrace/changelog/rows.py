"""Small, pure steps that rows go through between a file of the log and a reader."""

from __future__ import annotations

import functools

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.changelog.schemas import Version
from tailrace.model import change
from tailrace.model.batch import ChangeBatch
from tailrace.model.change import Operation
from tailrace.model.position import Lsn
from tailrace.model.schema import TableSchema

_FEW = 1024


def restore(
    stored: pa.RecordBatch, version: Version, without: tuple[str, ...], base: int, position: str | None
) -> pa.RecordBatch:
    """The rows of a body as the version's shape has them.

    `_seq` is counted in the log instead of in the window the rows came in, `_position` is filled in where it was not
    known when they were written, and other columns that were left out are put back as nulls.
    """
    columns, place = [], 0
    for field in version.arrow:
        if field.name not in without:
            column = stored.column(place)
            if base and field.name == change.SEQ:
                column = pa.array(column.to_numpy() + base)
            place += 1
        elif field.name == change.POSITION:
            column = pa.repeat(pa.scalar(position, field.type), stored.num_rows)
        else:
            column = nulls(field.type, stored.num_rows)
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=version.arrow)


def complete(data: pa.RecordBatch, version: Version) -> pa.RecordBatch:
    """The rows as the version's shape has them: columns that were left out are put back as nulls."""
    names = set(data.schema.names)
    columns = [
        data.column(field.name) if field.name in names else nulls(field.type, data.num_rows)
        for field in version.arrow
    ]
    return pa.RecordBatch.from_arrays(columns, schema=version.arrow)


def nulls(kind: pa.DataType, rows: int) -> pa.Array:
    """So many nulls. Making them costs more than a small batch's other columns together, so some are kept."""
    return _few_nulls(kind).slice(0, rows) if rows <= _FEW else pa.nulls(rows, kind)


@functools.lru_cache(maxsize=1024)
def _few_nulls(kind: pa.DataType) -> pa.Array:
    return pa.nulls(_FEW, kind)


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
    if seqs[0] > after_seq and seqs[-1] <= to_seq:
        return batch
    begin, end = np.searchsorted(seqs, [after_seq, to_seq], side="right").tolist()
    return counted(batch.schema, batch.data.slice(begin, end - begin))


def after_position(batch: ChangeBatch, position: Lsn) -> ChangeBatch:
    """The rows whose transaction ended after a position; all of them, from the first commit past it on."""
    texts = batch.data.column(change.POSITION)
    if Lsn.parse(texts[0].as_py()) > position:
        return batch
    later = [text for text in pc.unique(texts).to_pylist() if Lsn.parse(text) > position]
    return counted(batch.schema, batch.data.filter(pc.is_in(texts, pa.array(later, pa.string()))))
