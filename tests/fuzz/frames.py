"""How an input of several pieces is laid out in a file: each after its length, two bytes, the highest first.

Any bytes are such a file: a length that reaches beyond the end means what is left. A piece may be longer than a
length can say only where it is the last.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

LENGTH_MAX = 0xFFFD
"""Lengths above it are none: a value that is null, or was not sent."""


def frames(data: bytes) -> list[tuple[int, bytes]]:
    """Every length as it was said, and the piece that follows it."""
    found, at = [], 0
    while at + 2 <= len(data):
        (length,) = struct.unpack_from(">H", data, at)
        piece = data[at + 2 : at + 2 + length] if length <= LENGTH_MAX else b""
        found.append((length, piece))
        at += 2 + len(piece)
    return found


def pieces(data: bytes) -> list[bytes]:
    """Those that are not empty."""
    return [piece for _, piece in frames(data) if piece]


def framed(parts: Iterable[bytes]) -> bytes:
    """The parts as a file."""
    return b"".join(struct.pack(">H", len(part)) + part for part in parts)
