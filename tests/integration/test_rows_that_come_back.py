"""Rows that come, or come back, without a large value that the server does not send: only the source has it.

A publication's condition, a filter or a route makes an arrival of an update. What the lake table has under the key
then, if anything, is an earlier row, and never lends its value.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tailrace.deadletters.store import DeadLetterStore
from tailrace.model.schema import TableId
from tailrace.pipeline.report import TableState
from tailrace.pipeline.status import read_status
from tests.integration.test_routes import with_rules
from tests.support.engines import rows_of
from tests.support.loads import LOADED_SECONDS_MAX, Local, Scene, managed_table, wait_for_state
from tests.support.pipelines import eventually, execute

TABLE = (
    "CREATE TABLE t (id int PRIMARY KEY, state text, large text)",
    "ALTER TABLE t ALTER large SET STORAGE EXTERNAL",
    "INSERT INTO t VALUES (1, 'closed', repeat('a', 4000)), (20, 'open', repeat('b', 4000))",
)
PUBLISHED = "  publication: {name: some_rows, create: false}\n"
FILTER = """\
transforms:
  rules:
    - {do: filter, tables: ["public.t"], where: "state == 'open'"}
"""


def published(database: str, folder: Path) -> Scene:
    """A pipeline that the source tells only of some rows."""
    execute(database, *TABLE, "CREATE PUBLICATION some_rows FOR TABLE t WHERE (id > 10)")
    return Scene(folder, database, source=PUBLISHED)


def larges(applying: Local) -> dict[int, str]:
    """The large values in the lake, by the letter that each is made of."""
    found: list[dict[str, Any]] = rows_of(managed_table(applying, "t").location.path).to_pylist()
    assert all(len(row["large"]) == 4000 for row in found), "none is missing, nor half of another"
    return {row["id"]: row["large"][0] for row in found}


def assert_live(scene: Scene, applying: Local) -> None:
    assert scene.settled(applying), managed_table(applying, "t").error
    wait_for_state(applying, "t", TableState.LIVE, seconds=LOADED_SECONDS_MAX)
    assert not managed_table(applying, "t").ahead_of_position


def test_a_row_that_enters_a_publication_s_condition_is_read_from_the_source(database: str, tmp_path: Path) -> None:
    with published(database, tmp_path) as scene, scene.loader() as applying:
        wait_for_state(applying, "t", TableState.LIVE, seconds=LOADED_SECONDS_MAX)
        execute(database, "UPDATE t SET id = 11 WHERE id = 1")
        assert_live(scene, applying)
        assert larges(applying) == {11: "a", 20: "b"}
        # In one transaction, so that the table has the row of before when the new one comes.
        execute(
            database,
            "UPDATE t SET id = 1 WHERE id = 11; UPDATE t SET large = repeat('c', 4000) WHERE id = 1;"
            "UPDATE t SET id = 11 WHERE id = 1; UPDATE t SET state = 'open' WHERE id = 11",
        )
        assert_live(scene, applying)
        assert larges(applying) == {11: "c", 20: "b"}
        execute(
            database,
            "TRUNCATE t; INSERT INTO t VALUES (1, 'open', repeat('d', 4000));"
            "UPDATE t SET id = 12 WHERE id = 1; INSERT INTO t VALUES (2, '', repeat('e', 4000));"
            "UPDATE t SET id = 13 WHERE id = 2; DELETE FROM t WHERE id = 13",
        )
        assert_live(scene, applying)
        assert larges(applying) == {12: "d"}
        assert read_status(scene.settings).tables[0].note is None
        execute(database, "ALTER PUBLICATION some_rows DROP TABLE t")
        assert "its changes are not captured" in str(read_status(scene.settings).tables[0].note)


def test_a_row_is_not_read_under_names_that_are_other_columns_by_now(database: str, tmp_path: Path) -> None:
    with published(database, tmp_path) as scene:
        with scene.loader() as applying:
            assert_live(scene, applying)
        execute(database, "UPDATE t SET id = 11 WHERE id = 1")
        scene.wait_for_capture()
        execute(
            database,
            "ALTER TABLE t RENAME large TO x; ALTER TABLE t RENAME state TO large;ALTER TABLE t RENAME x TO state",
        )
        with scene.loader() as applying:
            assert eventually(lambda: managed_table(applying, "t").last_load is not None, seconds=LOADED_SECONDS_MAX)
            assert_live(scene, applying)
            rows = rows_of(managed_table(applying, "t").location.path).to_pylist()
            assert {row["id"]: (row["state"][0], row["large"]) for row in rows} == {
                11: ("a", "closed"),
                20: ("b", "open"),
            }


def test_a_row_that_a_filter_sent_away_comes_back_in_one_transaction(database: str, tmp_path: Path) -> None:
    execute(database, *TABLE)
    with with_rules(Scene(tmp_path, database), FILTER) as scene, scene.loader() as applying:
        wait_for_state(applying, "t", TableState.LIVE, seconds=LOADED_SECONDS_MAX)
        execute(
            database,
            "UPDATE t SET state = 'closed' WHERE id = 20;"
            "UPDATE t SET large = repeat('c', 4000) WHERE id = 20;"
            "UPDATE t SET state = 'open' WHERE id = 20; UPDATE t SET state = 'open' WHERE id = 1;"
            "UPDATE t SET id = 2 WHERE id = 1",
        )
        assert_live(scene, applying)
        assert larges(applying) == {2: "a", 20: "c"}


def test_where_letters_are_kept_such_a_row_is_one_and_a_replay_reads_it(database: str, tmp_path: Path) -> None:
    with published(database, tmp_path).set_tables("on_bad_row: dead-letter") as scene, scene.loader() as applying:
        wait_for_state(applying, "t", TableState.LIVE, seconds=LOADED_SECONDS_MAX)
        execute(database, "UPDATE t SET id = 11 WHERE id = 1")
        assert_live(scene, applying)
        assert larges(applying) == {20: "b"}
        (letter,) = json.loads(scene.pipeline.ask("dead-letters", "list", "--json").stdout)["letters"]
        assert letter["code"] == "base-row-missing"
        assert scene.pipeline.ask("dead-letters", "replay").returncode == 0
        waiting = DeadLetterStore(scene.settings.log.path, TableId("public", "t"))
        assert eventually(lambda: waiting.replay_requested_at is None, seconds=LOADED_SECONDS_MAX)
        assert larges(applying) == {11: "a", 20: "b"}
