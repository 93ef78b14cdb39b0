"""A stretch of the log folded by tasks into files, which Spark's Delta connector then merges.

No row passes the driver: tasks read the log and write files, and the driver hears of counts. What a task holds at once
is bounded: up to `ROWS_AT_ONCE_MAX` changes are folded by one task as they are; more are first dealt out to buckets by
key, each of about that many, so that all changes of a key meet in one. Changes that take values from the row of another
key need that row's changes beside them, so the keys of such moves share a bucket. Of a key that is changed again and
again only the last change of each piece is dealt out, unless values are absent; no piece ends between the two halves of
a move.

What a table's form asks for decides what is dealt out. Where each change is a row, nothing is: every part of the
stretch is folded by itself. Where what the source no longer has is kept, every change of a key counts, a TRUNCATE is
dealt out to every bucket at its place, and with it what a bucket cannot know: the latest time of commit so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tailrace.changelog.read.index import Slice
from tailrace.deadletters.keyed import has_unfit, unfit_cause
from tailrace.deadletters.keyless import split_updates
from tailrace.errors import TailraceError
from tailrace.model import change
from tailrace.model.change import Operation
from tailrace.model.schema import TableSchema
from tailrace.tables.fold.by_mode import fold_by_mode
from tailrace.tables.fold.fold import UPSERT, FoldedChanges, TruncateEffect, folded_schema, key_ordinals
from tailrace.tables.fold.row_hashes import RowHashes, RowHashSet, hash_images, hash_keys
from tailrace.tables.fold.row_ids import key_numbers
from tailrace.tables.fold.row_versions import LATEST, latest_times
from tailrace.tables.limits import refuse_far_dates
from tailrace.tables.partitions import partition_texts, refuse_unusable_values
from tailrace.tables.size_estimate import SizeEstimate, estimate_bytes
from tailrace.tables.spec import TableMode
from tailrace.tasks.apply import read_change_batches
from tailrace.tasks.fold_rejects import TaskRejects, split_rejects_to_file
from tailrace.tasks.work import ApplyWork, as_tailrace_error

ROWS_AT_ONCE_MAX = 1 << 18
"""Changes that one task folds."""
BUCKETS_MAX = 512
"""Files that one task writes at a time; past 134 million changes of one stretch buckets grow."""
BATCH_ROWS_MAX = 1 << 12
"""Changes that are dealt out together."""
GROUP_ROWS_MAX = 1 << 17
PARTITIONS_MAX = 100
"""Of those that changes are about, by name."""
_SEED = 0

RunFold = Callable[[Callable[[Any], Any], Sequence[Any]], Sequence[Any]]
"""Runs a task for each piece of work, wherever; the results in the order of the work."""


@dataclass(frozen=True, kw_only=True)
class FoldedFiles:
    """Folded rows, as `folded_schema` has them, in Parquet files; and what there is to know of them."""

    files: tuple[Path, ...] = ()
    truncated: bool = False
    changes: int = 0
    bytes: int = 0
    """Of the changes, as a table's files would hold them, about."""
    upserts: int = 0
    deletes: int = 0
    """Rows that say what becomes of others: that they go, end, or are marked."""
    unsent: frozenset[int] = frozenset()
    """The columns that some row takes from the table."""
    ended: TruncateEffect | None = None
    clock: int | None = None
    rejects: tuple[TaskRejects, ...] = ()
    """What was left out, for the table cannot take it."""
    partitions: Mapping[str, frozenset[str] | None] = field(default_factory=dict)
    """Of columns that are part of the key and that the table is partitioned by, the values that there are, as text;
    None if they are many."""

    @property
    def is_empty(self) -> bool:
        return not self.truncated and self.ended is None and not self.upserts and not self.deletes

    @property
    def only_adds(self) -> bool:
        """Whether nothing is said of rows that the table may have, but of those that come."""
        return self.ended is None and not self.deletes and not self.unsent


def folded_file_schema(schema: TableSchema) -> pa.Schema:
    """Folded rows as the files hold them: without a key there is no base, and Parquet has no struct without fields."""
    fields = folded_schema(schema)
    return fields if schema.key else fields.remove(fields.get_field_index("base"))


