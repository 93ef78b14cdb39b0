"""One holder of a role at a time: a lock the kernel gives back, and a record of who holds it.

What must stay true:

- Whoever's token stands in `<name>.lock` holds the lease. On one host `flock` on that file decides who may write
  it: the kernel gives the lock back when the holder dies.
- Where hosts share storage the lock may not reach. So a record (`<name>.json`) that another host left and did
  not mark as released must be seen *unchanged* for a while, by our own clock alone, before we take the lease;
  its holder renews it much more often than that. Clocks of two machines are never compared.
- Whoever takes the lease from one who has not let go (`take_over`, or expiry) puts a *new* lock file in place of
  the old one. The old holder's lock is then on a file that nobody looks at, and the new token tells it so.
- Nobody writes a record once the lease is lost. The two that a stop between the look and the write allows are
  put right by the holder's next renewal.

That is so on a disk (`DiskHold`). Where there are no locks a lease is held in another way: a `Hold` says how, and the
rest of it is the same.
"""

from __future__ import annotations

import abc
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol

from tailrace.storage import local

WAIT_SECONDS_MAX = 30.0
EXPIRY_SECONDS = 20.0
"""Another host's record that nobody renewed for so long, by our clock, is taken for a dead one's."""
RENEW_SECONDS = 4.0
_PAUSE_SECONDS = 0.1
_JOIN_SECONDS_MAX = 5.0


class LeaseFolder(Protocol):
    """A folder of leases, wherever it is."""

    def __truediv__(self, name: str, /) -> LeaseFolder: ...
    def read_bytes(self) -> bytes: ...


class LeaseBackend(Protocol):
    """How one lease is held where it is. Whoever holds it has its token there, and nobody else's is."""

    token: str
    """Like no other's."""

    @property
    def was_not_released(self) -> bool:
        """Whether what was taken as free was of one who had not let go, and whose last write may be on its way."""

    def acquire_if_free(self, watch: HolderWatch, record: bytes) -> bool:
        """Take the lease if nobody holds it; the watch is told what is seen of a holder."""

    def acquire_by_force(self, record: bytes) -> bool:
        """Take it whoever holds it. The last to do so holds it; false if another was quicker, who then does."""

    def lost(self) -> bool:
        """Whether somebody took it over. What cannot be read proves nothing."""

    def write(self, record: bytes) -> None:
        """Put the record in place of our last one."""

    def close(self) -> None:
        """Let go of what the kernel holds for us, if anything."""


