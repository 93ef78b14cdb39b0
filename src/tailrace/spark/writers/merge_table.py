"""The common part of all tables that Spark merges into: how rows become a merge.

Tasks fold rows into files. Spark joins these with the table's own rows where they need values of those. No row passes
the driver, except the keys of a small batch, which Spark may broadcast to save a shuffle (`BROADCAST_ROWS_MAX`).

Each format adds little (`TableAtCommit`, and the abstract methods). It says how a table is opened and read, and how
rows are written. Its commit is a compare-and-swap that states the position.
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
from tailrace.tables.fold.folded_changes import (
    DELETE,
    MARK_DELETED,
    UPSERT,
    FoldedChanges,
    TruncateEffect,
    key_ordinals,
)
from tailrace.tables.fold.row_versions import clamp_truncate
from tailrace.tables.port import AppliedPosition, Refetch, WriteResult
from tailrace.tables.spec import CURRENT, LoadOrigin, TableMode, TableSpec
from tailrace.tables.staging import StagedFile
from tailrace.tables.table_errors import concurrent_commit, refuse_other_position, refuse_other_replay
from tailrace.tables.table_folder import unreadable
from tailrace.tasks.fold_files import ROWS_AT_ONCE_MAX, FoldedFiles, folded_file_schema, write_folded

BROADCAST_ROWS_MAX = ROWS_AT_ONCE_MAX
"""Maximal number of rows in a batch whose keys Spark may broadcast, through the driver.

