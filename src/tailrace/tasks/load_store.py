"""Loads on record, below `<log>/seed/`: what is wished for, what is planned, which chunks are in.

    wishes/<id>.json      asked for by a person, until a load of it has landed
    held/<id>.json        tables whose loads a person has paused or stopped
    retries/<id>.json     tables that have failed and are to be tried again
    <id>/plan.json        a load, written before its first chunk
    <id>/chunk-<n>.json   a chunk whose rows lie, uncommitted, in the table's folder
    <id>/letters-<n>.arrow  rows of the chunk that the table cannot hold, where they are set aside
    <id>/landing.json     what the replay must pass, written before their one commit
    <id>/reread-….json    a row was read again during the replay, which is a chunk too
    landed/<id>.json      where a table that came from the load held rows newer than it said, for whoever goes back; and
                          the source's time when they had been read

A load that died is found here and goes on with the chunks it lacks. Nothing here decides what a table holds: its
own commit does, and that also says which load it came from.
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
from tailrace.deadletters.store import DeadLetterBatch, encode_dead_letters, read_dead_letters
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
"""Longer than a Delta table's own log remembers its versions."""
AHEAD_RANGES_MAX = 500
"""Of one load on record; then the two oldest count as one."""


class LoadMode(enum.Enum):
    """How rows that are read again come into a table that has some."""

    REPLACE = "replace"
    """All files are new: one commit takes the old ones out and the new ones in."""
    REFRESH = "refresh"
    """Only rows that differ are written."""


class LoadHold(enum.Enum):
    """What a person has decided about a table's loads."""

    PAUSED = "paused"
    STOPPED = "stopped"


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """A person asks for a table to be read again."""

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
    """One load: what is read, in which pieces, and where the replay over them starts."""

    plan: Plan
    snapshot_position: Lsn | None
    """Of the exact snapshot that it began with; what committed up to here is in every chunk."""
    barrier: BarrierSnapshot | None = None
    """What it began with otherwise."""
    request: LoadRequest | None = None
    spec: TableSpec = PLAIN_MIRROR
    """Of the lake table: what is staged has its shape."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    begun_at: float = field(default_factory=time.time)

    @property
    def table(self) -> TableId:
        return self.plan.schema.table

    @property
    def log_needed_after(self) -> Lsn:
        """The replay starts here or later, so the log must hold everything after it."""
        if self.snapshot_position is not None:
            return self.snapshot_position
        assert self.barrier is not None, "one of the two"
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
    """A chunk whose rows are in files that no commit names yet."""

    chunk: int
    files: tuple[StagedFile, ...]
    keys: tuple[StagedFile, ...] = ()
    """Of all rows of the chunk, where `files` has only those that fulfil a condition; or of rows that were set aside,
    where what the table has of them is to stay."""
    rows: int
    bytes: int
    seconds: float
    seen_until: Lsn
    """Everything that its snapshot saw ended at or before this."""
    dead_letters: int = 0
    """Rows that the table cannot hold, which were set aside."""

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
    """From a position on, and before another."""

    start: Lsn
    end: Lsn


class CommittedLoad(NamedTuple):
    """What is remembered of a load that a table comes from."""

    ahead_ranges: list[PositionRange]
    """Where the table held rows newer than it said."""
    source_time: int | None
    """No row that the load read was committed later, by the source's clock, in µs since 1970; None: not known."""

    def ahead_until(self, position: Lsn) -> Lsn | None:
        """What the log must pass before the table, if it stands here, holds no row that is newer than it says; None: it
        holds none."""
        return next((span.end for span in self.ahead_ranges if span.start <= position < span.end), None)


