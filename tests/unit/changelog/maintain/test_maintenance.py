"""Log maintenance seals in time, merges, cleans and trims, and never blocks the writer."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tailrace.changelog.format.commit_file import commit_path
from tailrace.changelog.maintain.maintenance import (
    STOP_SECONDS_MAX,
    LogMaintenance,
    MaintenancePolicy,
    UnsealedCommits,
    maintain_once,
)
from tailrace.changelog.maintain.retention import RetentionPolicy, disk_bytes
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.read.consumers import TableProgress, write_table_progress
from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import LogBusy, LogTrimmed
from tests.support.changes import SHOP, insert
from tests.support.logs import OTHER, Diary, inserts, read_all, rows_of, seal, stored_files
from tests.support.pipelines import descendants

FOR_EVER = RetentionPolicy(age_seconds=None)
NEVER = MaintenancePolicy(seal_bytes=1 << 40, seal_commits=1 << 40, seal_seconds=1e9, retention=FOR_EVER)


def eventually(condition: Callable[[], bool], seconds: float = 240.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def sealed_to(diary: Diary) -> int:
    log = ChangeLog.open(diary.path)
    log.seal_index.refresh()
    return log.seal_index.last_commit


def maintenance_pids(parent: int | None = None) -> list[int]:
    """Return the maintenance processes below a process, by default this one."""
    above, found = parent or os.getpid(), []
    for pid in descendants(above) - {above}:
        with suppress(OSError):
            if b"tailrace.changelog.maintain.maintenance" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


# --- when a seal is due--------------------------------------------------------------------------------------


def test_a_seal_is_due_after_enough_commits(diary: Diary) -> None:
    unsealed = UnsealedCommits(ChangeLog.open(diary.path))
    policy = MaintenancePolicy(seal_bytes=1 << 40, seal_commits=3, seal_seconds=1e9)
    for expected in (False, False, True, True):
        diary.commit(inserts(1))
        assert unsealed.is_seal_due(policy) is expected
    seal(diary.path)
    assert not unsealed.is_seal_due(policy)
    for expected in (False, False, True):
        diary.commit()
        assert unsealed.is_seal_due(policy) is expected


def test_a_seal_is_due_after_enough_bytes_pieces_included(diary: Diary) -> None:
    unsealed = UnsealedCommits(ChangeLog.open(diary.path))
    policy = MaintenancePolicy(seal_bytes=100_000, seal_commits=1 << 40, seal_seconds=1e9)
    diary.commit((SHOP, [insert(1, big="x" * 60_000)]))
    assert not unsealed.is_seal_due(policy)
    diary.piece((SHOP, [insert(2, big="x" * 60_000)]))
    assert not unsealed.is_seal_due(policy)
    diary.finish()
    assert unsealed.is_seal_due(policy)


def test_a_seal_is_due_when_the_oldest_commit_is_old_enough_and_no_sooner(
    diary: Diary, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, passed = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: real() + passed)
    unsealed = UnsealedCommits(ChangeLog.open(diary.path))
    policy = MaintenancePolicy(seal_bytes=1 << 40, seal_commits=1 << 40, seal_seconds=1000.0)
    diary.commit(inserts(1))
    assert not unsealed.is_seal_due(policy)
    passed += 1000.0
    assert unsealed.is_seal_due(policy)
    seal(diary.path)
    # A busy log is not sealed at every check: the next commit waits as long as the first did.
    diary.commit(inserts(2))
    assert not unsealed.is_seal_due(policy)
    diary.commit(inserts(3))
    assert not unsealed.is_seal_due(policy)
    passed += 1000.0
    assert unsealed.is_seal_due(policy)


# --- one round -----------------------------------------------------------------------------------------------


def test_a_round_seals_merges_and_cleans(diary: Diary) -> None:
    log = ChangeLog.open(diary.path)
    policy = MaintenancePolicy(grace_seconds=0.0, retention=FOR_EVER)
    for key in range(8):
        diary.commit(inserts(key))
        done = maintain_once(log, policy, seal=True)
        assert (done.sealed.seals, done.sealed.commits, done.sealed.rows) == (1, 1, 1)
    assert done.sealed.merged == 8
    assert len(stored_files(diary.path, "cold/*.json", "hot/*")) == 2
    assert read_all(diary.path) == diary.rows()


def test_a_round_without_a_due_seal_only_cleans_and_trims(diary: Diary) -> None:
    diary.commit(inserts(1))
    done = maintain_once(ChangeLog.open(diary.path), NEVER, seal=False)
    assert (done.sealed.seals, done.trimmed.rows) == (0, 0)
    assert stored_files(diary.path, "cold/*.json") == set()


def test_a_round_keeps_the_grace_period(diary: Diary) -> None:
    for key in range(3):
        diary.commit(inserts(key))
    log = ChangeLog.open(diary.path)
    maintain_once(log, MaintenancePolicy(retention=FOR_EVER), seal=True)
    assert len(stored_files(diary.path, "hot/*")) == 3


def test_a_round_trims_by_the_policy(diary: Diary) -> None:
    diary.commit(inserts(1))
    log = ChangeLog.open(diary.path)
    done = maintain_once(
        log, MaintenancePolicy(grace_seconds=0.0, retention=RetentionPolicy(age_seconds=-1.0)), seal=True
    )
    assert done.trimmed.commits == 1
    with pytest.raises(LogTrimmed):
        list(log.follow(0))


def test_a_nearly_full_log_is_sealed_and_cleaned_before_a_reader_is_detached(diary: Diary) -> None:
    write_table_progress(diary.path, [TableProgress(table=SHOP.table, numbers=(1,), commit=0, seq=0)])
    for key in range(4):
        diary.commit((SHOP, [insert(key, big=os.urandom(50_000).hex())]))
    hot = disk_bytes(diary.path)
    # As text these rows take twice the room that they take sealed.
    policy = RetentionPolicy(age_seconds=None, max_bytes=int(hot * 0.95))
    done = maintain_once(ChangeLog.open(diary.path), MaintenancePolicy(retention=policy), seal=False)
    assert (done.sealed.seals, done.trimmed.detached) == (1, ())
    assert read_all(diary.path) == diary.rows()
    tight = RetentionPolicy(age_seconds=None, max_bytes=int(hot * 0.3))
    done = maintain_once(ChangeLog.open(diary.path), MaintenancePolicy(retention=tight), seal=False)
    assert done.trimmed.detached == (str(SHOP.table),)


def test_a_round_yields_to_another_sealer(diary: Diary) -> None:
    diary.commit(inserts(1))
    with Sealer(diary.path), pytest.raises(LogBusy):
        maintain_once(ChangeLog.open(diary.path), NEVER, seal=True)
    assert maintain_once(ChangeLog.open(diary.path), NEVER, seal=True).sealed.seals == 1


# --- the process ---------------------------------------------------------------------------------------------


def test_the_process_seals_while_a_writer_continues(diary: Diary) -> None:
    maintenance = LogMaintenance(diary.path, MaintenancePolicy(seal_commits=5, grace_seconds=0.0, retention=FOR_EVER))
    maintenance.start()
    try:
        log = ChangeLog.open(diary.path)
        follower = log.follow(0, wait_seconds=240)
        found = []
        for key in range(40):
            diary.commit(inserts(key), inserts(key, schema=OTHER))
        assert eventually(lambda: bool(stored_files(diary.path, "cold/*.json")))
        diary.commit(inserts(99))
        for batch in follower:
            found.append(batch)
            if batch.data.column("id")[-1].as_py() == 99:
                break
    finally:
        maintenance.stop()
    assert not any(thread.name == "tailrace-log-maintenance" for thread in threading.enumerate())
    assert len(rows_of(found)) == len(diary.noted)
    assert read_all(diary.path) == diary.rows()


def test_a_process_that_finds_damage_logs_an_error_and_does_not_stop_the_writer(
    diary: Diary, caplog: pytest.LogCaptureFixture
) -> None:
    diary.commit(inserts(1, big="x" * 1000))
    diary.commit(inserts(2))
    path = commit_path(diary.path, 1)
    content = bytearray(path.read_bytes())
    content[-600] ^= 1
    path.write_bytes(content)
    maintenance = LogMaintenance(diary.path, MaintenancePolicy(seal_commits=1, retention=FOR_EVER))
    with caplog.at_level(logging.WARNING):
        maintenance.start()
        try:
            assert eventually(lambda: any(record.levelno == logging.ERROR for record in caplog.records))
            diary.commit(inserts(3))
        finally:
            began = time.monotonic()
            maintenance.stop()
    assert time.monotonic() - began < STOP_SECONDS_MAX, "no process waits for the next try"
    (record,) = (record for record in caplog.records if record.levelno == logging.ERROR)
    assert record.code == "log-corrupt"  # type: ignore[attr-defined] # an extra
    assert rows_of(ChangeLog.open(diary.path).follow(1)) == diary.rows(1)


def test_a_killed_process_is_started_again(diary: Diary, caplog: pytest.LogCaptureFixture) -> None:
    policy = MaintenancePolicy(
        seal_commits=1, grace_seconds=0.0, retention=FOR_EVER, check_seconds=0.05, retry_seconds=0.1
    )
    maintenance = LogMaintenance(diary.path, policy)
    maintenance.start()
    try:
        diary.commit(inserts(1))
        assert eventually(lambda: sealed_to(diary) == 1)
        (pid,) = maintenance_pids()
        os.kill(pid, signal.SIGKILL)
        diary.commit(inserts(2))
        assert eventually(lambda: sealed_to(diary) == 2)
    finally:
        maintenance.stop()
    assert "log maintenance ended, will be started again" in caplog.messages
    assert maintenance_pids() == []


@pytest.mark.slow
def test_a_process_ends_with_its_parent(diary: Diary) -> None:
    script = (
        "import sys, time; from pathlib import Path\n"
        "from tailrace.changelog.maintain.maintenance import LogMaintenance, MaintenancePolicy\n"
        "LogMaintenance(Path(sys.argv[1]), MaintenancePolicy(check_seconds=0.01)).start(); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(diary.path)]) as starter:
        try:
            assert eventually(lambda: len(maintenance_pids(starter.pid)) == 1)
            (pid,) = maintenance_pids(starter.pid)
        finally:
            starter.kill()
    assert eventually(lambda: not Path(f"/proc/{pid}").exists())


def test_maintenance_without_a_start_or_a_log_can_be_stopped(tmp_path: Path) -> None:
    LogMaintenance(tmp_path / "nothing", MaintenancePolicy()).stop()
    maintenance = LogMaintenance(tmp_path / "nothing", MaintenancePolicy())
    maintenance.start()
    maintenance.stop()
    assert not (tmp_path / "nothing").exists()
