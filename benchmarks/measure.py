"""What a bench reports: runs of two sides, interleaved, and the median of the ratios of the rounds.

The ratio is taken inside a round, between two runs that follow each other, and only then is the median
taken over the rounds. A machine that is slow for a minute is slow for both sides of a round, so the ratio
is stable where the two rates are not. The spread is printed next to it because a median alone hides how much
to trust it.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.cells import CellsResult


class BenchError(Exception):
    """A bench could not be measured; `hint` says what to do."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run of one side over the whole backlog."""

    rows: int
    wall_seconds: float
    cpu_seconds: float
    memory_peak_bytes: int | None = None
    server_cpu_seconds: float | None = None
    warm_rate: float | None = None
    """Rows per second over the second half, of a side that grows faster as it runs."""
    delivering_seconds: float | None = None
    """Of the wall time, from the first rows that were delivered to the last."""

    def __post_init__(self) -> None:
        if self.rows <= 0 or self.wall_seconds <= 0:
            raise ValueError("a run that moved no rows or took no time was not measured")

    @property
    def rate(self) -> float:
        """Rows per second of wall time."""
        return self.rows / self.wall_seconds

    def as_json(self) -> dict[str, Any]:
        """Give the run as plain data."""
        return {
            "rate": round(self.rate, 1),
            "rows": self.rows,
            "wall_seconds": round(self.wall_seconds, 4),
            "cpu_seconds": round(self.cpu_seconds, 3),
            "server_cpu_seconds": _rounded(self.server_cpu_seconds),
            "memory_peak_bytes": self.memory_peak_bytes,
            "warm_rate": _rounded(self.warm_rate),
        }


@dataclass(frozen=True, kw_only=True)
class Round:
    """Ours and the peer, one directly after the other."""

    ours: Measured
    peer: Measured

    @property
    def ratio(self) -> float:
        """How many times the peer's rate ours is; higher is better for us."""
        return self.ours.rate / self.peer.rate


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a bench found. `setup` holds what was prepared, and how long that took.

    `scale` below 1 says that it was a try and no figure.
    """

    name: str
    peer_name: str
    unit: str
    must_reach: float
    rounds: tuple[Round, ...]
    machine: dict[str, Any]
    setup: dict[str, Any]
    scale: float = 1.0

    @property
    def ours(self) -> float:
        """Our median rate."""
        return statistics.median(r.ours.rate for r in self.rounds)

    @property
    def peer(self) -> float:
        """The peer's median rate."""
        return statistics.median(r.peer.rate for r in self.rounds)

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios, which is not the ratio of the medians."""
        return statistics.median(r.ratio for r in self.rounds)

    @property
    def spread(self) -> tuple[float, float]:
        """The smallest and the largest ratio of a round."""
        ratios = [r.ratio for r in self.rounds]
        return min(ratios), max(ratios)

    @property
    def reached(self) -> bool:
        """Whether the figure that was promised holds, before any rounding."""
        return self.ratio >= self.must_reach

    def cpu_seconds(self) -> dict[str, float | None]:
        """Median CPU-seconds of a run, of both clients and of the server while it served them."""
        return {
            "ours": _median([r.ours.cpu_seconds for r in self.rounds]),
            "peer": _median([r.peer.cpu_seconds for r in self.rounds]),
            "server_for_ours": _median([r.ours.server_cpu_seconds for r in self.rounds]),
            "server_for_peer": _median([r.peer.server_cpu_seconds for r in self.rounds]),
        }

    def as_json(self) -> dict[str, Any]:
        """Give the object that `--json` prints as its last line."""
        low, high = self.spread
        return {
            "name": self.name,
            "ours": round(self.ours, 1),
            "peer": round(self.peer, 1),
            "ratio": round(self.ratio, 4),
            "unit": self.unit,
            "must_reach": self.must_reach,
            "reached": self.reached,
            "spread": {"min": round(low, 4), "max": round(high, 4)},
            "cpu_seconds": self.cpu_seconds(),
            "rounds": [
                {"ratio": round(r.ratio, 4), "ours": r.ours.as_json(), "peer": r.peer.as_json()} for r in self.rounds
            ],
            "scale": self.scale,
            "peer_name": self.peer_name,
            "setup": self.setup,
            "machine": self.machine,
        }


Outcome = Result | CellsResult


class Bench(Protocol):
    """A comparison that can be run. Runs never overlap, and nothing is left running afterwards."""

    @property
    def name(self) -> str:
        """The name on the command line."""
        ...

    @property
    def about(self) -> str:
        """What is measured and what makes it fair."""
        ...

    @property
    def limits(self) -> dict[str, float]:
        """By cell, the ratio below which the bench counts as missed; one cell may be named by nothing."""
        ...

    def run(self, rounds: int, scale: float) -> Outcome:
        """Measure; raises `BenchError` when one side could not be run.

        `scale` below 1 shrinks the work for a quick try, and the outcome says so. A bench that has one size
        only ignores it.
        """
        ...


def scaled(size: int, scale: float, *, least: int = 1) -> int:
    """Shrink a size for a quick try, but not below what can be measured at all."""
    return max(least, round(size * scale))


def progress(text: str) -> None:
    """Tell the person who waits; results alone go to stdout."""
    print(text, file=sys.stderr, flush=True)


def _median(values: list[float] | list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 3) if known else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
