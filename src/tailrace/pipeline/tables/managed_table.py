"""One table of a pipeline: its state, its applied position, and whether it can resume."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field

from tailrace.capture.postgres.catalogue import SourceTable
from tailrace.changelog.read.index import Slice
from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import Remedy, SchemaChanged, TableAhead, TailraceError
from tailrace.model.policies import EvolutionPolicies, EvolutionPolicy
from tailrace.model.position import Lsn
from tailrace.model.schema import Identity, TableId, TableSchema
from tailrace.pipeline.report import LoadResult, LoadStatus, TableState
from tailrace.tables.evolve.schema_plan import Recast
from tailrace.tables.location import TableLocation
from tailrace.tables.port import AppliedPosition
from tailrace.tables.schema_errors import IDENTITY_HINT, RELOAD_HINT

log = logging.getLogger(__name__)

RETRIES_MAX = 7
"""Of a table whose failure may pass by itself, before it counts as failed."""


OUTCOME_UNKNOWN_SECONDS = 30.0
"""After a job of Spark's has broken off, until none of its tasks can be at work any more: Spark ends them, and does not
wait for that."""


@dataclass
class ManagedTable:
    """One table: where it stands, and why it stands still if it does."""

    table: TableId
    location: TableLocation
    state: TableState = TableState.NEW
    applied_position: AppliedPosition | None = None
    load_floor: AppliedPosition | None = None
    """Where the load that is under way will stand at the earliest; what the log has after it must be kept."""
    load_status: LoadStatus | None = None
    """How that load stands."""
    last_load: LoadResult | None = None
    loaded_at: int | None = None
    """The source's time when all of that had been read, in µs since 1970; None: not known."""
    catch_up_load: str | None = None
    """The load whose chunks the log has not passed yet: until then rows may be newer than the position says."""
    repairing: bool = False
    """Whether a row was read again that changes build on, and the log has not passed that yet: the same holds then."""
    apply_suspended: bool = False
    """Whether it goes no further, because a load is under way that must find it where its own snapshot is."""
    missing_at_source: bool = False
    """Whether the source does not have it any more, and it was never loaded."""
    load_only: bool = False
    """Whether its changes are not applied: it is loaded, and that is all."""
    may_refetch: bool = False
    """Whether rows may be missing that changes build on, because none were ever loaded."""
    schema: TableSchema | None = None
    pending_schema: PendingSchema | None = None
    """What the catalogue showed last, until the table is that."""
    reload_reason: str | None = None
    """Why the table must be loaded anew although the log has all that it lacks."""
    error: TailraceError | None = None
    """What it fails at or waits for. Others look without the lock, and one that has failed always says why: so this is
    set before that state, and cleared after it."""
    failures: int = 0
    failed_at: float = 0.0
    """Of the monotonic clock."""
    not_before: float = 0.0
    """When what it waits for is tried again, by the same clock; 0: it waits for nothing."""
    rows_estimated: int | None = None
    rows_loaded: int = 0
    note: str | None = None
    reload_error: str | None = None
    """Why a load of a table that goes on came to nothing, until one lands."""
    lake_version: int | None = None
    """The lake table's own number of the version that has this cursor; None: it was not asked for yet."""
    lake_table_id: str | None = None
    """Which lake table that version is of; None as well."""
    outcome_unknown_until: float = 0.0
    """Until when a task may still commit that nobody hears of, because its job broke off, by the monotonic clock; from
    then on it is the table itself that says where it stands. 0: there is none."""
    commits_since_compaction: int = 0
    """Commits since its files were last looked after."""
    bytes_changed: int = 0
    bytes_written: int = 0
    """Since this process began: of changes applied, and of the files that this, new shapes and joining files took."""
    insert_only: bool = False
    """Whether only inserts and truncates of it are published, for want of a replica identity."""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Held by whoever is applying to the table, or takes it out of those that go on."""

    @property
    def ahead_of_position(self) -> bool:
        """Whether rows may be newer than the position says."""
        return self.catch_up_load is not None or self.repairing

    def update_from_source(self, source: SourceTable) -> None:
        """What the source says of it now."""
        self.note, self.insert_only = source.identity_note, source.identity is Identity.NONE

    def fail(self, error: TailraceError, *, told: bool = True) -> None:
        """Stop the table, unless the failure may pass by itself and has not come too often."""
        self.error = error
        self.failures += 1
        self.failed_at = time.monotonic()
        passing = error.remedy is Remedy.RETRY
        if not passing or self.failures > RETRIES_MAX:
            self.state = TableState.FAILED
            self.error = error  # whoever found it whole a moment ago may have cleared it
            if told:
                log.error("table failed", extra={"table": str(self.table), "code": error.code, "reason": error.message})
        elif told:
            log.warning("table tried again", extra={"table": str(self.table), "code": error.code})

    def restore_state(self, state: TableState, error: TailraceError | None) -> None:
        """Be what it was before a load that came to nothing; what it stood still for then it stands still for again."""
        if state.is_blocked:
            self.error = error
        self.state = state

    def defer(self, error: TailraceError, seconds: float) -> None:
        """What it needs cannot be had now, however often that is; the table is left alone for a while."""
        if self.error is None or self.error.code != error.code:
            log.warning("table waits", extra={"table": str(self.table), "code": error.code, "reason": error.message})
        self.error, self.not_before = error, time.monotonic() + seconds

    def mark_outcome_unknown(self) -> None:
        """A task was at work on the table, and how far it came is not known: its worker was killed, say."""
        self.outcome_unknown_until, self.lake_version = time.monotonic() + OUTCOME_UNKNOWN_SECONDS, None

    def mark_needs_snapshot(self) -> None:
        """What it must be loaded anew for stands; a person decides when."""
        self.state = TableState.NEEDS_SNAPSHOT
        self.error = SchemaChanged(
            "the table must be loaded anew", table=self.table, why=self.reload_reason, hint=RELOAD_HINT
        )

    def record_commit(self, cursor: AppliedPosition, shape: TableSchema, version: int | None = None) -> None:
        """The table's own commit now says this."""
        self.error, self.failures, self.reload_reason, self.not_before = None, 0, None, 0.0
        self.set_applied_position(cursor, shape, version)

    def set_applied_position(self, cursor: AppliedPosition, shape: TableSchema, version: int | None = None) -> None:
        """Where the table is; whether it goes on from there is another matter."""
        self.applied_position, self.lake_version, self.outcome_unknown_until = cursor, version, 0.0
        if version is None:  # it may have been made anew
            self.lake_table_id = None
        if self.schema is None or not self.schema.same_with_facts(shape):
            self.schema, self.pending_schema = shape, None  # what was seen beside the shape of before says nothing now


