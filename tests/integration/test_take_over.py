"""A capture that hangs, one that takes its place, and the first one waking up again: against a real server."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
import pytest

from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import LogFenced
from tailrace.pipeline.capture.log_capture import LogCapture
from tailrace.pipeline.config.settings_file import load_settings
from tests.support.pipelines import Pipeline, Running, assert_log_is_whole, eventually, execute, wait_for_free_slots
from tests.support.thorough import thorough


@contextmanager
def inserting(url: str, *, first: int = 1) -> Iterator[None]:
    """Single-row transactions, as an application makes them, until the block ends."""
    done = threading.Event()

    def insert() -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            n = first
            while not done.wait(0.002):
                connection.execute("INSERT INTO t VALUES (%s, 'x')", (n,))
                n += 1

    writer = threading.Thread(target=insert)
    writer.start()
    try:
        yield
    finally:
        done.set()
        writer.join()


def logged(log: Path) -> Counter[int]:
    """How often each id was inserted, by the log."""
    found: Counter[int] = Counter()
    for batch in ChangeLog.open(log).follow(0):
        if batch.schema.table.name == "t":
            found.update(batch.data.column("id").to_pylist())
    return found


def stored(url: str) -> set[int]:
    with psycopg.connect(url) as connection:
        return {row[0] for row in connection.execute("SELECT id FROM t")}


def confirmed(url: str) -> str:
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name LIKE 'tailrace%' "
            "AND database = current_database()"
        ).fetchone()
    assert row is not None
    return str(row[0])


def newest(log: Path) -> int:
    return ChangeLog.open(log).newest()


def start(ended: ExitStack, pipeline: Pipeline, *flags: str) -> Running:
    running = pipeline.start("capture", "--json", *flags)
    ended.callback(running.end)
    return running


def wait_until_capturing(running: Running, log: Path, commits: int = 5) -> None:
    assert eventually(lambda: "capture started" in running.said()), running.said()
    before = newest(log)
    assert eventually(lambda: newest(log) > before + commits, pause=0.02), running.said()


def error_of(running: Running) -> dict[str, object]:
    said = next(line for line in running.said().splitlines() if line.startswith("{"))
    found: dict[str, object] = json.loads(said)["error"]
    return found


@pytest.fixture
def ended() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_capture_that_was_stopped_wakes_up_and_disturbs_nothing(
    database: str, tmp_path: Path, ended: ExitStack
) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY, x text)")
    pipeline = Pipeline(tmp_path, database)
    first = start(ended, pipeline)
    assert eventually(lambda: "capture started" in first.said()), first.said()
    with inserting(database):  # only now: a log holds what was committed after its slot was made
        wait_until_capturing(first, pipeline.log)
        first.process.send_signal(signal.SIGSTOP)

        second = start(ended, pipeline, "--take-over")
        wait_until_capturing(second, pipeline.log)
        first.process.send_signal(signal.SIGCONT)
        assert first.wait() == 6, first.said()
        assert error_of(first)["code"] == "log-fenced"
        assert "Leave the work to that process" in str(error_of(first)["hint"])
        wait_until_capturing(second, pipeline.log)
    assert eventually(lambda: len(logged(pipeline.log)) == len(stored(database)))
    assert second.terminate() == 0, second.said()
    assert logged(pipeline.log) == Counter(stored(database)), "every row is there, once"
    assert_log_is_whole(pipeline.log)


def test_what_a_stopped_capture_had_read_is_not_confirmed_when_it_wakes_up(
    database: str, tmp_path: Path, ended: ExitStack
) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY, x text)")
    pipeline = Pipeline(tmp_path, database)
    first = start(ended, pipeline)
    assert eventually(lambda: "capture started" in first.said()), first.said()
    first.process.send_signal(signal.SIGSTOP)
    # These wait in the stopped one's socket: awake again it reads them, and may neither keep nor confirm them.
    execute(database, "INSERT INTO t SELECT g, 'x' FROM generate_series(1, 100) g")
    second = pipeline.call("capture", "--take-over", "--until-caught-up")
    assert second.returncode == 0, second.stderr
    wait_for_free_slots(database)  # so that its own last word was heard
    before, commits = confirmed(database), newest(pipeline.log)
    execute(database, "INSERT INTO t SELECT g, 'x' FROM generate_series(101, 200) g")
    first.process.send_signal(signal.SIGCONT)
    assert first.wait() == 6, first.said()
    assert confirmed(database) == before
    assert newest(pipeline.log) == commits
    assert pipeline.call("capture", "--until-caught-up").returncode == 0
    assert logged(pipeline.log) == Counter(range(1, 201))
    assert_log_is_whole(pipeline.log)


def test_a_capture_that_lost_the_log_says_so_and_not_that_its_position_is_lost(
    database: str, tmp_path: Path, ended: ExitStack
) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY, x text)")
    pipeline = Pipeline(tmp_path, database)
    assert pipeline.call("capture", "--until-caught-up").returncode == 0
    first = LogCapture(load_settings(pipeline.file), until_caught_up=False)
    ended.callback(first.log.close)
    execute(database, "INSERT INTO t VALUES (1, 'x')")
    assert pipeline.call("capture", "--take-over", "--until-caught-up").returncode == 0
    # The successor has moved the slot past where this one believes the log to end.
    # Woken just behind its last look at the lease, it goes straight to the source.
    with pytest.raises(LogFenced):
        first.runtime.run(first.sink, lambda: False)


def test_without_take_over_a_second_capture_waits_and_is_refused_even_by_one_that_is_stopped(
    database: str, tmp_path: Path, ended: ExitStack
) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY, x text)")
    pipeline = Pipeline(tmp_path, database)
    first = start(ended, pipeline)
    assert eventually(lambda: "capture started" in first.said()), first.said()
    first.process.send_signal(signal.SIGSTOP)
    second = pipeline.call("capture", "--until-caught-up")
    assert second.returncode == 6, second.stderr
    assert "another process holds the log" in second.stderr
    assert f"pid={first.process.pid}" in second.stderr
    assert "`--take-over`" in second.stderr
    first.process.send_signal(signal.SIGCONT)
    execute(database, "INSERT INTO t VALUES (1, 'x')")
    assert eventually(lambda: logged(pipeline.log) == Counter([1])), first.said()
    assert first.terminate() == 0


@thorough
def test_a_whole_pipeline_that_was_stopped_can_be_taken_over(database: str, tmp_path: Path, ended: ExitStack) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY, x text)", "INSERT INTO t VALUES (1, 'x')")
    pipeline = Pipeline(tmp_path, database)
    first = pipeline.start("run", "--json")
    ended.callback(first.end)
    live = lambda: [table["state"] for table in pipeline.status()["tables"]] == ["live"]  # noqa: E731
    assert eventually(live, pause=1), first.said()
    os.killpg(first.process.pid, signal.SIGSTOP)
    execute(database, "INSERT INTO t VALUES (2, 'y')")
    second = pipeline.call("run", "--take-over", "--until-caught-up")
    assert second.returncode == 0, second.stderr
    pipeline.assert_equal("t")
    os.killpg(first.process.pid, signal.SIGCONT)
    assert first.wait() == 6, first.said()
    assert error_of(first)["code"] == "log-fenced"
    pipeline.assert_equal("t")
    execute(database, "INSERT INTO t VALUES (3, 'z')")
    pipeline.catch_up()
    pipeline.assert_equal("t")
