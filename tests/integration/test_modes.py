"""Tables in every mode over a real server: loaded, changed, evolved, loaded again, and refused where they cannot be."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest
from deltalake import DeltaTable

from tailrace.pipeline.report import TableState
from tailrace.tasks.work import ChunkWork
from tests.support.loads import Local, Scene, managed_table, once, wait_for_state
from tests.support.pipelines import COME_SECONDS_MAX, Pipeline, eventually, execute
from tests.support.thorough import thorough

EVERY = (
    "metadata: [_op]",
    'rules: {"public.h": {mode: history}, "public.a": {mode: append}, "public.s": {soft_delete: true}}',
)
NAMES = ("m", "s", "h", "a")


def make(database: str, *names: str) -> None:
    for name in names:
        execute(
            database,
            f"CREATE TABLE {name} (id int PRIMARY KEY, x int, large text)",
            f"ALTER TABLE {name} ALTER large SET STORAGE EXTERNAL",
            f"INSERT INTO {name} SELECT g, g, repeat('l', 5000) FROM generate_series(1, 3) g",
        )


def rows(applying: Local, name: str, columns: str, where: str = "") -> list[tuple[Any, ...]]:
    """What Polars reads of the table, and DuckDB of its files."""
    path, table = managed_table(applying, name).location.path, managed_table(applying, name).location.open()
    frame = pl.read_delta(str(path))
    names = str([str(path / file) for file in table.files()])
    asked = (
        f"select {columns} from {source} {where} order by all"
        for source in ("frame", f"read_parquet({names}, union_by_name = true)")
    )
    with duckdb.connect() as connection:
        connection.register("frame", frame.to_arrow())
        first, second = (connection.execute(query).fetchall() for query in asked)
    assert first == second
    return first


def test_one_pipeline_has_tables_in_every_mode(database: str, tmp_path: Path) -> None:
    make(database, *NAMES)
    with Scene(tmp_path, database).set_tables(*EVERY) as scene, scene.loader() as applying:
        assert scene.settled(applying)
        for name in NAMES:
            execute(database, f"UPDATE {name} SET x = 20 WHERE id = 2", f"DELETE FROM {name} WHERE id = 1")
            execute(database, f"ALTER TABLE {name} ADD y int DEFAULT 7", f"UPDATE {name} SET id = 9 WHERE id = 3")
        assert scene.settled(applying)
        assert rows(applying, "m", "id, x, y, length(large), _op") == [
            (2, 20, 7, 5000, "update"),
            (9, 3, 7, 5000, "insert"),
        ]
        assert rows(applying, "s", "id, x, y, length(large), _deleted, _op") == [
            (1, 1, 7, 5000, True, "delete"),
            (2, 20, 7, 5000, False, "update"),
            (3, 3, 7, 5000, True, "delete"),
            (9, 3, 7, 5000, False, "insert"),
        ]
        assert rows(applying, "h", "id, x, y, length(large), _current, _op, _valid_to is null") == [
            (1, 1, 7, 5000, False, "read", False),
            (2, 2, 7, 5000, False, "read", False),
            (2, 20, 7, 5000, True, "update", True),
            (3, 3, 7, 5000, False, "read", False),
            (9, 3, 7, 5000, True, "insert", True),
        ]
        assert rows(applying, "a", "_op, id, x, y, length(large), _unchanged") == [
            ("delete", 1, None, None, None, None),
            ("delete", 3, None, None, None, None),
            ("insert", 9, 3, 7, None, ["large"]),
            ("read", 1, 1, None, 5000, None),
            ("read", 2, 2, None, 5000, None),
            ("read", 3, 3, None, 5000, None),
            ("update", 2, 20, None, None, ["large"]),
        ]
        said = json.loads(scene.pipeline.ask("status", "--json").stdout)["tables"]
        assert {table["table"]: table["mode"] for table in said} == {
            "m": "mirror",
            "s": "mirror, soft delete",
            "h": "history",
            "a": "append",
        }
        shown = scene.pipeline.ask("status").stdout
        assert "mirror, soft delete" in shown
        assert "history" in shown


def test_a_table_that_keeps_the_past_keeps_it_when_it_is_loaded_again(database: str, tmp_path: Path) -> None:
    make(database, "s", "h", "a")
    with Scene(tmp_path, database, way="chunked").set_tables(*EVERY) as scene, scene.loader() as applying:
        assert scene.settled(applying)
        for name in ("s", "h", "a"):
            execute(database, f"DELETE FROM {name} WHERE id = 1")
        assert scene.settled(applying)
        loads = {table: managed_table(applying, table).last_load for table in ("s", "h", "a")}
        assert {name: load.way for name, load in loads.items() if load} == {"s": "chunked", "h": "exact", "a": "exact"}
        scene.pipeline.ask("snapshot", "public.s", "public.h", "public.a")
        assert eventually(lambda: all(managed_table(applying, name).last_load is not loads[name] for name in loads))
        assert scene.settled(applying)
        assert rows(applying, "s", "id, _deleted") == [(1, True), (2, False), (3, False)]
        assert rows(applying, "h", "id, _current") == [(1, False), (2, True), (3, True)]
        assert [op for (op,) in rows(applying, "a", "_op")] == ["delete", "read", "read", "read", "read", "read"]
        refused = scene.pipeline.ask("snapshot", "public.h", "--where", "id = 2")
        assert refused.returncode != 0
        assert "cannot be reloaded" in refused.stderr


def test_the_past_is_never_taken_away_unasked(database: str, tmp_path: Path) -> None:
    make(database, "h")
    with Scene(tmp_path, database).set_tables("mode: history") as scene, scene.loader() as applying:
        assert scene.settled(applying)
        execute(database, "UPDATE h SET x = 5 WHERE id = 1")
        assert scene.settled(applying)
        execute(database, "ALTER TABLE h DROP CONSTRAINT h_pkey, ADD PRIMARY KEY (id, x)")
        told = scene.pipeline.ask("evolve", "--dry-run").stdout
        assert "stop" in told
        execute(database, "UPDATE h SET x = 6 WHERE id = 1")
        wait_for_state(applying, "h", TableState.FAILED)
        error = managed_table(applying, "h").error
        assert error is not None
        assert error.code == "schema-changed"
        assert "tailrace snapshot" in error.hint
        assert len(rows(applying, "h", "id")) == 4
        scene.pipeline.ask("snapshot", "public.h")
        wait_for_state(applying, "h", TableState.LIVE)
        assert rows(applying, "h", "id, x, _current") == [(1, 6, True), (2, 2, True), (3, 3, True)]


def test_one_word_of_a_person_is_enough_where_the_past_cannot_be_carried_over(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log has rows of the new key, and nobody has stopped at them yet."""
    make(database, "h")
    with Scene(tmp_path, database).set_tables("mode: history") as scene:
        with scene.loader() as applying:
            assert scene.settled(applying)
        execute(database, "UPDATE h SET x = 5 WHERE id = 1")
        execute(database, "ALTER TABLE h DROP CONSTRAINT h_pkey, ADD PRIMARY KEY (id, x)")
        execute(database, "UPDATE h SET x = 6 WHERE id = 1")
        scene.wait_for_capture()
        assert scene.pipeline.ask("snapshot", "public.h").returncode == 0
        monkeypatch.setattr(Local, "by_hand", True)
        with scene.loader() as applying:
            wait_for_state(applying, "h", TableState.LIVE, TableState.FAILED)
            assert managed_table(applying, "h").error is None
            assert rows(applying, "h", "id, x, _current") == [(1, 6, True), (2, 2, True), (3, 3, True)]


