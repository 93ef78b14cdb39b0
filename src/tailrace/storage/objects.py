"""Read and write objects in a store.

An object is named by a URL and written whole by one put. It is never renamed, linked or appended to.

The log builds on what the store promises. A put is visible whole or not at all, and is durable once it is answered. A
put *if absent*, and a put *if unchanged since*, succeed for one writer and are refused to all others. A read after an
answer sees what was put. S3 promises all of that (docs/decisions/0014-object-stores.md).

An answer may be lost although the put was done. So a put that must happen once is tried again with the same bytes. If
the name is then taken, it is ours when those very bytes are under it. For that the caller must make bytes that no other
writer makes.

An `ObjectPath` is a plain value that any process may have. The connection is made in the process that uses it.
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
"""URL schemes of a log. `memory` ends with its process: for tests and experiments."""
SPELLINGS = {"s3a": "s3"}
"""Other spellings of a scheme: Hadoop, and so Spark, says `s3a`.

A path has one spelling, so that a log is one log under both.
"""
STORES_HINT = (
    "Give a folder, or an object store that speaks S3: `s3://bucket/prefix`, or `s3a://`, which is the same. "
    "Tests run against moto's S3 server; addresses of other stores' own kinds are not accepted."
)
_BARE_HINT = (
    "Give `s3://bucket/prefix` alone. Credentials come from the environment or the machine's role. Give the address "
    "of a server that is not Amazon's as its own setting (`log.endpoint`, `logEndpoint`, or AWS_ENDPOINT_URL)."
)
PUT_SECONDS_MAX = 120.0
"""Seconds for a put that must happen once, repeated with the same bytes.

After that it is unknown whether the put was done.
"""
_PAUSE_SECONDS_FIRST, _PAUSE_SECONDS_MAX = 0.2, 5.0
_ANSWER_SECONDS_MAX = 60.0
_CONNECT_SECONDS_MAX = 5.0
_TRIES_MAX, _TRYING_SECONDS_MAX = 4, 20.0
"""Limits of any other request; the library repeats it."""
_IN_MEMORY_BYTES_MAX = 8 << 20
_STEP_BYTES = 8 << 20
_KEPT_BYTES_MAX = 512 << 20
"""Bytes of fetched sealed files to keep, in files without a name.

