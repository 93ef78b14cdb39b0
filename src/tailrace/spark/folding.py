"""A stretch of the log folded by tasks into files, which Spark's Delta connector then merges.

No row passes the driver: tasks read the log and write files, and the driver hears of counts. What a task holds at once
is bounded: up to `ROWS_AT_ONCE_MAX` changes are folded by one task as they are; more are first dealt out to buckets by
key, each of about that many, so that all changes of a key meet in one. Changes that take values from the row of another
key need that row's changes beside them, so the keys of such moves share a bucket. Of a key that is changed again and
again only the last change of each batch is dealt out, unless values are absent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tailrace.changelog.index import Slice
from tailrace.errors import TailraceError
from tailrace.model import change
from tailrace.model.change import Operation
from tailrace.model.schema import TableSchema
from tailrace.spark.tasks import ApplyWork, as_ours, change_batches
from tailrace.tables.fingerprints import Prints, PrintSet, image_prints, key_prints
from tailrace.tables.fold import UPSERT, Folded, fold, folded_schema, key_ordinals
from tailrace.tables.identity import key_numbers
from tailrace.tables.limits import refuse_far_dates

ROWS_AT_ONCE_MAX = 1 << 18
"""Changes that one task folds."""
BUCKETS_MAX = 512
"""Files that one task writes at a time; past 134 million changes of one stretch buckets grow."""
BATCH_ROWS_MAX = 1 << 12
"""Changes that are dealt out together."""
GROUP_ROWS_MAX = 1 << 17
_SEED = 0

Run = Callable[[Callable[[Any], Any], Sequence[Any]], Sequence[Any]]
"""Runs a task for each piece of work, wherever; the results in the order of the work."""


@dataclass(frozen=True, kw_only=True)
class FoldedFiles:
    """Folded rows, as `folded_schema` has them, in Parquet files; and what there is to know of them."""

    files: tuple[Path, ...] = ()
    truncated: bool = False
    changes: int = 0
    bytes: int = 0
    """Of the changes, in memory."""
    upserts: int = 0
    deletes: int = 0
    absent: frozenset[int] = frozenset()
    """The columns that some row takes from the table."""

    @property
    def empty(self) -> bool:
        return not self.truncated and not self.upserts and not self.deletes


def file_fields(schema: TableSchema) -> pa.Schema:
    """Folded rows as the files hold them: without a key there is no base, and Parquet has no struct without fields."""
    fields = folded_schema(schema)
    return fields if schema.key else fields.remove(fields.get_field_index("base"))


def write_folded(path: Path, schema: TableSchema, folded: Folded) -> FoldedFiles:
    """One file of folded rows; none if there are no rows."""
    rows = folded.rows
    if not rows.num_rows:
        return FoldedFiles(truncated=folded.truncated)
    upserts = pc.equal(rows.column("op"), UPSERT)
    refuse_far_dates(schema, rows.filter(upserts).columns[: len(schema.columns)])
    pq.write_table(rows.select(file_fields(schema).names), path, row_group_size=GROUP_ROWS_MAX, store_schema=False)
    came = int(pc.sum(upserts, min_count=0).as_py())
    absent = pc.unique(rows.column("absent").combine_chunks().flatten()).to_pylist()
    return FoldedFiles(
        files=(path,), truncated=folded.truncated, upserts=came, deletes=rows.num_rows - came,
        absent=frozenset(absent),
    )  # fmt: skip


def fold_stretch(work: ApplyWork, scratch: Path, run: Run, rows_max: int = ROWS_AT_ONCE_MAX) -> FoldedFiles:
    """Fold the slices of the work into files below `scratch`, which is there and empty."""
    rows = sum(item.rows for item in work.slices)
    if rows <= rows_max:
        whole = _Part(work=work, number=0, slices=work.slices, after_seq=work.expected.seq, scratch=scratch)
        return _joined(_results(run, _fold_whole, [whole]))
    parts = list(_parts(work, scratch, rows_max))
    seen = _results(run, _look, parts)
    truncates = [item.truncated_at for item in seen if item.truncated_at is not None]
    buckets = min(math.ceil(rows / rows_max), BUCKETS_MAX)
    last = max(truncates, default=None)
    _results(run, _deal, [replace(part, buckets=buckets, truncated_at=last) for part in parts])
    gathered = [
        _Bucket(schema=work.shape, number=number, scratch=scratch, truncated=last is not None)
        for number in range(buckets)
    ]
    folded = _joined(_results(run, _fold_bucket, gathered))
    return replace(
        folded, truncated=last is not None, changes=sum(item.rows for item in seen),
        bytes=sum(item.bytes for item in seen),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Slices that one task reads, one after the other."""

    work: ApplyWork
    number: int
    slices: tuple[Slice, ...]
    after_seq: int
    scratch: Path
    buckets: int = 0
    truncated_at: int | None = None
    """The number of the last TRUNCATE of the stretch: what came before it is of no account."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """In pieces small enough to be copied."""
        for batch in change_batches(replace(self.work, slices=self.slices), self.after_seq):
            for start in range(0, batch.num_rows, BATCH_ROWS_MAX):
                yield batch.slice(start, BATCH_ROWS_MAX)


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What a part holds."""

    rows: int
    bytes: int
    truncated_at: int | None