def write_folded(path: Path, schema: TableSchema, folded: FoldedChanges, partition_by: Sequence[str]) -> FoldedFiles:
    """One file of folded rows, for a table that is partitioned so; none if there are no rows."""
    rows = folded.rows
    if not rows.num_rows:
        return FoldedFiles(truncated=folded.truncated, ended=folded.truncate_effect, clock=folded.latest_time)
    upserts = pc.equal(rows.column("op"), UPSERT)
    _refuse_unstorable(schema, rows.filter(upserts), partition_by)
    pq.write_table(
        rows.select(folded_file_schema(schema).names), path, row_group_size=GROUP_ROWS_MAX, store_schema=False
    )
    came = int(pc.sum(upserts, min_count=0).as_py())
    absent = pc.unique(rows.column("absent").combine_chunks().flatten()).to_pylist()
    return FoldedFiles(
        files=(path,),
        truncated=folded.truncated,
        upserts=came,
        deletes=rows.num_rows - came,
        unsent=frozenset(absent),
        ended=folded.truncate_effect,
        clock=folded.latest_time,
        partitions={
            name: partition_texts(rows.column(f"c{i}"), PARTITIONS_MAX)
            for i, name in enumerate(schema.names)
            if name in partition_by and name in schema.key
        },
    )


def _refuse_unstorable(schema: TableSchema, rows: pa.Table, partition_by: Sequence[str]) -> None:
    """Refuse rows that come with a value that the table cannot hold."""
    own = rows.select(range(len(schema.columns))).rename_columns(schema.names)
    refuse_far_dates(schema, own.columns)
    refuse_unusable_values(schema, partition_by, own)


def fold_range(
    work: ApplyWork, scratch: Path, run: RunFold, rows_max: int = ROWS_AT_ONCE_MAX, *, sifts: bool = False
) -> FoldedFiles:
    """Fold the slices of the work into files below `scratch`, which is there and empty; with `sifts`, what the table
    cannot take is left out, and put beside (`FoldedFiles.aside`)."""
    rows, form = sum(item.rows for item in work.slices), work.location.spec
    if rows <= rows_max:
        whole = _FoldPart(work=work, number=0, slices=work.slices, after_seq=work.expected.seq, scratch=scratch)
        return _joined(_results(run, _fold_whole, [replace(whole, splits_rejects=sifts)]))
    parts = [replace(part, splits_rejects=sifts) for part in _parts(work, scratch, rows_max)]
    if form.mode is TableMode.APPEND:
        return _joined(_results(run, _fold_each, parts))
    seen = _results(run, _summarise_part, parts)
    buckets = min(math.ceil(rows / rows_max), BUCKETS_MAX)
    last = None
    if not form.keeps_past:
        last = max((item.truncated_at for item in seen if item.truncated_at is not None), default=None)
    times = np.maximum.accumulate([0, *(item.latest_commit_time for item in seen)]).tolist()
    dealt = [
        replace(part, buckets=buckets, truncated_at=last, latest_commit_time=time)
        for part, time in zip(parts, times, strict=False)
    ]
    _results(run, _distribute, dealt)
    gathered = [
        _FoldBucket(work=work, number=number, scratch=scratch, truncated=last is not None, splits_rejects=sifts)
        for number in range(buckets)
    ]
    folded = _joined(_results(run, _fold_bucket, gathered))
    return replace(
        folded,
        truncated=last is not None,
        changes=sum(item.rows for item in seen),
        bytes=sum(item.bytes for item in seen),
    )


