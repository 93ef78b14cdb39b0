"""A log goes on only where its position is a point of the server's own past, and the slot still has the rest."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from tailrace.changelog.read.reader import ChangeLog
from tailrace.demo.server import EmbeddedPostgres
from tests.integration.conftest import server_version
from tests.support.failover import Copy, copy_of, either, promote, wait_for_replay
from tests.support.pipelines import Pipeline, Running, assert_log_is_whole, eventually, execute, wait_for_free_slots


@pytest.fixture
def primary() -> Iterator[EmbeddedPostgres]:
    """A server of the test's own: it is halted, copied and left behind."""
    with EmbeddedPostgres(version=server_version(), settings={"fsync": "off"}) as server:
        execute(server.url(), "CREATE TABLE t (id int PRIMARY KEY)")
        yield server


@pytest.fixture
def ended() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def insert(url: str, first: int, last: int) -> None:
    execute(url, f"INSERT INTO t SELECT generate_series({first}, {last})")


def captured(pipeline: Pipeline) -> None:
    done = pipeline.call("capture", "--until-caught-up")
    assert done.returncode == 0, done.stderr


def point_at(pipeline: Pipeline, url: str) -> Pipeline:
    """The same log, another server."""
    return Pipeline(pipeline.folder, url)


def content(pipeline: Pipeline) -> dict[str, bytes]:
    """Everything the log holds, but for who holds it and how it stands."""
    files = [path for path in pipeline.log.rglob("*") if path.is_file()]
    return {
        str(path): path.read_bytes()
        for path in files
        if not path.name.startswith(("owner.", "sealer.")) and path.parent.name != "status"
    }


def logged(pipeline: Pipeline) -> Counter[int]:
    found: Counter[int] = Counter()
    for batch in ChangeLog.open(pipeline.log).follow(0):
        if batch.schema.table.name == "t":
            found.update(batch.data.column("id").to_pylist())
    return found


def timelines(pipeline: Pipeline) -> list[int]:
    return [header.timeline for header in ChangeLog.open(pipeline.log).headers(0)]


def refused(pipeline: Pipeline, code: str, *parts: str) -> None:
    """The capture ends with exit code 3, this error's code and a hint, and writes nothing."""
    before = content(pipeline)
    done = pipeline.call("capture", "--until-caught-up", "--json")
    assert done.returncode == 3, done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["code"] == code, error
    assert error["hint"]
    for part in parts:
        assert part in done.stderr, done.stderr
    assert content(pipeline) == before


def start(ended: ExitStack, pipeline: Pipeline) -> Running:
    running = pipeline.start("capture", "--json")
    ended.callback(running.end)
    assert eventually(lambda: "capture started" in running.said()), running.said()
    return running


# --- failover ----------------------------------------------------------------------------------------------


def test_a_server_that_branched_off_before_our_position_is_refused(primary: EmbeddedPostgres, tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, primary.url())
    captured(pipeline)
    with copy_of(primary, Copy.LEFT_BEHIND) as copy:
        insert(primary.url(), 1, 100)
        captured(pipeline)
        promote(copy)
        insert(copy.url(), 1000, 1100)
        refused(point_at(pipeline, copy.url()), "history-diverged", "branched off before our position")
        captured(point_at(pipeline, primary.url()))
    assert logged(pipeline) == Counter(range(1, 101))


def test_a_server_that_branched_off_after_our_position_is_gone_on_with(
    primary: EmbeddedPostgres, tmp_path: Path
) -> None:
    pipeline = Pipeline(tmp_path, primary.url())
    captured(pipeline)
    with copy_of(primary, Copy.FOLLOWING) as copy:
        insert(primary.url(), 1, 100)
        captured(pipeline)
        insert(primary.url(), 101, 200)
        wait_for_replay(primary, copy)
        primary.halt("immediate")
        promote(copy)
        insert(copy.url(), 201, 300)
        moved = point_at(pipeline, copy.url())
        captured(moved)
        insert(copy.url(), 301, 400)
        captured(moved)
        assert logged(moved) == Counter(range(1, 401))
        assert timelines(moved)[0] == 1
        assert timelines(moved)[-1] == 2
        assert_log_is_whole(moved.log)
        # Back to the one that was left: it never heard of what the log has from the other.
        primary.start()
        refused(point_at(pipeline, primary.url()), "history-diverged", "not in the server's past")


def test_a_server_without_the_slot_is_gone_on_with_where_tables_may_be_loaded_anew(
    primary: EmbeddedPostgres, tmp_path: Path
) -> None:
    pipeline = Pipeline(tmp_path, primary.url())
    captured(pipeline)
    with copy_of(primary, Copy.FOLLOWING) as copy:
        insert(primary.url(), 1, 100)
        captured(pipeline)
        wait_for_replay(primary, copy)
        primary.halt("immediate")
        promote(copy)
        execute(copy.url(), f"SELECT pg_drop_replication_slot('{slot_of(pipeline)}')")
        insert(copy.url(), 101, 200)
        moved = point_at(pipeline, copy.url())
        refused(moved, "position-lost", "load.mode: when_needed")
        moved.file.write_text(moved.file.read_text() + "load: {mode: when_needed}\n")
        for first in (201, 301):
            captured(moved)
            insert(copy.url(), first, first + 99)
        captured(moved)
        log = ChangeLog.open(moved.log)
        (gap,) = log.gaps()
        since = [number for batch in log.follow(gap.commit) for number in batch.data.column("id").to_pylist()]
        assert sorted(since) == list(range(201, 401))
        assert timelines(moved)[-1] == 2
        assert_log_is_whole(moved.log)


