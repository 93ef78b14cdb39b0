"""Limit concurrent chunk reads, so that a load does not slow down the source.

A small query probes the source every second. While answers are about as fast as the best one, a load may use its whole
budget of connections. When answers take several times as long, the number is halved. At one connection, the load rests
between chunks instead. The number grows back one by one.
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
"""Answers within this time never count as slow."""
REST_SECONDS_MAX = 30.0


class Throttle:
    """Number of readers allowed, and the rest between chunks; safe for any thread."""

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
        """Send the probe, and adjust the limits by the time that its answer took."""
        if self._probe is None:
            return
        began = time.monotonic()
        self._probe()
        self.record_answer(time.monotonic() - began)

    def record_answer(self, seconds: float) -> None:
        """Adjust the limits by the time that an answer took."""
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
