"""Your own `foreachBatch` over the changes: sales per customer in a database of yours, each order counted once.

    python examples/foreach_batch.py

It brings a PostgreSQL of its own (`pip install "tailrace[demo]"`) and leaves nothing behind.

The stream captures by itself, since it is given a `url`. After a crash Spark may hand over a micro-batch once more,
with the same number and the same rows. So the number is stored in the transaction that stores the result.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from tailrace.demo.server import EmbeddedPostgres

# Spark's workers are to run the Python that Tailrace is installed in.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def main() -> None:
    quiet = SparkSession.builder.config("spark.log.level", "ERROR").config("spark.ui.enabled", "false")
    # 200 tasks to sum up a few rows would be too many.
    spark = quiet.master("local[2]").config("spark.sql.shuffle.partitions", "2").getOrCreate()
    with EmbeddedPostgres() as server, TemporaryDirectory() as name, server.connect() as source:
        folder = Path(name)
        source.execute("create table orders (id int primary key, customer text, total numeric(10,2))")
        totals = sqlite3.connect(folder / "totals.db", check_same_thread=False)
        totals.execute("create table totals (customer text primary key, total text)")
        totals.execute("create table done (batch int primary key)")

        follow(spark, server.url(), folder, totals)  # makes slot and log; what is committed from now on is captured
        source.execute("insert into orders values (1, 'ada', 20.00), (2, 'grace', 5.50)")
        source.execute("insert into orders values (3, 'ada', 0.49)")
        follow(spark, server.url(), folder, totals)
        show("Two transactions later:", totals)
        source.execute("insert into orders values (4, 'grace', 100)")
        follow(spark, server.url(), folder, totals)
        show("Gone on where it stopped:", totals)
        totals.close()
    spark.stop()


def follow(spark: SparkSession, url: str, folder: Path, totals: sqlite3.Connection) -> None:
    """Take in all that is there. Without the trigger the query would run on."""
    orders = (
        spark.readStream.format("cdc")
        .option("url", url)
        .option("log", str(folder / "changes"))
        .option("table", "public.orders")
        .load()
    )
    query = (
        orders.writeStream.foreachBatch(lambda batch, number: add(batch, number, totals))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def add(batch: DataFrame, number: int, totals: sqlite3.Connection) -> None:
    """One micro-batch: new orders are added up by Spark, and only the sums come here."""
    sums = batch.where("_op = 'insert'").groupBy("customer").agg(f.sum("total").alias("total")).collect()
    with totals:  # one transaction
        if totals.execute("select 1 from done where batch = ?", (number,)).fetchone():
            return
        totals.execute("insert into done values (?)", (number,))
        for customer, total in sums:
            found = totals.execute("select total from totals where customer = ?", (customer,)).fetchone()
            # Decimals, as they came: a float would not add up to the cent.
            total += type(total)(found[0]) if found else 0
            totals.execute("insert or replace into totals values (?, ?)", (customer, str(total)))


def show(title: str, totals: sqlite3.Connection) -> None:
    print(title)
    for customer, total in totals.execute("select customer, total from totals order by customer"):
        print(f"  {customer:6} {total:>8}")


if __name__ == "__main__":
    main()
