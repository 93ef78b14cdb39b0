"""A folder of small files with one owner, each file replaced whole.

What must stay true:

- One process writes. Its lease is refused while another one lives, and while the record of another host says that it
  has not ended: nobody here can see whether it lives. Only one that died on this host, or with it, is taken over
  unasked.
- A file is written aside, made durable, given its name, and the folder made durable, in this order. So a crash leaves
  the one before or the new one, and what is called saved is there after it.
- What a predecessor wrote is made durable before it counts: it may have died, or failed, before it was.
- No name leads out of the folder: links are not followed, and only plain files are read.

Anyone may read beside the owner, with a handle that cannot write.
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
"""Nothing that is kept here is as large; what is, was not written by us."""
FILE_MODE, FOLDER_MODE = 0o600, 0o700
_OWNER = ".owner"
_HINTS = {
    errno.ENOSPC: "Free space on that disk; what is saved there stays as it is.",
    errno.EDQUOT: "Raise the quota or free space; what is saved there stays as it is.",
    errno.EROFS: "The file system is read-only: mount it writable, or choose another folder.",
    errno.EACCES: "Give this user the right to use it, or choose another folder.",
    errno.EPERM: "Give this user the right to use it, or choose another folder.",
    errno.EIO: "The disk failed: look at the kernel's log. What was not saved is captured again.",
    errno.EMFILE: "Raise the limit of open files (`ulimit -n`) and start again.",
    errno.ENOENT: "Check the path: a folder is made only by whoever opens it to write.",
    errno.ENOTDIR: "A file stands where the folder should be: choose another folder.",
    errno.ENAMETOOLONG: "Choose a shorter path.",
    errno.ELOOP: "A link stands where a file of ours should be: remove it.",
}


class FolderLease(Lease):
    """The one who writes a folder of state."""

    def __init__(self, folder: Path, what: str, *, take_over: bool) -> None:
        self._folder, self._what = folder, what
        # A record that is torn would keep everyone out, for it never expires.
        hold = DiskLeaseBackend(folder, _OWNER, put=local.replace_durably, reboot_ends=True)
        super().__init__(
            hold, _OWNER, wait_seconds=0.0, take_over=take_over, expiry_seconds=math.inf, renew_seconds=None
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
            hint="It goes on from where we stopped: leave it to that process. To move the work back here, stop "
            "it first.",
        )


def explain_errors(path: Path, what: str) -> AbstractContextManager[None]:
    """Turn an operating system error into one with a remedy."""
    return local.explain_errors(path, what, StateUnusable, StateFull, _HINTS)


class StateFolder:
    """The folder, opened by its owner or by a reader. `what` is how errors call it, e.g. "the checkpoint store"."""

    def __init__(
        self, given: str | os.PathLike[str], what: str, *, read_only: bool = False, take_over: bool = False
    ) -> None:
        path = require_folder(given, what)
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
        """Remove what owners left that died before giving a file its name. Nobody ever read it."""
        with suppress(OSError):
            for leftover in self.path.glob(".*.tmp"):
                local.remove(leftover)

    def close(self) -> None:
        """Let the next one in. What comes after is refused."""
        if self._lease is not None and self._process == os.getpid():
            self._lease.release()
        self._lease = None

    def require_owner(self) -> None:
        """Refuse to go on for anyone who may not write."""
        if self.read_only:
            raise ConfigError(
                f"{self.what} was opened to be read only", path=self.path, hint="Open it without `read_only=True`."
            )
        if self._lease is None:
            raise ConfigError(f"{self.what} is closed", path=self.path, hint="Open it again.")
        if self._process != os.getpid():
            # A fork has the lock too, and would write behind the back of the one that took it.
            raise StateBusy(
                f"{self.what} belongs to the process that this one was forked from",
                path=self.path,
                pid=self._process,
                hint="Open it in the process that uses it, or with `read_only=True`.",
            )
        self._lease.check()

    def names(self) -> list[str]:
        """The files that have their names, in order; not those that begin with a dot, which are ours."""
        with explain_errors(self.path, self.what):
            return sorted(name for name in os.listdir(self.path) if not name.startswith("."))

    def read(self, name: str) -> bytes | None:
        """The file's bytes; None if there is none of that name. Anything but a plain file is refused."""
        handle = self._open(name)
        if handle is None:
            return None
        try:
            with explain_errors(self.path / name, self.what):
                found = os.fstat(handle)
                if not stat.S_ISREG(found.st_mode):
                    raise self.corrupt_error(name, "it is not a plain file")
                if found.st_size > FILE_BYTES_MAX:
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
                    os.stat(self.path)  # a folder that is gone has taken its files along: that is not "none"
                return None
            if isinstance(cause, OSError) and cause.errno == errno.ELOOP:
                raise self.corrupt_error(name, "it is a link") from error
            raise

    def corrupt_error(self, name: str, reason: object, hint: str = "Restore the file from a copy.") -> StateCorrupt:
        """The error for a file that is not what was written."""
        return StateCorrupt(f"a file of {self.what} cannot be read: {reason}", path=self.path / name, hint=hint)

    def replace(self, name: str, content: bytes) -> None:
        """Put this content under the name. When this returns, it survives a crash of the machine."""
        self.require_owner()
        path = self.path / name
        aside = local.temp_path(path)
        with explain_errors(path, self.what):
            local.write_temp(aside, [content], FILE_MODE)
            failpoints.hit("state.written")
            try:
                os.replace(aside, path)
            except BaseException:
                local.remove(aside)
                raise
            failpoints.hit("state.replaced")
            self._sync(path)
        failpoints.hit("state.saved")
        self.require_owner()  # taken over meanwhile: whoever did so may not have seen this

    def create(self, name: str, content: bytes) -> None:
        """A new file of this name, durable when this returns. The owner knows that there is none."""
        self.require_owner()
        path = self.path / name
        aside = local.temp_path(path)
        try:
            with explain_errors(path, self.what):
                local.write_temp(aside, [content], FILE_MODE)
                failpoints.hit("state.written")
                local.publish(aside, path)
        except FileExistsError as error:
            raise StateFenced(
                f"another process writes {self.what}", path=path, hint="Stop it, then start again."
            ) from error
        failpoints.hit("state.created")

    def make_durable(self, name: str) -> None:
        """Make durable what is there, whatever became of the one who wrote it."""
        self.require_owner()
        with explain_errors(self.path / name, self.what):
            local.make_durable(self.path / name, FILE_MODE)

    def remove(self, *names: str) -> bool:
        """Take files away, durably; whether there was any."""
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
