"""The process that `spark_source.py` measures: one Spark session that streams the log and the peer in turn.

usage: python -m benchmarks.spark_source_child FOLDER TABLE COMMITS ROUNDS

The log is at FOLDER/log, and is sealed half-way. The last line printed is JSON.
"""

from __future__ import annotations

import json
import sys
import uuid
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

from benchmarks.bare_source import BareSource
from benchmarks.scan_child import java_version, open_session
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.read.offsets import LogOffset
from tailrace.spark.datasource.log.log_options import LogOptions
from tailrace.spark.datasource.log.log_part import read_part
from tailrace.spark.datasource.log.log_plan import LogPlanner
from tailrace.spark.datasource.log.log_schema import resolve_frame

SECONDS_MAX = 600


def main() -> int:
    """Warm up, measure, seal, measure again."""
    folder, table, commits, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    spark = open_session(folder)
    spark.dataSource.register(BareSource)
    _write_batch(folder, table)
    options = {
        "ours": ("cdc", {"log": str(folder / "log"), "table": table, "rowsPerPartition": "1"}, "maxPartitions"),
        "peer": ("bare", {"file": str(folder / "batch.arrow"), "times": str(commits)}, "partitions"),
    }
    seconds: dict[str, list[dict[str, float]]] = {}
    seen: set[int] = set()
    for prefix in ("", "sealed, "):
        if prefix:
            with Sealer(folder / "log") as sealer:
                sealer.seal()
                sealer.merge_seals()
        for partitions in (1, 2):
            name = f"{prefix}{partitions} partition{'s' if partitions > 1 else ''}"
            for number in range(rounds + 1):
                took = {}
                for side, (format_name, given, how_many) in options.items():
                    chosen = given | {how_many: str(partitions)}
                    rows, took[side] = _stream(spark, folder, format_name, chosen)
                    seen.add(rows)
                if number:  # the one before the clock
                    seconds.setdefault(name, []).append(took)
                    _say(f"{name}, round {number}: " + ", ".join(f"{side} {s:.2f} s" for side, s in took.items()))
    versions = {"spark": spark.version, "java": java_version(spark)}
    spark.stop()
    print(json.dumps({"rows": sorted(seen), "seconds": seconds, "versions": versions}), flush=True)
    return 0


def _write_batch(folder: Path, table: str) -> None:
    """The first batch that a task of ours would yield."""
    frame = resolve_frame(LogOptions.parse({"log": str(folder / "log"), "table": table}))
    part = LogPlanner(frame).plan_parts(LogOffset(0), 1)[0]
    batch = next(read_part(frame, part, frame.fields))
    with pa.OSFile(str(folder / "batch.arrow"), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


def _stream(spark: SparkSession, folder: Path, format_name: str, options: dict[str, str]) -> tuple[int, float]:
    """The rows of the one micro-batch, and the seconds it took."""
    query = (
        spark.readStream.format(format_name)
        .options(**options)
        .load()
        .writeStream.format("noop")
        .trigger(availableNow=True)
        .option("checkpointLocation", str(folder / f"checkpoint-{uuid.uuid4().hex}"))
        .start()
    )
    if not query.awaitTermination(SECONDS_MAX):
        raise TimeoutError("the stream did not end")
    (progress,) = [found for found in query.recentProgress if found["numInputRows"]]
    return progress["numInputRows"], progress["durationMs"]["triggerExecution"] / 1000


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
