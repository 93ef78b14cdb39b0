"""Where Spark's tasks run, and what follows for its settings: on this machine, or on a cluster.

On this machine nothing listens to others, everything stays in the pipeline's process group, and a task is tried once.
On a cluster nothing may be named that only the driver has: tasks run in a Python that the workers have by that path,
and one that was lost with its executor is run again, which its table's own position allows.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

DAEMON = "tailrace.spark.session.worker_daemon"
PYTHON_SETTING = "spark.pyspark.python"
_LOOPBACK = "127.0.0.1"
_GIVEN_PYTHON = os.environ.get("PYSPARK_PYTHON")
"""The user's word for it, read before ours is put in its place."""


def is_cluster(master: str) -> bool:
    """Whether tasks run in other processes than the driver's Java."""
    return not (master == "local" or master.startswith("local["))


def placed_settings(master: str) -> dict[str, str]:
    """Settings of Spark's that follow from where it runs."""
    here = {"spark.driver.bindAddress": _LOOPBACK, "spark.driver.host": _LOOPBACK}
    if not is_cluster(master):
        return here | {"spark.task.maxFailures": "1"}
    # There the documented way is enough: no task of ours is planned by a Python of the workers'.
    daemon = {"spark.python.daemon.module": DAEMON}
    return daemon | here if _is_this_machine(master) else daemon


def place_environment(master: str, scratch: Path, settings: Mapping[str, str]) -> None:
    """Tell Spark, which asks the environment, which Python runs tasks, and where this machine listens."""
    if _is_this_machine(master):
        os.environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)
    if is_cluster(master):
        os.environ["PYSPARK_PYTHON"] = settings.get(PYTHON_SETTING) or _GIVEN_PYTHON or sys.executable
        os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    else:
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = str(_worker_python(scratch))


def _is_this_machine(master: str) -> bool:
    return master.startswith("local")


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
  set -- -m {DAEMON} "$@"
fi
exec "{sys.executable}" "$@"
""")
    program.chmod(0o755)
    return program
