"""Rows that Spark's connector is given besides changes: those that tasks have staged, and a table's own in a new shape.

What must stay true: values of a partition are no part of a Delta table's files. They are taken from what was noted of
each file, never from the names of folders, which Spark reads in its own way. And a value that no partition can have is
refused here as everywhere, in the same words.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from tailrace.model.schema import Column, TableSchema
from tailrace.spark.session.arrow_types import spark_schema
from tailrace.spark.writers.merge_sql import column_named
from tailrace.tables.evolve.recast_columns import RecastColumns
from tailrace.tables.partitions import (
    DAY_MICROS,
    DAYS,
    NULL_FOLDER,
    folder_name_bytes_left,
    partition_value_error,
    values_of,
)
from tailrace.tables.staging import StagedFile


def no_rows(session: SparkSession, fields: pa.Schema) -> DataFrame:
    """A frame of these columns."""
    return session.createDataFrame([], spark_schema(fields))


def staged_rows(
    session: SparkSession, columns: Sequence[Column], folder: Path, files: Sequence[StagedFile], *, whole: bool = False
) -> DataFrame:
    """The rows of files that lie in a table's folder. `whole` ones hold the columns of their partition."""
    fields = pa.schema([(column.name, column.type) for column in columns])
    if not files:
        return no_rows(session, fields)
    apart = {} if whole else files[0].values
    inside = pa.schema([field for field in fields if field.name not in apart])
    rows = session.read.schema(spark_schema(inside)).parquet(*(str(folder / file.path) for file in files))
    if not apart:
        return rows
    said = [values_of(file.values, columns) for file in files]
    arrays = {name: pa.array([values[name].as_py() for values in said], fields.field(name).type) for name in apart}
    return with_partitions(rows, fields.names, [file.path for file in files], pa.table(arrays))


def with_partitions(rows: DataFrame, names: Sequence[str], files: Iterable[str], partitions: pa.Table) -> DataFrame:
    """Rows of files, in these columns, with those that the files do not hold: of each file there is a row of them. By
    the files' own names, which no two share."""
    file = "file" + "_" * max(map(len, names))
    said = partitions.append_column(file, pa.array([Path(name).name for name in files]))
    told = rows.withColumn(file, f.col("_metadata.file_name"))
    joined = told.join(f.broadcast(rows.sparkSession.createDataFrame(said, spark_schema(said.schema))), file)
    return joined.select(*map(column_named, names))


def recast_rows(rows: DataFrame, laid: RecastColumns, scratch: Path) -> DataFrame:
    """All rows of a table as they are to be."""
    fields = spark_schema(laid.fields)
    if laid.backfilled:
        # Through a file, as everything else: a literal of Spark's would be read in this process's time zone.
        filled = {f"f{i}": pa.array([value], value.type) for i, value in enumerate(laid.backfilled.values())}
        pq.write_table(pa.table(filled), scratch / "filled.parquet", store_schema=False)
        rows = rows.crossJoin(f.broadcast(rows.sparkSession.read.parquet(str(scratch / "filled.parquet"))))
    places = {name: f"f{i}" for i, name in enumerate(laid.backfilled)}
    columns = []
    for field, old in zip(fields, laid.source_names, strict=True):
        value = f.lit(None) if old is None else column_named(old)
        if old is None and field.name in places:
            value = f.col(places[field.name])
        columns.append(value.cast(field.dataType).alias(field.name))
    return rows.select(*columns)


def refuse_misfit_rows(schema: TableSchema, names: Collection[str], rows: DataFrame) -> None:
    """`refuse_misfits` by a job: refuse rows with a value in one of these columns that cannot be read back."""
    for column in schema.columns:
        if column.name in names and not rows.where(is_misfit(column, column_named(column.name))).isEmpty():
            raise partition_value_error(schema, column.name)


def is_misfit(column: Column, value: SparkColumn) -> SparkColumn:
    """What `misfits` says, for Spark. Null is no misfit."""
    if pa.types.is_string(column.type):
        plain = f.length(f.regexp_replace(value, "[^A-Za-z0-9_.-]", ""))
        size = 3 * f.octet_length(value) - 2 * plain
        return value.isin("", NULL_FOLDER) | (size > folder_name_bytes_left(column.name))
    if pa.types.is_date32(column.type):
        return ~f.unix_date(value).between(*DAYS)
    if pa.types.is_timestamp(column.type):
        low, high = DAYS[0] * DAY_MICROS, (DAYS[1] + 1) * DAY_MICROS - 1
        return ~f.unix_micros(value.cast("timestamp")).between(low, high)
    return f.lit(False)
