"""Which versions of the lake tables belong together: after every micro-batch, the version of each at one commit.

    <log>/ledger/<commit>-<time>.jsonl   points, oldest first; the first of a file is whole, the others say what differs

A point is noted only if every table that goes on holds all changes up to the commit, and none after it. What is lost
with a crash is a point and never a row: each line has a checksum, and one that is torn ends its file.
"""

from __future__ import annotations

import bisect
import json
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from tailrace.changelog import files
from tailrace.changelog.files import LogPath
from tailrace.errors import ConfigError, TailraceError
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId

FOLDER = "ledger"
POINTS_MAX = 1000
"""In one file."""
KEPT_SECONDS = 30 * 86_400.0
"""Points older than this go: the files of tables that old are usually gone as well."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """The version of every table at one commit of the log."""

    commit: int
    position: Lsn
    committed_at: int
    """When the source committed the last transaction that is in it, in microseconds since 1970."""
    versions: Mapping[TableId, int]

    @property
    def time(self) -> datetime:
        return datetime.fromtimestamp(self.committed_at / 1e6, UTC)


class Ledger:
    """The points of one log. One writes, any number read."""

    def __init__(self, log: LogPath) -> None:
        self._folder = log / FOLDER
        self._file: LogPath | None = None
        self._count = 0
        self._last: dict[TableId, int] = {}

    def note(self, point: Point) -> None:
        """Add a point, if it says anything new. Whoever cannot write it goes on without."""
        if self._file is not None and dict(point.versions) == self._last:
            return
        file, before = self._file, self._last
        if file is None or self._count >= POINTS_MAX:
            file, before, self._count = self._folder / f"{point.commit:020d}-{time.time_ns():020d}.jsonl", {}, 0
        self._file = None  # after a line that was not written, or not whole, comes another file
        with suppress(OSError, TailraceError):
            if not self._count:
                files.make_folder(self._folder)
                self._sweep()
            files.append(file, _line(point, before))
            self._file, self._last, self._count = file, dict(point.versions), self._count + 1

    def points(self) -> Iterator[Point]:
        """All of them, oldest first."""
        for path in self._files():
            yield from _read(path)

    def at(self, *, position: Lsn | None = None, committed_at: int | None = None) -> Point:
        """The last point at or before a position or a time; without either, the last of all."""
        names = self._files()
        first = [next(_read(path), None) for path in names]

        def is_after(point: Point | None) -> bool:
            if point is None:
                return False
            too_far = position is not None and point.position > position
            return too_far or (committed_at is not None and point.committed_at > committed_at)

        for path in reversed(names[: bisect.bisect_left(first, True, key=is_after)]):
            found = [point for point in _read(path) if not is_after(point)]
            if found:
                return found[-1]
        known = next((point for point in first if point is not None), None)
        if known is None:
            raise ConfigError(
                "no point across the tables has been noted yet",
                hint="One is noted whenever `tailrace run` or `tailrace apply` has brought all tables to one commit.",
            )
        raise ConfigError(
            "the first point that is known is later", time=known.time.isoformat(), position=known.position,
            hint="Points are kept for 30 days. Ask for a later time or position.",
        )  # fmt: skip

    def _files(self) -> list[LogPath]:
        return sorted(self._folder.glob("*.jsonl"))

    def _sweep(self) -> None:
        for path in self._files():
            if files.modified_at(path) < time.time() - KEPT_SECONDS:
                path.unlink()


def _line(point: Point, before: Mapping[TableId, int]) -> bytes:
    changed = [
        [table.schema, table.name, version]
        for table, version in point.versions.items()
        if before.get(table) != version
    ]
    stored = {
        "commit": point.commit, "position": str(point.position), "committed_at": point.committed_at,
        "tables": changed, "gone": [[table.schema, table.name] for table in before.keys() - point.versions.keys()],
    }  # fmt: skip
    text = json.dumps(stored).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _read(path: LogPath) -> Iterator[Point]:
    versions: dict[TableId, int] = {}
    with suppress(OSError), files.opened(path) as stream:
        for line in stream:
            crc, _, text = line.rstrip(b"\n").partition(b" ")
            if not line.endswith(b"\n") or f"{zlib.crc32(text):08x}".encode() != crc:
                return
            stored = json.loads(text)
            versions |= {TableId(schema, name): version for schema, name, version in stored["tables"]}
            for schema, name in stored["gone"]:
                versions.pop(TableId(schema, name), None)
            yield Point(
                commit=stored["commit"], position=Lsn.parse(stored["position"]), committed_at=stored["committed_at"],
                versions=dict(versions),
            )  # fmt: skip
