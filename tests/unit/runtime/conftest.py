"""What every test of the loop shares."""

from __future__ import annotations

import pytest

from tailrace.runtime import intake, loop


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same loop with short waits."""
    monkeypatch.setattr(loop, "READ_SECONDS", 0.02)
    monkeypatch.setattr(intake, "RETRY_SECONDS_FIRST", 0.05)
