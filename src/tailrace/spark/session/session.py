"""The Spark session of a pipeline. It prints little, ends with us, and is on this machine by default.

Load tasks may keep a slot each for long. On this machine there is always one more slot, for the apply. Where
`spark-submit` has started us, its Java process is used, which ends after us. Its settings hold unless the pipeline's
settings say otherwise.
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
    # On a busy machine a worker is slow to start.
    "spark.python.authenticate.socketTimeout": "120s",
    # A worker keeps its memory for ever. With few arenas the merge's peaks are given back sooner.
    "spark.executorEnv.MALLOC_ARENA_MAX": "2",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.adaptive.enabled": "false",
    # The query only wakes work, and its checkpoint is local: the plain file manager is faster.
    "spark.sql.streaming.checkpointFileManagerClass": _FILE_MANAGER,
    "spark.sql.streaming.minBatchesToRetain": "2",
    "spark.sql.streaming.pollingDelay": "50ms",
}

_SUBMITTED = "PYSPARK_GATEWAY_PORT"
"""Environment variable of a program that spark-submit has started."""
_JAVA_OPTIONS = (
    # Spark redacts long error texts with regular expressions that overflow the usual stack.
    "-Xss8m",
    # Rows never pass the JVM, which plans and wakes only. The better compiler costs more than it saves.
    "-XX:TieredStopAtLevel=1",
)


class Jvm:
    """Spark's Java process and the session in it. It prints to a file.

    Starting takes seconds, so one thread may start it and another may end it.
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
        requested = dict(settings or {})
        if self._gateway is not None:
            log_file.write_text("Spark was started by spark-submit: see what that has printed.\n")
            requested = _submitted_settings(self._gateway) | requested
        slots = max(readers + 1, (os.cpu_count() or 1) + 1)
        master = master or requested.get("spark.master") or f"local[{slots}]"
        place_environment(master, scratch, requested)
        if java_options is None:
            java_options = _archive_options(archive_path(java))
        # Java's temporary files are removed with the scratch folder: a killed Java does not clean up.
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
        self._settings = SparkConf(loadDefaults=False).setAll(list((own | requested).items())).setMaster(master)
        if self._gateway is None:
            with log_file.open("wb") as output:  # the workers inherit it from the JVM
                popen = {"stdout": output, "stderr": output}
                self._gateway = launch_gateway(self._settings, popen)  # type: ignore[no-untyped-call] # Spark's

    def open_session(self) -> SparkSession:
        """Open the session; raise if the process is killed meanwhile."""
        context = SparkContext(conf=self._settings, gateway=self._gateway)
        # It prints a traceback when the JVM hangs up first, as at every stop. We use no accumulators.
        context._accumulatorServer.handle_error = _ignore  # type: ignore[assignment, method-assign] # Spark's own
        return SparkSession(context)

    def end(self, wait_seconds: float) -> None:
        """Wait until the process has ended normally; kill nothing."""
        self._gateway.shutdown()
        if self._gateway.proc is None:
            return
        self._gateway.proc.stdin.close()
        code = self._gateway.proc.wait(wait_seconds)
        if code:
            raise RuntimeError(f"Spark's Java process ended with code {code}")

    @property
    def ended(self) -> bool:
        """True once the process has ended."""
        return self._gateway.proc is not None and self._gateway.proc.poll() is not None

    def kill(self) -> None:
        """End the process and everything that it started. That of spark-submit ends automatically, right after us."""
        if self._gateway.proc is None:
            return
        # Java objects that we still hold are released later, with a message to a process that is gone.
        self._gateway._gateway_client.is_connected = False
        self._gateway.proc.kill()
        self._gateway.proc.wait()
        # PySpark keeps the gateway for ever; the next session in this process needs a new one.
        with SparkContext._lock:
            if SparkContext._gateway is self._gateway:
                SparkContext._gateway = SparkContext._jvm = None


def _submitted_settings(gateway: Any) -> dict[str, str]:
    """Return the settings of command line and spark-defaults.conf.

    They leave out the application's name, for which Spark takes the program's file.
    """
    configured = dict(SparkConf(_jvm=gateway.jvm).getAll())
    return {name: value for name, value in configured.items() if name != "spark.app.name"}


def _archive_options(path: Path) -> tuple[str, ...]:
    return (f'"-XX:SharedArchiveFile={path}"', "-Xlog:cds=off") if path.exists() else ()


def _ignore(*_: object) -> None:
    """Print nothing, instead of a meaningless traceback."""
