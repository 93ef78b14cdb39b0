"""What a pipeline tells about itself: plain values, shared by the side that measures and the side that shows.

Everything in here is a fact at one moment and can be printed as JSON; nothing holds a connection, a row's
values or a secret. The names of the fields are the names in `--json`, which scripts rely on: fields are
added, never renamed.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tailrace import errors
from tailrace.errors import ExitCode, TailraceError


class TableState(enum.Enum):
    """Where a table stands in its life: new → seeding → catching_up → live, and what can come between."""

    NEW = "new"
    """The globs match it and its lake table holds no position of this log. Never stored: it follows from
    that."""
    SEEDING = "seeding"
    """The first load is reading the source. Set by the process that loads; not stored: a load that died
    starts again from `new`."""
    CATCHING_UP = "catching_up"
    """Loaded, but behind the log as it was when apply last looked. Never stored: it follows from the position
    in the table's own commit."""
    LIVE = "live"
    """Has applied everything the log held when apply last looked. Never stored, for the same reason."""
    REFRESHING = "refreshing"
    """Being loaded anew while its old contents stay readable. Set by apply when rows changed at rest; stored
    until the load's commit."""
    PAUSED = "paused"
    """Held back by an operator. Stored until the operator resumes it."""
    LOADED = "loaded"
    """Loaded once, and left so: its mode is `initial_only`. Never stored: it follows from the mode."""
    FAILED = "failed"
    """An error that a person must mend; the other tables go on. Set by capture or apply; stored with its
    reason until a start finds the cause gone."""
    NEEDS_SNAPSHOT = "needs_snapshot"
    """Only a load brings it what it lacks: the log no longer holds that, or it changed at rest and its mode (or a
    person who stopped the load) is against loading it by itself. Set by apply; never stored: it follows from
    what the log has let go, and from the shapes of both sides."""

    @property
    def is_applying(self) -> bool:
        """Whether it is loaded and its changes are applied."""
        return self in (TableState.CATCHING_UP, TableState.LIVE)

    @property
    def is_blocked(self) -> bool:
        """Whether the table goes nowhere until a person acts."""
        return self in (TableState.FAILED, TableState.NEEDS_SNAPSHOT)


