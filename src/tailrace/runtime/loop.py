"""The one loop: read, append, confirm, in that order.

The order is the delivery guarantee. Changes are durable in the log before the source may discard its own, so a
crash replays a window and never skips one. A source that breaks is opened again from the log's own position;
what was read and not appended is read again. So is a sink that fails: after any error the stream is closed, and a
transaction of which only a part was appended comes again from its beginning.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tailrace import failpoints
from tailrace.capture.base import Stream
from tailrace.errors import LogError, Remedy, TailraceError
from tailrace.model.batch import Window
from tailrace.model.position import Lsn

log = logging.getLogger(__name__)

IDLE_SECONDS_MAX = 10.0
IDLE_BYTES_MAX = 16 << 20
"""A quiet source's position is recorded at least this often, so that it can discard its log."""
READ_SECONDS = 0.25
RETRY_SECONDS_FIRST, RETRY_SECONDS_MAX = 0.5, 15.0


class Sink(Protocol):
    """Where windows become durable. `append` returns only when the window and its end are durable together;
    it refuses a window that does not start at `position`.

    An open window moves nothing: its rows are kept aside until the window that finishes their transaction makes
    all of them durable at once. A window that continues none forgets what was kept aside: it comes again."""

    position: Lsn

    def append(self, window: Window) -> object: ...


@dataclass
class Progress:
    """What the loop has done since it was started."""

    windows: int = 0
    transactions: int = 0
    rows: int = 0
    """Those of a transaction that has come in part are counted as they come."""
    reconnects: int = 0
    source_end: Lsn = Lsn(0)
    """The furthest position the source has shown."""
    last_error: TailraceError | None = None


def step(
    stream: Stream, sink: Sink, wait_seconds: float, idle_due: Callable[[Window], bool]
) -> Window | None:
    """Move the capture one window forward; the window, or None if there was none to take."""
    window = stream.read(sink.position, wait_seconds)
    if window is None:
        return None
    if window.open:
        failpoints.hit("capture.piece_read")
        sink.append(window)  # a part of a transaction moves no position, so there is nothing to confirm
        return window
    failpoints.hit("capture.window_read")
    if window.empty and not idle_due(window):
        return window
    sink.append(window)  # data and position in one atomic commit
    failpoints.hit("capture.before_confirm")
    stream.confirm(window.end)  # only now may the server drop its log
    failpoints.hit("capture.after_confirm")
    return window


class CdcRuntime:
    """Runs the loop until told to stop, through broken connections."""

    def __init__(
        self, open_stream: Callable[[Lsn], Stream], sink: Sink, *, target: Lsn | None = None,
        retry_seconds_max: float = 300.0,
    ) -> None:  # fmt: skip
        self._open = open_stream
        self._sink = sink
        self._target = target
        self._retry_seconds_max = retry_seconds_max
        self._last_commit = time.monotonic()
        self._failing_since: float | None = None
        self._rows_open = 0
        self.progress = Progress()

    @property
    def caught_up(self) -> bool:
        """Whether the log holds everything up to the target."""
        return self._target is not None and self._sink.position >= self._target

    def run(self, stopping: Callable[[], bool]) -> None:
        """Loop until `stopping` says so; a source that is lost and a log without room are waited out for a while."""
        pause = RETRY_SECONDS_FIRST
        while not stopping():
            try:
                self._stream_until(stopping)
            except TailraceError as error:
                if self._failing_since is None:
                    pause = RETRY_SECONDS_FIRST
                self._give_up_or_wait(error, pause, stopping)
                pause = min(pause * 2, RETRY_SECONDS_MAX)

    def _stream_until(self, stopping: Callable[[], bool]) -> None:
        stream = self._open(self._sink.position)
        self.progress.rows -= self._rows_open  # they come again
        self._rows_open = 0
        try:
            stream.confirm(self._sink.position)
            while not stopping():
                before = self._sink.position
                window = step(stream, self._sink, READ_SECONDS, self._idle_due)
                # An outage that is over does not count: of the source, when it answers, even if it has nothing to
                # say; of the log, when it has taken something.
                if not isinstance(self.progress.last_error, LogError) or self._sink.position > before:
                    self.progress.last_error = self._failing_since = None
                if window is not None:
                    self._count(window)
        finally:
            stream.close()

    def _count(self, window: Window) -> None:
        self.progress.source_end = max(self.progress.source_end, window.end)
        self.progress.transactions += window.transactions
        self.progress.rows += window.rows
        self.progress.windows += 1
        self._rows_open = self._rows_open + window.rows if window.open else 0
        if self._sink.position == window.end and not window.open:
            self._last_commit = time.monotonic()

    def _idle_due(self, window: Window) -> bool:
        reached = self._target is not None and window.start < self._target <= window.end
        return (
            reached
            or window.end - window.start >= IDLE_BYTES_MAX
            or time.monotonic() - self._last_commit >= IDLE_SECONDS_MAX
        )

    def _give_up_or_wait(self, error: TailraceError, pause: float, stopping: Callable[[], bool]) -> None:
        self._failing_since = self._failing_since or time.monotonic()
        failing = time.monotonic() - self._failing_since
        if error.remedy is not Remedy.RETRY or failing > self._retry_seconds_max:
            raise error
        self.progress.last_error = error
        self.progress.reconnects += 1
        said = {"code": error.code, "reason": error.message, "wait": pause}
        if isinstance(error, LogError):
            log.error("the log takes nothing, trying again", extra=said | {"hint": error.hint})
        else:
            log.warning("source lost, trying again", extra=said)
        until = time.monotonic() + pause
        while time.monotonic() < until and not stopping():
            time.sleep(0.05)
