"""A whole pipeline into Iceberg tables: loaded, changed, reshaped, killed; read by pyiceberg as the source has it."""

from __future__ import annotations

import signal
from pathlib import Path

import psycopg

from tailrace.tables.catalogs import newest_file
from tests.support.engines import only_iceberg
from tests.support.pipelines import Pipeline, execute

pytestmark = only_iceberg

SOURCE = """
CREATE TABLE orders (id int PRIMARY KEY, name text, big text, at timestamp, tz timestamptz, n numeric(12, 3), l int[]);
ALTER TABLE orders ALTER big SET STORAGE EXTERNAL;
CREATE TABLE marks (a smallint, b text);
ALTER TABLE marks REPLICA IDENTITY FULL;
CREATE TABLE cleared (id int PRIMARY KEY, t text);
INSERT INTO orders SELECT g, 'n' || g, repeat('x', 5000), now(), now(), g, ARRAY[g] FROM generate_series(1, 50) g;
INSERT INTO marks VALUES (1, 'x'), (1, 'x'), (1, 'x'), (2, NULL);
INSERT INTO cleared VALUES (1, 'a');
"""
FIRST = [
    "UPDATE orders SET name = 'changed' WHERE id <= 10",
    "UPDATE orders SET id = 1000 WHERE id = 1",
    "DELETE FROM orders WHERE id = 2",
    "DELETE FROM marks WHERE ctid = (SELECT min(ctid) FROM marks)",
    "TRUNCATE cleared",
    "INSERT INTO cleared VALUES (2, 'b')",
    "ALTER TABLE orders ADD extra text DEFAULT 'filled'",
    "ALTER TABLE orders RENAME name TO title",
    "INSERT INTO orders (id, title) VALUES (2000, 'new')",
]
SECOND = ["UPDATE orders SET n = n + 1", "INSERT INTO marks VALUES (3, 'z')", "DELETE FROM cleared"]


def in_lake(pipeline: Pipeline, name: str) -> list[str]:
    from pyiceberg.table import StaticTable

    file = newest_file(pipeline.lake / "public" / name / "metadata")
    rows = StaticTable.from_metadata(str(file)).scan().to_arrow().to_pylist()
    return sorted(str(tuple(row.values())) for row in rows)


def at_source(url: str, name: str) -> list[str]:
    with psycopg.connect(url) as connection:
        connection.execute("set timezone = 'UTC'")
        return sorted(str(row) for row in connection.execute(f"select * from {name}".encode()).fetchall())


def as_utc(rows: list[str]) -> list[str]:
    """As both readers write an instant."""
    return [row.replace("zoneinfo.ZoneInfo(key='UTC')", "UTC").replace("datetime.timezone.utc", "UTC") for row in rows]


def assert_equal(pipeline: Pipeline, url: str, *names: str) -> None:
    for name in names:
        assert as_utc(in_lake(pipeline, name)) == as_utc(at_source(url, name)), name


def test_a_pipeline_keeps_iceberg_tables_through_its_life(database: str, tmp_path: Path) -> None:
    execute(database, *(line for line in SOURCE.split(";\n") if line.strip()))
    pipeline = Pipeline(tmp_path / "one", database)
    pipeline.file.write_text(pipeline.file.read_text().replace("format: delta", "format: iceberg"))
    tables = ("orders", "marks", "cleared")
    pipeline.catch_up()
    assert_equal(pipeline, database, *tables)
    execute(database, *FIRST)
    for point in ("table.before_commit", "table.after_commit"):
        armed = {"TAILRACE_FAILPOINT": f"{point}:2", "TAILRACE_FAILPOINT_LOG": str(tmp_path / "hits")}
        running = pipeline.start("run", "--until-caught-up", environment=armed)
        try:
            assert running.wait() == -signal.SIGKILL, running.said()
        finally:
            running.end()
    execute(database, *SECOND)
    pipeline.catch_up()
    assert_equal(pipeline, database, *tables)
    assert {table["state"] for table in pipeline.status()["tables"]} == {"live"}
