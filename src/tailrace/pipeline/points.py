"""Lake tables as they were at one point of the source's history, all of them at the same."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from tailrace.changelog.reader import ChangeLog
from tailrace.errors import ConfigError
from tailrace.model.position import Lsn
from tailrace.pipeline.ledger import Ledger, Point
from tailrace.pipeline.settings import PipelineSettings, load_settings
from tailrace.tables.catalogs import SPARK_CATALOG, Catalog
from tailrace.tables.versions import files_at, needs_connector

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_TIME_HINT = "For example: `2026-11-16T12:00:00Z`. A time without a zone is UTC."


class TablesAt(dict[str, "DataFrame"]):
    """Tables at one point. Asked for one that has no version there it says why."""

    def __init__(self, tables: Mapping[str, DataFrame], point: Point) -> None:
        super().__init__(tables)
        self.point = point

    def __missing__(self, name: str) -> DataFrame:
        for table, absence in self.point.missing.items():
            if str(table) == name:
                raise ConfigError(
                    "the table has no version at this point", table=name, state=absence.state, why=absence.why,
                    time=self.point.time.isoformat(),
                    hint="Ask for an earlier time or position, or wait until `tailrace at` shows the table again.",
                )  # fmt: skip
        raise KeyError(name)


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
) -> TablesAt:
    """The pipeline's tables as they were at one point, by `schema.table`; a connector is needed only for Iceberg tables
    and for such with deletion vectors or column mapping.

    Transactions that the source committed up to there are in all of them, and later ones in none. A table that was not
    at that point is not among them, and asking for it says why.
    """
    settings = load_settings(file)
    point = find_point(settings, time=time, position=position)
    layout = settings.tables.layout
    read = partial(_frame, spark) if layout.catalog is None else partial(_snapshot, spark, layout.catalog)
    tables = {str(table): read(layout.path(table), version) for table, version in point.versions.items()}
    return TablesAt(tables, point)


def _snapshot(spark: SparkSession, catalog: Catalog, path: Path, version: int) -> DataFrame:
    """Of an Iceberg table, whose connector the session must have."""
    from tailrace.spark.connector import catalog_settings
    from tailrace.spark.frames import quoted

    for name, value in catalog_settings(catalog).items():
        spark.conf.set(name, value)
    name = ".".join(map(quoted, (SPARK_CATALOG, *catalog.levels(path.absolute()))))
    return spark.sql(f"SELECT * FROM {name} VERSION AS OF {version}")


def _frame(spark: SparkSession, path: Path, version: int) -> DataFrame:
    from tailrace.spark.arrow import spark_schema
    from tailrace.spark.rows import no_rows, with_partitions

    if needs_connector(path, version):
        return spark.read.format("delta").option("versionAsOf", version).load(str(path.absolute()))
    columns, files, partitions = files_at(path, version)
    if not files:
        return no_rows(spark, columns)
    inside = pa.schema([field for field in columns if field.name not in partitions.column_names])
    rows = spark.read.schema(spark_schema(inside)).parquet(*map(str, files))
    return with_partitions(rows, columns.names, map(str, files), partitions) if partitions.num_columns else rows
