"""Lake tables as they were at one point of the source's history, all of them at the same."""

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
from tailrace.pipeline.config.settings import PipelineSettings, load_settings
from tailrace.pipeline.points.ledger import Absence, ConsistentPoint, Ledger
from tailrace.pipeline.report import TableState
from tailrace.tables.delta.versions import files_at, needs_connector
from tailrace.tables.iceberg.catalogs import SPARK_CATALOG, Catalog
from tailrace.tables.location import LakeLayout

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TABLE_REMADE = "the table was made anew since"
FOLDER_GONE = "its folder is gone"
_NO_MORE = (TABLE_REMADE, FOLDER_GONE)
_LATER_HINT = "What it was then is gone with its folder. Ask for a time or position after it was loaded anew."
_EARLIER_HINT = "Ask for an earlier time or position, or wait until `tailrace at` shows the table again."
_TIME_HINT = "For example: `2026-11-16T12:00:00Z`. A time without a zone is UTC."


class TablesAt(dict[str, "DataFrame"]):
    """Tables at one point. Asked for one that has no version there it says why."""

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
                    hint=_LATER_HINT if absence.why in _NO_MORE else _EARLIER_HINT,
                )
        raise KeyError(name)


def find_point(
    settings: PipelineSettings, *, time: str | datetime | None = None, position: str | Lsn | None = None
) -> ConsistentPoint:
    """The last point at or before a time or a position; without either, the last of all. A table whose version then is
    none of the table that is there now is missing from it."""
    log = ChangeLog.open(settings.log.path)
    return _as_it_is_now(settings.tables.layout, log.log_id, _noted(Ledger(log.path), time, position))


def _noted(ledger: Ledger, time: str | datetime | None, position: str | Lsn | None) -> ConsistentPoint:
    if time is not None and position is not None:
        raise ConfigError("a point is at a time or at a position", hint="Give one of the two.")
    if position is not None:
        return ledger.at(position=Lsn.parse(str(position)))
    if time is None:
        return ledger.at()
    try:
        wanted = datetime.fromisoformat(str(time))
    except ValueError:
        raise ConfigError("this is no time", given=time, hint=_TIME_HINT) from None
    wanted = wanted if wanted.tzinfo is not None else wanted.replace(tzinfo=UTC)
    return ledger.at(committed_at=int(wanted.timestamp() * 1_000_000))


def _as_it_is_now(layout: LakeLayout, log_id: str, point: ConsistentPoint) -> ConsistentPoint:
    gone = dict[TableId, Absence]()
    for table, identity in point.lake_table_ids.items():
        with suppress(TailraceError):  # whoever reads a table that cannot be looked at is told why
            there = layout.location(table, log_id).open_for_reading()
            now = there.identity()
            # Another partitioning gives a table another identity where it stands.
            if now != identity and (now is None or there.identity(point.versions[table]) != identity):
                why = FOLDER_GONE if now is None else TABLE_REMADE
                gone[table] = Absence(state=TableState.LIVE.value, why=why)
    return replace(
        point,
        missing={**point.missing, **gone},
        versions={table: version for table, version in point.versions.items() if table not in gone},
    )


def tables_at(
    spark: SparkSession,
    file: str | Path,
    *,
    time: str | datetime | None = None,
    position: str | Lsn | None = None,
    tables: Iterable[TableId | str] | TableId | None = None,
) -> TablesAt:
    """The pipeline's tables as they were at one point, by `schema.table`; a connector is needed only for Iceberg tables
    and for such with deletion vectors or column mapping.

    Transactions that the source committed up to there are in all of them, and later ones in none. A table that was not
    at that point is not among them, and asking for it says why. With `tables`, only these are read: of two that
    `schema.table` does not tell apart, one has to be chosen.
    """
    settings = load_settings(file)
    point = select_tables(find_point(settings, time=time, position=position), tables)
    layout = settings.tables.layout
    read = partial(_frame, spark) if layout.catalog is None else partial(_snapshot, spark, layout.catalog)
    found = {str(table): read(layout.path(table), version) for table, version in point.versions.items()}
    return TablesAt(found, point)


def select_tables(point: ConsistentPoint, tables: Iterable[TableId | str] | TableId | None) -> ConsistentPoint:
    """The point with these tables alone, or with all; each has a name that is no other's. One may be given as
    `schema.table`."""
    wanted = set(point.versions) | set(point.missing)
    if tables is not None:
        given = _named(tables)
        asked = {table for table in wanted if table in given or str(table) in given}
        if unknown := given - asked - set(map(str, asked)):
            names = ", ".join(sorted(table if isinstance(table, str) else _in_parts(table) for table in unknown))
            raise ConfigError(
                "the point knows no such table",
                tables=names,
                time=point.time.isoformat(),
                hint="`tailrace at FILE --json` lists those that it knows.",
            )
        wanted = asked
    for name, alike in groupby(sorted(wanted, key=str), key=str):
        if len(both := sorted(alike)) > 1:
            names = " and ".join(map(_in_parts, both))
            raise ConfigError(f"`{name}` names two tables", tables=names, hint="Choose one of them with `tables=[…]`.")
    return replace(
        point,
        versions={table: version for table, version in point.versions.items() if table in wanted},
        missing={table: absence for table, absence in point.missing.items() if table in wanted},
    )


def _named(tables: object) -> set[TableId | str]:
    named = set[TableId | str]()
    for table in tables if isinstance(tables, Iterable) and not isinstance(tables, str) else (tables,):
        if not isinstance(table, str | TableId):
            raise ConfigError(
                "`tables` does not name tables",
                found=type(table).__name__,
                hint='Give a list of texts or of `TableId`: `tables=["public.orders"]`.',
            )
        named.add(table)
    return named


def _in_parts(table: TableId) -> str:
    return f'TableId("{table.schema}", "{table.name}")'


def _snapshot(spark: SparkSession, catalog: Catalog, path: Path, version: int) -> DataFrame:
    """Of an Iceberg table, whose connector the session must have."""
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
