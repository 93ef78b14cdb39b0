"""Read and write the files of a log, on a disk or in a store.

This is the one layer that all files of the log go through. A path is a `pathlib.Path` or an `ObjectPath`. Files appear
whole or not at all. An error of the file system or the store becomes an error of the log that says what to do.

On a disk `tailrace.storage.local` does that: it writes a temporary file, makes it durable, then links it to its name,
which is a compare-and-swap. In an object store the content waits in memory until it is published. Publishing is a put
that fails if the name is taken. There are no folders, nothing needs syncing, and `objects.py` says what a lost answer
means.

Both kinds share the methods of `pathlib.Path` that only read and name: `/`, `name`, `read_bytes`, `exists`, `iterdir`,
`glob`, `unlink`. Everything that must be durable, or that must happen once, is a function here. Only this module
writes, publishes and removes files of either kind.
"""

from __future__ import annotations

import errno
import hashlib
import io
import mmap
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, overload

from tailrace.errors import LogFenced, LogFull, LogUnreachable, LogUnusable
from tailrace.storage import local, objects
from tailrace.storage.local import DurabilityUnknown
from tailrace.storage.objects import ObjectMeta, ObjectPath, StoreRefused, StoreUnreachable
from tailrace.validation import require_folder

if TYPE_CHECKING:
    import pyarrow as pa

LogPath = Path | ObjectPath
"""A file or folder of the log, wherever the log is."""
FileStamp = tuple[int, int] | ObjectMeta
"""A value that differs between one content of a name and the next."""

_HINTS = {
    errno.ELOOP: "Remove the link: we expect a plain file there.",
    errno.ENOSPC: "Free space on that disk. Capture then continues where it stopped; nothing is lost.",
    errno.EDQUOT: "Raise the quota or free space. Capture then continues where it stopped; nothing is lost.",
    errno.EROFS: "Mount the file system writable, or set `log:` to another folder.",
    errno.EACCES: "Give this user the right to write there, or set `log:` to another folder.",
    errno.EPERM: "Give this user the right to write there, or set `log:` to another folder.",
    errno.EIO: "Look at the kernel's log: the disk failed. What was not written is captured again.",
    errno.EFBIG: "Raise the limit of a file's size (`ulimit -f`), or set `log:` to another file system.",
    errno.EMFILE: "Raise the limit of open files (`ulimit -n`) and start again.",
    errno.ENOENT: "Start `tailrace run` or `tailrace capture` first: they create the log.",
    errno.ENOTDIR: "Set `log:` to another folder: this path is a file.",
}
_OPTION_HINTS = {
    errno.EROFS: "Mount the file system writable, or give the option `log` another folder.",
    errno.EACCES: "Give this user the right to write there, or give the option `log` another folder.",
    errno.EPERM: "Give this user the right to write there, or give the option `log` another folder.",
    errno.EFBIG: "Raise the limit of a file's size (`ulimit -f`), or give the option `log` another file system.",
    errno.ENOTDIR: "Give the option `log` another folder: this path is a file.",
}
"""The same hints for users of the `format("cdc")` options, who have no settings file."""
STORE_ERRORS = (StoreUnreachable, StoreRefused)
"""Errors that say nothing about the file itself.

Code that treats an unreadable file as absent must not do so for these.
"""


class _ObjectDurabilityUnknown(DurabilityUnknown):
    """A put that may be done, or may yet be done.

    A request under way cannot be withdrawn.
    """

    def __init__(self, error: StoreUnreachable, path: ObjectPath) -> None:
        super().__init__(error.args[0])
        self.filename = str(path)


class UnsentObject:
    """The content of an object that has not been put yet."""

    def __init__(self) -> None:
        self.content = b""


TempFile = Path | UnsentObject


def parse_log_path(path: Path | ObjectPath | str, *, endpoint: str | None = None, region: str | None = None) -> LogPath:
    """Return the path of a folder, or of `s3://bucket/prefix`.

    Everything else that the store needs is in the environment.
    """
    if isinstance(path, str) and "://" in path:
        return ObjectPath.parse(path, endpoint=endpoint, region=region)
    return path if isinstance(path, ObjectPath) else require_folder(path, "the log")


