"""Fold an apply range in tasks into files, which Spark's connectors then merge.

No row passes the driver: tasks read the log and write files, and the driver sees only counts. The memory of a task is
bounded. Up to `ROWS_AT_ONCE_MAX` changes are folded by one task. More changes are first distributed to buckets by key,
each of about that size, so that all changes of a key meet in one bucket.

A key move takes values from the row of the old key, so it needs that row's changes too: keys of such moves share one
bucket. If a key changes often, only its last change per piece of a batch is distributed, unless values are unsent. No
piece ends between the two halves of a key move.

The table's mode decides what is distributed. In `append` mode nothing is: every part of the range is folded on its own.
Where the table keeps deleted rows or versions, every change of a key counts. So it does where
rejects are split off. A TRUNCATE then goes to every bucket, at its position in the order. In `history` mode each change
also carries what a bucket cannot know: the latest commit time so far.
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
from tailrace.errors import TailraceError
from tailrace.model import change
from tailrace.model.change import Operation
from tailrace.model.schema import TableSchema
from tailrace.tables.fold.by_mode import fold_by_mode
from tailrace.tables.fold.folded_changes import UPSERT, FoldedChanges, TruncateEffect, folded_schema
from tailrace.tables.fold.row_hashes import RowHashes, RowHashSet
from tailrace.tables.fold.row_versions import LATEST, latest_times
from tailrace.tables.limits import refuse_far_dates
from tailrace.tables.partitions import partition_texts, refuse_unusable_values
from tailrace.tables.size_estimate import SizeEstimate, estimate_bytes
from tailrace.tables.spec import TableMode
from tailrace.tasks.apply import read_change_batches
from tailrace.tasks.fold_buckets import changes_by_bucket, hashes_of_partial_moves, is_operation
from tailrace.tasks.fold_rejects import TaskRejects, split_rejects_to_file
from tailrace.tasks.work import ApplyWork, as_tailrace_error

ROWS_AT_ONCE_MAX = 1 << 18
"""Changes that one task folds at once."""
BUCKETS_MAX = 512
"""Files that one task writes at a time; past 134 million changes in one range, buckets grow."""
BATCH_ROWS_MAX = 1 << 12
"""Changes that are distributed together."""
GROUP_ROWS_MAX = 1 << 17
PARTITIONS_MAX = 100
"""Limit of partition values that are listed by name."""

RunFold = Callable[[Callable[[Any], Any], Sequence[Any]], Sequence[Any]]
"""Runs one task per piece of work, here or on Spark; returns the results in the order of the work."""


@dataclass(frozen=True, kw_only=True)
class FoldedFiles:
    """Parquet files of folded rows, in the schema of `folded_schema`, and facts about them."""

    files: tuple[Path, ...] = ()
    truncated: bool = False
    changes: int = 0
    bytes: int = 0
    """Estimated size of the changes in the table's files."""
    upserts: int = 0
    deletes: int = 0
    """Folded rows that delete, end or mark an existing row."""
    unsent: frozenset[int] = frozenset()
    """Columns with unsent values, which rows take from the table."""
    ended: TruncateEffect | None = None
    clock: int | None = None
    rejects: tuple[TaskRejects, ...] = ()
    """Changes left out because the table cannot take them."""
    partitions: Mapping[str, frozenset[str] | None] = field(default_factory=dict)
    """Values, as text, of each partition column that is part of the key; None if there are many."""

    @property
    def is_empty(self) -> bool:
        return not self.truncated and self.ended is None and not self.upserts and not self.deletes

    @property
    def only_adds(self) -> bool:
        """True if the files only add rows, and change no existing row."""
        return self.ended is None and not self.deletes and not self.unsent


def folded_file_schema(schema: TableSchema) -> pa.Schema:
    """Return the schema of folded rows in the files.

    A table without a key has no `base`: Parquet has no struct without fields.
    """
    fields = folded_schema(schema)
    return fields if schema.key else fields.remove(fields.get_field_index("base"))


