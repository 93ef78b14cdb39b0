"""Who makes a table anew for a rebuild: what the two formats do in their own way, behind one port.

What must stay true, whoever it is: the new table is made beside the one that is there, which is not touched until the
one commit of `swap`, and which is the new one after it, with its position. Changes are applied stretch by stretch, as a
pipeline applies them, but nothing is set aside and nothing is asked of the source.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import NoReturn, Protocol

from tailrace.errors import LOAD_ANEW_HINT, BaseRowMissing, TableUnusable
from tailrace.model import change
from tailrace.model.schema import TableId
from tailrace.tables.delta.rebuild_table import Base, Rebuilding
from tailrace.tables.delta.versions import files_at, needs_connector
from tailrace.tables.evolve.schema_plan import Recast
from tailrace.tables.fold.by_mode import fold_into
from tailrace.tables.location import Place
from tailrace.tables.port import Cursor
from tailrace.tasks.work import ApplyWork, changes_of

REMOVED = "files of it were removed"


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What a stretch of changes came to."""

    cursor: Cursor
    changes: int


class Making(Protocol):
    """One new table."""

    @property
    def made_at(self) -> Place:
        """Where it is made."""
        ...

    def begin(self, base: Base) -> int:
        """Make it what a version, or a kept seed, was; how many rows that is."""
        ...

    def evolve(self, recast: Recast, expected: Cursor) -> None:
        """Give it another shape, where it stands."""
        ...

    def apply(self, work: ApplyWork, *, mixed: bool) -> Taken:
        """Bring it to the end of the work, or to that part of it that is asked for; with no change in that part it
        stays where it is. With `mixed` some rows may be newer than the position says, and a value that only the source
        can tell is refused (`BaseRowMissing`)."""
        ...

    def swap(self, cursor: Cursor) -> int:
        """Make the table the new one, at this position, in one commit; how many rows it has."""
        ...


class Maker(Protocol):
    """Of one table."""

    def lacks(self, base: Base) -> str | None:
        """Why the rows of a version cannot be had; None if they can."""
        ...

    def making(self) -> AbstractContextManager[Making]:
        """A new table; what is not swapped in is gone in the end."""
        ...


class DeltaMaker:
    """Of a Delta table: delta-rs makes it, in this process, for every engine."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def lacks(self, base: Base) -> str | None:
        if needs_connector(self._place.path, base.version):
            return "it has deletion vectors or column mapping"
        try:
            files_at(self._place.path, base.version)
        except TableUnusable:
            return REMOVED
        return None

    def making(self) -> AbstractContextManager[Making]:
        return _DeltaMaking(self._place)


class _DeltaMaking(Rebuilding):
    def __enter__(self) -> _DeltaMaking:
        super().__enter__()
        return self

    def evolve(self, recast: Recast, expected: Cursor) -> None:
        self.made_at.open().evolve(recast, expected)

    def apply(self, work: ApplyWork, *, mixed: bool) -> Taken:
        changes = changes_of(work)
        cursor = work.cursor
        if work.upto is not None:
            if not changes.num_rows:
                return Taken(cursor=work.expected, changes=0)
            cursor = replace(work.expected, seq=changes.column(change.SEQ)[-1].as_py())
        folded = fold_into(work.place.form, work.shape, changes)
        reread = (lambda _: refuse_to_read(work.table)) if mixed else None
        applied = self.made_at.open().apply(work.shape, folded, work.expected, cursor, touch=True, reread=reread)
        return Taken(cursor=applied.cursor, changes=changes.num_rows)


def refuse_to_read(table: TableId) -> NoReturn:
    """Whoever applies asks the source for a row whose large values did not come, and whose row of before is not there,
    or may be another's by now."""
    raise BaseRowMissing(
        "a change leaves out values that only the source can tell, for the load was read in chunks",
        table=table,
        hint=LOAD_ANEW_HINT,
    )
