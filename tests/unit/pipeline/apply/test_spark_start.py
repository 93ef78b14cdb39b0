"""The scratch folder of a pipeline's Spark."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from tailrace.changelog.read.reader import ChangeLog
from tailrace.pipeline.apply.spark_start import make_scratch
from tests.support.logs import Diary


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ChangeLog:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    Diary(tmp_path / "log").close()
    return ChangeLog.open(tmp_path / "log")


def test_a_process_that_lost_the_lease_does_not_remove_its_successors_folder(log: ChangeLog) -> None:
    first = make_scratch(log)
    second = make_scratch(log)
    (second / "python").touch()
    shutil.rmtree(first, ignore_errors=True)
    assert (second / "python").exists()


def test_what_a_killed_predecessor_left_is_removed(log: ChangeLog) -> None:
    (make_scratch(log) / "checkpoint-0").mkdir()
    now = make_scratch(log)
    assert list(now.parent.rglob("*")) == [now]
