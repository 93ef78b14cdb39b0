"""end-to-end: how long after its commit at the source a change can be read from the Delta table, under a steady load.

Five tables of 1 M rows of pg-stream's 8 columns are loaded by `tailrace run`. Then a load process makes 10,000 changes
a second for 5 minutes at a steady pace: 50 % inserts, 40 % updates and 10 % deletes. 70 % of all changes hit
the newest 10 % of the keys, and the others any older one. A third process reads the Delta tables. A change's
latency runs from the moment its transaction is sent until that process has opened the table afresh and finds the
transaction's rows in it. There is no peer. Half of the changes must be there within 6 s (p50), all but one in a hundred
within 15 s (p99); the ratio is the limit over the measured. And the pipeline must keep up: until the last change is
seen it must reach 0.95 of the rate that the load has.

For this to be fair:
- all is real and on this machine: the server, `tailrace run` with its capture process and its Spark without further
  options, the load and the reader. All of them share its cores. fsync and `synchronous_commit` are on;
- the clock starts before the transaction is sent, so the time that the server takes for it counts too. All stamps are
  of the same clock;
- the reader does not know our positions. It sees a transaction when the newest version of the table holds the keys that
  the transaction inserted. It opens that version like a reader that has never seen the table. A transaction has 100
  changes of one table, and a table has one connection. So keys are inserted in the order of commits, and the newest are
  never deleted;
- every transaction counts, from the first to the last. The load must have kept its pace, or the bench fails;
- in the end the tables must hold what the source holds: the number of rows, and sums over their columns.

`end-to-end-large` shows the same for tables of 10 M rows, without a limit. A Delta table is changed by
rewriting whole files, so the same changes cost about ten times as much there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import duckdb
import psycopg
from deltalake import DeltaTable

from benchmarks import machine, ours
from benchmarks.cells import Cell, CellsResult, Pair
from benchmarks.measure import BenchError, progress, scaled
from benchmarks.pipelines import running
from benchmarks.steady_load import CHANGES_PER_TRANSACTION
from benchmarks.workloads import orders_table
from tailrace.demo.server import EmbeddedPostgres
from tailrace.demo.server_binaries import ServerFailed

LIMIT_SECONDS = {"p50": 6.0, "p99": 15.0}
KEEPS_UP = "keeps up"
RATE_TIMES_MIN = 0.95
TABLES = 5
ROWS, ROWS_LARGE = 1_000_000, 10_000_000
RATE = 10_000
SECONDS, SECONDS_LARGE = 300, 60
LATE_SECONDS_MAX = 300.0
"""After the load, for the last change to be seen; then the bench gives up."""
LOAD_SECONDS_MAX = 3_600.0
SUBJECT = "tailrace run: commit at the source to rows in a fresh reader of the Delta tables, fsync on"
SETTINGS = {
    "wal_level": "logical",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "1h",
    "autovacuum": "off",
    "synchronous_commit": "on",
}
_SUMS = "count(*), sum(id), sum(customer_id), sum(amount), sum(length(status)), sum(length(note)), sum(score)"


@dataclass(frozen=True)
class EndToEnd:
    """The bench. With large tables its figures have no limit."""

    about: str
    name: str = "end-to-end"
    rows: int = ROWS
    seconds: int = SECONDS
    limits: dict[str, float] = field(
        default_factory=lambda: {KEEPS_UP: RATE_TIMES_MIN, **dict.fromkeys(LIMIT_SECONDS, 1.0)}
    )

    def run(self, rounds: int, scale: float) -> CellsResult:
        """A server, a pipeline and tables of their own for every round."""
        described = machine.describe(ours.log_parent_folder())
        rows, rate = scaled(self.rows, scale, least=20_000), scaled(RATE, scale, least=1_000)
        seconds = scaled(self.seconds, scale, least=6)
        try:
            found = [self._round(number, rows, rate, seconds) for number in range(1, rounds + 1)]
        except (ServerFailed, psycopg.Error) as exc:
            raise BenchError(f"the round could not be run: {exc}", hint="Its log says more.") from exc
        rates = tuple(Pair(ours=took["rate"], peer=took["asked"]) for took in found)
        return CellsResult(
            name=self.name,
            peer_name="limit",
            cells=(
                Cell(name=KEEPS_UP, unit="changes/s", must_reach=self.limits.get(KEEPS_UP), pairs=rates, costs=False),
                *(
                    Cell(
                        name=which,
                        unit="s",
                        must_reach=self.limits.get(which),
                        pairs=tuple(Pair(ours=took[which], peer=limit) for took in found),
                    )
                    for which, limit in LIMIT_SECONDS.items()
                ),
            ),
            machine=described,
            setup={
                "ours": SUBJECT,
                "workload": f"{TABLES} tables of {rows:,} rows, {rate:,} changes/s for {seconds} s",
                "transport": f"TCP {EmbeddedPostgres.host}",
                "rounds": [{name: round(value, 2) for name, value in took.items()} for took in found],
            },
            scale=scale,
        )

    def _round(self, number: int, rows: int, rate: int, seconds: int) -> dict[str, float]:
        with ours.new_folder() as folder, EmbeddedPostgres(settings=SETTINGS) as server:
            progress(f"round {number}: making {TABLES} tables of {rows:,} rows")
            with server.connect(autocommit=True) as admin:
                for table in range(TABLES):
                    admin.execute(orders_table(f"t{table}", rows).encode())
                    admin.execute(f"vacuum (freeze, analyze) t{table}".encode())
                admin.execute("checkpoint")
            progress("loading them")
            with running(folder / "pipeline", server.url(), TABLES, load_seconds_max=LOAD_SECONDS_MAX) as lake:
                progress(f"{rate:,} changes/s for {seconds} s")
                found: dict[str, float] = ours.run_child(
                    "benchmarks.steady_load",
                    server.url(),
                    str(lake / "public"),
                    *map(str, (TABLES, rows, rate, seconds, LATE_SECONDS_MAX)),
                    seconds_max=seconds + 2 * LATE_SECONDS_MAX,
                )
                if found["unseen"] == 0:
                    _check(server, lake / "public")
        found["asked"] = float(rate // CHANGES_PER_TRANSACTION * CHANGES_PER_TRANSACTION)
        progress(f"round {number}: " + ", ".join(f"{name} {value:.4g}" for name, value in found.items()))
        return found


def _check(server: EmbeddedPostgres, lake: Path) -> None:
    """Compare every Delta table with its source."""
    with server.connect(autocommit=True) as admin, duckdb.connect() as engine:
        for table in range(TABLES):
            wanted = admin.execute(f"select {_SUMS} from t{table}".encode()).fetchone()
            files = DeltaTable(str(lake / f"t{table}")).file_uris()
            found = engine.execute(f"select {_SUMS} from read_parquet($files)", {"files": files}).fetchone()
            if wanted is None or found is None or list(map(float, wanted)) != list(map(float, found)):
                raise BenchError(f"t{table} holds {found}, its source {wanted}", hint="Look for lost changes.")


BENCH = EndToEnd(about=__doc__)
LARGE = EndToEnd(
    about="""end-to-end-large: a minute of the load of end-to-end, into five tables of 10 M rows; for information.

It has no limit of its own; the limits of end-to-end are shown next to the values. It is not among `all`: every
micro-batch rewrites all five tables and nothing is removed before the end, so it takes long and needs much disk.
""",
    name="end-to-end-large",
    rows=ROWS_LARGE,
    seconds=SECONDS_LARGE,
    limits={},
)
