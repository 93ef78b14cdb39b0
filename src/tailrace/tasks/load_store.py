"""Store load records, load requests and holds below `<log>/seed/`.

    wishes/<id>.json      load request of a person, kept until the load commit
    held/<id>.json        table whose loads a person has paused or stopped
    retries/<id>.json     failed table to try again
    <id>/plan.json        load record, written before the first chunk
    <id>/chunk-<n>.json   chunk whose rows are staged in the table's folder
    <id>/letters-<n>.arrow  dead letters of the chunk: rows that the table cannot hold
    <id>/landing.json     position that the catch-up must pass, written before the load commit
    <id>/reread-….json    row refetched during the catch-up: the catch-up must pass its position too
    landed/<id>.json      ranges in which the table held rows newer than its position (a rebuild needs them), and the
                          source's time when the rows had been read

A load whose process died is found here and resumes with the chunks it lacks. Nothing here decides what a table holds:
the table's own commit does, and that commit names its load.
"""

from __future__ import annotations

import enum
import json
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa

from tailrace.capture.postgres.chunks import Plan
from tailrace.capture.postgres.snapshot import BarrierSnapshot
from tailrace.deadletters.step_file import DeadLetterBatch, encode_dead_letters, read_dead_letters
from tailrace.errors import ConfigError
from tailrace.model.position import ZERO, Lsn
from tailrace.model.schema import TableId, TableSchema, table_token
from tailrace.storage import files
from tailrace.storage.files import LogPath
from tailrace.tables.spec import PLAIN_MIRROR, TableSpec
from tailrace.tables.staging import StagedFile

FOLDER = "seed"
Record = TypeVar("Record")
REMEMBERED_SECONDS = 90 * 86_400.0
"""Age at which records of committed loads are removed: longer than a Delta table's own log keeps its versions."""
AHEAD_RANGES_MAX = 500
"""Ranges kept per load; above that, the two oldest are merged."""


class LoadMode(enum.Enum):
    """The way a reload writes rows into a table that already has some."""

    REPLACE = "replace"
    """One commit removes all old files and adds the new ones."""
    REFRESH = "refresh"
    """One commit writes only rows that differ."""


class LoadHold(enum.Enum):
    """A person's decision to pause or stop a table's loads."""

    PAUSED = "paused"
    STOPPED = "stopped"


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """A person's request to reload a table."""

    table: TableId
    mode: LoadMode = LoadMode.REPLACE
    where: str | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    requested_at: float = field(default_factory=time.time)

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "schema": self.table.schema,
            "table": self.table.name,
            "mode": self.mode.value,
            "where": self.where,
            "made_at": self.requested_at,
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> LoadRequest:
        return cls(
            id=stored["id"],
            table=TableId.from_json(stored),
            mode=LoadMode(stored["mode"]),
            where=stored["where"],
            requested_at=stored["made_at"],
        )


