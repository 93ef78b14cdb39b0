"""`tailrace snapshot` on a pipeline that runs: what was asked for happens, and the table equals the source."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from tailrace.errors import ExitCode
from tailrace.model.schema import TableId
from tailrace.pipeline.loads import load_scheduler
from tailrace.pipeline.report import TableState
from tailrace.pipeline.status import measure
from tailrace.tables.delta.table import DeltaRsTable
from tailrace.tasks.load_store import LoadHold, LoadMode, LoadRequest, LoadStore
from tailrace.tasks.work import ChunkWork
from tests.support.loads import Local, Scene, managed_table, once, wait_for_state
from tests.support.pipelines import eventually, execute

TABLE = "CREATE TABLE things (id int PRIMARY KEY, x int, pad text)"
FILL = "INSERT INTO things SELECT g, 0, repeat('p', 600) FROM generate_series(1, 1500) g"


@pytest.fixture
def filled(database: str) -> str:
    execute(database, TABLE, FILL, "ANALYZE things")
    return database


def ask(scene: Scene, *arguments: str) -> str:
    done = scene.pipeline.ask("snapshot", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def stop(scene: Scene) -> None:
    ask(scene, "--stop")


def pause(scene: Scene) -> None:
    ask(scene, "--pause")


def rows(applying: Local, **values: int) -> list[int]:
    """The ids of the lake table's rows that have these values."""
    path = managed_table(applying, "things").location.path
    files = DeltaRsTable(path, applying.registry.log.log_id).files()
    found = [row for file in files for row in pq.read_table(path / file).to_pylist()]
    return sorted(row["id"] for row in found if values.items() <= row.items())


def behind_our_back(url: str, applying: Local, *statements: str) -> None:
    """Change the table so that nobody is told of it."""
    publication = applying._source.settings.publication
    execute(url, f"ALTER PUBLICATION {publication} DROP TABLE things", *statements)
    execute(url, f"ALTER PUBLICATION {publication} ADD TABLE things")


@contextmanager
def reading(path: Path) -> Iterator[set[int]]:
    """Someone reads the lake table again and again until the block is left, and sees these counts of rows."""
    stop, seen = threading.Event(), set[int]()

    def read() -> None:
        while not stop.wait(0.05):
            if DeltaTable.is_deltatable(str(path)):
                seen.add(DeltaTable(str(path)).to_pyarrow_table(columns=["id"]).num_rows)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield seen
    finally:
        stop.set()
        reader.join()


def test_a_reader_never_sees_half_a_table(filled: str, tmp_path: Path) -> None:
    lake = tmp_path / "lake" / "public" / "things"

    def write() -> None:
        execute(filled, "UPDATE things SET x = x + 1 WHERE id % 100 = 7", "UPDATE things SET id = -id WHERE id = 1499")

    with Scene(tmp_path, filled) as scene, reading(lake) as seen, scene.loader(before=once(write, at=4)) as applying:
        scene.assert_equal(applying, "things")
        for mode in ("replace", "refresh"):
            applying.before, before = once(write, at=4), len(applying.chunks)
            behind_our_back(filled, applying, "UPDATE things SET pad = 'other' WHERE id % 2 = 0")
            ask(scene, "public.things", "--mode", mode)
            assert eventually(lambda: not LoadStore(scene.settings.log.path).requests())
            scene.assert_equal(applying, "things")
            assert len(applying.chunks) > before + 4, "all of it was read again, and written to meanwhile"
    assert seen == {1500}
    versions = range(DeltaTable(str(lake)).version() + 1)
    assert len(versions) > 4
    assert {version: count_at(lake, version) for version in versions} == dict.fromkeys(versions, 1500)


def count_at(lake: Path, version: int) -> int:
    return int(DeltaTable(str(lake), version=version).to_pyarrow_table(columns=["id"]).num_rows)


def test_a_part_is_read_again_and_only_that_and_what_is_deleted_goes(filled: str, tmp_path: Path) -> None:
    with Scene(tmp_path, filled) as scene, scene.loader() as applying:
        scene.assert_equal(applying, "things")
        behind_our_back(filled, applying, "UPDATE things SET x = 7", "DELETE FROM things WHERE id > 1400")
        said = ask(scene, "public.things", "--where", "id <= 100 -- the first")
        assert "rows that match the condition are reloaded" in said
        assert "starts it within a second" in said
        assert eventually(lambda: not LoadStore(scene.settings.log.path).requests())
        assert scene.settled(applying)
        assert rows(applying) == list(range(1, 1401))
        assert rows(applying, x=7) == list(range(1, 101))
        ask(scene, "public.things")
        assert eventually(lambda: not LoadStore(scene.settings.log.path).requests())
        scene.assert_equal(applying, "things")


