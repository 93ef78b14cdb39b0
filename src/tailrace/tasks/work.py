"""What runs inside Spark tasks: reading a chunk of a table, and applying a stretch of the log to one.

Work is plain data and an outcome is plain data; a row never passes the driver. A task may be run twice: the
table's own position makes the second run do nothing. One table's failure is an outcome, not an exception, so
it holds back only that table.
"""

from __future__ import annotations

import json
import time
import traceback
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from tailrace import failpoints
from tailrace.capture.postgres.chunks import Chunk
from tailrace.capture.postgres.snapshot import SnapshotReader
from tailrace.changelog.read.index import Slice
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.read.row_steps import rows_after_position, rows_until_position
from tailrace.errors import SourceSlow, TableFailed, TailraceError, TransformFailed, ValueUnfit
from tailrace.model import change
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId, TableSchema
from tailrace.storage import files
from tailrace.storage.files import LogPath
from tailrace.tables.compaction_plan import UpkeepPlan, UpkeepResult
from tailrace.tables.evolve.schema_plan import Recast
from tailrace.tables.fold.by_mode import with_added_columns
from tailrace.tables.location import TableLocation
from tailrace.tables.port import AppliedPosition, LakeTable
from tailrace.tables.size_estimate import estimate_bytes
from tailrace.tables.spec import NO_ORIGIN, PLAIN_MIRROR, LoadOrigin, TableSpec
from tailrace.tables.staging import FILE_BYTES, StagedFile, stage
from tailrace.tables.table_errors import schema_mismatch
from tailrace.tasks.dead_letters import ApplyStep, ApplyStepResult, apply_with_dead_letters
from tailrace.tasks.load_dead_letters import LoadRejects
from tailrace.tasks.load_store import LoadStore, StagedChunk

PROGRESS_SECONDS = 0.5
SEEN_SECONDS_MAX, SEEN_PAUSE_SECONDS = 20.0, 0.2
"""For a commit to be seen that is in the log."""


@dataclass(frozen=True, kw_only=True)
class ChunkWork:
    """Read one chunk of a table into files beside its lake table, and put that on record."""

    schema: TableSchema
    chunk: Chunk
    reader: SnapshotReader
    condition: str | None
    table_path: Path
    log: LogPath
    load_id: str
    progress_file: Path
    """Where to note how many rows are in."""
    spec: TableSpec = PLAIN_MIRROR
    """Of the lake table,"""
    origin: LoadOrigin = NO_ORIGIN
    """and what its rows then say of where they come from."""
    has_field_ids: bool = False
    """Whether the columns of the files are known by numbers, as Iceberg has it."""
    file_bytes: int = FILE_BYTES
    """The size of file that is aimed at."""
    dead_letters_enabled: bool = False
    """Whether rows that the table cannot hold are set aside."""


@dataclass(frozen=True, kw_only=True)
class CommitLoadWork:
    """Make staged files all that a lake table holds."""

    schema: TableSchema
    location: TableLocation
    files: tuple[StagedFile, ...]
    position_after: AppliedPosition
    origin: LoadOrigin | None


@dataclass(frozen=True, kw_only=True)
class RefreshWork:
    """Make a lake table equal to what a load has staged, by writing what differs."""

    schema: TableSchema
    location: TableLocation
    log: LogPath
    load_id: str
    is_partial: bool
    """Whether only rows that fulfil a condition were read, beside all keys."""
    position_after: AppliedPosition
    origin: LoadOrigin


@dataclass(frozen=True, kw_only=True)
class ApplyWork:
    """Apply one table's slices of the log, in order, in one commit of its lake table."""

    table: TableId
    log: LogPath
    location: TableLocation
    slices: tuple[Slice, ...]
    """Which rows; where they lie is looked up when they are read, for the log may be sealed meanwhile."""
    schema: TableSchema
    expected: AppliedPosition
    position_after: AppliedPosition
    reader: SnapshotReader | None = None
    """To read rows again whose large values did not come; None where all of them must be there."""
    dead_letters_enabled: bool = False
    """Whether changes that the table cannot take are set aside."""
    until: Lsn | None = None
    """Where it ends, if that is inside the last slice."""

    @property
    def may_refetch(self) -> bool:
        """Whether the table can take a change that leaves out values which are nowhere, as `Step` has it."""
        return self.reader is not None and not self.dead_letters_enabled


