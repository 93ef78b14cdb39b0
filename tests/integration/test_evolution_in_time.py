"""What was done to a source table, told early, late, twice or not at all: the lake table equals the source, or says why
it does not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tailrace.capture.postgres.catalogue import Catalogue
from tailrace.capture.postgres.chunks import ChunkKind, plan_table
from tailrace.capture.postgres.connect import connect
from tailrace.model.catalogue_facts import CatalogueFacts
from tailrace.model.schema import TableId
from tailrace.pipeline.apply import schema_watch
from tailrace.pipeline.report import TableState
from tailrace.pipeline.tables.managed_table import PendingSchema
from tests.support.loads import Local, Scene, managed_table, once, rows_of, wait_for_state
from tests.support.pipelines import eventually, execute

PLAIN = ("CREATE TABLE t (id int PRIMARY KEY, a int)", "INSERT INTO t VALUES (0, 1)")
SPLIT = (
    "CREATE TABLE t (id int, d int, PRIMARY KEY (id, d)) PARTITION BY LIST (d)",
    "CREATE TABLE p1 PARTITION OF t FOR VALUES IN (1)", "INSERT INTO t VALUES (0, 1)",
)  # fmt: skip


def looked(applying: Local) -> None:
    """Wait until the catalogue has been compared, and what came of it is done."""
    shapes = applying.load_scheduler._schema_watch
    for _ in range(2):  # one look may be under way
        before = shapes._due
        assert eventually(lambda: shapes._due > before), "it looks"  # noqa: B023
    assert eventually(lambda: managed_table(applying, "t").pending_schema is None)


def look_no_more(applying: Local) -> None:
    """Have the look that comes be the last; the scene puts that back."""
    looked_last = applying.load_scheduler._schema_watch._due
    schema_watch.LOOK_SECONDS = 3600  # only now: a look that came before would be taken for the last one
    assert eventually(lambda: applying.load_scheduler._schema_watch._due > looked_last + 3000)


def all_equal(scene: Scene, applying: Local) -> None:
    looked(applying)
    scene.assert_equal(applying, "t")
    assert managed_table(applying, "t").state is TableState.LIVE


def load_again(scene: Scene, applying: Local) -> None:
    """What a person does about a table that stands still."""
    assert scene.pipeline.ask("snapshot", "public.t").returncode == 0
    wait_for_state(applying, "t", TableState.LIVE)
    all_equal(scene, applying)


def test_what_was_seen_is_forgotten_once_rows_have_brought_more(database: str, tmp_path: Path) -> None:
    execute(database, *PLAIN)
    with Scene(tmp_path, database) as scene, scene.loader() as applying:
        all_equal(scene, applying)
        look_no_more(applying)  # from here on it is we who look
        table = managed_table(applying, "t")
        assert table.schema is not None
        execute(database, "ALTER TABLE t ADD c int")
        seen = applying._source.describe([table.table])[table.table]
        told = PendingSchema(schema=seen, horizon=applying._source.committed_until(), compared_with=table.schema)
        execute(database, "ALTER TABLE t ADD d int", "INSERT INTO t VALUES (2, 2, 2, 5)")
        assert eventually(lambda: table.schema is not None and table.schema.names == ["id", "a", "c", "d"])
        table.pending_schema = told
        scene.assert_equal(applying, "t")


def test_partitions_that_come_and_go_again(database: str, tmp_path: Path) -> None:
    execute(database, *SPLIT)
    with Scene(tmp_path, database, tables='["public.t"]') as scene, scene.loader() as applying:
        all_equal(scene, applying)
        execute(database, "CREATE TABLE p2 PARTITION OF t FOR VALUES IN (2)", "INSERT INTO t VALUES (2, 2), (3, 2)")
        all_equal(scene, applying)
        execute(database, "ALTER TABLE t DETACH PARTITION p2", "DROP TABLE p2", "INSERT INTO t VALUES (9, 1)")
        all_equal(scene, applying)
        execute(database, "CREATE TABLE p3 PARTITION OF t FOR VALUES IN (3)", "INSERT INTO t VALUES (3, 3)")
        all_equal(scene, applying)
        execute(database, "TRUNCATE p3")
        all_equal(scene, applying)


def test_a_table_is_loaded_anew_once_and_not_with_every_row(database: str, tmp_path: Path) -> None:
    execute(database, *SPLIT)
    with Scene(tmp_path, database, tables='["public.t"]') as scene, scene.loader() as applying:
        all_equal(scene, applying)
        execute(database, "INSERT INTO t VALUES (1, 1)", "CREATE TABLE p2 PARTITION OF t FOR VALUES IN (2)")
        assert scene.pipeline.ask("snapshot", "public.t").returncode == 0
        assert eventually(lambda: len(applying.chunks) > 1)
        all_equal(scene, applying)
        read = len(applying.chunks)
        for number in range(3):
            execute(database, f"INSERT INTO t VALUES ({number}, 2), ({number + 10}, 1)")
            all_equal(scene, applying)
        assert len(applying.chunks) == read


def test_what_writes_rows_anew_without_changing_them_is_not_blamed_on_the_next_alter(
    database: str, tmp_path: Path
) -> None:
    execute(database, *PLAIN)
    with Scene(tmp_path, database) as scene, scene.loader() as applying:
        all_equal(scene, applying)
        for number, statement in enumerate(("VACUUM FULL t", "CLUSTER t USING t_pkey", "TRUNCATE t")):
            execute(database, statement)
            looked(applying)
            execute(database, f"INSERT INTO t VALUES ({number + 10}, 2)")
            all_equal(scene, applying)
        execute(database, "ALTER TABLE t ALTER a SET NOT NULL", "ALTER TABLE t ADD c int")
        for number in range(3):
            execute(database, f"INSERT INTO t VALUES ({number + 20}, 2)")
            all_equal(scene, applying)
        assert len(applying.chunks) == 1, "read once, at the beginning"


def test_a_table_that_gets_an_identity_is_read_again_for_what_was_not_told(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE t (a int, b text)", "INSERT INTO t VALUES (1, 'x'), (2, 'y')")
    with Scene(tmp_path, database) as scene, scene.loader() as applying:
        all_equal(scene, applying)
        execute(database, "UPDATE t SET b = 'unseen' WHERE a = 1", "DELETE FROM t WHERE a = 2")
        execute(database, "ALTER TABLE t REPLICA IDENTITY FULL")
        all_equal(scene, applying)
        execute(database, "UPDATE t SET b = 'seen' WHERE a = 1")
        all_equal(scene, applying)


def test_a_table_that_gets_a_key_is_loaded_anew_and_one_that_loses_its_own_stops(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE t (id int, b text)", "INSERT INTO t VALUES (1, 'x'), (2, 'y')")
    with Scene(tmp_path, database) as scene, scene.loader() as applying:
        all_equal(scene, applying)
        execute(database, "UPDATE t SET b = 'unseen' WHERE id = 1", "ALTER TABLE t ADD PRIMARY KEY (id)")
        all_equal(scene, applying)
        execute(database, "UPDATE t SET b = 'seen' WHERE id = 1")
        all_equal(scene, applying)
        execute(database, "ALTER TABLE t DROP CONSTRAINT t_pkey")
        wait_for_state(applying, "t", TableState.FAILED)
        error = managed_table(applying, "t").error
        assert error is not None
        assert "replica identity" in error.headline
        assert "tailrace snapshot" in error.hint
        assert scene.settled(applying), "a table that stops holds nobody back"
        execute(database, "UPDATE t SET b = 'not told' WHERE id = 1", "ALTER TABLE t REPLICA IDENTITY FULL")
        assert "REPLICA IDENTITY FULL" in error.hint
        assert "tailrace retry" in error.hint
        applying.registry.load_store.request_retry(managed_table(applying, "t").table)
        wait_for_state(applying, "t", TableState.LIVE)
        all_equal(scene, applying)
        execute(database, "ALTER TABLE t REPLICA IDENTITY DEFAULT")
        wait_for_state(applying, "t", TableState.FAILED)
        execute(database, "UPDATE t SET b = 'not told either' WHERE id = 1")
        load_again(scene, applying)


def test_a_table_that_lost_its_identity_is_loaded_by_no_retry_and_no_start_unless_asked_for(
    database: str, tmp_path: Path
) -> None:
    execute(database, *PLAIN)
    with Scene(tmp_path, database) as scene:
        with scene.loader() as applying:
            all_equal(scene, applying)
            table = managed_table(applying, "t")
            execute(database, "ALTER TABLE t DROP CONSTRAINT t_pkey")
            wait_for_state(applying, "t", TableState.FAILED)
            inserts = applying._source.settings.publication_inserts
            assert eventually(lambda: inserts in applying._source.publications_by_table().get(table.table, set()))
            read, error = len(applying.chunks), table.error
            applying.registry.load_store.request_retry(table.table)
            assert eventually(lambda: table.error is not None and table.error is not error)
            assert (table.state, len(applying.chunks)) == (TableState.FAILED, read)
        with scene.loader() as applying:
            wait_for_state(applying, "t", TableState.FAILED)
            assert "replica identity" in str(managed_table(applying, "t").error)
            assert scene.settled(applying)
            assert not applying.chunks
            load_again(scene, applying)


@pytest.mark.parametrize("way", ["auto", "chunked"])
def test_an_alter_while_a_load_waits_to_begin(database: str, tmp_path: Path, way: str) -> None:
    execute(database, *PLAIN, "CREATE TABLE other (x int PRIMARY KEY)")
    with Scene(tmp_path, database, way=way) as scene, psycopg.connect(database) as writer:
        writer.execute("INSERT INTO other VALUES (1)")
        with scene.loader() as applying:
            assert eventually(lambda: managed_table(applying, "t").load_status is not None)
            time.sleep(0.5)
            execute(
                database,
                "ALTER TABLE t ADD c int DEFAULT 7",
                "INSERT INTO t VALUES (2, 2, 3)",
                "UPDATE t SET c = 4 WHERE id = 0",
            )
            writer.commit()
            all_equal(scene, applying)


@pytest.mark.parametrize("way", ["auto", "chunked"])
def test_names_that_are_swapped_while_a_table_is_read(database: str, tmp_path: Path, way: str) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY, a text, b text)")
    execute(database, "INSERT INTO t SELECT g, repeat('a', 200), 'b' FROM generate_series(1, 2000) g")
    swap = "ALTER TABLE t RENAME a TO x; ALTER TABLE t RENAME b TO a; ALTER TABLE t RENAME x TO b"
    between = once(lambda: execute(database, swap), at=1)
    with Scene(tmp_path, database, way=way) as scene, scene.loader(before=between) as applying:
        all_equal(scene, applying)
        assert len(applying.chunks) > 3, "it was read in several chunks"


@pytest.mark.parametrize(
    "statements",
    [
        ("ALTER TABLE t ADD c int DEFAULT 1", "INSERT INTO t VALUES (2, 2)", "ALTER TABLE t DROP c",
         "ALTER TABLE t ADD c int DEFAULT 2"),
        ("ALTER TABLE t RENAME a TO x", "INSERT INTO t VALUES (2, 2)", "ALTER TABLE t DROP x",
         "ALTER TABLE t ADD x int"),
    ],
    ids=["made-twice", "renamed-and-made"],
)  # fmt: skip
def test_columns_that_came_and_went_while_nobody_captured(
    database: str, tmp_path: Path, statements: tuple[str, ...]
) -> None:
    execute(database, *PLAIN)
    scene = Scene(tmp_path, database)
    with scene, scene.loader() as applying:
        all_equal(scene, applying)
    execute(database, *statements)
    with scene, scene.loader() as applying:
        all_equal(scene, applying)
        execute(database, "INSERT INTO t VALUES (3, 3)")
        all_equal(scene, applying)


def test_a_load_anew_that_cannot_succeed_stops_the_table_and_holds_nobody_back(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY, n numeric)", "INSERT INTO t VALUES (1, 1.5), (2, 'NaN')")
    with Scene(tmp_path, database) as scene, scene.loader() as applying:
        all_equal(scene, applying)
        execute(database, "ALTER TABLE t ALTER n TYPE numeric(12, 2)")
        wait_for_state(applying, "t", TableState.FAILED)
        assert scene.settled(applying)
        read = len(applying.chunks)
        execute(database, "UPDATE t SET n = 2 WHERE id = 2")
        time.sleep(1)
        assert len(applying.chunks) == read, "it is not read again and again"
        load_again(scene, applying)


def test_a_load_anew_waits_for_a_person_who_said_so(database: str, tmp_path: Path) -> None:
    execute(database, *PLAIN)
    with Scene(tmp_path, database) as scene, scene.loader() as applying:
        all_equal(scene, applying)
        assert scene.pipeline.ask("snapshot", "public.t", "--pause").returncode == 0
        execute(database, "ALTER TABLE t ALTER a TYPE text USING 'x'")
        wait_for_state(applying, "t", TableState.PAUSED)
        assert scene.settled(applying), "a table that is paused holds nobody back"
        assert len(applying.chunks) == 1
        assert scene.pipeline.ask("snapshot", "public.t", "--resume").returncode == 0
        wait_for_state(applying, "t", TableState.LIVE)
        all_equal(scene, applying)


def test_a_load_anew_that_a_person_gives_up_stands_still_until_it_is_asked_for(database: str, tmp_path: Path) -> None:
    execute(database, *PLAIN)
    scene = Scene(tmp_path, database)
    give_up = once(lambda: scene.pipeline.ask("snapshot", "public.t", "--stop").check_returncode(), at=1)
    with scene, scene.loader(before=give_up) as applying:
        all_equal(scene, applying)
        execute(database, "ALTER TABLE t ALTER a TYPE text USING 'x'")
        wait_for_state(applying, "t", TableState.NEEDS_SNAPSHOT)
        assert scene.settled(applying)
        load_again(scene, applying)


def test_a_name_that_another_table_takes_over_is_a_table_made_anew(database: str, tmp_path: Path) -> None:
    execute(database, *PLAIN)
    with Scene(tmp_path, database) as scene, scene.loader() as applying:
        all_equal(scene, applying)
        execute(database, "CREATE TABLE t_new (id int PRIMARY KEY, a int)")
        assert eventually(lambda: any(item.name == "t_new" for item in applying.registry.tables))
        execute(database, "INSERT INTO t_new VALUES (1, 10), (2, 20)")
        assert scene.settled(applying)
        with psycopg.connect(database) as both:
            both.execute("ALTER TABLE t RENAME TO t_old")
            both.execute("ALTER TABLE t_new RENAME TO t")
        execute(database, "INSERT INTO t VALUES (3, 30)", "INSERT INTO t_old VALUES (7, 7)")
        all_equal(scene, applying)


def test_a_table_that_is_made_again_while_its_load_is_planned_waits_until_it_is_published(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(database, *PLAIN)
    with Scene(tmp_path, database).set_tables("soft_delete: true") as scene, scene.loader() as applying:
        assert scene.settled(applying)
        table = managed_table(applying, "t")
        scene.stop_capture()
        with monkeypatch.context() as patch:
            patch.setattr(
                applying.load_scheduler._starter, "_published_only", lambda waiting: waiting
            )  # it was, when that was looked at
            execute(database, "DROP TABLE t", *PLAIN, "INSERT INTO t VALUES (5, 5)")
            assert scene.pipeline.ask("snapshot", "public.t").returncode == 0
            assert eventually(lambda: table.reload_error is not None or table.state is TableState.FAILED)
            assert table.reload_error is not None
            assert "does not publish" in table.reload_error
        scene.begin_capture()
        assert eventually(lambda: applying.chunks[1:] and table.state is TableState.LIVE)
        assert rows_of(applying, "t") == 2


def test_a_table_that_is_renamed_and_back_goes_on_after_a_snapshot(database: str, tmp_path: Path) -> None:
    execute(database, *PLAIN)
    with Scene(tmp_path, database) as scene, scene.loader() as applying:
        all_equal(scene, applying)
        execute(database, "ALTER TABLE t RENAME TO u", "INSERT INTO u VALUES (2, 2)")
        wait_for_state(applying, "t", TableState.FAILED)
        error = managed_table(applying, "t").error
        assert error is not None
        assert "renamed to public.u" in error.headline
        execute(database, "ALTER TABLE u RENAME TO t")
        load_again(scene, applying)


def test_a_partition_attached_to_a_table_that_is_written_to_all_the_time(database: str, tmp_path: Path) -> None:
    execute(database, *SPLIT, "CREATE TABLE p2 (id int, d int, PRIMARY KEY (id, d))", "INSERT INTO p2 VALUES (7, 2)")
    with Scene(tmp_path, database, tables='["public.t"]') as scene, scene.loader() as applying:
        all_equal(scene, applying)
        table = managed_table(applying, "t")
        with table.lock:  # as if a long merge were under way
            execute(database, "ALTER TABLE t ATTACH PARTITION p2 FOR VALUES IN (2)")
            assert eventually(lambda: table.pending_schema is not None)
            execute(database, "INSERT INTO t VALUES (5, 1)")
            horizon = applying._source.committed_until()
            assert eventually(
                lambda: applying.registry.refresh_index() > 0 and applying.registry.index.position >= horizon
            )
            assert applying.registry.pending(table, applying.registry.index.last_commit)
            assert applying.registry.next_range(table, applying.registry.index.last_commit) is None
            assert table.reload_reason is not None, "it does not wait for a moment without rows"
        all_equal(scene, applying)


def test_a_type_that_gets_another_name_is_no_reason_to_load_again_and_again(database: str, tmp_path: Path) -> None:
    execute(
        database,
        "CREATE TYPE mood AS ENUM ('good', 'bad')",
        "CREATE TABLE t (id int PRIMARY KEY, m mood)",
        "INSERT INTO t VALUES (0, 'bad')",
    )
    with Scene(tmp_path, database) as scene, scene.loader() as applying:
        all_equal(scene, applying)
        execute(database, "INSERT INTO t VALUES (1, 'good')")
        all_equal(scene, applying)
        execute(database, "ALTER TYPE mood RENAME TO feeling")
        assert scene.pipeline.ask("snapshot", "public.t").returncode == 0
        assert eventually(lambda: len(applying.chunks) == 2)
        all_equal(scene, applying)
        for number in range(2, 5):
            execute(database, f"INSERT INTO t VALUES ({number}, 'good')")
            all_equal(scene, applying)
        assert len(applying.chunks) == 2


def test_what_was_written_while_a_table_had_no_identity_is_read_again(database: str, tmp_path: Path) -> None:
    execute(database, *PLAIN)
    with Scene(tmp_path, database) as scene, scene.loader() as applying:
        all_equal(scene, applying)
        table = managed_table(applying, "t").table
        look_no_more(applying)  # all of it lies between two looks

        def published(where: str) -> bool:
            return where in applying._source.publications_by_table().get(table, set())

        settings = applying._source.settings
        execute(database, "ALTER TABLE t DROP CONSTRAINT t_pkey")
        assert eventually(lambda: published(settings.publication_inserts))
        execute(database, "UPDATE t SET a = 99")
        execute(database, "ALTER TABLE t ADD PRIMARY KEY (id)")
        assert eventually(lambda: published(settings.publication))
        schema_watch.LOOK_SECONDS = 0.3
        applying.load_scheduler._schema_watch._due = 0.0
        assert eventually(lambda: len(applying.chunks) > 1), "it is loaded anew"
        all_equal(scene, applying)


def test_a_type_that_is_widened_while_a_table_is_read(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY, n numeric(4,2), padding text)")
    execute(database, "INSERT INTO t SELECT g, 1, repeat('a', 200) FROM generate_series(1, 2000) g")
    widen = ("ALTER TABLE t ALTER n TYPE numeric(14,2)", "UPDATE t SET n = 123456789 WHERE id > 1900")
    between = once(lambda: execute(database, *widen), at=1)
    with Scene(tmp_path, database, way="chunked") as scene, scene.loader(before=between) as applying:
        all_equal(scene, applying)
        assert len(applying.chunks) > 3, "it was read in several chunks"


def test_what_the_catalogue_tells_belongs_together(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    execute(database, *PLAIN)
    table, asked = TableId("public", "t"), Catalogue._rows

    def told() -> CatalogueFacts:
        with connect(database) as connection:
            found = Catalogue(connection).describe(table, None).facts
        assert found is not None
        return found

    def altered_meanwhile(self: Catalogue, query: str, *arguments: Any) -> Any:
        if "relnatts" in query:
            monkeypatch.setattr(Catalogue, "_rows", asked)
            execute(database, "ALTER TABLE t ALTER a TYPE int USING a * 2")
        return asked(self, query, *arguments)

    before = told()
    monkeypatch.setattr(Catalogue, "_rows", altered_meanwhile)
    with connect(database) as connection:
        torn = plan_table(connection, table, None, ChunkKind.PLACE).schema.facts
    assert torn in (before, told())
    assert before != told()


def test_a_table_that_a_micro_batch_has_left_is_swept_up(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(database, *PLAIN)
    with Scene(tmp_path, database) as scene, scene.loader() as applying:
        all_equal(scene, applying)
    monkeypatch.setattr(Local, "_apply", lambda self: None)  # nobody looks by himself
    with Scene(tmp_path, database) as scene, scene.loader() as applying:
        execute(database, "INSERT INTO t VALUES (1, 1)")
        horizon = applying._source.committed_until()
        assert eventually(lambda: applying.registry.refresh_index() > 0 and applying.registry.index.position >= horizon)
        table = managed_table(applying, "t")
        applying.advance_skipped()
        assert applying.registry.pending(table, applying.registry.index.last_commit), "nobody was asked to come so far"
        applying._target_commit = applying.registry.index.last_commit
        applying.advance_skipped()
        assert not applying.registry.pending(table, applying.registry.index.last_commit)
        scene.assert_equal(applying, "t")
