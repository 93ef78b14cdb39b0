"""A stream seen through rules: what the log, or anyone's own sink, gets of it is what the rules have made.

A window that a rule halts at is not given out, and the stream is done with: whoever acknowledges has nothing to
acknowledge it by, nor anything that came after it. Opened again, the stream begins at that window.
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
    """A stream as the rules show it. Windows of which nothing is left only move the position, now and then.

    Rows that a rule with `dead-letter` failed at are marked, for a log; or they go to `on_letter` before the window is
    given out, and come to it again with a window that comes again."""

    def __init__(self, stream: Stream[P], rules: TransformPlan, on_letter: OnDeadLetter | None = None) -> None:
        require_stream(stream)
        self._stream = stream
        self._rules, self._on_letter = rules, on_letter
        if isinstance(stream, HasTimeline):
            self.timeline = stream.timeline
        self._passed: P | None = None
        """The end of the last window, if it had rows of which none was let through."""
        self._kept = False
        """Whether any part of the transaction under way was."""
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
            made = self._rules.transform_window(window, self._on_letter)
        except Exception as error:  # whatever it is: the window is lost to this stream
            self._failure = error
            raise
        except BaseException:  # somebody is in a hurry, and may come back
            self._failure = SourceUnreachable("what was read was not transformed", hint="The stream is opened again.")
            raise
        if made is None:
            return None
        if window.open:
            made = replace(made, start=after, end=after, continues=self._kept)
            self._kept = True
            return made
        if window.continues and not self._kept:
            made = replace(made, continues=False, continued_end=None)
        self._kept = False
        self._passed = made.end if made.is_empty else None
        return made if made.start == after else replace(made, start=after)

    @property
    def held_bytes(self) -> int:
        """What the stream has read ahead, if it does."""
        return getattr(self._stream, "held_bytes", 0)

    def confirm(self, position: P) -> None:
        self._stream.confirm(position)

    def close(self) -> None:
        self._stream.close()
