"""The process that `log_scan.py` measures: one Spark session that reads the cold files and a plain copy in turn.

usage: python -m benchmarks.scan_child FOLDER TABLE ROUNDS

The log is at FOLDER/log; the copy is written next to it. The last line printed is JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # everybody's name for it

from tailrace.changelog.read.reader import ChangeLog
from tailrace.spark.session.java import find_java


def main() -> int:
    """Copy, warm up, check, measure."""
    folder, table, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    spark = open_session(folder)
    cold = [str(path) for path in ChangeLog.open(folder / "log").files(table)]
    plain = str(folder / "plain")
    _say("copying it to plain Parquet")
    spark.read.parquet(*cold).write.option("compression", "zstd").parquet(plain)

    sides = {"ours": cold, "peer": [plain]}
    sums = {side: _checksum(spark.read.parquet(*paths)) for side, paths in sides.items()}
    if sums["ours"] != sums["peer"]:
        print(f"the copy differs: {sums}", file=sys.stderr, flush=True)
        return 1
    for paths in sides.values():
        _seconds(spark, paths)
    seconds = []
    for number in range(1, rounds + 1):
        seconds.append({side: _seconds(spark, paths) for side, paths in sides.items()})
        _say(f"round {number}: " + ", ".join(f"{side} {took:.2f} s" for side, took in seconds[-1].items()))
    copies = [str(path) for path in Path(plain).glob("*.parquet")]
    report = {
        "rows": sums["ours"][0],
        "seconds": seconds,
        "files": {"ours": len(cold), "peer": len(copies)},
        "bytes": {"ours": _size(cold), "peer": _size(copies)},
        "versions": {"spark": spark.version, "java": java_version(spark)},
    }
    print(json.dumps(report), flush=True)
    spark.stop()
    return 0


def open_session(folder: Path) -> SparkSession:
    """Open Spark as it comes, on two cores; only what it prints and where it puts its files is set."""
    os.environ["JAVA_HOME"] = str(find_java())
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    session: SparkSession = (
        SparkSession.builder.master("local[2]")
        .appName("tailrace bench")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.driver.memory", "4g")
        .config("spark.local.dir", str(folder))
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .getOrCreate()
    )
    return session


def _seconds(spark: SparkSession, paths: list[str]) -> float:
    """Read every column of every row, and drop them."""
    begin = time.perf_counter()
    spark.read.parquet(*paths).write.format("noop").mode("overwrite").save()
    return time.perf_counter() - begin


def _checksum(rows: DataFrame) -> list[int]:
    """Count the rows, and add up a hash of each over all columns."""
    (found,) = rows.agg(F.count("*"), F.sum(F.xxhash64(*rows.columns) % 1_000_000_007)).collect()
    return [int(value) for value in found]


def _size(files: list[str]) -> int:
    return sum(Path(file).stat().st_size for file in files)


def java_version(spark: SparkSession) -> str:
    """Ask the session's Java."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    return str(jvm.java.lang.System.getProperty("java.version"))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
