"""Since when tables' changes are in the log without a gap, in `<log>/published.json`.

Written before tables come into the publication, and again once they are in it. What was written to a table until then
is not in the log: a mirror that stands before lacks it, and so does whoever reads the log. A table can come in more
than once, after it was out for a while or because another was made under its name. Each time is kept, since a reader
may stand before any of them.
"""

from __future__ import annotations

import enum
import hashlib
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
NAME = "published.json"


class Kind(enum.Enum):
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
class Coming:
    """One table that comes into the publication."""

    table: TableId
    relation: int
    """The source's number of the table that this one is made of."""
    kind: Kind
    commit: int
    """The log's newest one at the time; it may have been behind the source."""
    since: Lsn
    """Where the source was just before."""
    whole: Lsn | None = None
    """Where it was once the table was in; None: that is not known, or not so yet."""

    @property
    def complete_from(self) -> Lsn:
        """Nothing of the table is missing that was begun after this."""
        return self.whole or self.since


@dataclass(frozen=True, kw_only=True)
class Published:
    """All that have come in, oldest first."""

    comings: tuple[Coming, ...] = ()

    def since(self, table: TableId) -> Lsn | None:
        """A position that nothing of the table is missing after; None: nothing is missing at all."""
        return self._last.get(table)

    def again(self, table: TableId) -> Lsn | None:
        """The same of a table that was in it before, and was out for a while; None: that never was."""
        return self._again.get(table)

    @cached_property
    def _last(self) -> dict[TableId, Lsn]:
        return {coming.table: coming.since for coming in self.comings if coming.since > ZERO}

    @cached_property
    def _again(self) -> dict[TableId, Lsn]:
        return {coming.table: coming.since for coming in self.comings if coming.kind is Kind.AGAIN}


def read_published(log: LogPath) -> Published:
    """The record; in a log without one nothing is missing."""
    path = log / NAME
    try:
        with files.explained_but_missing(path):
            text = path.read_bytes()
        return Published(comings=tuple(map(_coming, records.decode(text, FORMAT)["tables"])))
    except FileNotFoundError:
        return Published()
    except (ValueError, KeyError, TypeError) as error:
        raise LogCorrupt(
            f"the record of when tables were published cannot be read: {error}",
            path=path,
            hint=f"Restore it from a copy of the log. Without one: {NEW_LOG_HINT}",
        ) from error


def announce(
    log: LogPath, tables: Sequence[tuple[TableId, int]], since: Lsn, *, commit: int = 0, moved: Collection[int] = ()
) -> None:
    """The tables, each with its number at the source, are about to be published."""
    known, asked = read_published(log).comings, set(tables)
    # One that was announced and never came in tells nothing.
    kept = [coming for coming in known if coming.whole is not None or (coming.table, coming.relation) not in asked]
    comings = [
        Coming(table=table, relation=relation, kind=_kind(kept, table, relation, moved), commit=commit, since=since)
        for table, relation in tables
    ]
    _write(log, [*_needed(log, kept), *comings])


def confirm(log: LogPath, tables: Sequence[tuple[TableId, int]], whole: Lsn) -> None:
    """All of these are in now. Those that nothing was written of are in for as long as there is a log."""
    known = read_published(log).comings
    inside, recorded = {relation for _, relation in tables}, {coming.relation for coming in known}
    now = [
        replace(coming, whole=whole) if coming.whole is None and coming.relation in inside else coming
        for coming in known
    ]
    now += [
        Coming(table=table, relation=relation, kind=Kind.NEW, commit=0, since=ZERO, whole=ZERO)
        for table, relation in tables
        if relation not in recorded
    ]
    if now != list(known):
        _write(log, now)


def _kind(known: Sequence[Coming], table: TableId, relation: int, moved: Collection[int]) -> Kind:
    if relation in moved:
        return Kind.MOVED
    inside = [coming for coming in known if coming.whole is not None]
    if any(coming.relation == relation for coming in inside):
        return Kind.AGAIN
    return Kind.ANOTHER if any(coming.table == table for coming in inside) else Kind.NEW


def _needed(log: LogPath, known: Sequence[Coming]) -> list[Coming]:
    """The last of each table, and whatever else lies after what is trimmed: nobody reads on from before that."""
    gone = read_trimmed(log).position
    last = {(coming.table, coming.relation): coming for coming in known}
    return [coming for coming in known if coming.since > gone or last[coming.table, coming.relation] is coming]


def _write(log: LogPath, comings: Sequence[Coming]) -> None:
    stored = [
        {
            "schema": coming.table.schema,
            "table": coming.table.name,
            "relation": coming.relation,
            "kind": coming.kind.value,
            "commit": coming.commit,
            "since": str(coming.since),
            "whole": None if coming.whole is None else str(coming.whole),
        }
        for coming in comings
    ]
    with files.explained(log / NAME):
        files.replace_durably(log / NAME, records.encode({"format": FORMAT, "tables": stored}))


def _coming(stored: dict[str, Any]) -> Coming:
    return Coming(
        table=TableId(stored["schema"], stored["table"]),
        relation=stored["relation"],
        kind=Kind(stored["kind"]),
        commit=stored["commit"],
        since=Lsn.parse(stored["since"]),
        whole=None if stored["whole"] is None else Lsn.parse(stored["whole"]),
    )


def token(table: TableId) -> str:
    """A name for a table that is a file's too."""
    return hashlib.sha256(f"{len(table.schema)}.{table.schema}.{table.name}".encode()).hexdigest()[:16]
