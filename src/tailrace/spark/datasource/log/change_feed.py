"""Changes as Spark's own `changes` and Delta's change feed tell them: the same columns, by the same rules.

- `_change_type` is `insert`, `delete`, `update_preimage` or `update_postimage`; a row has all its values, also where
  it goes. So the source must send whole old rows.
- `_commit_version` is the log's commit, which is never split. A key changes at most once in it: what became of it in
  between is not told. A changed key is a delete and an insert. Rows of a table without a key are told one by one.
- `_commit_timestamp` is when the log took the commit in: one time for all its rows, that never goes back.

What this shape cannot tell is an error: a TRUNCATE, an old row that was not sent, a value that its type cannot hold.
Whoever plans stops before it, so that it costs nobody what came before.
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
"""Ours for a while, and no column of any source's: none has a name with a zero byte."""
_ELSE = "or read it with `shape` `typed`, which tells everything."
_AFTER = f"Begin after the commit, by `startingPosition` (and with a new checkpoint), {_ELSE}"


def feed_fields(shape: TableSchema) -> pa.Schema:
    """The table's columns under their own names, then the feed's."""
    feed = {CHANGE_TYPE: pa.string(), VERSION: pa.int64(), TIMESTAMP: pa.timestamp("us", "UTC")}
    return pa.schema([*shape.row_fields(), *(pa.field(name, kind) for name, kind in feed.items())])


def refuse_partial(schema: TableSchema) -> None:
    """Refuse a table whose old rows are not sent as a whole."""
    if schema.identity is not Identity.FULL:
        raise SourceNotReady(
            "a change feed needs whole old rows, and the source does not send them",
            table=schema.table,
            hint=f"ALTER TABLE {schema.table} REPLICA IDENTITY FULL, and begin with changes made after that; {_ELSE}",
        )


def partial_rows_error(schema: TableSchema, commit: int) -> SourceNotReady | None:
    """Why rows of a version, which come up to a commit, cannot be told; None if they can."""
    if schema.identity is Identity.FULL:
        return None
    return SourceNotReady(
        "a change feed needs whole old rows, and changes of then have none",
        table=schema.table,
        commit=commit,
        hint=_AFTER,
    )


def feed_rows(
    batches: Iterable[ChangeBatch], shape: TableSchema, commits: CommitLookup
) -> Iterator[dict[str, pa.Array]]:
    """The feed of whole commits, by column. Rows of one commit are held together, and no more than that."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        block, places = commits.locate(batch.data.column(change.SEQ).to_numpy())
        numbers = block.commit[places]
        if (found := find_unsupported(batch, numbers)) is not None:
            raise found[1]
        rows = _keyed(batch, shape).append_column(change.COMMIT, pa.array(numbers))
        held.append(rows.append_column(_WRITTEN, pa.array(block.written_at[places])))
        whole = int(np.searchsorted(numbers, numbers[-1]))  # its last commit may go on in the next
        if whole or int(numbers[-1]) != held[0].column(change.COMMIT)[0].as_py():
            yield _feed_columns(pa.Table.from_batches([*held[:-1], held[-1].slice(0, whole)]), shape)
            held = [held[-1].slice(whole)]
    if held:
        yield _feed_columns(pa.Table.from_batches(held), shape)


def find_unsupported(batch: ChangeBatch, numbers: Int64Array) -> tuple[int, TailraceError] | None:
    """The first commit that cannot be told, of those that these rows are in, and why; None if all can."""
    table, found = batch.schema.table, list[tuple[int, TailraceError]]()
    if batch.truncates:
        commit = int(numbers[pc.index(batch.data.column(change.OP), Operation.TRUNCATE.value).as_py()])
        found.append(
            (
                commit,
                Unsupported("a TRUNCATE cannot be told as changes of rows", table=table, commit=commit, hint=_AFTER),
            )
        )
    if batch.unfit:
        commit = int(numbers[pc.index(batch.data.column(change.UNFIT).is_valid(), True).as_py()])
        found.append(
            (
                commit,
                ValueUnfit(
                    "a value does not fit its column's type, and a change feed has no other place for it",
                    table=table,
                    commit=commit,
                    hint=_AFTER,
                ),
            )
        )
    if (lacking := partial_rows_error(batch.schema, int(numbers[-1]))) is not None:
        found.append((int(numbers[0]), lacking))
    return min(found, key=lambda item: item[0], default=None)


def _keyed(batch: ChangeBatch, shape: TableSchema) -> pa.RecordBatch:
    """The rows in the view's shape, with the key that each was known by when it was written: that may not be the
    view's own."""
    rows = conform_to_schema(batch, shape).with_all_columns()
    alone = rows.column(change.SEQ) if not batch.schema.key else pa.nulls(len(batch), pa.int64())
    keys = [rows.column(change.stored_name(name)) for name in (*shape.key, *shape.former_key)]
    mine = [name in batch.schema.key for name in (*shape.key, *shape.former_key)]
    rows = rows.append_column(_ALONE, alone)
    for place, (column, own) in enumerate(zip(keys, mine, strict=True)):
        rows = rows.append_column(_KEY.format(place), column if own else pa.nulls(len(batch), column.type))
    return rows


