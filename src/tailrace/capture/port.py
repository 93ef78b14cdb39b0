"""The port that every source implements, and what an implementer must promise.

Order: windows arrive in the source's commit order, as whole transactions, and none is missing between two windows. A
transaction too large to hold arrives as open windows and one that finishes it, with nothing in between.

Repetition: a stream opened after a position yields nothing that ended at or before it. It yields every transaction
after it, from the transaction's beginning.

Durability: the source keeps everything after the last confirmed position. Only `confirm` lets it discard more, and the
caller confirms only what is durable on its side.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from tailrace.errors import ConfigError, Unsupported
from tailrace.model.batch import Window
from tailrace.model.position import ZERO, Lsn
from tailrace.model.position_kinds import P, Position, position_type_of
from tailrace.model.schema import TableId, TableSchema


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The abilities of a source. A request beyond it is an error, never ignored."""

    live: bool
    snapshot: bool
    lag: bool

    def require(self, name: str) -> None:
        if not getattr(self, name):
            raise Unsupported(f"this source cannot do `{name}`", hint="Choose a source that can.")


@dataclass(frozen=True, kw_only=True)
class SourceId:
    """The database that a log belongs to. Two servers with equal data are still two sources."""

    kind: str
    system: str
    database: str
    timeline: int


@dataclass(frozen=True, kw_only=True)
class Lag:
    """The distance from the confirmed position to the end of the source log."""

    end: Lsn
    confirmed: Lsn | None
    retained_bytes: int | None


class Stream(Protocol[P]):
    """A live stream of windows, used by one thread."""

    def read(self, after: P, wait_seconds: float) -> Window[P] | None:
        """Return the next window after the position.

        An empty window means that only the position moved; None, that nothing arrived in time. `after` is the end of
        the last window that the caller has, durable or in memory. An open window does not move that position, so the
        next read says that it was kept. A caller that could not keep it closes the stream and opens another one, which
        begins the transaction again.
        """

    def confirm(self, position: P) -> None:
        """Let the source discard everything up to here: it is durable elsewhere."""

    def close(self) -> None:
        """Disconnect from the source, without confirming anything more."""


class TableReader(Protocol):
    """Reads tables as one snapshot sees them; may be pickled and entered in another process."""

    def __enter__(self) -> TableReader: ...

    def __exit__(self, *_: object) -> None: ...

    def describe(self, table: TableId) -> TableSchema:
        """Return the table's schema in this snapshot."""

    def rows(self, schema: TableSchema) -> Iterator[pa.RecordBatch]:
        """Yield the table's rows, in bounded batches of the table's own columns."""


class TableSnapshot(Protocol):
    """Tables as of one position of the log: exactly what committed at or before `position`."""

    position: Lsn

    def reader(self) -> TableReader:
        """Return a reader; it is valid while the snapshot is open."""


class ChangeCapture(Protocol):
    """One database's log."""

    capabilities: Capabilities

    def live(self, after: Lsn) -> Stream:
        """Open a stream of what committed after the position."""

    def snapshot(self) -> AbstractContextManager[TableSnapshot]:
        """Open a consistent view of the tables, at one position of the log."""

    def lag(self) -> Lag:
        """Return how far behind the source's own log we are."""


# Optional abilities. A runtime checks whether a source has them; a pipeline knows its source.


@runtime_checkable
class CustomPositionSource(Protocol):
    """A source whose positions are not an `Lsn`."""

    @property
    def beginning(self) -> Position:
        """The position before everything it has: a new stream begins here.

        All its positions are of this type, and each reaches those before it. A row's `_position` is the text of one.
        """


def first_position(source: object) -> Position:
    """Return where a new stream begins, unless the source says otherwise in `prepare`."""
    return source.beginning if isinstance(source, CustomPositionSource) else ZERO


def require_position_type(position: Position, beginning: Position) -> None:
    """Refuse a position that is not of the source's position type."""
    if type(position) is not type(beginning):
        raise ConfigError(
            "the source returned a position of another type than its own",
            found=position_type_of(position).value,
            expected=position_type_of(beginning).value,
            hint="Return the same position type from `beginning` as the windows have.",
        )


@runtime_checkable
class PreparedSource(Protocol[P]):
    """A source that knows its database, and prepares for streaming."""

    def identify(self) -> SourceId:
        """Return which database this is."""

    def prepare(self, position: P | None, origin: SourceId | None = None) -> P | None:
        """Prepare to stream after a position of that origin, and refuse if that is impossible.

        Without a position: return where a new stream begins.
        """


@runtime_checkable
class RevertibleSource(Protocol):
    """A prepared source that creates something at its server for a new stream."""

    def unprepare(self) -> None:
        """Undo `prepare`: the start failed, and no stored state refers to it.

        Called only after a `prepare` without a position has succeeded.
        """


@runtime_checkable
class HasTimeline(Protocol):
    """A stream that knows the history of its positions."""

    timeline: int


class TimelineStream(Stream, HasTimeline, Protocol):
    """A `Stream` that has a timeline."""


@runtime_checkable
class SchemaAwareSource(Protocol):
    """A source that needs the last known schemas of its tables.

    Its rows may be of a table that was dropped since.
    """

    def remember_schemas(self, schemas: Sequence[TableSchema]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ScanPiece:
    """Some rows of a table under scan, in order."""

    schema: TableSchema
    data: pa.RecordBatch
    """The table's own columns."""
    position: Position
    """Every transaction visible in the rows ended at or before this."""
    table_done: bool
    """True if these are the table's last rows."""
    record: Callable[[int], Mapping[str, Any]]
    """Returns the scan's record once that many of these rows are acknowledged."""


class Scan(Protocol):
    """A read of whole tables, before the stream or during it.

    Before the stream it is one snapshot; *live*, it is chunk by chunk. With one snapshot the stream begins at `start`.
    One thread uses a scan.

    Order: tables in the given order, the rows of each in the order of its key. Repetition: a scan resumed from a record
    yields nothing that the record acknowledges, and all the rest. A row is never older than the transactions passed to
    `begin`.
    """

    @property
    def start(self) -> Position:
        """The position where the stream begins."""

    def record(self) -> Mapping[str, Any]:
        """Return a record to resume from, as long as no row is acknowledged. It is small, and fit for JSON."""

    def begin(self, delivered: Collection[int]) -> bool:
        """Begin the next chunk in a snapshot that sees all these transactions.

        Nothing happens if a chunk is under way.

        False if there is no such snapshot yet: call again later.
        """

    def next(self, rows_max: int) -> ScanPiece | None:
        """Return the next rows of the chunk under way; None if it has no more."""

    @property
    def done(self) -> bool:
        """True if no chunk remains."""

    def close(self) -> None:
        """Disconnect from the source."""


@runtime_checkable
class Scannable(Protocol):
    """A source whose tables can be scanned."""

    def scan(self, tables: Sequence[TableId], *, live: bool, where: str | None = None) -> Scan:
        """Begin to read tables; refuse those that cannot be read this way."""

    def resume_scan(self, record: Mapping[str, Any]) -> Scan | None:
        """Resume a scan; None if it has to start again."""
