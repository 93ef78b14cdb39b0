"""Checkpoints in files: damage is reported, foreign files are not read, and one process writes."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import stat
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from tailrace.errors import (
    ConfigError,
    PositionRewound,
    StateCorrupt,
    StateError,
    StateFull,
    StateUnusable,
    TailraceError,
)
from tailrace.model.position import Lsn
from tailrace.model.position_kinds import BinlogPosition, CustomPosition, MysqlGtidSet
from tailrace.state.checkpoint import METADATA_BYTES_MAX, Checkpoint, seed_checkpoint
from tailrace.state.checkpoint_stores import FileCheckpointStore, MemoryCheckpointStore
from tailrace.state.schema_history import MemorySchemaHistory
from tailrace.state.schema_history_stores import FileSchemaHistory
from tailrace.storage import records
from tailrace.testing.store_checks import check_checkpoint_store
from tests.support.disks import fill, mounted

GTIDS = "3e11fa47-71ca-11e1-9e33-c80aa9429562:1-77"
FIXTURE = Path(__file__).parents[2] / "fixtures" / "state-format-1"


def at(value: int, **given: object) -> Checkpoint:
    return Checkpoint(source_type="postgresql", position=Lsn(value), **given)  # type: ignore[arg-type] # as they are


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileCheckpointStore]:
    with FileCheckpointStore(tmp_path / "state") as opened:
        yield opened


@pytest.fixture
def file(store: FileCheckpointStore, tmp_path: Path) -> Path:
    """Return the file of a saved checkpoint."""
    store.save("orders", at(7, transaction="731", metadata={"snapshot": {"chunk": 3}}))
    return tmp_path / "state" / "orders.json"


# --- the value ---------------------------------------------------------------------------------------------


def test_a_checkpoint_refuses_invalid_values() -> None:
    now = datetime.now(UTC)
    refused: list[Callable[[], object]] = [
        lambda: Checkpoint(source_type="postgresql", position=CustomPosition("7")),
        lambda: Checkpoint(source_type="mariadb", position=MysqlGtidSet.parse(GTIDS)),
        lambda: Checkpoint(source_type="", position=Lsn(1)),
        lambda: Checkpoint(source_type="a\nb", position=Lsn(1)),
        lambda: at(1, transaction=""),
        lambda: at(1, transaction=731),
        lambda: at(1, time=now.replace(tzinfo=None)),
        lambda: at(1, time="2026-01-01"),
        lambda: Checkpoint(source_type="postgresql", position="16/1"),  # type: ignore[arg-type] # what a user may write
        lambda: Checkpoint(source_type="mine", position=None),  # type: ignore[arg-type]
        lambda: Checkpoint.parse(source_type="mine", position_type="custom", position=5),  # type: ignore[arg-type]
        lambda: at(1, metadata={"a": object()}),
        lambda: at(1, metadata={"a": float("nan")}),
        lambda: at(1, metadata={"a": "\udc80"}),
        lambda: at(1, metadata={"a": "x" * METADATA_BYTES_MAX}),
        lambda: Checkpoint.parse(source_type="postgresql", position_type="lsn", position="0/1"),
        lambda: Checkpoint.parse(source_type="postgresql", position_type="postgresql-lsn", position="yesterday"),
    ]
    for make in refused:
        with pytest.raises(ConfigError) as caught:
            make()
        assert caught.value.hint


def test_a_custom_source_may_use_any_position_type() -> None:
    assert Checkpoint(source_type="mine", position=Lsn(1)).position_type.value == "postgresql-lsn"
    assert Checkpoint(source_type="mine", position=CustomPosition("seven")).position_type.value == "custom"


def test_its_time_is_utc_and_its_age_is_never_negative() -> None:
    east = timezone(timedelta(hours=5))
    assert at(1, time=datetime(2026, 1, 1, 5, tzinfo=east)).time == datetime(2026, 1, 1, tzinfo=UTC)
    assert 60 <= at(1, time=datetime.now(UTC) - timedelta(minutes=1)).age_seconds < 120
    assert at(1, time=datetime.now(UTC) + timedelta(hours=1)).age_seconds == 0


def test_one_kind_of_store_can_replace_the_other(tmp_path: Path) -> None:
    stores: list[MemoryCheckpointStore | FileCheckpointStore]
    stores = [MemoryCheckpointStore(), FileCheckpointStore(tmp_path / "checkpoints")]
    for opened in stores:
        with opened as store:
            store.save("orders", at(1))
            assert store.list() == ("orders",)
    for made in (MemorySchemaHistory(), FileSchemaHistory(tmp_path / "shapes")):
        with made as history:
            assert history.tables() == ()


# --- seeding by hand ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["files", "memory"])
def test_a_first_checkpoint_is_saved_by_hand_and_never_replaces_one(kind: str, tmp_path: Path) -> None:
    store = MemoryCheckpointStore() if kind == "memory" else FileCheckpointStore(tmp_path)
    seed_checkpoint(
        store,
        "orders",
        Checkpoint.parse(source_type="mysql", position_type="mysql-binlog", position="mysql-bin.000042:1547"),
    )
    found = store.load("orders")
    assert found is not None
    assert found.position == BinlogPosition("mysql-bin.000042", 1547)
    with pytest.raises(StateError, match="already") as caught:
        seed_checkpoint(store, "orders", found)
    assert "delete" in caught.value.hint


@pytest.mark.parametrize("kind", ["files", "memory"])
@pytest.mark.parametrize("key", [None, 5, b"x", ("a",)])
def test_a_key_that_is_not_a_string_is_refused_by_every_call(kind: str, key: Any, tmp_path: Path) -> None:
    store = MemoryCheckpointStore() if kind == "memory" else FileCheckpointStore(tmp_path)
    acts: list[Callable[[Any], object]] = [
        store.load,
        store.delete,
        lambda key: store.save(key, at(1)),
        lambda key: seed_checkpoint(store, key, at(1)),
    ]
    for act in acts:
        with pytest.raises(ConfigError, match="key is not a string") as caught:
            act(key)
        assert "shop-orders" in caught.value.hint
    assert store.list() == ()


@pytest.mark.parametrize("kind", ["files", "memory"])
@pytest.mark.parametrize("given", [None, "0/7", Lsn(7), {"position": "0/7"}])
def test_a_value_that_is_not_a_checkpoint_is_refused_by_every_call(kind: str, given: Any, tmp_path: Path) -> None:
    store = MemoryCheckpointStore() if kind == "memory" else FileCheckpointStore(tmp_path)
    for act in (store.save, lambda key, given: seed_checkpoint(store, key, given)):
        with pytest.raises(ConfigError, match="not a checkpoint") as caught:
            act("orders", given)
        assert "Checkpoint.parse" in caught.value.hint
    assert store.list() == ()


STORED = at(7).to_json()


@pytest.mark.parametrize(("stored", "message"), [
    (None, "the wrong type"), (3, "the wrong type"), ([], "the wrong type"), ({}, "it lacks `source_type`"),
    ({**STORED, "position": "x"}, "not a log sequence number"),
    ({**STORED, "position_type": "zap"}, "position type is unknown"),
    ({**STORED, "time": "noon"}, "Invalid isoformat"), ({**STORED, "time": 3}, "the wrong type"),
    ({**STORED, "metadata": [1]}, "not a JSON object"), ({**STORED, "metadata": None}, "not a JSON object"),
    ({**STORED, "metadata": []}, "not a JSON object"),
])  # fmt: skip
def test_wrong_content_of_a_custom_store_is_damage_and_never_none(stored: Any, message: str) -> None:
    with pytest.raises(StateCorrupt, match=f"checkpoint cannot be read: .*{message}") as caught:
        Checkpoint.from_json(stored)
    assert "call `seed_checkpoint`" in caught.value.hint


@pytest.mark.parametrize("given", [None, 3, "", b"state"])
def test_a_store_is_in_a_folder_that_is_named_and_never_where_the_program_happens_to_run(
    given: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for make in (FileCheckpointStore, FileSchemaHistory):
        with pytest.raises(ConfigError, match="no folder is given") as caught:
            make(given)
        assert "state/shop" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "place", [None, MemoryCheckpointStore(), MemoryCheckpointStore, lambda: 3],
    ids=["none", "a store", "its class", "a function of none"],
)  # fmt: skip
def test_a_check_suite_that_gets_a_store_instead_of_a_factory_refuses_it(place: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be called") as caught:
        check_checkpoint_store(place)
    assert "returns a function that opens" in caught.value.hint


# --- the file ----------------------------------------------------------------------------------------------


def test_a_file_is_readable_by_its_owner_only_and_has_its_format(file: Path) -> None:
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    stored = json.loads(file.read_text())
    assert (stored["format"], stored["key"], stored["position"]) == (1, "orders", "0/7")
    assert len(stored["sha256"]) == 64


def test_the_mode_is_the_same_after_many_saves_and_restarts(store: FileCheckpointStore, file: Path) -> None:
    store.save("orders", at(8))
    store.close()
    with FileCheckpointStore(file.parent) as again:
        assert again.load("orders") is not None
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_files_of_format_1_are_read(tmp_path: Path) -> None:
    found = FileCheckpointStore(FIXTURE / "checkpoints", read_only=True).all()
    assert {key: str(checkpoint.position) for key, checkpoint in found.items()} == {
        "gtids": GTIDS,
        "orders": "16/B374D848",
    }
    assert found["orders"].metadata == {"snapshot": {"table": "public.örders", "chunk": 3}}
    assert found["orders"].transaction == "731"
    assert found["orders"].time == datetime(2026, 11, 16, 12, 0, 0, 123456, UTC)


# --- damage ------------------------------------------------------------------------------------------------


def assert_damage_is_reported(path: Path, message: str) -> None:
    """Assert that reading reports damage, a save is refused, and the file stays unchanged."""
    before = path.read_bytes() if path.is_file() else None
    for read_only in (True, False):
        with FileCheckpointStore(path.parent, read_only=read_only) as store:
            for act in (lambda store=store: store.load(path.stem), store.all):
                with pytest.raises(StateCorrupt, match=message) as caught:
                    act()
                assert caught.value.fields["path"] == path
                assert caught.value.hint
            if not read_only:
                with pytest.raises(StateCorrupt):
                    store.save(path.stem, at(99))
    assert (path.read_bytes() if path.is_file() else None) == before


def test_any_changed_byte_is_found(store: FileCheckpointStore, file: Path) -> None:
    store.close()
    whole = file.read_bytes()
    reader = FileCheckpointStore(file.parent, read_only=True)
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << random.randrange(8)
        file.write_bytes(changed)
        with pytest.raises(StateCorrupt):
            reader.load("orders")


def test_any_torn_file_is_found(store: FileCheckpointStore, file: Path) -> None:
    store.close()
    whole = file.read_bytes()
    reader = FileCheckpointStore(file.parent, read_only=True)
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(StateCorrupt):
            reader.load("orders")
    file.write_bytes(bytes(len(whole)))
    assert_damage_is_reported(file, "cannot be read")


def test_a_newer_format_is_not_guessed_at(store: FileCheckpointStore, file: Path) -> None:
    store.close()
    stored = json.loads(file.read_text())
    del stored["sha256"]
    file.write_bytes(records.encode_state(stored | {"format": 2}))
    assert_damage_is_reported(file, "format 2, and this version knows format 1")
    with pytest.raises(StateCorrupt) as caught:  # it is whole: nobody is told to delete it
        FileCheckpointStore(file.parent, read_only=True).load("orders")
    assert "the version of Tailrace that wrote it" in caught.value.hint
    assert "delete" not in caught.value.hint


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"position": "yesterday"}, "not a log sequence number"),
        ({"position_type": "moons"}, "position type is unknown"),
        ({"time": "noon"}, "cannot be read"),
        ({"time": "2026-01-01T00:00:00"}, "has no time zone"),
        ({"metadata": [1]}, "cannot be read"),
        ({"metadata": None}, "not a JSON object"),
        ({"format": True}, "it is not a record"),
        ({"position": 7}, "cannot be read"),
        ({"key": "elsewhere"}, "belongs to another key"),
    ],
)
def test_an_intact_file_with_invalid_content_is_refused(
    store: FileCheckpointStore, file: Path, wrong: dict[str, object], message: str
) -> None:
    store.close()
    stored = json.loads(file.read_text())
    del stored["sha256"]
    file.write_bytes(records.encode_state(stored | wrong))
    assert_damage_is_reported(file, message)


def test_a_file_copied_to_another_key_is_refused(store: FileCheckpointStore, file: Path) -> None:
    store.close()
    shutil.copy(file, file.with_name("customers.json"))
    assert_damage_is_reported(file.with_name("customers.json"), "belongs to another key")


def test_a_foreign_write_between_two_saves_is_noticed_and_not_overwritten(
    store: FileCheckpointStore, file: Path
) -> None:
    other = json.loads(file.read_text())
    del other["sha256"]
    file.write_bytes(records.encode_state(other | {"position": "0/20"}))
    with pytest.raises(PositionRewound):
        store.save("orders", at(8))
    file.write_bytes(b"{")
    with pytest.raises(StateCorrupt):
        store.save("orders", at(99))
    assert file.read_bytes() == b"{"


def test_a_damaged_checkpoint_can_be_deleted_and_saved_again(store: FileCheckpointStore, file: Path) -> None:
    file.write_bytes(b"{")
    with pytest.raises(StateCorrupt) as caught:
        store.load("orders")
    assert "`delete`" in caught.value.hint
    assert store.delete("orders")
    seed_checkpoint(store, "orders", at(5))
    found = store.load("orders")
    assert found is not None
    assert found.position == Lsn(5)


def test_an_unreadable_checkpoint_is_never_none(store: FileCheckpointStore, file: Path) -> None:
    """Lesson 16: an unreadable checkpoint is an error, never "no checkpoint"."""
    for content in (b"", b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"format": 1}'):
        file.write_bytes(content)
        with pytest.raises(StateCorrupt):
            store.load("orders")


# --- links, folders and pipes --------------------------------------------------------------------------------


def test_no_link_is_followed_out_of_the_folder(store: FileCheckpointStore, file: Path, tmp_path: Path) -> None:
    store.close()
    outside = tmp_path / "outside.json"
    file.rename(outside)
    file.symlink_to(outside)
    before = outside.read_bytes()
    assert_damage_is_reported(file, "it is a link")
    with FileCheckpointStore(file.parent) as again:
        assert again.delete("orders"), "the link goes"
        again.save("orders", at(1))
    assert not file.is_symlink()
    assert outside.read_bytes() == before, "and nothing outside was touched"


def test_a_dangling_link_does_not_count_as_no_checkpoint(store: FileCheckpointStore, tmp_path: Path) -> None:
    (tmp_path / "state" / "orders.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StateCorrupt, match="it is a link"):
        store.load("orders")


def test_only_plain_files_are_read(store: FileCheckpointStore, tmp_path: Path) -> None:
    (tmp_path / "state" / "folder.json").mkdir()
    os.mkfifo(tmp_path / "state" / "pipe.json")
    for key in ("folder", "pipe"):
        with pytest.raises(StateCorrupt, match="not a plain file"):
            store.load(key)


def test_a_file_too_large_to_be_ours_is_not_read(store: FileCheckpointStore, tmp_path: Path) -> None:
    with (tmp_path / "state" / "huge.json").open("wb") as huge:
        huge.truncate(1 << 40)
    with pytest.raises(StateCorrupt, match="too large"):
        store.load("huge")


def test_a_file_whose_name_is_not_a_key_is_an_error_when_keys_are_listed(
    store: FileCheckpointStore, tmp_path: Path
) -> None:
    (tmp_path / "state" / "a\nb.json").write_text("{}")
    with pytest.raises(StateCorrupt, match="not printable"):
        store.list()
    (tmp_path / "state" / "a\nb.json").rename(tmp_path / "state" / "notes.txt")
    assert store.list() == (), "what is no checkpoint is nobody's"


def test_a_missing_folder_is_an_error_and_not_an_empty_store(store: FileCheckpointStore, file: Path) -> None:
    file.parent.rename(file.parent.with_name("moved"))
    for act in (lambda: store.load("orders"), store.list, lambda: store.save("orders", at(9))):
        with pytest.raises(StateUnusable) as caught:
            act()
        assert caught.value.hint


def test_a_file_instead_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    for read_only in (True, False):
        with pytest.raises(StateUnusable) as caught:
            FileCheckpointStore(tmp_path / "state", read_only=read_only)
        assert "this path is a file" in caught.value.hint


# --- what a crash leaves -------------------------------------------------------------------------------------


def test_leftovers_are_swept_by_the_next_owner_and_by_no_reader(store: FileCheckpointStore, file: Path) -> None:
    store.close()
    orphan = file.with_name(".orders.json.0123456789abcdef-7-0.tmp")
    orphan.write_bytes(b"half")
    reader = FileCheckpointStore(file.parent, read_only=True)
    assert reader.list() == ("orders",)
    assert orphan.exists()
    FileCheckpointStore(file.parent).close()
    assert not orphan.exists()
    assert reader.list() == ("orders",)


def test_a_failed_save_leaves_the_old_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=256k", "tmpfs") as disk:
        with FileCheckpointStore(disk / "state") as store:
            store.save("orders", at(7))
            filler = fill(disk)
            with pytest.raises(StateFull) as caught:
                store.save("orders", at(8, metadata={"large": "x" * 20_000}))
            assert "Free space" in caught.value.hint
            found = store.load("orders")
            assert found is not None
            assert found.position == Lsn(7)
            assert sorted(path.name for path in (disk / "state").iterdir()) == [
                ".owner.json",
                ".owner.lock",
                "orders.json",
            ]
            filler.unlink()
            store.save("orders", at(8))
        with FileCheckpointStore(disk / "state") as store:
            found = store.load("orders")
            assert found is not None
            assert found.position == Lsn(8)


def test_a_store_on_a_full_disk_can_still_be_opened_by_its_owner(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=256k", "tmpfs") as disk:
        with FileCheckpointStore(disk / "state") as store:
            store.save("orders", at(7))
        fill(disk)
        with FileCheckpointStore(disk / "state") as store:
            found = store.load("orders")
            assert found is not None
            assert found.position == Lsn(7)


# --- nothing secret ------------------------------------------------------------------------------------------


def test_no_error_and_no_log_line_contains_a_value_of_the_metadata(
    store: FileCheckpointStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    reported: list[str] = []

    def note(act: Callable[[], object]) -> None:
        with pytest.raises(TailraceError) as caught:
            act()
        reported.append(str(caught.value))

    store.save("orders", at(7, metadata={"password": "SECRET"}))
    note(lambda: store.save("orders", at(6, metadata={"password": "SECRET"})))
    note(lambda: at(1, metadata={"password": ("SECRET", object())}))
    note(lambda: at(1, metadata={"password": "SECRET\udc80"}))
    path = tmp_path / "state" / "orders.json"
    path.write_bytes(path.read_bytes().replace(b"0/7", b"0/8"))
    note(lambda: store.load("orders"))
    path.write_bytes(path.read_bytes()[:-40])
    note(lambda: store.load("orders"))
    assert len(reported) == 5
    assert "SECRET" not in "".join(reported) + caplog.text


def test_a_rewind_says_both_positions_and_how_to_go_back_on_purpose(store: FileCheckpointStore, file: Path) -> None:
    with pytest.raises(PositionRewound) as caught:
        store.save("orders", at(6))
    assert caught.value.fields == {"saved": "0/7", "given": "0/6"}
    assert "`delete`" in caught.value.hint
