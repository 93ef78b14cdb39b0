"""Since when tables' changes are in the log without a gap, in `<log>/published.json`.

Written before tables come into the publication, and again once they are in it. What was written to a table until then
is not in the log: a mirror that stands before lacks it, and so does whoever reads the log. A table can come in more
than once, after it was out for a while or because another was made under its name. Each time is kept, since a reader
may stand before any of them.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tailrace.changelog.format.trimmed import read_trimmed
from tailrace.errors import NEW_LOG_HINT, LogCorrupt
from tailrace.model.position import ZERO, Lsn
from tailrace.model.schema import TableId
from tailrace.storage import files, records
from tailrace.storage.files import LogPath

FORMAT = 1
COVERAGE_FILE = "published.json"


class CaptureStartKind(enum.Enum):
    """What a table that comes in was to the log before."""

    NEW = "new"
    """Nothing."""
    ANOTHER = "another"
    """Another table of this name was in it."""
    AGAIN = "again"
    """It was in it, and was out for a while."""
    MOVED = "moved"
    """It goes from one publication of ours to the other, and is in both for a moment."""


@dataclass(frozen=True, kw_only=True)
class CaptureStart:
    """One table that comes into the publication."""

    table: TableId
    relation: int
    """The source's number of the table that this one is made of."""
    kind: CaptureStartKind
    commit: int
    """The log's newest one at the time; it may have been behind the source."""
    announced_at: Lsn
    """Where the source was just before."""
    confirmed_at: Lsn | None = None
    """Where it was once the table was in; None: that is not known, or not so yet."""

    @property
    def complete_from(self) -> Lsn:
        """Nothing of the table is missing that was begun after this."""
        return self.confirmed_at or self.announced_at


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """All that have come in, oldest first."""

    starts: tuple[CaptureStart, ...] = ()

    def complete_from(self, table: TableId) -> Lsn | None:
        """A position that nothing of the table is missing after; None: nothing is missing at all."""
        return self._last.get(table)

    def recaptured_from(self, table: TableId) -> Lsn | None:
        """The same of a table that was in it before, and was out for a while; None: that never was."""
        return self._again.get(table)

    @cached_property
    def _last(self) -> dict[TableId, Lsn]:
        return {coming.table: coming.announced_at for coming in self.starts if coming.announced_at > ZERO}

    @cached_property
    def _again(self) -> dict[TableId, Lsn]:
        return {coming.table: coming.announced_at for coming in self.starts if coming.kind is CaptureStartKind.AGAIN}


def read_coverage(log: LogPath) -> Coverage:
    """The record; in a log without one nothing is missing."""
    path = log / COVERAGE_FILE
    try:
        with files.explain_errors_but_missing(path):
            text = path.read_bytes()
        return Coverage(starts=tuple(map(_coming, records.decode(text, FORMAT)["tables"])))
    except FileNotFoundError:
        return Coverage()
    except (ValueError, KeyError, TypeError) as error:
        raise LogCorrupt(
            f"the record of when tables were published cannot be read: {error}",
            path=path,
            hint=f"Restore it from a copy of the log. Without one: {NEW_LOG_HINT}",
        ) from error


def announce_tables(
    log: LogPath, tables: Sequence[tuple[TableId, int]], since: Lsn, *, commit: int = 0, moved: Collection[int] = ()
) -> None:
    """The tables, each with its number at the source, are about to be published."""
    known, asked = read_coverage(log).starts, set(tables)
    # One that was announced and never came in tells nothing.
    kept = [
        coming for coming in known if coming.confirmed_at is not None or (coming.table, coming.relation) not in asked
    ]
    comings = [
        CaptureStart(
            table=table, relation=relation, kind=_kind(kept, table, relation, moved), commit=commit, announced_at=since
        )
        for table, relation in tables
    ]
    _write(log, [*_needed(log, kept), *comings])


def confirm_tables(log: LogPath, tables: Sequence[tuple[TableId, int]], whole: Lsn) -> None:
    """All of these are in now. Those that nothing was written of are in for as long as there is a log."""
    known = read_coverage(log).starts
    inside, recorded = {relation for _, relation in tables}, {coming.relation for coming in known}
    now = [
        replace(coming, confirmed_at=whole) if coming.confirmed_at is None and coming.relation in inside else coming
        for coming in known
    ]
    now += [
        CaptureStart(
            table=table, relation=relation, kind=CaptureStartKind.NEW, commit=0, announced_at=ZERO, confirmed_at=ZERO
        )
        for table, relation in tables
        if relation not in recorded
    ]
    if now != list(known):
        _write(log, now)


def _kind(known: Sequence[CaptureStart], table: TableId, relation: int, moved: Collection[int]) -> CaptureStartKind:
    if relation in moved:
        return CaptureStartKind.MOVED
    inside = [coming for coming in known if coming.confirmed_at is not None]
    if any(coming.relation == relation for coming in inside):
        return CaptureStartKind.AGAIN
    return CaptureStartKind.ANOTHER if any(coming.table == table for coming in inside) else CaptureStartKind.NEW


def _needed(log: LogPath, known: Sequence[CaptureStart]) -> list[CaptureStart]:
    """The last of each table, and whatever else lies after what is trimmed: nobody reads on from before that."""
    gone = read_trimmed(log).position
    last = {(coming.table, coming.relation): coming for coming in known}
    return [coming for coming in known if coming.announced_at > gone or last[coming.table, coming.relation] is coming]


def _write(log: LogPath, comings: Sequence[CaptureStart]) -> None:
    stored = [
        {
            "schema": coming.table.schema,
            "table": coming.table.name,
            "relation": coming.relation,
            "kind": coming.kind.value,
            "commit": coming.commit,
            "since": str(coming.announced_at),
            "whole": None if coming.confirmed_at is None else str(coming.confirmed_at),
        }
        for coming in comings
    ]
    with files.explain_errors(log / COVERAGE_FILE):
        files.replace_durably(log / COVERAGE_FILE, records.encode({"format": FORMAT, "tables": stored}))


def _coming(stored: dict[str, Any]) -> CaptureStart:
    return CaptureStart(
        table=TableId(stored["schema"], stored["table"]),
        relation=stored["relation"],
        kind=CaptureStartKind(stored["kind"]),
        commit=stored["commit"],
        announced_at=Lsn.parse(stored["since"]),
        confirmed_at=None if stored["whole"] is None else Lsn.parse(stored["whole"]),
    )
