"""Our position in a Delta table's own log, and who wrote the commits after it.

A table is where its newest commit says it is, and only if that commit is ours or maintenance that changes no
rows. `RESTORE` is not: it brings old rows back and leaves the position of the new ones.
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
"""Of the JSON under that key."""

MAINTENANCE = frozenset(["OPTIMIZE", "VACUUM START", "VACUUM END"])
"""What delta-rs and Spark call the commits that change files but no rows."""
MAINTENANCE_COMMITS_MAX = 10_000

REBUILD_HINT = "`tailrace rebuild FILE TABLE` goes back to its last version of ours, and on with the log."
REPLACE_HINT = "Run `tailrace snapshot FILE TABLE`: the table is loaded anew, and all that it holds is replaced."


@dataclass(frozen=True, kw_only=True)
class CommitRecord:
    """What one of our commits says of itself."""

    log: str
    applied_position: AppliedPosition
    schema: TableSchema
    spec: TableSpec = PLAIN_MIRROR
    latest_time: int = 0
    """The latest time that a version of a row begins or ends at, µs since 1970."""
    replay_id: str | None = None
    """The name of the dead letters that came in last, where their own changes did; every commit says it again."""

    def text(self) -> str:
        """As it stands in a commit."""
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
        """As it stands in a commit that Spark's connector makes: that has one place for what users have to say. By the
        token we know the commit again."""
        return json.dumps({METADATA_KEY: self.text(), "token": token})

    def properties(self) -> CommitProperties:
        """What makes a commit ours. No retries: a commit made by anyone since the table was read fails it."""
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
        cursor = AppliedPosition(
            seq=stored["seq"], commit=stored["commit"], position=Lsn.parse(stored["position"]), load=stored.get("load")
        )
        return cls(
            log=stored["log"],
            applied_position=cursor,
            schema=TableSchema.from_json(stored["schema"]),
            spec=TableSpec.from_json(stored["form"]) if "form" in stored else PLAIN_MIRROR,
            latest_time=stored.get("clock", 0),
            replay_id=stored.get("late"),
        )


def app_id(log_id: str) -> str:
    """Under which the position's number stands in Delta's own `txn` action."""
    return f"tailrace/{log_id}"


def has_commits(folder: Path) -> bool:
    """Whether a Delta table stands here: a crash before a first commit leaves a log folder without one."""
    log = folder / "_delta_log"
    return log.is_dir() and any(entry.suffix in (".json", ".parquet") for entry in log.iterdir())


def is_newest_version(folder: Path, version: int) -> bool:
    """Whether a table's newest version is this one, as names in its log tell. The newest is never cleared."""
    return _commit_path(folder, version).exists() and not _commit_path(folder, version + 1).exists()


def last_commit_record(folder: Path, version: int) -> CommitRecord | None:
    """The position of the last commit that any log of ours made, up to this version; None if there is none."""
    for number in range(version, max(-1, version - MAINTENANCE_COMMITS_MAX), -1):
        found = _Commit.read(folder, number)
        if found is None or found.position is not None:
            return None if found is None else found.position
    return None


def source_of(folder: Path, version: int) -> TableId | None:
    """The source table that the lake table was last made of; None where that cannot be told."""
    try:
        found = last_commit_record(folder, version)
    except TableUnusable:
        return None
    return None if found is None else found.schema.table


def commit_record_of(folder: Path, version: int, log_id: str) -> CommitRecord:
    """Our position at this version of the table, which is known to hold one; refuse if others wrote since."""
    for number in range(version, max(-1, version - MAINTENANCE_COMMITS_MAX), -1):
        found = _Commit.read(folder, number)
        if found is None:
            break
        if found.position is not None and found.position.log == log_id:
            return found.position
        if found.position is not None:
            raise ForeignWrite(
                "another change log writes this table",
                path=folder,
                log=found.position.log,
                version=number,
                hint="Give each pipeline its own `tables.path`. " + REPLACE_HINT,
            )
        if not found.maintenance:
            raise ForeignWrite(
                "someone else changed the table",
                path=folder,
                operation=found.operation,
                version=number,
                hint=f"A table of ours is written by Tailrace alone. {REBUILD_HINT} {REPLACE_HINT}",
            )
    raise TableUnusable(
        "the table's log no longer holds the commit with our position", path=folder, version=version, hint=REPLACE_HINT
    )


def is_ours(folder: Path, version: int, log_id: str) -> bool:
    """Whether nobody else has changed the table."""
    try:
        commit_record_of(folder, version, log_id)
    except (ForeignWrite, TableUnusable):
        return False
    return True


def own_versions(folder: Path, version: int, log_id: str) -> Iterator[tuple[int, CommitRecord]]:
    """The versions that this log's commits made, newest first, as far back as the table's own log holds them."""
    for number in range(version, -1, -1):
        found = _Commit.read(folder, number)
        if found is None:
            return
        if found.position is not None and found.position.log == log_id:
            yield number, found.position


def stats_of(folder: Path, version: int, names: Collection[str]) -> dict[str, str]:
    """The statistics of data files as the commits tell them that added them; those of before the log's beginning
    are left out."""
    found: dict[str, str] = {}
    for number in range(version, -1, -1):
        commit = _Commit.read(folder, number) if len(found) < len(names) else None
        if commit is None:
            break
        found = {name: stats for name, stats in commit.stats.items() if name in names} | found
    return found


def has_token(folder: Path, version: int, token: str) -> bool:
    """Whether a commit is the one with this token."""
    try:
        return token.encode() in _commit_path(folder, version).read_bytes()
    except FileNotFoundError:
        return False


