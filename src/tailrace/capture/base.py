"""The port every source implements, and what an implementer must promise.

Order: windows arrive in the source's commit order, whole transactions only, none missing between two windows. A
transaction too large to hold arrives as open windows and one that finishes it, with nothing in between.
Repetition: a stream opened after a position yields nothing that ended at or before it, and every transaction
after it from its beginning.
Durability: the source keeps everything after the last confirmed position; `confirm` is the only thing that
lets it go, and the caller confirms only what is durable on its side.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from tailrace.errors import Unsupported
from tailrace.model.batch import Window
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId, TableSchema


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a source can do; asking for more is an error, not a silence."""

    live: bool
    snapshot: bool
    lag: bool

    def require(self, name: str) -> None:
        if not getattr(self, name):
            raise Unsupported(f"this source cannot do `{name}`", hint="Choose another source for it.")


@dataclass(frozen=True, kw_only=True)
class SourceId:
    """Which database a log belongs to. Two servers with equal data are still two sources."""

    kind: str
    system: str
    database: str
    timeline: int


@dataclass(frozen=True, kw_only=True)
class Lag:
    """How far the source's log reaches beyond what was confirmed."""

    end: Lsn
    confirmed: Lsn | None
    retained_bytes: int | None


class Stream(Protocol):
    """A live stream of windows; one thread uses it."""

    def read(self, after: Lsn, wait_seconds: float) -> Window | None:
        """The next window after the given position; an empty one if only the position moved; None if
        nothing came in time. `after` is the end of the last window the caller made durable.

        An open window does not move that position, so reading on says that it was kept. A caller that could not
        keep it closes the stream and opens another, which begins the transaction again."""

    def confirm(self, position: Lsn) -> None:
        """Everything up to here is durable elsewhere: the source may discard it."""

    def close(self) -> None:
        """Let go of the source; nothing is confirmed that was not."""


class TableReader(Protocol):
    """Reads tables as one snapshot sees them; may be pickled and entered in another process."""

    def __enter__(self) -> TableReader: ...

    def __exit__(self, *_: object) -> None: ...

    def describe(self, table: TableId) -> TableSchema:
        """The table's shape in this snapshot."""

    def rows(self, schema: TableSchema) -> Iterator[pa.RecordBatch]:
        """The table's rows, in bounded batches of the table's own columns."""


class TableSnapshot(Protocol):
    """Tables as of one position of the log: exactly what committed at or before `point`."""

    point: Lsn

    def reader(self) -> TableReader:
        """A reader; valid while the snapshot is open."""


class ChangeCapture(Protocol):
    """One database's log."""

    capabilities: Capabilities

    def live(self, after: Lsn) -> Stream:
        """Stream what committed after the position."""

    def snapshot(self) -> AbstractContextManager[TableSnapshot]:
        """A consistent reading of tables, tied to a position of the log."""

    def lag(self) -> Lag:
        """How far behind the source's own log we are."""