def write_folded(path: Path, schema: TableSchema, folded: FoldedChanges, partition_by: Sequence[str]) -> FoldedFiles:
    """Write folded rows to one file; write none if there are no rows."""
    rows = folded.rows
    if not rows.num_rows:
        return FoldedFiles(truncated=folded.truncated, ended=folded.truncate_effect, clock=folded.latest_time)
    upserts = pc.equal(rows.column("op"), UPSERT)
    _refuse_unstorable(schema, rows.filter(upserts), partition_by)
    pq.write_table(
        rows.select(folded_file_schema(schema).names), path, row_group_size=GROUP_ROWS_MAX, store_schema=False
    )
    upsert_count = int(pc.sum(upserts, min_count=0).as_py())
    unsent = pc.unique(rows.column("absent").combine_chunks().flatten()).to_pylist()
    return FoldedFiles(
        files=(path,),
        truncated=folded.truncated,
        upserts=upsert_count,
        deletes=rows.num_rows - upsert_count,
        unsent=frozenset(unsent),
        ended=folded.truncate_effect,
        clock=folded.latest_time,
        partitions={
            name: partition_texts(rows.column(f"c{i}"), PARTITIONS_MAX)
            for i, name in enumerate(schema.names)
            if name in partition_by and name in schema.key
        },
    )


def _refuse_unstorable(schema: TableSchema, rows: pa.Table, partition_by: Sequence[str]) -> None:
    """Refuse rows with a value that the table cannot hold."""
    values = rows.select(range(len(schema.columns))).rename_columns(schema.names)
    refuse_far_dates(schema, values.columns)
    refuse_unusable_values(schema, partition_by, values)


def fold_range(
    work: ApplyWork, scratch: Path, run: RunFold, rows_max: int = ROWS_AT_ONCE_MAX, *, splits_rejects: bool = False
) -> FoldedFiles:
    """Fold the slices of the work into files below `scratch`, an existing, empty folder.

    With `splits_rejects`, changes that the table cannot take go to other files (`FoldedFiles.rejects`).
    """
    rows, spec = sum(item.rows for item in work.slices), work.location.spec
    if rows <= rows_max:
        whole = _FoldPart(work=work, number=0, slices=work.slices, after_seq=work.expected.seq, scratch=scratch)
        return _joined(_results(run, _fold_whole, [replace(whole, splits_rejects=splits_rejects)]))
    parts = [replace(part, splits_rejects=splits_rejects) for part in _parts(work, scratch, rows_max)]
    if spec.mode is TableMode.APPEND:
        return _joined(_results(run, _fold_each, parts))
    summaries = _results(run, _summarise_part, parts)
    buckets = min(math.ceil(rows / rows_max), BUCKETS_MAX)
    truncated_at = None
    if not spec.keeps_past:
        truncated_at = max((item.truncated_at for item in summaries if item.truncated_at is not None), default=None)
    times = np.maximum.accumulate([0, *(item.latest_commit_time for item in summaries)]).tolist()
    distributed = [
        replace(part, buckets=buckets, truncated_at=truncated_at, latest_commit_time=time)
        for part, time in zip(parts, times, strict=False)
    ]
    _results(run, _distribute, distributed)
    bucket_works = [
        _FoldBucket(
            work=work, number=number, scratch=scratch, truncated=truncated_at is not None, splits_rejects=splits_rejects
        )
        for number in range(buckets)
    ]
    folded = _joined(_results(run, _fold_bucket, bucket_works))
    return replace(
        folded,
        truncated=truncated_at is not None,
        changes=sum(item.rows for item in summaries),
        bytes=sum(item.bytes for item in summaries),
    )


