"""The Spark session of a pipeline: quiet, gone when we are, and on this machine unless the settings say otherwise.

Those who load may keep a slot each for long; on this machine there is always one more, for applying. Where
`spark-submit` has started us, its Java process is the one, which ends after us, and what it was told holds unless the
pipeline's settings say otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from tailrace.spark.session.cluster import place_environment, placed_settings
from tailrace.spark.session.java import archive_path, find_java

_FILE_MANAGER = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.driver.memory": "1g",
    "spark.python.worker.reuse": "true",
    # On a busy machine a worker takes its time to start.
    "spark.python.authenticate.socketTimeout": "120s",
    # A worker keeps its memory for ever; the merge's peaks are given back sooner with one arena.
    "spark.executorEnv.MALLOC_ARENA_MAX": "2",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.adaptive.enabled": "false",
    # The checkpoint only wakes work, and its folder is local: the plain file manager is faster.
    "spark.sql.streaming.checkpointFileManagerClass": _FILE_MANAGER,
    "spark.sql.streaming.minBatchesToRetain": "2",
    "spark.sql.streaming.pollingDelay": "50ms",
}

_SUBMITTED = "PYSPARK_GATEWAY_PORT"
"""In the environment of a program that spark-submit has started."""
_JAVA_OPTIONS = (
    # Spark redacts long error texts with regular expressions that overflow the usual stack.
    "-Xss8m",
    # Rows never pass the JVM. It plans and wakes, and the better compiler costs more than it brings.
    "-XX:TieredStopAtLevel=1",
)


class Jvm:
    """Spark's Java process, and the session in it. What it prints goes to the file.

    Starting takes seconds, so it may be done in one thread and ended by another.
    """

    def __init__(
        self,
        name: str,
        scratch: Path,
        log_file: Path,
        *,
        java_options: Sequence[str] | None = None,
        master: str | None = None,
        settings: Mapping[str, str] | None = None,
        readers: int = 2,
    ) -> None:
        java = find_java()
        os.environ["JAVA_HOME"] = str(java)
        self._gateway: Any = launch_gateway() if _SUBMITTED in os.environ else None  # type: ignore[no-untyped-call]
        given = dict(settings or {})
        if self._gateway is not None:
            log_file.write_text("Spark was started by spark-submit: see what that has printed.\n")
            given = _submitted_settings(self._gateway) | given
        slots = max(readers + 1, (os.cpu_count() or 1) + 1)
        master = master or given.get("spark.master") or f"local[{slots}]"
        place_environment(master, scratch, given)
        if java_options is None:
            java_options = _archived(archive_path(java))
        # What Java puts aside goes with the rest, for nobody asks Java to clean up when it is killed.
        temporary = f'"-Djava.io.tmpdir={scratch}"'
        own = (
            _SETTINGS
            | placed_settings(master)
            | {
                "spark.app.name": f"tailrace {name}",
                "spark.local.dir": str(scratch),
                "spark.sql.warehouse.dir": str(scratch / "warehouse"),
                "spark.driver.extraJavaOptions": " ".join([*_JAVA_OPTIONS, temporary, *java_options]),
            }
        )
        self._settings = SparkConf(loadDefaults=False).setAll(list((own | given).items())).setMaster(master)
        if self._gateway is None:
            with log_file.open("wb") as said:  # the workers inherit it from the JVM
                popen = {"stdout": said, "stderr": said}
                self._gateway = launch_gateway(self._settings, popen)  # type: ignore[no-untyped-call] # Spark's

    def open_session(self) -> SparkSession:
        """The session; raises if the process is killed meanwhile."""
        context = SparkContext(conf=self._settings, gateway=self._gateway)
        # It prints a traceback when the JVM hangs up first, which is how every stop ends; it counts nothing of ours.
        context._accumulatorServer.handle_error = _say_nothing  # type: ignore[assignment, method-assign] # Spark's own
        return SparkSession(context)

    def end(self, wait_seconds: float) -> None:
        """Let the process end by itself, as Java likes it."""
        self._gateway.shutdown()
        if self._gateway.proc is None:
            return
        self._gateway.proc.stdin.close()
        code = self._gateway.proc.wait(wait_seconds)
        if code:
            raise RuntimeError(f"Spark's Java process ended with code {code}")

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._gateway.proc is not None and self._gateway.proc.poll() is not None

    def kill(self) -> None:
        """End the process and, with it, everything it started; spark-submit's ends by itself, right after us."""
        if self._gateway.proc is None:
            return
        # Whatever of Java's we still hold is let go of later, and it would be told to a process that is gone.
        self._gateway._gateway_client.is_connected = False
        self._gateway.proc.kill()
        self._gateway.proc.wait()
        # PySpark keeps the gateway for ever; the next session in this process needs a new one.
        with SparkContext._lock:
            if SparkContext._gateway is self._gateway:
                SparkContext._gateway = SparkContext._jvm = None


def _submitted_settings(gateway: Any) -> dict[str, str]:
    """What command line and spark-defaults.conf say; the program's file, which Spark takes for its name, is none."""
    said = dict(SparkConf(_jvm=gateway.jvm).getAll())
    return {name: value for name, value in said.items() if name != "spark.app.name"}


def _archived(path: Path) -> tuple[str, ...]:
    return (f'"-XX:SharedArchiveFile={path}"', "-Xlog:cds=off") if path.exists() else ()


def _say_nothing(*_: object) -> None:
    """Instead of a traceback that means nothing to anyone."""