def test_another_mode_is_refused_until_a_person_has_the_table_replaced(database: str, tmp_path: Path) -> None:
    make(database, "t")
    with Scene(tmp_path, database) as scene:
        with scene.loader() as applying:
            assert scene.settled(applying)
        scene.set_tables("mode: append")
        execute(database, "INSERT INTO t VALUES (4, 4)")
        with scene.loader() as applying:
            wait_for_state(applying, "t", TableState.FAILED)
            error = managed_table(applying, "t").error
            assert error is not None
            assert (error.code, error.fields["made"], error.fields["asked"]) == ("form-changed", "mirror", "append")
            assert len(rows(applying, "t", "id")) == 3
            assert scene.pipeline.ask("snapshot", "public.t").returncode == 0
            wait_for_state(applying, "t", TableState.LIVE)
            execute(database, "DELETE FROM t WHERE id = 4")
            assert scene.settled(applying)
            assert rows(applying, "t", "_op, id") == [("delete", 4), ("read", 1), ("read", 2), ("read", 3), ("read", 4)]


def test_a_source_table_that_cannot_have_the_mode_says_so_and_holds_back_only_itself(
    database: str, tmp_path: Path
) -> None:
    make(database, "t")
    execute(database, "CREATE TABLE keyless (x int)", 'CREATE TABLE taken (id int PRIMARY KEY, "_current" int)')
    with Scene(tmp_path, database).set_tables("mode: history") as scene, scene.loader() as applying:
        for name, said in (("keyless", "needs a table with a key"), ("taken", "has the name of one")):
            wait_for_state(applying, name, TableState.FAILED)
            error = managed_table(applying, name).error
            assert error is not None
            assert (error.code, said in error.message) == ("table-unusable", True)
            assert error.hint
        assert scene.settled(applying)
        assert len(rows(applying, "t", "id")) == 3


