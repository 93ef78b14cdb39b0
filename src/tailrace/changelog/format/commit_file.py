"""Read and write commits, each a file of its own.

It has a checked header, then Arrow batches of every table that the commit touches:

```text
0   8 bytes   b"TAILRACE"
8   4 bytes   length of the header, little-endian
12  4 bytes   CRC-32 of the header
16            the header, JSON in UTF-8
…             zeros up to a multiple of 64
…             bodies: Arrow record batch messages, each at a multiple of 64
```

A body is read with the Arrow schema in `schemas/<table>/<version>.json`, without the columns that the header names as
left out. Bodies of a transaction too large for memory are in files of their own, which the header names (`big`).
Nothing is delivered from a header or body whose checksum does not match.

Fields may be added to the header; a reader skips those it does not know. A change that readers must know gets another
format number. docs/reference/log-format.md has the whole format.
"""

from __future__ import annotations

import functools
import json
import operator
import struct
import zlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, overload

from tailrace.errors import NEW_LOG_HINT, LogCorrupt
from tailrace.model.position import Lsn
from tailrace.storage import files
from tailrace.storage.files import LogPath
from tailrace.storage.objects import ObjectPath

FORMAT = 1
MAGIC = b"TAILRACE"
ALIGNMENT = 64
HEADER_GUESS = 64 << 10
"""Bytes of the first read, which usually has the whole header or even commit."""
HEADER_BYTES_MAX = 64 << 20
_PREFIX = struct.Struct("<8sII")


class CommitBody(NamedTuple):
    """One table's rows in a commit: their schema version, and where their bytes are."""

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
    piece: int = 0
    """The file that holds it: 0 is the commit's own, n the n-th of `big`."""
    base: int = 0
    """Added to every stored `_seq`: rows are numbered before the log's own count is known."""


_body_values = operator.itemgetter(*CommitBody._fields)
_WITHOUT = CommitBody._fields.index("without")


@dataclass(frozen=True, kw_only=True)
class BigTransactionFile:
    """A file with rows of a transaction too large for memory."""

    file: str
    """The path below the log's folder."""
    position: Lsn
    """The `_position` of its rows, which was not known when they were written."""


@dataclass(frozen=True, kw_only=True)
class CommitHeader:
    """The content of a commit. It starts at the position where the one before ended."""

    log: str
    commit: int
    start: Lsn
    end: Lsn
    transactions: int
    rows: int
    next_seq: int
    """The `_seq` of the first row after this commit. The first row of all has 1."""
    written_at: int
    committed_at: int | None
    """The newest commit time of its transactions."""
    bodies: tuple[CommitBody, ...]
    big: tuple[BigTransactionFile, ...] = ()
    shapes: int = 0
    """Number of schema versions announced in the `schema` stream so far."""
    timeline: int = 0
    """The timeline of the source's history, where it has one; 0 is unknown."""
    gaps: int = 0
    """Number of gaps of `gaps.json` that the log has passed so far.

    It shows when a log has lost that file.
    """
    writer: str = ""
    """A token unique to the writer, by which it knows its own commit.

    It is needed where an answer may be lost, and empty on a disk.
    """
    bodies_at: int = 0
    """Offset of the bodies in the file; not stored."""


_HEADER_FIELDS = tuple(field.name for field in fields(CommitHeader) if field.name != "bodies_at")


@overload
def commit_path(log: Path, commit: int) -> Path: ...
@overload
def commit_path(log: ObjectPath, commit: int) -> ObjectPath: ...
def commit_path(log: LogPath, commit: int) -> LogPath:
    """Return the path of a commit's file."""
    return log / "hot" / f"{commit:020d}.arrow"