They are read often and never change.
"""
_DELETED_AT_ONCE = 1000
_OPTIONS = ("endpoint", "region")
ENDPOINT = re.compile(r"https?://[^\s/@?#]+/?")
"""The address of a server and nothing more: it must not hold credentials."""

_Options = tuple[tuple[str, str], ...]
_T = TypeVar("_T")


class StoreRefused(OSError):
    """The store refused our credentials, the bucket or the request. Nothing was done."""


class StoreUnreachable(OSError):
    """The store did not answer, or answered that it cannot now. A put may have been done."""


class ObjectMeta(NamedTuple):
    """Size, time and tag of an object, as the store reports them."""

    size: int
    modified_ns: int
    tag: str
    """A tag that every put changes."""


@dataclass(frozen=True, order=True)
class ObjectPath:
    """One object, or all objects whose names begin with this and `/`.

    It has the methods of `pathlib.Path` that the log needs.
    """

    bucket: str
    """The bucket with its scheme: `s3://name`."""
    key: str
    options: _Options = field(default=(), compare=False, repr=False)

    @classmethod
    def parse(cls, url: str, **options: str | None) -> ObjectPath:
        """Return the path for `s3://bucket/prefix`.

        Credentials, and every option that is not passed, come from the environment.
        """
        spelling, address = url.partition(":/")[0], url.partition("://")[2]
        scheme = SPELLINGS.get(spelling, spelling)
        bucket, _, key = address.partition("/")
        segments = [segment for segment in key.split("/") if segment]
        if scheme not in SCHEMES:
            raise ConfigError(f"a log cannot be at `{_shown_scheme(spelling)}://`", hint=STORES_HINT)
        if re.search(r"[@:]", bucket):
            # Hadoop once took credentials like this. The error must not repeat the address: others would read them.
            raise ConfigError("log address has more than a bucket and a prefix", hint=_BARE_HINT)
        if not re.fullmatch(r"[A-Za-z0-9._-]+", bucket) or any(segment in (".", "..") for segment in segments):
            raise ConfigError("log address is not the address of an object store", url=url, hint=STORES_HINT)
        chosen = tuple(sorted((name, value) for name, value in options.items() if value is not None))
        assert all(name in _OPTIONS for name, _ in chosen), "unknown option"
        return cls(f"{scheme}://{bucket}", "/".join(segments), chosen)

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
        return _request(self, lambda library, store: bytes(library.get(store, self.key).bytes()))

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def meta(self) -> ObjectMeta:
        """Return the object's metadata; raise FileNotFoundError if there is no such object."""
        return _meta(_request(self, lambda library, store: library.head(store, self.key)))

    def exists(self) -> bool:
        try:
            self.meta()
        except FileNotFoundError:
            return self.is_dir()
        return True

    def is_dir(self) -> bool:
        """Return true if there is any object below."""

        def ask(library: Any, store: Any) -> list[Any]:
            return next(iter(library.list(store, self.key, chunk_size=1)), [])

        return any(item["path"] != self.key for item in _request(self, ask))

    def is_symlink(self) -> bool:
        return False

    def iterdir(self) -> Iterator[ObjectPath]:
        listed = _request(self, lambda library, store: library.list_with_delimiter(store, self.key))
        yield from (replace(self, key=item["path"]) for item in listed["objects"] if item["path"] != self.key)
        yield from (replace(self, key=prefix.rstrip("/")) for prefix in listed["common_prefixes"])

    def walk(self, after: str | None = None) -> Iterator[tuple[ObjectPath, ObjectMeta]]:
        """Yield every object below in the order of names; with `after`, those after that name."""
        offset = None if after is None else (self / after).key
        chunks = _request(self, lambda library, store: list(library.list(store, self.key, offset=offset)))
        for item in (item for chunk in chunks for item in chunk):
            yield replace(self, key=item["path"]), _meta(item)

    def glob(self, pattern: str) -> Iterator[ObjectPath]:
        """Yield the paths that match; `*` stays within one name, as with `pathlib.Path`.

        Folders match only if the pattern ends in `/`.
        """
        segments = pattern.rstrip("/").split("/")
        folders = pattern.endswith("/")
        root = self
        while len(segments) > 1 and not any(sign in segments[0] for sign in "*?["):
            root, segments = root / segments[0], segments[1:]
        seen: dict[ObjectPath, None] = {}
        for path, _ in root.walk():
            names = path.relative_to(root).parts
            long_enough = len(names) > len(segments) if folders else len(names) == len(segments)
            if long_enough and all(map(fnmatch.fnmatchcase, names, segments)):
                seen[root / "/".join(names[: len(segments)])] = None
        yield from seen

    # What changes it.

    def write_bytes(self, content: bytes | bytearray) -> None:
        """Write the object and overwrite what was there.

        Use it for what no correctness depends on, or what one process alone writes.
        """
        _request(self, lambda library, store: library.put(store, self.key, content, use_multipart=False), doubtful=True)
        object_cache.forget(self)

    def write_text(self, text: str) -> None:
        self.write_bytes(text.encode())

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: a folder exists when something is in it."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object; a missing one is no error.

        `missing_ok` exists for callers that also use `pathlib.Path`.
        """
        delete([self])


def put_new(path: ObjectPath, content: bytes) -> None:
    """Create an object; raise FileExistsError if there is one with other bytes.

    Raise StoreUnreachable after PUT_SECONDS_MAX: the object may then exist, or appear later.
    """
    _put_once(path, content, "create")


def put_if_unchanged(path: ObjectPath, content: bytes, before: ObjectMeta | None) -> None:
    """Replace exactly the object that had this metadata (None: no object).

    Raise FileExistsError if there is another one now.
    """
    _put_once(path, content, "create" if before is None else {"e_tag": before.tag})


def _put_once(path: ObjectPath, content: bytes, mode: str | dict[str, str]) -> None:
    until, pause = time.monotonic() + PUT_SECONDS_MAX, _PAUSE_SECONDS_FIRST
    while True:
        try:
            _request(path, lambda library, store: _put(library, store, path.key, content, mode), doubtful=True)
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
    """Put a local file's bytes under a name that only the caller uses."""
    _request(path, lambda library, store: library.put(store, path.key, file), doubtful=True)


def delete(paths: Sequence[ObjectPath]) -> None:
    """Delete objects of one bucket, in any order; missing ones are no error."""
    for begin in range(0, len(paths), _DELETED_AT_ONCE):
        _delete(paths[begin : begin + _DELETED_AT_ONCE])


def _delete(paths: Sequence[ObjectPath]) -> None:
    with suppress(FileNotFoundError):
        _request(paths[0], lambda library, store: library.delete(store, [path.key for path in paths]))


# Reading much.


def read_start(path: ObjectPath, size: int) -> tuple[bytes, int]:
    """Return at most the first `size` bytes of an object, and the object's size."""

    def ask(library: Any, store: Any) -> tuple[bytes, int]:
        try:
            answer = library.get(store, path.key, options={"range": (0, size)})
        except library.exceptions.BaseError:  # an empty object has no range
            answer = library.get(store, path.key)
        return bytes(answer.bytes()), answer.meta["size"]

    return _request(path, ask)


