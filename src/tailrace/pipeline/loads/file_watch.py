"""Whether the tables that are being read still lie in the files that their plans were made for.

Looked at in a thread of its own: the server keeps whoever asks waiting while somebody has the table locked, and neither
other loads nor what a person has asked for may wait with him.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from tailrace.capture.postgres.source import PostgresCapture
from tailrace.errors import TailraceError
from tailrace.pipeline.loads.running_load import RunningLoad

CHANGED_SECONDS = 10.0
"""Between two looks at a table."""


class FileWatch:
    """Asked again and again by one thread; never keeps it waiting."""

    def __init__(self, source: PostgresCapture, spawn: Callable[[Callable[[], None]], object]) -> None:
        self._source = source
        self._spawn = spawn
        self._looking = False
        self._found: deque[RunningLoad] = deque()

    def changed(self, loads: Sequence[RunningLoad]) -> list[RunningLoad]:
        """The loads whose tables were seen to lie in other files; looks again at those of `loads` where that is due."""
        due = [load for load in loads if time.monotonic() >= load.files_checked_at + CHANGED_SECONDS]
        if due and not self._looking:
            self._looking = True
            self._spawn(partial(self._look, due))
        return [self._found.popleft() for _ in range(len(self._found))]

    def _look(self, loads: list[RunningLoad]) -> None:
        try:
            for load in loads:
                load.files_checked_at = time.monotonic()
                with suppress(TailraceError):  # a source that is gone is heard of by those who read
                    if not self._source.is_unchanged(load.record.plan):
                        self._found.append(load)
        finally:
            self._looking = False
