"""Plain data that Spark tasks take and return: pieces of work, and their outcomes.

A row never passes the driver. A task may run twice: the table's applied position makes the second run do nothing. The
failure of one table is an outcome, not an exception, so it holds back only that table.
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
    """Read one chunk of a table into staged files, and record that."""

    schema: TableSchema
    chunk: Chunk
    reader: SnapshotReader
    condition: str | None
    table_path: Path
    log: LogPath
    load_id: str
    progress_file: Path
    """File that receives the number of rows read so far."""
    spec: TableSpec = PLAIN_MIRROR
    """Spec of the lake table."""
    origin: LoadOrigin = NO_ORIGIN
    """Values of the metadata columns for the rows that are read."""
    has_field_ids: bool = False
    """True if the files identify columns by number, as Iceberg does."""
    file_bytes: int = FILE_BYTES
    """Target size of a file."""
    dead_letters_enabled: bool = False
    """True if rows that the table cannot hold become dead letters."""


@dataclass(frozen=True, kw_only=True)
class CommitLoadWork:
    """Replace the content of a lake table with staged files."""

    schema: TableSchema
    location: TableLocation
    files: tuple[StagedFile, ...]
    position_after: AppliedPosition
    origin: LoadOrigin | None


@dataclass(frozen=True, kw_only=True)
class RefreshWork:
    """Make a lake table equal to a load's staged rows by writing what differs."""

    schema: TableSchema
    location: TableLocation
    log: LogPath
    load_id: str
    is_partial: bool
    """True if the load read only rows that fulfil a condition, and all keys."""
    position_after: AppliedPosition
    origin: LoadOrigin


@dataclass(frozen=True, kw_only=True)
class ApplyWork:
    """Apply one table's slices of the log, in order, in one table commit."""

    table: TableId
    log: LogPath
    location: TableLocation
    slices: tuple[Slice, ...]
    """Rows to apply. The task looks up their files when it reads them, because the log may be sealed meanwhile."""
    schema: TableSchema
    expected: AppliedPosition
    position_after: AppliedPosition
    reader: SnapshotReader | None = None
    """Reader that refetches rows with unsent values. None where every value must be in the log or the table."""
    dead_letters_enabled: bool = False
    """True if changes that the table cannot take become dead letters."""
    until: Lsn | None = None
    """Position at which the range ends, if that is inside the last slice."""

    @property
    def may_refetch(self) -> bool:
        """True if unsent values that neither log nor table has are refetched (see `ApplyStep`)."""
        return self.reader is not None and not self.dead_letters_enabled


@dataclass(frozen=True, kw_only=True)
class EvolveWork:
    """Recast a lake table to a new schema at its applied position."""

    table: TableId
    location: TableLocation
    recast: Recast
    expected: AppliedPosition


@dataclass(frozen=True, kw_only=True)
class CompactWork:
    """Compact a lake table's small files at its applied position."""

    table: TableId
    location: TableLocation
    expected: AppliedPosition
    upkeep: UpkeepPlan


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a piece of work."""

    table: TableId
    rows: int = 0
    seconds: float = 0.0
    cpu_seconds: float | None = None
    """CPU time of the process, if it did nothing else meanwhile; None: not known."""
    applied_position: AppliedPosition | None = None
    schema: TableSchema | None = None
    staged: StagedChunk | None = None
    bytes_changed: int = 0
    """Estimated size of the changes in the table's files."""
    bytes_written: int = 0
    """Size of the files that were written for them."""
    version: int | None = None
    """Version of the lake table after the work."""
    upkeep_result: UpkeepResult | None = None
    dead_letters: int = 0
    """Changes that became dead letters, or that are still open after a replay."""
    seen_until: Lsn | None = None
    """Position that the table must pass before refetched rows may be written into it."""
    needs_refetch: bool = False
    """True if rows must be refetched once more because they changed since."""
    error: TailraceError | None = None


def as_tailrace_error(error: Exception) -> TailraceError:
    """Return any failure as an error that can be shown. A defect in our code says so."""
    if isinstance(error, TailraceError):
        return error
    # The message names only the line of our code: the text of an unforeseen error may contain values of a row.
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return TableFailed(
        f"unexpected {type(error).__name__} in {frame.name} ({Path(frame.filename).name}:{frame.lineno})",
        hint="Run it again. If it fails again, report it with the file status/spark.log of the log.",
    )
