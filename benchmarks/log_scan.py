"""log-scan: whether Spark reads the log's cold files as fast as plain Parquet of the same rows.

A log of 20 M changes of one table of 8 columns (70 % inserts, 20 % updates, 10 % deletes) is written and
sealed. Ours is Spark reading its cold files natively, by the paths that `ChangeLog.files` returns. The peer is
the same Spark session reading the same rows from Parquet that Spark itself wrote, with its own defaults and
zstd. Both read every column of every row into Spark's `noop` sink, which takes rows and drops them.

For this to be fair:
- one session with two cores (`local[2]`) and Spark's default settings reads both, in turn, after each was read once
  before the clock. Both lie in the same folder and are read from the page cache;
- Spark wrote the plain files from the cold ones, so rows, columns, types and their order are the same. That is
  checked by count and by a hash over all columns;
- Spark chose the size of its files and row groups. Ours are as the sealer leaves them: sealed in one go, then merged
  as the log's maintenance does it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks import machine, ours
from benchmarks.cells import Cell, CellsResult, Pair
from benchmarks.measure import BenchError, progress, scaled
from benchmarks.windows import SOURCE, long_window, table_schemas
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.write.writer import LogWriter
from tailrace.errors import TailraceError

RATE_TIMES_MIN = 0.9
ROWS = 20_000_000
ROWS_PER_COMMIT = 50_000
SECONDS_MAX = 3_600.0
CELL = "every column"
SUBJECT = "Spark on the log's cold files"


@dataclass(frozen=True)
class LogScan:
    """The bench."""

    about: str
    name: str = "log-scan"
    limits: dict[str, float] = field(default_factory=lambda: {CELL: RATE_TIMES_MIN})

    def run(self, rounds: int, scale: float) -> CellsResult:
        """Make the log once, then let one Spark session read it and its copy in every round."""
        described = machine.describe(ours.log_parent_folder())
        commits = scaled(ROWS // ROWS_PER_COMMIT, scale)
        rows = commits * ROWS_PER_COMMIT
        with ours.new_folder() as folder:
            try:
                table = _make_log(folder / "log", commits)
            except TailraceError as exc:
                raise BenchError(f"the log could not be made: {exc}", hint="Is the disk full?") from exc
            found = ours.run_child("benchmarks.scan_child", str(folder), table, str(rounds), seconds_max=SECONDS_MAX)
        if found["rows"] != rows:
            raise BenchError(f"the cold files hold {found['rows']} of {rows} rows", hint="Look for lost rows.")
        described["versions"] |= found["versions"]
        return CellsResult(
            name=self.name,
            peer_name="plain Parquet",
            cells=(
                Cell(
                    name=CELL,
                    unit="rows/s",
                    must_reach=RATE_TIMES_MIN,
                    pairs=tuple(Pair(ours=rows / took["ours"], peer=rows / took["peer"]) for took in found["seconds"]),
                    costs=False,
                ),
            ),
            machine=described,
            setup={
                "ours": SUBJECT,
                "workload": f"{rows:,} changes of one table of 8 columns, sealed",
                "files": found["files"],
                "bytes": found["bytes"],
            },
            scale=scale,
        )


def _make_log(path: Path, commits: int) -> str:
    """Write and seal the log; the table's name."""
    progress(f"writing a log of {commits * ROWS_PER_COMMIT:,} changes")
    (schema,) = table_schemas(1)
    random = np.random.default_rng(1)
    writer = LogWriter(path, SOURCE)
    for _ in range(commits):
        writer.append(long_window(schema, writer.position, writer.next_seq, ROWS_PER_COMMIT, random))
    writer.close()
    progress("sealing it")
    with Sealer(path) as sealer:
        sealer.seal()
        sealer.merge_seals()
    return str(schema.table)


BENCH = LogScan(about=__doc__)
