"""`spark.read.format("cdc")`: all rows of one moment, typed as a load types them, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import tailrace
from tailrace.capture.postgres.snapshot import SnapshotReader
from tailrace.errors import ConfigError
from tailrace.model.schema import TableId
from tailrace.pipeline.points.ledger import Ledger
from tailrace.spark.session.java import find_java
from tailrace.spark.session.session import Jvm
from tests.support import typecases
from tests.support.loads import Scene, managed_table
from tests.support.pipelines import execute
from tests.support.transfers import ALL_MONEY, MADE, TABLES, transfers

POINTS_READ = 4
GONE_SECONDS_MAX = 240.0
TYPES = (
    "boolean", "smallint", "integer", "bigint", "oid", "real", "double precision", "numeric", "numeric(10,2)",
    "numeric(38,10)", "numeric(3,-2)", "text", "varchar(10)", "char(5)", "bytea", "date", "timestamp", "timestamptz",
    "time", "timetz", "interval", "money", "bit(10)", "uuid", "json", "jsonb", "inet", "int4range",
)  # fmt: skip
TRANSFER = """
with pick as materialized (select (random() * 7999)::int + 1 as first)
update accounts set balance = balance + case id when first then 1 else -1 end,
                    padding = repeat('y', 300 + (random() * 200)::int)
