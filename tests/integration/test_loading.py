"""Loads under everything that can happen at the source meanwhile: the table equals the source afterwards."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from tailrace import failpoints
from tailrace.capture.postgres import publications
from tailrace.capture.postgres.chunks import ChunkKind
from tailrace.capture.postgres.config import PostgresSettings
from tailrace.capture.postgres.snapshot import BarrierSnapshot
from tailrace.capture.postgres.source import PostgresCapture
from tailrace.demo.server import EmbeddedPostgres
from tailrace.errors import SourceTableMissing, SourceUnreachable
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId
from tailrace.pipeline.loads import chunk_readers, load_start
from tailrace.pipeline.loads.load_commit import find_load_point
from tailrace.pipeline.report import TableState
from tailrace.pipeline.status import measure
from tailrace.pipeline.tables.managed_table import ManagedTable
from tailrace.tasks.load_store import LoadMode, LoadRecord, LoadRequest, LoadStore
from tailrace.tasks.work import ChunkWork
from tests.integration.conftest import server_version
from tests.support.failover import Copy, copy_of, wait_for_replay
from tests.support.loads import Local, Scene, managed_table, once, rows_of, wait_for_state
from tests.support.pipelines import COME_SECONDS_MAX, eventually, execute

THOROUGH = bool(os.environ.get("TAILRACE_THOROUGH"))
"""Set by `make matrix` and `make soak`: every way of loading in every test. Else most go the hardest way."""
WAYS = ("auto", "exact", "chunked") if THOROUGH else ("chunked",)
BOTH = ("exact", "chunked") if THOROUGH else ("chunked",)
TABLE = (
    "CREATE TABLE things (id int PRIMARY KEY, x int, pad text, large text); "
    "ALTER TABLE things ALTER large SET STORAGE EXTERNAL"
)
FILL = "INSERT INTO things SELECT g, 0, repeat('p', 300), repeat(md5(g::text), 90) FROM generate_series(1, 1500) g"


@pytest.fixture
def filled(database: str) -> str:
    execute(database, TABLE, FILL, "ANALYZE things")
    return database


@contextmanager
def hammering(url: str) -> Iterator[None]:
    """Someone writes all the time: inserts, updates without the large value, key moves, deletes."""
    stop = threading.Event()

    def write() -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            turn = 0
            while not stop.is_set():
                turn += 1
                connection.execute("UPDATE things SET x = x + 1 WHERE id %% 50 = %s", (turn % 50,))
                connection.execute("INSERT INTO things VALUES (%s, 1, 'new', repeat('n', 3000))", (10_000 + turn,))
                connection.execute("UPDATE things SET id = id + 100000 WHERE id = %s", (turn * 7 % 1500,))
                connection.execute("DELETE FROM things WHERE id = %s", (turn * 11 % 1500,))

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        yield
    finally:
        stop.set()
        writer.join()


@pytest.mark.parametrize("way", WAYS if THOROUGH else ["exact", "chunked"])
def test_writers_hammer_during_the_whole_load(filled: str, tmp_path: Path, way: str) -> None:
    with Scene(tmp_path, filled, way=way, connections=2) as scene, scene.loader() as applying:
        with hammering(filled):
            assert eventually(lambda: managed_table(applying, "things").applied_position is not None), applying.chunks
        scene.assert_equal(applying, "things")
        assert len(applying.chunks) > 10


@pytest.mark.parametrize("way", WAYS)
def test_a_writer_that_was_open_at_the_first_start(filled: str, tmp_path: Path, way: str) -> None:
    with psycopg.connect(filled) as writer:
        writer.execute("INSERT INTO things VALUES (9001, 5, 'open', NULL)")
        writer.execute("UPDATE things SET x = 77 WHERE id = 3")
        ending = threading.Timer(1.0, writer.commit)
        ending.start()
        with Scene(tmp_path, filled, way=way) as scene:
            # As the server has it: here the commit may not have been heard of yet.
            ended = f"SELECT FROM pg_stat_activity WHERE pid = {writer.info.backend_pid} AND backend_xid IS NULL"
            with psycopg.connect(filled) as asking:
                assert asking.execute(ended).fetchall(), "capture begins after every transaction that was open"
            ending.join()
            with scene.loader() as applying:
                scene.assert_equal(applying, "things")


@pytest.mark.parametrize("way", WAYS)
def test_a_writer_that_was_open_when_the_table_was_published(
    filled: str, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_start, "WAITING_SECONDS", 0.1)
    with Scene(tmp_path, filled, way=way) as scene, scene.loader() as applying, psycopg.connect(filled) as writer:
        scene.assert_equal(applying, "things")
        execute(filled, "CREATE TABLE later (id int PRIMARY KEY, x int)", "INSERT INTO later VALUES (1, 1), (2, 2)")
        writer.execute("INSERT INTO later VALUES (9001, 5)")
        writer.execute("UPDATE later SET x = 77 WHERE id = 1")

        def told() -> bool:
            tables = measure(scene.settings, applying.registry, applying._source, None).tables
            waiting = [table.load.waiting_for for table in tables if table.load and table.load.stage == "waiting"]
            return any(f"1 open transaction: pid {writer.info.backend_pid} " in (said or "") for said in waiting)

        assert eventually(told)
        writer.commit()
        scene.assert_equal(applying, "things", "later")


class WaitingCommit:
    """An update that is committed and that nobody sees yet, for it waits for a standby that is not there."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._waits = threading.Event()
        self._writer = threading.Thread(target=self._write, daemon=True)

    def begin(self) -> None:
        execute(self._url, "ALTER SYSTEM SET synchronous_standby_names = 'nobody'", "SELECT pg_reload_conf()")
        self._writer.start()
        waiting = "SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        with psycopg.connect(self._url, autocommit=True) as asking:
            assert eventually(lambda: asking.execute(waiting).fetchall())
        self._waits.set()

    def end(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as asking:
            asking.execute("SET synchronous_commit = local")
            asking.execute("ALTER SYSTEM RESET synchronous_standby_names")
            asking.execute("SELECT pg_reload_conf()")
        self._writer.join(COME_SECONDS_MAX)
        assert not self._writer.is_alive()

    def _write(self) -> None:
        while not self._waits.is_set():  # the server takes its time to hear of the setting
            execute(self._url, "UPDATE things SET x = x + 1, pad = 'w' WHERE id <= 10")


@pytest.mark.parametrize("way", ["exact", "chunked"])
def test_a_commit_that_waits_for_a_synchronous_standby(tmp_path: Path, way: str) -> None:
    with EmbeddedPostgres(version=server_version()) as server:
        url = server.url()
        execute(url, TABLE, FILL)
        commit = WaitingCommit(url)
        with Scene(tmp_path, url, way=way) as scene:
            commit.begin()
            with scene.loader() as applying:
                # Give the load the time to go wrong.
                assert not eventually(lambda: managed_table(applying, "things").state is TableState.LIVE, seconds=2.0)
                commit.end()
                scene.assert_equal(applying, "things")


def test_a_commit_that_waits_for_a_synchronous_standby_at_the_first_chunk(tmp_path: Path) -> None:
    with EmbeddedPostgres(version=server_version()) as server:
        url = server.url()
        execute(url, TABLE, FILL)
        commit = WaitingCommit(url)
        with Scene(tmp_path, url, way="chunked") as scene, scene.loader(before=once(commit.begin)) as applying:
            assert eventually(lambda: managed_table(applying, "things").applied_position is not None)
            commit.end()
            scene.assert_equal(applying, "things")


@pytest.mark.parametrize("way", BOTH)
def test_commits_that_nobody_waits_for(filled: str, tmp_path: Path, way: str) -> None:
    name = psycopg.conninfo.conninfo_to_dict(filled)["dbname"]
    execute(filled, f"ALTER DATABASE {name} SET synchronous_commit = off")
    with Scene(tmp_path, filled, way=way) as scene, scene.loader() as applying:
        with hammering(filled):
            assert eventually(lambda: managed_table(applying, "things").applied_position is not None)
        scene.assert_equal(applying, "things")


def test_an_update_moves_a_row_between_chunks(filled: str, tmp_path: Path) -> None:
    def move() -> None:
        # From a chunk that was read into one that was not, and the other way round.
        execute(filled, "UPDATE things SET id = 2001 WHERE id = 1", "UPDATE things SET id = -5 WHERE id = 1499")

    for way in ("exact", "chunked"):
        folder = tmp_path / way
        with Scene(folder, filled, way=way) as scene, scene.loader(before=once(move, at=4)) as applying:
            scene.assert_equal(applying, "things")
            execute(filled, "UPDATE things SET id = 1 WHERE id = 2001", "UPDATE things SET id = 1499 WHERE id = -5")
            scene.assert_equal(applying, "things")


def test_a_key_moves_into_a_range_already_read_with_a_large_value(filled: str, tmp_path: Path) -> None:
    """Neither chunk holds the row, and the log does not hold the value."""

    def move() -> None:
        execute(
            filled,
            "UPDATE things SET id = -7 WHERE id = 1450",
            "UPDATE things SET x = 5 WHERE id = -7",
            "UPDATE things SET id = -8 WHERE id = 1460",
            "UPDATE things SET id = -9 WHERE id = 1470",
            "DELETE FROM things WHERE id = -9",
        )

    with Scene(tmp_path, filled, way="chunked") as scene, scene.loader(before=once(move, at=6)) as applying:
        scene.assert_equal(applying, "things")


@pytest.mark.parametrize("way", BOTH)
def test_the_table_is_rewritten_between_chunks(filled: str, tmp_path: Path, way: str) -> None:
    act = once(lambda: execute(filled, "DELETE FROM things WHERE id % 3 = 0", "VACUUM FULL things"), at=5)
    with Scene(tmp_path, filled, way=way) as scene, scene.loader(before=act) as applying:
        scene.assert_equal(applying, "things")


@pytest.mark.parametrize("way", BOTH)
def test_the_table_is_truncated_between_chunks(filled: str, tmp_path: Path, way: str) -> None:
    act = once(lambda: execute(filled, "TRUNCATE things", "INSERT INTO things VALUES (1, 1, 'after', NULL)"), at=5)
    with Scene(tmp_path, filled, way=way) as scene, scene.loader(before=act) as applying:
        scene.assert_equal(applying, "things")


def test_a_partition_comes_during_the_load_and_it_begins_again_at_once(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_readers, "CHANGED_SECONDS", 0.0)
    rows = "INSERT INTO parts SELECT g, repeat('p', 300) FROM generate_series({}) g"
    execute(
        database,
        "CREATE TABLE parts (id int PRIMARY KEY, pad text) PARTITION BY RANGE (id)",
        "CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (2000)",
        rows.format("1, 1999"),
    )

    def act() -> None:
        execute(
            database,
            "CREATE TABLE parts_2 PARTITION OF parts FOR VALUES FROM (2000) TO (4000)",
            rows.format("2000, 2999"),
        )
        assert eventually(lambda: bool(applying.load_scheduler._replans)), "before all of it is read"

    with Scene(tmp_path, database) as scene, scene.loader(before=once(act, at=2)) as applying:
        scene.assert_equal(applying, "parts")


def test_the_table_is_dropped_during_its_load(filled: str, tmp_path: Path) -> None:
    execute(filled, "CREATE TABLE other (id int PRIMARY KEY)", "INSERT INTO other VALUES (1)")
    act = once(lambda: execute(filled, "DROP TABLE things"), at=5)
    with Scene(tmp_path, filled) as scene, scene.loader(before=act) as applying:
        wait_for_state(applying, "things", TableState.FAILED)
        error = managed_table(applying, "things").error
        assert error is not None
        assert isinstance(error, SourceTableMissing)
        assert error.hint
        scene.assert_equal(applying, "other")


def test_a_column_is_added_during_the_load(filled: str, tmp_path: Path) -> None:
    added = ("ALTER TABLE things ADD extra int", "INSERT INTO things VALUES (9000, 1, 'p', NULL, 5)")
    act = once(lambda: execute(filled, *added), at=5)
    with Scene(tmp_path, filled) as scene, scene.loader(before=act) as applying:
        scene.assert_equal(applying, "things")


@pytest.mark.parametrize("way", WAYS if THOROUGH else ["auto"])
def test_the_server_restarts_during_the_load(tmp_path: Path, way: str) -> None:
    with EmbeddedPostgres(version=server_version()) as server:
        url = server.url()
        execute(url, TABLE, FILL, "ANALYZE things")

        def restart() -> None:
            server.halt()
            server.start()
            execute(url, "UPDATE things SET x = 3 WHERE id % 2 = 0")

        with Scene(tmp_path, url, way=way) as scene, scene.loader(before=once(restart, at=5)) as applying:
            scene.assert_equal(applying, "things")
            read = [number for _, number in applying.chunks]
            if way != "exact":
                assert len(set(read)) >= len(read) - 1, "but for the one that failed none is read twice"


def test_a_load_that_was_cut_off_goes_on_with_the_chunks_it_lacks(
    server: EmbeddedPostgres, filled: str, tmp_path: Path
) -> None:
    """None is read twice, as the server itself counts them."""
    name = psycopg.conninfo.conninfo_to_dict(filled)["dbname"]
    execute(filled, f"ALTER DATABASE {name} SET log_statement = 'all'")
    began = server.log_file.stat().st_size
    reached, gate = threading.Event(), threading.Event()

    def stay() -> None:
        reached.set()
        gate.wait(COME_SECONDS_MAX)

    with Scene(tmp_path, filled) as scene:
        with scene.loader(after=once(stay, at=4)) as applying:
            assert reached.wait(COME_SECONDS_MAX)
            chunks = len(next(iter(applying.load_scheduler._loads.values())).record.plan.chunks)
            applying._stopping.set()
            gate.set()
        with hammering(filled), scene.loader() as again:
            assert eventually(lambda: managed_table(again, "things").applied_position is not None)
        with scene.loader() as last:
            scene.assert_equal(last, "things")
    said = server.log_file.read_bytes()[began:].decode().lower().splitlines()
    read = [line for line in said if "statement: copy (select" in line and '("id") ' in line]
    # Rows that are read again by their key, during the replay, are no chunks.
    counted = sum('("id") in (' not in line for line in read)
    assert 4 <= len(applying.chunks) < chunks
    assert counted == chunks, (len(applying.chunks), len(again.chunks), len(last.chunks))


def test_killed_after_its_commit_a_load_is_known_by_the_table_and_not_over_too_early(
    filled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = threading.Event()

    def hit(name: str) -> None:
        if name == "load.landed":
            dead.set()
            raise RuntimeError("killed")

    def move() -> None:
        execute(filled, "UPDATE things SET id = -7 WHERE id = 1450")

    scene = Scene(tmp_path, filled, way="chunked")
    with scene:
        with monkeypatch.context() as patched, scene.loader(before=once(move, at=6)) as applying:
            patched.setattr(failpoints, "hit", hit)
            assert dead.wait(COME_SECONDS_MAX)
        execute(filled, "INSERT INTO things VALUES (5000, 0, 'after every chunk', NULL)")
        horizon = applying._source.committed_until()
        registry = applying.registry
        assert eventually(lambda: registry.refresh_index() and registry.index.position >= horizon), (
            "the log has passed every chunk"
        )
    # What the log does not hold yet, a row that is read again shows already: it is gone.
    execute(
        filled,
        "UPDATE things SET x = 5 WHERE id = -7",
        "UPDATE things SET x = 6 WHERE id = -7",
        "DELETE FROM things WHERE id = -7",
    )
    with scene.loader() as applying:
        assert eventually(lambda: any((applying.registry.log.path / "seed").glob("*/reread-*.json")))
        assert not eventually(lambda: managed_table(applying, "things").state is TableState.LIVE, seconds=1)
        assert applying.waits_for_log(applying.registry.index.last_commit), "it has nothing else to do"
        with scene:
            scene.assert_equal(applying, "things")
        assert not applying.waits_for_log(applying.registry.index.last_commit)


def test_time_runs_out_and_the_load_goes_on_in_chunks(filled: str, tmp_path: Path) -> None:
    def slow(_: object) -> None:
        threading.Event().wait(0.1)

    with Scene(tmp_path, filled, time_limit=1.0) as scene, scene.loader(before=slow) as applying:
        assert eventually(lambda: bool(applying.chunks))
        with hammering(filled):
            assert eventually(lambda: managed_table(applying, "things").applied_position is not None)
        scene.assert_equal(applying, "things")
        read = [number for _, number in applying.chunks]
        assert len(set(read)) >= len(read) - 1, "only the one that found the snapshot gone is tried again"


def test_reading_from_a_standby_with_a_running_transaction(tmp_path: Path) -> None:
    with EmbeddedPostgres(version=server_version(), settings={"hot_standby": "on", "log_statement": "all"}) as server:
        execute(server.url(), TABLE, FILL)
        with copy_of(server, Copy.FOLLOWING) as standby:
            wait_for_replay(server, standby)
            with psycopg.connect(server.url()) as running, psycopg.connect(server.url()) as other:

                def overlap() -> None:
                    running.execute("UPDATE things SET x = 11 WHERE id % 5 = 0")
                    other.execute("INSERT INTO things VALUES (8001, 1, 'other', NULL)")
                    other.commit()
                    wait_for_replay(server, standby)

                before, after = once(overlap), once(running.commit, at=6)
                with (
                    Scene(tmp_path, server.url(), standby=standby.url()) as scene,
                    scene.loader(before=before, after=after) as applying,
                ):
                    scene.assert_equal(applying, "things")
                assert '"id") >=' in standby.log_file.read_text(), "the standby was read from"


@pytest.mark.parametrize("mode", list(LoadMode) if THOROUGH else [LoadMode.REPLACE])
@pytest.mark.parametrize("way", BOTH)
def test_a_live_table_is_loaded_again(filled: str, tmp_path: Path, way: str, mode: LoadMode) -> None:
    with Scene(tmp_path, filled, way=way) as scene, scene.loader() as applying:
        scene.assert_equal(applying, "things")
        with hammering(filled):
            seeds = LoadStore(scene.settings.log.path)
            seeds.add_request(LoadRequest(table=TableId("public", "things"), mode=mode))
            assert eventually(lambda: not seeds.requests())
        scene.assert_equal(applying, "things")


KINDS = """
CREATE TABLE composite (a int, b text, c timestamptz, x text, PRIMARY KEY (b, a, c));
INSERT INTO composite SELECT g % 7, 'k' || g % 300, '2024-01-01'::timestamptz + g * interval '1 s', repeat('x', 200)
  FROM generate_series(1, 3000) g;
CREATE TABLE uuids (id uuid PRIMARY KEY, x text);
INSERT INTO uuids SELECT gen_random_uuid(), repeat('x', 200) FROM generate_series(1, 3000);
CREATE TABLE texts (id text PRIMARY KEY, x text);
INSERT INTO texts SELECT 'ü''\\" ' || md5(g::text), repeat('x', 200) FROM generate_series(1, 3000) g;
CREATE TABLE keyless (a int, x text);
INSERT INTO keyless SELECT g % 100, repeat('x', 200) FROM generate_series(1, 3000) g;
CREATE TABLE skewed (id bigint PRIMARY KEY, x text);
INSERT INTO skewed SELECT CASE WHEN g < 10 THEN g * 1000000000000 ELSE g END, repeat('x', 200)
  FROM generate_series(1, 3000) g;
CREATE TABLE bloated (id int PRIMARY KEY, x text);
INSERT INTO bloated SELECT g, repeat('x', 200) FROM generate_series(1, 6000) g;
DELETE FROM bloated WHERE id % 100 <> 0;
CREATE TABLE nothing (id int PRIMARY KEY);
CREATE TABLE parted (id int, region text, x text, PRIMARY KEY (region, id)) PARTITION BY LIST (region);
CREATE TABLE parted_eu PARTITION OF parted FOR VALUES IN ('eu');
CREATE TABLE parted_us PARTITION OF parted FOR VALUES IN ('us') PARTITION BY RANGE (id);
CREATE TABLE parted_us_1 PARTITION OF parted_us FOR VALUES FROM (0) TO (1000);
CREATE TABLE parted_us_2 PARTITION OF parted_us FOR VALUES FROM (1000) TO (9000);
INSERT INTO parted SELECT g, CASE WHEN g % 2 = 0 THEN 'eu' ELSE 'us' END, repeat('x', 200)
  FROM generate_series(1, 3000) g;
"""
NAMES = ("composite", "uuids", "texts", "keyless", "skewed", "bloated", "nothing", "parted")


@pytest.mark.parametrize("way", WAYS if THOROUGH else ["auto", "chunked"])
def test_every_kind_of_table_and_key(database: str, tmp_path: Path, way: str) -> None:
    execute(database, KINDS)
    with Scene(tmp_path, database, way=way, connections=2) as scene, scene.loader() as applying:
        scene.assert_equal(applying, *NAMES)
        counted = {name: sum(table == name for table, _ in applying.chunks) for name in NAMES}
        assert counted["nothing"] == 1
        large = ("composite", "uuids", "texts", "skewed", "parted", "keyless")
        assert all(counted[name] > 3 for name in large), counted


@pytest.mark.parametrize("ask", ["tables", "publish_new"])
def test_a_server_that_goes_away_between_two_questions_is_told_as_ours(
    database: str, monkeypatch: pytest.MonkeyPatch, ask: str
) -> None:
    source = PostgresCapture(PostgresSettings(url=database, wanted=lambda _: True, slot="none", publication="none"))

    def gone(connection: psycopg.Connection, _: object) -> None:
        execute(database, f"SELECT pg_terminate_backend({connection.info.backend_pid}, 5000)")
        connection.execute("SELECT 1")

    monkeypatch.setattr(publications, "select_tables", gone)
    with pytest.raises(SourceUnreachable):  # whoever asks again knows it, and a thread that publishes lives on
        getattr(source, ask)()


def test_other_tables_go_on_while_one_is_read(filled: str, tmp_path: Path) -> None:
    execute(filled, "CREATE TABLE other (id int PRIMARY KEY)", "INSERT INTO other VALUES (1)")
    gate, reached = threading.Event(), threading.Event()

    def wait_at_the_gate(work: ChunkWork) -> None:
        if work.schema.table.name == "things" and work.chunk.number > 2:
            reached.set()
            gate.wait(COME_SECONDS_MAX)

    with Scene(tmp_path, filled, connections=1) as scene, scene.loader(before=wait_at_the_gate) as applying:
        try:
            assert reached.wait(COME_SECONDS_MAX)
            wait_for_state(applying, "other", TableState.LIVE)
            for number in (2, 3):
                execute(filled, f"INSERT INTO other VALUES ({number})")
                assert eventually(lambda: rows_of(applying, "other") == number), "captured and applied meanwhile"  # noqa: B023
            assert managed_table(applying, "things").applied_position is None, "it is still read"
        finally:
            gate.set()
        scene.assert_equal(applying, "things", "other")


def test_a_replay_starts_before_the_first_transaction_that_the_snapshot_did_not_see(
    database: str, tmp_path: Path
) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)")
    with Scene(tmp_path, database, way="chunked") as scene, scene.loader() as applying:
        scene.assert_equal(applying, "t")
        for number in (1, 2, 3):
            execute(database, f"INSERT INTO t VALUES ({number})")
        scene.assert_equal(applying, "t")
        registry, table = applying.registry, managed_table(applying, "t")
        told = sorted(
            (Lsn.parse(row["_position"]), row["_tx"])
            for batch in registry.log.read(1, registry.index.last_commit, tables=registry.log_numbers(table))
            for row in batch.with_all_columns().to_pylist()
        )
        assert len(told) == 3
        (first, one), (second, two), (third, _) = told
        plan = applying._source.plan(table.table, ChunkKind.KEY, 1 << 20)

        def start(floor: Lsn, running: tuple[int, ...] = (), *, xmin: int = 0, standby: bool = False) -> Lsn:
            noted = BarrierSnapshot(
                floor=floor, ceiling=third, xmin=xmin, xmax=1 << 62, running=running, standby=standby
            )
            return find_load_point(registry, LoadRecord(plan=plan, snapshot_position=None, barrier=noted))

        before = Lsn(first.value - 1)
        assert start(before) == third, "all of them were seen"
        assert start(before, (two,)) == Lsn(second.value - 1)
        assert start(before, (two, one)) == before
        assert start(first, (one,)) == third, "what ended up to the floor is seen, whatever is said of it"
        assert start(before, xmin=two, standby=True) == Lsn(second.value - 1), "a standby knows no more than this"
        assert start(before, xmin=one, standby=True) == before


def test_a_table_that_another_was_at_when_it_had_landed_is_live_all_the_same(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written to it, so nothing else would bring it there."""
    execute(database, "CREATE TABLE things (id int PRIMARY KEY)", "INSERT INTO things VALUES (1)")
    hit, taken, done = failpoints.hit, threading.Event(), threading.Event()

    def keep(lock: threading.Lock) -> None:
        with lock:
            taken.set()
            done.wait(COME_SECONDS_MAX)

    def landed(name: str) -> None:
        hit(name)
        if name == "load.landed":
            threading.Thread(target=keep, args=(managed_table(applying, "things").lock,), daemon=True).start()

    monkeypatch.setattr(failpoints, "hit", landed)
    monkeypatch.setattr(Local, "_apply", lambda _: None)  # as where no micro-batch comes
    advance, tried = Local._advance_one, threading.Event()

    def advance_one(self: Local, table: ManagedTable, end: int | None = None) -> None:
        taken.wait(COME_SECONDS_MAX)  # the load has let go of the lock by now, and the other waits for it
        advance(self, table, end)
        tried.set()

    monkeypatch.setattr(Local, "_advance_one", advance_one)
    with Scene(tmp_path, database) as scene, scene.loader() as applying:
        assert taken.wait(COME_SECONDS_MAX)
        assert eventually(tried.is_set)
        assert managed_table(applying, "things").state is TableState.CATCHING_UP
        done.set()
        assert eventually(lambda: not managed_table(applying, "things").lock.locked())
        applying.advance_skipped()
        assert managed_table(applying, "things").state is TableState.LIVE
