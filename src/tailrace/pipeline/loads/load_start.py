"""How a load begins: the table is found, known to be published, then cut, then a snapshot is made to compare with.

In that order. A table that is not published would miss what is written while it is read; one that is rewritten between
cut and snapshot is told by its files.
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
"""A table that has just been made is published by the capturing process; only after this is it missed."""

ALTERED_MAX = 20
"""Times that a table was altered between its plan and the point that its replay starts at."""

_GONE_HINT = "Was it dropped or renamed? If it is made again it is loaded; else check `source.tables`."

WaitingTables = list[tuple[ManagedTable, LoadRequest | None]]
PlannedLoads = list[tuple[ManagedTable, Plan, LoadRequest | None]]


class LoadStarter:
    """Begins loads, one lot after the other: it may have to wait for transactions that are open at the source."""

    def __init__(
        self,
        settings: LoadSettings,
        source: PostgresCapture,
        lives: TableRegistry,
        holding: RetentionHolds,
        *,
        run: RunTasks,
        begun: Callable[[RunningLoad], None],
        failed: Callable[[ManagedTable, TailraceError], None],
        stopping: threading.Event,
    ) -> None:
        self._run = run
        self._settings = settings
        self._source = source
        self._lives = lives
        self._holding = holding
        self._begun = begun
        self._failed = failed
        self._stopping = stopping
        self._known_since: dict[TableId, float] = {}
        self._altered: dict[TableId, int] = {}
        self._followed = 0
        """How many tables the log had when all that there are were last followed."""
        self.chunked_only: set[TableId] = set()
        """Tables that could not be read in one snapshot."""

    @property
    def has_unseen_tables(self) -> bool:
        """Whether the log has tables that only rows tell of, and that nobody may have looked at yet."""
        return self._source.discovers_tables and self._followed < len(self._lives.log.schemas.latest())

    def discover_tables(self) -> None:
        """See which tables the source has now: new ones are followed, failed ones tried again if a person wants it."""
        wanted = self._lives.load_store.retry_requests()  # first: whoever asks for it has mended the source before
        known = self._lives.log.schemas.latest() if self._source.discovers_tables else []
        self._source.learn_tables(version.schema for version in known)
        try:
            there = {table.table: table for table in self._source.tables()}
        except TailraceError:
            return  # whoever needs the source says so
        self._follow(there)
        self._followed = len(known)  # only now: whoever hears that nothing is behind finds all of them
        self._retry(wanted, there)

    def _follow(self, there: dict[TableId, SourceTable]) -> None:
        """Tables may have been made, or renamed into what the settings name, since we last looked."""
        for life in list(self._lives.tables.values()):
            if life.table not in there and life.state is TableState.NEW:
                life.missing_at_source = True
                life.fail(SourceTableMissing("the table is not there", table=life.table, hint=_GONE_HINT))
            elif life.missing_at_source and life.table in there and life.state is TableState.FAILED:
                life.missing_at_source, life.state, life.error, life.failures = False, TableState.NEW, None, 0
        for table, source in there.items():
            if (known := self._lives.tables.get(table)) is not None:
                known.update_from_source(source)
            else:
                log.info("table found", extra={"table": str(table)})
                self._lives.add(table, source, self._settings.mode_of(table))

    def _retry(self, wanted: Iterable[TableId], there: dict[TableId, SourceTable]) -> None:
        for table in wanted:
            life = self._lives.tables.get(table)
            if life is not None and life.state is TableState.FAILED and table in there:
                log.info("table tried again", extra={"table": str(table)})
                self._lives.restart_table(life, there[table])
            self._lives.load_store.clear_retry(table)

    def start_loads(self, waiting: WaitingTables) -> None:
        """Begin a load of each; what cannot be begun has failed."""
        planned: PlannedLoads = []
        for life, wish in self._published_only(waiting):
            if wish is not None and wish.where is not None and self._lives.needs_full_load(life):
                wish = replace(wish, where=None)  # a part would not do
            mode = self._settings.mode_of(life.table)
            if wish is None and life.applied_position is None and mode in ("schema_only", "never"):
                self._make_empty(life, mode)
            elif life.location.spec.holds_messages and life.applied_position is None and not life.load_only:
                # What the log has of it may be gone at the source: that comes first, and then what is there.
                if wish is None:
                    self._lives.load_store.add_request(LoadRequest(table=life.table, mode=LoadMode.REFRESH))
                self._make_empty(life, "never")
            elif (plan := self._plan(life, wish)) is not None:
                planned.append((life, plan, wish))
        chunked = [item for item in planned if item[1].schema.key and self._wants_chunked(item[0])]
        exact = [item for item in planned if item not in chunked]
        for some, begin in ((exact, self._begin_exact), (chunked, self._begin_chunked)):
            if some:
                try:
                    begin(some)
                except TailraceError as error:
                    for life, _, _ in some:
                        self._failed(life, error)

    def _wants_chunked(self, life: ManagedTable) -> bool:
        if self._settings.way == "exact" or life.location.spec.needs_exact_load:
            return False
        return self._settings.way == "chunked" or self._settings.standby is not None or life.table in self.chunked_only

    def _plan(self, life: ManagedTable, wish: LoadRequest | None) -> Plan | None:
        """Cut the table; before the snapshot is made, so that a rewrite in between is noticed."""
        cut = (
            ChunkKind.PLACE
            if self._settings.way == "exact" or life.location.spec.needs_exact_load
            else ChunkKind.EITHER
        )
        if self._wants_chunked(life):
            cut = ChunkKind.KEY
        try:
            _refuse_meeting(life, self._lives)
            life.location.open_for_reading().refuse_foreign(life.table)
            plan = self._source.plan(life.table, cut, self._settings.chunk)
            if not plan.schema.columns:
                self._refuse_unpublished(life.table)
            if wish is not None and not plan.schema.key and (wish.where or wish.mode is LoadMode.REFRESH):
                raise Unsupported(
                    "a table without a key can only be replaced as a whole",
                    table=life.table,
                    hint="Leave out --where and --mode refresh, or give the table a primary key.",
                )
            self._refuse_form(life, plan.schema, wish)
            return plan
        except TailraceError as error:
            self._failed(life, error)
            return None

    def _refuse_unpublished(self, table: TableId) -> None:
        """Refuse a table that has columns and publishes none: it was made anew since it was looked at."""
        now = self._source.describe([table], unpublished=True)
        if table in now and now[table].columns:
            raise _unpublished(table, self._source.settings.publication)

    def _refuse_form(self, life: ManagedTable, schema: TableSchema, wish: LoadRequest | None) -> None:
        """Refuse what the table's form cannot be made of, and what would take away a past that it keeps."""
        form = life.location.spec
        form.stored_schema(schema)
        if wish is not None and wish.where is not None:
            form.refuse_partial_load(life.table)
        elif form.keeps_past:
            plan_carry_over(self._lives, life, schema, asked=wish is not None)

    def _begin_exact(self, planned: PlannedLoads) -> None:
        self._show_waiting(planned, "exact")
        for life, _, _ in planned:
            if life.location.spec.needs_exact_load:
                with life.lock:  # what is under way ends before the snapshot's point
                    life.apply_suspended = life.applied_position is not None
        snapshot = self._source.snapshot().__enter__()
        shared = SharedSnapshot(snapshot, users=1)  # ourselves, until all have begun
        begun: list[RunningLoad] = []
        try:
            self._lives.refresh_index()
            for life, plan, wish in self._as_planned(planned):
                seed = LoadRecord(plan=plan, snapshot_position=snapshot.position, request=wish, spec=life.location.spec)
                self._record(life, seed)
                shared.acquire()
                begun.append(
                    RunningLoad(
                        managed=life, record=seed, unread_chunks=deque(plan.chunks), staged={}, shared_snapshot=shared
                    )
                )
                self._begun(begun[-1])
        finally:
            shared.release()
            if self._stopping.is_set():  # whoever lets go of snapshots may have done so before these had begun
                for load in begun:
                    load.release_snapshot()
        self._holding.publish(now=True)

    def _begin_chunked(self, planned: PlannedLoads) -> None:
        self._show_waiting(planned, "chunked")
        # What comes while we wait is after the floor, and the floor is not known yet: hold from where the log is.
        self._lives.refresh_index()
        for life, _, _ in planned:
            life.load_floor = self._lives.applied_position_at(self._lives.index.position)
        self._holding.publish(now=True)
        noted = self._source.wait_for_writers(self._stopping.is_set)
        if noted is None:  # told to stop
            return
        for life, plan, wish in self._as_planned(planned):
            seed = LoadRecord(plan=plan, snapshot_position=None, barrier=noted, request=wish, spec=life.location.spec)
            self._record(life, seed)
            self._begun(
                RunningLoad(
                    managed=life,
                    record=seed,
                    unread_chunks=deque(plan.chunks),
                    staged={},
                    shared_snapshot=None,
                    barrier_position=noted.ceiling,
                )
            )

    def _as_planned(self, planned: PlannedLoads) -> PlannedLoads:
        """Those that were not altered until the point the replay starts at; what was written to the others since is not
        replayed, so they begin again."""
        now = self._source.describe(life.table for life, _, _ in planned)
        found: PlannedLoads = []
        for life, plan, wish in planned:
            if life.table in now and same_version(plan.schema, now[life.table]):
                self._altered.pop(life.table, None)
                found.append((life, plan, wish))
                continue
            life.load_floor, life.load_status, life.apply_suspended = None, None, False
            self._altered[life.table] = self._altered.get(life.table, 0) + 1
            log.info("load begins again: the table was altered", extra={"table": str(life.table)})
            if self._altered[life.table] >= ALTERED_MAX:
                del self._altered[life.table]
                self._failed(
                    life,
                    TableFailed(
                        "the table is altered again and again while its load begins",
                        table=life.table,
                        hint="Load it when nobody alters it or its partitions: `tailrace snapshot FILE TABLE`.",
                    ),
                )
        return found

    def _record(self, life: ManagedTable, seed: LoadRecord) -> None:
        life.load_floor = self._lives.applied_position_at(seed.log_needed_after)
        self._lives.load_store.begin(seed)
        failpoints.hit("load.planned")
        log.info(
            "load begun", extra={"table": str(life.table), "chunks": len(seed.plan.chunks), "cut": seed.plan.cut.value}
        )

    def _make_empty(self, life: ManagedTable, mode: str) -> None:
        """A table that is never loaded begins empty: now, or where the log begins."""
        try:
            _refuse_meeting(life, self._lives)
            plan = self._source.plan(life.table, ChunkKind.PLACE, self._settings.chunk)
            self._lives.refresh_index()
            since = self._lives.complete_from(life.table)
            here = self._lives.applied_position_at(max(self._lives.index.position, since or ZERO))
            begin = (
                self._lives.applied_position_at(since)
                if since is not None
                else AppliedPosition(seq=0, commit=0, position=ZERO)
            )
            cursor = begin if mode == "never" else here
            schema = plan.schema
            if life.location.spec.holds_messages:
                cursor = self._lives.skip_trimmed(schema, cursor)
                schema = self._lives.schema_after(schema, cursor)
            # By this name it is on record where rows of it were read that changes build on.
            cursor = replace(cursor, load=(load := uuid.uuid4().hex[:12]))
            self._lives.load_store.record_ahead_range(load, cursor.position)
            letters = DeadLetterStore(self._lives.log.path, life.table)
            if letters.has_any:  # of a lake table that was elsewhere, or is no more
                letters.before_load(load, whole=True, now=None, seq=cursor.seq)
            commit_files(self._run, life, schema, (), cursor)
        except TailraceError as error:
            self._failed(life, error)
            return
        life.state = TableState.CATCHING_UP
        life.record_commit(cursor, schema)

    def _published_only(self, waiting: WaitingTables) -> WaitingTables:
        """Those that are published."""
        try:
            published = self._source.publications_by_table()
        except TailraceError as error:
            for life, _ in waiting:
                self._failed(life, error)
            return []
        settings = self._source.settings
        fed: WaitingTables = []
        for life, wish in waiting:
            own = settings.publication_create and life.insert_only
            wanted = settings.publication_inserts if own else settings.publication
            since = self._known_since.setdefault(life.table, time.monotonic())
            if wanted in published.get(life.table, set()):
                fed.append((life, wish))
            elif time.monotonic() > since + PUBLISHED_SECONDS_MAX or not settings.publication_create:
                self._failed(life, _unpublished(life.table, wanted))
        return fed

    def _show_waiting(self, planned: PlannedLoads, way: str) -> None:
        for life, plan, wish in planned:
            life.load_status = LoadStatus(
                stage="waiting",
                way=way,
                mode=wish.mode.value if wish else LoadMode.REPLACE.value,
                chunks=len(plan.chunks),
                bytes_total=plan.bytes,
            )