class CommitFiles(NamedTuple):
    """What a commit did to a table's files; nothing, where the log no longer holds it."""

    added: int = 0
    removed: int = 0
    bytes: int = 0
    """Of the files that it adds."""


def make_durable(folder: Path, version: int) -> CommitFiles:
    """Push a commit and the files it adds to the disk: Spark leaves them in the operating system's cache."""
    commit = _Commit.read(folder, version)
    names = (*commit.adds, *commit.vectors) if commit else ()
    for name in names:
        fsync(folder / name)
    sync_folders(folder, names)
    sync_commit(folder, version)
    return CommitFiles(len(commit.adds), len(commit.gone), commit.bytes) if commit else CommitFiles()


def sync_commit(folder: Path, version: int) -> None:
    """Push a commit to the disk."""
    fsync(_commit_path(folder, version))
    fsync(folder / "_delta_log")


def sync_folders(folder: Path, names: Iterable[str]) -> None:
    """Push to the disk that the table's folder has these files: those of a partition lie in folders of their own."""
    inner = {parent for name in names if "/" in name for parent in Path(name).parents}
    for parent in inner or (Path(),):
        fsync(folder / parent)


def files_named_since(folder: Path, mtime_ns: int) -> set[str]:
    """The names of the files that commits made at this time or later have added or removed: some version has, or had,
    each of them. What the log no longer holds is no reader's any more, but for what a later commit removes."""
    log, added = folder / "_delta_log", set[str]()
    for entry in log.iterdir() if log.is_dir() else ():
        if entry.suffix == ".json" and entry.stem.isdigit() and entry.stat().st_mtime_ns >= mtime_ns:
            commit = _Commit.read(folder, int(entry.stem))
            added |= {*commit.adds, *commit.gone} if commit else set()
    return added


def newest_commit_ns(folder: Path) -> int:
    """When the newest commit was made; 0 if there is none."""
    log = folder / "_delta_log"
    names = [entry.name for entry in log.glob("*.json")] if log.is_dir() else []
    return (log / max(names)).stat().st_mtime_ns if names else 0


def file_names(table: DeltaTable) -> list[str]:
    """The data files of the version that was opened."""
    return [data_path(name) for name in pa.table(table.get_add_actions(flatten=True)).column("path").to_pylist()]


def data_path(said: str) -> str:
    """Where a data file lies in the table's folder, from what Delta says."""
    return unquote(said)


@dataclass(frozen=True, kw_only=True)
class _Commit:
    operation: str
    maintenance: bool
    position: CommitRecord | None
    adds: tuple[str, ...]
    vectors: tuple[str, ...]
    """The files with deletion vectors of those that it adds."""
    gone: tuple[str, ...]
    bytes: int
    """Of the files that it adds; of one that only gets another deletion vector, of that."""
    stats: dict[str, str]

    @classmethod
    def read(cls, folder: Path, version: int) -> _Commit | None:
        """One commit; None if the log no longer holds it."""
        try:
            actions = _actions(folder, version)
            info = _only(actions, "commitInfo")
            stated = _stated(info)
            position = None if stated is None else CommitRecord.parse(stated)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, ConfigError) as exc:
            raise TableUnusable(
                "a commit of the table cannot be read", path=folder, version=version, hint=REPLACE_HINT
            ) from exc
        added = [action["add"] for action in actions if "add" in action]
        removed = [action["remove"] for action in actions if "remove" in action]
        stayed = {file["path"] for file in removed}
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
            bytes=sum(file.get("size", 0) for file in added if file["path"] not in stayed)
            + sum(vector["sizeInBytes"] for vector in vectors),
            stats={data_path(file["path"]): file["stats"] for file in added if file.get("stats")},
        )


def actions_of(folder: Path, version: int) -> list[dict[str, Any]]:
    """All that one commit says."""
    try:
        return _actions(folder, version)
    except (OSError, ValueError) as exc:
        raise TableUnusable(
            "a commit of the table cannot be read", path=folder, version=version, hint=REPLACE_HINT
        ) from exc


def _actions(folder: Path, version: int) -> list[dict[str, Any]]:
    # Texts of rows stand in it unescaped, and may hold what else Python takes for the end of a line.
    lines = _commit_path(folder, version).read_bytes().split(b"\n")
    return [json.loads(line) for line in lines if line]


_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_ID_CHARS = 20


def vector_file(vector: dict[str, Any] | None) -> str | None:
    """The name of the file that a deletion vector lies in; None if it lies in none of the table's own."""
    if vector is None or vector["storageType"] != "u":
        return None
    prefix, said = vector["pathOrInlineDv"][:-_ID_CHARS], vector["pathOrInlineDv"][-_ID_CHARS:]
    number = uuid.UUID(bytes=base64.b85decode(said.translate(str.maketrans(_Z85, _B85))))
    return f"{prefix}/deletion_vector_{number}.bin" if prefix else f"deletion_vector_{number}.bin"


def _only(actions: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The commit's action of this kind; nothing if it has none, as a commit may."""
    return next((action[kind] for action in actions if kind in action), {})


def _stated(info: dict[str, Any]) -> str | None:
    """Our position's text, wherever the engine that made the commit has put it; None if the commit is not ours."""
    if METADATA_KEY in info:
        return str(info[METADATA_KEY])
    said = info.get("userMetadata")
    if not isinstance(said, str) or not said.startswith(f'{{"{METADATA_KEY}":'):
        return None
    return str(json.loads(said)[METADATA_KEY])


def _commit_path(folder: Path, version: int) -> Path:
    return folder / "_delta_log" / f"{version:020d}.json"


def fsync(path: Path) -> None:
    """Push a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
