"""Small JSON files that say when they are not what was written: each carries the CRC-32 of the rest of itself.

The checksum is taken over the object without `crc`, keys sorted, no spaces, non-ASCII escaped.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class Watched(Generic[_T]):
    """A record that is read again only when its file has been replaced."""

    def __init__(self, path: Path, read: Callable[[], _T]) -> None:
        self._path = path
        self._read = read
        self._known: tuple[tuple[int, int], _T] | None = None

    def now(self) -> _T:
        """What it says now. Cheap when nothing changed."""
        try:
            found = os.stat(self._path)
            stamp = (found.st_mtime_ns, found.st_ino)
        except FileNotFoundError:
            stamp = (0, 0)
        known = self._known
        if known is None or known[0] != stamp:
            known = self._known = (stamp, self._read())  # another thread may replace it before we return
        return known[1]


def encode(stored: dict[str, Any]) -> bytes:
    """The object as text, with its checksum."""
    return json.dumps({**stored, "crc": _checksum(stored)}, indent=1, ensure_ascii=False).encode()


def decode(text: bytes, format: int) -> dict[str, Any]:
    """The object, checked; ValueError, KeyError or TypeError if it is not what was written."""
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
