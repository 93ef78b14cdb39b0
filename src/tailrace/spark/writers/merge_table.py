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

from tailrace.errors import LOAD_ANEW_HINT, BaseRowMissing, ForeignWrite, TableFailed, Unsupported
from tailrace.model.schema import Column, TableId, TableSchema
from tailrace.spark.session.arrow_types import spark_schema
from tailrace.spark.session.connectors import TABLE_SETTINGS
from tailrace.spark.writers.frames import all_of, as_table, named, own_columns
from tailrace.spark.writers.keyless_delete import without
from tailrace.spark.writers.merge_sql import BACK, difference, in_partitions, merge_for, timed
from tailrace.spark.writers.staged_rows import no_rows, refuse_misfit_rows, staged_rows
from tailrace.tables.delta.commit_log import REPLACE_HINT, Position, Written
from tailrace.tables.fold.by_mode import compared, keeping
from tailrace.tables.fold.fold import DELETE, MARK, UPSERT, Ended, Folded, key_ordinals
from tailrace.tables.fold.row_versions import ended_after
from tailrace.tables.port import Applied, Cursor, Reread
from tailrace.tables.position_errors import overtaken, refuse_elsewhere, refuse_other_letters
from tailrace.tables.spec import CURRENT, Form, Origin, TableMode
from tailrace.tables.staging import StagedFile
from tailrace.tables.table_folder import unreadable
from tailrace.tasks.fold_files import ROWS_AT_ONCE_MAX, FoldedFiles, file_fields, write_folded

BROADCAST_ROWS_MAX = ROWS_AT_ONCE_MAX
"""Rows of a batch whose keys Spark may hand around, through the driver. It goes by the size of files, which says little
of what is in them: a column of one text, or of nulls, takes no room there."""
_BROADCAST = "spark.sql.autoBroadcastJoinThreshold"

_UNREADABLE = re.compile(r"PATH_NOT_FOUND|FAILED_READ_FILE|CANNOT_READ_FILE|FileNotFoundException|not a Parquet file")


@dataclass(frozen=True, kw_only=True)
class _Source:
    """What a merge is given: rows `c0…cN`, `op`, and a flag `k<i>` for each column in `kept`, true where the table's
    own row keeps its value."""

    rows: DataFrame
    kept: frozenset[int] = frozenset()
    left_out: int = 0
    """Rows that were to be read again, and are gone at the source."""
    emptied: tuple[str, ...] = ()
    """Columns that only the table has, and that rows lose which are read anew."""
    ended: Ended | None = None
    also: str = ""
    """What is known of rows of the table that it is about, as a condition."""


Given = Callable[[DataFrame], DataFrame]
"""Rows as the source has them now, for the keys in a frame."""


class Standing(Protocol):
    """A table as it stood when it was looked at."""

    @property
    def position(self) -> Position: ...


Table = TypeVar("Table", bound=Standing)
Looked = TypeVar("Looked", bound=Standing, covariant=True)


