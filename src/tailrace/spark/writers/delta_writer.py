"""Write Delta tables with Spark's own connector. The merge is distributed, and no row passes the driver.

A commit is a compare-and-swap here too, which the connector does not offer. The connector opens its transaction at the
newest version there is, which may be newer than the version that was read. It may also let others' commits pass before
its own. So every write includes a *guard*: a task that fails if the version that was read is no longer the newest. The
guard runs after the connector has opened its transaction, which must not try again (`maxCommitAttempts`). From then on
the number of the next commit decides.

The position is in the commit, where delta-rs finds it too. Commits that only add files staged by tasks are made by
delta-rs, because they need no Spark.
"""

from __future__ import annotations

import os.path
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from tailrace import failpoints
from tailrace.model.schema import Column, TableSchema
from tailrace.spark.writers.merge_sql import table_at
from tailrace.spark.writers.merge_table import MergedTable
from tailrace.spark.writers.staged_rows import no_rows, recast_rows, refuse_misfit_rows
from tailrace.tables.compaction_plan import UpkeepPlan, UpkeepResult, rows_per_file
from tailrace.tables.delta.commit_log import CommitFiles, CommitRecord, app_id, has_token, make_durable
from tailrace.tables.delta.features import NO_FEATURES, Features, features_of
from tailrace.tables.delta.table import DeltaRsTable, OpenedDelta
from tailrace.tables.evolve.recast_columns import is_metadata_only, only_adds, plan_columns, retained_columns
from tailrace.tables.evolve.schema_plan import Recast
from tailrace.tables.fold.by_mode import recast_for_spec
from tailrace.tables.limits import refuse_names, refuse_spark_names
from tailrace.tables.port import AppliedPosition, WriteResult
from tailrace.tables.spec import PLAIN_MIRROR, LoadOrigin, TableMode, TableSpec
from tailrace.tables.staging import FILE_BYTES, StagedFile
from tailrace.tables.table_errors import not_loaded, wrong_position
from tailrace.tables.table_folder import SCRATCH, find_folder, unreadable

_ROWS_PER_FILE = "spark.sql.files.maxRecordsPerFile"