def read_range(path: ObjectPath, begin: int, size: int) -> bytes:
    """Return `size` bytes from `begin`; fewer at the end."""
    return _request(path, lambda library, store: bytes(library.get_range(store, path.key, start=begin, length=size)))


def view(path: ObjectPath) -> memoryview:
    """Return all bytes of an object.

    Large ones are in a file without a name, so that memory is not needed for them.
    """

    def ask(library: Any, store: Any) -> memoryview:
        answer = library.get(store, path.key)
        if answer.meta["size"] <= _IN_MEMORY_BYTES_MAX:
            return memoryview(bytes(answer.bytes()))
        with tempfile.TemporaryFile(prefix="tailrace-") as file:
            for chunk in answer.stream(min_chunk_size=_STEP_BYTES):
                file.write(chunk)
            file.flush()
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    return _request(path, ask)


class _ObjectCache:
    """The objects fetched last, as many as fit.

    The key includes the options, because two servers may have objects of one name.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._views: OrderedDict[tuple[ObjectPath, _Options], memoryview] = OrderedDict()

    def view(self, path: ObjectPath) -> memoryview:
        key = path, path.options
        with self._lock:
            if key in self._views:
                self._views.move_to_end(key)
                return self._views[key]
        content = view(path)
        with self._lock:
            self._views[key] = content
            while len(self._views) > 1 and sum(map(len, self._views.values())) > _KEPT_BYTES_MAX:
                self._views.popitem(last=False)  # a reader's own reference keeps it alive
        return content

    def forget(self, path: ObjectPath) -> None:
        with self._lock:
            self._views.pop((path, path.options), None)


object_cache = _ObjectCache()


# Asking the store.

_stores: dict[tuple[int, str, _Options], Any] = {}
_memories: dict[str, Any] = {}


def _request(path: ObjectPath, ask: Callable[[Any, Any], _T], *, doubtful: bool = False) -> _T:
    """Return what the store answers; its errors become ours.

    With `doubtful`, a request that failed may have been done.
    """
    library = _library()
    try:
        return ask(library, _store(library, path))
    except FileExistsError as error:
        raise _named(FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)), path) from error
    except FileNotFoundError as error:
        if doubtful:  # for a put this means that there is no such bucket
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
    key = (os.getpid(), path.bucket, path.options)
    if key not in _stores:
        _stores[key] = _open(library, path)
    return _stores[key]


def _open(library: Any, path: ObjectPath) -> Any:
    from datetime import timedelta

    scheme, _, bucket = path.bucket.partition("://")
    if scheme == "memory":
        return _memories.setdefault(bucket, library.store.MemoryStore())
    options = dict(path.options)
    variables = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoint = options.get("endpoint") or next(filter(None, map(os.environ.get, variables)), "")
    client = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=_CONNECT_SECONDS_MAX),
        "timeout": timedelta(seconds=_ANSWER_SECONDS_MAX),
    }
    retry = {"max_retries": _TRIES_MAX, "retry_timeout": timedelta(seconds=_TRYING_SECONDS_MAX)}
    settings = {"region": options.get("region")} | ({"endpoint": endpoint} if endpoint else {})
    config = {name: value for name, value in settings.items() if value}
    return library.store.S3Store(bucket, config=config, client_options=client, retry_config=retry)


def _translated(library: Any, error: Exception) -> OSError:
    """Return our error for the library's.

    It drops the library's own text: that is long, and may hold what the store echoed of our credentials.
    """
    text = str(error)
    exceptions = library.exceptions
    code = re.search(r"<Code>(\w{1,64})</Code>", text)
    code_text = f" ({code[1]})" if code else ""
    if isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)):
        return StoreRefused(f"the store refused our credentials, or denies them this request{code_text}")
    status = re.search(r"\b(?:status code|status)\W{1,3}([45]\d\d)\b", text)
    if status and status[1].startswith("4") and status[1] not in ("408", "409", "429"):
        return StoreRefused(f"the store refused the request{code_text or f' (status {status[1]})'}")
    if isinstance(
        error, (exceptions.NotSupportedError, exceptions.UnknownConfigurationKeyError, exceptions.InvalidPathError)
    ):
        return StoreRefused("the store does not support the request")
    return StoreUnreachable(f"the store does not answer{code_text}")


def _shown_scheme(scheme: str) -> str:
    """Return the scheme if it is nothing more than that, else an ellipsis."""
    return scheme if re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]{0,15}", scheme) else "…"


def _named(error: OSError, path: ObjectPath) -> OSError:
    error.filename = str(path)
    return error


def _meta(item: Any) -> ObjectMeta:
    modified_ns = int(item["last_modified"].timestamp() * 1e6) * 1000
    return ObjectMeta(item["size"], modified_ns, item["e_tag"] or str(modified_ns))
