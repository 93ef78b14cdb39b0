"""The source's stream, opened again when it breaks, for as long as waiting makes sense.

What was read and not acknowledged is never lost with a stream: the next one is opened at a position before it. A loss
is an outage until the source answers; a sink, or a log, that fails is one until it has taken something. A snapshot that
is only taken up again has answered nothing. Waits grow from try to try. An error that only a person can mend, and an
outage that lasts too long, is raised.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from tailrace.capture.port import Stream
from tailrace.capture.stream_checks import require_stream, require_window
from tailrace.errors import LogError, Remedy, SinkError, StateError, TailraceError
from tailrace.model.batch import AnyWindow
from tailrace.model.position_kinds import P, Position, covers

log = logging.getLogger(__name__)

RETRY_SECONDS_FIRST, RETRY_SECONDS_MAX = 0.5, 15.0
WRITE_SIDE_ERRORS = (LogError, SinkError, StateError)
"""What is about the side that takes, not about the source: that the source answers does not end it."""


class StreamSource(Protocol[P]):
    """Who opens streams: a source, or a pipeline that looks at more than the source before."""

    def live(self, after: P) -> Stream[P]:
        """Stream what committed after the position."""


@runtime_checkable
class ReadAheadStream(Protocol):
    """A stream that reads ahead by itself."""

    held_bytes: int
    """Read from the server and not taken by the caller yet."""


@dataclass
class Outage:
    """What is failing now, since when, and when it is tried again."""

    error: TailraceError
    since: float
    pause_seconds: float
    retry_at: float

    @classmethod
    def after(cls, last: Outage | None, error: TailraceError) -> Outage:
        """The last one, which goes on with this error; or one that begins with it."""
        now = time.monotonic()
        pause = min(last.pause_seconds * 2, RETRY_SECONDS_MAX) if last else RETRY_SECONDS_FIRST
        return cls(error, last.since if last else now, pause, now + pause)

    def must_raise(self, seconds_max: float) -> bool:
        """Whether waiting any longer makes no sense."""
        return self.error.remedy is not Remedy.RETRY or time.monotonic() - self.since > seconds_max


class ReconnectingStream:
    """Windows of one source, one after the other, whatever becomes of its connection."""

    def __init__(
        self,
        source: StreamSource[Any],
        retry_seconds_max: float,
        *,
        through: Callable[[Stream[Any]], Stream[Any]],
        dropped: Callable[[], None],
        lost: Callable[[TailraceError, float], None],
        opened: Callable[[Stream[Any], Position], None],
    ) -> None:
        self._source = source
        """Of any kind: it is told the positions that it gave, and those of its kind that are on record."""
        self._retry_seconds_max = retry_seconds_max
        self._through, self._dropped, self._lost, self._opened = through, dropped, lost, opened
        self._stream: Stream[Any] | None = None
        self._holding: ReadAheadStream | None = None
        self.outage: Outage | None = None
        self.reconnects = 0

    @property
    def is_open(self) -> bool:
        return self._stream is not None

    @property
    def has_read_ahead(self) -> bool:
        """Whether the stream is known to have read more than it was asked for."""
        return self._holding is not None and self._holding.held_bytes > 0

    def read(self, after: Position, durable: Position, wait_seconds: float) -> AnyWindow | None:
        """The next window after the position; None if none came in time. `durable` is what may be confirmed."""
        if not self.wait_for_retry(wait_seconds):
            return None
        try:
            if self._stream is None:
                stream = self._source.live(after)
                require_stream(stream)
                self._stream = self._through(stream)
                self._holding = self._stream if isinstance(self._stream, ReadAheadStream) else None
                self._opened(self._stream, after)
                self._stream.confirm(durable)
            window = self._stream.read(after, wait_seconds)
            if window is not None:
                require_window(window, after)
        except TailraceError as error:
            self.handle_error(error)
            return None
        self.note_source_answered()  # even if it has nothing to say
        if window is None:
            return None
        if not window.open and covers(after, window.end):
            return None  # a source that repeats itself: all of it was taken
        return window

    def wait_for_retry(self, wait_seconds: float) -> bool:
        if self.outage is None:
            return True
        left = self.outage.retry_at - time.monotonic()
        if left > wait_seconds:
            time.sleep(wait_seconds)
            return False
        if left > 0:
            time.sleep(left)
        return True

    def confirm(self, position: Position) -> None:
        """Let the source discard what lies before. If it is gone, the next stream tells it."""
        if self._stream is None:
            return
        try:
            self._stream.confirm(position)
        except TailraceError as error:
            self.handle_error(error)

    def note_source_answered(self) -> None:
        """The source did: whatever was wrong with it is over."""
        if self.outage is not None and not isinstance(self.outage.error, WRITE_SIDE_ERRORS):
            self.outage = None

    def note_written(self, *, moved: bool) -> None:
        """Something became durable: whatever was wrong with that side is over; and with all else if it has `moved`."""
        if moved or (self.outage is not None and isinstance(self.outage.error, WRITE_SIDE_ERRORS)):
            self.outage = None

    def handle_error(self, error: TailraceError, *, keep: bool = False) -> None:
        """Close the stream, and wait before it is opened again; raise what waiting does not mend. With `keep` only
        wait: it is not the stream that failed, and what it gave is still to be taken."""
        if not keep:
            self.close()
            self._dropped()
        outage = Outage.after(self.outage, error)
        if outage.must_raise(self._retry_seconds_max):
            raise error
        self.outage = outage
        self.reconnects += 1
        said = {"code": error.code, "reason": error.message, "wait": outage.pause_seconds}
        if isinstance(error, WRITE_SIDE_ERRORS):
            log.error("the log or sink takes nothing, trying again", extra=said | {"hint": error.hint})
        else:
            log.warning("source lost, trying again", extra=said)
        self._lost(error, outage.pause_seconds)

    def close(self) -> None:
        """Let go of the source; nothing is confirmed that was not."""
        stream, self._stream, self._holding = self._stream, None, None
        if stream is not None:
            stream.close()
