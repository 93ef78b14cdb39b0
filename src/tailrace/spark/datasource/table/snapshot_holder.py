"""Hold a snapshot open for tasks in other processes, until no task reads in it.

The process that plans a read ends before its tasks do. So the session that exported the snapshot is in a process of its
own. That process ends when no task has read for a while, when its time is up, or when the Spark process that planned is
gone. The server then releases the snapshot. The process gets its connection settings through its standard input, never
by its command line or environment, which others can see.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg

from tailrace.capture.postgres.connect import connect, map_error
from tailrace.errors import SnapshotGone, TailraceError, error_class

START_SECONDS_MAX = 60.0
FIRST_SECONDS_MAX = 600.0
"""Wait for the first task. A query that is only explained has none."""
SEEN_SECONDS_MAX = 2.0
_LOOK_FIRST_SECONDS, _LOOK_SECONDS = 0.1, 1.0
_IN_USE = " in use"
_NAME_SESSION = "select set_config('application_name', %s, false)"
# Without this, the server repeats its first answer for the rest of a transaction.
_LOOK_AGAIN = "select pg_stat_clear_snapshot()"
_READERS = "select count(*) from pg_stat_activity where application_name = %s"
_SEEN = "select bool_or(application_name = %s) from pg_stat_activity where application_name = any(%s)"


@dataclass(frozen=True, kw_only=True)
class SnapshotHandle:
    """A snapshot that tasks can import while its holder runs."""

    name: str
    id: str
    """Number in the names of sessions that read in it. The holder finds them by it."""
    pid: int

    def release(self) -> None:
        """Release the snapshot now."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, 15)


def hold_snapshot(url: str, *, seconds_max: float, idle_seconds: float) -> SnapshotHandle:
    """Start a holder, and wait until it has a snapshot. It outlives this process, but not its parent."""
    number = uuid.uuid4().hex[:12]
    request = {"url": url, "seconds_max": seconds_max, "idle_seconds": idle_seconds, "watched": os.getppid()}
    process = subprocess.Popen(
        [sys.executable, "-m", "tailrace.spark.datasource.table.snapshot_holder", number],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Files that Spark has added are only on this process's path.
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    )
    # Waiting for it, for as long as this process runs, keeps it from becoming a zombie.
    threading.Thread(target=process.wait, daemon=True).start()
    assert process.stdin is not None, "a pipe"
    assert process.stdout is not None, "a pipe"
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.close()
    with process.stdout:
        answer = _read_line(process.stdout.fileno(), time.monotonic() + START_SECONDS_MAX)
    if not answer:
        process.kill()
        raise SnapshotGone(
            "the process that holds the snapshot did not start",
            hint="Look for its output in the log of Spark's driver.",
        )
    reply: dict[str, Any] = json.loads(answer)
    if "code" in reply:
        raise error_class(reply["code"])(reply["message"], hint=reply["hint"], **reply["fields"])
    return SnapshotHandle(name=reply["snapshot"], id=number, pid=process.pid)


def begin_reading(connection: psycopg.Connection, number: str) -> None:
    """Name a session as one that reads in the snapshot with this number."""
    connection.execute(_NAME_SESSION, (_session_name("read", number),), prepare=False)


def end_reading(connection: psycopg.Connection, number: str) -> None:
    """Wait until the holder has seen this reader, before a very short read is over."""
    free, used = _session_name("hold", number), _session_name("hold", number) + _IN_USE
    deadline = time.monotonic() + SEEN_SECONDS_MAX
    while time.monotonic() < deadline:
        connection.execute(_LOOK_AGAIN, prepare=False)
        row = connection.execute(_SEEN, (used, [free, used]), prepare=False).fetchone()
        if row is None or row[0] is not False:
            return  # it has seen us, or is gone
        time.sleep(_LOOK_FIRST_SECONDS / 5)


def _session_name(what: str, number: str) -> str:
    """Return the name of a session at the server. The holder's command line has the same number."""
    return f"tailrace {what} {number}"


def _read_line(file: int, deadline: float) -> bytes:
    """Return one line. Nothing if the input ends before, or it is not there in time."""
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([file], [], [], max(0.0, deadline - time.monotonic()))
        more = os.read(file, 65536) if ready else b""
        if not more:
            return b""
        line += more
    return line


def main() -> int:
    """Export a snapshot, send its name, and hold it while it is needed."""
    number, request = sys.argv[1], json.loads(sys.stdin.buffer.readline())
    try:
        with connect(request["url"]) as connection:
            name = _export(connection, _session_name("hold", number))
            _reply({"snapshot": name})
            _hold(connection, _WatchedProcess(request["watched"]), number, request)
    except TailraceError as error:
        fields = {name: str(value) for name, value in error.fields.items()}
        _reply({"code": error.code, "message": error.message, "hint": error.hint, "fields": fields})
        return 1
    return 0


def _reply(reply: dict[str, Any]) -> None:
    with suppress(OSError):  # the process that waits for it may be gone
        os.write(1, json.dumps(reply).encode() + b"\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _export(connection: psycopg.Connection, tag: str) -> str:
    try:
        connection.execute(_NAME_SESSION, (tag,))
        connection.execute("begin isolation level repeatable read read only")
        row = connection.execute("select pg_export_snapshot()").fetchone()
    except psycopg.Error as error:
        raise map_error(error) from error
    assert row is not None, "a function's value"
    return str(row[0])


def _hold(connection: psycopg.Connection, watched: _WatchedProcess, number: str, request: dict[str, Any]) -> None:
    started = last = time.monotonic()
    seen = False
    while not watched.has_ended(_LOOK_SECONDS if seen else _LOOK_FIRST_SECONDS):
        now = time.monotonic()
        if now > started + request["seconds_max"]:
            return
        try:
            connection.execute(_LOOK_AGAIN)
            row = connection.execute(_READERS, (_session_name("read", number),)).fetchone()
            has_readers = row is not None and row[0] > 0
            if has_readers and not seen:
                connection.execute(_NAME_SESSION, (_session_name("hold", number) + _IN_USE,))
        except psycopg.Error:
            return  # the session is gone, and the snapshot with it
        if has_readers:
            seen, last = True, now
        elif now > last + (request["idle_seconds"] if seen else FIRST_SECONDS_MAX):
            return


class _WatchedProcess:
    """A process that is not our child."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._handle: int | None = None
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):
                self._handle = os.pidfd_open(pid)

    def has_ended(self, wait_seconds: float) -> bool:
        """Return whether it has ended, after waiting this long for it."""
        if self._handle is not None:
            return bool(select.select([self._handle], [], [], wait_seconds)[0])
        time.sleep(wait_seconds)
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # it is there, and another user's
        return False


if __name__ == "__main__":
    sys.exit(main())
