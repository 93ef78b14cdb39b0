"""snapshot-growth: whether a row costs the same to load when the table is large, and how much memory a task takes.

Two tables of pg-stream's 8 columns, of 1 M and of 20 M rows, are each loaded into a new Delta table as in pg-snapshot.
It is planned, read chunk by chunk in two Spark tasks at a time, and committed at once. A million rows of the large one
may take 1.15 times the seconds that one of the small one takes. The ratio is the inverse, so it must reach 0.87. And no
Python worker may ever have held more than 450 MiB (VmHWM), including imports and compiled kernels. There the ratio is
the limit over the measured.

For this to be fair:
- the session is warm: both tables are loaded once before the first round. The one-time cost of a load (planning,
  snapshot, record, commit) is included, and the small table has fewer rows to share it;
- a worker is used again from one load to the next, so its peak is that of all loads until then;
- no Delta table is removed before its round is over, and each must hold exactly the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import psycopg

from benchmarks import machine, ours
from benchmarks.cells import Cell, CellsResult, Pair
from benchmarks.measure import BenchError, Measured, progress, scaled
from benchmarks.pg_snapshot import SUBJECT, Loader, checksum, loader
from benchmarks.postgres import DATABASE, Admin, ask, server_settings
from benchmarks.workloads import one_transaction
from tailrace.demo.server import EmbeddedPostgres
from tailrace.demo.server_binaries import ServerFailed

MIB = 1 << 20
ROWS = {"few": 1_000_000, "many": 20_000_000}
COST_TIMES_MAX = 1.15
MEMORY_MIB_MAX = 450
COST, MEMORY = "20 M rows", "memory of a task"


@dataclass(frozen=True)
class SnapshotGrowth:
    """The bench."""

    about: str
    name: str = "snapshot-growth"
    limits: dict[str, float] = field(default_factory=lambda: {COST: 1 / COST_TIMES_MAX, MEMORY: 1.0})

    def run(self, rounds: int, scale: float) -> CellsResult:
        """Make the tables once, then load both in every round."""
        described = machine.describe(ours.log_parent_folder())
        sizes = {name: scaled(rows, scale, least=1000) for name, rows in ROWS.items()}
        try:
            with EmbeddedPostgres(settings=server_settings(slots=2)) as server:
                with server.connect(DATABASE, autocommit=True) as admin:
                    described["versions"]["postgresql"] = str(ask(admin, "show server_version"))
                    for name, rows in sizes.items():
                        _fill(admin, name, rows)
                with loader("ours", server) as mine:
                    found = [_round(mine, sizes, number) for number in range(rounds + 1)][1:]  # the first one warms
        except (ServerFailed, psycopg.Error) as exc:
            raise BenchError(f"the embedded PostgreSQL failed: {exc}", hint="Its log says more.") from exc
        return CellsResult(
            name=self.name,
            peer_name="1 M rows, or limit",
            cells=(
                Cell(
                    name=COST,
                    unit="s per million",
                    must_reach=1 / COST_TIMES_MAX,
                    pairs=tuple(Pair(ours=_seconds(of["many"]), peer=_seconds(of["few"])) for of in found),
                ),
                Cell(
                    name=MEMORY,
                    unit="MiB",
                    must_reach=1.0,
                    pairs=tuple(Pair(ours=_peak_mib(of["many"]), peer=MEMORY_MIB_MAX) for of in found),
                ),
            ),
            machine=described,
            setup={
                "ours": SUBJECT,
                "workload": " and ".join(f"{rows:,}" for rows in sizes.values()) + " rows of 8 columns",
                "transport": f"TCP {EmbeddedPostgres.host}",
            },
            scale=scale,
        )


def _fill(admin: Admin, name: str, rows: int) -> None:
    progress(f"making a table of {rows:,} rows")
    workload = one_transaction(rows)
    for statement in (workload.tables, workload.changes):
        admin.execute(statement.replace("orders", name).replace("publication bench", f"publication {name}").encode())
    admin.execute(f"vacuum (freeze, analyze) {name}".encode())
    admin.execute("checkpoint")


def _round(mine: Loader, sizes: dict[str, int], number: int) -> dict[str, Measured]:
    found = {}
    with ours.new_folder() as folder:
        for name, rows in sizes.items():
            run, further = mine.load(name, name, rows, folder / name)
            row_count, _ = checksum(folder / name / "lake")
            if row_count != rows:
                raise BenchError(f"the table holds {row_count} of {rows} rows", hint="Look for lost or repeated rows.")
            progress(
                f"{f'round {number}' if number else 'warming'}, {rows:,} rows: {_seconds(run):.3f} s per million, "
                f"{run.rate:,.0f} rows/s, cpu {run.cpu_seconds / rows * 1e6:.3f} s per million, {further['parts']} "
                f"parts, a worker of at most {_peak_mib(run):,.0f} MiB"
            )
            found[name] = run
    return found


def _seconds(run: Measured) -> float:
    return run.wall_seconds / run.rows * 1e6


def _peak_mib(run: Measured) -> float:
    return (run.memory_peak_bytes or 0) / MIB


BENCH = SnapshotGrowth(about=__doc__)
