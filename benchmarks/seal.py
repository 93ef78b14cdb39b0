"""seal: how fast the log is sealed, on one core, against how fast it is captured.

Ours turns the commits of a log into cold Parquet files (`Sealer.seal`) in a process that may use one core only. It is
timed from opening the log to the return, when every file and the seal that names it are durable. The peer is our own
capture, which wrote that log just before, in the same round: 500,000 inserts of pg-stream's 8 columns, timed as
there. Sealing must reach three times the capture's rate, or a log under full load would never be cold.

For this to be fair:
- the capture may use all cores, and the server it reads from runs in parallel as always;
- nothing else runs while the log is sealed. The commits were just written, so they are read from memory, as in
  a pipeline that keeps up;
- the cold files must hold exactly the rows captured. Rows are counted in the Parquet files' own footers;
- the values are pg-stream's, unchanged, and they count upwards, so they compress well. As many rows with
  the values of log-scan took four times the bytes, and were sealed 5 to 8 % slower.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import psycopg

from benchmarks import machine, ours, workloads
from benchmarks.cells import Cell, CellsResult, Pair
from benchmarks.measure import BenchError, Measured, progress, scaled
from benchmarks.postgres import (
    DATABASE,
    Admin,
    Backlog,
    ask,
    server_settings,
    target_of,
    wait_until_released,
    write_backlog,
)
from tailrace.demo.server import EmbeddedPostgres
from tailrace.demo.server_binaries import ServerFailed

RATE_TIMES_MIN = 3.0
ROWS = 500_000
CELL = "one core"
SUBJECT = "Sealer.seal on one core: hot commits to durable Parquet"


@dataclass(frozen=True)
class Seal:
    """The bench."""

    about: str
    name: str = "seal"
    limits: dict[str, float] = field(default_factory=lambda: {CELL: RATE_TIMES_MIN})

    def run(self, rounds: int, scale: float) -> CellsResult:
        """Write the backlog once, then capture and seal it in every round."""
        described = machine.describe(ours.log_parent_folder())
        workload = workloads.inserts(scaled(ROWS, scale))
        slots = [f"bench_{number}" for number in range(1, rounds + 1)]
        try:
            with (
                EmbeddedPostgres(settings=server_settings(slots=len(slots))) as server,
                server.connect(DATABASE, autocommit=True) as admin,
            ):
                described["versions"]["postgresql"] = str(ask(admin, "show server_version"))
                backlog = write_backlog(admin, workload, slots)
                pairs = [_round(server, admin, slot, backlog) for slot in slots]
        except (ServerFailed, psycopg.Error) as exc:
            raise BenchError(f"the embedded PostgreSQL failed: {exc}", hint="Its log says more.") from exc
        return CellsResult(
            name=self.name,
            peer_name="capture",
            cells=(Cell(name=CELL, unit="rows/s", must_reach=RATE_TIMES_MIN, pairs=tuple(pairs), costs=False),),
            machine=described,
            setup={"ours": SUBJECT, "workload": workload.title, "transport": f"TCP {server.host}"},
            scale=scale,
        )


def _round(server: EmbeddedPostgres, admin: Admin, slot: str, backlog: Backlog) -> Pair:
    target = target_of(server, slot)
    with ours.drained(target.url, target.slot, target.publication, backlog.end_lsn) as (captured, log):
        wait_until_released(admin, slot)
        answer = ours.run_child("benchmarks.seal_child", str(log))
        size, files = answer.pop("bytes"), answer.pop("files")
        sealed = Measured(**answer)
    for side, run in (("the capture", captured), ("the sealer", sealed)):
        if run.rows != backlog.rows:
            raise BenchError(
                f"{side} made {run.rows} of {backlog.rows} rows", hint="Look for lost or repeated changes."
            )
    progress(
        f"{slot}: sealed {sealed.rate:,.0f} rows/s (cpu {sealed.cpu_seconds:.2f} s, {files} files, "
        f"{size / 2**20:.1f} MiB), captured {captured.rate:,.0f}, ratio {sealed.rate / captured.rate:.2f}"
    )
    return Pair(ours=sealed.rate, peer=captured.rate)


BENCH = Seal(about=__doc__)
