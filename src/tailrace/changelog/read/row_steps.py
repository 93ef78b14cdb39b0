"""Pure steps that rows take from a file of the log to a reader."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.changelog.format.commit_file import CommitBody
from tailrace.changelog.format.schemas import LogSchemaVersion
from tailrace.model import change
from tailrace.model.batch import ChangeBatch
from tailrace.model.change import Operation
from tailrace.model.position import Lsn
from tailrace.model.schema import TableSchema

_ALWAYS = [field.name for field in change.REQUIRED]
_SEQ_INDEX, _POSITION_INDEX = _ALWAYS.index(change.SEQ), _ALWAYS.index(change.POSITION)


def restore_rows(
    stored: pa.RecordBatch, version: LogSchemaVersion, body: CommitBody, position: str | None
) -> pa.RecordBatch:
    """Return the rows of a body as readers see them.

    `_seq` counts in the log and no longer in the rows' own window. `_position` is added where it was not known when
    they were written. Optional columns that were left out stay so.
    """
    data = stored
    if body.base:
        seqs = pa.array(stored.column(_SEQ_INDEX).to_numpy() + body.base)
        data = data.set_column(_SEQ_INDEX, version.arrow_schema.field(_SEQ_INDEX), seqs)
    if position is not None and change.POSITION in body.without:
        field = version.arrow_schema.field(_POSITION_INDEX)
        data = data.add_column(_POSITION_INDEX, field, pa.repeat(pa.scalar(position, field.type), data.num_rows))
    return data


def batch_with_counts(schema: TableSchema, data: pa.RecordBatch) -> ChangeBatch:
    """Return rows as a batch, with its counts made from the rows."""
    names = data.schema.names
    moved = data.column(change.MOVED_FROM) if change.MOVED_FROM in names else None
    unfit = data.column(change.UNFIT) if change.UNFIT in names else None
    truncates = pc.sum(pc.equal(data.column(change.OP), Operation.TRUNCATE.value)).as_py()
    return ChangeBatch(
        schema=schema,
        data=data,
        moves=len(moved) - moved.null_count if moved is not None else 0,
        truncates=truncates or 0,
        unfit=(pc.sum(pc.list_value_length(unfit)).as_py() or 0) if unfit is not None else 0,
    )


def rows_between(batch: ChangeBatch, after_seq: int, to_seq: int) -> ChangeBatch:
    """Return the rows of a batch after a `_seq` and up to another.

    Usually that is all of them.
    """
    seqs = batch.data.column(change.SEQ).to_numpy()
    if seqs[0] > after_seq and seqs[-1] <= to_seq:
        return batch
    begin, end = np.searchsorted(seqs, [after_seq, to_seq], side="right").tolist()
    return batch_with_counts(batch.schema, batch.data.slice(begin, end - begin))


def rows_until_position(batch: ChangeBatch, position: Lsn) -> ChangeBatch:
    """Return the rows whose transaction ended at or before a position.

    The other rows follow them.
    """
    texts = batch.data.column(change.POSITION)
    if Lsn.parse(texts[-1].as_py()) <= position:
        return batch
    earlier = [text for text in pc.unique(texts).to_pylist() if Lsn.parse(text) <= position]
    return batch_with_counts(batch.schema, batch.data.filter(pc.is_in(texts, pa.array(earlier, pa.string()))))


def rows_after_position(batch: ChangeBatch, position: Lsn) -> ChangeBatch:
    """Return the rows whose transaction ended after a position.

    From the first commit past it, that is all of them.
    """
    texts = batch.data.column(change.POSITION)
    if Lsn.parse(texts[0].as_py()) > position:
        return batch
    later = [text for text in pc.unique(texts).to_pylist() if Lsn.parse(text) > position]
    return batch_with_counts(batch.schema, batch.data.filter(pc.is_in(texts, pa.array(later, pa.string()))))
