"""Every policy that is no default, on a real server: each table has its own, and does as it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tailrace.errors import SchemaChanged
from tailrace.pipeline.report import TableState
from tests.integration.test_evolution import ALTERS, SETTLED_SECONDS_MAX, assert_equal, make, run, settled
from tests.support.engines import rows_of
from tests.support.loads import Scene, managed_table
from tests.support.pipelines import eventually

NARROWED = {
    "integer": ALTERS["narrow"], "numeric": ALTERS["narrow-numeric"],
    "varchar": "ALTER TABLE {t} ALTER v TYPE varchar(3)", "text": "ALTER TABLE {t} ALTER b TYPE varchar(20)",
    "time": "ALTER TABLE {t} ADD w timestamp; ALTER TABLE {t} ALTER w TYPE timestamp(0)",
}  # fmt: skip
STOPS = {
    "key_stop": ("{key: stop}", ALTERS["key"], "key", "another key"),
    "recreate_stop": ("{recreate: stop}", ALTERS["recreate"], "recreate", "dropped and created again"),
    "rewrite_stop": ("{rewrite: stop}", ALTERS["retype-using"], "rewrite", "its rows were rewritten"),
    "retype_stop": ("{retype: stop}", ALTERS["retype"], "retype", "retyped a"),
    "narrow_untold": ("{retype: stop}", ALTERS["narrow"], "retype", "narrowed a"),
    "narrow_unwidened": ("{widen: stop}", NARROWED["varchar"], "widen", "narrowed v"),
    "narrow_integer": ("{narrow: stop}", NARROWED["integer"], "narrow", "narrowed a"),
    "narrow_numeric": ("{narrow: stop}", NARROWED["numeric"], "narrow", "narrowed n"),
    "narrow_varchar": ("{narrow: stop}", NARROWED["varchar"], "narrow", "narrowed v"),
    "narrow_text": ("{narrow: stop}", NARROWED["text"], "narrow", "narrowed b"),
}
"""By table: its policies, what is done to it, the kind that stops it, and what is said."""
LOADED = {
    "add_refresh": ("{add: refresh}", ALTERS["add"]),
    "drop_refresh": ("{drop: refresh}", ALTERS["drop"]),
    "rename_refresh": ("{rename: refresh}", ALTERS["rename"]),
    "widen_refresh": ("{widen: refresh}", ALTERS["widen-text"]),
    "narrow_refresh": ("{narrow: refresh, retype: stop}", ALTERS["narrow"]),
}
APPLIED = {"drop_apply": ("{drop: apply}", ALTERS["drop"])}
DONE = {**{table: (said, alter) for table, (said, alter, _, _) in STOPS.items()}, **LOADED, **APPLIED}


@pytest.mark.timeout(SETTLED_SECONDS_MAX + 480)
def test_each_table_does_what_its_own_policy_says_and_goes_on_once_that_is_another(
    database: str, tmp_path: Path
) -> None:
    make(database, *DONE)
    rules = ", ".join(f'"public.{table}": {{evolution: {said}}}' for table, (said, _) in DONE.items())
    with Scene(tmp_path, database, connections=2).set_tables(f"rules: {{{rules}}}") as scene:
        with scene.loader() as applying:
            assert scene.settled(applying)
        for table in DONE:
            run(database, table, "UPDATE {t} SET e = 1 WHERE id < 20")
        scene.wait_for_capture()
        for table, (_, alter) in DONE.items():
            run(database, table, alter)
            run(database, table, "INSERT INTO {t} VALUES (100, 1000)")
        scene.wait_for_capture()
        told = json.loads(scene.pipeline.ask("evolve", "--dry-run", "--json").stdout)["tables"]
        found = {table["table"]: table for table in told}
        for table, (_, _, kind, why) in STOPS.items():
            assert (found[table]["action"], found[table]["why"]) == ("stop", why)
            assert f"`evolution.{kind}` is `stop` for it." in found[table]["hint"]
        assert {found[table]["action"] for table in LOADED} == {"refresh"}
        assert "narrowed a" in found["narrow_refresh"]["why"]
        assert (found["drop_apply"]["action"], found["drop_apply"]["steps"]) == ("apply", ["drop b"])
        with scene.loader() as applying:
            assert settled(scene, applying, *LOADED, *APPLIED)
            for table in (*LOADED, *APPLIED):
                assert_equal(scene, table)
                assert (managed_table(applying, table).last_load is not None) == (table in LOADED)
            assert "b" not in rows_of(tmp_path / "lake" / "public" / "drop_apply").column_names
            for table, (_, _, _, why) in STOPS.items():
                stopped = managed_table(applying, table)
                assert eventually(lambda: stopped.state is TableState.FAILED), stopped  # noqa: B023
                assert isinstance(stopped.error, SchemaChanged)
                assert stopped.error.fields["change"] == why
                rows = rows_of(tmp_path / "lake" / "public" / table).to_pylist()
                assert sorted((row["id"], row["e"]) for row in rows) == [
                    (number, 1 if number < 20 else None) for number in range(1, 51)
                ], f"all of before is in {table}, and nothing of after"
        with scene.set_tables().loader() as applying:
            assert settled(scene, applying, *DONE)
            for table in STOPS:
                assert_equal(scene, table)


def test_digits_of_a_second_that_are_taken_away_stop_a_table_that_is_to_stop_at_less(
    database: str, tmp_path: Path
) -> None:
    make(database, "t")
    added, narrowed = NARROWED["time"].split("; ")
    run(database, "t", added)
    with Scene(tmp_path, database).set_tables("evolution: {narrow: stop}") as scene, scene.loader() as applying:
        assert scene.settled(applying)
        run(database, "t", "UPDATE {t} SET w = '2026-01-02 03:04:05.678'; " + narrowed)
        assert eventually(lambda: managed_table(applying, "t").state is TableState.FAILED)
        error = managed_table(applying, "t").error
        assert isinstance(error, SchemaChanged)
        assert error.fields["change"] == "narrowed w"


def test_a_table_that_is_made_again_beside_a_running_pipeline_stops_if_it_is_to(database: str, tmp_path: Path) -> None:
    """It is published anew, and what was not published for a while is loaded anew otherwise."""
    made = {"filled": ALTERS["recreate"], "empty": "DROP TABLE {t}; CREATE TABLE {t} (id int PRIMARY KEY, a text)"}
    make(database, *made)
    with Scene(tmp_path, database).set_tables("evolution: {recreate: stop}") as scene, scene.loader() as applying:
        assert scene.settled(applying)
        for table, statements in made.items():
            run(database, table, statements)
        for table in made:
            found = managed_table(applying, table)
            assert eventually(lambda: found.state is TableState.FAILED), found  # noqa: B023
            assert isinstance(found.error, SchemaChanged)
            assert found.error.fields["change"] == "dropped and created again"
            assert rows_of(tmp_path / "lake" / "public" / table).num_rows == 50
