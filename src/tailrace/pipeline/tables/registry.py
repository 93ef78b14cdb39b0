"""Registry of managed tables: what each has applied, and what it may do next. Uses no Spark.

A table's own commit says what it has applied; `ManagedTable` is only a copy. A table without an applied position of
this log is new; nothing else decides that. The file is long because the next step of a table depends on everything
that is known about it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from tailrace.capture.postgres.catalogue import SourceTable
from tailrace.changelog.format.coverage import Coverage
from tailrace.changelog.format.gaps import Gap
from tailrace.changelog.read.index import LogIndex, Slice
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.read.row_steps import rows_after_position
from tailrace.errors import LogTrimmed, TailraceError
from tailrace.model.evolution import is_newer_version
from tailrace.model.policies import DEFAULT_POLICIES, EvolutionPolicies
from tailrace.model.position import Lsn
from tailrace.model.schema import Identity, TableId, TableSchema
from tailrace.pipeline.report import TableState
from tailrace.pipeline.tables.managed_table import (
    ApplyRange,
    BatchEnd,
    ManagedTable,
    has_missed_updates,
    refuse_ahead,
    refuse_lost_identity,
    stops_at_recreated,
)
from tailrace.tables.evolve.schema_plan import EvolutionStep, ParseValue, Recast, ReloadNeeded, no_value, plan_evolution
from tailrace.tables.location import LakeLayout, TableLocation
from tailrace.tables.port import AppliedPosition
from tailrace.tables.table_errors import not_loaded, table_went_back
from tailrace.tables.table_paths import folder_taken
from tailrace.tasks.load_store import LoadRecord, LoadStore

log = logging.getLogger(__name__)

ROWS_PER_BATCH_MAX = 500_000
"""Rows of all tables in one micro-batch, unless a single commit has more."""
ROWS_PER_APPLY_MAX = 500_000
"""Rows in one table commit, unless a single commit of the log has more."""
TRIMMED_HINT = (
    "Run `tailrace snapshot FILE TABLE` to reload the table. Raise `log.retention` or `log.max_bytes` to make the log "
    "wait longer for a table."
)
NOT_PUBLISHED = "its changes were not published for a while"
RECALL_SECONDS = 5.0


class TableRegistry:
    """The managed tables of a pipeline, and the log that they apply."""

    def __init__(
        self,
        log_reader: ChangeLog,
        layout: LakeLayout,
        policies_of: Callable[[TableId], EvolutionPolicies] = lambda _: DEFAULT_POLICIES,
        value_of: ParseValue = no_value,
        *,
        until: Lsn | None = None,
        logs_changes: bool = True,
    ) -> None:
        self.log = log_reader
        self._logs_changes = logs_changes
        """False for read-only commands, which print states instead of logging them."""
        self._until = until
        """Gaps from this position on are ignored, because no table is to reach it."""
        self._coverage_read: tuple[int, Coverage] | None = None
        """Coverage read last, with the commit up to which it is complete."""
        self.index = LogIndex(log_reader)
        self.load_store = LoadStore(log_reader.path)
        self._unfinished_read: tuple[float, list[LoadRecord]] | None = None
        self._layout = layout
        self.policies_of, self.value_of = policies_of, value_of
        self._index_lock = threading.Lock()
        self.tables: dict[TableId, ManagedTable] = {}
        self.waiting_for: str | None = None
        """Open transactions that new loads wait for, as text; None: nothing, or not known."""

    def refresh_index(self) -> int:
        """Read new commits into the index; return the newest commit."""
        with self._index_lock:
            self.index.grow()
            return self.index.last_commit

    def next_batch_end(self, after: int) -> BatchEnd:
        """Read new commits into the index; return where the next micro-batch ends."""
        with self._index_lock:
            self.index.grow()
            end = self.index.furthest_commit(after, ROWS_PER_BATCH_MAX)
            return BatchEnd(end=end, has_backlog=end < self.index.last_commit)

    def add(self, table: TableId, source: SourceTable | None = None, mode: str = "initial") -> ManagedTable:
        """Add a table, and restore its state from its own commit."""
        folder = self._layout.root / table.schema / table.name  # until the layout has checked the name
        managed = ManagedTable(table, TableLocation(path=folder, log_id=self.log.log_id))
        managed.load_only, managed.may_refetch = mode == "initial_only", mode in ("schema_only", "never")
        if source is not None:
            managed.rows_estimated = source.rows_estimated
            managed.update_from_source(source)
        self._restore(managed, source)
        self.tables[table] = managed  # last: other threads use it as soon as it is here
        return managed

    def restart_table(self, managed: ManagedTable, source: SourceTable) -> None:
        """Restore a failed table from its own commit, as at a start."""
        with managed.lock:
            managed.update_from_source(source)
            managed.state = TableState.NEW
            (
                managed.error,
                managed.failures,
                managed.reload_reason,
                managed.pending_schema,
                managed.missing_at_source,
            ) = (None, 0, None, None, False)
            managed.not_before = 0.0
            self._restore(managed, source)

    def _restore(self, managed: ManagedTable, source: SourceTable | None) -> None:
        """Read the table's own commit, and decide whether it can resume from there."""
        table = managed.table
        try:
            managed.location = self._layout.location(table, self.log.log_id)
            lake_table = managed.location.open_for_reading()
            if (schema := lake_table.schema()) is not None and schema.table != table:
                raise folder_taken(managed.location.path, schema.table, table)
            managed.applied_position, managed.schema = lake_table.applied_position(), schema
            self._restore_load(managed)
            recreated = source is not None and stops_at_recreated(managed, source.oid, self.policies_of(table))
            refuse_lost_identity(managed, source)  # first: its inserts are published again, which would start a load
            if managed.applied_position is not None and (
                recreated or not (self.has_missing_changes(managed) or has_missed_updates(managed, source))
            ):
                loaded_once = managed.load_only and managed.catch_up_load is None
                managed.state = TableState.LOADED if loaded_once else TableState.CATCHING_UP
                refuse_ahead(managed, self.log)
        except TailraceError as error:
            managed.fail(error, logged=self._logs_changes)

    def refresh_from_table(self, managed: ManagedTable) -> None:
        """Read the table's own commit again if the outcome of its last task is unknown.

        The caller holds the table's lock.
        """
        if not managed.outcome_unknown_until or managed.applied_position is None:
            return
        until, before = managed.outcome_unknown_until, managed.applied_position
        known = time.monotonic() >= until
        try:
            table = managed.location.open_for_reading()
            applied, schema = table.applied_position(), table.schema()
            if applied is None or schema is None:
                raise not_loaded(managed.location.path)
            if applied.load == before.load and applied.seq < before.seq:
                raise table_went_back(managed.location.path, applied, before)
        except TailraceError as error:
            managed.fail(error)
            return
        if applied != before and not managed.state.is_blocked:  # the task did commit
            managed.error, managed.failures = None, 0
        managed.set_applied_position(applied, schema)
        managed.outcome_unknown_until = 0.0 if known else until
        if applied.load != before.load:
            self.update_repair_state(managed)

    def _restore_load(self, managed: ManagedTable) -> None:
        """Take over load records that an earlier process left."""
        for record in self._unfinished_loads():
            if record.table != managed.table:
                continue
            if managed.applied_position is not None and managed.applied_position.load == record.id:
                managed.catch_up_load, managed.load_floor = record.id, None  # the other loads are older
            else:
                managed.load_floor = managed.load_floor or self.applied_position_at(record.log_needed_after)
        self.update_repair_state(managed)

    def update_repair_state(self, managed: ManagedTable) -> None:
        """Find whether the table may hold rows newer than its applied position."""
        if managed.applied_position is None or managed.applied_position.load is None or managed.load_only:
            return
        load = self.load_store.committed_load(managed.applied_position.load)
        managed.repairing = load is not None and load.ahead_until(managed.applied_position.position) is not None
        managed.loaded_at = load.source_time if load is not None else None
        if managed.repairing and managed.state is TableState.LIVE:
            managed.state = TableState.CATCHING_UP

    def _unfinished_loads(self) -> list[LoadRecord]:
        """Return the unfinished loads. Read once for all tables, because tables are added by the hundred."""
        if self._unfinished_read is None or time.monotonic() > self._unfinished_read[0] + RECALL_SECONDS:
            self._unfinished_read = (time.monotonic(), self.load_store.unfinished_loads())
        return self._unfinished_read[1]

    def applied_position_at(self, position: Lsn) -> AppliedPosition:
        """Return the applied position of a table that has everything committed up to a position.

        A commit that contains the position does not count as applied by number; its rows are compared by position.
        """
        commit = self.index.commit_at(position)
        return AppliedPosition(seq=self.index.next_seq(commit) - 1, commit=commit, position=position)

    def _has_caught_up(self, managed: ManagedTable) -> bool:
        """Return whether the log has passed the table's load and all rows refetched since."""
        if not managed.ahead_of_position or managed.applied_position is None:
            return True
        position = self.index.position  # read before the slices up to it
        reached = managed.applied_position.position if self.pending(managed, self.index.last_commit) else position
        if (
            managed.catch_up_load is not None
            and (until := self.load_store.catch_up_until(managed.catch_up_load)) is not None
        ):
            return reached >= until
        # The loading thread may have ended the load meanwhile; the record of committed loads still has its ranges.
        until = self.load_store.ahead_until(managed.applied_position.load or "", managed.applied_position.position)
        return until is None or reached >= until

    def pending(self, managed: ManagedTable, to: int) -> list[Slice]:
        """Return the slices up to a commit that the table has not applied, in order."""
        if managed.applied_position is None:
            return []
        covered = self.index.commit_at(managed.applied_position.position)
        pending = [
            item
            for number in self.log_numbers(managed)
            for item in self.index.pending(number, managed.applied_position.seq, to)
            if item.last > covered
        ]
        return sorted(pending, key=lambda item: item.last_seq)

    def log_numbers(self, managed: ManagedTable) -> list[int]:
        """Return the log's numbers for the table: one, unless it was dropped and created again."""
        return self.log.schemas.current_numbers(managed.table, managed.schema.relation if managed.schema else None)

    def log_numbers_of(self, schema: TableSchema) -> list[int]:
        """Return the log's numbers for the table with this schema."""
        return self.log.schemas.current_numbers(schema.table, schema.relation)

    def skip_trimmed(self, schema: TableSchema, applied: AppliedPosition) -> AppliedPosition:
        """Return the first position at or after `applied` from which the log is not trimmed."""
        trimmed = self.index.trimmed_after_position(self.log_numbers_of(schema), applied.seq, applied.position)
        return (
            applied
            if trimmed is None
            else replace(self.applied_position_at(self.index.end_of(trimmed.commit)), load=applied.load)
        )

    def schema_after(self, schema: TableSchema, applied: AppliedPosition) -> TableSchema:
        """Return the schema of the first rows that the log has after an applied position. Without any, `schema`."""
        pending = [
            item
            for number in self.log_numbers_of(schema)
            for item in self.index.pending(number, applied.seq, self.index.last_commit)
        ]
        first = min(pending, key=lambda item: item.last_seq, default=None)
        return schema if first is None else self.log.schemas.get(first.table, first.schema).schema

    def next_range(self, managed: ManagedTable, end: int) -> ApplyRange | None:
        """Return the next range that the table can apply; None: its state has the reason."""
        if (
            managed.state.is_blocked
            or managed.reload_reason is not None
            or managed.applied_position is None
            or managed.schema is None
        ):
            return None
        if self._refuse_trimmed(managed) or self._reload_after_gap(managed) or managed.apply_suspended:
            return None
        if managed.load_only and self._has_caught_up(managed):
            managed.state, managed.catch_up_load, managed.repairing = TableState.LOADED, None, False
            return None
        reached = self.index.position  # read before the slices up to it
        pending = self.pending(managed, self.index.last_commit)
        if pending and self._reload_after_recapture(managed, pending):
            return None
        if (step := self._pending_step(managed, reached, pending)) is not None:
            return self._range_of_step(managed, step)
        taken: list[Slice] = []
        fitting: set[tuple[int, int]] = set()
        rows = 0
        for item in pending:
            if item.first > end or (taken and rows + item.rows > ROWS_PER_APPLY_MAX):
                break
            if (item.table, item.schema) not in fitting and (
                step := self.schema_change_before(managed, item)
            ) is not None:
                if taken:
                    break
                return self._range_of_step(managed, step)
            if self.index.start_of(item.first) >= managed.applied_position.position:
                fitting.add((item.table, item.schema))
            taken.append(item)
            rows += item.rows
        if not taken:
            if managed.state.is_applying and self._has_caught_up(managed):
                managed.state, managed.catch_up_load, managed.repairing = TableState.LIVE, None, False
            return None
        return ApplyRange(
            tuple(taken),
            self.position_after(managed.applied_position, taken, pending[len(taken) :], max(end, taken[-1].last)),
        )

    def position_after(
        self, applied: AppliedPosition, taken: list[Slice], remaining: list[Slice], last: int
    ) -> AppliedPosition:
        """Return the position of a table after it has applied slices up to a commit.

        One commit may have several slices of a table. The position must not pass those that remain.
        """
        if remaining:
            last = min(last, remaining[0].first - 1)
        seq = max(self.index.next_seq(last) - 1, taken[-1].last_seq)
        return replace(applied, seq=seq, commit=last, position=max(applied.position, self.index.end_of(last)))

    def _pending_step(self, managed: ManagedTable, reached: Lsn, pending: list[Slice]) -> EvolutionStep | None:
        """Return the step to the catalogue's schema, once no older row is pending."""
        pending_schema = managed.pending_schema
        if pending_schema is None or managed.schema is None:
            return None
        if pending_schema.compared_with is managed.schema:
            if reached < pending_schema.horizon or any(
                self.index.start_of(item.first) < pending_schema.horizon for item in pending
            ):
                return None
            if (step := self.plan_schema_change(managed, pending_schema.schema)) is not None:
                return step
        if managed.pending_schema is pending_schema:  # a newer one may have been set meanwhile
            managed.pending_schema = None
        return None

    def check_trimmed(self) -> None:
        """Check whether failed tables have lost rows by retention. Then that is the error to show."""
        for managed in list(self.tables.values()):
            if managed.state is TableState.FAILED:
                self._refuse_trimmed(managed)

    def complete_from(self, table: TableId) -> Lsn | None:
        """Return the position from which the table is complete in the log. None: it is complete everywhere."""
        published = self.log.coverage().complete_from(table)
        return max([*(gap.end for gap in self._gaps()), *([published] if published else [])], default=None)

    def has_missing_changes(self, managed: ManagedTable) -> bool:
        """Return whether the log lacks changes after the applied position. False for a table that is only loaded."""
        since = (
            self.complete_from(managed.table) if not managed.load_only or managed.catch_up_load is not None else None
        )
        return since is not None and managed.applied_position is not None and managed.applied_position.position < since

    def missing_from(self, managed: ManagedTable) -> Lsn | None:
        """Return the position after which the log first lacks changes that the table needs. None: it lacks none."""
        assert managed.applied_position is not None, "a table that was loaded"
        position = managed.applied_position.position
        starts = [gap.start for gap in self._gaps() if gap.end > position]
        recaptured = [start.announced_at for start in self.log.coverage().starts if start.table == managed.table]
        # The end of the earlier coverage is not known; just before the new start there are certainly no rows.
        starts += [Lsn(since.value - 1) for since in recaptured if since > position]
        return min(starts, default=None)

    def needs_full_load(self, managed: ManagedTable) -> bool:
        """Return whether only a load of the whole table can complete it."""
        owed = managed.schema is not None and managed.schema.owed
        return (
            managed.state is TableState.NEW
            or managed.reload_reason is not None
            or owed
            or self.has_missing_changes(managed)
        )

    def _gaps(self) -> list[Gap]:
        gaps = [gap for gap in self.log.gaps() if gap.commit <= self.index.last_commit]
        return gaps if self._until is None else [gap for gap in gaps if gap.start < self._until]

    def has_gap(self, managed: ManagedTable) -> bool:
        """Return whether a gap of the log lies after the applied position."""
        return managed.applied_position is not None and any(
            gap.end > managed.applied_position.position for gap in self._gaps()
        )

    def _reload_after_gap(self, managed: ManagedTable) -> bool:
        """Require a reload if a gap lies ahead of the table; return whether one does."""
        if has_gap := self.has_gap(managed):
            self.require_reload(managed, "the source had discarded changes before they were read")
        return has_gap

    def _reload_after_recapture(self, managed: ManagedTable, pending: list[Slice]) -> bool:
        """Require a reload if the table was not published for a while. Return whether that is so.

        The schema shows the two other cases: a new table of the same name, and a lost identity, for which it stops.
        """
        assert managed.applied_position is not None, "a table that can apply"
        assert managed.schema is not None, "a table that can apply"
        since = self._coverage().recaptured_from(managed.table)
        if since is None or managed.applied_position.position >= since or managed.load_only:
            return False
        schemas = {self.log.schemas.get(item.table, item.schema).schema for item in pending}
        if managed.schema.identity is not Identity.NONE and any(schema.identity is Identity.NONE for schema in schemas):
            return False
        self.require_reload(managed, NOT_PUBLISHED)
        return True

    def _coverage(self) -> Coverage:
        """Return the coverage up to the index's last commit. Coverage is written before the rows it is about."""
        commit = self.index.last_commit
        if self._coverage_read is None or self._coverage_read[0] < commit:
            self._coverage_read = (commit, self.log.coverage())
        return self._coverage_read[1]

    def _refuse_trimmed(self, managed: ManagedTable) -> bool:
        """Stop the table if the log no longer holds what it lacks. Return whether that is so."""
        if managed.applied_position is None:
            return False
        trimmed = self.index.trimmed_after_position(
            self.log_numbers(managed), managed.applied_position.seq, managed.applied_position.position
        )
        if trimmed is None:
            return False
        managed.error = LogTrimmed(
            "the log no longer holds what the table lacks",
            table=managed.table,
            applied=managed.applied_position.commit,
            gone_to=trimmed.commit,
            why=trimmed.why,
            hint=TRIMMED_HINT,
        )
        managed.state = TableState.NEEDS_SNAPSHOT
        if self._logs_changes:
            log.error("table needs a snapshot", extra={"table": str(managed.table), "code": managed.error.code})
        return True

    def waits_for_log(self, managed: ManagedTable) -> bool:
        """Return whether the table has applied the whole log but has read newer rows."""
        waits = managed.ahead_of_position and managed.state is TableState.CATCHING_UP
        return waits and not self.pending(managed, self.index.last_commit) and not self._has_caught_up(managed)

    def is_caught_up(self, commit: int, *, but: Collection[TableId] = ()) -> bool:
        """Return whether every table that can apply has reached the commit, except those in `but`."""
        return all(
            managed.table in but
            or managed.state.is_blocked
            or managed.state in (TableState.LOADED, TableState.PAUSED)
            or (managed.state is TableState.LIVE and not self.pending(managed, commit) and not self.has_gap(managed))
            for managed in list(self.tables.values())
        )

    def schema_change_before(self, managed: ManagedTable, item: Slice) -> EvolutionStep | None:
        """Return the schema change that the table needs before it can apply the slice."""
        assert managed.applied_position is not None, "a table that can apply"
        assert managed.schema is not None, "a table that can apply"
        schema = self.schema_of_slice(managed.schema, item)
        step = self.plan_schema_change(managed, schema) if is_newer_version(managed.schema, schema) else None
        if step is None or self.index.start_of(item.first) >= managed.applied_position.position:
            return step
        # The load point is inside the slice: rows that the load has read may have an older schema.
        rows = self.log.read(
            item.first, item.last, tables=[item.table], after_seq=managed.applied_position.seq, to_seq=item.last_seq
        )
        return (
            step if any(len(rows_after_position(batch, managed.applied_position.position)) for batch in rows) else None
        )

    def schema_of_slice(self, own: TableSchema, item: Slice) -> TableSchema:
        """Return the schema of a slice's rows. If another table has the name since, return that table's."""
        schema = self.log.schemas.get(item.table, item.schema).schema
        if (schema.table, schema.relation) == (own.table, own.relation):
            return schema
        named = [version.schema for version in self.log.schemas.versions_after(0) if version.schema.table == own.table]
        return named[-1] if named and named[-1].relation != own.relation else schema

    def plan_schema_change(self, managed: ManagedTable, new: TableSchema) -> EvolutionStep | None:
        """Return the schema change that the table needs to apply rows of another schema."""
        assert managed.schema is not None, "a table that can apply"
        return plan_evolution(
            managed.schema, new, self.policies_of(managed.table), self.value_of, managed.location.spec
        )

    def _range_of_step(self, managed: ManagedTable, step: EvolutionStep) -> ApplyRange | None:
        """Return the range that is only a recast; otherwise stop the table with the reason."""
        assert managed.applied_position is not None, "a table that can apply"
        if isinstance(step, Recast):
            return ApplyRange((), managed.applied_position, step)
        if isinstance(step, ReloadNeeded):
            self.require_reload(managed, step.why)
        else:
            managed.fail(step, logged=self._logs_changes)
        return None

    def require_reload(self, managed: ManagedTable, why: str) -> None:
        """Require a reload, because the log cannot complete the table."""
        managed.reload_reason, managed.pending_schema, managed.state = why, None, TableState.REFRESHING
        if managed.may_refetch:  # its load mode excludes an automatic load
            managed.mark_needs_snapshot()
        if self._logs_changes:
            log.info("table must be reloaded", extra={"table": str(managed.table), "why": why})
