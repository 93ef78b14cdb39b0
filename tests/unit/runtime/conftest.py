"""Fixtures of the loop's tests."""

from __future__ import annotations

import pytest

from tailrace.runtime import intake, loop


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the loop short waits."""
    monkeypatch.setattr(loop, "READ_SECONDS", 0.02)
    monkeypatch.setattr(intake, "RETRY_SECONDS_FIRST", 0.05)
