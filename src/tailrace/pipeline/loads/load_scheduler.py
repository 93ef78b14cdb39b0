"""Loads: each planned and put on record, read chunk by chunk in Spark tasks, landed in one commit.

Exact: all chunks are read in one exported snapshot, and the replay starts at its point. Chunked: each in a snapshot
of its own, and the table is whole once the replay has passed the last of them. A load that loses its exported
snapshot (it took too long, the session broke, we were killed) goes on in the chunked way with the chunks it lacks if
they are ranges of the key; otherwise it begins again.

One thread looks, here, what is to be loaded, and lands what has been read; others read (`reading`). Nothing here stops
capture, or the applying to other tables. The file is longer than most because whoever may end a load, hold it back or
land it stands in it.
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
"""Between two looks for tables that are new at the source."""
SOURCE_WAIT_ERRORS = (SourceUnreachable, SourceSlow)
"""However long it takes: whoever captures tells of the one, and `status` of the other."""
CHUNK_TRIES_MAX = 8
"""Of one chunk, for reasons other than a source that cannot be reached: that is waited for."""
REPLANS_MAX = 20
"""Of a load whose table keeps being rewritten under it."""


class LoadScheduler:
    """Loads whatever tables need it, until told to stop."""

    def __init__(
        self,
        settings: PipelineSettings,
        source: PostgresCapture,
        lives: TableRegistry,
        holding: RetentionHolds,
        *,
        run: RunTasks,
        spawn: Callable[[Callable[[], None]], object],
        advance: Callable[[ManagedTable], None],
        take: ApplyCallback,
        stopping: threading.Event,
        scratch: Path,
        seeds: LoadKeeper,
    ) -> None:
        self._settings = settings
        self._source = source
        self._lives = lives
        self._holding = holding
        self._run, self._spawn = run, spawn
        self._advance, self._take = advance, take
        self._stopping = stopping
        self._seeds, self._kept = lives.load_store, seeds
        self._under_way = RunningLoads(scratch, lives.load_store.holds())
        self._loads, self._lock = self._under_way.loads, self._under_way.lock
        self._begins = LoadStarter(
            settings.load, source, lives, holding, run=run, begun=self._start, failed=self._fail, stopping=stopping
        )
        self._beginning = False
        self._always = {table for table in lives.tables if settings.load.mode_of(table) == "always"}
        self._replans: dict[TableId, int] = {}
        self._landed: dict[TableId, LoadRecord] = {}
        """Loads whose replay is not over."""
        self._was: dict[TableId, tuple[TableState, TailraceError | None]] = {}
        """What tables go back to that a person holds back."""
        self._again: dict[TableId, tuple[int, float]] = {}
        """Loads of tables that go on meanwhile and that failed: how often, and when the next is due."""
        self._waits = OpenTransactionWatch(source)
        self._shapes = SchemaWatch(source, lives)
        self._files = FileWatch(source, spawn)
        self._throttle = Throttle(settings.load.connections, source.lag if settings.load.throttle else None)
        self.chunk_readers = ChunkReaders(
            settings.load,
            source,
            lives.log.path,
            self._under_way,
            self._throttle,
            run=run,
            failed=self._chunk_failed,
            stopping=stopping,
            sets_aside=settings.tables.dead_letters_enabled,
        )

    # The one who looks.

    def run(self) -> None:
        """Begin, end, hold back and let go of loads, until told to stop."""
        self._take_up()
        tables_at = probe_at = 0.0
        while not self._stopping.is_set():
            now = time.monotonic()
            if now >= tables_at or self._begins.has_unseen_tables:
                self._begins.discover_tables()
                self._shapes.run_if_due()
                for life in self._shapes.tables_with_pending_schema():
                    self._spawn(partial(self._advance, life))
                tables_at = time.monotonic() + TABLES_SECONDS
            if self._loads and now >= probe_at:
                with suppress(TailraceError):  # a source that is gone is heard of by those who read
                    self._throttle.probe()
                self._notice_changed()
                probe_at = time.monotonic() + PROBE_SECONDS
            self._obey()
            self._begin_waiting()
            self._expire()
            self._land_complete()
            self._end_replayed()
            self._tell()
            self._stopping.wait(LOOK_SECONDS)
        for load in list(self._loads.values()):
            load.release_snapshot()
        self._end_replayed()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being loaded, and nothing waits for it that could be."""
        return self.is_idle_except(())

    def is_idle_except(self, some: Collection[TableId]) -> bool:
        """The same, where loads of some tables do not count."""
        behind = self._begins.has_unseen_tables  # first: a table that is followed after this is not missed
        held, tables = self._seeds.holds(), dict(self._lives.tables)
        wished = {wish.table for wish in self._seeds.requests()} & tables.keys()
        needed = {table for table, life in tables.items() if self._is_needed(life)}
        with self._lock:
            busy = behind or self._beginning or not self._shapes.has_run
            return not busy and not (wished | needed | self._loads.keys()) - held.keys() - set(some)

    def tables_waiting_for_log(self) -> set[TableId]:
        """The tables whose rows are all read, and land once the log has what was committed before."""
        with self._lock:
            return {
                table
                for table, load in self._loads.items()
                if load.is_complete
                and not load.committing
                and table not in self._under_way.holds
                and not self._can_land(load)
            }

    def _is_needed(self, life: ManagedTable) -> bool:
        """Whether the table's mode asks for a load of it, new or not."""
        mode = self._settings.load.mode_of(life.table)
        if life.state is TableState.NEEDS_SNAPSHOT:
            return mode in ("when_needed", "always")
        unloaded = life.state in (TableState.NEW, TableState.PAUSED, TableState.REFRESHING)
        return unloaded or (life.table in self._always and not life.state.is_blocked)

    def _take_up(self) -> None:
        """Loads that an earlier process began."""
        self._seeds.remove_leftovers(self._kept.loads_in_use)
        seen: set[TableId] = set()
        for seed in reversed(self._seeds.unfinished_loads()):
            life = self._lives.tables.get(seed.table)
            if life is None:
                continue  # not wanted any more, or the source does not show it now
            if life.catch_up_load == seed.id:
                self._landed[seed.table] = seed
                self._kept.keep(life, seed.id)
                if seed.request is not None:
                    self._seeds.complete_request(seed.request)
                continue
            if seed.table in self._landed:
                self._seeds.end(seed)  # an older one
                continue
            since = self._lives.complete_from(seed.table)
            usable = (
                seed.table not in seen
                and (since is None or seed.log_needed_after >= since)
                and seed.plan.cut is ChunkKind.KEY
                and seed.spec == life.location.spec
                and self._lives.index.commit_at(seed.log_needed_after) + 1 >= self._lives.index.first_commit
            )
            seen.add(seed.table)
            if not usable:
                # What was cut off in one snapshot would be so again.
                self._begins.chunked_only.add(seed.table)
                life.load_floor = None
                self._give_up(seed, life)
                self._begin_again(life, seed)
                continue
            staged = self._seeds.staged_chunks(seed.id)
            todo = deque(chunk for chunk in seed.plan.chunks if chunk.number not in staged)
            log.info(
                "load taken up again",
                extra={"table": str(seed.table), "chunks_done": len(staged), "chunks": len(seed.plan.chunks)},
            )
            self._start(RunningLoad(managed=life, record=seed, unread_chunks=todo, staged=staged, shared_snapshot=None))
        self._holding.publish(now=True)

    def _obey(self) -> None:
        """Do what a person has decided about loads."""
        wishes = self._seeds.requests()  # before the holds: one who asks again has lifted his own
        held = self._under_way.holds = self._seeds.holds()
        for table, hold in held.items():
            load, life = self._loads.get(table), self._lives.tables.get(table)
            if load is not None and load.committing:
                continue  # whoever lands it says what the table is then
            if load is not None and not load.progress_files:
                self._hold_back(load, hold)
            if life is not None and life.state in (TableState.NEW, TableState.SEEDING, TableState.REFRESHING):
                before = (load.state_before, load.error_before) if load is not None else (life.state, life.error)
                self._was[table] = before
                life.state = TableState.PAUSED
        for wish in wishes:
            if held.get(wish.table) is LoadHold.STOPPED and wish.table not in self._loads and not self._beginning:
                self._seeds.complete_request(wish)
                self._lift(wish.table)
        for table, life in list(self._lives.tables.items()):
            if table not in held and life.state is TableState.PAUSED:
                was = self._was.pop(table, (TableState.NEW, None))
                life.restore_state(*((TableState.SEEDING, None) if table in self._loads else was))

    def _hold_back(self, load: RunningLoad, hold: LoadHold) -> None:
        """The source's clean-up must not wait for a person: only chunks that need no snapshot of before are kept."""
        table = load.managed.table
        if hold is LoadHold.STOPPED:
            if load.record.request is not None:
                self._seeds.complete_request(load.record.request)
            if self._drop(load):
                self._lift(table)
        elif load.record.plan.cut is ChunkKind.KEY:
            load.release_snapshot()
        elif self._drop(load):
            self._begin_again(load.managed, load.record)

    def _lift(self, table: TableId) -> None:
        """A table that has rows goes on as it was; one that has none stays so until it is asked for."""
        life = self._lives.tables.get(table)
        if life is not None and life.applied_position is not None:
            self._seeds.set_hold(table, None)
            if life.reload_reason is not None:
                self._was.pop(table, None)
                life.mark_needs_snapshot()

    # Beginning.

    def _begin_waiting(self) -> None:
        wishes = {wish.table: wish for wish in reversed(self._seeds.requests())}
        waiting: WaitingTables = []
        for table, life in list(self._lives.tables.items()):
            if table in self._under_way.holds or table in self._loads:
                continue
            failed = life.error is not None and life.failures > 0
            if failed and time.monotonic() < life.failed_at + retry_pause(life.failures):
                continue
            if time.monotonic() < self._again.get(table, (0, 0.0))[1]:
                continue
            if life.outcome_unknown_until and life.location.spec.needs_exact_load:
                continue  # a task of before could bring it past the snapshot's point
            if table in wishes:
                waiting.append((life, wishes[table]))
            elif self._is_needed(life):
                waiting.append((life, None))
        if waiting and not self._beginning:
            # Apart: it waits for transactions that are open at the source.
            self._beginning = True
            self._spawn(partial(self._begin, waiting))

    def _begin(self, waiting: WaitingTables) -> None:
        try:
            self._begins.start_loads(waiting)
        finally:
            self._beginning = False

    def _start(self, load: RunningLoad) -> None:
        load.rows_at_start = sum(staged.rows for staged in load.staged.values())
        load.state_before, load.error_before = load.managed.state, load.managed.error
        if load.managed.state is TableState.NEW or load.managed.state.is_blocked:
            load.managed.state = TableState.SEEDING
        load.managed.load_floor = load.managed.load_floor or self._lives.applied_position_at(
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
                self._hand_over(load, "the exported snapshot is gone")
            return
        tries = load.tries[chunk.number] = load.tries.get(chunk.number, 0) + 1
        passing = error.remedy is Remedy.RETRY
        if passing and (isinstance(error, SourceUnreachable) or tries < CHUNK_TRIES_MAX):
            if not load.managed.state.is_blocked:
                load.managed.error = error
            load.not_before = time.monotonic() + retry_pause(tries)
            log.warning("chunk tried again", extra={"table": str(load.managed.table), "code": error.code})
        elif self._drop(load):
            self._fail(load.managed, error)

    def _expire(self) -> None:
        """End a snapshot that is open for too long: the source's clean-up waits for it."""
        for load in list(self._loads.values()):
            shared = load.shared_snapshot
            limit = self._settings.load.time_limit
            if shared is not None and load.unread_chunks and time.monotonic() > shared.opened_at + limit:
                self._hand_over(load, "the time limit is reached")

    def _hand_over(self, load: RunningLoad, why: str) -> None:
        """Go on without the exported snapshot: in the chunked way with what is left, or from the beginning."""
        load.release_snapshot()
        if load.record.plan.cut is ChunkKind.KEY:
            log.warning("load goes on in chunks", extra={"table": str(load.managed.table), "why": why})
            return
        if not self._drop(load):
            return
        if load.record.plan.schema.key and self._settings.load.way != "exact" and not load.record.spec.needs_exact_load:
            log.warning("load begins again in chunks", extra={"table": str(load.managed.table), "why": why})
            self._begins.chunked_only.add(load.managed.table)
            self._begin_again(load.managed, load.record)
            return
        self._fail(
            load.managed,
            TableFailed(
                "the load could not be finished in one snapshot",
                table=load.managed.table,
                why=why,
                hint="It is tried again. A table without a key, in `mode: append` or `history` is read in one "
                "snapshot. Raise `load.time_limit` or `load.connections`, or load at a quieter time.",
            ),
        )

    def _begin_again(self, life: ManagedTable, seed: LoadRecord) -> None:
        """See to it that a load that was dropped is begun again; one that was wished for is still on record."""
        if seed.request is None and life.applied_position is not None:
            self._always.add(life.table)

    def _replan(self, load: RunningLoad, error: SourceRewritten) -> None:
        """The table is not what the plan was made for; begin again."""
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
                    hint="Load it when nobody truncates, rewrites or alters it: `tailrace snapshot FILE TABLE`.",
                ),
            )
            return
        self._begin_again(load.managed, load.record)

    # Landing.

    def _land_complete(self) -> None:
        for load in list(self._loads.values()):
            if load.is_complete and not load.committing and load.managed.table not in self._under_way.holds:
                load.release_snapshot()
                self._lives.refresh_index()
                if self._can_land(load):
                    load.committing = True
                    self._spawn(partial(self._land, load))

    def _can_land(self, load: RunningLoad) -> bool:
        """Whether the log holds all that it takes to say where the replay starts, or to bring the table there."""
        upto = (
            load.record.barrier.ceiling
            if load.record.barrier is not None
            else load.record.snapshot_position
            if load.managed.apply_suspended
            else None
        )
        return upto is None or self._lives.index.position >= upto

    def _notice_changed(self) -> None:
        """A partition that comes or goes, or a file that is another, is not waited for until the end."""
        for load in self._files.changed([load for load in list(self._loads.values()) if not load.committing]):
            if not load.committing:  # else it is about to be noticed there
                self._replan(load, table_changed_error(load.managed.table))

    def _end_replayed(self) -> None:
        """Forget loads once the log has passed their last chunk."""
        for table, seed in list(self._landed.items()):
            with self._lock:
                over = self._landed.get(table) is seed and self._lives.tables[table].catch_up_load != seed.id
                if over:
                    del self._landed[table]
            if over:
                self._seeds.end(seed)

    def _land(self, load: RunningLoad) -> None:
        """One commit of everything that was staged, at the position just before the replay."""
        life, seed = load.managed, load.record
        try:
            start = find_load_point(self._lives, seed)
            since = self._lives.complete_from(life.table)
            if not self._source.is_unchanged(seed.plan) or (since is not None and start < since):
                raise table_changed_error(life.table)
            with life.lock:
                apply_to_load_point(self._lives, load, start, self._take)
                cursor = applied_position_after(self._lives, load, start)
                passed = newest_row_position(self._lives, load, start)
                if passed > cursor.position:
                    # It may be the end of a log that is not flushed yet, and the stream may never get there.
                    passed = min(passed, self._source.committed_until())
                self._seeds.record_commit(seed.id, passed, read_by := self._source.server_time())
                landed = finish_load(self._lives, load, cursor, self._run)
                failpoints.hit("load.landed")
                self._kept.keep(life, seed.id)
                if seed.request is not None:
                    self._seeds.complete_request(seed.request)
                over = life.load_only and passed <= cursor.position
                life.state = TableState.LOADED if over else TableState.CATCHING_UP
                life.record_commit(landed, seed.plan.schema)
                life.loaded_at = read_by
                life.last_load = load.result()
                life.rows_loaded = life.last_load.rows
                life.catch_up_load = seed.id if passed > cursor.position else None
                with self._lock:
                    before, self._landed[life.table] = self._landed.get(life.table), seed
                if before is not None:
                    self._seeds.end(before)
        except SourceRewritten as error:
            self._replan(load, error)
            return
        except TailraceError as error:
            if isinstance(error, SOURCE_WAIT_ERRORS):
                load.committing = False  # all is staged: only the last look is missing
                if not life.state.is_blocked:
                    life.error = error
                return
            if self._drop(load):
                self._fail(life, error)
            return
        with self._lock:
            del self._loads[life.table]
            life.load_floor = life.load_status = life.reload_error = None
            life.apply_suspended = False
        self._replans.pop(life.table, None)
        self._again.pop(life.table, None)
        with suppress(TailraceError):
            discard(life.location.staging, seed.id)
        log.info("load landed", extra={"table": str(life.table), "rows": life.rows_loaded})
        if not over:
            self._advance(life)

    # Ending.

    def _drop(self, load: RunningLoad) -> bool:
        """Forget a load and what it has staged; the table is as it was. False if another has done so already."""
        load.release_snapshot()
        if not self._under_way.drop(load):
            return False
        load.managed.apply_suspended = False
        self._give_up(load.record, load.managed)
        return True

    def _give_up(self, seed: LoadRecord, life: ManagedTable) -> None:
        with suppress(TailraceError):
            discard(life.location.staging, seed.id)
        self._seeds.end(seed)

    def _fail(self, life: ManagedTable, error: TailraceError) -> None:
        """The table is not loaded; whether it is tried again the error says. A table that is live goes on."""
        if life.table in self._loads:
            return  # it had begun before something else of its lot failed
        life.load_floor, life.load_status, life.apply_suspended = None, None, False
        if isinstance(error, SOURCE_WAIT_ERRORS):
            shown = (
                life.error if life.state.is_blocked else error
            )  # what it stands still for tells how it can be loaded
            life.error, life.failures, life.failed_at = shown, min(life.failures + 1, 5), time.monotonic()
            return
        waits = (TableState.NEW, TableState.SEEDING, TableState.REFRESHING)
        unloaded = life.applied_position is None or life.state in waits or life.state.is_blocked
        if unloaded or life.reload_reason is not None:  # it goes no further without the load
            life.fail(error)
            if error.remedy is not Remedy.RETRY:
                self._forget_wishes(life.table)
            return
        failures = self._again.get(life.table, (0, 0.0))[0] + 1
        self._again[life.table] = (failures, time.monotonic() + retry_pause(failures))
        life.reload_error = f"It could not be loaded again: {error.headline}. {error.hint}"
        if failures >= CHUNK_TRIES_MAX or error.remedy is not Remedy.RETRY:
            del self._again[life.table]
            self._always.discard(life.table)
            self._forget_wishes(life.table)  # last: who has asked for it finds why it came to nothing
        said = {"table": str(life.table), "code": error.code, "reason": error.headline, "hint": error.hint}
        log.error("table not loaded again", extra=said)

    def _forget_wishes(self, table: TableId) -> None:
        for wish in self._seeds.requests():
            if wish.table == table:
                self._seeds.complete_request(wish)

    def _tell(self) -> None:
        for load in list(self._loads.values()):
            held = load.managed.table in self._under_way.holds
            status = load.status(held=held, backing_off=self._throttle.backing_off)
            self._under_way.publish_status(load, status)
            if load.managed.applied_position is None:
                load.managed.rows_loaded = status.rows
        shown = [life.load_status for life in list(self._lives.tables.values())]
        self._lives.waiting_for = self._waits.describe(any(load and load.stage == "waiting" for load in shown))
