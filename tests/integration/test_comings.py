"""Tables that come into the publication and go out of it while streams read the log: nothing is passed over in silence,
and streams that take turns with a log of their own lose nothing."""

from __future__ import annotations

import logging
from pathlib import Path

import psycopg
import pytest

from tailrace.changelog.format.coverage import CaptureStartKind, read_coverage
from tailrace.changelog.read.offsets import LogOffset
from tailrace.errors import LogGap, SourceTableMissing
from tailrace.model.position import Lsn
from tailrace.pipeline.capture.embedded_capture import EmbeddedCapture
from tailrace.spark.datasource.log.log_plan import LogPlanner
from tests.support.frames import frame, rows_of_parts, steps, stream
from tests.support.loads import Scene
from tests.support.pipelines import eventually, execute


def settings_name(scene: Scene, *tables: str) -> None:
    source = scene.settings.source.model_copy(update={"tables": tables})
    scene.settings = scene.settings.model_copy(update={"source": source})


def published(url: str) -> set[str]:
    with psycopg.connect(url) as connection:
        return {name for (name,) in connection.execute("SELECT tablename::text FROM pg_publication_tables")}


def test_a_table_that_a_pipeline_left_out_for_a_while_is_told_to_whoever_streams_it(
    database: str, tmp_path: Path
) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)")
    scene = Scene(tmp_path, database)
    log = scene.settings.log.path
    for tables, key in ((("public.*",), 1), (("public.u",), 2), (("public.*",), 3)):
        settings_name(scene, *tables)
        with scene:
            execute(database, f"INSERT INTO t VALUES ({key})", f"INSERT INTO u VALUES ({key})")
            scene.wait_for_capture()
    made = frame(log, table="public.t")
    view = LogPlanner(made)
    end = view.next_end(view.start_offset(), view.newest(), limited=True)
    rows = rows_of_parts(made, view.plan_parts(view.start_offset(), end))
    assert [row["id"] for row in rows] == [1], "everything before is delivered"
    with pytest.raises(LogGap, match="not captured for a while") as caught:
        steps(made, after=LogOffset(end))
    again = stream(log, table="public.t", startingPosition=caught.value.fields["complete_from"])
    assert [row["id"] for row in again] == [3]
    assert [row["id"] for row in stream(log, table="public.u")] == [1, 2, 3], "others are not concerned"


def test_what_is_written_to_a_table_before_it_is_published_is_told_with_the_position_it_is_complete_from(
    database: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)")
    with Scene(tmp_path, database) as scene:
        execute(database, "INSERT INTO t VALUES (1)")
        with psycopg.connect(database) as connection:
            connection.execute("CREATE TABLE n (id int PRIMARY KEY)")
            connection.execute("INSERT INTO n VALUES (1)")
        assert eventually(lambda: "n" in published(database))
        execute(database, "INSERT INTO n VALUES (2)")
        scene.wait_for_capture()
    log = scene.settings.log.path
    with caplog.at_level(logging.WARNING, "tailrace.spark"):
        rows = stream(log, tables="public.*")
    assert [row["_table"] for row in rows] == ["t", "n"], "its first row came too early"
    (said,) = caplog.records
    assert "public.n" in said.getMessage()
    since = read_coverage(log).starts[-1].complete_from
    assert str(since) in said.getMessage()
    assert Lsn.parse(rows[-1]["_position"]) > since


def test_a_table_that_gets_a_key_is_captured_all_the_while(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE t (id int)", "CREATE TABLE u (id int PRIMARY KEY)")
    with Scene(tmp_path, database) as scene:
        log = scene.settings.log.path
        execute(database, "INSERT INTO t VALUES (1)", "ALTER TABLE t ADD PRIMARY KEY (id)")
        assert eventually(lambda: [coming.kind for coming in read_coverage(log).starts][2:] == [CaptureStartKind.MOVED])
        execute(database, "INSERT INTO t VALUES (2)", "UPDATE t SET id = 3 WHERE id = 1")
        scene.wait_for_capture()
    assert [row["_op"] for row in stream(log, tables="*")] == ["insert", "insert", "delete", "insert"]


def capture(url: str, log: Path, table: str, *statements: str) -> None:
    """As a stream does that reads all there is: in the log is what was committed before the start, at the least."""
    beside = EmbeddedCapture(url=url, log=str(log), tables=(table,))
    beside.start()
    try:
        assert table.removeprefix("public.") in published(url), "it is captured once it was started"
        execute(url, *statements)
    finally:
        beside.stop()


def test_streams_of_several_tables_that_take_turns_with_one_log_lose_nothing(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)")
    log = tmp_path / "log"
    capture(database, log, "public.t", "INSERT INTO t VALUES (1)")
    capture(database, log, "public.u", "INSERT INTO t VALUES (2)", "INSERT INTO u VALUES (1)")
    last = EmbeddedCapture(url=database, log=str(log), tables=("public.t",))
    execute(database, "INSERT INTO t VALUES (3)", "INSERT INTO u VALUES (2)")
    last.start()
    try:
        last.catch_up()
    finally:
        last.stop()
    assert [row["id"] for row in stream(log, table="public.t")] == [1, 2, 3]
    assert [row["id"] for row in stream(log, table="public.u")] == [1, 2]


@pytest.mark.parametrize(
    "asked", [{"tables": "public.t, public.nobody"}, {"table": "public.nobody", "shape": "envelope"}]
)
def test_a_name_that_is_no_table_is_told_before_anything_is_made_for_a_stream(
    database: str, tmp_path: Path, asked: dict[str, str]
) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)")
    with pytest.raises(SourceTableMissing, match=r"not there \(table=public\.nobody\).*case included"):
        frame(tmp_path / "log", url=database, **asked)
    assert not (tmp_path / "log").exists()
    frame(tmp_path / "log", url=database, tables="public.t, public.n*")  # a pattern takes what comes later
