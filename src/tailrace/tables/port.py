"""The port that a lake table implements.

A table's position and its rows change in one atomic commit or not at all. So the position alone says exactly which
changes the rows hold, after any crash. No other record is needed.
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
from tailrace.tables.fold.folded_changes import Flags, FoldedChanges

if TYPE_CHECKING:
    from tailrace.tables.spec import LoadOrigin
    from tailrace.tables.staging import StagedFile


@dataclass(frozen=True, kw_only=True)
class AppliedPosition:
    """The position that a table has applied, stored in its own commit."""

    seq: int
    """The last `_seq` of the log that the table covers."""
    commit: int
    """The log's commit number at that `_seq`."""
    position: Lsn
    """Source position up to which every transaction is covered. A load point may be past the log's end."""
    load: str | None = None
    """Id of the load that the table is from, if it has one. Applying keeps it."""

    def covers(self, other: AppliedPosition) -> bool:
        """Return whether a table at this position has everything up to the other one.

        The `_seq` alone is not enough: a point inside a commit has the `_seq` of the commit before.
        """
        return self.seq >= other.seq and self.position >= other.position


@dataclass(frozen=True, kw_only=True)
class WriteResult:
    """The result of a write to a lake table."""

    committed: bool
    """False if there was nothing to do: the table and its position are unchanged."""
    applied_position: AppliedPosition
    """The table's position now."""
    upserted: int = 0
    deleted: int = 0
    bytes: int = 0
    """Size of the files that were written."""
    version: int | None = None
    """The table's own number of its new version, where known."""


Refetch = Callable[[pa.Table], pa.Table]
"""Return the rows under these keys as the source has them now, all columns.

The keys are given as the key's columns under their own names. A row that the source no longer has is not in the result.
"""


