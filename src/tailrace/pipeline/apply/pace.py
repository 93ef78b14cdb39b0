"""How long to rest between micro-batches, so that merging uses at most half of the time.

Every second of merging owes one of rest, also of what is merged beside the micro-batches; where several merge at once
it is one second. What passes without merging pays for it, whatever it passes with: a rest, or
Spark getting ready, or waiting for changes; so a pipeline that merges seldom does not rest at all. Rest is taken in
advance only up to a limit: a quiet night does not pay for a busy morning. While there is a backlog nothing is owed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

AHEAD_SECONDS_MAX = 10.0
"""Of rest that counts before what it is for."""
SHARE_SECONDS = 60.0
"""The time that the share is told of."""


class Pace:
    """What merging took, and what rest is owed for it. Any thread may merge, and ask for the share; one rests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._owed = 0.0
        """Below zero: rest that was taken in advance."""
        self._rested_since = self._began
        self._merges: deque[tuple[float, float]] = deque()
        self._merging_since: float | None = None
        self._merging = 0
        """How many merge now."""
        self._lock = threading.Lock()
        self._hurried = threading.Event()

    def stop_resting(self) -> None:
        """End the rest under way, and rest no more: someone waits for the end, or it is over."""
        self._hurried.set()

    def rest(self, seconds: float) -> None:
        """Wait that long, unless nobody rests any more."""
        self._hurried.wait(seconds)

    @contextmanager
    def merging(self) -> Iterator[None]:
        """Whatever is done in here is merging."""
        with self._lock:
            self._pay()
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
        """Nobody merges any more who has since then."""
        ended = self._rested_since = self._clock()
        self._owed += ended - started
        self._merges.append((started, ended))
        self._merging_since = None
        self._forget()

    def rest_seconds(self, *, backlog: bool) -> float:
        """How long to rest now. With a backlog not at all: more was waiting already when the merge was planned, and
        what it took is not made up for later."""
        with self._lock:
            self._pay()
            if backlog:
                self._owed = min(self._owed, 0.0)
            return max(self._owed, 0.0)

    def merging_share(self) -> float:
        """Which part of the last minute went into merging."""
        with self._lock:
            now = self._clock()
            begun = [(self._merging_since, now)] if self._merging_since is not None else []
            start = max(self._began, now - SHARE_SECONDS)
            merged = sum(max(0.0, end - max(start, since)) for since, end in [*self._merges, *begun])
            return merged / (now - start) if now > start else 0.0

    def _pay(self) -> None:
        if self._merging:  # no time to rest
            return
        now = self._clock()
        self._owed = max(self._owed - (now - self._rested_since), -AHEAD_SECONDS_MAX)
        self._rested_since = now

    def _forget(self) -> None:
        while self._merges[0][1] < self._rested_since - SHARE_SECONDS:
            self._merges.popleft()
