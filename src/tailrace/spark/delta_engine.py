"""Delta tables written by Spark's own connector: the merge is distributed, and no row passes the driver.

A commit is a compare-and-swap here too, which the connector does not offer by itself: it may start from a newer version
than the one that was looked at, and may let others' commits pass before its own. So what is written always comes with a
*guard*, a task that fails if the version that was looked at is no longer the newest. It runs after the connector has
opened its transaction, and that may not try again (`maxCommitAttempts`). The position stands in the commit, where
delta-rs finds it too; commits that only add files which tasks have staged are made by delta-rs, for they need no Spark.
"""

from __future__ import annotations

import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from tailrace import failpoints
from tailrace.errors import (
    LOAD_ANEW_HINT,
    BaseRowMissing,
    ForeignWrite,
    TableFailed,
    TableUnusable,
    Unsupported,
)
from tailrace.model.schema import Column, TableId, TableSchema
from tailrace.spark.connector import TABLE_SETTINGS
from tailrace.spark.copies import without
from tailrace.spark.folding import FoldedFiles, file_fields, write_folded
from tailrace.spark.forming import BACK, difference, merge_for, timed
from tailrace.spark.frames import all_of, as_table, named, own_columns, spark_schema
from tailrace.spark.guard import guard, was_overtaken
from tailrace.tables.base import Applied, Cursor, Reread
from tailrace.tables.delta import ONE_APPLIER, DeltaRsTable, Opened
from tailrace.tables.deltalog import REPLACE_HINT, Position, Written, app_id, made_by, make_durable
from tailrace.tables.evolving import Recast
from tailrace.tables.features import PLAIN_FILES, Features, features_of
from tailrace.tables.fold import MARK, UPSERT, Ended, Folded, key_ordinals
from tailrace.tables.folder import find_folder, unreadable
from tailrace.tables.formed import compared, keeping, recast_into
from tailrace.tables.forms import CURRENT, DELETED, PLAIN, Form, Origin, TableMode
from tailrace.tables.history import ended_after
from tailrace.tables.limits import refuse_names, refuse_spark_names
from tailrace.tables.recast import Laid, kept_columns, lay_out, only_adds, only_names
from tailrace.tables.staging import StagedFile
from tailrace.tables.upkeep import Tended, Upkeep

SCRATCH = "_tailrace"
"""Below a table's folder; readers and Delta's own upkeep pass over names that begin so."""

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


Given = Callable[[DataFrame], DataFrame]
"""Rows as the source has them now, for the keys in a frame."""


