"""spark-trigger: how long after its commit at the source a row reaches `foreachBatch`.

`tailrace capture` writes the changes of a table to the log, and a typed stream of `format("cdc")` over that log passes
them to a `foreachBatch`. Rows are inserted one by one, each in a transaction of its own. The next is inserted only when
the one before has arrived, after a pause that differs each time, so every one is a micro-batch of its own. A row's
latency runs from the moment the server stamped into its commit record (`_committed_at`) to the moment Spark calls the
function with it. There is no peer: half of the rows (p50) must arrive within 400 ms, and the ratio is the limit over
the measured. Two more values are shown: the slowest in a hundred (p99), and the time until the function has collected
the row, which runs a Spark job.

For this to be fair:
- the session is Spark with its defaults (`local[2]`), with no setting that makes micro-batches faster;
- both stamps are from the same clock of the same machine, which also runs server, capture and Spark;
- the first rows, while Spark is still compiling itself, are not counted; every one after that is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import psycopg

from benchmarks import machine, ours
from benchmarks.cells import Cell, CellsResult, Pair
from benchmarks.measure import BenchError, progress, scaled
from benchmarks.pg_latency import SETTINGS
from tailrace.demo.server import EmbeddedPostgres
from tailrace.demo.server_binaries import ServerFailed
from tailrace.errors import TailraceError

LIMIT_MS = 400.0
ROWS = 100
SECONDS_MAX = 1_200.0
CELLS: dict[str, float | None] = {"p50": 1.0, "p99": None, "p50, collected": None}
SUBJECT = 'tailrace capture and readStream.format("cdc"): commit at the source to foreachBatch'


@dataclass(frozen=True)
class SparkTrigger:
    """The bench."""

    about: str
    name: str = "spark-trigger"
    limits: dict[str, float] = field(default_factory=lambda: {"p50": 1.0})

    def run(self, rounds: int, scale: float) -> CellsResult:
        """A server, a capture and a Spark session of their own for every round."""
        described = machine.describe(ours.log_parent_folder())
        rows = scaled(ROWS, scale, least=5)
        try:
            measured = [self._round(number, rows) for number in range(1, rounds + 1)]
        except (ServerFailed, psycopg.Error, TailraceError) as exc:
            raise BenchError(f"the round could not be run: {exc}", hint="Its log says more.") from exc
        return CellsResult(
            name=self.name,
            peer_name="limit",
            cells=tuple(
                Cell(
                    name=name,
                    unit="ms",
                    must_reach=limit,
                    pairs=tuple(Pair(ours=found[name], peer=LIMIT_MS) for found in measured),
                )
                for name, limit in CELLS.items()
            ),
            machine=described,
            setup={
                "ours": SUBJECT,
                "workload": f"{rows} one-row transactions, one after the other",
                "rounds": measured,
                "transport": f"TCP {EmbeddedPostgres.host}",
            },
            scale=scale,
        )

    def _round(self, number: int, rows: int) -> dict[str, float]:
        with (
            ours.new_folder() as folder,
            EmbeddedPostgres(settings=SETTINGS) as server,
            server.connect(autocommit=True) as admin,
        ):
            admin.execute("create table t (id bigint primary key, state text, amount numeric(12, 2))")
            with ours.capturing(folder, server.url()) as (log, _):
                found: dict[str, float] = ours.run_child(
                    "benchmarks.spark_trigger_child",
                    server.url(),
                    str(log),
                    str(rows),
                    str(folder),
                    seconds_max=SECONDS_MAX,
                )
        progress(f"round {number}: " + ", ".join(f"{name} {value:.4g}" for name, value in found.items()))
        return found


BENCH = SparkTrigger(about=__doc__)
