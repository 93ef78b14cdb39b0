"""Who still needs which rows: readers that gave a name, and the lake tables, as they last said.

A consumer has read everything of its tables up to its commit and up to its `_seq`. What it has not read is kept for
it until it has not been heard of for as long as it said, or until it is forgotten. What stands here only ever makes
the log keep more: a file that is lost or cannot be read keeps nothing, and whoever then comes too late is told.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from types import UnionType
from typing import Any

from tailrace.changelog.format.schemas import TableSelector
from tailrace.errors import ConfigError
from tailrace.model.schema import TableId
from tailrace.storage import files, records
from tailrace.storage.files import LogPath

EXPIRE_SECONDS = 7 * 86_400.0
SAVE_SECONDS = 1.0
"""A reader's place is written down at most this often, and when it stops."""
FORMAT = 1
TABLES_FILE = "@tables.json"
_PLACE: dict[str, UnionType | type] = {
    "name": str, "table": str | None, "tables": list | None, "commit": int, "seq": int, "seen_at": float | int,
    "expires_seconds": float | int | None,
}  # fmt: skip
_SAID: dict[str, UnionType | type] = {"at": float | int, "tables": list}
_HINT: dict[str, UnionType | type] = {"schema": str, "table": str, "numbers": list, "commit": int, "seq": int}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}")


@dataclass(frozen=True, kw_only=True)
class RetentionHold:
    """What one reader or one lake table has covered; the log keeps the rest of its tables for it."""

    name: str
    kind: str
    """`consumer`, or `table`."""
    tables: tuple[int, ...] | None
    """The log's numbers; None means all of them."""
    commit: int
    seq: int
    seen_at: float
    expires_seconds: float | None
    """After this long without a sign it holds nothing; None: it never does so."""

    def is_expired(self, now: float) -> bool:
        return self.expires_seconds is not None and now - self.seen_at > self.expires_seconds

    def needs(self, table: int, last_seq: int, last_commit: int) -> bool:
        """Whether rows of a table, up to this row in this commit, are not all covered."""
        mine = self.tables is None or table in self.tables
        return mine and last_commit > self.commit and last_seq > self.seq

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def consumer_path(log: LogPath, name: str) -> LogPath:
    """Where a consumer's place is written; a name that could lead elsewhere is refused."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "a consumer's name is 1 to 63 letters, digits, `_`, `-` or `.`, and does not begin with `.` or `-`",
            name=name,
            hint="For example: `nightly-export`.",
        )
    return log / "consumers" / f"{name}.json"


class Consumer:
    """One named reader's place in the log."""

    def __init__(
        self,
        path: LogPath,
        name: str,
        wanted: TableSelector | None,
        start: tuple[int, int],
        expires_seconds: float | None,
    ) -> None:
        self._path = path
        self._saved_at = 0.0
        self._wanted = wanted
        self._expires = expires_seconds
        self.name = name
        self.commit, self.seq = start

    @classmethod
    def open(
        cls,
        log: LogPath,
        name: str,
        *,
        wanted: TableSelector | None,
        start: tuple[int, int],
        expires_seconds: float | None = EXPIRE_SECONDS,
    ) -> Consumer:
        """The named reader where it stopped; a new one at `start`, a commit and a `_seq`."""
        path = consumer_path(log, name)
        stored = _read(path)
        made = cls(path, name, wanted, start, expires_seconds)
        if stored is not None:
            if stored["table"] != (wanted.name if wanted else None):
                raise ConfigError(
                    "this consumer reads another table",
                    name=name,
                    table=stored["table"] or "all",
                    hint="Give the new reader a name of its own, or forget the old one: "
                    f"`tailrace consumers FILE --forget {name}`.",
                )
            made.commit, made.seq = stored["commit"], stored["seq"]
        made.save()
        return made

    def advance_to(self, commit: int, seq: int) -> None:
        """Everything up to here is read; written down if that was not done just now."""
        self.commit, self.seq = commit, seq
        if time.monotonic() - self._saved_at >= SAVE_SECONDS:
            self.save()

    def jump_to(self, commit: int, seq: int) -> None:
        """Go on from here, wherever the reader was before."""
        self.commit, self.seq = commit, seq
        self.save()

    def save(self) -> None:
        """Write the place down."""
        stored = {
            "name": self.name,
            "table": self._wanted.name if self._wanted else None,
            "tables": sorted(self._wanted.numbers) if self._wanted else None,
            "commit": self.commit,
            "seq": self.seq,
            "seen_at": time.time(),
            "expires_seconds": self._expires,
        }
        with files.explain_errors(self._path):
            self._path.parent.mkdir(exist_ok=True)
            files.replace(self._path, records.encode({"format": FORMAT, **stored}))
        self._saved_at = time.monotonic()


