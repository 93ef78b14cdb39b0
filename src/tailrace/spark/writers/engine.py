"""Drive the work on lake tables that a Spark connector writes.

Each table has one job after the other. The work and its outcome are those of `tasks`; only its executor differs. There
one task does all of a table's work. Here the driver has Spark do it, with tables side by side in threads, each with a
session of its own. Rows are read, folded and merged in tasks all the same, and only counts come back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from py4j.protocol import Py4JNetworkError
from pyspark.sql import DataFrame, SparkSession

from tailrace import failpoints
from tailrace.deadletters.store import DeadLetterStore
from tailrace.errors import TailraceError
from tailrace.model import change
from tailrace.model.schema import TableId
from tailrace.spark.writers.delta_writer import SparkDeltaTable
from tailrace.spark.writers.iceberg_writer import SparkIcebergTable
from tailrace.spark.writers.merge_table import RefetchFrame
from tailrace.tables.fold.folded_changes import key_ordinals
from tailrace.tables.iceberg.catalogs import Catalog
from tailrace.tables.location import TableLocation
from tailrace.tables.port import WriteResult
from tailrace.tasks.apply import advance_table, compact_table, read_change_batches
from tailrace.tasks.dead_letters import REJECTABLE_ERRORS
from tailrace.tasks.fold_files import FoldedFiles, fold_range
from tailrace.tasks.fold_rejects import ASKED_KEYS_SUFFIX, MISSING_KEYS, StoreRejectsWork, store_task_rejects
from tailrace.tasks.keyed_replay import ReplayRowsWork, StageReplayRowsWork, replay_rows, stage_replay_rows
from tailrace.tasks.keyless_replay import (
    ReplayChangesWork,
    StageReplayChangesWork,
    confirm_replay,
    replay_changes,
    stage_replay_changes,
)
from tailrace.tasks.load import commit_load, refresh_table, refresh_with
from tailrace.tasks.source_rows import refetch_rows
from tailrace.tasks.work import (
    ApplyWork,
    CommitLoadWork,
    CompactWork,
    EvolveWork,
    Outcome,
    RefreshWork,
    as_tailrace_error,
)

TABLES_AT_ONCE_MAX = 4
"""Maximal number of tables with jobs under way at once."""


ConnectorTable = SparkDeltaTable | SparkIcebergTable


class SparkEngine:
    """Does the work of tables that a connector writes."""

    def __init__(self, spark: SparkSession, catalog: Catalog | None = None) -> None:
        self._spark = spark
        self._methods: dict[Callable[..., Outcome], Callable[[Any], Outcome]] = {
            advance_table: self._advance,
            refresh_table: self._refresh,
            replay_rows: self._replay_rows,
            replay_changes: self._replay_changes,
        }
        if catalog is not None:
            self._methods |= {commit_load: self._commit_load, compact_table: self._compact}
        self._opened: dict[Path, SparkIcebergTable] = {}

    def handles(self, task: Callable[..., Outcome]) -> bool:
        """Return whether the connector does this work. It changes rows, and makes every commit of an Iceberg table.

        Tasks read the source and join a Delta table's files, whichever engine writes.
        """
        return task in self._methods

    def run(self, task: Callable[..., Outcome], works: Sequence[Any]) -> list[Outcome]:
        """Run pieces of work of different tables side by side. A failure is an outcome, not an exception."""
        with ThreadPoolExecutor(max_workers=min(len(works), TABLES_AT_ONCE_MAX)) as threads:
            return list(threads.map(self._methods[task], works))

    def _in_tasks(self, task: Callable[[Any], Any], works: Sequence[Any]) -> Sequence[Any]:
        return self._spark.sparkContext.parallelize(works, len(works)).map(task).collect()

    def _table(self, location: TableLocation) -> ConnectorTable:
        if location.catalog is None:
            return SparkDeltaTable(
                self._spark, location.path, location.log_id, location.spec, location.features, location.file_bytes
            )
        if location.path not in self._opened:  # each has a session with a catalog, which is slow to open
            opened = SparkIcebergTable(
                self._spark, location.path, location.log_id, location.catalog, location.spec, location.file_bytes
            )
            self._opened[location.path] = opened
        return self._opened[location.path]

    def _commit_load(self, work: CommitLoadWork) -> Outcome:
        return _timed(work.schema.table, partial(self._run_commit_load, work))

    def _run_commit_load(self, work: CommitLoadWork) -> Outcome:
        rows = self._table(work.location).commit_load(work.schema, work.files, work.position_after, origin=work.origin)
        return Outcome(table=work.schema.table, rows=rows, applied_position=work.position_after, schema=work.schema)

    def _compact(self, work: CompactWork) -> Outcome:
        def compact() -> Outcome:
            return Outcome(
                table=work.table, upkeep_result=self._table(work.location).compact(work.upkeep, work.expected)
            )

        return _timed(work.table, compact)

    def _advance(self, work: ApplyWork | EvolveWork) -> Outcome:
        return self._evolve(work) if isinstance(work, EvolveWork) else self._apply(work)

    def _apply(self, work: ApplyWork) -> Outcome:
        started = time.monotonic()
        failpoints.hit("apply.before_table")
        try:
            folded, applied = self._apply_once(work)
        except Exception as error:  # the work's boundary: the table fails, the others go on
            return _failed(work.table, error)
        return Outcome(
            table=work.table,
            rows=folded.changes,
            seconds=time.monotonic() - started,
            applied_position=work.position_after,
            schema=work.schema,
            bytes_changed=folded.bytes,
            bytes_written=applied.bytes,
            version=applied.version,
            dead_letters=sum(len(item.causes) for item in folded.rejects),
        )

    def _apply_once(self, work: ApplyWork) -> tuple[FoldedFiles, WriteResult]:
        """Apply in one commit. Rejected changes are stored first, as in `tasks/dead_letters.py`."""
        table, store = self._table(work.location), DeadLetterStore(work.log, work.table)
        with table.scratch() as scratch:
            if not store.has_any:
                try:
                    return self._fold_and_apply(work, table, scratch / "plain")
                except REJECTABLE_ERRORS:
                    if not work.dead_letters_enabled:
                        raise
            applied = table.applied_position()
            if applied != work.expected:  # done already, or `apply_files` raises why it cannot be done
                no_files = FoldedFiles()
                return no_files, table.apply_files(
                    work.schema, no_files, work.expected, work.position_after, touch=True
                )
            store.recover(work.expected.load, table.replay_id())
            store.discard_after(work.expected.seq)
            result = self._fold_and_apply(work, table, scratch / "sifted", splits_rejects=True)
        store.remove_closed(work.position_after.seq)
        failpoints.hit("letters.tidied")
        return result

    def _fold_and_apply(
        self, work: ApplyWork, table: ConnectorTable, scratch: Path, *, splits_rejects: bool = False
    ) -> tuple[FoldedFiles, WriteResult]:
        scratch.mkdir()
        folded = fold_range(work, scratch, self._in_tasks, splits_rejects=splits_rejects)
        if key_files := sorted(scratch.glob(f"*{ASKED_KEYS_SUFFIX}")):
            second_try = scratch / "again"
            second_try.mkdir()
            if table.write_missing_keys(work.schema, key_files, second_try / MISSING_KEYS):
                folded = fold_range(work, second_try, self._in_tasks, splits_rejects=True)
        if folded.rejects:
            (error,) = self._in_tasks(store_task_rejects, [StoreRejectsWork(work=work, rejects=folded.rejects)])
            if error is not None:
                raise error
        refetch = None if work.reader is None else self._refetch_in_task(work, table, scratch)
        applied = table.apply_files(
            work.schema, folded, work.expected, work.position_after, touch=True, refetch=refetch
        )
        return folded, applied

    def _refetch_in_task(self, work: ApplyWork, table: ConnectorTable, scratch: Path) -> RefetchFrame:
        """Return a function that refetches rows in a task. The keys and the rows pass through files."""

        def rows(keys: DataFrame) -> DataFrame:
            keys.coalesce(1).write.parquet(str(scratch / "keys"))
            (error,) = self._in_tasks(_refetch_from_key_file, [_KeyFileRefetch(work=work, scratch=scratch)])
            if error is not None:
                raise error
            fields = table.source_fields(work.schema)
            return table.session.read.schema(fields).parquet(str(scratch / "refetched.parquet"))

        return rows

    def _evolve(self, work: EvolveWork) -> Outcome:
        return _timed(work.table, partial(self._run_evolve, work))

    def _run_evolve(self, work: EvolveWork) -> Outcome:
        applied = self._table(work.location).evolve(work.recast, work.expected)
        return Outcome(
            table=work.table, applied_position=work.expected, schema=work.recast.schema, bytes_written=applied.bytes
        )

    def _refresh(self, work: RefreshWork) -> Outcome:
        return _timed(work.schema.table, lambda: refresh_with(self._table(work.location), work))

    def _replay_rows(self, work: ReplayRowsWork) -> Outcome:
        return _timed(work.schema.table, partial(self._run_replay_rows, work))

    def _run_replay_rows(self, work: ReplayRowsWork) -> Outcome:
        """Commit the rows that may be written, then record the replay's outcome, as in `tasks/keyed_replay.py`."""
        table, version = self._table(work.location), None
        with table.scratch() as scratch:
            (staged,) = self._in_tasks(
                stage_replay_rows, [StageReplayRowsWork(work=work, path=scratch / "ready.parquet")]
            )
            if isinstance(staged, TailraceError):
                raise staged
            if staged.upserts:
                version = table.upsert_files(work.schema, staged, work.expected).version
        outcome: Outcome = self._in_tasks(replay_rows, [replace(work, writes_rows=False)])[0]
        return replace(outcome, version=version)

    def _replay_changes(self, work: ReplayChangesWork) -> Outcome:
        return _timed(work.schema.table, partial(self._run_replay_changes, work))

    def _run_replay_changes(self, work: ReplayChangesWork) -> Outcome:
        """Commit the stored changes, then record the replay's outcome, as in `tasks/keyless_replay.py`."""
        table, version = self._table(work.location), None
        with table.scratch() as scratch:
            (staged,) = self._in_tasks(
                stage_replay_changes, [StageReplayChangesWork(work=work, path=scratch / "late.parquet")]
            )
            if isinstance(staged, TailraceError):
                raise staged
            intent, folded = staged
            if intent.replay_id is not None:
                version = table.append_files(
                    work.schema,
                    folded,
                    work.expected,
                    previous_replay_id=intent.previous_replay_id,
                    replay_id=intent.replay_id,
                ).version
        remaining = confirm_replay(work, intent, version)
        return Outcome(table=work.schema.table, rows=intent.dead_letters, dead_letters=remaining, version=version)


