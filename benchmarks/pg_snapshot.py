"""pg-snapshot: how fast Spark tasks load a table into Delta, against Spark's own JDBC reader.

A table of 5,000,000 rows of pg-stream's 8 columns is loaded into a new Delta table by two tasks at a time. Ours does
the same as a pipeline: it plans the chunks, exports a snapshot, reads each chunk in a Spark task (`load_chunk`) and
commits all of them at once. The peer is `spark.read.jdbc` with PostgreSQL's own JDBC driver. Ours must take at most
half of the wall time and a third of the client's CPU time.

For this to be fair:
- the peer reads as many partitions as ours has chunks, by ranges of the key. It is given the ends of the key, and
  10,000 rows a fetch. Its rows are written by the same `stage`, in a Python sink that takes Arrow, and committed by the
  same commit: files, compression, statistics and fsync are the same. With Spark's own Parquet writer, which makes no
  statistics for Delta and does not fsync, the peer took a sixth less CPU time and about as long;
- each side has a Spark of its own with two slots, started and warmed by a whole load before the first round, and
  idle while the other one works. The peer's JVM has Java's better compiler, which ours does without, and twice the
  memory;
- the clock starts before the first query to the server and stops when the commit is durable. Both read over TCP
  on 127.0.0.1; the table is vacuumed and lies in the server's cache;
- the client's CPU time is that of the driver, its JVM and its Python workers. The server's is not included;
- the peer's partitions are each read in a snapshot of their own, ours all in one;
- after every load the Delta table must hold exactly the rows: their count, and a sum of a hash of each row, which
  must be the same for both sides.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import duckdb
import psycopg
from deltalake import DeltaTable

from benchmarks import debezium, machine, ours
from benchmarks.cells import Cell, CellsResult, Pair
from benchmarks.measure import BenchError, Measured, progress, scaled
from benchmarks.postgres import DATABASE, USER, fill, server_settings
from benchmarks.workloads import PUBLICATION
from tailrace.demo.server import EmbeddedPostgres
from tailrace.demo.server_binaries import ServerFailed

ROWS = 5_000_000
WALL, CPU = "wall time", "client CPU"
TIMES_MIN = {WALL: 2.0, CPU: 3.0}
SUBJECT = "Tailrace: load_chunk in 2 Spark tasks at a time, one Delta commit"
STOP_SECONDS_MAX = 30.0


@dataclass(frozen=True)
class PgSnapshot:
    """The bench."""

    about: str
    name: str = "pg-snapshot"
    limits: dict[str, float] = field(default_factory=lambda: dict(TIMES_MIN))

    def run(self, rounds: int, scale: float) -> CellsResult:
        """Make the table once, warm both sides, then load it with each in every round."""
        described = machine.describe(ours.log_parent_folder())
        jar = debezium.jdbc_driver()
        described["versions"]["pgjdbc"] = jar.stem.removeprefix("postgresql-")
        rows = scaled(ROWS, scale, least=1000)
        try:
            with EmbeddedPostgres(settings=server_settings(slots=2)) as server:
                described["versions"]["postgresql"], size = fill(server, rows)
                with loader("ours", server) as mine, loader("jdbc", server, jar) as peer:
                    warm = _round(mine, peer, rows, 0)
                    found = [_round(mine, peer, rows, number) for number in range(1, rounds + 1)]
        except (ServerFailed, psycopg.Error) as exc:
            raise BenchError(f"the embedded PostgreSQL failed: {exc}", hint="Its log says more.") from exc
        return CellsResult(
            name=self.name,
            peer_name="spark.read.jdbc",
            cells=(
                Cell(
                    name=WALL,
                    unit="s",
                    must_reach=TIMES_MIN[WALL],
                    pairs=tuple(Pair(ours=mine.wall_seconds, peer=peer.wall_seconds) for mine, peer in found),
                ),
                Cell(
                    name=CPU,
                    unit="CPU-seconds",
                    must_reach=TIMES_MIN[CPU],
                    pairs=tuple(Pair(ours=mine.cpu_seconds, peer=peer.cpu_seconds) for mine, peer in found),
                ),
            ),
            machine=described,
            setup={
                "ours": SUBJECT,
                "workload": f"a table of {rows:,} rows of 8 columns, {size / 2**20:,.0f} MiB",
                "transport": f"TCP {EmbeddedPostgres.host}",
                "cold_wall_seconds": [round(run.wall_seconds, 2) for run in warm],
            },
            scale=scale,
        )


class Loader:
    """A Spark driver in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], said: Path) -> None:
        self._process = process
        self._said = said

    def load(self, table: str, publication: str, rows: int, folder: Path) -> tuple[Measured, dict[str, Any]]:
        """Load the table into a new folder. Return the measurement and the further figures."""
        asked = {"table": table, "publication": publication, "rows": rows, "folder": str(folder)}
        answer = ""
        with suppress(BrokenPipeError):
            _pipe(self._process.stdin).write(json.dumps(asked) + "\n")
            _pipe(self._process.stdin).flush()
            answer = _pipe(self._process.stdout).readline()
        if not answer:
            raise BenchError("a Spark driver ended", hint=self._said.read_text()[-2000:])
        found = json.loads(answer)
        further = {"parts": found.pop("parts")}
        if found["rows"] != rows:
            raise BenchError(f"{found['rows']} of {rows} rows were loaded", hint="Look for lost or repeated rows.")
        return Measured(**found), further


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None, "asked for"
    return stream