class ReadProgress:
    """How far a reader is, and where that is written down if it gave a name."""

    def __init__(self, start: tuple[int, int], consumer: Consumer | None) -> None:
        self.commit, self.seq = start
        self._consumer = consumer

    def advance_to(self, commit: int, seq: int) -> None:
        self.commit, self.seq = max(self.commit, commit), seq
        if self._consumer is not None:
            self._consumer.advance_to(self.commit, self.seq)

    def save(self) -> None:
        if self._consumer is not None:
            self._consumer.save()


@dataclass(frozen=True, kw_only=True)
class TableProgress:
    """What the applying process says of one lake table."""

    table: TableId
    numbers: tuple[int, ...]
    commit: int
    seq: int


def write_table_progress(log: LogPath, hints: Sequence[TableProgress]) -> None:
    """Say what the lake tables have covered; replaces what was said before."""
    stored = [
        {
            "schema": hint.table.schema,
            "table": hint.table.name,
            "numbers": list(hint.numbers),
            "commit": hint.commit,
            "seq": hint.seq,
        }
        for hint in hints
    ]
    path = log / "consumers" / TABLES_FILE
    with files.explain_errors(path):
        path.parent.mkdir(exist_ok=True)
        files.replace(path, records.encode({"format": FORMAT, "at": time.time(), "tables": stored}))


def read_holds(log: LogPath, named: Callable[[str], Iterable[int]] = lambda name: ()) -> list[RetentionHold]:
    """Everyone who needs something of the log, expired ones too.

    `named` gives the numbers that tables of a name have by now: rows may have come since, of a table that had none
    or was made again, and whoever reads it by name needs them as well.
    """

    def numbers(stored: Iterable[int], name: str) -> tuple[int, ...]:
        return tuple(sorted({*stored, *named(name)}))

    folder = log / "consumers"
    found = []
    with files.explain_errors(folder):
        paths = files.matching_files(folder, "*.json")
    for path in paths:
        stored = _read(path)
        if stored is None or path.name == TABLES_FILE:
            continue
        found.append(
            RetentionHold(
                name=stored["name"],
                kind="consumer",
                seen_at=stored["seen_at"],
                commit=stored["commit"],
                tables=numbers(stored["tables"], stored["table"] or "") if stored["tables"] is not None else None,
                seq=stored["seq"],
                expires_seconds=stored["expires_seconds"],
            )
        )
    said = _read(folder / TABLES_FILE) or {"tables": [], "at": 0.0}
    for table in said["tables"]:
        name = str(TableId.from_json(table))
        found.append(
            RetentionHold(
                name=name,
                kind="table",
                tables=numbers(table["numbers"], name),
                commit=table["commit"],
                seq=table["seq"],
                seen_at=said["at"],
                expires_seconds=None,
            )
        )
    return found


def read_table_progress(log: LogPath) -> list[TableProgress]:
    """What the applying process last said; nothing if it cannot be read."""
    said = _read(log / "consumers" / TABLES_FILE) or {"tables": []}
    return [
        TableProgress(
            table=TableId.from_json(table), numbers=tuple(table["numbers"]), commit=table["commit"], seq=table["seq"]
        )
        for table in said["tables"]
    ]


def unreadable_files(log: LogPath) -> list[LogPath]:
    """The files of readers and tables that are not what was written: the log keeps nothing for them."""
    folder = log / "consumers"
    with files.explain_errors(folder):
        found = [path for path in files.matching_files(folder, "*.json") if _read(path) is None]
    return [path for path in found if path.exists()]  # one that was forgotten meanwhile is not unreadable


def forget_consumer(log: LogPath, name: str) -> None:
    """Let go of what a named reader holds."""
    path = consumer_path(log, name)
    if not path.exists():
        known = [hold.name for hold in read_holds(log) if hold.kind == "consumer"]
        raise ConfigError(
            "there is no such consumer",
            name=name,
            hint=f"There are: {', '.join(known)}." if known else "This log has no named consumers.",
        )
    with files.explain_errors(path):
        path.unlink()


def _read(path: LogPath) -> dict[str, Any] | None:
    """What a file says; None if it is not there, or not what was written."""
    try:
        text = path.read_bytes()
        stored = json.loads(text)
        if "crc" in stored:  # the first logs had none
            stored = records.decode(text, FORMAT)
    except files.STORE_ERRORS as error:  # not a place that is lost: it would hold nothing
        raise files.explained_error(error, path) from error
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if path.name != TABLES_FILE:
        return stored if _fits(stored, _PLACE) and _are_numbers(stored["tables"] or []) else None
    whole = _fits(stored, _SAID) and all(
        _fits(table, _HINT) and _are_numbers(table["numbers"]) for table in stored["tables"]
    )
    return stored if whole else None


def _fits(stored: object, shape: dict[str, UnionType | type]) -> bool:
    return isinstance(stored, dict) and all(
        name in stored and isinstance(stored[name], kind) for name, kind in shape.items()
    )


def _are_numbers(found: list[Any]) -> bool:
    return all(isinstance(number, int) for number in found)
