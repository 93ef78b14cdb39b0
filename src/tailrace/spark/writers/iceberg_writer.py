"""Write Iceberg tables with Spark's connector, merge-on-read. A changed row is marked deleted in its file.

The position is in the summary of each snapshot (`tables/iceberg/commit_log.py`), and a commit is a compare-and-swap
(`spark/writers/iceberg_commits.py`). What Spark writes is staged where no reader sees it. It is published only if
nobody else has committed since the table was read. Commits without rows, and those of files that tasks have written,
need no staging. `tables/iceberg/table.py` reads what can be known of the table without Java.
"""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from tailrace import failpoints
from tailrace.errors import ForeignWrite, TailraceError
from tailrace.model.schema import Column, TableSchema
from tailrace.spark.session.connectors import catalog_settings
from tailrace.spark.writers.iceberg_commits import IcebergCommits, NewFile, Overtaken, link_file
from tailrace.spark.writers.merge_sql import column_named, quoted
from tailrace.spark.writers.merge_table import MergedTable
from tailrace.spark.writers.staged_rows import recast_rows, refuse_misfit_rows
from tailrace.tables.compaction_plan import FILES_MIN, UpkeepPlan, UpkeepResult
from tailrace.tables.delta.commit_log import CommitFiles, CommitRecord
from tailrace.tables.evolve.recast_columns import plan_columns, retained_columns
from tailrace.tables.evolve.schema_plan import Recast
from tailrace.tables.fold.by_mode import recast_for_spec, with_added_columns
from tailrace.tables.iceberg.catalogs import SPARK_CATALOG, Catalog, local_path
from tailrace.tables.iceberg.commit_log import (
    LOADED_SUMMARY_KEY,
    TOKEN,
    IcebergMetadata,
    Properties,
    Summary,
    files_digest,
    summary_and_properties,
)
from tailrace.tables.iceberg.schema_mapping import (
    are_same,
    columns_of,
    fresh_fields,
    recast_fields,
    refuse_iceberg_names,
)
from tailrace.tables.iceberg.table import STAGED, IcebergTable, OpenedIceberg
from tailrace.tables.partitions import values_of
from tailrace.tables.port import AppliedPosition, WriteResult
from tailrace.tables.spec import PLAIN_MIRROR, LoadOrigin, TableSpec
from tailrace.tables.staging import FILE_BYTES, StagedFile, discard, stage
from tailrace.tables.table_errors import wrong_position
from tailrace.tables.table_folder import SCRATCH, unreadable

_SUMMARY_SETTING = "spark.sql.iceberg.snapshot-property."
_STAGING_SETTING = "spark.wap.id"
_OVERTAKEN = re.compile(r"iceberg\.exceptions\.(CommitFailed|AlreadyExists|Validation)Exception")
PROPERTIES = {
    "write.merge.mode": "merge-on-read",
    "write.update.mode": "merge-on-read",
    "write.delete.mode": "merge-on-read",
    # What Spark writes is staged, and published by us.
    "write.wap.enabled": "true",
    # A task writes rows of any partition in any order, so they need not be sorted first.
    "write.spark.fanout.enabled": "true",
    # Each commit writes a new metadata file. Without this setting all of them would stay.
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
}
"""Properties of every table of ours."""
_FILE_BYTES = "write.target-file-size-bytes"
_SHUFFLED = "write.distribution-mode"
"""Setting that sends the rows of one partition to one task, so that they make one file."""


