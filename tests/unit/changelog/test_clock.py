"""Clock jumps: commit times never go back, nothing is removed early, no lease is lost.

test_retention.py tests the effect on retention.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace.changelog.maintain.maintenance import MaintenancePolicy, UnsealedCommits
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write.log_lease import LogLease
from tailrace.errors import LogBusy
from tests.support.logs import Diary, inserts, read_all, seal, stored_files

DAY = 86_400.0
Jump = Callable[[float], None]


@pytest.fixture
def jump(monkeypatch: pytest.MonkeyPatch) -> Jump:
    """Set the machine's clock so many seconds forward or, mostly, back."""
    real, real_ns = time.time, time.time_ns

    def set_clock(seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: real() + seconds)
        monkeypatch.setattr(time, "time_ns", lambda: real_ns() + int(seconds * 1e9))

    return set_clock


def test_a_commit_is_never_older_than_the_one_before_it(diary: Diary, jump: Jump) -> None:
    diary.commit(inserts(1))
    jump(-DAY)
    diary.commit(inserts(2))
    diary.reopen()
    diary.commit(inserts(3))
    jump(-3 * DAY)
    diary.commit(inserts(4))
    jump(DAY)
    diary.commit(inserts(5))
    written = [header.written_at for header in ChangeLog.open(diary.path).headers(0)]
    assert written == sorted(written)
    assert written[-1] - written[-2] > 0.9 * DAY * 1e6, "and it follows the clock once that is ahead again"


def test_commits_written_while_the_clock_jumped_are_sealed_merged_and_read(diary: Diary, jump: Jump) -> None:
    for step, seconds in enumerate((0.0, -DAY, 2 * DAY, -3 * DAY)):
        jump(seconds)
        diary.commit(inserts(step))
        seal(diary.path, grace_seconds=None)
    log = ChangeLog.open(diary.path)
    log.seal_index.refresh()
    times = [(seal.written_from, seal.written_to) for seal in log.seal_index.seals]
    assert times == sorted(times)
    assert read_all(diary.path) == diary.rows()


@pytest.mark.parametrize("days", [-1, -400])
def test_replaced_files_are_kept_for_the_grace_period_when_the_clock_jumps(
    diary: Diary, jump: Jump, days: float
) -> None:
    for key in range(3):
        diary.commit(inserts(key))
    seal(diary.path, grace_seconds=None)
    hot = stored_files(diary.path, "hot/*")
    jump(days * DAY)
    with Sealer(diary.path) as sealer:
        assert sealer.clean(60.0).removed == 0
    assert stored_files(diary.path, "hot/*") == hot
    jump(61.0)
    with Sealer(diary.path) as sealer:
        sealer.clean(60.0)
    assert len(stored_files(diary.path, "hot/*")) == 1
    assert read_all(diary.path) == diary.rows()


def test_a_seal_is_due_in_time_when_the_clock_jumps(diary: Diary, jump: Jump, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.monotonic
    policy = MaintenancePolicy(seal_bytes=1 << 40, seal_commits=1 << 40, seal_seconds=1000.0)
    unsealed = UnsealedCommits(ChangeLog.open(diary.path))
    diary.commit(inserts(1))
    assert not unsealed.is_seal_due(policy)
    jump(DAY)
    assert not unsealed.is_seal_due(policy), "a day by the clock"
    jump(-DAY)
    monkeypatch.setattr(time, "monotonic", lambda: real() + 1000.0)
    assert unsealed.is_seal_due(policy), "by the clock it is not even written"


def test_a_clock_jump_neither_loses_a_lease_nor_keeps_it_for_ever(tmp_path: Path, jump: Jump) -> None:
    record = {
        "pid": 1,
        "host": "elsewhere",
        "boot": "another",
        "token": "x",
        "since": time.time(),
        "renewed": 1,
        "released": False,
    }
    (tmp_path / "owner.json").write_text(json.dumps(record))
    jump(400 * DAY)
    with pytest.raises(LogBusy):
        LogLease(tmp_path, wait_seconds=0.3, expiry_seconds=240.0)
    jump(-400 * DAY)
    lease = LogLease(tmp_path, wait_seconds=240.0, expiry_seconds=0.3)
    jump(400 * DAY)
    assert not lease.lost()
    lease.release()
