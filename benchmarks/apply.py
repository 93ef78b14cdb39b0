"""apply: how fast changes of the log get into a Delta table, against the same fold and merge written by hand.

A Delta table of 1 M or of 10 M rows of pg-stream's 8 columns gets 1,000,000 changes in 10 micro-batches. 50 % are
inserts, 40 % updates and 10 % deletes, of keys from all over the table. Ours does the same as `tailrace run` with each
of them. It plans the apply range, reads it from the log, folds it to the last state of every key and writes that to the
table in one commit. The peer is a script such as a person writes for the one table and the one engine. For delta-rs it
reads the same sealed files of the log with pyarrow, keeps the last change of every key with numpy, and calls delta-rs's
`merge`. For Spark's Delta connector it does all of that in SQL. Ours must reach nine tenths of its rate with each
engine.

For this to be fair:
- the sides take turns, micro-batch by micro-batch, in one process, and change who begins. Each has a table of its own,
  both made of the same files, and what they merge has the same rows. With Spark both are in one session, with the same
  settings;
- every micro-batch is one sealed Parquet file, the easiest input for a script. The script is given the file, reads only
  the columns it needs, and keeps its table open. Ours finds the rows itself and opens the table again each time;
- the script keeps no position, checks nothing, handles no unsent values, key moves, truncates or schema changes, and
  leaves its files in the operating system's cache. Ours does all of that and fsyncs files and commit;
- with delta-rs Spark only gives the work to a task, so it is left out here on both sides. The
  bench end-to-end has it in;
- Spark's connector runs in the environment that `make engines` makes, because nobody publishes one for the Spark that
  all else uses. Where that is missing the report lacks those cells, and a line says so;
- both tables must hold the same rows in the end: their count, and a sum of a hash of each row.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine, ours
from benchmarks.cells import Cell, CellsResult, Pair
from benchmarks.measure import BenchError, progress, scaled
from benchmarks.windows import DELETED, INSERTED, SOURCE, UPDATED, changes_window, rows_of_table, table_schemas
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write.writer import LogWriter
from tailrace.errors import TailraceError
from tailrace.model.position import ZERO
from tailrace.tables.location import LakeLayout
from tailrace.tables.port import AppliedPosition

RATE_TIMES_MIN = 0.9
ENGINES = ("delta-rs", "spark")
SIZES = {"1 M rows": 1_000_000, "10 M rows": 10_000_000}
CHANGES = 1_000_000
BATCHES = 10
COMMITS_PER_BATCH = 10
SECONDS_MAX = 7_200.0
SUBJECT = "Tailrace: TableRegistry.next_range and apply_changes, fsync on"


@dataclass(frozen=True)
class Apply:
    """The bench."""

    about: str
    name: str = "apply"
    limits: dict[str, float] = field(
        default_factory=lambda: {_cell(engine, size): RATE_TIMES_MIN for engine in ENGINES for size in SIZES}
    )

    def run(self, rounds: int, scale: float) -> CellsResult:
        """A table and a log for every size, then every engine on it."""
        described = machine.describe(ours.log_parent_folder())
        # Of few changes each commit would have less than a row.
        changes = scaled(CHANGES, scale, least=10 * BATCHES * COMMITS_PER_BATCH)
        engines = [engine for engine in ENGINES if _python(engine).exists()]
        for engine in set(ENGINES) - set(engines):
            progress(f"{engine}: NOT MEASURED, there is no {_python(engine)}; `make engines` makes it")
        cells: list[Cell] = []
        cpu_seconds: dict[str, Any] = {}
        for size, rows in SIZES.items():
            with ours.new_folder() as folder:
                try:
                    _prepare(folder, scaled(rows, scale, least=changes), changes)
                except TailraceError as exc:
                    raise BenchError(f"the table could not be made: {exc}", hint="Is the disk full?") from exc
                for engine in engines:
                    found = _measure(folder, engine, size, rounds)
                    cells.append(
                        Cell(
                            name=_cell(engine, size),
                            unit="changes/s",
                            must_reach=RATE_TIMES_MIN,
                            costs=False,
                            pairs=tuple(
                                Pair(ours=changes / took["ours"]["wall"], peer=changes / took["peer"]["wall"])
                                for took in found["rounds"]
                            ),
                        )
                    )
                    if engine == "delta-rs":
                        cpu_seconds[_cell(engine, size)] = [
                            [round(took[side]["cpu"], 2) for side in ("ours", "peer")] for took in found["rounds"]
                        ]
                    described["versions"] |= found["versions"]
        return CellsResult(
            name=self.name,
            peer_name="by hand",
            cells=tuple(cells),
            machine=described,
            setup={
                "ours": SUBJECT,
                "workload": f"{changes:,} changes, 50/40/10 inserts, updates and deletes, in {BATCHES} micro-batches",
                "cpu_seconds_ours_and_peer": cpu_seconds,
            },
            scale=scale,
        )


def _cell(engine: str, size: str) -> str:
    return f"{engine}, {size}"


def _python(engine: str) -> Path:
    return Path(sys.executable) if engine == "delta-rs" else ours.SPARK_VENV / "bin" / "python"


def _measure(folder: Path, engine: str, size: str, rounds: int) -> dict[str, Any]:
    progress(f"{engine}, {size}")
    found = ours.run_child(
        "benchmarks.apply_child", str(folder), engine, str(rounds), seconds_max=SECONDS_MAX, python=_python(engine)
    )
    if any(took["sums"]["ours"] != took["sums"]["peer"] for took in found["rounds"]):
        raise BenchError("the tables differ in the end", hint="The sides did different work.")
    return found


def _prepare(folder: Path, rows: int, changes: int) -> None:
    """The table, and the log of the changes: each micro-batch a file of its own."""
    progress(f"making a table of {rows:,} rows and a log of {changes:,} changes")
    (schema,) = table_schemas(1)
    random = np.random.default_rng(1)
    writer = LogWriter(folder / "log", SOURCE)
    log_id = ChangeLog.open(folder / "log").log_id
    place = LakeLayout(root=folder / "base").location(schema.table, log_id)
    place.open().load(schema, rows_of_table(schema, rows, random), AppliedPosition(seq=0, commit=0, position=ZERO))

    operations, ids = _changes(rows, changes, random)
    each = changes // (BATCHES * COMMITS_PER_BATCH)
    cuts = np.arange(1, BATCHES * COMMITS_PER_BATCH) * each
    for number, (some, keys) in enumerate(zip(np.split(operations, cuts), np.split(ids, cuts), strict=True), start=1):
        writer.append(changes_window(schema, writer.position, writer.next_seq, some, keys, random))
        if number % COMMITS_PER_BATCH == 0:
            with Sealer(folder / "log") as sealer:
                sealer.seal()
    writer.close()


def _changes(rows: int, changes: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Operations and keys: every key inserted is new, none is deleted twice, and none is updated that is deleted."""
    deletes, updates = changes // 10, 2 * changes // 5
    keys = random.permutation(rows) + 1
    operations = np.full(changes, INSERTED)
    operations[:deletes], operations[deletes : deletes + updates] = DELETED, UPDATED
    operations = random.permutation(operations)
    ids = rows + 1 + np.arange(changes)
    ids[operations == DELETED] = keys[:deletes]
    ids[operations == UPDATED] = random.choice(keys[deletes:], updates)
    return operations, ids


BENCH = Apply(about=__doc__)
