"""Make a class data archive, with which Spark starts in a third of the time.

The archive holds Spark's classes, loaded and checked once. Java writes it when a Spark that was started with that
option ends. It fits one Java and one location of Spark's jars; any other Java starts without it.
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from tailrace.spark.session.java import archive_path, find_java
from tailrace.spark.session.session import Jvm
from tailrace.spark.session.wakeup import WakeSource
from tailrace.storage import files

WAIT_SECONDS_MAX = 300.0


def make_archive() -> None:
    """Make the archive for this Java and this Spark, unless it exists."""
    path = archive_path(find_java())
    if path.exists():
        return
    temporary = files.temp_path(path)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            _make(Path(scratch), temporary)
        files.sync_file(temporary)  # Java does not check what it maps
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _make(scratch: Path, path: Path) -> None:
    jvm = Jvm("archive", scratch, scratch / "spark.log", java_options=(f'"-XX:ArchiveClassesAtExit={path}"',))
    try:
        session = jvm.open_session()
        _work(session, scratch)
        session.stop()
        jvm.end(WAIT_SECONDS_MAX)
    finally:
        jvm.kill()


def _work(session: SparkSession, scratch: Path) -> None:
    """Do a pipeline's Spark work. Runs a stream that wakes work, and a task in a Python process."""
    done, stopping = threading.Event(), threading.Event()
    source = WakeSource(lambda _: 1, 0)

    def on_batch(_batch: DataFrame, _number: int) -> None:
        if (end := source.announced_commit()) is not None:
            session.sparkContext.parallelize([1, 2], 2).map(str).collect()
            source.acknowledge(end)
            done.set()

    thread = threading.Thread(target=source.serve, args=(stopping,), daemon=True)
    thread.start()
    query = source.start(session, scratch / "checkpoint", on_batch)
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not done.wait(0.1):
        if not query.isActive or time.monotonic() >= deadline:
            raise RuntimeError(f"the query ended without its work: {query.exception()}")
    query.stop()
    stopping.set()
    thread.join()