@dataclass(frozen=True, kw_only=True)
class LoadRecord:
    """One load: its plan, its chunks, and the position at which its catch-up starts."""

    plan: Plan
    snapshot_position: Lsn | None
    """Position of an exact load's snapshot: every chunk has what was committed up to it. None for a chunked load."""
    barrier: BarrierSnapshot | None = None
    """Barrier of a chunked load; None for an exact one."""
    request: LoadRequest | None = None
    spec: TableSpec = PLAIN_MIRROR
    """Spec of the lake table; staged files follow it."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    begun_at: float = field(default_factory=time.time)

    @property
    def table(self) -> TableId:
        return self.plan.schema.table

    @property
    def log_needed_after(self) -> Lsn:
        """Earliest position at which the catch-up may start; the log must keep everything after it."""
        if self.snapshot_position is not None:
            return self.snapshot_position
        assert self.barrier is not None, "a chunked load has a barrier"
        return self.barrier.floor

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "made_at": self.begun_at,
            "plan": self.plan.to_json(),
            "point": None if self.snapshot_position is None else str(self.snapshot_position),
            "noted": self.barrier.to_json() if self.barrier else None,
            "wish": self.request.to_json() if self.request else None,
            "form": self.spec.to_json(),
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> LoadRecord:
        return cls(
            id=stored["id"],
            begun_at=stored["made_at"],
            plan=Plan.from_json(stored["plan"]),
            snapshot_position=None if stored["point"] is None else Lsn.parse(stored["point"]),
            barrier=BarrierSnapshot.from_json(stored["noted"]) if stored["noted"] else None,
            request=LoadRequest.from_json(stored["wish"]) if stored["wish"] else None,
            spec=TableSpec.from_json(stored["form"]) if "form" in stored else PLAIN_MIRROR,
        )


@dataclass(frozen=True, kw_only=True)
class StagedChunk:
    """A chunk whose rows are in staged files."""

    chunk: int
    files: tuple[StagedFile, ...]
    keys: tuple[StagedFile, ...] = ()
    """Files with keys of rows that the table keeps although `files` lacks them.

    With a condition these are the keys of all rows of the chunk. Otherwise they are keys of rejected rows whose earlier
    state the table keeps.
    """
    rows: int
    bytes: int
    seconds: float
    seen_until: Lsn
    """Position at or before which everything in the chunk's snapshot was committed."""
    dead_letters: int = 0
    """Rows that became dead letters because the table cannot hold them."""

    def to_json(self) -> dict[str, Any]:
        return {
            "chunk": self.chunk,
            "files": [file.to_json() for file in self.files],
            "keys": [file.to_json() for file in self.keys],
            "rows": self.rows,
            "bytes": self.bytes,
            "seconds": self.seconds,
            "seen": str(self.seen_until),
            "letters": self.dead_letters,
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> StagedChunk:
        return cls(
            chunk=stored["chunk"],
            files=tuple(StagedFile.from_json(file) for file in stored["files"]),
            keys=tuple(StagedFile.from_json(file) for file in stored["keys"]),
            rows=stored["rows"],
            bytes=stored["bytes"],
            seconds=stored["seconds"],
            seen_until=Lsn.parse(stored["seen"]),
            dead_letters=stored.get("letters", 0),
        )


class PositionRange(NamedTuple):
    """A range of positions that includes its start and excludes its end."""

    start: Lsn
    end: Lsn


class CommittedLoad(NamedTuple):
    """Facts that are kept about a committed load."""

    ahead_ranges: list[PositionRange]
    """Ranges of applied positions at which the table may hold newer rows."""
    source_time: int | None
    """Latest source commit time of any row that was read, in µs since 1970. None: not known."""

    def ahead_until(self, position: Lsn) -> Lsn | None:
        """Return the position up to which a table at `position` may hold newer rows.

        Once the log has been applied up to it, no row is newer than the applied position. None: no row is newer now.
        """
        return next((one.end for one in self.ahead_ranges if one.start <= position < one.end), None)


class LoadStore:
    """Load records of one log; plain data, so that tasks can use it too."""

    def __init__(self, log: LogPath) -> None:
        self._path = log / FOLDER

    # Loads.

    def begin(self, record: LoadRecord) -> None:
        """Write the plan; from now on the load survives the end of this process."""
        files.make_folder(self.folder(record.id))
        _write(self.folder(record.id) / "plan.json", record.to_json())

    def unfinished_loads(self) -> list[LoadRecord]:
        """Return every load that has begun and not ended, oldest first; skip unreadable records."""
        return sorted(_read_all(self._path, "*/plan.json", LoadRecord.from_json), key=lambda record: record.begun_at)

    def folder(self, load: str) -> LogPath:
        return self._path / load

    def record_chunk(self, load: str, staged: StagedChunk) -> None:
        """Record a staged chunk. Its files must be durable."""
        _write(self.folder(load) / f"chunk-{staged.chunk:06d}.json", staged.to_json())

    def staged_chunks(self, load: str) -> dict[int, StagedChunk]:
        chunks = _read_all(self.folder(load), "chunk-*.json", StagedChunk.from_json)
        return {chunk.chunk: chunk for chunk in chunks}

    def store_dead_letters(self, load: str, chunk: int, schema: TableSchema, dead_letters: pa.Table) -> None:
        """Store the dead letters of a chunk durably. To be called before the chunk is recorded."""
        path = self._dead_letters_path(load, chunk)
        with files.explain_errors(path):
            files.replace_durably(path, encode_dead_letters(schema, dead_letters))

    def dead_letters(self, load: str, chunks: Iterable[StagedChunk]) -> list[DeadLetterBatch]:
        """Return the dead letters of staged chunks, in the order of the chunks."""
        return [
            read_dead_letters(self._dead_letters_path(load, staged.chunk)) for staged in chunks if staged.dead_letters
        ]

    def _dead_letters_path(self, load: str, chunk: int) -> LogPath:
        return self.folder(load) / f"letters-{chunk:06d}.arrow"

    def record_commit(self, load: str, until: Lsn, time: int | None = None) -> None:
        """Record, before the load commit, the position that the catch-up must pass.

        `time` is the source's time; nothing that was read was committed later.
        """
        _write(self.folder(load) / "landing.json", {"passed": str(until)})
        self.record_ahead_range(load, until, time=time)

    def record_refetch(self, load: str, since: Lsn, seen_until: Lsn) -> None:
        """Record that the table commit with position `since` contains a refetched row.

        To be called before that commit, because any later process must know it. The catch-up of the load must pass
        `seen_until` too.
        """
        if (self.folder(load) / "plan.json").exists():
            _write(self.folder(load) / f"reread-{uuid.uuid4().hex[:12]}.json", {"passed": str(seen_until)})
        self.record_ahead_range(load, seen_until, since=since)

    def record_ahead_range(self, load: str, until: Lsn, *, since: Lsn = ZERO, time: int | None = None) -> None:
        """Record a range of applied positions at which the table may hold newer rows."""
        files.make_folder(self._path / "landed")
        earlier = self.committed_load(load) or CommittedLoad([], None)
        ranges = _merge_ranges([*earlier.ahead_ranges, PositionRange(since, until)])
        ahead_until = max(one.end for one in ranges)
        stored = {
            "passed": str(ahead_until),
            "spans": [[str(one.start), str(one.end)] for one in ranges],
            "time": earlier.source_time if time is None else time,
        }
        _write(self._path / "landed" / f"{load}.json", stored)

    def committed_load(self, load: str) -> CommittedLoad | None:
        """Return the facts kept about a committed load; None: none are kept."""
        return next(_read_all(self._path / "landed", f"{load}.json", _committed_load), None)

    def ahead_ranges(self, load: str) -> list[PositionRange] | None:
        """Return the applied positions at which the table held newer rows; None: not known."""
        committed = self.committed_load(load)
        return None if committed is None else committed.ahead_ranges

    def ahead_until(self, load: str, position: Lsn) -> Lsn | None:
        """Return the position up to which a table at `position` may hold newer rows.

        None: no row is newer now, or nothing is known about the load.
        """
        committed = self.committed_load(load)
        return None if committed is None else committed.ahead_until(position)

    def catch_up_until(self, load: str) -> Lsn | None:
        """Return the position that the catch-up of a load must pass. None before its load commit is recorded."""
        commit = list(_read_all(self.folder(load), "landing.json", _passed))
        return max([*commit, *_read_all(self.folder(load), "reread-*.json", _passed)]) if commit else None

    def end(self, record: LoadRecord) -> None:
        """Remove a load that ended or was given up.

        The plan goes first: without it, the remaining files no longer count as a load.
        """
        with suppress(FileNotFoundError):
            (self.folder(record.id) / "plan.json").unlink()
        files.delete_folder(self.folder(record.id))

    def remove_leftovers(self, used: Collection[str] | None = ()) -> None:
        """Remove what ended loads left behind; only for the process that begins loads.

        Records of loads in `used` (of tables, or of kept loads) stay for another
        `REMEMBERED_SECONDS`. None: it is not known which loads are used, so all records stay.
        """
        for record in self._path.glob("landed/*.json"):
            with suppress(OSError):
                if files.modified_at(record) >= time.time() - REMEMBERED_SECONDS:
                    continue
                if used is None or record.name.removesuffix(".json") in used:
                    files.replace_durably(record, record.read_bytes())
                else:
                    record.unlink()
        for folder in self._path.glob("*/"):
            if folder.name not in ("wishes", "held", "retries", "landed") and not (folder / "plan.json").exists():
                files.delete_folder(folder)

    # Load requests and holds.

    def add_request(self, request: LoadRequest) -> None:
        files.make_folder(self._path / "wishes")
        _write(self._path / "wishes" / f"{request.id}.json", request.to_json())

    def requests(self) -> list[LoadRequest]:
        """Return the open load requests, oldest first."""
        return sorted(
            _read_all(self._path, "wishes/*.json", LoadRequest.from_json), key=lambda request: request.requested_at
        )

    def complete_request(self, request: LoadRequest) -> None:
        with suppress(FileNotFoundError):
            (self._path / "wishes" / f"{request.id}.json").unlink()

    def set_hold(self, table: TableId, hold: LoadHold | None) -> None:
        """Pause or stop a table's loads; None removes the hold."""
        path = self._path / "held" / f"{table_token(table)}.json"
        if hold is None:
            with suppress(FileNotFoundError):
                path.unlink()
            return
        files.make_folder(path.parent)
        _write(path, {"schema": table.schema, "table": table.name, "what": hold.value})

    def holds(self) -> dict[TableId, LoadHold]:
        return dict(_read_all(self._path, "held/*.json", _hold_from_json))

    def request_retry(self, table: TableId) -> None:
        """Ask the running process to try a failed table again."""
        path = self._path / "retries" / f"{table_token(table)}.json"
        files.make_folder(path.parent)
        _write(path, {"schema": table.schema, "table": table.name})

    def retry_requests(self) -> list[TableId]:
        return list(_read_all(self._path, "retries/*.json", _table))

    def clear_retry(self, table: TableId) -> None:
        with suppress(FileNotFoundError):
            (self._path / "retries" / f"{table_token(table)}.json").unlink()


def _write(path: LogPath, content: dict[str, Any]) -> None:
    with files.explain_errors(path):
        files.replace_durably(path, json.dumps(content).encode())


def _passed(stored: dict[str, Any]) -> Lsn:
    return Lsn.parse(stored["passed"])


def _committed_load(stored: dict[str, Any]) -> CommittedLoad:
    """Parse a record; older ones have only the last position, without ranges."""
    ranges = [PositionRange(Lsn.parse(start), Lsn.parse(end)) for start, end in stored.get("spans", ())]
    return CommittedLoad(ranges or [PositionRange(ZERO, _passed(stored))], stored.get("time"))


def _merge_ranges(ranges: Iterable[PositionRange]) -> list[PositionRange]:
    """Return the ranges in order, with overlapping ones merged."""
    merged: list[PositionRange] = []
    for one in sorted(ranges):
        if merged and one.start < merged[-1].end:
            merged[-1] = PositionRange(merged[-1].start, max(merged[-1].end, one.end))
        else:
            merged.append(one)
    if len(merged) > AHEAD_RANGES_MAX:
        merged[:2] = [PositionRange(merged[0].start, merged[1].end)]
    return merged


def _hold_from_json(stored: dict[str, Any]) -> tuple[TableId, LoadHold]:
    return _table(stored), LoadHold(stored["what"])


def _table(stored: dict[str, Any]) -> TableId:
    return TableId.from_json(stored)


def _read_all(folder: LogPath, pattern: str, parse: Callable[[dict[str, Any]], Record]) -> Iterator[Record]:
    """Yield the records of one kind. Skip unreadable ones, because what they recorded is done again."""
    with files.explain_store_errors(folder):
        found = files.matching_files(folder, pattern)
    for path in found:
        try:
            record = parse(json.loads(path.read_bytes()))
        except files.STORE_ERRORS as error:
            raise files.explained_error(error, path) from error
        except (OSError, ValueError, KeyError, TypeError, ConfigError):
            continue
        yield record
