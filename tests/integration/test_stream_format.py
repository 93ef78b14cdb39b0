"""`format("cdc")` over a change log, as a stream and as a range: every row once, and nothing left behind."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.errors import PySparkException
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import tailrace
from tailrace.changelog.read import consumers
from tailrace.model.schema import Identity
from tailrace.spark.session.session import Jvm
from tests.support.changes import SHOP, delete, insert, truncate, update
from tests.support.logs import OTHER, WIDER, Diary, inserts, rich, seal
from tests.support.pipelines import descendants, eventually, execute
from tests.support.stores import ENVIRONMENT, S3, s3_server

GONE_SECONDS_MAX = 240.0
COME_SECONDS_MAX = 200
"""On a machine that does much else."""
FULL = replace(SHOP, identity=Identity.FULL)
LIMITS = importlib.util.find_spec("pyspark.sql.streaming.datasource") is not None
"""Whether this Spark asks a source for no more than a limit: 4.1 does not."""


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with pytest.MonkeyPatch.context() as patch, s3_server() as found:
        for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": found.endpoint}).items():
            patch.setenv(name, value)
        yield found


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory, s3: S3) -> Iterator[SparkSession]:
    """A session in which nothing was registered: Spark finds the format by itself. Its tasks know of a store."""
    scratch = tmp_path_factory.mktemp("spark")
    settings = {"spark.sql.session.timeZone": "UTC"}
    jvm = Jvm("stream", scratch, scratch / "spark.log", master="local[2]", settings=settings)
    try:
        session = jvm.open_session()
        yield session
        session.stop()
        jvm.end(GONE_SECONDS_MAX)
    finally:
        jvm.kill()


@pytest.fixture
def diary(tmp_path: Path) -> Iterator[Diary]:
    made = Diary(tmp_path / "log")
    yield made
    made.close()


class Streamed:
    """A stream and what came of it, micro-batch by micro-batch; one that comes again takes its own place."""

    def __init__(self, spark: SparkSession, folder: Path, **options: object) -> None:
        self._spark, self._checkpoint, self._options = spark, folder / "checkpoint", options
        self.batches: dict[int, list[Row]] = {}

    def frame(self) -> DataFrame:
        options = {name: str(value) for name, value in self._options.items()}
        return self._spark.readStream.format("cdc").options(**options).load()

    def start(self, **trigger: Any) -> StreamingQuery:
        def note(batch: DataFrame, number: int) -> None:
            self.batches[number] = batch.orderBy("_seq" if "_seq" in batch.columns else "_commit_version").collect()

        writer = self.frame().writeStream.foreachBatch(note).option("checkpointLocation", str(self._checkpoint))
        while True:
            query = (writer.trigger(**trigger) if trigger else writer).start()
            # On a busy machine: Spark gives a source's process ten seconds to start.
            if "failed to connect back" not in _begun(query):
                return query

    def run(self) -> list[list[Row]]:
        """All there is now; what came this time."""
        before = set(self.batches)
        query = self.start(availableNow=True)
        assert query.awaitTermination(COME_SECONDS_MAX)
        return [rows for number, rows in sorted(self.batches.items()) if number not in before]

    @property
    def rows(self) -> list[Row]:
        return [row for _, rows in sorted(self.batches.items()) for row in rows]

    @property
    def ids(self) -> list[int]:
        return [row["id"] for row in self.rows]


def _begun(query: StreamingQuery) -> str:
    """Why it has ended by now, if it has."""
    assert eventually(lambda: query.status["message"] != "Initializing sources", COME_SECONDS_MAX)
    return str(query.exception())


def read(spark: SparkSession, **options: object) -> DataFrame:
    return spark.read.format("cdc").options(**{name: str(value) for name, value in options.items()}).load()


def test_a_log_is_read_and_streamed_with_no_import(spark: SparkSession, diary: Diary, tmp_path: Path) -> None:
    diary.commit(rich(1))
    seal(diary.path)
    diary.commit(inserts(2), inserts(7, schema=OTHER))
    frame = read(spark, log=diary.path, table="public.things")
    assert frame.dtypes[:7] == [
        ("_op", "string"),
        ("_seq", "bigint"),
        ("_commit", "bigint"),
        ("_position", "string"),
        ("_tx", "bigint"),
        ("_tx_index", "int"),
        ("_committed_at", "timestamp"),
    ]
    assert frame.columns[7:] == ["_unchanged", "_before", "_moved_from", "_unfit", "id", "name", "big", "n"]
    wanted = [n.row.values | {"_commit": n.commit} for n in diary.noted if n.row.schema == SHOP]
    for row in (found := [row.asDict(recursive=True) for row in frame.orderBy("_seq").collect()]):
        row["_committed_at"] = wanted[0]["_committed_at"]  # Spark's has no zone
    assert found == wanted
    options: dict[str, object] = {"log": diary.path, "table": "public.things", "rowsPerPartition": 2}
    limited = Streamed(spark, tmp_path, **options, consumer="mine", maxRowsPerTrigger=7)
    if LIMITS:
        stream, batches = limited, [[1, 2, 3, 4, 5, 6, 7], [8]]
    else:
        with pytest.raises(PySparkException, match=r"limits need Spark 4\.2"):
            limited.run()
        stream, batches = Streamed(spark, tmp_path, **options, consumer="mine"), [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert [[row["_seq"] for row in rows] for rows in stream.run()] == batches
    if LIMITS:
        by_bytes = Streamed(spark, tmp_path / "bytes", **options, maxBytesPerTrigger="1B")
        assert [[row["_seq"] for row in rows] for rows in by_bytes.run()] == batches, "one commit at the least"
    diary.commit(inserts(9))
    diary.commit(inserts(7, schema=OTHER))
    assert [[row["id"] for row in rows] for rows in stream.run()] == [[9]]
    (hold,) = consumers.read_holds(diary.path)
    assert (hold.name, hold.commit) == ("mine", 4 if LIMITS else 2), "with nothing left, all is read"


def test_an_envelope_and_a_change_feed_are_what_spark_takes_them_for(spark: SparkSession, diary: Diary) -> None:
    diary.commit(rich(1), inserts(7, schema=OTHER))
    diary.commit((WIDER, [insert(5, added=True), update(5, before={"id": 5, "added": False})]))
    frame = read(spark, log=diary.path, tables="*")
    assert frame.schema["_row"].dataType.simpleString() == "variant"
    rows = frame.orderBy("_seq").collect()
    told = [(row["_op"], row["_schema"], row["_table"], row["_row"] and row["_row"].toPython()) for row in rows]
    assert told[0] == ("insert", "public", "things", {"id": 1, "name": "né", "big": None, "n": -1})
    assert told[7][2:] == ("other", {"id": 7, "name": "n7", "big": None, "n": None})
    assert told[8][3] == {"id": 5, "name": None, "big": None, "n": None, "added": True}
    assert rows[9]["_before"].toPython()["added"] is False
    assert [row["_moved_from"].toPython() for row in rows if row["_moved_from"]] == [{"id": 1}]
    others = frame.where("_table = 'other'").selectExpr("variant_get(_row, '$.id', 'bigint')", "to_json(_row)")
    assert [tuple(row) for row in others.collect()] == [(7, '{"big":null,"id":7,"n":null,"name":"n7"}')]
    diary.commit((FULL, [insert(1, n=1), insert(2, n=1)]))
    diary.commit((FULL, [update(1, n=2, before={"id": 1, "n": 1}), delete(2, n=1)]))
    feed = read(spark, log=diary.path, table="public.things", shape="changelog", startingPosition=4)
    assert feed.dtypes[-3:] == [
        ("_change_type", "string"),
        ("_commit_version", "bigint"),
        ("_commit_timestamp", "timestamp"),
    ]
    changes = sorted((row["_change_type"], row["id"], row["n"], row["_commit_version"]) for row in feed.collect())
    assert changes == [("delete", 2, 1, 4), ("update_postimage", 1, 2, 4), ("update_preimage", 1, 1, 4)]


class Told:
    """A change feed of ours as Spark's own `changes` would have it from a connector."""

    def __init__(self, spark: SparkSession, feed: DataFrame) -> None:
        gateway = spark.sparkContext._gateway
        assert gateway is not None
        column, fields = gateway.jvm.org.apache.spark.sql.connector.catalog.Column, feed._jdf.schema().fields()
        self._columns = gateway.new_array(column, len(fields))
        for place, field in enumerate(fields):
            self._columns[place] = column.create(field.name(), field.dataType())

    def name(self) -> str:
        return "cdc"

    def columns(self) -> Any:
        return self._columns

    def containsCarryoverRows(self) -> bool:  # noqa: N802 # Java's own name
        return False

    def containsIntermediateChanges(self) -> bool:  # noqa: N802 # Java's own name
        return False

    def representsUpdateAsDeleteAndInsert(self) -> bool:  # noqa: N802 # Java's own name
        return False

    class Java:
        implements = ("org.apache.spark.sql.connector.catalog.Changelog",)