def _refuse_meeting(life: ManagedTable, lives: TableRegistry) -> None:
    """Refuse to make a table where another one is, or is to be."""
    for other in list(lives.tables.values()) if life.applied_position is None else ():
        if other is not life and overlap(other.location.path, life.location.path):
            raise folder_taken(life.location.path, other.table, life.table)


def _unpublished(table: TableId, publication: str) -> TableUnpublished:
    return TableUnpublished(
        "the source does not publish the table's changes yet",
        table=table,
        publication=publication,
        hint="Start `tailrace capture` or `tailrace run` again; with `publication: {create: false}`, add the "
        "table to your publication.",
    )


WAITING_SECONDS = 5.0
"""Before the first look at whose they are, and between two."""


class OpenTransactionWatch:
    """Asked again and again while loads may be waiting; looks at the source only where that takes a while."""

    def __init__(self, source: PostgresCapture) -> None:
        self._source = source
        self._due: float | None = None
        self._said: str | None = None

    def describe(self, waiting: bool) -> str | None:
        """How many transactions are waited for and whose the oldest is, as far as that is known."""
        now = time.monotonic()
        if not waiting:
            self._due = self._said = None
        elif self._due is None:
            self._due = now + WAITING_SECONDS
        elif now >= self._due:
            first, self._due = self._said is None, now + WAITING_SECONDS
            with suppress(TailraceError):  # a source that is gone is heard of by those who read
                self._said = self._source.open_transactions()
            if first and self._said:
                log.warning("load waits for open transactions", extra={"what": self._said})
        return self._said
