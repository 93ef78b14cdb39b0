"""Tasks in other processes than the driver's: executors of `local-cluster`, of a standalone master, and Connect.

One short stream is always run; the rest takes minutes, and runs where there is time (`make matrix`, `make soak`).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from tailrace.spark.session.session import Jvm
from tests.support.clusters import Cluster, cluster_environment, spark_program, standalone
from tests.support.engines import IS_SPARK
from tests.support.logs import Diary, inserts, seal
from tests.support.pipelines import Pipeline, eventually, execute
from tests.support.stores import ENVIRONMENT, S3, s3_server
from tests.support.thorough import thorough

LOCAL_CLUSTER = "local-cluster[2,1,1024]"
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "clusters.md"
SUBMIT_SECONDS_MAX, GONE_SECONDS_MAX, COME_SECONDS_MAX = 600, 240, 300
pytestmark = pytest.mark.skipif(IS_SPARK, reason="who writes tables makes no difference to who runs tasks")
ORDERS = (
    "create table orders (id int primary key, state text)",
    "insert into orders select i, 'new' from generate_series(1, 5000) i",
)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    """A store whose credentials are in the environment of everybody, and whose address is in nobody's."""
    with pytest.MonkeyPatch.context() as patch, s3_server() as found:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
            patch.delenv(name, raising=False)
        yield found


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory, s3: S3) -> Iterator[SparkSession]:
    """A session whose executors are processes of their own."""
    scratch = tmp_path_factory.mktemp("local-cluster")
    jvm = Jvm("cluster", scratch, scratch / "spark.log", master=LOCAL_CLUSTER)
    try:
        session = jvm.open_session()
        yield session
        assert session.sparkContext._jsc.sc().getExecutorMemoryStatus().size() > 1, "the driver is one of them"
        session.stop()
        jvm.end(GONE_SECONDS_MAX)
    finally:
        jvm.kill()


def streamed(spark: SparkSession, folder: Path, **options: str) -> dict[int, list[int]]:
    """What a stream of things brings now, micro-batch by micro-batch."""
    found: dict[int, list[int]] = {}

    def note(batch: DataFrame, number: int) -> None:
        found[number] = sorted(row["id"] for row in batch.select("id").collect())

    changes = spark.readStream.format("cdc").options(**options).option("table", "public.things")
    writer = changes.option("rowsPerPartition", 4).load().writeStream.foreachBatch(note)
    writer = writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True)
    while True:
        try:
            assert writer.start().awaitTermination(COME_SECONDS_MAX)
        except PySparkException as error:
            # On a busy machine: Spark gives a source's process ten seconds to start.
            if "failed to connect back" not in str(error):
                raise
        else:
            return found


def test_changes_are_streamed_and_a_table_is_read_by_executors(
    spark: SparkSession, database: str, tmp_path: Path
) -> None:
    execute(database, *ORDERS)
    diary = Diary(tmp_path / "log")
    diary.commit(inserts(*range(1, 9)))
    diary.close()
    assert spark.sparkContext.pythonExec == sys.executable, "a path that workers have"
    assert streamed(spark, tmp_path, log=str(diary.path)) == {0: list(range(1, 9))}
    table = spark.read.format("cdc").option("url", database).option("table", "public.orders")
    assert table.option("chunkBytes", "64KiB").load().where("id > 2500").count() == 2500


