"""Turn changes into the columns of Spark's `changes` and Delta's change data feed. Both follow the same rules.

- `_change_type` is `insert`, `delete`, `update_preimage` or `update_postimage`. A row has all its values, also in a
  delete. So the source must send whole old rows.
- `_commit_version` is the log's commit, which is never split. A key changes at most once in it: changes in between are
  not reported. A changed key is a delete and an insert. Rows of a table without a key are reported one by one.
- `_commit_timestamp` is when the log stored the commit: one time for all its rows, and it never decreases.

What these columns cannot represent is an error: a TRUNCATE, an old row that was not sent, a value its type cannot hold.
The planner stops before such a commit, so everything before it is delivered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.changelog.read.commit_lookup import CommitLookup, Int64Array
from tailrace.changelog.read.merged_schema import conform_to_schema
from tailrace.errors import SourceNotReady, TailraceError, Unsupported, ValueUnfit
from tailrace.model import change
from tailrace.model.batch import ChangeBatch
from tailrace.model.change import Operation
from tailrace.model.event import python_values
from tailrace.model.schema import Identity, TableSchema

CHANGE_TYPE, VERSION, TIMESTAMP = "_change_type", "_commit_version", "_commit_timestamp"
_WRITTEN, _ALONE, _KEY = "\0written_at", "\0alone", "\0key{}"
"""Helper columns. No column of a source has such a name, for none has a zero byte in its name."""
_TYPED_HINT = "or read the table with `shape` `typed`, which reports every change."
_SKIP_HINT = f"Begin after the commit, with `startingPosition` and a new checkpoint, {_TYPED_HINT}"


def feed_fields(schema: TableSchema) -> pa.Schema:
    """Return the table's columns under their own names, then those of the feed."""
    feed = {CHANGE_TYPE: pa.string(), VERSION: pa.int64(), TIMESTAMP: pa.timestamp("us", "UTC")}
    return pa.schema([*schema.row_fields(), *(pa.field(name, kind) for name, kind in feed.items())])


def refuse_partial(schema: TableSchema) -> None:
    """Refuse a table whose old rows are not sent whole."""
    if schema.identity is not Identity.FULL:
        raise SourceNotReady(
            "a change feed needs whole old rows, and the source does not send them",
            table=schema.table,
            hint=f"Run `ALTER TABLE {schema.table} REPLICA IDENTITY FULL;` and begin with changes made after that, "
            f"{_TYPED_HINT}",
        )


def partial_rows_error(schema: TableSchema, commit: int) -> SourceNotReady | None:
    """Return why a feed cannot represent rows of a schema version; None if it can.

    The rows extend up to this commit.
    """
    if schema.identity is Identity.FULL:
        return None
    return SourceNotReady(
        "a change feed needs whole old rows, and these changes have none",
        table=schema.table,
        commit=commit,
        hint=_SKIP_HINT,
    )


def feed_rows(
    batches: Iterable[ChangeBatch], schema: TableSchema, commits: CommitLookup
) -> Iterator[dict[str, pa.Array]]:
    """Yield the feed of whole commits, by column. Memory holds the rows of one commit and of one batch."""
    pending: list[pa.RecordBatch] = []
    for batch in batches:
        block, indexes = commits.locate(batch.data.column(change.SEQ).to_numpy())
        numbers = block.commit[indexes]
        if (error := find_unsupported(batch, numbers)) is not None:
            raise error[1]
        rows = _keyed(batch, schema).append_column(change.COMMIT, pa.array(numbers))
        pending.append(rows.append_column(_WRITTEN, pa.array(block.written_at[indexes])))
        whole = int(np.searchsorted(numbers, numbers[-1]))  # the last commit may continue in the next batch
        if whole or int(numbers[-1]) != pending[0].column(change.COMMIT)[0].as_py():
            yield _feed_columns(pa.Table.from_batches([*pending[:-1], pending[-1].slice(0, whole)]), schema)
            pending = [pending[-1].slice(whole)]
    if pending:
        yield _feed_columns(pa.Table.from_batches(pending), schema)


