"""Plain values that report a pipeline. The code that measures and the code that shows share them.

Every value is a fact at one moment and can be printed as JSON. None holds a connection, a row's values or a secret. The
fields have the names that `--json` prints, and scripts rely on them: fields are added, never renamed.
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
    """The state of one table: new → seeding → catching_up → live, and others between."""

    NEW = "new"
    """The globs match the table, and its lake table holds no position of this log. Never stored: it follows from
    that."""
    SEEDING = "seeding"
    """The first load is reading the source. Set by the process that loads. Not stored: after a
    crash the table is `new` until its recorded load resumes."""
    CATCHING_UP = "catching_up"
    """Loaded, but behind the log as it was when apply last looked. Never stored: it follows from the position in the
    table's own commit."""
    LIVE = "live"
    """Everything that the log held when apply last looked is applied. Never stored: it follows from the same
    position."""
    REFRESHING = "refreshing"
    """A reload runs while the old rows stay readable. Set by apply when the log cannot complete the table.
    Stored until the load commit."""
    PAUSED = "paused"
    """A person has paused or stopped the table's loads. Stored until they are resumed."""
    LOADED = "loaded"
    """The table is loaded once and gets no changes: its mode is `initial_only`. Never stored: it follows from the
    mode."""
    FAILED = "failed"
    """An error that a person must fix; the other tables continue. Set by capture or apply. Stored with its reason until
    a start finds the cause gone."""
    NEEDS_SNAPSHOT = "needs_snapshot"
    """Only a load can bring what the table lacks, and it does not start automatically.

    Either the log no longer holds the changes; or rows at rest have changed, and the load mode or a person who stopped
    the load forbids a reload. Set by apply. Never stored: it follows from what the log has trimmed and from the schemas
    of both sides.
    """

    @property
    def is_applying(self) -> bool:
        """Return whether the table is loaded and its changes are applied."""
        return self in (TableState.CATCHING_UP, TableState.LIVE)

    @property
    def is_blocked(self) -> bool:
        """Return whether the table makes no progress until a person acts."""
        return self in (TableState.FAILED, TableState.NEEDS_SNAPSHOT)