@dataclass(frozen=True, kw_only=True)
class LoadStatus:
    """A load that is under way, or was when its process was last heard of."""

    stage: str
    """`waiting` for transactions that were open when it began, `reading`, `landing`, `replaying` what was committed
    meanwhile, or `paused`."""
    way: str
    """`exact`: in one snapshot; `chunked`: every chunk in one of its own."""
    mode: str
    """`replace` or `refresh`."""
    chunks: int = 0
    chunks_done: int = 0
    rows: int = 0
    bytes: int = 0
    """Of the source that are read, about; `bytes_total` are expected."""
    bytes_total: int = 0
    seconds: float = 0.0
    rows_per_second: float = 0.0
    seconds_left: float | None = None
    backing_off: bool = False
    """Whether it goes slower because the source is busy."""
    waiting_for: str | None = None
    """How many transactions it waits for and whose the oldest is, once that takes a while."""

    def to_json(self) -> dict[str, Any]:
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """A load that has landed."""

    landed_at: float
    mode: str
    way: str
    rows: int
    bytes: int
    """Of the source, about."""
    seconds: float
    rows_per_second: float

    def to_json(self) -> dict[str, Any]:
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class TableStatus:
    """One table: how far it is and, if it stands still, why and what to do."""

    schema: str
    table: str
    state: TableState
    path: str
    """Where its lake table lies."""
    mode: str = "mirror"
    """What it holds: `mirror`, `mirror, soft delete`, `append` or `history`."""
    reason: str | None = None
    """The code of the error that stopped it, e.g. `schema-changed`."""
    detail: str | None = None
    """That error's text."""
    hint: str | None = None
    rows_captured: int = 0
    rows_applied: int = 0
    rows_loaded: int = 0
    load_rows_estimated: int | None = None
    applied_commit: int | None = None
    applied_position: str | None = None
    lag_bytes: int | None = None
    lag_seconds: float | None = None
    bytes_changed: int = 0
    """Of the changes that were applied since the process began that does this, as a table's files would hold them;"""
    bytes_written: int = 0
    """and of all files that were written for them, for new shapes, and to join files."""
    write_amplification: float | None = field(init=False, default=None)
    """The second over the first; None before the first change."""
    dead_letters: int = 0
    """Changes that it could not take and that were set aside."""
    note: str | None = None
    """Something worth knowing that stops nothing, e.g. the SQL that would let updates be captured too."""
    load: LoadStatus | None = None
    last_load: LoadResult | None = None
    """The last one that has landed since the process began that does this."""

    def __post_init__(self) -> None:
        if self.state is TableState.FAILED and not self.reason:
            raise ValueError("a failed table says why: give `reason`, the code of its error")
        object.__setattr__(self, "write_amplification", amplification([self]))

    @property
    def name(self) -> str:
        """For people only: two tables can share it, when a name holds a dot."""
        return f"{self.schema}.{self.table}"

    def to_json(self) -> dict[str, Any]:
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class LogStatus:
    """The change log: what it spans and what it weighs."""

    path: str
    id: str | None = None
    commits: int = 0
    first_commit: int | None = None
    last_commit: int | None = None
    position: str | None = None
    """The source position it reaches."""
    bytes: int = 0
    """Of the rows that are kept."""
    disk_bytes: int | None = None
    """All it takes on disk, what is replaced and not yet removed included; None where it was not measured."""
    last_seq: int = 0

    def to_json(self) -> dict[str, Any]:
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class SourceStatus:
    """The database, as far as it could be asked."""

    reachable: bool
    place: str
    """Host, port and database; never a user, never a password."""
    slot: str | None = None
    slot_active: bool | None = None
    retained_bytes: int | None = None
    """What the server keeps for us on its own disk."""
    position: str | None = None
    """The end of the server's log."""

    def to_json(self) -> dict[str, Any]:
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class PipelineStatus:
    """One pipeline at one moment."""

    name: str
    running: bool
    """Whether any of its processes is alive."""
    source: SourceStatus
    log: LogStatus
    tables: tuple[TableStatus, ...] = ()
    capture_pid: int | None = None
    apply_pid: int | None = None
    merging_share: float | None = None
    """Which part of the last minute went into merging changes into tables; None while nobody applies."""

    def to_json(self) -> dict[str, Any]:
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a command did, said once when it ends."""

    name: str
    command: str
    seconds: float
    transactions: int = 0
    rows_captured: int = 0
    tables: tuple[TableStatus, ...] = ()
    exit_code: ExitCode = ExitCode.OK
    message: str = ""

    def to_json(self) -> dict[str, Any]:
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class LoggedTable:
    """What the log keeps of one table, or of one of its own streams."""

    number: int
    """The log's own for it: its folder below `cold/` and `schemas/`."""
    schema: str
    """Empty for the log's own streams."""
    table: str
    versions: int
    """How many shapes it has had."""
    rows: int = 0
    bytes: int = 0
    files: int = 0
    """Sealed ones."""
    first_commit: int | None = None
    last_commit: int | None = None
    rows_trimmed: int = 0

    @property
    def name(self) -> str:
        return f"{self.schema}.{self.table}" if self.schema else self.table


