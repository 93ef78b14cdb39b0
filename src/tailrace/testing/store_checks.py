"""The promises of every checkpoint store, as checks for your own implementation.

```python
@pytest.mark.parametrize("check", CHECKPOINT_STORE, ids=str)
def test_my_store(check, tmp_path):
    check(lambda: MyStore(tmp_path / "checkpoints"))
```

`DURABLE` is for a store whose checkpoints outlive the process: it kills a process of its own (`os.fork`) once a save
has returned.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from tailrace.errors import ConfigError, PositionRewound, StateError, StateForeign
from tailrace.model.position import Lsn
from tailrace.model.position_kinds import (
    BinlogPosition,
    CustomPosition,
    MariadbGtidSet,
    MysqlGtidSet,
    Position,
    SqlServerLsn,
)
from tailrace.state.checkpoint import KEY_BYTES_MAX, METADATA_BYTES_MAX, Checkpoint, CheckpointStore
from tailrace.testing.checks import Check, open_at, require, require_checks, require_refused, run, run_and_kill, suite

Open = Callable[[], CheckpointStore]

_UUID = "3e11fa47-71ca-11e1-9e33-c80aa9429562"
ORDERED: tuple[tuple[str, Position, Position], ...] = (
    ("postgresql", Lsn.parse("0/9"), Lsn.parse("0/10")),
    ("mysql", BinlogPosition("mysql-bin.999999", 500), BinlogPosition("mysql-bin.1000000", 4)),
    ("mysql", MysqlGtidSet.parse(f"{_UUID}:1-9"), MysqlGtidSet.parse(f"{_UUID}:1-10:12")),
    ("mariadb", MariadbGtidSet.parse("0-1-9"), MariadbGtidSet.parse("0-2-10,1-1-1")),
    ("sqlserver", SqlServerLsn(1, 9, 9), SqlServerLsn(2, 0, 1)),
    ("mine", CustomPosition("9"), CustomPosition("10")),
)
"""An earlier and a later position of each kind. Their texts sort the other way round where possible."""

BAD_KEYS = ("", ".", "..", "...", "a/b", "/a", "a\\b", "../a", ".a", "a\nb", "a\0b", "\x7f", "\u202ea", "k" * 1000)
GOOD_KEYS = ("a", "a.b", "-", "Ünï cödé ✓", "shop:orders", "k" * KEY_BYTES_MAX, "a%", "a_b", "a*", "[a]", "'a'")
ALIKE = (("orders", "Orders"), ("orders", "orders "), ("caf\u00e9", "cafe\u0301"), ("strasse", "straße"))
"""Keys that databases and disks may take for one."""
SAVES = 60
"""Saves while another thread loads."""


def checkpoint(source: str, position: Position, **fields: Any) -> Checkpoint:
    return Checkpoint(source_type=source, position=position, **fields)


def _lsn(value: int, **fields: Any) -> Checkpoint:
    return checkpoint("postgresql", Lsn(value), **fields)


def _begins_empty(at: Open) -> None:
    """a new store is empty, and returns that without an error"""
    with open_at(at) as store:
        require(store.load("orders") is None, "it has a checkpoint that was never saved")
        require(tuple(store.list()) == () and dict(store.all()) == {}, "it lists a checkpoint that was never saved")
        require(store.delete("orders") is False, "it deleted a checkpoint that did not exist")


def _returns_what_was_saved(at: Open) -> None:
    """a saved checkpoint is loaded as it was, with every kind of position"""
    time = datetime(2026, 11, 16, 12, 0, 0, 123456, UTC)
    with open_at(at) as store:
        for number, (source, position, _) in enumerate(ORDERED):
            saved = checkpoint(
                source, position, time=time, transaction="7:ü", metadata={"a": [1, 2.5, None, "é\n"], "b": {"c": True}}
            )
            store.save(f"key{number}", saved)
            require(
                store.load(f"key{number}") == saved,
                f"a checkpoint with {saved.position_type.value} was loaded differently",
            )


def _survives_reopening(at: Open) -> None:
    """saves and deletes survive a reopening"""
    with open_at(at) as store:
        store.save("kept", _lsn(7, metadata={"n": 1}))
        store.save("gone", _lsn(8))
        store.delete("gone")
        kept = store.load("kept")
    with open_at(at) as store:
        require(kept is not None and store.load("kept") == kept, "a saved checkpoint does not exist")
        require(store.load("gone") is None, "a deleted checkpoint exists again")


def _moves_forward(at: Open) -> None:
    """the last save counts, and the same position may be saved with other metadata"""
    with open_at(at) as store:
        for source, early, late in ORDERED:
            key = f"{source}-{type(early).__name__}"
            store.save(key, checkpoint(source, early))
            store.save(key, checkpoint(source, early, metadata={"chunk": 2}))
            repeated = store.load(key)
            require(repeated is not None and repeated.metadata == {"chunk": 2}, "the same position was not saved again")
            store.save(key, checkpoint(source, late))
            loaded = store.load(key)
            require(loaded is not None and loaded.position == late, f"{late} did not follow {early}")


def _replaces_all(at: Open) -> None:
    """a checkpoint replaces the one before completely"""
    early, late = (datetime(2026, 11, day, tzinfo=UTC) for day in (16, 17))
    chain = (
        _lsn(5, time=late, transaction="7", metadata={"a": 1, "b": {"c": 2}}),
        _lsn(5, time=early, metadata={"b": {"d": 3}}),
        _lsn(6, time=early, transaction="8", metadata={"b": {"d": 4}}),
        _lsn(6, time=early, transaction="8", metadata={"b": {"d": 5}}),
        _lsn(7, time=late),
    )
    with open_at(at) as store:
        for one in chain:
            store.save("orders", one)
            require(store.load("orders") == one, "a part of the one before remains, or the time differs")


def _keeps_large(at: Open) -> None:
    """metadata, positions and numbers are loaded whole, however large"""
    room = METADATA_BYTES_MAX - len(json.dumps({"text": ""}))
    many = ",".join(f"{number:08x}-71ca-11e1-9e33-c80aa9429562:1-{number + 1}" for number in range(500))
    checkpoints = (
        _lsn((1 << 64) - 1, transaction="t" * 200, metadata={"text": "x" * room}),
        _lsn((1 << 64) - 1, metadata={"whole": (1 << 63) + 1, "one": 1, "part": 0.1, "none": None, "text": "'\"\\\0"}),
        checkpoint("mysql", MysqlGtidSet.parse(many)),
    )
    with open_at(at) as store:
        for number, saved in enumerate(checkpoints):
            store.save(f"key{number}", saved)
            loaded = store.load(f"key{number}")
            require(loaded == saved, "a checkpoint was not loaded whole")
            same = loaded is not None and json.dumps(loaded.metadata) == json.dumps(saved.metadata)
            require(same, "a number was loaded as another type")


def _never_back(at: Open) -> None:
    """a position that does not follow the saved one is refused, and nothing changes"""
    with open_at(at) as store:
        for source, early, late in ORDERED:
            key = f"{source}-{type(early).__name__}"
            store.save(key, checkpoint(source, late))
            back = checkpoint(source, early)
            require_refused(
                lambda key=key, back=back: store.save(key, back),  # type: ignore[misc]
                PositionRewound,
                f"it went back from {late} to {early}",
            )
            loaded = store.load(key)
            require(loaded is not None and loaded.position == late, "a refused checkpoint was saved all the same")
        store.save("two", checkpoint("mysql", MysqlGtidSet.parse(f"{_UUID}:1-5")))
        unrelated = checkpoint("mysql", MysqlGtidSet.parse(f"{_UUID}:3-9"))
        require_refused(
            lambda: store.save("two", unrelated),
            PositionRewound,
            "a set was accepted that lacks transactions of the one before",
        )


def _one_source(at: Open) -> None:
    """a key belongs to one source and one position type, until it is deleted"""
    with open_at(at) as store:
        store.save("orders", _lsn(7))
        other = checkpoint("mysql", BinlogPosition("mysql-bin.000001", 4))
        require_refused(lambda: store.save("orders", other), StateForeign, "another source took the key")
        store.save("binlog", other)
        for foreign in (
            checkpoint("mariadb", BinlogPosition("mysql-bin.000002", 4)),
            checkpoint("mysql", MysqlGtidSet.parse(f"{_UUID}:1-9")),
        ):
            require_refused(
                lambda foreign=foreign: store.save("binlog", foreign),  # type: ignore[misc]
                StateForeign,
                "another source, or another position type, took the key",
            )
            require(store.load("binlog") == other, "a refused checkpoint was saved all the same")
        store.delete("orders")
        store.save("orders", other)
        require(store.load("orders") == other, "a deleted key still belongs to its first source")


def _deletes(at: Open) -> None:
    """a deleted checkpoint does not exist any more, and its key can begin at any position"""
    with open_at(at) as store:
        store.save("orders", _lsn(9))
        require(store.delete("orders") is True, "it did not return that there was one")
        require(store.load("orders") is None and store.delete("orders") is False, "it still exists")
        store.save("orders", _lsn(1))
        loaded = store.load("orders")
        require(loaded is not None and loaded.position == Lsn(1), "it did not begin at the new position")


def _keeps_keys_separate(at: Open) -> None:
    """keys are independent, and are listed in order with their checkpoints"""
    with open_at(at) as store:
        for number, key in enumerate(GOOD_KEYS, start=1):
            store.save(key, _lsn(number))
        store.delete("a")
        expected = {key: Lsn(number) for number, key in enumerate(GOOD_KEYS, start=1) if key != "a"}
        require(list(store.list()) == sorted(expected), "`list` returned other keys, or in another order")
        positions = {key: item.position for key, item in store.all().items()}
        require(positions == expected and list(positions) == sorted(expected), "`all` returned other checkpoints")


def _keys_alike(at: Open) -> None:
    """keys that look alike are not one: both are kept, or the second is refused"""
    with open_at(at) as store:
        for one, other in ALIKE:
            store.save(one, _lsn(7))
            try:
                store.save(other, _lsn(9))
                kept = store.load(other)
            except StateError:  # a disk may use one file for both: that is detected
                kept = _lsn(9)
            first = store.load(one)
            apart = first is not None and first.position == Lsn(7) and kept is not None and kept.position == Lsn(9)
            require(apart, f"{one!a} and {other!a} are one")
            store.delete(one)


def _bad_keys(at: Open) -> None:
    """a key that is empty, too long, or could lead to another folder is refused in every call"""
    with open_at(at) as store:
        for key in BAD_KEYS:
            calls: tuple[tuple[str, Callable[[str], object]], ...] = (
                ("save", lambda key: store.save(key, _lsn(1))),
                ("load", store.load),
                ("delete", store.delete),
            )
            for name, call in calls:
                require_refused(
                    lambda call=call, key=key: call(key),  # type: ignore[misc]
                    ConfigError,
                    f"`{name}` took the key {key[:20]!a}",
                )
        require(tuple(store.list()) == (), "something was saved under such a key")


def _callers_own(at: Open) -> None:
    """a caller's later changes of metadata do not change what is saved"""
    metadata = {"chunks": [1]}
    with open_at(at) as store:
        saved = _lsn(5, metadata=metadata)
        store.save("orders", saved)
        metadata["chunks"].append(2)
        saved.metadata["chunks"].append(3)
        for _ in range(2):
            loaded = store.load("orders")
            require(loaded is not None and loaded.metadata == {"chunks": [1]}, "the saved metadata has changed")
            if loaded is not None:
                loaded.metadata["chunks"].append(4)


