"""A consistent point names versions of the existing lake table, not of an earlier one in the same folder."""

from __future__ import annotations

import json
import shutil
from datetime import timedelta
from pathlib import Path

import pytest

from tailrace.changelog.read.reader import ChangeLog
from tailrace.cli.main import main
from tailrace.control.point_in_time import TablesAt, find_point
from tailrace.errors import ConfigError
from tailrace.pipeline.points.consistent_point import build_point
from tailrace.pipeline.points.ledger import Ledger
from tailrace.pipeline.report import TableState
from tailrace.tables.location import TableLocation
from tests.support.changes import SHOP, insert
from tests.support.quiet import THINGS, Quiet


@pytest.fixture
def quiet(tmp_path: Path) -> Quiet:
    """A table with one point at its version 1."""
    quiet = Quiet(tmp_path)
    quiet.load([{"id": 1, "n": 0}])
    quiet.commit(insert(2))
    quiet.apply()
    record_point(quiet)
    return quiet


def record_point(quiet: Quiet) -> None:
    """Record a point, as the applier does at the end of a micro-batch."""
    registry = quiet.registry()
    registry.add(THINGS).state = TableState.LIVE
    point = build_point(registry, registry.index.last_commit)
    assert point is not None
    Ledger(quiet.settings.log.path).record(point)


def folder(quiet: Quiet) -> Path:
    return quiet.settings.tables.layout.path(THINGS)


def test_a_recreated_table_is_missing_from_earlier_points(quiet: Quiet, capsys: pytest.CaptureFixture[str]) -> None:
    before = str(quiet.applied_position.position)
    assert find_point(quiet.settings).versions == {THINGS: 1}
    shutil.rmtree(folder(quiet))
    assert find_point(quiet.settings).missing[THINGS].why == "its folder is gone"
    quiet.reload([{"id": 1, "n": 0}], "anew")
    quiet.commit(insert(3))
    quiet.apply()
    record_point(quiet)
    assert find_point(quiet.settings).versions == {THINGS: 1}, "the same number, of another table"
    earlier = find_point(quiet.settings, position=before)
    assert (earlier.versions, earlier.missing[THINGS].why) == ({}, "the table was recreated since")
    with pytest.raises(ConfigError, match="no version at this point") as refused:
        TablesAt({}, earlier)[str(THINGS)]
    assert "after the table was loaded again" in str(refused.value.hint)
    assert main(["at", str(quiet.file), "--position", before, "--json"]) == 0
    (missing,) = json.loads(capsys.readouterr().out)["missing"]
    assert missing["why"] == "the table was recreated since"


def test_a_table_that_a_load_partitions_differently_is_still_the_same_table(quiet: Quiet) -> None:
    log = ChangeLog.open(quiet.settings.log.path)
    quiet.file.write_text(quiet.file.read_text().replace("on_bad_row: stop", "on_bad_row: stop, partition_by: [n]"))
    location: TableLocation = quiet.settings.tables.layout.location(THINGS, log.log_id)
    assert location.spec.partition_by == ("n",)
    quiet.load([{"id": 1, "n": 0}], SHOP)
    assert find_point(quiet.settings).versions == {THINGS: 1}


def test_a_datetime_and_a_position_object_are_accepted(quiet: Quiet) -> None:
    point = find_point(quiet.settings)
    assert find_point(quiet.settings, time=point.time, position=None) == point
    assert find_point(quiet.settings, time=point.time.replace(tzinfo=None)) == point, "without a zone it is UTC"
    assert find_point(quiet.settings, position=point.position) == point
    with pytest.raises(ConfigError, match="the first consistent point is later"):
        find_point(quiet.settings, time=point.time - timedelta(seconds=1))
