"""Lake tables as they were at one point of the source's history, all of them at the same."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from tailrace.changelog.reader import ChangeLog
from tailrace.errors import ConfigError
from tailrace.model.position import Lsn
from tailrace.pipeline.ledger import Ledger, Point
from tailrace.pipeline.settings import PipelineSettings, load_settings
from tailrace.tables.versions import files_at, needs_connector

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_TIME_HINT = "For example: `2026-11-16T12:00:00Z`. A time without a zone is UTC."


def find_point(settings: PipelineSettings, *, time: str | None = None, position: str | None = None) -> Point:
    """The last point at or before a time or a position; without either, the last of all."""
    ledger = Ledger(ChangeLog.open(settings.log.path).path)
    if time is not None and position is not None:
        raise ConfigError("a point is at a time or at a position", hint="Give one of the two.")
    if position is not None:
        return ledger.at(position=Lsn.parse(position))
    if time is None:
        return ledger.at()
    try:
        wanted = datetime.fromisoformat(time)
    except ValueError:
        raise ConfigError("this is no time", given=time, hint=_TIME_HINT) from None
    wanted = wanted if wanted.tzinfo is not None else wanted.replace(tzinfo=UTC)
    return ledger.at(committed_at=int(wanted.timestamp() * 1_000_000))


def tables_at(
    spark: SparkSession, file: str | Path, *, time: str | None = None, position: str | None = None
) -> dict[str, DataFrame]:
    """The pipeline's tables as they were at one point, by `schema.table`; a connector is needed only for tables with
    deletion vectors or column mapping.

    Transactions that the source committed up to there are in all of them, and later ones in none.
    """
    settings = load_settings(file)
    point = find_point(settings, time=time, position=position)
    return {
        str(table): _frame(spark, settings.tables.layout.path(table), version)
        for table, version in point.versions.items()
    }


def _frame(spark: SparkSession, path: Path, version: int) -> DataFrame:
    from tailrace.spark.frames import spark_schema

    if needs_connector(path, version):
        return spark.read.format("delta").option("versionAsOf", version).load(str(path.absolute()))
    columns, files, partitions = files_at(path, version)
    if not files:
        return spark.createDataFrame([], spark_schema(columns))
    inside = pa.schema([field for field in columns if field.name not in partitions.column_names])
    rows = spark.read.schema(spark_schema(inside)).parquet(*map(str, files))
    return _with_partitions(rows, columns.names, files, partitions) if partitions.num_columns else rows


def _with_partitions(rows: DataFrame, names: list[str], files: list[Path], partitions: pa.Table) -> DataFrame:
    """The rows with what their files do not hold. By the files' own names, for what Spark would take from the folders'
    depends on the session's time zone."""
    from pyspark.sql import functions as f

    from tailrace.spark.frames import spark_schema

    file = "file" + "_" * max(map(len, names))
    said = partitions.append_column(file, pa.array([path.name for path in files]))
    told = rows.withColumn(file, f.col("_metadata.file_name"))
    joined = told.join(f.broadcast(rows.sparkSession.createDataFrame(said, spark_schema(said.schema))), file)
    return joined.select(*("`" + name.replace("`", "``") + "`" for name in names))