class SparkDeltaTable:
    """A table of one change log; keeps the promises of `LakeTable`, but lives where its session does."""

    def __init__(
        self, spark: SparkSession, path: Path, log_id: str, form: Form = PLAIN, features: Features = PLAIN_FILES
    ) -> None:
        # The position of a commit is a setting of the session, so each table has its own.
        self.session = spark.newSession()
        for name, value in TABLE_SETTINGS.items():
            self.session.conf.set(name, value)
        self._path, self._log_id, self._form = path.absolute(), log_id, form
        self._versions = form.mode is TableMode.HISTORY
        self._plain = DeltaRsTable(path, log_id, form, features)

    def cursor(self) -> Cursor | None:
        return self._plain.cursor()

    def shape(self) -> TableSchema | None:
        return self._plain.shape()

    def rows(self) -> int:
        return self._plain.rows()

    def version(self) -> int | None:
        return self._plain.version()

    def files(self) -> list[str]:
        """The data files of the newest version, by name."""
        return self._plain.files()

    def refuse_foreign(self, table: TableId) -> None:
        self._plain.refuse_foreign(table)

    def load(
        self, schema: TableSchema, batches: Iterable[pa.RecordBatch], cursor: Cursor, *, origin: Origin | None = None
    ) -> int:
        return self._plain.load(schema, batches, cursor, origin=origin)

    def land(
        self, schema: TableSchema, files: Sequence[StagedFile], cursor: Cursor, *, origin: Origin | None = None,
        kept: Sequence[Column] = (),
    ) -> int:  # fmt: skip
        return self._plain.land(schema, files, cursor, origin=origin, kept=kept)

    def tend(self, upkeep: Upkeep, expected: Cursor) -> Tended:
        """By delta-rs: its joins are a compare-and-swap and state the position; the connector's are neither. Files are
        streamed, and a pipeline has a task do it."""
        return self._plain.tend(upkeep, expected)

    # Applying.

    def apply(
        self, schema: TableSchema, folded: Folded, expected: Cursor, cursor: Cursor, *, touch: bool = False,
        reread: Reread | None = None,
    ) -> Applied:  # fmt: skip
        given = None if reread is None else self._given(schema, reread)
        with self.scratch() as folder:
            files = write_folded(folder / "folded.parquet", self._form.stored(schema), folded)
            return self.apply_files(schema, files, expected, cursor, touch=touch, given=given)

    def apply_files(
        self, schema: TableSchema, folded: FoldedFiles, expected: Cursor, cursor: Cursor, *, touch: bool = False,
        given: Given | None = None,
    ) -> Applied:  # fmt: skip
        """`apply`, of rows that tasks have folded into files."""
        table = self._plain.opened()
        here = table.position.cursor
        if here.seq >= cursor.seq or (folded.empty and not touch):
            return Applied(committed=False, cursor=here)
        self._plain.refuse_elsewhere(table.position, schema, expected)
        clock = max(table.position.clock, folded.clock or 0)
        after = replace(table.position, schema=schema, cursor=cursor, clock=clock)
        version, upserted = self._write(self._form.stored(schema), table, folded, after, given)
        written = self._make_durable(version)
        return Applied(
            committed=True, cursor=cursor, upserted=upserted, deleted=folded.deletes, bytes=written.bytes,
            version=version,
        )  # fmt: skip

    def put_files(self, schema: TableSchema, folded: FoldedFiles, expected: Cursor) -> Applied:
        """`MendedTable.put`, of rows that a task has put into files."""
        table = self._plain.opened()
        self._plain.refuse_elsewhere(table.position, schema, expected)
        version, upserted = self._write(self._form.stored(schema), table, folded, table.position, None)
        written = self._make_durable(version)
        return Applied(committed=True, cursor=expected, upserted=upserted, bytes=written.bytes, version=version)

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
        self, schema: TableSchema, table: Opened, folded: FoldedFiles, position: Position, given: Given | None
    ) -> tuple[int, int]:  # fmt: skip
        """One commit, in the cheapest way that is exact; its version, and how many rows came."""
        rows = self._folded(schema, folded)
        if self._versions:
            rows = timed(schema, rows, table.position.clock)
        if folded.truncated:
            came = as_table(schema, rows)
            return self._commit(table, position, lambda: self._save(table, came, "overwrite")), folded.upserts
        if schema.key and not folded.empty and not (self._versions and folded.only_adds):
            source = self._merge_source(schema, table, rows, folded.absent, None if self._versions else given)
            ended = ended_after(folded.ended, table.position.clock) if self._versions else folded.ended
            source = replace(source, ended=ended)
            version = self._commit(table, position, lambda: self._merge(schema, table, source))
            return version, folded.upserts - source.left_out
        if folded.deletes:
            left = without(schema, self._read(table), rows, self._keep).unionByName(as_table(schema, rows))
            return self._commit(table, position, lambda: self._save(table, left, "overwrite")), folded.upserts
        came = as_table(schema, rows)
        return self._commit(table, position, lambda: self._save(table, came, "append")), folded.upserts

    def _folded(self, schema: TableSchema, folded: FoldedFiles) -> DataFrame:
        fields = file_fields(schema)
        if not folded.files:
            return self._nothing(fields)
        return self.session.read.schema(spark_schema(fields)).parquet(*map(str, folded.files))

    def _merge_source(
        self, schema: TableSchema, table: Opened, rows: DataFrame, absent: frozenset[int], given: Given | None
    ) -> _Source:  # fmt: skip
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
            if i in absent else f.col(f"c{i}")
            for i in range(len(schema.columns))
        ]  # fmt: skip
        flags = [f.coalesce(takes[i] & still, f.lit(False)).alias(f"k{i}") for i in sorted(absent)]
        if given is not None:
            # Of a row that moved nothing in the table can be trusted, as `lookup.with_bases` says.
            again = partial & (f.col("moved") | missing)
            mine = [*keys, *range(len(schema.columns) - len(self._form.added), len(schema.columns))]
            wanted = self._keep(joined.where(again).select(*(f.col(f"c{i}").alias(f"w{i}") for i in mine)))
            fresh, left_out = self._read_again(schema, wanted, absent, given)
            kept = joined.where(~again).select(*columns, "op", *flags)
            return _Source(rows=kept.unionByName(fresh), kept=absent, left_out=left_out)
        if lost := joined.where(partial & missing).count():
            raise BaseRowMissing(
                "a partial change arrived for a row that the table does not hold", table=schema.table, rows=lost,
                hint=LOAD_ANEW_HINT,
            )  # fmt: skip
        return _Source(rows=joined.select(*columns, "op", *flags), kept=absent)

    def _read_again(
        self, schema: TableSchema, wanted: DataFrame, absent: frozenset[int], given: Given
    ) -> tuple[DataFrame, int]:
        """The rows with these keys as they are at the source now, and how many of them are gone there. What the form
        adds is of the change that asks for the row."""
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
            return self._nothing(pa.schema(fields)).select(*own, op, *none), 0
        answers = given(wanted.select(*(f.col(f"w{i}").alias(name) for i, name in names.items())))
        same = [named(name) == f.col(f"w{i}") for i, name in names.items()]
        found = answers.join(wanted, same).select(*own, op, *none)
        if self._form.soft_delete:  # whatever of such a row stands in the table is marked
            lost = wanted.join(answers, same, "left_anti").where(f"w{schema.names.index(DELETED)}")
            left = [
                (f.col(f"w{i}") if i in names or i >= theirs else f.lit(None).cast(kind.dataType)).alias(f"c{i}")
                for i, kind in enumerate(spark_schema(pa.schema(schema.row_fields())))
            ]
            found = found.unionByName(lost.select(*left, f.lit(MARK).cast("tinyint").alias("op"), *none))
        found = self._keep(found)
        return found, asked - found.count()

    def _merge(self, schema: TableSchema, table: Opened, source: _Source) -> None:
        view = f"source_{uuid.uuid4().hex}"
        self._guarded(table, source.rows).createOrReplaceTempView(view)
        try:
            self.session.sql(
                merge_for(self._form, schema, table.folder, view, source.kept, source.emptied, source.ended)
            )
        finally:
            self.session.catalog.dropTempView(view)

    def refresh(
        self, schema: TableSchema, files: Sequence[StagedFile], expected: Cursor, cursor: Cursor, *,
        keys: Sequence[StagedFile] | None = None, origin: Origin | None = None,
    ) -> Applied:  # fmt: skip
        table, appends = self._plain.opened(), self._form.mode is TableMode.APPEND
        if appends and not features_of(table.table).any:  # the files become the table's own: no row is touched
            return self._plain.refresh(schema, files, expected, cursor, keys=keys, origin=origin)
        if not schema.key and not appends:
            raise Unsupported("only a table with a key can be refreshed", table=schema.table, hint=REPLACE_HINT)
        here = table.position.cursor
        if (here != expected and here.seq >= cursor.seq) or (appends and here == cursor):
            return Applied(committed=False, cursor=here)
        self._plain.refuse_elsewhere(table.position, schema, expected)
        origin = origin or Origin(seq=cursor.seq, position=str(cursor.position), read_at=time.time_ns() // 1000)
        clock = max(table.position.clock, origin.read_at)
        after = replace(table.position, schema=schema, cursor=cursor, clock=clock)
        if appends:
            came = self._staged(pa.schema(self._form.stored(schema).row_fields()), table, files)
            self._make_durable(self._commit(table, after, lambda: self._save(table, came, "append")))
            return Applied(committed=True, cursor=cursor, upserted=sum(file.rows for file in files))
        with self.scratch():
            changes = self._difference(schema, table, files, keys, origin)
            return self._make_equal(self._form.stored(schema), table, after, changes)

    def _make_equal(self, schema: TableSchema, table: Opened, after: Position, changes: DataFrame) -> Applied:
        found = self._keep(changes)
        counts = {(row["op"] == UPSERT, row[BACK]): row["count"] for row in found.groupBy("op", BACK).count().collect()}
        if counts:
            emptied = tuple(column.name for column in kept_columns(table.table, schema))
            source = _Source(rows=found, emptied=emptied)
            version = self._commit(table, after, lambda: self._merge(schema, table, source))
        elif after.cursor != table.position.cursor:
            nothing = self._nothing(pa.schema(schema.row_fields()))
            version = self._commit(table, after, lambda: self._save(table, nothing, "append"))
        else:
            return Applied(committed=False, cursor=after.cursor)
        self._make_durable(version)
        return Applied(
            committed=True, cursor=after.cursor, upserted=counts.get((True, False), 0),
            deleted=counts.get((False, False), 0),
        )  # fmt: skip

    def _difference(
        self, schema: TableSchema, table: Opened, files: Sequence[StagedFile], keys: Sequence[StagedFile] | None,
        origin: Origin,
    ) -> DataFrame:  # fmt: skip
        stored, counts = self._form.stored(schema), len(compared(self._form, schema)[0].columns)
        columns = [stored.columns[i] for i in key_ordinals(stored)]
        fields = pa.schema([(column.name, column.type) for column in columns])
        staged = self._staged(pa.schema(stored.row_fields()), table, files)
        listed = None if keys is None else self._staged(fields, table, keys)
        past = keeping(self._form, origin, table.position.clock)
        return difference(stored, counts, self._read(table), staged, listed, past)

    def _staged(self, fields: pa.Schema, table: Opened, files: Sequence[StagedFile]) -> DataFrame:
        if not files:
            return self._nothing(fields)
        paths = [str(table.folder / file.path) for file in files]
        return self.session.read.schema(spark_schema(fields)).parquet(*paths)

    def evolve(self, recast: Recast, expected: Cursor) -> Applied:
        table = self._plain.opened()
        here, old = table.position.cursor, table.position.schema
        if here == expected and old.same_as(recast.schema):
            return Applied(committed=False, cursor=here)
        if here != expected:
            raise self._plain.elsewhere(here, expected)
        own = recast_into(self._form, recast)
        laid = lay_out(table.table, own)
        shape = replace(own.schema, columns=laid.columns, facts=None)
        if features_of(table.table).column_mapping:
            refuse_names(shape)
            if only_names(table.table, laid):
                self._plain.lay(table, shape, laid, recast.schema)
                return Applied(committed=True, cursor=here)
        else:
            refuse_spark_names(shape)
        # A commit without rows, which the connector makes nobody but a person do.
        self._plain.add_features(table.folder, table.table, shape)
        table = self._plain.opened()
        after = replace(table.position, schema=recast.schema)
        if only_adds(table.table, laid):
            nothing = self._nothing(laid.fields)
            version = self._commit(
                table, after, lambda: self._save(table, nothing, "append", mergeSchema="true")
            )
        else:
            with self.scratch() as folder:
                rows = self._recast(table, laid, folder)
                version = self._commit(
                    table, after, lambda: self._save(table, rows, "overwrite", overwriteSchema="true")
                )
        self._make_durable(version)
        return Applied(committed=True, cursor=here)

    def _recast(self, table: Opened, laid: Laid, scratch: Path) -> DataFrame:
        """All rows of the table as they are to be."""
        fields = spark_schema(laid.fields)
        rows = self._read(table)
        if laid.filled:
            # Through a file, as everything else: a literal of Spark's would be read in this process's time zone.
            filled = {f"f{i}": pa.array([value], value.type) for i, value in enumerate(laid.filled.values())}
            pq.write_table(pa.table(filled), scratch / "filled.parquet", store_schema=False)
            rows = rows.crossJoin(f.broadcast(self.session.read.parquet(str(scratch / "filled.parquet"))))
        places = {name: f"f{i}" for i, name in enumerate(laid.filled)}
        columns = []
        for field, old in zip(fields, laid.taken, strict=True):
            value = f.lit(None) if old is None else named(old)
            if old is None and field.name in places:
                value = f.col(places[field.name])
            columns.append(value.cast(field.dataType).alias(field.name))
        return rows.select(*columns)

    # Commits.

    def _nothing(self, fields: pa.Schema) -> DataFrame:
        return self.session.createDataFrame([], spark_schema(fields))

    def _keep(self, rows: DataFrame) -> DataFrame:
        """Rows that are asked for more than once, in files: a merge refuses what Spark has cached."""
        path = str(self._scratch() / f"kept-{uuid.uuid4().hex}")
        rows.write.parquet(path)
        return self.session.read.schema(rows.schema).parquet(path)

    def _save(self, table: Opened, rows: DataFrame, mode: str, **options: str) -> None:
        rows = self._guarded(table, rows)
        rows.write.format("delta").mode(mode).options(**options).save(str(table.folder))

    def _read(self, table: Opened) -> DataFrame:
        return self.session.read.format("delta").option("versionAsOf", table.table.version()).load(str(table.folder))

    def _guarded(self, table: Opened, rows: DataFrame) -> DataFrame:
        """The rows, and a task beside them that fails if someone has committed since the table was looked at."""
        return rows.union(guard(self.session, rows.schema, table.folder, table.table.version()))

    def _commit(self, table: Opened, position: Position, write: Callable[[], None]) -> int:
        """Run the one statement that commits, with the position; the version that it made."""
        failpoints.hit("table.before_commit")
        conf, before = self.session.conf, table.table.version()
        self._unset()
        token = uuid.uuid4().hex
        conf.set("spark.databricks.delta.commitInfo.userMetadata", position.user_metadata(token))
        # The connector leaves out what it takes for a repetition; where the number stays, the last one stands.
        if table.table.transaction_version(app_id(self._log_id)) != position.cursor.seq:
            conf.set("spark.databricks.delta.write.txnAppId", app_id(self._log_id))
            conf.set("spark.databricks.delta.write.txnVersion", str(position.cursor.seq))
        with self._told():
            write()
        # The connector says nothing where it takes the write for one that was done already, by whomever.
        found = self._plain.version()
        if found != before + 1 or not made_by(table.folder, found, token):
            raise self._overtaken()
        failpoints.hit("table.after_commit")
        return found

    def _unset(self) -> None:
        for name in ("commitInfo.userMetadata", "write.txnAppId", "write.txnVersion"):
            self.session.conf.unset(f"spark.databricks.delta.{name}")

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What Spark says, as one of our errors. Its own text may hold a row, so only its kind is kept."""
        try:
            yield
        except (PySparkException, Py4JError) as exc:
            said = str(exc)
            if was_overtaken(said):
                raise self._overtaken() from exc
            found = re.search(r"\[([A-Z][A-Z0-9_.]{3,})\]", said)
            if _UNREADABLE.search(said):
                raise unreadable(self._path, OSError(found[1] if found else "")) from exc
            raise TableFailed(
                "Spark's Delta connector failed", path=self._path, reason=found[1] if found else type(exc).__name__,
                hint="See the file status/spark.log of the log; if it comes back, report it.",
            ) from exc

    def _overtaken(self) -> ForeignWrite:
        return ForeignWrite("someone else committed to the table at the same time", path=self._path, hint=ONE_APPLIER)

    def _make_durable(self, version: int) -> Written:
        try:
            return make_durable(self._folder(), version)
        except OSError as exc:
            raise unreadable(self._path, exc) from exc

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

    def _folder(self) -> Path:
        folder = find_folder(self._path)
        if folder is None:
            raise TableUnusable("the table has not been loaded", path=self._path, hint="Load it first.")
        return folder

    def _scratch(self) -> Path:
        return self._folder() / SCRATCH
