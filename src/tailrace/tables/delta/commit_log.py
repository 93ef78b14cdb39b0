"""Read our position from a Delta table's log, and find out who wrote later commits.

A table is at the position that its newest commit states, if that commit is ours. Maintenance commits after it, which
change no rows, do not matter. `RESTORE` is not maintenance: it restores old rows under the position of the new ones.
"""

from __future__ import annotations

import base64
import json
import os
import uuid
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction

from tailrace.errors import ConfigError, ForeignWrite, TableUnusable
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId, TableSchema
from tailrace.tables.port import AppliedPosition
from tailrace.tables.spec import PLAIN_MIRROR, TableSpec

METADATA_KEY = "tailrace"
FORMAT = 1
"""Format of the JSON under `METADATA_KEY`."""

MAINTENANCE = frozenset(["OPTIMIZE", "VACUUM START", "VACUUM END"])
"""Names that delta-rs and Spark give to commits that change files but no rows."""
MAINTENANCE_COMMITS_MAX = 10_000

REBUILD_HINT = "Run `tailrace rebuild FILE TABLE` to return to our last version of it and apply the log from there."
REPLACE_HINT = "Run `tailrace snapshot FILE TABLE` to reload the table and replace all its rows."


@dataclass(frozen=True, kw_only=True)
class CommitRecord:
    """Our record in one of our commits."""

    log: str
    applied_position: AppliedPosition
    schema: TableSchema
    spec: TableSpec = PLAIN_MIRROR
    latest_time: int = 0
    """Latest begin or end of any row version, µs since 1970."""
    replay_id: str | None = None
    """Id of the last dead-letter replay that appended rows. Every later commit repeats it."""

    def text(self) -> str:
        """Return the record as it is stored in a commit."""
        stored = {
            "format": FORMAT,
            "log": self.log,
            "seq": self.applied_position.seq,
            "commit": self.applied_position.commit,
            "position": str(self.applied_position.position),
            "load": self.applied_position.load,
            "schema": self.schema.to_json(),
        }
        if self.spec != PLAIN_MIRROR:
            stored |= {"form": self.spec.to_json(), "clock": self.latest_time}
        if self.replay_id is not None:
            stored["late"] = self.replay_id
        return json.dumps(stored)

    def user_metadata(self, token: str) -> str:
        """Return the record as stored in a commit by Spark's connector.

        The connector has only one field for user data. The token identifies the commit.
        """
        return json.dumps({METADATA_KEY: self.text(), "token": token})

    def properties(self) -> CommitProperties:
        """Return the properties that make a commit ours.

        No retries: any commit made since the table was read makes this one fail.
        """
        return CommitProperties(
            custom_metadata={METADATA_KEY: self.text()},
            app_transactions=[Transaction(app_id(self.log), self.applied_position.seq)],
            max_commit_retries=0,
        )

    @classmethod
    def parse(cls, text: str) -> CommitRecord:
        stored = json.loads(text)
        if stored["format"] != FORMAT:
            raise TableUnusable(
                "the table's position was written by a newer Tailrace", format=stored["format"], hint="Update Tailrace."
            )
        applied = AppliedPosition(
            seq=stored["seq"], commit=stored["commit"], position=Lsn.parse(stored["position"]), load=stored.get("load")
        )
        return cls(
            log=stored["log"],
            applied_position=applied,
            schema=TableSchema.from_json(stored["schema"]),
            spec=TableSpec.from_json(stored["form"]) if "form" in stored else PLAIN_MIRROR,
            latest_time=stored.get("clock", 0),
            replay_id=stored.get("late"),
        )


def app_id(log_id: str) -> str:
    """Return the application id of our position's number in Delta's `txn` action."""
    return f"tailrace/{log_id}"


def has_commits(folder: Path) -> bool:
    """Return whether the folder has a Delta table.

    A crash before the first commit leaves a log folder without commits.
    """
    log = folder / "_delta_log"
    return log.is_dir() and any(entry.suffix in (".json", ".parquet") for entry in log.iterdir())


def is_newest_version(folder: Path, version: int) -> bool:
    """Return whether a version is the newest, by the log's file names. The newest is never removed."""
    return _commit_path(folder, version).exists() and not _commit_path(folder, version + 1).exists()


def last_commit_record(folder: Path, version: int) -> CommitRecord | None:
    """Return the record of the last commit by any change log, up to this version."""
    for number in range(version, max(-1, version - MAINTENANCE_COMMITS_MAX), -1):
        commit = _Commit.read(folder, number)
        if commit is None or commit.position is not None:
            return None if commit is None else commit.position
    return None


