"""spark-source: whether `readStream.format("cdc")` reads the log as fast as Python can pass Arrow to Spark.

A log of 5 M changes of one table of 8 columns (70 % inserts, 20 % updates, 10 % deletes) is written. Ours is a typed
stream over it into Spark's `noop` sink, which takes rows and drops them, in one partition and in two. The peer is a
Python data source that does nothing: it yields one of the very batches that ours yields, as often as there are
commits. So the ratio is the cost of finding, checking and reading the log. It is measured over commits as the
capture leaves them and, without a limit, over the same commits sealed to Parquet.

For this to be fair:
- one session with two cores (`local[2]`) and Spark's default settings runs both, in turn, after each ran once before
  the clock. The log is read from the page cache, and so is the peer's batch;
- the value is the time that Spark itself records for the micro-batch that has the rows (`triggerExecution`). Starting a
  query costs both the same, and so makes neither look better;
- every row of both must have arrived (`numInputRows`); both have the same columns and batches of the same size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from benchmarks import machine, ours
from benchmarks.cells import Cell, CellsResult, Pair
from benchmarks.measure import BenchError, progress, scaled
from benchmarks.windows import SOURCE, long_window, table_schemas
from tailrace.changelog.write.writer import LogWriter
from tailrace.errors import TailraceError

RATE_TIMES_MIN = 0.8
ROWS = 5_000_000
ROWS_PER_COMMIT = 50_000
SECONDS_MAX = 3_600.0
CELLS: dict[str, float | None] = {
    "1 partition": RATE_TIMES_MIN, "2 partitions": RATE_TIMES_MIN, "sealed, 1 partition": None,
    "sealed, 2 partitions": None,
}  # fmt: skip
SUBJECT = 'a typed stream of format("cdc") from the log to noop'


@dataclass(frozen=True)
class SparkSource:
    """The bench."""

    about: str
    name: str = "spark-source"
    limits: dict[str, float] = field(
        default_factory=lambda: {name: limit for name, limit in CELLS.items() if limit is not None}
    )

    def run(self, rounds: int, scale: float) -> CellsResult:
        """Make the log once, then let one Spark session stream it and the peer in every round."""
        described = machine.describe(ours.log_parent_folder())
        commits = scaled(ROWS // ROWS_PER_COMMIT, scale, least=2)
        rows = commits * ROWS_PER_COMMIT
        (schema,) = table_schemas(1)
        with ours.new_folder() as folder:
            progress(f"writing a log of {rows:,} changes")
            random = np.random.default_rng(1)
            try:
                writer = LogWriter(folder / "log", SOURCE)
                for _ in range(commits):
                    writer.append(long_window(schema, writer.position, writer.next_seq, ROWS_PER_COMMIT, random))
                writer.close()
            except TailraceError as exc:
                raise BenchError(f"the log could not be made: {exc}", hint="Is the disk full?") from exc
            found = ours.run_child(
                "benchmarks.spark_source_child",
                str(folder),
                str(schema.table),
                str(commits),
                str(rounds),
                seconds_max=SECONDS_MAX,
            )
        if found["rows"] != [rows]:
            raise BenchError(f"{found['rows']} of {rows} rows came", hint="Look for lost rows.")
        described["versions"] |= found["versions"]
        return CellsResult(
            name=self.name,
            peer_name="bare Python source",
            cells=tuple(
                Cell(
                    name=name,
                    unit="rows/s",
                    must_reach=limit,
                    costs=False,
                    pairs=tuple(
                        Pair(ours=rows / took["ours"], peer=rows / took["peer"]) for took in found["seconds"][name]
                    ),
                )
                for name, limit in CELLS.items()
            ),
            machine=described,
            setup={"ours": SUBJECT, "workload": f"{rows:,} changes of one table of 8 columns in {commits} commits"},
            scale=scale,
        )


BENCH = SparkSource(about=__doc__)
