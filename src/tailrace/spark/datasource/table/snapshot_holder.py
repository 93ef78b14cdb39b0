"""A process that holds a snapshot open for tasks in other processes, and lets go of it when nobody reads in it.

Whoever plans a read ends before its tasks do, so the session that has exported the snapshot lives in a process of its
own. That one ends when no task has read for a while, when its time is up, or when the process of Spark's that planned
is gone; with it the server lets go of the snapshot. How to connect it is told through its input, never by its command
line or environment, which others can see.
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
"""Until the first task reads; a query that is only explained has none."""
SEEN_SECONDS_MAX = 2.0
_LOOK_FIRST_SECONDS, _LOOK_SECONDS = 0.1, 1.0
_IN_USE = " in use"
_NAME_SESSION = "select set_config('application_name', %s, false)"
# Asked twice in a transaction the server would say the same again.
_LOOK_AGAIN = "select pg_stat_clear_snapshot()"
_READERS = "select count(*) from pg_stat_activity where application_name = %s"
_SEEN = "select bool_or(application_name = %s) from pg_stat_activity where application_name = any(%s)"


@dataclass(frozen=True, kw_only=True)
class SnapshotHandle:
    """A snapshot that tasks can import while its holder lives."""

    name: str
    id: str
    """What sessions that read in it are named by, for the holder to see them."""
    pid: int

    def release(self) -> None:
        """Let go of it now."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, 15)


def hold_snapshot(url: str, *, seconds_max: float, idle_seconds: float) -> SnapshotHandle:
    """Start a holder, and wait until it has a snapshot. It outlives this process, but not its parent."""
    number = uuid.uuid4().hex[:12]
    asked = {"url": url, "seconds_max": seconds_max, "idle_seconds": idle_seconds, "watched": os.getppid()}
    process = subprocess.Popen(
        [sys.executable, "-m", "tailrace.spark.datasource.table.snapshot_holder", number],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Files that Spark has added are on the path of this process only.
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    )
    # It is waited for, however long this process lives, so that it does not stay as a zombie.
    threading.Thread(target=process.wait, daemon=True).start()
    assert process.stdin is not None, "asked for"
    assert process.stdout is not None, "asked for"
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(asked).encode() + b"\n")
        process.stdin.close()
    with process.stdout:
        answer = _line(process.stdout.fileno(), time.monotonic() + START_SECONDS_MAX)
    if not answer:
        process.kill()
        raise SnapshotGone(
            "the process that holds the snapshot did not start",
            hint="What it said stands in the log of Spark's driver.",
        )
    told: dict[str, Any] = json.loads(answer)
    if "code" in told:
        raise error_class(told["code"])(told["message"], hint=told["hint"], **told["fields"])
    return SnapshotHandle(name=told["snapshot"], id=number, pid=process.pid)


def begin_reading(connection: psycopg.Connection, number: str) -> None:
    """Name a session as one that reads in the snapshot of this number."""
    connection.execute(_NAME_SESSION, (_tag("read", number),), prepare=False)


def end_reading(connection: psycopg.Connection, number: str) -> None:
    """Let the holder see that there was a reader, before a read that took no time is over."""
    free, used = _tag("hold", number), _tag("hold", number) + _IN_USE
    deadline = time.monotonic() + SEEN_SECONDS_MAX
    while time.monotonic() < deadline:
        connection.execute(_LOOK_AGAIN, prepare=False)
        row = connection.execute(_SEEN, (used, [free, used]), prepare=False).fetchone()
        if row is None or row[0] is not False:
            return  # it has seen us, or is gone
        time.sleep(_LOOK_FIRST_SECONDS / 5)


def _tag(what: str, number: str) -> str:
    """What sessions are called at the server; the same number stands in the holder's command line."""
    return f"tailrace {what} {number}"


def _line(file: int, deadline: float) -> bytes:
    """One line; what came of it if there is no more, or not in time."""
    found = b""
    while not found.endswith(b"\n"):
        ready, _, _ = select.select([file], [], [], max(0.0, deadline - time.monotonic()))
        more = os.read(file, 65536) if ready else b""
        if not more:
            return b""
        found += more
    return found


def main() -> int:
    """Export a snapshot, say its name, hold it for as long as it is needed."""
    number, asked = sys.argv[1], json.loads(sys.stdin.buffer.readline())
    try:
        with connect(asked["url"]) as connection:
            name = _export(connection, _tag("hold", number))
            _reply({"snapshot": name})
            _hold(connection, _WatchedProcess(asked["watched"]), number, asked)
    except TailraceError as error:
        fields = {name: str(value) for name, value in error.fields.items()}
        _reply({"code": error.code, "message": error.message, "hint": error.hint, "fields": fields})
        return 1
    return 0


def _reply(what: dict[str, Any]) -> None:
    with suppress(OSError):  # whoever asked may be gone
        os.write(1, json.dumps(what).encode() + b"\n")
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


def _hold(connection: psycopg.Connection, watched: _WatchedProcess, number: str, asked: dict[str, Any]) -> None:
    began = last = time.monotonic()
    seen = False
    while not watched.has_ended(_LOOK_SECONDS if seen else _LOOK_FIRST_SECONDS):
        now = time.monotonic()
        if now > began + asked["seconds_max"]:
            return
        try:
            connection.execute(_LOOK_AGAIN)
            row = connection.execute(_READERS, (_tag("read", number),)).fetchone()
            found = row is not None and row[0] > 0
            if found and not seen:
                connection.execute(_NAME_SESSION, (_tag("hold", number) + _IN_USE,))
        except psycopg.Error:
            return  # the session is gone, and the snapshot with it
        if found:
            seen, last = True, now
        elif now > last + (asked["idle_seconds"] if seen else FIRST_SECONDS_MAX):
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
        """Whether it has ended; waits so long for that."""
        if self._handle is not None:
            return bool(select.select([self._handle], [], [], wait_seconds)[0])
        time.sleep(wait_seconds)
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # it is there, and another's
        return False


if __name__ == "__main__":
    sys.exit(main())
