"""A comparison on PostgreSQL: one backlog, one slot per run, ours and the peer in turn.

All slots are made before the backlog is written, so each has exactly the backlog to deliver, and no run
finds its slot moved by another. The server is our own, used by nothing else, with autovacuum off and a
checkpoint taken after the backlog, so that no background work falls into one side's run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import psycopg

from benchmarks import machine, ours
from benchmarks.measure import BenchError, Measured, Result, Round, progress, scaled
from benchmarks.workloads import PUBLICATION, Workload, one_transaction
from tailrace.demo.server import EmbeddedPostgres
from tailrace.demo.server_binaries import ServerFailed

DATABASE, USER = "postgres", "postgres"
SLOT_RELEASE_SECONDS_MAX = 30.0
POLL_SECONDS = 0.02
# The last commit can end a little before the position noted as the backlog's end: a page header or a record
# of the server's own may lie between. One page covers both.
CONFIRMED_SLACK_BYTES = 8192


@dataclass(frozen=True, kw_only=True)
class Backlog:
    """What every slot holds: all row changes end at or before `end_lsn`, and WAL continues after it."""

    rows: int
    end_lsn: str
    generation_seconds: float
    wal_bytes: int


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where a run reads from. The address is TCP for both sides."""

    url: str
    host: str
    port: int
    user: str
    database: str
    binaries: Path
    slot: str
    publication: str


class Peer(Protocol):
    """What we are compared with. It must read `target.slot` to the backlog's end."""

    @property
    def name(self) -> str:
        """What the report calls it."""
        ...

    @property
    def confirms(self) -> bool:
        """True if it has confirmed the backlog's end to the server on return."""
        ...

    @property
    def from_first_batch(self) -> bool:
        """Whether its clock runs from the first rows it delivers to the last, and so must ours."""
        ...

    def prepare(self) -> dict[str, str]:
        """Install what is missing, before any clock runs; return versions for the report."""
        ...

    def drain(self, target: Target, backlog: Backlog) -> Measured:
        """Read the whole backlog once."""
        ...

    def startup_seconds(self, target: Target, backlog: Backlog) -> float | None:
        """Time `drain` on a slot with nothing to deliver; None where the clock leaves the start out."""
        ...


