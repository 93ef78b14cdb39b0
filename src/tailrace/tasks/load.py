"""Read a chunk of a table, and commit a load, in a Spark task.

A chunk is staged whole or not at all. A second try stages it under another name, so it never meets files of the first.
"""

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
    """Stage one chunk and record it, whole or not at all."""
    started = time.monotonic()
    try:
        try:
            staged_chunk = _stage_chunk(work, started, split_rejects=False)
        except (ValueUnfit, TransformFailed):
            if not work.dead_letters_enabled:
                raise
            # Read the chunk again from its start: only a more expensive read says which rows do not fit.
            staged_chunk = _stage_chunk(work, started, split_rejects=True)
        failpoints.hit("load.before_record")
        LoadStore(work.log).record_chunk(work.load_id, staged_chunk)
        failpoints.hit("load.after_record")
    except Exception as error:  # the task's boundary: the table fails, the others continue
        return Outcome(table=work.schema.table, error=as_tailrace_error(error))
    return Outcome(
        table=work.schema.table,
        rows=staged_chunk.rows,
        seconds=staged_chunk.seconds,
        staged=staged_chunk,
        dead_letters=staged_chunk.dead_letters,
    )


def _stage_chunk(work: ChunkWork, started: float, *, split_rejects: bool) -> StagedChunk:
    """Stage the chunk's rows, and store its rejects; the caller records the chunk."""
    name = f"{work.load_id}-{work.chunk.number:06d}-{uuid.uuid4().hex[:8]}"
    with work.reader as reader:
        failpoints.hit("load.snapshot_open")
        seen_until = reader.lock_chunk(work.schema, work.chunk)
        rejects = LoadRejects(work.schema, work.spec, work.origin, seen_until)
        batches = (
            rejects.without_rejects(reader.marked_rows(work.schema, work.chunk, work.condition))
            if split_rejects
            else reader.rows(work.schema, work.chunk, work.condition)
        )
        stored = work.spec.stored_schema(work.schema)
        rows = with_added_columns(work.spec, work.schema, _with_progress(batches, work.progress_file), work.origin)
        staged = stage(
            work.table_path,
            name,
            stored,
            rows,
            work.spec.partition_by,
            numbered=work.has_field_ids,
            file_bytes=work.file_bytes,
        )
        keys: tuple[StagedFile, ...] = ()
        kept_keys = reader.rows(_key_schema(work.schema), work.chunk) if work.condition is not None else None
        if kept_keys is None and work.spec.keeps_past and stored.key and rejects.count:
            kept_keys = rejects.keys()  # a row that does not fit now is not a deleted row: the table keeps what it has
        if kept_keys is not None:
            keys = stage(work.table_path, f"{name}-keys", _key_schema(stored), kept_keys)
    if rejects.count:
        LoadStore(work.log).store_dead_letters(work.load_id, work.chunk.number, work.schema, rejects.dead_letters)
    return StagedChunk(
        chunk=work.chunk.number,
        files=staged,
        keys=keys,
        rows=sum(file.rows for file in staged),
        bytes=sum(file.size for file in staged),
        seconds=round(time.monotonic() - started, 3),
        seen_until=seen_until,
        dead_letters=rejects.count,
    )


def refresh_table(work: RefreshWork) -> Outcome:
    """Commit a load in one table commit that writes only rows that differ."""
    started = time.monotonic()
    try:
        outcome = refresh_with(work.location.open(), work)
    except Exception as error:  # the task's boundary
        return Outcome(table=work.schema.table, error=as_tailrace_error(error))
    return replace(outcome, seconds=time.monotonic() - started)


def refresh_with(table: LakeTable, work: RefreshWork) -> Outcome:
    """Commit a load as `refresh_table` does, with any implementation of the lake table."""
    chunks, expected = LoadStore(work.log).staged_chunks(work.load_id).values(), table.applied_position()
    assert expected is not None, "a table to refresh has been loaded"
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
    """Return files with keys of rows that the table keeps although they were not staged.

    None means that every row that was not staged has been deleted at the source.
    """
    keys = [file for chunk in chunks for file in chunk.keys]
    return keys if work.is_partial or keys else None


def commit_load(work: CommitLoadWork) -> Outcome:
    """Commit the staged files of a load in one table commit."""
    try:
        rows = work.location.open().commit_load(work.schema, work.files, work.position_after, origin=work.origin)
    except Exception as error:  # the task's boundary
        return Outcome(table=work.schema.table, error=as_tailrace_error(error))
    return Outcome(table=work.schema.table, rows=rows, applied_position=work.position_after, schema=work.schema)


def _key_schema(schema: TableSchema) -> TableSchema:
    columns = tuple(column for column in schema.columns if column.name in schema.key)
    return replace(schema, columns=columns, facts=None)


def _with_progress(batches: Iterator[pa.RecordBatch], progress_file: Path) -> Iterator[pa.RecordBatch]:
    """Yield the batches, and write every `PROGRESS_SECONDS` how many rows have passed."""
    rows, due = 0, 0.0
    for batch in batches:
        rows += batch.num_rows
        if time.monotonic() >= due:
            with suppress(OSError):  # on another machine the folder does not exist, and nothing depends on the file
                files.replace(progress_file, json.dumps({"rows": rows}).encode())
            due = time.monotonic() + PROGRESS_SECONDS
        yield batch
