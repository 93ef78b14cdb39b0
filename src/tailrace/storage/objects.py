"""Files that are objects in a store: named by a URL, written whole by one put, never renamed, linked or appended to.

What the log builds on is the store's, not ours: a put is seen whole or not at all and is durable when it is answered;
a put *if absent*, and a put *if unchanged since*, are refused to all but one; who reads after an answer sees what was
put. S3 promises all of that (docs/decisions/0014-object-stores.md).

An answer may be lost although the put was done. So a put that must happen once is tried again with the same bytes, and
a name that turns out to be taken is ours if those very bytes are under it: whoever calls makes them like no other's.

An `ObjectPath` is a plain value that any process may have; the connection is made in the process that uses it.
"""

from __future__ import annotations

import errno
import fnmatch
import mmap
import os
import re
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

from tailrace.errors import ConfigError

SCHEMES = ("s3", "memory")
"""`memory` lives and dies with the process: for tests, and for trying things out."""
SPELLINGS = {"s3a": "s3"}
"""Hadoop's name for the same, and so Spark's. A path has one spelling, so that a log is one log under both."""
STORES_HINT = (
    "A log lies in a folder, or in an object store that speaks S3: `s3://bucket/prefix`, or `s3a://`, which is the "
    "same. What was tested is moto's S3 server; other stores' own addresses are not taken."
)
_BARE_HINT = (
    "Give `s3://bucket/prefix` alone. Credentials come from the environment, or are the machine's role; the address of "
    "a server that is not Amazon's is given apart."
)
PUT_SECONDS_MAX = 120.0
"""For a put that must happen once, tried again with the same bytes, until it is not known whether it was done."""
_PAUSE_SECONDS_FIRST, _PAUSE_SECONDS_MAX = 0.2, 5.0
_ANSWER_SECONDS_MAX = 60.0
_CONNECT_SECONDS_MAX = 5.0
_TRIES_MAX, _TRYING_SECONDS_MAX = 4, 20.0
"""Of any other request, by the library."""
_IN_MEMORY_BYTES_MAX = 8 << 20
_STEP_BYTES = 8 << 20
_KEPT_BYTES_MAX = 512 << 20
"""Of sealed files that were fetched, in files without a name: they are read again and again, and never change."""
_DELETED_AT_ONCE = 1000
_OPTIONS = ("endpoint", "region")
ENDPOINT = re.compile(r"https?://[^\s/@?#]+/?")
"""Of a server, and nothing more: credentials have no place in it."""

_Options = tuple[tuple[str, str], ...]
_T = TypeVar("_T")


class StoreRefused(OSError):
    """The store said no: to our credentials, to the bucket, to what was asked. Nothing was done."""


class StoreUnreachable(OSError):
    """The store did not answer, or answered that it cannot now. Whether a put was done is not known."""


class ObjectMeta(NamedTuple):
    """What a store tells of an object."""

    size: int
    modified_ns: int
    tag: str
    """Another one after every put."""


