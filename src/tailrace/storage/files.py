"""The one layer that all files of the log go through, on a disk (`pathlib.Path`) or in an object store (`ObjectPath`).

Files appear whole or not at all. What that takes on a disk `tailrace.storage.local` knows: a file is written aside,
made durable, then linked to its name, which is a compare-and-swap. In an object store what is written aside waits in
memory, and publishing it is a put that fails if the name is taken; there are no folders, nothing needs syncing, and
`objects.py` says what an answer that was lost means. An error of the file system or the store becomes an error of the
log, which says what to do.

Both kinds have of `pathlib.Path` what only reads and names: `/`, `name`, `read_bytes`, `exists`, `iterdir`, `glob`,
`unlink`. Everything that must be durable, or that must happen once, is a function here: this is the one place where
the two kinds differ."""

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
"""What tells one content of a name from the next."""

_HINTS = {
    errno.ELOOP: "A link stands where a file of ours should be: remove it.",
    errno.ENOSPC: "Free space on that disk; capture goes on where it stopped, nothing is lost.",
    errno.EDQUOT: "Raise the quota or free space; capture goes on where it stopped, nothing is lost.",
    errno.EROFS: "The file system is read-only: mount it writable, or set `log:` to another folder.",
    errno.EACCES: "Give this user the right to write there, or set `log:` to another folder.",
    errno.EPERM: "Give this user the right to write there, or set `log:` to another folder.",
    errno.EIO: "The disk failed: look at the kernel's log. What was not written is captured again.",
    errno.EFBIG: "Raise the limit of a file's size (`ulimit -f`), or set `log:` to another file system.",
    errno.EMFILE: "Raise the limit of open files (`ulimit -n`) and start again.",
    errno.ENOENT: "Start `tailrace run` or `tailrace capture` first; they make the log.",
    errno.ENOTDIR: "A file stands where the log's folder should be: set `log:` to another folder.",
}
STORE_ERRORS = (StoreUnreachable, StoreRefused)
"""Says nothing of the file that was asked for: whoever takes one that cannot be read for none must not take this so."""


class _ObjectDurabilityUnknown(DurabilityUnknown):
    """It may have been done, or may yet be: a request that is under way cannot be called back."""

    def __init__(self, error: StoreUnreachable, path: ObjectPath) -> None:
        super().__init__(error.args[0])
        self.filename = str(path)


class UnsentObject:
    """What is written aside on the way into an object store."""

    def __init__(self) -> None:
        self.content = b""


TempFile = Path | UnsentObject


def parse_log_path(
    given: Path | ObjectPath | str, *, endpoint: str | None = None, region: str | None = None
) -> LogPath:
    """A folder's path, or `s3://bucket/prefix`; whatever else the store needs comes from the environment."""
    if isinstance(given, str) and "://" in given:
        return ObjectPath.parse(given, endpoint=endpoint, region=region)
    return given if isinstance(given, ObjectPath) else require_folder(given, "the log")


def is_remote(path: LogPath) -> bool:
    """Whether every look costs a request."""
    return isinstance(path, ObjectPath)


@contextmanager
def explain_errors(path: LogPath) -> Iterator[None]:
    """Turn an error of the operating system or the store about the log into one with a remedy."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise explained_error(error, path) from error


@contextmanager
def explain_store_errors(path: LogPath) -> Iterator[None]:
    """The same of the store's errors alone."""
    try:
        yield
    except STORE_ERRORS as error:
        raise explained_error(error, path) from error


def explained_error(error: OSError, path: LogPath) -> LogUnusable:
    """The error with its remedy."""
    named = error.filename or path
    if isinstance(error, _ObjectDurabilityUnknown):
        return LogUnusable(
            f"the log cannot be used: what was written may not be durable: {local.system_message(error)}",
            path=named,
            hint="Look at the network and at the store, then start again: nothing is lost.",
        )
    if isinstance(error, StoreUnreachable):
        return LogUnreachable(
            f"the log cannot be reached: {local.system_message(error)}",
            path=named,
            hint="Look at the network, the store and its address (`log.endpoint`, `logEndpoint`, or AWS_ENDPOINT_URL).",
        )
    if isinstance(error, StoreRefused):
        return LogUnusable(
            f"the log cannot be used: {local.system_message(error)}",
            path=named,
            hint="Look at the bucket's name and at the credentials in the environment (AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or the machine's role), and at what they may do there.",
        )
    return local.explained_error(error, path, "the log", LogUnusable, LogFull, _HINTS)


