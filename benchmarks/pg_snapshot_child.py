"""A Spark driver that loads a table into Delta on request, for `pg_snapshot.py` and `snapshot_growth.py`.

usage: python -m benchmarks.pg_snapshot_child ours|jdbc URL SCRATCH [JAR]

Each line of its input is JSON: the table, its publication, how many rows it has, and the folder to load into. Each
line of its output is JSON too: what the load took. The session stays open, so all but the first load find it warm.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from benchmarks.ours import memory_peak_bytes
from tailrace.capture.postgres.chunks import CHUNK_BYTES, ChunkKind, Plan
from tailrace.capture.postgres.config import PostgresSettings
from tailrace.capture.postgres.source import PostgresCapture
from tailrace.model.position import ZERO, Lsn
from tailrace.model.schema import TableId, TableSchema
from tailrace.processes import die_with_parent
from tailrace.spark.session.session import Jvm
from tailrace.tables.delta.table import DeltaRsTable
from tailrace.tables.port import AppliedPosition
from tailrace.tables.staging import StagedFile, stage
from tailrace.tasks.load import load_chunk
from tailrace.tasks.load_store import LoadRecord, LoadStore
from tailrace.tasks.work import ChunkWork

TASKS = 2
SECONDS_MAX = 900.0
FETCH_ROWS = 10_000
LOG_ID = "bench"
JDBC_SETTINGS = {"spark.driver.memory": "2g", "spark.sql.session.timeZone": "UTC"}
# Spark for a pipeline does without the better compiler, because no row passes the JVM; here every row does.
JDBC_JAVA = ("-XX:TieredStopAtLevel=4",)


@dataclass(frozen=True)
class Asked:
    """What is to be loaded, and where to."""

    table: str
    publication: str
    rows: int
    folder: Path


@dataclass(frozen=True)
class Source:
    """Where it is loaded from, and with what."""

    spark: SparkSession
    url: str


def main() -> int:
    """Open a session, then load whatever is asked for until the input ends."""
    die_with_parent()
    side, url, scratch, *jar = sys.argv[1:]
    load: Callable[[Source, Asked, Plan], int] = {"ours": _ours, "jdbc": _jdbc}[side]
    jvm = Jvm(
        "bench",
        Path(scratch),
        Path(scratch) / "spark.log",
        master=f"local[{TASKS}]",
        java_options=JDBC_JAVA if jar else None,
        settings=JDBC_SETTINGS | {"spark.driver.extraClassPath": jar[0]} if jar else None,
    )
    try:
        source = Source(jvm.open_session(), url)
        source.spark.dataSource.register(StagedSink)
        for line in sys.stdin:
            request = json.loads(line)
            asked = Asked(**request | {"folder": Path(request["folder"])})
            print(json.dumps(_measure(load, source, asked)), flush=True)
    finally:
        jvm.kill()
    return 0


def _measure(load: Callable[[Source, Asked, Plan], int], source: Source, asked: Asked) -> dict[str, Any]:
    plan = _plan(source.url, asked)  # the peer needs it to cut the table and to know its types
    cpu, wall = _tree_cpu_seconds(), time.perf_counter()
    rows = load(source, asked, plan)
    wall, cpu = time.perf_counter() - wall, _tree_cpu_seconds() - cpu
    return {
        "rows": rows,
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "memory_peak_bytes": _worker_peak_bytes(),
        "parts": len(plan.chunks),
    }


def _capture(url: str, publication: str) -> PostgresCapture:
    return PostgresCapture(
        PostgresSettings(
            url=url, wanted=lambda _: True, slot="unused", publication=publication, publication_create=False
        )
    )


def _plan(url: str, asked: Asked) -> Plan:
    return _capture(url, asked.publication).plan(TableId("public", asked.table), ChunkKind.EITHER, CHUNK_BYTES)


def _ours(source: Source, asked: Asked, _: Plan) -> int:
    """As a pipeline loads a table: plan, snapshot, record, chunks in tasks, one commit."""
    plan = _plan(source.url, asked)
    lake, log = asked.folder / "lake", asked.folder / "log"
    with _capture(source.url, asked.publication).snapshot() as snapshot:
        seed = LoadRecord(plan=plan, snapshot_position=snapshot.position)
        LoadStore(log).begin(seed)
        works = [
            ChunkWork(
                schema=plan.schema,
                chunk=chunk,
                reader=snapshot.reader(SECONDS_MAX),
                condition=None,
                table_path=lake,
                log=log,
                load_id=seed.id,
                progress_file=asked.folder / f"progress-{chunk.number}",
            )
            for chunk in plan.chunks
        ]
        outcomes = source.spark.sparkContext.parallelize(works, len(works)).map(load_chunk).collect()
    files: list[StagedFile] = []
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
        assert outcome.staged is not None, "neither staged nor failed"
        files += outcome.staged.files
    return _land(lake, plan.schema, files, snapshot.position)


def _jdbc(source: Source, asked: Asked, plan: Plan) -> int:
    """Spark's JDBC reader, then the same files and the same commit."""
    lake, schema = asked.folder / "lake", plan.schema
    given = psycopg.conninfo.conninfo_to_dict(source.url)
    frame = source.spark.read.jdbc(
        f"jdbc:postgresql://{given['host']}:{given['port']}/{given['dbname']}",
        f"public.{asked.table}",
        column="id",
        lowerBound=1,
        upperBound=asked.rows + 1,
        numPartitions=len(plan.chunks),
        properties={"user": str(given["user"]), "fetchsize": str(FETCH_ROWS), "driver": "org.postgresql.Driver"},
    )

    answers = asked.folder / "staged"
    answers.mkdir(parents=True)
    frame.write.format(StagedSink.name()).mode("append").options(
        lake=str(lake), schema=json.dumps(schema.to_json()), answers=str(answers)
    ).save()
    files = [StagedFile.from_json(json.loads(path.read_text())) for path in answers.iterdir()]
    return _land(lake, schema, files, ZERO)


