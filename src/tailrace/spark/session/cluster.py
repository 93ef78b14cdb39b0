"""Settings that follow from where Spark's tasks run: on this machine, or on a cluster.

On this machine nothing listens to others, everything stays in the pipeline's process group, and a task is tried once.
On a cluster no setting may name what only the driver has. Tasks run in a Python that the workers have under that path.
A task that was lost with its executor is run again, which is safe because the table has its own applied position.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

DAEMON = "tailrace.spark.session.worker_daemon"
PYTHON_SETTING = "spark.pyspark.python"
_LOOPBACK = "127.0.0.1"
_USER_PYTHON = os.environ.get("PYSPARK_PYTHON")
"""The user's own setting, read before ours replaces it."""


def is_cluster(master: str) -> bool:
    """Return whether tasks run in other processes than the driver's Java."""
    return not (master == "local" or master.startswith("local["))


def placed_settings(master: str) -> dict[str, str]:
    """Return Spark's settings that follow from where it runs."""
    here = {"spark.driver.bindAddress": _LOOPBACK, "spark.driver.host": _LOOPBACK}
    if not is_cluster(master):
        return here | {"spark.task.maxFailures": "1"}
    # On a cluster the documented setting is enough: no Python of the workers plans a task of ours.
    daemon = {"spark.python.daemon.module": DAEMON}
    return daemon | here if _is_this_machine(master) else daemon


def place_environment(master: str, scratch: Path, settings: Mapping[str, str]) -> None:
    """Set the environment variables for the tasks' Python and this machine's address.

    Spark reads both from the environment.
    """
    if _is_this_machine(master):
        os.environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)
    if is_cluster(master):
        os.environ["PYSPARK_PYTHON"] = settings.get(PYTHON_SETTING) or _USER_PYTHON or sys.executable
        os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    else:
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = str(_worker_python(scratch))


def _is_this_machine(master: str) -> bool:
    return master.startswith("local")


def _worker_python(scratch: Path) -> Path:
    """Return a script that runs this Python. It starts our daemon wherever Spark wants its own.

    `spark.python.daemon.module` names another daemon for tasks, but not for the processes that plan a Python data
    source. So the choice is made one step earlier. The pipeline answers Ctrl-C, not these processes.
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
