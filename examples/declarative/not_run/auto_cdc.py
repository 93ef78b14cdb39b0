"""The same with `create_auto_cdc_flow`. NOT RUN: Spark has it since 4.3, and its target must be a table of a connector
that can change rows, such as Iceberg's, which there is not for Spark 4.3 yet. A dry run of it passes. See
docs/guides/declarative-pipelines.md.
"""

from __future__ import annotations

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

spark = SparkSession.active()


@dp.temporary_view
def order_changes() -> DataFrame:
    """Rows that a load would read, and values that the server did not send (`_unchanged`), are not in here."""
    changes = spark.readStream.format("cdc").option("log", os.environ["SHOP_LOG"]).option("table", "public.orders")
    return changes.load().select("_seq", "_op", "id", "state", "total")


dp.create_streaming_table("orders", format="iceberg")
dp.create_auto_cdc_flow(
    target="orders",
    source="order_changes",
    keys=["id"],
    sequence_by="_seq",
    apply_as_deletes="_op = 'delete'",
    except_column_list=["_op", "_seq"],
    stored_as_scd_type=1,
)
