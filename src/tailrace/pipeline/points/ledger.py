"""Which versions of the lake tables belong together: after every micro-batch, the version of each at one commit.

    <log>/ledger/<commit>-<time>.jsonl   points, oldest first; the first of a file is whole, the others say what differs

A point names the tables that hold all changes up to the commit, and none after it; of any other it says why that is
missing. A version is told with the identity of the table that it is of: a table's folder that is removed and made anew
counts from the beginning, and what its numbers meant before they no longer mean. Times never go back from point to
point, whatever the source's clock does: what is in one is in all after it. What is lost with a crash is a point and
never a row: each line has a checksum, and one that is torn ends its file.
"""

from __future__ import annotations

import bisect
import json
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from tailrace.errors import ConfigError, TailraceError
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId
from tailrace.pipeline.report import TableState
from tailrace.storage import files
from tailrace.storage.files import LogPath

FOLDER = "ledger"
POINTS_MAX = 1000
"""In one file."""
NEAR_POINTS = 30
"""So far back is looked for a point that a table is not missing from which is usually there."""
KEPT_SECONDS = 30 * 86_400.0
"""Points older than this go: the files of tables that old are usually gone as well."""


@dataclass(frozen=True, kw_only=True)
class Absence:
    """Why a table is missing from a point."""

    state: str
    """Of the table, as `TableState` has it,"""
    why: str
    """and a few words, or the code of its error."""

    @property
    def is_temporary(self) -> bool:
        """Whether the table goes on, and will be with the others again by itself."""
        return self.state in (TableState.LIVE.value, TableState.CATCHING_UP.value)


@dataclass(frozen=True, kw_only=True)
class ConsistentPoint:
    """The version of every table that is at one commit of the log."""

    commit: int
    position: Lsn
    committed_at: int
    """When the source committed the newest of all transactions that are in it, in microseconds since 1970; 0: nothing
    tells, and it is noted with the time of the one before it."""
    versions: Mapping[TableId, int]
    missing: Mapping[TableId, Absence] = field(default_factory=dict)
    """The tables that have none there."""
    lake_table_ids: Mapping[TableId, str] = field(default_factory=dict)
    """Which table each version is of; points noted before that was asked do not say."""

    @property
    def time(self) -> datetime:
        return datetime.fromtimestamp(self.committed_at / 1e6, UTC)


class Ledger:
    """The points of one log. One writes, any number read."""

    def __init__(self, log: LogPath) -> None:
        self._folder = log / FOLDER
        self._file: LogPath | None = None
        self._count = 0
        self._last: ConsistentPoint | None = None
        self._newest: int | None = None

    @property
    def last(self) -> ConsistentPoint | None:
        """The point that was last noted, by us."""
        return self._last

    def record(self, point: ConsistentPoint) -> None:
        """Add a point, if it says anything new. Whoever cannot write it goes on without."""
        file, before = self._file, self._last
        if file is not None and before is not None and _says_the_same(point, before):
            return
        if file is None or self._count >= POINTS_MAX:
            file, before, self._count = self._folder / f"{point.commit:020d}-{time.time_ns():020d}.jsonl", None, 0
        self._file = None  # after a line that was not written, or not whole, comes another file
        with suppress(OSError, TailraceError):
            # Our own clock may be another than the source's, so it counts only where nothing of that is known.
            self._newest = max(self._noted_upto(), point.committed_at) or time.time_ns() // 1000
            point = replace(point, committed_at=self._newest)
            if not self._count:
                files.make_folder(self._folder)
                self._sweep()
            files.append(file, _line(point, before))
            self._file, self._last, self._count = file, point, self._count + 1

    def points(self) -> Iterator[ConsistentPoint]:
        """All of them, oldest first."""
        for path in self._files():
            yield from _read(path)

    def at(self, *, position: Lsn | None = None, committed_at: int | None = None) -> ConsistentPoint:
        """The last point at or before a position or a time; without either, the last of all. If tables are missing from
        it only in passing, one of those shortly before that lacks fewer."""
        begun = {path: point for path in self._files() if (point := next(_read(path), None)) is not None}
        names, first = list(begun), list(_rising(begun.values()))

        def is_after(point: ConsistentPoint) -> bool:
            too_far = position is not None and point.position > position
            return too_far or (committed_at is not None and point.committed_at > committed_at)

        near: list[ConsistentPoint] = []
        for place in reversed(range(bisect.bisect_left(first, True, key=is_after))):
            points = _rising(_read(names[place]), first[place].committed_at)
            near += reversed([point for point in points if not is_after(point)])
            if len(near) >= NEAR_POINTS:
                break
        if near:
            last = near[0]
            wanted = last.versions.keys() | {table for table, absence in last.missing.items() if absence.is_temporary}
            # What a point before lacks counts whatever the reason was then. Of several, the newest.
            return min(near[:NEAR_POINTS], key=lambda point: len(wanted & point.missing.keys()))
        if not first:
            raise ConfigError(
                "no point across the tables has been noted yet",
                hint="One is noted whenever `tailrace run` or `tailrace apply` has brought tables to one commit.",
            )
        raise ConfigError(
            "the first point that is known is later",
            time=first[0].time.isoformat(),
            position=first[0].position,
            hint="Points are kept for 30 days. Ask for a later time or position.",
        )

    def _noted_upto(self) -> int:
        """The time of the last point that was noted, also by a process before us; 0 if there is none."""
        if self._newest is None:
            last = next((points for path in reversed(self._files()) if (points := list(_read(path)))), [])
            self._newest = max((point.committed_at for point in last), default=0)
        return self._newest

    def _files(self) -> list[LogPath]:
        return sorted(self._folder.glob("*.jsonl"))

    def _sweep(self) -> None:
        for path in self._files():
            if files.modified_at(path) < time.time() - KEPT_SECONDS:
                path.unlink()