@dataclass(frozen=True, kw_only=True)
class LoadStatus:
    """A load that runs, or ran when its process last reported."""

    stage: str
    """The stage: `waiting`, `reading`, `landing`, `replaying` or `paused`.

    `waiting` is for transactions that were open at the start. `replaying` applies what was committed during the load.
    """
    way: str
    """`exact`: one snapshot for the whole table. `chunked`: one snapshot per chunk."""
    mode: str
    """`replace` or `refresh`."""
    chunks: int = 0
    chunks_done: int = 0
    rows: int = 0
    bytes: int = 0
    """Bytes read from the source, about."""
    bytes_total: int = 0
    seconds: float = 0.0
    rows_per_second: float = 0.0
    seconds_left: float | None = None
    backing_off: bool = False
    """True while the load is slowed down because the source is busy."""
    waiting_for: str | None = None
    """Number of open transactions that it waits for, and the owner of the oldest. Set after a while."""

    def to_json(self) -> dict[str, Any]:
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """A load whose rows are committed."""

    landed_at: float
    mode: str
    way: str
    rows: int
    bytes: int
    """Bytes read from the source, about."""
    seconds: float
    rows_per_second: float

    def to_json(self) -> dict[str, Any]:
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class TableStatus:
    """One table: its position and, if it is stopped, the reason and the remedy."""

    schema: str
    table: str
    state: TableState
    path: str
    """Path of the lake table."""
    mode: str = "mirror"
    """Mode of the lake table: `mirror`, `mirror, soft delete`, `append` or `history`."""
    reason: str | None = None
    """Code of the error that stopped the table, e.g. `schema-changed`."""
    detail: str | None = None
    """Text of that error."""
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
    """Size of the changes applied since the process started, as they are in a table's files."""
    bytes_written: int = 0
    """Size of all files written since then, also for schema changes and compaction."""
    write_amplification: float | None = field(init=False, default=None)
    """`bytes_written` divided by `bytes_changed`; None before the first change."""
    dead_letters: int = 0
    """Number of open dead letters."""
    note: str | None = None
    """Advice that stops nothing, e.g. the SQL that would let updates be captured too."""
    load: LoadStatus | None = None
    last_load: LoadResult | None = None
    """The last load that the applying process has committed since it started."""

    def __post_init__(self) -> None:
        if self.state is TableState.FAILED and not self.reason:
            raise ValueError("a failed table has no `reason`: give the code of its error")
        object.__setattr__(self, "write_amplification", amplification([self]))

    @property
    def name(self) -> str:
        """The name for people only: two tables share it if a name holds a dot."""
        return f"{self.schema}.{self.table}"

    def to_json(self) -> dict[str, Any]:
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class LogStatus:
    """The change log: its commits, its position and its size."""

    path: str
    id: str | None = None
    commits: int = 0
    first_commit: int | None = None
    last_commit: int | None = None
    position: str | None = None
    """Source position that the log has reached."""
    bytes: int = 0
    """Size of the rows that are kept."""
    disk_bytes: int | None = None
    """Size on disk; None where it was not measured. Replaced files that are not removed yet count."""
    last_seq: int = 0

    def to_json(self) -> dict[str, Any]:
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class SourceStatus:
    """The database, as far as it answered."""

    reachable: bool
    place: str
    """Host, port and database; never a user, never a password."""
    slot: str | None = None
    slot_active: bool | None = None
    retained_bytes: int | None = None
    """Size of the source log that the server keeps for the slot."""
    position: str | None = None
    """End of the source log."""

    def to_json(self) -> dict[str, Any]:
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class PipelineStatus:
    """One pipeline at one moment."""

    name: str
    running: bool
    """True while any process of the pipeline is alive."""
    source: SourceStatus
    log: LogStatus
    tables: tuple[TableStatus, ...] = ()
    capture_pid: int | None = None
    apply_pid: int | None = None
    merging_share: float | None = None
    """Share of the last minute spent on merging changes. None while no process applies."""

    def to_json(self) -> dict[str, Any]:
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of a command, reported once when it ends."""

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
    """One table, or one system stream, as the log keeps it."""

    number: int
    """The log's own number of the table: its folder below `cold/` and `schemas/`."""
    schema: str
    """Database schema; empty for the log's system streams."""
    table: str
    versions: int
    """Number of schema versions that the table has had."""
    rows: int = 0
    bytes: int = 0
    files: int = 0
    """Number of sealed files."""
    first_commit: int | None = None
    last_commit: int | None = None
    rows_trimmed: int = 0

    @property
    def name(self) -> str:
        return f"{self.schema}.{self.table}" if self.schema else self.table


