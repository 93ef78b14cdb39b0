"""Rows that a lake table cannot take, on a real server: the table goes on, and a replay brings them in."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq
import pytest

from tailrace.deadletters.store import DeadLetterStore
from tailrace.model.schema import TableId
from tailrace.pipeline.report import TableState
from tailrace.tasks.keyed_replay import RefetchWork, ReplayRowsWork, refetch_dead_letters, replay_rows
from tests.support.loads import Local, Scene, managed_table, wait_for_state
from tests.support.pipelines import eventually, execute

THINGS = TableId("public", "things")
TABLE = """
CREATE TABLE things (id int PRIMARY KEY, amount numeric(10, 2), large text);
ALTER TABLE things ALTER large SET STORAGE EXTERNAL;
INSERT INTO things SELECT g, g, repeat('x', 4000) FROM generate_series(1, 20) g;
CREATE TABLE others (id int PRIMARY KEY);
"""
BAD = "UPDATE things SET amount = 'NaN' WHERE id = {}"


@pytest.fixture
def scene(database: str, tmp_path: Path) -> Iterator[Scene]:
    execute(database, *TABLE.strip().split(";\n"))
    opened = Scene(tmp_path, database)
    settings = opened.settings
    opened.pipeline.file.write_text(f"{opened.pipeline.file.read_text()}  on_bad_row: dead-letter\n")
    tables = settings.tables.model_copy(update={"on_bad_row": "dead-letter"})
    opened.settings = settings.model_copy(update={"tables": tables})
    with opened:
        yield opened


def rows(applying: Local) -> dict[int, dict[str, Any]]:
    table = managed_table(applying, "things").location
    files = table.open().files()
    return {row["id"]: row for file in files for row in pq.read_table(table.path / file).to_pylist()}


def letters(scene: Scene, *flags: str) -> list[dict[str, Any]]:
    done = scene.pipeline.ask("dead-letters", "list", *flags, "--json")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["letters"]
    return found


def replay(scene: Scene) -> None:
    done = scene.pipeline.ask("dead-letters", "replay")
    assert done.returncode == 0, done.stderr
    assert "replayed" in done.stdout
    answered = DeadLetterStore(scene.settings.log.path, THINGS)
    assert eventually(lambda: answered.replay_requested_at is None)


def test_the_table_goes_on_without_the_row_and_a_replay_brings_it_in(scene: Scene) -> None:
    with scene.loader() as applying:
        wait_for_state(applying, "things", TableState.LIVE)
        execute(
            scene.pipeline.url,
            BAD.format(3),
            "UPDATE things SET amount = 50 WHERE id = 4",
            "INSERT INTO things VALUES (30, 'NaN', 'fresh')",
        )
        assert scene.settled(applying)
        found = rows(applying)
        assert (found[3]["amount"], found[4]["amount"], 30 in found) == (3, 50, False)
        first, second = letters(scene)
        assert (first["table"], first["operation"], first["code"]) == ("things", "update", "value-unfit")
        assert (second["operation"], "payload" in second) == ("insert", False)
        payload = letters(scene, "--payload")[1]["payload"]
        assert (payload["values"]["amount"], payload["values"]["large"], payload["unfit"]) == (
            "NaN",
            "fresh",
            ["amount"],
        )
        status = scene.pipeline.table_status("things")
        assert (status["state"], status["dead_letters"]) == ("live", 2)
        assert "tailrace dead-letters FILE list" in status["note"]

        replay(scene)  # nothing was mended
        assert [letter["seq"] for letter in letters(scene)] == [first["seq"], second["seq"]]
        assert "dead-letters FILE replay TABLE" in letters(scene)[0]["hint"]

        # Partial updates: the large value is not sent, and builds on what was set aside.
        execute(scene.pipeline.url, "UPDATE things SET amount = 7 WHERE id = 3")
        assert scene.settled(applying)
        assert (rows(applying)[3]["amount"], len(letters(scene))) == (3, 3)
        replay(scene)
        assert (rows(applying)[3]["amount"], rows(applying)[3]["large"]) == (7, "x" * 4000)
        assert [letter["seq"] for letter in letters(scene)] == [second["seq"]]

        execute(scene.pipeline.url, "UPDATE things SET amount = 8, large = 'y' WHERE id = 30")
        scene.assert_equal(applying, "things")
        assert (letters(scene), scene.pipeline.table_status("things")["dead_letters"]) == ([], 0)


def test_a_partial_change_of_a_row_that_the_table_lacks_is_read_again_at_a_replay(scene: Scene) -> None:
    with scene.loader() as applying:
        wait_for_state(applying, "things", TableState.LIVE)
        publication = applying._source.settings.publication
        # A row that nobody was told of, and then a change that leaves its large value out.
        with_it_unseen = f"ALTER PUBLICATION {publication} DROP TABLE things"
        execute(
            scene.pipeline.url,
            with_it_unseen,
            "INSERT INTO things VALUES (40, 1, repeat('z', 4000))",
            f"ALTER PUBLICATION {publication} ADD TABLE things",
            "UPDATE things SET amount = 2 WHERE id = 40",
        )
        assert scene.settled(applying)
        (letter,) = letters(scene)
        assert (letter["code"], 40 in rows(applying)) == ("base-row-missing", False)
        replay(scene)
        scene.assert_equal(applying, "things")
        assert letters(scene) == []


DELIVER = """
import pickle, sys
from tailrace.tasks.keyed_replay import replay_rows
replay_rows(pickle.load(open(sys.argv[1], "rb")))
"""


def test_killed_between_the_commit_and_the_letters_it_is_done_again_and_changes_nothing(
    scene: Scene, tmp_path: Path
) -> None:
    with scene.loader() as applying:
        wait_for_state(applying, "things", TableState.LIVE)
        execute(scene.pipeline.url, BAD.format(3), "UPDATE things SET amount = 7 WHERE id = 3")
        assert scene.settled(applying)
        here, reader = managed_table(applying, "things"), applying._source.row_reader(60)
    assert here.applied_position is not None
    assert here.schema is not None
    log = scene.settings.log.path
    read = refetch_dead_letters(RefetchWork(log=log, schema=here.schema, expected=here.applied_position, reader=reader))
    assert (read.error, read.rows) == (None, 1)
    work = ReplayRowsWork(log=log, location=here.location, schema=here.schema, expected=here.applied_position)
    (tmp_path / "work").write_bytes(pickle.dumps(work))
    armed = {"TAILRACE_FAILPOINT": "letters.delivered", "TAILRACE_FAILPOINT_LOG": str(tmp_path / "hits")}
    died = subprocess.run(
        [sys.executable, "-c", DELIVER, str(tmp_path / "work")],
        check=False,
        start_new_session=True,
        env={**os.environ, **armed},
    )
    assert (died.returncode, len(letters(scene))) == (-9, 2)
    again = replay_rows(work)
    assert (again.error, again.dead_letters, again.needs_refetch, letters(scene)) == (None, 0, False, [])
    scene.pipeline.assert_equal("things")


def test_a_row_that_has_got_another_letter_since_it_was_read_is_read_again(scene: Scene) -> None:
    with scene.loader() as applying:
        wait_for_state(applying, "things", TableState.LIVE)
        execute(scene.pipeline.url, BAD.format(3), BAD.format(4), "UPDATE things SET amount = 7 WHERE id IN (3, 4)")
        assert scene.settled(applying)
        here, log = managed_table(applying, "things"), scene.settings.log.path
        assert here.applied_position is not None
        assert here.schema is not None
        reader = applying._source.row_reader(60)
        assert (
            refetch_dead_letters(
                RefetchWork(log=log, schema=here.schema, expected=here.applied_position, reader=reader)
            ).error
            is None
        )
        execute(scene.pipeline.url, "UPDATE things SET amount = 8 WHERE id = 3")
        assert scene.settled(applying)
        work = ReplayRowsWork(log=log, location=here.location, schema=here.schema, expected=here.applied_position)
        with here.lock:
            done = replay_rows(work)
        assert (done.error, done.rows, done.needs_refetch) == (None, 2, True)
        found = rows(applying)
        assert (found[3]["amount"], found[4]["amount"]) == (3, 7), "one waits, the other is in"
        replay(scene)
        scene.assert_equal(applying, "things")


def story(chance: random.Random) -> str:
    key, other = chance.randint(1, 25), chance.randint(1, 25)
    amount = chance.choice(["'NaN'", "1", "2", "3"])
    return chance.choices(
        [
            f"UPDATE things SET amount = {amount} WHERE id = {key}",
            f"UPDATE things SET amount = {amount}, large = repeat('{key % 10}', 4000) WHERE id = {key}",
            f"UPDATE things SET id = {other} WHERE id = {key} AND NOT EXISTS (SELECT FROM things WHERE id = {other})",
            f"INSERT INTO things VALUES ({key}, {amount}, repeat('i', 4000)) ON CONFLICT DO NOTHING",
            f"DELETE FROM things WHERE id = {key}",
            "TRUNCATE things",
        ],
        weights=[40, 10, 15, 15, 10, 1],
    )[0]


def test_any_story_ends_as_the_source_once_its_rows_are_mended_and_replayed(scene: Scene) -> None:
    chance = random.Random(20261116)
    with scene.loader() as applying:
        wait_for_state(applying, "things", TableState.LIVE)
        seen = 0
        for _ in range(8):
            execute(scene.pipeline.url, *(story(chance) for _ in range(25)))
            assert scene.settled(applying)
            seen = max(seen, len(letters(scene)))
        assert seen, "there was something to mend"
        assert scene.pipeline.ask("dead-letters", "replay").returncode == 0  # while changes come
        execute(scene.pipeline.url, *(story(chance) for _ in range(25)))
        execute(scene.pipeline.url, "UPDATE things SET amount = 9 WHERE amount = 'NaN'")
        assert scene.settled(applying)
        if letters(scene):
            replay(scene)
        scene.assert_equal(applying, "things")
        assert letters(scene) == []


def test_a_load_of_the_whole_table_clears_its_letters(scene: Scene) -> None:
    with scene.loader() as applying:
        wait_for_state(applying, "things", TableState.LIVE)
        execute(scene.pipeline.url, BAD.format(3))
        assert scene.settled(applying)
        assert len(letters(scene)) == 1
        execute(scene.pipeline.url, "UPDATE things SET amount = 1 WHERE id = 3")
        assert scene.pipeline.ask("snapshot", "public.things").returncode == 0
        assert eventually(lambda: not letters(scene))
        scene.assert_equal(applying, "things")
        assert letters(scene) == []


def test_a_table_that_begins_empty_has_no_letters_of_the_one_before_it(scene: Scene) -> None:
    with scene.loader() as applying:
        wait_for_state(applying, "things", TableState.LIVE)
        execute(scene.pipeline.url, BAD.format(3))
        assert scene.settled(applying)
        assert len(letters(scene)) == 1
        shutil.rmtree(managed_table(applying, "things").location.path)
    mode = scene.settings.load.model_copy(update={"mode": "schema_only"})
    scene.settings = scene.settings.model_copy(update={"load": mode})
    with scene.loader() as applying:
        wait_for_state(applying, "things", TableState.LIVE)
        assert (rows(applying), letters(scene)) == ({}, [])
        execute(scene.pipeline.url, "UPDATE things SET amount = 7 WHERE id = 3")
        assert scene.settled(applying)
        assert (rows(applying)[3]["amount"], letters(scene)) == (7, [])


def test_forgotten_letters_are_gone_and_the_row_stays(scene: Scene) -> None:
    with scene.loader() as applying:
        wait_for_state(applying, "things", TableState.LIVE)
        execute(scene.pipeline.url, BAD.format(3), BAD.format(4))
        assert scene.settled(applying)
        first, second = letters(scene)
        said = scene.pipeline.ask("dead-letters", "list", "public.things", "--forget", "--seq", str(first["seq"]))
        assert said.stdout == "public.things: 1 dead letter dropped; the rows stay as they are\n"
        assert [letter["seq"] for letter in letters(scene)] == [second["seq"]]
        assert rows(applying)[3]["amount"] == 3


def test_without_letters_a_row_that_the_table_lacks_is_read_again_by_itself(scene: Scene) -> None:
    tables = scene.settings.tables.model_copy(update={"on_bad_row": "stop"})
    scene.settings = scene.settings.model_copy(update={"tables": tables})
    with scene.loader() as applying:
        wait_for_state(applying, "things", TableState.LIVE)
        publication = applying._source.settings.publication
        execute(
            scene.pipeline.url,
            f"ALTER PUBLICATION {publication} DROP TABLE things",
            "INSERT INTO things VALUES (40, 1, repeat('z', 4000)), (41, 1, repeat('y', 4000))",
            f"ALTER PUBLICATION {publication} ADD TABLE things",
            "UPDATE things SET amount = 2 WHERE id = 40; DELETE FROM things WHERE id = 41",
            "UPDATE things SET id = 42 WHERE id = 40",
            "UPDATE things SET amount = 3 WHERE id = 42",
        )
        scene.assert_equal(applying, "things")
        assert (rows(applying)[42]["large"], 40 in rows(applying)) == ("z" * 4000, False)
        wait_for_state(applying, "things", TableState.LIVE)
        here = managed_table(applying, "things")
        assert here.applied_position is not None
        spans = applying.registry.load_store.ahead_ranges(here.applied_position.load or "")
        assert spans
        assert (here.ahead_of_position, applying.registry.index.position >= spans[-1].end) == (False, True)


def test_a_table_that_holds_rows_which_do_not_fit_is_loaded_without_them(scene: Scene) -> None:
    execute(scene.pipeline.url, BAD.format(3), BAD.format(4), BAD.format(5), BAD.format(6))
    with scene.loader() as applying:
        wait_for_state(applying, "things", TableState.LIVE)
        assert sorted(rows(applying)) == [1, 2, *range(7, 21)]
        found = letters(scene, "--payload")
        assert [letter["payload"]["values"]["id"] for letter in found] == [3, 4, 5, 6]
        first = found[0]
        assert (first["operation"], first["code"], first["payload"]["unfit"]) == ("read", "value-unfit", ["amount"])
        assert first["payload"]["values"]["amount"] == "NaN"
        assert "column=amount" in first["cause"]

        # What builds on a row that is not there is set aside too; what brings all of it, or takes it away, clears it.
        execute(
            scene.pipeline.url,
            "UPDATE things SET amount = 3 WHERE id = 3",
            "DELETE FROM things WHERE id = 4",
            "UPDATE things SET amount = 5, large = 'all' WHERE id = 5",
        )
        assert scene.settled(applying)
        assert [letter["operation"] for letter in letters(scene)] == ["read", "read", "update"]
        assert sorted(rows(applying)) == [1, 2, 5, *range(7, 21)]
        replay(scene)
        assert (rows(applying)[3]["amount"], rows(applying)[3]["large"]) == (3, "x" * 4000)
        (left,) = letters(scene)
        assert (left["operation"], left["seq"] < 0) == ("read", True)

        scene.pipeline.ask("snapshot", "public.things")  # finds the one that was not mended again, and only that
        assert eventually(lambda: [letter["seq"] for letter in letters(scene)] not in ([], [left["seq"]]))
        execute(scene.pipeline.url, "UPDATE things SET amount = 6, large = 'all' WHERE id = 6")
        scene.assert_equal(applying, "things")
        assert letters(scene) == []


def test_a_load_that_stops_at_a_row_holds_nothing_at_the_source(scene: Scene) -> None:
    execute(scene.pipeline.url, BAD.format(3))
    tables = scene.settings.tables.model_copy(update={"on_bad_row": "stop"})
    scene.settings = scene.settings.model_copy(update={"tables": tables})
    with scene.loader() as applying:
        wait_for_state(applying, "things", TableState.FAILED)
        error = managed_table(applying, "things").error
        assert error is not None
        assert (error.code, DeadLetterStore(scene.settings.log.path, THINGS).has_any) == ("value-unfit", False)
        assert eventually(lambda: not temporary_slots(scene))


def temporary_slots(scene: Scene) -> list[Any]:
    with psycopg.connect(scene.pipeline.url, autocommit=True) as connection:
        found = connection.execute(
            "select slot_name from pg_replication_slots where temporary and database = current_database()"
        )
        return found.fetchall()


def versions(applying: Local, key: int) -> list[tuple[Any, bool]]:
    """A row's amounts, oldest first, and which is current."""
    table = managed_table(applying, "things").location
    found = [row for file in table.open().files() for row in pq.read_table(table.path / file).to_pylist()]
    mine = sorted((row for row in found if row["id"] == key), key=lambda row: (row["_valid_from"], row["_seq"]))
    return [(row["amount"], row["_current"]) for row in mine]