@contextmanager
def explain_errors_but_missing(path: LogPath) -> Iterator[None]:
    """The same, but a file that is not there stays FileNotFoundError: the caller knows where else to look."""
    try:
        with explain_errors(path):
            yield
    except LogUnusable as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise error.__cause__ from None
        raise


def make_folder(path: LogPath) -> None:
    """The folder and those above it, durable, also where somebody else has just made one."""
    if isinstance(path, Path):
        with explain_errors(path):
            local.make_folder(path)


def file_exists(path: LogPath) -> bool:
    """Whether there is such a file. Not being allowed to look is an error, not a no."""
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
    """A name beside the file that no other writer uses, on this host or another; in a store there is none."""
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
    """A file under a name that nobody else uses, its bytes durable; on a disk its name is not yet."""
    if isinstance(path, Path):
        local.write_temp(path, parts)
    else:
        path.write_bytes(b"".join(parts))


def remove(path: LogPath | UnsentObject) -> None:
    """Take back a file that nobody was told of; one that stays is swept later."""
    if isinstance(path, Path):
        local.remove(path)
    elif isinstance(path, ObjectPath):
        with suppress(OSError):
            path.unlink(missing_ok=True)


def publish(aside: TempFile, path: LogPath) -> None:
    """Give the file its name, unless that name is taken (FileExistsError), and make that durable (or Doubtful)."""
    if isinstance(aside, Path) and isinstance(path, Path):
        local.publish(aside, path)
        return
    assert isinstance(aside, UnsentObject), "made by aside_of"
    assert isinstance(path, ObjectPath), "where aside_of was asked"
    try:
        objects.put_new(path, aside.content)
    except StoreUnreachable as error:
        raise _ObjectDurabilityUnknown(error, path) from error


def create(path: LogPath, content: bytes) -> None:
    """A new durable file with this content; FileExistsError if there is one."""
    aside = temp_path(path)
    write_temp(aside, [content])
    publish(aside, path)


def replace_durably(path: LogPath, content: bytes) -> None:
    """Put this content under the name, whatever stood there, so that a crash leaves the one or the other."""
    if isinstance(path, Path):
        local.replace_durably(path, content)
    else:
        path.write_bytes(content)


def compare_and_swap(path: LogPath, content: bytes, before: FileStamp | None) -> None:
    """The same, but in a store only in place of what was stamped so, or of nothing: FileExistsError if another was
    quicker. On a disk it is the lock of whoever writes such a file that keeps the others out."""
    if isinstance(path, Path):
        local.replace_durably(path, content)
    else:
        objects.put_if_unchanged(path, content, before if isinstance(before, ObjectMeta) else None)


@contextmanager
def refuse_second_writer(path: LogPath) -> Iterator[None]:
    """Whoever finds that another was quicker is no longer the one to write such a file."""
    try:
        yield
    except FileExistsError as error:
        raise LogFenced(
            "another process has written this file since we read it",
            path=path,
            hint="Stop one of the two processes that keep this log, then start again.",
        ) from error


def make_durable(path: LogPath) -> None:
    """Make a file durable under its name, whatever became of earlier tries. What can be seen in a store is."""
    if isinstance(path, Path):
        local.make_durable(path)


def replace(path: LogPath, content: bytes) -> None:
    """Put this content under the name, whatever stood there. For notes that no correctness hangs on."""
    if isinstance(path, Path):
        local.replace(path, content)
    else:
        path.write_bytes(content)


# Files that are too large to be held: written to a local one first.


def scratch_folder(folder: LogPath) -> Path:
    """Where the files are written that will come into a folder: there, or beside, if it is in a store."""
    if isinstance(folder, Path):
        return folder
    name = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    found = Path(tempfile.gettempdir()) / f"tailrace-{os.getuid()}-objects" / name
    found.mkdir(mode=0o700, parents=True, exist_ok=True)
    return found


def put_file(aside: Path, path: LogPath) -> None:
    """Give a file from the scratch folder its name, which nobody else uses. On a disk its folder is not synced."""
    if isinstance(path, ObjectPath):
        try:
            objects.put_file(path, aside)
        finally:
            remove(aside)
    else:
        sync_file(aside)
        os.replace(aside, path)


# Looking.


def relative_name(folder: LogPath, path: LogPath) -> str:
    """The path of a file within a folder that holds it, with `/`."""
    return str(path)[len(str(folder)) + 1 :] if is_remote(path) else Path(str(path)).relative_to(str(folder)).as_posix()


def read_stamp(path: LogPath) -> FileStamp | None:
    """Another one when the file has been replaced; None if there is none."""
    try:
        if isinstance(path, ObjectPath):
            return path.meta()
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return (found.st_mtime_ns, found.st_ino)