def find_unsupported(batch: ChangeBatch, numbers: Int64Array) -> tuple[int, TailraceError] | None:
    """Return the first commit of these rows that a feed cannot represent, with the error.

    None if it can represent all of them.
    """
    table, errors = batch.schema.table, list[tuple[int, TailraceError]]()
    if batch.truncates:
        commit = int(numbers[pc.index(batch.data.column(change.OP), Operation.TRUNCATE.value).as_py()])
        errors.append(
            (
                commit,
                Unsupported("a change feed cannot represent a TRUNCATE", table=table, commit=commit, hint=_SKIP_HINT),
            )
        )
    if batch.unfit:
        commit = int(numbers[pc.index(batch.data.column(change.UNFIT).is_valid(), True).as_py()])
        errors.append(
            (
                commit,
                ValueUnfit(
                    "a value does not fit its column's type, and a change feed has no other column for it",
                    table=table,
                    commit=commit,
                    hint=_SKIP_HINT,
                ),
            )
        )
    if (partial_error := partial_rows_error(batch.schema, int(numbers[-1]))) is not None:
        errors.append((int(numbers[0]), partial_error))
    return min(errors, key=lambda item: item[0], default=None)


def _keyed(batch: ChangeBatch, schema: TableSchema) -> pa.RecordBatch:
    """Return the rows in the view's schema. Each has the key that it had when written.

    That key may not be the view's own.
    """
    rows = conform_to_schema(batch, schema).with_all_columns()
    alone = rows.column(change.SEQ) if not batch.schema.key else pa.nulls(len(batch), pa.int64())
    keys = [rows.column(change.stored_name(name)) for name in (*schema.key, *schema.former_key)]
    is_own_key = [name in batch.schema.key for name in (*schema.key, *schema.former_key)]
    rows = rows.append_column(_ALONE, alone)
    for i, (column, is_own) in enumerate(zip(keys, is_own_key, strict=True)):
        rows = rows.append_column(_KEY.format(i), column if is_own else pa.nulls(len(batch), column.type))
    return rows


def _feed_columns(rows: pa.Table, schema: TableSchema) -> dict[str, pa.Array]:
    """Return the feed of these rows, which are whole commits."""
    rows = rows.combine_chunks()
    first, last = _ends(rows, schema)
    ops = rows.column(change.OP)
    inserted = _is(ops, Operation.INSERT)[first]
    deleted = _is(ops, Operation.DELETE)[last]
    old, new = ~inserted, ~deleted  # a row inserted and deleted in one commit is not reported
    # The old row first, then the new one, in the order of the log.
    order = np.argsort(np.concatenate([last[old] * 2, last[new] * 2 + 1]))
    kinds = np.concatenate(
        [np.where(deleted[old], "delete", "update_preimage"), np.where(inserted[new], "insert", "update_postimage")]
    )
    chosen = pa.array(np.concatenate([first[old], last[new]])[order])
    is_old = pa.array((np.arange(len(order)) < old.sum())[order])
    columns = {column.name: _values(rows, change.stored_name(column.name), chosen, is_old) for column in schema.columns}
    times = rows.column(_WRITTEN).take(chosen).cast(pa.timestamp("us", "UTC"))
    return columns | {
        CHANGE_TYPE: pa.array(kinds[order], pa.string()),
        VERSION: _one(rows.column(change.COMMIT).take(chosen)),
        TIMESTAMP: _one(times),
    }


def _ends(rows: pa.Table, schema: TableSchema) -> tuple[Int64Array, Int64Array]:
    """Return the indexes of each key's first and last change in a commit."""
    names = [_KEY.format(i) for i in range(len(schema.key) + len(schema.former_key))]
    by = [change.COMMIT, _ALONE, *names]
    keys = pa.table({"row": np.arange(len(rows))} | {name: _hashable(rows.column(name)) for name in by})
    ends = keys.group_by(by, use_threads=False).aggregate([("row", "min"), ("row", "max")])
    return ends.column("row_min").to_numpy(), ends.column("row_max").to_numpy()


def _hashable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_nested(column.type):
        return pa.chunked_array([pa.array(map(str, python_values(_one(column))), pa.string())])
    return column


def _is(ops: pa.ChunkedArray, operation: Operation) -> npt.NDArray[np.bool_]:
    flags: npt.NDArray[np.bool_] = pc.equal(ops, operation.value).to_numpy()
    return flags


def _values(rows: pa.Table, name: str, chosen: pa.Array, is_old: pa.Array) -> pa.Array:
    """Return a column's values; for the old row of an update those from before."""
    own = rows.column(name).take(chosen)
    before = rows.column(change.BEFORE).take(chosen)
    return _one(pc.if_else(pc.and_(is_old, before.is_valid()), pc.struct_field(before, name), own))


def _one(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
