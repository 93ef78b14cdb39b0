"""How many chunks may be read at once, so that a load never makes the source slow for others.

A tiny question is asked of the source now and then. While it is answered about as fast as at best, the load may use
its whole budget; when answers take several times as long, the budget is halved, and below one connection the load
rests between chunks. It comes back one by one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from statistics import median

PROBE_SECONDS = 1.0
PROBES = 5
SLOW_FACTOR = 8.0
SLOW_SECONDS_MIN = 0.05
"""However fast the best answer was, one within this is no sign of trouble."""
REST_SECONDS_MAX = 30.0


class Throttle:
    """Says how many may read, and how long to rest before the next chunk. Any thread may ask."""

    def __init__(self, budget: int, probe: Callable[[], object] | None) -> None:
        self._budget = budget
        self._probe = probe
        self._lock = threading.Lock()
        self._recent: list[float] = []
        self._best = float("inf")
        self.allowed = budget
        self.rest_seconds = 0.0

    @property
    def backing_off(self) -> bool:
        return self.allowed < self._budget or self.rest_seconds > 0

    def probe(self) -> None:
        """Ask the question, and settle how much is allowed from here on."""
        if self._probe is None:
            return
        began = time.monotonic()
        self._probe()
        self.record_answer(time.monotonic() - began)

    def record_answer(self, seconds: float) -> None:
        """An answer took so long."""
        with self._lock:
            self._best = min(self._best, seconds)
            self._recent = [*self._recent, seconds][-PROBES:]
            usual = median(self._recent)
            if usual > max(SLOW_SECONDS_MIN, self._best * SLOW_FACTOR):
                if self.allowed > 1:
                    self.allowed = max(1, self.allowed // 2)
                else:
                    self.rest_seconds = min(max(1.0, self.rest_seconds * 2), REST_SECONDS_MAX)
                self._recent = []
            elif len(self._recent) == PROBES and self.backing_off:
                if self.rest_seconds > 1.0:
                    self.rest_seconds /= 2
                elif self.rest_seconds:
                    self.rest_seconds = 0.0
                else:
                    self.allowed = min(self._budget, self.allowed + 1)
                self._recent = []