@dataclass(frozen=True, kw_only=True)
class _FoldPart:
    """Slices that one task reads, one after the other."""

    work: ApplyWork
    number: int
    slices: tuple[Slice, ...]
    after_seq: int
    scratch: Path
    buckets: int = 0
    truncated_at: int | None = None
    """The number of the last TRUNCATE of the stretch, where what came before it is of no account."""
    latest_commit_time: int = 0
    """The latest time of commit before the part, µs since 1970."""
    splits_rejects: bool = False

    def batches(self) -> Iterator[pa.RecordBatch]:
        """In pieces small enough to be copied, as `_pieces` cuts them."""
        for batch in read_change_batches(replace(self.work, slices=self.slices), self.after_seq):
            self._refuse_unsplit(batch)
            yield from _pieces(batch, BATCH_ROWS_MAX)

    def _refuse_unsplit(self, batch: pa.RecordBatch) -> None:
        """A fold takes no notice of a value that a later change replaces. Where letters are kept that must not decide
        what becomes one: with another cut there would be two batches."""
        if self.work.dead_letters_enabled and not self.splits_rejects and has_unfit(batch):
            row = int(np.argmax(batch.column(change.UNFIT).is_valid().to_numpy(zero_copy_only=False)))
            by = self.work.location.spec.partitions_of(self.work.schema)
            raise unfit_cause(self.work.schema, pa.Table.from_batches([batch]), row, by)


@dataclass(frozen=True, kw_only=True)
class _PartSummary:
    """What a part holds."""

    rows: int
    bytes: int
    truncated_at: int | None
    latest_commit_time: int


@dataclass(frozen=True, kw_only=True)
class _FoldBucket:
    work: ApplyWork
    number: int
    scratch: Path
    truncated: bool
    splits_rejects: bool


def _results(run: RunFold, task: Callable[[Any], Any], works: Sequence[Any]) -> Sequence[Any]:
    found = run(task, works)
    for item in found:
        if isinstance(item, TailraceError):
            raise item
    return found


def _joined(pieces: Iterable[FoldedFiles]) -> FoldedFiles:
    found = list(pieces)
    return FoldedFiles(
        files=tuple(file for item in found for file in item.files),
        truncated=any(item.truncated for item in found),
        changes=sum(item.changes for item in found),
        bytes=sum(item.bytes for item in found),
        upserts=sum(item.upserts for item in found),
        deletes=sum(item.deletes for item in found),
        unsent=frozenset().union(*(item.unsent for item in found)),
        # A TRUNCATE is in every bucket, and says the same in each.
        ended=next((item.ended for item in found if item.ended is not None), None),
        clock=max((item.clock for item in found if item.clock is not None), default=None),
        rejects=tuple(some for item in found for some in item.rejects),
        partitions={
            name: _all([item.partitions[name] for item in found if name in item.partitions])
            for item in found
            for name in item.partitions
        },
    )


def _all(partitions: Sequence[frozenset[str] | None]) -> frozenset[str] | None:
    known = [some for some in partitions if some is not None]
    found = frozenset[str]().union(*known)
    return found if len(known) == len(partitions) and len(found) <= PARTITIONS_MAX else None


def _parts(work: ApplyWork, scratch: Path, rows_max: int) -> Iterator[_FoldPart]:
    """The slices in stretches of about so many rows; one slice is never divided."""
    pending: list[Slice] = []
    number, seq = 0, work.expected.seq
    for item in work.slices:
        pending.append(item)
        if sum(each.rows for each in pending) >= rows_max:
            yield _FoldPart(work=work, number=number, slices=tuple(pending), after_seq=seq, scratch=scratch)
            number, seq, pending = number + 1, item.last_seq, []
    if pending:
        yield _FoldPart(work=work, number=number, slices=tuple(pending), after_seq=seq, scratch=scratch)


# --- tasks -------------------------------------------------------------------------------------------------


def _fold_whole(part: _FoldPart) -> FoldedFiles | TailraceError:
    try:
        empty = part.work.schema.change_schema().empty_table()
        changes = pa.concat_tables([empty, *(pa.Table.from_batches([batch]) for batch in part.batches())])
        done = _fold_changes(part.work, changes, part.scratch, "folded", part.splits_rejects)
    except Exception as error:  # the task's boundary: what went wrong is an answer, too
        return as_tailrace_error(error)
    return replace(done, changes=changes.num_rows, bytes=estimate_bytes(part.work.schema, changes))


def _fold_changes(work: ApplyWork, changes: pa.Table, scratch: Path, name: str, sifts: bool) -> FoldedFiles:
    """Changes as a file of what the table must do about them, and one of those that it cannot take."""
    aside: tuple[TaskRejects, ...] = ()
    if sifts:
        changes, some = split_rejects_to_file(work, changes, scratch / f"{name}-aside.arrow")
        aside = () if some is None else (some,)
    form = work.location.spec
    folded = fold_by_mode(form, work.schema, changes, rereads=work.may_refetch)
    done = write_folded(scratch / f"{name}.parquet", form.stored_schema(work.schema), folded, form.partition_by)
    return replace(done, rejects=aside)


