"""What a destination must promise, so that it alone decides what it still needs.

A table's position and its rows change in one atomic commit or not at all. Whoever reads the position back
therefore knows exactly which changes the rows hold, after any crash, and needs no other record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from tailrace.model.position import Lsn
from tailrace.model.schema import Column, TableId, TableSchema
from tailrace.tables.compaction_plan import UpkeepPlan, UpkeepResult
from tailrace.tables.evolve.schema_plan import Recast
from tailrace.tables.fold.fold import Flags, FoldedChanges

if TYPE_CHECKING:
    from tailrace.tables.spec import LoadOrigin
    from tailrace.tables.staging import StagedFile


@dataclass(frozen=True, kw_only=True)
class AppliedPosition:
    """What a table has applied, kept in its own commit."""

    seq: int
    """The last `_seq` of the log it covers."""
    commit: int
    """The log's commit number at that point."""
    position: Lsn
    """Everything that ended at or before this is covered too: a load's point may lie past the log's end."""
    load: str | None = None
    """The load that the table came from, if that has a name; applying keeps it."""

    def covers(self, other: AppliedPosition) -> bool:
        """Whether a table that stands here has all that one has which stands there. The number alone does not tell: a
        point inside a commit has that of the commit before."""
        return self.seq >= other.seq and self.position >= other.position


@dataclass(frozen=True, kw_only=True)
class WriteResult:
    """What an apply came to. `cursor` is where the table stands now."""

    committed: bool
    """False: there was nothing to do, and the table and its position are as they were."""
    applied_position: AppliedPosition
    upserted: int = 0
    deleted: int = 0
    bytes: int = 0
    """Of the files that were written."""
    version: int | None = None
    """The table's own number of what it is now, where that is known."""


Refetch = Callable[[pa.Table], pa.Table]
"""Given keys, the key's columns by their own names, the rows as the source has them now, all columns; a row that
is gone is not among them."""