@pytest.mark.skipif(not LIMITS, reason="Spark has `changes` since 4.2")
def test_a_change_feed_is_one_that_spark_takes_for_its_own_changes(spark: SparkSession, diary: Diary) -> None:
    diary.commit((FULL, [insert(1, n=1), insert(2, n=1)]))
    diary.commit((FULL, [update(1, n=2, before={"id": 1, "n": 1}), delete(2, n=1)]))
    feed = read(spark, log=diary.path, table="public.things", shape="changelog")
    java, gateway = spark._jvm, spark.sparkContext._gateway
    assert java is not None
    assert gateway is not None
    ensure_callback_server_started(gateway)  # type: ignore[no-untyped-call]
    check = getattr(java, "org.apache.spark.sql.execution.datasources.v2.ChangelogTable$")
    getattr(check, "MODULE$").validateSchema(Told(spark, feed))
    with pytest.raises(PySparkException, match=r"INVALID_CHANGELOG_SCHEMA.*_commit_version"):
        getattr(check, "MODULE$").validateSchema(Told(spark, feed.drop("_commit_version")))
    words = java.org.apache.spark.sql.connector.catalog.Changelog
    kinds = ("INSERT", "DELETE", "UPDATE_PREIMAGE", "UPDATE_POSTIMAGE")
    assert {row["_change_type"] for row in feed.collect()} == {getattr(words, f"CHANGE_TYPE_{kind}") for kind in kinds}


