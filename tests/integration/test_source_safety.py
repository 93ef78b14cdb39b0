"""The application at the source is never disturbed, and a load sees what the stream sees."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from tailrace.capture.postgres.config import PostgresSettings
from tailrace.capture.postgres.snapshot import ExactSnapshot
from tailrace.capture.postgres.source import PostgresCapture
from tailrace.demo.server import EmbeddedPostgres
from tailrace.errors import ConfigError, SourceRefused
from tailrace.model.schema import TableId
from tailrace.pipeline.capture.log_capture import LogCapture
from tailrace.pipeline.config.settings_file import load_settings
from tailrace.spark.datasource.option_values import as_option_error
from tests.support.pipelines import Pipeline, eventually, execute

SLOT_IS_MADE = "select from pg_stat_activity where datname = current_database() and query like 'CREATE_REPLICATION%'"
SLOTS = "select from pg_replication_slots where database = current_database()"


def capture_of(url: str, *names: str) -> PostgresCapture:
    wanted = {TableId("public", name) for name in names}
    return PostgresCapture(
        PostgresSettings(url=url, wanted=lambda table: table in wanted, slot="mine", publication="mine")
    )


def rows_of(url: str, name: str) -> list[dict[str, object]]:
    with ExactSnapshot(url, ("mine", "mine_inserts")) as snapshot, snapshot.reader() as reader:
        schema = reader.describe(TableId("public", name))
        return [row for batch in reader.rows(schema) for row in batch.to_pylist()]


def test_the_application_can_update_and_delete_in_every_table_that_is_captured(database: str) -> None:
    execute(
        database,
        "CREATE TABLE keyless (id int)",
        "CREATE TABLE nothing (id int PRIMARY KEY)",
        "ALTER TABLE nothing REPLICA IDENTITY NOTHING",
        "CREATE TABLE deferred (id int PRIMARY KEY DEFERRABLE)",
        "CREATE TABLE parent (id int PRIMARY KEY)",
        "CREATE TABLE child () INHERITS (parent)",
        "CREATE TABLE root (id int) PARTITION BY RANGE (id)",
        "ALTER TABLE root REPLICA IDENTITY FULL",
        "CREATE TABLE leaf PARTITION OF root FOR VALUES FROM (0) TO (100)",
        "CREATE TABLE good (id int PRIMARY KEY)",
    )
    names = ["keyless", "nothing", "deferred", "parent", "child", "root", "good"]
    capture = capture_of(database, *names)
    capture.prepare(None)
    for name in names:
        execute(database, f"INSERT INTO {name} VALUES (1)", f"UPDATE {name} SET id = 2", f"DELETE FROM {name}")
    published = {table.name: publications for table, publications in capture.publications_by_table().items()}
    told = {"parent", "good"}
    assert {name for name, where in published.items() if where == {"mine"}} == told
    assert {name for name, where in published.items() if where == {"mine_inserts"}} == set(names) - told
    capture.drop()


def test_a_child_that_is_not_wanted_is_not_published_with_its_parent(database: str) -> None:
    execute(database, "CREATE TABLE parent (id int PRIMARY KEY)", "CREATE TABLE child () INHERITS (parent)")
    capture = capture_of(database, "parent")
    capture.prepare(None)
    assert set(capture.publications_by_table()) == {TableId("public", "parent")}
    execute(database, "INSERT INTO parent VALUES (1)", "INSERT INTO child VALUES (2)")
    assert rows_of(database, "parent") == [{"id": 1}]
    capture.drop()


def test_who_asks_for_no_table_at_all_is_refused_and_nothing_is_made_or_unpublished(database: str) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)")
    nobody = capture_of(database, "nobody")
    with pytest.raises(ConfigError, match="no table at the source matches") as caught:
        nobody.prepare(None)
    assert as_option_error(caught.value).hint == "Check the option `tables`, case included."
    with psycopg.connect(database) as connection:
        assert connection.execute("SELECT count(*) FROM pg_publication").fetchone() == (0,)
    capture = capture_of(database, "t")
    capture.prepare(None)
    with pytest.raises(ConfigError, match="no table at the source matches"):
        nobody.prepare(None)
    assert set(capture.publications_by_table()) == {TableId("public", "t")}, "what was published goes on"
    capture.drop()


def test_a_load_that_a_policy_would_filter_is_refused(server: EmbeddedPostgres, database: str) -> None:
    execute(
        database,
        "CREATE TABLE t (id int PRIMARY KEY)",
        "INSERT INTO t VALUES (1), (2)",
        "CREATE PUBLICATION mine FOR TABLE t",
        "ALTER TABLE t ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY one ON t USING (id = 1)",
        "DROP ROLE IF EXISTS reader",
        "CREATE ROLE reader LOGIN REPLICATION",
        "GRANT SELECT ON t TO reader",
    )
    url = server.url(database.rpartition("/")[2], user="reader")
    with pytest.raises(SourceRefused, match="row-level security") as caught:
        rows_of(url, "t")
    assert "BYPASSRLS" in caught.value.hint
    execute(database, "DROP OWNED BY reader", "DROP ROLE reader")


def test_a_load_has_the_columns_and_rows_that_the_publication_has(database: str) -> None:
    execute(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, secret text, x int)",
        "INSERT INTO t VALUES (1, 'no', 2)",
        "CREATE TABLE picked (id int PRIMARY KEY)",
        "INSERT INTO picked SELECT generate_series(1, 7)",
        "CREATE PUBLICATION mine FOR TABLE t (id, x), picked WHERE (id > 5)",
    )
    assert rows_of(database, "t") == [{"id": 1, "x": 2}]
    assert rows_of(database, "picked") == [{"id": 6}, {"id": 7}]


def test_what_a_role_or_database_sets_does_not_change_a_value(database: str) -> None:
    name = database.rpartition("/")[2]
    execute(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, tz timestamptz, d date, i interval, f float8, b bytea)",
        "INSERT INTO t VALUES (1, '2024-03-05 06:07:08+00', '2024-03-05', '1 day 2 hours', 0.1, '\\xff')",
        "CREATE PUBLICATION mine FOR TABLE t",
    )
    plain = rows_of(database, "t")
    settings = {
        "datestyle": "German",
        "timezone": "Asia/Tokyo",
        "intervalstyle": "iso_8601",
        "extra_float_digits": "-10",
        "bytea_output": "escape",
    }
    execute(database, *(f"ALTER DATABASE {name} SET {key} = '{value}'" for key, value in settings.items()))
    assert rows_of(database, "t") == plain


def test_who_is_stopped_while_a_slot_waits_for_others_leaves_none(database: str, tmp_path: Path) -> None:
    """Nobody at the server would notice, and the slot would be made when they end, for nobody."""
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)")
    with psycopg.connect(database) as writer, psycopg.connect(database, autocommit=True) as looking:
        writer.execute("INSERT INTO t VALUES (1)")

        def count(query: str) -> int:
            return len(looking.execute(query.encode()).fetchall())

        running = Pipeline(tmp_path / "one", database).start("capture")
        try:
            assert eventually(lambda: count(SLOT_IS_MADE) == 1), running.said()
            running.process.terminate()
            assert running.wait() == 0, running.said()
            assert "stopped before it started" in running.said()
        finally:
            running.end()
        assert eventually(lambda: count(SLOT_IS_MADE) == 0)
        assert count(SLOTS) == 0


@pytest.mark.timeout(60)
def test_what_nobody_foresaw_beside_a_capture_ends_it(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)")
    capturing = LogCapture(load_settings(Pipeline(tmp_path, database).file), until_caught_up=False)

    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(capturing.source, "publish_new", broken)
    with pytest.raises(ZeroDivisionError):
        capturing.run(lambda: False)
