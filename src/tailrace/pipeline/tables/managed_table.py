"""One managed table. Its state, its applied position, and whether it can resume from its own commit."""

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
"""Retries after temporary errors before a table counts as failed."""


OUTCOME_UNKNOWN_SECONDS = 30.0
"""Seconds after a broken Spark job until none of its tasks can still run: Spark kills them, but does not wait."""


@dataclass
class ManagedTable:
    """One table in a pipeline. Has a state, an applied position, and an error if it failed."""

    table: TableId
    location: TableLocation
    state: TableState = TableState.NEW
    applied_position: AppliedPosition | None = None
    load_floor: AppliedPosition | None = None
    """Earliest position at which the running load can commit. The log must keep everything after it."""
    load_status: LoadStatus | None = None
    """Progress of the running load."""
    last_load: LoadResult | None = None
    loaded_at: int | None = None
    """Source time when the last load had read everything, in µs since 1970. None: not known."""
    catch_up_load: str | None = None
    """Load whose catch-up has not ended. Until then rows may be newer than the applied position."""
    repairing: bool = False
    """True if a row was refetched and the log has not passed that read. Rows may be newer than the applied position."""
    apply_suspended: bool = False
    """True while an exact reload runs: it must find the table at the position of its own snapshot."""
    missing_at_source: bool = False
    """True if the source no longer has the table, and it was never loaded."""
    load_only: bool = False
    """True if the table is only loaded, and its changes are not applied."""
    may_refetch: bool = False
    """True if base rows of changes may be missing, because the table was never loaded."""
    schema: TableSchema | None = None
    pending_schema: PendingSchema | None = None
    """Schema last read from the catalogue, until the table has it."""
    reload_reason: str | None = None
    """Reason for a reload that is needed although the log has everything the table lacks."""
    error: TailraceError | None = None
    """Error that stopped the table, or that it waits to recover from.

    Other threads read it without the lock, and a failed table always has one. So it is set before that state, and
    cleared after it.
    """
    failures: int = 0
    failed_at: float = 0.0
    """Time of the last failure, by the monotonic clock."""
    not_before: float = 0.0
    """Time of the next try, by the monotonic clock; 0: the table does not wait."""
    rows_estimated: int | None = None
    rows_loaded: int = 0
    note: str | None = None
    reload_error: str | None = None
    """Reason why the last reload of a live table failed. Cleared by the next load commit."""
    lake_version: int | None = None
    """Version of the lake table at the applied position; None: not read yet."""
    lake_table_id: str | None = None
    """Identity of the lake table that has that version; None: not read yet."""
    outcome_unknown_until: float = 0.0
    """Monotonic time until which a task of a broken job may still commit; 0: no such task.

    After that time, the table itself says what was applied.
    """
    commits_since_compaction: int = 0
    """Table commits since the last upkeep."""
    bytes_changed: int = 0
    """Bytes of changes applied since this process began."""
    bytes_written: int = 0
    """Bytes of files written since this process began: by applying, recasting and compacting."""
    insert_only: bool = False
    """True if the source publishes only inserts and truncates, for lack of a replica identity."""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Lock of the thread that applies to the table, or that suspends it."""

    @property
    def ahead_of_position(self) -> bool:
        """True if rows may be newer than the applied position."""
        return self.catch_up_load is not None or self.repairing

    def update_from_source(self, source: SourceTable) -> None:
        """Take over what the source says about the table now."""
        self.note, self.insert_only = source.identity_note, source.identity is Identity.NONE

    def fail(self, error: TailraceError, *, logged: bool = True) -> None:
        """Record a failure; stop the table unless the error is temporary and retries are left."""
        self.error = error
        self.failures += 1
        self.failed_at = time.monotonic()
        temporary = error.remedy is Remedy.RETRY
        if not temporary or self.failures > RETRIES_MAX:
            self.state = TableState.FAILED
            self.error = error  # again: a thread that saw the table succeed may have cleared it meanwhile
            if logged:
                log.error("table failed", extra={"table": str(self.table), "code": error.code, "reason": error.message})
        elif logged:
            log.warning("table tried again", extra={"table": str(self.table), "code": error.code})

    def restore_state(self, state: TableState, error: TailraceError | None) -> None:
        """Return to the state before a load that failed. A blocked table gets its earlier error back."""
        if state.is_blocked:
            self.error = error
        self.state = state

    def defer(self, error: TailraceError, seconds: float) -> None:
        """Wait some seconds because something the table needs is unavailable. This does not count as a failure."""
        if self.error is None or self.error.code != error.code:
            log.warning("table waits", extra={"table": str(self.table), "code": error.code, "reason": error.message})
        self.error, self.not_before = error, time.monotonic() + seconds

    def mark_outcome_unknown(self) -> None:
        """Record that a task may have committed, for example because its worker was killed."""
        self.outcome_unknown_until, self.lake_version = time.monotonic() + OUTCOME_UNKNOWN_SECONDS, None

    def mark_needs_snapshot(self) -> None:
        """Require a reload that only a person starts; the reason stays."""
        self.state = TableState.NEEDS_SNAPSHOT
        self.error = SchemaChanged(
            "the table must be reloaded", table=self.table, why=self.reload_reason, hint=RELOAD_HINT
        )

    def record_commit(self, position: AppliedPosition, schema: TableSchema, version: int | None = None) -> None:
        """Record a table commit at this position, and clear earlier failures."""
        self.error, self.failures, self.reload_reason, self.not_before = None, 0, None, 0.0
        self.set_applied_position(position, schema, version)

    def set_applied_position(self, position: AppliedPosition, schema: TableSchema, version: int | None = None) -> None:
        """Set the applied position and schema, without clearing failures."""
        self.applied_position, self.lake_version, self.outcome_unknown_until = position, version, 0.0
        if version is None:  # it may be another table now
            self.lake_table_id = None
        if self.schema is None or not self.schema.same_with_facts(schema):
            self.schema, self.pending_schema = schema, None  # it was compared with the old schema


@dataclass(frozen=True)
class ApplyRange:
    """The slices or the recast that one table commit takes, and the position after it."""

    slices: tuple[Slice, ...]
    position_after: AppliedPosition
    recast: Recast | None = None
    until: Lsn | None = None
    """Position at which the range ends, if that is inside the last slice."""


@dataclass(frozen=True, kw_only=True)
class PendingSchema:
    """A schema read from the catalogue, and a position at or after its DDL."""

    schema: TableSchema
    horizon: Lsn
    compared_with: TableSchema
    """Schema of the table when the catalogue was read. Once it is another object, the catalogue must be read again."""


@dataclass(frozen=True, kw_only=True)
class BatchEnd:
    """End of one micro-batch."""

    end: int
    """Number of the last commit."""
    has_backlog: bool
    """True if the log has more commits than one micro-batch takes."""


def has_lost_identity(managed: ManagedTable) -> bool:
    """Return whether the source now publishes only inserts of the table. Such a table stops and is not loaded."""
    return managed.insert_only and managed.schema is not None and managed.schema.identity is not Identity.NONE


def refuse_lost_identity(managed: ManagedTable, source: SourceTable | None) -> None:
    """Refuse a table that has applied updates and whose source no longer publishes them."""
    if source is None or source.identity is not Identity.NONE or managed.schema is None:
        return
    if managed.schema.identity is not Identity.NONE:
        raise SchemaChanged("the source table lost its replica identity", table=managed.table, hint=IDENTITY_HINT)


def refuse_ahead(managed: ManagedTable, change_log: ChangeLog) -> None:
    """Refuse a table that has applied commits which the log lacks. It followed another history of the log."""
    newest = change_log.newest()
    if managed.applied_position is not None and managed.applied_position.commit > newest:
        raise TableAhead(
            "the table has applied more than the log holds",
            table=managed.table,
            applied=managed.applied_position.commit,
            newest=newest,
            hint="Check whether the log was restored from a copy. Put back the newer log, or reload the table: "
            "`tailrace snapshot FILE TABLE`.",
        )


def has_missed_updates(managed: ManagedTable, source: SourceTable | None) -> bool:
    """Return whether updates were missed until now because the table had no replica identity. It needs a reload."""
    before = managed.schema is not None and managed.schema.identity is Identity.NONE
    return before and source is not None and source.identity is not Identity.NONE


def stops_at_recreated(managed: ManagedTable, oid: int, policies: EvolutionPolicies) -> bool:
    """Return whether the table was recreated at the source, and the policy is to stop.

    The table then stops at the first row of the new one.
    The lake table lacks nothing of the dropped table, which was published until it was dropped.
    """
    return (
        policies.recreate is EvolutionPolicy.STOP
        and managed.schema is not None
        and managed.schema.source_schema.relation != oid
    )