@dataclass(frozen=True, kw_only=True)
class EvolveWork:
    """Make one lake table one of a new shape, where it stands."""

    table: TableId
    location: TableLocation
    recast: Recast
    expected: AppliedPosition


@dataclass(frozen=True, kw_only=True)
class CompactWork:
    """Join a lake table's small files, where it stands."""

    table: TableId
    location: TableLocation
    expected: AppliedPosition
    upkeep: UpkeepPlan


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a piece of work."""

    table: TableId
    rows: int = 0
    seconds: float = 0.0
    cpu_seconds: float | None = None
    """Of the process that did it, where it did nothing else meanwhile; None: that is not known."""
    applied_position: AppliedPosition | None = None
    schema: TableSchema | None = None
    staged: StagedChunk | None = None
    bytes_changed: int = 0
    """Of the changes, as a table's files would hold them, about;"""
    bytes_written: int = 0
    """and of the files that it took to write them."""
    version: int | None = None
    """Of the table as it is now."""
    upkeep_result: UpkeepResult | None = None
    dead_letters: int = 0
    """Changes that were set aside, or that are still open after they were tried again."""
    seen_until: Lsn | None = None
    """What the table must pass before what was read again may come into it."""
    needs_refetch: bool = False
    """Whether it is to be read once more, for something has changed since."""
    error: TailraceError | None = None


def load_chunk(work: ChunkWork) -> Outcome:
    """One chunk, whole or not at all. Tried again it is written under another name."""
    started = time.monotonic()
    try:
        try:
            done = _read_chunk(work, started, letters=False)
        except (ValueUnfit, TransformFailed):
            if not work.dead_letters_enabled:
                raise
            # Once more from the beginning: which rows do not fit is told only by a way of reading that costs more.
            done = _read_chunk(work, started, letters=True)
        failpoints.hit("load.before_record")
        LoadStore(work.log).record_chunk(work.load_id, done)
        failpoints.hit("load.after_record")
    except Exception as error:  # the task's boundary: the table fails, the others go on
        return Outcome(table=work.schema.table, error=as_tailrace_error(error))
    return Outcome(
        table=work.schema.table, rows=done.rows, seconds=done.seconds, staged=done, dead_letters=done.dead_letters
    )


def _read_chunk(work: ChunkWork, started: float, *, letters: bool) -> StagedChunk:
    """The chunk's rows as files, and what is set aside of them as another, but for the record."""
    name = f"{work.load_id}-{work.chunk.number:06d}-{uuid.uuid4().hex[:8]}"
    with work.reader as reader:
        failpoints.hit("load.snapshot_open")
        seen = reader.lock_chunk(work.schema, work.chunk)
        aside = LoadRejects(work.schema, work.spec, work.origin, seen)
        read = (
            aside.without_rejects(reader.marked_rows(work.schema, work.chunk, work.condition))
            if letters
            else reader.rows(work.schema, work.chunk, work.condition)
        )
        stored = work.spec.stored_schema(work.schema)
        own = with_added_columns(work.spec, work.schema, _with_progress(read, work.progress_file), work.origin)
        staged = stage(
            work.table_path,
            name,
            stored,
            own,
            work.spec.partition_by,
            numbered=work.has_field_ids,
            file_bytes=work.file_bytes,
        )
        keys: tuple[StagedFile, ...] = ()
        stay = reader.rows(_key_shape(work.schema), work.chunk) if work.condition is not None else None
        if stay is None and work.spec.keeps_past and stored.key and aside.count:
            stay = aside.keys()  # what a table has of rows that do not fit now is no row that is gone
        if stay is not None:
            keys = stage(work.table_path, f"{name}-keys", _key_shape(stored), stay)
    if aside.count:
        LoadStore(work.log).store_dead_letters(work.load_id, work.chunk.number, work.schema, aside.dead_letters)
    return StagedChunk(
        chunk=work.chunk.number,
        files=staged,
        keys=keys,
        rows=sum(file.rows for file in staged),
        bytes=sum(file.size for file in staged),
        seconds=round(time.monotonic() - started, 3),
        seen_until=seen,
        dead_letters=aside.count,
    )


def refresh_table(work: RefreshWork) -> Outcome:
    """One commit that leaves alone what is right already."""
    started = time.monotonic()
    try:
        done = refresh_with(work.location.open(), work)
    except Exception as error:  # the task's boundary
        return Outcome(table=work.schema.table, error=as_tailrace_error(error))
    return replace(done, seconds=time.monotonic() - started)


