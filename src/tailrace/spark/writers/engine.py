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
from tailrace.deadletters.store import Letters
from tailrace.errors import TailraceError
from tailrace.model import change
from tailrace.model.schema import TableId
from tailrace.spark.writers.delta_writer import SparkDeltaTable
from tailrace.spark.writers.iceberg_writer import SparkIcebergTable
from tailrace.spark.writers.merge_table import Given
from tailrace.tables.fold.fold import key_ordinals
from tailrace.tables.iceberg.catalogs import Catalog
from tailrace.tables.location import Place
from tailrace.tables.port import Applied
from tailrace.tasks.dead_letters import NOT_TAKEN
from tailrace.tasks.fold_files import FoldedFiles, fold_stretch
from tailrace.tasks.fold_rejects import ASKED, MISSING, KeepWork, keep_aside
from tailrace.tasks.replay_changes import LateWork, StageLateWork, deliver_late, end_late, stage_late
from tailrace.tasks.replay_rows import DeliverWork, StageWork, deliver_letters, stage_letters
from tailrace.tasks.work import (
    ApplyWork,
    EvolveWork,
    LandWork,
    Outcome,
    RefreshWork,
    TendWork,
    advance_table,
    as_ours,
    change_batches,
    land_table,
    read_again,
    refresh_table,
    refreshed,
    tend_table,
)

TABLES_AT_ONCE_MAX = 4
"""Tables whose jobs are under way side by side."""


WrittenTable = SparkDeltaTable | SparkIcebergTable