@dataclass(frozen=True, kw_only=True)
class TableEvolution:
    """What would be done to a lake table for what became of its source."""

    schema: str
    table: str
    action: str
    """`none`, `apply`, `refresh` or `stop`."""
    steps: tuple[str, ...] = ()
    """What is done to the lake table first, in order."""
    why: str | None = None
    """Why it is loaded anew, or stops, or nothing is done."""
    hint: str | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class LoggedSchemaVersion:
    """One version of a table's shape, and what became of the table with it."""

    number: int
    schema: str
    table: str
    version: int
    position: str | None
    """Of the first row that has it; None where the log does not keep that record any more."""
    committed_at: str | None
    definition: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.schema}.{self.table}"

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class LogOverview:
    """What a log holds and takes."""

    path: str
    id: str
    source: str
    first_commit: int | None
    """The oldest that is kept, wholly or in part; None if none is."""
    last_commit: int | None
    sealed_commit: int | None
    """The last one that is in Parquet files."""
    transactions: int
    rows: int
    rows_trimmed: int
    start_position: str | None
    end_position: str | None
    written_from: str | None
    written_to: str | None
    committed_to: str | None
    """When its last transaction was committed at the source."""
    bytes: int
    """All it takes on disk, what is replaced and not yet removed included."""
    hot_bytes: int
    big_bytes: int
    cold_bytes: int
    lake_tables: int
    """Tables that say how far they are."""
    consumers: int
    """Readers that do."""
    gaps: tuple[int, ...] = ()
    """Commits before which changes are missing: the source had discarded them unread."""
    tables: tuple[LoggedTable, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class LogProblem:
    """Something in a log that is not as it was written."""

    path: str
    message: str
    hint: str


@dataclass(frozen=True, kw_only=True)
class LogVerifyResult:
    """What a look at every byte of a log came to."""

    path: str
    ok: bool
    commits: int
    rows: int
    files: int
    bytes: int
    seconds: float
    problems: tuple[LogProblem, ...] = ()
    problems_total: int = 0
    """More than are listed, if they were very many."""

    def to_json(self) -> dict[str, Any]:
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class LogSealResult:
    """What sealing by hand did."""

    commits: int
    rows: int
    bytes: int
    """Of the Parquet files that were written."""
    seals: int
    joined: int
    """Small seals that were made one with their neighbours."""
    removed: int
    """Files that others had replaced, and whose grace period was over."""
    sealed_commit: int | None
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class LogReaderStatus:
    """A lake table or a named consumer, as it last said how far it is."""

    kind: str
    """`table` or `consumer`."""
    name: str
    tables: tuple[str, ...] | None
    """What it reads; None means everything."""
    state: str
    """`live`; `expired`: not heard of for too long; `detached`: it has lost rows. Only a live one is waited for."""
    commit: int
    seq: int
    position: str | None
    behind_commits: int
    behind_rows: int
    """At most: of what is sealed, whole row groups count."""
    held_bytes: int
    """What the log keeps for it; others may need the same."""
    seen_at: str
    expires_at: str | None
    """None: never."""

    def to_json(self) -> dict[str, Any]:
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class LogTrimResult:
    """What trimming by hand let go, and who keeps the rest."""

    commits: int
    files: int
    rows: int
    bytes: int
    first_commit: int | None
    unsealed_commits: int
    """Not sealed yet, so not even looked at."""
    readers: tuple[LogReaderStatus, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return _fields(self)


class Observer(Protocol):
    """Someone watching a pipeline. Both calls return soon, never raise, and may come from any thread; missing
    one loses nothing but a view of that moment."""

    def tick(self, status: PipelineStatus) -> None:
        """The state now; called about twice a second."""

    def event(self, text: str, **fields: object) -> None:
        """Something happened that is worth a line: a lower-case fragment, and its identifiers as fields."""


def amplification(tables: Iterable[TableStatus]) -> float | None:
    """How many bytes were written for one of changes; None where there were none."""
    counts = [(table.bytes_written, table.bytes_changed) for table in tables]
    changed = sum(count for _, count in counts)
    return sum(count for count, _ in counts) / changed if changed else None


def tables_exit_code(tables: Iterable[TableStatus]) -> ExitCode:
    """How a command that waited for these tables ends: TABLE if one of them cannot go on."""
    return ExitCode.TABLE if any(table.state.is_blocked for table in tables) else ExitCode.OK


def error_to_json(error: TailraceError) -> dict[str, Any]:
    """An error as `--json` prints it; `error_from_json` gives it back in another process."""
    # A position or a table's name is what people call it: what an error says in another process is what it says here.
    fields = {
        name: str(value) if dataclasses.is_dataclass(value) else _plain(value) for name, value in error.fields.items()
    }
    return {"code": error.code, "message": error.message, "hint": error.hint, "fields": fields}


def error_from_json(stored: Mapping[str, Any]) -> TailraceError:
    """The error of the class its code names; the root class for a code this version does not know."""
    kind = errors.error_class(stored["code"])
    return kind(stored["message"], hint=stored["hint"], **stored["fields"])


def _fields(value: Any) -> dict[str, Any]:
    return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}


def _plain(value: object) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return _fields(value)
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return round(value, 3)
    return value if value is None or isinstance(value, (str, int)) else str(value)
