"""Lease a role to one holder at a time.

A lease is a kernel lock and a record of the holder. What must stay true:

- The token in `<name>.lock` names the holder. On one host `flock` on that file decides who may write it: the kernel
  releases the lock when the holder dies.
- Where hosts share storage the lock may not reach. So a record (`<name>.json`) that another host left, and did not mark
  as released, must be *unchanged* for a while before we take the lease. Our own clock alone measures that; clocks of
  two machines are never compared. The holder renews its record much more often than that.
- To take the lease from a holder that has not released it (`take_over`, or expiry), a process replaces the lock file
  with a *new* one. The old holder's lock is then on a file that no process looks at, and the new token shows it that it
  lost the lease.
- No process writes a record once it has lost the lease. If it is stopped between the look and the write, up to two such
  writes are possible. The holder's next renewal corrects them.

That is so on a disk (`DiskLeaseBackend`). Where there are no locks a lease is held in another way: a `LeaseBackend`
implements it, and everything else is the same.
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
"""Seconds, by our clock, after which an unrenewed record of another host counts as dead."""
RENEW_SECONDS = 4.0
_PAUSE_SECONDS = 0.1
_JOIN_SECONDS_MAX = 5.0


class LeaseFolder(Protocol):
    """A folder of leases, on a disk or in a store."""

    def __truediv__(self, name: str, /) -> LeaseFolder: ...
    def read_bytes(self) -> bytes: ...


class LeaseBackend(Protocol):
    """A way to hold one lease: the holder's token is there, and no other."""

    token: str
    """A token that is unique to this holder."""

    @property
    def was_not_released(self) -> bool:
        """True if the last holder had not released the lease.

        Its last write may then be on its way.
        """

    def acquire_if_free(self, watch: HolderWatch, record: bytes) -> bool:
        """Take the lease if it is free. The watch records what is seen of a holder."""

    def acquire_by_force(self, record: bytes) -> bool:
        """Take the lease from any holder; return false if another process was quicker.

        The last process to do so holds it.
        """

    def lost(self) -> bool:
        """Return true if another process took it over; an unreadable record proves nothing."""

    def write(self, record: bytes) -> None:
        """Replace our last record with this one."""

    def close(self) -> None:
        """Release what the kernel holds for us, if anything."""


