"""Distribute changes to buckets by key, in order.

All changes of a key get one bucket, and so do all rows of equal values without a key. The keys of key moves with unsent
values share bucket 0. A TRUNCATE goes to every bucket. Only the last change of a key in a batch is needed, unless every
change counts or a value is unsent or unfit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.deadletters.keyless import split_updates
from tailrace.model import change
from tailrace.model.change import Operation
from tailrace.model.schema import TableSchema
from tailrace.tables.fold.folded_changes import key_ordinals
from tailrace.tables.fold.row_hashes import RowHashes, RowHashSet, hash_images, hash_keys
from tailrace.tables.fold.row_ids import key_numbers

_SEED = 0


def is_operation(batch: pa.RecordBatch, operation: Operation) -> Any:
    return pc.equal(batch.column(change.OP), operation.value)


def _own(schema: TableSchema, batch: pa.RecordBatch) -> list[Any]:
    return [batch.column(change.stored_name(column.name)) for column in schema.columns]


def _keys(schema: TableSchema, batch: pa.RecordBatch) -> list[Any]:
    own = _own(schema, batch)
    return [own[i] for i in key_ordinals(schema)]


def hashes_of_partial_moves(schema: TableSchema, batch: pa.RecordBatch) -> Iterator[RowHashes]:
    """Yield hashes of the old and the new keys of key moves with unsent values."""
    partial = pc.and_(
        batch.column(change.MOVED_FROM).is_valid(),
        pc.greater(pc.fill_null(pc.list_value_length(batch.column(change.UNCHANGED)), 0), 0),
    )
    rows = batch.filter(partial)
    if rows.num_rows:
        old = rows.column(change.MOVED_FROM)
        yield hash_keys(_keys(schema, rows), _SEED)
        yield hash_keys([pc.struct_field(old, [i]) for i in range(old.type.num_fields)], _SEED)


def changes_by_bucket(
    schema: TableSchema, batch: pa.RecordBatch, moved: RowHashSet, buckets: int, all_count: bool
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the changes by bucket, in order; a TRUNCATE goes to every bucket."""
    if not all_count:  # the batch has neither a TRUNCATE nor a change before one
        yield from _keyed_changes_by_bucket(
            schema, batch if not schema.key else _last_of_each(schema, batch), moved, buckets
        )
        return
    begin = 0
    for at in np.flatnonzero(is_operation(batch, Operation.TRUNCATE).to_numpy(zero_copy_only=False)).tolist():
        yield from _keyed_changes_by_bucket(schema, batch.slice(begin, at - begin), moved, buckets)
        yield from ((bucket, batch.slice(at, 1)) for bucket in range(buckets))
        begin = at + 1
    yield from _keyed_changes_by_bucket(schema, batch.slice(begin), moved, buckets)


def _keyed_changes_by_bucket(
    schema: TableSchema, batch: pa.RecordBatch, moved: RowHashSet, buckets: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    if not batch.num_rows:
        return
    if schema.key:
        prints = hash_keys(_keys(schema, batch), _SEED)
        number = np.where(moved.find(prints) >= 0, 0, prints[:, 0] % buckets) if len(moved) else prints[:, 0] % buckets
    else:
        (batch,) = split_updates(schema, pa.Table.from_batches([batch])).combine_chunks().to_batches()
        number = hash_images(_own(schema, batch), _SEED)[:, 0] % buckets
    order = np.argsort(number, kind="stable")
    batch, sorted_numbers = batch.take(pa.array(order)), number[order]
    starts = np.flatnonzero(np.append(True, sorted_numbers[1:] != sorted_numbers[:-1]))
    for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
        yield int(sorted_numbers[start]), batch.slice(start, end - start)


def _last_of_each(schema: TableSchema, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the last change of each key.

    If one has an unsent or unfit value, all changes are returned."""
    if any(batch.column(name).null_count < batch.num_rows for name in (change.UNCHANGED, change.UNFIT)):
        return batch
    numbered = key_numbers(_keys(schema, batch))
    last = np.full(numbered.limit, -1, np.int64)
    last[numbered.numbers] = np.arange(batch.num_rows)
    return batch.take(pa.array(np.sort(last[last >= 0])))
