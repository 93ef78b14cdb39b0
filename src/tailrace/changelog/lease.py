"""One writer per log on a host: a lock the kernel gives back when the holder is gone, and a note of who it is.

The lease only spares the loser the work; the fence is the commit number.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path

from tailrace.changelog import files
from tailrace.errors import LogBusy

WAIT_SECONDS_MAX = 30.0
_PAUSE_SECONDS = 0.1


class Lease:
    """Held from construction to `release`, or to the end of the process."""

    def __init__(self, folder: Path, name: str = "owner", wait_seconds: float = WAIT_SECONDS_MAX) -> None:
        self._note = folder / f"{name}.json"
        with files.explained(folder):
            self._handle = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + wait_seconds
        while not self._try():
            if time.monotonic() >= deadline:
                os.close(self._handle)
                raise LogBusy(
                    f"another process holds the log as its {name}",
                    **holder(folder, name),
                    hint="Stop that process, or wait for it; two at once would not be safe.",
                )
            time.sleep(_PAUSE_SECONDS)
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        try:
            with files.explained(folder):
                files.replace(self._note, json.dumps(owner).encode())
        except BaseException:
            self.release()
            raise

    def _try(self) -> bool:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Let the next one in."""
        os.close(self._handle)


def holder(folder: Path, name: str = "owner") -> dict[str, object]:
    """Who holds the lease, as far as the note tells: pid and host."""
    try:
        note = json.loads((folder / f"{name}.json").read_bytes())
        return {"pid": note["pid"], "host": note["host"]}
    except (OSError, ValueError, KeyError):
        return {}


def held(folder: Path, name: str = "owner") -> int | None:
    """The pid of the live holder, or None if nobody holds the lease."""
    try:
        handle = os.open(folder / f"{name}.lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = holder(folder, name).get("pid")
        return pid if isinstance(pid, int) else 0
    finally:
        os.close(handle)
    return None