def _fold_each(part: _FoldPart) -> FoldedFiles | TailraceError:
    """Every change as a row, a few at a time."""
    form, shape = part.work.location.spec, part.work.schema
    stored, path = form.stored_schema(shape), part.scratch / f"folded-{part.number:05d}.parquet"
    came, rows, weight, aside = 0, 0, SizeEstimate(shape), list[TaskRejects]()
    try:
        with pq.ParquetWriter(path, folded_file_schema(stored), store_schema=False) as writer:
            for number, batch in enumerate(part.batches()):
                rows += batch.num_rows
                weight.add(batch)
                changes = pa.Table.from_batches([batch])
                if part.splits_rejects:
                    changes, some = split_rejects_to_file(
                        part.work, changes, path.with_suffix(f".{number:05d}-aside.arrow")
                    )
                    aside += [] if some is None else [some]
                folded = fold_by_mode(form, shape, changes).rows
                came += folded.num_rows
                _refuse_unstorable(stored, folded, form.partition_by)
                writer.write_table(folded.select(folded_file_schema(stored).names))
    except Exception as error:  # the task's boundary
        return as_tailrace_error(error)
    return FoldedFiles(files=(path,), changes=rows, bytes=weight.bytes, upserts=came, rejects=tuple(aside))


def _summarise_part(part: _FoldPart) -> _PartSummary | TailraceError:
    """Count, find the last TRUNCATE, and note the keys of rows that moved and left values behind."""
    rows, latest, weight = 0, 0, SizeEstimate(part.work.schema)
    truncated_at, moves = None, list[RowHashes]()
    try:
        for batch in part.batches():
            rows += batch.num_rows
            weight.add(batch)
            truncates = batch.column(change.SEQ).filter(_is(batch, Operation.TRUNCATE))
            truncated_at = truncates[-1].as_py() if len(truncates) else truncated_at
            latest = max(latest, int(latest_times(pa.Table.from_batches([batch]))[-1]))
            if part.work.schema.key:
                moves += _moves(part.work.schema, batch)
        np.save(part.scratch / f"moves-{part.number:05d}.npy", np.concatenate([np.empty((0, 2), np.uint64), *moves]))
    except Exception as error:  # the task's boundary
        return as_tailrace_error(error)
    return _PartSummary(rows=rows, bytes=weight.bytes, truncated_at=truncated_at, latest_commit_time=latest)


def _distribute(part: _FoldPart) -> int | TailraceError:
    """Write each change into the file of its bucket."""
    schema, form, latest = part.work.schema, part.work.location.spec, part.latest_commit_time
    all_count = form.keeps_past or part.splits_rejects
    try:
        moved = RowHashSet(np.concatenate([np.load(file) for file in sorted(part.scratch.glob("moves-*.npy"))]))
        with ExitStack() as stack:
            writers: dict[int, Any] = {}
            for batch in part.batches():
                if form.mode is TableMode.HISTORY:
                    times = np.maximum(latest_times(pa.Table.from_batches([batch])), latest)
                    batch, latest = batch.append_column(LATEST, pa.array(times)), int(times[-1])
                batch = _after(batch, part.truncated_at)
                for bucket, rows in _changes_by_bucket(schema, batch, moved, part.buckets, all_count):
                    if bucket not in writers:
                        file = stack.enter_context(_file(part.scratch, bucket, part.number).open("xb"))
                        writers[bucket] = stack.enter_context(pa.ipc.new_stream(file, rows.schema))
                    writers[bucket].write_batch(rows)
    except Exception as error:  # the task's boundary
        return as_tailrace_error(error)
    return len(writers)


