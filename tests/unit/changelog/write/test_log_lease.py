"""The lease: its holder, its release, its expiry, and its loss."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tailrace.changelog.write import log_lease
from tailrace.changelog.write.log_lease import LogLease
from tailrace.errors import LogBusy, LogFenced

LONG_SECONDS = 240.0
HOLD = """
import sys, time
from pathlib import Path
from tailrace.changelog.write.log_lease import LogLease
held = LogLease(Path(sys.argv[1]), renew_seconds=0.05)
print("held", flush=True)
while not held.lost():
    time.sleep(0.01)
try:
    held.check()
except Exception as error:
    print(error.code, flush=True)
    held.release()
    sys.exit(error.exit_code)
"""


@contextmanager
def holding_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lease."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "held\n"
            yield child
        finally:
            child.kill()


def leave_record(folder: Path, **changed: object) -> Path:
    """Write the record of another host, which we cannot see."""
    record = {
        "pid": 7,
        "host": "elsewhere",
        "boot": "another",
        "token": "t",
        "since": 1.0,
        "renewed": 3,
        "released": False,
    }
    path = folder / "owner.json"
    path.write_text(json.dumps(record | changed))
    return path


def record_of(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "owner.json").read_text())
    return found


def seconds(act: Callable[[], object]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


# --- on one host the kernel decides ------------------------------------------------------------------------


def test_leases_of_different_names_are_independent(tmp_path: Path) -> None:
    one, other = LogLease(tmp_path, "owner", 0.0), LogLease(tmp_path, "apply", 0.0)
    assert log_lease.live_holder_pid(tmp_path, "owner") == log_lease.live_holder_pid(tmp_path, "apply") == os.getpid()
    one.release()
    assert log_lease.live_holder_pid(tmp_path, "owner") is None
    assert log_lease.live_holder_pid(tmp_path, "apply") == os.getpid()
    other.release()


def test_a_lease_never_taken_has_no_holder(tmp_path: Path) -> None:
    assert log_lease.live_holder_pid(tmp_path) is None
    assert log_lease.read_holder(tmp_path) == {}


def test_a_second_process_waits_and_then_gets_an_error_that_names_the_holder(tmp_path: Path) -> None:
    first = LogLease(tmp_path)
    began = time.monotonic()
    with pytest.raises(LogBusy) as caught:
        LogLease(tmp_path, wait_seconds=0.3)
    assert time.monotonic() - began >= 0.3
    assert caught.value.fields["pid"] == os.getpid()
    assert "Stop that process" in caught.value.hint
    assert "`--take-over`" in caught.value.hint
    first.check()
    first.release()


def test_a_waiting_process_gets_the_lease_when_it_is_released(tmp_path: Path) -> None:
    first = LogLease(tmp_path)
    timer = threading.Timer(0.2, first.release)

    def wait() -> None:
        timer.start()
        LogLease(tmp_path, wait_seconds=LONG_SECONDS).release()

    assert seconds(wait) >= 0.2
    timer.join()


def test_an_unreadable_record_names_no_holder(tmp_path: Path) -> None:
    taken = LogLease(tmp_path, wait_seconds=0.0)
    (tmp_path / "owner.json").write_bytes(b"{")
    assert log_lease.live_holder_pid(tmp_path) == 0
    with pytest.raises(LogBusy):
        LogLease(tmp_path, wait_seconds=0.0)
    taken.release()


def test_the_lease_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    with holding_process(tmp_path) as child:
        assert log_lease.live_holder_pid(tmp_path) == child.pid
        with pytest.raises(LogBusy) as caught:
            LogLease(tmp_path, wait_seconds=0.1)
        assert caught.value.fields["pid"] == child.pid
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert record_of(tmp_path)["released"] is False
        found = LogLease(tmp_path, wait_seconds=0.0)
        assert not found.was_forced
        found.release()
    assert log_lease.live_holder_pid(tmp_path) is None


def test_a_container_on_our_kernel_is_not_another_host(tmp_path: Path) -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    leave_record(tmp_path, boot=boot)
    mine = LogLease(tmp_path, wait_seconds=0.0)
    assert not mine.lost()
    assert log_lease.live_holder_pid(tmp_path) == os.getpid()
    mine.release()


def test_a_record_without_host_fields_is_read(tmp_path: Path) -> None:
    mine = LogLease(tmp_path)
    mine.release()
    (tmp_path / "owner.json").write_text(json.dumps({"pid": 7, "host": record_of(tmp_path)["host"]}))
    LogLease(tmp_path, wait_seconds=0.0).release()
    (tmp_path / "owner.json").write_text(json.dumps({"pid": 7, "host": "elsewhere"}))
    with pytest.raises(LogBusy):
        LogLease(tmp_path, wait_seconds=0.0)


def test_a_second_release_does_nothing(tmp_path: Path) -> None:
    first = LogLease(tmp_path)
    first.release()
    second = LogLease(tmp_path, wait_seconds=0.0)
    first.release()
    second.check()
    assert log_lease.live_holder_pid(tmp_path) == os.getpid()
    second.release()


# --- where hosts share storage -----------------------------------------------------------------------------


def test_a_fresh_record_of_another_host_blocks_the_lease(tmp_path: Path) -> None:
    path = leave_record(tmp_path)
    before = path.read_bytes()
    with pytest.raises(LogBusy) as caught:
        LogLease(tmp_path, wait_seconds=0.3, expiry_seconds=LONG_SECONDS)
    assert caught.value.fields == {"pid": 7, "host": "elsewhere"}
    assert path.read_bytes() == before


def test_an_unrenewed_record_of_another_host_expires(tmp_path: Path) -> None:
    leave_record(tmp_path)
    began = time.monotonic()
    found = LogLease(tmp_path, wait_seconds=LONG_SECONDS, expiry_seconds=0.6)
    assert time.monotonic() - began >= 0.6
    assert found.was_forced
    assert log_lease.live_holder_pid(tmp_path) == os.getpid()
    found.release()


def test_a_renewed_record_of_another_host_never_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sleep, renewed = leave_record(tmp_path), time.sleep, itertools.count(4)

    def renew(pause: float) -> None:
        """Between two looks, however far apart they are."""
        path.write_text(json.dumps({**record_of(tmp_path), "renewed": next(renewed)}))
        sleep(pause)

    with monkeypatch.context() as patched:
        patched.setattr(time, "sleep", renew)
        with pytest.raises(LogBusy):
            LogLease(tmp_path, wait_seconds=1.5, expiry_seconds=0.5)
    assert next(renewed) > 5
    # It stops renewing: the time counts from the last change seen, not from the start of our wait.
    assert seconds(lambda: LogLease(tmp_path, wait_seconds=LONG_SECONDS, expiry_seconds=0.5).release()) >= 0.5


def test_the_clock_of_another_host_does_not_matter(tmp_path: Path) -> None:
    for since in (0.0, time.time() + 1e6):
        path = leave_record(tmp_path, since=since)
        os.utime(path, (since, since))
        with pytest.raises(LogBusy):
            LogLease(tmp_path, wait_seconds=0.2, expiry_seconds=LONG_SECONDS)


def test_a_released_record_of_another_host_frees_the_lease_at_once(tmp_path: Path) -> None:
    leave_record(tmp_path, released=True)
    found = LogLease(tmp_path, wait_seconds=0.0)
    assert not found.was_forced
    found.release()


def test_a_record_without_an_owner_counts_as_another_hosts(tmp_path: Path) -> None:
    for content in (b"", b"{", b"[]", b'{"pid": 1}'):
        (tmp_path / "owner.json").write_bytes(content)
        with pytest.raises(LogBusy):
            LogLease(tmp_path, wait_seconds=0.0)
    LogLease(tmp_path, wait_seconds=LONG_SECONDS, expiry_seconds=0.2).release()


def test_a_holder_renews_its_record_and_marks_it_as_released(tmp_path: Path) -> None:
    held = LogLease(tmp_path, renew_seconds=0.02)
    first = record_of(tmp_path)
    assert (first["pid"], first["renewed"], first["released"]) == (os.getpid(), 0, False)
    deadline = time.monotonic() + LONG_SECONDS
    while record_of(tmp_path)["renewed"] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    later = record_of(tmp_path)
    assert later["renewed"] != 0
    assert later["token"] == first["token"]
    held.release()
    assert record_of(tmp_path)["released"] is True
    assert log_lease.read_holder(tmp_path) == {"pid": os.getpid(), "host": first["host"]}


def test_a_renewal_that_the_disk_refuses_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    held = LogLease(folder, renew_seconds=0.01)
    folder.rename(tmp_path / "moved")
    time.sleep(0.1)
    held.check()
    held.release()
    assert not folder.exists()
    LogLease(tmp_path / "moved", wait_seconds=0.0).release()


# --- taking it over ----------------------------------------------------------------------------------------


def test_a_holder_loses_a_lease_that_is_taken_over(tmp_path: Path) -> None:
    first = LogLease(tmp_path)
    second = LogLease(tmp_path, wait_seconds=0.0, take_over=True)
    assert second.was_forced
    assert first.lost()
    with pytest.raises(LogFenced) as caught:
        first.check()
    assert caught.value.fields["pid"] == os.getpid()
    assert caught.value.hint
    second.check()
    first.release()
    assert record_of(tmp_path)["released"] is False, "what a former holder does has no effect"
    with pytest.raises(LogBusy):
        LogLease(tmp_path, wait_seconds=0.0)
    second.check()
    second.release()


def test_a_free_lease_is_not_taken_by_force(tmp_path: Path) -> None:
    LogLease(tmp_path).release()
    found = LogLease(tmp_path, take_over=True)
    assert not found.was_forced
    found.release()


def test_a_lease_of_another_host_can_be_taken_over_at_once(tmp_path: Path) -> None:
    leave_record(tmp_path)
    found = LogLease(tmp_path, wait_seconds=0.0, take_over=True)
    assert found.was_forced
    found.release()


def test_a_lease_held_by_a_stopped_process_can_be_taken_over(tmp_path: Path) -> None:
    with holding_process(tmp_path) as child:
        child.send_signal(signal.SIGSTOP)
        with pytest.raises(LogBusy):
            LogLease(tmp_path, wait_seconds=0.2)
        found = LogLease(tmp_path, wait_seconds=0.0, take_over=True, renew_seconds=0.05)
        assert log_lease.live_holder_pid(tmp_path) == os.getpid()
        child.send_signal(signal.SIGCONT)
        output, _ = child.communicate(timeout=240)
        assert (output, child.returncode) == ("log-fenced\n", 6)
        found.check()
        time.sleep(0.2)
        assert record_of(tmp_path)["pid"] == os.getpid()
        found.release()


def test_a_waiting_process_waits_for_the_new_holder_after_a_take_over(tmp_path: Path) -> None:
    first = LogLease(tmp_path)
    got: list[LogLease] = []
    waiting = threading.Thread(target=lambda: got.append(LogLease(tmp_path, wait_seconds=LONG_SECONDS)))
    waiting.start()
    second = LogLease(tmp_path, wait_seconds=0.0, take_over=True)
    first.release()
    time.sleep(0.4)
    assert not got
    second.release()
    waiting.join()
    got[0].check()
    got[0].release()


def test_a_lock_file_replaced_between_open_and_lock_gives_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, flock, turns = LogLease(tmp_path), fcntl.flock, iter([True])
    second: list[LogLease] = []

    def flock_after_a_take_over(handle: int, how: int) -> None:
        if next(turns, False):
            second.append(LogLease(tmp_path, wait_seconds=0.0, take_over=True))
            first.release()
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", flock_after_a_take_over)
    with pytest.raises(LogBusy):
        LogLease(tmp_path, wait_seconds=0.0)
    second[0].check()
    second[0].release()


def test_exactly_one_of_many_concurrent_take_overs_holds_the_lease(tmp_path: Path) -> None:
    first = LogLease(tmp_path)
    got: list[LogLease] = []
    takers = [
        threading.Thread(target=lambda: got.append(LogLease(tmp_path, wait_seconds=LONG_SECONDS, take_over=True)))
        for _ in range(8)
    ]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join()
    assert len(got) == 8
    assert first.lost()
    assert sum(not found.lost() for found in got) == 1
    for found in [first, *got]:
        found.release()
    assert log_lease.live_holder_pid(tmp_path) is None
    assert list(tmp_path.glob(".*")) == []