from pick where id in (first, first % 8000 + 1)
"""
ARRAYS = ("integer", "text", "numeric(10,2)", "timestamptz", "double precision", "uuid")


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    scratch = tmp_path_factory.mktemp("spark")
    jvm = Jvm("read", scratch, scratch / "spark.log", master="local[2]", settings={"spark.sql.session.timeZone": "UTC"})
    try:
        session = jvm.open_session()
        tailrace.register(session)
        yield session
        session.stop()
        jvm.end(GONE_SECONDS_MAX)
    finally:
        jvm.kill()


@pytest.fixture
def source(database: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database, autocommit=True) as connection:
        yield connection


Read = Callable[..., DataFrame]


@pytest.fixture
def read(spark: SparkSession, database: str) -> Read:
    """A DataFrame of a table."""

    def load(table: str, **options: object) -> DataFrame:
        given = {"url": database, "table": table, "idleSeconds": 30, **options}
        return spark.read.format("cdc").options(**{name: str(value) for name, value in given.items()}).load()

    return load


HELD = """
select application_name from pg_stat_activity where application_name ~ '^tailrace' and datname = current_database()
"""


def held(source: psycopg.Connection) -> list[str]:
    """The sessions of ours, by number: once a read is planned or over, those that hold a snapshot.

    One that has no number has asked for a table's shape, and goes within a moment.
    """
    names: list[list[str]] = []

    def all_numbered() -> bool:
        names[:] = [name.split() for (name,) in source.execute(HELD).fetchall()]
        return all(len(words) > 2 for words in names)

    wait_for(all_numbered)
    return [words[2] for words in names]


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GONE_SECONDS_MAX
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def holder(source: psycopg.Connection) -> Path:
    """Where the one process that holds a snapshot is described; also as a zombie it would be there."""
    (number,) = held(source)
    (found,) = [
        path for path in Path("/proc").glob("[0-9]*") if f"holder\0{number}".encode() in _read(path / "cmdline")
    ]
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def rows_of(frame: DataFrame) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in frame.collect())


def test_every_type_arrives_as_in_a_load(source: psycopg.Connection, database: str, read: Read) -> None:
    kinds = {kind: typecases.BUILT_IN[kind] for kind in TYPES}
    kinds |= {
        f"{kind}[]": ["'{}'", "array[null]::" + kind + "[]", f"array[{typecases.BUILT_IN[kind][0]}, null]::{kind}[]"]
        for kind in ARRAYS
    }
    columns = [f"c{n}" for n in range(len(kinds))]
    source.execute(
        "create table types (id int primary key, "
        + ", ".join(f"{name} {kind}" for name, kind in zip(columns, kinds, strict=True))
        + ")"
    )
    for row in range(max(map(len, kinds.values()))):
        cells = [f"({of[row]})::{kind}" if row < len(of) else "null" for kind, of in kinds.items()]
        source.execute(f"insert into types values ({row}, {', '.join(cells)})".encode())
    with SnapshotReader(database, None, None) as reader:
        schema = reader.describe(TableId("public", "types"))
        loaded = pa.Table.from_batches(reader.rows(schema)).sort_by("id").combine_chunks()
    found = read("public.types").toArrow().sort_by("id").combine_chunks()
    assert [field.name for field in found.schema] == schema.names
    for name in schema.names:
        mine, theirs = found.column(name).chunk(0), loaded.column(name).chunk(0)
        assert mine.type == theirs.type, name
        assert typecases.plain(mine) == typecases.plain(theirs), name


def test_all_tasks_read_one_moment_while_others_write(source: psycopg.Connection, database: str, read: Read) -> None:
    source.execute("create table accounts (id int primary key, balance int, padding text) with (fillfactor = 60)")
    source.execute("insert into accounts select g, 100, repeat('x', 400) from generate_series(1, 8000) g")
    with writing(database, TRANSFER):
        for _ in range(3):
            frame = read("public.accounts", chunkBytes="256KiB")
            assert frame.rdd.getNumPartitions() > 8
            (row,) = frame.selectExpr("count(*)", "count(distinct id)", "sum(balance)").collect()
            assert tuple(row) == (8000, 8000, 800_000)


@contextmanager
def writing(database: str, statement: str) -> Iterator[None]:
    """Others run the statement, which leaves something as it was, again and again while this lasts."""
    done, failed = threading.Event(), []

    def write() -> None:
        try:
            with psycopg.connect(database, autocommit=True) as connection:
                while not done.is_set():
                    with suppress(psycopg.errors.DeadlockDetected):
                        connection.execute(statement.encode())
        except psycopg.Error as error:
            failed.append(error)

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not failed


def test_a_data_frame_stays_at_its_moment_and_a_new_one_is_of_now(source: psycopg.Connection, read: Read) -> None:
    source.execute("create table t (id int); insert into t select generate_series(1, 10)")
    frame = read("public.t")
    assert frame.count() == 10
    source.execute("insert into t select generate_series(11, 15); delete from t where id = 1")
    assert rows_of(frame) == [(n,) for n in range(1, 11)]
    assert frame.filter("id > 8").count() == 2
    assert rows_of(read("public.t")) == [(n,) for n in range(2, 16)]


def test_partitions_at_any_depth_are_read_those_without_a_log_too(source: psycopg.Connection, read: Read) -> None:
    source.execute("""
        create table p (id int, kind text) partition by list (kind);
        create table pa partition of p for values in ('a');
        create table pb partition of p for values in ('b') partition by range (id);
        create table pb1 partition of pb for values from (0) to (50);
        create table pb2 partition of pb for values from (50) to (100);
        create unlogged table pu partition of p for values in ('u');
        insert into p select g, (array['a', 'b', 'u'])[g % 3 + 1] from generate_series(0, 99) g;
    """)
    frame = read("public.p")
    assert frame.rdd.getNumPartitions() == 1, "small ones are read by one task"
    assert rows_of(frame) == [(n, "abu"[n % 3]) for n in range(100)]
    assert rows_of(read("public.p", chunkBytes=8192)) == [(n, "abu"[n % 3]) for n in range(100)]


def test_a_table_may_be_empty_or_have_no_key(source: psycopg.Connection, read: Read) -> None:
    source.execute("create table nothing (id int, v text)")
    source.execute("create table bag (v int); insert into bag values (1), (1), (null)")
    assert read("public.nothing").collect() == []
    assert read("public.nothing").columns == ["id", "v"]
    assert sorted(row.v or 0 for row in read("public.bag").collect()) == [0, 1, 1]


def test_columns_and_where_are_the_sources_business(source: psycopg.Connection, read: Read) -> None:
    source.execute(
        'create table t (id int primary key, "a, ""b" text, c int, twice int generated always as (c * 2) stored)'
    )
    source.execute('insert into t (id, "a, ""b", c) select g, \'x\' || g, g % 3 from generate_series(1, 9) g')
    assert read("public.t").columns == ["id", 'a, "b', "c", "twice"], "generated columns too"
    frame = read("public.t", columns='twice, "a, ""b"', where="c = 2 and id > 4 -- the rest")
    assert frame.columns == ["twice", 'a, "b']
    assert rows_of(frame) == [(4, "x5"), (4, "x8")]


def test_names_are_taken_as_they_are(source: psycopg.Connection, read: Read) -> None:
    source.execute('create schema "a.b"; create table "a.b"."C""d" (id int); insert into "a.b"."C""d" values (7)')
    assert read('"a.b"."C""d"').collect()[0].id == 7


def test_a_table_is_read_by_as_many_tasks_as_its_size_asks_for(source: psycopg.Connection, read: Read) -> None:
    source.execute("create table t as select g as id, repeat('x', 100) as v from generate_series(1, 20000) g")
    assert read("public.t").rdd.getNumPartitions() == 1
    assert read("public.t", chunkBytes="256KiB").rdd.getNumPartitions() == pytest.approx(11, abs=2)
    few = read("public.t", chunkBytes="64KiB", maxPartitions=3)
    assert few.rdd.getNumPartitions() == 3
    assert few.agg({"id": "sum"}).collect()[0][0] == 20000 * 20001 // 2


def test_views_are_read_by_one_task(source: psycopg.Connection, read: Read) -> None:
    source.execute("""
        create table t as select g as id from generate_series(1, 1000) g;
        create view v as select id * 2 as twice from t;
        create materialized view m as select id * 3 as thrice from t;
    """)
    for name, times in (("v", 2), ("m", 3)):
        frame = read(f"public.{name}", chunkBytes=8192)
        assert frame.rdd.getNumPartitions() == 1
        assert rows_of(frame) == [(n * times,) for n in range(1, 1001)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"table": "public.missing"}, "not there (table=public.missing) [source-table-missing] | hint: Write names"),
        ({"table": "t"}, "the option `table` is not the name of a table with its schema [config-invalid] | hint: For"),
        ({"columns": "id, nope"}, "column=nope) [config-invalid] | hint: Name one of id, v"),
        ({"columns": "id, id"}, "the option `columns` has a name twice"),
        ({"columns": "id,,v"}, "the option `columns` is not a list of names"),
        ({"where": "nope = 1"}, 'the condition cannot be used: column "nope" does not exist'),
        ({"where": "true) or (true"}, "the condition cannot be used"),
        ({"chunkBytes": "5 potatoes"}, "the option `chunkBytes` is not a size [config-invalid] | hint: For example"),
        ({"maxPartitions": 0}, "the option `maxPartitions` is not a whole number above 0"),
        ({"snapshotSeconds": "-1"}, "the option `snapshotSeconds` is not a number of seconds"),
        ({"fetchsize": 100}, "the option `fetchsize` is not known [config-invalid] | hint: Use the options of"),
        ({"url": "host=localhost password=secret"}, "the option `url` is not a URL of PostgreSQL"),
        ({"url": "postgresql://nobody:secret@127.0.0.1:1/x"}, "[source-unreachable] | hint: Check that it is running"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_said_when_it_is_loaded(
    source: psycopg.Connection, read: Read, options: dict[str, object], said: str
) -> None:
    source.execute("create table t (id int, v text)")
    with pytest.raises(PySparkException) as caught:
        read(**{"table": "public.t", **options})
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_table_that_may_not_be_read_says_what_to_grant(source: psycopg.Connection, database: str, read: Read) -> None:
    role = database.rpartition("/")[2]
    source.execute(f"create table t (id int); create role {role} login")
    try:
        with pytest.raises(PySparkException, match=r"source-refused.*GRANT SELECT ON public\.t"):
            read("public.t", url=database.replace("postgres@", f"{role}@"))
    finally:
        source.execute(f"drop role {role}")


def test_a_condition_that_fails_on_a_row_does_not_tell_the_row(source: psycopg.Connection, read: Read) -> None:
    source.execute("create table t (v text); insert into t values ('12'), ('a secret')")
    with pytest.raises(PySparkException) as caught:
        read("public.t", where="v::int > 3").collect()
    assert "the condition `where` failed on a row" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_value_that_does_not_fit_is_refused_and_not_told(source: psycopg.Connection, read: Read) -> None:
    source.execute("create table t (id int primary key, v numeric(10,2)); insert into t values (1, 5), (2, 'NaN')")
    with pytest.raises(PySparkException, match="value-unfit"):
        read("public.t").collect()


def test_nobody_holds_the_snapshot_when_nobody_reads(source: psycopg.Connection, read: Read) -> None:
    source.execute("create table t as select generate_series(1, 100) as id")
    frame = read("public.t", idleSeconds=3)
    assert held(source) == [], "to know the columns nothing is held"
    assert frame.rdd.getNumPartitions() == 1
    process = holder(source)  # before it is read: from then on, it may go at any time
    assert frame.count() == 100
    wait_for(lambda: not held(source) and not process.exists())
    with pytest.raises(PySparkException, match=r"snapshot-gone\] \| hint: Create the DataFrame again"):
        frame.collect()
    assert read("public.t", idleSeconds=1).count() == 100


def test_a_snapshot_is_not_held_longer_than_its_time(source: psycopg.Connection, read: Read) -> None:
    source.execute("create table t as select generate_series(1, 100) as id")
    frame = read("public.t", snapshotSeconds=1)
    assert frame.rdd.getNumPartitions() == 1, "planned, and not read"
    wait_for(lambda: not held(source))
    with pytest.raises(PySparkException, match="snapshot-gone"):
        frame.collect()


@pytest.mark.parametrize("rewrite", ["vacuum full t", "truncate t", "alter table t alter id type int8"])
def test_a_table_that_is_rewritten_under_a_read_is_refused(
    source: psycopg.Connection, read: Read, rewrite: str
) -> None:
    source.execute("create table t as select g as id from generate_series(1, 100) g")
    frame = read("public.t")
    assert frame.rdd.getNumPartitions() == 1
    source.execute(rewrite.encode())
    with pytest.raises(PySparkException, match=r"source-rewritten\] \| hint: Create the DataFrame again"):
        frame.collect()


def test_a_table_that_got_other_columns_since_it_was_loaded_is_refused(source: psycopg.Connection, read: Read) -> None:
    source.execute("create table t (id int); insert into t values (1)")
    frame = read("public.t")
    source.execute("alter table t add more text")
    with pytest.raises(PySparkException, match="other columns or types than the DataFrame"):
        frame.collect()


def test_a_holder_that_is_killed_is_told_of(source: psycopg.Connection, read: Read) -> None:
    source.execute("create table t as select generate_series(1, 100) as id")
    frame = read("public.t")
    assert frame.rdd.getNumPartitions() == 1
    os.kill(int(holder(source).name), signal.SIGKILL)
    wait_for(lambda: not held(source))
    with pytest.raises(PySparkException, match="snapshot-gone"):
        frame.collect()


STOCK = """
import os, sys, time
import tailrace
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").config(
    "spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1").getOrCreate()
