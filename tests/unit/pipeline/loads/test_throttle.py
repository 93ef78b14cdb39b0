"""The throttle limits a load by how fast the source answers."""

from __future__ import annotations

import pytest

from tailrace.errors import SourceUnreachable
from tailrace.pipeline.loads.throttle import PROBES, REST_SECONDS_MAX, Throttle

FAST, SLOW = 0.002, 1.0


def with_answers(throttle: Throttle, seconds: float, times: int = PROBES) -> Throttle:
    for _ in range(times):
        throttle.record_answer(seconds)
    return throttle


def calibrated(budget: int) -> Throttle:
    """Return a throttle that knows the source's best answer time."""
    return with_answers(Throttle(budget, None), FAST)


def test_fast_answers_allow_the_whole_budget() -> None:
    throttle = calibrated(4)
    assert (throttle.allowed, throttle.rest_seconds, throttle.backing_off) == (4, 0.0, False)


def test_slow_answers_halve_the_budget_down_to_one_reader_with_rests() -> None:
    throttle, steps = calibrated(8), list[tuple[int, float]]()
    for _ in range(40):
        throttle.record_answer(SLOW)
        if not steps or steps[-1] != (throttle.allowed, throttle.rest_seconds):
            steps.append((throttle.allowed, throttle.rest_seconds))
    assert [allowed for allowed, rest in steps if not rest] == [8, 4, 2, 1]
    rests = [rest for _, rest in steps if rest]
    assert rests[:3] == [1.0, 2.0, 4.0]
    assert max(rests) == REST_SECONDS_MAX
    assert throttle.allowed == 1, "a load never stops altogether"
    assert throttle.backing_off


def test_a_single_slow_answer_changes_nothing() -> None:
    throttle = calibrated(4)
    for _ in range(20):
        with_answers(throttle, FAST, 3)
        throttle.record_answer(SLOW)
    assert not throttle.backing_off


def test_slower_answers_within_the_minimum_change_nothing() -> None:
    throttle = with_answers(with_answers(Throttle(2, None), 0.0001), 0.04, 20)
    assert not throttle.backing_off


def test_a_distant_source_is_not_mistaken_for_a_busy_one() -> None:
    assert not with_answers(Throttle(2, None), 0.3, 20).backing_off


def test_rests_end_first_and_then_readers_return_one_by_one() -> None:
    throttle = with_answers(calibrated(4), SLOW, 12)
    assert throttle.rest_seconds > 0
    steps = []
    for _ in range(60):
        throttle.record_answer(FAST)
        steps.append((throttle.rest_seconds, throttle.allowed))
    rests, allowed = [rest for rest, _ in steps], [count for _, count in steps]
    assert rests == sorted(rests, reverse=True)
    assert allowed == sorted(allowed)
    assert {2, 3, 4} <= set(allowed), "one by one"
    assert not throttle.backing_off


def test_a_recovery_waits_for_several_answers() -> None:
    throttle = with_answers(calibrated(2), SLOW, 3)
    assert throttle.allowed == 1
    with_answers(throttle, FAST, PROBES - 1)
    assert throttle.allowed == 1
    throttle.record_answer(FAST)
    assert throttle.allowed == 2


def test_without_a_probe_the_budget_stays() -> None:
    throttle = Throttle(3, None)
    throttle.probe()
    assert (throttle.allowed, throttle.backing_off) == (3, False)


def test_a_probe_asks_once_and_raises_if_the_source_is_gone() -> None:
    asked: list[int] = []
    Throttle(1, lambda: asked.append(1)).probe()
    assert asked == [1]

    def gone() -> None:
        raise SourceUnreachable("gone")

    throttle = Throttle(1, gone)
    with pytest.raises(SourceUnreachable):
        throttle.probe()
    assert not throttle.backing_off
