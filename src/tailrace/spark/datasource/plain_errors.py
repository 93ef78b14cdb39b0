"""Errors of ours as they are told to a user of Spark: what happened and what to do, and not by which way it came here.

Spark tells an exception of a Python source with its whole traceback before the text, and that with those of its causes.
Whoever has misspelled an option has no use for our lines. What is no error of ours is left as it is: there they help.
"""

from __future__ import annotations

from types import TracebackType

from tailrace.errors import TailraceError


class WithoutTraceback:
    """Around what Spark calls."""

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _trace: TracebackType | None) -> None:
        if isinstance(error, TailraceError):
            raise error.with_traceback(None) from None


without_traceback = WithoutTraceback()
