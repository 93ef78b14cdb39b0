"""A Spark cluster of one machine's: a standalone master and two workers, each a process, gone at the end.

PySpark as pip installs it has no `sbin` scripts, so the classes are started as those do it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from pyspark.find_spark_home import _find_spark_home

from tailrace.spark.session.java import find_java
from tests.support.pipelines import eventually, group_members

START_SECONDS_MAX = 180.0
"""On a machine that does much else."""
_MASTER, _WORKER = "org.apache.spark.deploy.master.Master", "org.apache.spark.deploy.worker.Worker"
_HERE = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")


def spark_program(name: str) -> Path:
    """One of Spark's own commands."""
    return Path(_find_spark_home()) / "bin" / name


def cluster_environment() -> dict[str, str]:
    """For everything that belongs to it: this machine alone, and a Java."""
    return {**os.environ, "JAVA_HOME": str(find_java()), "SPARK_LOCAL_IP": "127.0.0.1"}


@dataclass
class Cluster:
    """A master and its workers."""

    folder: Path
    master: str = ""
    """Its address."""
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, workers: int = 2) -> None:
        said = self._run("master", _MASTER, *_HERE, until=r"Starting Spark master at (spark://\S+)")
        self.master = said.group(1)
        for number in range(workers):
            name, own = f"worker-{number}", ("--cores", "2", "--memory", "1g")
            work = ("--work-dir", str(self.folder / name), self.master)
            self._run(name, _WORKER, *_HERE, *own, *work, until="Successfully registered with master")

    def _run(self, name: str, *arguments: str, until: str) -> re.Match[str]:
        file = self.folder / f"{name}.log"
        with file.open("wb") as log:
            process = subprocess.Popen(
                [spark_program("spark-class"), *arguments],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=cluster_environment(),
                cwd=self.folder,
            )
        self._processes.append(process)
        assert eventually(lambda: re.search(until, file.read_text()), START_SECONDS_MAX), file.read_text()
        found = re.search(until, file.read_text())
        assert found is not None
        return found

    def executors(self) -> list[int]:
        """The processes that run tasks."""
        found = []
        for process in self._processes[1:]:
            for pid in group_members(process.pid) - {process.pid}:
                with suppress(OSError):
                    if b"CoarseGrainedExecutorBackend" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        found.append(pid)
        return found

    def stop(self) -> None:
        for process in reversed(self._processes):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def standalone(folder: Path) -> Iterator[Cluster]:
    """A cluster with two workers that have two slots each."""
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
