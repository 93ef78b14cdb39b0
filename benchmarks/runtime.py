"""runtime: what the library's loop costs alone, from a source in memory to a sink in memory.

One table of 8 columns, inserts only, committed in transactions as large as a batch before the clock starts. Ours is
`CdcRuntime.run` from its first poll to the acknowledgement of the last row. It takes the window, numbers it, cuts or
joins it to a batch, writes and flushes it to the sink, saves the checkpoint and confirms to the source. With `file` the
checkpoint is made durable (fsync) for each batch. The peer is not a program but the figure that was promised: 5 million
rows a second with batches of 65,536 rows. The other cells are shown without a limit. So is `events`, which makes Python
objects of the same rows.

For this to be fair:
- the rows lie in memory as the source was given them. What the source adds (position, transaction, number) it makes
  inside the clock, as a decoder would;
- nothing looks at a row, and that is the point: the cells with small batches show what a batch costs;
- the checkpoint's folder is on the disk that the log benches use; an fsync there costs what it costs.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import machine, ours
from benchmarks.cells import Cell, CellsResult, Pair
from benchmarks.measure import progress, scaled
from benchmarks.windows import table_schemas, window
from tailrace.capture.memory.source import MemoryCapture
from tailrace.model.batch import ChangeBatch
from tailrace.model.position import ZERO
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.output_batch import Limits
from tailrace.runtime.sinks import MemorySink
from tailrace.state.checkpoint import CheckpointStore
from tailrace.state.checkpoint_stores import FileCheckpointStore, MemoryCheckpointStore

PROMISED = 5_000_000.0
"""Rows per second at the largest batch."""
ROWS = {64: 200_000, 1_024: 2_000_000, 65_536: 16_000_000}
"""By rows of a batch: how many in a round."""
ROWS_PROMISED = 65_536
EVENTS = 200_000
EVENTS_CELL = "events()"


@dataclass(frozen=True)
class Runtime:
    """The bench."""

    about: str
    name: str = "runtime"
    limits: dict[str, float] = field(
        default_factory=lambda: {_cell(ROWS_PROMISED, kind): 1.0 for kind in ("memory", "file")}
    )

    def run(self, rounds: int, scale: float) -> CellsResult:
        """Measure every cell in every round."""
        described = machine.describe(ours.log_parent_folder())
        pairs: dict[str, list[Pair]] = {}
        with ours.new_folder() as folder:
            for number in range(1, rounds + 1):
                for size, rows in ROWS.items():
                    batches = max(2, scaled(rows, scale) // size)
                    for kind in ("memory", "file"):
                        rate = _measure(size, batches, kind, folder / f"{number}-{size}")
                        pairs.setdefault(_cell(size, kind), []).append(Pair(ours=rate, peer=PROMISED))
                        progress(f"round {number}, {_cell(size, kind)}: {rate:,.0f} rows/s")
                rate = _measure_events(scaled(EVENTS, scale))
                pairs.setdefault(EVENTS_CELL, []).append(Pair(ours=rate, peer=PROMISED))
                progress(f"round {number}, {EVENTS_CELL}: {rate:,.0f} rows/s")
        return CellsResult(
            name=self.name,
            peer_name="promised",
            cells=tuple(
                Cell(name=name, unit="rows/s", must_reach=self.limits.get(name), pairs=tuple(found), costs=False)
                for name, found in pairs.items()
            ),
            machine=described,
            setup={
                "ours": "CdcRuntime.run, MemoryCapture to MemorySink, one thread",
                "workload": "inserts of 8 columns, a transaction for each batch",
                "rows_a_round": {str(size): scaled(rows, scale) for size, rows in ROWS.items()},
            },
            scale=scale,
        )


def _cell(size: int, kind: str) -> str:
    return f"batches of {size:,}, checkpoint in {'a file' if kind == 'file' else 'memory'}"


class _Drop(MemorySink):
    """Keeps nothing: what is kept for ever is not what is measured."""

    def flush(self, caught_up: bool) -> None:
        super().flush(caught_up)
        self.batches.clear()


def _rows(count: int) -> ChangeBatch:
    (batch,) = window(table_schemas(1), ZERO, 0, count).batches
    return batch


def _measure(size: int, batches: int, kind: str, folder: Path) -> float:
    if kind == "memory":
        return _loop(size, batches, MemoryCheckpointStore())
    with FileCheckpointStore(folder) as store:
        return _loop(size, batches, store)


def _loop(size: int, batches: int, store: CheckpointStore) -> float:
    source, rows = MemoryCapture(), _rows(size)
    for _ in range(batches):
        source.commit(rows)
    total = size * batches
    runtime = CdcRuntime(source, store, limits=Limits(rows=size))
    runtime.start()
    gc.collect()
    return total / _timed(lambda: runtime.run(_Drop(), lambda: runtime.rows_committed >= total))


def _measure_events(rows: int) -> float:
    batch = _rows(rows)
    return rows / _timed(lambda: sum(1 for _ in batch.events()))


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


BENCH = Runtime(about=__doc__)