class Lease(abc.ABC):
    """Held from construction to `release`, to the end of the process, or until somebody takes it over.

    Whoever leases says in its own words what is wrong: it gives the three methods that follow the constructor.
    """

    def __init__(
        self,
        hold: LeaseBackend,
        name: str,
        wait_seconds: float,
        *,
        take_over: bool,
        expiry_seconds: float,
        renew_seconds: float | None,
    ) -> None:
        """Without `renew_seconds` nobody is shown that we live: for those who never take a record for a dead one's."""
        self._hold, self._name = hold, name
        self._since, self._renewed = time.time(), 0
        self.was_forced = False
        """Whether it was taken from one who had not let go: who may still believe to hold it, or whose last write may
        be on its way."""
        self._acquire(HolderWatch(expiry_seconds), time.monotonic() + wait_seconds, take_over)
        try:
            self._write_first_record()
        except BaseException:
            self._hold.close()
            raise
        self._done = threading.Event()
        self._renewing = threading.Thread(
            target=self._keep_renewing, args=(renew_seconds,), name=f"tailrace-lease-{name}", daemon=True
        )
        if renew_seconds is not None:
            self._renewing.start()

    @abc.abstractmethod
    def _explained(self) -> AbstractContextManager[None]:
        """Turns an error of the operating system into one of the lessee's."""

    @abc.abstractmethod
    def _refuse_busy(self) -> NoReturn:
        """Somebody else holds it."""

    @abc.abstractmethod
    def _refuse_fenced(self) -> NoReturn:
        """Somebody took it over."""

    def lost(self) -> bool:
        """Whether somebody took the lease over. Costs a look; one that fails proves nothing."""
        return self._hold.lost()

    def check(self) -> None:
        """Refuse to go on if somebody took the lease over."""
        if self.lost():
            self._refuse_fenced()

    def renew(self) -> None:
        """Show other hosts that we are alive, unless the lease is no longer ours."""
        if not self.lost():
            self._renewed += 1
            self._hold.write(self._record(released=False))

    def release(self) -> None:
        """Let the next one in. A second call does nothing."""
        if self._done.is_set():
            return
        self._done.set()
        if self._renewing.ident is not None:
            self._renewing.join(_JOIN_SECONDS_MAX)  # a disk that hangs must not hold us
        with suppress(OSError):  # on a full disk another host waits a little longer, that is all
            if not self.lost():
                self._hold.write(self._record(released=True))
        self._hold.close()

    def _acquire(self, watch: HolderWatch, deadline: float, take_over: bool) -> None:
        while True:
            with self._explained():
                if self._hold.acquire_if_free(watch, self._record(released=False)):
                    self.was_forced = self._hold.was_not_released
                    return
                if (take_over or watch.expired) and self._hold.acquire_by_force(self._record(released=False)):
                    self.was_forced = True
                    return
            if time.monotonic() >= deadline:
                self._refuse_busy()
            time.sleep(_PAUSE_SECONDS)

    def _record(self, *, released: bool) -> bytes:
        record = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "machine": _machine(),
            "boot": _boot(),
            "space": _space(),
            "token": self._hold.token,
            "since": self._since,
            "renewed": self._renewed,
            "released": released,
        }
        return json.dumps(record).encode()

    def _write_first_record(self) -> None:
        with self._explained():
            try:
                self._hold.write(self._record(released=False))
            except OSError as error:
                # On a full disk whoever makes room must get the lease. Another host sees us at the next renewal.
                if error.errno not in local.DISK_FULL_ERRNOS:
                    raise

    def _keep_renewing(self, every_seconds: float | None) -> None:
        while not self._done.wait(every_seconds):
            with suppress(OSError):
                self.renew()


class DiskLeaseBackend:
    """A lease on a disk: the lock, our token in it, and the record beside."""

    was_not_released = False
    """Of a dead process nothing is on its way to a disk."""

    def __init__(
        self, folder: Path, name: str, *, put: Callable[[Path, bytes], None] = local.replace, reboot_ends: bool = False
    ) -> None:
        """`put` writes the record: one that a crash of the machine may tear will do where records expire.
        With `reboot_ends` a holder is dead whose host, by name and machine id, is this one and was started anew."""
        self._lock, self._record = folder / f"{name}.lock", folder / f"{name}.json"
        self._put, self._reboot_ends = put, reboot_ends
        self.token = uuid.uuid4().hex
        self._handle = -1

    def acquire_if_free(self, watch: HolderWatch, record: bytes) -> bool:
        """Take the lock, and put our token in it, if nobody holds the lease. The record comes after."""
        watch.expired = False
        # A link may lead to anybody's file, and our token is about to be written over what is there.
        handle = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another one's take-over may have put a new file here since we opened this one.
            if os.path.samestat(os.fstat(handle), os.stat(self._lock)) and self._is_free(watch):
                # In this order: what is written over what was there needs no room.
                os.pwrite(handle, self.token.encode(), 0)
                os.ftruncate(handle, len(self.token))
                self._handle = handle
                return True
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
        return False

    def _is_free(self, watch: HolderWatch) -> bool:
        """Whether the record stands in nobody's way, given that we hold the lock."""
        try:
            content = self._record.read_bytes()
        except FileNotFoundError:
            return True
        return watch.is_free(content, lambda content: _left_by_us_or_released(content, self._reboot_ends))

    def acquire_by_force(self, record: bytes) -> bool:
        """Put a lock file of our own in place of the one that is there. The last to do so holds the lease."""
        aside = local.temp_path(self._lock)
        handle = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(handle, self.token.encode())
            os.fsync(handle)
            os.replace(aside, self._lock)
        except FileNotFoundError:  # a writer that has just begun swept it away
            os.close(handle)
            return False
        except BaseException:
            os.close(handle)
            aside.unlink(missing_ok=True)
            raise
        self._handle = handle
        return True

    def lost(self) -> bool:
        try:
            return self._lock.read_bytes() != self.token.encode()
        except OSError:
            return False

    def write(self, record: bytes) -> None:
        self._put(self._record, record)

    def close(self) -> None:
        os.close(self._handle)


