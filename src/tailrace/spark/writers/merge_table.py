"""What every table that Spark merges into has in common, whoever writes the commit: how rows become a merge.

Rows are folded by tasks into files, and joined with the table's own where they need something of it; no row passes the
driver, but for the keys of a small batch, which Spark may hand around to save a shuffle (`BROADCAST_ROWS_MAX`). What a
format does in its own way (`Standing`, and the methods that raise here) is little: how a table is looked
at and read, how rows are written, and how a commit is a compare-and-swap that states the position.
"""

from __future__ import annotations

import abc
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from tailrace.errors import RELOAD_TABLE_HINT, BaseRowMissing, ForeignWrite, TableFailed, Unsupported
from tailrace.model.schema import Column, TableId, TableSchema
from tailrace.spark.session.arrow_types import spark_schema
from tailrace.spark.session.connectors import TABLE_SETTINGS
from tailrace.spark.writers.merge_sql import (
    REINSERTED,
    all_of,
    as_table_rows,
    column_named,
    merge_sql_for,
    not_before_clock,
    own_columns,
    partition_condition,
    remove_copies,
    rows_to_change,
)
from tailrace.spark.writers.staged_rows import no_rows, refuse_misfit_rows, staged_rows
from tailrace.tables.delta.commit_log import REPLACE_HINT, CommitFiles, CommitRecord
from tailrace.tables.fold.by_mode import retirement_rule, split_compared
from tailrace.tables.fold.fold import DELETE, MARK_DELETED, UPSERT, FoldedChanges, TruncateEffect, key_ordinals
from tailrace.tables.fold.row_versions import clamp_truncate
from tailrace.tables.port import AppliedPosition, Refetch, WriteResult
from tailrace.tables.spec import CURRENT, LoadOrigin, TableMode, TableSpec
from tailrace.tables.staging import StagedFile
from tailrace.tables.table_errors import concurrent_commit, refuse_other_position, refuse_other_replay
from tailrace.tables.table_folder import unreadable
from tailrace.tasks.fold_files import ROWS_AT_ONCE_MAX, FoldedFiles, folded_file_schema, write_folded

BROADCAST_ROWS_MAX = ROWS_AT_ONCE_MAX
"""Rows of a batch whose keys Spark may hand around, through the driver. It goes by the size of files, which says little
of what is in them: a column of one text, or of nulls, takes no room there."""
_BROADCAST = "spark.sql.autoBroadcastJoinThreshold"

_UNREADABLE = re.compile(r"PATH_NOT_FOUND|FAILED_READ_FILE|CANNOT_READ_FILE|FileNotFoundException|not a Parquet file")


@dataclass(frozen=True, kw_only=True)
class _MergeSource:
    """What a merge is given: rows `c0…cN`, `op`, and a flag `k<i>` for each column in `kept`, true where the table's
    own row keeps its value."""

    rows: DataFrame
    keeping_columns: frozenset[int] = frozenset()
    missing_at_source: int = 0
    """Rows that were to be read again, and are gone at the source."""
    emptied_columns: tuple[str, ...] = ()
    """Columns that only the table has, and that rows lose which are read anew."""
    ended: TruncateEffect | None = None
    extra_condition: str = ""
    """What is known of rows of the table that it is about, as a condition."""


RefetchFrame = Callable[[DataFrame], DataFrame]
"""Rows as the source has them now, for the keys in a frame."""


class TableAtCommit(Protocol):
    """A table as it stood when it was looked at."""

    @property
    def commit_record(self) -> CommitRecord: ...


Table = TypeVar("Table", bound=TableAtCommit)
Looked = TypeVar("Looked", bound=TableAtCommit, covariant=True)


class TableInspector(Protocol[Looked]):
    """What a table says of itself without Spark."""

    def applied_position(self) -> AppliedPosition | None: ...
    def schema(self) -> TableSchema | None: ...
    def rows(self) -> int: ...
    def version(self) -> int | None: ...
    def refuse_foreign(self, table: TableId) -> None: ...
    def opened(self) -> Looked:
        """The table as it stands, with its position; refuses one that was not loaded, or that others changed."""