@pytest.mark.parametrize("way", ["exact", "chunked"])
def test_a_part_that_is_read_again_leaves_no_change_of_the_rest_out(filled: str, tmp_path: Path, way: str) -> None:
    with Scene(tmp_path, filled, way=way) as scene, scene.loader() as applying:
        scene.assert_equal(applying, "things")
        before, table = len(applying.chunks), managed_table(applying, "things")
        with table.lock:  # it is behind: what comes now is applied after the part has landed
            execute(filled, "UPDATE things SET x = 1 WHERE id IN (5, 50)", "DELETE FROM things WHERE id = 60")
            ask(scene, "public.things", "--where", "id <= 10")
            assert eventually(lambda: len(applying.chunks) > before)
            execute(filled, "UPDATE things SET x = 2 WHERE id IN (6, 51)")
            assert eventually(lambda: any(load.committing for load in applying.load_scheduler._loads.values()))
            time.sleep(0.5)  # until it waits for the table
        scene.assert_equal(applying, "things")
        assert not LoadStore(scene.settings.log.path).requests()


def test_what_is_asked_while_nothing_runs_is_done_at_the_next_start(filled: str, tmp_path: Path) -> None:
    with Scene(tmp_path, filled) as scene:
        with scene.loader() as applying:
            scene.assert_equal(applying, "things")
            behind_our_back(filled, applying, "UPDATE things SET x = 7")
        said = ask(scene, "public.*", "--mode", "refresh")
        assert "no process applies now" in said
        with scene.loader() as applying:
            scene.assert_equal(applying, "things")
            assert len(rows(applying, x=7)) == 1500


def test_a_table_that_others_wrote_to_is_loaded_over_it(filled: str, tmp_path: Path) -> None:
    with Scene(tmp_path, filled) as scene, scene.loader() as applying:
        scene.assert_equal(applying, "things")
        DeltaTable(str(managed_table(applying, "things").location.path)).delete("id < 500")
        execute(filled, "UPDATE things SET x = 1 WHERE id = 700")
        wait_for_state(applying, "things", TableState.FAILED)
        ask(scene, "public.things")
        scene.assert_equal(applying, "things")


def test_a_first_load_that_is_stopped_leaves_the_table_unloaded_until_it_is_asked_for(
    filled: str, tmp_path: Path
) -> None:
    with Scene(tmp_path, filled) as scene:
        with scene.loader(before=once(lambda: stop(scene), at=3)) as applying:
            wait_for_state(applying, "things", TableState.PAUSED)
            assert eventually(lambda: managed_table(applying, "things").load_status is None)
        with scene.loader() as applying:
            wait_for_state(applying, "things", TableState.PAUSED)
            assert not eventually(lambda: bool(applying.chunks), seconds=2)
            ask(scene, "public.things")
            scene.assert_equal(applying, "things")


def test_a_table_asked_for_and_stopped_before_its_first_load_stays_unloaded(filled: str, tmp_path: Path) -> None:
    with Scene(tmp_path, filled) as scene:
        ask(scene, "public.things")
        with scene.loader(before=once(lambda: stop(scene), at=3)) as applying:
            wait_for_state(applying, "things", TableState.PAUSED)
            assert eventually(lambda: managed_table(applying, "things").load_status is None)
            read = len(applying.chunks)
            assert not eventually(lambda: len(applying.chunks) > read, seconds=2)


@pytest.mark.parametrize("way", ["auto", "exact", "chunked"] if os.environ.get("TAILRACE_THOROUGH") else ["auto"])
@pytest.mark.parametrize("key", ["PRIMARY KEY (id)", "REPLICA IDENTITY FULL"])
def test_a_load_is_paused_for_long_and_the_table_is_changed_meanwhile(
    filled: str, tmp_path: Path, way: str, key: str
) -> None:
    if "FULL" in key:
        execute(filled, "ALTER TABLE things DROP CONSTRAINT things_pkey", f"ALTER TABLE things {key}")
    with Scene(tmp_path, filled, way=way) as scene, scene.loader(before=once(lambda: pause(scene), at=3)) as applying:
        wait_for_state(applying, "things", TableState.PAUSED)
        execute(filled, "UPDATE things SET x = 5 WHERE id % 2 = 0", "INSERT INTO things VALUES (9000, 1, 'new')")
        execute(filled, "DELETE FROM things WHERE id = 1")
        ask(scene, "public.things", "--resume")
        scene.assert_equal(applying, "things")


def test_a_part_of_a_table_is_read_again(filled: str, tmp_path: Path) -> None:
    with Scene(tmp_path, filled) as scene, scene.loader() as applying:
        scene.assert_equal(applying, "things")
        seeds = LoadStore(scene.settings.log.path)
        seeds.add_request(LoadRequest(table=TableId("public", "things"), mode=LoadMode.REFRESH, where="id < 300"))
        assert eventually(lambda: not seeds.requests())
        scene.assert_equal(applying, "things")