def test_a_load_that_was_cut_off_is_not_gone_on_with_in_another_form(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY, large text)")
    execute(database, "INSERT INTO t SELECT g, repeat('l', 500) FROM generate_series(1, 1000) g")
    with Scene(tmp_path, database, way="chunked") as scene:
        leave = threading.Event()

        def wait(_: ChunkWork) -> None:
            leave.wait(COME_SECONDS_MAX)

        with scene.loader(after=wait) as applying:
            assert eventually(lambda: len(applying.chunks) == 1)
            applying._stopping.set()
            leave.set()
        scene.set_tables("metadata: [_op]")
        with scene.loader() as applying:
            assert scene.settled(applying)
            assert rows(applying, "t", "count(*), count(_op)") == [(1000, 1000)]


def test_rows_that_change_while_they_are_read_are_marked_as_they_should_be(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY, x int, large text)")
    execute(database, "ALTER TABLE t ALTER large SET STORAGE EXTERNAL")
    execute(database, "INSERT INTO t SELECT g, g, repeat('l', 3000) FROM generate_series(1, 200) g")

    def write() -> None:
        execute(database, "UPDATE t SET x = -1 WHERE id = 150", "DELETE FROM t WHERE id IN (1, 150)")
        execute(database, "UPDATE t SET id = 1000 WHERE id = 199", "UPDATE t SET x = -2 WHERE id = 2")
        execute(database, "INSERT INTO t VALUES (1, 7, 'again')", "DELETE FROM t WHERE id = 1000")

    loaded = Scene(tmp_path, database, way="chunked").set_tables("soft_delete: true", "metadata: [_op, _tx]")
    with loaded as scene, scene.loader(after=once(write)) as applying:
        assert scene.settled(applying)
        assert len(applying.chunks) > 2
        assert rows(applying, "t", "count(*)  filter (not _deleted)") == [(198,)]
        assert rows(applying, "t", "id, x, length(large), _op", "where id in (1, 2) and not _deleted") == [
            (1, 7, 5, "insert"),
            (2, -2, 3000, "update"),
        ]


def test_rows_that_must_be_read_again_come_in_the_tables_own_shape(database: str, tmp_path: Path) -> None:
    make(database, "t")
    lines = ("soft_delete: true", 'rules: {"public.t": {metadata: [_op], columns: {id: key, large: text}}}')
    with Scene(tmp_path, database, mode="schema_only").set_tables(*lines) as scene, scene.loader() as applying:
        assert scene.settled(applying)
        execute(database, "UPDATE t SET x = 20 WHERE id = 2", "DELETE FROM t WHERE id = 3")
        assert scene.settled(applying)
        assert rows(applying, "t", "key, x, length(text), _deleted, _op") == [(2, 20, 5000, False, "update")]


def test_tables_lie_where_their_names_say_and_have_the_columns_that_were_asked_for(
    database: str, tmp_path: Path
) -> None:
    make(database, "t", "u")
    lines = ("names: '{pipeline}/{schema}_{table}'", 'rules: {"public.t": {name: gold, columns: {x: amount}}}')
    with Scene(tmp_path, database).set_tables(*lines) as scene, scene.loader() as applying:
        assert scene.settled(applying)
        execute(database, "UPDATE t SET x = 5 WHERE id = 1", "ALTER TABLE t ADD y int")
        execute(database, "INSERT INTO t VALUES (9, 9, 'l', 9)")
        assert scene.settled(applying)
        assert managed_table(applying, "t").location.path == scene.pipeline.lake / "gold"
        assert managed_table(applying, "u").location.path == scene.pipeline.lake / "test" / "public_u"
        assert rows(applying, "t", "id, amount, y, length(large)") == [
            (1, 5, None, 5000),
            (2, 2, None, 5000),
            (3, 3, None, 5000),
            (9, 9, 9, 1),
        ]


