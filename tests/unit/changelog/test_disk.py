"""A disk that is full, read-only or not ours: one clear error with the remedy, and nothing lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.changelog import writer as writer_module
from tailrace.changelog.lease import Lease
from tailrace.changelog.reader import ChangeLog
from tailrace.changelog.writer import LogWriter
from tailrace.errors import LogUnusable
from tests.support.windows import SOURCE, ids, named, rows_window, window

NOBODY = 65534
as_root = pytest.mark.skipif(
    os.geteuid() != 0,
    reason="SKIPPED LOUDLY: needs root, to mount a small disk or to become a user without rights",
)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own that holds 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"SKIPPED LOUDLY: a full disk was not tried, mount is not allowed here: {made.stderr}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """Leave not a byte free."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        size = 1 << 16
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
    return filler


@as_root
def test_a_full_disk_is_told_and_the_same_window_goes_in_once_there_is_room(small_disk: Path) -> None:
    writer = LogWriter(small_disk / "log", SOURCE)
    writer.append(rows_window(0, 100, 1))
    filler = fill(small_disk)
    for _ in range(2):
        with pytest.raises(LogUnusable, match="No space left") as caught:
            writer.append(rows_window(100, 200, *range(2, 2000)))
        assert "Free space" in caught.value.hint
        assert ids(list(ChangeLog.open(small_disk / "log").follow(0))) == [(1, 1)]
    filler.unlink()
    writer.append(rows_window(100, 200, *range(2, 2000)))
    writer.close()
    assert ids(list(ChangeLog.open(small_disk / "log").follow(0))) == [(n, n) for n in range(1, 2000)]


@as_root
def test_a_new_table_on_a_full_disk_goes_in_once_there_is_room(small_disk: Path) -> None:
    writer = LogWriter(small_disk / "log", SOURCE)
    writer.append(window(0, 100))
    filler = fill(small_disk)
    new = named("public", "new", 7)
    with pytest.raises(LogUnusable, match="No space left"):
        writer.append(rows_window(100, 200, 1, schema=new))
    filler.unlink()
    writer.append(rows_window(100, 200, 1, schema=new))
    writer.close()
    (found,) = ChangeLog.open(small_disk / "log").follow(0)
    assert found.schema == new


@as_root
def test_a_log_opened_on_a_full_disk_can_be_opened_again_once_there_is_room(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = small_disk / "log"
    LogWriter(log, SOURCE).close()
    (log / "owner.json").unlink()
    filler = fill(small_disk)
    with pytest.raises(LogUnusable, match="No space left"):
        LogWriter(log, SOURCE)
    filler.unlink()
    monkeypatch.setattr(writer_module, "Lease", lambda path: Lease(path, wait_seconds=0.5))
    LogWriter(log, SOURCE).close()


@as_root
def test_a_read_only_disk_is_told(small_disk: Path) -> None:
    LogWriter(small_disk / "log", SOURCE).close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for path in (small_disk / "log", small_disk / "new"):
        with pytest.raises(LogUnusable, match="Read-only") as caught:
            LogWriter(path, SOURCE)
        assert "`log:`" in caught.value.hint
    assert ChangeLog.open(small_disk / "log").newest() == 0


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_a_file_where_the_folder_should_be_is_told(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(LogUnusable) as caught:
        LogWriter(tmp_path / where, SOURCE)
    assert "`log:`" in caught.value.hint
    assert (tmp_path / "file").read_text() == "mine"


# --- without rights ----------------------------------------------------------------------------------------

CLOSED: dict[str, tuple[str, int, str]] = {
    "a folder above the log": ("", 0o755, "LogWriter(path / 'new', SOURCE)"),
    "the log, to write": ("log", 0o755, "LogWriter(path / 'log', SOURCE)"),
    "the log, to enter and write": ("log", 0o700, "LogWriter(path / 'log', SOURCE)"),
    "the log, to enter": ("log", 0o700, "ChangeLog.open(path / 'log')"),
    "its description": ("log/meta.json", 0o600, "ChangeLog.open(path / 'log')"),
    "its commits": ("log/hot", 0o700, "list(ChangeLog.open(path / 'log').follow(0))"),
    "the list of its commits": ("log/hot", 0o711, "ChangeLog.open(path / 'log').newest()"),
    "one commit": (f"log/hot/{1:020d}.arrow", 0o600, "list(ChangeLog.open(path / 'log').follow(0))"),
}
"""What is closed to others, how, and what they try."""

AS_NOBODY = f"""
import os, sys
from pathlib import Path
from tailrace.changelog.reader import ChangeLog
from tailrace.changelog.writer import LogWriter
from tailrace.errors import TailraceError
from tests.support.windows import SOURCE
os.setgid({NOBODY}); os.setuid({NOBODY})
for name, act in zip(sys.argv[2::2], sys.argv[3::2]):
    path = Path(sys.argv[1]) / name
    try:
        print(name, repr(eval(act)), sep="\\t")
    except TailraceError as error:
        print(name, error, sep="\\t")
    except OSError as error:
        print(name, repr(error), sep="\\t")
"""


@pytest.fixture(scope="module")
def told() -> Iterator[dict[str, str]]:
    """What a user without rights is told in each case. One process for all: starting one takes a second."""
    top = Path(tempfile.mkdtemp(prefix="tailrace-test-"))  # pytest's own folders may not be entered by others
    top.chmod(0o755)
    arguments = []
    for n, (closed, mode, act) in enumerate(CLOSED.values()):
        writer = LogWriter(top / str(n) / "log", SOURCE)
        writer.append(rows_window(0, 100, 1))
        writer.close()
        (top / str(n) / closed).chmod(mode)
        arguments += [str(n), act]
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, str(top), *arguments], capture_output=True, text=True, check=False,
        timeout=60, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = dict(line.split("\t", 1) for line in done.stdout.splitlines())
    yield {name: lines[str(n)] for n, name in enumerate(CLOSED)}
    shutil.rmtree(top)


@as_root
@pytest.mark.parametrize("case", CLOSED)
def test_what_may_not_be_used_is_told_and_is_never_an_empty_log(told: dict[str, str], case: str) -> None:
    assert "Permission denied" in told[case]
    assert "[log-unusable] | hint: " in told[case]