def _fold_bucket(bucket: _FoldBucket) -> FoldedFiles | TailraceError:
    schema = bucket.work.schema
    try:
        fields = schema.change_schema()
        if bucket.work.location.spec.mode is TableMode.HISTORY:
            fields = fields.append(pa.field(LATEST, pa.int64()))
        pieces = [fields.empty_table()]
        if bucket.truncated:
            pieces.append(_truncate(schema))
        for file in sorted(bucket.scratch.glob(f"bucket-{bucket.number:05d}-*.arrow")):
            with file.open("rb") as source, pa.ipc.open_stream(source) as reader:
                pieces.append(reader.read_all())
        changes, name = pa.concat_tables(pieces), f"folded-{bucket.number:05d}"
        return _fold_changes(bucket.work, changes, bucket.scratch, name, bucket.splits_rejects)
    except Exception as error:  # the task's boundary
        return as_tailrace_error(error)


def _file(scratch: Path, bucket: int, part: int) -> Path:
    return scratch / f"bucket-{bucket:05d}-{part:05d}.arrow"


# --- rows --------------------------------------------------------------------------------------------------


def _pieces(batch: pa.RecordBatch, rows_max: int) -> Iterator[pa.RecordBatch]:
    """So many changes at a time, and one more where a move would be cut: the delete of the old key lends the values of
    the change before it to the row that arrives, and by itself would pass for the last that counts of its key."""
    moved, begin = batch.column(change.MOVED_FROM), 0
    while begin < batch.num_rows:
        end = begin + rows_max
        end += end < batch.num_rows and moved[end].is_valid
        yield batch.slice(begin, end - begin)
        begin = end


def _is(batch: pa.RecordBatch, operation: Operation) -> Any:
    return pc.equal(batch.column(change.OP), operation.value)


def _after(batch: pa.RecordBatch, seq: int | None) -> pa.RecordBatch:
    return batch if seq is None else batch.filter(pc.greater(batch.column(change.SEQ), seq))


def _own(schema: TableSchema, batch: pa.RecordBatch) -> list[Any]:
    return [batch.column(change.stored_name(column.name)) for column in schema.columns]


def _keys(schema: TableSchema, batch: pa.RecordBatch) -> list[Any]:
    own = _own(schema, batch)
    return [own[i] for i in key_ordinals(schema)]


def _moves(schema: TableSchema, batch: pa.RecordBatch) -> Iterator[RowHashes]:
    """The old and the new keys of rows that moved without all their values."""
    partial = pc.and_(
        batch.column(change.MOVED_FROM).is_valid(),
        pc.greater(pc.fill_null(pc.list_value_length(batch.column(change.UNCHANGED)), 0), 0),
    )
    rows = batch.filter(partial)
    if rows.num_rows:
        old = rows.column(change.MOVED_FROM)
        yield hash_keys(_keys(schema, rows), _SEED)
        yield hash_keys([pc.struct_field(old, [i]) for i in range(old.type.num_fields)], _SEED)


def _changes_by_bucket(
    schema: TableSchema, batch: pa.RecordBatch, moved: RowHashSet, buckets: int, all_count: bool
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The changes by bucket, in order; a TRUNCATE is in every one."""
    if not all_count:  # what came before a TRUNCATE is not among them, nor is that itself
        yield from _keyed_changes_by_bucket(
            schema, batch if not schema.key else _last_of_each(schema, batch), moved, buckets
        )
        return
    begin = 0
    for at in np.flatnonzero(_is(batch, Operation.TRUNCATE).to_numpy(zero_copy_only=False)).tolist():
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
    """The last change of each key; all changes, where one needs another or must be refused for itself."""
    if any(batch.column(name).null_count < batch.num_rows for name in (change.UNCHANGED, change.UNFIT)):
        return batch
    numbered = key_numbers(_keys(schema, batch))
    last = np.full(numbered.limit, -1, np.int64)
    last[numbered.numbers] = np.arange(batch.num_rows)
    return batch.take(pa.array(np.sort(last[last >= 0])))


def _truncate(schema: TableSchema) -> pa.Table:
    """One TRUNCATE: what follows starts from nothing."""
    row = {
        change.OP: Operation.TRUNCATE.value,
        change.SEQ: 0,
        change.POSITION: "",
        change.TX: 0,
        change.TX_INDEX: 0,
        change.COMMITTED_AT: datetime(1970, 1, 1, tzinfo=UTC),
    }
    return pa.Table.from_pylist([row], schema=schema.change_schema())