def _threads(at: Open) -> None:
    """threads that save at once, each under a key of its own, lose nothing"""
    failures: list[Exception] = []
    with open_at(at) as store:

        def work(key: str) -> None:
            try:
                for value in range(1, 9):
                    store.save(key, _lsn(value))
            except Exception as error:  # noqa: BLE001 # it is reported below
                failures.append(error)

        threads = [threading.Thread(target=work, args=(f"key{number}",)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        require(not failures, f"a thread failed with {failures and type(failures[0]).__name__}")
        positions = {key: found.position for key, found in store.all().items()}
        require(positions == {f"key{number}": Lsn(8) for number in range(4)}, "a checkpoint is missing or old")


def _always_there(at: Open) -> None:
    """while a checkpoint is replaced, a load returns the old or the new one, and never nothing"""
    with open_at(at) as store:
        store.save("orders", _lsn(1))
        failures: list[Exception] = []

        def work() -> None:
            try:
                for value in range(2, SAVES):
                    store.save("orders", _lsn(value))
            except Exception as error:  # noqa: BLE001 # it is reported below
                failures.append(error)

        interval, last = sys.getswitchinterval(), Lsn(1)
        sys.setswitchinterval(1e-5)  # otherwise one thread has done everything before the other runs
        saving = threading.Thread(target=work)
        saving.start()
        try:
            while saving.is_alive():
                loaded = store.load("orders")
                position = loaded.position if loaded is not None else None
                require(isinstance(position, Lsn), "there was no checkpoint for a moment")
                require(isinstance(position, Lsn) and position >= last, "it went back")
                last = position if isinstance(position, Lsn) else last
        finally:
            saving.join()
            sys.setswitchinterval(interval)
        require(not failures, f"a save failed with {failures and type(failures[0]).__name__}")


def _outlives_a_kill(at: Open) -> None:
    """saves and deletes survive a killed process"""

    def act() -> None:
        store = at()
        for value in (1, 2):
            store.save("kept", _lsn(value, metadata={"n": value}))
        store.save("gone", _lsn(8))
        store.delete("gone")

    run_and_kill(act)
    with open_at(at) as store:
        loaded = store.load("kept")
        require(loaded is not None and loaded.position == Lsn(2), "a saved checkpoint does not exist")
        require(loaded is not None and loaded.metadata == {"n": 2}, "other metadata was loaded")
        require(store.load("gone") is None, "a deleted checkpoint exists again")


CHECKPOINT_STORE: tuple[Check[CheckpointStore], ...] = suite(
    _begins_empty,
    _returns_what_was_saved,
    _survives_reopening,
    _moves_forward,
    _replaces_all,
    _keeps_large,
    _never_back,
    _one_source,
    _deletes,
    _keeps_keys_separate,
    _keys_alike,
    _bad_keys,
    _callers_own,
    _threads,
    _always_there,
)
DURABLE: tuple[Check[CheckpointStore], ...] = suite(_outlives_a_kill)


def check_checkpoint_store(place: Callable[[], Open], *more: Check[CheckpointStore]) -> None:
    """Run all checks, and others. `place` returns a function that opens a store at an empty location."""
    require_checks(more, "`*DURABLE`")
    run((*CHECKPOINT_STORE, *more), place)