@dataclass(frozen=True, kw_only=True)
class TableEvolution:
    """Work that a run would do on a lake table after source changes."""

    schema: str
    table: str
    action: str
    """`none`, `apply`, `refresh` or `stop`."""
    steps: tuple[str, ...] = ()
    """The steps on the lake table that come first, in order."""
    why: str | None = None
    """The reason for a reload, for a stop, or for doing nothing."""
    hint: str | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class LoggedSchemaVersion:
    """One version of a table's schema, with its schema change."""

    number: int
    schema: str
    table: str
    version: int
    position: str | None
    """Position of the first row with this version. None where the log no longer keeps that record."""
    committed_at: str | None
    definition: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.schema}.{self.table}"

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class LogOverview:
    """The contents of a log and its size on disk."""

    path: str
    id: str
    source: str
    first_commit: int | None
    """The oldest commit that is kept, wholly or in part; None if none is."""
    last_commit: int | None
    sealed_commit: int | None
    """The last commit that is in sealed files."""
    transactions: int
    rows: int
    rows_trimmed: int
    start_position: str | None
    end_position: str | None
    written_from: str | None
    written_to: str | None
    committed_to: str | None
    """Time at which the source committed the log's last transaction."""
    bytes: int
    """Size on disk, including replaced files that are not removed yet."""
    hot_bytes: int
    big_bytes: int
    cold_bytes: int
    lake_tables: int
    """Number of lake tables that report their progress."""
    consumers: int
    """Number of named readers that report their progress."""
    gaps: tuple[int, ...] = ()
    """Commits with a gap before them: the source had discarded changes before capture read them."""
    tables: tuple[LoggedTable, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class LogProblem:
    """One part of a log that is not as it was written."""

    path: str
    message: str
    hint: str


@dataclass(frozen=True, kw_only=True)
class LogVerifyResult:
    """The result of checking every byte of a log."""

    path: str
    ok: bool
    commits: int
    rows: int
    files: int
    bytes: int
    seconds: float
    problems: tuple[LogProblem, ...] = ()
    problems_total: int = 0
    """Number of problems; `problems` lists only the first of very many."""

    def to_json(self) -> dict[str, Any]:
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class LogSealResult:
    """The result of `tailrace log FILE seal`."""

    commits: int
    rows: int
    bytes: int
    """Size of the Parquet files that were written."""
    seals: int
    joined: int
    """Number of small seals that were merged with their neighbours."""
    removed: int
    """Number of replaced files removed after their grace period."""
    sealed_commit: int | None
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class LogReaderStatus:
    """A lake table or a named consumer, with the progress it last reported."""

    kind: str
    """`table` or `consumer`."""
    name: str
    tables: tuple[str, ...] | None
    """The tables it reads; None means all."""
    state: str
    """`live`; `expired`: silent for too long; `detached`: it has lost rows.

    The log keeps rows for live readers only.
    """
    commit: int
    seq: int
    position: str | None
    behind_commits: int
    behind_rows: int
    """Upper bound of the rows to read: of sealed files, whole row groups count."""
    held_bytes: int
    """Size of what the log keeps for this reader; others may need the same rows."""
    seen_at: str
    expires_at: str | None
    """Time of expiry; None means never."""

    def to_json(self) -> dict[str, Any]:
        return _fields(self)


@dataclass(frozen=True, kw_only=True)
class LogTrimResult:
    """The result of `tailrace log FILE trim`, and the readers that hold the rest."""

    commits: int
    files: int
    rows: int
    bytes: int
    first_commit: int | None
    unsealed_commits: int
    """Number of commits that trimming skipped because they are not sealed yet."""
    readers: tuple[LogReaderStatus, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return _fields(self)


class Observer(Protocol):
    """A viewer of a running pipeline.

    Both calls return soon, never raise, and may come from any thread. A missed call loses nothing but the view of that
    moment.
    """

    def tick(self, status: PipelineStatus) -> None:
        """Show the current status; called about twice a second."""

    def event(self, text: str, **fields: object) -> None:
        """Show an event: a lower-case fragment, and its identifiers as fields."""


def amplification(tables: Iterable[TableStatus]) -> float | None:
    """Return the bytes written per byte of changes; None without changes."""
    counts = [(table.bytes_written, table.bytes_changed) for table in tables]
    changed = sum(count for _, count in counts)
    return sum(count for count, _ in counts) / changed if changed else None


def tables_exit_code(tables: Iterable[TableStatus]) -> ExitCode:
    """Return the exit code after waiting for these tables: TABLE if one is blocked."""
    return ExitCode.TABLE if any(table.state.is_blocked for table in tables) else ExitCode.OK


def error_to_json(error: TailraceError) -> dict[str, Any]:
    """Return the error as `--json` prints it; `error_from_json` restores it in another process."""
    # Positions and table names become text, so the error reads the same in another process.
    fields = {
        name: str(value) if dataclasses.is_dataclass(value) else _plain(value) for name, value in error.fields.items()
    }
    return {"code": error.code, "message": error.message, "hint": error.hint, "fields": fields}


def error_from_json(stored: Mapping[str, Any]) -> TailraceError:
    """Return an error of the class that its code names, or of the root class."""
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
