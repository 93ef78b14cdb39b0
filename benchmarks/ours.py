"""Our side of every bench: a change capture that drains a slot into a durable change log.

It runs in a process of its own, as `tailrace run` does it, so that its CPU time and memory are its alone
and nothing that the harness imported or compiled helps it. `ours_child.py` is that process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measure import BenchError, Measured

DRAIN_SECONDS_MAX = 600.0
# What the figures of our side are figures of; it stands beside them in every report.
SUBJECT = "Tailrace: slot decoded to typed columns in a durable change log, fsync on"
REPOSITORY = Path(__file__).resolve().parent.parent


def log_parent_folder() -> Path:
    """Name the folder for logs: /var/tmp outlives a reboot, so it is a disk even where /tmp is memory."""
    persistent = Path("/var/tmp")
    return persistent if persistent.is_dir() else Path(tempfile.gettempdir())


def drain_into_log(url: str, slot: str, publication: str, until_lsn: str) -> Measured:
    """Read the slot to `until_lsn` into a new change log.

    The wall time runs from opening the connection until the last durable commit is confirmed to the server.
    The rows are the row changes that are durable in the log at that moment.
    """
    with drained(url, slot, publication, until_lsn) as (measured, _):
        return measured


@contextmanager
def drained(url: str, slot: str, publication: str, until_lsn: str) -> Iterator[tuple[Measured, Path]]:
    """Do the same, and keep the log for as long as the context lasts."""
    with new_folder() as folder:
        log = folder / "log"
        answer = run_child("benchmarks.ours_child", url, slot, publication, until_lsn, str(log))
        yield Measured(**answer), log


@contextmanager
def new_folder() -> Iterator[Path]:
    """Make a folder for logs that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-", dir=log_parent_folder()) as folder:
        yield Path(folder)


def run_child(module: str, *arguments: str, seconds_max: float = DRAIN_SECONDS_MAX) -> dict[str, Any]:
    """Run one of our modules in a process of its own; the answer is the JSON on its last line."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
            timeout=seconds_max,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise BenchError(
            f"{module} did not end within {seconds_max:.0f} s", hint="Run it alone and look."
        ) from exc
    if done.returncode != 0:
        raise BenchError(f"{module} ended with code {done.returncode}", hint="Its own message stands above.")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
