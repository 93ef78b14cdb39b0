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
from tailrace.capture.postgres.chunks import Chunk, Cut
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
from tailrace.pipeline.apply.schema_watch import ShapeWatch
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.pipeline.loads.chunk_readers import Reading
from tailrace.pipeline.loads.file_watch import FileWatch
from tailrace.pipeline.loads.history_catch_up import Take, bring_to
from tailrace.pipeline.loads.kept_loads import SeedKeeping
from tailrace.pipeline.loads.load_commit import Run, commit, cursor_after, last_seen, start_of
from tailrace.pipeline.loads.load_start import Beginning, Waiting
from tailrace.pipeline.loads.open_transactions import Waits
from tailrace.pipeline.loads.running_load import LOOK_SECONDS, Load, Shared, UnderWay, pause, was_changed
from tailrace.pipeline.loads.throttle import PROBE_SECONDS, Throttle
from tailrace.pipeline.report import TableState
from tailrace.pipeline.tables.registry import Lives, TableLife
from tailrace.pipeline.tables.retention_holds import Holding
from tailrace.tables.staging import discard
from tailrace.tasks.load_store import Hold, Seed

log = logging.getLogger(__name__)

TABLES_SECONDS = 3.0
"""Between two looks for tables that are new at the source."""
WAITED_FOR = (SourceUnreachable, SourceSlow)
"""However long it takes: whoever captures tells of the one, and `status` of the other."""
CHUNK_TRIES_MAX = 8
"""Of one chunk, for reasons other than a source that cannot be reached: that is waited for."""
REPLANS_MAX = 20
"""Of a load whose table keeps being rewritten under it."""