@dataclass(frozen=True, kw_only=True)
class PostgresBench:
    """One workload against one peer."""

    name: str
    must_reach: float
    unit: str
    workload: Callable[[int], Workload]
    rows: int
    peer: Peer
    about: str

    @property
    def limits(self) -> dict[str, float]:
        """There is one cell."""
        return {"": self.must_reach}

    def run(self, rounds: int, scale: float) -> Result:
        """Measure, and describe what was measured."""
        described = machine.describe(ours.log_parent_folder())
        comparison = Comparison(workload=self.workload(scaled(self.rows, scale)), peer=self.peer, unit=self.unit)
        measured = comparison.measure(rounds)
        described["versions"].update(measured.versions)
        return Result(
            name=self.name,
            peer_name=self.peer.name,
            unit=self.unit,
            must_reach=self.must_reach,
            rounds=measured.rounds,
            machine=described,
            setup={"ours": ours.SUBJECT, **measured.setup},
            scale=scale,
        )


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The rounds of a comparison, the versions of what took part, and what was prepared."""

    rounds: tuple[Round, ...]
    versions: dict[str, str]
    setup: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One workload, read by ours and by the peer."""

    workload: Workload
    peer: Peer
    unit: str

    def measure(self, rounds: int) -> Compared:
        """Write the backlog once, then measure ours and the peer `rounds` times in turn."""
        try:
            return self._measure(rounds)
        except (ServerFailed, psycopg.Error) as exc:
            raise BenchError(f"the embedded PostgreSQL failed: {exc}", hint="Its log says more.") from exc

    def _measure(self, rounds: int) -> Compared:
        versions = self.peer.prepare()
        slots = [f"bench_{side}_{number}" for number in range(1, rounds + 1) for side in ("ours", "peer")]
        with (
            EmbeddedPostgres(settings=server_settings(slots=len(slots) + 1)) as server,
            server.connect(DATABASE, autocommit=True) as admin,
        ):
            versions["postgresql"] = str(ask(admin, "show server_version"))
            backlog = write_backlog(admin, self.workload, slots)
            startup = self._peer_startup(server, admin, backlog)
            measured = tuple(self._round(server, admin, backlog, number) for number in range(1, rounds + 1))
        return Compared(
            rounds=measured,
            versions=versions,
            setup={
                "workload": self.workload.title,
                "transport": f"TCP {server.host}",
                "generation_seconds": round(backlog.generation_seconds, 2),
                "wal_bytes": backlog.wal_bytes,
                "peer_startup_seconds": startup,
            },
        )

    def _round(self, server: EmbeddedPostgres, admin: Admin, backlog: Backlog, number: int) -> Round:
        def drain_ours(target: Target) -> Measured:
            run = ours.drain_into_log(target.url, target.slot, target.publication, backlog.end_lsn)
            if self.peer.from_first_batch:
                assert run.delivering_seconds is not None, "our side always reports it"
                run = replace(run, wall_seconds=run.delivering_seconds)
            return run

        def drain_peer(target: Target) -> Measured:
            return self.peer.drain(target, backlog)

        ours_run = observed(admin, target_of(server, f"bench_ours_{number}"), drain_ours)
        check_confirmed(admin, f"bench_ours_{number}", backlog)
        peer_run = observed(admin, target_of(server, f"bench_peer_{number}"), drain_peer)
        if self.peer.confirms:
            check_confirmed(admin, f"bench_peer_{number}", backlog)
        for side, run in (("ours", ours_run), (self.peer.name, peer_run)):
            if run.rows != backlog.rows:
                raise BenchError(
                    f"{side} delivered {run.rows} of {backlog.rows} rows",
                    hint="The sides did different work. Look for lost or repeated changes.",
                )
        done = Round(ours=ours_run, peer=peer_run)
        progress(
            f"round {number}: ours {ours_run.rate:,.0f} {self.unit} (cpu {ours_run.cpu_seconds:.2f} s), "
            f"peer {peer_run.rate:,.0f} (cpu {peer_run.cpu_seconds:.2f} s), ratio {done.ratio:.2f}"
        )
        return done

    def _peer_startup(self, server: EmbeddedPostgres, admin: Admin, backlog: Backlog) -> float | None:
        slot = "bench_startup"
        admin.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        seconds = self.peer.startup_seconds(target_of(server, slot), backlog)
        wait_until_released(admin, slot)
        admin.execute("select pg_drop_replication_slot(%s)", [slot])
        return None if seconds is None else round(seconds, 4)


Admin = psycopg.Connection[tuple[Any, ...]]


def server_settings(slots: int) -> dict[str, str]:
    """What a server is started with that holds so many backlogs, and does nothing by itself."""
    return {
        "wal_level": "logical",
        "max_replication_slots": str(slots),
        "max_wal_senders": str(slots),
        "max_wal_size": "16GB",
        "checkpoint_timeout": "1h",
        "autovacuum": "off",
        "synchronous_commit": "off",
    }


def write_backlog(admin: Admin, workload: Workload, slots: list[str]) -> Backlog:
    """Make the tables, then the slots, then the changes."""
    progress(f"writing the backlog: {workload.title}")
    admin.execute(workload.tables.encode())
    for slot in slots:
        admin.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    begin = ask(admin, "select pg_current_wal_insert_lsn()")
    started = time.perf_counter()
    admin.execute(workload.changes.encode())
    seconds = time.perf_counter() - started
    end = str(ask(admin, "select pg_current_wal_insert_lsn()"))
    # The checkpoint flushes the backlog and writes WAL after it. A reader that stops at `end` needs to
    # see a position at or past it, and at the very end of the WAL there might be none until the next write.
    admin.execute("checkpoint")
    wal_bytes = int(ask(admin, "select pg_wal_lsn_diff(%s, %s)", [end, begin]))
    progress(f"wrote {workload.rows:,} changes, {wal_bytes / 2**20:,.0f} MiB of WAL, in {seconds:.1f} s")
    return Backlog(rows=workload.rows, end_lsn=end, generation_seconds=seconds, wal_bytes=wal_bytes)


