"""What runs inside Spark tasks: reading a chunk of a table, and applying a stretch of the log to one.

Work is plain data and an outcome is plain data; a row never passes the driver. A task may be run twice: the
table's own position makes the second run do nothing. One table's failure is an outcome, not an exception, so
it holds back only that table.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path

from tailrace.capture.postgres.chunks import Chunk
from tailrace.capture.postgres.snapshot import SnapshotReader
from tailrace.changelog.read.index import Slice
from tailrace.errors import TableFailed, TailraceError
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId, TableSchema
from tailrace.storage.files import LogPath
from tailrace.tables.compaction_plan import UpkeepPlan, UpkeepResult
from tailrace.tables.evolve.schema_plan import Recast
from tailrace.tables.location import TableLocation
from tailrace.tables.port import AppliedPosition
from tailrace.tables.spec import NO_ORIGIN, PLAIN_MIRROR, LoadOrigin, TableSpec
from tailrace.tables.staging import FILE_BYTES, StagedFile
from tailrace.tasks.load_store import StagedChunk


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
