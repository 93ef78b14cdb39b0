"""The apply side of a pipeline: loads new tables, and brings the loaded ones to the end of the log.

Tables at different positions share one query, which only wakes the work; losing its checkpoint loses nothing.
One table's failure holds back only that table. All tables of a micro-batch end on one commit of the log, and
no row passes the driver: tasks read the log and write the tables.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tailrace import failpoints
from tailrace.capture.postgres.source import PostgresCapture
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write import log_lease
from tailrace.errors import BaseRowMissing, ForeignWrite, SchemaChanged, SourceRewritten, TableFailed, TailraceError
from tailrace.pipeline.apply.compaction import Compactor
from tailrace.pipeline.apply.dead_letter_replay import DeadLetterReplayer
from tailrace.pipeline.apply.foreign_writes import ForeignWriteWatch
from tailrace.pipeline.apply.pace import Pace
from tailrace.pipeline.apply.spark_start import make_scratch, spark_log, start_jvm
from tailrace.pipeline.capture.capture_process import RESTARTS_MAX, RestartLimit
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.pipeline.loads.kept_loads import LoadKeeper
from tailrace.pipeline.loads.load_commit import run_task
from tailrace.pipeline.loads.load_scheduler import SOURCE_WAIT_ERRORS, LoadScheduler
from tailrace.pipeline.points.consistent_point import build_point
from tailrace.pipeline.points.ledger import ConsistentPoint, Ledger
from tailrace.pipeline.report import TableState
from tailrace.pipeline.status import read_status_file
from tailrace.pipeline.tables.managed_table import RETRIES_MAX, ApplyRange, ManagedTable
from tailrace.pipeline.tables.registry import ROWS_PER_BATCH_MAX, TableRegistry
from tailrace.pipeline.tables.retention_holds import RetentionHolds
from tailrace.spark.session.session import Jvm
from tailrace.spark.session.wakeup import WakeSource
from tailrace.spark.writers.engine import SparkEngine
from tailrace.tables.delta.table import UNCOMMITTED
from tailrace.tables.spec import TableMode
from tailrace.tables.staging import discard
from tailrace.tasks.apply import advance_table
from tailrace.tasks.work import ApplyWork, EvolveWork, Outcome, as_tailrace_error

log = logging.getLogger(__name__)

REFETCH_SECONDS_MAX = 60.0
RETRY_SECONDS = 0.5
SOURCE_SECONDS = 5.0
"""Until rows are asked for again of a source that did not answer."""
SWEEP_SECONDS = 2.0
STOP_SECONDS_MAX = 20.0
"""For what is under way when we are told to stop; then the JVM is ended with it."""


class Applier:
    """Loads and applies every wanted table until it is told to stop."""

    def __init__(self, settings: PipelineSettings, change_log: ChangeLog, source: PostgresCapture) -> None:
        self._settings = settings
        self._log = change_log
        self._source = source
        self.registry = TableRegistry(
            change_log, settings.tables.layout, settings.tables.policies_of, source.parse_value
        )
        self.retention_holds = RetentionHolds(self.registry)
        self._lake = ForeignWriteWatch(self.registry)
        self._kept = LoadKeeper(settings.tables.keep_seed, settings.tables.layout, self.registry)
        self._ledger = Ledger(change_log.path)
        self._stopping = threading.Event()
        self._pace = Pace()
        self._redelivering = DeadLetterReplayer(
            self.registry, source, run=self._run, merging=self._pace.merging, stopping=self._stopping
        )
        self._batch = threading.Lock()
        self._woken = threading.Event()
        self._called_for = 0
        """The commit that all tables were last asked to come to."""
        self._scratch = make_scratch(change_log)
        self._jvm: Jvm | None = None
        self._spark: SparkSession | None = None
        self._engine: SparkEngine | None = None
        """Where Spark's connector writes the tables."""
        self._query: StreamingQuery | None = None
        self._restarts = RestartLimit()
        """Of a query that broke, e.g. because a worker was killed."""
        self._threads: list[threading.Thread] = []
        """Those that may be at work; `_threading` is for whoever begins one."""
        self._threading = threading.Lock()
        self._starting: threading.Thread | None = None
        self._failure: TailraceError | None = None

    # Life and death.

    def discover(self) -> None:
        """Find the wanted tables and what their lake tables already hold."""
        self.registry.refresh_index()
        noted = read_status_file(self._log.path)
        for table in self._source.tables():
            life = self.registry.add(table.table, table, self._settings.load.mode_of(table.table))
            life.rows_loaded = noted.get(table.table, {}).get("rows_loaded", 0)
            for left in UNCOMMITTED:
                with suppress(TailraceError):
                    discard(life.location.staging, left, last=True)
        if not self._source.discovers_tables:  # of those it is not known what they will be called
            for pattern in self._settings.unmatched_patterns(self.registry.tables):
                log.warning("pattern matches no table", extra={"pattern": pattern})
        self.retention_holds.enable()
        self.load_scheduler = LoadScheduler(
            self._settings,
            self._source,
            self.registry,
            self.retention_holds,
            run=self._run,
            spawn=self._in_background,
            advance=self._advance_one,
            take=self._take,
            stopping=self._stopping,
            scratch=self._scratch,
            seeds=self._kept,
        )

    def start(self) -> None:
        """Begin to start Spark, the loads and the query that wakes the work; returns at once."""
        self._starting = self._in_background(self._start)

    def _start(self) -> None:
        self._jvm = start_jvm(self._settings, self._scratch)
        if self._stopping.is_set():
            return
        self._spark = self._jvm.open_session()
        tables = self._settings.tables
        self._engine = SparkEngine(self._spark, tables.layout.catalog) if tables.written_by_spark else None
        known = [
            life.applied_position.commit for life in self.registry.tables.values() if life.applied_position is not None
        ]
        begin = min([*known, self.registry.index.last_commit]) if known else 0
        self._wake = WakeSource(lambda done: self.registry.next_batch_end(done).end, begin)
        self._in_background(lambda: self._wake.serve(self._stopping))
        # None of them waits for the query, which takes seconds to start.
        self._in_background(self.load_scheduler.run)
        for number in range(self._settings.load.connections):
            self._in_background(partial(self.load_scheduler.chunk_readers.run_reader, number))
        self._in_background(self._apply_until_woken)
        self._in_background(self._sweep_until_stopped)
        self.start_compaction()
        self.start_dead_letter_replay()
        self._query = self._start_query()

    def start_compaction(self) -> None:
        """Begin to look after the tables' files, if that is wished."""
        upkeep = self._settings.tables.upkeep
        if upkeep.join or upkeep.remove_after is not None:
            tending = Compactor(
                upkeep, self.registry, run=self._run, advance=self._advance_one, stopping=self._stopping
            )
            self._in_background(tending.run)

    def start_dead_letter_replay(self) -> None:
        """Begin to look for dead letters that are to be tried again."""
        self._in_background(self._redelivering.run)

    def _start_query(self) -> StreamingQuery:
        """A query with a checkpoint of its own: the tables say where to go on, not Spark."""
        assert self._spark is not None, "started"
        return self._wake.start(self._spark, self._scratch / f"checkpoint-{self._restarts.count}", self._on_batch)

    @property
    def spark_log(self) -> Path:
        """Where Spark writes what it has to say."""
        return spark_log(self._settings)

    def stop(self) -> None:
        """Finish what is under way, then let go of everything."""
        self._stopping.set()
        self._pace.stop_resting()
        if self._query is None:
            self._kill_unstarted()
        deadline = time.monotonic() + STOP_SECONDS_MAX
        while (alive := self._alive()) and (left := deadline - time.monotonic()) > 0:
            alive[0].join(left)
        if alive and self._jvm is not None:
            self._jvm.kill()  # what a task has written and not committed is nobody's
        with suppress(Exception):  # the JVM may be gone already
            if self._batch.acquire(timeout=STOP_SECONDS_MAX):  # stopped inside a micro-batch it dies noisily
                self._batch.release()
            if self._query is not None and self._query.isActive:
                self._query.stop()
            if self._spark is not None:
                self._spark.stop()
        if self._jvm is not None:
            self._jvm.kill()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _kill_unstarted(self) -> None:
        """Do not wait for a Spark that is only starting: nothing of ours runs in it yet."""
        starting = self._starting
        while starting is not None and starting.is_alive() and self._query is None:
            if self._jvm is not None and self._spark is None:
                self._jvm.kill()
            starting.join(0.1)

    def check(self) -> None:
        """Start the query again if it broke; raise what made the apply side as a whole stop."""
        if self._failure is not None:
            raise self._failure
        if self._query is None or self._stopping.is_set() or self._query_is_active(self._query):
            return
        if not self._restarts.try_one_more():
            raise TableFailed(
                "the Spark query ended by itself, again and again",
                times=RESTARTS_MAX + 1,
                hint=f"See {self.spark_log}, and start again.",
            )
        log.warning("query ended, started again", extra={"spark_log": str(self.spark_log)})
        self._query = self._start_query()

    def _query_is_active(self, query: StreamingQuery) -> bool:
        try:
            return query.isActive
        except Exception as error:
            hint = f"Was it out of memory? See {self.spark_log}, and start again: nothing is lost."
            raise TableFailed("Spark's Java process ended", hint=hint) from error

    def stop_resting(self) -> None:
        """Do not rest between micro-batches, nor go on resting: someone waits for the end."""
        self._pace.stop_resting()

    @property
    def merging_share(self) -> float:
        """Which part of the last minute went into merging."""
        return self._pace.merging_share()

    def _in_background(self, work: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except TailraceError as error:
                self._failure = error
            except Exception as error:  # the thread's boundary: the pipeline must hear of it
                if self._stopping.is_set():  # Spark was ended under it
                    return
                self._failure = as_tailrace_error(error)

        thread = threading.Thread(target=guarded, daemon=True)
        with self._threading:
            thread.start()
            self._threads = [*self._alive(), thread]
        return thread

    def _alive(self) -> list[threading.Thread]:
        """A table that cannot be loaded is tried again for ever, in a new thread each time: none that ended is kept."""
        return [thread for thread in self._threads if thread.is_alive()]

    def _run(self, task: Callable[..., Outcome], works: Sequence[Any]) -> list[Outcome]:
        assert self._spark is not None, "started"
        if self._engine is not None and self._engine.handles(task):
            return self._engine.run(task, works)
        return self._spark.sparkContext.parallelize(works, len(works)).map(task).collect()

    # Applying.

    def is_caught_up(self, commit: int) -> bool:
        """Whether every table that can go on holds the log up to the commit, and nothing is left to load or to replay.

        While someone captures, the log will also pass what the catalogue showed of tables that changed their shape.
        """
        if not self.load_scheduler.is_idle or not self.registry.is_caught_up(commit) or not self._redelivering.is_idle:
            return False
        told = [life.pending_schema for life in self._loaded() if life.pending_schema is not None]
        captured = bool(told) and log_lease.live_holder_pid(self._log.path) is not None
        return not any(captured or self.registry.index.position >= item.horizon for item in told)

    def waits_for_log(self, commit: int) -> bool:
        """Whether all that is left to do up to the commit is to wait for the log to grow past what was loaded."""
        landing, lives = self.load_scheduler.tables_waiting_for_log(), list(self.registry.tables.values())
        waiting = landing | {life.table for life in lives if self.registry.waits_for_log(life)}
        return (
            bool(waiting)
            and self.load_scheduler.is_idle_except(landing)
            and self.registry.is_caught_up(commit, but=waiting)
        )

    def _apply_until_woken(self) -> None:
        """Apply what there is while the query starts."""
        while not self._stopping.is_set() and not self._woken.wait(RETRY_SECONDS):
            with self._batch:
                self._come_to(self.registry.refresh_index())

    def _on_batch(self, _batch: DataFrame, _number: int) -> None:
        """One micro-batch: bring every loaded table to the commit it ends on, then rest as long as is owed for it."""
        with self._batch:
            if self._stopping.is_set():
                return
            started = time.monotonic()
            if self._wake.announced_commit() is None:
                return
            self._woken.set()
            ahead = self.registry.next_batch_end(
                self._wake.answered_commit
            )  # while Spark got ready the log has grown past what was said
            self._come_to(ahead.end)
            failpoints.hit("apply.batch_done")
            rest = self._pace.rest_seconds(backlog=ahead.has_backlog)
            said = {"commit": ahead.end, "seconds": round(time.monotonic() - started, 3), "rests": round(rest, 3)}
            log.info("micro-batch done", extra=said)
            self._pace.rest(rest)
            self._wake.acknowledge(ahead.end)

    def _come_to(self, end: int) -> None:
        """Bring every loaded table to a commit, and note which of their versions belong together there. One that waits
        for the source would hold up the others: it is left to the sweep."""
        self._called_for = max(self._called_for, end)
        with self._pace.merging():
            self._advance([life for life in self._loaded() if not life.not_before], end)
        if (point := build_point(self.registry, end)) is not None:
            self._ledger.record(point)

    def _loaded(self) -> list[ManagedTable]:
        return [life for life in list(self.registry.tables.values()) if life.state.is_applying]

    def advance_skipped(self) -> None:
        """Tables that a micro-batch has left, because someone else was at work on them, or they wait for the source, or
        that were tried again; and such as have caught up, and could not be told so."""
        for life in self._loaded():
            untold = life.state is TableState.CATCHING_UP and not self.registry.pending(
                life, self.registry.index.last_commit
            )
            if untold or self.registry.pending(life, self._called_for):
                self._advance_one(life, None if untold else self._called_for)
        self._end_doubts()
        self.ensure_complete_point()

    def _end_doubts(self) -> None:
        """Have tables that no change comes for stand where they are, once no task can be at work on them."""
        for life in list(self.registry.tables.values()):
            if 0.0 < life.outcome_unknown_until <= time.monotonic() and life.lock.acquire(blocking=False):
                try:
                    self.registry.refresh_from_table(life)
                finally:
                    life.lock.release()

    def ensure_complete_point(self) -> bool:
        """Whether the last point has every table that goes on. If not it is noted anew once tables are there that were
        missing in passing, or were being loaded: when all is quiet no other would follow it."""
        if not self._unpointed(self._ledger.last):
            return True
        if not self._batch.acquire(blocking=False):
            return False
        try:
            point = build_point(self.registry, self._called_for)
            if point is not None and self._unpointed(point) < self._unpointed(self._ledger.last):
                self._ledger.record(point)
        finally:
            self._batch.release()
        return not self._unpointed(self._ledger.last)

    def _unpointed(self, point: ConsistentPoint | None) -> int:
        """How many tables go on, and are not in the point with all that they were loaded with."""
        return sum(
            point is None
            or life.table not in point.versions
            or (life.applied_position is not None and life.applied_position.position > point.position)
            for life in self._loaded()
        )

    def _sweep_until_stopped(self) -> None:
        while not self._stopping.wait(SWEEP_SECONDS):
            self.advance_skipped()
            self._lake.run_if_due()
            self._kept.run_if_due()

    def _advance_one(self, life: ManagedTable, end: int | None = None) -> None:
        """Beside the micro-batches, to a commit or the log's end; what fails here is done by the next of them, or swept
        up."""
        try:
            upto = self.registry.refresh_index() if end is None else end
            # As with micro-batches nothing is owed for a backlog: all tables would wait for one.
            waiting = sum(item.rows for item in self.registry.pending(life, upto))
            with nullcontext() if waiting > ROWS_PER_BATCH_MAX else self._pace.merging():
                self._advance([life], upto)
        except Exception as error:  # a worker was killed, or Spark is ending: whoever checks the query says so
            log.warning("table left for later", extra={"table": str(life.table), "exception": type(error).__name__})

    def _advance(self, lives: list[ManagedTable], end: int) -> None:
        """Apply, table beside table, until each has reached the commit, has failed, or is another's."""
        mine = [life for life in lives if life.lock.acquire(blocking=False)]
        apart = False
        try:
            while not self._stopping.is_set():
                works = [(life, work) for life in mine if (work := self._work(life, end)) is not None]
                if not works:
                    return
                outcomes = self._done(works, apart=apart)
                apart = apart or outcomes is None
                for outcome in outcomes or ():
                    self._settle(self.registry.tables[outcome.table], outcome)
        finally:
            for life in mine:
                life.lock.release()

    def _done(self, works: list[tuple[ManagedTable, ApplyWork | EvolveWork]], *, apart: bool) -> list[Outcome] | None:
        """What became of each piece of work, in one job or each in its own. None: the job broke off, for a worker was
        killed, and nobody knows how far the others came. Which table it is that kills workers shows only apart."""
        if apart:
            return [run_task(self._run, advance_table, work, life) for life, work in works]
        try:
            return self._run(advance_table, [work for _, work in works])
        except Exception as error:  # the job's boundary: what Spark as a whole suffers from is told by `check`
            for life, _ in works:
                life.mark_outcome_unknown()
            if self._stopping.is_set() or (self._jvm is not None and self._jvm.ended):
                raise
            log.warning("tables applied one by one", extra={"tables": len(works), "exception": type(error).__name__})
            return None

    def _take(self, life: ManagedTable, stretch: ApplyRange) -> None:
        """One commit of a table that stands still, and whose lock the caller holds."""
        outcome = run_task(self._run, advance_table, self._work_of(life, stretch), life)
        if outcome.error is not None:
            raise outcome.error
        self._settle(life, outcome)

    def _work(self, life: ManagedTable, end: int) -> ApplyWork | EvolveWork | None:
        if time.monotonic() < life.not_before:
            return None
        self.registry.refresh_from_table(life)
        stretch = self.registry.next_range(life, end)
        return None if stretch is None else self._work_of(life, stretch)

    def _work_of(self, life: ManagedTable, stretch: ApplyRange) -> ApplyWork | EvolveWork:
        assert life.applied_position is not None, "it takes something"
        assert life.schema is not None, "it takes something"
        if stretch.recast is not None:
            if said := "; ".join(stretch.recast.descriptions):
                log.info("table evolves", extra={"table": str(life.table), "how": said})
            return EvolveWork(
                table=life.table, location=life.location, recast=stretch.recast, expected=life.applied_position
            )
        return ApplyWork(
            table=life.table,
            log=self._log.path,
            location=life.location,
            slices=stretch.slices,
            schema=life.schema,
            expected=life.applied_position,
            position_after=stretch.position_after,
            reader=self._source.row_reader(REFETCH_SECONDS_MAX) if life.ahead_of_position or life.may_refetch else None,
            dead_letters_enabled=self._settings.tables.dead_letters_enabled(life.table),
            until=stretch.until,
        )

    def _settle(self, life: ManagedTable, outcome: Outcome) -> None:
        if outcome.error is None:
            assert outcome.applied_position is not None, "an apply that did not fail"
            assert outcome.schema is not None, "an apply that did not fail"
            life.record_commit(outcome.applied_position, outcome.schema, outcome.version)
            if life.repairing or life.may_refetch:  # whoever did this could read rows again
                self.registry.update_repair_state(life)
            life.commits_since_compaction += 1
            life.bytes_changed += outcome.bytes_changed
            life.bytes_written += outcome.bytes_written
            said = {"table": str(life.table), "rows": outcome.rows, "seconds": round(outcome.seconds, 3)}
            log.info("table applied", extra=said)
            if outcome.dead_letters:
                aside = {
                    "table": str(life.table),
                    "letters": outcome.dead_letters,
                    "see": "tailrace dead-letters FILE list",
                }
                log.warning("changes set aside as dead letters", extra=aside)
            return
        if isinstance(outcome.error, BaseRowMissing) and self._may_heal(life):
            life.repairing, life.state = True, TableState.CATCHING_UP  # what is done next has a reader
            log.warning("a row that changes build on is missing, and is read again", extra={"table": str(life.table)})
            return
        if isinstance(outcome.error, SOURCE_WAIT_ERRORS):  # a row had to be read again
            life.defer(outcome.error, SOURCE_SECONDS)
            return
        if isinstance(outcome.error, SourceRewritten):
            self._outrun(life)
            return
        if isinstance(outcome.error, ForeignWrite) and life.outcome_unknown_until and life.failures < RETRIES_MAX:
            life.failures += 1  # it may have been a task of ours; what is done next looks again
            return
        life.fail(outcome.error)
        self._stopping.wait(RETRY_SECONDS)

    def _outrun(self, life: ManagedTable) -> None:
        """A row had to be read again, and the source no longer has it in the shape that the table is at. Only a load
        brings it, unless what was done there is to stop the table."""
        with suppress(TailraceError):
            now = self._source.describe([life.table]).get(life.table)
            step = self.registry.plan_schema_change(life, now) if now is not None and now.columns else None
            if isinstance(step, SchemaChanged):
                life.fail(step)
                return
        self.registry.require_reload(life, "a row had to be read again, and the source has other columns by now")

    def _may_heal(self, life: ManagedTable) -> bool:
        """Whether a row that the table should hold may be read from the source, though it is newer there. Where that
        was tried, where changes are set aside instead, and where every version counts, it may not."""
        if (
            life.applied_position is None
            or life.applied_position.load is None
            or life.schema is None
            or not life.schema.key
        ):
            return False
        aside = self._settings.tables.dead_letters_enabled(life.table)
        return (
            not (life.ahead_of_position or life.may_refetch or life.load_only or aside)
            and life.location.spec.mode is TableMode.MIRROR
        )