class SparkEngine:
    """Does the work of tables that a connector writes."""

    def __init__(self, spark: SparkSession, catalog: Catalog | None = None) -> None:
        self._spark = spark
        self._ways: dict[Callable[..., Outcome], Callable[[Any], Outcome]] = {
            advance_table: self._advance,
            refresh_table: self._refresh,
            deliver_letters: self._deliver,
            deliver_late: self._deliver_late,
        }
        if catalog is not None:
            self._ways |= {land_table: self._land, tend_table: self._tend}
        self._opened: dict[Path, SparkIcebergTable] = {}

    def does(self, task: Callable[..., Outcome]) -> bool:
        """Whether this is work of the connector's: what changes rows, and of Iceberg tables every commit. Reading the
        source and joining a Delta table's files are done in tasks, whoever writes."""
        return task in self._ways

    def run(self, task: Callable[..., Outcome], works: Sequence[Any]) -> list[Outcome]:
        """Each piece of work is another table's. What fails is an outcome, not an exception."""
        with ThreadPoolExecutor(max_workers=min(len(works), TABLES_AT_ONCE_MAX)) as threads:
            return list(threads.map(self._ways[task], works))

    def _in_tasks(self, task: Callable[[Any], Any], works: Sequence[Any]) -> Sequence[Any]:
        return self._spark.sparkContext.parallelize(works, len(works)).map(task).collect()

    def _table(self, place: Place) -> WrittenTable:
        if place.catalog is None:
            return SparkDeltaTable(self._spark, place.path, place.log_id, place.form, place.features, place.file_bytes)
        if place.path not in self._opened:  # each has a session with a catalog, which takes its time to open
            opened = SparkIcebergTable(
                self._spark, place.path, place.log_id, place.catalog, place.form, place.file_bytes
            )
            self._opened[place.path] = opened
        return self._opened[place.path]

    def _land(self, work: LandWork) -> Outcome:
        return _timed(work.schema.table, partial(self._landed, work))

    def _landed(self, work: LandWork) -> Outcome:
        rows = self._table(work.place).land(work.schema, work.files, work.cursor, origin=work.origin)
        return Outcome(table=work.schema.table, rows=rows, cursor=work.cursor, schema=work.schema)

    def _tend(self, work: TendWork) -> Outcome:
        def tended() -> Outcome:
            return Outcome(table=work.table, tended=self._table(work.place).tend(work.upkeep, work.expected))

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
            cursor=work.cursor,
            schema=work.shape,
            bytes_changed=folded.bytes,
            bytes_written=applied.bytes,
            version=applied.version,
            letters=sum(len(item.causes) for item in folded.aside),
        )

    def _applied(self, work: ApplyWork) -> tuple[FoldedFiles, Applied]:
        """One commit; what the table cannot take is set aside first, as `setting_aside` has it."""
        table, letters = self._table(work.place), Letters(work.log, work.table)
        with table.scratch() as scratch:
            if not letters.any:
                try:
                    return self._attempted(work, table, scratch / "plain")
                except NOT_TAKEN:
                    if not work.letters:
                        raise
            here = table.cursor()
            if here != work.expected:  # it is done already, or this says why it cannot be
                nothing = FoldedFiles()
                return nothing, table.apply_files(work.shape, nothing, work.expected, work.cursor, touch=True)
            letters.settle(work.expected.load, table.late())
            letters.void(work.expected.seq)
            done = self._attempted(work, table, scratch / "sifted", sifts=True)
        letters.tidy(work.cursor.seq)
        failpoints.hit("letters.tidied")
        return done

    def _attempted(
        self, work: ApplyWork, table: WrittenTable, scratch: Path, *, sifts: bool = False
    ) -> tuple[FoldedFiles, Applied]:
        scratch.mkdir()
        folded = fold_stretch(work, scratch, self._in_tasks, sifts=sifts)
        if asked := sorted(scratch.glob(f"*{ASKED}")):
            again = scratch / "again"
            again.mkdir()
            if table.find_missing(work.shape, asked, again / MISSING):
                folded = fold_stretch(work, again, self._in_tasks, sifts=True)
        if folded.aside:
            (error,) = self._in_tasks(keep_aside, [KeepWork(work=work, aside=folded.aside)])
            if error is not None:
                raise error
        given = None if work.reader is None else self._given(work, table, scratch)
        applied = table.apply_files(work.shape, folded, work.expected, work.cursor, touch=True, given=given)
        return folded, applied

    def _given(self, work: ApplyWork, table: WrittenTable, scratch: Path) -> Given:
        """Rows that a task reads from the source again; the keys and the rows pass through files."""

        def rows(keys: DataFrame) -> DataFrame:
            keys.coalesce(1).write.parquet(str(scratch / "keys"))
            (error,) = self._in_tasks(_read_given, [_Asked(work=work, scratch=scratch)])
            if error is not None:
                raise error
            fields = table.source_fields(work.shape)
            return table.session.read.schema(fields).parquet(str(scratch / "given.parquet"))

        return rows

    def _evolve(self, work: EvolveWork) -> Outcome:
        return _timed(work.table, partial(self._evolved, work))

    def _evolved(self, work: EvolveWork) -> Outcome:
        applied = self._table(work.place).evolve(work.recast, work.expected)
        return Outcome(table=work.table, cursor=work.expected, schema=work.recast.schema, bytes_written=applied.bytes)

    def _refresh(self, work: RefreshWork) -> Outcome:
        return _timed(work.schema.table, lambda: refreshed(self._table(work.place), work))

    def _deliver(self, work: DeliverWork) -> Outcome:
        return _timed(work.shape.table, partial(self._delivered, work))

    def _delivered(self, work: DeliverWork) -> Outcome:
        """One commit of the rows that may come in, then what became of the letters: both as `redelivery` has it."""
        table, version = self._table(work.place), None
        with table.scratch() as scratch:
            (found,) = self._in_tasks(stage_letters, [StageWork(work=work, path=scratch / "ready.parquet")])
            if isinstance(found, TailraceError):
                raise found
            if found.upserts:
                version = table.put_files(work.shape, found, work.expected).version
        done: Outcome = self._in_tasks(deliver_letters, [replace(work, put=False)])[0]
        return replace(done, version=version)

    def _deliver_late(self, work: LateWork) -> Outcome:
        return _timed(work.shape.table, partial(self._delivered_late, work))

    def _delivered_late(self, work: LateWork) -> Outcome:
        """One commit of what letters hold, then what became of them: both as `late_letters` has it."""
        table, version = self._table(work.place), None
        with table.scratch() as scratch:
            (found,) = self._in_tasks(stage_late, [StageLateWork(work=work, path=scratch / "late.parquet")])
            if isinstance(found, TailraceError):
                raise found
            promised, folded = found
            if promised.late is not None:
                version = table.add_files(
                    work.shape, folded, work.expected, after=promised.after, late=promised.late
                ).version
        left = end_late(work, promised, version)
        return Outcome(table=work.shape.table, rows=promised.letters, letters=left, version=version)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """Keys that lie in a file, whose rows are to be read again."""

    work: ApplyWork
    scratch: Path


def _read_given(asked: _Asked) -> TailraceError | None:
    work = asked.work
    try:
        keys = pq.read_table(asked.scratch / "keys")
        stored = work.place.form.stored(work.shape)
        columns = [stored.columns[i] for i in key_ordinals(stored)]
        fields = pa.schema([(column.name, column.type) for column in columns])
        transactions = {tx for batch in change_batches(work, work.expected.seq) for tx in _transactions(batch)}
        rows = read_again(work, sorted(transactions), keys.select(fields.names).cast(fields))
        pq.write_table(rows, asked.scratch / "given.parquet", store_schema=False)
    except Exception as error:  # the task's boundary
        return as_ours(error)
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
    return Outcome(table=table, error=as_ours(error))


def _timed(table: TableId, work: Callable[[], Outcome]) -> Outcome:
    started = time.monotonic()
    try:
        done = work()
    except Exception as error:  # the work's boundary: the table fails, the others go on
        done = _failed(table, error)
    return replace(done, seconds=time.monotonic() - started)
