"""The process that `apply.py` measures: ours and a script by hand, one micro-batch each in turn.

usage: python -m benchmarks.apply_child FOLDER ENGINE ROUNDS

The log is at FOLDER/log and the table to begin with at FOLDER/base; every round works on copies of it. The last line
printed is JSON.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow.parquet as pq
from deltalake import DeltaTable

from benchmarks.pg_snapshot import checksum
from tailrace.changelog.read.reader import ChangeLog
from tailrace.model import change
from tailrace.model.schema import TableId
from tailrace.pipeline.tables.registry import TableRegistry
from tailrace.tables.location import LakeLayout
from tailrace.tasks.apply import advance_table, apply_changes
from tailrace.tasks.work import ApplyWork, Outcome

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PACKAGES = {"delta-rs": ["deltalake"], "spark": ["pyspark"]}
ROUNDS_BEFORE = 1
"""That do not count: libraries are loaded and kernels compiled in it."""


class Side(Protocol):
    """Applies one micro-batch after the other to its table."""

    def apply(self, number: int) -> None: ...


class Ours:
    """As the pipeline does it. With delta-rs, Spark would only carry the work to a task, and is left out."""

    def __init__(self, log: Path, layout: LakeLayout, table: TableId, run: Callable[[ApplyWork], Outcome]) -> None:
        self._log = ChangeLog.open(log)
        self._registry = TableRegistry(self._log, layout)
        self._run = run
        self._registry.refresh_index()
        self._managed = self._registry.add(table)
        self._ends = [seal.last for seal in self._log.seal_index.seals]

    def apply(self, number: int) -> None:
        managed, end = self._managed, self._ends[number]
        self._registry.refresh_index()
        apply_range = self._registry.next_range(managed, end)
        assert apply_range is not None, "there are changes"
        assert managed.applied_position is not None, "it is loaded"
        assert managed.schema is not None, "it is loaded"
        work = ApplyWork(
            table=managed.table,
            log=self._log.path,
            location=managed.location,
            slices=apply_range.slices,
            schema=managed.schema,
            expected=managed.applied_position,
            position_after=apply_range.position_after,
        )
        outcome = self._run(work)
        if outcome.error is not None:
            raise outcome.error
        assert outcome.applied_position is not None, "it did not fail"
        assert outcome.schema is not None, "it did not fail"
        managed.record_commit(outcome.applied_position, outcome.schema, outcome.version)


class DeltaRsByHand:
    """What one writes who knows the table, the files and delta-rs, and nothing can go wrong."""

    def __init__(self, files: list[Path], table: Path) -> None:
        self._files = files
        self._table = DeltaTable(str(table))
        self._columns = [field.name for field in self._table.schema().fields]

    def apply(self, number: int) -> None:
        changes = pq.read_table(self._files[number], columns=[change.OP, *self._columns])
        _, from_the_end = np.unique(changes["id"].to_numpy()[::-1], return_index=True)
        last = changes.take(changes.num_rows - 1 - from_the_end)
        values = {name: f"s.{name}" for name in self._columns}
        (
            self._table.merge(last, predicate="t.id = s.id", source_alias="s", target_alias="t", streamed_exec=False)
            .when_matched_delete(f"s.{change.OP} = 'delete'")
            .when_matched_update(values, f"s.{change.OP} <> 'delete'")
            .when_not_matched_insert(values, f"s.{change.OP} <> 'delete'")
            .execute()
        )


class SparkByHand:
    """The same of one who knows Spark's SQL and its Delta connector."""

    def __init__(self, spark: SparkSession, files: list[Path], table: Path) -> None:
        self._spark, self._files, self._path = spark.newSession(), files, table
        self._columns = [field.name for field in DeltaTable(str(table)).schema().fields]

    def apply(self, number: int) -> None:
        from pyspark.sql import functions as f

        changes = self._spark.read.parquet(str(self._files[number])).select(change.SEQ, change.OP, *self._columns)
        last = f.max_by(f.struct(*changes.columns), change.SEQ).alias("last")
        changes.groupBy("id").agg(last).select("last.*").createOrReplaceTempView("changes")
        own = ", ".join(self._columns)
        theirs = ", ".join(f"s.{name}" for name in self._columns)
        self._spark.sql(
            f"MERGE INTO delta.`{self._path}` t USING changes s ON t.id = s.id "
            f"WHEN MATCHED AND s.{change.OP} = 'delete' THEN DELETE "
            f"WHEN MATCHED THEN UPDATE SET {', '.join(f't.{name} = s.{name}' for name in self._columns)} "
            f"WHEN NOT MATCHED AND s.{change.OP} <> 'delete' THEN INSERT ({own}) VALUES ({theirs})"
        )