@dataclass(frozen=True, kw_only=True)
class _Bucket:
    schema: TableSchema
    number: int
    scratch: Path
    truncated: bool


def _results(run: Run, task: Callable[[Any], Any], works: Sequence[Any]) -> Sequence[Any]:
    found = run(task, works)
    for item in found:
        if isinstance(item, TailraceError):
            raise item
    return found


def _joined(pieces: Iterable[FoldedFiles]) -> FoldedFiles:
    found = list(pieces)
    return FoldedFiles(
        files=tuple(file for item in found for file in item.files), truncated=any(item.truncated for item in found),
        changes=sum(item.changes for item in found), bytes=sum(item.bytes for item in found),
        upserts=sum(item.upserts for item in found), deletes=sum(item.deletes for item in found),
        absent=frozenset().union(*(item.absent for item in found)),
    )  # fmt: skip


def _parts(work: ApplyWork, scratch: Path, rows_max: int) -> Iterator[_Part]:
    """The slices in stretches of about so many rows; one slice is never divided."""
    pending: list[Slice] = []
    number, seq = 0, work.expected.seq
    for item in work.slices:
        pending.append(item)
        if sum(each.rows for each in pending) >= rows_max:
            yield _Part(work=work, number=number, slices=tuple(pending), after_seq=seq, scratch=scratch)
            number, seq, pending = number + 1, item.last_seq, []
    if pending:
        yield _Part(work=work, number=number, slices=tuple(pending), after_seq=seq, scratch=scratch)


# --- tasks -------------------------------------------------------------------------------------------------


def _fold_whole(part: _Part) -> FoldedFiles | TailraceError:
    try:
        empty = part.work.shape.change_schema().empty_table()
        changes = pa.concat_tables([empty, *(pa.Table.from_batches([batch]) for batch in part.batches())])
        folded = fold(part.work.shape, changes)
        done = write_folded(part.scratch / "folded.parquet", part.work.shape, folded)
    except Exception as error:  # the task's boundary: what went wrong is an answer, too
        return as_ours(error)
    return replace(done, changes=changes.num_rows, bytes=changes.nbytes)


def _look(part: _Part) -> _Seen | TailraceError:
    """Count, find the last TRUNCATE, and note the keys of rows that moved and left values behind."""
    rows = size = 0
    truncated_at, moves = None, list[Prints]()
    try:
        for batch in part.batches():
            rows, size = rows + batch.num_rows, size + batch.nbytes
            truncates = batch.column(change.SEQ).filter(_is(batch, Operation.TRUNCATE))
            truncated_at = truncates[-1].as_py() if len(truncates) else truncated_at
            if part.work.shape.key:
                moves += _moves(part.work.shape, batch)
        np.save(part.scratch / f"moves-{part.number:05d}.npy", np.concatenate([np.empty((0, 2), np.uint64), *moves]))
    except Exception as error:  # the task's boundary
        return as_ours(error)
    return _Seen(rows=rows, bytes=size, truncated_at=truncated_at)


def _deal(part: _Part) -> int | TailraceError:
    """Write each change into the file of its bucket."""
    schema = part.work.shape
    try:
        moved = PrintSet(np.concatenate([np.load(file) for file in sorted(part.scratch.glob("moves-*.npy"))]))
        with ExitStack() as stack:
            writers: dict[int, Any] = {}
            for batch in part.batches():
                for bucket, rows in _dealt(schema, _after(batch, part.truncated_at), moved, part.buckets):
                    if bucket not in writers:
                        file = stack.enter_context(_file(part.scratch, bucket, part.number).open("xb"))
                        writers[bucket] = stack.enter_context(pa.ipc.new_stream(file, rows.schema))
                    writers[bucket].write_batch(rows)
    except Exception as error:  # the task's boundary
        return as_ours(error)
    return len(writers)


def _fold_bucket(bucket: _Bucket) -> FoldedFiles | TailraceError:
    schema = bucket.schema
    try:
        pieces = [schema.change_schema().empty_table()]
        if bucket.truncated:
            pieces.append(_truncate(schema))
        for file in sorted(bucket.scratch.glob(f"bucket-{bucket.number:05d}-*.arrow")):
            with file.open("rb") as source, pa.ipc.open_stream(source) as reader:
                pieces.append(reader.read_all())
        folded = fold(schema, pa.concat_tables(pieces))
        return write_folded(bucket.scratch / f"folded-{bucket.number:05d}.parquet", schema, folded)
    except Exception as error:  # the task's boundary
        return as_ours(error)