class LakeTable(Protocol):
    """One source table in the lake, written with one table spec for one change log.

    `schema` is always the source's schema. Staged and folded rows have the table's own schema, which the spec derives
    from it. A table that was made with another spec is refused (`FormChanged`) until a load replaces it.

    Order: changes are applied in `_seq` order. `expected` names the position they start from, so a gap is refused, not
    applied. Repetition: an apply that the table already covers does nothing, so any call may be repeated. Durability:
    when a writing method returns, rows and position are on disk. When it raises or the process dies, the commit is
    either complete or not visible at all. Every commit has the position.

    One table has one writer at a time. This is checked, not assumed: a commit fails if another one was made since the
    table was read. Methods open the table each time and keep nothing between calls, so an object may be sent to another
    process.
    """

    def applied_position(self) -> AppliedPosition | None:
        """Return what this log has applied. None if no table with a position of this log exists.

        Raises `ForeignWrite` if someone else has changed the table since, and `TableUnusable` if it cannot be read.
        """
        ...

    def schema(self) -> TableSchema | None:
        """Return the source's schema as of this log's last commit; None without an applied position."""
        ...

    def load(
        self,
        schema: TableSchema,
        batches: Iterable[pa.RecordBatch],
        position: AppliedPosition,
        *,
        origin: LoadOrigin | None = None,
    ) -> int:
        """Replace all rows of the table by these source rows, at this position. Return their number.

        Rows are streamed: memory does not grow with the table. Replaces whatever this log wrote before, even if others
        have changed it since. Refuses a table that this log did not make (`ForeignWrite`). An exception out of
        `batches` is raised unchanged, and nothing is committed.
        """
        ...

    def refuse_foreign(self, table: TableId) -> None:
        """Raise what `load` and `commit_load` of this source table would raise before they begin.

        Nothing is written.
        """
        ...

    def commit_load(
        self,
        schema: TableSchema,
        files: Sequence[StagedFile],
        position: AppliedPosition,
        *,
        origin: LoadOrigin | None = None,
        kept: Sequence[Column] = (),
    ) -> int:
        """Replace all rows of the table by these staged files in one commit. Return their number of rows.

        Replaces and refuses what `load` does. `kept` are columns that the files have in addition to those of the
        schema, as `evolve` leaves them. Files that are in the table already are not committed again, so the call may be
        repeated. Without files the table becomes empty.
        """
        ...

    def apply(
        self,
        schema: TableSchema,
        folded: FoldedChanges,
        expected: AppliedPosition,
        position: AppliedPosition,
        *,
        touch: bool = False,
        refetch: Refetch | None = None,
    ) -> WriteResult:
        """Bring the table from `expected` to `position` in one commit.

        Does nothing if the table is already at or past `position.seq`. Does nothing for an empty fold either, unless
        `touch` is set: a quiet table's position does not move. The next apply must expect the position that was
        returned. If a value must be taken from a row that the table does not hold, that is found before the commit
        (`BaseRowMissing`). The value never becomes null.

        With `refetch` the table may hold rows as they were at different times after `expected`, as long as all changes
        since are applied too. Two kinds of partial row are then refetched: one whose base is missing, and one that had
        another key. The old key of the latter may belong to another row by now. They are refetched by the key they have
        after this batch, and taken as returned. A row that is not returned is left out: its delete, or its next key
        move, is still ahead in the log. If such a row arrived without those values and has no base at all, the row
        under its key is removed. That is an earlier row, and must not lend its values.
        """
        ...

    def merge_load(
        self,
        schema: TableSchema,
        files: Sequence[StagedFile],
        expected: AppliedPosition,
        position: AppliedPosition,
        *,
        keys: Sequence[StagedFile] | None = None,
        origin: LoadOrigin | None = None,
    ) -> WriteResult:
        """Make a keyed table's rows equal to those of the staged files, in one commit.

        Files that already hold the right rows are not touched. A table that keeps the past keeps it; in append mode the
        rows are added. `keys` are staged files with the key's columns of all rows at the source. With them the staged
        rows are only a part of the table: other rows stay if their key is listed, and are removed if it is not.

        Starts from `expected` as `apply` does. Commits nothing if no row differs and the position stays. The staged
        files do not become part of the table; the caller discards them.
        """
        ...

    def evolve(self, recast: Recast, expected: AppliedPosition) -> WriteResult:
        """Give the table the recast's schema, at its position, in one commit. Does nothing if it has that.

        Columns that the source no longer has and that are not dropped stay in addition to the schema's own. New rows
        have null in them, and changed rows keep their values.
        """
        ...

    def compact(self, upkeep: UpkeepPlan, expected: AppliedPosition) -> UpkeepResult:
        """Compact small files and remove unneeded ones.

        Rows and position stay the same, and each commit states the position.
        """
        ...

    def rows(self) -> int:
        """Return the number of rows; 0 if there is no table."""
        ...

    def version(self) -> int | None:
        """Return the table's own number of its newest version; None if there is no table."""
        ...


class RepairableTable(LakeTable, Protocol):
    """A lake table whose single rows can be looked up and repaired, for dead letters."""

    def keys_exist(self, schema: TableSchema, keys: pa.Table) -> Flags:
        """Flag the keys that the table has a row of.

        The keys are distinct, and given as the key's columns under their own names.
        """
        ...

    def upsert_rows(
        self, schema: TableSchema, rows: pa.Table, expected: AppliedPosition, metadata: pa.Table | None = None
    ) -> WriteResult:
        """Write these whole rows under their keys, at the table's position, in one commit.

        The rows must be what the table would hold at that position, had it been able to take their changes. In history
        mode each becomes the current version; `metadata` has, row by row, the metadata columns of the change that made
        it. May be repeated.
        """
        ...

    def replay_id(self) -> str | None:
        """Return the replay id of the last `append_rows`. None if there was none since the load."""
        ...

    def append_rows(
        self,
        schema: TableSchema,
        folded: FoldedChanges,
        expected: AppliedPosition,
        *,
        previous_replay_id: str | None,
        replay_id: str,
    ) -> WriteResult:
        """Append rows at the table's position, in one commit that has the replay id.

        For a keyless table or append mode. Every later commit repeats the id, until another `append_rows` sets a new
        one.

        A repeated call would append the rows twice. So it is refused unless the table has `previous_replay_id`. A
        caller that has read the id before therefore knows whether the rows are in, and no other append can happen in
        between.
        """
        ...
