"""A stream of stock Spark of which one part is killed: after the next start every row is there, once, and nothing of
the first is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest

from tailrace.changelog.read.reader import ChangeLog
from tailrace.spark.session.java import find_java
from tests.support.pipelines import descendants, eventually, execute
from tests.support.stores import ENVIRONMENT, s3_server
from tests.support.thorough import thorough

COME_SECONDS_MAX = 300.0

DRIVER = """
import json, os, sys
from pyspark.sql import SparkSession
options, folder, master, trigger = sys.argv[1:]
spark = SparkSession.builder.master(master).config("spark.ui.enabled", "false").config(
    "spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1").config(
    "spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"]).config("spark.task.maxFailures", "8").config(
    "spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1").getOrCreate()
frame = spark.readStream.format("cdc").options(**json.loads(options)).option("table", "public.t").option(
    "rowsPerPartition", "100").load()

def write(batch, number):
    ids = [row["id"] for row in batch.select("id").collect()]
    path = os.path.join(folder, "out", f"{number}.json")
    with open(path + ".tmp", "w") as file:
        json.dump(ids, file)
    os.replace(path + ".tmp", path)

writer = frame.writeStream.foreachBatch(write).option("checkpointLocation", os.path.join(folder, "checkpoint"))
print("started", flush=True)
while True:
    query = (writer.trigger(availableNow=True) if trigger == "all" else writer).start()
    try:
        query.awaitTermination()
        break
    except Exception as error:
        # On a busy machine: Spark gives a source's process ten seconds to start.
        if "failed to connect back" not in str(error):
            raise
spark.stop()
"""


class Drivers:
    """Starts the same query again and again."""

    def __init__(self, url: str, folder: Path, master: str, **options: str) -> None:
        self._options = {"url": url, "log": str(folder / "log"), **options}
        self._folder, self._master = folder, master
        (folder / "out").mkdir()

    @contextmanager
    def running(self, trigger: str = "on") -> Iterator[subprocess.Popen[bytes]]:
        environment = os.environ | {
            "PYSPARK_PYTHON": sys.executable,
            "JAVA_HOME": str(find_java()),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        with (self._folder / "said").open("ab") as said:
            process = subprocess.Popen(
                [sys.executable, "-c", DRIVER, json.dumps(self._options), str(self._folder), self._master, trigger],
                stdout=subprocess.PIPE,
                stderr=said,
                env=environment,
                cwd=self._folder,
                start_new_session=True,
            )
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"started\n", (self._folder / "said").read_text()[-3000:]
            yield process
        finally:
            process.kill()
            process.wait()
            process.stdout.close()

    def ids(self) -> list[int]:
        """All that the query has written, in order."""
        files = sorted((self._folder / "out").glob("*.json"), key=lambda path: int(path.stem))
        return [key for file in files for key in json.loads(file.read_text())]


def slot_is_free(url: str) -> bool:
    with psycopg.connect(url) as connection:
        rows = connection.execute("select active from pg_replication_slots where database = current_database()")
        return [active for (active,) in rows.fetchall()] == [False]


def processes(driver: subprocess.Popen[bytes], *words: str) -> list[int]:
    """Those below a driver whose command line has these words."""
    found = []
    for pid in descendants(driver.pid) - {driver.pid}:
        try:
            said = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if all(word.encode() in said for word in words):
            found.append(pid)
    return found


def kill(victims: list[int]) -> bool:
    """Whether there were any."""
    for pid in victims:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(victims)


@contextmanager
def writing(url: str) -> Iterator[list[int]]:
    """Somebody who inserts all the time; the ids that were committed."""
    done, written = threading.Event(), list[int]()

    def write() -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            while not done.wait(0.02):
                key = len(written) + 1
                connection.execute("insert into t values (%s)", (key,))
                written.append(key)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield written
    finally:
        done.set()
        thread.join()


def alive(pids: set[int]) -> list[bytes]:
    """The command lines of those that still run."""
    found = []
    for pid in pids:
        try:
            status, said = (Path(f"/proc/{pid}/{name}").read_bytes() for name in ("stat", "cmdline"))
        except OSError:
            continue
        if status.rpartition(b")")[2].split()[0] != b"Z":
            found.append(said)
    return found


@pytest.mark.parametrize(
    ("master", "killed"),
    [
        pytest.param("local[2]", (), id="driver"),
        pytest.param("local[2]", ("java",), id="java", marks=thorough),
        pytest.param("local[2]", ("python_streaming_source_runner",), id="source", marks=thorough),
        pytest.param("local[2]", ("pyspark.daemon", "pyspark.worker"), id="workers", marks=thorough),
        pytest.param("local[2]", ("tailrace.pipeline.capture.embedded_capture",), id="capture", marks=thorough),
        pytest.param("local-cluster[2,1,1024]", ("CoarseGrainedExecutorBackend",), id="executor", marks=thorough),
    ],
)
def test_every_row_is_written_once_whatever_is_killed(
    database: str, tmp_path: Path, master: str, killed: tuple[str, ...]
) -> None:
    execute(database, "create table t (id int primary key)")
    drivers = Drivers(database, tmp_path, master)
    with drivers.running() as driver, writing(database) as written:
        assert eventually(lambda: len(drivers.ids()) > 5, COME_SECONDS_MAX)
        below = descendants(driver.pid)
        assert processes(driver, "python_streaming_source_runner"), "the source has a process of its own"
        assert processes(driver, "tailrace.pipeline.capture.embedded_capture"), "and so has its capture"
        if killed:
            # Spark may just be starting it anew.
            assert eventually(lambda: kill(processes(driver, *killed)), pause=0.02), "there is something to kill"
            time.sleep(3)  # what survives goes on
        else:
            driver.kill()
    assert eventually(lambda: not alive(below) and slot_is_free(database), COME_SECONDS_MAX), alive(below)
    with drivers.running("all") as driver:
        assert driver.wait(COME_SECONDS_MAX) == 0
    assert eventually(lambda: slot_is_free(database), COME_SECONDS_MAX)
    first = drivers.ids()[0]
    assert drivers.ids() == list(range(first, len(written) + 1)), "from the slot's making on"


@thorough
def test_a_stream_captures_into_a_store_and_goes_on_there_when_its_driver_is_started_again(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(database, "create table t (id int primary key)")
    with s3_server() as s3:
        for name, value in ENVIRONMENT.items():
            monkeypatch.setenv(name, value)
        log = s3.place()
        sparks = str(log).replace("s3://", "s3a://")
        drivers = Drivers(database, tmp_path, "local[2]", log=sparks, logEndpoint=s3.endpoint)
        with drivers.running() as driver, writing(database) as written:
            assert eventually(lambda: len(drivers.ids()) > 5, COME_SECONDS_MAX)
            below = descendants(driver.pid)
            assert processes(driver, "tailrace.pipeline.capture.embedded_capture", str(log)), (
                "the capture is a process beside it"
            )
            driver.terminate()
            driver.wait(COME_SECONDS_MAX)
        assert eventually(lambda: not alive(below) and slot_is_free(database), COME_SECONDS_MAX), alive(below)
        with drivers.running("all") as driver:
            assert driver.wait(COME_SECONDS_MAX) == 0
        assert eventually(lambda: slot_is_free(database), COME_SECONDS_MAX)
        first = drivers.ids()[0]
        assert drivers.ids() == list(range(first, len(written) + 1)), "from the slot's making on"
        captured = [key for batch in ChangeLog.open(log).follow() for key in batch.data.column("id").to_pylist()]
        assert captured == drivers.ids(), "the log is one like any other"
    assert not (tmp_path / "log").exists()
