"""What loads that begin wait for: transactions that are open at the source."""

from __future__ import annotations

import logging
import time
from contextlib import suppress

from tailrace.capture.postgres.source import PostgresCapture
from tailrace.errors import TailraceError

log = logging.getLogger(__name__)

WAITING_SECONDS = 5.0
"""Before the first look at whose they are, and between two."""


class OpenTransactionWatch:
    """Asked again and again while loads may be waiting; looks at the source only where that takes a while."""

    def __init__(self, source: PostgresCapture) -> None:
        self._source = source
        self._due: float | None = None
        self._said: str | None = None

    def describe(self, waiting: bool) -> str | None:
        """How many transactions are waited for and whose the oldest is, as far as that is known."""
        now = time.monotonic()
        if not waiting:
            self._due = self._said = None
        elif self._due is None:
            self._due = now + WAITING_SECONDS
        elif now >= self._due:
            first, self._due = self._said is None, now + WAITING_SECONDS
            with suppress(TailraceError):  # a source that is gone is heard of by those who read
                self._said = self._source.open_transactions()
            if first and self._said:
                log.warning("load waits for open transactions", extra={"what": self._said})
        return self._said
