"""The log's lease: `tailrace.storage.lease`, in the log's words, on a disk or in an object store.

It only spares the loser the work; the fence is the commit number.

In an object store there is no lock, only the record, and every write of it replaces exactly the one that was read:
whoever's token stands in it holds the lease. One that a process of this very kernel left, which is dead, is free at
once; any other must be seen unchanged for as long as on a disk.
"""

from __future__ import annotations

import time
import uuid
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import NoReturn

from tailrace.errors import LogBusy, LogFenced
from tailrace.storage import files, lease
from tailrace.storage.files import LogPath
from tailrace.storage.lease import (
    EXPIRY_SECONDS,
    RENEW_SECONDS,
    WAIT_SECONDS_MAX,
    DiskLeaseBackend,
    HolderWatch,
    read_holder,
)
from tailrace.storage.objects import ObjectMeta, ObjectPath

__all__ = ["EXPIRY_SECONDS", "WAIT_SECONDS_MAX", "LogLease", "live_holder_pid", "read_holder"]

_LOOKED_SECONDS = 1.0
"""In a store, a look at the record that is not older counts."""


class LogLease(lease.Lease):
    """Of one role at a log."""

    def __init__(
        self,
        folder: LogPath,
        name: str = "owner",
        wait_seconds: float = WAIT_SECONDS_MAX,
        *,
        take_over: bool = False,
        expiry_seconds: float = EXPIRY_SECONDS,
        renew_seconds: float = RENEW_SECONDS,
    ) -> None:
        self._folder = folder
        hold = DiskLeaseBackend(folder, name) if isinstance(folder, Path) else _ObjectLeaseBackend(folder, name)
        super().__init__(
            hold, name, wait_seconds, take_over=take_over, expiry_seconds=expiry_seconds, renew_seconds=renew_seconds
        )

    def _explained(self) -> AbstractContextManager[None]:
        return files.explain_errors(self._folder)

    def _refuse_busy(self) -> NoReturn:
        raise LogBusy(
            f"another process holds the log as its {self._name}",
            **read_holder(self._folder, self._name),
            hint="Stop that process, or wait for it; two at once would not be safe. If it hangs, or its host "
            "does, start this one with `--take-over`.",
        )

    def _refuse_fenced(self) -> NoReturn:
        raise LogFenced(
            f"another process has taken the log over as its {self._name}",
            log=self._folder,
            **read_holder(self._folder, self._name),
            hint="It goes on from where we stopped: leave it to that process. To move the work back here, "
            "stop it first.",
        )


class _ObjectLeaseBackend:
    """A lease in an object store: the record is the lease."""

    def __init__(self, folder: ObjectPath, name: str) -> None:
        self._path, self.token = folder / f"{name}.json", uuid.uuid4().hex
        self._lost = False
        self._looked = 0.0
        self.was_not_released = False

    def acquire_if_free(self, watch: HolderWatch, record: bytes) -> bool:
        stamp, content = self._found()
        watch.expired = False
        if content is not None and not watch.is_free(content, lease.is_holder_gone):
            return False
        self.was_not_released = content is not None and not lease.is_released(content)
        return self._swap(record, stamp)

    def acquire_by_force(self, record: bytes) -> bool:
        return self._swap(record, self._found()[0])

    def lost(self) -> bool:
        """Mostly as the last look or renewal found it."""
        if not self._lost and time.monotonic() >= self._looked + _LOOKED_SECONDS:
            with suppress(OSError):
                self._lost = self._is_others(self._found()[1])
        return self._lost

    def write(self, record: bytes) -> None:
        """Replace our own record; one that is not ours any more is left as it is."""
        stamp, content = self._found()
        self._lost = self._is_others(content)
        if not self._lost and not self._swap(record, stamp):
            self._lost = self._is_others(self._found()[1])

    def close(self) -> None:
        """The kernel holds nothing."""

    def _is_others(self, content: bytes | None) -> bool:
        return content is not None and lease.token_of(content) != self.token

    def _found(self) -> tuple[ObjectMeta | None, bytes | None]:
        """The record and its stamp; a record that was replaced in between is not the one that was stamped."""
        try:
            stamp = self._path.meta()
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None, None
        finally:
            self._looked = time.monotonic()
        return stamp, content

    def _swap(self, record: bytes, stamp: ObjectMeta | None) -> bool:
        try:
            files.compare_and_swap(self._path, record, stamp)
        except FileExistsError:
            return False
        return True


def live_holder_pid(folder: LogPath, name: str = "owner") -> int | None:
    """The pid of the live holder on this host, or None if nobody holds the lease."""
    if isinstance(folder, Path):
        return lease.live_holder_pid(folder, name)
    path = folder / f"{name}.json"
    with suppress(FileNotFoundError), files.explain_store_errors(path):
        return lease.live_pid_of(path.read_bytes())
    return None
