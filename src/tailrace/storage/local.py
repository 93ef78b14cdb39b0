"""Write files that appear whole or not at all.

A file is written to a temporary name, made durable, and then given its own name. `link(2)` fails if the name is taken,
so publishing a file is a compare-and-swap. `rename` overwrites, and is for files with one owner. An error of the file
system becomes an error that says what to do.

A failed fsync is never repeated on the same bytes: the kernel may have marked them as written and dropped them, and
would then report success. Bytes that must become durable after that are written again (`write_temp`, `make_durable`).
"""

from __future__ import annotations

import errno
import itertools
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from tailrace.errors import TailraceError

_PARTS_AT_ONCE = 1024
"""The kernel takes no more parts in one call."""
_COPIED_BYTES_MAX = 1 << 20
_TOKEN, _NUMBERS = uuid.uuid4().hex, itertools.count()
_Error = TypeVar("_Error", bound=TailraceError)
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers that mean there is no room."""


class DurabilityUnknown(OSError):
    """A file has its name, but may lose it in a crash of the machine."""


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
    error: OSError,
    path: object,
    what: str,
    unusable: type[_Error],
    full: type[_Error],
    hints: Mapping[int, str],
    option_hints: Mapping[int, str] = MappingProxyType({}),
) -> _Error:
    """Return the error with its remedy.

    The path is used where the system names none.
    """
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
    ).with_option_hint(option_hints.get(error.errno or 0, ""))


def system_message(error: OSError) -> str:
    """Return the system's own text, without what libraries put around it."""
    return os.strerror(error.errno) if error.errno else str(error.args[0] if error.args else error)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Create the folder and those above it, durably; `mode` is the folder's own.

    Another process may have created any of them just before.
    """
    missing = [path]
    while not file_exists(missing[-1].parent):
        missing.append(missing[-1].parent)
    for folder in reversed(missing):
        created = True
        try:
            folder.mkdir(mode if folder == path else 0o777)
        except FileExistsError as error:
            created = False
            if not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from error
        try:
            sync_folder(folder.parent)
        except BaseException:
            if created:
                with suppress(OSError):
                    folder.rmdir()  # so that the next try makes it
            raise


def file_exists(path: Path) -> bool:
    """Return true if there is such a file. A look that is not permitted is an error."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True


def temp_path(path: Path) -> Path:
    """Return a name next to the file that no other writer uses, on any host."""
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
    """Remove a file that no process knows of; one that remains is swept later."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _write_all(handle: int, parts: Sequence[bytes | memoryview]) -> None:
    """Write every byte, with many parts in one call.

    A commit of 200 tables has 400 parts. Where they are small, one copy of them all is cheaper than many parts for the
    kernel.
    """
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


def publish(temp: Path, path: Path) -> None:
    """Link the temporary file to its name, and make that durable.

    Raise FileExistsError if the name is taken, and DurabilityUnknown if the name may not be durable.
    """
    try:
        _link(temp, path)
    finally:
        remove(temp)
    try:
        sync_folder(path.parent)
    except OSError as error:
        raise DurabilityUnknown(error.errno, error.strerror, str(path)) from error


def _link(temp: Path, path: Path) -> None:
    try:
        os.link(temp, path)
    except FileExistsError:
        # Over a network the link may exist although the answer was lost; then the second try finds it.
        if not os.path.lexists(temp) or not os.path.samefile(temp, path):
            raise
    except FileNotFoundError:
        raise  # swept away by another writer, so certainly not linked
    except OSError as error:
        if os.path.lexists(path):
            raise DurabilityUnknown(error.errno, error.strerror, str(path)) from error
        raise


def create(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Create a durable file with this content; raise FileExistsError if there is one."""
    temp = temp_path(path)
    write_temp(temp, [content], mode)
    publish(temp, path)


def replace_durably(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace the file's content, so that a crash leaves the old or the new one."""
    temp = temp_path(path)
    write_temp(temp, [content], mode)
    try:
        os.replace(temp, path)
    except BaseException:
        remove(temp)
        raise
    sync_folder(path.parent)


def make_durable(path: Path, mode: int = 0o644) -> None:
    """Make a file durable under its name with its bytes unchanged.

    Earlier tries may have failed.
    """
    try:
        replace_durably(path, path.read_bytes(), mode)
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        # There is no room for another copy, and the process that makes room must be able to begin. A disk that is
        # only full has failed no sync before.
        sync_file(path)
        sync_folder(path.parent)


def replace(path: Path, content: bytes) -> None:
    """Replace the file's content without durability, for notes that no correctness depends on."""
    temp = temp_path(path)
    try:
        temp.write_bytes(content)
        os.replace(temp, path)
    except BaseException:
        remove(temp)
        raise