def test_tables_that_would_share_a_folder_are_refused_before_anything_is_written(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE SCHEMA other")
    make(database, "t", "u")
    met = Scene(tmp_path, database, tables='["public.*", "other.*"]').set_tables("names: '{table}'")
    with met as scene, scene.loader() as applying:
        assert scene.settled(applying)
        execute(database, "CREATE TABLE other.t (id int PRIMARY KEY)", "INSERT INTO other.t VALUES (1)")
        assert eventually(lambda: any(found.table.schema == "other" for found in applying.registry.tables.values()))
        (late,) = [found for found in applying.registry.tables.values() if found.table.schema == "other"]
        assert eventually(lambda: late.state is TableState.FAILED)
        assert late.error is not None
        assert (late.error.code, str(late.error.fields["other"])) == ("table-unusable", "public.t")
        execute(database, "UPDATE t SET x = 9 WHERE id = 1")
        assert scene.settled(applying)
        assert rows(applying, "t", "id, x") == [(1, 9), (2, 2), (3, 3)]
    with Scene(tmp_path / "new", database, tables='["*.t"]').set_tables("names: '{table}'") as scene:
        with scene.loader() as applying:
            assert eventually(
                lambda: all(found.state is TableState.FAILED for found in applying.registry.tables.values())
            )
        assert not scene.pipeline.lake.exists()


def test_two_pipelines_share_a_lake_if_their_names_do_not_meet(database: str, tmp_path: Path) -> None:
    make(database, "t", "u")
    lake = f"path: {tmp_path / 'lake'}"
    with ExitStack() as stack:
        scenes = [stack.enter_context(shared(tmp_path / name, database, name, lake)) for name in ("one", "two")]
        for scene in scenes:
            with scene.loader() as applying:
                assert scene.settled(applying)
                assert len(rows(applying, "t", "id")) == 3
        late = stack.enter_context(shared(tmp_path / "three", database, "one", lake))
        with late.loader() as applying:
            wait_for_state(applying, "t", TableState.FAILED)
            error = managed_table(applying, "t").error
            assert error is not None
            assert error.code == "foreign-write"
            assert "tables.names" in error.hint
        with scenes[0].loader() as applying:
            execute(database, "DELETE FROM t WHERE id = 1")
            assert scenes[0].settled(applying)
            assert len(rows(applying, "t", "id")) == 2


def shared(folder: Path, database: str, name: str, lake: str) -> Scene:
    """A pipeline of this name in a lake that it does not have for itself."""
    scene = Scene(folder, database)
    scene.pipeline.file.write_text(
        scene.pipeline.file.read_text().replace("name: test", f"name: {name}").replace("path: ./lake", lake)
    )
    return scene.read_settings().set_tables("names: '{pipeline}/{table}'")


@thorough
def test_a_pipeline_on_spark_writes_tables_in_every_mode(database: str, tmp_path: Path) -> None:
    make(database, *NAMES)
    pipeline = Pipeline(tmp_path, database)
    pipeline.file.write_text(pipeline.file.read_text() + "".join(f"  {line}\n" for line in EVERY))
    pipeline.catch_up()
    for name in NAMES:
        execute(database, f"UPDATE {name} SET x = 20 WHERE id = 2", f"DELETE FROM {name} WHERE id = 1")
    pipeline.catch_up()
    found = {name: pl.read_delta(str(pipeline.lake / "public" / name)).sort("id", "_op") for name in NAMES}
    assert found["m"]["id", "x", "_op"].rows() == [(2, 20, "update"), (3, 3, "read")]
    assert found["s"]["id", "_deleted"].rows() == [(1, True), (2, False), (3, False)]
    assert found["h"]["id", "_current", "_op"].rows() == [
        (1, False, "read"),
        (2, False, "read"),
        (2, True, "update"),
        (3, True, "read"),
    ]
    assert found["a"]["id", "_op"].rows() == [(1, "delete"), (1, "read"), (2, "read"), (2, "update"), (3, "read")]
    assert all(frame["large"].str.len_chars().max() == 5000 for frame in found.values())


@pytest.mark.parametrize("line", ["mode: history", "soft_delete: true", "mode: append"])
def test_a_table_that_others_changed_is_replaced_if_a_person_asks(database: str, tmp_path: Path, line: str) -> None:
    make(database, "t")
    with Scene(tmp_path, database).set_tables(line) as scene, scene.loader() as applying:
        assert scene.settled(applying)
        DeltaTable(str(managed_table(applying, "t").location.path)).delete("id = 1")
        execute(database, "UPDATE t SET x = 20 WHERE id = 2")
        wait_for_state(applying, "t", TableState.FAILED)
        error = managed_table(applying, "t").error
        assert error is not None
        assert error.code == "foreign-write"
        assert "tailrace rebuild" in error.hint
        scene.pipeline.ask("snapshot", "public.t")
        wait_for_state(applying, "t", TableState.LIVE)
        assert rows(applying, "t", "id, x") == [(1, 1), (2, 20), (3, 3)]