@thorough
def test_executors_are_told_by_options_where_the_store_of_a_log_is(spark: SparkSession, s3: S3, tmp_path: Path) -> None:
    diary = Diary(s3.place())
    diary.commit(inserts(*range(1, 7)))
    seal(diary.path)
    diary.commit(inserts(7, 8))
    diary.close()
    options = {"log": str(diary.path).replace("s3://", "s3a://"), "logEndpoint": s3.endpoint, "logRegion": "us-east-1"}
    assert streamed(spark, tmp_path, **options) == {0: list(range(1, 9))}
    changes = spark.read.format("cdc").options(**options, table="public.things", rowsPerPartition="4").load()
    assert sorted(row["id"] for row in changes.collect()) == list(range(1, 9))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with standalone(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine as workers here know it; its own name may not be known to anyone."""
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")


def on(master: str) -> str:
    """What a pipeline's settings say of it."""
    return f'spark: {{master: "{master}"}}\n'


@thorough
@pytest.mark.usefixtures("at_home")
def test_a_pipeline_loads_and_applies_with_executors_of_local_cluster(database: str, tmp_path: Path) -> None:
    execute(database, *ORDERS)
    pipeline = Pipeline(tmp_path / "pipeline", database, extra=on(LOCAL_CLUSTER))
    pipeline.catch_up()
    execute(database, "update orders set state = 'paid' where id % 3 = 0", "delete from orders where id % 7 = 0")
    pipeline.catch_up()
    pipeline.assert_equal("orders")


@thorough
@pytest.mark.usefixtures("at_home")
def test_a_pipeline_goes_on_when_every_executor_is_killed(cluster: Cluster, database: str, tmp_path: Path) -> None:
    execute(database, *ORDERS)
    pipeline = Pipeline(tmp_path / "pipeline", database, extra=on(cluster.master))
    running = pipeline.start("run")
    try:
        assert eventually(lambda: _is_live(pipeline), COME_SECONDS_MAX), running.said()
        execute(database, "update orders set state = 'paid' where id % 3 = 0")
        assert eventually(lambda: _applied(pipeline) >= 1666, COME_SECONDS_MAX), running.said()
        killed = cluster.executors()
        assert len(killed) == 2
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        execute(database, "delete from orders where id % 7 = 0")
        assert eventually(lambda: _applied(pipeline) >= 1666 + 714, COME_SECONDS_MAX), running.said()
        assert set(cluster.executors()).isdisjoint(killed)
        assert running.terminate() == 0, running.said()
    finally:
        running.end()
    pipeline.assert_equal("orders")
    assert eventually(lambda: not cluster.executors(), GONE_SECONDS_MAX), "they end with the pipeline"


@thorough
def test_the_commands_of_the_guide_run_with_spark_submit(cluster: Cluster, database: str, tmp_path: Path) -> None:
    programs = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", GUIDE.read_text(), re.DOTALL))
    for name, code in programs.items():
        (tmp_path / name).write_text(code)
    execute(database, *ORDERS)
    pipeline = Pipeline(tmp_path / "pipeline", database)
    assert "pipeline.py run tailrace.yaml" in GUIDE.read_text()
    submit(cluster, "--executor-memory", "1g", tmp_path / "pipeline.py", "run", pipeline.file, "--until-caught-up")
    execute(database, "update orders set state = 'paid' where id <= 100")
    submit(cluster, "--executor-memory", "1g", tmp_path / "pipeline.py", "run", pipeline.file, "--until-caught-up")
    pipeline.assert_equal("orders")
    submit(cluster, tmp_path / "changes.py", pipeline.log, tmp_path / "checkpoint", tmp_path / "out")
    rows = pq.read_table(list((tmp_path / "out").glob("*.parquet")))
    assert sorted(rows.column("id").to_pylist()) == list(range(1, 101))
    assert set(rows.column("_op").to_pylist()) == {"update"}


def submit(cluster: Cluster, *arguments: str | Path) -> None:
    done = subprocess.run(
        [spark_program("spark-submit"), "--master", cluster.master, *arguments],
        capture_output=True,
        text=True,
        env={**cluster_environment(), "PYSPARK_PYTHON": sys.executable},
        timeout=SUBMIT_SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def _is_live(pipeline: Pipeline) -> bool:
    with suppress(AssertionError, StopIteration):  # there is no log yet, or no table in it
        return bool(pipeline.table_status("orders")["state"] == "live")
    return False


def _applied(pipeline: Pipeline) -> int:
    return int(pipeline.table_status("orders")["rows_applied"])
