"""Benches of several figures, or of one that is not a rate of rows. Each cell has a limit of its own.

What a cell compares stays inside a round, as in `measure`: ours and the peer follow each other, the ratio is
theirs, and the median is taken over the rounds. `ratio` is always better when higher: where the values are
costs (milliseconds, bytes, CPU-seconds) it is the peer's over ours.

A bench answers with the cell that has the least to spare against its limit, so that its `ratio` and its
`must_reach` belong together, and it is reached exactly when that cell is.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One round of one cell: our value and the one it is compared with."""

    ours: float
    peer: float

    def __post_init__(self) -> None:
        if self.ours <= 0 or self.peer <= 0:
            raise ValueError("a value that is not above zero was not measured")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One figure."""

    name: str
    unit: str
    must_reach: float | None
    """Limit of the ratio. None: the cell is shown without a limit; `peer` names what it is compared with."""
    pairs: tuple[Pair, ...]
    costs: bool = True
    """Whether the values are costs, so that less is better; else they are rates."""

    @property
    def ours(self) -> float:
        return statistics.median(pair.ours for pair in self.pairs)

    @property
    def peer(self) -> float:
        return statistics.median(pair.peer for pair in self.pairs)

    def ratio_of(self, pair: Pair) -> float:
        """How many times better than the peer ours is; higher is better."""
        return pair.peer / pair.ours if self.costs else pair.ours / pair.peer

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios, which is not the ratio of the medians."""
        return statistics.median(self.ratio_of(pair) for pair in self.pairs)

    @property
    def spread(self) -> tuple[float, float]:
        """The smallest and the largest ratio of a round."""
        ratios = [self.ratio_of(pair) for pair in self.pairs]
        return min(ratios), max(ratios)

    @property
    def reached(self) -> bool:
        """Whether the figure that was promised holds, before any rounding."""
        return self.must_reach is None or self.ratio >= self.must_reach

    @property
    def to_spare(self) -> float:
        """How far from the limit: 1 is just reached."""
        return math.inf if self.must_reach is None else self.ratio / self.must_reach

    def as_json(self) -> dict[str, Any]:
        low, high = self.spread
        return {
            "name": self.name,
            "ours": _significant(self.ours),
            "peer": _significant(self.peer),
            "ratio": round(self.ratio, 4),
            "unit": self.unit,
            "must_reach": None if self.must_reach is None else round(self.must_reach, 4),
            "reached": self.reached,
            "spread": {"min": round(low, 4), "max": round(high, 4)},
            "rounds": [
                {
                    "ratio": round(self.ratio_of(pair), 4),
                    "ours": _significant(pair.ours),
                    "peer": _significant(pair.peer),
                }
                for pair in self.pairs
            ],
        }


@dataclass(frozen=True, kw_only=True)
class CellsResult:
    """What a bench of cells found. `scale` below 1 says that it was a try and no figure."""

    name: str
    peer_name: str
    cells: tuple[Cell, ...]
    machine: dict[str, Any]
    setup: dict[str, Any]
    scale: float = 1.0

    @property
    def tightest(self) -> Cell:
        """The cell with the least to spare."""
        return min(self.cells, key=lambda cell: cell.to_spare)

    @property
    def unit(self) -> str:
        return self.tightest.unit

    @property
    def must_reach(self) -> float | None:
        return self.tightest.must_reach

    @property
    def ratio(self) -> float:
        return self.tightest.ratio

    @property
    def reached(self) -> bool:
        return all(cell.reached for cell in self.cells)

    def as_json(self) -> dict[str, Any]:
        """Give the object that `--json` prints as its last line: the tightest cell, then all of them."""
        return {
            **self.tightest.as_json(),
            "name": self.name,
            "cell": self.tightest.name,
            "cells": [cell.as_json() for cell in self.cells],
            "scale": self.scale,
            "peer_name": self.peer_name,
            "setup": self.setup,
            "machine": self.machine,
        }


def _significant(value: float) -> float:
    """Keep four digits, whatever the size: milliseconds and rows per second share one field."""
    return float(f"{value:.4g}")