def test_a_running_capture_goes_on_through_a_failover(
    primary: EmbeddedPostgres, tmp_path: Path, ended: ExitStack
) -> None:
    captured(Pipeline(tmp_path, primary.url()))
    with copy_of(primary, Copy.FOLLOWING) as copy:
        pipeline = Pipeline(tmp_path, either(primary, copy))
        running = start(ended, pipeline)
        insert(primary.url(), 1, 100)
        assert eventually(lambda: len(logged(pipeline)) == 100), running.said()
        wait_for_replay(primary, copy)
        primary.halt("immediate")
        promote(copy)
        insert(copy.url(), 101, 200)
        assert eventually(lambda: len(logged(pipeline)) == 200), running.said()
        assert timelines(pipeline)[-1] == 2, "what comes from the new server says so"
        assert running.terminate() == 0, running.said()
        insert(copy.url(), 201, 300)
        captured(pipeline)
        assert logged(pipeline) == Counter(range(1, 301))
        assert_log_is_whole(pipeline.log)


def test_a_running_capture_ends_when_a_failover_lost_what_it_has(
    primary: EmbeddedPostgres, tmp_path: Path, ended: ExitStack
) -> None:
    captured(Pipeline(tmp_path, primary.url()))
    with copy_of(primary, Copy.LEFT_BEHIND) as copy:
        pipeline = Pipeline(tmp_path, either(primary, copy))
        running = start(ended, pipeline)
        insert(primary.url(), 1, 100)
        assert eventually(lambda: len(logged(pipeline)) == 100), running.said()
        primary.halt("immediate")
        before = content(pipeline)
        promote(copy)
        insert(copy.url(), 1000, 1100)
        assert running.wait() == 3, running.said()
        assert '"code": "history-diverged"' in running.said()
        assert content(pipeline) == before


def test_an_older_backup_of_the_same_timeline_is_refused(primary: EmbeddedPostgres, tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, primary.url())
    captured(pipeline)
    with copy_of(primary, Copy.RESTORED) as copy:
        insert(primary.url(), 1, 1000)
        captured(pipeline)
        refused(point_at(pipeline, copy.url()), "history-diverged", "ends before ours")


def test_a_standby_that_was_not_promoted_is_no_divergence(primary: EmbeddedPostgres, tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, primary.url())
    captured(pipeline)
    with copy_of(primary, Copy.LEFT_BEHIND) as copy:
        insert(primary.url(), 1, 100)
        captured(pipeline)
        refused(point_at(pipeline, copy.url()), "source-unreachable", "has not been promoted", "Promote it")


# --- what the slot has -------------------------------------------------------------------------------------


def slot_of(pipeline: Pipeline) -> str:
    return f"tailrace_{ChangeLog.open(pipeline.log).log_id}"


def test_a_slot_that_was_moved_by_hand_is_a_lost_position(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)")
    pipeline = Pipeline(tmp_path, database)
    captured(pipeline)
    insert(database, 1, 100)
    wait_for_free_slots(database)
    execute(database, f"SELECT pg_replication_slot_advance('{slot_of(pipeline)}', pg_current_wal_lsn())")
    refused(pipeline, "position-lost", "the slot is ahead of the log", "tailrace drop")


def test_a_slot_that_was_dropped_is_a_lost_position(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)")
    pipeline = Pipeline(tmp_path, database)
    captured(pipeline)
    insert(database, 1, 100)
    wait_for_free_slots(database)
    execute(database, f"SELECT pg_drop_replication_slot('{slot_of(pipeline)}')")
    refused(pipeline, "position-lost", "the replication slot is gone", "load.mode: when_needed")


def test_log_that_the_server_discarded_is_a_lost_position(tmp_path: Path) -> None:
    settings = {"max_slot_wal_keep_size": "1MB", "min_wal_size": "32MB", "max_wal_size": "32MB", "fsync": "off"}
    with EmbeddedPostgres(version=server_version(), settings=settings) as server:
        execute(server.url(), "CREATE TABLE t (id int PRIMARY KEY)")
        pipeline = Pipeline(tmp_path, server.url())
        captured(pipeline)
        wait_for_free_slots(server.url())
        with psycopg.connect(server.url(), autocommit=True) as connection:
            for n in range(6):
                connection.execute("INSERT INTO t VALUES (%s)", (n,))
                connection.execute("SELECT pg_switch_wal()")
            connection.execute("CHECKPOINT")
            row = connection.execute("SELECT wal_status FROM pg_replication_slots").fetchone()
        assert row == ("lost",)
        refused(pipeline, "position-lost", "load.mode: when_needed")
