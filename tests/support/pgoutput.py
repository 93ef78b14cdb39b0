"""pgoutput messages by hand: what a server would send, and things that no server would.

`decode(transaction(ITEMS.relation(), ITEMS.insert(1, "x")))` is a window.
https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tailrace.capture.postgres.catalogue import parse_relation
from tailrace.capture.postgres.decode import EPOCH_2000, Decoder
from tailrace.capture.postgres.types import arrow_type
from tailrace.model.batch import Window
from tailrace.model.position import ZERO, Lsn
from tailrace.model.schema import Column, Identity, TableId, TableSchema

INT4, INT8, TEXT, NUMERIC, BYTEA = 23, 20, 25, 1700, 17
TIMESTAMPTZ, FLOAT8, INT4_ARRAY, TEXT_ARRAY = 1184, 701, 1007, 1009


class Unsent:
    """A value the server did not send again."""


UNSENT = Unsent()
Cell = Any


def numeric(precision: int, scale: int) -> int:
    """The modifier of numeric(precision, scale)."""
    return ((precision << 16) | (scale & 0x7FF)) + 4


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A table as the stream describes it: columns are (name, type, modifier)."""

    oid: int
    schema: str = "public"
    name: str
    columns: tuple[tuple[str, int, int], ...]
    key: tuple[str, ...] = ("id",)
    replica: str = "d"

    def relation(self) -> bytes:
        columns = b"".join(
            bytes([column in self.key and self.replica != "f"])
            + column.encode()
            + b"\0"
            + struct.pack(">Ii", kind, modifier)
            for column, kind, modifier in self.columns
        )
        head = b"R" + struct.pack(">I", self.oid) + self.schema.encode() + b"\0" + self.name.encode() + b"\0"
        return head + self.replica.encode() + struct.pack(">H", len(self.columns)) + columns

    def insert(self, *cells: Cell) -> bytes:
        return b"I" + struct.pack(">I", self.oid) + b"N" + row(*cells)

    def update(self, *cells: Cell, key: tuple[Cell, ...] | None = None, old: tuple[Cell, ...] | None = None) -> bytes:
        before = b"K" + row(*key) if key is not None else b"O" + row(*old) if old is not None else b""
        return b"U" + struct.pack(">I", self.oid) + before + b"N" + row(*cells)

    def delete(self, *, key: tuple[Cell, ...] | None = None, old: tuple[Cell, ...] | None = None) -> bytes:
        before = b"K" + row(*key) if key is not None else b"O" + row(*(old or ()))
        return b"D" + struct.pack(">I", self.oid) + before


def row(*cells: Cell) -> bytes:
    """A tuple: None is null, UNSENT is not sent, anything else is its text."""
    parts = [struct.pack(">H", len(cells))]
    for cell in cells:
        if cell is None:
            parts.append(b"n")
        elif cell is UNSENT:
            parts.append(b"u")
        else:
            text = cell if isinstance(cell, bytes) else str(cell).encode()
            parts.append(b"t" + struct.pack(">I", len(text)) + text)
    return b"".join(parts)


def truncate(*tables: Sent) -> bytes:
    oids = b"".join(struct.pack(">I", table.oid) for table in tables)
    return b"T" + struct.pack(">IB", len(tables), 0) + oids


def begin(xid: int = 7, end: int = 0x100, at: int = EPOCH_2000) -> bytes:
    return b"B" + struct.pack(">QqI", end - 8, at - EPOCH_2000, xid & 0xFFFFFFFF)


def commit(end: int = 0x100, at: int = EPOCH_2000) -> bytes:
    return b"C" + struct.pack(">BQQq", 0, end - 8, end, at - EPOCH_2000)


def transaction(*changes: bytes, xid: int = 7, end: int = 0x100, at: int = EPOCH_2000) -> list[bytes]:
    """The changes between a begin and a commit that ends at `end`."""
    return [begin(xid, end, at), *changes, commit(end, at)]


def message(prefix: str, content: bytes, *, lsn: int = 0x90, outside_at: int | None = None) -> bytes:
    """What an application wrote; outside of a transaction it is followed by the server's clock."""
    head = b"M" + struct.pack(">BQ", outside_at is None, lsn) + prefix.encode() + b"\0"
    clock = b"" if outside_at is None else struct.pack(">q", outside_at - EPOCH_2000)
    return head + struct.pack(">I", len(content)) + content + clock


def describe(messages: Sequence[bytes]) -> list[TableSchema]:
    """The shapes that relation messages announce, without a catalogue."""
    return [describe_one(message) for message in messages]


def describe_one(message: bytes) -> TableSchema:
    """The flagged columns are the key, or the first one where the server flags none."""
    oid, table, replica, columns, flagged = parse_relation(message)
    key = flagged or tuple(name for name, _, _ in columns[:1])
    return shape(oid, table, columns, key, Identity.FULL if replica == "f" else Identity.KEY)


def shape(
    oid: int, table: TableId, columns: list[tuple[str, int, int]], key: tuple[str, ...], identity: Identity
) -> TableSchema:
    return TableSchema(
        table=table,
        relation=oid,
        key=key,
        identity=identity,
        columns=tuple(
            Column(name=name, source_type=str(kind), type=arrow_type(kind, modifier))
            for name, kind, modifier in columns
        ),
    )


def laid_out(messages: list[bytes]) -> tuple[bytes, np.ndarray[Any, np.dtype[np.int64]]]:
    """The messages end to end, and where each begins (and the last one ends)."""
    starts = np.zeros(len(messages) + 1, np.int64)
    starts[1:] = np.cumsum([len(message) for message in messages])
    return b"".join(messages), starts


def decode(messages: list[bytes], after: Lsn = ZERO, end: Lsn = Lsn(1 << 40), decoder: Decoder | None = None) -> Window:
    """The window these messages make."""
    b, starts = laid_out(messages)
    return (decoder or Decoder(describe)).decode(_writable(b), starts, len(messages), after, end)


def decode_part(messages: list[bytes], decoder: Decoder, after: Lsn = ZERO) -> Window | None:
    """The open window these messages make: a part of one transaction, without its end."""
    b, starts = laid_out(messages)
    return decoder.decode_part(_writable(b), starts, len(messages), after)


def decode_in_parts(
    messages: list[bytes],
    cuts: Sequence[int],
    after: Lsn = ZERO,
    end: Lsn = Lsn(1 << 40),
    decoder: Decoder | None = None,
) -> list[Window]:
    """The windows these messages make when they are cut before each of these numbers; the cuts lie inside one
    transaction."""
    decoder = decoder or Decoder(describe)
    edges = [0, *cuts]
    found = [decode_part(messages[begin:stop], decoder, after) for begin, stop in itertools.pairwise(edges)]
    return [window for window in found if window is not None] + [decode(messages[edges[-1] :], after, end, decoder)]


def _writable(b: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A copy, because the real buffer can be written to: numba compiles anew for one that cannot."""
    return np.frombuffer(b, np.uint8).copy()
