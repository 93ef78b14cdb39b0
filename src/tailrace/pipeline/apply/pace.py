"""Keep merging to at most half of the time, by rests between micro-batches.

Every second of merging owes one second of rest, also for merges outside the micro-batches. Several merges at once count
as one. Time without merging pays the debt, whatever it is used for: a rest, Spark getting ready, or waiting for
changes. So a pipeline that merges seldom does not rest at all. Rest in advance counts only up to a limit: a quiet night
does not pay for a busy morning. During a backlog no rest is owed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

AHEAD_SECONDS_MAX = 10.0
"""Limit for rest that counts in advance of merging."""
SHARE_SECONDS = 60.0
"""Period that the merging share is measured over."""


class Pace:
    """The time spent merging, and the rest owed for it.

    Any thread may merge and read the share; one thread rests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._owed = 0.0
        """Seconds of rest owed; below zero: rest taken in advance."""
        self._rested_since = self._began
        self._merges: deque[tuple[float, float]] = deque()
        self._merging_since: float | None = None
        self._merging = 0
        """Number of merges that run now."""
        self._lock = threading.Lock()
        self._no_rest = threading.Event()

    def stop_resting(self) -> None:
        """End the current rest, and rest no more.

        A caller waits for the end, or the pipeline stops.
        """
        self._no_rest.set()

    def rest(self, seconds: float) -> None:
        """Wait that long, or until `stop_resting`."""
        self._no_rest.wait(seconds)

    @contextmanager
    def merging(self) -> Iterator[None]:
        """Count the time inside this context as merging."""
        with self._lock:
            self._credit_rest()
            self._merging += 1
            if self._merging_since is None:
                self._merging_since = self._clock()
        try:
            yield
        finally:
            with self._lock:
                self._merging -= 1
                if not self._merging:
                    self._end(self._merging_since)

    def _end(self, started: float) -> None:
        """Record the end of a period of merging."""
        ended = self._rested_since = self._clock()
        self._owed += ended - started
        self._merges.append((started, ended))
        self._merging_since = None
        self._drop_old_merges()

    def rest_seconds(self, *, backlog: bool) -> float:
        """Return how long to rest now: zero during a backlog.

        With a backlog more changes were waiting when the merge was planned, and the rest owed for it is forgiven.
        """
        with self._lock:
            self._credit_rest()
            if backlog:
                self._owed = min(self._owed, 0.0)
            return max(self._owed, 0.0)

    def merging_share(self) -> float:
        """Return the share of the last minute spent on merging."""
        with self._lock:
            now = self._clock()
            begun = [(self._merging_since, now)] if self._merging_since is not None else []
            start = max(self._began, now - SHARE_SECONDS)
            merged = sum(max(0.0, end - max(start, since)) for since, end in [*self._merges, *begun])
            return merged / (now - start) if now > start else 0.0

    def _credit_rest(self) -> None:
        if self._merging:  # time spent merging is not rest
            return
        now = self._clock()
        self._owed = max(self._owed - (now - self._rested_since), -AHEAD_SECONDS_MAX)
        self._rested_since = now

    def _drop_old_merges(self) -> None:
        while self._merges[0][1] < self._rested_since - SHARE_SECONDS:
            self._merges.popleft()
