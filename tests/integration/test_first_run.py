"""A pipeline from nothing: what a user sees who writes a settings file and runs it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tests.support.pipelines import Pipeline, assert_log_is_whole, eventually, execute

SCHEMA = """
CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy');
CREATE DOMAIN price AS numeric(10, 2);
CREATE TABLE kinds (
    id int PRIMARY KEY, b boolean, i2 int2, i8 int8, f4 real, f8 double precision, n numeric(12, 3),
    big numeric(38, 0), free numeric, wide numeric(50, 2), p price, t text, v varchar(20), c char(5),
    raw bytea, d date, ts timestamp, tz timestamptz, tm time, iv interval, u uuid, m mood, j json, jb jsonb, ip inet,
    bits bit(3), ints int[], texts text[], nums numeric(6, 2)[], times timestamptz[], flags boolean[], uuids uuid[]
);
CREATE TABLE "Mixed Case" ("Id" int PRIMARY KEY, "a b" text, "quo""te" int, "_op" text, "_seq" int, sélect text);
CREATE TABLE keyless (a int, b text);
CREATE TABLE full_keyless (a int, b text, big text);
ALTER TABLE full_keyless REPLICA IDENTITY FULL;
CREATE TABLE full_keyed (id int PRIMARY KEY, a text, big text);
ALTER TABLE full_keyed REPLICA IDENTITY FULL;
ALTER TABLE full_keyed ALTER big SET STORAGE EXTERNAL;
CREATE TABLE pair (a int, b text, x int, PRIMARY KEY (b, a));
CREATE TABLE empty (id int PRIMARY KEY);
CREATE TABLE parted (id int, region text, x int, PRIMARY KEY (id, region)) PARTITION BY LIST (region);
CREATE TABLE parted_eu PARTITION OF parted FOR VALUES IN ('eu');
CREATE TABLE parted_us PARTITION OF parted FOR VALUES IN ('us');
CREATE TABLE unwanted (id int PRIMARY KEY);
CREATE SCHEMA other;
CREATE TABLE other.pair (id int PRIMARY KEY, y text);
CREATE TABLE other."a/b%.c" (id int PRIMARY KEY, y text);
CREATE UNLOGGED TABLE unlogged (id int PRIMARY KEY);
CREATE TABLE cleared (id int PRIMARY KEY, t text);
"""

KINDS = """
INSERT INTO kinds VALUES
({0}, true, -32768, 9223372036854775807, 'NaN', '-Infinity', 123456789.125, 99999999999999999999999999999999999999,
 '1e-30', 12345678901234567890123456789012345678901234567.5, 19.99, E'a\\tb\\n\\\\ü', 'v', 'c', '\\x00ff', '2024-02-29',
 '2024-02-29 23:59:59.999999', '2024-02-29 23:59:59.5+02', '24:00', '1 year 2 days', gen_random_uuid(), 'happy',
 '{{"a" : 1}}', '{{"a": 1}}', '10.0.0.1', B'101', '{{1,NULL,3}}', '{{a,"b,c",NULL,"NULL"}}', '{{1.50,NULL}}',
 '{{"2024-01-01 00:00:00+00",NULL}}', '{{t,f}}', ARRAY[gen_random_uuid()]),
