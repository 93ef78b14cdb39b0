"""The Spark session of a pipeline: local, quiet, bound to this machine, gone when we are."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

from tailrace.spark.java import find_java

TASK_SLOTS_MIN = 4
"""A load keeps a slot for long, so there are always more than the cores of a small machine."""

_FILE_MANAGER = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "1g",
    # Spark redacts long error texts with regular expressions that overflow the usual stack.
    "spark.driver.extraJavaOptions": "-Xss8m",
    "spark.python.worker.reuse": "true",
    # On a busy machine a worker takes its time to start.
    "spark.python.authenticate.socketTimeout": "120s",
    # A worker keeps its memory for ever; the merge's peaks are given back sooner with one arena.
    "spark.executorEnv.MALLOC_ARENA_MAX": "2",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.adaptive.enabled": "false",
    "spark.task.maxFailures": "1",
    # A data source's exceptions should come back as they are, without Spark's shortening.
    "spark.sql.pyspark.jvmStacktrace.enabled": "false",
    "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "true",
    # The checkpoint only wakes work, and its folder is local: the plain file manager is faster.
    "spark.sql.streaming.checkpointFileManagerClass": _FILE_MANAGER,
    "spark.sql.streaming.minBatchesToRetain": "2",
    "spark.sql.streaming.pollingDelay": "50ms",
}


def open_session(name: str, scratch: Path, log_file: Path) -> SparkSession:
    """Start Spark on this machine, finding Java first; what it prints goes to the file."""
    os.environ["JAVA_HOME"] = str(find_java())
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ["PYSPARK_PYTHON"] = str(_worker_python(scratch))
    os.environ["PYSPARK_DRIVER_PYTHON"] = os.environ["PYSPARK_PYTHON"]
    slots = max(TASK_SLOTS_MIN, os.cpu_count() or 1)
    builder = SparkSession.Builder().master(f"local[{slots}]").appName(f"tailrace {name}")
    for key, value in _SETTINGS.items():
        builder = builder.config(key, value)
    builder = builder.config("spark.local.dir", str(scratch)).config(
        "spark.sql.warehouse.dir", str(scratch / "warehouse")
    )
    with _stderr_to(log_file):  # the JVM and its workers inherit it
        return builder.getOrCreate()


@contextmanager
def _stderr_to(file: Path) -> Iterator[None]:
    sys.stderr.flush()
    kept, target = os.dup(2), os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    os.dup2(target, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(target)


def _worker_python(scratch: Path) -> Path:
    """This Python, starting our daemon wherever Spark asks for its own.

    `spark.python.daemon.module` names another daemon for tasks, but not for the processes that plan a Python
    data source, so the choice is made one step earlier. Ctrl-C is the pipeline's to answer, not theirs.
    """
    program = scratch / "python"
    program.write_text(f"""#!/bin/sh
trap '' INT
if [ "$1" = -m ] && [ "$2" = pyspark.daemon ]; then
  shift 2
  set -- -m tailrace.spark.daemon "$@"
fi
exec "{sys.executable}" "$@"
""")
    program.chmod(0o755)
    return program