def test_a_schema_change_ends_a_stream_and_started_again_it_has_it(
    spark: SparkSession, diary: Diary, tmp_path: Path
) -> None:
    diary.commit(inserts(1))
    stream = Streamed(spark, tmp_path, log=diary.path, table="public.things")
    query = stream.start()
    assert eventually(lambda: stream.ids == [1], COME_SECONDS_MAX)
    diary.commit((WIDER, [insert(2, added=True)]))
    with pytest.raises(PySparkException, match=r"schema-changed\] \| hint: .*with the same checkpoint"):
        query.awaitTermination(COME_SECONDS_MAX)
    assert stream.ids == [1]
    ((row,),) = stream.run()
    assert (row["id"], row["added"]) == (2, True)


def test_every_shape_is_streamed(spark: SparkSession, diary: Diary, tmp_path: Path) -> None:
    tailrace.register(spark)
    diary.commit((FULL, [insert(1, n=1)]), inserts(7, schema=OTHER))
    loose = Streamed(spark, tmp_path / "loose", path=diary.path, table="public.things", onSchemaChange="envelope")
    query = loose.start()
    assert eventually(lambda: loose.ids == [1], COME_SECONDS_MAX)
    diary.commit((replace(WIDER, identity=Identity.FULL), [insert(2, n=2, added=True)]))
    assert eventually(lambda: loose.ids == [1, 2], COME_SECONDS_MAX)
    query.stop()
    assert loose.rows[0]["_row"] is None
    assert loose.rows[1]["_row"].toPython()["added"] is True
    diary.commit((replace(WIDER, identity=Identity.FULL), [update(1, n=3, before={"id": 1, "n": 1})]))
    diary.commit((replace(WIDER, identity=Identity.FULL), [truncate()]))
    many = Streamed(spark, tmp_path / "many", log=diary.path, tables="public.o*, public.things")
    many.run()
    told = [(row["_table"], row["_op"], row["_row"] and row["_row"].toPython()["id"]) for row in many.rows]
    assert told == [
        ("things", "insert", 1),
        ("other", "insert", 7),
        ("things", "insert", 2),
        ("things", "update", 1),
        ("things", "truncate", None),
    ]
    feed = Streamed(spark, tmp_path / "feed", log=diary.path, table="public.things", shape="changelog")
    if LIMITS:  # else a query that ends by itself has one micro-batch, and that cannot be planned
        with pytest.raises(PySparkException, match="cannot represent a TRUNCATE"):
            feed.run()
        changes = [(row["_change_type"], row["id"], row["_commit_version"]) for row in feed.rows]
        assert changes[:2] == [("insert", 1, 1), ("insert", 2, 2)], "everything before is delivered"
        assert sorted(changes[2:]) == [("update_postimage", 1, 3), ("update_preimage", 1, 3)]


def test_what_cannot_be_meant_is_said(spark: SparkSession, diary: Diary) -> None:
    diary.commit(inserts(1))
    with pytest.raises(PySparkException, match=r"config-invalid\] \| hint: It has public\.things"):
        read(spark, log=diary.path, table="public.thing")


# With a database: the log is the stream's own.


def captures(log: Path) -> list[Path]:
    """The processes that capture into a log beside a stream, as they are described."""
    mark = f"tailrace.pipeline.capture.embedded_capture\0{log}".encode()
    return [path for path in Path("/proc").glob("[0-9]*") if mark in _said(path / "cmdline")]