Spark decides by the size of files, which says little of what is in them: a column of one text, or of nulls, has no size
there.
"""
_BROADCAST = "spark.sql.autoBroadcastJoinThreshold"

_UNREADABLE = re.compile(r"PATH_NOT_FOUND|FAILED_READ_FILE|CANNOT_READ_FILE|FileNotFoundException|not a Parquet file")


@dataclass(frozen=True, kw_only=True)
class _MergeSource:
    """The rows of a merge. Columns are `c0…cN`, `op`, and a flag `k<i>` for each column in `keeping_columns`.

    A flag is true where the table's own row keeps its value.
    """

    rows: DataFrame
    keeping_columns: frozenset[int] = frozenset()
    missing_at_source: int = 0
    """Number of rows to refetch that no longer exist at the source."""
    emptied_columns: tuple[str, ...] = ()
    """Columns that only the table has. They become null in rows that are loaded again."""
    ended: TruncateEffect | None = None
    extra_condition: str = ""
    """A condition that all rows of the table meet that the merge is about."""


RefetchFrame = Callable[[DataFrame], DataFrame]
"""Returns the rows that the source has now, for the keys in a frame."""


class TableAtCommit(Protocol):
    """A table as of the commit that was read."""

    @property
    def commit_record(self) -> CommitRecord: ...


Table = TypeVar("Table", bound=TableAtCommit)
OpenedTable = TypeVar("OpenedTable", bound=TableAtCommit, covariant=True)


class TableInspector(Protocol[OpenedTable]):
    """The facts about a table that need no Spark."""

    def applied_position(self) -> AppliedPosition | None: ...
    def schema(self) -> TableSchema | None: ...
    def rows(self) -> int: ...
    def version(self) -> int | None: ...
    def refuse_foreign(self, table: TableId) -> None: ...
    def opened(self) -> OpenedTable:
        """Return the table as it is, with its position.

        Refuse one that was not loaded, or that others changed.
        """


class MergedTable(abc.ABC, Generic[Table]):
    """A table of one change log whose rows Spark writes. It keeps the promises of `LakeTable` that are about rows."""

    connector: str
    """The connector's name in errors."""
    whole_files: bool
    """True if staged files contain the columns of their partition."""
    _inspector: TableInspector[Table]

    def __init__(self, spark: SparkSession, path: Path, spec: TableSpec, inspector: TableInspector[Table]) -> None:
        # A commit's metadata is a setting of the session, so each table has its own session.
        self.session = spark.newSession()
        for name, value in TABLE_SETTINGS.items():
            self.session.conf.set(name, value)
        self._broadcast = str(self.session.conf.get(_BROADCAST))
        self._path, self._spec, self._inspector = path.absolute(), spec, inspector
        self._keeps_versions = spec.mode is TableMode.HISTORY

    def applied_position(self) -> AppliedPosition | None:
        return self._inspector.applied_position()

    def schema(self) -> TableSchema | None:
        return self._inspector.schema()

    def rows(self) -> int:
        return self._inspector.rows()

    def version(self) -> int | None:
        return self._inspector.version()

    def refuse_foreign(self, table: TableId) -> None:
        self._inspector.refuse_foreign(table)

    def _opened(self) -> Table:
        return self._inspector.opened()

    # The part of each format.

    @abc.abstractmethod
    def _read(self, table: Table) -> DataFrame:
        """Return all rows as of the commit that was read."""

    @abc.abstractmethod
    def _sql_name(self, table: Table) -> str:
        """Return the table's name in a statement that writes."""

    @abc.abstractmethod
    def _save(self, table: Table, rows: DataFrame, mode: str) -> None:
        """Add rows (`append`), or replace all rows by them (`overwrite`)."""

    @abc.abstractmethod
    def _commit(self, table: Table, record: CommitRecord, write: Callable[[], None]) -> int:
        """Run the one statement that writes, and commit it with the position.

        Return the version that it made. It fails if anyone else has committed since the table was read.
        """

    @abc.abstractmethod
    def _make_durable(self, version: int) -> CommitFiles:
        """Flush a commit, and the files that it wrote, to the disk."""

    @abc.abstractmethod
    def _retained_columns(self, table: Table, schema: TableSchema) -> Sequence[Column]:
        """Return the columns that the table has in addition to those of its schema."""

    @abc.abstractmethod
    def _staging(self, table: Table) -> Path:
        """Return the folder that the paths of staged files are relative to."""

    @abc.abstractmethod
    def _scratch(self) -> Path:
        """Return a folder for files that are not part of the table."""

    def _guarded(self, table: Table, rows: DataFrame) -> DataFrame:
        """Return the rows, with any that must be written with them."""
        return rows

    def _was_overtaken(self, message: str) -> bool:
        """Return whether a statement failed because someone else committed."""
        return False

    # Applying.

    def apply(
        self,
        schema: TableSchema,
        folded: FoldedChanges,
        expected: AppliedPosition,
        position: AppliedPosition,
        *,
        touch: bool = False,
        refetch: Refetch | None = None,
    ) -> WriteResult:
        refetch_frame = None if refetch is None else self._refetch_through_file(schema, refetch)
        with self.scratch() as folder:
            files = write_folded(
                folder / "folded.parquet", self._spec.stored_schema(schema), folded, self._spec.partition_by
            )
            return self.apply_files(schema, files, expected, position, touch=touch, refetch=refetch_frame)

    def apply_files(
        self,
        schema: TableSchema,
        folded: FoldedFiles,
        expected: AppliedPosition,
        position: AppliedPosition,
        *,
        touch: bool = False,
        refetch: RefetchFrame | None = None,
    ) -> WriteResult:
        """Apply as `apply` does, with rows that tasks have folded into files."""
        table = self._opened()
        applied = table.commit_record.applied_position
        if applied.covers(position) or (folded.is_empty and not touch):
            return WriteResult(committed=False, applied_position=applied)
        refuse_other_position(self._path, table.commit_record, schema, expected)
        clock = max(table.commit_record.latest_time, folded.clock or 0)
        after = replace(table.commit_record, schema=schema, applied_position=position, latest_time=clock)
        version, upserted = self._write(self._spec.stored_schema(schema), table, folded, after, refetch)
        written = self._make_durable(version)
        return WriteResult(
            committed=True,
            applied_position=position,
            upserted=upserted,
            deleted=folded.deletes,
            bytes=written.bytes,
            version=version,
        )

    def upsert_files(self, schema: TableSchema, folded: FoldedFiles, expected: AppliedPosition) -> WriteResult:
        """Write rows as `RepairableTable.upsert_rows` does, from files that a task has written."""
        table = self._opened()
        refuse_other_position(self._path, table.commit_record, schema, expected)
        after = replace(table.commit_record, latest_time=max(table.commit_record.latest_time, folded.clock or 0))
        return self._write_and_sync(schema, table, folded, after)

    def replay_id(self) -> str | None:
        """Return the id of the last replay that appended changes."""
        return self._opened().commit_record.replay_id

    def append_files(
        self,
        schema: TableSchema,
        folded: FoldedFiles,
        expected: AppliedPosition,
        *,
        previous_replay_id: str | None,
        replay_id: str,
    ) -> WriteResult:
        """Append rows as `RepairableTable.append_rows` does, from files that a task has written."""
        table = self._opened()
        refuse_other_position(self._path, table.commit_record, schema, expected)
        refuse_other_replay(self._path, table.commit_record, previous_replay_id)
        return self._write_and_sync(schema, table, folded, replace(table.commit_record, replay_id=replay_id))

    def _write_and_sync(
        self, schema: TableSchema, table: Table, folded: FoldedFiles, record: CommitRecord
    ) -> WriteResult:
        version, upserted = self._write(self._spec.stored_schema(schema), table, folded, record, None)
        written = self._make_durable(version)
        return WriteResult(
            committed=True,
            applied_position=record.applied_position,
            upserted=upserted,
            bytes=written.bytes,
            version=version,
        )

    def _refetch_through_file(self, schema: TableSchema, refetch: Refetch) -> RefetchFrame:
        """Return a function that refetches rows with the caller's function. A pipeline refetches in tasks instead."""

        def rows(keys: DataFrame) -> DataFrame:
            refetched = refetch(pa.table(keys.toArrow()))
            path = self._scratch() / f"refetched-{uuid.uuid4().hex}.parquet"
            pq.write_table(refetched, path, store_schema=False)
            return self.session.read.schema(self.source_fields(schema)).parquet(str(path))

        return rows

    def source_fields(self, schema: TableSchema) -> StructType:
        """Return the source's columns, by their names in the lake."""
        fields = self._spec.stored_schema(schema).row_fields()
        return spark_schema(pa.schema(fields[: len(schema.columns)]))

    def _write(
        self, schema: TableSchema, table: Table, folded: FoldedFiles, record: CommitRecord, refetch: RefetchFrame | None
    ) -> tuple[int, int]:
        """Make one commit, in the cheapest way that is exact.

        Return its version, and how many rows were written.
        """
        self._bound_broadcasts(folded.upserts + folded.deletes)
        rows = self._folded_frame(schema, folded)
        if self._keeps_versions:
            rows = not_before_clock(schema, rows, table.commit_record.latest_time)
        if folded.truncated:
            left_out = 0
            if folded.unsent:  # the truncate leaves no row of the table to take values from
                source = self._merge_source(schema, table, rows, folded.unsent, refetch)
                rows, left_out = source.rows, source.missing_at_source
            inserted = as_table_rows(schema, rows)
            version = self._commit(table, record, lambda: self._save(table, inserted, "overwrite"))
            return version, folded.upserts - left_out
        if schema.key and not folded.is_empty and not (self._keeps_versions and folded.only_adds):
            source = self._merge_source(schema, table, rows, folded.unsent, None if self._keeps_versions else refetch)
            ended = (
                clamp_truncate(folded.ended, table.commit_record.latest_time) if self._keeps_versions else folded.ended
            )
            source = replace(source, ended=ended, extra_condition=partition_condition(schema, folded.partitions))
            version = self._commit(table, record, lambda: self._merge(schema, table, source))
            return version, folded.upserts - source.missing_at_source
        if folded.deletes:
            remaining = remove_copies(schema, self._read(table), rows, self._materialise).unionByName(
                as_table_rows(schema, rows)
            )
            return self._commit(table, record, lambda: self._save(table, remaining, "overwrite")), folded.upserts
        inserted = as_table_rows(schema, rows)
        return self._commit(table, record, lambda: self._save(table, inserted, "append")), folded.upserts

    def write_missing_keys(self, schema: TableSchema, key_files: Sequence[Path], into: Path) -> bool:
        """Write those keys into files of which the table has no row. Return whether there are any.

        The keys are the columns `k0…kN` of files.
        """
        stored = self._spec.stored_schema(schema)
        own = [stored.columns[i] for i in key_ordinals(stored)]
        fields = spark_schema(pa.schema([(f"k{i}", column.type) for i, column in enumerate(own)]))
        keys = self.session.read.schema(fields).parquet(*map(str, key_files))
        rows = self._read(self._opened())
        rows = rows.where(column_named(CURRENT)) if self._keeps_versions else rows
        existing = rows.select(*(column_named(column.name).alias(f"t{i}") for i, column in enumerate(own)))
        same = [f.col(f"k{i}") == f.col(f"t{i}") for i in range(len(own))]
        # Broadcast the few keys, and not the table.
        found = existing.join(f.broadcast(keys), same, "left_semi")
        keys.join(found, same, "left_anti").write.parquet(str(into))
        return not self.session.read.schema(fields).parquet(str(into)).isEmpty()

    def _bound_broadcasts(self, rows: int) -> None:
        self.session.conf.set(_BROADCAST, self._broadcast if rows <= BROADCAST_ROWS_MAX else "-1")

    def _folded_frame(self, schema: TableSchema, folded: FoldedFiles) -> DataFrame:
        fields = folded_file_schema(schema)
        if not folded.files:
            return no_rows(self.session, fields)
        return self.session.read.schema(spark_schema(fields)).parquet(*map(str, folded.files))

    def _merge_source(
        self, schema: TableSchema, table: Table, rows: DataFrame, unsent: frozenset[int], refetch: RefetchFrame | None
    ) -> _MergeSource:
        """Return the rows as a merge takes them. A row whose base is missing is an error, or is refetched."""
        if not unsent:
            return _MergeSource(rows=rows.select(*own_columns(schema), "op"))
        keys, table_rows = key_ordinals(schema), self._read(table)
        base_rows = (table_rows.where(column_named(CURRENT)) if self._keeps_versions else table_rows).select(
            *(column_named(schema.columns[i].name).alias(f"b{i}") for i in sorted({*keys, *unsent})),
            f.lit(True).alias("there"),
        )
        bases = [f.col(f"base.c{i}") == f.col(f"b{i}") for i in keys]
        joined = self._materialise(rows.join(base_rows, bases, "left"))
        partial, missing = f.col("absent").isNotNull(), f.col("there").isNull()
        # A new version is added to the one that it changes, and needs all values of that.
        keeps_key = (
            f.lit(False) if self._keeps_versions else all_of([f.col(f"base.c{i}") == f.col(f"c{i}") for i in keys])
        )
        takes_base = {
            i: f.coalesce(f.array_contains("absent", f.lit(i).cast("smallint")), f.lit(False)) for i in unsent
        }
        columns = [
            f.when(takes_base[i] & ~keeps_key, f.col(f"b{i}")).otherwise(f.col(f"c{i}")).alias(f"c{i}")
            if i in unsent
            else f.col(f"c{i}")
            for i in range(len(schema.columns))
        ]
        flags = [f.coalesce(takes_base[i] & keeps_key, f.lit(False)).alias(f"k{i}") for i in sorted(unsent)]
        if refetch is not None:
            # For a row whose key moved, no row of the table can be trusted (`tables/delta/key_lookup.py`), and one
            # without a base has none.
            must_refetch = partial & (f.col("moved") | missing)
            kept_columns = [*keys, *range(len(schema.columns) - len(self._spec.added_columns), len(schema.columns))]
            key_columns = [f.col(f"c{i}").alias(f"w{i}") for i in kept_columns]
            to_refetch = self._materialise(
                joined.where(must_refetch).select(*key_columns, f.col("base").isNull().alias("baseless"))
            )
            refetched, left_out = self._refetch_rows(schema, to_refetch, unsent, refetch)
            kept = joined.where(~must_refetch).select(*columns, "op", *flags)
            return _MergeSource(rows=kept.unionByName(refetched), keeping_columns=unsent, missing_at_source=left_out)
        if missing_rows := joined.where(partial & missing).count():
            raise BaseRowMissing(
                "a partial change arrived for a row that the table does not hold",
                table=schema.table,
                rows=missing_rows,
                hint=RELOAD_TABLE_HINT,
            )
        return _MergeSource(rows=joined.select(*columns, "op", *flags), keeping_columns=unsent)

    def _refetch_rows(
        self, schema: TableSchema, to_refetch: DataFrame, unsent: frozenset[int], refetch: RefetchFrame
    ) -> tuple[DataFrame, int]:
        """Return the source's present rows with these keys, and how many it no longer has.

        Columns that the table spec adds are those of the change that needs the row. If a row has no base and the source
        no longer has it, the row under its key is removed, as in `RowsWithoutBase`.
        """
        source_columns = len(schema.columns) - len(self._spec.added_columns)
        own = [
            (column_named(column.name) if i < source_columns else f.col(f"w{i}")).alias(f"c{i}")
            for i, column in enumerate(schema.columns)
        ]
        no_flags = [f.lit(False).alias(f"k{i}") for i in sorted(unsent)]
        op = f.lit(UPSERT).cast("tinyint").alias("op")
        requested = to_refetch.count()
        names = {i: schema.columns[i].name for i in key_ordinals(schema)}
        if not requested:
            fields = [(f"w{i}" if i >= source_columns else c.name, c.type) for i, c in enumerate(schema.columns)]
            return no_rows(self.session, pa.schema(fields)).select(*own, op, *no_flags), 0
        refetched = refetch(to_refetch.select(*(f.col(f"w{i}").alias(name) for i, name in names.items())))
        refuse_misfit_rows(schema, {*self._spec.partition_by} & {*refetched.columns}, refetched)
        same = [column_named(name) == f.col(f"w{i}") for i, name in names.items()]
        result = refetched.join(to_refetch.drop("baseless"), same).select(*own, op, *no_flags)
        remaining = [
            (f.col(f"w{i}") if i in names or i >= source_columns else f.lit(None).cast(kind.dataType)).alias(f"c{i}")
            for i, kind in enumerate(spark_schema(pa.schema(schema.row_fields())))
        ]
        # A row that stays as deleted is marked, if the table has it.
        mark = f.col(f"w{schema.names.index(self._spec.deleted_column)}") if self._spec.soft_delete else f.lit(False)
        instead = f.when(mark, MARK_DELETED).when(f.col("baseless"), DELETE).cast("tinyint")
        gone = to_refetch.join(refetched, same, "left_anti").where(mark | f.col("baseless"))
        result = self._materialise(result.unionByName(gone.select(*remaining, instead.alias("op"), *no_flags)))
        return result, requested - result.where(f.col("op") == UPSERT).count()

    def _merge(self, schema: TableSchema, table: Table, source: _MergeSource) -> None:
        view = f"source_{uuid.uuid4().hex}"
        merge = merge_sql_for(
            self._spec,
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
        position: AppliedPosition,
        *,
        keys: Sequence[StagedFile] | None = None,
        origin: LoadOrigin | None = None,
    ) -> WriteResult:
        table, appends = self._opened(), self._spec.mode is TableMode.APPEND
        if not schema.key and not appends:
            raise Unsupported(
                "a table without a key can only be reloaded as a whole", table=schema.table, hint=REPLACE_HINT
            )
        applied = table.commit_record.applied_position
        if (applied != expected and applied.covers(position)) or (appends and applied == position):
            return WriteResult(committed=False, applied_position=applied)
        refuse_other_position(self._path, table.commit_record, schema, expected)
        origin = origin or LoadOrigin(seq=position.seq, position=str(position.position), read_at=time.time_ns() // 1000)
        latest_time = max(table.commit_record.latest_time, origin.read_at)
        record = replace(table.commit_record, schema=schema, applied_position=position, latest_time=latest_time)
        if appends:
            inserted = self._staged(table, self._spec.stored_schema(schema).columns, files)
            self._make_durable(self._commit(table, record, lambda: self._save(table, inserted, "append")))
            return WriteResult(committed=True, applied_position=position, upserted=sum(file.rows for file in files))
        self._bound_broadcasts(sum(file.rows for file in files))
        with self.scratch():
            changes = self._difference(schema, table, files, keys, origin)
            return self._merge_difference(self._spec.stored_schema(schema), table, record, changes)

    def _merge_difference(
        self, schema: TableSchema, table: Table, record: CommitRecord, changes: DataFrame
    ) -> WriteResult:
        rows = self._materialise(changes)
        counts = {
            (row["op"] == UPSERT, row[REINSERTED]): row["count"]
            for row in rows.groupBy("op", REINSERTED).count().collect()
        }
        if counts:
            emptied = tuple(column.name for column in self._retained_columns(table, schema))
            source = _MergeSource(rows=rows, emptied_columns=emptied)
            version = self._commit(table, record, lambda: self._merge(schema, table, source))
        elif record.applied_position != table.commit_record.applied_position:
            no_rows_frame = no_rows(self.session, pa.schema(schema.row_fields()))
            version = self._commit(table, record, lambda: self._save(table, no_rows_frame, "append"))
        else:
            return WriteResult(committed=False, applied_position=record.applied_position)
        self._make_durable(version)
        return WriteResult(
            committed=True,
            applied_position=record.applied_position,
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
        stored, compared = self._spec.stored_schema(schema), len(split_compared(self._spec, schema)[0].columns)
        key = [stored.columns[i] for i in key_ordinals(stored)]
        staged = self._staged(table, stored.columns, files)
        listed_keys = None if keys is None else self._staged(table, key, keys)
        if self._spec.holds_messages:
            listed_keys = self._read(table)
        retirement = retirement_rule(self._spec, origin, table.commit_record.latest_time)
        return rows_to_change(stored, compared, self._read(table), staged, listed_keys, retirement)

    def _staged(self, table: Table, columns: Sequence[Column], files: Sequence[StagedFile]) -> DataFrame:
        return staged_rows(self.session, columns, self._staging(table), files, whole=self.whole_files)

    def _materialise(self, rows: DataFrame) -> DataFrame:
        """Write rows to files and return them read back.

        This is for rows that are read more than once, because a merge refuses rows that Spark has cached.
        """
        path = str(self._scratch() / f"kept-{uuid.uuid4().hex}")
        rows.write.parquet(path)
        return self.session.read.schema(rows.schema).parquet(path)

    @contextmanager
    def _spark_errors(self) -> Iterator[None]:
        """Map Spark's errors to ours. Spark's own text may contain a row, so only its error class is kept."""
        try:
            yield
        except (PySparkException, Py4JError) as exc:
            message = str(exc)
            if self._was_overtaken(message):
                raise self._overtaken() from exc
            error_class = re.search(r"\[([A-Z][A-Z0-9_.]{3,})\]", message)
            if _UNREADABLE.search(message):
                raise unreadable(self._path, OSError(error_class[1] if error_class else "")) from exc
            raise TableFailed(
                f"{self.connector} failed",
                path=self._path,
                reason=error_class[1] if error_class else type(exc).__name__,
                hint="Read the file status/spark.log of the log. If the error repeats, report it.",
            ) from exc

    def _overtaken(self) -> ForeignWrite:
        return concurrent_commit(self._path)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Make an empty folder for files that are not part of the table.

        Files that a killed process has left there are removed.
        """
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