class Plain(Protocol[Looked]):
    """What a table says of itself without Spark."""

    def cursor(self) -> Cursor | None: ...
    def shape(self) -> TableSchema | None: ...
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
    _plain: Plain[Table]

    def __init__(self, spark: SparkSession, path: Path, form: Form, plain: Plain[Table]) -> None:
        # What a commit says is a setting of the session, so each table has its own.
        self.session = spark.newSession()
        for name, value in TABLE_SETTINGS.items():
            self.session.conf.set(name, value)
        self._broadcast = str(self.session.conf.get(_BROADCAST))
        self._path, self._form, self._plain = path.absolute(), form, plain
        self._versions = form.mode is TableMode.HISTORY

    def cursor(self) -> Cursor | None:
        return self._plain.cursor()

    def shape(self) -> TableSchema | None:
        return self._plain.shape()

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
    def _target(self, table: Table) -> str:
        """The table, as a statement that writes names it."""

    @abc.abstractmethod
    def _save(self, table: Table, rows: DataFrame, mode: str) -> None:
        """Add rows (`append`), or make them all that there is (`overwrite`)."""

    @abc.abstractmethod
    def _commit(self, table: Table, position: Position, write: Callable[[], None]) -> int:
        """Run the one statement that writes, and commit it with the position if nobody else has committed since the
        table was looked at; the version that it made."""

    @abc.abstractmethod
    def _make_durable(self, version: int) -> Written:
        """Push a commit and what it wrote to the disk."""

    @abc.abstractmethod
    def _kept(self, table: Table, schema: TableSchema) -> Sequence[Column]:
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
        folded: Folded,
        expected: Cursor,
        cursor: Cursor,
        *,
        touch: bool = False,
        reread: Reread | None = None,
    ) -> Applied:
        given = None if reread is None else self._given(schema, reread)
        with self.scratch() as folder:
            files = write_folded(folder / "folded.parquet", self._form.stored(schema), folded, self._form.partition_by)
            return self.apply_files(schema, files, expected, cursor, touch=touch, given=given)

    def apply_files(
        self,
        schema: TableSchema,
        folded: FoldedFiles,
        expected: Cursor,
        cursor: Cursor,
        *,
        touch: bool = False,
        given: Given | None = None,
    ) -> Applied:
        """`apply`, of rows that tasks have folded into files."""
        table = self._opened()
        here = table.position.cursor
        if here.covers(cursor) or (folded.empty and not touch):
            return Applied(committed=False, cursor=here)
        refuse_elsewhere(self._path, table.position, schema, expected)
        clock = max(table.position.clock, folded.clock or 0)
        after = replace(table.position, schema=schema, cursor=cursor, clock=clock)
        version, upserted = self._write(self._form.stored(schema), table, folded, after, given)
        written = self._make_durable(version)
        return Applied(
            committed=True,
            cursor=cursor,
            upserted=upserted,
            deleted=folded.deletes,
            bytes=written.bytes,
            version=version,
        )

    def put_files(self, schema: TableSchema, folded: FoldedFiles, expected: Cursor) -> Applied:
        """`MendedTable.put`, of rows that a task has put into files."""
        table = self._opened()
        refuse_elsewhere(self._path, table.position, schema, expected)
        after = replace(table.position, clock=max(table.position.clock, folded.clock or 0))
        return self._put(schema, table, folded, after)

    def late(self) -> str | None:
        """The name of the dead letters that came in last, where their own changes did."""
        return self._opened().position.late

    def add_files(
        self, schema: TableSchema, folded: FoldedFiles, expected: Cursor, *, after: str | None, late: str
    ) -> Applied:
        """`MendedTable.add`, of rows that a task has put into files."""
        table = self._opened()
        refuse_elsewhere(self._path, table.position, schema, expected)
        refuse_other_letters(self._path, table.position, after)
        return self._put(schema, table, folded, replace(table.position, late=late))

    def _put(self, schema: TableSchema, table: Table, folded: FoldedFiles, after: Position) -> Applied:
        version, upserted = self._write(self._form.stored(schema), table, folded, after, None)
        written = self._make_durable(version)
        return Applied(committed=True, cursor=after.cursor, upserted=upserted, bytes=written.bytes, version=version)

    def _given(self, schema: TableSchema, reread: Reread) -> Given:
        """Rows read again by whoever calls; a pipeline has tasks read them."""

        def rows(keys: DataFrame) -> DataFrame:
            found = reread(pa.table(keys.toArrow()))
            path = self._scratch() / f"given-{uuid.uuid4().hex}.parquet"
            pq.write_table(found, path, store_schema=False)
            return self.session.read.schema(self.source_fields(schema)).parquet(str(path))

        return rows

    def source_fields(self, schema: TableSchema) -> StructType:
        """The source's columns, by their names in the lake."""
        fields = self._form.stored(schema).row_fields()
        return spark_schema(pa.schema(fields[: len(schema.columns)]))

    def _write(
        self, schema: TableSchema, table: Table, folded: FoldedFiles, position: Position, given: Given | None
    ) -> tuple[int, int]:
        """One commit, in the cheapest way that is exact; its version, and how many rows came."""
        self._bound_broadcasts(folded.upserts + folded.deletes)
        rows = self._folded(schema, folded)
        if self._versions:
            rows = timed(schema, rows, table.position.clock)
        if folded.truncated:
            left_out = 0
            if folded.absent:  # of the table's own rows none stays to take values from
                source = self._merge_source(schema, table, rows, folded.absent, given)
                rows, left_out = source.rows, source.left_out
            came = as_table(schema, rows)
            version = self._commit(table, position, lambda: self._save(table, came, "overwrite"))
            return version, folded.upserts - left_out
        if schema.key and not folded.empty and not (self._versions and folded.only_adds):
            source = self._merge_source(schema, table, rows, folded.absent, None if self._versions else given)
            ended = ended_after(folded.ended, table.position.clock) if self._versions else folded.ended
            source = replace(source, ended=ended, also=in_partitions(schema, folded.partitions))
            version = self._commit(table, position, lambda: self._merge(schema, table, source))
            return version, folded.upserts - source.left_out
        if folded.deletes:
            left = without(schema, self._read(table), rows, self._keep).unionByName(as_table(schema, rows))
            return self._commit(table, position, lambda: self._save(table, left, "overwrite")), folded.upserts
        came = as_table(schema, rows)
        return self._commit(table, position, lambda: self._save(table, came, "append")), folded.upserts

    def find_missing(self, schema: TableSchema, asked: Sequence[Path], into: Path) -> bool:
        """Put keys, the columns `k0…kN` of files, of which the table has no row into other files; whether there are
        some."""
        stored = self._form.stored(schema)
        own = [stored.columns[i] for i in key_ordinals(stored)]
        fields = spark_schema(pa.schema([(f"k{i}", column.type) for i, column in enumerate(own)]))
        keys = self.session.read.schema(fields).parquet(*map(str, asked))
        rows = self._read(self._opened())
        rows = rows.where(named(CURRENT)) if self._versions else rows
        there = rows.select(*(named(column.name).alias(f"t{i}") for i, column in enumerate(own)))
        same = [f.col(f"k{i}") == f.col(f"t{i}") for i in range(len(own))]
        # The few keys are handed around, and not the table.
        held = there.join(f.broadcast(keys), same, "left_semi")
        keys.join(held, same, "left_anti").write.parquet(str(into))
        return not self.session.read.schema(fields).parquet(str(into)).isEmpty()

    def _bound_broadcasts(self, rows: int) -> None:
        self.session.conf.set(_BROADCAST, self._broadcast if rows <= BROADCAST_ROWS_MAX else "-1")

    def _folded(self, schema: TableSchema, folded: FoldedFiles) -> DataFrame:
        fields = file_fields(schema)
        if not folded.files:
            return no_rows(self.session, fields)
        return self.session.read.schema(spark_schema(fields)).parquet(*map(str, folded.files))

    def _merge_source(
        self, schema: TableSchema, table: Table, rows: DataFrame, absent: frozenset[int], given: Given | None
    ) -> _Source:
        """The rows as a merge takes them. A row whose base is missing is an error, or is read again."""
        if not absent:
            return _Source(rows=rows.select(*own_columns(schema), "op"))
        keys, there = key_ordinals(schema), self._read(table)
        held = (there.where(named(CURRENT)) if self._versions else there).select(
            *(named(schema.columns[i].name).alias(f"b{i}") for i in sorted({*keys, *absent})),
            f.lit(True).alias("there"),
        )
        bases = [f.col(f"base.c{i}") == f.col(f"b{i}") for i in keys]
        joined = self._keep(rows.join(held, bases, "left"))
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
            mine = [*keys, *range(len(schema.columns) - len(self._form.added), len(schema.columns))]
            asked = [f.col(f"c{i}").alias(f"w{i}") for i in mine]
            wanted = self._keep(joined.where(again).select(*asked, f.col("base").isNull().alias("baseless")))
            fresh, left_out = self._read_again(schema, wanted, absent, given)
            kept = joined.where(~again).select(*columns, "op", *flags)
            return _Source(rows=kept.unionByName(fresh), kept=absent, left_out=left_out)
        if lost := joined.where(partial & missing).count():
            raise BaseRowMissing(
                "a partial change arrived for a row that the table does not hold",
                table=schema.table,
                rows=lost,
                hint=LOAD_ANEW_HINT,
            )
        return _Source(rows=joined.select(*columns, "op", *flags), kept=absent)

    def _read_again(
        self, schema: TableSchema, wanted: DataFrame, absent: frozenset[int], given: Given
    ) -> tuple[DataFrame, int]:
        """The rows with these keys as they are at the source now, and how many of them are gone there. What the form
        adds is of the change that asks for the row. What stands under the key of one that has no base and is gone goes
        too, as `lookup.Baseless` has it."""
        theirs = len(schema.columns) - len(self._form.added)
        own = [
            (named(column.name) if i < theirs else f.col(f"w{i}")).alias(f"c{i}")
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
        same = [named(name) == f.col(f"w{i}") for i, name in names.items()]
        found = answers.join(wanted.drop("baseless"), same).select(*own, op, *none)
        left = [
            (f.col(f"w{i}") if i in names or i >= theirs else f.lit(None).cast(kind.dataType)).alias(f"c{i}")
            for i, kind in enumerate(spark_schema(pa.schema(schema.row_fields())))
        ]
        # Whatever stands in the table of a row that is to be found as deleted is marked.
        mark = f.col(f"w{schema.names.index(self._form.mark)}") if self._form.soft_delete else f.lit(False)
        instead = f.when(mark, MARK).when(f.col("baseless"), DELETE).cast("tinyint")
        lost = wanted.join(answers, same, "left_anti").where(mark | f.col("baseless"))
        found = self._keep(found.unionByName(lost.select(*left, instead.alias("op"), *none)))
        return found, asked - found.where(f.col("op") == UPSERT).count()

    def _merge(self, schema: TableSchema, table: Table, source: _Source) -> None:
        view = f"source_{uuid.uuid4().hex}"
        merge = merge_for(
            self._form, schema, self._target(table), view, source.kept, source.emptied, source.ended, source.also
        )
        self._guarded(table, source.rows).createOrReplaceTempView(view)
        try:
            self.session.sql(merge)
        finally:
            self.session.catalog.dropTempView(view)

    def refresh(
        self,
        schema: TableSchema,
        files: Sequence[StagedFile],
        expected: Cursor,
        cursor: Cursor,
        *,
        keys: Sequence[StagedFile] | None = None,
        origin: Origin | None = None,
    ) -> Applied:
        table, appends = self._opened(), self._form.mode is TableMode.APPEND
        if not schema.key and not appends:
            raise Unsupported("only a table with a key can be refreshed", table=schema.table, hint=REPLACE_HINT)
        here = table.position.cursor
        if (here != expected and here.covers(cursor)) or (appends and here == cursor):
            return Applied(committed=False, cursor=here)
        refuse_elsewhere(self._path, table.position, schema, expected)
        origin = origin or Origin(seq=cursor.seq, position=str(cursor.position), read_at=time.time_ns() // 1000)
        clock = max(table.position.clock, origin.read_at)
        after = replace(table.position, schema=schema, cursor=cursor, clock=clock)
        if appends:
            came = self._staged(table, self._form.stored(schema).columns, files)
            self._make_durable(self._commit(table, after, lambda: self._save(table, came, "append")))
            return Applied(committed=True, cursor=cursor, upserted=sum(file.rows for file in files))
        self._bound_broadcasts(sum(file.rows for file in files))
        with self.scratch():
            changes = self._difference(schema, table, files, keys, origin)
            return self._make_equal(self._form.stored(schema), table, after, changes)

    def _make_equal(self, schema: TableSchema, table: Table, after: Position, changes: DataFrame) -> Applied:
        found = self._keep(changes)
        counts = {(row["op"] == UPSERT, row[BACK]): row["count"] for row in found.groupBy("op", BACK).count().collect()}
        if counts:
            emptied = tuple(column.name for column in self._kept(table, schema))
            source = _Source(rows=found, emptied=emptied)
            version = self._commit(table, after, lambda: self._merge(schema, table, source))
        elif after.cursor != table.position.cursor:
            nothing = no_rows(self.session, pa.schema(schema.row_fields()))
            version = self._commit(table, after, lambda: self._save(table, nothing, "append"))
        else:
            return Applied(committed=False, cursor=after.cursor)
        self._make_durable(version)
        return Applied(
            committed=True,
            cursor=after.cursor,
            upserted=counts.get((True, False), 0),
            deleted=counts.get((False, False), 0),
        )

    def _difference(
        self,
        schema: TableSchema,
        table: Table,
        files: Sequence[StagedFile],
        keys: Sequence[StagedFile] | None,
        origin: Origin,
    ) -> DataFrame:
        stored, counts = self._form.stored(schema), len(compared(self._form, schema)[0].columns)
        key = [stored.columns[i] for i in key_ordinals(stored)]
        staged = self._staged(table, stored.columns, files)
        listed = None if keys is None else self._staged(table, key, keys)
        if self._form.keeps:
            listed = self._read(table)
        past = keeping(self._form, origin, table.position.clock)
        return difference(stored, counts, self._read(table), staged, listed, past)

    def _staged(self, table: Table, columns: Sequence[Column], files: Sequence[StagedFile]) -> DataFrame:
        return staged_rows(self.session, columns, self._staging(table), files, whole=self.whole_files)

    def _keep(self, rows: DataFrame) -> DataFrame:
        """Rows that are asked for more than once, in files: a merge refuses what Spark has cached."""
        path = str(self._scratch() / f"kept-{uuid.uuid4().hex}")
        rows.write.parquet(path)
        return self.session.read.schema(rows.schema).parquet(path)

    @contextmanager
    def _told(self) -> Iterator[None]:
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
        return overtaken(self._path)

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
            with self._told():
                yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