class Lease(abc.ABC):
    """A lease held from construction to `release`, the process's end, or a take-over.

    Subclasses word the errors for their own role: they give the three methods that follow the constructor.
    """

    def __init__(
        self,
        backend: LeaseBackend,
        name: str,
        wait_seconds: float,
        *,
        take_over: bool,
        expiry_seconds: float,
        renew_seconds: float | None,
    ) -> None:
        """Acquire the lease.

        Without `renew_seconds` the record is not renewed: for leases where a record never counts as dead.
        """
        self._backend, self._name = backend, name
        self._since, self._renewed = time.time(), 0
        self.was_forced = False
        """True if the lease was taken from a holder that had not released it.

        That holder may still believe that it holds the lease, or its last write may be on its way.
        """
        self._acquire(HolderWatch(expiry_seconds), time.monotonic() + wait_seconds, take_over)
        try:
            self._write_first_record()
        except BaseException:
            self._backend.close()
            raise
        self._done = threading.Event()
        self._renewing = threading.Thread(
            target=self._keep_renewing, args=(renew_seconds,), name=f"tailrace-lease-{name}", daemon=True
        )
        if renew_seconds is not None:
            self._renewing.start()

    @abc.abstractmethod
    def _explained(self) -> AbstractContextManager[None]:
        """Return a context that turns an operating system error into one of the lessee's."""

    @abc.abstractmethod
    def _refuse_busy(self) -> NoReturn:
        """Raise: another process holds the lease."""

    @abc.abstractmethod
    def _refuse_fenced(self) -> NoReturn:
        """Raise: another process took the lease over."""

    def lost(self) -> bool:
        """Return true if another process took the lease over.

        It costs a look; one that fails proves nothing.
        """
        return self._backend.lost()

    def check(self) -> None:
        """Refuse to continue if another process took the lease over."""
        if self.lost():
            self._refuse_fenced()

    def renew(self) -> None:
        """Show other hosts that we are alive, unless the lease is no longer ours."""
        if not self.lost():
            self._renewed += 1
            self._backend.write(self._record(released=False))

    def release(self) -> None:
        """Let the next holder in. A second call does nothing."""
        if self._done.is_set():
            return
        self._done.set()
        if self._renewing.ident is not None:
            self._renewing.join(_JOIN_SECONDS_MAX)  # a disk that hangs must not block us
        with suppress(OSError):  # on a full disk another host only waits a little longer
            if not self.lost():
                self._backend.write(self._record(released=True))
        self._backend.close()

    def _acquire(self, watch: HolderWatch, deadline: float, take_over: bool) -> None:
        while True:
            with self._explained():
                if self._backend.acquire_if_free(watch, self._record(released=False)):
                    self.was_forced = self._backend.was_not_released
                    return
                if (take_over or watch.expired) and self._backend.acquire_by_force(self._record(released=False)):
                    self.was_forced = True
                    return
            if time.monotonic() >= deadline:
                self._refuse_busy()
            time.sleep(_PAUSE_SECONDS)

    def _record(self, *, released: bool) -> bytes:
        record = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "machine": _machine_id(),
            "boot": _boot_id(),
            "space": _pid_namespace(),
            "token": self._backend.token,
            "since": self._since,
            "renewed": self._renewed,
            "released": released,
        }
        return json.dumps(record).encode()

    def _write_first_record(self) -> None:
        with self._explained():
            try:
                self._backend.write(self._record(released=False))
            except OSError as error:
                # On a full disk the process that makes room must get the lease. Other hosts see us at the next renewal.
                if error.errno not in local.DISK_FULL_ERRNOS:
                    raise

    def _keep_renewing(self, every_seconds: float | None) -> None:
        while not self._done.wait(every_seconds):
            with suppress(OSError):
                self.renew()


class DiskLeaseBackend:
    """A lease on a disk: the lock, our token in it, and a record file."""

    was_not_released = False
    """Always false: a dead process has no write on its way to a disk."""

    def __init__(
        self, folder: Path, name: str, *, put: Callable[[Path, bytes], None] = local.replace, reboot_ends: bool = False
    ) -> None:
        """Prepare the lease.

        `put` writes the record. One that a crash of the machine may tear will do where records expire. With
        `reboot_ends` a holder counts as dead if its host, by name and machine id, is this one and has been restarted.
        """
        self._lock, self._record = folder / f"{name}.lock", folder / f"{name}.json"
        self._put, self._reboot_ends = put, reboot_ends
        self.token = uuid.uuid4().hex
        self._handle = -1

    def acquire_if_free(self, watch: HolderWatch, record: bytes) -> bool:
        """Take the lock and write our token into it, if the lease is free.

        The record is written afterwards.
        """
        watch.expired = False
        # A link may lead to any file, and our token is about to overwrite what is there.
        handle = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process's take-over may have put a new file here since we opened this one.
            if os.path.samestat(os.fstat(handle), os.stat(self._lock)) and self._is_free(watch):
                # In this order: overwriting needs no room on the disk.
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
        """Return true if the record bars no other holder, while we hold the lock."""
        try:
            content = self._record.read_bytes()
        except FileNotFoundError:
            return True
        return watch.is_free(content, lambda content: _is_released_or_gone(content, self._reboot_ends))

    def acquire_by_force(self, record: bytes) -> bool:
        """Replace the lock file with our own. The last process to do so holds the lease."""
        temp = local.temp_path(self._lock)
        handle = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(handle, self.token.encode())
            os.fsync(handle)
            os.replace(temp, self._lock)
        except FileNotFoundError:  # a writer that has just started swept it away
            os.close(handle)
            return False
        except BaseException:
            os.close(handle)
            temp.unlink(missing_ok=True)
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
    """A look at a record over time, to see whether its holder still renews it."""

    def __init__(self, expiry_seconds: float) -> None:
        self._expiry_seconds = expiry_seconds
        self._seen: bytes | None = None
        self._since = 0.0
        self.expired = False

    def is_free(self, content: bytes, left: Callable[[bytes], bool]) -> bool:
        """Return true if the record bars no other holder.

        `left` says whether the record's holder has left.
        """
        if left(content):
            return True
        if content != self._seen:
            self._seen, self._since = content, time.monotonic()
        self.expired = time.monotonic() - self._since >= self._expiry_seconds
        return False


