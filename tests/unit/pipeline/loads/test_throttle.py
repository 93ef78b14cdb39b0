"""How much a load may take of a source, by how fast that answers."""

from __future__ import annotations

import pytest

from tailrace.errors import SourceUnreachable
from tailrace.pipeline.loads.throttle import PROBES, REST_SECONDS_MAX, Throttle

FAST, SLOW = 0.002, 1.0


def heard(throttle: Throttle, seconds: float, times: int = PROBES) -> Throttle:
    for _ in range(times):
        throttle.record_answer(seconds)
    return throttle


def calm(budget: int) -> Throttle:
    """One that knows how fast the source is at best."""
    return heard(Throttle(budget, None), FAST)


def test_a_source_that_answers_fast_gives_the_whole_budget() -> None:
    throttle = calm(4)
    assert (throttle.allowed, throttle.rest_seconds, throttle.backing_off) == (4, 0.0, False)


def test_a_source_that_answers_slowly_gives_half_and_half_again_until_one_reads_with_rests() -> None:
    throttle, seen = calm(8), list[tuple[int, float]]()
    for _ in range(40):
        throttle.record_answer(SLOW)
        if not seen or seen[-1] != (throttle.allowed, throttle.rest_seconds):
            seen.append((throttle.allowed, throttle.rest_seconds))
    assert [allowed for allowed, rest in seen if not rest] == [8, 4, 2, 1]
    rests = [rest for _, rest in seen if rest]
    assert rests[:3] == [1.0, 2.0, 4.0]
    assert max(rests) == REST_SECONDS_MAX
    assert throttle.allowed == 1, "a load never stops altogether"
    assert throttle.backing_off


def test_one_slow_answer_among_fast_ones_is_no_reason() -> None:
    throttle = calm(4)
    for _ in range(20):
        heard(throttle, FAST, 3)
        throttle.record_answer(SLOW)
    assert not throttle.backing_off


def test_a_slower_answer_that_is_still_fast_is_no_sign_of_trouble() -> None:
    throttle = heard(heard(Throttle(2, None), 0.0001), 0.04, 20)
    assert not throttle.backing_off


def test_a_source_that_is_far_away_is_not_taken_for_a_busy_one() -> None:
    assert not heard(Throttle(2, None), 0.3, 20).backing_off


def test_what_was_taken_away_comes_back_rests_first_then_one_by_one() -> None:
    throttle = heard(calm(4), SLOW, 12)
    assert throttle.rest_seconds > 0
    seen = []
    for _ in range(60):
        throttle.record_answer(FAST)
        seen.append((throttle.rest_seconds, throttle.allowed))
    rests, allowed = [rest for rest, _ in seen], [count for _, count in seen]
    assert rests == sorted(rests, reverse=True)
    assert allowed == sorted(allowed)
    assert {2, 3, 4} <= set(allowed), "one by one"
    assert not throttle.backing_off


def test_it_waits_for_several_answers_before_it_goes_on() -> None:
    throttle = heard(calm(2), SLOW, 3)
    assert throttle.allowed == 1
    heard(throttle, FAST, PROBES - 1)
    assert throttle.allowed == 1
    throttle.record_answer(FAST)
    assert throttle.allowed == 2


def test_without_a_question_to_ask_it_leaves_the_budget_alone() -> None:
    throttle = Throttle(3, None)
    throttle.probe()
    assert (throttle.allowed, throttle.backing_off) == (3, False)


def test_a_probe_asks_once_and_a_source_that_is_gone_says_so() -> None:
    asked: list[int] = []
    Throttle(1, lambda: asked.append(1)).probe()
    assert asked == [1]

    def gone() -> None:
        raise SourceUnreachable("gone")

    throttle = Throttle(1, gone)
    with pytest.raises(SourceUnreachable):
        throttle.probe()
    assert not throttle.backing_off