def refresh_with(table: LakeTable, work: RefreshWork) -> Outcome:
    """The same, whoever writes the table."""
    chunks, expected = LoadStore(work.log).staged_chunks(work.load_id).values(), table.applied_position()
    assert expected is not None, "a table that is refreshed has been loaded"
    applied = table.merge_load(
        work.schema,
        [file for chunk in chunks for file in chunk.files],
        expected,
        work.position_after,
        keys=_keys_to_keep(work, chunks),
        origin=work.origin,
    )
    rows = applied.upserted + applied.deleted
    return Outcome(table=work.schema.table, rows=rows, applied_position=applied.applied_position, schema=work.schema)


def _keys_to_keep(work: RefreshWork, chunks: Iterable[StagedChunk]) -> list[StagedFile] | None:
    """Files with the keys of rows that the table may go on having although they were not staged; None: there are none,
    for whatever is not staged is gone."""
    keys = [file for chunk in chunks for file in chunk.keys]
    return keys if work.is_partial or keys else None


def commit_load(work: CommitLoadWork) -> Outcome:
    """One commit of what a load has staged."""
    try:
        rows = work.location.open().commit_load(work.schema, work.files, work.position_after, origin=work.origin)
    except Exception as error:  # the task's boundary
        return Outcome(table=work.schema.table, error=as_tailrace_error(error))
    return Outcome(table=work.schema.table, rows=rows, applied_position=work.position_after, schema=work.schema)


def _key_shape(schema: TableSchema) -> TableSchema:
    """The table as if it had no columns but its key."""
    columns = tuple(column for column in schema.columns if column.name in schema.key)
    return replace(schema, columns=columns, facts=None)


def _with_progress(batches: Iterator[pa.RecordBatch], note: Path) -> Iterator[pa.RecordBatch]:
    """The batches, with a note of how far they are now and then."""
    rows, due = 0, 0.0
    for batch in batches:
        rows += batch.num_rows
        if time.monotonic() >= due:
            with suppress(OSError):  # on another machine the folder is not there; nothing hangs on it
                files.replace(note, json.dumps({"rows": rows}).encode())
            due = time.monotonic() + PROGRESS_SECONDS
        yield batch


def advance_table(work: ApplyWork | EvolveWork) -> Outcome:
    """The next step of one table, whatever it is."""
    return evolve_table(work) if isinstance(work, EvolveWork) else apply_changes(work)


def apply_changes(work: ApplyWork) -> Outcome:
    """Fold the slices to what the table's form makes of them and write that, with the new position, in one commit."""
    started = time.monotonic()
    failpoints.hit("apply.before_table")
    try:
        changes = read_changes(work)
        done = _apply_step(work, changes)
    except Exception as error:  # the task's boundary: the table fails, the others go on
        return Outcome(table=work.table, error=as_tailrace_error(error))
    return Outcome(
        table=work.table,
        rows=changes.num_rows,
        seconds=time.monotonic() - started,
        applied_position=work.position_after,
        schema=work.schema,
        bytes_changed=estimate_bytes(work.schema, changes),
        bytes_written=done.applied.bytes,
        version=done.applied.version,
        dead_letters=done.dead_letters,
    )


def _apply_step(work: ApplyWork, changes: pa.Table) -> ApplyStepResult:
    again = partial(_read_again, work, changes) if work.reader is not None else None
    step = ApplyStep(
        log=work.log,
        schema=work.schema,
        spec=work.location.spec,
        expected=work.expected,
        position_after=work.position_after,
        dead_letters_enabled=work.dead_letters_enabled,
        refetch=again,
    )
    return apply_with_dead_letters(work.location.open(), step, changes)


def compact_table(work: CompactWork) -> Outcome:
    """What a table needs besides its changes."""
    started, used = time.monotonic(), time.process_time()  # a worker of Spark's does one task at a time
    tended, failed = None, None
    try:
        tended = work.location.open().compact(work.upkeep, work.expected)
    except Exception as error:  # the task's boundary
        failed = as_tailrace_error(error)
    return Outcome(
        table=work.table,
        seconds=time.monotonic() - started,
        cpu_seconds=time.process_time() - used,
        upkeep_result=tended,
        error=failed,
    )


