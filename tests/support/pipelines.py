"""A pipeline in a folder of its own, run as a user runs it: as a command, in its own process group.

Only questions (`ask`) are put in this process.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import psycopg

from tailrace.changelog.read.reader import ChangeLog
from tailrace.cli.main import main
from tailrace.demo.compare import TableVerdict, compare
from tailrace.model import change
from tailrace.model.system_streams import SCHEMA_STREAM

RUN_SECONDS_MAX = 900.0 if os.environ.get("TAILRACE_TEST_ENGINE") in ("spark", "iceberg") else 600.0
COME_SECONDS_MAX = 240.0
"""However busy the machine is: a limit that only guards costs nothing."""


class Pipeline:
    """Settings, log and lake in one folder, and the commands on them."""

    def __init__(self, folder: Path, url: str, *, tables: str = '["public.*"]', extra: str = "") -> None:
        self.folder = folder
        self.url = url
        self.file = folder / "tailrace.yaml"
        self.log = folder / "changes"
        self.lake = folder / "lake"
        folder.mkdir(parents=True, exist_ok=True)
        self.file.write_text(
            f"name: test\nsource:\n  url: {url}\n  tables: {tables}\n{extra}"
            f"log: ./changes\ntables:\n  format: delta\n  path: ./lake\n"
        )

    def stops_at(self, *kinds: str) -> None:
        """Have these kinds of schema changes stop their table."""
        said = ", ".join(f"{kind}: stop" for kind in kinds)
        self.file.write_text(f"{self.file.read_text()}  evolution: {{{said}}}\n")

    def start(self, command: str, *flags: str, environment: Mapping[str, str] | None = None) -> Running:
        """Start a command in a process group of its own."""
        return Running(["-m", "tailrace", command, str(self.file), *flags], self.folder, environment or {})

    def call(self, command: str, *flags: str, seconds: float = RUN_SECONDS_MAX) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [sys.executable, "-m", "tailrace", command, str(self.file), *flags],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            start_new_session=True,
        )

    def ask(self, command: str, *flags: str) -> subprocess.CompletedProcess[str]:
        """Run a short command in this process: starting Python for each look takes a second of a small machine."""
        said, told = io.StringIO(), io.StringIO()
        with redirect_stdout(said), redirect_stderr(told):
            code = main([command, str(self.file), *flags])
        return subprocess.CompletedProcess([command, *flags], code, said.getvalue(), told.getvalue())

    def catch_up(self) -> None:
        """`tailrace run --until-caught-up` must succeed."""
        done = self.call("run", "--until-caught-up")
        assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"

    def status(self) -> dict[str, Any]:
        done = self.ask("status", "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def table_status(self, name: str) -> dict[str, Any]:
        return next(table for table in self.status()["tables"] if table["table"] == name)

    def compare(self, *tables: str, schema: str = "public") -> list[TableVerdict]:
        return compare(self.url, self.lake, [(schema, table) for table in tables])

    def assert_equal(self, *tables: str, schema: str = "public") -> None:
        for verdict in self.compare(*tables, schema=schema):
            assert verdict.equal, verdict


class Running:
    """A command that is under way."""

    def __init__(self, arguments: list[str], folder: Path, environment: Mapping[str, str]) -> None:
        self.output = (folder / f"output-{time.monotonic_ns()}.txt").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=self.output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **environment},
        )

    def said(self) -> str:
        self.output.flush()
        return Path(self.output.name).read_text()

    def wait(self, seconds: float = RUN_SECONDS_MAX) -> int:
        return self.process.wait(seconds)

    def kill_group(self) -> None:
        """What a power cut looks like."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def terminate(self) -> int:
        self.process.terminate()
        return self.process.wait(COME_SECONDS_MAX)

    def alive(self) -> list[str]:
        """The processes of the group that still run, by command line."""
        return processes_of_group(self.process.pid)

    def end(self) -> None:
        """Leave nothing behind, whatever state it is in."""
        if self.process.poll() is None or self.alive():
            try:
                self.kill_group()
            except ProcessLookupError:
                self.process.wait()
        self.output.close()


def _processes() -> list[tuple[int, int, int]]:
    """Pid, parent and process group of everything that runs; the dead that nobody waited for do not count."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                found.append((int(entry.name), int(fields[1]), int(fields[2])))
        except (OSError, ValueError, IndexError):
            continue
    return found


def group_members(group: int) -> set[int]:
    """The live members of a process group."""
    return {pid for pid, _, its_group in _processes() if its_group == group}


def processes_of_group(group: int) -> list[str]:
    """Command lines of the live members of a process group."""
    lines = []
    for pid in group_members(group):
        with suppress(OSError):
            lines.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
    return lines


def descendants(ancestor: int) -> set[int]:
    """Everything a process has started, and what those have started."""
    found, known = {ancestor}, _processes()
    while more := {pid for pid, parent, _ in known if parent in found} - found:
        found |= more
    return found


def eventually(condition: Any, seconds: float = COME_SECONDS_MAX, pause: float = 0.1) -> bool:
    """Whether the condition comes true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(pause)
    return bool(condition())


def wait_for_free_slots(url: str) -> None:
    """Until nobody reads a slot of the database: what was told last is heard by then, or never.

    The server ends a session, and hears what it was told before, some time after its client has left.
    """
    active = "SELECT FROM pg_replication_slots WHERE active AND database = current_database()"
    with psycopg.connect(url, autocommit=True) as connection:
        assert eventually(lambda: not connection.execute(active).fetchall(), pause=0.02)


def lose_the_slot(url: str, *changes: str) -> None:
    """Changes are made that no slot keeps."""
    wait_for_free_slots(url)
    drop = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database()"
    execute(url, drop, *changes)


def assert_log_is_whole(log: Path) -> None:
    """`_seq` is dense, no transaction stands in two commits, every transaction is whole."""
    reader = ChangeLog.open(log)
    next_seq, seen = 1, dict[int, int]()
    for header in reader.headers(0):
        rows: list[tuple[int, int, int]] = []
        for body in header.bodies:
            batch = reader.batch(header, body)
            if batch.schema == SCHEMA_STREAM:  # its records bear the `_seq` of the rows they speak of
                continue
            data = batch.data
            names = (change.SEQ, change.TX, change.TX_INDEX)
            rows += zip(*(data.column(name).to_pylist() for name in names), strict=True)
        rows.sort()
        assert [row[0] for row in rows] == list(range(next_seq, next_seq + len(rows))), "`_seq` has a gap"
        next_seq += len(rows)
        indexes: dict[int, int] = {}
        for _, tx, index in rows:
            if not tx:  # a message outside of any
                continue
            assert seen.get(tx, header.commit) == header.commit, f"transaction {tx} stands in two commits"
            assert index == indexes.get(tx, 0), f"transaction {tx} is not whole"
            seen[tx], indexes[tx] = header.commit, index + 1
        assert header.next_seq == next_seq


def execute(url: str, *statements: str) -> None:
    """Run statements at the source, each in its own transaction."""
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)
