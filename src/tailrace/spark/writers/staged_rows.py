"""Rows for Spark's connector that are not changes. Tasks have staged them, or they are a table's own in a new schema.

The values of a partition are not in a Delta table's files. They are taken from what is recorded of each file, never
from the names of folders, which Spark reads in its own way. A value that no partition can have is refused with the same
error as everywhere.
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
    """Return a frame of these columns without rows."""
    return session.createDataFrame([], spark_schema(fields))


def staged_rows(
    session: SparkSession, columns: Sequence[Column], folder: Path, files: Sequence[StagedFile], *, whole: bool = False
) -> DataFrame:
    """Return the rows of files in a table's folder. Files that are `whole` contain the columns of their partition."""
    fields = pa.schema([(column.name, column.type) for column in columns])
    if not files:
        return no_rows(session, fields)
    partition_values = {} if whole else files[0].values
    file_fields = pa.schema([field for field in fields if field.name not in partition_values])
    rows = session.read.schema(spark_schema(file_fields)).parquet(*(str(folder / file.path) for file in files))
    if not partition_values:
        return rows
    values_by_file = [values_of(file.values, columns) for file in files]
    arrays = {
        name: pa.array([values[name].as_py() for values in values_by_file], fields.field(name).type)
        for name in partition_values
    }
    return with_partitions(rows, fields.names, [file.path for file in files], pa.table(arrays))


def with_partitions(rows: DataFrame, names: Sequence[str], files: Iterable[str], partitions: pa.Table) -> DataFrame:
    """Return rows of files with these columns; those that the files lack come from `partitions`.

    It has one row for each file. Files are matched by their names, which no two share.
    """
    file = "file" + "_" * max(map(len, names))
    by_file = partitions.append_column(file, pa.array([Path(name).name for name in files]))
    with_file = rows.withColumn(file, f.col("_metadata.file_name"))
    joined = with_file.join(f.broadcast(rows.sparkSession.createDataFrame(by_file, spark_schema(by_file.schema))), file)
    return joined.select(*map(column_named, names))


def recast_rows(rows: DataFrame, planned: RecastColumns, scratch: Path) -> DataFrame:
    """Return all rows of a table in its new schema."""
    fields = spark_schema(planned.fields)
    if planned.backfilled:
        # Through a file, as all rows: Spark would read a literal in this process's time zone.
        filled = {f"f{i}": pa.array([value], value.type) for i, value in enumerate(planned.backfilled.values())}
        pq.write_table(pa.table(filled), scratch / "filled.parquet", store_schema=False)
        rows = rows.crossJoin(f.broadcast(rows.sparkSession.read.parquet(str(scratch / "filled.parquet"))))
    fill_columns = {name: f"f{i}" for i, name in enumerate(planned.backfilled)}
    columns = []
    for field, old in zip(fields, planned.source_names, strict=True):
        value = f.lit(None) if old is None else column_named(old)
        if old is None and field.name in fill_columns:
            value = f.col(fill_columns[field.name])
        columns.append(value.cast(field.dataType).alias(field.name))
    return rows.select(*columns)


def refuse_misfit_rows(schema: TableSchema, names: Collection[str], rows: DataFrame) -> None:
    """Refuse values that cannot be read back from a partition. A Spark job checks these columns."""
    for column in schema.columns:
        if column.name in names and not rows.where(is_misfit(column, column_named(column.name))).isEmpty():
            raise partition_value_error(schema, column.name)


def is_misfit(column: Column, value: SparkColumn) -> SparkColumn:
    """Return a condition for values that cannot be read back from a partition. Null is no such value."""
    if pa.types.is_string(column.type):
        plain_bytes = f.length(f.regexp_replace(value, "[^A-Za-z0-9_.-]", ""))
        size = 3 * f.octet_length(value) - 2 * plain_bytes
        return value.isin("", NULL_FOLDER) | (size > folder_name_bytes_left(column.name))
    if pa.types.is_date32(column.type):
        return ~f.unix_date(value).between(*DAYS)
    if pa.types.is_timestamp(column.type):
        low, high = DAYS[0] * DAY_MICROS, (DAYS[1] + 1) * DAY_MICROS - 1
        return ~f.unix_micros(value.cast("timestamp")).between(low, high)
    return f.lit(False)
