"""Work on lake tables that one of Spark's connectors writes: driven from here, one job after the other for each table.

The work and its outcome are those of `tasks`; only who does it differs. There a task does a table's work by itself,
here the driver has Spark do it, tables side by side in threads, each with a session of its own. Rows are read, folded
and merged in tasks all the same, and what comes back are counts.
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
from tailrace.tables.fold.fold import key_ordinals
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
"""Tables whose jobs are under way side by side."""


ConnectorTable = SparkDeltaTable | SparkIcebergTable


class SparkEngine:
    """Does the work of tables that a connector writes."""

    def __init__(self, spark: SparkSession, catalog: Catalog | None = None) -> None:
        self._spark = spark
        self._ways: dict[Callable[..., Outcome], Callable[[Any], Outcome]] = {
            advance_table: self._advance,
            refresh_table: self._refresh,
            replay_rows: self._replay_rows,
            replay_changes: self._replay_changes,
        }
        if catalog is not None:
            self._ways |= {commit_load: self._commit_load, compact_table: self._compact}
        self._opened: dict[Path, SparkIcebergTable] = {}

    def handles(self, task: Callable[..., Outcome]) -> bool:
        """Whether this is work of the connector's: what changes rows, and of Iceberg tables every commit. Reading the
        source and joining a Delta table's files are done in tasks, whoever writes."""
        return task in self._ways

    def run(self, task: Callable[..., Outcome], works: Sequence[Any]) -> list[Outcome]:
        """Each piece of work is another table's. What fails is an outcome, not an exception."""
        with ThreadPoolExecutor(max_workers=min(len(works), TABLES_AT_ONCE_MAX)) as threads:
            return list(threads.map(self._ways[task], works))

    def _in_tasks(self, task: Callable[[Any], Any], works: Sequence[Any]) -> Sequence[Any]:
        return self._spark.sparkContext.parallelize(works, len(works)).map(task).collect()

    def _table(self, place: TableLocation) -> ConnectorTable:
        if place.catalog is None:
            return SparkDeltaTable(self._spark, place.path, place.log_id, place.spec, place.features, place.file_bytes)
        if place.path not in self._opened:  # each has a session with a catalog, which takes its time to open
            opened = SparkIcebergTable(
                self._spark, place.path, place.log_id, place.catalog, place.spec, place.file_bytes
            )
            self._opened[place.path] = opened
        return self._opened[place.path]

    def _commit_load(self, work: CommitLoadWork) -> Outcome:
        return _timed(work.schema.table, partial(self._run_commit_load, work))

    def _run_commit_load(self, work: CommitLoadWork) -> Outcome:
        rows = self._table(work.location).commit_load(work.schema, work.files, work.position_after, origin=work.origin)
        return Outcome(table=work.schema.table, rows=rows, applied_position=work.position_after, schema=work.schema)

    def _compact(self, work: CompactWork) -> Outcome:
        def tended() -> Outcome:
            return Outcome(
                table=work.table, upkeep_result=self._table(work.location).compact(work.upkeep, work.expected)
            )

        return _timed(work.table, tended)

    def _advance(self, work: ApplyWork | EvolveWork) -> Outcome:
        return self._evolve(work) if isinstance(work, EvolveWork) else self._apply(work)

    def _apply(self, work: ApplyWork) -> Outcome:
        started = time.monotonic()
        failpoints.hit("apply.before_table")
        try:
            folded, applied = self._applied(work)
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

    def _applied(self, work: ApplyWork) -> tuple[FoldedFiles, WriteResult]:
        """One commit; what the table cannot take is set aside first, as `setting_aside` has it."""
        table, letters = self._table(work.location), DeadLetterStore(work.log, work.table)
        with table.scratch() as scratch:
            if not letters.has_any:
                try:
                    return self._fold_and_apply(work, table, scratch / "plain")
                except REJECTABLE_ERRORS:
                    if not work.dead_letters_enabled:
                        raise
            here = table.applied_position()
            if here != work.expected:  # it is done already, or this says why it cannot be
                nothing = FoldedFiles()
                return nothing, table.apply_files(work.schema, nothing, work.expected, work.position_after, touch=True)
            letters.recover(work.expected.load, table.replay_id())
            letters.discard_after(work.expected.seq)
            done = self._fold_and_apply(work, table, scratch / "sifted", splits_rejects=True)
        letters.remove_closed(work.position_after.seq)
        failpoints.hit("letters.tidied")
        return done

    def _fold_and_apply(
        self, work: ApplyWork, table: ConnectorTable, scratch: Path, *, splits_rejects: bool = False
    ) -> tuple[FoldedFiles, WriteResult]:
        scratch.mkdir()
        folded = fold_range(work, scratch, self._in_tasks, splits_rejects=splits_rejects)
        if asked := sorted(scratch.glob(f"*{ASKED_KEYS_SUFFIX}")):
            again = scratch / "again"
            again.mkdir()
            if table.write_missing_keys(work.schema, asked, again / MISSING_KEYS):
                folded = fold_range(work, again, self._in_tasks, splits_rejects=True)
        if folded.rejects:
            (error,) = self._in_tasks(store_task_rejects, [StoreRejectsWork(work=work, rejects=folded.rejects)])
            if error is not None:
                raise error
        given = None if work.reader is None else self._refetch_in_task(work, table, scratch)
        applied = table.apply_files(work.schema, folded, work.expected, work.position_after, touch=True, given=given)
        return folded, applied

    def _refetch_in_task(self, work: ApplyWork, table: ConnectorTable, scratch: Path) -> RefetchFrame:
        """Rows that a task reads from the source again; the keys and the rows pass through files."""

        def rows(keys: DataFrame) -> DataFrame:
            keys.coalesce(1).write.parquet(str(scratch / "keys"))
            (error,) = self._in_tasks(_refetch_from_key_file, [_KeyFileRefetch(work=work, scratch=scratch)])
            if error is not None:
                raise error
            fields = table.source_fields(work.schema)
            return table.session.read.schema(fields).parquet(str(scratch / "given.parquet"))

        return rows

    def _evolve(self, work: EvolveWork) -> Outcome:
        return _timed(work.table, partial(self._evolved, work))

    def _evolved(self, work: EvolveWork) -> Outcome:
        applied = self._table(work.location).evolve(work.recast, work.expected)
        return Outcome(
            table=work.table, applied_position=work.expected, schema=work.recast.schema, bytes_written=applied.bytes
        )

    def _refresh(self, work: RefreshWork) -> Outcome:
        return _timed(work.schema.table, lambda: refresh_with(self._table(work.location), work))

    def _replay_rows(self, work: ReplayRowsWork) -> Outcome:
        return _timed(work.schema.table, partial(self._run_replay_rows, work))

    def _run_replay_rows(self, work: ReplayRowsWork) -> Outcome:
        """One commit of the rows that may come in, then what became of the letters: both as `redelivery` has it."""
        table, version = self._table(work.location), None
        with table.scratch() as scratch:
            (found,) = self._in_tasks(
                stage_replay_rows, [StageReplayRowsWork(work=work, path=scratch / "ready.parquet")]
            )
            if isinstance(found, TailraceError):
                raise found
            if found.upserts:
                version = table.upsert_files(work.schema, found, work.expected).version
        done: Outcome = self._in_tasks(replay_rows, [replace(work, writes_rows=False)])[0]
        return replace(done, version=version)

    def _replay_changes(self, work: ReplayChangesWork) -> Outcome:
        return _timed(work.schema.table, partial(self._run_replay_changes, work))

    def _run_replay_changes(self, work: ReplayChangesWork) -> Outcome:
        """One commit of what letters hold, then what became of them: both as `late_letters` has it."""
        table, version = self._table(work.location), None
        with table.scratch() as scratch:
            (found,) = self._in_tasks(
                stage_replay_changes, [StageReplayChangesWork(work=work, path=scratch / "late.parquet")]
            )
            if isinstance(found, TailraceError):
                raise found
            promised, folded = found
            if promised.replay_id is not None:
                version = table.append_files(
                    work.schema, folded, work.expected, after=promised.previous_replay_id, late=promised.replay_id
                ).version
        left = confirm_replay(work, promised, version)
        return Outcome(table=work.schema.table, rows=promised.dead_letters, dead_letters=left, version=version)