@dataclass(frozen=True, kw_only=True)
class _FoldPart:
    """Slices that one task reads in order."""

    work: ApplyWork
    number: int
    slices: tuple[Slice, ...]
    after_seq: int
    scratch: Path
    buckets: int = 0
    truncated_at: int | None = None
    """`_seq` of the last TRUNCATE in the range, if changes before it have no effect."""
    latest_commit_time: int = 0
    """Latest commit time before this part, in µs since 1970."""
    splits_rejects: bool = False

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the changes in pieces small enough to be copied (see `_pieces`)."""
        for batch in read_change_batches(replace(self.work, slices=self.slices), self.after_seq):
            self._refuse_unsplit(batch)
            yield from _pieces(batch, BATCH_ROWS_MAX)

    def _refuse_unsplit(self, batch: pa.RecordBatch) -> None:
        """Refuse a batch with an unfit value unless rejects are split off.

        A fold ignores a value that a later change replaces. With dead letters enabled that must not decide which change
        becomes one: the result would depend on how the log was cut into batches.
        """
        if self.work.dead_letters_enabled and not self.splits_rejects and has_unfit(batch):
            row = int(np.argmax(batch.column(change.UNFIT).is_valid().to_numpy(zero_copy_only=False)))
            partition_by = self.work.location.spec.partitions_of(self.work.schema)
            raise unfit_cause(self.work.schema, pa.Table.from_batches([batch]), row, partition_by)


@dataclass(frozen=True, kw_only=True)
class _PartSummary:
    """Counts of one part, its last TRUNCATE and its latest commit time."""

    rows: int
    bytes: int
    truncated_at: int | None
    latest_commit_time: int


@dataclass(frozen=True, kw_only=True)
class _FoldBucket:
    """The changes of one bucket, to be folded by one task."""

    work: ApplyWork
    number: int
    scratch: Path
    truncated: bool
    splits_rejects: bool


def _results(run: RunFold, task: Callable[[Any], Any], works: Sequence[Any]) -> Sequence[Any]:
    results = run(task, works)
    for item in results:
        if isinstance(item, TailraceError):
            raise item
    return results


def _joined(parts: Iterable[FoldedFiles]) -> FoldedFiles:
    folded = list(parts)
    return FoldedFiles(
        files=tuple(file for item in folded for file in item.files),
        truncated=any(item.truncated for item in folded),
        changes=sum(item.changes for item in folded),
        bytes=sum(item.bytes for item in folded),
        upserts=sum(item.upserts for item in folded),
        deletes=sum(item.deletes for item in folded),
        unsent=frozenset().union(*(item.unsent for item in folded)),
        # A TRUNCATE is in every bucket, with the same effect.
        ended=next((item.ended for item in folded if item.ended is not None), None),
        clock=max((item.clock for item in folded if item.clock is not None), default=None),
        rejects=tuple(some for item in folded for some in item.rejects),
        partitions={
            name: _all([item.partitions[name] for item in folded if name in item.partitions])
            for item in folded
            for name in item.partitions
        },
    )


def _all(partitions: Sequence[frozenset[str] | None]) -> frozenset[str] | None:
    known = [part for part in partitions if part is not None]
    values = frozenset[str]().union(*known)
    return values if len(known) == len(partitions) and len(values) <= PARTITIONS_MAX else None


def _parts(work: ApplyWork, scratch: Path, rows_max: int) -> Iterator[_FoldPart]:
    """Yield the slices in parts of about `rows_max` rows; a slice is never divided."""
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
        folded_files = _fold_changes(part.work, changes, part.scratch, "folded", part.splits_rejects)
    except Exception as error:  # the task's boundary: an error is a result too
        return as_tailrace_error(error)
    return replace(folded_files, changes=changes.num_rows, bytes=estimate_bytes(part.work.schema, changes))


def _fold_changes(work: ApplyWork, changes: pa.Table, scratch: Path, name: str, splits_rejects: bool) -> FoldedFiles:
    """Write one file of folded changes, and one of changes that the table cannot take."""
    rejects: tuple[TaskRejects, ...] = ()
    if splits_rejects:
        changes, task_rejects = split_rejects_to_file(work, changes, scratch / f"{name}-rejects.arrow")
        rejects = () if task_rejects is None else (task_rejects,)
    spec = work.location.spec
    folded = fold_by_mode(spec, work.schema, changes, can_refetch=work.may_refetch)
    folded_files = write_folded(scratch / f"{name}.parquet", spec.stored_schema(work.schema), folded, spec.partition_by)
    return replace(folded_files, rejects=rejects)


def _fold_each(part: _FoldPart) -> FoldedFiles | TailraceError:
    """Write every change as a row, one piece at a time."""
    spec, schema = part.work.location.spec, part.work.schema
    stored, path = spec.stored_schema(schema), part.scratch / f"folded-{part.number:05d}.parquet"
    upserts, rows, size, rejects = 0, 0, SizeEstimate(schema), list[TaskRejects]()
    try:
        with pq.ParquetWriter(path, folded_file_schema(stored), store_schema=False) as writer:
            for number, batch in enumerate(part.batches()):
                rows += batch.num_rows
                size.add(batch)
                changes = pa.Table.from_batches([batch])
                if part.splits_rejects:
                    changes, task_rejects = split_rejects_to_file(
                        part.work, changes, path.with_suffix(f".{number:05d}-rejects.arrow")
                    )
                    rejects += [] if task_rejects is None else [task_rejects]
                folded = fold_by_mode(spec, schema, changes).rows
                upserts += folded.num_rows
                _refuse_unstorable(stored, folded, spec.partition_by)
                writer.write_table(folded.select(folded_file_schema(stored).names))
    except Exception as error:  # the task's boundary
        return as_tailrace_error(error)
    return FoldedFiles(files=(path,), changes=rows, bytes=size.bytes, upserts=upserts, rejects=tuple(rejects))


def _summarise_part(part: _FoldPart) -> _PartSummary | TailraceError:
    """Count the changes, find the last TRUNCATE, and save hashes of incomplete key moves."""
    rows, latest, size = 0, 0, SizeEstimate(part.work.schema)
    truncated_at, moves = None, list[RowHashes]()
    try:
        for batch in part.batches():
            rows += batch.num_rows
            size.add(batch)
            truncates = batch.column(change.SEQ).filter(is_operation(batch, Operation.TRUNCATE))
            truncated_at = truncates[-1].as_py() if len(truncates) else truncated_at
            latest = max(latest, int(latest_times(pa.Table.from_batches([batch]))[-1]))
            if part.work.schema.key:
                moves += hashes_of_partial_moves(part.work.schema, batch)
        np.save(part.scratch / f"moves-{part.number:05d}.npy", np.concatenate([np.empty((0, 2), np.uint64), *moves]))
    except Exception as error:  # the task's boundary
        return as_tailrace_error(error)
    return _PartSummary(rows=rows, bytes=size.bytes, truncated_at=truncated_at, latest_commit_time=latest)


def _distribute(part: _FoldPart) -> int | TailraceError:
    """Write each change into the file of its bucket."""
    schema, spec, latest = part.work.schema, part.work.location.spec, part.latest_commit_time
    all_count = spec.keeps_past or part.splits_rejects
    try:
        moved = RowHashSet(np.concatenate([np.load(file) for file in sorted(part.scratch.glob("moves-*.npy"))]))
        with ExitStack() as stack:
            writers: dict[int, Any] = {}
            for batch in part.batches():
                if spec.mode is TableMode.HISTORY:
                    times = np.maximum(latest_times(pa.Table.from_batches([batch])), latest)
                    batch, latest = batch.append_column(LATEST, pa.array(times)), int(times[-1])
                batch = _after(batch, part.truncated_at)
                for bucket, rows in changes_by_bucket(schema, batch, moved, part.buckets, all_count):
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
    """Yield pieces of `rows_max` changes, or one more to keep a key move together.

    The delete of the old key carries the values of an earlier change to the row of the new key. Alone in a piece, it
    would count as the last change of its key.
    """
    moved, begin = batch.column(change.MOVED_FROM), 0
    while begin < batch.num_rows:
        end = begin + rows_max
        end += end < batch.num_rows and moved[end].is_valid
        yield batch.slice(begin, end - begin)
        begin = end


def _after(batch: pa.RecordBatch, seq: int | None) -> pa.RecordBatch:
    return batch if seq is None else batch.filter(pc.greater(batch.column(change.SEQ), seq))


def _truncate(schema: TableSchema) -> pa.Table:
    """Return one TRUNCATE, so that the following changes start from an empty table."""
    row = {
        change.OP: Operation.TRUNCATE.value,
        change.SEQ: 0,
        change.POSITION: "",
        change.TX: 0,
        change.TX_INDEX: 0,
        change.COMMITTED_AT: datetime(1970, 1, 1, tzinfo=UTC),
    }
    return pa.Table.from_pylist([row], schema=schema.change_schema())
