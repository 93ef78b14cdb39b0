"""Begin loads. Find the table, check that it is published, plan its chunks, take the snapshot, in that order.

An unpublished table would miss what is written while it is read, so publication is checked first. A table that is
rewritten between plan and snapshot has other files, so the plan is made first.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from tailrace import failpoints
from tailrace.capture.postgres.catalogue import SourceTable
from tailrace.capture.postgres.chunks import ChunkKind, Plan
from tailrace.capture.postgres.source import PostgresCapture
from tailrace.deadletters.store import DeadLetterStore
from tailrace.errors import SourceTableMissing, TableFailed, TableUnpublished, TailraceError, Unsupported
from tailrace.model.evolution import same_version
from tailrace.model.position import ZERO
from tailrace.model.schema import TableId, TableSchema
from tailrace.pipeline.config.settings import LoadSettings
from tailrace.pipeline.loads.history_catch_up import plan_carry_over
from tailrace.pipeline.loads.load_commit import RunTasks, commit_files
from tailrace.pipeline.loads.running_load import RunningLoad, SharedSnapshot
from tailrace.pipeline.report import LoadStatus, TableState
from tailrace.pipeline.tables.managed_table import ManagedTable
from tailrace.pipeline.tables.registry import TableRegistry
from tailrace.pipeline.tables.retention_holds import RetentionHolds
from tailrace.tables.port import AppliedPosition
from tailrace.tables.table_paths import folder_taken, overlap
from tailrace.tasks.load_store import LoadMode, LoadRecord, LoadRequest

log = logging.getLogger(__name__)

PUBLISHED_SECONDS_MAX = 30.0
"""Seconds that the capture process has to publish a new table."""

ALTERED_MAX = 20
"""Limit of restarts because a table was altered between its plan and its load point."""

_GONE_HINT = (
    "Check whether it was dropped or renamed. Create it again, and it is loaded automatically; or remove it from "
    "`source.tables`."
)

WaitingTables = list[tuple[ManagedTable, LoadRequest | None]]
PlannedLoads = list[tuple[ManagedTable, Plan, LoadRequest | None]]


class LoadStarter:
    """Begins loads, one group after another. It may have to wait for open transactions of the source."""

    def __init__(
        self,
        settings: LoadSettings,
        source: PostgresCapture,
        registry: TableRegistry,
        retention_holds: RetentionHolds,
        *,
        run: RunTasks,
        begun: Callable[[RunningLoad], None],
        failed: Callable[[ManagedTable, TailraceError], None],
        stopping: threading.Event,
    ) -> None:
        self._run = run
        self._settings = settings
        self._source = source
        self._registry = registry
        self._retention_holds = retention_holds
        self._begun = begun
        self._failed = failed
        self._stopping = stopping
        self._first_seen_at: dict[TableId, float] = {}
        self._times_altered: dict[TableId, int] = {}
        self._known_count = 0
        """Number of tables in the log when tables were last discovered."""
        self.chunked_only: set[TableId] = set()
        """Tables that could not be loaded in one snapshot."""

    @property
    def has_unseen_tables(self) -> bool:
        """True if the log has tables, discovered by their rows, that are not managed yet."""
        return self._source.discovers_tables and self._known_count < len(self._registry.log.schemas.latest())

    def discover_tables(self) -> None:
        """Read which tables the source has. Manage new ones, and retry failed ones that a person requests."""
        retries = self._registry.load_store.retry_requests()  # first: the person mended the source before asking
        known = self._registry.log.schemas.latest() if self._source.discovers_tables else []
        self._source.learn_tables(version.schema for version in known)
        try:
            source_tables = {table.table: table for table in self._source.tables()}
        except TailraceError:
            return  # the readers report a source that is gone
        self._update_tables(source_tables)
        self._known_count = len(known)  # last: all tables are managed before `has_unseen_tables` says so
        self._retry(retries, source_tables)

    def _update_tables(self, source_tables: dict[TableId, SourceTable]) -> None:
        """Add tables that were created or renamed since, and fail new ones that are gone."""
        for managed in list(self._registry.tables.values()):
            if managed.table not in source_tables and managed.state is TableState.NEW:
                managed.missing_at_source = True
                managed.fail(SourceTableMissing("the source has no such table", table=managed.table, hint=_GONE_HINT))
            elif managed.missing_at_source and managed.table in source_tables and managed.state is TableState.FAILED:
                managed.missing_at_source, managed.state, managed.error, managed.failures = (
                    False,
                    TableState.NEW,
                    None,
                    0,
                )
        for table, source in source_tables.items():
            if (known := self._registry.tables.get(table)) is not None:
                known.update_from_source(source)
            else:
                log.info("table found", extra={"table": str(table)})
                self._registry.add(table, source, self._settings.mode_of(table))

    def _retry(self, retries: Iterable[TableId], source_tables: dict[TableId, SourceTable]) -> None:
        for table in retries:
            managed = self._registry.tables.get(table)
            if managed is not None and managed.state is TableState.FAILED and table in source_tables:
                log.info("table tried again", extra={"table": str(table)})
                self._registry.restart_table(managed, source_tables[table])
            self._registry.load_store.clear_retry(table)

    def start_loads(self, waiting: WaitingTables) -> None:
        """Begin a load of each table; a load that cannot begin fails its table."""
        planned: PlannedLoads = []
        for managed, request in self._published_only(waiting):
            if request is not None and request.where is not None and self._registry.needs_full_load(managed):
                request = replace(request, where=None)  # the table needs a full load
            mode = self._settings.mode_of(managed.table)
            if request is None and managed.applied_position is None and mode in ("schema_only", "never"):
                self._make_empty(managed, mode)
            elif managed.location.spec.holds_messages and managed.applied_position is None and not managed.load_only:
                # The log may have rows that the source has deleted since. Apply the log first, then load what exists.
                if request is None:
                    self._registry.load_store.add_request(LoadRequest(table=managed.table, mode=LoadMode.REFRESH))
                self._make_empty(managed, "never")
            elif (plan := self._plan(managed, request)) is not None:
                planned.append((managed, plan, request))
        chunked = [item for item in planned if item[1].schema.key and self._wants_chunked(item[0])]
        exact = [item for item in planned if item not in chunked]
        for some, begin in ((exact, self._begin_exact), (chunked, self._begin_chunked)):
            if some:
                try:
                    begin(some)
                except TailraceError as error:
                    for managed, _, _ in some:
                        self._failed(managed, error)

    def _wants_chunked(self, managed: ManagedTable) -> bool:
        if self._settings.way == "exact" or managed.location.spec.needs_exact_load:
            return False
        return (
            self._settings.way == "chunked" or self._settings.standby is not None or managed.table in self.chunked_only
        )

    def _plan(self, managed: ManagedTable, request: LoadRequest | None) -> Plan | None:
        """Plan the chunks before the snapshot, so that a rewrite in between is noticed."""
        cut = (
            ChunkKind.PLACE
            if self._settings.way == "exact" or managed.location.spec.needs_exact_load
            else ChunkKind.EITHER
        )
        if self._wants_chunked(managed):
            cut = ChunkKind.KEY
        try:
            _refuse_overlap(managed, self._registry)
            managed.location.open_for_reading().refuse_foreign(managed.table)
            plan = self._source.plan(managed.table, cut, self._settings.chunk)
            if not plan.schema.columns:
                self._refuse_unpublished(managed.table)
            if request is not None and not plan.schema.key and (request.where or request.mode is LoadMode.REFRESH):
                raise Unsupported(
                    "a table without a key can only be reloaded as a whole",
                    table=managed.table,
                    hint="Leave out --where and --mode refresh, or give the table a primary key.",
                )
            self._refuse_spec(managed, plan.schema, request)
            return plan
        except TailraceError as error:
            self._failed(managed, error)
            return None

    def _refuse_unpublished(self, table: TableId) -> None:
        """Refuse a table that has columns but publishes none. It was created again since it was checked."""
        now = self._source.describe([table], unpublished=True)
        if table in now and now[table].columns:
            raise _unpublished(table, self._source.settings.publication)

    def _refuse_spec(self, managed: ManagedTable, schema: TableSchema, request: LoadRequest | None) -> None:
        """Refuse an unstorable schema, and a load that would remove the past the table keeps."""
        spec = managed.location.spec
        spec.stored_schema(schema)
        if request is not None and request.where is not None:
            spec.refuse_partial_load(managed.table)
        elif spec.keeps_past:
            plan_carry_over(self._registry, managed, schema, asked=request is not None)

    def _begin_exact(self, planned: PlannedLoads) -> None:
        self._publish_waiting(planned, "exact")
        for managed, _, _ in planned:
            if managed.location.spec.needs_exact_load:
                with managed.lock:  # a running apply ends before the snapshot's position
                    managed.apply_suspended = managed.applied_position is not None
        snapshot = self._source.snapshot().__enter__()
        shared = SharedSnapshot(snapshot, users=1)  # this method, until all loads have begun
        begun: list[RunningLoad] = []
        try:
            self._registry.refresh_index()
            for managed, plan, request in self._unaltered(planned):
                record = LoadRecord(
                    plan=plan, snapshot_position=snapshot.position, request=request, spec=managed.location.spec
                )
                self._record(managed, record)
                shared.acquire()
                begun.append(
                    RunningLoad(
                        managed=managed,
                        record=record,
                        unread_chunks=deque(plan.chunks),
                        staged={},
                        shared_snapshot=shared,
                    )
                )
                self._begun(begun[-1])
        finally:
            shared.release()
            if self._stopping.is_set():  # the scheduler may have released its snapshots before
                for load in begun:
                    load.release_snapshot()
        self._retention_holds.publish(now=True)

    def _begin_chunked(self, planned: PlannedLoads) -> None:
        self._publish_waiting(planned, "chunked")
        # Changes during the wait are after the load's floor, which is not known yet. So hold from the log's end.
        self._registry.refresh_index()
        for managed, _, _ in planned:
            managed.load_floor = self._registry.applied_position_at(self._registry.index.position)
        self._retention_holds.publish(now=True)
        barrier = self._source.wait_for_writers(self._stopping.is_set)
        if barrier is None:  # the process stops
            return
        for managed, plan, request in self._unaltered(planned):
            record = LoadRecord(
                plan=plan, snapshot_position=None, barrier=barrier, request=request, spec=managed.location.spec
            )
            self._record(managed, record)
            self._begun(
                RunningLoad(
                    managed=managed,
                    record=record,
                    unread_chunks=deque(plan.chunks),
                    staged={},
                    shared_snapshot=None,
                    barrier_position=barrier.ceiling,
                )
            )

    def _unaltered(self, planned: PlannedLoads) -> PlannedLoads:
        """Return the loads whose tables were not altered up to the load point.

        The others begin again, because what was written to them since is not in the catch-up.
        """
        current = self._source.describe(managed.table for managed, _, _ in planned)
        unaltered: PlannedLoads = []
        for managed, plan, request in planned:
            if managed.table in current and same_version(plan.schema, current[managed.table]):
                self._times_altered.pop(managed.table, None)
                unaltered.append((managed, plan, request))
                continue
            managed.load_floor, managed.load_status, managed.apply_suspended = None, None, False
            self._times_altered[managed.table] = self._times_altered.get(managed.table, 0) + 1
            log.info("load begins again: the table was altered", extra={"table": str(managed.table)})
            if self._times_altered[managed.table] >= ALTERED_MAX:
                del self._times_altered[managed.table]
                self._failed(
                    managed,
                    TableFailed(
                        "the table is altered again and again while its load begins",
                        table=managed.table,
                        hint="Load it at a time without DDL on it or its partitions: `tailrace snapshot FILE TABLE`.",
                    ),
                )
        return unaltered

    def _record(self, managed: ManagedTable, record: LoadRecord) -> None:
        managed.load_floor = self._registry.applied_position_at(record.log_needed_after)
        self._registry.load_store.begin(record)
        failpoints.hit("load.planned")
        log.info(
            "load begun",
            extra={"table": str(managed.table), "chunks": len(record.plan.chunks), "cut": record.plan.cut.value},
        )

    def _make_empty(self, managed: ManagedTable, mode: str) -> None:
        """Begin a table without a load. It is empty, at the log's end or where the log has it completely."""
        try:
            _refuse_overlap(managed, self._registry)
            plan = self._source.plan(managed.table, ChunkKind.PLACE, self._settings.chunk)
            self._registry.refresh_index()
            since = self._registry.complete_from(managed.table)
            end = self._registry.applied_position_at(max(self._registry.index.position, since or ZERO))
            start = (
                self._registry.applied_position_at(since)
                if since is not None
                else AppliedPosition(seq=0, commit=0, position=ZERO)
            )
            position = start if mode == "never" else end
            schema = plan.schema
            if managed.location.spec.holds_messages:
                position = self._registry.skip_trimmed(schema, position)
                schema = self._registry.schema_after(schema, position)
            # Records of refetched rows need a load id.
            position = replace(position, load=(load := uuid.uuid4().hex[:12]))
            self._registry.load_store.record_ahead_range(load, position.position)
            store = DeadLetterStore(self._registry.log.path, managed.table)
            if store.has_any:  # of an earlier lake table, in another folder or deleted
                store.before_load(load, whole=True, now=None, seq=position.seq)
            commit_files(self._run, managed, schema, (), position)
        except TailraceError as error:
            self._failed(managed, error)
            return
        managed.state = TableState.CATCHING_UP
        managed.record_commit(position, schema)

    def _published_only(self, waiting: WaitingTables) -> WaitingTables:
        """Return the tables that are published; fail the others once they had time enough."""
        try:
            published = self._source.publications_by_table()
        except TailraceError as error:
            for managed, _ in waiting:
                self._failed(managed, error)
            return []
        settings = self._source.settings
        published_tables: WaitingTables = []
        for managed, request in waiting:
            inserts_only = settings.publication_create and managed.insert_only
            publication = settings.publication_inserts if inserts_only else settings.publication
            since = self._first_seen_at.setdefault(managed.table, time.monotonic())
            if publication in published.get(managed.table, set()):
                published_tables.append((managed, request))
            elif time.monotonic() > since + PUBLISHED_SECONDS_MAX or not settings.publication_create:
                self._failed(managed, _unpublished(managed.table, publication))
        return published_tables

    def _publish_waiting(self, planned: PlannedLoads, way: str) -> None:
        for managed, plan, request in planned:
            managed.load_status = LoadStatus(
                stage="waiting",
                way=way,
                mode=request.mode.value if request else LoadMode.REPLACE.value,
                chunks=len(plan.chunks),
                bytes_total=plan.bytes,
            )