def is_remote(path: LogPath) -> bool:
    """Return true if every look costs a request."""
    return isinstance(path, ObjectPath)


@contextmanager
def explain_errors(path: LogPath) -> Iterator[None]:
    """Turn an error of the system or the store into one with a remedy."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise explained_error(error, path) from error


@contextmanager
def explain_store_errors(path: LogPath) -> Iterator[None]:
    """Turn an error of the store alone into one with a remedy."""
    try:
        yield
    except STORE_ERRORS as error:
        raise explained_error(error, path) from error


def explained_error(error: OSError, path: LogPath) -> LogUnusable:
    """Return the error with its remedy."""
    file = error.filename or path
    if isinstance(error, _ObjectDurabilityUnknown):
        return LogUnusable(
            f"the log cannot be used: what was written may not be durable: {local.system_message(error)}",
            path=file,
            hint="Look at the network and at the store, then start again: nothing is lost.",
        )
    if isinstance(error, StoreUnreachable):
        return LogUnreachable(
            f"the log cannot be reached: {local.system_message(error)}",
            path=file,
            hint="Look at the network, the store and its address (`log.endpoint`, `logEndpoint`, or AWS_ENDPOINT_URL).",
        )
    if isinstance(error, StoreRefused):
        return LogUnusable(
            f"the log cannot be used: {local.system_message(error)}",
            path=file,
            hint="Look at the bucket's name and at the credentials in the environment (AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or the machine's role), and at what they may do there.",
        )
    return local.explained_error(error, path, "the log", LogUnusable, LogFull, _HINTS, _OPTION_HINTS)


@contextmanager
def explain_errors_but_missing(path: LogPath) -> Iterator[None]:
    """Turn errors into ones with a remedy, except FileNotFoundError.

    The caller knows where else to look for a missing file.
    """
    try:
        with explain_errors(path):
            yield
    except LogUnusable as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise error.__cause__ from None
        raise


def make_folder(path: LogPath) -> None:
    """Create the folder and those above it, durably; another process may have just created them."""
    if isinstance(path, Path):
        with explain_errors(path):
            local.make_folder(path)


def file_exists(path: LogPath) -> bool:
    """Return true if there is such a file. A look that is not permitted is an error."""
    if isinstance(path, Path):
        return local.file_exists(path)
    try:
        path.meta()
    except FileNotFoundError:
        return False
    return True


@overload
def temp_path(path: Path) -> Path: ...
@overload
def temp_path(path: LogPath) -> TempFile: ...
def temp_path(path: LogPath) -> TempFile:
    """Return a temporary name next to the file that no other writer uses.

    That holds on every host. In a store there is no temporary file: the content waits in memory.
    """
    return local.temp_path(path) if isinstance(path, Path) else UnsentObject()


def sync_file(path: LogPath) -> None:
    """Make a file's bytes durable."""
    if isinstance(path, Path):
        local.sync_file(path)


def sync_folder(folder: LogPath) -> None:
    """Make the folder's entries durable."""
    if isinstance(folder, Path):
        local.sync_folder(folder)


def write_temp(path: TempFile, parts: Sequence[bytes | memoryview]) -> None:
    """Write the parts to a file of their own and make them durable."""
    if isinstance(path, Path):
        local.write_temp(path, parts)
    else:
        path.content = b"".join(parts)


def write_new(path: LogPath, parts: Sequence[bytes | memoryview]) -> None:
    """Write durable bytes under a name that only the caller uses.

    On a disk the name itself is not durable yet.
    """
    if isinstance(path, Path):
        local.write_temp(path, parts)
    else:
        path.write_bytes(b"".join(parts))


def remove(path: LogPath | UnsentObject) -> None:
    """Remove a file that no process knows of; one that remains is swept later."""
    if isinstance(path, Path):
        local.remove(path)
    elif isinstance(path, ObjectPath):
        with suppress(OSError):
            path.unlink(missing_ok=True)


