"""Files that appear whole or not at all: written aside, made durable, then given their name.

`link(2)` fails if the name is taken, so publishing a file is a compare-and-swap; `rename` overwrites, and is for what
has one owner. An error of the file system becomes an error that says what to do.

An fsync that failed is never tried again on the same bytes: the kernel may have counted them as written and let
go of them, and would say yes. What is to be made durable after that is written anew (`write_aside`, `renew`).
"""

from __future__ import annotations

import errno
import itertools
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from tailrace.errors import TailraceError

_PARTS_AT_ONCE = 1024
"""The kernel takes no more in one call."""
_COPIED_BYTES_MAX = 1 << 20
_TOKEN, _NUMBERS = uuid.uuid4().hex, itertools.count()
_Error = TypeVar("_Error", bound=TailraceError)
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
"""How a system says that there is no room."""


class DurabilityUnknown(OSError):
    """A file has its name, but whether it keeps it through a crash of the machine is not known."""


@contextmanager
def explain_errors(
    path: Path, what: str, unusable: type[TailraceError], full: type[TailraceError], hints: Mapping[int, str]
) -> Iterator[None]:
    """Turn an operating system error about `what` into one with a remedy."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise explained_error(error, path, what, unusable, full, hints) from error


def explained_error(
    error: OSError, path: object, what: str, unusable: type[_Error], full: type[_Error], hints: Mapping[int, str]
) -> _Error:
    """The error with its remedy. The path is named where the system names none."""
    if isinstance(error, DurabilityUnknown):
        return unusable(
            f"{what} cannot be used: what was written may not be durable: {system_message(error)}",
            path=error.filename or path,
            hint="Look at the disk and at the kernel's log, then start again: nothing is lost.",
        )
    kind = full if error.errno in DISK_FULL_ERRNOS else unusable
    return kind(
        f"{what} cannot be used: {system_message(error)}",
        path=error.filename or path,
        hint=hints.get(error.errno or 0, "Look at the disk and the folder's permissions."),
    )


def system_message(error: OSError) -> str:
    """In the system's own words; libraries put theirs around them."""
    return os.strerror(error.errno) if error.errno else str(error.args[0] if error.args else error)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """The folder and those above it, durable, also where somebody else has just made one. The mode is the folder's."""
    missing = [path]
    while not file_exists(missing[-1].parent):
        missing.append(missing[-1].parent)
    for folder in reversed(missing):
        made = True
        try:
            folder.mkdir(mode if folder == path else 0o777)
        except FileExistsError as error:
            made = False
            if not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from error
        try:
            sync_folder(folder.parent)
        except BaseException:
            if made:
                with suppress(OSError):
                    folder.rmdir()  # so that it is made anew
            raise


def file_exists(path: Path) -> bool:
    """Whether there is such a file. Not being allowed to look is an error, not a no."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True


def temp_path(path: Path) -> Path:
    """A name beside the file that no other writer uses, on this host or another."""
    return path.with_name(f".{path.name}.{_TOKEN}-{os.getpid()}-{next(_NUMBERS)}.tmp")


def sync_file(path: Path) -> None:
    """Make a file's bytes durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Make the folder's entries durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_temp(path: Path, parts: Sequence[bytes | memoryview], mode: int = 0o644) -> None:
    """Write the parts to a file of their own and make them durable."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        _write_all(handle, parts)
        os.fsync(handle)
    except BaseException:
        remove(path)  # half a file takes room on a disk that may have none
        raise
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Take back a file that nobody was told of; one that stays is swept later."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _write_all(handle: int, parts: Sequence[bytes | memoryview]) -> None:
    """Write every byte, many parts in one call: a commit of 200 tables has 400 of them. Where they are small, copying
    them together is cheaper than telling the kernel of each."""
    small = sum(map(len, parts)) <= _COPIED_BYTES_MAX
    left = [memoryview(part) for part in ([b"".join(parts)] if small else parts) if len(part)]
    while left:
        written = os.writev(handle, left[:_PARTS_AT_ONCE])
        done = 0
        while done < len(left) and written >= len(left[done]):
            written -= len(left[done])
            done += 1
        left = left[done:]
        if written:
            left[0] = left[0][written:]


def publish(aside: Path, path: Path) -> None:
    """Give the file its name, unless that name is taken (FileExistsError), and make that durable (or Doubtful)."""
    try:
        _link(aside, path)
    finally:
        remove(aside)
    try:
        sync_folder(path.parent)
    except OSError as error:
        raise DurabilityUnknown(error.errno, error.strerror, str(path)) from error


def _link(aside: Path, path: Path) -> None:
    try:
        os.link(aside, path)
    except FileExistsError:
        # Over a network it may have been done although the answer was lost, and then the second try finds it done.
        if not os.path.lexists(aside) or not os.path.samefile(aside, path):
            raise
    except FileNotFoundError:
        raise  # swept away by another writer, so certainly not linked
    except OSError as error:
        if os.path.lexists(path):
            raise DurabilityUnknown(error.errno, error.strerror, str(path)) from error
        raise


def create(path: Path, content: bytes, mode: int = 0o644) -> None:
    """A new durable file with this content; FileExistsError if there is one."""
    aside = temp_path(path)
    write_temp(aside, [content], mode)
    publish(aside, path)


def replace_durably(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Put this content under the name, whatever stood there, so that a crash leaves the one or the other."""
    aside = temp_path(path)
    write_temp(aside, [content], mode)
    try:
        os.replace(aside, path)
    except BaseException:
        remove(aside)
        raise
    sync_folder(path.parent)


def make_durable(path: Path, mode: int = 0o644) -> None:
    """Make a file durable under its name, whatever became of earlier tries. Its bytes stay the same."""
    try:
        replace_durably(path, path.read_bytes(), mode)
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        # No room for another copy, and whoever is to make room must be able to begin. A disk that is only full has
        # failed no sync before.
        sync_file(path)
        sync_folder(path.parent)


def replace(path: Path, content: bytes) -> None:
    """Put this content under the name, whatever stood there. For notes that no correctness hangs on."""
    aside = temp_path(path)
    try:
        aside.write_bytes(content)
        os.replace(aside, path)
    except BaseException:
        remove(aside)
        raise
