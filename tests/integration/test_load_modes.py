"""When a table is loaded by itself and when not: its `load.mode`, and what became of the log meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tailrace.changelog.format.gaps import Gap, record_gap
from tailrace.changelog.maintain.retention import RetentionPolicy, trim
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import LogGap, PositionLost
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId
from tailrace.pipeline.capture.log_capture import LogCapture
from tailrace.pipeline.points.consistent_point import build_point
from tailrace.pipeline.report import TableState
from tailrace.storage.files import LogPath
from tailrace.tasks.work import ChunkWork
from tests.support.loads import Local, Scene, managed_table, once, rows_of, wait_for_state
from tests.support.logs import seal
from tests.support.pipelines import COME_SECONDS_MAX, eventually, execute, lose_the_slot, wait_for_free_slots


def test_modes(database: str, tmp_path: Path) -> None:
    names = ("a_initial", "a_always", "a_once", "a_needed", "a_schema", "a_never")
    for name in names:
        execute(
            database,
            f"CREATE TABLE {name} (id int PRIMARY KEY, x int, large text)",
            f"ALTER TABLE {name} ALTER large SET STORAGE EXTERNAL",
            f"INSERT INTO {name} SELECT g, 1, repeat('l', 5000) FROM generate_series(1, 5) g",
        )
    modes = {
        "public.a_always": "always",
        "public.a_once": "initial_only",
        "public.a_needed": "when_needed",
        "public.a_schema": "schema_only",
        "public.a_never": "never",
    }
    with Scene(tmp_path, database, modes=modes) as scene:
        with scene.loader() as applying:
            scene.assert_equal(applying, "a_initial", "a_always", "a_needed")
            for name in names:
                execute(database, f"UPDATE {name} SET x = 2 WHERE id = 1", f"INSERT INTO {name} VALUES (9, 9, 'new')")
            scene.assert_equal(applying, "a_initial", "a_always", "a_needed")
            assert managed_table(applying, "a_once").state is TableState.LOADED
            rows = {name: rows_of(applying, name) for name in names}
            assert rows == {"a_initial": 6, "a_always": 6, "a_once": 5, "a_needed": 6, "a_schema": 2, "a_never": 2}
        with scene.loader() as applying:
            scene.assert_equal(applying, "a_initial", "a_always", "a_needed")
            assert {table for table, _ in applying.chunks} == {"a_always"}


def test_without_a_load_a_table_begins_empty_from_now_on_or_with_what_the_log_holds(
    database: str, tmp_path: Path
) -> None:
    names = ("from_now", "from_log")
    for name in names:
        execute(database, f"CREATE TABLE {name} (id int PRIMARY KEY, x int)")
        execute(database, f"INSERT INTO {name} VALUES (1, 1), (2, 2)")
    modes = {"public.from_now": "schema_only", "public.from_log": "never"}
    with Scene(tmp_path, database, modes=modes) as scene:
        for name in names:
            execute(database, f"INSERT INTO {name} VALUES (3, 3)", f"DELETE FROM {name} WHERE id = 1")
        scene.wait_for_capture()
        with scene.loader() as applying:
            for name in names:
                wait_for_state(applying, name, TableState.LIVE)
            assert {name: ids(scene, name) for name in names} == {"from_now": [], "from_log": [3]}
            for name in names:
                execute(database, f"INSERT INTO {name} VALUES (4, 4)", f"UPDATE {name} SET x = 5 WHERE id = 2")
            assert scene.settled(applying)
            # An update of a row that was never loaded brings it.
            assert {name: ids(scene, name) for name in names} == {"from_now": [2, 4], "from_log": [2, 3, 4]}
            assert not applying.chunks


def test_a_table_that_was_never_loaded_is_at_no_point_while_a_row_of_it_is_newer(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY, x int, large text)")
    execute(
        database, "ALTER TABLE t ALTER large SET STORAGE EXTERNAL", "INSERT INTO t VALUES (1, 1, repeat('l', 4000))"
    )
    monkeypatch.setattr(Local, "by_hand", True)
    with Scene(tmp_path, database, modes={"public.t": "schema_only"}) as scene, scene.loader() as applying:
        wait_for_state(applying, "t", TableState.CATCHING_UP)
        registry, here = applying.registry, managed_table(applying, "t")
        execute(database, "UPDATE t SET x = 2 WHERE id = 1")
        scene.wait_for_capture()
        scene.stop_capture()
        execute(database, "UPDATE t SET x = 3 WHERE id = 1")
        applying._advance([here], registry.refresh_index())
        assert DeltaTable(str(here.location.path)).to_pyarrow_table().column("x").to_pylist() == [3], "as of now"
        assert (here.repairing, here.state) == (True, TableState.CATCHING_UP)
        assert build_point(registry, registry.index.last_commit) is None
        scene.begin_capture()
        scene.wait_for_capture()
        applying._advance([here], registry.refresh_index())
        assert (here.ahead_of_position, here.state) == (False, TableState.LIVE)
        assert build_point(registry, registry.index.last_commit) is not None


def ids(scene: Scene, table: str) -> list[int]:
    found = DeltaTable(str(scene.pipeline.lake / "public" / table)).to_pyarrow_table()
    assert found.column_names[:2] == ["id", "x"], "the table has the source's columns"
    return sorted(found.column("id").to_pylist())


def let_go_of_everything(log: LogPath) -> set[str]:
    """What `log.max_bytes` does when it comes to the worst; returns the tables that lost what they lacked."""
    seal(log)
    with Sealer(log) as sealer:
        return set(trim(sealer, RetentionPolicy(age_seconds=None, max_bytes=100)).detached)


def test_a_table_whose_changes_the_log_let_go_of_is_loaded_again_when_needed_and_else_waits_for_a_person(
    database: str, tmp_path: Path
) -> None:
    names = ("needed", "plain")
    for name in names:
        execute(database, f"CREATE TABLE {name} (id int PRIMARY KEY)", f"INSERT INTO {name} VALUES (1)")
    scene = Scene(tmp_path, database, modes={"public.needed": "when_needed"})
    with scene:
        with scene.loader() as applying:
            scene.assert_equal(applying, *names)
        for name in names:
            execute(database, f"INSERT INTO {name} VALUES (2), (3)", f"DELETE FROM {name} WHERE id = 1")
        scene.wait_for_capture()
    assert let_go_of_everything(scene.settings.log.path) == {"public.needed", "public.plain"}
    with scene, scene.loader() as applying:
        wait_for_state(applying, "needed", TableState.LIVE)
        execute(database, "INSERT INTO needed VALUES (4)", "INSERT INTO plain VALUES (4)")
        scene.assert_equal(applying, "needed")
        left = managed_table(applying, "plain")
        assert left.state is TableState.NEEDS_SNAPSHOT
        assert left.error is not None
        assert (left.error.code, "Run `tailrace snapshot FILE TABLE`" in left.error.hint) == ("log-trimmed", True)
        assert rows_of(applying, "plain") == 1, "it is as it was"
        assert {table for table, _ in applying.chunks} == {"needed"}
        assert scene.pipeline.ask("snapshot", "public.plain").returncode == 0
        wait_for_state(applying, "plain", TableState.LIVE)
        scene.assert_equal(applying, *names)


def test_a_table_that_failed_and_was_let_go_of_is_loaded_again_when_needed_without_a_restart(
    database: str, tmp_path: Path
) -> None:
    execute(database, "CREATE TABLE needed (id int PRIMARY KEY)", "INSERT INTO needed VALUES (1)")
    with Scene(tmp_path, database, mode="when_needed") as scene, scene.loader() as applying:
        scene.assert_equal(applying, "needed")
        DeltaTable(str(scene.pipeline.lake / "public" / "needed")).delete("id = 1")
        execute(database, "INSERT INTO needed VALUES (2)")
        wait_for_state(applying, "needed", TableState.FAILED)
        applying.retention_holds.publish(now=True)
        scene.wait_for_capture()
        assert eventually(lambda: let_go_of_everything(scene.settings.log.path) == {"public.needed"})
        applying.registry.refresh_index()
        applying.retention_holds.publish(now=True)
        wait_for_state(applying, "needed", TableState.LIVE)
        scene.assert_equal(applying, "needed")
        assert len(applying.chunks) == 2


def test_a_table_that_was_left_out_for_a_while_is_loaded_anew(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE things (id int PRIMARY KEY, x int)", "INSERT INTO things VALUES (1, 1), (2, 2)")
    execute(database, "CREATE TABLE other (id int PRIMARY KEY)")
    with Scene(tmp_path, database) as scene, scene.loader() as applying:
        scene.assert_equal(applying, "things", "other")
    with Scene(tmp_path, database, tables='["public.other"]') as scene:
        execute(database, "UPDATE things SET x = 42 WHERE id = 1", "INSERT INTO other VALUES (1)")
        with scene.loader() as applying:
            scene.assert_equal(applying, "other")
    with Scene(tmp_path, database) as scene, scene.loader() as applying:
        scene.assert_equal(applying, "things", "other")
        assert applying.chunks, "what it lacks is not in the log"


def test_a_table_made_while_everything_runs_is_published_loaded_and_streamed(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE things (id int PRIMARY KEY)", "INSERT INTO things VALUES (1)")
    with Scene(tmp_path, database) as scene, scene.loader() as applying:
        scene.assert_equal(applying, "things")
        execute(database, "CREATE TABLE later (id int PRIMARY KEY, x int)", "INSERT INTO later VALUES (1, 1)")
        assert eventually(lambda: any(found.table.name == "later" for found in applying.registry.tables.values()))
        execute(database, "INSERT INTO later VALUES (2, 2)", "UPDATE later SET x = 9 WHERE id = 1")
        wait_for_state(applying, "later", TableState.LIVE)
        execute(database, "DELETE FROM later WHERE id = 2", "INSERT INTO later VALUES (3, 3)")
        scene.assert_equal(applying, "things", "later")


CHANGED = (
    "INSERT INTO t SELECT g, 'new' FROM generate_series(2001, 2100) g", "UPDATE t SET v = 'other' WHERE id <= 10",
    "DELETE FROM t WHERE id BETWEEN 20 AND 29", "UPDATE t SET id = 5000 WHERE id = 30",
)  # fmt: skip


@pytest.fixture
def filled(database: str) -> str:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE quiet (id int PRIMARY KEY)")
    execute(database, "INSERT INTO t SELECT g, repeat('v', 500) FROM generate_series(1, 1000) g")
    return database


def test_a_lost_position_loads_every_table_again_and_tells_readers(filled: str, tmp_path: Path) -> None:
    scene = Scene(tmp_path, filled, mode="when_needed", modes={"public.quiet": "initial_only"})
    with scene, scene.loader() as applying:
        scene.assert_equal(applying, "t", "quiet")
    lose_the_slot(filled, *CHANGED)
    execute(filled, "INSERT INTO quiet VALUES (1)")
    with scene:
        with scene.loader() as applying:
            scene.assert_equal(applying, "t")
            assert {table for table, _ in applying.chunks} == {"t"}, "one that is loaded only once lacks nothing"
            execute(filled, "DELETE FROM t WHERE id = 1", "INSERT INTO t VALUES (1, 'back')")
            scene.assert_equal(applying, "t")
        with scene.loader() as applying:
            scene.assert_equal(applying, "t")
            assert not applying.chunks, "once is enough"
    log = ChangeLog.open(scene.settings.log.path)
    (gap,) = log.gaps()
    with pytest.raises(LogGap, match="the source had discarded changes"):
        list(log.follow(table="public.t", after=gap.commit - 1))
    assert sum(len(batch) for batch in log.follow(table="public.t", after=gap.commit)) == 2


def test_tables_that_are_applied_when_the_position_is_lost_never_pass_over_it(filled: str, tmp_path: Path) -> None:
    scene = Scene(tmp_path, filled, mode="when_needed")
    scene.__enter__()
    with scene.loader() as applying:
        scene.assert_equal(applying, "t", "quiet")
        before = len(applying.chunks)
        scene.__exit__()
        lose_the_slot(filled, *CHANGED)
        with scene:
            execute(filled, "UPDATE t SET v = 'after' WHERE id = 40", "INSERT INTO quiet VALUES (1)")
            scene.assert_equal(applying, "t", "quiet")
            assert {table for table, _ in applying.chunks[before:]} == {"t", "quiet"}


def test_a_load_that_was_cut_off_before_the_position_was_lost_begins_anew(filled: str, tmp_path: Path) -> None:
    scene = Scene(tmp_path, filled, mode="when_needed", way="chunked")
    reached, gate = threading.Event(), threading.Event()

    def stay(work: ChunkWork) -> None:
        if work.schema.table.name == "t" and work.chunk.number == 5:
            reached.set()
            gate.wait(COME_SECONDS_MAX)

    with scene, scene.loader(before=stay) as applying:
        assert reached.wait(COME_SECONDS_MAX)
        applying._stopping.set()
        gate.set()
    assert managed_table(applying, "t").applied_position is None
    lose_the_slot(filled, *CHANGED)
    with scene, scene.loader() as applying:
        scene.assert_equal(applying, "t", "quiet")
        assert ("t", 0) in applying.chunks, "what was read before is read again"


def test_a_log_that_was_put_back_is_not_gone_on_with(filled: str, tmp_path: Path) -> None:
    scene = Scene(tmp_path, filled, mode="when_needed")
    with scene, scene.loader() as applying:
        scene.assert_equal(applying, "t")
    log = ChangeLog.open(scene.settings.log.path)
    slot = f"tailrace_{log.log_id}"
    wait_for_free_slots(filled)
    execute(filled, *CHANGED, f"SELECT pg_replication_slot_advance('{slot}', pg_current_wal_lsn())")
    with pytest.raises(PositionLost, match="the slot is ahead of the log"):
        LogCapture(scene.settings, until_caught_up=True)
    # As if a start had been cut off between its new slot and its commit.
    record_gap(log.path, Gap(commit=log.newest() + 1, start=Lsn(1), end=Lsn(1)))
    with scene, scene.loader() as applying:
        scene.assert_equal(applying, "t", "quiet")
    (gap,) = log.gaps()
    assert gap.end > gap.start > Lsn(1)


@pytest.mark.parametrize("way", ["exact", "chunked"])
def test_a_table_that_is_loaded_only_once_is_loaded_whole(filled: str, tmp_path: Path, way: str) -> None:
    def move() -> None:
        # Out of a chunk that was not read into one that was, and a row that is gone before its chunk is read.
        execute(filled, "UPDATE t SET id = -1 WHERE id = 1000", "DELETE FROM t WHERE id = 999")

    scene = Scene(tmp_path, filled, mode="initial_only", way=way)
    with scene, scene.loader(before=once(move, at=4)) as applying:
        wait_for_state(applying, "t", TableState.LOADED)
        assert rows_of(applying, "t") == (1000 if way == "exact" else 999)
        if way == "chunked":
            scene.pipeline.assert_equal("t")
        execute(filled, "DELETE FROM t")
        scene.wait_for_capture()
        assert rows_of(applying, "t") >= 999, "what comes later is not for it"


def test_a_position_is_not_given_up_for_tables_that_are_not_loaded_by_themselves(filled: str, tmp_path: Path) -> None:
    scene = Scene(tmp_path, filled, mode="when_needed", modes={"public.quiet": "schema_only"})
    with scene, scene.loader() as applying:
        scene.assert_equal(applying, "t")
    lose_the_slot(filled, *CHANGED)
    with pytest.raises(PositionLost, match="the replication slot is gone"):
        LogCapture(scene.settings, until_caught_up=True)
    assert not ChangeLog.open(scene.settings.log.path).gaps()


def test_a_table_that_is_made_later_and_never_loaded_begins_where_its_changes_do(database: str, tmp_path: Path) -> None:
    """The log is behind the position that the table was published at."""
    late = TableId("public", "late")
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)")
    with Scene(tmp_path, database, mode="schema_only") as scene:
        published = ChangeLog.open(scene.settings.log.path).coverage
        execute(database, "CREATE TABLE late (id int PRIMARY KEY)", "INSERT INTO late VALUES (1)")
        assert eventually(lambda: published().complete_from(late) is not None, pause=0.01)
        scene.stop_capture()
        with scene.loader() as applying:
            assert eventually(
                lambda: (
                    late in applying.registry.tables and managed_table(applying, "late").applied_position is not None
                )
            )
            since, cursor = published().complete_from(late), managed_table(applying, "late").applied_position
            assert since is not None
            assert cursor is not None
            assert cursor.position >= since
        scene.begin_capture()
