"""The process that `spark_trigger.py` measures: a Spark session with a stream over the log, and the one who writes.

usage: python -m benchmarks.spark_trigger_child URL LOG ROWS FOLDER

The last line printed is JSON.
"""

from __future__ import annotations

import json
import queue
import random
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psycopg
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  # everybody's name for it
from pyspark.sql.streaming.query import StreamingQuery

from benchmarks.scan_child import open_session
from tailrace.changelog.read.reader import ChangeLog

WARM_ROWS = 20
COME_SECONDS_MAX = 300.0
PAUSE_SECONDS = 0.3, 0.6

Came = tuple[list[int], float, float]
"""Ids, and the seconds from the commit until the function was called and until it had the rows."""


def main() -> int:
    """Insert row by row, and note how long each takes."""
    url, log, rows, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    came: queue.Queue[Came] = queue.Queue()

    def note(batch: DataFrame, _: int) -> None:
        called = time.time()
        found = batch.select("id", F.unix_micros("_committed_at").alias("at")).collect()
        came.put(([row["id"] for row in found], called - found[0]["at"] / 1e6, time.time() - found[0]["at"] / 1e6))

    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute("insert into t values (0, 'first', 0)")
        _wait_for_first(log)
        spark = open_session(folder)
        stream = spark.readStream.format("cdc").option("log", log).option("table", "public.t").load()
        query = stream.writeStream.foreachBatch(note).option("checkpointLocation", str(folder / "checkpoint")).start()
        _next(came, query)
        ages = []
        for number in range(1, WARM_ROWS + rows + 1):
            time.sleep(random.uniform(*PAUSE_SECONDS))
            admin.execute("insert into t values (%s, 'one', 1.5)", (number,))
            ids, *age = _next(came, query)
            if ids != [number]:
                print(f"{ids} came instead of {number}", file=sys.stderr, flush=True)
                return 1
            ages.append(age)
    query.stop()
    spark.stop()
    called, collected = np.array(ages[WARM_ROWS:]).T * 1000
    p50, p99 = np.percentile(called, [50, 99]).tolist()
    print(json.dumps({"p50": p50, "p99": p99, "p50, collected": float(np.median(collected))}), flush=True)
    return 0


def _next(came: queue.Queue[Came], query: StreamingQuery) -> Came:
    deadline = time.monotonic() + COME_SECONDS_MAX
    while time.monotonic() < deadline and query.isActive:
        with suppress(queue.Empty):
            return came.get(timeout=1.0)
    raise TimeoutError(f"nothing came: {query.exception()}")


def _wait_for_first(log: str) -> None:
    """A table is known to the log once it has had a row."""
    for _ in ChangeLog.open(log).follow(0, wait_seconds=COME_SECONDS_MAX):
        return


if __name__ == "__main__":
    sys.exit(main())
