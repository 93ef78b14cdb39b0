"""Spark's classes, loaded and checked once and kept in a file: Spark then starts in a third of the time.

Java writes the file, a class data archive, when a Spark that was told so ends. It fits one Java and one place of
Spark's jars; a Java to which it does not fit starts without it.
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
    """Make the archive for this Java and this Spark, unless it is there."""
    path = archive_path(find_java())
    if path.exists():
        return
    aside = files.temp_path(path)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            _make(Path(scratch), aside)
        files.sync_file(aside)  # Java does not check what it maps
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


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
    """What a pipeline has Spark do: a stream that wakes, a task in a Python process."""
    done, stopping = threading.Event(), threading.Event()
    wake = WakeSource(lambda _: 1, 0)

    def on_batch(_batch: DataFrame, _number: int) -> None:
        if (end := wake.announced_commit()) is not None:
            session.sparkContext.parallelize([1, 2], 2).map(str).collect()
            wake.acknowledge(end)
            done.set()

    speaking = threading.Thread(target=wake.serve, args=(stopping,), daemon=True)
    speaking.start()
    query = wake.start(session, scratch / "checkpoint", on_batch)
    until = time.monotonic() + WAIT_SECONDS_MAX
    while not done.wait(0.1):
        if not query.isActive or time.monotonic() >= until:
            raise RuntimeError(f"Spark did not do its work: {query.exception()}")
    query.stop()
    stopping.set()
    speaking.join()