@dataclass(frozen=True, order=True)
class ObjectPath:
    """One object, or all whose names begin with this and `/`; it has of `pathlib.Path` what the log needs."""

    bucket: str
    """With its scheme: `s3://name`."""
    key: str
    options: _Options = field(default=(), compare=False, repr=False)

    @classmethod
    def parse(cls, url: str, **options: str | None) -> ObjectPath:
        """From `s3://bucket/prefix`. Credentials, and whatever is not given here, come from the environment."""
        written, rest = url.partition(":/")[0], url.partition("://")[2]
        scheme = SPELLINGS.get(written, written)
        bucket, _, key = rest.partition("/")
        segments = [segment for segment in key.split("/") if segment]
        if scheme not in SCHEMES:
            raise ConfigError(f"a log cannot lie at `{_shown(written)}://`", hint=STORES_HINT)
        if re.search(r"[@:]", bucket):
            # As Hadoop once took credentials. The address is not repeated here: it would be read by others.
            raise ConfigError("the address of a log has more in it than a bucket and a prefix", hint=_BARE_HINT)
        if not re.fullmatch(r"[A-Za-z0-9._-]+", bucket) or any(segment in (".", "..") for segment in segments):
            raise ConfigError("this is not the address of a place in an object store", url=url, hint=STORES_HINT)
        given = tuple(sorted((name, value) for name, value in options.items() if value is not None))
        assert all(name in _OPTIONS for name, _ in given), "an option that nobody takes"
        return cls(f"{scheme}://{bucket}", "/".join(segments), given)

    # Names.

    def __str__(self) -> str:
        return f"{self.bucket}/{self.key}" if self.key else self.bucket

    def __truediv__(self, below: str | Path) -> ObjectPath:
        return replace(self, key=f"{self.key}/{below}" if self.key else str(below))

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def stem(self) -> str:
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> ObjectPath:
        return replace(self, key=self.key.rpartition("/")[0])

    def relative_to(self, other: ObjectPath) -> Path:
        return Path(self.key).relative_to(other.key)

    # What is there.

    def read_bytes(self) -> bytes:
        return _asked(self, lambda library, store: bytes(library.get(store, self.key).bytes()))

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def meta(self) -> ObjectMeta:
        """FileNotFoundError if there is no such object."""
        return _meta(_asked(self, lambda library, store: library.head(store, self.key)))

    def exists(self) -> bool:
        try:
            self.meta()
        except FileNotFoundError:
            return self.is_dir()
        return True

    def is_dir(self) -> bool:
        """Whether there is anything below."""

        def ask(library: Any, store: Any) -> list[Any]:
            return next(iter(library.list(store, self.key, chunk_size=1)), [])

        return any(item["path"] != self.key for item in _asked(self, ask))

    def is_symlink(self) -> bool:
        return False

    def iterdir(self) -> Iterator[ObjectPath]:
        found = _asked(self, lambda library, store: library.list_with_delimiter(store, self.key))
        yield from (replace(self, key=item["path"]) for item in found["objects"] if item["path"] != self.key)
        yield from (replace(self, key=prefix.rstrip("/")) for prefix in found["common_prefixes"])

    def walk(self, after: str | None = None) -> Iterator[tuple[ObjectPath, ObjectMeta]]:
        """Every object below in the order of names; those after one below, if it is given."""
        offset = None if after is None else (self / after).key
        chunks = _asked(self, lambda library, store: list(library.list(store, self.key, offset=offset)))
        for item in (item for chunk in chunks for item in chunk):
            yield replace(self, key=item["path"]), _meta(item)

    def glob(self, pattern: str) -> Iterator[ObjectPath]:
        """What `*` stands for is within one name, as with `pathlib.Path`; folders only where it ends in `/`."""
        wanted = pattern.rstrip("/").split("/")
        folders = pattern.endswith("/")
        within = self
        while len(wanted) > 1 and not any(sign in wanted[0] for sign in "*?["):
            within, wanted = within / wanted[0], wanted[1:]
        seen: dict[ObjectPath, None] = {}
        for path, _ in within.walk():
            names = path.relative_to(within).parts
            long_enough = len(names) > len(wanted) if folders else len(names) == len(wanted)
            if long_enough and all(map(fnmatch.fnmatchcase, names, wanted)):
                seen[within / "/".join(names[: len(wanted)])] = None
        yield from seen

    # What changes it.

    def write_bytes(self, content: bytes | bytearray) -> None:
        """Whatever was there. For what no correctness hangs on, or what one process alone writes."""
        _asked(self, lambda library, store: library.put(store, self.key, content, use_multipart=False), doubtful=True)
        object_cache.forget(self)

    def write_text(self, text: str) -> None:
        self.write_bytes(text.encode())

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing: a folder is there when something is in it."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Deleting what is not there is no error here; `missing_ok` is for those who ask `pathlib.Path` too."""
        delete([self])


