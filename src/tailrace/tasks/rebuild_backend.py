"""Port for rebuilding a lake table, and its implementation for Delta.

Invariants for every implementation: the new table is made in another folder. The existing table stays untouched until
the one commit of `swap`, which gives it the content and position of the new one. Changes are applied range by range, as
a pipeline does. But nothing becomes a dead letter, and the source is never read.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import NoReturn, Protocol

from tailrace.errors import RELOAD_TABLE_HINT, BaseRowMissing, TableUnusable
from tailrace.model import change
from tailrace.model.schema import TableId
from tailrace.tables.delta.rebuild_table import DeltaTableRebuild, RebuildBase
from tailrace.tables.delta.versions import files_at, needs_connector
from tailrace.tables.evolve.schema_plan import Recast
from tailrace.tables.fold.by_mode import fold_by_mode
from tailrace.tables.location import TableLocation
from tailrace.tables.port import AppliedPosition
from tailrace.tasks.apply import read_changes
from tailrace.tasks.work import ApplyWork

FILES_REMOVED = "some of its files were removed"


@dataclass(frozen=True, kw_only=True)
class ApplyRangeResult:
    """Result of applying one range of changes."""

    applied_position: AppliedPosition
    changes: int


class RebuildSession(Protocol):
    """One new table that is being rebuilt."""

    @property
    def location(self) -> TableLocation:
        """Location of the new table."""
        ...

    def restore_base(self, base: RebuildBase) -> int:
        """Restore the rows of a table version or a kept load; return their number."""
        ...

    def evolve(self, recast: Recast, expected: AppliedPosition) -> None:
        """Recast the new table at its applied position."""
        ...

    def apply(self, work: ApplyWork, *, mixed: bool) -> ApplyRangeResult:
        """Apply the work, up to `work.until` if that is set.

        Without a change in that range the position stays as it is. With `mixed`, rows may be newer than the position,
        and an unsent value that only the source has is refused (`BaseRowMissing`).
        """
        ...

    def swap(self, position: AppliedPosition) -> int:
        """Replace the table with the new one, at this position, in one commit. Return its number of rows."""
        ...


class RebuildBackend(Protocol):
    """Rebuilds of one table."""

    def why_unavailable(self, base: RebuildBase) -> str | None:
        """Return why the rows of a version cannot be read; None if they can."""
        ...

    def open_rebuild(self) -> AbstractContextManager[RebuildSession]:
        """Begin a new table; it is removed at the end unless it was swapped in."""
        ...


class DeltaRebuildBackend:
    """Rebuilds of a Delta table: delta-rs makes them, in this process, for every engine."""

    def __init__(self, location: TableLocation) -> None:
        self._location = location

    def why_unavailable(self, base: RebuildBase) -> str | None:
        if needs_connector(self._location.path, base.version):
            return "it has deletion vectors or column mapping"
        try:
            files_at(self._location.path, base.version)
        except TableUnusable:
            return FILES_REMOVED
        return None

    def open_rebuild(self) -> AbstractContextManager[RebuildSession]:
        return _DeltaRebuildSession(self._location)


class _DeltaRebuildSession(DeltaTableRebuild):
    def __enter__(self) -> _DeltaRebuildSession:
        super().__enter__()
        return self

    def evolve(self, recast: Recast, expected: AppliedPosition) -> None:
        self.location.open().evolve(recast, expected)

    def apply(self, work: ApplyWork, *, mixed: bool) -> ApplyRangeResult:
        changes = read_changes(work)
        position_after = work.position_after
        if work.until is not None:
            if not changes.num_rows:
                return ApplyRangeResult(applied_position=work.expected, changes=0)
            position_after = replace(work.expected, seq=changes.column(change.SEQ)[-1].as_py())
        folded = fold_by_mode(work.location.spec, work.schema, changes)
        refetch = (lambda _: refuse_refetch(work.table)) if mixed else None
        applied = self.location.open().apply(
            work.schema, folded, work.expected, position_after, touch=True, refetch=refetch
        )
        return ApplyRangeResult(applied_position=applied.applied_position, changes=changes.num_rows)


def refuse_refetch(table: TableId) -> NoReturn:
    """Refuse to refetch a row that a change with unsent values builds on.

    Called when the earlier row is missing, or may be another row by now.
    """
    raise BaseRowMissing(
        "an update has unsent values that the rebuilt table lacks: the load was chunked, and a rebuild cannot read the "
        "source",
        table=table,
        hint=RELOAD_TABLE_HINT,
    )
