"""Kill whoever saves at every named place, and cut the power under it: what was called saved is there, and whole."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tailrace import failpoints
from tailrace.model.position import Lsn
from tailrace.state.checkpoint import Checkpoint
from tailrace.state.checkpoint_stores import FileCheckpointStore
from tailrace.state.schema_history_stores import FileSchemaHistory
from tests.support.changes import SHOP
from tests.support.failing_disk import built
from tests.support.killed import SAVES, Killed
from tests.support.logs import quick_folder

ROOT = Path(__file__).parents[2]
PLACES = [name for name in failpoints.NAMES if name.startswith("state.")]
PASSED = {
    "save": {"state.written", "state.replaced", "state.saved", "state.removed"},
    "record": {"state.written", "state.created", "state.removed"},
}
LEFT = {".owner.json", ".owner.lock"}


def done(folder: Path) -> list[str]:
    """What the process that died had been told is durable."""
    noted = folder / "done"
    return noted.read_text().split() if noted.exists() else []


def assert_saved(folder: Path) -> None:
    told = done(folder)
    last = told[-1] if told else "none"
    count = len([item for item in told if item != "none"])
    with FileCheckpointStore(folder / "state") as store:  # the dead one's lease is ours at once
        found = store.load("orders")
        now = "none" if found is None else str(found.position)
        # The one that was under way may be there or not; it was a save, or at half time the deletion.
        under_way = "none" if count == SAVES // 2 and last != "none" else str(Lsn(count + 1))
        assert now in {last if last == "none" else str(Lsn(int(last))), under_way}
        store.save("orders", Checkpoint(source_type="postgresql", position=Lsn(SAVES + 1)))
    assert {path.name for path in (folder / "state").iterdir()} == LEFT | {"orders.json"}, "nothing is left over"


def assert_recorded(folder: Path) -> None:
    told = len(done(folder))
    with FileSchemaHistory(folder / "state", retention=None) as history:
        kept = [version.version for version in history.versions(SHOP.table)]
        assert kept
        assert kept[-1] in {told, told + 1}
        assert len(kept) >= min(3, kept[-1])
        assert len(history.at_version(SHOP.table, kept[-1]).schema.columns) == len(SHOP.columns) + kept[-1] - 1
    names = {path.name.rsplit(".", 2)[-2] for path in (folder / "state").iterdir() if path.name not in LEFT}
    assert names == {str(number) for number in kept}, "nothing is left over"


CHECKS = {"save": assert_saved, "record": assert_recorded}


def test_killed_anywhere_a_store_is_whole_and_the_next_owner_goes_on(tmp_path: Path) -> None:
    hits, expected = tmp_path / "hits", Counter[str]()
    with quick_folder(tmp_path) as top, Killed(hits) as killed:
        for task, places in PASSED.items():
            for name in sorted(places):
                for turn in range(1, SAVES + 2):
                    folder = top / f"{task}-{name}-{turn}"
                    folder.mkdir()
                    ended = killed.at(name, turn, folder, task)
                    if ended == 0:
                        assert turn > 1, f"{name} is never passed by {task}"
                        break
                    assert ended == -signal.SIGKILL
                    expected[name] += 1
                    if not (task == "record" and not done(folder) and name == "state.written"):
                        CHECKS[task](folder)
    assert Counter(hits.read_text().split()) == expected
    assert set(expected) == set(PLACES)


# --- the power goes ------------------------------------------------------------------------------------------

POWER = """
import sys
from dataclasses import replace
from pathlib import Path
from tailrace.errors import StateUnusable
from tailrace.model.position import Lsn
from tailrace.state.checkpoint import Checkpoint
from tailrace.state.checkpoint_stores import FileCheckpointStore
from tests.support.failing_disk import Call, Disk

top, calls, error = Path(sys.argv[1]), Call(int(sys.argv[2])), int(sys.argv[3])
(top / "disk").mkdir()
disk = Disk(top / "disk", top / "trace", remembers=True)


def at(value):
    return Checkpoint(source_type="postgresql", position=Lsn(value))


def survivor():
    "What another machine finds on the disk after a power cut."
    disk.after_power_cut(top / "left")
    found = FileCheckpointStore(top / "left" / "state", read_only=True).load("orders")
    return found and found.position.value


