"""The socket that wakes the work, heard by a plain listener in Spark's place."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.changelog.read.reader import ChangeLog
from tailrace.pipeline.tables import registry
from tailrace.pipeline.tables.registry import TableRegistry
from tailrace.spark.session.wakeup import WakeSource
from tailrace.tables.location import LakeLayout
from tests.support.logs import Diary, inserts
from tests.support.pipelines import eventually

SECONDS_MAX = 240.0


class Listener:
    """What Spark's source does: connect, and read lines."""

    def __init__(self, server: WakeSource) -> None:
        self._connection = socket.create_connection(server._server.getsockname(), timeout=SECONDS_MAX)
        self._lines = self._connection.makefile("rb")

    def hear(self) -> int:
        return int(self._lines.readline())

    def hears_nothing(self) -> bool:
        self._connection.settimeout(0.3)
        try:
            self._connection.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return True
        finally:
            self._connection.settimeout(SECONDS_MAX)
        return False

    def hang_up(self) -> None:
        self._lines.close()
        self._connection.close()


@pytest.fixture
def speaking(diary: Diary, tmp_path: Path) -> Iterator[WakeSource]:
    lives = TableRegistry(ChangeLog.open(diary.path), LakeLayout(root=tmp_path))
    stopping, made = threading.Event(), WakeSource(lambda done: lives.next_batch_end(done).end, 0)
    thread = threading.Thread(target=made.serve, args=(stopping,))
    thread.start()
    yield made
    stopping.set()
    thread.join(SECONDS_MAX)
    assert not thread.is_alive()


def write(diary: Diary, commits: int) -> None:
    for number in range(commits):
        diary.commit(inserts(number))


def test_it_says_how_far_the_log_has_grown_and_waits_for_an_answer(diary: Diary, speaking: WakeSource) -> None:
    listener = Listener(speaking)
    assert listener.hears_nothing(), "there is no commit yet"
    write(diary, 3)
    assert listener.hear() in (1, 2, 3)
    assert speaking.announced_commit() in (1, 2, 3)
    assert listener.hears_nothing(), "one at a time"
    speaking.acknowledge(1)
    assert speaking.answered_commit == 1
    assert eventually(lambda: not listener.hears_nothing())
    assert listener.hear() == 3
    speaking.acknowledge(3)
    assert speaking.announced_commit() is None, "what was answered is not asked for again"
    assert listener.hears_nothing()
    listener.hang_up()


def test_a_query_that_comes_anew_is_told_what_the_last_one_did_not_answer(diary: Diary, speaking: WakeSource) -> None:
    write(diary, 2)
    first = Listener(speaking)
    assert first.hear() == 2
    first.hang_up()
    second = Listener(speaking)
    assert second.hear() == 2
    speaking.acknowledge(2)
    second.hang_up()
    third = Listener(speaking)
    assert third.hears_nothing()
    third.hang_up()


def test_a_number_covers_a_bounded_count_of_rows(
    diary: Diary, speaking: WakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "ROWS_PER_BATCH_MAX", 2)
    write(diary, 5)
    listener, heard = Listener(speaking), list[int]()
    while not heard or heard[-1] < 5:
        heard.append(listener.hear())
        speaking.acknowledge(heard[-1])
    assert heard == [2, 4, 5]
    listener.hang_up()
