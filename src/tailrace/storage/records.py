"""Write and check small JSON records that carry a checksum of themselves.

There are two kinds. A record of the log carries the CRC-32 of the rest of its object: without `crc`, keys sorted, no
spaces, non-ASCII escaped. A record of the state carries the SHA-256 of the same text, without `sha256`. A state record
is also refused if its bytes differ, by a space even, from those that we would write for the object.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from tailrace.storage import files
from tailrace.storage.files import FileStamp, LogPath

_T = TypeVar("_T")


class CachedRecord(Generic[_T]):
    """A record that is read again only when its file has been replaced."""

    def __init__(self, path: LogPath, read: Callable[[], _T]) -> None:
        self._path = path
        self._read = read
        self._known: tuple[FileStamp | None, _T] | None = None
        self._looked = 0.0

    def get(self, within: float = 0.0) -> _T:
        """Return the current content, cheaply when nothing changed.

        Where a look costs a request, a content that was current `within` so many seconds ago will do.
        """
        known = self._known
        if known is not None and within and files.is_remote(self._path) and time.monotonic() < self._looked + within:
            return known[1]
        looked_at = time.monotonic()
        try:
            stamp = files.read_stamp(self._path)
        except OSError as error:
            raise files.explained_error(error, self._path) from error
        if known is None or known[0] != stamp:
            known = self._known = (stamp, self._read())  # another thread may replace it before we return
        self._looked = looked_at
        return known[1]


def encode(stored: dict[str, Any]) -> bytes:
    """Return the object as text, with its checksum."""
    return json.dumps({**stored, "crc": _checksum(stored)}, indent=1, ensure_ascii=False).encode()


def decode(text: bytes, format: int) -> dict[str, Any]:
    """Return the checked object; raise ValueError, KeyError or TypeError if it is damaged."""
    stored = json.loads(text)
    if not isinstance(stored, dict):
        raise ValueError("it is not a record")
    if stored.pop("crc") != _checksum(stored):
        raise ValueError("it does not match its checksum")
    if stored["format"] != format:
        raise ValueError("it has a format this version does not know")
    return stored


def _checksum(stored: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(stored, sort_keys=True, separators=(",", ":")).encode())


_OTHER_FORMAT_HINT = (
    "Use the version of Tailrace that wrote it, or a newer one. Restore the file from a copy if no other version wrote "
    "it: then it is damaged."
)


class UnknownFormat(ValueError):
    """The record was written by another version of Tailrace.

    It is not damaged, so no hint may advise to replace it.
    """

    def __init__(self, format: object, known: int) -> None:
        super().__init__(f"it has format {format}, and this version knows format {known}")


def unreadable_hint(error: BaseException, otherwise: str) -> str:
    """Return what to do about something that cannot be read."""
    return _OTHER_FORMAT_HINT if isinstance(error, UnknownFormat) else otherwise


def encode_state(stored: dict[str, Any]) -> bytes:
    """Return the object as text, with its hash."""
    return (json.dumps({**stored, "sha256": _hash(stored)}, indent=1, ensure_ascii=False) + "\n").encode()


def decode_state(text: bytes, format: int) -> dict[str, Any]:
    """Return the checked object; raise ValueError, KeyError or TypeError if it is damaged."""
    try:
        return _decode_state(text, format)
    except RecursionError as error:
        raise ValueError("it is not a record") from error


def _decode_state(text: bytes, format: int) -> dict[str, Any]:
    stored = json.loads(text)
    if not isinstance(stored, dict) or type(stored.get("format")) is not int:
        raise ValueError("it is not a record")
    if stored["format"] != format:
        raise UnknownFormat(stored["format"], format)
    written = stored.pop("sha256", None)
    if written != _hash(stored) or encode_state(stored) != text:
        raise ValueError("it does not match its SHA-256")
    return stored


def _hash(stored: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(stored, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
