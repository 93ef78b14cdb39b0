"""Each table's life, as far as the log and the table itself tell it; no Spark in here.

A table's own commit says what it has; `TableLife` keeps only a copy of that. A table that holds no position of
this log is new, and nothing else decides that. The file is longer than most because what a table may do next hangs on
all that is known of it.
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
"""Of all tables in one micro-batch, unless a single commit has more."""
ROWS_PER_APPLY_MAX = 500_000
"""Of one table in one commit, unless a single commit of the log has more."""
TRIMMED_HINT = (
    "Run `tailrace snapshot FILE TABLE`: the table is loaded anew. `log.retention` and `log.max_bytes` say "
    "for how long the log waits for a table."
)
NOT_PUBLISHED = "its changes were not published for a while"
RECALL_SECONDS = 5.0


class TableRegistry:
    """The tables of a pipeline beside the log they are fed from."""

    def __init__(
        self,
        log_reader: ChangeLog,
        layout: LakeLayout,
        policies_of: Callable[[TableId], EvolutionPolicies] = lambda _: DEFAULT_POLICIES,
        value_of: ParseValue = no_value,
        *,
        until: Lsn | None = None,
        tells: bool = True,
    ) -> None:
        self.log = log_reader
        self._tells = tells
        """Whether what becomes of tables is logged; who only looks shows it himself."""
        self._until = until
        """What the source had discarded after this counts for nothing, since no table is to come there."""
        self._read_published: tuple[int, Coverage] | None = None
        """And up to which commit that is whole."""
        self.index = LogIndex(log_reader)
        self.load_store = LoadStore(log_reader.path)
        self._recorded: tuple[float, list[LoadRecord]] | None = None
        self._layout = layout
        self.policies_of, self.value_of = policies_of, value_of
        self._growing = threading.Lock()
        self.tables: dict[TableId, ManagedTable] = {}
        self.waiting_for: str | None = None
        """What loads that have not begun wait for, as far as that is known."""

    def refresh_index(self) -> int:
        """Take in what the log has got; its newest commit."""
        with self._growing:
            self.index.grow()
            return self.index.last_commit

    def next_batch_end(self, after: int) -> BatchEnd:
        """Take in what the log has got; the commit up to which one micro-batch goes."""
        with self._growing:
            self.index.grow()
            end = self.index.furthest_commit(after, ROWS_PER_BATCH_MAX)
            return BatchEnd(end=end, has_backlog=end < self.index.last_commit)

    def add(self, table: TableId, source: SourceTable | None = None, mode: str = "initial") -> ManagedTable:
        """Begin to follow a table from what its own commit says."""
        folder = self._layout.root / table.schema / table.name  # until it is known whether that can be one
        life = ManagedTable(table, TableLocation(path=folder, log_id=self.log.log_id))
        life.load_only, life.may_refetch = mode == "initial_only", mode in ("schema_only", "never")
        if source is not None:
            life.rows_estimated = source.rows_estimated
            life.update_from_source(source)
        self._stand(life, source)
        self.tables[table] = life  # only now: others look at it as soon as it is here
        return life

    def restart_table(self, life: ManagedTable, source: SourceTable) -> None:
        """Look anew where a failed table stands, as at a start."""
        with life.lock:
            life.update_from_source(source)
            life.state = TableState.NEW
            life.error, life.failures, life.reload_reason, life.pending_schema, life.missing_at_source = (
                None,
                0,
                None,
                None,
                False,
            )
            life.not_before = 0.0
            self._stand(life, source)

    def _stand(self, life: ManagedTable, source: SourceTable | None) -> None:
        """What the table's own commit says, and whether it can go on from there."""
        table = life.table
        try:
            life.location = self._layout.location(table, self.log.log_id)
            lake_table = life.location.open_for_reading()
            if (shape := lake_table.schema()) is not None and shape.table != table:
                raise folder_taken(life.location.path, shape.table, table)
            life.applied_position, life.schema = lake_table.applied_position(), shape
            self._recall(life)
            stops = source is not None and stops_at_recreated(life, source.oid, self.policies_of(table))
            refuse_lost_identity(life, source)  # first: it is published anew for its inserts, and loads by itself then
            if life.applied_position is not None and (
                stops or not (self.has_missing_changes(life) or has_missed_updates(life, source))
            ):
                over = life.load_only and life.catch_up_load is None
                life.state = TableState.LOADED if over else TableState.CATCHING_UP
                refuse_ahead(life, self.log)
        except TailraceError as error:
            life.fail(error, told=self._tells)

    def refresh_from_table(self, life: ManagedTable) -> None:
        """Go by what the table's own commit says, if nobody heard how far the last task came. Whoever calls holds the
        table's lock."""
        if not life.outcome_unknown_until or life.applied_position is None:
            return
        until, before = life.outcome_unknown_until, life.applied_position
        over = time.monotonic() >= until
        try:
            table = life.location.open_for_reading()
            cursor, shape = table.applied_position(), table.schema()
            if cursor is None or shape is None:
                raise not_loaded(life.location.path)
            if cursor.load == before.load and cursor.seq < before.seq:
                raise table_went_back(life.location.path, cursor, before)
        except TailraceError as error:
            life.fail(error)
            return
        if cursor != before and not life.state.is_blocked:  # it was done after all
            life.error, life.failures = None, 0
        life.set_applied_position(cursor, shape)
        life.outcome_unknown_until = 0.0 if over else until
        if cursor.load != before.load:
            self.update_repair_state(life)

    def _recall(self, life: ManagedTable) -> None:
        """What an earlier process left of a load."""
        for seed in self._unfinished():
            if seed.table != life.table:
                continue
            if life.applied_position is not None and life.applied_position.load == seed.id:
                life.catch_up_load, life.load_floor = seed.id, None  # older ones were before it
            else:
                life.load_floor = life.load_floor or self.applied_position_at(seed.log_needed_after)
        self.update_repair_state(life)

    def update_repair_state(self, life: ManagedTable) -> None:
        """What is on record of rows that were read: the table may hold newer ones than its position says."""
        if life.applied_position is None or life.applied_position.load is None or life.load_only:
            return
        landed = self.load_store.committed_load(life.applied_position.load)
        life.repairing = landed is not None and landed.ahead_until(life.applied_position.position) is not None
        life.loaded_at = landed.source_time if landed is not None else None
        if life.repairing and life.state is TableState.LIVE:
            life.state = TableState.CATCHING_UP

    def _unfinished(self) -> list[LoadRecord]:
        """The loads on record. Tables are added by the hundred, so they are looked up once for all of them."""
        if self._recorded is None or time.monotonic() > self._recorded[0] + RECALL_SECONDS:
            self._recorded = (time.monotonic(), self.load_store.unfinished_loads())
        return self._recorded[1]

    def applied_position_at(self, position: Lsn) -> AppliedPosition:
        """Where a table stands that has all that ended at or before the position.

        A commit that straddles the point is not covered by number; its rows are told by position.
        """
        commit = self.index.commit_at(position)
        return AppliedPosition(seq=self.index.next_seq(commit) - 1, commit=commit, position=position)

    def _replayed(self, life: ManagedTable) -> bool:
        """Whether the log has passed the last chunk of the load that the table came from, and rows read again since."""
        if not life.ahead_of_position or life.applied_position is None:
            return True
        position = self.index.position  # before we look what there is up to it
        reached = life.applied_position.position if self.pending(life, self.index.last_commit) else position
        if (
            life.catch_up_load is not None
            and (passed := self.load_store.catch_up_until(life.catch_up_load)) is not None
        ):
            return reached >= passed
        # Whoever loads may have ended it since we saw it on record; what it landed with is remembered.
        passed = self.load_store.ahead_until(life.applied_position.load or "", life.applied_position.position)
        return passed is None or reached >= passed

    def pending(self, life: ManagedTable, to: int) -> list[Slice]:
        """What the log holds for the table up to a commit and the table has not covered."""
        if life.applied_position is None:
            return []
        covered = self.index.commit_at(life.applied_position.position)
        found = [
            item
            for number in self.log_numbers(life)
            for item in self.index.pending(number, life.applied_position.seq, to)
            if item.last > covered
        ]
        return sorted(found, key=lambda item: item.last_seq)

    def log_numbers(self, life: ManagedTable) -> list[int]:
        """The log's numbers for the table: one, unless it was dropped and made again."""
        return self.log.schemas.current_numbers(life.table, life.schema.relation if life.schema else None)

    def log_numbers_of(self, shape: TableSchema) -> list[int]:
        """The same for a table of this shape."""
        return self.log.schemas.current_numbers(shape.table, shape.relation)

    def skip_trimmed(self, shape: TableSchema, cursor: AppliedPosition) -> AppliedPosition:
        """The cursor; or the first after it that the log still holds everything of the table from."""
        gone = self.index.trimmed_after_position(self.log_numbers_of(shape), cursor.seq, cursor.position)
        return (
            cursor
            if gone is None
            else replace(self.applied_position_at(self.index.end_of(gone.commit)), load=cursor.load)
        )

    def schema_after(self, shape: TableSchema, cursor: AppliedPosition) -> TableSchema:
        """The shape of the table's first rows that the log has after a cursor; if it has none, the given one."""
        pending = [
            item
            for number in self.log_numbers_of(shape)
            for item in self.index.pending(number, cursor.seq, self.index.last_commit)
        ]
        first = min(pending, key=lambda item: item.last_seq, default=None)
        return shape if first is None else self.log.schemas.get(first.table, first.schema).schema

    def next_range(self, life: ManagedTable, end: int) -> ApplyRange | None:
        """The next stretch the table can take; None when there is none, and then its state says why."""
        if (
            life.state.is_blocked
            or life.reload_reason is not None
            or life.applied_position is None
            or life.schema is None
        ):
            return None
        if self._refuse_trimmed(life) or self._notice_gap(life) or life.apply_suspended:
            return None
        if life.load_only and self._replayed(life):
            life.state, life.catch_up_load, life.repairing = TableState.LOADED, None, False
            return None
        reached = self.index.position  # before we look what there is up to it
        pending = self.pending(life, self.index.last_commit)
        if pending and self._notice_coming(life, pending):
            return None
        if (step := self._seen_step(life, reached, pending)) is not None:
            return self._stepped(life, step)
        taken: list[Slice] = []
        fitting: set[tuple[int, int]] = set()
        rows = 0
        for item in pending:
            if item.first > end or (taken and rows + item.rows > ROWS_PER_APPLY_MAX):
                break
            if (item.table, item.schema) not in fitting and (step := self.schema_change_before(life, item)) is not None:
                if taken:
                    break
                return self._stepped(life, step)
            if self.index.start_of(item.first) >= life.applied_position.position:
                fitting.add((item.table, item.schema))
            taken.append(item)
            rows += item.rows
        if not taken:
            if life.state.is_applying and self._replayed(life):
                life.state, life.catch_up_load, life.repairing = TableState.LIVE, None, False
            return None
        return ApplyRange(
            tuple(taken),
            self.position_after(life.applied_position, taken, pending[len(taken) :], max(end, taken[-1].last)),
        )

    def position_after(
        self, cursor: AppliedPosition, taken: list[Slice], left: list[Slice], last: int
    ) -> AppliedPosition:
        """Where a table stands that has taken slices up to a commit. One may hold several of a table; a cursor must not
        pass the ones left for later."""
        if left:
            last = min(last, left[0].first - 1)
        seq = max(self.index.next_seq(last) - 1, taken[-1].last_seq)
        return replace(cursor, seq=seq, commit=last, position=max(cursor.position, self.index.end_of(last)))

    def _seen_step(self, life: ManagedTable, reached: Lsn, pending: list[Slice]) -> EvolutionStep | None:
        """What the table must become for what the catalogue showed; no row of before is left to come."""
        told = life.pending_schema
        if told is None or life.schema is None:
            return None
        if told.compared_with is life.schema:
            if reached < told.horizon or any(self.index.start_of(item.first) < told.horizon for item in pending):
                return None
            if (step := self.plan_schema_change(life, told.schema)) is not None:
                return step
        if life.pending_schema is told:  # another may have been seen meanwhile
            life.pending_schema = None
        return None

    def check_trimmed(self) -> None:
        """See whether tables that stand still have lost rows meanwhile: then their failure is the lesser trouble."""
        for life in list(self.tables.values()):
            if life.state is TableState.FAILED:
                self._refuse_trimmed(life)

    def complete_from(self, table: TableId) -> Lsn | None:
        """A position that nothing of the table is missing after; None: nothing is missing at all."""
        published = self.log.coverage().complete_from(table)
        return max([*(gap.end for gap in self._gaps()), *([published] if published else [])], default=None)

    def has_missing_changes(self, life: ManagedTable) -> bool:
        """Whether changes are missing after where the table stands. One that is loaded only once takes none then."""
        since = self.complete_from(life.table) if not life.load_only or life.catch_up_load is not None else None
        return since is not None and life.applied_position is not None and life.applied_position.position < since

    def missing_from(self, life: ManagedTable) -> Lsn | None:
        """What the log lacks after where the table stands begins after this position; None: it lacks nothing."""
        assert life.applied_position is not None, "a table that was loaded"
        here = life.applied_position.position
        begins = [gap.start for gap in self._gaps() if gap.end > here]
        came = [coming.announced_at for coming in self.log.coverage().starts if coming.table == life.table]
        # When it went out is not known; it has no rows from there to just before it came back.
        begins += [Lsn(since.value - 1) for since in came if since > here]
        return min(begins, default=None)

    def needs_full_load(self, life: ManagedTable) -> bool:
        """Whether nothing but a load of the whole table will do."""
        owed = life.schema is not None and life.schema.owed
        return life.state is TableState.NEW or life.reload_reason is not None or owed or self.has_missing_changes(life)

    def _gaps(self) -> list[Gap]:
        known = [gap for gap in self.log.gaps() if gap.commit <= self.index.last_commit]
        return known if self._until is None else [gap for gap in known if gap.start < self._until]

    def has_gap(self, life: ManagedTable) -> bool:
        """Whether changes are missing after where the table stands."""
        return life.applied_position is not None and any(
            gap.end > life.applied_position.position for gap in self._gaps()
        )

    def _notice_gap(self, life: ManagedTable) -> bool:
        """Whether the table must not go on, because changes are missing; then it is loaded anew."""
        if lacking := self.has_gap(life):
            self.require_reload(life, "the source had discarded changes before they were read")
        return lacking

    def _notice_coming(self, life: ManagedTable, pending: list[Slice]) -> bool:
        """Whether the table must not take what came once it was published again; then it is loaded anew. Another one
        that was made under its name its shape tells of, and so does a lost identity, for which it stops."""
        assert life.applied_position is not None, "a table that takes anything"
        assert life.schema is not None, "a table that takes anything"
        since = self._published().recaptured_from(life.table)
        if since is None or life.applied_position.position >= since or life.load_only:
            return False
        schemas = {self.log.schemas.get(item.table, item.schema).schema for item in pending}
        if life.schema.identity is not Identity.NONE and any(one.identity is Identity.NONE for one in schemas):
            return False
        self.require_reload(life, NOT_PUBLISHED)
        return True

    def _published(self) -> Coverage:
        """When tables came into the publication, as far as the index goes: it is written down before their rows."""
        commit = self.index.last_commit
        if self._read_published is None or self._read_published[0] < commit:
            self._read_published = (commit, self.log.coverage())
        return self._read_published[1]

    def _refuse_trimmed(self, life: ManagedTable) -> bool:
        """Whether the log no longer holds what the table lacks; then it says so, and takes nothing."""
        if life.applied_position is None:
            return False
        gone = self.index.trimmed_after_position(
            self.log_numbers(life), life.applied_position.seq, life.applied_position.position
        )
        if gone is None:
            return False
        life.error = LogTrimmed(
            "the log no longer holds what the table lacks",
            table=life.table,
            applied=life.applied_position.commit,
            gone_to=gone.commit,
            why=gone.why,
            hint=TRIMMED_HINT,
        )
        life.state = TableState.NEEDS_SNAPSHOT
        if self._tells:
            log.error("table needs a snapshot", extra={"table": str(life.table), "code": life.error.code})
        return True

    def waits_for_log(self, life: ManagedTable) -> bool:
        """Whether the table has applied all that the log holds, and was read when the source had more."""
        waits = life.ahead_of_position and life.state is TableState.CATCHING_UP
        return waits and not self.pending(life, self.index.last_commit) and not self._replayed(life)

    def is_caught_up(self, commit: int, *, but: Collection[TableId] = ()) -> bool:
        """Whether every table that can go on has applied the log up to the commit; some may be left out."""
        return all(
            life.table in but
            or life.state.is_blocked
            or life.state in (TableState.LOADED, TableState.PAUSED)
            or (life.state is TableState.LIVE and not self.pending(life, commit) and not self.has_gap(life))
            for life in list(self.tables.values())
        )

    def schema_change_before(self, life: ManagedTable, item: Slice) -> EvolutionStep | None:
        """What the table must become before it can take the slice."""
        assert life.applied_position is not None, "a table that takes anything"
        assert life.schema is not None, "a table that takes anything"
        shape = self.schema_of_slice(life.schema, item)
        step = self.plan_schema_change(life, shape) if is_newer_version(life.schema, shape) else None
        if step is None or self.index.start_of(item.first) >= life.applied_position.position:
            return step
        # The load's point lies inside: rows that it has seen may be of a shape of before.
        rows = self.log.read(
            item.first, item.last, tables=[item.table], after_seq=life.applied_position.seq, to_seq=item.last_seq
        )
        return step if any(len(rows_after_position(batch, life.applied_position.position)) for batch in rows) else None

    def schema_of_slice(self, mine: TableSchema, item: Slice) -> TableSchema:
        """The shape of a slice's rows; where another table has taken the name over since, that one's."""
        shape = self.log.schemas.get(item.table, item.schema).schema
        if (shape.table, shape.relation) == (mine.table, mine.relation):
            return shape
        named = [version.schema for version in self.log.schemas.versions_after(0) if version.schema.table == mine.table]
        return named[-1] if named and named[-1].relation != mine.relation else shape

    def plan_schema_change(self, life: ManagedTable, new: TableSchema) -> EvolutionStep | None:
        """What the table must become to take rows of another shape."""
        assert life.schema is not None, "a table that takes anything"
        return plan_evolution(life.schema, new, self.policies_of(life.table), self.value_of, life.location.spec)

    def _stepped(self, life: ManagedTable, step: EvolutionStep) -> ApplyRange | None:
        """The stretch that is only a recast; or the table says why it goes no further."""
        assert life.applied_position is not None, "a table that takes anything"
        if isinstance(step, Recast):
            return ApplyRange((), life.applied_position, step)
        if isinstance(step, ReloadNeeded):
            self.require_reload(life, step.why)
        else:
            life.fail(step, told=self._tells)
        return None

    def require_reload(self, life: ManagedTable, why: str) -> None:
        """Nothing but a load brings the table what it lacks."""
        life.reload_reason, life.pending_schema, life.state = why, None, TableState.REFRESHING
        if life.may_refetch:  # its mode says that it is not loaded by itself
            life.mark_needs_snapshot()
        if self._tells:
            log.info("table must be loaded anew", extra={"table": str(life.table), "why": why})