@dataclass(frozen=True)
class ApplyRange:
    """Slices of the log that a table can take in one commit, and where that brings it; or a recast of the table, that
    comes before them."""

    slices: tuple[Slice, ...]
    position_after: AppliedPosition
    recast: Recast | None = None
    until: Lsn | None = None
    """Where it ends, if that is inside the last slice."""


@dataclass(frozen=True, kw_only=True)
class PendingSchema:
    """A shape that the source's catalogue showed, and a position at or after whatever made it so."""

    schema: TableSchema
    horizon: Lsn
    compared_with: TableSchema
    """What the table was when the catalogue was asked; if that very one is no longer so, it must be asked again."""


@dataclass(frozen=True, kw_only=True)
class BatchEnd:
    """What one micro-batch is to do."""

    end: int
    """The commit that it ends on."""
    has_backlog: bool
    """Whether the log has more already, which would be too much at once."""


def has_lost_identity(life: ManagedTable) -> bool:
    """Whether the source publishes only inserts of it by now. Then it stops, and is not loaded."""
    return life.insert_only and life.schema is not None and life.schema.identity is not Identity.NONE


def refuse_lost_identity(life: ManagedTable, source: SourceTable | None) -> None:
    """A mirror that was fed by updates cannot go on without them as if nothing had happened."""
    if source is None or source.identity is not Identity.NONE or life.schema is None:
        return
    if life.schema.identity is not Identity.NONE:
        raise SchemaChanged("the source table lost its replica identity", table=life.table, hint=IDENTITY_HINT)


def refuse_ahead(life: ManagedTable, change_log: ChangeLog) -> None:
    """A table that has applied commits this log does not have was fed by another past of it."""
    newest = change_log.newest()
    if life.applied_position is not None and life.applied_position.commit > newest:
        raise TableAhead(
            "the table has applied more than the log holds",
            table=life.table,
            applied=life.applied_position.commit,
            newest=newest,
            hint="Was the log restored from a copy? Put back the newer one, or run `tailrace snapshot FILE TABLE`: the "
            "table is loaded anew.",
        )


def has_missed_updates(life: ManagedTable, source: SourceTable | None) -> bool:
    """Whether updates went unseen until now, because the table had no replica identity; it is loaded anew."""
    before = life.schema is not None and life.schema.identity is Identity.NONE
    return before and source is not None and source.identity is not Identity.NONE


def stops_at_recreated(life: ManagedTable, oid: int, policies: EvolutionPolicies) -> bool:
    """Whether the source has another table of its name by now, and the table is to stop at that one's first row. It
    lacks nothing of the one before: that was published until it was dropped."""
    return (
        policies.recreate is EvolutionPolicy.STOP
        and life.schema is not None
        and life.schema.source_schema.relation != oid
    )