def size_of(path: LogPath) -> int:
    return path.meta().size if isinstance(path, ObjectPath) else os.stat(path).st_size


def modified_at(path: LogPath) -> float:
    """When it was written, in seconds since 1970; in a store by the store's own clock."""
    return path.meta().modified_ns / 1e9 if isinstance(path, ObjectPath) else os.stat(path).st_mtime


def list_names(folder: LogPath) -> list[str]:
    """What is in a folder; FileNotFoundError if there is none, but in a store nothing tells that from an empty one."""
    return [path.name for path in folder.iterdir()] if isinstance(folder, ObjectPath) else os.listdir(folder)


def log_file_named(log: LogPath, path: str) -> LogPath:
    """The file of the log that an error names."""
    return log / path[len(str(log)) + 1 :] if is_remote(log) else Path(path)


def matching_files(folder: LogPath, pattern: str) -> list[LogPath]:
    """What a pattern finds in a folder, in the order of names."""
    found: list[LogPath] = list(folder.glob(pattern))
    return sorted(found, key=str)


def file_sizes(folder: LogPath, after: str | None = None) -> dict[LogPath, int]:
    """Every file below, and its bytes; of those directly in it only the names after one, if that is given."""
    if isinstance(folder, ObjectPath):
        return {path: meta.size for path, meta in folder.walk(after)}
    found: dict[LogPath, int] = {}
    for below, folders, inside in os.walk(folder):
        if after is not None and below == str(folder):
            folders[:] = [name for name in folders if name > after]
            inside = [name for name in inside if name > after]
        for name in inside:
            with suppress(FileNotFoundError):  # written aside, sealed or trimmed meanwhile
                found[Path(below, name)] = os.lstat(os.path.join(below, name)).st_size
    return found


# Reading.


def read_start(path: LogPath, size: int) -> tuple[bytes, int]:
    """The first bytes of a file, at most so many, and how many it has."""
    if isinstance(path, ObjectPath):
        return objects.read_start(path, size)
    with path.open("rb", buffering=0) as file:
        return file.read(size), os.fstat(file.fileno()).st_size


def open_for_reading(path: LogPath) -> BinaryIO:
    """A file to be read from its beginning on."""
    return io.BytesIO(path.read_bytes()) if isinstance(path, ObjectPath) else path.open("rb")


def read_range(path: LogPath, begin: int, size: int) -> bytes:
    """So many bytes from a place on; fewer at the end."""
    if isinstance(path, ObjectPath):
        return objects.read_range(path, begin, size)
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        return file.read(size)


def read_view(path: LogPath) -> memoryview:
    """All bytes of a file, which the kernel brings in as they are looked at."""
    if isinstance(path, ObjectPath):
        return objects.view(path)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b"")


def cached_view(path: ObjectPath) -> memoryview:
    """The same of an object that never changes; it is kept at hand, and not fetched again."""
    return objects.object_cache.view(path)


def arrow_source(path: LogPath) -> Path | pa.BufferReader:
    """What Arrow reads a file from that never changes."""
    return _buffer(cached_view(path)) if isinstance(path, ObjectPath) else path


def arrow_file(path: LogPath) -> pa.NativeFile:
    """What Arrow reads any other file from, as it is now."""
    import pyarrow as pa

    return _buffer(read_view(path)) if isinstance(path, ObjectPath) else pa.memory_map(str(path))


def _buffer(found: memoryview) -> pa.BufferReader:
    import pyarrow as pa

    return pa.BufferReader(pa.py_buffer(found))


# Removing.


def delete_all(paths: Collection[LogPath]) -> None:
    """Remove files and folders, in any order; those that are gone already are none."""
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
    """What must go for a folder to go: in a store there is none, only what is in it."""
    return [path for path, _ in folder.walk()] if isinstance(folder, ObjectPath) else [folder]


def append(path: LogPath, content: bytes) -> None:
    """Put this behind what a file has, which one process alone writes; in a store it is put there as a whole."""
    if isinstance(path, ObjectPath):
        before = b""
        with suppress(FileNotFoundError):
            before = path.read_bytes()
        path.write_bytes(before + content)
    else:
        with path.open("ab") as stream:
            stream.write(content)


def delete_folder(folder: LogPath) -> None:
    """Remove a folder and all that is in it; whatever stays is swept later."""
    with suppress(OSError):
        if isinstance(folder, ObjectPath):
            objects.delete([path for path, _ in folder.walk()])
        else:
            shutil.rmtree(folder, ignore_errors=True)
