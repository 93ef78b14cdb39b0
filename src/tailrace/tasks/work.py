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
from tailrace.changelog.read.row_steps import after_position, upto_position
from tailrace.errors import SourceSlow, TableFailed, TailraceError, TransformFailed, ValueUnfit
from tailrace.model import change
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId, TableSchema
from tailrace.storage import files
from tailrace.storage.files import LogPath
from tailrace.tables.compaction_plan import Tended, Upkeep
from tailrace.tables.evolve.schema_plan import Recast
from tailrace.tables.fold.by_mode import loaded
from tailrace.tables.location import Place
from tailrace.tables.port import Cursor, LakeTable
from tailrace.tables.schema_errors import unusable
from tailrace.tables.size_estimate import weigh
from tailrace.tables.spec import NOWHERE, PLAIN, Form, Origin
from tailrace.tables.staging import FILE_BYTES, StagedFile, stage
from tailrace.tasks.dead_letters import Done, Step, apply_with_letters
from tailrace.tasks.load_dead_letters import LoadLetters
from tailrace.tasks.load_store import Seeds, StagedChunk

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
    lake: Path
    log: LogPath
    seed: str
    progress: Path
    """Where to note how many rows are in."""
    form: Form = PLAIN
    """Of the lake table,"""
    origin: Origin = NOWHERE
    """and what its rows then say of where they come from."""
    numbered: bool = False
    """Whether the columns of the files are known by numbers, as Iceberg has it."""
    file_bytes: int = FILE_BYTES
    """The size of file that is aimed at."""
    letters: bool = False
    """Whether rows that the table cannot hold are set aside."""


@dataclass(frozen=True, kw_only=True)
class LandWork:
    """Make staged files all that a lake table holds."""

    schema: TableSchema
    place: Place
    files: tuple[StagedFile, ...]
    cursor: Cursor
    origin: Origin | None


@dataclass(frozen=True, kw_only=True)
class RefreshWork:
    """Make a lake table equal to what a load has staged, by writing what differs."""

    schema: TableSchema
    place: Place
    log: LogPath
    seed: str
    partial: bool
    """Whether only rows that fulfil a condition were read, beside all keys."""
    cursor: Cursor
    origin: Origin


@dataclass(frozen=True, kw_only=True)
class ApplyWork:
    """Apply one table's slices of the log, in order, in one commit of its lake table."""

    table: TableId
    log: LogPath
    place: Place
    slices: tuple[Slice, ...]
    """Which rows; where they lie is looked up when they are read, for the log may be sealed meanwhile."""
    shape: TableSchema
    expected: Cursor
    cursor: Cursor
    reader: SnapshotReader | None = None
    """To read rows again whose large values did not come; None where all of them must be there."""
    letters: bool = False
    """Whether changes that the table cannot take are set aside."""
    upto: Lsn | None = None
    """Where it ends, if that is inside the last slice."""

    @property
    def rereads(self) -> bool:
        """Whether the table can take a change that leaves out values which are nowhere, as `Step` has it."""
        return self.reader is not None and not self.letters


@dataclass(frozen=True, kw_only=True)
class EvolveWork:
    """Make one lake table one of a new shape, where it stands."""

    table: TableId
    place: Place
    recast: Recast
    expected: Cursor


@dataclass(frozen=True, kw_only=True)
class TendWork:
    """Join a lake table's small files, where it stands."""

    table: TableId
    place: Place
    expected: Cursor
    upkeep: Upkeep


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a piece of work."""

    table: TableId
    rows: int = 0
    seconds: float = 0.0
    cpu_seconds: float | None = None
    """Of the process that did it, where it did nothing else meanwhile; None: that is not known."""
    cursor: Cursor | None = None
    schema: TableSchema | None = None
    staged: StagedChunk | None = None
    bytes_changed: int = 0
    """Of the changes, as a table's files would hold them, about;"""
    bytes_written: int = 0
    """and of the files that it took to write them."""
    version: int | None = None
    """Of the table as it is now."""
    tended: Tended | None = None
    letters: int = 0
    """Changes that were set aside, or that are still open after they were tried again."""
    seen: Lsn | None = None
    """What the table must pass before what was read again may come into it."""
    again: bool = False
    """Whether it is to be read once more, for something has changed since."""
    error: TailraceError | None = None


def load_chunk(work: ChunkWork) -> Outcome:
    """One chunk, whole or not at all. Tried again it is written under another name."""
    started = time.monotonic()
    try:
        try:
            done = _read_chunk(work, started, letters=False)
        except (ValueUnfit, TransformFailed):
            if not work.letters:
                raise
            # Once more from the beginning: which rows do not fit is told only by a way of reading that costs more.
            done = _read_chunk(work, started, letters=True)
        failpoints.hit("load.before_record")
        Seeds(work.log).stage(work.seed, done)
        failpoints.hit("load.after_record")
    except Exception as error:  # the task's boundary: the table fails, the others go on
        return Outcome(table=work.schema.table, error=as_ours(error))
    return Outcome(table=work.schema.table, rows=done.rows, seconds=done.seconds, staged=done, letters=done.letters)


