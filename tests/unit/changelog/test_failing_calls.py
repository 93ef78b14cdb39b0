"""Any one call to the disk may fail, once or for good.

It is reported, nothing is lost, and no promise is broken. `tests/support/fault_story.py` is the work in which calls
fail. Each run fails other calls, so that in time every one has failed. `TAILRACE_TEST_FAULTS=all` fails each of them in
one run, which takes minutes.
"""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.failing_disk import Call, built
from tests.support.logs import quick_folder

ROOT = Path(__file__).parents[3]
LINKS = Call.LINK | Call.RENAME | Call.UNLINK
NEW = Call.CREATE | Call.MKDIR | Call.SYMLINK


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = built(tmp_path_factory.mktemp("library"))
    if found is None:
        pytest.skip("SKIPPED LOUDLY: failing calls were not tried, there is no C compiler or no Linux here")
    return found


def run_failing(library: Path, *arguments: str) -> str:
    """Return the output of a process whose disk calls can be made to fail."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": str(library), "PYTHONWARNINGS": "error"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("calls", "error", "lasting", "lives"),
    [
        pytest.param(Call.SYNC, errno.EIO, False, 8, id="one fsync"),
        pytest.param(Call.WRITE, errno.EDQUOT, False, 3, id="one write, for a quota"),
        pytest.param(LINKS, errno.EIO, False, 6, id="one link, rename or removal"),
        pytest.param(NEW, errno.ENOSPC, False, 4, id="one new file, folder or link"),
        pytest.param(LINKS | NEW | Call.WRITE, errno.EROFS, True, 4, id="everything, as on a read-only disk"),
    ],
)
def test_any_failing_call_is_reported_and_loses_nothing(
    library: Path, tmp_path: Path, calls: Call, error: int, lasting: bool, lives: int
) -> None:
    if os.environ.get("TAILRACE_TEST_FAULTS") == "all":
        lives = 10_000
    with quick_folder(tmp_path) as folder:
        output = run_failing(
            library,
            "-m",
            "tests.support.fault_story",
            str(folder),
            str(int(calls)),
            str(error),
            str(int(lasting)),
            str(lives),
            str(random.randrange(1_000_000)),
        )
    lived, failed = map(int, output.split())
    assert lived >= 3
    # A failed sync is always reported. Removed files are mostly swept later anyway, and some are only for people.
    assert failed == lived if calls == Call.SYNC else failed


DOUBT = """
import ctypes, sys
from pathlib import Path
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write.writer import LogWriter
from tailrace.errors import LogFull, LogUnusable
from tests.support.changes import SHOP, insert
from tests.support.failing_disk import Call, Disk
from tests.support.fault_story import part
from tests.support.windows import SOURCE, finishing_window, ids, open_window, rows_window, window

top, large, error = Path(sys.argv[1]), sys.argv[2] == "large", int(sys.argv[3])
(top / "disk").mkdir()
disk = Disk(top / "disk", top / "trace")
log = top / "disk" / "log"
writer = LogWriter(log, SOURCE)
writer.append(rows_window(0, 100, 1))
next_window = rows_window(100, 200, 2, 3)
if large:
    writer.append(open_window(100, part(0, 2)))
    next_window = finishing_window(100, 200, part(1, 3))
disk.fail(Call.SYNC, 4 if large else 2, error)  # the folder's, once the commit has its name
try:
    writer.append(next_window)
    raise SystemExit("it was claimed")
except LogUnusable as failure:
    assert not isinstance(failure, LogFull), "that would be tried again"
    assert "may not be durable" in failure.message and "start again" in failure.hint, failure
disk.heal()
assert writer.position.value == 100, "it was claimed"
assert ids(list(ChangeLog.open(log).follow(0))) == [(1, 1), (2, 2), (3, 3)], "a reader of it has read the right rows"
for again in (rows_window(100, 200, 2, 3), rows_window(100, 300, 2, 3, 4)):
    try:
        writer.append(again)
        raise SystemExit("nobody knows whether the commit before is durable")
    except LogUnusable as failure:
        assert "start again" in failure.hint, failure
writer.close()
next_one = LogWriter(log, SOURCE)
assert next_one.position.value == 200, "it is found"
disk.after_power_cut(top / "left")
(top / "left" / "log" / "owner.json").unlink()
survivor = LogWriter(top / "left" / "log", SOURCE)
assert survivor.position.value == 200, "it is durable before the source is confirmed"
survivor.close()
next_one.append(rows_window(200, 300, 4))
next_one.close()
assert ids(list(ChangeLog.open(log).follow(0))) == [(1, 1), (2, 2), (3, 3), (4, 4)]
"""


@pytest.mark.parametrize(("size", "error"), [("small", errno.ENOSPC), ("large", errno.EIO)])
def test_a_commit_that_may_not_be_durable_is_found_again_and_never_written_twice(
    library: Path, tmp_path: Path, size: str, error: int
) -> None:
    run_failing(library, "-c", DOUBT, str(tmp_path), size, str(error))
