"""The source's stream, opened again when it breaks, as long as a retry makes sense.

Rows that were read and not acknowledged are never lost with a stream: the next one opens at a position before them. A
broken source is an outage until it answers. A failing sink or log is an outage until it has accepted something. A
snapshot that was only opened again does not count as an answer. Waits grow from attempt to attempt. An error that only
a person can fix, and an outage that lasts too long, are raised.
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
"""Errors of the log, sink or state. An answer of the source does not end such an outage."""


class StreamSource(Protocol[P]):
    """A source, or a pipeline that does more before it opens a stream."""

    def live(self, after: P) -> Stream[P]:
        """Stream the changes committed after the position."""


@runtime_checkable
class ReadAheadStream(Protocol):
    """A stream that reads ahead on its own."""

    held_bytes: int
    """Bytes read from the server and not taken by the caller yet."""


@dataclass
class Outage:
    """A failure: its error, when it began, and when the next attempt is due."""

    error: TailraceError
    since: float
    pause_seconds: float
    retry_at: float

    @classmethod
    def after(cls, last: Outage | None, error: TailraceError) -> Outage:
        """Return the outage after another error: the last one continued, or a new one."""
        now = time.monotonic()
        pause = min(last.pause_seconds * 2, RETRY_SECONDS_MAX) if last else RETRY_SECONDS_FIRST
        return cls(error, last.since if last else now, pause, now + pause)

    def must_raise(self, seconds_max: float) -> bool:
        """Return whether another retry makes no sense."""
        return self.error.remedy is not Remedy.RETRY or time.monotonic() - self.since > seconds_max


class ReconnectingStream:
    """The windows of one source, in order, across lost connections."""

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
        """A source of any kind. It only receives positions that it gave, or recorded ones of its kind."""
        self._retry_seconds_max = retry_seconds_max
        self._through, self._dropped, self._lost, self._opened = through, dropped, lost, opened
        self._stream: Stream[Any] | None = None
        self._read_ahead: ReadAheadStream | None = None
        self.outage: Outage | None = None
        self.reconnects = 0

    @property
    def is_open(self) -> bool:
        return self._stream is not None

    @property
    def has_read_ahead(self) -> bool:
        """True if the stream is known to hold more than was taken."""
        return self._read_ahead is not None and self._read_ahead.held_bytes > 0

    def read(self, after: Position, durable: Position, wait_seconds: float) -> AnyWindow | None:
        """Return the next window after the position; None if there was none in time.

        The source may discard everything up to `durable`.
        """
        if not self.wait_for_retry(wait_seconds):
            return None
        try:
            if self._stream is None:
                stream = self._source.live(after)
                require_stream(stream)
                self._stream = self._through(stream)
                self._read_ahead = self._stream if isinstance(self._stream, ReadAheadStream) else None
                self._opened(self._stream, after)
                self._stream.confirm(durable)
            window = self._stream.read(after, wait_seconds)
            if window is not None:
                require_window(window, after)
        except TailraceError as error:
            self.handle_error(error)
            return None
        self.note_source_answered()  # also if it had no window
        if window is None:
            return None
        if not window.open and covers(after, window.end):
            return None  # the source repeated a window that was taken already
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
        """Let the source discard its log up to the position.

        If the connection is lost, the next stream confirms it.
        """
        if self._stream is None:
            return
        try:
            self._stream.confirm(position)
        except TailraceError as error:
            self.handle_error(error)

    def note_source_answered(self) -> None:
        """End an outage of the source."""
        if self.outage is not None and not isinstance(self.outage.error, WRITE_SIDE_ERRORS):
            self.outage = None

    def note_written(self, *, moved: bool) -> None:
        """End an outage of the write side; with `moved` end any outage.

        Call it when something became durable.
        """
        if moved or (self.outage is not None and isinstance(self.outage.error, WRITE_SIDE_ERRORS)):
            self.outage = None

    def handle_error(self, error: TailraceError, *, keep: bool = False) -> None:
        """Close the stream and schedule a retry; raise an error that a retry cannot fix.

        With `keep` the stream stays open: something else failed, and its windows are still to be delivered.
        """
        if not keep:
            self.close()
            self._dropped()
        outage = Outage.after(self.outage, error)
        if outage.must_raise(self._retry_seconds_max):
            raise error
        self.outage = outage
        self.reconnects += 1
        fields = {"code": error.code, "reason": error.message, "wait": outage.pause_seconds}
        if isinstance(error, WRITE_SIDE_ERRORS):
            log.error("log or sink failed, trying again", extra=fields | {"hint": error.hint})
        else:
            log.warning("source lost, trying again", extra=fields)
        self._lost(error, outage.pause_seconds)

    def close(self) -> None:
        """Close the stream. Nothing more is confirmed."""
        stream, self._stream, self._read_ahead = self._stream, None, None
        if stream is not None:
            stream.close()