def source_of(folder: Path, version: int) -> TableId | None:
    """Return the source table that the lake table was last made from; None if unknown."""
    try:
        record = last_commit_record(folder, version)
    except TableUnusable:
        return None
    return None if record is None else record.schema.table


def commit_record_of(folder: Path, version: int, log_id: str) -> CommitRecord:
    """Return our record at this version of the table; refuse if others have written since.

    The table must be known to have one.
    """
    for number in range(version, max(-1, version - MAINTENANCE_COMMITS_MAX), -1):
        commit = _Commit.read(folder, number)
        if commit is None:
            break
        if commit.position is not None and commit.position.log == log_id:
            return commit.position
        if commit.position is not None:
            raise ForeignWrite(
                "another change log writes this table",
                path=folder,
                log=commit.position.log,
                version=number,
                hint="Give each pipeline its own `tables.path`. " + REPLACE_HINT,
            )
        if not commit.maintenance:
            raise ForeignWrite(
                "someone else changed the table",
                path=folder,
                operation=commit.operation,
                version=number,
                hint=f"Only Tailrace may write its tables. {REBUILD_HINT} Or: {REPLACE_HINT}",
            )
    raise TableUnusable(
        "the table's log no longer holds the commit with our position", path=folder, version=version, hint=REPLACE_HINT
    )


def is_ours(folder: Path, version: int, log_id: str) -> bool:
    """Return whether only this log has changed the table."""
    try:
        commit_record_of(folder, version, log_id)
    except (ForeignWrite, TableUnusable):
        return False
    return True


def own_versions(folder: Path, version: int, log_id: str) -> Iterator[tuple[int, CommitRecord]]:
    """Yield the versions that this log's commits made, newest first.

    Stops where the table's own log begins.
    """
    for number in range(version, -1, -1):
        commit = _Commit.read(folder, number)
        if commit is None:
            return
        if commit.position is not None and commit.position.log == log_id:
            yield number, commit.position


def stats_of(folder: Path, version: int, names: Collection[str]) -> dict[str, str]:
    """Return data files' statistics from the commits that added them.

    Files added before the log's beginning are omitted.
    """
    found: dict[str, str] = {}
    for number in range(version, -1, -1):
        commit = _Commit.read(folder, number) if len(found) < len(names) else None
        if commit is None:
            break
        found = {name: stats for name, stats in commit.stats.items() if name in names} | found
    return found


def has_token(folder: Path, version: int, token: str) -> bool:
    """Return whether this version's commit has the token."""
    try:
        return token.encode() in _commit_path(folder, version).read_bytes()
    except FileNotFoundError:
        return False


class CommitFiles(NamedTuple):
    """A commit's effect on a table's files. All zero where the log no longer has the commit."""

    added: int = 0
    removed: int = 0
    bytes: int = 0
    """Size of the files that it adds."""


def make_durable(folder: Path, version: int) -> CommitFiles:
    """Flush a commit and the files it adds to disk.

    Spark leaves them in the operating system's cache.
    """
    commit = _Commit.read(folder, version)
    names = (*commit.adds, *commit.vectors) if commit else ()
    for name in names:
        fsync(folder / name)
    sync_folders(folder, names)
    sync_commit(folder, version)
    return CommitFiles(len(commit.adds), len(commit.gone), commit.bytes) if commit else CommitFiles()


def sync_commit(folder: Path, version: int) -> None:
    """Flush a commit to disk."""
    fsync(_commit_path(folder, version))
    fsync(folder / "_delta_log")


def sync_folders(folder: Path, names: Iterable[str]) -> None:
    """Flush the folder entries of these files to disk.

    The files of a partition are in folders of their own.
    """
    inner = {parent for name in names if "/" in name for parent in Path(name).parents}
    for parent in inner or (Path(),):
        fsync(folder / parent)


def files_named_since(folder: Path, mtime_ns: int) -> set[str]:
    """Return the files that commits since this time have added or removed.

    Some version has, or had, each of them. No reader uses files of commits that the log no longer has, except those
    that a later commit removes.
    """
    log, added = folder / "_delta_log", set[str]()
    for entry in log.iterdir() if log.is_dir() else ():
        if entry.suffix == ".json" and entry.stem.isdigit() and entry.stat().st_mtime_ns >= mtime_ns:
            commit = _Commit.read(folder, int(entry.stem))
            added |= {*commit.adds, *commit.gone} if commit else set()
    return added


