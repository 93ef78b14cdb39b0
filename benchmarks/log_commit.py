"""log-commit: what a commit to the change log costs over writing its bytes to a file.

Ours is `LogWriter.append` of a small window: 5 rows of 8 columns in each of 1, 20 and 200 tables. It is timed from
the call with Arrow columns in memory to the return, when the commit is durable. The peer writes one file
of exactly the bytes of that commit, all in one call, and fsyncs the file and its folder. Both values are the
median of a round's commits (p50). The ratio is the peer's cost over ours, so the limits of 2, 2.5 and 6 times
the peer's cost are ratios of 0.5, 0.4 and 0.1667. Ours does all the rest of a commit: it numbers the rows, lays them
out as Arrow messages, computes checksums, writes a header, and takes a name by compare-and-swap.

For this to be fair:
- both write to the same file system, in adjacent folders that grow alike. They take turns commit by
  commit, so that a slow moment of the disk affects both;
- every window is new: built just before its turn, outside the clock, with buffers nobody has read yet. It is laid out
  as the decoder does it: the columns of all tables are converted together, and a batch has slices of them;
- the slower the disk, the less of our work shows: a figure taken during other writes says nothing. So the set-up
  states the CPU time of a commit for both sides, because that part hardly depends on the disk;
- a table's schema is recorded with its first row, once per table. These commits happen before the
  clock. The log is then closed and opened again, as it is after every restart of a capture.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import machine, ours
from benchmarks.cells import Cell, CellsResult, Pair
from benchmarks.measure import BenchError, progress, scaled
from benchmarks.windows import SOURCE, table_schemas, window
from tailrace.changelog.format.commit_file import commit_path
from tailrace.changelog.write.writer import LogWriter

COST_TIMES_MAX = {1: 2.0, 20: 2.5, 200: 6.0}
"""By tables touched: how many times the peer's cost a commit may cost."""
ROWS_PER_TABLE = 5
COMMITS = 300
"""In a round, of each side."""
COMMITS_BEFORE = 20
SUBJECT = "LogWriter.append, fsync on: Arrow columns in memory to a durable commit"


@dataclass(frozen=True)
class LogCommit:
    """The bench."""

    about: str
    name: str = "log-commit"
    limits: dict[str, float] = field(
        default_factory=lambda: {_cell(tables): 1 / times for tables, times in COST_TIMES_MAX.items()}
    )

    def run(self, rounds: int, scale: float) -> CellsResult:
        """Measure every cell in every round."""
        described = machine.describe(ours.log_parent_folder())
        commits = scaled(COMMITS, scale, least=20)
        pairs: dict[int, list[Pair]] = {tables: [] for tables in COST_TIMES_MAX}
        sizes: dict[int, int] = {}
        cpu: dict[int, list[Pair]] = {tables: [] for tables in COST_TIMES_MAX}
        # Nothing is removed before the end: ext4 is slow to make files where others have just been removed.
        with ours.new_folder() as folder:
            for number in range(1, rounds + 1):
                for tables in COST_TIMES_MAX:
                    pair, used, sizes[tables] = _measure(folder / f"{number}-{tables}", tables, commits)
                    pairs[tables].append(pair)
                    cpu[tables].append(used)
                    progress(
                        f"round {number}, {_cell(tables)} ({sizes[tables]:,} bytes): ours {pair.ours:.3f} ms, "
                        f"plain file {pair.peer:.3f} ms, {pair.ours / pair.peer:.2f} × the cost "
                        f"(CPU {used.ours:.3f} and {used.peer:.3f} ms)"
                    )
        return CellsResult(
            name=self.name,
            peer_name="plain file",
            cells=tuple(
                Cell(name=_cell(tables), unit="ms", must_reach=1 / times, pairs=tuple(pairs[tables]))
                for tables, times in COST_TIMES_MAX.items()
            ),
            machine=described,
            setup={
                "ours": SUBJECT,
                "workload": f"{ROWS_PER_TABLE} rows of 8 columns a table, {commits} commits a round",
                "cpu_ms_per_commit": {
                    _cell(tables): {
                        "ours": round(statistics.median(used.ours for used in rounds_used), 3),
                        "plain file": round(statistics.median(used.peer for used in rounds_used), 3),
                    }
                    for tables, rounds_used in cpu.items()
                },
                "bytes_per_commit": {_cell(tables): size for tables, size in sizes.items()},
            },
            scale=scale,
        )


def _cell(tables: int) -> str:
    return f"{tables} table{'s' * (tables > 1)}"


def _measure(folder: Path, tables: int, commits: int) -> tuple[Pair, Pair, int]:
    """One round of one cell: the p50 of both sides in ms, of their CPU time too, and the bytes of a commit."""
    schemas = table_schemas(tables)
    log, plain = folder / "log", folder / "plain"
    plain.mkdir(parents=True)
    writer = LogWriter(log, SOURCE)
    gc.collect()
    gc.freeze()  # as a capture does when it begins
    ours_took, peer_took = _Taken(), _Taken()
    size = 0
    for number in range(COMMITS_BEFORE + commits):
        if number == COMMITS_BEFORE // 2:
            writer.close()
            writer = LogWriter(log, SOURCE)
        coming = window(schemas, writer.position, writer.next_seq, ROWS_PER_TABLE)
        with ours_took:
            writer.append(coming)
        content = commit_path(log, writer.commit).read_bytes()
        size = len(content)
        with peer_took:
            _write_plain(plain, f"{number:020d}", content)
    writer.close()
    gc.unfreeze()
    (wall, cpu), (peer_wall, peer_cpu) = ours_took.medians(), peer_took.medians()
    return Pair(ours=wall, peer=peer_wall), Pair(ours=cpu, peer=peer_cpu), size


class _Taken:
    """The wall and the CPU time of every commit of one side, in milliseconds."""

    def __init__(self) -> None:
        self._wall: list[float] = []
        self._cpu: list[float] = []
        self._begin = self._cpu_begin = 0.0

    def __enter__(self) -> None:
        self._cpu_begin = time.thread_time()
        self._begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._wall.append(1000 * (time.perf_counter() - self._begin))
        self._cpu.append(1000 * (time.thread_time() - self._cpu_begin))

    def medians(self) -> tuple[float, float]:
        """Of all but the commits that came before the clock."""
        return statistics.median(self._wall[COMMITS_BEFORE:]), statistics.median(self._cpu[COMMITS_BEFORE:])


def _write_plain(folder: Path, name: str, content: bytes) -> None:
    """Make one file durable under its name, with as few calls as that takes."""
    handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        written = os.write(handle, content)
        os.fsync(handle)
    finally:
        os.close(handle)
    if written != len(content):
        raise BenchError("a plain file was written in part", hint="Is the disk full?")
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


BENCH = LogCommit(about=__doc__)
