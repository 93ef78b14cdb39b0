"""A point names versions of the table that is there; those of one that was there before it does not."""

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
    made = Quiet(tmp_path)
    made.load([{"id": 1, "n": 0}])
    made.commit(insert(2))
    made.apply()
    note(made)
    return made


def note(quiet: Quiet) -> None:
    """What whoever applies does at the end of a micro-batch."""
    registry = quiet.registry()
    registry.add(THINGS).state = TableState.LIVE
    point = build_point(registry, registry.index.last_commit)
    assert point is not None
    Ledger(quiet.settings.log.path).record(point)


def folder(quiet: Quiet) -> Path:
    return quiet.settings.tables.layout.path(THINGS)


def test_a_table_that_was_made_anew_is_left_out_of_points_of_before(
    quiet: Quiet, capsys: pytest.CaptureFixture[str]
) -> None:
    before = str(quiet.applied_position.position)
    assert find_point(quiet.settings).versions == {THINGS: 1}
    shutil.rmtree(folder(quiet))
    assert find_point(quiet.settings).missing[THINGS].why == "its folder is gone"
    quiet.reload([{"id": 1, "n": 0}], "anew")
    quiet.commit(insert(3))
    quiet.apply()
    note(quiet)
    assert find_point(quiet.settings).versions == {THINGS: 1}, "the same number, and another thing"
    then = find_point(quiet.settings, position=before)
    assert (then.versions, then.missing[THINGS].why) == ({}, "the table was made anew since")
    with pytest.raises(ConfigError, match="no version at this point") as refused:
        TablesAt({}, then)[str(THINGS)]
    assert "after it was loaded anew" in str(refused.value.hint)
    assert main(["at", str(quiet.file), "--position", before, "--json"]) == 0
    (missing,) = json.loads(capsys.readouterr().out)["missing"]
    assert missing["why"] == "the table was made anew since"


def test_a_table_that_is_partitioned_otherwise_where_it_stands_is_still_that_table(quiet: Quiet) -> None:
    log = ChangeLog.open(quiet.settings.log.path)
    quiet.file.write_text(quiet.file.read_text().replace("on_bad_row: stop", "on_bad_row: stop, partition_by: [n]"))
    place: TableLocation = quiet.settings.tables.layout.location(THINGS, log.log_id)
    assert place.spec.partition_by == ("n",)
    quiet.load([{"id": 1, "n": 0}], SHOP)
    assert find_point(quiet.settings).versions == {THINGS: 1}


def test_a_time_and_a_position_of_python_s_own_are_taken(quiet: Quiet) -> None:
    there = find_point(quiet.settings)
    assert find_point(quiet.settings, time=there.time, position=None) == there
    assert find_point(quiet.settings, time=there.time.replace(tzinfo=None)) == there, "without a zone it is UTC"
    assert find_point(quiet.settings, position=there.position) == there
    with pytest.raises(ConfigError, match="the first consistent point is later"):
        find_point(quiet.settings, time=there.time - timedelta(seconds=1))