def put_new(path: ObjectPath, content: bytes) -> None:
    """An object where there is none; FileExistsError if there is one with other bytes.

    `Unreachable` after so long: then it may be there, or come to be there.
    """
    _put_once(path, content, "create")


def put_if_unchanged(path: ObjectPath, content: bytes, before: ObjectMeta | None) -> None:
    """In place of exactly what was there before (None: of nothing); FileExistsError if that is no longer there."""
    _put_once(path, content, "create" if before is None else {"e_tag": before.tag})


def _put_once(path: ObjectPath, content: bytes, mode: str | dict[str, str]) -> None:
    until, pause = time.monotonic() + PUT_SECONDS_MAX, _PAUSE_SECONDS_FIRST
    while True:
        try:
            _asked(path, lambda library, store: _put(library, store, path.key, content, mode), doubtful=True)
            return
        except FileExistsError:
            if _holds(path, content):
                return  # it was ours; the answer was lost
            raise
        except StoreUnreachable:
            if time.monotonic() + pause >= until:
                raise
        time.sleep(pause)
        pause = min(pause * 2, _PAUSE_SECONDS_MAX)


def _put(library: Any, store: Any, key: str, content: bytes, mode: str | dict[str, str]) -> None:
    taken = (library.exceptions.AlreadyExistsError, library.exceptions.PreconditionError)
    try:
        # In one request: what is put in parts is not refused until its end, and stays in parts if we die.
        library.put(store, key, content, mode=mode, use_multipart=False)
    except taken as error:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error


def _holds(path: ObjectPath, content: bytes) -> bool:
    try:
        return path.read_bytes() == content
    except FileNotFoundError:
        return False


def put_file(path: ObjectPath, file: Path) -> None:
    """A local file's bytes under a name that nobody else uses."""
    _asked(path, lambda library, store: library.put(store, path.key, file), doubtful=True)


def delete(paths: Sequence[ObjectPath]) -> None:
    """Delete objects of one bucket, in any order; those that are not there are none."""
    for begin in range(0, len(paths), _DELETED_AT_ONCE):
        _delete(paths[begin : begin + _DELETED_AT_ONCE])


def _delete(paths: Sequence[ObjectPath]) -> None:
    with suppress(FileNotFoundError):
        _asked(paths[0], lambda library, store: library.delete(store, [path.key for path in paths]))


# Reading much.


def read_start(path: ObjectPath, size: int) -> tuple[bytes, int]:
    """The first bytes of an object, at most so many, and how many it has."""

    def ask(library: Any, store: Any) -> tuple[bytes, int]:
        try:
            found = library.get(store, path.key, options={"range": (0, size)})
        except library.exceptions.BaseError:  # of an empty object there is no range
            found = library.get(store, path.key)
        return bytes(found.bytes()), found.meta["size"]

    return _asked(path, ask)


def read_range(path: ObjectPath, begin: int, size: int) -> bytes:
    """So many bytes from a place on; fewer at the end."""
    return _asked(path, lambda library, store: bytes(library.get_range(store, path.key, start=begin, length=size)))


def view(path: ObjectPath) -> memoryview:
    """All bytes of an object; many of them lie in a file without a name, so that memory is not needed for them."""

    def ask(library: Any, store: Any) -> memoryview:
        found = library.get(store, path.key)
        if found.meta["size"] <= _IN_MEMORY_BYTES_MAX:
            return memoryview(bytes(found.bytes()))
        with tempfile.TemporaryFile(prefix="tailrace-") as file:
            for chunk in found.stream(min_chunk_size=_STEP_BYTES):
                file.write(chunk)
            file.flush()
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    return _asked(path, ask)