tailrace.register(spark)
frame = spark.read.format("cdc").option("url", sys.argv[1]).option("table", "public.t").load()
print("read", frame.count(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, *([signal.SIGTERM] if os.environ.get("TAILRACE_THOROUGH") else [])])
def test_no_holder_outlives_a_spark_of_any_kind(
    source: psycopg.Connection, database: str, tmp_path: Path, number: signal.Signals
) -> None:
    source.execute("create table t as select generate_series(1, 100) as id")
    url = database.replace("postgres@", "postgres:secret-word@")
    environment = os.environ | {"PYSPARK_PYTHON": sys.executable, "JAVA_HOME": str(find_java())}
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", STOCK, url],
            stdout=subprocess.PIPE,
            stderr=said,
            env=environment,
            cwd=tmp_path,
            start_new_session=True,
        )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"read 100\n", (tmp_path / "said").read_text()
        found = holder(source)
        for what in ("cmdline", "environ"):
            assert b"secret-word" not in (found / what).read_bytes()
        process.send_signal(number)
        process.wait(GONE_SECONDS_MAX)
        wait_for(lambda: not held(source) and not found.exists())
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def enough(ledger: Ledger) -> bool:
    """Points to read, and some that lack a table."""
    noted = list(ledger.points())
    return len(noted) >= POINTS_READ and any(point.missing for point in noted)