def test_a_condition_that_names_what_is_not_there_is_said_to_and_nothing_is_stuck(filled: str, tmp_path: Path) -> None:
    """Whether it was mistyped, or what it names has gone since it was asked for."""
    with Scene(tmp_path, filled) as scene, scene.loader() as applying:
        scene.assert_equal(applying, "things")
        seeds = LoadStore(scene.settings.log.path)
        refused = scene.pipeline.ask("snapshot", "public.things", "--where", "xx = 1")
        assert refused.returncode == ExitCode.CONFIG
        assert 'column "xx" does not exist' in refused.stderr
        assert not seeds.requests()
        seeds.add_request(LoadRequest(table=TableId("public", "things"), where="id in (select id from public.gone)"))
        assert eventually(lambda: not seeds.requests())
        assert 'relation "public.gone" does not exist' in (managed_table(applying, "things").reload_error or "")
        execute(filled, "UPDATE things SET x = 5 WHERE id = 1")
        scene.assert_equal(applying, "things")


def test_a_load_is_paused_and_resumed_and_stopped(filled: str, tmp_path: Path) -> None:
    things = TableId("public", "things")
    seeds = LoadStore(tmp_path / "changes")

    def hold(how: LoadHold) -> None:
        seeds.set_hold(things, how)
        assert eventually(lambda: things in applying.load_scheduler._running_loads.holds), "it is obeyed"

    with Scene(tmp_path, filled) as scene:
        with scene.loader(before=once(lambda: hold(LoadHold.PAUSED), at=4)) as applying:
            wait_for_state(applying, "things", TableState.PAUSED)
            read = len(applying.chunks)
        with scene.loader() as applying:
            wait_for_state(applying, "things", TableState.PAUSED)
            assert not eventually(lambda: bool(applying.chunks), seconds=1.5), "paused across a restart"
            seeds.set_hold(things, None)
            scene.assert_equal(applying, "things")
            total = len(applying.chunks) + read
        with scene.loader(before=once(lambda: hold(LoadHold.STOPPED), at=4)) as applying:
            seeds.add_request(LoadRequest(table=things))
            assert eventually(lambda: not seeds.requests() and not seeds.holds())
            scene.assert_equal(applying, "things")
            assert len(applying.chunks) < total
    assert not list((tmp_path / "changes" / "seed").glob("*/plan.json"))


def told(scene: Scene, applying: Local) -> str | None:
    """Why the table stands still, as `tailrace run` sees it a few times a second."""
    (table,) = measure(scene.settings, applying.registry, applying._source, None).tables
    return table.reason


def test_a_table_that_has_failed_says_why_also_after_a_load_of_it_was_stopped(filled: str, tmp_path: Path) -> None:
    things = TableId("public", "things")
    with Scene(tmp_path, filled).set_tables("evolution: {rename: stop}") as scene, scene.loader() as applying:
        scene.assert_equal(applying, "things")
        execute(filled, "ALTER TABLE things RENAME pad TO other", "UPDATE things SET x = 1 WHERE id = 1")
        wait_for_state(applying, "things", TableState.FAILED)
        applying.before = once(lambda: stop(scene), at=4)
        ask(scene, "public.things")
        assert eventually(lambda: things in applying.load_scheduler._loads)
        wait_for_state(applying, "things", TableState.FAILED)
        assert told(scene, applying) == "schema-changed"


def test_a_table_that_fails_while_it_is_loaded_again_says_why(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE things (id int PRIMARY KEY, x text, pad text)", FILL)
    said = list[str | None]()

    def look(work: ChunkWork) -> None:
        if work.chunk.number == 2:
            execute(database, "UPDATE things SET x = '' WHERE id = 1")
            wait_for_state(applying, "things", TableState.FAILED)
        elif work.chunk.number == 4:
            said.append(told(scene, applying))

    with Scene(tmp_path, database).set_tables("partition_by: [x]") as scene, scene.loader() as applying:
        scene.assert_equal(applying, "things")
        applying.before = look
        ask(scene, "public.things")
        assert eventually(lambda: bool(said))
        assert said == ["value-unfit"]


def test_a_table_that_has_failed_is_tried_again_without_a_restart(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    with Scene(tmp_path, database) as scene, scene.loader() as applying:
        scene.assert_equal(applying, "t")
        lake = tmp_path / "lake" / "public" / "t"
        lake.rename(tmp_path / "away")
        execute(database, "INSERT INTO t VALUES (2)")
        wait_for_state(applying, "t", TableState.FAILED)
        (tmp_path / "away").rename(lake)
        looks = 3 * load_scheduler.TABLES_SECONDS
        assert not eventually(lambda: managed_table(applying, "t").state is not TableState.FAILED, seconds=looks), (
            "by itself"
        )
        applying.registry.load_store.request_retry(managed_table(applying, "t").table)
        wait_for_state(applying, "t", TableState.LIVE)
        scene.assert_equal(applying, "t")
        assert applying.registry.load_store.retry_requests() == []
        assert len(applying.chunks) == 1, "it goes on from where it stood"
