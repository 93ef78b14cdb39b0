"""One suite over every checkpoint store and schema history, a user's own among them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace import (
    Checkpoint,
    CheckpointStore,
    FileCheckpointStore,
    FileSchemaHistory,
    MemoryCheckpointStore,
    MemorySchemaHistory,
    Retention,
    SchemaHistory,
    check_key,
)
from tailrace.testing.checks import Check, ContractBroken
from tailrace.testing.schema_history_checks import KEEP_LAST, SCHEMA_HISTORY, check_schema_history
from tailrace.testing.store_checks import CHECKPOINT_STORE, check_checkpoint_store
from tests.support.logs import quick_folder

KEPT = Retention(keep_last=KEEP_LAST)


class SqliteStore:
    """A store as a user writes one."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
        self._database.execute("PRAGMA synchronous = FULL")
        self._database.execute("CREATE TABLE IF NOT EXISTS checkpoints (key TEXT PRIMARY KEY, value TEXT NOT NULL)")

    def save(self, key: str, checkpoint: Checkpoint) -> None:
        check_key(key)
        with self._database:
            checkpoint.require_follows(self.load(key))
            stored = json.dumps(checkpoint.to_json())
            self._database.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?)", (key, stored))

    def load(self, key: str) -> Checkpoint | None:
        row = self._database.execute("SELECT value FROM checkpoints WHERE key = ?", (check_key(key),)).fetchone()
        return Checkpoint.from_json(json.loads(row[0])) if row else None

    def delete(self, key: str) -> bool:
        return bool(self._database.execute("DELETE FROM checkpoints WHERE key = ?", (check_key(key),)).rowcount)

    def list(self) -> tuple[str, ...]:
        return tuple(sorted(key for (key,) in self._database.execute("SELECT key FROM checkpoints")))

    def all(self) -> dict[str, Checkpoint]:
        found = {key: self.load(key) for key in self.list()}
        return {key: checkpoint for key, checkpoint in found.items() if checkpoint is not None}

    def close(self) -> None:
        self._database.close()


def memory(_: Path) -> Callable[[], CheckpointStore]:
    store = MemoryCheckpointStore()
    return lambda: store


def files(folder: Path) -> Callable[[], CheckpointStore]:
    return lambda: FileCheckpointStore(folder / "checkpoints")


def sqlite(folder: Path) -> Callable[[], CheckpointStore]:
    return lambda: SqliteStore(folder / "checkpoints.db")


STORES = {"memory": memory, "files": files, "a user's": sqlite}


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("check", CHECKPOINT_STORE, ids=str)
def test_a_checkpoint_store_promises(check: Check[CheckpointStore], kind: str, tmp_path: Path) -> None:
    with quick_folder(tmp_path) as folder:
        check(STORES[kind](folder))


def memory_history(_: Path) -> Callable[[], SchemaHistory]:
    history = MemorySchemaHistory(retention=KEPT)
    return lambda: history


def file_history(folder: Path) -> Callable[[], SchemaHistory]:
    return lambda: FileSchemaHistory(folder / "schemas", retention=KEPT)


HISTORIES = {"memory": memory_history, "files": file_history}


@pytest.mark.parametrize("kind", HISTORIES)
@pytest.mark.parametrize("check", SCHEMA_HISTORY, ids=str)
def test_a_schema_history_promises(check: Check[SchemaHistory], kind: str, tmp_path: Path) -> None:
    with quick_folder(tmp_path) as folder:
        check(HISTORIES[kind](folder))


# --- the suite itself finds what is wrong -------------------------------------------------------------------


class Careless(MemoryCheckpointStore):
    """Saves anything."""

    def save(self, key: str, checkpoint: Checkpoint) -> None:
        self._saved[key] = checkpoint


class Forgetful(MemorySchemaHistory):
    """Takes every schema for a new one."""

    def _record(self, schema, occurrence, evolution=None):  # type: ignore[no-untyped-def] # as the one above
        self.drop(schema.table)
        return super()._record(schema, occurrence, evolution)


def test_all_broken_promises_of_a_store_are_reported_at_once() -> None:
    with pytest.raises(ContractBroken) as caught:
        check_checkpoint_store(lambda: (lambda store: lambda: store)(Careless()))
    told = str(caught.value).splitlines()
    assert [line.partition(":")[0] for line in told] == [
        "a position that does not follow the saved one is refused, and nothing changes",
        "a key belongs to one source and one position type, until it is deleted",
        "a key that is empty, too long, or could lead to another folder is refused in every call",
        "a caller's later changes of metadata do not change what is saved",
    ]


def test_broken_promises_of_a_history_are_reported() -> None:
    with pytest.raises(ContractBroken, match="recording a table's current schema again adds nothing"):
        check_schema_history(lambda: (lambda history: lambda: history)(Forgetful(retention=KEPT)))