def test_no_point_that_the_helper_reads_sees_money_appear_or_vanish(
    spark: SparkSession, database: str, tmp_path: Path
) -> None:
    execute(database, *MADE)
    ledger = Ledger(tmp_path / "changes")
    with Scene(tmp_path, database) as scene, scene.loader() as applying:
        scene.record_point(applying)
        applying.by_hand = True
        with transfers(database) as stopping:
            deadline, number = time.monotonic() + GONE_SECONDS_MAX, 0
            while number < 6 * POINTS_READ or (not enough(ledger) and time.monotonic() < deadline):
                number += 1
                busy = managed_table(applying, TABLES[number % 2]).lock if number % 3 == 2 else nullcontext()
                with busy:  # as if the table's files were being joined
                    applying._bring_tables_to(applying.registry.refresh_index())
                stopping.wait(0.05)
        noted = list(ledger.points())
        assert enough(ledger)
        for point in noted[:: len(noted) // POINTS_READ]:
            found = tailrace.tables_at(spark, scene.pipeline.file, position=str(point.position))
            assert sorted(found) == [f"public.{table}" for table in TABLES], "one that has both is near"
            assert sum(row["money"] for table in found.values() for row in table.collect()) == ALL_MONEY


def test_tables_of_a_pipeline_are_read_as_of_one_point(spark: SparkSession, database: str, tmp_path: Path) -> None:
    execute(
        database,
        "CREATE TABLE a (id int PRIMARY KEY, t timestamp)",
        "CREATE TABLE b (id int PRIMARY KEY, n numeric(10,2))",
        "INSERT INTO a VALUES (1, '2026-01-02 03:04:05')",
        "INSERT INTO b VALUES (1, 1.5)",
        "CREATE TABLE p (id int PRIMARY KEY, region text, at timestamp)",
        "INSERT INTO p VALUES (1, 'a/b %', '2026-01-02 03:04:05.000006'), (2, NULL, NULL)",
    )
    rule = 'rules: {"public.p": {partition_by: [region, at]}}'
    with Scene(tmp_path, database).set_tables(rule) as scene, scene.loader() as applying:
        for statement in ("UPDATE a SET id = 2", "DELETE FROM b", "ALTER TABLE a ADD c text DEFAULT 'x'"):
            execute(database, statement)
            scene.record_point(applying)
    first = next(Ledger(tmp_path / "changes").points())
    before = tailrace.tables_at(spark, scene.pipeline.file, position=str(first.position))
    after = tailrace.tables_at(spark, scene.pipeline.file)
    assert [row["id"] for row in before["public.a"].collect()] == [2]
    assert [str(row["n"]) for row in before["public.b"].collect()] == ["1.50"]
    assert before["public.a"].columns == ["id", "t"]
    assert after["public.b"].collect() == []
    assert after["public.b"].dtypes == [("id", "int"), ("n", "decimal(10,2)")]
    told = after["public.p"].selectExpr("id", "region", "CAST(at AS string) AS at").collect()
    assert sorted(map(tuple, told)) == [(1, "a/b %", "2026-01-02 03:04:05.000006"), (2, None, None)]
    assert list(tailrace.tables_at(spark, scene.pipeline.file, tables=[TableId("public", "b")])) == ["public.b"]
    with pytest.raises(ConfigError):
        tailrace.tables_at(spark, scene.pipeline.file, time="1999-01-01")
