"""Rows of a table without a key that go: so many copies of each image, by Spark."""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from tailrace.errors import RELOAD_TABLE_HINT, BaseRowMissing
from tailrace.model.schema import TableSchema
from tailrace.spark.writers.frames import column_named, comparable_bits
from tailrace.tables.fold.fold import DELETE


def remove_copies(
    schema: TableSchema, table: DataFrame, rows: DataFrame, keep: Callable[[DataFrame], DataFrame]
) -> DataFrame:
    """The table's rows less so many copies of each image among the folded rows; too few of one is an error. `keep` has
    rows stay as they are, however often they are asked for."""
    there = table.select(*(column_named(c.name).alias(f"t{i}") for i, c in enumerate(schema.columns)))
    gone = keep(rows.where(f.col("op") == DELETE).withColumn("image", f.monotonically_increasing_id()))
    same = [
        comparable_bits(f.col(f"t{i}"), c).eqNullSafe(comparable_bits(f.col(f"c{i}"), c))
        for i, c in enumerate(schema.columns)
    ]
    joined = there.join(gone.select(*(f"c{i}" for i in range(len(same))), "image", "copies"), same, "left")
    number = "row_number() OVER (PARTITION BY image ORDER BY image) AS n"
    # Which of equal rows goes is all the same, but it must stay the same.
    numbered = keep(joined.where("image IS NOT NULL").selectExpr("*", number))
    dropped = f.col("n") <= -f.col("copies")
    wanted = gone.agg(f.coalesce(-f.sum("copies"), f.lit(0))).first()
    found = numbered.where(dropped).count()
    assert wanted is not None, "an aggregate"
    if found < wanted[0]:
        raise BaseRowMissing(
            "rows to be removed are not in the table",
            table=schema.table,
            rows=int(wanted[0]) - found,
            hint=RELOAD_TABLE_HINT,
        )
    kept = joined.where("image IS NULL").unionByName(numbered.where(~dropped).drop("n"))
    return kept.select(*(f.col(f"t{i}").alias(c.name) for i, c in enumerate(schema.columns)))