def _file(scratch: Path, bucket: int, part: int) -> Path:
    return scratch / f"bucket-{bucket:05d}-{part:05d}.arrow"


# --- rows --------------------------------------------------------------------------------------------------


def _is(batch: pa.RecordBatch, operation: Operation) -> Any:
    return pc.equal(batch.column(change.OP), operation.value)


def _after(batch: pa.RecordBatch, seq: int | None) -> pa.RecordBatch:
    return batch if seq is None else batch.filter(pc.greater(batch.column(change.SEQ), seq))


def _own(schema: TableSchema, batch: pa.RecordBatch) -> list[Any]:
    return [batch.column(change.stored_name(column.name)) for column in schema.columns]


def _keys(schema: TableSchema, batch: pa.RecordBatch) -> list[Any]:
    own = _own(schema, batch)
    return [own[i] for i in key_ordinals(schema)]


def _moves(schema: TableSchema, batch: pa.RecordBatch) -> Iterator[Prints]:
    """The old and the new keys of rows that moved without all their values."""
    partial = pc.and_(
        batch.column(change.MOVED_FROM).is_valid(),
        pc.greater(pc.fill_null(pc.list_value_length(batch.column(change.UNCHANGED)), 0), 0),
    )
    rows = batch.filter(partial)
    if rows.num_rows:
        old = rows.column(change.MOVED_FROM)
        yield key_prints(_keys(schema, rows), _SEED)
        yield key_prints([pc.struct_field(old, [i]) for i in range(old.type.num_fields)], _SEED)


def _dealt(
    schema: TableSchema, batch: pa.RecordBatch, moved: PrintSet, buckets: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    if not batch.num_rows:
        return
    if schema.key:
        batch = _last_of_each(schema, batch)
        prints = key_prints(_keys(schema, batch), _SEED)
        number = np.where(moved.find(prints) >= 0, 0, prints[:, 0] % buckets) if len(moved) else prints[:, 0] % buckets
    else:
        batch = _images(schema, batch)
        number = image_prints(_own(schema, batch), _SEED)[:, 0] % buckets
    order = np.argsort(number, kind="stable")
    batch, sorted_numbers = batch.take(pa.array(order)), number[order]
    starts = np.flatnonzero(np.append(True, sorted_numbers[1:] != sorted_numbers[:-1]))
    for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
        yield int(sorted_numbers[start]), batch.slice(start, end - start)


def _last_of_each(schema: TableSchema, batch: pa.RecordBatch) -> pa.RecordBatch:
    """The last change of each key; all changes, where one needs another or must be refused for itself."""
    if any(batch.column(name).null_count < batch.num_rows for name in (change.UNCHANGED, change.UNFIT)):
        return batch
    numbered = key_numbers(_keys(schema, batch))
    last = np.full(numbered.limit, -1, np.int64)
    last[numbered.numbers] = np.arange(batch.num_rows)
    return batch.take(pa.array(np.sort(last[last >= 0])))


def _images(schema: TableSchema, batch: pa.RecordBatch) -> pa.RecordBatch:
    """The changes of a table without a key, each update as the row that went and the row that came."""
    updates = _is(batch, Operation.UPDATE)
    changed = batch.filter(updates)
    if not changed.num_rows:
        return batch
    before = changed.column(change.BEFORE)
    if before.null_count or batch.column(change.UNCHANGED).null_count < batch.num_rows:
        fold(schema, pa.Table.from_batches([batch]))  # says what is wrong
    went = _with(changed, change.OP, pa.array([Operation.DELETE.value] * changed.num_rows))
    for i, column in enumerate(schema.columns):
        went = _with(went, change.stored_name(column.name), pc.struct_field(before, [i]))
    went = _with(went, change.UNFIT, pa.nulls(changed.num_rows, change.UNFIT_TYPE))
    came = _with(changed, change.OP, pa.array([Operation.INSERT.value] * changed.num_rows))
    rest = batch.filter(pc.invert(updates))
    return pa.concat_batches([rest, went, came])


def _with(batch: pa.RecordBatch, name: str, values: Any) -> pa.RecordBatch:
    place = batch.schema.get_field_index(name)
    return batch.set_column(place, batch.schema.field(place), values)


def _truncate(schema: TableSchema) -> pa.Table:
    """One TRUNCATE: what follows starts from nothing."""
    row = {
        change.OP: Operation.TRUNCATE.value, change.SEQ: 0, change.POSITION: "", change.TX: 0, change.TX_INDEX: 0,
        change.COMMITTED_AT: datetime(1970, 1, 1, tzinfo=UTC),
    }  # fmt: skip
    return pa.Table.from_pylist([row], schema=schema.change_schema())
