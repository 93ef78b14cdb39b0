"""Small JSON files that say when they are not what was written: each carries the SHA-256 of the rest of itself.

The hash is taken over the object without `sha256`, keys sorted, no spaces, non-ASCII escaped. A file is read only if
its bytes are those that the object would be written as: not even a space may differ.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

_OTHER_FORMAT_HINT = (
    "Another version of Tailrace wrote it: go on with that one, or a newer one. If none did, it is damaged. Restore "
    "the file from a copy."
)


class UnknownFormat(ValueError):
    """What another version wrote: it is not damaged, so nobody is told to put something else in its place."""

    def __init__(self, format: object, known: int) -> None:
        super().__init__(f"it has format {format}, and this version knows format {known}")


def unreadable_hint(error: BaseException, otherwise: str) -> str:
    """What to do about something that cannot be read."""
    return _OTHER_FORMAT_HINT if isinstance(error, UnknownFormat) else otherwise


def encode(stored: dict[str, Any]) -> bytes:
    """The object as text, with its hash."""
    return (json.dumps({**stored, "sha256": _hash(stored)}, indent=1, ensure_ascii=False) + "\n").encode()


def decode(text: bytes, format: int) -> dict[str, Any]:
    """The object, checked; ValueError, and what goes with it, if it is not what was written."""
    try:
        return _decode(text, format)
    except RecursionError as error:
        raise ValueError("it is not a record") from error


def _decode(text: bytes, format: int) -> dict[str, Any]:
    stored = json.loads(text)
    if not isinstance(stored, dict) or type(stored.get("format")) is not int:
        raise ValueError("it is not a record")
    if stored["format"] != format:
        raise UnknownFormat(stored["format"], format)
    written = stored.pop("sha256", None)
    if written != _hash(stored) or encode(stored) != text:
        raise ValueError("it does not match its SHA-256")
    return stored


def _hash(stored: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(stored, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