class LakeTable(Protocol):
    """What one source table is in the lake, in one form, written on behalf of one change log.

    A `schema` is the source's shape everywhere in here; rows that are staged or folded have the table's own, which the
    form makes of it. A table that was made in another form is refused (`FormChanged`), and replaced by a load.

    Order: changes are applied in `_seq` order and `expected` names the position they start from, so a gap is
    refused, not applied. Repetition: an apply that the table already covers does nothing, so any call may be
    repeated. Durability: when a method that writes returns, rows and position are on disk; when it raises or the
    process dies, either the whole commit is there or nothing of it is visible. No commit lacks the position.

    One table has one writer at a time. That is not assumed but checked: a commit fails if any other was made
    since the table was read. Methods open the table anew and keep nothing between calls, so an object may be
    sent to another process.
    """

    def applied_position(self) -> AppliedPosition | None:
        """What this log has applied; None only if there is no table here, or none with a position of this log.

        Raises `ForeignWrite` if someone else changed the table since, `TableUnusable` if it cannot be read.
        """
        ...

    def schema(self) -> TableSchema | None:
        """The source's shape as of the last commit of this log; None where `cursor` is None."""
        ...

    def load(
        self,
        schema: TableSchema,
        batches: Iterable[pa.RecordBatch],
        cursor: AppliedPosition,
        *,
        origin: LoadOrigin | None = None,
    ) -> int:
        """Make these rows of the source all that the table holds, at this position; return how many.

        Streams: memory does not grow with the table. Replaces whatever this log put here before, even after
        others changed it, and refuses a table this log did not make (`ForeignWrite`). An exception out of
        `batches` is raised unchanged and nothing is committed.
        """
        ...

    def refuse_foreign(self, table: TableId) -> None:
        """Raise what `load` and `land` of this source table would raise before they begin; nothing is touched."""
        ...

    def commit_load(
        self,
        schema: TableSchema,
        files: Sequence[StagedFile],
        cursor: AppliedPosition,
        *,
        origin: LoadOrigin | None = None,
        kept: Sequence[Column] = (),
    ) -> int:
        """Make these staged files all that the table holds, at this position, in one commit; return their rows.

        Replaces and refuses what `load` does. `kept` are columns that the files have beside those of the shape, as
        `evolve` leaves them. Files that are in the table already are not landed again: the call
        may be repeated. No files: an empty table.
        """
        ...

    def apply(
        self,
        schema: TableSchema,
        folded: FoldedChanges,
        expected: AppliedPosition,
        cursor: AppliedPosition,
        *,
        touch: bool = False,
        reread: Refetch | None = None,
    ) -> WriteResult:
        """Bring the table from `expected` to `cursor` in one commit.

        Does nothing if the table is already at or past `cursor.seq`, or if the fold is empty: a quiet table's
        position does not move, unless it is asked to (`touch`). Whoever goes on from here must expect the
        cursor that was returned. A value to be taken from a row that the table does not hold is found before
        the commit (`BaseRowMissing`), never nulled.

        With `reread` the table may hold rows as they were at different times after `expected`, as long as all
        changes since come too. A partial row whose base is missing, or that had another key (its old one may be
        another row's by now), is then asked for by the key that it has after this batch and taken as it is given.
        One that is not given is left out: its delete, or its next move, is still to come. If it came without those
        values and has no base at all, what stands under its key goes: that is an earlier row, and lends it nothing.
        """
        ...

    def merge_load(
        self,
        schema: TableSchema,
        files: Sequence[StagedFile],
        expected: AppliedPosition,
        cursor: AppliedPosition,
        *,
        keys: Sequence[StagedFile] | None = None,
        origin: LoadOrigin | None = None,
    ) -> WriteResult:
        """Make the rows of a table with a key those of the staged files, in one commit, and leave alone what holds
        them already. A table that keeps what the source no longer has keeps it; one of changes gets the rows added.

        With `keys`, staged files that hold the key's columns of all rows at the source, the staged rows are a part
        of the table: other rows stay as they are if their key is listed, and go if it is not. Starts from
        `expected` as `apply` does, and commits nothing if no row differs and the position stays. The staged files
        do not become part of the table; whoever staged them discards them.
        """
        ...

    def evolve(self, recast: Recast, expected: AppliedPosition) -> WriteResult:
        """Make the table one of the recast's shape, at the position it has, in one commit; nothing if it is already.

        Columns that the source no longer has and that are not dropped stay, beside those of the shape: rows that come
        have null in them, and rows that are changed keep what they had.
        """
        ...

    def compact(self, upkeep: UpkeepPlan, expected: AppliedPosition) -> UpkeepResult:
        """Join small files and remove those that nobody needs, in commits that change no row and state the position."""
        ...

    def rows(self) -> int:
        """How many rows it holds; 0 if there is no table."""
        ...

    def version(self) -> int | None:
        """The table's own number of its newest version; None if there is no table."""
        ...


class RepairableTable(LakeTable, Protocol):
    """One of which single rows can be looked for and put right, for changes that it could not take."""

    def keys_exist(self, schema: TableSchema, keys: pa.Table) -> Flags:
        """Which of these keys, the key's columns by their own names, it has a row of; each is asked for once."""
        ...

    def upsert_rows(
        self, schema: TableSchema, rows: pa.Table, expected: AppliedPosition, said: pa.Table | None = None
    ) -> WriteResult:
        """Make these whole rows the ones under their keys, at the position that the table has, in one commit.

        For rows that are known to be what the table would hold at that position, had it been able to take their
        changes. In a table of versions each becomes the current one; `said` is what the change that made it says of
        itself, row by row. May be repeated.
        """
        ...

    def replay_id(self) -> str | None:
        """The name that the last `add` was given; None: there was none since the table was loaded."""
        ...

    def append_rows(
        self, schema: TableSchema, folded: FoldedChanges, expected: AppliedPosition, *, after: str | None, late: str
    ) -> WriteResult:
        """Add rows, in a table without a key or one of changes, at the position that it has, in one commit that bears
        the name `late`; every later commit bears it too, until the next that is given one.

        Repeated, it would add them once more. So it is refused unless the table bears the name `after`: whoever has
        looked for the name before knows whether the rows are in, and nothing can come between.
        """
        ...
