"""`make demo` as a person meets it: it ends green, or at Ctrl-C, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.pipelines import COME_SECONDS_MAX, Running, eventually

pytestmark = [pytest.mark.pg, pytest.mark.spark]
"""The demonstration starts both itself."""
FIRST_CHANGE_SECONDS_MAX = 60
LAG_SECONDS_MAX = 10.0


def servers_below(folder: Path) -> list[str]:
    """PostgreSQL servers started by this test: their temporary files lie below its folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it ended meanwhile
            said = process.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if f"postgres -D {folder}" in said:
                found.append(said)
    return found


def start_demo(folder: Path, *flags: str) -> Running:
    place = {"TMPDIR": str(folder)}
    arguments = ["-m", "tailrace.demo", "--folder", str(folder / "demo"), *flags]
    return Running(arguments, folder, place)


@pytest.fixture
def folder() -> Path:
    """Not pytest's own: the server runs as another user, who must be able to reach it."""
    made = Path(tempfile.mkdtemp(prefix="tailrace-demo-test-"))
    made.chmod(0o755)
    return made


@pytest.mark.alone
def test_the_demo_survives_a_killed_capture_and_ends_green(folder: Path) -> None:
    running = start_demo(folder, "--seconds", "15")
    try:
        code = running.wait(600)
        said = running.said()
        assert code == 0, said
        assert "every table equals its source" in said
        assert "capture was killed once" in said
        assert said.count("equal") >= 4
        figures = re.search(r"first change applied after (\d+) s; largest lag while live ([\d.]+) s", said)
        assert figures, said
        assert int(figures[1]) < FIRST_CHANGE_SECONDS_MAX, said
        assert float(figures[2]) < LAG_SECONDS_MAX, said
        assert "Traceback" not in said
        assert not running.alive()
        assert not servers_below(folder)
    finally:
        running.end()


@pytest.mark.parametrize("after_seconds", [0.3, 4.0, 14.0])
def test_ctrl_c_is_clean_at_any_moment(folder: Path, after_seconds: float) -> None:
    # A shell has what it starts in the background ignore the signal, and so would whatever is started from here.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    running = start_demo(folder)
    signal.signal(signal.SIGINT, before)
    try:
        time.sleep(after_seconds)
        os.killpg(running.process.pid, signal.SIGINT)
        # Before Python has taken the signal over, the system itself ends the process: a shell calls both 130.
        assert running.wait(COME_SECONDS_MAX) in (130, -signal.SIGINT), running.said()
        assert "Traceback" not in running.said()
        assert eventually(lambda: not running.alive()), running.alive()
        assert not servers_below(folder)
    finally:
        running.end()


def test_a_folder_that_is_not_the_demos_own_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep me")
    command = [sys.executable, "-m", "tailrace.demo", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COME_SECONDS_MAX)
    assert done.returncode == 2
    assert "no earlier demo created it" in done.stderr
    assert (tmp_path / "mine.txt").read_text() == "keep me"
