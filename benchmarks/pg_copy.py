"""pg-copy: how fast one connection reads a table into Arrow, against psql's `\\copy` and against ADBC.

A table of 2,000,000 rows of pg-stream's 8 columns is read from beginning to end. Ours does the same as a load: it
queries the types of the columns, copies them in binary form and returns Arrow batches. There are two peers:

- `psql`, whose `\\copy orders to '/dev/null'` takes the server's text and throws it away: ours must reach 0.8 times
  its rate;
- ADBC (PyPI `adbc-driver-postgresql`), which turns the same binary form into Arrow too: ours must reach 1.3 times its
  rate.

For this to be fair:
- all read the same table over TCP on 127.0.0.1 with one connection, each in a process of its own. The table is
  vacuumed, and every side reads it once before the clock;
- ours and ADBC are timed from opening the connection until the last batch is there; imports and loading compiled
  kernels happen before. Batches are dropped at once, except for the keys. These are added up when the clock has
  stopped, so that a missing one would show;
- `psql` is timed from process start to exit; `setup.psql_startup_seconds` holds what a start without a table takes. It
  reports how many rows it copied;
- a round is four runs: ours and `psql`, then ours and ADBC;
- ADBC returns `numeric` as text, ours as a decimal. It keeps its defaults otherwise.
"""

from __future__ import annotations

import importlib.util
import resource
import shutil
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import psycopg

from benchmarks import machine, ours
from benchmarks.cells import Cell, CellsResult, Pair
from benchmarks.measure import BenchError, Measured, progress, scaled
from benchmarks.postgres import DATABASE, USER, fill, server_settings
from tailrace.demo.server import EmbeddedPostgres
from tailrace.demo.server_binaries import ServerFailed

ROWS = 2_000_000
PSQL, ADBC = "psql", "ADBC"
RATE_TIMES_MIN = {PSQL: 0.8, ADBC: 1.3}
SUBJECT = "Tailrace: one connection's COPY as typed Arrow batches"
SECONDS_MAX = 600.0


@dataclass(frozen=True)
class PgCopy:
    """The bench."""

    about: str
    name: str = "pg-copy"
    limits: dict[str, float] = field(
        default_factory=lambda: {_cell(peer): least for peer, least in RATE_TIMES_MIN.items()}
    )

    def run(self, rounds: int, scale: float) -> CellsResult:
        """Make the table once, then read it with every side in every round."""
        described = machine.describe(ours.log_parent_folder())
        _get_adbc()
        described["versions"]["adbc-driver-postgresql"] = metadata.version("adbc-driver-postgresql")
        rows = scaled(ROWS, scale)
        try:
            with EmbeddedPostgres(settings=server_settings(slots=1)) as server:
                described["versions"]["postgresql"], size = fill(server, rows)
                sides = _sides(server, rows)
                startup = _psql(server, "select", 0).wall_seconds
                for side in sides.values():
                    side()
                pairs = [_round(sides, number) for number in range(1, rounds + 1)]
        except (ServerFailed, psycopg.Error) as exc:
            raise BenchError(f"the embedded PostgreSQL failed: {exc}", hint="Its log says more.") from exc
        return CellsResult(
            name=self.name,
            peer_name="the peer",
            cells=tuple(
                Cell(
                    name=_cell(peer),
                    unit="rows/s",
                    must_reach=least,
                    costs=False,
                    pairs=tuple(Pair(ours=of[peer][0].rate, peer=of[peer][1].rate) for of in pairs),
                )
                for peer, least in RATE_TIMES_MIN.items()
            ),
            machine=described,
            setup={
                "ours": SUBJECT,
                "workload": f"a table of {rows:,} rows of 8 columns, {size / 2**20:,.0f} MiB",
                "transport": f"TCP {EmbeddedPostgres.host}",
                "cpu_seconds": _cpu_seconds(pairs),
                "psql_startup_seconds": round(startup, 4),
            },
            scale=scale,
        )


def _cell(peer: str) -> str:
    return f"against {peer}"


def _sides(server: EmbeddedPostgres, rows: int) -> dict[str, Callable[[], Measured]]:
    """Reading the table once, by whom."""
    return {
        "ours": lambda: _child("ours", server, rows),
        PSQL: lambda: _psql(server, r"\copy orders to '/dev/null'", rows),
        ADBC: lambda: _child("adbc", server, rows),
    }


def _round(sides: dict[str, Callable[[], Measured]], number: int) -> dict[str, tuple[Measured, Measured]]:
    """By peer: ours, and directly after it the peer."""
    found = {peer: (sides["ours"](), sides[peer]()) for peer in RATE_TIMES_MIN}
    for peer, (mine, theirs) in found.items():
        progress(
            f"round {number}: ours {mine.rate:,.0f} rows/s (cpu {mine.cpu_seconds:.2f} s), {peer} "
            f"{theirs.rate:,.0f} (cpu {theirs.cpu_seconds:.2f} s), ratio {mine.rate / theirs.rate:.2f}"
        )
    return found


def _child(who: str, server: EmbeddedPostgres, rows: int) -> Measured:
    found = ours.run_child("benchmarks.copy_child", who, server.url(DATABASE, USER))
    if (found.pop("keys"), found["rows"]) != (rows * (rows + 1) // 2, rows):
        raise BenchError(f"{who} read {found['rows']} of {rows} rows", hint="The sides did different work.")
    return Measured(**found)


def _psql(server: EmbeddedPostgres, command: str, rows: int) -> Measured:
    """Run psql once; it prints what it copied."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [str(server.bin / "psql"), "--no-psqlrc", "--dbname", server.url(DATABASE, USER), "--command", command],
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0 or (rows and done.stdout.strip() != f"COPY {rows}"):
        raise BenchError(f"psql failed: {done.stderr.strip() or done.stdout.strip()}", hint="See the server's log.")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Measured(rows=max(rows, 1), wall_seconds=wall, cpu_seconds=cpu)


def _cpu_seconds(pairs: list[dict[str, tuple[Measured, Measured]]]) -> dict[str, float]:
    """The median CPU-seconds of a run of each client."""
    mine = [run.cpu_seconds for of in pairs for run, _ in of.values()]
    theirs = {peer: [of[peer][1].cpu_seconds for of in pairs] for peer in RATE_TIMES_MIN}
    return {who: round(statistics.median(taken), 2) for who, taken in {"ours": mine, **theirs}.items()}


def _get_adbc() -> None:
    """Install what the extra `bench` names, where it is missing."""
    if importlib.util.find_spec("adbc_driver_postgresql"):
        return
    project: dict[str, Any] = tomllib.loads((ours.REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = project["optional-dependencies"]["bench"]
    progress(f"installing {', '.join(wanted)}")
    uv = shutil.which("uv")
    install = [uv, "pip", "install", "--python", sys.executable] if uv else [sys.executable, "-m", "pip", "install"]
    try:
        subprocess.run([*install, "--quiet", *wanted], check=True, stdout=sys.stderr, timeout=SECONDS_MAX)
    except subprocess.SubprocessError as exc:
        raise BenchError("could not install ADBC", hint="Is PyPI reachable? See the details above.") from exc
    importlib.invalidate_caches()


BENCH = PgCopy(about=__doc__)
