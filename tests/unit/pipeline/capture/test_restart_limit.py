"""A killed process is restarted, up to a limit per hour."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tailrace.errors import TailraceError
from tailrace.pipeline.capture.capture_process import RESTARTS_MAX, RESTARTS_SECONDS, CaptureChild, RestartLimit


def test_restarts_are_limited_within_an_hour_and_allowed_again_later() -> None:
    now = 0.0
    restarts = RestartLimit(clock=lambda: now)
    for _ in range(RESTARTS_MAX):
        assert restarts.try_one_more()
        now += 60.0
    assert not restarts.try_one_more()
    now = RESTARTS_SECONDS
    assert restarts.try_one_more(), "the first of them is an hour ago"
    assert not restarts.try_one_more(), "the second is not"
    assert restarts.count == RESTARTS_MAX + 1


def test_a_process_that_is_killed_now_and_then_is_restarted_for_ever() -> None:
    now = 0.0
    restarts = RestartLimit(clock=lambda: now)
    for _ in range(RESTARTS_MAX * 10):
        now += RESTARTS_SECONDS / RESTARTS_MAX
        assert restarts.try_one_more()


def test_a_capture_that_is_killed_at_once_each_time_ends_the_pipeline(tmp_path: Path) -> None:
    child = CaptureChild(tmp_path, ["http.server", "--bind", "127.0.0.1", "0"])

    def kill() -> None:
        os.kill(child._process.pid, signal.SIGKILL)
        child._process.wait(30.0)

    try:
        for _ in range(RESTARTS_MAX):
            kill()
            child.check()
            assert child._process.poll() is None
        kill()
        with pytest.raises(TailraceError, match="the capture process ended"):
            child.check()
        assert child.restarts.count == RESTARTS_MAX
    finally:
        child.stop()
    assert child._process.poll() is not None
