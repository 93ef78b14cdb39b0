"""Who makes a table anew for a rebuild: what the two formats do in their own way, behind one port.

What must stay true, whoever it is: the new table is made beside the one that is there, which is not touched until the
one commit of `swap`, and which is the new one after it, with its position. Changes are applied stretch by stretch, as a
pipeline applies them, but nothing is set aside and nothing is asked of the source.
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

FILES_REMOVED = "files of it were removed"


@dataclass(frozen=True, kw_only=True)
class ApplyRangeResult:
    """What a stretch of changes came to."""

    applied_position: AppliedPosition
    changes: int


class RebuildSession(Protocol):
    """One new table."""

    @property
    def location(self) -> TableLocation:
        """Where it is made."""
        ...

    def restore_base(self, base: RebuildBase) -> int:
        """Make it what a version, or a kept seed, was; how many rows that is."""
        ...

    def evolve(self, recast: Recast, expected: AppliedPosition) -> None:
        """Give it another shape, where it stands."""
        ...

    def apply(self, work: ApplyWork, *, mixed: bool) -> ApplyRangeResult:
        """Bring it to the end of the work, or to that part of it that is asked for; with no change in that part it
        stays where it is. With `mixed` some rows may be newer than the position says, and a value that only the source
        can tell is refused (`BaseRowMissing`)."""
        ...

    def swap(self, cursor: AppliedPosition) -> int:
        """Make the table the new one, at this position, in one commit; how many rows it has."""
        ...


class RebuildBackend(Protocol):
    """Of one table."""

    def why_unavailable(self, base: RebuildBase) -> str | None:
        """Why the rows of a version cannot be had; None if they can."""
        ...

    def open_rebuild(self) -> AbstractContextManager[RebuildSession]:
        """A new table; what is not swapped in is gone in the end."""
        ...


class DeltaRebuildBackend:
    """Of a Delta table: delta-rs makes it, in this process, for every engine."""

    def __init__(self, place: TableLocation) -> None:
        self._place = place

    def why_unavailable(self, base: RebuildBase) -> str | None:
        if needs_connector(self._place.path, base.version):
            return "it has deletion vectors or column mapping"
        try:
            files_at(self._place.path, base.version)
        except TableUnusable:
            return FILES_REMOVED
        return None

    def open_rebuild(self) -> AbstractContextManager[RebuildSession]:
        return _DeltaRebuildSession(self._place)


class _DeltaRebuildSession(DeltaTableRebuild):
    def __enter__(self) -> _DeltaRebuildSession:
        super().__enter__()
        return self

    def evolve(self, recast: Recast, expected: AppliedPosition) -> None:
        self.location.open().evolve(recast, expected)

    def apply(self, work: ApplyWork, *, mixed: bool) -> ApplyRangeResult:
        changes = read_changes(work)
        cursor = work.position_after
        if work.until is not None:
            if not changes.num_rows:
                return ApplyRangeResult(applied_position=work.expected, changes=0)
            cursor = replace(work.expected, seq=changes.column(change.SEQ)[-1].as_py())
        folded = fold_by_mode(work.location.spec, work.schema, changes)
        reread = (lambda _: refuse_refetch(work.table)) if mixed else None
        applied = self.location.open().apply(work.schema, folded, work.expected, cursor, touch=True, reread=reread)
        return ApplyRangeResult(applied_position=applied.applied_position, changes=changes.num_rows)


def refuse_refetch(table: TableId) -> NoReturn:
    """Whoever applies asks the source for a row whose large values did not come, and whose row of before is not there,
    or may be another's by now."""
    raise BaseRowMissing(
        "a change leaves out values that only the source can tell, for the load was read in chunks",
        table=table,
        hint=RELOAD_TABLE_HINT,
    )
