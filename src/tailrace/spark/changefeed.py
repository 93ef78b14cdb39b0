"""Changes as Spark's own `changes` and Delta's change feed tell them: the same columns, by the same rules.

- `_change_type` is `insert`, `delete`, `update_preimage` or `update_postimage`; a row has all its values, also where
  it goes. So the source must send whole old rows.
- `_commit_version` is the log's commit, which is never split. A key changes at most once in it: what became of it in
  between is not told. A changed key is a delete and an insert. Rows of a table without a key are told one by one.
- `_commit_timestamp` is when the log took the commit in: one time for all its rows, that never goes back.

What this shape cannot tell is an error: a TRUNCATE, an old row that was not sent, a value that its type cannot hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.changelog.commits import Commits, Numbers
from tailrace.changelog.merged import conform
from tailrace.errors import SourceNotReady, Unsupported, ValueUnfit
from tailrace.model import change
from tailrace.model.batch import ChangeBatch
from tailrace.model.change import Operation
from tailrace.model.schema import Identity, TableSchema

CHANGE_TYPE, VERSION, TIMESTAMP = "_change_type", "_commit_version", "_commit_timestamp"
_WRITTEN = "_written_at"
_ELSE = "or read it with `shape` `typed`, which tells everything."


def feed_fields(shape: TableSchema) -> pa.Schema:
    """The table's columns under their own names, then the feed's."""
    feed = {CHANGE_TYPE: pa.string(), VERSION: pa.int64(), TIMESTAMP: pa.timestamp("us", "UTC")}
    return pa.schema([*shape.row_fields(), *(pa.field(name, kind) for name, kind in feed.items())])


def refuse_partial(schema: TableSchema, commit: int | None = None) -> None:
    """Refuse a shape whose old rows are not sent as a whole."""
    if schema.identity is Identity.FULL:
        return
    table = schema.table
    if commit is None:
        raise SourceNotReady(
            "a change feed needs whole old rows, and the source does not send them", table=table,
            hint=f"ALTER TABLE {table} REPLICA IDENTITY FULL, and begin with changes made after that; {_ELSE}",
        )  # fmt: skip
    raise SourceNotReady(
        "a change feed needs whole old rows, and changes of then have none", table=table, commit=commit,
        hint=f"Begin after the commit, by `startingPosition` (and with a new checkpoint), {_ELSE}",
    )


def feed_rows(batches: Iterable[ChangeBatch], shape: TableSchema, commits: Commits) -> Iterator[dict[str, pa.Array]]:
    """The feed of whole commits, by column. Rows of one commit are held together, and no more than that."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        block, places = commits.places_of(batch.data.column(change.SEQ).to_numpy())
        numbers = block.commit[places]
        _refuse(batch, shape, numbers)
        rows = conform(batch, shape).completed().append_column(change.COMMIT, pa.array(numbers))
        held.append(rows.append_column(_WRITTEN, pa.array(block.written_at[places])))
        whole = int(np.searchsorted(numbers, numbers[-1]))  # its last commit may go on in the next
        if whole or int(numbers[-1]) != held[0].column(change.COMMIT)[0].as_py():
            yield _told(pa.Table.from_batches([*held[:-1], held[-1].slice(0, whole)]), shape)
            held = [held[-1].slice(whole)]
    if held:
        yield _told(pa.Table.from_batches(held), shape)


def _refuse(batch: ChangeBatch, shape: TableSchema, numbers: Numbers) -> None:
    table = shape.table
    if batch.truncates:
        at = pc.index(batch.data.column(change.OP), Operation.TRUNCATE.value).as_py()
        raise Unsupported(
            "a TRUNCATE cannot be told as changes of rows", table=table, commit=int(numbers[at]),
            hint=f"Begin after the commit, by `startingPosition` (and with a new checkpoint), {_ELSE}",
        )  # fmt: skip
    if batch.unfit:
        raise ValueUnfit(
            "a value does not fit its column's type, and a change feed has no other place for it", table=table,
            commit=int(numbers[0]), hint=f"Begin after the commit, {_ELSE}",
        )  # fmt: skip
    refuse_partial(batch.schema, int(numbers[0]))


def _told(rows: pa.Table, shape: TableSchema) -> dict[str, pa.Array]:
    """The feed of these rows, which are whole commits."""
    rows = rows.combine_chunks()
    first, last = _ends(rows, shape)
    ops = rows.column(change.OP)
    came = _is(ops, Operation.INSERT)[first]
    went = _is(ops, Operation.DELETE)[last]
    old, new = ~came, ~went  # of what came and went nothing is told
    # The old row first, then the new one, in the order of the log.
    order = np.argsort(np.concatenate([last[old] * 2, last[new] * 2 + 1]))
    kinds = np.concatenate([
        np.where(went[old], "delete", "update_preimage"), np.where(came[new], "insert", "update_postimage")
    ])  # fmt: skip
    taken = pa.array(np.concatenate([first[old], last[new]])[order])
    is_old = pa.array((np.arange(len(order)) < old.sum())[order])
    found = {
        column.name: _values(rows, change.stored_name(column.name), taken, is_old) for column in shape.columns
    }
    times = rows.column(_WRITTEN).take(taken).cast(pa.timestamp("us", "UTC"))
    return found | {
        CHANGE_TYPE: pa.array(kinds[order], pa.string()), VERSION: _one(rows.column(change.COMMIT).take(taken)),
        TIMESTAMP: _one(times),
    }  # fmt: skip


def _ends(rows: pa.Table, shape: TableSchema) -> tuple[Numbers, Numbers]:
    """Where each key's first and last change of a commit stands."""
    every = np.arange(len(rows))
    if not shape.key:
        return every, every
    names = [change.stored_name(name) for name in shape.key]
    keys = pa.table({"commit": rows.column(change.COMMIT), "place": every} | {
        f"key{place}": _hashable(rows.column(name)) for place, name in enumerate(names)
    })  # fmt: skip
    by = ["commit", *(f"key{place}" for place in range(len(names)))]
    found = keys.group_by(by, use_threads=False).aggregate([("place", "min"), ("place", "max")])
    return found.column("place_min").to_numpy(), found.column("place_max").to_numpy()


def _hashable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_nested(column.type):
        return pa.chunked_array([pa.array(map(str, column.to_pylist()), pa.string())])
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