def capture_of(log: Path) -> Path:
    """The one there is. A process that it is about to start has its description until it is another program."""
    assert eventually(lambda: len(captures(log)) == 1, COME_SECONDS_MAX)
    return captures(log)[0]


def _said(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def slots(url: str) -> list[bool]:
    """Whether each slot of the database is in use."""
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "select active from pg_replication_slots where database = current_database()"
        ).fetchall()
    return [active for (active,) in rows]


def test_a_stream_captures_for_itself_and_leaves_nothing_behind(
    spark: SparkSession, database: str, tmp_path: Path
) -> None:
    execute(database, "create table t (id int primary key, v text)", "insert into t values (0, 'before')")
    stream = Streamed(spark, tmp_path, url=database, checkpointLocation=tmp_path / "checkpoint", table="public.t")
    log = tmp_path / "checkpoint" / "tailrace-log"
    query = stream.start()
    assert eventually(lambda: slots(database) == [True], COME_SECONDS_MAX)
    execute(database, "insert into t values (1, 'a'), (2, 'b')", "update t set v = 'c' where id = 2")
    assert eventually(lambda: stream.ids == [1, 2, 2], COME_SECONDS_MAX)
    capture = capture_of(log)
    assert eventually(lambda: len(descendants(int(capture.name))) > 1, COME_SECONDS_MAX), "it has a keeper of the log"
    below = descendants(int(capture.name))
    query.stop()
    assert eventually(lambda: not living(below) and slots(database) == [False], COME_SECONDS_MAX)
    execute(database, "insert into t values (3, 'while nobody looked')")
    query = stream.start()
    assert eventually(lambda: stream.ids == [1, 2, 2, 3], COME_SECONDS_MAX)
    # The source's own process is killed: the query ends with it, and so does the capture.
    capture = capture_of(log)
    source = int((capture / "stat").read_text().split()[3])
    assert b"python_streaming_source_runner" in _said(Path(f"/proc/{source}/cmdline"))
    below = descendants(source)
    os.kill(source, 9)
    execute(database, "insert into t values (4, 'killed')")
    with pytest.raises(PySparkException):
        query.awaitTermination(COME_SECONDS_MAX)
    assert eventually(lambda: not living(below) and slots(database) == [False], COME_SECONDS_MAX)
    query = stream.start()
    assert eventually(lambda: stream.ids == [1, 2, 2, 3, 4], COME_SECONDS_MAX)
    query.stop()
    assert eventually(lambda: not captures(log) and slots(database) == [False], COME_SECONDS_MAX)
    changes = spark.read.format("cdc").option("table", "public.t").load(str(log))
    assert sorted(row["id"] for row in changes.collect()) == [1, 2, 2, 3, 4], "the log is one like any other"


def living(pids: set[int]) -> set[int]:
    """Those that still run."""
    return {pid for pid in pids if _said(Path(f"/proc/{pid}/cmdline"))}


def test_a_stream_without_a_log_says_why_it_needs_one(spark: SparkSession, database: str, tmp_path: Path) -> None:
    execute(database, "create table t (id int primary key)")
    with pytest.raises(PySparkException, match=r"the option `log` is missing.*`checkpointLocation`") as caught:
        Streamed(spark, tmp_path, url=database, table="public.t").run()
    assert "another exception occurred" not in str(caught.value)


def test_a_log_in_a_store_is_streamed_and_read_by_its_url(spark: SparkSession, s3: S3, tmp_path: Path) -> None:
    diary = Diary(s3.place())
    diary.commit(inserts(1, 2))
    seal(diary.path)
    diary.commit(inserts(3))
    streamed = Streamed(spark, tmp_path, log=diary.path, table="public.things", consumer="nightly")
    streamed.run()
    diary.commit(inserts(4))
    streamed.run()
    assert streamed.ids == [1, 2, 3, 4]
    # The checkpoint is of this log, by whichever of its names it is called.
    sparks = str(diary.path).replace("s3://", "s3a://")
    again = Streamed(spark, tmp_path, log=sparks, table="public.things", consumer="nightly")
    diary.commit(inserts(5))
    again.run()
    diary.close()
    assert again.ids == [5]
    assert [hold.name for hold in consumers.read_holds(diary.path)] == ["nightly"]
    options = {"log": str(diary.path), "table": "public.things", "startingPosition": "2"}
    read = spark.read.format("cdc").options(**options).load()
    assert sorted(row["id"] for row in read.collect()) == [3, 4, 5]
