"""Our side of every bench: a change capture that drains a slot into a durable change log.

It runs in a process of its own, as `tailrace run` does it, so that its CPU time and memory are its alone,
and nothing that the harness imported or compiled helps it. `ours_child.py` is that process where a rate or CPU
time is measured: it captures to a position and ends. Where the whole process counts, with all its other work,
it is `tailrace capture` itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.measure import BenchError, Measured

DRAIN_SECONDS_MAX = 600.0
START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 60.0
# The subject of our side's figures. Every report shows it next to them.
SUBJECT = "Tailrace: slot decoded to typed columns in a durable change log, fsync on"
REPOSITORY = Path(__file__).resolve().parent.parent
SPARK_VENV = Path(os.environ.get("TAILRACE_SPARK_VENV", REPOSITORY / ".venv-spark"))
"""What `tools/engines.py` makes."""


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


def run_child(
    module: str, *arguments: str, seconds_max: float = DRAIN_SECONDS_MAX, python: Path = Path(sys.executable)
) -> dict[str, Any]:
    """Run one of our modules in a process of its own; the answer is the JSON on its last line."""
    try:
        done = subprocess.run(
            [python, "-m", module, *arguments],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}"},
            stdout=subprocess.PIPE,
            text=True,
            timeout=seconds_max,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise BenchError(f"{module} did not end within {seconds_max:.0f} s", hint="Run it alone and look.") from exc
    if done.returncode != 0:
        raise BenchError(f"{module} ended with code {done.returncode}", hint="See its own message above.")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@contextmanager
def capturing(
    folder: Path, url: str, *, slot: str | None = None, publication: str | None = None
) -> Iterator[tuple[Path, int]]:
    """`tailrace capture` over everything, from when it streams: the path of its log, and its process id.

    Slot and publication are its own, unless ones that exist are named.
    """
    settings, log, said = folder / "bench.yaml", folder / "log", folder / "capture.log"
    given = "".join(
        f"  {key}: {{name: {name}, create: false}}\n"
        for key, name in (("slot", slot), ("publication", publication))
        if name
    )
    settings.write_text(
        f"name: bench\nsource:\n  url: {url}\n  tables: ['public.*']\n{given}log: {log}\n"
        f"tables: {{format: delta, path: {folder / 'lake'}}}\n"
    )
    with running("capture", str(settings), said=said) as capture:
        _wait_until_streaming(capture, url, said)
        yield log, capture.pid


@contextmanager
def running(*arguments: str, said: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`tailrace` in a process of its own that must not end before it is stopped."""
    with said.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tailrace", *arguments],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield process
        if process.poll() is not None:
            raise BenchError("the process ended by itself", hint=said.read_text()[-2000:])
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_streaming(capture: subprocess.Popen[bytes], url: str, said: Path) -> None:
    deadline = time.monotonic() + START_SECONDS_MAX
    # A connection that only makes the slot stays in `startup`.
    query = b"select count(*) from pg_stat_replication where state in ('catchup', 'streaming')"
    with psycopg.connect(url, autocommit=True) as admin:
        while (row := admin.execute(query).fetchone()) is None or not row[0]:
            if capture.poll() is not None or time.monotonic() > deadline:
                raise BenchError("the capture did not start", hint=said.read_text()[-2000:])
            time.sleep(0.05)


def memory_peak_bytes(process: int | str) -> int | None:
    """Read the most memory that a process has held so far; None where the kernel does not say."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