class _ObjectCache:
    """The objects fetched last, as many as fit. Two servers may have objects of one name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[tuple[ObjectPath, _Options], memoryview] = OrderedDict()

    def view(self, path: ObjectPath) -> memoryview:
        which = path, path.options
        with self._lock:
            if which in self._found:
                self._found.move_to_end(which)
                return self._found[which]
        found = view(path)
        with self._lock:
            self._found[which] = found
            while len(self._found) > 1 and sum(map(len, self._found.values())) > _KEPT_BYTES_MAX:
                self._found.popitem(last=False)  # whoever still reads it keeps it alive
        return found

    def forget(self, path: ObjectPath) -> None:
        with self._lock:
            self._found.pop((path, path.options), None)


object_cache = _ObjectCache()


# Asking the store.

_stores: dict[tuple[int, str, _Options], Any] = {}
_memories: dict[str, Any] = {}


def _asked(path: ObjectPath, ask: Callable[[Any, Any], _T], *, doubtful: bool = False) -> _T:
    """What the store answers; its errors become ours. With `doubtful`, what failed may have been done."""
    library = _library()
    try:
        return ask(library, _store(library, path))
    except FileExistsError as error:
        raise _named(FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)), path) from error
    except FileNotFoundError as error:
        if doubtful:  # of a put it says that there is no such bucket
            raise _named(StoreRefused("the store has no such bucket"), path) from error
        raise _named(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)), path) from error
    except library.exceptions.BaseError as error:
        raise _named(_translated(library, error), path) from error


def _library() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise ConfigError(
            "a log in an object store needs the package `obstore`",
            hint="Install it: `pip install 'tailrace[objects]'`.",
        ) from error
    return obstore


def _store(library: Any, path: ObjectPath) -> Any:
    # By process: a connection does not survive a fork, and Spark forks its workers.
    place = (os.getpid(), path.bucket, path.options)
    if place not in _stores:
        _stores[place] = _open(library, path)
    return _stores[place]


def _open(library: Any, path: ObjectPath) -> Any:
    from datetime import timedelta

    scheme, _, bucket = path.bucket.partition("://")
    if scheme == "memory":
        return _memories.setdefault(bucket, library.store.MemoryStore())
    options = dict(path.options)
    asked = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoint = options.get("endpoint") or next(filter(None, map(os.environ.get, asked)), "")
    client = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=_CONNECT_SECONDS_MAX),
        "timeout": timedelta(seconds=_ANSWER_SECONDS_MAX),
    }
    retry = {"max_retries": _TRIES_MAX, "retry_timeout": timedelta(seconds=_TRYING_SECONDS_MAX)}
    given = {"region": options.get("region")} | ({"endpoint": endpoint} if endpoint else {})
    config = {name: value for name, value in given.items() if value}
    return library.store.S3Store(bucket, config=config, client_options=client, retry_config=retry)


def _translated(library: Any, error: Exception) -> OSError:
    """Without the library's own words: they are long, and may hold what the store echoed of our credentials."""
    text = str(error)
    named = library.exceptions
    code = re.search(r"<Code>(\w{1,64})</Code>", text)
    said = f" ({code[1]})" if code else ""
    if isinstance(error, (named.PermissionDeniedError, named.UnauthenticatedError)):
        return StoreRefused(f"the store refused our credentials, or does not let us do this{said}")
    status = re.search(r"\b(?:status code|status)\W{1,3}([45]\d\d)\b", text)
    if status and status[1].startswith("4") and status[1] not in ("408", "409", "429"):
        return StoreRefused(f"the store refused what we asked{said or f' (status {status[1]})'}")
    if isinstance(error, (named.NotSupportedError, named.UnknownConfigurationKeyError, named.InvalidPathError)):
        return StoreRefused("the store does not know what we asked for")
    return StoreUnreachable(f"the store does not answer{said}")


def _shown(scheme: str) -> str:
    """What stands before `://`, if it is no more than that."""
    return scheme if re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]{0,15}", scheme) else "…"


def _named(error: OSError, path: ObjectPath) -> OSError:
    error.filename = str(path)
    return error


def _meta(item: Any) -> ObjectMeta:
    modified_ns = int(item["last_modified"].timestamp() * 1e6) * 1000
    return ObjectMeta(item["size"], modified_ns, item["e_tag"] or str(modified_ns))
