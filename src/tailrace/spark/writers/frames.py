"""Rows as Spark's frames: names, images, and what a merge is told. Nothing here runs a job."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import pyarrow as pa
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from tailrace.model.schema import Column, TableSchema
from tailrace.tables.fold.fold import DELETE, UPSERT, key_ordinals


def quoted(name: str) -> str:
    """A column's name as Spark's SQL has it, verbatim."""
    return "`" + name.replace("`", "``") + "`"


def table_at(folder: Path) -> str:
    """A Delta table as Spark's SQL names it."""
    return f"delta.{quoted(str(folder))}"


def column_named(name: str) -> SparkColumn:
    """A column by its very name."""
    return f.col(quoted(name))


def own_columns(schema: TableSchema) -> list[str]:
    """The names of the table's own columns in folded rows."""
    return [f"c{i}" for i in range(len(schema.columns))]


def all_of(conditions: Sequence[SparkColumn]) -> SparkColumn:
    """One condition of several."""
    whole = conditions[0]
    for condition in conditions[1:]:
        whole = whole & condition
    return whole


def comparable_bits(value: SparkColumn, column: Column) -> SparkColumn:
    """To compare images by: 0.0 is not -0.0 there, and Spark takes them for equal."""
    kind = column.type.value_type if pa.types.is_list(column.type) else column.type
    return value.cast("string") if pa.types.is_floating(kind) else value


def as_table_rows(schema: TableSchema, rows: DataFrame) -> DataFrame:
    """The folded rows that come, under the table's own names; a row of a keyless table as often as it came."""
    came = rows.where(f.col("op") == UPSERT)
    if not schema.key:
        came = came.withColumn("copy", f.explode(f.sequence(f.lit(1), f.col("copies").cast("int"))))
    return came.select(*(f.col(f"c{i}").alias(column.name) for i, column in enumerate(schema.columns)))


def mirror_merge_sql(
    schema: TableSchema,
    target: str,
    view: str,
    kept: Collection[int],
    emptied: Collection[str] = (),
    *,
    matched: str = "",
    also: str = "",
) -> str:
    """The merge of a view's rows `c0…cN` and `op` into a table; where a flag `k<i>` is set its own row keeps its value.
    Columns that are emptied have null in rows that change. `matched` is what else is done with rows that are there,
    `also` what else is known of them."""
    names = [quoted(column.name) for column in schema.columns]
    over = ", ".join(
        f"{name} = CASE WHEN s.k{i} THEN t.{name} ELSE s.c{i} END" if i in kept else f"{name} = s.c{i}"
        for i, name in enumerate(names)
    )
    over += "".join(f", {quoted(name)} = NULL" for name in emptied)
    return (
        f"MERGE INTO {target} t USING {view} s"
        f" ON {' AND '.join(f't.{names[i]} = s.c{i}' for i in key_ordinals(schema))}{also}"
        f" WHEN MATCHED AND s.op = {DELETE} THEN DELETE"
        f" WHEN MATCHED AND s.op = {UPSERT} THEN UPDATE SET {over}{matched}"
        f" WHEN NOT MATCHED AND s.op = {UPSERT} THEN INSERT ({', '.join(names)})"
        f" VALUES ({', '.join(f's.c{i}' for i in range(len(names)))})"
    )