def align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def encode_header(header: CommitHeader) -> bytes:
    """Return prefix, header and padding: everything before the first body."""
    stored: dict[str, Any] = {name: getattr(header, name) for name in _HEADER_FIELDS}
    del stored["bodies"]
    stored |= {
        "format": FORMAT,
        "start": str(header.start),
        "end": str(header.end),
        "big": [{"file": piece.file, "position": str(piece.position)} for piece in header.big],
    }
    head = json.dumps(stored, separators=(",", ":"))
    # Formatted by hand for speed: a commit may have hundreds of them, and nothing in them needs escaping.
    bodies = ",".join(
        [
            f'{{"table":{table},"schema":{schema},"rows":{rows},"first_seq":{first_seq},"last_seq":{last_seq},'
            f'"moves":{moves},"truncates":{truncates},"unfit":{unfit},"without":{_names(without)},'
            f'"at":{at},"size":{size},"crc":{crc},"piece":{piece},"base":{base}}}'
            for (
                table,
                schema,
                rows,
                first_seq,
                last_seq,
                moves,
                truncates,
                unfit,
                without,
                at,
                size,
                crc,
                piece,
                base,
            ) in header.bodies
        ]
    )
    text = f'{head[:-1]},"bodies":[{bodies}]}}'.encode()
    packed = _PREFIX.pack(MAGIC, len(text), zlib.crc32(text)) + text
    return packed.ljust(align(len(packed)), b"\0")


def read_header(path: LogPath) -> CommitHeader:
    """Return the checked header of a commit file."""
    return read_commit(path)[0]


def read_commit(path: LogPath) -> tuple[CommitHeader, bytes]:
    """Return the checked header, and all bytes of the file if it is small.

    The bytes of a large file are empty.
    """
    start, length = files.read_start(path, HEADER_GUESS)
    if len(start) < _PREFIX.size:
        raise corrupt_commit_error(path, "it is too short")
    magic, size, crc = _PREFIX.unpack_from(start)
    if magic != MAGIC or size > HEADER_BYTES_MAX:
        raise corrupt_commit_error(path, "it does not begin like a commit")
    header = start[_PREFIX.size : _PREFIX.size + size]
    if len(header) < size:
        header += files.read_range(path, len(start), size - len(header))
    if len(header) != size or zlib.crc32(header) != crc:
        raise corrupt_commit_error(path, "its header does not match its checksum")
    return _header(path, json.loads(header), align(_PREFIX.size + size)), start if len(start) == length else b""


def _header(path: LogPath, stored: dict[str, Any], bodies_at: int) -> CommitHeader:
    if stored.get("format") != FORMAT:
        raise LogCorrupt(
            "a commit has a format this version does not know",
            path=path,
            hint="Read it with the version that wrote it, or a newer one.",
        )
    known = {name: stored[name] for name in _HEADER_FIELDS if name in stored}
    known |= {
        "start": Lsn.parse(known["start"]),
        "end": Lsn.parse(known["end"]),
        "bodies": tuple(_body(body) for body in known["bodies"]),
        "big": tuple(BigTransactionFile(file=big["file"], position=Lsn.parse(big["position"])) for big in known["big"]),
    }
    return CommitHeader(**known, bodies_at=bodies_at)


@functools.cache
def _names(names: tuple[str, ...]) -> str:
    return json.dumps(names)


def _body(stored: dict[str, Any]) -> CommitBody:
    try:
        values = _body_values(stored)
    except KeyError:  # the first logs had fewer
        known = {name: stored[name] for name in CommitBody._fields if name in stored}
        return CommitBody(**{**known, "without": tuple(known["without"])})
    return CommitBody._make((*values[:_WITHOUT], tuple(values[_WITHOUT]), *values[_WITHOUT + 1 :]))


def corrupt_commit_error(path: LogPath, why: str) -> LogCorrupt:
    """Return the error for a file that is not what was written."""
    error = LogCorrupt(
        f"a commit of the log is damaged: {why}",
        path=path,
        hint=f"Restore the file from a copy of the log. Without one: {NEW_LOG_HINT}",
    )
    error.damaged_commit = True
    return error