({0} + 1, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
 NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
({0} + 2, false, 0, 0, 0, '-0', -0.001, -1, '-12345.6700', 0, 0, '', '', '', '', '0044-03-15 BC', 'infinity',
 '-infinity', '00:00', '-1 mon', gen_random_uuid(), 'sad', 'null', '[]', '::1/64', B'000',
 '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}')
"""

ROWS = [
    KINDS.format(1),
    """INSERT INTO "Mixed Case" SELECT g, 't' || g, g, 'op', g, 'é' FROM generate_series(1, 20) g""",
    "INSERT INTO keyless VALUES (1, 'x'), (1, 'x'), (2, NULL)",
    "INSERT INTO full_keyless SELECT g % 3, 'b', repeat('x', 10) FROM generate_series(1, 12) g",
    "INSERT INTO full_keyed SELECT g, 'a', repeat(md5(g::text), 200) FROM generate_series(1, 20) g",
    "INSERT INTO pair SELECT g, 'b' || g % 3, g FROM generate_series(1, 50) g",
    "INSERT INTO parted SELECT g, CASE WHEN g % 2 = 0 THEN 'eu' ELSE 'us' END, g FROM generate_series(1, 40) g",
    "INSERT INTO other.pair SELECT g, 'y' FROM generate_series(1, 5) g",
    """INSERT INTO other."a/b%.c" VALUES (1, 'slash')""",
    "INSERT INTO cleared SELECT g, 't' FROM generate_series(1, 9) g",
    "INSERT INTO unlogged VALUES (1)",
    "INSERT INTO unwanted VALUES (1)",
]

CHANGES = [
    KINDS.format(11),
    "UPDATE kinds SET t = 'changed', i8 = NULL WHERE id = 1",
    """UPDATE "Mixed Case" SET "a b" = NULL, "_op" = 'update' WHERE "Id" < 5""",
    """UPDATE "Mixed Case" SET "Id" = "Id" + 100 WHERE "Id" BETWEEN 3 AND 6""",
    """DELETE FROM "Mixed Case" WHERE "Id" = 8""",
    "INSERT INTO keyless VALUES (1, 'x'), (3, 'y')",
    "DELETE FROM full_keyless WHERE ctid IN (SELECT ctid FROM full_keyless WHERE a = 1 LIMIT 2)",
    "UPDATE full_keyless SET b = 'c' WHERE ctid IN (SELECT ctid FROM full_keyless WHERE a = 2 LIMIT 1)",
    "UPDATE full_keyed SET a = 'z' WHERE id < 5",
    "UPDATE full_keyed SET id = id + 1000 WHERE id < 3",
    "DELETE FROM full_keyed WHERE id = 7",
    "UPDATE pair SET x = x + 1 WHERE a < 10",
    "UPDATE pair SET b = 'moved' WHERE a = 11",
    "UPDATE parted SET region = 'us' WHERE id = 2",
    "DELETE FROM parted WHERE id = 4",
    "UPDATE other.pair SET y = 'changed' WHERE id = 1",
    """INSERT INTO other."a/b%.c" VALUES (2, 'percent')""",
    "INSERT INTO cleared VALUES (100, 'gone')",
    "TRUNCATE cleared",
    "INSERT INTO cleared VALUES (1, 'after')",
    "BEGIN; INSERT INTO pair VALUES (900, 'rolled', 1); ROLLBACK",
]
PUBLIC = ["kinds", "Mixed Case", "keyless", "full_keyless", "full_keyed", "pair", "empty", "parted", "cleared"]


@pytest.fixture
def pipeline(database: str, tmp_path: Path) -> Pipeline:
    execute(database, *SCHEMA.split(";\n"), *ROWS)
    return Pipeline(tmp_path, database, tables='["public.*", "other.*"]', extra='  exclude: ["public.unwanted"]\n')


def test_every_kind_of_table_and_change_arrives_and_is_told(pipeline: Pipeline) -> None:
    pipeline.catch_up()
    pipeline.assert_equal(*PUBLIC)
    _assert_one_point(pipeline)  # though nothing has changed since they were loaded
    execute(pipeline.url, *CHANGES)
    running = pipeline.start("run")
    try:
        done = lambda: all(  # noqa: E731
            v.equal for v in pipeline.compare(*PUBLIC) + pipeline.compare("pair", "a/b%.c", schema="other")
        )
        assert eventually(done, pause=1), running.said() + str(pipeline.compare(*PUBLIC))
        status = pipeline.status()
        assert status["running"]
        assert status["capture_pid"]
        assert status["apply_pid"]
        groups = {Path(f"/proc/{status[who]}/stat").read_text().split()[4] for who in ("capture_pid", "apply_pid")}
        assert groups == {str(running.process.pid)}
        assert running.terminate() == 0, running.said()
        assert eventually(lambda: not running.alive())
    finally:
        running.end()
    _assert_typed(pipeline)
    _assert_status(pipeline)
    assert_log_is_whole(pipeline.log)
    assert not (pipeline.lake / "public" / "unwanted").exists()
    assert not (pipeline.lake / "public" / "unlogged").exists()


def _assert_one_point(pipeline: Pipeline) -> None:
    told = pipeline.ask("at", "--json")
    assert told.returncode == 0, told.stderr
    point = json.loads(told.stdout)
    assert {table["table"] for table in point["tables"]} == {*PUBLIC, "a/b%.c"}
    assert point["missing"] == []


def _assert_typed(pipeline: Pipeline) -> None:
    stored = json.loads(DeltaTable(str(pipeline.lake / "public" / "kinds")).schema().to_json())
    types = {field["name"]: field["type"] for field in stored["fields"]}
    lists = {name: kind["elementType"] for name, kind in types.items() if isinstance(kind, dict)}
    assert lists == {
        "ints": "integer",
        "texts": "string",
        "nums": "decimal(6,2)",
        "times": "timestamp",
        "flags": "boolean",
    }
    assert {name: kind for name, kind in types.items() if name not in lists and kind != "string"} == {
        "id": "integer",
        "b": "boolean",
        "i2": "short",
        "i8": "long",
        "f4": "float",
        "f8": "double",
        "n": "decimal(12,3)",
        "big": "decimal(38,0)",
        "p": "decimal(10,2)",
        "raw": "binary",
        "d": "date",
        "ts": "timestamp_ntz",
        "tz": "timestamp",
    }
    assert len(types) == 32, "a mirror holds the source's columns and no others"


def _assert_status(pipeline: Pipeline) -> None:
    status = pipeline.status()
    assert not status["running"]
    states = {table["table"]: table for table in status["tables"] if table["schema"] == "public"}
    assert set(states) == set(PUBLIC)
    assert {table["state"] for table in states.values()} == {"live"}
    assert "REPLICA IDENTITY FULL" in states["keyless"]["note"]
    assert states["pair"]["rows_applied"] == states["pair"]["rows_captured"] > 0
    assert states["kinds"]["rows_loaded"] == 3
    _assert_one_point(pipeline)
    assert states["pair"]["bytes_written"] > 0
    assert states["pair"]["bytes_changed"] > 0
    execute(pipeline.url, "UPDATE keyless SET b = 'the application may still update it'")


def test_capture_and_apply_run_apart_and_agree(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY, x text)", "INSERT INTO t VALUES (1, 'a'), (2, 'b')")
    pipeline = Pipeline(tmp_path, database)
    assert pipeline.call("capture", "--until-caught-up").returncode == 0
    execute(database, "UPDATE t SET x = 'c' WHERE id = 1", "UPDATE t SET id = 3 WHERE id = 2")
    done = pipeline.call("apply", "--until-caught-up")  # loads at a point the log has not reached
    assert done.returncode == 0, done.stderr
    pipeline.assert_equal("t")
    execute(database, "INSERT INTO t VALUES (4, 'd')")
    assert pipeline.call("capture", "--until-caught-up").returncode == 0
    done = pipeline.call("apply", "--until-caught-up", "--json")
    assert done.returncode == 0, done.stderr
    pipeline.assert_equal("t")
    _drop_and_be_told(pipeline)


@pytest.mark.skipif("TAILRACE_THOROUGH" not in os.environ, reason="one more Spark: it runs where there is time")
def test_applying_what_nobody_captures_says_so_and_keeps_what_it_has_read(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY, x text)", "INSERT INTO t VALUES (1, 'a'), (2, 'b')")
    pipeline = Pipeline(tmp_path, database)
    with pipeline.file.open("a") as settings:
        settings.write("load: {way: chunked}\n")
    assert pipeline.call("capture", "--until-caught-up").returncode == 0
    execute(database, "UPDATE t SET x = 'c' WHERE id = 1")
    done = pipeline.call("apply", "--until-caught-up")
    assert done.returncode == 4, done.stderr
    assert "no capture runs" in done.stderr
    assert "Start `tailrace capture FILE`" in done.stderr
    pipeline.catch_up()
    pipeline.assert_equal("t")


def _drop_and_be_told(pipeline: Pipeline) -> None:
    assert pipeline.call("drop").returncode == 2, "without a terminal it wants --yes"
    dropped = pipeline.call("drop", "--yes")
    assert dropped.returncode == 0, dropped.stderr
    assert dropped.stdout.count("removed") == 3
    assert pipeline.log.exists()
    refused = pipeline.call("capture", "--until-caught-up")
    assert refused.returncode == 3
    assert "error: the replication slot is gone" in refused.stderr
    assert "hint:" in refused.stderr
