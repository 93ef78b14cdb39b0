"""Lease a role at the log, on a disk or in an object store.

The lease only spares the loser the work: the commit number is the fence. `tailrace.storage.lease` has the rules.

An object store has no lock, only the record. Every write replaces exactly the record that was read, and the token in it
names the holder. A record of a dead process of this very kernel is free at once. Any other record must be unchanged for
as long as on a disk.
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
"""In a store, `lost` reuses a look at the record that is not older."""


class LogLease(lease.Lease):
    """The lease of one role at a log."""

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
        backend = DiskLeaseBackend(folder, name) if isinstance(folder, Path) else _ObjectLeaseBackend(folder, name)
        super().__init__(
            backend, name, wait_seconds, take_over=take_over, expiry_seconds=expiry_seconds, renew_seconds=renew_seconds
        )

    def _explained(self) -> AbstractContextManager[None]:
        return files.explain_errors(self._folder)

    def _refuse_busy(self) -> NoReturn:
        raise LogBusy(
            f"another process holds the log as its {self._name}",
            **read_holder(self._folder, self._name),
            hint="Stop that process, or wait for it: two at once are not safe. If it hangs, or its host does, "
            "start this one with `--take-over`.",
        )

    def _refuse_fenced(self) -> NoReturn:
        raise LogFenced(
            f"another process has taken the log over as its {self._name}",
            log=self._folder,
            **read_holder(self._folder, self._name),
            hint="Leave the work to that process: it continues where we stopped. To move it back here, stop that "
            "process first.",
        )


class _ObjectLeaseBackend:
    """A lease in an object store: the record is the lease."""

    def __init__(self, folder: ObjectPath, name: str) -> None:
        self._path, self.token = folder / f"{name}.json", uuid.uuid4().hex
        self._lost = False
        self._looked_at = 0.0
        self.was_not_released = False

    def acquire_if_free(self, watch: HolderWatch, record: bytes) -> bool:
        stamp, content = self._read_record()
        watch.expired = False
        if content is not None and not watch.is_free(content, lease.is_holder_gone):
            return False
        self.was_not_released = content is not None and not lease.is_released(content)
        return self._swap(record, stamp)

    def acquire_by_force(self, record: bytes) -> bool:
        return self._swap(record, self._read_record()[0])

    def lost(self) -> bool:
        """Return true if another process took it over.

        The answer is mostly that of the last look or renewal.
        """
        if not self._lost and time.monotonic() >= self._looked_at + _LOOKED_SECONDS:
            with suppress(OSError):
                self._lost = self._is_others(self._read_record()[1])
        return self._lost

    def write(self, record: bytes) -> None:
        """Replace our own record; leave one that is no longer ours as it is."""
        stamp, content = self._read_record()
        self._lost = self._is_others(content)
        if not self._lost and not self._swap(record, stamp):
            self._lost = self._is_others(self._read_record()[1])

    def close(self) -> None:
        """Do nothing: the kernel holds nothing for us."""

    def _is_others(self, content: bytes | None) -> bool:
        return content is not None and lease.token_of(content) != self.token

    def _read_record(self) -> tuple[ObjectMeta | None, bytes | None]:
        """Return the stamp and the record.

        A record that was replaced in between is not the one with that stamp.
        """
        try:
            stamp = self._path.meta()
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None, None
        finally:
            self._looked_at = time.monotonic()
        return stamp, content

    def _swap(self, record: bytes, stamp: ObjectMeta | None) -> bool:
        try:
            files.compare_and_swap(self._path, record, stamp)
        except FileExistsError:
            return False
        return True


def live_holder_pid(folder: LogPath, name: str = "owner") -> int | None:
    """Return the pid of the live holder on this host.

    None if no process holds the lease.
    """
    if isinstance(folder, Path):
        return lease.live_holder_pid(folder, name)
    path = folder / f"{name}.json"
    with suppress(FileNotFoundError), files.explain_store_errors(path):
        return lease.live_pid_of(path.read_bytes())
    return None
