"""Where tables stand beside the log, and when that is one point for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.changelog.reader import ChangeLog
from tailrace.model.position import Lsn
from tailrace.pipeline.life import Lives, TableLife
from tailrace.pipeline.report import TableState
from tailrace.tables.base import Cursor
from tailrace.tables.layout import Layout, Place
from tests.support.changes import SHOP, insert
from tests.support.logs import Diary, inserts, quick_folder
from tests.support.quiet import Quiet


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


def test_a_table_with_a_row_that_was_read_again_is_at_no_point_until_the_log_has_passed_that(tmp_path: Path) -> None:
    quiet = Quiet(tmp_path)
    quiet.diary.commit()
    quiet.load_anew([{"id": 1, "n": 1}], "first")
    lives = quiet.lives()
    lives.seeds.remember("first", Lsn(quiet.cursor.position.value + 150))
    life = lives.add(SHOP.table)  # as a process finds it that comes after the one that has read
    assert (life.mixed, lives.stretch(life, lives.index.commit), life.state) == (True, None, TableState.CATCHING_UP)
    assert (lives.point(lives.index.commit), lives.replays_what_is_to_come(life)) == (None, True)
    quiet.commit(insert(2, n=2))
    quiet.diary.commit()
    quiet.apply()
    lives = quiet.lives()
    life = lives.add(SHOP.table)
    assert lives.stretch(life, lives.index.commit) is None
    assert (life.mixed, life.state) == (False, TableState.LIVE)
    assert lives.point(lives.index.commit) is not None