# The record.


def _is_released_or_gone(content: bytes, reboot_ends: bool) -> bool:
    record = _parsed(content)
    if record.get("released", False):
        return True
    # Containers have host names of their own and one kernel, which has just granted us the lock.
    same_host = bool(record.get("host") == socket.gethostname())
    if record.get("boot") and _boot_id():
        machine = _machine_id()  # without a name, two machines look alike
        rebooted = same_host and bool(machine) and record.get("machine") == machine
        return bool(record["boot"] == _boot_id()) or (reboot_ends and rebooted)
    return same_host


def is_holder_gone(content: bytes) -> bool:
    """Return true if the holder released it or was a process here that is dead.

    A holder on another host is not known to be gone.
    """
    record = _parsed(content)
    return is_released(content) or (_is_here(record) and not _is_alive(record.get("pid")))


def live_pid_of(content: bytes) -> int | None:
    """Return the holder's pid if it is a live process on this host.

    None if it has released the lease.
    """
    record = _parsed(content)
    pid = record.get("pid")
    live = isinstance(pid, int) and not is_released(content) and _is_here(record) and _is_alive(pid)
    return pid if live else None


def is_released(content: bytes) -> bool:
    """Return true if the holder released the lease."""
    return bool(_parsed(content).get("released", False))


def token_of(content: bytes) -> str | None:
    """Return the record's token; None if it cannot be read."""
    token = _parsed(content).get("token")
    return token if isinstance(token, str) else None


def read_holder(folder: LeaseFolder, name: str = "owner") -> dict[str, object]:
    """Return the holder's pid and host, as far as the record says."""
    try:
        record = _parsed((folder / f"{name}.json").read_bytes())
        return {"pid": record["pid"], "host": record["host"]}
    except (OSError, KeyError):
        return {}


def _parsed(content: bytes) -> dict[str, Any]:
    """Return a record's fields; an unreadable record has none."""
    try:
        record = json.loads(content)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _is_here(record: dict[str, Any]) -> bool:
    """Return true if a record's pid means the same to us.

    That needs the same kernel and the same pid namespace.
    """
    return bool(_boot_id() and _pid_namespace()) and (record.get("boot"), record.get("space")) == (
        _boot_id(),
        _pid_namespace(),
    )


def _is_alive(pid: object) -> bool:
    """Return false if there is no such process; unknown counts as alive."""
    try:
        os.kill(int(str(pid)), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, ValueError, OverflowError):
        return True
    return True


def _pid_namespace() -> str:
    """Return the name of our pid namespace: a container has its own."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _boot_id() -> str:
    """Return the name of the running kernel, or an empty string where it has none.

    All processes that share the kernel see its locks.
    """
    return _read_word("/proc/sys/kernel/random/boot_id")


def _machine_id() -> str:
    """Return the machine's name, which a restart does not change; empty where it has none."""
    return _read_word("/etc/machine-id")


def _read_word(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def live_holder_pid(folder: Path, name: str = "owner") -> int | None:
    """Return the pid of the live holder on this host.

    None if no process holds the lease.
    """
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
