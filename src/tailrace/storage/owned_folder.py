"""Keep small files in a folder with one owner; each file is replaced whole.

What must stay true:

- One process writes. It gets no lease while another owner is alive. It gets none either while the record of another
  host says that its owner has not ended: from here no process can see whether that one is alive. Only an owner that
  died on this host, or with it, is taken over without a request.
- A file is written to a temporary name, made durable and renamed, and then the folder is made durable, in this order.
  So a crash leaves the old file or the new one, and what we report as saved survives it.
- What a former owner wrote is made durable before it counts: that owner may have died, or failed, before it was.
- No name leads out of the folder: links are not followed, and only plain files are read.

Any process may read while the owner writes, with a handle that cannot write.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import NoReturn

from tailrace import failpoints
from tailrace.errors import ConfigError, StateBusy, StateCorrupt, StateFenced, StateFull, StateUnusable
from tailrace.storage import local
from tailrace.storage.lease import DiskLeaseBackend, Lease, read_holder
from tailrace.validation import require_folder

FILE_BYTES_MAX = 64 << 20
"""Largest file that is read. Ours are smaller, so a larger one is not ours."""
FILE_MODE, FOLDER_MODE = 0o600, 0o700
_OWNER = ".owner"
_HINTS = {
    errno.ENOSPC: "Free space on that disk. What is saved there is unharmed.",
    errno.EDQUOT: "Raise the quota or free space. What is saved there is unharmed.",
    errno.EROFS: "Mount the file system writable, or choose another folder.",
    errno.EACCES: "Give this user the right to use it, or choose another folder.",
    errno.EPERM: "Give this user the right to use it, or choose another folder.",
    errno.EIO: "Look at the kernel's log: the disk failed. What was not saved is captured again.",
    errno.EMFILE: "Raise the limit of open files (`ulimit -n`) and start again.",
    errno.ENOENT: "Check the path. Only a process that opens the folder for writing creates it.",
    errno.ENOTDIR: "Choose another folder: this path is a file.",
    errno.ENAMETOOLONG: "Choose a shorter path.",
    errno.ELOOP: "Remove the link: we expect a plain file there.",
}


class FolderLease(Lease):
    """The lease of the one process that writes a folder of state."""

    def __init__(self, folder: Path, what: str, *, take_over: bool) -> None:
        self._folder, self._what = folder, what
        # A torn record would bar every owner, because it never expires.
        backend = DiskLeaseBackend(folder, _OWNER, put=local.replace_durably, reboot_ends=True)
        super().__init__(
            backend, _OWNER, wait_seconds=0.0, take_over=take_over, expiry_seconds=math.inf, renew_seconds=None
        )

    def _explained(self) -> AbstractContextManager[None]:
        return explain_errors(self._folder, self._what)

    def _refuse_busy(self) -> NoReturn:
        raise StateBusy(
            f"another process owns {self._what}",
            path=self._folder,
            **read_holder(self._folder, _OWNER),
            hint="Stop that process first, or open this one with `read_only=True`. If it ran on another host and is "
            "certainly gone, open it once with `take_over=True`.",
        )

    def _refuse_fenced(self) -> NoReturn:
        raise StateFenced(
            f"another process has taken over {self._what}",
            path=self._folder,
            **read_holder(self._folder, _OWNER),
            hint="Leave the work to that process: it continues where we stopped. To move it back here, stop that "
            "process first.",
        )


def explain_errors(path: Path, what: str) -> AbstractContextManager[None]:
    """Turn an operating system error into one with a remedy."""
    return local.explain_errors(path, what, StateUnusable, StateFull, _HINTS)


class StateFolder:
    """A folder of state, opened by its owner or by a reader.

    `what` is its name in errors, for example "the checkpoint store".
    """

    def __init__(
        self, folder: str | os.PathLike[str], what: str, *, read_only: bool = False, take_over: bool = False
    ) -> None:
        path = require_folder(folder, what)
        self.path, self.what, self.read_only = path, what, read_only
        self._process = os.getpid()
        self._lease: FolderLease | None = None
        if read_only:
            with explain_errors(path, what):
                os.listdir(path)
            return
        with explain_errors(path, what):
            local.make_folder(path, FOLDER_MODE)
        self._lease = FolderLease(path, what, take_over=take_over)
        self._sweep()

    def _sweep(self) -> None:
        """Remove temporary files that former owners left when they died. No process has read them."""
        with suppress(OSError):
            for leftover in self.path.glob(".*.tmp"):
                local.remove(leftover)

    def close(self) -> None:
        """Let the next owner in. This handle refuses every later write."""
        if self._lease is not None and self._process == os.getpid():
            self._lease.release()
        self._lease = None

    def require_owner(self) -> None:
        """Refuse to continue if this process may not write."""
        if self.read_only:
            raise ConfigError(
                f"{self.what} was opened read-only", path=self.path, hint="Open it without `read_only=True`."
            )
        if self._lease is None:
            raise ConfigError(f"{self.what} is closed", path=self.path, hint="Open it again.")
        if self._process != os.getpid():
            # A fork has the lock too, and would write without the knowledge of the process that took it.
            raise StateBusy(
                f"{self.what} belongs to the process that this one was forked from",
                path=self.path,
                pid=self._process,
                hint="Open it in the process that uses it, or with `read_only=True`.",
            )
        self._lease.check()

    def names(self) -> list[str]:
        """Return the names of the files in order.

        Our own files, which begin with a dot, are not among them.
        """
        with explain_errors(self.path, self.what):
            return sorted(name for name in os.listdir(self.path) if not name.startswith("."))

    def read(self, name: str) -> bytes | None:
        """Return the file's bytes, or None if there is no such file.

        Anything but a plain file is refused.
        """
        handle = self._open(name)
        if handle is None:
            return None
        try:
            with explain_errors(self.path / name, self.what):
                status = os.fstat(handle)
                if not stat.S_ISREG(status.st_mode):
                    raise self.corrupt_error(name, "it is not a plain file")
                if status.st_size > FILE_BYTES_MAX:
                    raise self.corrupt_error(name, "it is too large")
                with open(handle, "rb", closefd=False) as file:
                    return file.read()
        finally:
            os.close(handle)

    def _open(self, name: str) -> int | None:
        try:
            with explain_errors(self.path / name, self.what):
                return os.open(self.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except StateUnusable as error:
            cause = error.__cause__
            if isinstance(cause, FileNotFoundError):
                with explain_errors(self.path, self.what):
                    os.stat(self.path)  # if the folder itself is gone, its files are lost, not absent
                return None
            if isinstance(cause, OSError) and cause.errno == errno.ELOOP:
                raise self.corrupt_error(name, "it is a link") from error
            raise

    def corrupt_error(self, name: str, reason: object, hint: str = "Restore the file from a copy.") -> StateCorrupt:
        """Return the error for a file that is not what was written."""
        return StateCorrupt(f"a file of {self.what} cannot be read: {reason}", path=self.path / name, hint=hint)

    def replace(self, name: str, content: bytes) -> None:
        """Replace the file's content. When this returns, it survives a crash of the machine."""
        self.require_owner()
        path = self.path / name
        temp = local.temp_path(path)
        with explain_errors(path, self.what):
            local.write_temp(temp, [content], FILE_MODE)
            failpoints.hit("state.written")
            try:
                os.replace(temp, path)
            except BaseException:
                local.remove(temp)
                raise
            failpoints.hit("state.replaced")
            self._sync(path)
        failpoints.hit("state.saved")
        self.require_owner()  # a process that took over meanwhile may not have seen this

    def create(self, name: str, content: bytes) -> None:
        """Create a file, durable when this returns.

        The owner knows that there is no such file yet.
        """
        self.require_owner()
        path = self.path / name
        temp = local.temp_path(path)
        try:
            with explain_errors(path, self.what):
                local.write_temp(temp, [content], FILE_MODE)
                failpoints.hit("state.written")
                local.publish(temp, path)
        except FileExistsError as error:
            raise StateFenced(
                f"another process writes {self.what}", path=path, hint="Stop it, then start again."
            ) from error
        failpoints.hit("state.created")

    def make_durable(self, name: str) -> None:
        """Make the file durable, even if its writer died or failed before it was."""
        self.require_owner()
        with explain_errors(self.path / name, self.what):
            local.make_durable(self.path / name, FILE_MODE)

    def remove(self, *names: str) -> bool:
        """Remove files durably; return true if there was any."""
        self.require_owner()
        removed = False
        for name in names:
            with explain_errors(self.path / name, self.what), suppress(FileNotFoundError):
                os.unlink(self.path / name)
                removed = True
        if removed:
            failpoints.hit("state.removed")
            with explain_errors(self.path, self.what):
                self._sync(self.path / names[0])
        return removed

    @staticmethod
    def _sync(path: Path) -> None:
        try:
            local.sync_folder(path.parent)
        except OSError as error:
            raise local.DurabilityUnknown(error.errno, error.strerror, str(path)) from error
