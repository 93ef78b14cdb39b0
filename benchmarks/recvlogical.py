"""The peer `pg_recvlogical`: the server's own client, writing what it receives to /dev/null.

It is started with the options ours uses (pgoutput, protocol 1, the same publication) and ends at the
backlog's end. On the way out it confirms that position, which is how we know that it read everything.
"""

from __future__ import annotations

import os
import resource
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.measure import BenchError, Measured

if TYPE_CHECKING:
    from benchmarks.postgres import Backlog, Target

DRAIN_SECONDS_MAX = 600.0


@dataclass(frozen=True)
class PgRecvlogical:
    """Timed from process start to exit; its start and its exit are inside."""

    name: str = "pg_recvlogical"
    confirms: bool = True
    from_first_batch: bool = False

    def prepare(self) -> dict[str, str]:
        """Nothing: it comes with the server, in the server's version."""
        return {}

    def startup_seconds(self, target: Target, backlog: Backlog) -> float:
        """Time the whole process on a slot made after the backlog."""
        return self.drain(target, backlog).wall_seconds

    def drain(self, target: Target, backlog: Backlog) -> Measured:
        """Run it once over the slot."""
        command = [
            *(str(target.binaries / "pg_recvlogical"), "--start", "--no-loop"),
            *("--dbname", target.url, "--slot", target.slot, "--file", os.devnull),
            *("--endpos", backlog.end_lsn),
            *("--option", "proto_version=1", "--option", f"publication_names={target.publication}"),
        ]
        cpu_before = _ended_children_cpu_seconds()
        started = time.perf_counter()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DRAIN_SECONDS_MAX, check=False)
        except subprocess.TimeoutExpired as exc:
            raise BenchError("pg_recvlogical did not reach the backlog's end", hint="See the server's log.") from exc
        wall = time.perf_counter() - started
        if done.returncode != 0:
            raise BenchError(f"pg_recvlogical failed: {done.stderr.strip()}", hint="See the server's log.")
        cpu = _ended_children_cpu_seconds() - cpu_before
        return Measured(rows=backlog.rows, wall_seconds=wall, cpu_seconds=cpu)


def _ended_children_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