def publish(temp: TempFile, path: LogPath) -> None:
    """Give the content its name and make that durable.

    Raise FileExistsError if the name is taken, and DurabilityUnknown if the name may not be durable.
    """
    if isinstance(temp, Path) and isinstance(path, Path):
        local.publish(temp, path)
        return
    assert isinstance(temp, UnsentObject), "made by temp_path"
    assert isinstance(path, ObjectPath), "as temp_path was called"
    try:
        objects.put_new(path, temp.content)
    except StoreUnreachable as error:
        raise _ObjectDurabilityUnknown(error, path) from error


def create(path: LogPath, content: bytes) -> None:
    """Create a durable file with this content; raise FileExistsError if there is one."""
    temp = temp_path(path)
    write_temp(temp, [content])
    publish(temp, path)


def replace_durably(path: LogPath, content: bytes) -> None:
    """Replace the file's content, so that a crash leaves the old or the new one."""
    if isinstance(path, Path):
        local.replace_durably(path, content)
    else:
        path.write_bytes(content)


def compare_and_swap(path: LogPath, content: bytes, before: FileStamp | None) -> None:
    """Replace the file's content if it still has the stamp `before`.

    In a store it replaces only what had this stamp (None: nothing), and raises FileExistsError if another writer was
    quicker. On a disk it always replaces: the lock of the file's writer keeps the others out.
    """
    if isinstance(path, Path):
        local.replace_durably(path, content)
    else:
        objects.put_if_unchanged(path, content, before if isinstance(before, ObjectMeta) else None)


@contextmanager
def refuse_second_writer(path: LogPath) -> Iterator[None]:
    """Turn FileExistsError into LogFenced.

    A writer that finds that another was quicker is no longer the one to write such a file.
    """
    try:
        yield
    except FileExistsError as error:
        raise LogFenced(
            "another process has written this file since we read it",
            path=path,
            hint="Stop one of the two processes that write this log, then start again.",
        ) from error


def make_durable(path: LogPath) -> None:
    """Make a file durable under its name, even if earlier tries failed.

    In a store every visible object is durable.
    """
    if isinstance(path, Path):
        local.make_durable(path)


def replace(path: LogPath, content: bytes) -> None:
    """Replace the file's content without durability, for notes that no correctness depends on."""
    if isinstance(path, Path):
        local.replace(path, content)
    else:
        path.write_bytes(content)


# Files too large for memory: written to a local file first.


def scratch_folder(folder: LogPath) -> Path:
    """Return the folder where files for `folder` are written first.

    It is the folder itself on a disk, and a local one for a store.
    """
    if isinstance(folder, Path):
        return folder
    name = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    scratch = Path(tempfile.gettempdir()) / f"tailrace-{os.getuid()}-objects" / name
    scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    return scratch


def put_file(file: Path, path: LogPath) -> None:
    """Move a file from the scratch folder to a name that only the caller uses.

    On a disk the target's folder is not synced.
    """
    if isinstance(path, ObjectPath):
        try:
            objects.put_file(path, file)
        finally:
            remove(file)
    else:
        sync_file(file)
        os.replace(file, path)


# Looking.


def relative_name(folder: LogPath, path: LogPath) -> str:
    """Return the path of a file within a folder that holds it, with `/`."""
    return str(path)[len(str(folder)) + 1 :] if is_remote(path) else Path(str(path)).relative_to(str(folder)).as_posix()


def read_stamp(path: LogPath) -> FileStamp | None:
    """Return a stamp that changes when the file is replaced; None without a file."""
    try:
        if isinstance(path, ObjectPath):
            return path.meta()
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return (status.st_mtime_ns, status.st_ino)


def size_of(path: LogPath) -> int:
    return path.meta().size if isinstance(path, ObjectPath) else os.stat(path).st_size


def modified_at(path: LogPath) -> float:
    """Return the time of the last write, in seconds since 1970.

    In a store that is the store's own clock.
    """
    return path.meta().modified_ns / 1e9 if isinstance(path, ObjectPath) else os.stat(path).st_mtime


def list_names(folder: LogPath) -> list[str]:
    """Return the names in a folder; raise FileNotFoundError if there is no folder.

    In a store a missing folder looks like an empty one.
    """
    return [path.name for path in folder.iterdir()] if isinstance(folder, ObjectPath) else os.listdir(folder)