def evolve_table(work: EvolveWork) -> Outcome:
    """One commit that leaves every row as the new shape has it."""
    started = time.monotonic()
    try:
        applied = work.location.open().evolve(work.recast, work.expected)
    except Exception as error:  # the task's boundary: the table fails, the others go on
        return Outcome(table=work.table, error=as_tailrace_error(error))
    return Outcome(
        table=work.table,
        seconds=time.monotonic() - started,
        applied_position=work.expected,
        schema=work.recast.schema,
        bytes_written=applied.bytes,
    )


def _read_again(work: ApplyWork, changes: pa.Table, keys: pa.Table) -> pa.Table:
    return refetch_rows(work, pc.unique(changes.column(change.TX)).to_pylist(), keys)


def refetch_rows(work: ApplyWork, transactions: Sequence[int], keys: pa.Table) -> pa.Table:
    """The rows as the source has them now, these transactions included.

    That they may be newer than the table will say is on record before the commit.
    """
    assert work.reader is not None, "whoever calls has one"
    form, shape = work.location.spec, work.schema
    keys = keys.rename_columns([name for name in shape.names if name in shape.key])
    rows, seen = fetch_rows(work.reader, shape, keys, transactions)
    if work.expected.load is not None:
        LoadStore(work.log).record_refetch(work.expected.load, work.position_after.position, seen)
    return rows.rename_columns([form.lake_name(name) for name in rows.column_names])


def fetch_rows(
    source: SnapshotReader, shape: TableSchema, keys: pa.Table, transactions: Sequence[int]
) -> tuple[pa.Table, Lsn]:
    """The rows with these keys, once the transactions are seen; and what everything seen ended at or before."""
    deadline = time.monotonic() + SEEN_SECONDS_MAX
    while time.monotonic() < deadline:
        with source as reader:
            reader.lock_schema(shape)
            if reader.sees_all(transactions):
                rows = pa.Table.from_batches(reader.rows_by_key(shape, keys), pa.schema(shape.row_fields()))
                return rows, reader.position()
        time.sleep(SEEN_PAUSE_SECONDS)
    raise SourceSlow(
        "a commit is in the server's log and cannot be seen yet",
        table=shape.table,
        hint="It is tried again. Does the commit wait for a synchronous standby? See pg_stat_activity.",
    )


def read_changes(work: ApplyWork) -> pa.Table:
    """The changes the table has not covered, in order."""
    empty = pa.RecordBatch.from_pylist([], work.schema.change_schema())
    return pa.Table.from_batches([empty, *read_change_batches(work, work.expected.seq)])


def read_change_batches(work: ApplyWork, seq: int) -> Iterator[pa.RecordBatch]:
    """The changes of the work's slices past this number that the table has not covered, in order."""
    log = ChangeLog.open(work.log)
    for first, last in _group_slices(log, work.slices):
        for batch in log.read(first.first, last.last, tables=[first.table], after_seq=seq, to_seq=last.last_seq):
            batch = rows_after_position(batch, work.expected.position)  # a load has seen the others
            if work.until is not None and batch.data.num_rows:
                batch = rows_until_position(batch, work.until)
            if batch.data.num_rows:
                if error := schema_mismatch(work.schema, batch.schema, first.first):
                    raise error
                yield batch.with_all_columns()
        seq = max(seq, last.last_seq)


def _group_slices(log: ChangeLog, slices: Sequence[Slice]) -> Iterator[tuple[Slice, Slice]]:
    """Stretches of slices that are read at once, each as its first and its last.

    What was sealed since the slices were listed lies in one row group where it was many commits. Read commit by commit
    that group would be decoded, and kept, once for each.
    """
    begin = 0
    while begin < len(slices):
        first, end = slices[begin], begin + 1
        log.seal_index.refresh()
        seal = log.seal_index.covering(first.first)
        while seal and end < len(slices) and slices[end].first <= seal.last and slices[end].table == first.table:
            end += 1
        yield first, slices[end - 1]
        begin = end


def as_tailrace_error(error: Exception) -> TailraceError:
    """Any failure as an error that can be shown; a defect of ours says so."""
    if isinstance(error, TailraceError):
        return error
    # Only where it happened: the text of an error that nobody foresaw may hold a row's values.
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return TableFailed(
        f"unexpected {type(error).__name__} in {frame.name} ({Path(frame.filename).name}:{frame.lineno})",
        hint="Run again; if it comes back, report it with the file status/spark.log of the log.",
    )
