"""A whole pipeline into Iceberg tables: loaded, changed, reshaped, killed, mended, rebuilt; read by pyiceberg as the
source has it."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import psycopg

from tailrace.tables.iceberg.catalogs import newest_file
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
CREATE TABLE parted (id int PRIMARY KEY, region text, day date, n numeric(5, 1), big text);
ALTER TABLE parted ALTER big SET STORAGE EXTERNAL;
INSERT INTO parted
SELECT g, 'r/' || g % 3, date '2026-01-01' + g % 2, g, repeat('x', 5000) FROM generate_series(1, 30) g;
"""
RULES = """format: iceberg
  on_bad_row: dead-letter
  rules:
    "public.parted": {partition_by: [region, day]}"""
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
    "UPDATE parted SET region = NULL, day = day + 1 WHERE id < 7",
    "UPDATE parted SET n = 'NaN' WHERE id = 8",
    "INSERT INTO parted VALUES (100, '', NULL, 1, NULL)",
]
SECOND = [
    "UPDATE orders SET n = n + 1",
    "INSERT INTO marks VALUES (3, 'z')",
    "DELETE FROM cleared",
    "UPDATE parted SET n = 1, region = 'mended' WHERE id IN (8, 100)",
    "DELETE FROM parted WHERE id = 9",
]


def in_lake(pipeline: Pipeline, name: str) -> list[str]:
    from pyiceberg.table import StaticTable

    file = newest_file(pipeline.lake / "public" / name / "metadata")
    rows = StaticTable.from_metadata(str(file)).scan().to_arrow().to_pylist()
    return sorted(str(tuple(row.values())) for row in rows)


def letters(pipeline: Pipeline) -> int:
    return len(json.loads(pipeline.ask("dead-letters", "list", "--json").stdout)["letters"])


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
    pipeline.file.write_text(pipeline.file.read_text().replace("format: delta", RULES))
    tables = ("orders", "marks", "cleared", "parted")
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
    pipeline.catch_up()
    assert letters(pipeline) == 2
    execute(database, *SECOND)
    assert pipeline.ask("dead-letters", "replay").returncode == 0
    pipeline.catch_up()
    assert letters(pipeline) == 0
    assert_equal(pipeline, database, *tables)
    assert {table["state"] for table in pipeline.status()["tables"]} == {"live"}
    shutil.rmtree(pipeline.lake / "public" / "orders")
    done = pipeline.call("rebuild", "public.orders")
    assert (done.returncode, done.stderr) == (0, "")
    assert "rebuilt from the kept files of its last load" in done.stdout
    assert_equal(pipeline, database, "orders")
    execute(database, "UPDATE orders SET n = n + 1")
    pipeline.catch_up()
    assert_equal(pipeline, database, "orders")