def newest_commit_ns(folder: Path) -> int:
    """Return the time of the newest commit, or 0."""
    log = folder / "_delta_log"
    names = [entry.name for entry in log.glob("*.json")] if log.is_dir() else []
    return (log / max(names)).stat().st_mtime_ns if names else 0


def file_names(table: DeltaTable) -> list[str]:
    """Return the data files of the version that was opened."""
    return [data_path(name) for name in pa.table(table.get_add_actions(flatten=True)).column("path").to_pylist()]


def data_path(encoded: str) -> str:
    """Return a data file's path in the table's folder, decoded from Delta's log."""
    return unquote(encoded)


@dataclass(frozen=True, kw_only=True)
class _Commit:
    operation: str
    maintenance: bool
    position: CommitRecord | None
    adds: tuple[str, ...]
    vectors: tuple[str, ...]
    """Files with deletion vectors of the data files that it adds."""
    gone: tuple[str, ...]
    bytes: int
    """Size of the files that it adds. For a file that only gets another deletion vector, the vector's size."""
    stats: dict[str, str]

    @classmethod
    def read(cls, folder: Path, version: int) -> _Commit | None:
        """Return one commit; None if the log no longer has it."""
        try:
            actions = _actions(folder, version)
            info = _only(actions, "commitInfo")
            stated = _record_text(info)
            position = None if stated is None else CommitRecord.parse(stated)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, ConfigError) as exc:
            raise TableUnusable(
                "a commit of the table cannot be read", path=folder, version=version, hint=REPLACE_HINT
            ) from exc
        added = [action["add"] for action in actions if "add" in action]
        removed = [action["remove"] for action in actions if "remove" in action]
        kept = {file["path"] for file in removed}
        vectors = [file["deletionVector"] for file in added if file.get("deletionVector")]
        operation = str(info.get("operation", "unknown"))
        changes_rows = any(file.get("dataChange", True) for file in (*added, *removed))
        return cls(
            operation=operation,
            maintenance=operation in MAINTENANCE and not changes_rows,
            position=position,
            adds=tuple(data_path(file["path"]) for file in added),
            vectors=tuple(name for vector in vectors if (name := vector_file(vector)) is not None),
            gone=tuple(data_path(file["path"]) for file in removed),
            bytes=sum(file.get("size", 0) for file in added if file["path"] not in kept)
            + sum(vector["sizeInBytes"] for vector in vectors),
            stats={data_path(file["path"]): file["stats"] for file in added if file.get("stats")},
        )


def actions_of(folder: Path, version: int) -> list[dict[str, Any]]:
    """Return all actions of one commit."""
    try:
        return _actions(folder, version)
    except (OSError, ValueError) as exc:
        raise TableUnusable(
            "a commit of the table cannot be read", path=folder, version=version, hint=REPLACE_HINT
        ) from exc


def _actions(folder: Path, version: int) -> list[dict[str, Any]]:
    # It has row texts unescaped, which may contain other characters that Python treats as line ends.
    lines = _commit_path(folder, version).read_bytes().split(b"\n")
    return [json.loads(line) for line in lines if line]


_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_ID_CHARS = 20


def vector_file(vector: dict[str, Any] | None) -> str | None:
    """Return the name of a deletion vector's file. None if it is not one of the table's own."""
    if vector is None or vector["storageType"] != "u":
        return None
    prefix, encoded = vector["pathOrInlineDv"][:-_ID_CHARS], vector["pathOrInlineDv"][-_ID_CHARS:]
    number = uuid.UUID(bytes=base64.b85decode(encoded.translate(str.maketrans(_Z85, _B85))))
    return f"{prefix}/deletion_vector_{number}.bin" if prefix else f"deletion_vector_{number}.bin"


def _only(actions: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Return the commit's action of this kind; empty if it has none."""
    return next((action[kind] for action in actions if kind in action), {})


def _record_text(info: dict[str, Any]) -> str | None:
    """Return our record's text, from where the committing engine has stored it.

    None if the commit is not ours.
    """
    if METADATA_KEY in info:
        return str(info[METADATA_KEY])
    user_metadata = info.get("userMetadata")
    if not isinstance(user_metadata, str) or not user_metadata.startswith(f'{{"{METADATA_KEY}":'):
        return None
    return str(json.loads(user_metadata)[METADATA_KEY])


def _commit_path(folder: Path, version: int) -> Path:
    return folder / "_delta_log" / f"{version:020d}.json"


def fsync(path: Path) -> None:
    """Flush a file or a folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