class SparkIcebergTable(MergedTable[OpenedIceberg]):
    """An Iceberg table of one change log, written by Spark.

    It keeps the promises of `LakeTable`, except that it stays in the process of its session.
    """

    connector = "Spark's Iceberg connector"
    whole_files = True
    _inspector: IcebergTable

    def __init__(
        self,
        spark: SparkSession,
        path: Path,
        log_id: str,
        catalog: Catalog,
        spec: TableSpec = PLAIN_MIRROR,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        super().__init__(spark, path, spec, IcebergTable(path, log_id, catalog, spec))
        for name, value in catalog_settings(catalog).items():
            self.session.conf.set(name, value)
        self._log_id, self._version, self._file_bytes = log_id, catalog.version, file_bytes
        self._last = 0, CommitFiles()
        self._commits = IcebergCommits(self.session, catalog, self._path)
        self._name = ".".join(map(quoted, (SPARK_CATALOG, *catalog.levels(self._path))))

    def files(self) -> list[str]:
        """Return the names of the newest version's data files."""
        if self._inspector.metadata() is None:
            return []
        rows = self.session.sql(f"SELECT file_path FROM {self._name}.files WHERE content = 0").collect()
        return [row["file_path"].rpartition("/")[2] for row in rows]

    # Loading.

    def load(
        self,
        schema: TableSchema,
        batches: Iterable[pa.RecordBatch],
        position: AppliedPosition,
        *,
        origin: LoadOrigin | None = None,
    ) -> int:
        stored = self._spec.stored_schema(schema)
        refuse_iceberg_names(stored)
        self._inspector.refuse_foreign(schema.table)
        metadata, name = self._inspector.metadata(), f"load-{uuid.uuid4().hex}"
        origin = origin or LoadOrigin(seq=position.seq, position=str(position.position), read_at=time.time_ns() // 1000)
        files = stage(
            self._path / STAGED,
            name,
            stored,
            with_added_columns(self._spec, schema, batches, origin),
            self._spec.partition_by,
            numbered=True,
            file_bytes=self._file_bytes,
        )
        try:
            return self._commit_load(metadata, schema, files, position, origin)
        finally:
            self._discard(name)

    def commit_load(
        self,
        schema: TableSchema,
        files: Sequence[StagedFile],
        position: AppliedPosition,
        *,
        origin: LoadOrigin | None = None,
        kept: Sequence[Column] = (),
    ) -> int:
        refuse_iceberg_names(self._spec.stored_schema(schema))
        self._inspector.refuse_foreign(schema.table)
        return self._commit_load(self._inspector.metadata(), schema, files, position, origin, kept)

    def _commit_load(
        self,
        metadata: IcebergMetadata | None,
        schema: TableSchema,
        files: Sequence[StagedFile],
        position: AppliedPosition,
        origin: LoadOrigin | None,
        kept: Sequence[Column] = (),
    ) -> int:
        """Replace what the table held when it was read with these files."""
        rows, digest = sum(file.rows for file in files), files_digest(files)
        if metadata is not None and digest and metadata.has_in_summary(LOADED_SUMMARY_KEY, digest):
            return rows
        stored = self._spec.stored_schema(schema)
        clock = origin.read_at if origin else 0
        record = CommitRecord(
            log=self._log_id, applied_position=position, schema=schema, spec=self._spec, latest_time=clock
        )
        self._replace(metadata, (*stored.columns, *kept), files, record, {LOADED_SUMMARY_KEY: digest} if digest else {})
        return rows

    def _replace(
        self,
        metadata: IcebergMetadata | None,
        columns: Sequence[Column],
        files: Sequence[StagedFile],
        record: CommitRecord,
        extra_summary: Summary,
    ) -> int:
        """Make these staged files all that the table holds, with these columns numbered from one."""
        fields, partition_by = fresh_fields(columns), self._spec.partition_by
        try:
            new_files = [
                NewFile(
                    path=link_file(self._path / STAGED / file.path, self._path),
                    partition=values_of(file.values, columns),
                )
                for file in files
            ]
        except OSError as exc:
            raise unreadable(self._path, exc) from exc

        def commit(summary: Summary, properties: Properties) -> int:
            own = {_FILE_BYTES: str(self._file_bytes), _SHUFFLED: "hash" if partition_by else "none"}
            own_summary, own_properties = {**summary, **extra_summary}, {**PROPERTIES, **own, **properties}
            if metadata is None:
                return self._commits.create(
                    fields,
                    partition_by,
                    new_files,
                    {**own_properties, "format-version": str(self._version)},
                    own_summary,
                )
            return self._commits.replace(metadata, fields, partition_by, new_files, own_properties, own_summary)

        try:
            return self._commit_with_position(record, commit)
        except ForeignWrite:  # none of these files is in the table
            for new in new_files:
                new.path.unlink(missing_ok=True)
            raise

    def _discard(self, name: str) -> None:
        with contextlib.suppress(TailraceError):
            discard(self._path / STAGED, name)

    # Schema and upkeep.

    def evolve(self, recast: Recast, expected: AppliedPosition) -> WriteResult:
        table = self._opened()
        applied, old = table.commit_record.applied_position, table.commit_record.schema
        if applied == expected and old.same_with_facts(recast.schema):
            return WriteResult(committed=False, applied_position=applied)
        if applied != expected:
            raise wrong_position(self._path, applied, expected)
        metadata, own = table.metadata, recast_for_spec(self._spec, recast)
        planned = plan_columns(columns_of(metadata.fields), own)
        schema = replace(own.schema, columns=planned.columns, facts=None)
        refuse_iceberg_names(schema)
        after = replace(table.commit_record, schema=recast.schema)
        partition_by, fields = self._spec.partition_by, recast_fields(metadata.fields, planned, metadata.last_number)
        # One entry in the table's metadata, and no file is rewritten. But where the table's partitions change, all rows
        # are moved into theirs.
        if fields is not None and are_same(metadata.fields, fields, partition_by):
            self._commit_with_position(
                after, lambda summary, properties: self._commits.commit_position(metadata, properties, summary, fields)
            )
            return WriteResult(committed=True, applied_position=applied)
        with self.scratch() as folder:
            rows, name = recast_rows(self._read(table), planned, folder), f"recast-{uuid.uuid4().hex}"
            refuse_misfit_rows(schema, planned.others & {*partition_by}, rows)
            rows.write.parquet(str(folder / "recast"))
            try:
                files = self._with_field_ids(schema, folder / "recast", name)
                self._replace(metadata, schema.columns, files, after, {})
            finally:
                self._discard(name)
        return WriteResult(committed=True, applied_position=applied, bytes=sum(file.size for file in files))

    def _with_field_ids(self, schema: TableSchema, folder: Path, name: str) -> list[StagedFile]:
        """Rewrite Spark's Parquet files as files for the table.

        Spark does not number the elements of a list.
        """
        works = [
            _RewriteWork(
                schema=schema,
                partition_by=self._spec.partition_by,
                file=file,
                path=self._path / STAGED,
                name=f"{name}-{number:06d}",
                file_bytes=self._file_bytes,
            )
            for number, file in enumerate(sorted(folder.glob("part-*.parquet")))
        ]
        staged = self.session.sparkContext.parallelize(works, max(len(works), 1)).map(_rewrite_file).collect()
        return [file for files in staged for file in files]

    def compact(self, upkeep: UpkeepPlan, expected: AppliedPosition) -> UpkeepResult:
        table = self._opened()
        if table.commit_record.applied_position != expected:
            raise wrong_position(self._path, table.commit_record.applied_position, expected)
        result = UpkeepResult()
        with self._spark_errors():
            if upkeep.file_bytes is not None:
                compacted, written, size = self._commits.compact_files(upkeep.file_bytes, FILES_MIN)
                result = UpkeepResult(files_compacted=compacted, files_written=written, bytes=size)
        if result.files_compacted:
            # Iceberg's own commit does not state the position, which must outlive the expiry of old snapshots.
            table = self._opened()
            self._commit_with_position(
                table.commit_record,
                lambda summary, properties: self._commits.commit_position(table.metadata, properties, summary),
            )
        if (age := upkeep.remove_after_seconds) is not None:
            with self._spark_errors():
                self._commits.expire_snapshots(int((time.time() - age) * 1000))
        return result

    # For a rebuild: `spark/writers/iceberg_rebuild.py`.

    def metadata(self) -> IcebergMetadata | None:
        """Return the table's metadata as of its newest commit; None if there is no table."""
        return self._inspector.metadata()

    def has_files(self, snapshot: int) -> bool:
        """Return whether all files of a snapshot exist."""
        try:
            rows = self.session.sql(f"SELECT file_path FROM {self._name}.files VERSION AS OF {snapshot}").collect()
        except (PySparkException, Py4JJavaError):  # the files that list them are gone
            return False
        return all(local_path(row["file_path"]).exists() for row in rows)

    def set_position(self, position: AppliedPosition) -> None:
        """Commit another position of the same rows."""
        table = self._opened()
        after = replace(table.commit_record, applied_position=position)
        self._commit_with_position(
            after, lambda summary, properties: self._commits.commit_position(table.metadata, properties, summary)
        )

    @property
    def commits(self) -> IcebergCommits:
        return self._commits

    def run_swap(self, commit: Callable[[], None]) -> None:
        """Run a commit that states the position on its own, with errors mapped to ours."""
        try:
            with self._spark_errors():
                commit()
        except Overtaken as exc:
            raise self._overtaken() from exc

    # Iceberg's part of a write.

    def _sql_name(self, table: OpenedIceberg) -> str:
        return self._name

    def _retained_columns(self, table: OpenedIceberg, schema: TableSchema) -> Sequence[Column]:
        return retained_columns(columns_of(table.metadata.fields), schema)

    def _staging(self, table: OpenedIceberg) -> Path:
        return self._path / STAGED

    def _scratch(self) -> Path:
        return self._path / SCRATCH

    def _was_overtaken(self, message: str) -> bool:
        return _OVERTAKEN.search(message) is not None

    def _read(self, table: OpenedIceberg) -> DataFrame:
        return self.session.sql(f"SELECT * FROM {self._name} VERSION AS OF {table.metadata.snapshot}")

    def _save(self, table: OpenedIceberg, rows: DataFrame, mode: str) -> None:
        stored = self.session.table(self._name).schema
        columns = [
            column_named(field.name)
            if field.name in rows.columns
            else f.lit(None).cast(field.dataType).alias(field.name)
            for field in stored
        ]
        writer = rows.select(*columns).writeTo(self._name)
        if mode == "append":
            writer.append()
        else:
            writer.overwrite(f.lit(True))

    # Commits.

    def _commit(self, table: OpenedIceberg, record: CommitRecord, write: Callable[[], None]) -> int:
        def commit(summary: Summary, properties: Properties) -> int:
            with self._staging_as(summary) as token:
                try:
                    write()
                except (PySparkException, Py4JError) as exc:
                    if self._inspector.version() != table.metadata.snapshot:
                        raise Overtaken from exc  # the other writer has removed our files, too
                    raise
                number = self._commits.staged_snapshot(token)
            self._last = number, self._commits.sync(number)
            failpoints.hit("iceberg.staged")
            self._commits.publish(table.metadata, number, properties)
            return number

        return self._commit_with_position(record, commit)

    def _commit_with_position(self, record: CommitRecord, commit: Callable[[Summary, Properties], int]) -> int:
        """Make the one commit that states the position; return the number of its snapshot."""
        failpoints.hit("table.before_commit")
        summary, properties = summary_and_properties(record, uuid.uuid4().hex)
        try:
            with self._spark_errors():
                number = commit(summary, properties)
        except Overtaken as exc:
            raise self._overtaken() from exc
        except OSError as exc:
            raise unreadable(self._path, exc) from exc
        failpoints.hit("table.after_commit")
        return number

    @contextlib.contextmanager
    def _staging_as(self, summary: Summary) -> Iterator[str]:
        """Stage what is written meanwhile, with this summary."""
        conf, token = self.session.conf, summary[TOKEN]
        settings = {**{_SUMMARY_SETTING + name: value for name, value in summary.items()}, _STAGING_SETTING: token}
        for name, value in settings.items():
            conf.set(name, value)
        try:
            yield token
        finally:
            for name in settings:
                conf.unset(name)

    def _make_durable(self, version: int) -> CommitFiles:
        number, written = self._last
        assert number == version, "only the last commit, which was on disk before it was published"
        return written


@dataclass(frozen=True, kw_only=True)
class _RewriteWork:
    """A file whose rows are to be written again."""

    schema: TableSchema
    partition_by: tuple[str, ...]
    file: Path
    path: Path
    name: str
    file_bytes: int


def _rewrite_file(work: _RewriteWork) -> tuple[StagedFile, ...]:
    fields = pa.schema(work.schema.row_fields())
    with pq.ParquetFile(work.file) as source:
        rows = (pa.Table.from_batches([batch]).cast(fields).to_batches() for batch in source.iter_batches())
        batches = (batch for parts in rows for batch in parts)
        return stage(
            work.path, work.name, work.schema, batches, work.partition_by, numbered=True, file_bytes=work.file_bytes
        )