def _refuse_overlap(managed: ManagedTable, registry: TableRegistry) -> None:
    """Refuse a location that overlaps with another table's."""
    for other in list(registry.tables.values()) if managed.applied_position is None else ():
        if other is not managed and overlap(other.location.path, managed.location.path):
            raise folder_taken(managed.location.path, other.table, managed.table)


def _unpublished(table: TableId, publication: str) -> TableUnpublished:
    return TableUnpublished(
        "the source does not publish the table's changes yet",
        table=table,
        publication=publication,
        hint="Restart `tailrace capture` or `tailrace run`. With `publication: {create: false}`, add the table to your "
        "publication.",
    )


WAITING_SECONDS = 5.0
"""Seconds before the first look at open transactions, and between two looks."""


class OpenTransactionWatch:
    """Watches which open transactions of the source new loads wait for. Queries the source only if that takes long."""

    def __init__(self, source: PostgresCapture) -> None:
        self._source = source
        self._due: float | None = None
        self._description: str | None = None

    def describe(self, waiting: bool) -> str | None:
        """Return how many transactions loads wait for, and whose the oldest is; None: not known."""
        now = time.monotonic()
        if not waiting:
            self._due = self._description = None
        elif self._due is None:
            self._due = now + WAITING_SECONDS
        elif now >= self._due:
            first, self._due = self._description is None, now + WAITING_SECONDS
            with suppress(TailraceError):  # the readers report a source that is gone
                self._description = self._source.open_transactions()
            if first and self._description:
                log.warning("load waits for open transactions", extra={"what": self._description})
        return self._description
