"""A stream transformed by rules, for the log or any sink.

If a rule halts at a window, the window is not returned and the stream is finished. Nothing after it can be
acknowledged. Opened again, the stream begins at that window.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Generic

from tailrace.capture.port import HasTimeline, Stream
from tailrace.capture.stream_checks import require_stream, require_window
from tailrace.errors import SourceUnreachable
from tailrace.model.batch import Window
from tailrace.model.position_kinds import P, covers
from tailrace.transforms.transform_plan import OnDeadLetter, TransformPlan


class TransformedStream(Generic[P]):
    """A stream seen through rules. Windows without rows left move only the position.

    Rows that a rule with `dead-letter` rejected are marked, for a log. With `on_dead_letter` they go there before the
    window is returned. A repeated window repeats them.
    """

    def __init__(self, stream: Stream[P], rules: TransformPlan, on_dead_letter: OnDeadLetter | None = None) -> None:
        require_stream(stream)
        self._stream = stream
        self._rules, self._on_letter = rules, on_dead_letter
        if isinstance(stream, HasTimeline):
            self.timeline = stream.timeline
        self._passed: P | None = None
        """The end of the last window if the rules left none of its rows."""
        self._kept = False
        """True if the rules kept any row of the current transaction."""
        self._failure: Exception | None = None

    def read(self, after: P, wait_seconds: float) -> Window[P] | None:
        if self._failure is not None:
            raise self._failure
        reached = after if self._passed is None or covers(after, self._passed) else self._passed
        window = self._stream.read(reached, wait_seconds)
        if window is None:
            return Window(start=after, end=reached) if reached != after and not self._kept else None
        try:
            require_window(window, reached)
            result = self._rules.transform_window(window, self._on_letter)
        except Exception as error:  # any failure: the window is lost to this stream
            self._failure = error
            raise
        except BaseException:  # an interrupt: the caller may read again
            self._failure = SourceUnreachable("window was read and not transformed", hint="Open the stream again.")
            raise
        if result is None:
            return None
        if window.open:
            result = replace(result, start=after, end=after, continues=self._kept)
            self._kept = True
            return result
        if window.continues and not self._kept:
            result = replace(result, continues=False, continued_end=None)
        self._kept = False
        self._passed = result.end if result.is_empty else None
        return result if result.start == after else replace(result, start=after)

    @property
    def held_bytes(self) -> int:
        """Bytes that the stream has read ahead, if it does."""
        return getattr(self._stream, "held_bytes", 0)

    def confirm(self, position: P) -> None:
        self._stream.confirm(position)

    def close(self) -> None:
        self._stream.close()
