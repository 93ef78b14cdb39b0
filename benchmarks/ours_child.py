"""The process that `ours.py` measures: drain one slot into a log, then print what it took as a line of JSON.

usage: python -m benchmarks.ours_child URL SLOT PUBLICATION UNTIL_LSN LOG_FOLDER

What is timed must be what a user gets: the clock starts before the connection is opened and stops when the
last commit is durable and confirmed. Only the one-time work of a capture process, importing and
loading compiled kernels, is before that. Rows are counted once they are durable, never when received.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ours import memory_peak_bytes
from tailrace.capture.postgres.config import PostgresSettings
from tailrace.capture.postgres.source import PostgresCapture, identify
from tailrace.capture.postgres.warm import warm_kernels
from tailrace.changelog.format.commit_file import CommitHeader
from tailrace.changelog.write.writer import LogWriter
from tailrace.model.batch import Window
from tailrace.model.position import ZERO, Lsn
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.position_store import LogSink


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to drain, and where to."""

    url: str
    slot: str
    publication: str
    until_lsn: int
    log_folder: Path


def main() -> int:
    """Warm up, drain under the clock, report."""
    url, slot, publication, until, folder = sys.argv[1:]
    high, low = until.split("/")
    job = Job(
        url=url,
        slot=slot,
        publication=publication,
        until_lsn=int(high, 16) << 32 | int(low, 16),
        log_folder=Path(folder),
    )
    warm()
    cpu, wall = _cpu_seconds(), time.perf_counter()
    rows, delivering = drain(job)
    wall, cpu = time.perf_counter() - wall, _cpu_seconds() - cpu
    report = {
        "rows": rows,
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "memory_peak_bytes": memory_peak_bytes("self"),
        "delivering_seconds": delivering,
    }
    print(json.dumps(report), flush=True)
    return 0


def warm() -> None:
    """Load what a capture process loads once, before the clock starts."""
    warm_kernels()


class TimedLog(LogWriter):
    """Notes when its first rows were durable, and when its last were."""

    first = last = 0.0

    def append(self, window: Window) -> CommitHeader | None:
        header = super().append(window)
        if header is not None and header.rows:
            self.last = time.perf_counter()
            self.first = self.first or self.last
        return header


def drain(job: Job) -> tuple[int, float]:
    """Capture the slot up to `job.until_lsn` into a new log; return the rows that are durable in it, and the
    seconds from the first of them to the last."""
    capture = PostgresCapture(
        PostgresSettings(
            url=job.url,
            wanted=lambda _: True,
            slot=job.slot,
            slot_create=False,
            publication=job.publication,
            publication_create=False,
        )
    )
    log = TimedLog(job.log_folder, identify(job.url))
    begin = capture.prepare(None)
    assert begin is not None, "a new log has a beginning"
    log.append(Window(start=ZERO, end=begin))
    sink = LogSink(log)
    runtime = CdcRuntime(capture, sink, target=Lsn(job.until_lsn))
    runtime.run(sink, lambda: runtime.caught_up)
    log.close()
    return log.next_seq - 1, log.last - log.first


def _cpu_seconds() -> float:
    """Add up the CPU of this process and of children it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


if __name__ == "__main__":
    sys.exit(main())
