"""How often what was killed is started again: so many times within an hour, and for as long as the pipeline lives.

What dies at once each time is heard of soon; what is killed once a month goes on for years.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

RESTARTS_MAX = 5
RESTARTS_SECONDS = 3600.0
"""In which there may be so many."""


class RestartLimit:
    """Those of one process, or one query."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: deque[float] = deque(maxlen=RESTARTS_MAX)
        self.count = 0

    def try_one_more(self) -> bool:
        """Count a restart, unless there were too many of late: whether it may be."""
        now = self._clock()
        if len(self._last) == RESTARTS_MAX and now < self._last[0] + RESTARTS_SECONDS:
            return False
        self._last.append(now)
        self.count += 1
        return True
