"""Settings that follow from where tasks run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.spark.session import cluster
from tailrace.spark.session.cluster import DAEMON, place_environment, placed_settings

REMOTE = "spark://spark.example.com:7077"
VARIABLES = ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_LOCAL_IP")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # monkeypatch then restores it
        monkeypatch.delenv(name)
    monkeypatch.setattr(cluster, "_USER_PYTHON", None)


@pytest.mark.parametrize("master", ["local", "local[4]", "local[*]"])
def test_on_this_machine_nothing_listens_to_others_and_a_task_is_tried_once(master: str, tmp_path: Path) -> None:
    settings = placed_settings(master)
    assert settings["spark.driver.bindAddress"] == settings["spark.driver.host"] == "127.0.0.1"
    assert settings["spark.task.maxFailures"] == "1"
    place_environment(master, tmp_path, {})
    assert os.environ["SPARK_LOCAL_IP"] == "127.0.0.1"
    program = Path(os.environ["PYSPARK_PYTHON"])
    result = subprocess.run([program, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True)
    assert (program.parent, result.stdout.strip()) == (tmp_path, sys.executable)


@pytest.mark.parametrize("master", [REMOTE, "yarn", "k8s://https://example.com", "local-cluster[2,1,1024]"])
def test_on_a_cluster_nothing_is_named_that_only_the_driver_has(master: str, tmp_path: Path) -> None:
    settings = placed_settings(master)
    assert settings["spark.python.daemon.module"] == DAEMON
    assert "spark.task.maxFailures" not in settings, "a task that is lost with its executor is run again"
    place_environment(master, tmp_path, {})
    assert os.environ["PYSPARK_PYTHON"] == sys.executable
    assert not list(tmp_path.iterdir())


def test_workers_on_other_machines_can_reach_the_driver_and_those_on_this_one_need_no_network(tmp_path: Path) -> None:
    assert not {"spark.driver.host", "spark.driver.bindAddress"} & set(placed_settings(REMOTE))
    place_environment(REMOTE, tmp_path, {})
    assert "SPARK_LOCAL_IP" not in os.environ
    assert placed_settings("local-cluster[2,1,1024]")["spark.driver.host"] == "127.0.0.1"


def test_the_python_of_a_cluster_is_the_one_in_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_USER_PYTHON", "/opt/there/bin/python")
    place_environment(REMOTE, tmp_path, {})
    assert os.environ["PYSPARK_PYTHON"] == "/opt/there/bin/python"
    place_environment(REMOTE, tmp_path, {"spark.pyspark.python": "/opt/other/bin/python"})
    assert os.environ["PYSPARK_PYTHON"] == "/opt/other/bin/python"
    assert os.environ["PYSPARK_DRIVER_PYTHON"] == sys.executable