class SparkDeltaTable(MergedTable[OpenedDelta]):
    """A Delta table of one change log, written by Spark.

    It keeps the promises of `LakeTable`, except that it stays in the process of its session.
    """

    connector = "Spark's Delta connector"
    whole_files = False
    _inspector: DeltaRsTable

    def __init__(
        self,
        spark: SparkSession,
        path: Path,
        log_id: str,
        spec: TableSpec = PLAIN_MIRROR,
        features: Features = NO_FEATURES,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        super().__init__(spark, path, spec, DeltaRsTable(path, log_id, spec, features, file_bytes))
        self._log_id, self._file_bytes = log_id, file_bytes

    def files(self) -> list[str]:
        """Return the names of the newest version's data files."""
        return self._inspector.files()

    def load(
        self,
        schema: TableSchema,
        batches: Iterable[pa.RecordBatch],
        position: AppliedPosition,
        *,
        origin: LoadOrigin | None = None,
    ) -> int:
        return self._inspector.load(schema, batches, position, origin=origin)

    def commit_load(
        self,
        schema: TableSchema,
        files: Sequence[StagedFile],
        position: AppliedPosition,
        *,
        origin: LoadOrigin | None = None,
        kept: Sequence[Column] = (),
    ) -> int:
        return self._inspector.commit_load(schema, files, position, origin=origin, kept=kept)

    def compact(self, upkeep: UpkeepPlan, expected: AppliedPosition) -> UpkeepResult:
        """Compact with delta-rs, whose commit is a compare-and-swap and states the position.

        The connector's is neither. Files are streamed, and a pipeline runs this in a task.
        """
        return self._inspector.compact(upkeep, expected)

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
        if self._spec.mode is TableMode.APPEND and not features_of(self._opened().table).any:
            # The files become the table's own, and no row is rewritten.
            return self._inspector.merge_load(schema, files, expected, position, keys=keys, origin=origin)
        return super().merge_load(schema, files, expected, position, keys=keys, origin=origin)

    def evolve(self, recast: Recast, expected: AppliedPosition) -> WriteResult:
        table = self._inspector.opened()
        applied, old = table.commit_record.applied_position, table.commit_record.schema
        if applied == expected and old.same_with_facts(recast.schema):
            return WriteResult(committed=False, applied_position=applied)
        if applied != expected:
            raise wrong_position(self._path, applied, expected)
        own = recast_for_spec(self._spec, recast)
        planned = plan_columns(table.table, own)
        schema = replace(own.schema, columns=planned.columns, facts=None)
        if features_of(table.table).column_mapping:
            refuse_names(schema)
            if is_metadata_only(table.table, planned):
                self._inspector.set_columns(table, schema, planned, recast.schema)
                return WriteResult(committed=True, applied_position=applied)
        else:
            refuse_spark_names(schema)
        # A commit without rows. The connector leaves it to a person.
        self._inspector.add_features(table.folder, table.table, schema)
        table = self._inspector.opened()
        after = replace(table.commit_record, schema=recast.schema)
        if only_adds(table.table, planned):
            no_rows_frame = no_rows(self.session, planned.fields)
            version = self._commit(table, after, lambda: self._save(table, no_rows_frame, "append", mergeSchema="true"))
        else:
            with self.scratch() as folder:
                rows = recast_rows(self._read(table), planned, folder)
                refuse_misfit_rows(schema, planned.others & {*self._spec.partition_by}, rows)
                version = self._commit(
                    table, after, lambda: self._save(table, rows, "overwrite", overwriteSchema="true")
                )
        written = self._make_durable(version)
        return WriteResult(committed=True, applied_position=applied, bytes=written.bytes, version=version)

    # Delta's part of a write.

    def _sql_name(self, table: OpenedDelta) -> str:
        return table_at(table.folder)

    def _retained_columns(self, table: OpenedDelta, schema: TableSchema) -> Sequence[Column]:
        return retained_columns(table.table, schema)

    def _staging(self, table: OpenedDelta) -> Path:
        return table.folder

    def _was_overtaken(self, message: str) -> bool:
        return was_overtaken(message)

    # Commits.

    def _save(self, table: OpenedDelta, rows: DataFrame, mode: str, **options: str) -> None:
        rows = self._guarded(table, rows)
        writer = rows.write.format("delta").mode(mode).options(**options)
        if "overwriteSchema" in options:  # it drops partitions that are not named again
            writer = writer.partitionBy(*self._spec.partition_by)
        writer.save(str(table.folder))

    def _read(self, table: OpenedDelta) -> DataFrame:
        return self.session.read.format("delta").option("versionAsOf", table.table.version()).load(str(table.folder))

    def _guarded(self, table: OpenedDelta, rows: DataFrame) -> DataFrame:
        """Add a task to the rows that fails after a foreign commit. It compares with the version that was read."""
        return rows.union(version_guard(self.session, rows.schema, table.folder, table.table.version()))

    def _commit(self, table: OpenedDelta, record: CommitRecord, write: Callable[[], None]) -> int:
        """Run the one statement that commits, with the position; return the version that it made."""
        failpoints.hit("table.before_commit")
        conf, before = self.session.conf, table.table.version()
        self._unset()
        # The connector has no target size of files, but a number of rows, which the existing files give.
        conf.set(_ROWS_PER_FILE, str(rows_per_file(table.table, self._file_bytes)))
        token = uuid.uuid4().hex
        conf.set("spark.databricks.delta.commitInfo.userMetadata", record.user_metadata(token))
        # The connector skips a write that it takes for a repetition. So the number is set only where it rises.
        if record.applied_position.seq > (table.table.transaction_version(app_id(self._log_id)) or 0):
            conf.set("spark.databricks.delta.write.txnAppId", app_id(self._log_id))
            conf.set("spark.databricks.delta.write.txnVersion", str(record.applied_position.seq))
        with self._spark_errors():
            write()
        # The connector reports nothing if it takes the write for one that was done already.
        version = self._inspector.version()
        if version != before + 1 or not has_token(table.folder, version, token):
            raise self._overtaken()
        failpoints.hit("table.after_commit")
        return version

    def _unset(self) -> None:
        for name in ("commitInfo.userMetadata", "write.txnAppId", "write.txnVersion"):
            self.session.conf.unset(f"spark.databricks.delta.{name}")

    def _make_durable(self, version: int) -> CommitFiles:
        try:
            return make_durable(self._folder(), version)
        except OSError as exc:
            raise unreadable(self._path, exc) from exc

    def _folder(self) -> Path:
        folder = find_folder(self._path)
        if folder is None:
            raise not_loaded(self._path)
        return folder

    def _scratch(self) -> Path:
        return self._folder() / SCRATCH


_CODE = "tailrace-version-moved"
_OVERTAKEN = re.compile(rf"{_CODE}|Concurrent\w*Exception|DELTA_CONCURRENT|commit attempts|DELTA_MAX_COMMIT")
"""Matches Spark's message for our guard, and the connector's own for a version number that is taken."""


def version_guard(session: SparkSession, fields: StructType, folder: Path, version: int) -> DataFrame:
    """Return a frame without rows that fails if there is a newer version.

    It has these fields, to be written with other rows.
    """
    check = f.udf(_check(folder, version), "boolean", useArrow=False).asNondeterministic()
    nulls = [f.lit(None).cast(field.dataType).alias(field.name) for field in fields]
    return session.range(1, numPartitions=1).where(check("id")).select(*nulls)


def was_overtaken(message: str) -> bool:
    """Return whether a statement failed because someone else committed."""
    return _OVERTAKEN.search(message.partition("\n\tat ")[0]) is not None


def _check(folder: Path, version: int) -> Callable[[int], bool]:
    following = str(folder / "_delta_log" / f"{version + 1:020d}.json")

    def check(_: int) -> bool:
        if os.path.exists(following):
            raise RuntimeError(_CODE)
        return False

    return check