def test_a_history_goes_on_without_versions_that_do_not_fit_and_keeps_their_letters(scene: Scene) -> None:
    execute(scene.pipeline.url, BAD.format(3))
    scene.read_settings().set_tables("mode: history")
    with scene.loader() as applying:
        wait_for_state(applying, "things", TableState.LIVE)
        assert versions(applying, 3) == [], "a row that a load could not bring"
        execute(
            scene.pipeline.url,
            BAD.format(4),
            "UPDATE things SET amount = 40 WHERE id = 4",
            "UPDATE things SET amount = 30, large = 'all' WHERE id = 3",
        )
        assert scene.settled(applying)
        assert (versions(applying, 3), versions(applying, 4)) == ([(30, True)], [(4, True)])
        assert [(one["operation"], one["passed"]) for one in letters(scene)] == [
            ("read", True),
            ("update", False),
            ("update", False),
        ]
        merged = len(applying._pace._merges)
        replay(scene)
        assert versions(applying, 4) == [(4, False), (40, True)]
        assert len(applying._pace._merges) > merged, "what is put in beside the micro-batches is rested for, too"
        assert [(one["operation"], one["passed"]) for one in letters(scene)] == [("read", True), ("update", True)]

        # A load finds the row as it is now, and never what it was in between.
        execute(scene.pipeline.url, BAD.format(5), "UPDATE things SET amount = 50 WHERE id = 5")
        assert scene.settled(applying)
        load = managed_table(applying, "things").last_load
        scene.pipeline.ask("snapshot", "public.things")
        assert eventually(lambda: managed_table(applying, "things").last_load is not load)
        assert scene.settled(applying)
        assert versions(applying, 5) == [(5, False), (50, True)]
        assert [one["passed"] for one in letters(scene)] == [True] * 4
        assert "cannot be replayed" in scene.pipeline.ask("dead-letters", "replay").stdout