class LoadStore:
    """The records of one log. Plain: a task may have one too."""

    def __init__(self, log: LogPath) -> None:
        self._path = log / FOLDER

    # Loads.

    def begin(self, seed: LoadRecord) -> None:
        """Write the plan down; from here on the load survives us."""
        files.make_folder(self.folder(seed.id))
        _write(self.folder(seed.id) / "plan.json", seed.to_json())

    def unfinished_loads(self) -> list[LoadRecord]:
        """Every load that has begun and is not over, oldest first. One that cannot be read is none."""
        return sorted(_read_all(self._path, "*/plan.json", LoadRecord.from_json), key=lambda seed: seed.begun_at)

    def folder(self, seed: str) -> LogPath:
        return self._path / seed

    def record_chunk(self, seed: str, staged: StagedChunk) -> None:
        """A chunk is in. Its files are durable."""
        _write(self.folder(seed) / f"chunk-{staged.chunk:06d}.json", staged.to_json())

    def staged_chunks(self, seed: str) -> dict[int, StagedChunk]:
        found = _read_all(self.folder(seed), "chunk-*.json", StagedChunk.from_json)
        return {chunk.chunk: chunk for chunk in found}

    def store_dead_letters(self, seed: str, chunk: int, shape: TableSchema, letters: pa.Table) -> None:
        """Rows of a chunk that the table cannot hold; durable before the chunk's own record."""
        path = self._letters_of(seed, chunk)
        with files.explain_errors(path):
            files.replace_durably(path, encode_dead_letters(shape, letters))

    def dead_letters(self, seed: str, chunks: Iterable[StagedChunk]) -> list[DeadLetterBatch]:
        """Those of chunks that are in, in order."""
        return [read_dead_letters(self._letters_of(seed, one.chunk)) for one in chunks if one.dead_letters]

    def _letters_of(self, seed: str, chunk: int) -> LogPath:
        return self.folder(seed) / f"letters-{chunk:06d}.arrow"

    def record_commit(self, seed: str, passed: Lsn, time: int | None = None) -> None:
        """The commit is about to be made; the table is whole once the replay has passed this. Nothing that was read was
        committed later than that time of the source."""
        _write(self.folder(seed) / "landing.json", {"passed": str(passed)})
        self.record_ahead_range(seed, passed, time=time)

    def record_refetch(self, load: str, since: Lsn, seen: Lsn) -> None:
        """A row was read again, for the commit that brings the table to `since`. A replay of the load must pass what
        was seen, too. Before that commit: whoever finds the table there must know."""
        if (self.folder(load) / "plan.json").exists():
            _write(self.folder(load) / f"reread-{uuid.uuid4().hex[:12]}.json", {"passed": str(seen)})
        self.record_ahead_range(load, seen, since=since)

    def record_ahead_range(self, load: str, passed: Lsn, *, since: Lsn = ZERO, time: int | None = None) -> None:
        """A table that comes from the load may hold rows newer than it says, from a position on and before another."""
        files.make_folder(self._path / "landed")
        before = self.committed_load(load) or CommittedLoad([], None)
        spans = _joined([*before.ahead_ranges, PositionRange(since, passed)])
        last = max(span.end for span in spans)
        stored = {
            "passed": str(last),
            "spans": [[str(span.start), str(span.end)] for span in spans],
            "time": before.source_time if time is None else time,
        }
        _write(self._path / "landed" / f"{load}.json", stored)

    def committed_load(self, load: str) -> CommittedLoad | None:
        """What is remembered of a load; None: nothing is."""
        return next(_read_all(self._path / "landed", f"{load}.json", _landed), None)

    def ahead_ranges(self, load: str) -> list[PositionRange] | None:
        """Where a table that came from a load held rows newer than it said; None: not known."""
        landed = self.committed_load(load)
        return None if landed is None else landed.ahead_ranges

    def ahead_until(self, load: str, position: Lsn) -> Lsn | None:
        """What the log must pass before a table that came from a load, and stands here, holds no row that is newer than
        it says; None: it holds none now, or nothing is known of the load."""
        landed = self.committed_load(load)
        return None if landed is None else landed.ahead_until(position)

    def catch_up_until(self, seed: str) -> Lsn | None:
        """What the replay of a load must pass; None if it is not about to land."""
        landing = list(_read_all(self.folder(seed), "landing.json", _passed))
        return max([*landing, *_read_all(self.folder(seed), "reread-*.json", _passed)]) if landing else None

    def end(self, seed: LoadRecord) -> None:
        """The load is over, or is given up. Without its plan it is none, whatever else is left of it."""
        with suppress(FileNotFoundError):
            (self.folder(seed.id) / "plan.json").unlink()
        files.delete_folder(self.folder(seed.id))

    def remove_leftovers(self, used: Collection[str] | None = ()) -> None:
        """Remove what is left of loads that are over. What is known of those that a table comes from, or of which a
        seed is kept, stays for as long again; None: it is not known which. Only for the one who begins loads."""
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

    # Wishes and holds.

    def add_request(self, wish: LoadRequest) -> None:
        files.make_folder(self._path / "wishes")
        _write(self._path / "wishes" / f"{wish.id}.json", wish.to_json())

    def requests(self) -> list[LoadRequest]:
        """Oldest first."""
        return sorted(_read_all(self._path, "wishes/*.json", LoadRequest.from_json), key=lambda wish: wish.requested_at)

    def complete_request(self, wish: LoadRequest) -> None:
        with suppress(FileNotFoundError):
            (self._path / "wishes" / f"{wish.id}.json").unlink()

    def set_hold(self, table: TableId, what: LoadHold | None) -> None:
        """Hold a table's loads back, or let them go on."""
        path = self._path / "held" / f"{table_token(table)}.json"
        if what is None:
            with suppress(FileNotFoundError):
                path.unlink()
            return
        files.make_folder(path.parent)
        _write(path, {"schema": table.schema, "table": table.name, "what": what.value})

    def holds(self) -> dict[TableId, LoadHold]:
        return dict(_read_all(self._path, "held/*.json", _held))

    def request_retry(self, table: TableId) -> None:
        """Ask for a table that has failed to be tried again."""
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


def _landed(stored: dict[str, Any]) -> CommittedLoad:
    """Also of a record that says only what was passed last."""
    found = [PositionRange(Lsn.parse(start), Lsn.parse(end)) for start, end in stored.get("spans", ())]
    return CommittedLoad(found or [PositionRange(ZERO, _passed(stored))], stored.get("time"))


def _joined(spans: Iterable[PositionRange]) -> list[PositionRange]:
    """The same with those that overlap as one, in order."""
    found: list[PositionRange] = []
    for span in sorted(spans):
        if found and span.start < found[-1].end:
            found[-1] = PositionRange(found[-1].start, max(found[-1].end, span.end))
        else:
            found.append(span)
    if len(found) > AHEAD_RANGES_MAX:
        found[:2] = [PositionRange(found[0].start, found[1].end)]
    return found


def _held(stored: dict[str, Any]) -> tuple[TableId, LoadHold]:
    return _table(stored), LoadHold(stored["what"])


def _table(stored: dict[str, Any]) -> TableId:
    return TableId.from_json(stored)


def _read_all(folder: LogPath, pattern: str, parse: Callable[[dict[str, Any]], Record]) -> Iterator[Record]:
    """The records of a kind. One that cannot be read is none: what it stood for is done again."""
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
