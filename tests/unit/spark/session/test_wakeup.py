"""The socket that wakes the work, read by a plain listener in Spark's place."""

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
    """Does what Spark's source does: it connects, and reads lines."""

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
def wake_source(diary: Diary, tmp_path: Path) -> Iterator[WakeSource]:
    tables = TableRegistry(ChangeLog.open(diary.path), LakeLayout(root=tmp_path))
    stopping, source = threading.Event(), WakeSource(lambda done: tables.next_batch_end(done).end, 0)
    thread = threading.Thread(target=source.serve, args=(stopping,))
    thread.start()
    yield source
    stopping.set()
    thread.join(SECONDS_MAX)
    assert not thread.is_alive()


def write(diary: Diary, commits: int) -> None:
    for number in range(commits):
        diary.commit(inserts(number))


def test_one_number_at_a_time_says_how_far_the_log_has_grown(diary: Diary, wake_source: WakeSource) -> None:
    listener = Listener(wake_source)
    assert listener.hears_nothing(), "there is no commit yet"
    write(diary, 3)
    assert listener.hear() in (1, 2, 3)
    assert wake_source.announced_commit() in (1, 2, 3)
    assert listener.hears_nothing(), "one at a time"
    wake_source.acknowledge(1)
    assert wake_source.answered_commit == 1
    assert eventually(lambda: not listener.hears_nothing())
    assert listener.hear() == 3
    wake_source.acknowledge(3)
    assert wake_source.announced_commit() is None, "an acknowledged number is not announced again"
    assert listener.hears_nothing()
    listener.hang_up()


def test_a_restarted_query_gets_the_number_that_was_not_acknowledged(diary: Diary, wake_source: WakeSource) -> None:
    write(diary, 2)
    first = Listener(wake_source)
    assert first.hear() == 2
    first.hang_up()
    second = Listener(wake_source)
    assert second.hear() == 2
    wake_source.acknowledge(2)
    second.hang_up()
    third = Listener(wake_source)
    assert third.hears_nothing()
    third.hang_up()


def test_a_number_covers_a_bounded_count_of_rows(
    diary: Diary, wake_source: WakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "ROWS_PER_BATCH_MAX", 2)
    write(diary, 5)
    listener, heard = Listener(wake_source), list[int]()
    while not heard or heard[-1] < 5:
        heard.append(listener.hear())
        wake_source.acknowledge(heard[-1])
    assert heard == [2, 4, 5]
    listener.hang_up()
