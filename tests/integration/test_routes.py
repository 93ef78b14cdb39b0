"""Tables of other names than the source's, in a pipeline on a real server: they hold what the rules say, however they
come to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq
import pytest

from tailrace.changelog.read.reader import ChangeLog
from tailrace.deadletters.store import DeadLetterStore
from tailrace.model.schema import TableId
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.pipeline.config.settings_file import load_settings
from tailrace.tables.location import TableLocation
from tests.support.loads import LOADED_SECONDS_MAX, Local, Scene, once
from tests.support.pipelines import Pipeline, eventually, execute
from tests.support.thorough import thorough

TABLES = """
CREATE TABLE orders (id int PRIMARY KEY, x int, note text);
ALTER TABLE orders ALTER note SET STORAGE EXTERNAL;
INSERT INTO orders SELECT g, 0, 'note-' || repeat('n', 3000) FROM generate_series(1, 200) g;
CREATE TABLE people (id int PRIMARY KEY, country text, x int, note text);
ALTER TABLE people ALTER note SET STORAGE EXTERNAL;
INSERT INTO people SELECT g, CASE g % 2 WHEN 0 THEN 'DE' ELSE 'FR' END, 0, 'note-' || repeat('p', 3000)
  FROM generate_series(1, 200) g;
CREATE TABLE plain (id int PRIMARY KEY);
INSERT INTO plain VALUES (1);
ANALYZE orders, people
"""
RULES = """\
transforms:
  rules:
    - {do: route, tables: ["public.orders"], to: shop.sales}
    - {do: route, tables: ["public.people"], to: "de.{table}", when: "country == 'DE'"}
"""
HOLDS = {
    ("shop", "sales"): "SELECT * FROM orders", ("de", "people"): "SELECT * FROM people WHERE country = 'DE'",
    ("public", "people"): "SELECT * FROM people WHERE country IS DISTINCT FROM 'DE'",
    ("public", "plain"): "SELECT * FROM plain",
}  # fmt: skip
"""What each table of the lake is, in the source's words."""


def with_rules(scene: Scene, text: str) -> Scene:
    scene.pipeline.file.write_text(scene._file + text)
    read = load_settings(scene.pipeline.file)
    scene.settings = scene.settings.model_copy(update={"transforms": read.transforms, "tables": read.tables})
    return scene


