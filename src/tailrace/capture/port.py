"""The port every source implements, and what an implementer must promise.

Order: windows arrive in the source's commit order, whole transactions only, none missing between two windows. A
transaction too large to hold arrives as open windows and one that finishes it, with nothing in between.
Repetition: a stream opened after a position yields nothing that ended at or before it, and every transaction
after it from its beginning.
Durability: the source keeps everything after the last confirmed position; `confirm` is the only thing that
lets it go, and the caller confirms only what is durable on its side.
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


class Stream(Protocol[P]):
    """A live stream of windows; one thread uses it."""

    def read(self, after: P, wait_seconds: float) -> Window[P] | None:
        """The next window after the given position; an empty one if only the position moved; None if
        nothing came in time. `after` is the end of the last window that the caller has, durable or held.

        An open window does not move that position, so reading on says that it was kept. A caller that could not
        keep it closes the stream and opens another, which begins the transaction again."""

    def confirm(self, position: P) -> None:
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

    position: Lsn

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


# What a source may also do. A runtime asks whether it does; a pipeline knows its source.


@runtime_checkable
class CustomPositionSource(Protocol):
    """A source that does not count in `Lsn`."""

    @property
    def beginning(self) -> Position:
        """Before everything that it has: where a stream begins that is new. All its positions are of this type; each
        reaches those before it, and a row's `_position` is the text of one."""


def first_position(source: object) -> Position:
    """Where a stream of this source begins that is new, if it does not say otherwise when it gets ready."""
    return source.beginning if isinstance(source, CustomPositionSource) else ZERO


def require_position_type(position: Position, beginning: Position) -> None:
    """Refuse a position of a source that does not count in such."""
    if type(position) is not type(beginning):
        raise ConfigError(
            "a source gave a position of another kind than it counts in",
            found=position_type_of(position).value,
            expected=position_type_of(beginning).value,
            hint="Let its `beginning` be of the kind that its windows have.",
        )


@runtime_checkable
class PreparedSource(Protocol[P]):
    """A source that knows which database it is, and gets ready before it is streamed from."""

    def identify(self) -> SourceId:
        """Which database this is."""

    def prepare(self, position: P | None, origin: SourceId | None = None) -> P | None:
        """Get ready to stream after a position of that origin, and refuse if that cannot be. Without a position: where
        a stream begins that is new."""


@runtime_checkable
class RevertibleSource(Protocol):
    """An anchored source that makes something at its server when it gets ready for a stream that is new."""

    def unprepare(self) -> None:
        """Take that back: the start failed, and nothing knows of it. Called only after a `prepare` without a position
        that has succeeded."""


@runtime_checkable
class HasTimeline(Protocol):
    """A stream that knows the history its positions are of."""

    timeline: int


class TimelineStream(Stream, HasTimeline, Protocol):
    """A stream that is one, whatever stands around it."""


@runtime_checkable
class SchemaAwareSource(Protocol):
    """A source to which the last known shapes of its tables are told: rows may come of one that is gone."""

    def remember_schemas(self, shapes: Sequence[TableSchema]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ScanPiece:
    """Some rows of a table that is scanned, in order."""

    schema: TableSchema
    data: pa.RecordBatch
    """The table's own columns."""
    position: Position
    """Everything that the rows show ended at or before this."""
    table_done: bool
    """Whether these are the table's last."""
    record: Callable[[int], Mapping[str, Any]]
    """The scan's record once so many of these rows are acknowledged."""


class Scan(Protocol):
    """Tables being read: in one snapshot, with the stream to begin at `start`; or *live*, chunk by chunk beside a
    stream that goes on. One thread uses it.

    Order: tables as they were named, the rows of each in the order of its key. Repetition: a scan that is resumed from
    a record yields nothing that was acknowledged by it, and all the rest. A row is never older than the
    transactions that `begin` was told of.
    """

    @property
    def start(self) -> Position:
        """Where the stream begins."""

    def record(self) -> Mapping[str, Any]:
        """What it can be resumed from before any row of it is acknowledged; small, and fit for JSON."""

    def begin(self, delivered: Collection[int]) -> bool:
        """Begin the next chunk, if none is under way, in a snapshot that sees all these transactions; False if there
        is none yet: ask again later."""

    def next(self, rows_max: int) -> ScanPiece | None:
        """The next rows of the chunk under way; None if it has no more."""

    @property
    def done(self) -> bool:
        """Whether there is no other chunk."""

    def close(self) -> None:
        """Let go of the source."""


@runtime_checkable
class Scannable(Protocol):
    """A source whose tables can be scanned."""

    def scan(self, tables: Sequence[TableId], *, live: bool, where: str | None = None) -> Scan:
        """Begin to read tables; those that cannot be read this way are refused."""

    def resume_scan(self, record: Mapping[str, Any]) -> Scan | None:
        """Go on with a scan; None if that cannot be, and it has to begin anew."""
