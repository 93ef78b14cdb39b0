"""One holder of a role at a time: a lock the kernel gives back, and a record of who holds it.

The lease only spares the loser the work; the fence is the commit number. What must stay true:

- Whoever's token stands in `<name>.lock` holds the lease. On one host `flock` on that file decides who may write
  it: the kernel gives the lock back when the holder dies.
- Where hosts share storage the lock may not reach. So a record (`<name>.json`) that another host left and did
  not mark as released must be seen *unchanged* for a while, by our own clock alone, before we take the lease;
  its holder renews it much more often than that. Clocks of two machines are never compared.
- Whoever takes the lease from one who has not let go (`take_over`, or expiry) puts a *new* lock file in place of
  the old one. The old holder's lock is then on a file that nobody looks at, and the new token tells it so.
- Nobody writes a record once the lease is lost. The two that a stop between the look and the write allows are
  put right by the holder's next renewal.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

from tailrace.changelog import files
from tailrace.errors import LogBusy, LogFenced, LogFull

WAIT_SECONDS_MAX = 30.0
EXPIRY_SECONDS = 20.0
"""Another host's record that nobody renewed for so long, by our clock, is taken for a dead one's."""
RENEW_SECONDS = 4.0
_PAUSE_SECONDS = 0.1
_JOIN_SECONDS_MAX = 5.0


class Lease:
    """Held from construction to `release`, to the end of the process, or until somebody takes it over."""

    def __init__(
        self, folder: Path, name: str = "owner", wait_seconds: float = WAIT_SECONDS_MAX, *, take_over: bool = False,
        expiry_seconds: float = EXPIRY_SECONDS, renew_seconds: float = RENEW_SECONDS,
    ) -> None:  # fmt: skip
        self._folder, self._name = folder, name
        self._lock, self._record = folder / f"{name}.lock", folder / f"{name}.json"
        self._token = uuid.uuid4().hex
        self._since, self._renewed = time.time(), 0
        self.forced = False
        """Whether it was taken from one who had not let go, and who may still believe to hold it."""
        self._handle = self._acquire(_Watch(expiry_seconds), time.monotonic() + wait_seconds, take_over)
        try:
            # On a full disk whoever makes room must get the lease. Another host sees us at the next renewal.
            with suppress(LogFull), files.explained(folder):
                self._write_record(released=False)
        except BaseException:
            os.close(self._handle)
            raise
        self._done = threading.Event()
        self._renewing = threading.Thread(
            target=self._keep_renewing, args=(renew_seconds,), name=f"tailrace-lease-{name}", daemon=True
        )
        self._renewing.start()

    def lost(self) -> bool:
        """Whether somebody took the lease over. Reads one small file; an unreadable one proves nothing."""
        try:
            return self._lock.read_bytes() != self._token.encode()
        except OSError:
            return False

    def check(self) -> None:
        """Raise LogFenced if somebody took the lease over."""
        if self.lost():
            raise LogFenced(
                f"another process has taken the log over as its {self._name}",
                log=self._folder,
                **holder(self._folder, self._name),
                hint="It goes on from where we stopped: leave it to that process. To move the work back here, "
                "stop it first.",
            )

    def renew(self) -> None:
        """Show other hosts that we are alive, unless the lease is no longer ours."""
        if not self.lost():
            self._renewed += 1
            self._write_record(released=False)

    def release(self) -> None:
        """Let the next one in. A second call does nothing."""
        if self._done.is_set():
            return
        self._done.set()
        self._renewing.join(_JOIN_SECONDS_MAX)  # a disk that hangs must not hold us
        with suppress(OSError):  # on a full disk another host waits a little longer, that is all
            if not self.lost():
                self._write_record(released=True)
        os.close(self._handle)

    def _acquire(self, watch: _Watch, deadline: float, take_over: bool) -> int:
        while True:
            with files.explained(self._folder):
                handle = self._take_free(watch)
                if handle is None and (take_over or watch.expired):
                    handle = self._take_by_force()
            if handle is not None:
                return handle
            if time.monotonic() >= deadline:
                raise LogBusy(
                    f"another process holds the log as its {self._name}",
                    **holder(self._folder, self._name),
                    hint="Stop that process, or wait for it; two at once would not be safe. If it hangs, or its host "
                    "does, start this one with `--take-over`.",
                )
            time.sleep(_PAUSE_SECONDS)

    def _take_free(self, watch: _Watch) -> int | None:
        """The handle of the lock, now with our token in it, if nobody holds the lease."""
        watch.expired = False
        handle = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another one's take-over may have put a new file here since we opened this one.
            if os.path.samestat(os.fstat(handle), os.stat(self._lock)) and watch.free(self._record):
                # In this order: what is written over what was there needs no room.
                os.pwrite(handle, self._token.encode(), 0)
                os.ftruncate(handle, len(self._token))
                return handle
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
        return None

    def _take_by_force(self) -> int | None:
        """Put a lock file of our own in place of the one that is there. The last to do so holds the lease."""
        aside = files.aside_of(self._lock)
        handle = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(handle, self._token.encode())
            os.fsync(handle)
            os.replace(aside, self._lock)
        except FileNotFoundError:  # a writer that has just begun swept it away
            os.close(handle)
            return None
        except BaseException:
            os.close(handle)
            aside.unlink(missing_ok=True)
            raise
        self.forced = True
        return handle

    def _write_record(self, *, released: bool) -> None:
        record = {
            "pid": os.getpid(), "host": socket.gethostname(), "boot": _boot(), "token": self._token,
            "since": self._since, "renewed": self._renewed, "released": released,
        }  # fmt: skip
        files.replace(self._record, json.dumps(record).encode())

    def _keep_renewing(self, every_seconds: float) -> None:
        while not self._done.wait(every_seconds):
            with suppress(OSError):
                self.renew()


class _Watch:
    """Looks at a record again and again: may we take the lease, or has it been still for long enough?"""

    def __init__(self, expiry_seconds: float) -> None:
        self._expiry_seconds = expiry_seconds
        self._seen: bytes | None = None
        self._since = 0.0
        self.expired = False

    def free(self, path: Path) -> bool:
        """Whether the record stands in nobody's way, given that we hold the lock."""
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return True
        if _left_by_us_or_released(content):
            return True
        if content != self._seen:
            self._seen, self._since = content, time.monotonic()
        self.expired = time.monotonic() - self._since >= self._expiry_seconds
        return False


def _left_by_us_or_released(content: bytes) -> bool:
    try:
        record = json.loads(content)
        if record.get("released", False):
            return True
        # Containers have names of their own and one kernel, which has just given us the lock.
        if record.get("boot") and _boot():
            return bool(record["boot"] == _boot())
        return bool(record["host"] == socket.gethostname())
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def _boot() -> str:
    """Names the running kernel: locks are seen by all that share it. Empty where there is no such name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def holder(folder: Path, name: str = "owner") -> dict[str, object]:
    """Who holds the lease, as far as the record tells: pid and host."""
    try:
        record = json.loads((folder / f"{name}.json").read_bytes())
        return {"pid": record["pid"], "host": record["host"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def held(folder: Path, name: str = "owner") -> int | None:
    """The pid of the live holder on this host, or None if nobody holds the lease."""
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
