"""A table that is captured and never changed has columns for whoever reads its changes."""

from __future__ import annotations

from pathlib import Path

from tailrace.changelog.format.schemas import known_tables
from tailrace.changelog.read.reader import ChangeLog
from tailrace.pipeline.status import read_status
from tests.support.frames import frame, steps
from tests.support.loads import Scene
from tests.support.pipelines import eventually, execute


def test_the_capture_notes_what_quiet_tables_look_like_and_what_comes_fits(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE quiet (id int PRIMARY KEY, at timestamp)", "CREATE TABLE busy (id int)")
    with Scene(tmp_path, database) as scene:
        log = scene.settings.log.path

        def noted() -> set[str]:
            return {str(shape.table) for shape in known_tables(log)}

        assert eventually(lambda: {"public.quiet", "public.busy"} <= noted())
        made = frame(log, table="public.quiet")
        assert made.fields.names[-2:] == ["id", "at"]
        assert steps(made) == []
        execute(database, "CREATE TABLE later (id int PRIMARY KEY)", "INSERT INTO quiet VALUES (1, now())")
        assert eventually(lambda: "public.later" in noted()), "one that is made meanwhile"
        scene.wait_for_capture()
    assert [row["id"] for _, rows in steps(made) for row in rows] == [1]
    assert ChangeLog.open(log).table_numbers("public.quiet"), "by now the log knows it by its rows"


def test_the_status_says_which_tables_the_source_no_longer_has(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE stays (id int)", "CREATE TABLE goes (id int)", "CREATE TABLE moves (id int)")
    with Scene(tmp_path, database) as scene:
        scene.wait_for_capture()
        execute(database, *(f"INSERT INTO {table} VALUES (1)" for table in ("stays", "goes", "moves")))
        scene.wait_for_capture()
        execute(database, "DROP TABLE goes", "ALTER TABLE moves RENAME TO moved")
        notes = {table.table: table.note or "" for table in read_status(scene.settings).tables}
        assert {name for name, note in notes.items() if "no longer has this table" in note} == {"goes", "moves"}