class MergedTable(abc.ABC, Generic[Table]):
    """A table of one change log whose rows Spark writes; keeps the promises of `LakeTable` that are about rows."""

    connector: str
    """As errors call it."""
    whole_files: bool
    """Whether staged files hold the columns of their partition."""
    _plain: TableInspector[Table]

    def __init__(self, spark: SparkSession, path: Path, form: TableSpec, plain: TableInspector[Table]) -> None:
        # What a commit says is a setting of the session, so each table has its own.
        self.session = spark.newSession()
        for name, value in TABLE_SETTINGS.items():
            self.session.conf.set(name, value)
        self._broadcast = str(self.session.conf.get(_BROADCAST))
        self._path, self._form, self._plain = path.absolute(), form, plain
        self._versions = form.mode is TableMode.HISTORY

    def applied_position(self) -> AppliedPosition | None:
        return self._plain.applied_position()

    def schema(self) -> TableSchema | None:
        return self._plain.schema()

    def rows(self) -> int:
        return self._plain.rows()

    def version(self) -> int | None:
        return self._plain.version()

    def refuse_foreign(self, table: TableId) -> None:
        self._plain.refuse_foreign(table)

    def _opened(self) -> Table:
        return self._plain.opened()

    # What each format does in its own way.

    @abc.abstractmethod
    def _read(self, table: Table) -> DataFrame:
        """All rows, as they were when the table was looked at."""

    @abc.abstractmethod
    def _sql_name(self, table: Table) -> str:
        """The table, as a statement that writes names it."""

    @abc.abstractmethod
    def _save(self, table: Table, rows: DataFrame, mode: str) -> None:
        """Add rows (`append`), or make them all that there is (`overwrite`)."""

    @abc.abstractmethod
    def _commit(self, table: Table, position: CommitRecord, write: Callable[[], None]) -> int:
        """Run the one statement that writes, and commit it with the position if nobody else has committed since the
        table was looked at; the version that it made."""

    @abc.abstractmethod
    def _make_durable(self, version: int) -> CommitFiles:
        """Push a commit and what it wrote to the disk."""

    @abc.abstractmethod
    def _retained_columns(self, table: Table, schema: TableSchema) -> Sequence[Column]:
        """The columns that the table holds beside those of its shape."""

    @abc.abstractmethod
    def _staging(self, table: Table) -> Path:
        """The folder that staged files are named from."""

    @abc.abstractmethod
    def _scratch(self) -> Path:
        """A folder for what is not part of the table."""

    def _guarded(self, table: Table, rows: DataFrame) -> DataFrame:
        """The rows, and whatever must be written with them."""
        return rows

    def _was_overtaken(self, said: str) -> bool:
        """Whether a statement failed because someone else committed."""
        return False

    # Applying.

    def apply(
        self,
        schema: TableSchema,
        folded: FoldedChanges,
        expected: AppliedPosition,
        cursor: AppliedPosition,
        *,
        touch: bool = False,
        reread: Refetch | None = None,
    ) -> WriteResult:
        given = None if reread is None else self._refetch_through_file(schema, reread)
        with self.scratch() as folder:
            files = write_folded(
                folder / "folded.parquet", self._form.stored_schema(schema), folded, self._form.partition_by
            )
            return self.apply_files(schema, files, expected, cursor, touch=touch, given=given)

    def apply_files(
        self,
        schema: TableSchema,
        folded: FoldedFiles,
        expected: AppliedPosition,
        cursor: AppliedPosition,
        *,
        touch: bool = False,
        given: RefetchFrame | None = None,
    ) -> WriteResult:
        """`apply`, of rows that tasks have folded into files."""
        table = self._opened()
        here = table.commit_record.applied_position
        if here.covers(cursor) or (folded.is_empty and not touch):
            return WriteResult(committed=False, applied_position=here)
        refuse_other_position(self._path, table.commit_record, schema, expected)
        clock = max(table.commit_record.latest_time, folded.clock or 0)
        after = replace(table.commit_record, schema=schema, applied_position=cursor, latest_time=clock)
        version, upserted = self._write(self._form.stored_schema(schema), table, folded, after, given)
        written = self._make_durable(version)
        return WriteResult(
            committed=True,
            applied_position=cursor,
            upserted=upserted,
            deleted=folded.deletes,
            bytes=written.bytes,
            version=version,
        )

    def upsert_files(self, schema: TableSchema, folded: FoldedFiles, expected: AppliedPosition) -> WriteResult:
        """`MendedTable.put`, of rows that a task has put into files."""
        table = self._opened()
        refuse_other_position(self._path, table.commit_record, schema, expected)
        after = replace(table.commit_record, latest_time=max(table.commit_record.latest_time, folded.clock or 0))
        return self._put(schema, table, folded, after)

    def replay_id(self) -> str | None:
        """The name of the dead letters that came in last, where their own changes did."""
        return self._opened().commit_record.replay_id

    def append_files(
        self, schema: TableSchema, folded: FoldedFiles, expected: AppliedPosition, *, after: str | None, late: str
    ) -> WriteResult:
        """`MendedTable.add`, of rows that a task has put into files."""
        table = self._opened()
        refuse_other_position(self._path, table.commit_record, schema, expected)
        refuse_other_replay(self._path, table.commit_record, after)
        return self._put(schema, table, folded, replace(table.commit_record, replay_id=late))

    def _put(self, schema: TableSchema, table: Table, folded: FoldedFiles, after: CommitRecord) -> WriteResult:
        version, upserted = self._write(self._form.stored_schema(schema), table, folded, after, None)
        written = self._make_durable(version)
        return WriteResult(
            committed=True,
            applied_position=after.applied_position,
            upserted=upserted,
            bytes=written.bytes,
            version=version,
        )

    def _refetch_through_file(self, schema: TableSchema, reread: Refetch) -> RefetchFrame:
        """Rows read again by whoever calls; a pipeline has tasks read them."""

        def rows(keys: DataFrame) -> DataFrame:
            found = reread(pa.table(keys.toArrow()))
            path = self._scratch() / f"given-{uuid.uuid4().hex}.parquet"
            pq.write_table(found, path, store_schema=False)
            return self.session.read.schema(self.source_fields(schema)).parquet(str(path))

        return rows

    def source_fields(self, schema: TableSchema) -> StructType:
        """The source's columns, by their names in the lake."""
        fields = self._form.stored_schema(schema).row_fields()
        return spark_schema(pa.schema(fields[: len(schema.columns)]))

    def _write(
        self, schema: TableSchema, table: Table, folded: FoldedFiles, position: CommitRecord, given: RefetchFrame | None
    ) -> tuple[int, int]:
        """One commit, in the cheapest way that is exact; its version, and how many rows came."""
        self._bound_broadcasts(folded.upserts + folded.deletes)
        rows = self._folded(schema, folded)
        if self._versions:
            rows = not_before_clock(schema, rows, table.commit_record.latest_time)
        if folded.truncated:
            left_out = 0
            if folded.unsent:  # of the table's own rows none stays to take values from
                source = self._merge_source(schema, table, rows, folded.unsent, given)
                rows, left_out = source.rows, source.missing_at_source
            came = as_table_rows(schema, rows)
            version = self._commit(table, position, lambda: self._save(table, came, "overwrite"))
            return version, folded.upserts - left_out
        if schema.key and not folded.is_empty and not (self._versions and folded.only_adds):
            source = self._merge_source(schema, table, rows, folded.unsent, None if self._versions else given)
            ended = clamp_truncate(folded.ended, table.commit_record.latest_time) if self._versions else folded.ended
            source = replace(source, ended=ended, extra_condition=partition_condition(schema, folded.partitions))
            version = self._commit(table, position, lambda: self._merge(schema, table, source))
            return version, folded.upserts - source.missing_at_source
        if folded.deletes:
            left = remove_copies(schema, self._read(table), rows, self._materialise).unionByName(
                as_table_rows(schema, rows)
            )
            return self._commit(table, position, lambda: self._save(table, left, "overwrite")), folded.upserts
        came = as_table_rows(schema, rows)
        return self._commit(table, position, lambda: self._save(table, came, "append")), folded.upserts

    def write_missing_keys(self, schema: TableSchema, asked: Sequence[Path], into: Path) -> bool:
        """Put keys, the columns `k0…kN` of files, of which the table has no row into other files; whether there are
        some."""
        stored = self._form.stored_schema(schema)
        own = [stored.columns[i] for i in key_ordinals(stored)]
        fields = spark_schema(pa.schema([(f"k{i}", column.type) for i, column in enumerate(own)]))
        keys = self.session.read.schema(fields).parquet(*map(str, asked))
        rows = self._read(self._opened())
        rows = rows.where(column_named(CURRENT)) if self._versions else rows
        there = rows.select(*(column_named(column.name).alias(f"t{i}") for i, column in enumerate(own)))
        same = [f.col(f"k{i}") == f.col(f"t{i}") for i in range(len(own))]
        # The few keys are handed around, and not the table.
        held = there.join(f.broadcast(keys), same, "left_semi")
        keys.join(held, same, "left_anti").write.parquet(str(into))
        return not self.session.read.schema(fields).parquet(str(into)).isEmpty()

    def _bound_broadcasts(self, rows: int) -> None:
        self.session.conf.set(_BROADCAST, self._broadcast if rows <= BROADCAST_ROWS_MAX else "-1")

    def _folded(self, schema: TableSchema, folded: FoldedFiles) -> DataFrame:
        fields = folded_file_schema(schema)
        if not folded.files:
            return no_rows(self.session, fields)
        return self.session.read.schema(spark_schema(fields)).parquet(*map(str, folded.files))

    def _merge_source(
        self, schema: TableSchema, table: Table, rows: DataFrame, absent: frozenset[int], given: RefetchFrame | None
    ) -> _MergeSource:
        """The rows as a merge takes them. A row whose base is missing is an error, or is read again."""
        if not absent:
            return _MergeSource(rows=rows.select(*own_columns(schema), "op"))
        keys, there = key_ordinals(schema), self._read(table)
        held = (there.where(column_named(CURRENT)) if self._versions else there).select(
            *(column_named(schema.columns[i].name).alias(f"b{i}") for i in sorted({*keys, *absent})),
            f.lit(True).alias("there"),
        )
        bases = [f.col(f"base.c{i}") == f.col(f"b{i}") for i in keys]
        joined = self._materialise(rows.join(held, bases, "left"))
        partial, missing = f.col("absent").isNotNull(), f.col("there").isNull()
        # A version takes its place beside the one that it comes from, and needs all that this has.
        still = f.lit(False) if self._versions else all_of([f.col(f"base.c{i}") == f.col(f"c{i}") for i in keys])
        takes = {i: f.coalesce(f.array_contains("absent", f.lit(i).cast("smallint")), f.lit(False)) for i in absent}
        columns = [
            f.when(takes[i] & ~still, f.col(f"b{i}")).otherwise(f.col(f"c{i}")).alias(f"c{i}")
            if i in absent
            else f.col(f"c{i}")
            for i in range(len(schema.columns))
        ]
        flags = [f.coalesce(takes[i] & still, f.lit(False)).alias(f"k{i}") for i in sorted(absent)]
        if given is not None:
            # Of a row that moved nothing in the table can be trusted, as `lookup.without_base` says; and of one without
            # a base nothing is found.
            again = partial & (f.col("moved") | missing)
            mine = [*keys, *range(len(schema.columns) - len(self._form.added_columns), len(schema.columns))]
            asked = [f.col(f"c{i}").alias(f"w{i}") for i in mine]
            wanted = self._materialise(joined.where(again).select(*asked, f.col("base").isNull().alias("baseless")))
            fresh, left_out = self._refetch_rows(schema, wanted, absent, given)
            kept = joined.where(~again).select(*columns, "op", *flags)
            return _MergeSource(rows=kept.unionByName(fresh), keeping_columns=absent, missing_at_source=left_out)
        if lost := joined.where(partial & missing).count():
            raise BaseRowMissing(
                "a partial change arrived for a row that the table does not hold",
                table=schema.table,
                rows=lost,
                hint=RELOAD_TABLE_HINT,
            )
        return _MergeSource(rows=joined.select(*columns, "op", *flags), keeping_columns=absent)

    def _refetch_rows(
        self, schema: TableSchema, wanted: DataFrame, absent: frozenset[int], given: RefetchFrame
    ) -> tuple[DataFrame, int]:
        """The rows with these keys as they are at the source now, and how many of them are gone there. What the form
        adds is of the change that asks for the row. What stands under the key of one that has no base and is gone goes
        too, as `lookup.Baseless` has it."""
        theirs = len(schema.columns) - len(self._form.added_columns)
        own = [
            (column_named(column.name) if i < theirs else f.col(f"w{i}")).alias(f"c{i}")
            for i, column in enumerate(schema.columns)
        ]
        none = [f.lit(False).alias(f"k{i}") for i in sorted(absent)]
        op = f.lit(UPSERT).cast("tinyint").alias("op")
        asked = wanted.count()
        names = {i: schema.columns[i].name for i in key_ordinals(schema)}
        if not asked:
            fields = [(f"w{i}" if i >= theirs else c.name, c.type) for i, c in enumerate(schema.columns)]
            return no_rows(self.session, pa.schema(fields)).select(*own, op, *none), 0
        answers = given(wanted.select(*(f.col(f"w{i}").alias(name) for i, name in names.items())))
        refuse_misfit_rows(schema, {*self._form.partition_by} & {*answers.columns}, answers)
        same = [column_named(name) == f.col(f"w{i}") for i, name in names.items()]
        found = answers.join(wanted.drop("baseless"), same).select(*own, op, *none)
        left = [
            (f.col(f"w{i}") if i in names or i >= theirs else f.lit(None).cast(kind.dataType)).alias(f"c{i}")
            for i, kind in enumerate(spark_schema(pa.schema(schema.row_fields())))
        ]
        # Whatever stands in the table of a row that is to be found as deleted is marked.
        mark = f.col(f"w{schema.names.index(self._form.deleted_column)}") if self._form.soft_delete else f.lit(False)
        instead = f.when(mark, MARK_DELETED).when(f.col("baseless"), DELETE).cast("tinyint")
        lost = wanted.join(answers, same, "left_anti").where(mark | f.col("baseless"))
        found = self._materialise(found.unionByName(lost.select(*left, instead.alias("op"), *none)))
        return found, asked - found.where(f.col("op") == UPSERT).count()

    def _merge(self, schema: TableSchema, table: Table, source: _MergeSource) -> None:
        view = f"source_{uuid.uuid4().hex}"
        merge = merge_sql_for(
            self._form,
            schema,
            self._sql_name(table),
            view,
            source.keeping_columns,
            source.emptied_columns,
            source.ended,
            source.extra_condition,
        )
        self._guarded(table, source.rows).createOrReplaceTempView(view)
        try:
            self.session.sql(merge)
        finally:
            self.session.catalog.dropTempView(view)

    def merge_load(
        self,
        schema: TableSchema,
        files: Sequence[StagedFile],
        expected: AppliedPosition,
        cursor: AppliedPosition,
        *,
        keys: Sequence[StagedFile] | None = None,
        origin: LoadOrigin | None = None,
    ) -> WriteResult:
        table, appends = self._opened(), self._form.mode is TableMode.APPEND
        if not schema.key and not appends:
            raise Unsupported("only a table with a key can be refreshed", table=schema.table, hint=REPLACE_HINT)
        here = table.commit_record.applied_position
        if (here != expected and here.covers(cursor)) or (appends and here == cursor):
            return WriteResult(committed=False, applied_position=here)
        refuse_other_position(self._path, table.commit_record, schema, expected)
        origin = origin or LoadOrigin(seq=cursor.seq, position=str(cursor.position), read_at=time.time_ns() // 1000)
        clock = max(table.commit_record.latest_time, origin.read_at)
        after = replace(table.commit_record, schema=schema, applied_position=cursor, latest_time=clock)
        if appends:
            came = self._staged(table, self._form.stored_schema(schema).columns, files)
            self._make_durable(self._commit(table, after, lambda: self._save(table, came, "append")))
            return WriteResult(committed=True, applied_position=cursor, upserted=sum(file.rows for file in files))
        self._bound_broadcasts(sum(file.rows for file in files))
        with self.scratch():
            changes = self._difference(schema, table, files, keys, origin)
            return self._merge_difference(self._form.stored_schema(schema), table, after, changes)

    def _merge_difference(
        self, schema: TableSchema, table: Table, after: CommitRecord, changes: DataFrame
    ) -> WriteResult:
        found = self._materialise(changes)
        counts = {
            (row["op"] == UPSERT, row[REINSERTED]): row["count"]
            for row in found.groupBy("op", REINSERTED).count().collect()
        }
        if counts:
            emptied = tuple(column.name for column in self._retained_columns(table, schema))
            source = _MergeSource(rows=found, emptied_columns=emptied)
            version = self._commit(table, after, lambda: self._merge(schema, table, source))
        elif after.applied_position != table.commit_record.applied_position:
            nothing = no_rows(self.session, pa.schema(schema.row_fields()))
            version = self._commit(table, after, lambda: self._save(table, nothing, "append"))
        else:
            return WriteResult(committed=False, applied_position=after.applied_position)
        self._make_durable(version)
        return WriteResult(
            committed=True,
            applied_position=after.applied_position,
            upserted=counts.get((True, False), 0),
            deleted=counts.get((False, False), 0),
        )

    def _difference(
        self,
        schema: TableSchema,
        table: Table,
        files: Sequence[StagedFile],
        keys: Sequence[StagedFile] | None,
        origin: LoadOrigin,
    ) -> DataFrame:
        stored, counts = self._form.stored_schema(schema), len(split_compared(self._form, schema)[0].columns)
        key = [stored.columns[i] for i in key_ordinals(stored)]
        staged = self._staged(table, stored.columns, files)
        listed = None if keys is None else self._staged(table, key, keys)
        if self._form.holds_messages:
            listed = self._read(table)
        past = retirement_rule(self._form, origin, table.commit_record.latest_time)
        return rows_to_change(stored, counts, self._read(table), staged, listed, past)

    def _staged(self, table: Table, columns: Sequence[Column], files: Sequence[StagedFile]) -> DataFrame:
        return staged_rows(self.session, columns, self._staging(table), files, whole=self.whole_files)

    def _materialise(self, rows: DataFrame) -> DataFrame:
        """Rows that are asked for more than once, in files: a merge refuses what Spark has cached."""
        path = str(self._scratch() / f"kept-{uuid.uuid4().hex}")
        rows.write.parquet(path)
        return self.session.read.schema(rows.schema).parquet(path)

    @contextmanager
    def _spark_errors(self) -> Iterator[None]:
        """What Spark says, as one of our errors. Its own text may hold a row, so only its kind is kept."""
        try:
            yield
        except (PySparkException, Py4JError) as exc:
            said = str(exc)
            if self._was_overtaken(said):
                raise self._overtaken() from exc
            found = re.search(r"\[([A-Z][A-Z0-9_.]{3,})\]", said)
            if _UNREADABLE.search(said):
                raise unreadable(self._path, OSError(found[1] if found else "")) from exc
            raise TableFailed(
                f"{self.connector} failed",
                path=self._path,
                reason=found[1] if found else type(exc).__name__,
                hint="See the file status/spark.log of the log; if it comes back, report it.",
            ) from exc

    def _overtaken(self) -> ForeignWrite:
        return concurrent_commit(self._path)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder for what is not part of the table; what a killed predecessor left goes too."""
        folder = self._scratch()
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.mkdir(parents=True)
        except OSError as exc:
            raise unreadable(self._path, exc) from exc
        try:
            with self._spark_errors():
                yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