def target_of(server: EmbeddedPostgres, slot: str, publication: str = PUBLICATION) -> Target:
    """Say where one slot is read from."""
    return Target(
        url=server.url(DATABASE, USER),
        host=server.host,
        port=server.port,
        user=USER,
        database=DATABASE,
        binaries=server.bin,
        slot=slot,
        publication=publication,
    )


def observed(admin: Admin, target: Target, drain: Callable[[Target], Measured]) -> Measured:
    """Drain the slot and add the CPU that the server spent on it."""
    before = _ended_backends_cpu_seconds(admin)
    run = drain(target)
    wait_until_released(admin, target.slot)
    after = _ended_backends_cpu_seconds(admin)
    return replace(run, server_cpu_seconds=None if before is None or after is None else after - before)


def check_confirmed(admin: Admin, slot: str, backlog: Backlog) -> None:
    """Refuse a run that stopped before the end or did not say so to the server."""
    query = "select pg_wal_lsn_diff(%s, confirmed_flush_lsn) from pg_replication_slots where slot_name = %s"
    missing = int(ask(admin, query, [backlog.end_lsn, slot]))
    if missing > CONFIRMED_SLACK_BYTES:
        raise BenchError(
            f"slot {slot} was confirmed {missing} bytes short of the backlog's end",
            hint="Each side must confirm what it read before it stops.",
        )


def wait_until_released(admin: Admin, slot: str) -> None:
    """Wait until the slot's walsender has ended, so that runs never overlap and all of its CPU counts."""
    deadline = time.monotonic() + SLOT_RELEASE_SECONDS_MAX
    while time.monotonic() < deadline:
        senders = ask(admin, "select count(*) from pg_stat_replication")
        held = ask(admin, "select active from pg_replication_slots where slot_name = %s", [slot])
        if not held and not senders:
            # The postmaster reaps a walsender a moment after its last trace in shared memory is gone.
            time.sleep(5 * POLL_SECONDS)
            return
        time.sleep(POLL_SECONDS)
    raise BenchError(f"slot {slot} is still in use", hint="The run left a connection open; see which process holds it.")


def _ended_backends_cpu_seconds(admin: Admin) -> float | None:
    """Read the CPU time of ended server processes, which their parent's entry adds up; None off Linux."""
    try:
        backend = Path(f"/proc/{admin.info.backend_pid}/stat").read_text()
        postmaster = Path(f"/proc/{_stat_fields(backend)[1]}/stat").read_text()
    except OSError:
        return None
    user_ticks, system_ticks = _stat_fields(postmaster)[13:15]
    return (int(user_ticks) + int(system_ticks)) / os.sysconf("SC_CLK_TCK")


def _stat_fields(stat: str) -> list[str]:
    """Split /proc/PID/stat from its third field on; the second is the name, which may contain spaces."""
    return stat.rpartition(")")[2].split()


def ask(admin: Admin, query: str, parameters: list[Any] | None = None) -> Any:
    """Give the one value that the query answers with."""
    row = admin.execute(query.encode(), parameters).fetchone()
    if row is None:
        raise BenchError(f"the server gave no answer to: {query}", hint="Is the embedded server still running?")
    return row[0]


def fill(server: EmbeddedPostgres, rows: int) -> tuple[str, int]:
    """Make the table `orders`; the server's version and the table's bytes."""
    progress(f"making a table of {rows:,} rows")
    workload = one_transaction(rows)
    with server.connect(DATABASE, autocommit=True) as admin:
        for statement in (workload.tables, workload.changes, "vacuum (freeze, analyze) orders", "checkpoint"):
            admin.execute(statement.encode())
        return str(ask(admin, "show server_version")), int(ask(admin, "select pg_table_size('orders')"))
