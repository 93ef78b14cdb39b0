"""The barrier that a scan waits for in the background: the caller gets any error that ended the wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tailrace.capture.postgres.table_scan import Barrier
from tailrace.errors import SourceError, SourceUnreachable


class Broken:
    """A source whose wait ends with this error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def begin_chunks(self, _stopping: Callable[[], bool]) -> None:
        raise self._error


@pytest.mark.parametrize("error", [SourceUnreachable("gone", hint="Wait."), MemoryError("SECRET")])
def test_any_end_of_the_wait_is_reported_and_no_caller_waits_for_ever(error: Exception) -> None:
    source: Any = Broken(error)
    barrier = Barrier(source)
    barrier.close()  # which waits for it
    with pytest.raises(SourceError) as told:
        barrier.result()
    assert "SECRET" not in str(told.value)