def _rising(points: Iterable[ConsistentPoint], newest: int = 0) -> Iterator[ConsistentPoint]:
    """The points with times that do not go back: such as were noted before that was seen to may do so."""
    for point in points:
        newest = max(newest, point.committed_at)
        yield replace(point, committed_at=newest)


def _says_the_same(point: ConsistentPoint, before: ConsistentPoint) -> bool:
    return _all_of(point) == _all_of(before)


def _all_of(point: ConsistentPoint) -> tuple[object, ...]:
    return dict(point.versions), dict(point.missing), dict(point.lake_table_ids)


def _line(point: ConsistentPoint, before: ConsistentPoint | None) -> bytes:
    versions = before.versions if before is not None else {}
    missing = before.missing if before is not None else {}
    identities = before.lake_table_ids if before is not None else {}
    stored = {
        "commit": point.commit,
        "position": str(point.position),
        "committed_at": point.committed_at,
        "tables": [
            [table.schema, table.name, version]
            for table, version in point.versions.items()
            if versions.get(table) != version
        ],
        "gone": _names(versions.keys() - point.versions.keys()),
        "missing": [
            [table.schema, table.name, absence.state, absence.why]
            for table, absence in point.missing.items()
            if missing.get(table) != absence
        ],
        "found": _names(missing.keys() - point.missing.keys()),
        "identities": [
            [table.schema, table.name, own]
            for table, own in point.lake_table_ids.items()
            if identities.get(table) != own
        ],
    }
    text = json.dumps(stored).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _names(tables: Iterable[TableId]) -> list[list[str]]:
    return [[table.schema, table.name] for table in tables]


def _read(path: LogPath) -> Iterator[ConsistentPoint]:
    versions, missing, identities = dict[TableId, int](), dict[TableId, Absence](), dict[TableId, str]()
    with suppress(OSError), files.open_for_reading(path) as stream:
        for line in stream:
            crc, _, text = line.rstrip(b"\n").partition(b" ")
            if not line.endswith(b"\n") or f"{zlib.crc32(text):08x}".encode() != crc:
                return
            stored = json.loads(text)
            versions |= {TableId(schema, name): version for schema, name, version in stored["tables"]}
            for schema, name in stored["gone"]:
                versions.pop(TableId(schema, name), None)
                identities.pop(TableId(schema, name), None)
            # Points noted before tables could be missing from one say nothing of such.
            for schema, name, state, why in stored.get("missing", []):
                missing[TableId(schema, name)] = Absence(state=state, why=why)
            for schema, name in stored.get("found", []):
                missing.pop(TableId(schema, name), None)
            identities |= {TableId(schema, name): own for schema, name, own in stored.get("identities", [])}
            yield ConsistentPoint(
                commit=stored["commit"],
                position=Lsn.parse(stored["position"]),
                committed_at=stored["committed_at"],
                versions=dict(versions),
                missing=dict(missing),
                lake_table_ids=dict(identities),
            )
