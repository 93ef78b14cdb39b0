"""pg-growth: whether a change costs the same when there are many of them, or many tables.

There are four backlogs of inserts of 8 columns, all in transactions of 1,000 rows. Three are in one table: 1 M, 4 M and
20 M. One has 4 M spread over 200 tables, 5 rows of each in every transaction. Each is drained into a new change log as
in pg-stream. The value is the CPU time of the capture process per million changes. The peer is ours in the same round
over one table. 20 M may cost 1.1 times as much per million as 1 M, and 4 M of 200 tables 1.5 times as much as 4 M of
one. The ratio is the inverse, so it must reach 0.909 and 0.667.

For this to be fair:
- every backlog has slots and a publication of its own, so a run receives exactly its own changes and ends
  with them; the log must hold exactly as many rows;
- the CPU time is that of all threads of the process from opening the connection to the last confirmed commit.
  Imports and loading compiled kernels happen before, or the small backlog would look expensive because of them. Sealing
  is not included: it can wait, so a short run would have none of it and a long one all. The bench `seal` has it;
- the one-time cost of a table, describing it and recording its schema durably, is included, and 4 M changes share
  it: about 2 ms a table. Over a single million, 200 tables cost 1.6 times as much as one because of it;
- no log is removed before the end: ext4 is slow to make files where others have just been removed, and a log of 200
  tables begins with hundreds of them.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

import psycopg

from benchmarks import machine, ours
from benchmarks.cells import Cell, CellsResult, Pair
from benchmarks.measure import BenchError, progress, scaled
from benchmarks.postgres import (
    DATABASE,
    Admin,
    Backlog,
    ask,
    check_confirmed,
    server_settings,
    target_of,
    wait_until_released,
    write_backlog,
)
from benchmarks.workloads import SPREAD_TRANSACTION_ROWS, Workload, spread
from tailrace.demo.server import EmbeddedPostgres
from tailrace.demo.server_binaries import ServerFailed

COST_TIMES_MAX = {"20 M changes": 1.1, "200 tables": 1.5}
CHANGES, CHANGES_MANY, CHANGES_WIDE, TABLES_MANY = 1_000_000, 20_000_000, 4_000_000, 200
BASE, MANY, ONE, WIDE = "base", "many", "one", "wide"


@dataclass(frozen=True)
class PgGrowth:
    """The bench."""

    about: str
    name: str = "pg-growth"
    limits: dict[str, float] = field(
        default_factory=lambda: {cell: 1 / times for cell, times in COST_TIMES_MAX.items()}
    )

    def run(self, rounds: int, scale: float) -> CellsResult:
        """Write the backlogs once, then drain all of them in every round."""
        described = machine.describe(ours.log_parent_folder())
        few, many, wide = (
            SPREAD_TRANSACTION_ROWS * scaled(rows // SPREAD_TRANSACTION_ROWS, scale, least=10)
            for rows in (CHANGES, CHANGES_MANY, CHANGES_WIDE)
        )
        workloads = {
            BASE: spread(BASE, few, 1),
            MANY: spread(MANY, many, 1),
            ONE: spread(ONE, wide, 1),
            WIDE: spread(WIDE, wide, TABLES_MANY),
        }
        try:
            measured, version = _measure(workloads, rounds)
        except (ServerFailed, psycopg.Error) as exc:
            raise BenchError(f"the embedded PostgreSQL failed: {exc}", hint="Its log says more.") from exc
        described["versions"]["postgresql"] = version
        return CellsResult(
            name=self.name,
            peer_name="1 M, or 4 M, of one table",
            cells=tuple(
                Cell(
                    name=cell,
                    unit="CPU-seconds per million",
                    must_reach=1 / COST_TIMES_MAX[cell],
                    pairs=tuple(Pair(ours=costs[which], peer=costs[peer]) for costs in measured),
                )
                for cell, (which, peer) in zip(COST_TIMES_MAX, ((MANY, BASE), (WIDE, ONE)), strict=True)
            ),
            machine=described,
            setup={
                "ours": ours.SUBJECT,
                "workload": "; ".join(workload.title for workload in workloads.values()),
                "transport": f"TCP {EmbeddedPostgres.host}",
            },
            scale=scale,
        )


def _measure(workloads: dict[str, Workload], rounds: int) -> tuple[list[dict[str, float]], str]:
    """CPU-seconds per million changes of every workload, round by round, and the server's version."""
    numbers = range(1, rounds + 1)
    with (
        ExitStack() as logs,
        EmbeddedPostgres(settings=server_settings(slots=rounds * len(workloads))) as server,
        server.connect(DATABASE, autocommit=True) as admin,
    ):
        backlogs = {
            name: write_backlog(admin, workload, [f"{name}_{number}" for number in numbers])
            for name, workload in workloads.items()
        }
        measured = [
            {name: _cost(server, admin, name, number, backlog, logs) for name, backlog in backlogs.items()}
            for number in numbers
        ]
        return measured, str(ask(admin, "show server_version"))


def _cost(server: EmbeddedPostgres, admin: Admin, name: str, number: int, backlog: Backlog, logs: ExitStack) -> float:
    target = target_of(server, f"{name}_{number}", publication=name)
    run, _ = logs.enter_context(ours.drained(target.url, target.slot, target.publication, backlog.end_lsn))
    wait_until_released(admin, target.slot)
    check_confirmed(admin, target.slot, backlog)
    if run.rows != backlog.rows:
        raise BenchError(f"the log has {run.rows} of {backlog.rows} rows", hint="Look for lost or repeated changes.")
    cost = run.cpu_seconds / run.rows * 1e6
    progress(f"round {number}, {name}: {cost:.3f} CPU-seconds per million, {run.rate:,.0f} rows/s")
    return cost


BENCH = PgGrowth(about=__doc__)
