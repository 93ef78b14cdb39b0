"""Our side of every bench: a change capture that drains a slot into a durable change log.

It runs in a process of its own, as `tailrace run` does it, so that its CPU time and memory are its alone
and nothing that the harness imported or compiled helps it. `ours_child.py` is that process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

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
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-", dir=log_parent_folder()) as folder:
        command = [
            sys.executable,
            "-m",
            "benchmarks.ours_child",
            url,
            slot,
            publication,
            until_lsn,
            f"{folder}/log",
        ]
        try:
            done = subprocess.run(
                command,
                cwd=REPOSITORY,
                stdout=subprocess.PIPE,
                text=True,
                timeout=DRAIN_SECONDS_MAX,
                check=False,
            )
        except subprocess.TimeoutExpired as exc:
            raise BenchError(
                "our capture did not reach the backlog's end", hint="Run it alone and look."
            ) from exc
    if done.returncode != 0:
        raise BenchError(
            f"our capture ended with code {done.returncode}", hint="Its own message stands above."
        )
    return Measured(**json.loads(done.stdout.splitlines()[-1]))