def _read_chunk(work: ChunkWork, started: float, *, letters: bool) -> StagedChunk:
    """The chunk's rows as files, and what is set aside of them as another, but for the record."""
    name = f"{work.seed}-{work.chunk.number:06d}-{uuid.uuid4().hex[:8]}"
    with work.reader as reader:
        failpoints.hit("load.snapshot_open")
        seen = reader.hold(work.schema, work.chunk)
        aside = LoadLetters(work.schema, work.form, work.origin, seen)
        read = (
            aside.without_letters(reader.marked_rows(work.schema, work.chunk, work.condition))
            if letters
            else reader.rows(work.schema, work.chunk, work.condition)
        )
        stored = work.form.stored(work.schema)
        own = loaded(work.form, work.schema, _noted(read, work.progress), work.origin)
        staged = stage(
            work.lake, name, stored, own, work.form.partition_by, numbered=work.numbered, file_bytes=work.file_bytes
        )
        keys: tuple[StagedFile, ...] = ()
        stay = reader.rows(_key_shape(work.schema), work.chunk) if work.condition is not None else None
        if stay is None and work.form.retains and stored.key and aside.count:
            stay = aside.keys()  # what a table has of rows that do not fit now is no row that is gone
        if stay is not None:
            keys = stage(work.lake, f"{name}-keys", _key_shape(stored), stay)
    if aside.count:
        Seeds(work.log).stage_letters(work.seed, work.chunk.number, work.schema, aside.letters)
    return StagedChunk(
        chunk=work.chunk.number,
        files=staged,
        keys=keys,
        rows=sum(file.rows for file in staged),
        bytes=sum(file.size for file in staged),
        seconds=round(time.monotonic() - started, 3),
        seen=seen,
        letters=aside.count,
    )


def refresh_table(work: RefreshWork) -> Outcome:
    """One commit that leaves alone what is right already."""
    started = time.monotonic()
    try:
        done = refreshed(work.place.open(), work)
    except Exception as error:  # the task's boundary
        return Outcome(table=work.schema.table, error=as_ours(error))
    return replace(done, seconds=time.monotonic() - started)


def refreshed(table: LakeTable, work: RefreshWork) -> Outcome:
    """The same, whoever writes the table."""
    chunks, expected = Seeds(work.log).staged(work.seed).values(), table.cursor()
    assert expected is not None, "a table that is refreshed has been loaded"
    applied = table.refresh(
        work.schema,
        [file for chunk in chunks for file in chunk.files],
        expected,
        work.cursor,
        keys=_keys_that_stay(work, chunks),
        origin=work.origin,
    )
    rows = applied.upserted + applied.deleted
    return Outcome(table=work.schema.table, rows=rows, cursor=applied.cursor, schema=work.schema)


def _keys_that_stay(work: RefreshWork, chunks: Iterable[StagedChunk]) -> list[StagedFile] | None:
    """Files with the keys of rows that the table may go on having although they were not staged; None: there are none,
    for whatever is not staged is gone."""
    keys = [file for chunk in chunks for file in chunk.keys]
    return keys if work.partial or keys else None


def land_table(work: LandWork) -> Outcome:
    """One commit of what a load has staged."""
    try:
        rows = work.place.open().land(work.schema, work.files, work.cursor, origin=work.origin)
    except Exception as error:  # the task's boundary
        return Outcome(table=work.schema.table, error=as_ours(error))
    return Outcome(table=work.schema.table, rows=rows, cursor=work.cursor, schema=work.schema)


def _key_shape(schema: TableSchema) -> TableSchema:
    """The table as if it had no columns but its key."""
    columns = tuple(column for column in schema.columns if column.name in schema.key)
    return replace(schema, columns=columns, facts=None)


def _noted(batches: Iterator[pa.RecordBatch], note: Path) -> Iterator[pa.RecordBatch]:
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
        changes = changes_of(work)
        done = _applied(work, changes)
    except Exception as error:  # the task's boundary: the table fails, the others go on
        return Outcome(table=work.table, error=as_ours(error))
    return Outcome(
        table=work.table,
        rows=changes.num_rows,
        seconds=time.monotonic() - started,
        cursor=work.cursor,
        schema=work.shape,
        bytes_changed=weigh(work.shape, changes),
        bytes_written=done.applied.bytes,
        version=done.applied.version,
        letters=done.letters,
    )


def _applied(work: ApplyWork, changes: pa.Table) -> Done:
    again = partial(_read_again, work, changes) if work.reader is not None else None
    step = Step(
        log=work.log,
        schema=work.shape,
        form=work.place.form,
        expected=work.expected,
        cursor=work.cursor,
        on=work.letters,
        reread=again,
    )
    return apply_with_letters(work.place.open(), step, changes)