def _feed_columns(rows: pa.Table, shape: TableSchema) -> dict[str, pa.Array]:
    """The feed of these rows, which are whole commits."""
    rows = rows.combine_chunks()
    first, last = _ends(rows, shape)
    ops = rows.column(change.OP)
    came = _is(ops, Operation.INSERT)[first]
    went = _is(ops, Operation.DELETE)[last]
    old, new = ~came, ~went  # of what came and went nothing is told
    # The old row first, then the new one, in the order of the log.
    order = np.argsort(np.concatenate([last[old] * 2, last[new] * 2 + 1]))
    kinds = np.concatenate(
        [np.where(went[old], "delete", "update_preimage"), np.where(came[new], "insert", "update_postimage")]
    )
    taken = pa.array(np.concatenate([first[old], last[new]])[order])
    is_old = pa.array((np.arange(len(order)) < old.sum())[order])
    found = {column.name: _values(rows, change.stored_name(column.name), taken, is_old) for column in shape.columns}
    times = rows.column(_WRITTEN).take(taken).cast(pa.timestamp("us", "UTC"))
    return found | {
        CHANGE_TYPE: pa.array(kinds[order], pa.string()),
        VERSION: _one(rows.column(change.COMMIT).take(taken)),
        TIMESTAMP: _one(times),
    }


def _ends(rows: pa.Table, shape: TableSchema) -> tuple[Int64Array, Int64Array]:
    """Where each key's first and last change of a commit stands."""
    names = [_KEY.format(place) for place in range(len(shape.key) + len(shape.former_key))]
    by = [change.COMMIT, _ALONE, *names]
    keys = pa.table({"place": np.arange(len(rows))} | {name: _hashable(rows.column(name)) for name in by})
    found = keys.group_by(by, use_threads=False).aggregate([("place", "min"), ("place", "max")])
    return found.column("place_min").to_numpy(), found.column("place_max").to_numpy()


def _hashable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_nested(column.type):
        return pa.chunked_array([pa.array(map(str, python_values(_one(column))), pa.string())])
    return column


def _is(ops: pa.ChunkedArray, operation: Operation) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = pc.equal(ops, operation.value).to_numpy()
    return found


def _values(rows: pa.Table, name: str, taken: pa.Array, is_old: pa.Array) -> pa.Array:
    """A column: of an old row that was updated, as it was before."""
    own = rows.column(name).take(taken)
    before = rows.column(change.BEFORE).take(taken)
    return _one(pc.if_else(pc.and_(is_old, before.is_valid()), pc.struct_field(before, name), own))


def _one(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
