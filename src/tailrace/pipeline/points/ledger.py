"""Ledger of consistent points. After each micro-batch, it gets each lake table's version at one commit.

    <log>/ledger/<commit>-<time>.jsonl   points, oldest first; the first in a file is complete, the others are deltas

A point lists the tables that have all changes up to the commit and none after it. For every other table it has the
reason why that is missing. Each version is stored with the identity of its lake table: a table whose folder was removed
counts its versions from the beginning, and old numbers then mean nothing. Times never go back from point to point,
whatever the source's clock does: what is in one point is in all later ones. A crash can lose a point but never a row:
each line has a checksum, and a torn line ends its file.
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
"""Points in one file."""
NEAR_POINTS = 30
"""Points before the requested one that are searched for one with fewer tables temporarily missing."""
KEPT_SECONDS = 30 * 86_400.0
"""Age at which files of points are removed. The table versions they name are usually gone by then."""


TABLE_RECREATED, FOLDER_GONE = "the table was recreated since", "its folder is gone"
"""Stored values of `Absence.why`: ledgers hold them, so they do not change."""


@dataclass(frozen=True, kw_only=True)
class Absence:
    """The reason why a table is missing from a point."""

    state: str
    """State of the table: a value of `TableState`."""
    why: str
    """Reason in a few words, or the code of the table's error."""

    @property
    def is_replaced(self) -> bool:
        """True if the version is gone, because the table was recreated or its folder removed."""
        return self.why in (TABLE_RECREATED, FOLDER_GONE)

    @property
    def is_temporary(self) -> bool:
        """True if the table still applies, so that later points will have it again."""
        return self.state in (TableState.LIVE.value, TableState.CATCHING_UP.value)


@dataclass(frozen=True, kw_only=True)
class ConsistentPoint:
    """The versions of the lake tables that belong together at one commit of the log."""

    commit: int
    position: Lsn
    committed_at: int
    """Source commit time of the newest transaction in the point, in µs since 1970.

    0: not known; such a point is recorded with the time of the point before it.
    """
    versions: Mapping[TableId, int]
    missing: Mapping[TableId, Absence] = field(default_factory=dict)
    """Tables without a version at this point."""
    lake_table_ids: Mapping[TableId, str] = field(default_factory=dict)
    """Identity of the lake table of each version; absent in points recorded by older releases."""

    @property
    def time(self) -> datetime:
        return datetime.fromtimestamp(self.committed_at / 1e6, UTC)


class Ledger:
    """The consistent points of one log; one process writes, any number read."""

    def __init__(self, log: LogPath) -> None:
        self._folder = log / FOLDER
        self._file: LogPath | None = None
        self._count = 0
        self._last: ConsistentPoint | None = None
        self._newest: int | None = None

    @property
    def last(self) -> ConsistentPoint | None:
        """Last point that this process recorded."""
        return self._last

    def record(self, point: ConsistentPoint) -> None:
        """Add a point if it differs from the last one. A failure to write is ignored."""
        file, before = self._file, self._last
        if file is not None and before is not None and _is_same(point, before):
            return
        if file is None or self._count >= POINTS_MAX:
            file, before, self._count = self._folder / f"{point.commit:020d}-{time.time_ns():020d}.jsonl", None, 0
        self._file = None  # after a line that was torn or not written, another file begins
        with suppress(OSError, TailraceError):
            # Our own clock may differ from the source's, so it counts only if no source time is known.
            self._newest = max(self._newest_time(), point.committed_at) or time.time_ns() // 1000
            point = replace(point, committed_at=self._newest)
            if not self._count:
                files.make_folder(self._folder)
                self._remove_old()
            files.append(file, _line(point, before))
            self._file, self._last, self._count = file, point, self._count + 1

    def points(self) -> Iterator[ConsistentPoint]:
        """Yield all points, oldest first."""
        for path in self._files():
            yield from _read(path)

    def at(self, *, position: Lsn | None = None, committed_at: int | None = None) -> ConsistentPoint:
        """Return the last point at or before a position or a time.

        Without either it is the last of all.

        If tables are temporarily missing from it, return one shortly before that lacks fewer.
        """
        begun = {path: point for path in self._files() if (point := next(_read(path), None)) is not None}
        names, first = list(begun), list(_with_rising_times(begun.values()))

        def is_after(point: ConsistentPoint) -> bool:
            too_far = position is not None and point.position > position
            return too_far or (committed_at is not None and point.committed_at > committed_at)

        near: list[ConsistentPoint] = []
        for place in reversed(range(bisect.bisect_left(first, True, key=is_after))):
            points = _with_rising_times(_read(names[place]), first[place].committed_at)
            near += reversed([point for point in points if not is_after(point)])
            if len(near) >= NEAR_POINTS:
                break
        if near:
            last = near[0]
            wanted = last.versions.keys() | {table for table, absence in last.missing.items() if absence.is_temporary}
            # A table missing from an earlier point counts whatever the reason was. Among equals the newest wins.
            return min(near[:NEAR_POINTS], key=lambda point: len(wanted & point.missing.keys()))
        if not first:
            raise ConfigError(
                "the log has no consistent point yet",
                hint="Run `tailrace run` or `tailrace apply`, and wait until the tables have reached one commit.",
            )
        raise ConfigError(
            "the first consistent point is later",
            time=first[0].time.isoformat(),
            position=first[0].position,
            hint="Points are kept for 30 days. Ask for a later time or position.",
        )

    def _newest_time(self) -> int:
        """Return the time of the last recorded point; 0 without any. An earlier process may have recorded it."""
        if self._newest is None:
            last = next((points for path in reversed(self._files()) if (points := list(_read(path)))), [])
            self._newest = max((point.committed_at for point in last), default=0)
        return self._newest

    def _files(self) -> list[LogPath]:
        return sorted(self._folder.glob("*.jsonl"))

    def _remove_old(self) -> None:
        for path in self._files():
            if files.modified_at(path) < time.time() - KEPT_SECONDS:
                path.unlink()


def _with_rising_times(points: Iterable[ConsistentPoint], newest: int = 0) -> Iterator[ConsistentPoint]:
    """Yield the points with times that never go back. In points of older releases they may."""
    for point in points:
        newest = max(newest, point.committed_at)
        yield replace(point, committed_at=newest)


def _is_same(point: ConsistentPoint, before: ConsistentPoint) -> bool:
    return _content(point) == _content(before)


def _content(point: ConsistentPoint) -> tuple[object, ...]:
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
            # Points of older releases have no list of missing tables.
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