def log_file_named(log: LogPath, path: str) -> LogPath:
    """Return the file of the log that an error names."""
    return log / path[len(str(log)) + 1 :] if is_remote(log) else Path(path)


def matching_files(folder: LogPath, pattern: str) -> list[LogPath]:
    """Return the paths in a folder that match a pattern, in the order of names."""
    paths: list[LogPath] = list(folder.glob(pattern))
    return sorted(paths, key=str)


def file_sizes(folder: LogPath, after: str | None = None) -> dict[LogPath, int]:
    """Return the size of every file below the folder.

    With `after`, entries directly in the folder count only if their names are greater.
    """
    if isinstance(folder, ObjectPath):
        return {path: meta.size for path, meta in folder.walk(after)}
    sizes: dict[LogPath, int] = {}
    for below, folders, inside in os.walk(folder):
        if after is not None and below == str(folder):
            folders[:] = [name for name in folders if name > after]
            inside = [name for name in inside if name > after]
        for name in inside:
            with suppress(FileNotFoundError):  # a temporary file, or sealed or trimmed meanwhile
                sizes[Path(below, name)] = os.lstat(os.path.join(below, name)).st_size
    return sizes


# Reading.


def read_start(path: LogPath, size: int) -> tuple[bytes, int]:
    """Return at most the first `size` bytes of a file, and the file's size."""
    if isinstance(path, ObjectPath):
        return objects.read_start(path, size)
    with path.open("rb", buffering=0) as file:
        return file.read(size), os.fstat(file.fileno()).st_size


def open_for_reading(path: LogPath) -> BinaryIO:
    """Open a file to read it from its beginning."""
    return io.BytesIO(path.read_bytes()) if isinstance(path, ObjectPath) else path.open("rb")


def read_range(path: LogPath, begin: int, size: int) -> bytes:
    """Return `size` bytes from `begin`; fewer at the end."""
    if isinstance(path, ObjectPath):
        return objects.read_range(path, begin, size)
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        return file.read(size)


def read_view(path: LogPath) -> memoryview:
    """Return all bytes of a file; the kernel loads them on access."""
    if isinstance(path, ObjectPath):
        return objects.view(path)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b"")


def cached_view(path: ObjectPath) -> memoryview:
    """Return all bytes of an object that never changes, from the cache if possible."""
    return objects.object_cache.view(path)


def arrow_source(path: LogPath) -> Path | pa.BufferReader:
    """Return a source for Arrow to read a file that never changes."""
    return _buffer(cached_view(path)) if isinstance(path, ObjectPath) else path


def arrow_file(path: LogPath) -> pa.NativeFile:
    """Return a source for Arrow to read any other file, as it is now."""
    import pyarrow as pa

    return _buffer(read_view(path)) if isinstance(path, ObjectPath) else pa.memory_map(str(path))


def _buffer(view: memoryview) -> pa.BufferReader:
    import pyarrow as pa

    return pa.BufferReader(pa.py_buffer(view))


# Removing.


def delete_all(paths: Collection[LogPath]) -> None:
    """Remove files and folders in any order; missing ones are no error."""
    remote = [path for path in paths if isinstance(path, ObjectPath)]
    for path in paths:
        if isinstance(path, Path):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    if remote:
        objects.delete(remote)


def deletable_parts(folder: LogPath) -> list[LogPath]:
    """Return what to delete so that a folder disappears.

    In a store there are no folders, only their objects.
    """
    return [path for path, _ in folder.walk()] if isinstance(folder, ObjectPath) else [folder]


def append(path: LogPath, content: bytes) -> None:
    """Append to a file that one process alone writes; a store puts the whole again."""
    if isinstance(path, ObjectPath):
        before = b""
        with suppress(FileNotFoundError):
            before = path.read_bytes()
        path.write_bytes(before + content)
    else:
        with path.open("ab") as stream:
            stream.write(content)


def delete_folder(folder: LogPath) -> None:
    """Remove a folder and everything in it; what remains is swept later."""
    with suppress(OSError):
        if isinstance(folder, ObjectPath):
            objects.delete([path for path, _ in folder.walk()])
        else:
            shutil.rmtree(folder, ignore_errors=True)