def wanted(url: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
    with psycopg.connect(url, row_factory=psycopg.rows.dict_row) as connection:
        return {table: connection.execute(f"{query} ORDER BY id").fetchall() for table, query in HOLDS.items()}


def read(place: TableLocation) -> list[dict[str, Any]]:
    table = place.open()
    shape = table.schema()
    assert shape is not None, place.path
    bare = dict.fromkeys(shape.names)  # a file may be older than a column
    rows = [bare | row for file in table.files() for row in pq.read_table(place.path / file).to_pylist()]
    return sorted(rows, key=lambda row: int(row["id"]))


def found(applying: Local) -> dict[tuple[str, str], list[dict[str, Any]]]:
    return {
        (managed.table.schema, managed.table.name): read(managed.location)
        for managed in list(applying.registry.tables.values())
    }


def found_in(settings: PipelineSettings, *tables: tuple[str, str]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The same where nobody applies."""
    log_id = ChangeLog.open(settings.log.path).log_id
    return {table: read(settings.tables.layout.location(TableId(*table), log_id)) for table in tables}


def assert_equal(scene: Scene, applying: Local) -> None:
    assert_settled(scene, applying)
    assert found(applying) == wanted(scene.pipeline.url)


def assert_settled(scene: Scene, applying: Local) -> None:
    # What is written while a load is under way comes after the first time.
    settled = scene.settled(applying) and scene.settled(applying)
    states = [(str(managed.table), managed.state, managed.error) for managed in applying.registry.tables.values()]
    assert settled, states
    assert not any(state.is_blocked for _, state, _ in states), states


MEANWHILE = (
    "UPDATE people SET country = 'DE', x = 1 WHERE id IN (1, 3, 199)", "UPDATE people SET country = 'FR' WHERE id = 2",
    "UPDATE people SET id = 1000, country = 'FR' WHERE id = 4", "DELETE FROM people WHERE id IN (5, 6)",
    "UPDATE orders SET id = 1001 WHERE id = 2", "UPDATE orders SET x = 1 WHERE id IN (1001, 5, 198)",
    "INSERT INTO people VALUES (500, 'DE', 5, 'new'), (501, NULL, 5, 'new')", "DELETE FROM orders WHERE id = 9",
)  # fmt: skip
LATER = (
    "UPDATE people SET country = 'DE' WHERE id IN (7, 11)",
    "UPDATE people SET country = NULL WHERE id = 8", "UPDATE people SET id = 12000, x = 3 WHERE id = 12",
    "UPDATE orders SET x = 7 WHERE id < 20", "INSERT INTO orders VALUES (300, 3, 'later')",
)  # fmt: skip


@pytest.mark.parametrize(("way", "identity"), [("exact", "FULL"), ("chunked", "DEFAULT")])
def test_loads_changes_and_restarts_leave_each_table_with_what_the_rules_say(
    database: str, tmp_path: Path, way: str, identity: str
) -> None:
    url = database
    execute(url, *TABLES.strip().split(";\n"), f"ALTER TABLE people REPLICA IDENTITY {identity}")
    with with_rules(Scene(tmp_path, url, way=way), RULES) as scene:
        with scene.loader(after=once(lambda: execute(url, *MEANWHILE), at=1)) as applying:
            assert_equal(scene, applying)
            execute(url, *LATER)
            assert_equal(scene, applying)
            # Away and back, between two looks, without the large value.
            applying.by_hand = True
            execute(url, *(f"UPDATE people SET country = '{country}' WHERE id = 7" for country in ("FR", "DE")))
            scene.wait_for_capture()
            applying.by_hand = False
            assert_equal(scene, applying)
        # What comes while nobody applies, a column more, and rows that go.
        execute(
            url,
            "ALTER TABLE people ADD COLUMN extra int DEFAULT 4",
            "ALTER TABLE orders ADD COLUMN extra text",
            "UPDATE people SET country = 'DE', extra = 5 WHERE id = 13",
            "INSERT INTO orders VALUES (301, 1, 'x', 'y')",
        )
        with scene.loader() as applying:
            assert_equal(scene, applying)
            assert not applying.chunks, "nothing is loaded twice"
            execute(url, "TRUNCATE people", "INSERT INTO people VALUES (1, 'DE', 1, 'a'), (2, 'FR', 1, 'b')")
            assert_equal(scene, applying)


OUTBOX = """
CREATE TABLE outbox (id int PRIMARY KEY, aggregatetype text, payload text);
INSERT INTO outbox VALUES (1, 'order', 'a'), (2, 'bill', 'b'), (3, 'order', 'c'), (4, 'Old/One', 'd')
"""
SENT = """\
transforms:
  rules:
    - {do: outbox, tables: ["public.outbox"], to: "events.{type}"}
    - {do: mask, tables: ["public.outbox"], columns: [payload]}
"""


def messages(applying: Local) -> dict[str, list[int]]:
    return {str(TableId(*table)): [row["id"] for row in rows] for table, rows in found(applying).items()}


@pytest.mark.parametrize("key", ["PRIMARY KEY", "UNIQUE"])
def test_messages_of_an_outbox_stay_whatever_becomes_of_its_rows(database: str, tmp_path: Path, key: str) -> None:
    execute(database, *OUTBOX.replace("PRIMARY KEY", key).strip().split(";\n"))
    with with_rules(Scene(tmp_path, database), SENT) as scene:
        # One that came, and was gone, before anybody applied; one of a type that nobody knew, gone at once.
        execute(
            database,
            "INSERT INTO outbox VALUES (5, 'order', 'e')",
            "DELETE FROM outbox WHERE id = 5",
            "BEGIN; INSERT INTO outbox VALUES (6, 'note', 'f'); DELETE FROM outbox WHERE id = 6; COMMIT",
        )
        scene.wait_for_capture()
        with scene.loader() as applying:
            assert_settled(scene, applying)
            first = {"events.order": [1, 3, 5], "events.bill": [2], "events.note": [6], "events.Old/One": [4]}
            assert messages(applying) == first
            execute(
                database,
                "INSERT INTO outbox VALUES (7, 'order', 'g'), (8, 'new', 'h')",
                "DELETE FROM outbox",
                "INSERT INTO outbox VALUES (9, 'new', 'i')",
                "UPDATE outbox SET id = 10 WHERE id = 9",
                "TRUNCATE outbox",
            )
            assert_settled(scene, applying)
            then = first | {"events.order": [1, 3, 5, 7], "events.new": [8, 9]}
            assert messages(applying) == then
        execute(
            database,
            "ALTER TABLE outbox ADD COLUMN trace text",
            "INSERT INTO outbox VALUES (11, 'note', 'j', 't')",
            "DELETE FROM outbox",
            "INSERT INTO outbox VALUES (12, 'new', 'k', 'u')",
        )
        with scene.loader() as applying:
            assert_settled(scene, applying)
            last = then | {"events.note": [6, 11], "events.new": [8, 9, 12]}
            assert messages(applying) == last
            # Asked for by a person, too, nothing goes; and what the log did not tell of comes.
            source = applying._source.settings
            publication = source.publication if key == "PRIMARY KEY" else source.publication_inserts
            execute(
                database,
                f"ALTER PUBLICATION {publication} DROP TABLE outbox",
                "INSERT INTO outbox VALUES (13, 'note', 'l', 'v')",
                f"ALTER PUBLICATION {publication} ADD TABLE outbox",
            )
            done = scene.pipeline.ask("snapshot", "events.*")
            assert done.returncode == 0, done.stderr
            assert eventually(lambda: messages(applying).get("events.note") == [6, 11, 13], seconds=LOADED_SECONDS_MAX)
            assert_settled(scene, applying)
            assert messages(applying) == last | {"events.note": [6, 11, 13]}
            rows = found(applying)
        assert rows["events", "note"][2] == {"id": 13, "payload": "*", "trace": "v"}
        names = {(table["schema"], table["table"]) for table in scene.pipeline.status()["tables"]}
        assert names == rows.keys()
        for name in ("events.note", "events.new"):
            done = scene.pipeline.ask("rebuild", name)
            assert done.returncode == 0, done.stderr
        assert found_in(scene.settings, *rows) == rows


SOME = """\
transforms:
  rules:
    - {do: outbox, tables: ["public.outbox"], to: "events.{type}", when: "payload != 'test'"}
    - {do: unwrap, tables: ["public.people"], deletes: mark, marker: left, when: "country == 'DE'"}
    - {do: cast, tables: ["public.people"], columns: [x], to: string, when: "country == 'DE'"}
"""


def test_rules_are_for_the_rows_of_which_their_condition_is_true(database: str, tmp_path: Path) -> None:
    execute(
        database,
        *OUTBOX.strip().split(";\n"),
        "INSERT INTO outbox VALUES (5, 'order', 'test')",
        "CREATE TABLE people (id int PRIMARY KEY, country text, x int)",
        "ALTER TABLE people REPLICA IDENTITY FULL",
        "INSERT INTO people VALUES (1, 'DE', 1), (2, 'FR', 2)",
    )
    with with_rules(Scene(tmp_path, database), SOME) as scene, scene.loader() as applying:
        assert_settled(scene, applying)
        execute(
            database,
            "INSERT INTO people VALUES (3, 'DE', 3), (4, 'FR', 4)",
            "DELETE FROM people WHERE id <> 4",
            "INSERT INTO outbox VALUES (6, 'bill', 'f'), (7, 'bill', 'test')",
            "DELETE FROM outbox",
        )
        assert_settled(scene, applying)
        rows = found(applying)
    people = [(row["id"], row["x"], row["left"]) for row in rows.pop(("public", "people"))]
    assert people == [(1, "1", True), (3, "3", True), (4, "4", None)]
    assert {name: [row["id"] for row in some] for (_, name), some in rows.items()} == {
        "order": [1, 3],
        "bill": [2, 6],
        "Old/One": [4],
    }


def test_the_tools_know_a_table_by_the_name_that_a_rule_gave_it(database: str, tmp_path: Path) -> None:
    execute(database, *TABLES.strip().split(";\n"))
    scene = with_rules(Scene(tmp_path, database), RULES)
    with scene:
        with scene.loader() as applying:
            assert_equal(scene, applying)
            execute(database, *MEANWHILE, "ALTER TABLE people ADD COLUMN extra int DEFAULT 4")
            assert_equal(scene, applying)
            done = scene.pipeline.ask("snapshot", "de.people", "--where", "id < 50")
            assert done.returncode == 0, done.stderr
            assert_equal(scene, applying)
        for name in ("shop.sales", "de.people"):
            done = scene.pipeline.ask("rebuild", name)
            assert done.returncode == 0, done.stderr
        assert found_in(scene.settings, *HOLDS) == wanted(database)
        assert "public.orders" not in scene.pipeline.ask("status").stdout
        assert "is not a table of this pipeline" in scene.pipeline.ask("rebuild", "public.orders").stderr
        assert "matches no table" in scene.pipeline.ask("snapshot", "public.orders").stderr
    # Another condition: both tables of the rule are loaded anew, and nobody is surprised.
    with_rules(scene, RULES.replace("'DE'", "'FR'"))
    told = scene.pipeline.ask("evolve", "--dry-run", "--json").stdout
    said = {f"{table['schema']}.{table['table']}": table["action"] for table in json.loads(told)["tables"]}
    assert said == {"shop.sales": "none", "de.people": "refresh", "public.people": "refresh", "public.plain": "none"}
    with scene, scene.loader() as applying:
        there = [row for row in wanted(database)["public", "people"] if row["country"] == "FR"]
        assert eventually(lambda: found(applying)["de", "people"] == there, seconds=LOADED_SECONDS_MAX)


def test_a_row_that_a_rule_fails_at_is_a_letter_of_the_table_that_it_was_sent_to(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE codes (id int PRIMARY KEY, code text)", "INSERT INTO codes VALUES (1, '1')")
    scene = Scene(tmp_path, database).set_tables("on_bad_row: dead-letter").read_settings()
    rules = """\
transforms:
  rules:
    - {do: cast, tables: ["public.codes"], columns: [code], to: int32, on_error: dead-letter}
    - {do: route, tables: ["public.codes"], to: shop.numbers}
"""
    with with_rules(scene, rules), scene.loader() as applying:
        assert_settled(scene, applying)
        execute(database, "INSERT INTO codes VALUES (2, 'two')")
        assert_settled(scene, applying)
        (letter,) = json.loads(scene.pipeline.ask("dead-letters", "list", "--json").stdout)["letters"]
        assert (letter["schema"], letter["table"]) == ("shop", "numbers")
        execute(database, "UPDATE codes SET code = '2' WHERE id = 2")
        assert scene.pipeline.ask("dead-letters", "replay", "shop.numbers").returncode == 0
        waiting = DeadLetterStore(scene.settings.log.path, TableId("shop", "numbers"))
        assert eventually(lambda: waiting.replay_requested_at is None)
        assert_settled(scene, applying)
        assert found(applying) == {("shop", "numbers"): [{"id": 1, "code": 1}, {"id": 2, "code": 2}]}


@thorough
def test_killed_while_it_loads_and_while_it_applies_a_pipeline_comes_to_what_the_rules_say(
    database: str, tmp_path: Path
) -> None:
    execute(database, *TABLES.strip().split(";\n"), *OUTBOX.strip().split(";\n"))
    pipeline, hits = Pipeline(tmp_path, database), tmp_path / "hits"
    pipeline.file.write_text(pipeline.file.read_text() + RULES + SENT.partition("rules:\n")[2])

    def run_into(place: str) -> None:
        armed = {"TAILRACE_FAILPOINT": place, "TAILRACE_FAILPOINT_LOG": str(hits)}
        running = pipeline.start("run", environment=armed)
        try:
            assert running.wait() == -9, running.said()
        finally:
            running.end()

    run_into("load.landed:2")
    gone = "DELETE FROM outbox WHERE id > 4"  # what the log has; the others nobody has read yet
    execute(database, *MEANWHILE, "INSERT INTO outbox VALUES (5, 'order', 'e'), (6, 'late', 'f')", gone)
    run_into("table.after_commit:3")
    execute(database, *LATER, "INSERT INTO outbox VALUES (7, 'late', 'g')", gone)
    pipeline.catch_up()
    settings = load_settings(pipeline.file)
    assert found_in(settings, *HOLDS) == wanted(database)
    there = found_in(settings, *(("events", name) for name in ("order", "late")))
    assert {name: [row["id"] for row in rows] for (_, name), rows in there.items()} == {
        "order": [1, 3, 5],
        "late": [6, 7],
    }
