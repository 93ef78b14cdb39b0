"""Upkeep uses its share of one core, measured in CPU time and not in wall time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tailrace import failpoints
from tailrace.errors import TableUnusable
from tailrace.pipeline.apply.compaction import PAUSE_SECONDS_MIN, pause_after
from tailrace.tables.compaction_plan import FILES_MIN, UpkeepPlan
from tailrace.tables.location import TableLocation
from tailrace.tasks.apply import compact_table
from tailrace.tasks.work import CompactWork, Outcome
from tests.support.changes import SHOP, insert
from tests.support.mirrors import LOG, Mirror, at

SLEPT_SECONDS = 0.6


def outcome(seconds: float, cpu_seconds: float | None) -> Outcome:
    return Outcome(table=SHOP.table, seconds=seconds, cpu_seconds=cpu_seconds)


@pytest.mark.parametrize(
    ("seconds", "cpu_seconds", "budget", "pause"),
    [
        (10.0, 10.0, 0.1, 90.0),
        (10.0, 2.0, 0.1, 10.0),
        (10.0, 20.0, 0.1, 190.0),
        (10.0, 5.0, 0.5, PAUSE_SECONDS_MIN),
        (60.0, 0.5, 0.1, PAUSE_SECONDS_MIN),
        (0.0, 0.0, 0.1, PAUSE_SECONDS_MIN),
        (10.0, None, 0.1, 90.0),
    ],
    ids=["busy", "waiting for the disk", "on two cores", "enough already", "hardly any", "nothing", "not known"],
)
def test_the_pause_pays_for_the_cpu_time_used(
    seconds: float, cpu_seconds: float | None, budget: float, pause: float
) -> None:
    assert pause_after(outcome(seconds, cpu_seconds), budget) == pytest.approx(pause)


def test_over_a_day_the_budget_is_kept() -> None:
    used = passed = 0.0
    for number in range(1, 200):
        done = outcome(number % 7 * 3.0, number % 5 * 2.0)
        used, passed = used + number % 5 * 2.0, passed + done.seconds + pause_after(done, 0.1)
    assert used / passed <= 0.1


def test_a_task_reports_cpu_time_and_not_wall_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = Mirror(tmp_path / "t")
    for number in range(FILES_MIN + 1):
        mirror.apply(insert(number, name="x", big="b", n=1))
    monkeypatch.setattr(failpoints, "hit", lambda _: time.sleep(SLEPT_SECONDS))
    work = CompactWork(
        table=SHOP.table,
        location=TableLocation(path=tmp_path / "t", log_id=LOG),
        expected=at(mirror.seq),
        upkeep=UpkeepPlan(file_bytes=1 << 20, remove_after_seconds=None),
    )
    done = compact_table(work)
    assert (done.error, done.upkeep_result is not None and done.upkeep_result.files_written) == (None, 1)
    assert done.seconds > SLEPT_SECONDS
    assert done.cpu_seconds is not None
    assert 0 < done.cpu_seconds < done.seconds - SLEPT_SECONDS / 2


def test_a_failed_task_reports_its_cpu_time(tmp_path: Path) -> None:
    work = CompactWork(
        table=SHOP.table,
        location=TableLocation(path=tmp_path / "nothing", log_id=LOG),
        expected=at(0),
        upkeep=UpkeepPlan(file_bytes=1 << 20, remove_after_seconds=None),
    )
    done = compact_table(work)
    assert isinstance(done.error, TableUnusable)
    assert done.cpu_seconds is not None
