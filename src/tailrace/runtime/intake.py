"""The source's stream, opened again when it breaks, for as long as waiting makes sense.

What was read and not acknowledged is never lost with a stream: the next one is opened at a position before it. A loss
is an outage until the source answers; a sink, or a log, that fails is one until it has taken something. Waits grow from
try to try. An error that only a person can mend, and an outage that lasts too long, is raised.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from tailrace.capture.base import Stream
from tailrace.errors import LogError, Remedy, SinkError, StateError, TailraceError
from tailrace.model.batch import Window
from tailrace.model.position import Lsn

log = logging.getLogger(__name__)

RETRY_SECONDS_FIRST, RETRY_SECONDS_MAX = 0.5, 15.0
OURS = (LogError, SinkError, StateError)
"""What is about the side that takes, not about the source: that the source answers does not end it."""


class Streams(Protocol):
    """Who opens streams: a source, or a pipeline that looks at more than the source before."""

    def live(self, after: Lsn) -> Stream:
        """Stream what committed after the position."""


@runtime_checkable
class Holding(Protocol):
    """A stream that reads ahead by itself."""

    held_bytes: int
    """Read from the server and not taken by the caller yet."""


@dataclass
class Outage:
    """What is failing now, since when, and when it is tried again."""

    error: TailraceError
    since: float
    pause: float
    again_at: float


class Intake:
    """Windows of one source, one after the other, whatever becomes of its connection."""

    def __init__(
        self, source: Streams, retry_seconds_max: float, *, through: Callable[[Stream], Stream],
        dropped: Callable[[], None], lost: Callable[[TailraceError, float], None],
        opened: Callable[[Stream, Lsn], None],
    ) -> None:  # fmt: skip
        self._source = source
        self._retry_seconds_max = retry_seconds_max
        self._through, self._dropped, self._lost, self._opened = through, dropped, lost, opened
        self._stream: Stream | None = None
        self._holding: Holding | None = None
        self.outage: Outage | None = None
        self.reconnects = 0

    @property
    def open(self) -> bool:
        return self._stream is not None

    @property
    def holds_more(self) -> bool:
        """Whether the stream is known to have read more than it was asked for."""
        return self._holding is not None and self._holding.held_bytes > 0

    def read(self, after: Lsn, durable: Lsn, wait_seconds: float) -> Window | None:
        """The next window after the position; None if none came in time. `durable` is what may be confirmed."""
        if not self.may_try(wait_seconds):
            return None
        try:
            if self._stream is None:
                self._stream = self._through(self._source.live(after))
                self._holding = self._stream if isinstance(self._stream, Holding) else None
                self._opened(self._stream, after)
                self._stream.confirm(durable)
            window = self._stream.read(after, wait_seconds)
        except TailraceError as error:
            self.fail(error)
            return None
        if self.outage is not None and not isinstance(self.outage.error, OURS):
            self.outage = None  # it answers, even if it has nothing to say
        if window is not None and not window.open and window.end <= after:
            return None  # a source that repeats itself: all of it was taken
        return window

    def may_try(self, wait_seconds: float) -> bool:
        if self.outage is None:
            return True
        left = self.outage.again_at - time.monotonic()
        if left > wait_seconds:
            time.sleep(wait_seconds)
            return False
        if left > 0:
            time.sleep(left)
        return True

    def confirm(self, position: Lsn) -> None:
        """Let the source discard what lies before. If it is gone, the next stream tells it."""
        if self._stream is None:
            return
        try:
            self._stream.confirm(position)
        except TailraceError as error:
            self.fail(error)

    def taken(self) -> None:
        """Something became durable: whatever was wrong with that side is over."""
        self.outage = None

    def fail(self, error: TailraceError, *, keep: bool = False) -> None:
        """Close the stream, and wait before it is opened again; raise what waiting does not mend. With `keep` only
        wait: it is not the stream that failed, and what it gave is still to be taken."""
        if not keep:
            self.close()
            self._dropped()
        now = time.monotonic()
        since = self.outage.since if self.outage else now
        if error.remedy is not Remedy.RETRY or now - since > self._retry_seconds_max:
            raise error
        pause = min(self.outage.pause * 2, RETRY_SECONDS_MAX) if self.outage else RETRY_SECONDS_FIRST
        self.outage = Outage(error, since, pause, now + pause)
        self.reconnects += 1
        said = {"code": error.code, "reason": error.message, "wait": pause}
        if isinstance(error, OURS):
            log.error("the log or sink takes nothing, trying again", extra=said | {"hint": error.hint})
        else:
            log.warning("source lost, trying again", extra=said)
        self._lost(error, pause)

    def close(self) -> None:
        """Let go of the source; nothing is confirmed that was not."""
        stream, self._stream, self._holding = self._stream, None, None
        if stream is not None:
            stream.close()
