"""The process that `apply.py` measures: ours and a script by hand, one micro-batch each in turn.

usage: python -m benchmarks.apply_child FOLDER ENGINE ROUNDS

The log is at FOLDER/log and the table to begin with at FOLDER/base; every round works on copies of it. The last line
printed is JSON.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow.parquet as pq
from deltalake import DeltaTable

from benchmarks.pg_snapshot import checksum
from tailrace.changelog.reader import ChangeLog
from tailrace.model import change
from tailrace.model.schema import TableId
from tailrace.pipeline.life import Lives
from tailrace.spark.tasks import ApplyWork, apply_changes
from tailrace.tables.layout import Layout

ROUNDS_BEFORE = 1
"""That do not count: libraries are loaded and kernels compiled in it."""


class Side(Protocol):
    """Applies one micro-batch after the other to its table."""

    def apply(self, number: int) -> None: ...


class Ours:
    """As the pipeline does it, but for Spark, which would carry the work to a task."""

    def __init__(self, log: Path, lake: Path, table: TableId) -> None:
        self._log = ChangeLog.open(log)
        self._lives = Lives(self._log, Layout(root=lake))
        self._lives.grow()
        self._life = self._lives.add(table)
        self._ends = [seal.last for seal in self._log.cold.seals]

    def apply(self, number: int) -> None:
        life, end = self._life, self._ends[number]
        self._lives.grow()
        stretch = self._lives.stretch(life, end)
        assert stretch is not None, "there are changes"
        assert life.cursor is not None, "it is loaded"
        assert life.shape is not None, "it is loaded"
        work = ApplyWork(
            table=life.table, log=self._log.path, place=life.place, slices=stretch.slices, shape=life.shape,
            expected=life.cursor, cursor=stretch.cursor,
        )  # fmt: skip
        outcome = apply_changes(work)
        if outcome.error is not None:
            raise outcome.error
        assert outcome.cursor is not None, "it did not fail"
        assert outcome.schema is not None, "it did not fail"
        life.moved(outcome.cursor, outcome.schema, outcome.version)


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
            self._table.merge(
                last, predicate="t.id = s.id", source_alias="s", target_alias="t", streamed_exec=False
            )
            .when_matched_delete(f"s.{change.OP} = 'delete'")
            .when_matched_update(values, f"s.{change.OP} <> 'delete'")
            .when_not_matched_insert(values, f"s.{change.OP} <> 'delete'")
            .execute()
        )


BY_HAND: dict[str, Callable[[list[Path], Path], Side]] = {"delta-rs": DeltaRsByHand}
"""By engine."""


def main() -> int:
    """Measure every round, compare the tables, report."""
    folder, engine, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    log = ChangeLog.open(folder / "log")
    log.schemas.load()
    (table,) = [version.schema.table for version in log.schemas.latest()]
    files = log.files(table)
    assert len(files) == len(log.cold.seals), "each micro-batch is one file"
    measured = []
    for number in range(1 - ROUNDS_BEFORE, rounds + 1):
        lakes = {side: folder / f"{side}-{engine}-{number}" for side in ("ours", "peer")}
        for lake in lakes.values():
            # Nobody writes to a file of a Delta table twice, so a link is as good as a copy.
            shutil.copytree(folder / "base", lake, copy_function=os.link)
        sides: dict[str, Side] = {
            "ours": Ours(folder / "log", lakes["ours"], table),
            "peer": BY_HAND[engine](files, Layout(root=lakes["peer"]).path(table)),
        }
        batches = len(files) if number > 0 else 1
        took = _take_turns(sides, batches)
        sums = {side: checksum(Layout(root=lake).path(table)) for side, lake in lakes.items()}
        if number > 0:
            measured.append({**took, "sums": sums})
            _say(f"round {number}: " + ", ".join(f"{side} {took[side]['wall']:.2f} s" for side in sides))
        for lake in lakes.values():
            shutil.rmtree(lake)
    versions = {"deltalake": metadata.version("deltalake")}
    print(json.dumps({"rounds": measured, "versions": versions}), flush=True)
    return 0


def _take_turns(sides: dict[str, Side], batches: int) -> dict[str, dict[str, float]]:
    """The seconds and CPU-seconds of each side."""
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
