"""pg-bigtx: how much memory the capture needs for a transaction that does not fit into it.

One transaction inserts 10 M rows of 8 columns. `tailrace capture` writes it to a new change log. The value is
the most memory that this process ever held (VmHWM), from its start until the log has everything and has sealed
it. That includes imports, compiled kernels, and pages of files it has mapped. There is no peer: the limit is
600 MiB, and the ratio is the limit over the measured.

For this to be fair:
- it is one transaction, in one statement. The server may spill it to its own disk; the capture cannot
  look at it a second time;
- the process runs until the transaction is sealed, because sealing is done in the capture process and must
  handle a large transaction too. `setup.sealed` says in how many rounds that was so: after two minutes the bench
  continues without;
- another process then reads the log from its beginning. It must hold every row exactly once (the count,
  a dense `_seq`, the sum of the ids), and return them in pieces of at most 64 MiB. A log that can be
  written and not read would not help.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

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
from benchmarks.workloads import one_transaction
from tailrace.changelog.read.reader import ChangeLog
from tailrace.demo.server import EmbeddedPostgres
from tailrace.demo.server_binaries import ServerFailed

MIB = 1 << 20
MEMORY_MIB_MAX = 600
PIECE_BYTES_MAX = 64 * MIB
ROWS = 10_000_000
SEAL_SECONDS_MAX = 120.0
POLL_SECONDS = 0.2
SUBJECT = "tailrace capture, the whole process, fsync on"
CELL = "peak memory"


@dataclass(frozen=True)
class PgBigtx:
    """The bench."""

    about: str
    name: str = "pg-bigtx"
    limits: dict[str, float] = field(default_factory=lambda: {CELL: 1.0})

    def run(self, rounds: int, scale: float) -> CellsResult:
        """Write the transaction once, then drain it and read it back in every round."""
        described = machine.describe(ours.log_parent_folder())
        workload = one_transaction(scaled(ROWS, scale, least=1000))
        slots = [f"bench_{number}" for number in range(1, rounds + 1)]
        try:
            with (
                EmbeddedPostgres(settings=server_settings(slots=len(slots))) as server,
                server.connect(DATABASE, autocommit=True) as admin,
            ):
                described["versions"]["postgresql"] = str(ask(admin, "show server_version"))
                backlog = write_backlog(admin, workload, slots)
                found = [_peak_mib(server, admin, slot, backlog) for slot in slots]
        except (ServerFailed, psycopg.Error) as exc:
            raise BenchError(f"the embedded PostgreSQL failed: {exc}", hint="Its log says more.") from exc
        return CellsResult(
            name=self.name,
            peer_name="limit",
            cells=(
                Cell(
                    name=CELL,
                    unit="MiB",
                    must_reach=1.0,
                    pairs=tuple(Pair(ours=peak, peer=MEMORY_MIB_MAX) for peak, _ in found),
                ),
            ),
            machine=described,
            setup={
                "ours": SUBJECT,
                "workload": workload.title,
                "transport": f"TCP {server.host}",
                "generation_seconds": round(backlog.generation_seconds, 2),
                "wal_bytes": backlog.wal_bytes,
                "sealed": f"{sum(sealed for _, sealed in found)} of {rounds} rounds",
            },
            scale=scale,
        )


def _peak_mib(server: EmbeddedPostgres, admin: Admin, slot: str, backlog: Backlog) -> tuple[float, bool]:
    """The peak in MiB, and whether the transaction was sealed before it was read off."""
    target = target_of(server, slot)
    with ours.new_folder() as folder:
        running = ours.capturing(folder, target.url, slot=slot, publication=target.publication)
        with running as (log, process):
            _wait_until_confirmed(admin, slot, backlog)
            sealed = _wait_until_sealed(log)
            peak_bytes = ours.memory_peak_bytes(process)
        wait_until_released(admin, slot)
        piece_bytes = _check_readable(log, backlog.rows)
    if peak_bytes is None:
        raise BenchError("the peak memory is not known here", hint="Run it on Linux.")
    progress(
        f"{slot}: {peak_bytes / MIB:,.0f} MiB at most, {'sealed' if sealed else 'NOT sealed'}; read back in pieces "
        f"of at most {piece_bytes / MIB:.1f} MiB"
    )
    return peak_bytes / MIB, sealed


def _wait_until_confirmed(admin: Admin, slot: str, backlog: Backlog) -> None:
    deadline = time.monotonic() + ours.DRAIN_SECONDS_MAX
    while True:
        try:
            return check_confirmed(admin, slot, backlog)
        except BenchError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)


def _wait_until_sealed(path: Path) -> bool:
    """Whether everything the log has now became cold in time."""
    log = ChangeLog.open(path)
    newest = log.newest()
    deadline = time.monotonic() + SEAL_SECONDS_MAX
    while time.monotonic() < deadline:
        log.seal_index.refresh()
        if log.seal_index.last_commit >= newest:
            return True
        time.sleep(POLL_SECONDS)
    return False


def _check_readable(log: Path, rows: int) -> int:
    """Read the log in another process; the bytes of the largest piece it gave."""
    found = ours.run_child("benchmarks.read_back", str(log))
    wanted = {"rows": rows, "first_seq": 1, "last_seq": rows, "dense": True, "id_sum": rows * (rows + 1) // 2}
    if {name: found[name] for name in wanted} != wanted:
        raise BenchError(f"the log gives {found}, not {wanted}", hint="Look for lost or repeated changes.")
    piece_bytes = int(found["piece_bytes"])
    if piece_bytes > PIECE_BYTES_MAX:
        raise BenchError(
            f"the log gives a piece of {piece_bytes / MIB:,.0f} MiB", hint="Its readers need bounded pieces."
        )
    return piece_bytes


BENCH = PgBigtx(about=__doc__)