def test_a_row_that_does_not_fit_is_not_marked_as_deleted_when_its_table_is_loaded_again(scene: Scene) -> None:
    """A rewrite has the table carried over and loaded; what it holds of the row stays."""
    scene.read_settings().set_tables("soft_delete: true")
    with scene.loader() as applying:
        wait_for_state(applying, "things", TableState.LIVE)
        execute(scene.pipeline.url, BAD.format(3), "DELETE FROM things WHERE id = 5")
        assert scene.settled(applying)
        load = managed_table(applying, "things").last_load
        execute(scene.pipeline.url, "ALTER TABLE things ADD c serial")
        assert eventually(lambda: managed_table(applying, "things").last_load is not load)
        assert scene.settled(applying)
        assert managed_table(applying, "things").state is TableState.LIVE
        found = rows(applying)
        assert sorted(key for key, row in found.items() if row["_deleted"]) == [5]
        assert (found[3]["amount"], found[3]["c"], found[4]["c"] is None) == (3, None, False)
        assert [letter["operation"] for letter in letters(scene)] == ["read"]
        execute(scene.pipeline.url, "UPDATE things SET amount = 33, large = 'all' WHERE id = 3")
        assert scene.settled(applying)
        assert (rows(applying)[3]["amount"], rows(applying)[3]["_deleted"], letters(scene)) == (33, False, [])
