"""Read all lake tables as of one point of the source's history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import ConfigError, TailraceError
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.pipeline.config.settings_file import load_settings
from tailrace.pipeline.points.ledger import FOLDER_GONE, TABLE_RECREATED, Absence, ConsistentPoint, Ledger
from tailrace.pipeline.report import TableState
from tailrace.tables.delta.versions import files_at, needs_connector
from tailrace.tables.iceberg.catalogs import SPARK_CATALOG, Catalog
from tailrace.tables.location import LakeLayout

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_LATER_HINT = "That version is gone with its folder. Ask for a time or position after the table was loaded again."
_EARLIER_HINT = "Ask for an earlier time or position, or wait until `tailrace at` shows the table again."
_TIME_HINT = "For example: `2026-11-16T12:00:00Z`. A time without a zone is UTC."


class TablesAt(dict[str, "DataFrame"]):
    """Tables at one point; a lookup of a missing table raises the reason."""

    def __init__(self, tables: Mapping[str, DataFrame], point: ConsistentPoint) -> None:
        super().__init__(tables)
        self.point = point

    def __missing__(self, name: str) -> DataFrame:
        for table, absence in self.point.missing.items():
            if str(table) == name:
                raise ConfigError(
                    "the table has no version at this point",
                    table=name,
                    state=absence.state,
                    why=absence.why,
                    time=self.point.time.isoformat(),
                    hint=_LATER_HINT if absence.is_replaced else _EARLIER_HINT,
                )
        raise KeyError(name)


def find_point(
    settings: PipelineSettings, *, time: str | datetime | None = None, position: str | Lsn | None = None
) -> ConsistentPoint:
    """Return the last point at or before a time or a position.

    Without either, return the last of all. A version that belongs to an earlier table of the same name is reported as
    missing.
    """
    log = ChangeLog.open(settings.log.path)
    return _without_replaced_tables(
        settings.tables.layout, log.log_id, _recorded_point(Ledger(log.path), time, position)
    )


def _recorded_point(ledger: Ledger, time: str | datetime | None, position: str | Lsn | None) -> ConsistentPoint:
    if time is not None and position is not None:
        raise ConfigError("both a time and a position are given", hint="Give one of the two.")
    if position is not None:
        return ledger.at(position=Lsn.parse(str(position)))
    if time is None:
        return ledger.at()
    try:
        instant = datetime.fromisoformat(str(time))
    except ValueError:
        raise ConfigError("the time is not valid", given=time, hint=_TIME_HINT) from None
    instant = instant if instant.tzinfo is not None else instant.replace(tzinfo=UTC)
    return ledger.at(committed_at=int(instant.timestamp() * 1_000_000))


def _without_replaced_tables(layout: LakeLayout, log_id: str, point: ConsistentPoint) -> ConsistentPoint:
    replaced = dict[TableId, Absence]()
    for table, identity in point.lake_table_ids.items():
        with suppress(TailraceError):  # reading such a table raises its error
            lake_table = layout.location(table, log_id).open_for_reading()
            current = lake_table.identity()
            # A new partitioning gives a table a new identity at the same path.
            if current != identity and (current is None or lake_table.identity(point.versions[table]) != identity):
                why = FOLDER_GONE if current is None else TABLE_RECREATED
                replaced[table] = Absence(state=TableState.LIVE.value, why=why)
    return replace(
        point,
        missing={**point.missing, **replaced},
        versions={table: version for table, version in point.versions.items() if table not in replaced},
    )


def tables_at(
    spark: SparkSession,
    file: str | Path,
    *,
    time: str | datetime | None = None,
    position: str | Lsn | None = None,
    tables: Iterable[TableId | str] | TableId | None = None,
) -> TablesAt:
    """Return the pipeline's tables as of one point, by `schema.table`.

    Transactions that the source committed up to there are in all of them, and later ones in none. A table without a
    version at that point is left out, and a lookup of it raises the reason. With `tables`, only these are read. If two
    tables have the same `schema.table` text, one must be chosen this way. A connector is needed only for Iceberg
    tables, and for Delta tables with deletion vectors or column mapping.
    """
    settings = load_settings(file)
    point = select_tables(find_point(settings, time=time, position=position), tables)
    layout = settings.tables.layout
    read = partial(_frame, spark) if layout.catalog is None else partial(_snapshot, spark, layout.catalog)
    frames = {str(table): read(layout.path(table), version) for table, version in point.versions.items()}
    return TablesAt(frames, point)


def select_tables(point: ConsistentPoint, tables: Iterable[TableId | str] | TableId | None) -> ConsistentPoint:
    """Return the point with these tables alone, or with all; each name must be unique.

    A table may be given as `schema.table`.
    """
    wanted = set(point.versions) | set(point.missing)
    if tables is not None:
        requested = _table_names(tables)
        chosen = {table for table in wanted if table in requested or str(table) in requested}
        if unknown := requested - chosen - set(map(str, chosen)):
            names = ", ".join(sorted(table if isinstance(table, str) else _in_parts(table) for table in unknown))
            raise ConfigError(
                "the point has no such table",
                tables=names,
                time=point.time.isoformat(),
                hint="See `tailrace at FILE --json` for its tables.",
            )
        wanted = chosen
    for name, alike in groupby(sorted(wanted, key=str), key=str):
        if len(both := sorted(alike)) > 1:
            names = " and ".join(map(_in_parts, both))
            raise ConfigError(f"`{name}` names two tables", tables=names, hint="Choose one of them with `tables=[…]`.")
    return replace(
        point,
        versions={table: version for table, version in point.versions.items() if table in wanted},
        missing={table: absence for table, absence in point.missing.items() if table in wanted},
    )


def _table_names(tables: object) -> set[TableId | str]:
    named = set[TableId | str]()
    for table in tables if isinstance(tables, Iterable) and not isinstance(tables, str) else (tables,):
        if not isinstance(table, str | TableId):
            raise ConfigError(
                "`tables` does not name tables",
                found=type(table).__name__,
                hint='Give a list of strings or of `TableId`: `tables=["public.orders"]`.',
            )
        named.add(table)
    return named


def _in_parts(table: TableId) -> str:
    return f'TableId("{table.schema}", "{table.name}")'


def _snapshot(spark: SparkSession, catalog: Catalog, path: Path, version: int) -> DataFrame:
    """Return a version of an Iceberg table; the session must have the connector."""
    from tailrace.spark.session.connectors import catalog_settings
    from tailrace.spark.writers.merge_sql import quoted

    for name, value in catalog_settings(catalog).items():
        spark.conf.set(name, value)
    name = ".".join(map(quoted, (SPARK_CATALOG, *catalog.levels(path.absolute()))))
    return spark.sql(f"SELECT * FROM {name} VERSION AS OF {version}")


def _frame(spark: SparkSession, path: Path, version: int) -> DataFrame:
    from tailrace.spark.session.arrow_types import spark_schema
    from tailrace.spark.writers.staged_rows import no_rows, with_partitions

    if needs_connector(path, version):
        return spark.read.format("delta").option("versionAsOf", version).load(str(path.absolute()))
    columns, files, partitions = files_at(path, version)
    if not files:
        return no_rows(spark, columns)
    inside = pa.schema([field for field in columns if field.name not in partitions.column_names])
    rows = spark.read.schema(spark_schema(inside)).parquet(*map(str, files))
    return with_partitions(rows, columns.names, map(str, files), partitions) if partitions.num_columns else rows