@dataclass(frozen=True, kw_only=True)
class _KeyFileRefetch:
    """A refetch of rows whose keys are in a file."""

    work: ApplyWork
    scratch: Path


def _refetch_from_key_file(refetch: _KeyFileRefetch) -> TailraceError | None:
    work = refetch.work
    try:
        keys = pq.read_table(refetch.scratch / "keys")
        stored = work.location.spec.stored_schema(work.schema)
        columns = [stored.columns[i] for i in key_ordinals(stored)]
        fields = pa.schema([(column.name, column.type) for column in columns])
        transactions = {tx for batch in read_change_batches(work, work.expected.seq) for tx in _transactions(batch)}
        rows = refetch_rows(work, sorted(transactions), keys.select(fields.names).cast(fields))
        pq.write_table(rows, refetch.scratch / "refetched.parquet", store_schema=False)
    except Exception as error:  # the task's boundary
        return as_tailrace_error(error)
    return None


def _transactions(batch: pa.RecordBatch) -> Iterator[int]:
    yield from pc.unique(batch.column(change.TX)).to_pylist()


def _failed(table: TableId, error: Exception) -> Outcome:
    """Return the failure as the table's outcome. If Spark itself is gone, raise: its watcher reports that."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (Py4JNetworkError, ConnectionError)):
            raise error
        cause = cause.__cause__
    return Outcome(table=table, error=as_tailrace_error(error))


def _timed(table: TableId, work: Callable[[], Outcome]) -> Outcome:
    started = time.monotonic()
    try:
        outcome = work()
    except Exception as error:  # the work's boundary: the table fails, the others go on
        outcome = _failed(table, error)
    return replace(outcome, seconds=time.monotonic() - started)
