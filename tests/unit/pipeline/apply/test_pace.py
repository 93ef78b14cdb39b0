"""Merging uses at most half of the time, by a clock that only the test moves."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import pytest

from tailrace.pipeline.apply.pace import AHEAD_SECONDS_MAX, SHARE_SECONDS, Pace

SECONDS_MAX = 240.0


class Day:
    """A pipeline with a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pace = Pace(lambda: self.now)
        self.merged = 0.0

    def merge(self, seconds: float, *, backlog: bool = False) -> float:
        with self.pace.merging():
            self.now += seconds
        self.merged += seconds
        return self.pace.rest_seconds(backlog=backlog)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def day() -> Day:
    return Day()


@pytest.mark.parametrize("seconds", [0.2, 3.0, 45.0, 900.0])
def test_a_merge_of_any_length_is_followed_by_an_equal_rest(day: Day, seconds: float) -> None:
    assert day.merge(seconds) == pytest.approx(seconds)
    day.pass_by(seconds)
    assert day.merge(seconds) == pytest.approx(seconds), "and so is the next"


def test_under_a_steady_load_merging_takes_half_of_the_time(day: Day) -> None:
    began = day.now
    for number in range(200):
        day.pass_by(day.merge(2.0 + number % 3))
        day.pass_by(0.4)  # Spark gets ready: that is rest, too
    assert day.merged / (day.now - began) == pytest.approx(0.5, abs=0.01)


def test_idle_time_between_merges_counts_as_rest(day: Day) -> None:
    for _ in range(5):
        day.pass_by(4.0)
        assert day.merge(3.0) == 0.0


def test_a_quiet_night_does_not_pay_for_a_busy_morning(day: Day) -> None:
    day.pass_by(8 * 3600)
    assert day.merge(AHEAD_SECONDS_MAX) == 0.0
    assert day.merge(5.0) == pytest.approx(5.0)


def test_a_backlog_is_merged_without_rest_and_nothing_is_owed_for_it(day: Day) -> None:
    for _ in range(20):
        assert day.merge(30.0, backlog=True) == 0.0
    assert day.merge(2.0) == pytest.approx(2.0), "the last merge owes rest only for itself"


def test_a_failed_merge_owes_rest_too(day: Day) -> None:
    with suppress(OSError), day.pace.merging():
        day.pass_by(7.0)
        raise OSError
    assert day.pace.rest_seconds(backlog=False) == pytest.approx(7.0)


def test_concurrent_merges_owe_rest_for_the_time_they_cover_once(day: Day) -> None:
    with day.pace.merging():
        day.pass_by(2.0)
        with day.pace.merging():
            day.pass_by(3.0)
        assert day.pace.rest_seconds(backlog=False) == 0.0, "a running merge owes nothing yet"
        day.pass_by(1.0)
    assert day.pace.rest_seconds(backlog=False) == pytest.approx(6.0)
    day.pass_by(6.0)
    assert day.pace.rest_seconds(backlog=False) == 0.0
    assert day.pace.merging_share() == pytest.approx(0.5)


def test_a_merge_during_the_rest_is_not_rest(day: Day) -> None:
    day.merge(4.0)
    with day.pace.merging():
        day.pass_by(4.0)
    assert day.pace.rest_seconds(backlog=False) == pytest.approx(8.0)


def test_the_share_covers_the_last_minute_and_the_running_merge(day: Day) -> None:
    assert day.pace.merging_share() == 0.0
    day.merge(15.0)
    day.pass_by(15.0)
    assert day.pace.merging_share() == pytest.approx(0.5)
    day.pass_by(SHARE_SECONDS)
    assert day.pace.merging_share() == 0.0
    with day.pace.merging():
        day.pass_by(SHARE_SECONDS / 4)
        assert day.pace.merging_share() == pytest.approx(0.25)


def test_the_share_can_be_read_while_another_thread_merges() -> None:
    pace, inside, over = Pace(), threading.Event(), threading.Event()

    def merge() -> None:
        with pace.merging():
            inside.set()
            over.wait(SECONDS_MAX)

    thread = threading.Thread(target=merge)
    thread.start()
    assert inside.wait(SECONDS_MAX)
    time.sleep(0.01)
    assert pace.merging_share() > 0.0
    over.set()
    thread.join(SECONDS_MAX)


@pytest.mark.parametrize("before", [True, False])
def test_stop_resting_ends_a_rest_at_once(before: bool) -> None:
    pace = Pace()
    if before:
        pace.stop_resting()
    resting = threading.Thread(target=pace.rest, args=(600.0,))
    resting.start()
    pace.stop_resting()
    resting.join(SECONDS_MAX)
    assert not resting.is_alive()
