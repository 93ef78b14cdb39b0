"""Where tables stand beside the log, and when that is one point for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.changelog.reader import ChangeLog
from tailrace.pipeline import life as life_module
from tailrace.pipeline.life import Ahead, Lives, TableLife
from tailrace.pipeline.report import TableState
from tailrace.tables.base import Cursor
from tailrace.tables.layout import Layout, Place
from tests.support.changes import SHOP
from tests.support.logs import Diary, inserts, quick_folder


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Lives]:
    """One table that has applied all of a log of one commit."""
    with quick_folder(tmp_path) as folder:
        diary = Diary(folder / "log")
        diary.commit(inserts(1, 2))
        diary.close()
        found = Lives(ChangeLog.open(diary.path), Layout(root=tmp_path / "lake"))
        commit = found.grow()
        there = Cursor(commit=commit, seq=found.index.next_seq(commit) - 1, position=found.index.end_of(commit))
        found.tables[SHOP.table] = TableLife(
            SHOP.table, Place(path=tmp_path / "lake" / "t", log_id=found.log.log_id), state=TableState.LIVE,
            cursor=there, shape=SHOP,
        )
        yield found


def test_a_point_has_the_version_of_every_table_that_goes_on(lives: Lives) -> None:
    lives.tables[SHOP.table].version = 3
    point = lives.point(lives.index.commit)
    assert point is not None
    assert point.versions == {SHOP.table: 3}


def test_a_table_whose_folder_was_taken_away_is_at_no_point(lives: Lives) -> None:
    assert lives.point(lives.index.commit) is None


def test_a_micro_batch_is_limited_only_if_more_was_waiting_when_it_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life_module, "ROWS_PER_BATCH_MAX", 2)
    diary = Diary(tmp_path / "log")
    for number in range(3):
        diary.commit(inserts(number))
    found = Lives(ChangeLog.open(diary.path), Layout(root=tmp_path / "lake"))
    assert found.ahead(0) == Ahead(end=2, limited=True)
    assert found.ahead(2) == Ahead(end=3, limited=False)
    assert found.ahead(3) == Ahead(end=3, limited=False)
    diary.commit(inserts(9))
    diary.close()
    assert found.ahead(2) == Ahead(end=4, limited=False), "what comes later is planned later"