class StagedSink(DataSource):
    """Writes whatever Spark has as the loader's tasks do, with `stage`."""

    @classmethod
    def name(cls) -> str:
        return "bench-staged"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        options = self.options
        table_schema = TableSchema.from_json(json.loads(options["schema"]))
        return StagedWriter(Path(options["lake"]), table_schema, Path(options["answers"]))


class StagedWriter(DataSourceArrowWriter):
    """Puts on record, a file each, what was staged."""

    def __init__(self, lake: Path, schema: TableSchema, answers: Path) -> None:
        self._lake, self._schema, self._answers = lake, schema, answers

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for file in stage(self._lake, f"jdbc-{uuid.uuid4().hex}", self._schema, iterator):
            (self._answers / file.path).write_text(json.dumps(file.to_json()))
        return WriterCommitMessage()


def _land(lake: Path, schema: TableSchema, files: list[StagedFile], position: Lsn) -> int:
    return DeltaRsTable(lake, LOG_ID).commit_load(schema, files, AppliedPosition(seq=0, commit=0, position=position))


def _tree() -> dict[int, list[str]]:
    """This process and all below it, each with its fields of /proc/PID/stat from the third on."""
    stats: dict[int, list[str]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            stats[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
    found = {os.getpid()}
    while more := {pid for pid, fields in stats.items() if int(fields[1]) in found} - found:
        found |= more
    return {pid: stats[pid] for pid in found}


def _tree_cpu_seconds() -> float:
    """The CPU time of the driver, the JVM and the Python workers, all of which stay for the next load."""
    ticks = sum(int(field) for fields in _tree().values() for field in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def _worker_peak_bytes() -> int:
    """The most memory that one of the Python workers has held so far."""
    tree = _tree()
    daemons = {pid for pid in tree if b"spark.daemon" in Path(f"/proc/{pid}/cmdline").read_bytes()}
    return max((memory_peak_bytes(pid) or 0 for pid in daemons if int(tree[pid][1]) in daemons), default=0)


if __name__ == "__main__":
    sys.exit(main())
