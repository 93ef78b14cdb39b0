"""pg-latency: how long after its commit at the source a change can be read from the log.

A load process makes 1,000 transactions a second for 20 s, each of one row, in turn over 20 tables, at a steady
pace over 4 connections. `tailrace capture` writes them to the log, and a reader in a third process follows the
log (`ChangeLog.follow`). A change's latency runs from the moment the server stamped into its commit record
(`_committed_at`) to the moment the reader holds it as typed columns. There is no peer, but there are two limits:
10 ms for half of the changes (p50) and 60 ms for all but one in a hundred (p99). The ratio is the
limit over the measured.

For this to be fair:
- the server stamps a commit before it makes it durable and before the client hears of it, so waiting for the
  server's own disk counts too. Both stamps are from the same clock of the same machine. It also runs the
  load, the server and the reader, and all of them share its cores with the capture;
- `synchronous_commit` is on, as it is by default. With it off, the server sends a commit to a client only
  when its own background writer has flushed it, up to 0.6 s later;
- every change counts, from the first to the last. The load must have kept its pace, or the bench fails. Each
  table has had one row before, because a table's first row also records its schema, once per table;
- the reader must have received exactly the rows written.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from benchmarks import machine, ours
from benchmarks.cells import Cell, CellsResult, Pair
from benchmarks.measure import BenchError, progress, scaled
from tailrace.changelog.read.reader import ChangeLog
from tailrace.demo.server import EmbeddedPostgres
from tailrace.demo.server_binaries import ServerFailed
from tailrace.errors import TailraceError

LIMIT_MS = {"p50": 10.0, "p99": 60.0}
TABLES = 20
RATE = 1_000
SECONDS = 20
CONNECTIONS = 4
START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 30.0
SUBJECT = "tailrace capture and ChangeLog.follow: commit at the source to columns in a reader, fsync on"
SETTINGS = {
    "wal_level": "logical",
    "max_wal_size": "4GB",
    "checkpoint_timeout": "1h",
    "autovacuum": "off",
    "synchronous_commit": "on",
}


@dataclass(frozen=True)
class PgLatency:
    """The bench."""

    about: str
    name: str = "pg-latency"
    limits: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LIMIT_MS, 1.0))

    def run(self, rounds: int, scale: float) -> CellsResult:
        """A server, a capture and a log of their own for every round."""
        described = machine.describe(ours.log_parent_folder())
        seconds = scaled(SECONDS, scale, least=2)
        try:
            measured = [self._round(number, seconds) for number in range(1, rounds + 1)]
        except (ServerFailed, psycopg.Error, TailraceError) as exc:
            raise BenchError(f"the round could not be run: {exc}", hint="Its log says more.") from exc
        return CellsResult(
            name=self.name,
            peer_name="limit",
            cells=tuple(
                Cell(
                    name=which,
                    unit="ms",
                    must_reach=1.0,
                    pairs=tuple(Pair(ours=found[which], peer=limit) for found in measured),
                )
                for which, limit in LIMIT_MS.items()
            ),
            machine=described,
            setup={
                "ours": SUBJECT,
                "workload": f"{RATE:,} one-row transactions/s over {TABLES} tables for {seconds} s",
                "transport": f"TCP {EmbeddedPostgres.host}",
                "rounds": measured,
            },
            scale=scale,
        )

    def _round(self, number: int, seconds: int) -> dict[str, float]:
        with (
            ours.new_folder() as folder,
            EmbeddedPostgres(settings=SETTINGS) as server,
            server.connect(autocommit=True) as admin,
        ):
            for table in range(TABLES):
                admin.execute(
                    f"create table t{table} (id bigint primary key, account int, state text, "
                    "amount numeric(12, 2), changed_at timestamptz)".encode()
                )
            with ours.capturing(folder, server.url()) as (log, _):
                _write_first_rows(admin, log)
                with (
                    _child("benchmarks.latency_reader", str(log), str(RATE * seconds)) as reader,
                    _child(
                        "benchmarks.paced_load", server.url(), *map(str, (TABLES, RATE, seconds, CONNECTIONS))
                    ) as load,
                ):
                    found = _answer(load, "the load", seconds + STOP_SECONDS_MAX)
                    found |= _answer(reader, "the reader", STOP_SECONDS_MAX)
                found["commits"] = ChangeLog.open(log).newest()
        progress(f"round {number}: " + ", ".join(f"{name} {value:.4g}" for name, value in found.items()))
        return found


def _write_first_rows(admin: psycopg.Connection[tuple[object, ...]], log: Path) -> None:
    """Let every table have its first row in the log."""
    for table in range(TABLES):
        admin.execute(f"insert into t{table} values (-1, 0, 'first', 0, now())".encode())
    rows = sum(len(batch) for batch in ChangeLog.open(log).follow(0, wait_seconds=2.0))
    if rows != TABLES:
        raise BenchError(f"the log has {rows} of {TABLES} first rows", hint="Look for lost changes.")


@contextmanager
def _child(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """One of our processes, ready: it has printed a line. It does not outlive the context."""
    with subprocess.Popen(
        [sys.executable, "-m", module, *arguments], cwd=ours.REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def _answer(process: subprocess.Popen[str], name: str, seconds_max: float) -> dict[str, float]:
    try:
        said, _ = process.communicate(timeout=seconds_max)
    except subprocess.TimeoutExpired as exc:
        raise BenchError(f"{name} did not end in time", hint="Is the machine busy with other work?") from exc
    if process.returncode != 0:
        raise BenchError(f"{name} ended with code {process.returncode}", hint="See its message above.")
    answer: dict[str, float] = json.loads(said.splitlines()[-1])
    return answer


BENCH = PgLatency(about=__doc__)
