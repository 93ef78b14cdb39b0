"""A flow that reads the changes of a table."""

from __future__ import annotations

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

spark = SparkSession.active()


@dp.table(format="parquet")
def order_changes() -> DataFrame:
    """Every change of the table, in a streaming table: each run takes in what came since the one before."""
    changes = spark.readStream.format("cdc").option("log", os.environ["SHOP_LOG"]).option("table", "public.orders")
    return changes.load().select("_seq", "_op", "_committed_at", "id", "state", "total")
