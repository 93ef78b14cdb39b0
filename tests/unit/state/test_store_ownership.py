"""One process owns a store; any number may read meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tailrace.errors import ConfigError, StateBusy, StateFenced, StateUnusable
from tailrace.model.position import Lsn
from tailrace.state.checkpoint import Checkpoint
from tailrace.state.checkpoint_stores import FileCheckpointStore
from tailrace.storage import lease


def at(value: int, **given: object) -> Checkpoint:
    return Checkpoint(source_type="postgresql", position=Lsn(value), **given)  # type: ignore[arg-type] # as they are


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileCheckpointStore]:
    with FileCheckpointStore(tmp_path / "state") as opened:
        yield opened


@pytest.fixture
def file(store: FileCheckpointStore, tmp_path: Path) -> Path:
    """Return the file of a saved checkpoint."""
    store.save("orders", at(7))
    return tmp_path / "state" / "orders.json"


# --- one owner -----------------------------------------------------------------------------------------------

HOLD = """
import sys
import time
from tailrace.state.checkpoint_stores import FileCheckpointStore
from tailrace.state.checkpoint import Checkpoint
from tailrace.model.position import Lsn
store = FileCheckpointStore(sys.argv[1])
store.save("orders", Checkpoint(source_type="postgresql", position=Lsn(7)))
print("held", flush=True)
for line in sys.stdin:
    try:
        store.save("orders", Checkpoint(source_type="postgresql", position=Lsn(int(line))))
        print("saved", flush=True)
    except Exception as error:
        print(error.code, flush=True)
