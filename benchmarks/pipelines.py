"""`tailrace run` in a process of its own, and a reader that detects when rows are visible in the lake.

The reader does not know positions or the log. It opens the Delta table like a reader that has never seen it, and
takes the largest key that the files of the newest version hold, from Delta's own statistics. A load that inserts keys
in rising order, never deletes its newest, and commits them table by table is seen transaction by transaction that way.
"""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from benchmarks import ours
from benchmarks.measure import BenchError
from tailrace.pipeline.status import read_status_file

KEY = "id"
LOOK_SECONDS = 0.5


@contextmanager
def running(folder: Path, url: str, tables: int, *, load_seconds_max: float) -> Iterator[Path]:
    """Yield the folder of the lake once all tables are live. A second start in the same folder continues there."""
    folder.mkdir(parents=True, exist_ok=True)
    settings, log, lake, said = (folder / name for name in ("bench.yaml", "log", "lake", "run.log"))
    settings.write_text(
        f"name: bench\nsource:\n  url: {url}\n  tables: ['public.*']\nlog: {log}\n"
        f"tables: {{format: delta, path: {lake}}}\n"
    )
    with ours.running("--log-level", "info", "run", str(settings), said=said) as process:
        _wait_until_live(process, log, tables, load_seconds_max, said)
        yield lake


def _wait_until_live(process: subprocess.Popen[bytes], log: Path, tables: int, seconds_max: float, said: Path) -> None:
    begun, deadline = time.time(), time.monotonic() + seconds_max
    states: Counter[str] = Counter()
    while states["live"] != tables:
        if process.poll() is not None or time.monotonic() > deadline:
            raise BenchError(f"the tables are not live: {dict(states)}", hint=said.read_text()[-2000:])
        time.sleep(LOOK_SECONDS)
        note = log / "status" / "apply.json"
        # One that an earlier process left says nothing of this one.
        fresh = note.exists() and note.stat().st_mtime > begun
        states = Counter(str(table["state"]) for table in read_status_file(log).values()) if fresh else Counter()


class FreshReader:
    """Looks at one Delta table; asking whether there is a new version costs next to nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version = -1

    def newest_key(self) -> int | None:
        """The largest key of the newest version; None if that was seen before."""
        if not (self._path / "_delta_log" / f"{self._version + 1:020d}.json").exists():
            return None
        try:
            table = DeltaTable(str(self._path))
        except TableNotFoundError:
            return None
        self._version = table.version()
        adds = pa.table(table.get_add_actions(flatten=True))
        return int(pc.max(adds.column(f"max.{KEY}")).as_py() or 0)
