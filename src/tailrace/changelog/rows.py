"""Small, pure steps that rows go through between a file of the log and a reader."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.changelog.format import Body
from tailrace.changelog.schemas import Version
from tailrace.model import change
from tailrace.model.batch import ChangeBatch
from tailrace.model.change import Operation
from tailrace.model.position import Lsn
from tailrace.model.schema import TableSchema

_ALWAYS = [field.name for field in change.ALWAYS]
_SEQ_PLACE, _POSITION_PLACE = _ALWAYS.index(change.SEQ), _ALWAYS.index(change.POSITION)


def restore(stored: pa.RecordBatch, version: Version, body: Body, position: str | None) -> pa.RecordBatch:
    """The rows of a body as the version's shape has them.

    `_seq` is counted in the log instead of in the window the rows came in, `_position` is filled in where it was not
    known when they were written, and other columns that were left out are put back as nulls.
    """
    rows = stored.num_rows
    found, left_out = stored.columns, version.left_out(body.without)
    if body.base:
        found[_SEQ_PLACE] = pa.array(found[_SEQ_PLACE].to_numpy() + body.base)
    for place, kind, few in left_out:
        if position is not None and place == _POSITION_PLACE:
            found.insert(place, pa.repeat(pa.scalar(position, kind), rows))
        else:
            found.insert(place, few.slice(0, rows) if rows <= len(few) else pa.nulls(rows, kind))
    return pa.RecordBatch.from_arrays(found, schema=version.arrow)


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