class Loading:
    """Loads whatever tables need it, until told to stop."""

    def __init__(
        self,
        settings: PipelineSettings,
        source: PostgresCapture,
        lives: Lives,
        holding: Holding,
        *,
        run: Run,
        spawn: Callable[[Callable[[], None]], object],
        advance: Callable[[TableLife], None],
        take: Take,
        stopping: threading.Event,
        scratch: Path,
        seeds: SeedKeeping,
    ) -> None:
        self._settings = settings
        self._source = source
        self._lives = lives
        self._holding = holding
        self._run, self._spawn = run, spawn
        self._advance, self._take = advance, take
        self._stopping = stopping
        self._seeds, self._kept = lives.seeds, seeds
        self._under_way = UnderWay(scratch, lives.seeds.held())
        self._loads, self._lock = self._under_way.loads, self._under_way.lock
        self._begins = Beginning(
            settings.load, source, lives, holding, run=run, begun=self._start, failed=self._fail, stopping=stopping
        )
        self._beginning = False
        self._always = {table for table in lives.tables if settings.load.mode_of(table) == "always"}
        self._replans: dict[TableId, int] = {}
        self._landed: dict[TableId, Seed] = {}
        """Loads whose replay is not over."""
        self._was: dict[TableId, tuple[TableState, TailraceError | None]] = {}
        """What tables go back to that a person holds back."""
        self._again: dict[TableId, tuple[int, float]] = {}
        """Loads of tables that go on meanwhile and that failed: how often, and when the next is due."""
        self._waits = Waits(source)
        self._shapes = ShapeWatch(source, lives)
        self._files = FileWatch(source, spawn)
        self._throttle = Throttle(settings.load.connections, source.lag if settings.load.throttle else None)
        self.reading = Reading(
            settings.load,
            source,
            lives.log.path,
            self._under_way,
            self._throttle,
            run=run,
            failed=self._chunk_failed,
            stopping=stopping,
            sets_aside=settings.tables.sets_aside,
        )

    # The one who looks.

    def look(self) -> None:
        """Begin, end, hold back and let go of loads, until told to stop."""
        self._take_up()
        tables_at = probe_at = 0.0
        while not self._stopping.is_set():
            now = time.monotonic()
            if now >= tables_at or self._begins.behind:
                self._begins.look()
                self._shapes.look()
                for life in self._shapes.ready():
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
            load.leave_snapshot()
        self._end_replayed()

    @property
    def idle(self) -> bool:
        """Whether nothing is being loaded, and nothing waits for it that could be."""
        return self.is_idle_but_for(())

    def is_idle_but_for(self, some: Collection[TableId]) -> bool:
        """The same, where loads of some tables do not count."""
        behind = self._begins.behind  # first: a table that is followed after this is not missed
        held, tables = self._seeds.held(), dict(self._lives.tables)
        wished = {wish.table for wish in self._seeds.wishes()} & tables.keys()
        needed = {table for table, life in tables.items() if self._is_needed(life)}
        with self._lock:
            busy = behind or self._beginning or not self._shapes.tried
            return not busy and not (wished | needed | self._loads.keys()) - held.keys() - set(some)

    def waiting_for_log(self) -> set[TableId]:
        """The tables whose rows are all read, and land once the log has what was committed before."""
        with self._lock:
            return {
                table
                for table, load in self._loads.items()
                if load.complete and not load.landing and table not in self._under_way.held and not self._can_land(load)
            }

    def _is_needed(self, life: TableLife) -> bool:
        """Whether the table's mode asks for a load of it, new or not."""
        mode = self._settings.load.mode_of(life.table)
        if life.state is TableState.NEEDS_SNAPSHOT:
            return mode in ("when_needed", "always")
        unloaded = life.state in (TableState.NEW, TableState.PAUSED, TableState.REFRESHING)
        return unloaded or (life.table in self._always and not life.state.broken)

    def _take_up(self) -> None:
        """Loads that an earlier process began."""
        self._seeds.sweep(self._kept.loads)
        seen: set[TableId] = set()
        for seed in reversed(self._seeds.all()):
            life = self._lives.tables.get(seed.table)
            if life is None:
                continue  # not wanted any more, or the source does not show it now
            if life.replay == seed.id:
                self._landed[seed.table] = seed
                self._kept.keep(life, seed.id)
                if seed.wish is not None:
                    self._seeds.fulfil(seed.wish)
                continue
            if seed.table in self._landed:
                self._seeds.end(seed)  # an older one
                continue
            since = self._lives.since(seed.table)
            usable = (
                seed.table not in seen
                and (since is None or seed.floor >= since)
                and seed.plan.cut is Cut.KEY
                and seed.form == life.place.form
                and self._lives.index.commit_at(seed.floor) + 1 >= self._lives.index.first
            )
            seen.add(seed.table)
            if not usable:
                # What was cut off in one snapshot would be so again.
                self._begins.chunked.add(seed.table)
                life.loading = None
                self._give_up(seed, life)
                self._begin_again(life, seed)
                continue
            staged = self._seeds.staged(seed.id)
            todo = deque(chunk for chunk in seed.plan.chunks if chunk.number not in staged)
            log.info(
                "load taken up again",
                extra={"table": str(seed.table), "chunks_done": len(staged), "chunks": len(seed.plan.chunks)},
            )
            self._start(Load(life=life, seed=seed, todo=todo, staged=staged, shared=None))
        self._holding.say(now=True)

    def _obey(self) -> None:
        """Do what a person has decided about loads."""
        wishes = self._seeds.wishes()  # before the holds: one who asks again has lifted his own
        held = self._under_way.held = self._seeds.held()
        for table, hold in held.items():
            load, life = self._loads.get(table), self._lives.tables.get(table)
            if load is not None and load.landing:
                continue  # whoever lands it says what the table is then
            if load is not None and not load.reading:
                self._hold_back(load, hold)
            if life is not None and life.state in (TableState.NEW, TableState.SEEDING, TableState.REFRESHING):
                before = (load.state_before, load.stopped_by) if load is not None else (life.state, life.error)
                self._was[table] = before
                life.state = TableState.PAUSED
        for wish in wishes:
            if held.get(wish.table) is Hold.STOPPED and wish.table not in self._loads and not self._beginning:
                self._seeds.fulfil(wish)
                self._lift(wish.table)
        for table, life in list(self._lives.tables.items()):
            if table not in held and life.state is TableState.PAUSED:
                was = self._was.pop(table, (TableState.NEW, None))
                life.fall_back(*((TableState.SEEDING, None) if table in self._loads else was))

    def _hold_back(self, load: Load, hold: Hold) -> None:
        """The source's clean-up must not wait for a person: only chunks that need no snapshot of before are kept."""
        table = load.life.table
        if hold is Hold.STOPPED:
            if load.seed.wish is not None:
                self._seeds.fulfil(load.seed.wish)
            if self._drop(load):
                self._lift(table)
        elif load.seed.plan.cut is Cut.KEY:
            load.leave_snapshot()
        elif self._drop(load):
            self._begin_again(load.life, load.seed)

    def _lift(self, table: TableId) -> None:
        """A table that has rows goes on as it was; one that has none stays so until it is asked for."""
        life = self._lives.tables.get(table)
        if life is not None and life.cursor is not None:
            self._seeds.hold(table, None)
            if life.refresh is not None:
                self._was.pop(table, None)
                life.needs_snapshot()

    # Beginning.

    def _begin_waiting(self) -> None:
        wishes = {wish.table: wish for wish in reversed(self._seeds.wishes())}
        waiting: Waiting = []
        for table, life in list(self._lives.tables.items()):
            if table in self._under_way.held or table in self._loads:
                continue
            failed = life.error is not None and life.failures > 0
            if failed and time.monotonic() < life.failed_at + pause(life.failures):
                continue
            if time.monotonic() < self._again.get(table, (0, 0.0))[1]:
                continue
            if life.doubted_until and life.place.form.exact:
                continue  # a task of before could bring it past the snapshot's point
            if table in wishes:
                waiting.append((life, wishes[table]))
            elif self._is_needed(life):
                waiting.append((life, None))
        if waiting and not self._beginning:
            # Apart: it waits for transactions that are open at the source.
            self._beginning = True
            self._spawn(partial(self._begin, waiting))

    def _begin(self, waiting: Waiting) -> None:
        try:
            self._begins.begin(waiting)
        finally:
            self._beginning = False

    def _start(self, load: Load) -> None:
        load.found_rows = sum(staged.rows for staged in load.staged.values())
        load.state_before, load.stopped_by = load.life.state, load.life.error
        if load.life.state is TableState.NEW or load.life.state.broken:
            load.life.state = TableState.SEEDING
        load.life.loading = load.life.loading or self._lives.cursor_at(load.seed.floor)
        self._always.discard(load.life.table)
        with self._lock:
            self._loads[load.life.table] = load

    # Reading.

    def _chunk_failed(self, load: Load, chunk: Chunk, error: TailraceError, shared: Shared | None) -> None:
        if load.dropped:
            return
        if isinstance(error, SourceRewritten):
            self._replan(load, error)
            return
        if isinstance(error, SnapshotGone):
            if shared is not None and load.shared is shared:
                self._hand_over(load, "the exported snapshot is gone")
            return
        tries = load.tries[chunk.number] = load.tries.get(chunk.number, 0) + 1
        passing = error.remedy is Remedy.RETRY
        if passing and (isinstance(error, SourceUnreachable) or tries < CHUNK_TRIES_MAX):
            if not load.life.state.broken:
                load.life.error = error
            load.not_before = time.monotonic() + pause(tries)
            log.warning("chunk tried again", extra={"table": str(load.life.table), "code": error.code})
        elif self._drop(load):
            self._fail(load.life, error)

    def _expire(self) -> None:
        """End a snapshot that is open for too long: the source's clean-up waits for it."""
        for load in list(self._loads.values()):
            shared = load.shared
            limit = self._settings.load.time_limit
            if shared is not None and load.todo and time.monotonic() > shared.opened_at + limit:
                self._hand_over(load, "the time limit is reached")

    def _hand_over(self, load: Load, why: str) -> None:
        """Go on without the exported snapshot: in the chunked way with what is left, or from the beginning."""
        load.leave_snapshot()
        if load.seed.plan.cut is Cut.KEY:
            log.warning("load goes on in chunks", extra={"table": str(load.life.table), "why": why})
            return
        if not self._drop(load):
            return
        if load.seed.plan.schema.key and self._settings.load.way != "exact" and not load.seed.form.exact:
            log.warning("load begins again in chunks", extra={"table": str(load.life.table), "why": why})
            self._begins.chunked.add(load.life.table)
            self._begin_again(load.life, load.seed)
            return
        self._fail(
            load.life,
            TableFailed(
                "the load could not be finished in one snapshot",
                table=load.life.table,
                why=why,
                hint="It is tried again. A table without a key, in `mode: append` or `history` is read in one "
                "snapshot. Raise `load.time_limit` or `load.connections`, or load at a quieter time.",
            ),
        )

    def _begin_again(self, life: TableLife, seed: Seed) -> None:
        """See to it that a load that was dropped is begun again; one that was wished for is still on record."""
        if seed.wish is None and life.cursor is not None:
            self._always.add(life.table)

    def _replan(self, load: Load, error: SourceRewritten) -> None:
        """The table is not what the plan was made for; begin again."""
        if not self._drop(load):
            return
        table = load.life.table
        self._replans[table] = self._replans.get(table, 0) + 1
        log.warning("load begins again", extra={"table": str(table), "reason": error.message})
        if not load.life.state.broken:
            load.life.error = error
        if self._replans[table] > REPLANS_MAX:
            self._fail(
                load.life,
                TableFailed(
                    "the table is rewritten again and again while it is loaded",
                    table=table,
                    hint="Load it when nobody truncates, rewrites or alters it: `tailrace snapshot FILE TABLE`.",
                ),
            )
            return
        self._begin_again(load.life, load.seed)

    # Landing.

    def _land_complete(self) -> None:
        for load in list(self._loads.values()):
            if load.complete and not load.landing and load.life.table not in self._under_way.held:
                load.leave_snapshot()
                self._lives.grow()
                if self._can_land(load):
                    load.landing = True
                    self._spawn(partial(self._land, load))

    def _can_land(self, load: Load) -> bool:
        """Whether the log holds all that it takes to say where the replay starts, or to bring the table there."""
        upto = load.seed.noted.upto if load.seed.noted is not None else load.seed.point if load.life.halted else None
        return upto is None or self._lives.index.position >= upto

    def _notice_changed(self) -> None:
        """A partition that comes or goes, or a file that is another, is not waited for until the end."""
        for load in self._files.changed([load for load in list(self._loads.values()) if not load.landing]):
            if not load.landing:  # else it is about to be noticed there
                self._replan(load, was_changed(load.life.table))

    def _end_replayed(self) -> None:
        """Forget loads once the log has passed their last chunk."""
        for table, seed in list(self._landed.items()):
            with self._lock:
                over = self._landed.get(table) is seed and self._lives.tables[table].replay != seed.id
                if over:
                    del self._landed[table]
            if over:
                self._seeds.end(seed)

    def _land(self, load: Load) -> None:
        """One commit of everything that was staged, at the position just before the replay."""
        life, seed = load.life, load.seed
        try:
            start = start_of(self._lives, seed)
            since = self._lives.since(life.table)
            if not self._source.unchanged(seed.plan) or (since is not None and start < since):
                raise was_changed(life.table)
            with life.lock:
                bring_to(self._lives, load, start, self._take)
                cursor = cursor_after(self._lives, load, start)
                passed = last_seen(self._lives, load, start)
                if passed > cursor.position:
                    # It may be the end of a log that is not flushed yet, and the stream may never get there.
                    passed = min(passed, self._source.horizon())
                self._seeds.land(seed.id, passed, read_by := self._source.clock())
                landed = commit(self._lives, load, cursor, self._run)
                failpoints.hit("load.landed")
                self._kept.keep(life, seed.id)
                if seed.wish is not None:
                    self._seeds.fulfil(seed.wish)
                over = life.once and passed <= cursor.position
                life.state = TableState.LOADED if over else TableState.CATCHING_UP
                life.moved(landed, seed.plan.schema)
                life.loaded_at = read_by
                life.last_load = load.done()
                life.rows_loaded = life.last_load.rows
                life.replay = seed.id if passed > cursor.position else None
                with self._lock:
                    before, self._landed[life.table] = self._landed.get(life.table), seed
                if before is not None:
                    self._seeds.end(before)
        except SourceRewritten as error:
            self._replan(load, error)
            return
        except TailraceError as error:
            if isinstance(error, WAITED_FOR):
                load.landing = False  # all is staged: only the last look is missing
                if not life.state.broken:
                    life.error = error
                return
            if self._drop(load):
                self._fail(life, error)
            return
        with self._lock:
            del self._loads[life.table]
            life.loading = life.load = life.trouble = None
            life.halted = False
        self._replans.pop(life.table, None)
        self._again.pop(life.table, None)
        with suppress(TailraceError):
            discard(life.place.staging, seed.id)
        log.info("load landed", extra={"table": str(life.table), "rows": life.rows_loaded})
        if not over:
            self._advance(life)

    # Ending.

    def _drop(self, load: Load) -> bool:
        """Forget a load and what it has staged; the table is as it was. False if another has done so already."""
        load.leave_snapshot()
        if not self._under_way.drop(load):
            return False
        load.life.halted = False
        self._give_up(load.seed, load.life)
        return True

    def _give_up(self, seed: Seed, life: TableLife) -> None:
        with suppress(TailraceError):
            discard(life.place.staging, seed.id)
        self._seeds.end(seed)

    def _fail(self, life: TableLife, error: TailraceError) -> None:
        """The table is not loaded; whether it is tried again the error says. A table that is live goes on."""
        if life.table in self._loads:
            return  # it had begun before something else of its lot failed
        life.loading, life.load, life.halted = None, None, False
        if isinstance(error, WAITED_FOR):
            shown = life.error if life.state.broken else error  # what it stands still for tells how it can be loaded
            life.error, life.failures, life.failed_at = shown, min(life.failures + 1, 5), time.monotonic()
            return
        waits = (TableState.NEW, TableState.SEEDING, TableState.REFRESHING)
        unloaded = life.cursor is None or life.state in waits or life.state.broken
        if unloaded or life.refresh is not None:  # it goes no further without the load
            life.fail(error)
            if error.remedy is not Remedy.RETRY:
                self._forget_wishes(life.table)
            return
        failures = self._again.get(life.table, (0, 0.0))[0] + 1
        self._again[life.table] = (failures, time.monotonic() + pause(failures))
        life.trouble = f"It could not be loaded again: {error.headline}. {error.hint}"
        if failures >= CHUNK_TRIES_MAX or error.remedy is not Remedy.RETRY:
            del self._again[life.table]
            self._always.discard(life.table)
            self._forget_wishes(life.table)  # last: who has asked for it finds why it came to nothing
        said = {"table": str(life.table), "code": error.code, "reason": error.headline, "hint": error.hint}
        log.error("table not loaded again", extra=said)

    def _forget_wishes(self, table: TableId) -> None:
        for wish in self._seeds.wishes():
            if wish.table == table:
                self._seeds.fulfil(wish)

    def _tell(self) -> None:
        for load in list(self._loads.values()):
            held = load.life.table in self._under_way.held
            status = load.status(held=held, backing_off=self._throttle.backing_off)
            self._under_way.tell(load, status)
            if load.life.cursor is None:
                load.life.rows_loaded = status.rows
        shown = [life.load for life in list(self._lives.tables.values())]
        self._lives.waiting_for = self._waits.told(any(load and load.stage == "waiting" for load in shown))
