"""`format("cdc")` through Spark Connect: a client without a JVM of its own asks a server, which reads and streams.

The client needs packages that nothing else of ours does, pandas among them, so it has an environment of its own:
`make matrix ONLY=connect`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.spark.session.java import find_java
from tests.support.logs import Diary, inserts
from tests.support.pipelines import execute

RUN_SECONDS_MAX = 850
pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("grpc"), reason="needs Spark Connect: `make matrix ONLY=connect`"
)
CLIENT = """
import sys
from pyspark.sql import SparkSession
import tailrace

url, log, folder = sys.argv[1:]
spark = SparkSession.builder.remote("local[2]").getOrCreate()
print(type(spark).__module__)
table = spark.read.format("cdc").option("url", url).option("table", "public.orders").load()
print("table", sorted(row.id for row in table.collect()))
a_range = spark.read.format("cdc").option("log", log).option("table", "public.things").load()
print("range", sorted(row.id for row in a_range.select("id").collect()))
stream = spark.readStream.format("cdc").option("log", log).option("table", "public.things").load()
writer = stream.select("_seq", "id").writeStream.format("parquet").option("path", f"{folder}/out")
query = writer.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True).start()
assert query.awaitTermination(300)
print("stream", sorted(row.id for row in spark.read.parquet(f"{folder}/out").collect()))
tailrace.register(spark)
again = spark.read.format("cdc").option("log", log).option("table", "public.things").load()
print("registered", again.count())
spark.stop()
"""


def test_a_client_reads_a_table_a_range_and_a_stream(database: str, tmp_path: Path) -> None:
    execute(database, "create table orders (id int primary key)", "insert into orders values (1), (2)")
    diary = Diary(tmp_path / "log")
    diary.commit(inserts(7, 8))
    diary.close()
    environment = {
        **os.environ,
        "JAVA_HOME": str(find_java()),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, database, diary.path, tmp_path],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=RUN_SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.splitlines() == [
        "pyspark.sql.connect.session",
        "table [1, 2]",
        "range [7, 8]",
        "stream [7, 8]",
        "registered 2",
    ]
