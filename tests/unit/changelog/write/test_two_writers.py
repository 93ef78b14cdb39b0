"""Two writers of one log: one wins, the other is refused; nothing is overwritten.

There is no gap and no fork. The lease keeps the second writer out; the fence must hold where the lease does not
(another host, a lock that lies). So most tests here remove the lease. test_log_lease.py tests the lease itself,
test_log_take_over.py whole processes.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tailrace.changelog.format.commit_file import commit_path
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write import writer as writer_module
from tailrace.changelog.write.log_lease import LogLease
from tailrace.changelog.write.writer import LogWriter
from tailrace.errors import LogBusy, LogFenced
from tailrace.storage import files
from tailrace.storage.files import LogPath
from tests.support.windows import SOURCE, ids, named, rows_window

PLACES = ("disk", "store")


class NoLease:
    """A lease that keeps no process out, as on a file system whose locks lie."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def release(self) -> None: ...


@pytest.fixture
def rivals(filled: LogPath, monkeypatch: pytest.MonkeyPatch) -> tuple[LogWriter, LogWriter]:
    """Two writers of one log, both at commit 3, without knowledge of each other."""
    monkeypatch.setattr(writer_module, "LogLease", NoLease)
    return LogWriter(filled, SOURCE), LogWriter(filled, SOURCE)


def keys(folder: LogPath, after: int = 0) -> list[object]:
    return [key for _, key in ids(list(ChangeLog.open(folder).follow(after)))]


# --- the number is the fence -------------------------------------------------------------------------------


def test_the_second_writer_of_a_number_is_refused_and_overwrites_nothing(
    rivals: tuple[LogWriter, LogWriter], filled: LogPath
) -> None:
    one, other = rivals
    one.append(rows_window(300, 400, 10))
    stored = commit_path(filled, 4).read_bytes()
    with pytest.raises(LogFenced) as caught:
        other.append(rows_window(300, 500, 20))
    assert caught.value.fields["commit"] == 4
    assert commit_path(filled, 4).read_bytes() == stored
    assert keys(filled, 3) == [10]
    assert [path.name for path in (filled / "hot").iterdir() if path.name.startswith(".")] == []


def test_a_refused_writer_stays_refused(rivals: tuple[LogWriter, LogWriter], filled: LogPath) -> None:
    one, other = rivals
    one.append(rows_window(300, 400, 10))
    for _ in range(2):
        with pytest.raises(LogFenced):
            other.append(rows_window(300, 500, 20))
    assert other.commit == 3
    one.append(rows_window(400, 500, 11))
    assert keys(filled, 3) == [10, 11]


def test_a_writer_paused_during_several_commits_is_refused(
    rivals: tuple[LogWriter, LogWriter], filled: LogPath
) -> None:
    one, other = rivals
    for start in range(300, 600, 100):
        one.append(rows_window(start, start + 100, start))
    with pytest.raises(LogFenced):
        other.append(rows_window(300, 400, 20))
    assert keys(filled, 3) == [300, 400, 500]


def test_the_loser_of_a_new_tables_number_is_refused_too(rivals: tuple[LogWriter, LogWriter], filled: LogPath) -> None:
    one, other = rivals
    one.append(rows_window(300, 400, 10, schema=named("public", "new", 2)))
    for rival in (named("public", "new", 2), named("public", "another", 3)):
        with pytest.raises(LogFenced):
            other.append(rows_window(300, 400, 20, schema=rival))
    (found,) = ChangeLog.open(filled).follow(3)
    assert found.schema.table.name == "new"


def test_a_rival_that_commits_between_our_write_and_our_link_wins(
    rivals: tuple[LogWriter, LogWriter], filled: LogPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = rivals
    publish, turns = files.publish, iter([True])

    def publish_after_the_rival(aside: Path, path: LogPath) -> None:
        if next(turns, False):
            other.append(rows_window(300, 400, 20))
        publish(aside, path)

    monkeypatch.setattr(files, "publish", publish_after_the_rival)
    with pytest.raises(LogFenced):
        one.append(rows_window(300, 400, 10))
    assert keys(filled, 3) == [20]


def test_what_a_writer_publishes_is_what_that_writer_wrote(
    rivals: tuple[LogWriter, LogWriter], filled: LogPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = rivals
    write, written, go_on = files.write_temp, threading.Event(), threading.Event()

    def write_and_hold_back_the_rival(path: files.TempFile, parts: Sequence[bytes | memoryview]) -> None:
        write(path, parts)
        if threading.current_thread() is rival:
            written.set()
            go_on.wait(240)
        else:
            rival.start()
            assert written.wait(240)

    refused: list[BaseException] = []

    def append() -> None:
        try:
            other.append(rows_window(300, 400, 20))
        except LogFenced as error:
            refused.append(error)

    rival = threading.Thread(target=append)
    monkeypatch.setattr(files, "write_temp", write_and_hold_back_the_rival)
    one.append(rows_window(300, 400, 10))
    go_on.set()
    rival.join()
    assert keys(filled, 3) == [10]
    assert len(refused) == 1


def test_writers_that_race_leave_no_gap_and_no_fork(rivals: tuple[LogWriter, LogWriter], filled: LogPath) -> None:
    won: list[tuple[int, int]] = []

    def race(writer: LogWriter, name: int) -> None:
        for turn in range(25):
            key = name + turn
            try:
                position = writer.position.value
                header = writer.append(rows_window(position, position + 10, key))
                assert header is not None
                won.append((header.commit, key))
            except LogFenced:
                last = ChangeLog.open(filled).last_header()
                assert last is not None
                writer.commit, writer.position, writer.next_seq = last.commit, last.end, last.next_seq

    threads = [threading.Thread(target=race, args=(writer, 1000 * n)) for n, writer in enumerate(rivals, start=1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [commit for commit, _ in sorted(won)] == list(range(4, len(won) + 4))
    assert keys(filled, 3) == [key for _, key in sorted(won)]
    assert [seq for seq, _ in ids(list(ChangeLog.open(filled).follow(0)))] == list(range(1, len(won) + 6))


# --- the lease ---------------------------------------------------------------------------------------------


def test_a_second_writer_waits_and_then_gets_an_error_that_names_the_holder(
    writer: LogWriter, folder: LogPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "LogLease", functools.partial(LogLease, wait_seconds=0.3))
    began = time.monotonic()
    with pytest.raises(LogBusy) as caught:
        LogWriter(folder, SOURCE)
    assert time.monotonic() - began >= 0.3
    assert caught.value.fields["pid"] == os.getpid()
    assert caught.value.hint
    writer.append(rows_window(0, 100, 1))


def test_a_waiting_writer_gets_the_log_when_the_first_one_closes(folder: LogPath) -> None:
    first = LogWriter(folder, SOURCE)
    timer = threading.Timer(0.2, first.close)
    began = time.monotonic()
    timer.start()
    second = LogWriter(folder, SOURCE)
    waited = time.monotonic() - began
    timer.join()
    second.close()
    assert waited >= 0.2
