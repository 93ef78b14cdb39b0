"""Schedule loads. Plan and record each, read its chunks in Spark tasks, commit all rows at once.

An exact load reads all chunks in one exported snapshot, and its catch-up starts at the snapshot's position. A chunked
load reads each chunk in its own snapshot; the table is complete once the catch-up has passed the last of them. A load
can lose its exported snapshot: it took too long, the session broke, or the process was killed. If its chunks are key
ranges, it then continues as a chunked load with the chunks it lacks; otherwise it begins again.

One thread, here, decides what to load and commits complete loads; others read (`chunk_readers`). Nothing here stops
capture, or the apply of other tables. The file is long because everything that may end, hold or commit a load is here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path

from tailrace import failpoints
from tailrace.capture.postgres.chunks import Chunk, ChunkKind
from tailrace.capture.postgres.source import PostgresCapture
from tailrace.errors import (
    Remedy,
    SnapshotGone,
    SourceRewritten,
    SourceSlow,
    SourceUnreachable,
    TableFailed,
    TailraceError,
)
from tailrace.model.schema import TableId
from tailrace.pipeline.apply.schema_watch import SchemaWatch
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.pipeline.loads.chunk_readers import ChunkReaders, FileWatch
from tailrace.pipeline.loads.history_catch_up import ApplyCallback, apply_to_load_point
from tailrace.pipeline.loads.kept_loads import LoadKeeper
from tailrace.pipeline.loads.load_commit import (
    RunTasks,
    applied_position_after,
    find_load_point,
    finish_load,
    newest_row_position,
)
from tailrace.pipeline.loads.load_start import LoadStarter, OpenTransactionWatch, WaitingTables
from tailrace.pipeline.loads.running_load import (
    LOOK_SECONDS,
    RunningLoad,
    RunningLoads,
    SharedSnapshot,
    retry_pause,
    table_changed_error,
)
from tailrace.pipeline.loads.throttle import PROBE_SECONDS, Throttle
from tailrace.pipeline.report import TableState
from tailrace.pipeline.tables.managed_table import ManagedTable
from tailrace.pipeline.tables.registry import TableRegistry
from tailrace.pipeline.tables.retention_holds import RetentionHolds
from tailrace.tables.staging import discard
from tailrace.tasks.load_store import LoadHold, LoadRecord

log = logging.getLogger(__name__)

TABLES_SECONDS = 3.0
"""Seconds between two searches for new tables at the source."""
SOURCE_WAIT_ERRORS = (SourceUnreachable, SourceSlow)
"""Errors that a load waits out for as long as it takes. Capture reports the first, `status` the second."""
CHUNK_TRIES_MAX = 8
"""Tries of one chunk; failures because the source is unreachable do not count."""
REPLANS_MAX = 20
"""Restarts of a load whose table is rewritten again and again."""


class LoadScheduler:
    """Loads tables that need it, until the process stops."""

    def __init__(
        self,
        settings: PipelineSettings,
        source: PostgresCapture,
        registry: TableRegistry,
        retention_holds: RetentionHolds,
        *,
        run: RunTasks,
        spawn: Callable[[Callable[[], None]], object],
        advance: Callable[[ManagedTable], None],
        apply: ApplyCallback,
        stopping: threading.Event,
        scratch: Path,
        keeper: LoadKeeper,
    ) -> None:
        self._settings = settings
        self._source = source
        self._registry = registry
        self._retention_holds = retention_holds
        self._run, self._spawn = run, spawn
        self._advance, self._take = advance, apply
        self._stopping = stopping
        self._store, self._keeper = registry.load_store, keeper
        self._running_loads = RunningLoads(scratch, registry.load_store.holds())
        self._loads, self._lock = self._running_loads.loads, self._running_loads.lock
        self._starter = LoadStarter(
            settings.load,
            source,
            registry,
            retention_holds,
            run=run,
            begun=self._start,
            failed=self._fail,
            stopping=stopping,
        )
        self._starting = False
        self._always = {table for table in registry.tables if settings.load.mode_of(table) == "always"}
        self._replans: dict[TableId, int] = {}
        self._catching_up: dict[TableId, LoadRecord] = {}
        """Committed loads whose catch-up has not ended."""
        self._state_before_hold: dict[TableId, tuple[TableState, TailraceError | None]] = {}
        """State and error that held tables return to."""
        self._reload_retries: dict[TableId, tuple[int, float]] = {}
        """Failed reloads of live tables: number of failures, and time of the next try."""
        self._open_transactions = OpenTransactionWatch(source)
        self._schema_watch = SchemaWatch(source, registry)
        self._file_watch = FileWatch(source, spawn)
        self._throttle = Throttle(settings.load.connections, source.lag if settings.load.throttle else None)
        self.chunk_readers = ChunkReaders(
            settings.load,
            source,
            registry.log.path,
            self._running_loads,
            self._throttle,
            run=run,
            failed=self._chunk_failed,
            stopping=stopping,
            dead_letters_enabled=settings.tables.dead_letters_enabled,
        )

    # The scheduling thread.

    def run(self) -> None:
        """Begin, hold, commit and end loads, until the process stops."""
        self._resume_loads()
        tables_at = probe_at = 0.0
        while not self._stopping.is_set():
            now = time.monotonic()
            if now >= tables_at or self._starter.has_unseen_tables:
                self._starter.discover_tables()
                self._schema_watch.run_if_due()
                for managed in self._schema_watch.tables_with_pending_schema():
                    self._spawn(partial(self._advance, managed))
                tables_at = time.monotonic() + TABLES_SECONDS
            if self._loads and now >= probe_at:
                with suppress(TailraceError):  # the readers report a source that is gone
                    self._throttle.probe()
                self._replan_changed()
                probe_at = time.monotonic() + PROBE_SECONDS
            self._apply_holds()
            self._start_waiting()
            self._end_expired_snapshots()
            self._commit_complete()
            self._end_caught_up()
            self._publish_status()
            self._stopping.wait(LOOK_SECONDS)
        for load in list(self._loads.values()):
            load.release_snapshot()
        self._end_caught_up()

    @property
    def is_idle(self) -> bool:
        """True if no load runs, and no table waits for one that could begin."""
        return self.is_idle_except(())

    def is_idle_except(self, some: Collection[TableId]) -> bool:
        """Return whether no load runs or waits, except loads of some tables."""
        behind = self._starter.has_unseen_tables  # first: a table that is added after this is not missed
        held, tables = self._store.holds(), dict(self._registry.tables)
        requested = {request.table for request in self._store.requests()} & tables.keys()
        needed = {table for table, managed in tables.items() if self._is_needed(managed)}
        with self._lock:
            busy = behind or self._starting or not self._schema_watch.has_run
            return not busy and not (requested | needed | self._loads.keys()) - held.keys() - set(some)

    def tables_waiting_for_log(self) -> set[TableId]:
        """Return the tables with complete loads that wait for the log."""
        with self._lock:
            return {
                table
                for table, load in self._loads.items()
                if load.is_complete
                and not load.committing
                and table not in self._running_loads.holds
                and not self._can_commit(load)
            }

    def _is_needed(self, managed: ManagedTable) -> bool:
        """Return whether the table's load mode requires a load now."""
        mode = self._settings.load.mode_of(managed.table)
        if managed.state is TableState.NEEDS_SNAPSHOT:
            return mode in ("when_needed", "always")
        unloaded = managed.state in (TableState.NEW, TableState.PAUSED, TableState.REFRESHING)
        return unloaded or (managed.table in self._always and not managed.state.is_blocked)

    def _resume_loads(self) -> None:
        """Resume loads that an earlier process began."""
        self._store.remove_leftovers(self._keeper.loads_in_use)
        seen: set[TableId] = set()
        for record in reversed(self._store.unfinished_loads()):
            managed = self._registry.tables.get(record.table)
            if managed is None:
                continue  # no longer in the settings, or not shown by the source now
            if managed.catch_up_load == record.id:
                self._catching_up[record.table] = record
                self._keeper.keep(managed, record.id)
                if record.request is not None:
                    self._store.complete_request(record.request)
                continue
            if record.table in self._catching_up:
                self._store.end(record)  # an older one
                continue
            since = self._registry.complete_from(record.table)
            usable = (
                record.table not in seen
                and (since is None or record.log_needed_after >= since)
                and record.plan.cut is ChunkKind.KEY
                and record.spec == managed.location.spec
                and self._registry.index.commit_at(record.log_needed_after) + 1 >= self._registry.index.first_commit
            )
            seen.add(record.table)
            if not usable:
                # A load that did not finish in one snapshot would not finish again.
                self._starter.chunked_only.add(record.table)
                managed.load_floor = None
                self._discard(record, managed)
                self._restart(managed, record)
                continue
            staged = self._store.staged_chunks(record.id)
            todo = deque(chunk for chunk in record.plan.chunks if chunk.number not in staged)
            log.info(
                "load resumed",
                extra={"table": str(record.table), "chunks_done": len(staged), "chunks": len(record.plan.chunks)},
            )
            self._start(
                RunningLoad(managed=managed, record=record, unread_chunks=todo, staged=staged, shared_snapshot=None)
            )
        self._retention_holds.publish(now=True)

    def _apply_holds(self) -> None:
        """Pause, stop and resume loads as persons have decided."""
        requests = self._store.requests()  # before the holds: a new request removes the person's own hold first
        held = self._running_loads.holds = self._store.holds()
        for table, hold in held.items():
            load, managed = self._loads.get(table), self._registry.tables.get(table)
            if load is not None and load.committing:
                continue  # the commit sets the table's state
            if load is not None and not load.progress_files:
                self._hold_load(load, hold)
            if managed is not None and managed.state in (TableState.NEW, TableState.SEEDING, TableState.REFRESHING):
                before = (load.state_before, load.error_before) if load is not None else (managed.state, managed.error)
                self._state_before_hold[table] = before
                managed.state = TableState.PAUSED
        for request in requests:
            if held.get(request.table) is LoadHold.STOPPED and request.table not in self._loads and not self._starting:
                self._store.complete_request(request)
                self._lift_hold(request.table)
        for table, managed in list(self._registry.tables.items()):
            if table not in held and managed.state is TableState.PAUSED:
                earlier = self._state_before_hold.pop(table, (TableState.NEW, None))
                managed.restore_state(*((TableState.SEEDING, None) if table in self._loads else earlier))

    def _hold_load(self, load: RunningLoad, hold: LoadHold) -> None:
        """Hold a running load, and release its snapshot.

        The source's clean-up must not wait for a person.
        A paused load keeps its chunks only if they are key ranges, which need no earlier snapshot.
        """
        table = load.managed.table
        if hold is LoadHold.STOPPED:
            if load.record.request is not None:
                self._store.complete_request(load.record.request)
            if self._drop(load):
                self._lift_hold(table)
        elif load.record.plan.cut is ChunkKind.KEY:
            load.release_snapshot()
        elif self._drop(load):
            self._restart(load.managed, load.record)

    def _lift_hold(self, table: TableId) -> None:
        """Remove the hold of a stopped load if the table has rows. An unloaded table stays held until a request."""
        managed = self._registry.tables.get(table)
        if managed is not None and managed.applied_position is not None:
            self._store.set_hold(table, None)
            if managed.reload_reason is not None:
                self._state_before_hold.pop(table, None)
                managed.mark_needs_snapshot()

    # Beginning.

    def _start_waiting(self) -> None:
        requests = {request.table: request for request in reversed(self._store.requests())}
        waiting: WaitingTables = []
        for table, managed in list(self._registry.tables.items()):
            if table in self._running_loads.holds or table in self._loads:
                continue
            failed = managed.error is not None and managed.failures > 0
            if failed and time.monotonic() < managed.failed_at + retry_pause(managed.failures):
                continue
            if time.monotonic() < self._reload_retries.get(table, (0, 0.0))[1]:
                continue
            if managed.outcome_unknown_until and managed.location.spec.needs_exact_load:
                continue  # an earlier task could still commit past the snapshot's position
            if table in requests:
                waiting.append((managed, requests[table]))
            elif self._is_needed(managed):
                waiting.append((managed, None))
        if waiting and not self._starting:
            # In another thread, because it waits for open transactions of the source.
            self._starting = True
            self._spawn(partial(self._start_loads, waiting))

    def _start_loads(self, waiting: WaitingTables) -> None:
        try:
            self._starter.start_loads(waiting)
        finally:
            self._starting = False

    def _start(self, load: RunningLoad) -> None:
        load.rows_at_start = sum(staged.rows for staged in load.staged.values())
        load.state_before, load.error_before = load.managed.state, load.managed.error
        if load.managed.state is TableState.NEW or load.managed.state.is_blocked:
            load.managed.state = TableState.SEEDING
        load.managed.load_floor = load.managed.load_floor or self._registry.applied_position_at(
            load.record.log_needed_after
        )
        self._always.discard(load.managed.table)
        with self._lock:
            self._loads[load.managed.table] = load

    # Reading.

    def _chunk_failed(
        self, load: RunningLoad, chunk: Chunk, error: TailraceError, shared: SharedSnapshot | None
    ) -> None:
        if load.dropped:
            return
        if isinstance(error, SourceRewritten):
            self._replan(load, error)
            return
        if isinstance(error, SnapshotGone):
            if shared is not None and load.shared_snapshot is shared:
                self._end_snapshot(load, "the exported snapshot is gone")
            return
        tries = load.tries[chunk.number] = load.tries.get(chunk.number, 0) + 1
        temporary = error.remedy is Remedy.RETRY
        if temporary and (isinstance(error, SourceUnreachable) or tries < CHUNK_TRIES_MAX):
            if not load.managed.state.is_blocked:
                load.managed.error = error
            load.not_before = time.monotonic() + retry_pause(tries)
            log.warning("chunk tried again", extra={"table": str(load.managed.table), "code": error.code})
        elif self._drop(load):
            self._fail(load.managed, error)

    def _end_expired_snapshots(self) -> None:
        """End snapshots that are open for too long, because the source's clean-up waits for them."""
        for load in list(self._loads.values()):
            shared = load.shared_snapshot
            limit = self._settings.load.time_limit
            if shared is not None and load.unread_chunks and time.monotonic() > shared.opened_at + limit:
                self._end_snapshot(load, "the time limit is reached")

    def _end_snapshot(self, load: RunningLoad, why: str) -> None:
        """Continue without the exported snapshot: chunked with the remaining chunks, or from the start."""
        load.release_snapshot()
        if load.record.plan.cut is ChunkKind.KEY:
            log.warning("load continues in chunks", extra={"table": str(load.managed.table), "why": why})
            return
        if not self._drop(load):
            return
        if load.record.plan.schema.key and self._settings.load.way != "exact" and not load.record.spec.needs_exact_load:
            log.warning("load begins again in chunks", extra={"table": str(load.managed.table), "why": why})
            self._starter.chunked_only.add(load.managed.table)
            self._restart(load.managed, load.record)
            return
        self._fail(
            load.managed,
            TableFailed(
                "the load could not be finished in one snapshot",
                table=load.managed.table,
                why=why,
                hint="Raise `load.time_limit` or `load.connections`, or load at a quieter time; it is tried again "
                "automatically. A table without a key, or with `mode: append` or `history`, needs one snapshot.",
            ),
        )

    def _restart(self, managed: ManagedTable, record: LoadRecord) -> None:
        """Make a dropped load begin again. A requested one begins by its request, which is still stored."""
        if record.request is None and managed.applied_position is not None:
            self._always.add(managed.table)

    def _replan(self, load: RunningLoad, error: SourceRewritten) -> None:
        """Drop a load whose table no longer matches its plan, and begin again."""
        if not self._drop(load):
            return
        table = load.managed.table
        self._replans[table] = self._replans.get(table, 0) + 1
        log.warning("load begins again", extra={"table": str(table), "reason": error.message})
        if not load.managed.state.is_blocked:
            load.managed.error = error
        if self._replans[table] > REPLANS_MAX:
            self._fail(
                load.managed,
                TableFailed(
                    "the table is rewritten again and again while it is loaded",
                    table=table,
                    hint="Load it at a time without truncates, rewrites or DDL: `tailrace snapshot FILE TABLE`.",
                ),
            )
            return
        self._restart(load.managed, load.record)

    # Committing.

    def _commit_complete(self) -> None:
        for load in list(self._loads.values()):
            if load.is_complete and not load.committing and load.managed.table not in self._running_loads.holds:
                load.release_snapshot()
                self._registry.refresh_index()
                if self._can_commit(load):
                    load.committing = True
                    self._spawn(partial(self._commit, load))

    def _can_commit(self, load: RunningLoad) -> bool:
        """Return whether the log has reached the position that the load commit needs."""
        upto = (
            load.record.barrier.ceiling
            if load.record.barrier is not None
            else load.record.snapshot_position
            if load.managed.apply_suspended
            else None
        )
        return upto is None or self._registry.index.position >= upto

    def _replan_changed(self) -> None:
        """Restart loads whose table has other partitions or files, without waiting for the end."""
        for load in self._file_watch.changed([load for load in list(self._loads.values()) if not load.committing]):
            if not load.committing:  # a committing load checks this itself
                self._replan(load, table_changed_error(load.managed.table))

    def _end_caught_up(self) -> None:
        """End committed loads once the log has passed their last chunk."""
        for table, record in list(self._catching_up.items()):
            with self._lock:
                caught_up = (
                    self._catching_up.get(table) is record and self._registry.tables[table].catch_up_load != record.id
                )
                if caught_up:
                    del self._catching_up[table]
            if caught_up:
                self._store.end(record)

    def _commit(self, load: RunningLoad) -> None:
        """Commit all staged rows of a load, and set the table's state."""
        managed, record = load.managed, load.record
        try:
            start = find_load_point(self._registry, record)
            since = self._registry.complete_from(managed.table)
            if not self._source.is_unchanged(record.plan) or (since is not None and start < since):
                raise table_changed_error(managed.table)
            with managed.lock:
                apply_to_load_point(self._registry, load, start, self._take)
                position = applied_position_after(self._registry, load, start)
                catch_up_until = newest_row_position(self._registry, load, start)
                if catch_up_until > position.position:
                    # The end of an unflushed source log may be a position that the stream never reaches.
                    catch_up_until = min(catch_up_until, self._source.committed_until())
                self._store.record_commit(record.id, catch_up_until, source_time := self._source.server_time())
                committed = finish_load(self._registry, load, position, self._run)
                failpoints.hit("load.landed")
                self._keeper.keep(managed, record.id)
                if record.request is not None:
                    self._store.complete_request(record.request)
                done = managed.load_only and catch_up_until <= position.position
                managed.state = TableState.LOADED if done else TableState.CATCHING_UP
                managed.record_commit(committed, record.plan.schema)
                managed.loaded_at = source_time
                managed.last_load = load.result()
                managed.rows_loaded = managed.last_load.rows
                managed.catch_up_load = record.id if catch_up_until > position.position else None
                with self._lock:
                    before, self._catching_up[managed.table] = self._catching_up.get(managed.table), record
                if before is not None:
                    self._store.end(before)
        except SourceRewritten as error:
            self._replan(load, error)
            return
        except TailraceError as error:
            if isinstance(error, SOURCE_WAIT_ERRORS):
                load.committing = False  # everything is staged: only the final check is missing
                if not managed.state.is_blocked:
                    managed.error = error
                return
            if self._drop(load):
                self._fail(managed, error)
            return
        with self._lock:
            del self._loads[managed.table]
            managed.load_floor = managed.load_status = managed.reload_error = None
            managed.apply_suspended = False
        self._replans.pop(managed.table, None)
        self._reload_retries.pop(managed.table, None)
        with suppress(TailraceError):
            discard(managed.location.staging, record.id)
        log.info("load committed", extra={"table": str(managed.table), "rows": managed.rows_loaded})
        if not done:
            self._advance(managed)

    # Ending.

    def _drop(self, load: RunningLoad) -> bool:
        """Drop a load and its staged files, and restore the table. Return False if that was done already."""
        load.release_snapshot()
        if not self._running_loads.drop(load):
            return False
        load.managed.apply_suspended = False
        self._discard(load.record, load.managed)
        return True

    def _discard(self, record: LoadRecord, managed: ManagedTable) -> None:
        with suppress(TailraceError):
            discard(managed.location.staging, record.id)
        self._store.end(record)

    def _fail(self, managed: ManagedTable, error: TailraceError) -> None:
        """Record that a load failed; the error's remedy decides about a retry. A live table stays live."""
        if managed.table in self._loads:
            return  # its load had begun before another of the same group failed
        managed.load_floor, managed.load_status, managed.apply_suspended = None, None, False
        if isinstance(error, SOURCE_WAIT_ERRORS):
            # A blocked table keeps its error, whose hint says how it can be loaded.
            shown = managed.error if managed.state.is_blocked else error
            managed.error, managed.failures, managed.failed_at = shown, min(managed.failures + 1, 5), time.monotonic()
            return
        unloaded_states = (TableState.NEW, TableState.SEEDING, TableState.REFRESHING)
        unloaded = managed.applied_position is None or managed.state in unloaded_states or managed.state.is_blocked
        if unloaded or managed.reload_reason is not None:  # the table needs the load
            managed.fail(error)
            if error.remedy is not Remedy.RETRY:
                self._complete_requests(managed.table)
            return
        failures = self._reload_retries.get(managed.table, (0, 0.0))[0] + 1
        self._reload_retries[managed.table] = (failures, time.monotonic() + retry_pause(failures))
        managed.reload_error = f"The reload failed: {error.headline}. {error.hint}"
        if failures >= CHUNK_TRIES_MAX or error.remedy is not Remedy.RETRY:
            del self._reload_retries[managed.table]
            self._always.discard(managed.table)
            self._complete_requests(managed.table)  # last: a process that waits for the request then finds the reason
        details = {"table": str(managed.table), "code": error.code, "reason": error.headline, "hint": error.hint}
        log.error("table not reloaded", extra=details)

    def _complete_requests(self, table: TableId) -> None:
        for request in self._store.requests():
            if request.table == table:
                self._store.complete_request(request)

    def _publish_status(self) -> None:
        for load in list(self._loads.values()):
            held = load.managed.table in self._running_loads.holds
            status = load.status(held=held, backing_off=self._throttle.backing_off)
            self._running_loads.publish_status(load, status)
            if load.managed.applied_position is None:
                load.managed.rows_loaded = status.rows
        statuses = [managed.load_status for managed in list(self._registry.tables.values())]
        self._registry.waiting_for = self._open_transactions.describe(
            any(load and load.stage == "waiting" for load in statuses)
        )
