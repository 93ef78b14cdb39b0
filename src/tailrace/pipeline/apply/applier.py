"""Load new tables, and apply the log to the loaded ones.

Tables at different positions share one Spark query. The query only wakes the work, so losing its checkpoint loses
nothing. One table's failure holds back only that table. All tables of a micro-batch end on one commit of the log. No
row passes the driver: tasks read the log and write the tables.
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
"""Seconds before rows are requested again from a source that did not answer."""
SWEEP_SECONDS = 2.0
STOP_SECONDS_MAX = 20.0
"""Seconds that running work gets after a stop request. Then the JVM is killed with it."""


class Applier:
    """Loads and applies every wanted table until it is asked to stop."""

    def __init__(self, settings: PipelineSettings, change_log: ChangeLog, source: PostgresCapture) -> None:
        self._settings = settings
        self._log = change_log
        self._source = source
        self.registry = TableRegistry(
            change_log, settings.tables.layout, settings.tables.policies_of, source.parse_value
        )
        self.retention_holds = RetentionHolds(self.registry)
        self._foreign_write_watch = ForeignWriteWatch(self.registry)
        self._load_keeper = LoadKeeper(settings.tables.keep_seed, settings.tables.layout, self.registry)
        self._ledger = Ledger(change_log.path)
        self._stopping = threading.Event()
        self._pace = Pace()
        self._dead_letter_replayer = DeadLetterReplayer(
            self.registry, source, run=self._run, merging=self._pace.merging, stopping=self._stopping
        )
        self._batch = threading.Lock()
        self._woken = threading.Event()
        self._target_commit = 0
        """The commit that all tables were last asked to reach."""
        self._scratch = make_scratch(change_log)
        self._jvm: Jvm | None = None
        self._spark: SparkSession | None = None
        self._engine: SparkEngine | None = None
        """The engine, where one of Spark's connectors writes the tables."""
        self._query: StreamingQuery | None = None
        self._restarts = RestartLimit()
        """Limit for restarts of a query that broke, e.g. because a worker was killed."""
        self._threads: list[threading.Thread] = []
        """Threads that may be at work; `_threads_lock` guards the list."""
        self._threads_lock = threading.Lock()
        self._starting: threading.Thread | None = None
        self._failure: TailraceError | None = None

    # Start and stop.

    def discover(self) -> None:
        """Find the wanted tables, and what their lake tables already hold."""
        self.registry.refresh_index()
        stored = read_status_file(self._log.path)
        for table in self._source.tables():
            managed = self.registry.add(table.table, table, self._settings.load.mode_of(table.table))
            managed.rows_loaded = stored.get(table.table, {}).get("rows_loaded", 0)
            for leftover in UNCOMMITTED:
                with suppress(TailraceError):
                    discard(managed.location.staging, leftover, last=True)
        if not self._source.discovers_tables:  # otherwise further tables may match later
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
            apply=self._apply_range,
            stopping=self._stopping,
            scratch=self._scratch,
            keeper=self._load_keeper,
        )

    def start(self) -> None:
        """Start Spark, the loads and the query in the background; return at once."""
        self._starting = self._in_background(self._start)

    def _start(self) -> None:
        self._jvm = start_jvm(self._settings, self._scratch)
        if self._stopping.is_set():
            return
        self._spark = self._jvm.open_session()
        tables = self._settings.tables
        self._engine = SparkEngine(self._spark, tables.layout.catalog) if tables.written_by_spark else None
        known = [
            managed.applied_position.commit
            for managed in self.registry.tables.values()
            if managed.applied_position is not None
        ]
        begin = min([*known, self.registry.index.last_commit]) if known else 0
        self._wake = WakeSource(lambda done: self.registry.next_batch_end(done).end, begin)
        self._in_background(lambda: self._wake.serve(self._stopping))
        # None of these waits for the query, which takes seconds to start.
        self._in_background(self.load_scheduler.run)
        for number in range(self._settings.load.connections):
            self._in_background(partial(self.load_scheduler.chunk_readers.run_reader, number))
        self._in_background(self._apply_until_woken)
        self._in_background(self._sweep_until_stopped)
        self.start_compaction()
        self.start_dead_letter_replay()
        self._query = self._start_query()

    def start_compaction(self) -> None:
        """Start compaction in the background, if the settings ask for it."""
        upkeep = self._settings.tables.upkeep
        if upkeep.join or upkeep.remove_after is not None:
            compactor = Compactor(
                upkeep, self.registry, run=self._run, advance=self._advance_one, stopping=self._stopping
            )
            self._in_background(compactor.run)

    def start_dead_letter_replay(self) -> None:
        """Start the replay of dead letters in the background."""
        self._in_background(self._dead_letter_replayer.run)

    def _start_query(self) -> StreamingQuery:
        """Start a query with a new checkpoint.

        The tables store the positions to resume from, not Spark.
        """
        assert self._spark is not None, "started"
        return self._wake.start(self._spark, self._scratch / f"checkpoint-{self._restarts.count}", self._on_batch)

    @property
    def spark_log(self) -> Path:
        """Path of Spark's own log file."""
        return spark_log(self._settings)

    def stop(self) -> None:
        """Finish running work, then release everything."""
        self._stopping.set()
        self._pace.stop_resting()
        if self._query is None:
            self._kill_unstarted()
        deadline = time.monotonic() + STOP_SECONDS_MAX
        while (alive := self._alive()) and (left := deadline - time.monotonic()) > 0:
            alive[0].join(left)
        if alive and self._jvm is not None:
            self._jvm.kill()  # files that a task has not committed belong to no table
        with suppress(Exception):  # the JVM may be gone already
            if self._batch.acquire(timeout=STOP_SECONDS_MAX):  # a query stopped inside a micro-batch logs errors
                self._batch.release()
            if self._query is not None and self._query.isActive:
                self._query.stop()
            if self._spark is not None:
                self._spark.stop()
        if self._jvm is not None:
            self._jvm.kill()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _kill_unstarted(self) -> None:
        """Kill a Spark that is still starting: none of our work runs in it yet."""
        starting = self._starting
        while starting is not None and starting.is_alive() and self._query is None:
            if self._jvm is not None and self._spark is None:
                self._jvm.kill()
            starting.join(0.1)

    def check(self) -> None:
        """Restart a broken query; raise the error that stopped the apply side."""
        if self._failure is not None:
            raise self._failure
        if self._query is None or self._stopping.is_set() or self._query_is_active(self._query):
            return
        if not self._restarts.try_one_more():
            raise TableFailed(
                "the Spark query ended unexpectedly too many times",
                times=RESTARTS_MAX + 1,
                hint=f"Read {self.spark_log} for the cause, then start again.",
            )
        log.warning("query ended, started again", extra={"spark_log": str(self.spark_log)})
        self._query = self._start_query()

    def _query_is_active(self, query: StreamingQuery) -> bool:
        try:
            return query.isActive
        except Exception as error:
            hint = f"Check {self.spark_log}, e.g. for lack of memory, then start again: nothing is lost."
            raise TableFailed("Spark's Java process ended", hint=hint) from error

    def stop_resting(self) -> None:
        """End the rest between micro-batches, because a caller waits for the end."""
        self._pace.stop_resting()

    @property
    def merging_share(self) -> float:
        """Share of the last minute spent on merging."""
        return self._pace.merging_share()

    def _in_background(self, work: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except TailraceError as error:
                self._failure = error
            except Exception as error:  # the thread's boundary: `check` raises it in the pipeline
                if self._stopping.is_set():  # Spark ended while it worked
                    return
                self._failure = as_tailrace_error(error)

        thread = threading.Thread(target=guarded, daemon=True)
        with self._threads_lock:
            thread.start()
            self._threads = [*self._alive(), thread]
        return thread

    def _alive(self) -> list[threading.Thread]:
        """Return the threads that still run.

        A failing load is retried for ever, in a new thread each time, so ended threads must not be kept.
        """
        return [thread for thread in self._threads if thread.is_alive()]

    def _run(self, task: Callable[..., Outcome], works: Sequence[Any]) -> list[Outcome]:
        assert self._spark is not None, "started"
        if self._engine is not None and self._engine.handles(task):
            return self._engine.run(task, works)
        return self._spark.sparkContext.parallelize(works, len(works)).map(task).collect()

    # Applying.

    def is_caught_up(self, commit: int) -> bool:
        """Return whether all work up to this commit is done.

        Every table that is not blocked has applied the log up to the commit, and no load or replay is left. While
        capture runs, the log must also pass the schema changes that were seen in the catalogue.
        """
        if (
            not self.load_scheduler.is_idle
            or not self.registry.is_caught_up(commit)
            or not self._dead_letter_replayer.is_idle
        ):
            return False
        pending = [managed.pending_schema for managed in self._applying_tables() if managed.pending_schema is not None]
        captured = bool(pending) and log_lease.live_holder_pid(self._log.path) is not None
        return not any(captured or self.registry.index.position >= item.horizon for item in pending)

    def waits_for_log(self, commit: int) -> bool:
        """Return whether only a longer log can finish the work up to this commit.

        The log must first grow past what was loaded.
        """
        loading, tables = self.load_scheduler.tables_waiting_for_log(), list(self.registry.tables.values())
        waiting = loading | {managed.table for managed in tables if self.registry.waits_for_log(managed)}
        return (
            bool(waiting)
            and self.load_scheduler.is_idle_except(loading)
            and self.registry.is_caught_up(commit, but=waiting)
        )

    def _apply_until_woken(self) -> None:
        """Apply what the log holds while the query starts."""
        while not self._stopping.is_set() and not self._woken.wait(RETRY_SECONDS):
            with self._batch:
                self._bring_tables_to(self.registry.refresh_index())

    def _on_batch(self, _batch: DataFrame, _number: int) -> None:
        """Run one micro-batch, then rest.

        Every loaded table is brought to the commit that the batch ends on. The rest is as long as is owed for it.
        """
        with self._batch:
            if self._stopping.is_set():
                return
            started = time.monotonic()
            if self._wake.announced_commit() is None:
                return
            self._woken.set()
            ahead = self.registry.next_batch_end(
                self._wake.answered_commit
            )  # the log has grown past the announced commit while Spark got ready
            self._bring_tables_to(ahead.end)
            failpoints.hit("apply.batch_done")
            rest = self._pace.rest_seconds(backlog=ahead.has_backlog)
            fields = {"commit": ahead.end, "seconds": round(time.monotonic() - started, 3), "rests": round(rest, 3)}
            log.info("micro-batch done", extra=fields)
            self._pace.rest(rest)
            self._wake.acknowledge(ahead.end)

    def _bring_tables_to(self, end: int) -> None:
        """Bring every loaded table to a commit, and record the consistent point there.

        A table that waits for the source would hold up the others, so it is left to the sweep.
        """
        self._target_commit = max(self._target_commit, end)
        with self._pace.merging():
            self._advance([managed for managed in self._applying_tables() if not managed.not_before], end)
        if (point := build_point(self.registry, end)) is not None:
            self._ledger.record(point)

    def _applying_tables(self) -> list[ManagedTable]:
        return [managed for managed in list(self.registry.tables.values()) if managed.state.is_applying]

    def advance_skipped(self) -> None:
        """Advance tables that a micro-batch has skipped.

        Those were locked by other work, wait for the source, or are retried. Tables that have caught up without
        becoming `live` are advanced too.
        """
        for managed in self._applying_tables():
            not_live_yet = managed.state is TableState.CATCHING_UP and not self.registry.pending(
                managed, self.registry.index.last_commit
            )
            if not_live_yet or self.registry.pending(managed, self._target_commit):
                self._advance_one(managed, None if not_live_yet else self._target_commit)
        self._resolve_unknown_outcomes()
        self.ensure_complete_point()

    def _resolve_unknown_outcomes(self) -> None:
        """Refresh tables with an unknown outcome once no task can still write to them."""
        for managed in list(self.registry.tables.values()):
            if 0.0 < managed.outcome_unknown_until <= time.monotonic() and managed.lock.acquire(blocking=False):
                try:
                    self.registry.refresh_from_table(managed)
                finally:
                    managed.lock.release()

    def ensure_complete_point(self) -> bool:
        """Return whether the last point has every table that is not blocked.

        If it does not, try to record a better one. Tables may be missing because they were locked or being loaded. Once
        they are available a new point must be recorded, because in a quiet pipeline no other point would follow.
        """
        if not self._missing_from(self._ledger.last):
            return True
        if not self._batch.acquire(blocking=False):
            return False
        try:
            point = build_point(self.registry, self._target_commit)
            if point is not None and self._missing_from(point) < self._missing_from(self._ledger.last):
                self._ledger.record(point)
        finally:
            self._batch.release()
        return not self._missing_from(self._ledger.last)

    def _missing_from(self, point: ConsistentPoint | None) -> int:
        """Return how many applying tables are not in the point with all their loaded rows."""
        return sum(
            point is None
            or managed.table not in point.versions
            or (managed.applied_position is not None and managed.applied_position.position > point.position)
            for managed in self._applying_tables()
        )

    def _sweep_until_stopped(self) -> None:
        while not self._stopping.wait(SWEEP_SECONDS):
            self.advance_skipped()
            self._foreign_write_watch.run_if_due()
            self._load_keeper.run_if_due()

    def _advance_one(self, managed: ManagedTable, end: int | None = None) -> None:
        """Advance one table outside the micro-batches, to a commit or to the log's end.

        Work that fails here is left to the next micro-batch or to the sweep.
        """
        try:
            upto = self.registry.refresh_index() if end is None else end
            # As with micro-batches no rest is owed for a backlog: all tables would wait for one.
            waiting = sum(item.rows for item in self.registry.pending(managed, upto))
            with nullcontext() if waiting > ROWS_PER_BATCH_MAX else self._pace.merging():
                self._advance([managed], upto)
        except Exception as error:  # a worker was killed, or Spark is ending: `check` reports it
            log.warning("table left for later", extra={"table": str(managed.table), "exception": type(error).__name__})

    def _advance(self, tables: list[ManagedTable], end: int) -> None:
        """Apply tables in parallel until each has reached the commit, has failed, or is locked."""
        locked = [managed for managed in tables if managed.lock.acquire(blocking=False)]
        separately = False
        try:
            while not self._stopping.is_set():
                works = [(managed, work) for managed in locked if (work := self._work(managed, end)) is not None]
                if not works:
                    return
                outcomes = self._run_works(works, separately=separately)
                separately = separately or outcomes is None
                for outcome in outcomes or ():
                    self._record_outcome(self.registry.tables[outcome.table], outcome)
        finally:
            for managed in locked:
                managed.lock.release()

    def _run_works(
        self, works: list[tuple[ManagedTable, ApplyWork | EvolveWork]], *, separately: bool
    ) -> list[Outcome] | None:
        """Run the works in one job, or each in its own, and return their outcomes.

        None means that the job broke off because a worker was killed, so the outcome of each table is unknown. Only
        separate jobs show which table kills workers.
        """
        if separately:
            return [run_task(self._run, advance_table, work, managed) for managed, work in works]
        try:
            return self._run(advance_table, [work for _, work in works])
        except Exception as error:  # the job's boundary: `check` reports problems of Spark as a whole
            for managed, _ in works:
                managed.mark_outcome_unknown()
            if self._stopping.is_set() or (self._jvm is not None and self._jvm.ended):
                raise
            log.warning("tables applied one by one", extra={"tables": len(works), "exception": type(error).__name__})
            return None

    def _apply_range(self, managed: ManagedTable, apply_range: ApplyRange) -> None:
        """Apply one range of a table whose lock the caller holds."""
        outcome = run_task(self._run, advance_table, self._work_of(managed, apply_range), managed)
        if outcome.error is not None:
            raise outcome.error
        self._record_outcome(managed, outcome)

    def _work(self, managed: ManagedTable, end: int) -> ApplyWork | EvolveWork | None:
        if time.monotonic() < managed.not_before:
            return None
        self.registry.refresh_from_table(managed)
        apply_range = self.registry.next_range(managed, end)
        return None if apply_range is None else self._work_of(managed, apply_range)

    def _work_of(self, managed: ManagedTable, apply_range: ApplyRange) -> ApplyWork | EvolveWork:
        assert managed.applied_position is not None, "a table with a range"
        assert managed.schema is not None, "a table with a range"
        if apply_range.recast is not None:
            if steps := "; ".join(apply_range.recast.descriptions):
                log.info("table evolves", extra={"table": str(managed.table), "how": steps})
            return EvolveWork(
                table=managed.table,
                location=managed.location,
                recast=apply_range.recast,
                expected=managed.applied_position,
            )
        return ApplyWork(
            table=managed.table,
            log=self._log.path,
            location=managed.location,
            slices=apply_range.slices,
            schema=managed.schema,
            expected=managed.applied_position,
            position_after=apply_range.position_after,
            reader=self._source.row_reader(REFETCH_SECONDS_MAX)
            if managed.ahead_of_position or managed.may_refetch
            else None,
            dead_letters_enabled=self._settings.tables.dead_letters_enabled(managed.table),
            until=apply_range.until,
        )

    def _record_outcome(self, managed: ManagedTable, outcome: Outcome) -> None:
        if outcome.error is None:
            assert outcome.applied_position is not None, "an apply that did not fail"
            assert outcome.schema is not None, "an apply that did not fail"
            managed.record_commit(outcome.applied_position, outcome.schema, outcome.version)
            if managed.repairing or managed.may_refetch:  # this work could refetch rows
                self.registry.update_repair_state(managed)
            managed.commits_since_compaction += 1
            managed.bytes_changed += outcome.bytes_changed
            managed.bytes_written += outcome.bytes_written
            fields = {"table": str(managed.table), "rows": outcome.rows, "seconds": round(outcome.seconds, 3)}
            log.info("table applied", extra=fields)
            if outcome.dead_letters:
                rejected = {
                    "table": str(managed.table),
                    "dead_letters": outcome.dead_letters,
                    "see": "tailrace dead-letters FILE list",
                }
                log.warning("changes rejected as dead letters", extra=rejected)
            return
        if isinstance(outcome.error, BaseRowMissing) and self._may_refetch_base(managed):
            managed.repairing, managed.state = True, TableState.CATCHING_UP  # the next work has a row reader
            log.warning("base row is missing and is refetched", extra={"table": str(managed.table)})
            return
        if isinstance(outcome.error, SOURCE_WAIT_ERRORS):  # a row had to be refetched
            managed.defer(outcome.error, SOURCE_SECONDS)
            return
        if isinstance(outcome.error, SourceRewritten):
            self._reload_or_stop(managed)
            return
        if isinstance(outcome.error, ForeignWrite) and managed.outcome_unknown_until and managed.failures < RETRIES_MAX:
            managed.failures += 1  # it may be one of our own tasks; the next work checks again
            return
        managed.fail(outcome.error)
        self._stopping.wait(RETRY_SECONDS)

    def _reload_or_stop(self, managed: ManagedTable) -> None:
        """Handle rows that must be refetched and no longer exist in the table's schema.

        Only a reload brings them, unless the evolution policy is to stop the table.
        """
        with suppress(TailraceError):
            source_schema = self._source.describe([managed.table]).get(managed.table)
            step = (
                self.registry.plan_schema_change(managed, source_schema)
                if source_schema is not None and source_schema.columns
                else None
            )
            if isinstance(step, SchemaChanged):
                managed.fail(step)
                return
        self.registry.require_reload(managed, "a row must be refetched, but the source has other columns now")

    def _may_refetch_base(self, managed: ManagedTable) -> bool:
        """Return whether a missing base row may be refetched, though the source's row is newer.

        It may not where that was tried, where rejected changes become dead letters, and where every version of a row
        counts.
        """
        if (
            managed.applied_position is None
            or managed.applied_position.load is None
            or managed.schema is None
            or not managed.schema.key
        ):
            return False
        dead_letters = self._settings.tables.dead_letters_enabled(managed.table)
        return (
            not (managed.ahead_of_position or managed.may_refetch or managed.load_only or dead_letters)
            and managed.location.spec.mode is TableMode.MIRROR
        )
