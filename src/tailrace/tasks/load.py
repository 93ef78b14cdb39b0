"""Reading a chunk of a table, and committing a load, in a task."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from tailrace import failpoints
from tailrace.errors import TransformFailed, ValueUnfit
from tailrace.model.schema import TableSchema
from tailrace.storage import files
from tailrace.tables.fold.by_mode import with_added_columns
from tailrace.tables.port import LakeTable
from tailrace.tables.staging import StagedFile, stage
from tailrace.tasks.load_dead_letters import LoadRejects
from tailrace.tasks.load_store import LoadStore, StagedChunk
from tailrace.tasks.work import ChunkWork, CommitLoadWork, Outcome, RefreshWork, as_tailrace_error

PROGRESS_SECONDS = 0.5


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