def tend_table(work: TendWork) -> Outcome:
    """What a table needs besides its changes."""
    started, used = time.monotonic(), time.process_time()  # a worker of Spark's does one task at a time
    tended, failed = None, None
    try:
        tended = work.place.open().tend(work.upkeep, work.expected)
    except Exception as error:  # the task's boundary
        failed = as_ours(error)
    return Outcome(
        table=work.table,
        seconds=time.monotonic() - started,
        cpu_seconds=time.process_time() - used,
        tended=tended,
        error=failed,
    )


def evolve_table(work: EvolveWork) -> Outcome:
    """One commit that leaves every row as the new shape has it."""
    started = time.monotonic()
    try:
        applied = work.place.open().evolve(work.recast, work.expected)
    except Exception as error:  # the task's boundary: the table fails, the others go on
        return Outcome(table=work.table, error=as_ours(error))
    return Outcome(
        table=work.table,
        seconds=time.monotonic() - started,
        cursor=work.expected,
        schema=work.recast.schema,
        bytes_written=applied.bytes,
    )


def _read_again(work: ApplyWork, changes: pa.Table, keys: pa.Table) -> pa.Table:
    return read_again(work, pc.unique(changes.column(change.TX)).to_pylist(), keys)


def read_again(work: ApplyWork, transactions: Sequence[int], keys: pa.Table) -> pa.Table:
    """The rows as the source has them now, these transactions included.

    That they may be newer than the table will say is on record before the commit.
    """
    assert work.reader is not None, "whoever calls has one"
    form, shape = work.place.form, work.shape
    keys = keys.rename_columns([name for name in shape.names if name in shape.key])
    rows, seen = read_rows(work.reader, shape, keys, transactions)
    if work.expected.load is not None:
        Seeds(work.log).reread(work.expected.load, work.cursor.position, seen)
    return rows.rename_columns([form.name_of(name) for name in rows.column_names])


def read_rows(
    source: SnapshotReader, shape: TableSchema, keys: pa.Table, transactions: Sequence[int]
) -> tuple[pa.Table, Lsn]:
    """The rows with these keys, once the transactions are seen; and what everything seen ended at or before."""
    deadline = time.monotonic() + SEEN_SECONDS_MAX
    while time.monotonic() < deadline:
        with source as reader:
            reader.keep(shape)
            if reader.sees(transactions):
                rows = pa.Table.from_batches(reader.rows_of(shape, keys), pa.schema(shape.row_fields()))
                return rows, reader.position()
        time.sleep(SEEN_PAUSE_SECONDS)
    raise SourceSlow(
        "a commit is in the server's log and cannot be seen yet",
        table=shape.table,
        hint="It is tried again. Does the commit wait for a synchronous standby? See pg_stat_activity.",
    )


def changes_of(work: ApplyWork) -> pa.Table:
    """The changes the table has not covered, in order."""
    empty = pa.RecordBatch.from_pylist([], work.shape.change_schema())
    return pa.Table.from_batches([empty, *change_batches(work, work.expected.seq)])


def change_batches(work: ApplyWork, seq: int) -> Iterator[pa.RecordBatch]:
    """The changes of the work's slices past this number that the table has not covered, in order."""
    log = ChangeLog.open(work.log)
    for first, last in _together(log, work.slices):
        for batch in log.read(first.first, last.last, tables=[first.table], after_seq=seq, to_seq=last.last_seq):
            batch = after_position(batch, work.expected.position)  # a load has seen the others
            if work.upto is not None and batch.data.num_rows:
                batch = upto_position(batch, work.upto)
            if batch.data.num_rows:
                if error := unusable(work.shape, batch.schema, first.first):
                    raise error
                yield batch.completed()
        seq = max(seq, last.last_seq)


def _together(log: ChangeLog, slices: Sequence[Slice]) -> Iterator[tuple[Slice, Slice]]:
    """Stretches of slices that are read at once, each as its first and its last.

    What was sealed since the slices were listed lies in one row group where it was many commits. Read commit by commit
    that group would be decoded, and kept, once for each.
    """
    begin = 0
    while begin < len(slices):
        first, end = slices[begin], begin + 1
        log.cold.refresh()
        seal = log.cold.covering(first.first)
        while seal and end < len(slices) and slices[end].first <= seal.last and slices[end].table == first.table:
            end += 1
        yield first, slices[end - 1]
        begin = end


def as_ours(error: Exception) -> TailraceError:
    """Any failure as an error that can be shown; a defect of ours says so."""
    if isinstance(error, TailraceError):
        return error
    # Only where it happened: the text of an error that nobody foresaw may hold a row's values.
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return TableFailed(
        f"unexpected {type(error).__name__} in {frame.name} ({Path(frame.filename).name}:{frame.lineno})",
        hint="Run again; if it comes back, report it with the file status/spark.log of the log.",
    )