class HolderWatch:
    """Looks at a record again and again: may we take the lease, or has it been still for long enough?"""

    def __init__(self, expiry_seconds: float) -> None:
        self._expiry_seconds = expiry_seconds
        self._seen: bytes | None = None
        self._since = 0.0
        self.expired = False

    def is_free(self, content: bytes, left: Callable[[bytes], bool]) -> bool:
        """Whether a record stands in nobody's way, given how to tell one that its holder has left."""
        if left(content):
            return True
        if content != self._seen:
            self._seen, self._since = content, time.monotonic()
        self.expired = time.monotonic() - self._since >= self._expiry_seconds
        return False


# What a record says.


def _left_by_us_or_released(content: bytes, reboot_ends: bool) -> bool:
    record = _parsed(content)
    if record.get("released", False):
        return True
    # Containers have names of their own and one kernel, which has just given us the lock.
    same_host = bool(record.get("host") == socket.gethostname())
    if record.get("boot") and _boot():
        machine = _machine()  # where there is none, two machines look alike
        before = same_host and bool(machine) and record.get("machine") == machine
        return bool(record["boot"] == _boot()) or (reboot_ends and before)
    return same_host


def is_holder_gone(content: bytes) -> bool:
    """Whether the holder let go, or was a process here that is no more. That of another host is not known."""
    record = _parsed(content)
    return is_released(content) or (_is_here(record) and not _is_alive(record.get("pid")))


def live_pid_of(content: bytes) -> int | None:
    """The holder's pid, if it is a process here that lives and has not let go."""
    record = _parsed(content)
    pid = record.get("pid")
    live = isinstance(pid, int) and not is_released(content) and _is_here(record) and _is_alive(pid)
    return pid if live else None


def is_released(content: bytes) -> bool:
    """Whether its holder let go."""
    return bool(_parsed(content).get("released", False))


def token_of(content: bytes) -> str | None:
    """Whose record it is; None if that cannot be read."""
    token = _parsed(content).get("token")
    return token if isinstance(token, str) else None


def read_holder(folder: LeaseFolder, name: str = "owner") -> dict[str, object]:
    """Who holds the lease, as far as the record tells: pid and host."""
    try:
        record = _parsed((folder / f"{name}.json").read_bytes())
        return {"pid": record["pid"], "host": record["host"]}
    except (OSError, KeyError):
        return {}


def _parsed(content: bytes) -> dict[str, Any]:
    """A record's fields; none of one that cannot be read."""
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_here(record: dict[str, Any]) -> bool:
    """Whether a record's pid means the same to us: one kernel, and one space of its process numbers."""
    return bool(_boot() and _space()) and (record.get("boot"), record.get("space")) == (_boot(), _space())


def _is_alive(pid: object) -> bool:
    """Unknown is alive."""
    try:
        os.kill(int(str(pid)), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, ValueError, OverflowError):
        return True
    return True


def _space() -> str:
    """Names the space of process numbers we live in: a container has its own."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _boot() -> str:
    """Names the running kernel: locks are seen by all that share it. Empty where there is no such name."""
    return _word("/proc/sys/kernel/random/boot_id")


def _machine() -> str:
    """Names the machine, however often it is started. Empty where there is no such name."""
    return _word("/etc/machine-id")


def _word(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def live_holder_pid(folder: Path, name: str = "owner") -> int | None:
    """The pid of the live holder on this host, or None if nobody holds the lease."""
    try:
        handle = os.open(folder / f"{name}.lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = read_holder(folder, name).get("pid")
        return pid if isinstance(pid, int) else 0
    finally:
        os.close(handle)
    return None