failed, saved = 0, 0
for nth in range(1, 20):
    store = FileCheckpointStore(top / "disk" / "state")
    loaded = store.load("orders")
    saved = loaded.position.value if loaded else 0
    assert not saved or survivor() == saved, "what is loaded is durable, whoever saved it"
    store.save("orders", at(saved + 1))
    assert survivor() == saved + 1, "what is saved is durable"
    disk.fail(calls, nth, error)
    try:
        store.save("orders", at(saved + 2))
        done = True
    except StateUnusable as told:
        assert told.hint
        done = False
    disk.heal()
    assert survivor() in ({saved + 2} if done else {saved + 1, saved + 2}), "the one before or the new one"
    after = store.load("orders").position.value
    assert survivor() == after, "what is loaded after a failure is durable"
    store.save("orders", at(saved + 3))
    assert survivor() == saved + 3
    store.close()
    if done:
        break
    failed += 1
assert done, "there are more calls than were tried"
print(failed)
"""


POWER_HISTORY = """
import sys
from dataclasses import replace
from pathlib import Path
import pyarrow as pa
from tailrace.errors import StateUnusable
from tailrace.model.schema import Column
from tailrace.state.schema_history_stores import FileSchemaHistory
from tests.support.changes import SHOP
from tests.support.failing_disk import Call, Disk

top, calls, error = Path(sys.argv[1]), Call(int(sys.argv[2])), int(sys.argv[3])
(top / "disk").mkdir()
disk = Disk(top / "disk", top / "trace")


def wider(count):
    extra = tuple(Column(name=f"x{n}", source_type="int", type=pa.int32()) for n in range(count))
    return replace(SHOP, columns=(*SHOP.columns, *extra))


def survivor():
    "What another machine finds on the disk after a power cut."
    disk.after_power_cut(top / "left")
    return len(FileSchemaHistory(top / "left" / "state", read_only=True).versions(SHOP.table))


failed = known = 0
for nth in range(1, 20):
    history = FileSchemaHistory(top / "disk" / "state", retention=None)
    known = history.record(wider(known)).version
    assert survivor() == known, "what was told is durable"
    disk.fail(calls, nth, error)
    try:
        history.record(wider(known))
        done = True
    except StateUnusable as told:
        assert told.hint
        done = False
    disk.heal()
    assert survivor() in ({known + 1} if done else {known, known + 1}), "with the new one or without it"
    known = history.latest(SHOP.table).version
    assert survivor() == known, "what it knows after a failure is durable"
    known = history.record(wider(known)).version
    assert survivor() == known
    history.close()
    if done:
        break
    failed += 1
assert done, "there are more calls than were tried"
print(failed)
"""


@pytest.mark.parametrize(
    ("calls", "error", "failing"),
    [
        pytest.param(1, errno.EIO, 2, id="a sync: of the file, of the folder"),
        pytest.param(2, errno.ENOSPC, 1, id="the write"),
        pytest.param(4, errno.EIO, 1, id="the link"),
    ],
)
def test_after_a_power_cut_the_history_has_what_was_told(
    tmp_path: Path, library: Path, calls: int, error: int, failing: int
) -> None:
    assert told(library, POWER_HISTORY, str(tmp_path), str(calls), str(error)) == failing


@pytest.mark.parametrize(
    ("calls", "error", "failing"),
    [
        pytest.param(1, errno.EIO, 2, id="a sync: of the file, of the folder"),
        pytest.param(2, errno.ENOSPC, 1, id="the write"),
        pytest.param(8, errno.EIO, 1, id="the rename"),
        pytest.param(64, errno.EDQUOT, 1, id="the new file"),
    ],
)
def test_after_a_power_cut_the_checkpoint_is_the_one_before_or_the_new_one(
    tmp_path: Path, library: Path, calls: int, error: int, failing: int
) -> None:
    assert told(library, POWER, str(tmp_path), str(calls), str(error)) == failing


def told(library: Path, code: str, *arguments: str) -> int:
    """What a process says whose calls to the disk can be made to fail."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": str(library), "PYTHONWARNINGS": "error"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return int(done.stdout)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = built(tmp_path_factory.mktemp("library"))
    if found is None:
        pytest.skip("SKIPPED LOUDLY: power cuts were not tried, there is no C compiler or no Linux here")
    return found