@contextmanager
def loader(side: str, server: EmbeddedPostgres, jar: Path | None = None) -> Iterator[Loader]:
    """A driver of one side, for as long as the context lasts."""
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-spark-") as scratch:
        said = Path(scratch) / "driver.log"
        command = [sys.executable, "-m", "benchmarks.pg_snapshot_child", side, server.url(DATABASE, USER), scratch]
        with said.open("wb") as log:
            process = subprocess.Popen(
                [*command, *([str(jar)] if jar else [])],
                cwd=ours.REPOSITORY,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        try:
            yield Loader(process, said)
        finally:
            with suppress(BrokenPipeError):
                _pipe(process.stdin).close()
            try:
                process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _round(mine: Loader, peer: Loader, rows: int, number: int) -> tuple[Measured, Measured]:
    with ours.new_folder() as folder:
        runs, sums = [], []
        for name, side in (("ours", mine), ("jdbc", peer)):
            run, further = side.load("orders", PUBLICATION, rows, folder / name)
            runs.append(run)
            sums.append(checksum(folder / name / "lake"))
            progress(
                f"{f'round {number}' if number else 'warming'}, {name}: {run.wall_seconds:.2f} s, "
                f"{run.rate:,.0f} rows/s, cpu {run.cpu_seconds:.2f} s, {further['parts']} parts, a worker of at most "
                f"{(run.memory_peak_bytes or 0) / 2**20:,.0f} MiB"
            )
    if sums[0] != sums[1] or sums[0][0] != rows:
        raise BenchError(f"the tables hold {sums[0]} and {sums[1]}", hint="The sides did different work.")
    return runs[0], runs[1]


def checksum(lake: Path) -> tuple[int, int]:
    """How many rows a Delta table holds, and the sum of a hash of each."""
    table = DeltaTable(str(lake))
    columns = ", ".join(f'"{column.name}"' for column in table.schema().fields)
    with duckdb.connect() as engine:
        engine.execute("set timezone = 'UTC'")
        rows = engine.execute(
            f"select count(*), sum(hash({columns})) from read_parquet($files)", {"files": table.file_uris()}
        ).fetchone()
    assert rows is not None, "an aggregate"
    return int(rows[0]), int(rows[1] or 0)


BENCH = PgSnapshot(about=__doc__)
