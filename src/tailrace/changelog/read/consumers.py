"""Store the progress of consumers and lake tables, for which the log keeps rows.

A consumer has read everything of its tables up to its commit and up to its `_seq`. The log keeps what it has not read
until it expires, which means no sign of it for as long as it chose, or until it is forgotten. These files only ever
make the log keep more. A file that is lost or unreadable keeps nothing, and a reader that is then too late gets an
error.
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
"""A reader's offset is saved at most this often, and when the reader stops."""
FORMAT = 1
TABLES_FILE = "@tables.json"
_CONSUMER_FIELDS: dict[str, UnionType | type] = {
    "name": str, "table": str | None, "tables": list | None, "commit": int, "seq": int, "seen_at": float | int,
    "expires_seconds": float | int | None,
}  # fmt: skip
_TABLES_FIELDS: dict[str, UnionType | type] = {"at": float | int, "tables": list}
_TABLE_FIELDS: dict[str, UnionType | type] = {"schema": str, "table": str, "numbers": list, "commit": int, "seq": int}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}")


@dataclass(frozen=True, kw_only=True)
class RetentionHold:
    """The progress of one reader or one lake table.

    The log keeps the rest of its tables for it.
    """

    name: str
    kind: str
    """`consumer`, or `table`."""
    tables: tuple[int, ...] | None
    """The log's numbers; None means all of them."""
    commit: int
    seq: int
    seen_at: float
    expires_seconds: float | None
    """It holds nothing after this long without a sign; None: it never expires."""

    def is_expired(self, now: float) -> bool:
        return self.expires_seconds is not None and now - self.seen_at > self.expires_seconds

    def needs(self, table: int, last_seq: int, last_commit: int) -> bool:
        """Return true if some rows of a table, up to this one, are not covered.

        `last_commit` is the commit of that row.
        """
        mine = self.tables is None or table in self.tables
        return mine and last_commit > self.commit and last_seq > self.seq

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def consumer_path(log: LogPath, name: str) -> LogPath:
    """Return the path of a consumer's file; refuse a name that could lead elsewhere."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "a consumer's name is not valid",
            name=name,
            hint="Use 1 to 63 of `A-Z`, `a-z`, `0-9`, `_`, `-` and `.`, and do not begin with `.` or `-`. For example: "
            "`nightly-export`.",
        )
    return log / "consumers" / f"{name}.json"


class Consumer:
    """One named reader's progress in the log."""

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
        """Return the named reader where it stopped.

        A new one begins at `start`, a commit and a `_seq`.
        """
        path = consumer_path(log, name)
        stored = _read(path)
        consumer = cls(path, name, wanted, start, expires_seconds)
        if stored is not None:
            if stored["table"] != (wanted.name if wanted else None):
                raise ConfigError(
                    "this consumer reads another table",
                    name=name,
                    table=stored["table"] or "all",
                    hint="Give the new reader another name, or forget the old one: "
                    f"`tailrace consumers FILE --forget {name}`.",
                )
            consumer.commit, consumer.seq = stored["commit"], stored["seq"]
        consumer.save()
        return consumer

    def advance_to(self, commit: int, seq: int) -> None:
        """Record that everything up to here is read; save it if due."""
        self.commit, self.seq = commit, seq
        if time.monotonic() - self._saved_at >= SAVE_SECONDS:
            self.save()

    def jump_to(self, commit: int, seq: int) -> None:
        """Continue from here, wherever the reader was before, and save it."""
        self.commit, self.seq = commit, seq
        self.save()

    def save(self) -> None:
        """Save the offset."""
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
    """A reader's offset, which is saved if the reader has a name."""

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
    """The progress of one lake table, as the applying process reports it."""

    table: TableId
    numbers: tuple[int, ...]
    commit: int
    seq: int


def write_table_progress(log: LogPath, hints: Sequence[TableProgress]) -> None:
    """Save what the lake tables have covered; this replaces the last report."""
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
    """Return everything that holds rows of the log, expired holds too.

    `named` gives the numbers that tables of a name have by now. A table may have got its first rows since, or been made
    again, and a reader that selects it by name needs those rows as well.
    """

    def numbers(stored: Iterable[int], name: str) -> tuple[int, ...]:
        return tuple(sorted({*stored, *named(name)}))

    folder = log / "consumers"
    holds = []
    with files.explain_errors(folder):
        paths = files.matching_files(folder, "*.json")
    for path in paths:
        stored = _read(path)
        if stored is None or path.name == TABLES_FILE:
            continue
        holds.append(
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
    reported = _read(folder / TABLES_FILE) or {"tables": [], "at": 0.0}
    for table in reported["tables"]:
        name = str(TableId.from_json(table))
        holds.append(
            RetentionHold(
                name=name,
                kind="table",
                tables=numbers(table["numbers"], name),
                commit=table["commit"],
                seq=table["seq"],
                seen_at=reported["at"],
                expires_seconds=None,
            )
        )
    return holds


def read_table_progress(log: LogPath) -> list[TableProgress]:
    """Return the last report of the applying process; nothing if it is unreadable."""
    reported = _read(log / "consumers" / TABLES_FILE) or {"tables": []}
    return [
        TableProgress(
            table=TableId.from_json(table), numbers=tuple(table["numbers"]), commit=table["commit"], seq=table["seq"]
        )
        for table in reported["tables"]
    ]


def unreadable_files(log: LogPath) -> list[LogPath]:
    """Return the damaged files of readers and tables.

    The log keeps nothing for them.
    """
    folder = log / "consumers"
    with files.explain_errors(folder):
        unreadable = [path for path in files.matching_files(folder, "*.json") if _read(path) is None]
    return [path for path in unreadable if path.exists()]  # one that was forgotten meanwhile is not unreadable


def forget_consumer(log: LogPath, name: str) -> None:
    """Remove a named reader's hold on the log."""
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
    """Return the content of a file; None if it is missing or damaged."""
    try:
        text = path.read_bytes()
        stored = json.loads(text)
        if "crc" in stored:  # the first logs had none
            stored = records.decode(text, FORMAT)
    except files.STORE_ERRORS as error:  # the offset is not lost: if it were, it would hold nothing
        raise files.explained_error(error, path) from error
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if path.name != TABLES_FILE:
        return stored if _fits(stored, _CONSUMER_FIELDS) and _are_numbers(stored["tables"] or []) else None
    whole = _fits(stored, _TABLES_FIELDS) and all(
        _fits(table, _TABLE_FIELDS) and _are_numbers(table["numbers"]) for table in stored["tables"]
    )
    return stored if whole else None


def _fits(stored: object, fields: dict[str, UnionType | type]) -> bool:
    return isinstance(stored, dict) and all(
        name in stored and isinstance(stored[name], kind) for name, kind in fields.items()
    )


def _are_numbers(values: list[Any]) -> bool:
    return all(isinstance(number, int) for number in values)
