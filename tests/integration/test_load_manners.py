"""What a load asks of the source, and what it tells of itself meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from tailrace.capture.postgres import source
from tailrace.capture.postgres.chunks import ChunkKind, plan_table
from tailrace.capture.postgres.connect import connect
from tailrace.demo.server import EmbeddedPostgres
from tailrace.model.schema import TableId
from tailrace.pipeline.loads import chunk_readers, load_scheduler
from tailrace.pipeline.report import TableState, TableStatus
from tailrace.pipeline.status import measure
from tailrace.tasks.work import ChunkWork
from tests.support.loads import Local, Scene, managed_table, once, wait_for_state
from tests.support.pipelines import COME_SECONDS_MAX, eventually, execute

ROWS = 1500
TABLE = "CREATE TABLE things (id int PRIMARY KEY, x int, pad text)"
FILL = f"INSERT INTO things SELECT g, 0, repeat('p', 1000) FROM generate_series(1, {ROWS}) g"


@pytest.fixture
def filled(database: str) -> str:
    execute(database, TABLE, FILL, "ANALYZE things")
    return database


def waits_for_locks(scene: Scene, applying: Local) -> bool:
    """Whether the table says so, and what to do about it."""
    found = shown(scene, applying)
    return found.reason == "source-slow" and "who holds locks" in (found.hint or "")


def shown(scene: Scene, applying: Local) -> TableStatus:
    (table,) = measure(scene.settings, applying.registry, applying._source, None).tables
    return table


@pytest.mark.parametrize("way", ["exact", "chunked"] if os.environ.get("TAILRACE_THOROUGH") else ["chunked"])
def test_a_chunk_that_takes_too_long_is_given_up_and_tried_again(filled: str, tmp_path: Path, way: str) -> None:
    with (
        psycopg.connect(filled) as someone,
        Scene(tmp_path, filled, way=way, chunk_timeout=0.9) as scene,
        scene.loader(before=once(lambda: lock_things(someone), at=3)) as applying,
    ):
        try:
            assert eventually(lambda: waits_for_locks(scene, applying))
        finally:
            someone.rollback()
        scene.assert_equal(applying, "things")
        assert shown(scene, applying).reason is None
        read = [number for _, number in applying.chunks]
        assert len(set(read)) < len(read) <= len(set(read)) + 6, "hardly any but the one that waited is read again"


def test_a_person_is_obeyed_while_somebody_has_the_table_locked(
    filled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_readers, "CHANGED_SECONDS", 0.0)
    asked = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%pg_table_size%'"
    with (
        psycopg.connect(filled, autocommit=True) as asking,
        psycopg.connect(filled) as someone,
        Scene(tmp_path, filled, chunk_timeout=1.5) as scene,
        scene.loader(before=once(lambda: lock_things(someone), at=3)) as applying,
    ):
        try:
            assert eventually(lambda: asking.execute(asked).fetchall()), "whether it still is what was planned"
            assert scene.pipeline.ask("snapshot", "--pause").returncode == 0
            wait_for_state(applying, "things", TableState.PAUSED)
        finally:
            someone.rollback()
        assert scene.pipeline.ask("snapshot", "--resume").returncode == 0
        wait_for_state(applying, "things", TableState.LIVE)
        scene.assert_equal(applying, "things")


def test_a_table_that_somebody_has_locked_holds_up_no_load_of_another(filled: str, tmp_path: Path) -> None:
    execute(filled, "CREATE TABLE aside (id int PRIMARY KEY)")
    with psycopg.connect(filled) as someone:

        def lock(work: ChunkWork) -> None:
            if work.schema.table.name == "things" and work.chunk.number == 3:
                someone.execute("LOCK TABLE aside IN ACCESS EXCLUSIVE MODE")

        with Scene(tmp_path, filled, connections=2) as scene, scene.loader(before=lock) as applying:
            wait_for_state(applying, "things", TableState.LIVE)
            someone.rollback()
            scene.assert_equal(applying, "things", "aside")


def test_a_table_that_is_locked_when_its_load_begins_is_waited_for(
    filled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "LOCK_SECONDS_MAX", 1)
    with Scene(tmp_path, filled) as scene, psycopg.connect(filled) as someone:
        published = "SELECT FROM pg_publication_tables WHERE tablename = 'things'"
        assert eventually(lambda: someone.execute(published).fetchall())
        someone.execute("LOCK TABLE things IN ACCESS EXCLUSIVE MODE")
        with scene.loader() as applying:
            assert eventually(lambda: waits_for_locks(scene, applying))
            someone.rollback()
            scene.assert_equal(applying, "things")
            assert shown(scene, applying).reason is None


def test_a_load_tells_how_far_it_is_and_what_it_came_to(filled: str, tmp_path: Path) -> None:
    gate, reached = threading.Event(), threading.Event()

    def wait_at_the_gate(work: ChunkWork) -> None:
        if work.chunk.number == 5:
            reached.set()
            gate.wait(COME_SECONDS_MAX)

    century = 100 * 365 * 86_400.0
    with Scene(tmp_path, filled, chunk_timeout=century) as scene, scene.loader(before=wait_at_the_gate) as applying:
        try:
            assert reached.wait(COME_SECONDS_MAX)
            assert eventually(lambda: (load := shown(scene, applying).load) is not None and load.chunks_done == 5)
            load = shown(scene, applying).load
            assert load is not None
            size = applying.load_scheduler._loads[managed_table(applying, "things").table].record.plan.bytes
            assert (load.stage, load.way, load.mode) == ("reading", "exact", "replace")
            assert load.chunks > 15
            assert 0 < load.rows < ROWS / 2
            assert load.bytes_total == size
            assert load.bytes == pytest.approx(size * 5 / load.chunks, rel=0.1)
            assert load.rows_per_second == pytest.approx(load.rows / load.seconds, rel=0.5)
            assert load.seconds_left == pytest.approx((ROWS - load.rows) / load.rows_per_second, rel=0.05)
        finally:
            gate.set()
        scene.assert_equal(applying, "things")
        table = shown(scene, applying)
        assert table.load is None
        done = table.last_load
        assert done is not None
        assert (done.rows, done.bytes, done.way, done.mode, table.rows_loaded) == (ROWS, size, "exact", "replace", ROWS)
        assert done.seconds >= load.seconds
        assert done.rows_per_second == pytest.approx(ROWS / done.seconds, rel=0.5)


def test_a_plan_is_made_without_reading_the_table(database: str) -> None:
    rows = 20_000
    execute(
        database,
        "CREATE TABLE big (id int PRIMARY KEY, pad text)",
        f"INSERT INTO big SELECT g, repeat('p', 700) FROM generate_series(1, {rows}) g",
        "VACUUM ANALYZE big",
    )
    read = """
        SELECT seq_scan, seq_tup_read, heap_blks_read + heap_blks_hit
        FROM pg_stat_user_tables JOIN pg_statio_user_tables USING (relid)
    """
    with connect(database) as connection:

        def counted() -> tuple[int, int, int]:
            connection.execute("SELECT pg_stat_force_next_flush()")
            connection.execute("SELECT pg_stat_clear_snapshot()")
            row = connection.execute(read).fetchone()
            assert row is not None
            return row

        for cut in ChunkKind:
            before = counted()
            plan = plan_table(connection, TableId("public", "big"), None, cut, 1 << 20)
            scans, tuples, blocks = (now - then for now, then in zip(counted(), before, strict=True))
            assert len(plan.chunks) > 10
            assert scans == 0, cut
            assert tuples < rows / 5, "a sample"
            assert blocks < plan.leaves[0].pages / 5


def test_no_more_sessions_read_than_are_allowed(filled: str, tmp_path: Path) -> None:
    allowed, seconds = 3, 1.0
    query = """
        SELECT count(*) FILTER (WHERE query LIKE 'lock table%'), count(*) FILTER (WHERE backend_type = 'walsender'),
          count(*) FROM pg_stat_activity WHERE application_name = 'tailrace' AND datname = current_database()
    """
    with (
        psycopg.connect(filled, autocommit=True) as asking,
        psycopg.connect(filled) as someone,
        Scene(tmp_path, filled, connections=allowed) as scene,
        # Whoever would read waits from then on, and can be counted.
        scene.loader(before=once(lambda: lock_things(someone), at=3)) as applying,
    ):

        def sessions() -> tuple[int, int, int]:
            row = asking.execute(query).fetchone()
            assert row is not None
            return row

        try:
            assert eventually(lambda: sessions()[0] == allowed, pause=0.01)
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                reading, streams, total = sessions()
                assert reading == allowed
                assert streams <= 2, "the slot's, and the exported snapshot's"
                assert total - reading - streams <= 3, "the slot's catalogue, and short questions"
                time.sleep(0.01)
        finally:
            someone.rollback()
        scene.assert_equal(applying, "things")


def lock_things(someone: psycopg.Connection) -> None:
    """Between two chunks: a load is over before somebody beside it comes to it."""
    someone.execute("LOCK TABLE things IN ACCESS EXCLUSIVE MODE")


@contextmanager
def answering_slowly(server: EmbeddedPostgres) -> Iterator[None]:
    """New sessions come about only now and then, as at a server that has too much to do."""
    postmaster, stop = server.pid, threading.Event()
    assert postmaster is not None

    def hold_up() -> None:
        while not stop.is_set():
            os.kill(postmaster, signal.SIGSTOP)
            stop.wait(0.6)
            os.kill(postmaster, signal.SIGCONT)
            stop.wait(0.01)

    holding = threading.Thread(target=hold_up, daemon=True)
    holding.start()
    try:
        yield
    finally:
        stop.set()
        holding.join()


def test_fewer_read_while_the_source_answers_slowly_and_all_again_afterwards(
    server: EmbeddedPostgres, filled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So much that it is not over before the source answers quickly again.
    execute(filled, f"INSERT INTO things SELECT g, 0, repeat('p', 1000) FROM generate_series({ROWS + 1}, 12000) g")
    monkeypatch.setattr(load_scheduler, "PROBE_SECONDS", 0.0)
    monkeypatch.setattr(load_scheduler, "LOOK_SECONDS", 0.05)
    counting, reading, most = threading.Lock(), [0], [0]

    def begin(_: ChunkWork) -> None:
        with counting:
            reading[0] += 1
            most[0] = max(most[0], reading[0])
        time.sleep(0.05)

    def end(_: ChunkWork) -> None:
        with counting:
            reading[0] -= 1

    with (
        Scene(tmp_path, filled, connections=2, throttle=True, chunk=4 << 10) as scene,
        scene.loader(before=begin, after=end) as applying,
    ):

        def told() -> bool | None:
            load = shown(scene, applying).load
            return None if load is None else load.backing_off

        assert eventually(lambda: most[0] == 2 and told() is False)
        with answering_slowly(server):
            assert eventually(told)
            assert eventually(lambda: reading[0] < 2), "what was being read ends"
            most[0], read = 0, len(applying.chunks)
            assert eventually(lambda: len(applying.chunks) > read + 1), "it goes on"
            assert most[0] == 1
        most[0] = 0
        assert eventually(lambda: most[0] == 2 and told() is False)