"""


@contextmanager
def owning_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "held\n"
            yield child
        finally:
            child.kill()


def test_a_live_owner_is_refused_and_named_and_a_dead_one_is_taken_over(tmp_path: Path) -> None:
    with owning_process(tmp_path) as child:
        began = time.monotonic()
        with pytest.raises(StateBusy) as caught:
            FileCheckpointStore(tmp_path)
        assert time.monotonic() - began < lease.WAIT_SECONDS_MAX, "nobody waits"
        assert caught.value.fields["pid"] == child.pid
        assert "read_only=True" in caught.value.hint
        assert FileCheckpointStore(tmp_path, read_only=True).list() == ("orders",)
        child.kill()
        child.wait()
        with FileCheckpointStore(tmp_path) as store:
            store.save("orders", at(8))


def test_a_second_owner_in_the_same_process_is_refused_too(store: FileCheckpointStore, tmp_path: Path) -> None:
    with pytest.raises(StateBusy):
        FileCheckpointStore(tmp_path / "state")
    store.close()
    store.close()
    FileCheckpointStore(tmp_path / "state").close()


def leave_record(folder: Path, **changed: object) -> None:
    """Leave the record of an owner that did not end properly."""
    FileCheckpointStore(folder).close()
    record = json.loads((folder / ".owner.json").read_text())
    (folder / ".owner.json").write_text(json.dumps(record | {"pid": 7, "released": False} | changed))


def test_an_owner_that_died_with_its_host_is_taken_over_once_the_host_is_back(tmp_path: Path) -> None:
    leave_record(tmp_path, boot="the one before")
    with FileCheckpointStore(tmp_path) as store:
        store.save("orders", at(1))
        assert store.list() == ("orders",)
    assert json.loads((tmp_path / ".owner.json").read_text())["boot"] != "the one before"


def test_a_host_of_the_same_name_is_not_the_same_host(tmp_path: Path) -> None:
    leave_record(tmp_path, boot="another", machine="another")
    with pytest.raises(StateBusy):
        FileCheckpointStore(tmp_path)


def test_hosts_without_a_machine_id_are_not_distinguished_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_machine_id", lambda: "")
    leave_record(tmp_path, boot="another")
    with pytest.raises(StateBusy):
        FileCheckpointStore(tmp_path)


def test_an_unreadable_owner_record_blocks_the_store_until_it_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / ".owner.json").write_bytes(b"{")
    with pytest.raises(StateBusy):
        FileCheckpointStore(tmp_path)
    FileCheckpointStore(tmp_path, take_over=True).close()
    FileCheckpointStore(tmp_path).close()


def test_an_owner_on_another_host_blocks_the_store_until_take_over(tmp_path: Path) -> None:
    leave_record(tmp_path, host="elsewhere", boot="another")
    with pytest.raises(StateBusy) as caught:
        FileCheckpointStore(tmp_path)
    assert (caught.value.fields["host"], caught.value.fields["pid"]) == ("elsewhere", 7)
    assert "take_over=True" in caught.value.hint
    with FileCheckpointStore(tmp_path, take_over=True) as store:
        store.save("orders", at(1))
    FileCheckpointStore(tmp_path).close()


def test_an_owner_that_was_taken_over_saves_nothing_more(tmp_path: Path) -> None:
    with owning_process(tmp_path) as child, FileCheckpointStore(tmp_path, take_over=True) as store:
        store.save("orders", at(20))
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write("30\n")
        child.stdin.flush()
        assert child.stdout.readline() == "state-fenced\n"
        found = store.load("orders")
        assert found is not None
        assert found.position == Lsn(20)
    with pytest.raises(ConfigError, match="closed"):
        store.save("orders", at(21))


def test_a_former_owner_gets_an_error_before_it_reads_or_writes(tmp_path: Path) -> None:
    first = FileCheckpointStore(tmp_path)
    first.save("orders", at(1))
    with FileCheckpointStore(tmp_path, take_over=True):
        for act in (lambda: first.save("orders", at(2)), lambda: first.delete("orders")):
            with pytest.raises(StateFenced) as caught:
                act()
            assert caught.value.hint
    first.close()


def test_a_forked_process_does_not_own_its_parents_store(store: FileCheckpointStore, file: Path) -> None:
    before = file.read_bytes()
    child = os.fork()
    if not child:
        code = 1
        try:
            store.save("orders", at(9))
        except StateBusy:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert file.read_bytes() == before
    store.save("orders", at(10))


# --- reading beside the owner --------------------------------------------------------------------------------


def test_a_read_only_handle_sees_what_the_owner_saves_and_writes_nothing(
    store: FileCheckpointStore, file: Path
) -> None:
    reader = FileCheckpointStore(file.parent, read_only=True)
    before = sorted(path.name for path in file.parent.iterdir())
    store.save("orders", at(8))
    found = reader.load("orders")
    assert found is not None
    assert found.position == Lsn(8)
    for act in (lambda: reader.save("orders", at(9)), lambda: reader.delete("orders")):
        with pytest.raises(ConfigError, match="read-only"):
            act()
    reader.close()
    assert sorted(path.name for path in file.parent.iterdir()) == before


def test_a_read_only_handle_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(StateUnusable) as caught:
        FileCheckpointStore(tmp_path / "nowhere", read_only=True)
    assert caught.value.hint
    assert not (tmp_path / "nowhere").exists()


def test_a_reader_never_sees_half_a_checkpoint(store: FileCheckpointStore, tmp_path: Path) -> None:
    reader = FileCheckpointStore(tmp_path / "state", read_only=True)
    for value in range(1, 100):
        store.save("orders", at(value, metadata={"pad": "x" * (value * 37 % 5000)}))
        found = reader.load("orders")
        assert found is not None
        assert found.position == Lsn(value)


def test_a_link_instead_of_the_lock_is_refused_and_its_target_is_not_written(
    store: FileCheckpointStore, file: Path, tmp_path: Path
) -> None:
    store.close()
    other = tmp_path / "somebody's"
    other.write_text("a text of theirs, which is longer than a token is, and not to be lost")
    (file.parent / ".owner.lock").unlink()
    (file.parent / ".owner.lock").symlink_to(other)
    with pytest.raises(StateUnusable) as raised:
        FileCheckpointStore(file.parent)
    assert "Remove the link" in raised.value.hint
    assert other.read_text().startswith("a text of theirs")
