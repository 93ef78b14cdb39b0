"""Record from which position each table is complete in the log.

The record is `<log>/published.json`. It is written before a table enters the publication, and again once the table is
in it. What was written to a table until then is not in the log, so a mirror with an earlier position and an early
reader of the log lack it.

A table can enter more than once: after it was out for a while, or because another table was made under its name. Each
start is kept, since a reader may be before any of them.
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
    """The history of a table in the log before a start."""

    NEW = "new"
    """The log had no table of this name."""
    ANOTHER = "another"
    """Another table of this name was in the log."""
    AGAIN = "again"
    """The table was in the log, and was out for a while."""
    MOVED = "moved"
    """The table moves between two publications of ours and is in both for a moment."""


@dataclass(frozen=True, kw_only=True)
class CaptureStart:
    """One table that enters the publication."""

    table: TableId
    relation: int
    """The source's number of this table."""
    kind: CaptureStartKind
    commit: int
    """The log's newest commit at the time; it may have been behind the source."""
    announced_at: Lsn
    """The source's position just before."""
    confirmed_at: Lsn | None = None
    """The source's position once the table was in; None: unknown, or not in yet."""

    @property
    def complete_from(self) -> Lsn:
        """The position after which every transaction that begins has its changes in the log."""
        return self.confirmed_at or self.announced_at


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """All starts of all tables, oldest first."""

    starts: tuple[CaptureStart, ...] = ()

    def complete_from(self, table: TableId) -> Lsn | None:
        """Return a position after which no change of the table is missing.

        None: no change is missing at all.
        """
        return self._last.get(table)

    def recaptured_from(self, table: TableId) -> Lsn | None:
        """Return the position from which a table that was out for a while is complete.

        None: the table never was out.
        """
        return self._again.get(table)

    @cached_property
    def _last(self) -> dict[TableId, Lsn]:
        return {start.table: start.announced_at for start in self.starts if start.announced_at > ZERO}

    @cached_property
    def _again(self) -> dict[TableId, Lsn]:
        return {start.table: start.announced_at for start in self.starts if start.kind is CaptureStartKind.AGAIN}


def read_coverage(log: LogPath) -> Coverage:
    """Return the record; a log without one has all changes."""
    path = log / COVERAGE_FILE
    try:
        with files.explain_errors_but_missing(path):
            text = path.read_bytes()
        return Coverage(starts=tuple(map(_parse_start, records.decode(text, FORMAT)["tables"])))
    except FileNotFoundError:
        return Coverage()
    except (ValueError, KeyError, TypeError) as error:
        raise LogCorrupt(
            f"the record of table coverage cannot be read: {error}",
            path=path,
            hint=f"Restore it from a copy of the log. Without one: {NEW_LOG_HINT}",
        ) from error


def announce_tables(
    log: LogPath, tables: Sequence[tuple[TableId, int]], since: Lsn, *, commit: int = 0, moved: Collection[int] = ()
) -> None:
    """Record that tables, each with its number at the source, are about to be published."""
    known, announced = read_coverage(log).starts, set(tables)
    # A start that was announced and never confirmed says nothing.
    kept = [
        start for start in known if start.confirmed_at is not None or (start.table, start.relation) not in announced
    ]
    starts = [
        CaptureStart(
            table=table, relation=relation, kind=_kind(kept, table, relation, moved), commit=commit, announced_at=since
        )
        for table, relation in tables
    ]
    _write(log, [*_needed(log, kept), *starts])


def confirm_tables(log: LogPath, tables: Sequence[tuple[TableId, int]], whole: Lsn) -> None:
    """Record that all of these tables are in the publication now.

    A table without an earlier record has been in since the log began.
    """
    known = read_coverage(log).starts
    published, recorded = {relation for _, relation in tables}, {start.relation for start in known}
    updated = [
        replace(start, confirmed_at=whole) if start.confirmed_at is None and start.relation in published else start
        for start in known
    ]
    updated += [
        CaptureStart(
            table=table, relation=relation, kind=CaptureStartKind.NEW, commit=0, announced_at=ZERO, confirmed_at=ZERO
        )
        for table, relation in tables
        if relation not in recorded
    ]
    if updated != list(known):
        _write(log, updated)


def _kind(known: Sequence[CaptureStart], table: TableId, relation: int, moved: Collection[int]) -> CaptureStartKind:
    if relation in moved:
        return CaptureStartKind.MOVED
    confirmed = [start for start in known if start.confirmed_at is not None]
    if any(start.relation == relation for start in confirmed):
        return CaptureStartKind.AGAIN
    return CaptureStartKind.ANOTHER if any(start.table == table for start in confirmed) else CaptureStartKind.NEW


def _needed(log: LogPath, known: Sequence[CaptureStart]) -> list[CaptureStart]:
    """Return the last start of each table, and every other one after what is trimmed.

    No reader resumes from before that.
    """
    trimmed = read_trimmed(log).position
    last = {(start.table, start.relation): start for start in known}
    return [start for start in known if start.announced_at > trimmed or last[start.table, start.relation] is start]


def _write(log: LogPath, starts: Sequence[CaptureStart]) -> None:
    stored = [
        {
            "schema": start.table.schema,
            "table": start.table.name,
            "relation": start.relation,
            "kind": start.kind.value,
            "commit": start.commit,
            "since": str(start.announced_at),
            "whole": None if start.confirmed_at is None else str(start.confirmed_at),
        }
        for start in starts
    ]
    with files.explain_errors(log / COVERAGE_FILE):
        files.replace_durably(log / COVERAGE_FILE, records.encode({"format": FORMAT, "tables": stored}))


def _parse_start(stored: dict[str, Any]) -> CaptureStart:
    return CaptureStart(
        table=TableId(stored["schema"], stored["table"]),
        relation=stored["relation"],
        kind=CaptureStartKind(stored["kind"]),
        commit=stored["commit"],
        announced_at=Lsn.parse(stored["since"]),
        confirmed_at=None if stored["whole"] is None else Lsn.parse(stored["whole"]),
    )