@dataclass(frozen=True, kw_only=True)
class _KeyFileRefetch:
    """Keys that lie in a file, whose rows are to be read again."""

    work: ApplyWork
    scratch: Path


def _refetch_from_key_file(asked: _KeyFileRefetch) -> TailraceError | None:
    work = asked.work
    try:
        keys = pq.read_table(asked.scratch / "keys")
        stored = work.location.spec.stored_schema(work.schema)
        columns = [stored.columns[i] for i in key_ordinals(stored)]
        fields = pa.schema([(column.name, column.type) for column in columns])
        transactions = {tx for batch in read_change_batches(work, work.expected.seq) for tx in _transactions(batch)}
        rows = refetch_rows(work, sorted(transactions), keys.select(fields.names).cast(fields))
        pq.write_table(rows, asked.scratch / "given.parquet", store_schema=False)
    except Exception as error:  # the task's boundary
        return as_tailrace_error(error)
    return None


def _transactions(batch: pa.RecordBatch) -> Iterator[int]:
    yield from pc.unique(batch.column(change.TX)).to_pylist()


def _failed(table: TableId, error: Exception) -> Outcome:
    """What failed is the table's, unless Spark itself is gone: whoever watches over that says so."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (Py4JNetworkError, ConnectionError)):
            raise error
        cause = cause.__cause__
    return Outcome(table=table, error=as_tailrace_error(error))


def _timed(table: TableId, work: Callable[[], Outcome]) -> Outcome:
    started = time.monotonic()
    try:
        done = work()
    except Exception as error:  # the work's boundary: the table fails, the others go on
        done = _failed(table, error)
    return replace(done, seconds=time.monotonic() - started)
