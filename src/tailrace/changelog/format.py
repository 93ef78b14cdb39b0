"""The bytes of a commit: one file, a checked header, then the Arrow batches of every table it touches.

```text
0   8 bytes   b"TAILRACE"
8   4 bytes   length of the header, little-endian
12  4 bytes   CRC-32 of the header
16            the header, JSON in UTF-8
…             zeros up to a multiple of 64
…             bodies: Arrow record batch messages, each at a multiple of 64
```

A body is read with the Arrow schema that `schemas/<table>/<version>.json` holds, less the optional columns the
header names as left out. Nothing is delivered from a header or body whose checksum does not fit.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tailrace.errors import NEW_LOG_HINT, LogCorrupt
from tailrace.model.position import Lsn

FORMAT = 1
MAGIC = b"TAILRACE"
ALIGNMENT = 64
HEADER_GUESS = 16 << 10
"""Read at once in the hope that the whole header is in it."""
HEADER_BYTES_MAX = 64 << 20
_PREFIX = struct.Struct("<8sII")


@dataclass(frozen=True, kw_only=True)
class Body:
    """One table's rows in a commit: which shape they have, and where they lie."""

    table: int
    schema: int
    rows: int
    first_seq: int
    last_seq: int
    moves: int
    truncates: int
    unfit: int
    without: tuple[str, ...]
    at: int
    size: int
    crc: int


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a commit holds. It names the position it starts from, which is the end of the one before."""

    log: str
    commit: int
    start: Lsn
    end: Lsn
    transactions: int
    rows: int
    next_seq: int
    """The `_seq` that the first row after this commit will have; the first row of all has 1."""
    written_at: int
    committed_at: int | None
    bodies: tuple[Body, ...]
    bodies_at: int = 0
    """Where the bodies begin in the file; not stored."""


def align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def encode_header(header: Header) -> bytes:
    """Prefix, header and padding: everything before the first body."""
    fields = asdict(header)
    del fields["bodies_at"]
    fields |= {"format": FORMAT, "start": str(header.start), "end": str(header.end), "big": []}
    text = json.dumps(fields, separators=(",", ":")).encode()
    packed = _PREFIX.pack(MAGIC, len(text), zlib.crc32(text)) + text
    return packed.ljust(align(len(packed)), b"\0")


def read_header(path: Path) -> Header:
    """The header of a commit file, checked."""
    with path.open("rb", buffering=0) as file:
        start = file.read(HEADER_GUESS)
        if len(start) < _PREFIX.size:
            raise corrupt(path, "it is too short")
        magic, size, crc = _PREFIX.unpack_from(start)
        if magic != MAGIC or size > HEADER_BYTES_MAX:
            raise corrupt(path, "it does not begin like a commit")
        text = start[_PREFIX.size : _PREFIX.size + size]
        if len(text) < size:
            text += file.read(size - len(text))
    if len(text) != size or zlib.crc32(text) != crc:
        raise corrupt(path, "its header does not match its checksum")
    return _header(path, json.loads(text), align(_PREFIX.size + size))


def _header(path: Path, fields: dict[str, Any], bodies_at: int) -> Header:
    if fields.pop("format") != FORMAT:
        raise LogCorrupt(
            "a commit has a format this version does not know",
            path=path,
            hint="Read it with the version that wrote it, or a newer one.",
        )
    del fields["big"]
    bodies = tuple(Body(**{**body, "without": tuple(body["without"])}) for body in fields.pop("bodies"))
    start, end = Lsn.parse(fields.pop("start")), Lsn.parse(fields.pop("end"))
    return Header(**fields, start=start, end=end, bodies=bodies, bodies_at=bodies_at)


def corrupt(path: Path, why: str) -> LogCorrupt:
    """The error for a file that is not what was written."""
    return LogCorrupt(
        f"a commit of the log is damaged: {why}",
        path=path,
        hint=f"Restore the file from a copy of the log. Without one: {NEW_LOG_HINT}",
    )