class WithDeltaRs:
    """Both sides, with delta-rs,"""

    def sides(self, log: Path, files: list[Path], ours: Path, peer: Path, table: TableId) -> dict[str, Side]:
        return {
            "ours": Ours(log, LakeLayout(root=ours), table, apply_changes),
            "peer": DeltaRsByHand(files, LakeLayout(root=peer).path(table)),
        }


class WithSpark:
    """and with Spark's connector, in one Spark."""

    def __init__(self) -> None:
        from tailrace.spark.session.connectors import connector_settings
        from tailrace.spark.session.session import Jvm
        from tailrace.spark.writers.engine import SparkEngine

        scratch = Path(tempfile.mkdtemp(prefix="tailrace-bench-spark-"))
        jvm = Jvm("bench", scratch, scratch / "spark.log", settings=connector_settings({}))
        atexit.register(shutil.rmtree, scratch, ignore_errors=True)
        atexit.register(jvm.kill)
        self._spark = jvm.open_session()
        atexit.register(self._spark.stop)
        self._engine = SparkEngine(self._spark)

    def sides(self, log: Path, files: list[Path], ours: Path, peer: Path, table: TableId) -> dict[str, Side]:
        return {
            "ours": Ours(log, LakeLayout(root=ours, engine="spark"), table, self._run),
            "peer": SparkByHand(self._spark, files, LakeLayout(root=peer).path(table)),
        }

    def _run(self, work: ApplyWork) -> Outcome:
        (outcome,) = self._engine.run(advance_table, [work])
        return outcome


ENGINES: dict[str, Callable[[], WithDeltaRs | WithSpark]] = {"delta-rs": WithDeltaRs, "spark": WithSpark}


def main() -> int:
    """Measure every round, compare the tables, report."""
    folder, engine, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    log = ChangeLog.open(folder / "log")
    log.schemas.load()
    (table,) = [version.schema.table for version in log.schemas.latest()]
    files = [Path(str(file)) for file in log.files(table)]
    assert len(files) == len(log.seal_index.seals), "each micro-batch is one file"
    both, measured = ENGINES[engine](), []
    for number in range(1 - ROUNDS_BEFORE, rounds + 1):
        lakes = {side: folder / f"{side}-{engine}-{number}" for side in ("ours", "peer")}
        for lake in lakes.values():
            # Nobody writes to a file of a Delta table twice, so a link is as good as a copy.
            shutil.copytree(folder / "base", lake, copy_function=os.link)
        sides = both.sides(folder / "log", files, lakes["ours"], lakes["peer"], table)
        batches = len(files) if number > 0 else 1
        took = _take_turns(sides, batches)
        sums = {side: checksum(LakeLayout(root=lake).path(table)) for side, lake in lakes.items()}
        if number > 0:
            measured.append({**took, "sums": sums})
            _say(f"round {number}: " + ", ".join(f"{side} {took[side]['wall']:.2f} s" for side in sides))
        for lake in lakes.values():
            shutil.rmtree(lake)
    versions = {name: metadata.version(name) for name in PACKAGES[engine]}
    print(json.dumps({"rounds": measured, "versions": versions}), flush=True)
    return 0


def _take_turns(sides: dict[str, Side], batches: int) -> dict[str, dict[str, float]]:
    """The seconds and CPU-seconds of each side; the latter are this process's, not those of its Java."""
    took = {side: {"wall": 0.0, "cpu": 0.0} for side in sides}
    for number in range(batches):
        for side in sorted(sides, reverse=number % 2 == 1):
            cpu, wall = _cpu_seconds(), time.perf_counter()
            sides[side].apply(number)
            took[side]["wall"] += time.perf_counter() - wall
            took[side]["cpu"] += _cpu_seconds() - cpu
    return took


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
