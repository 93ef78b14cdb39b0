"""A point has the version of every table that is there, and says of every other why it is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tailrace.changelog.reader import ChangeLog
from tailrace.errors import TableUnusable
from tailrace.model.position import ZERO, Lsn
from tailrace.model.schema import TableId
from tailrace.pipeline.ledger import Absence
from tailrace.pipeline.life import Lives, TableLife
from tailrace.pipeline.noting import point_at
from tailrace.pipeline.report import TableState
from tailrace.tables.base import Cursor
from tailrace.tables.layout import Layout, Place
from tests.support.changes import SHOP
from tests.support.logs import Diary, inserts, quick_folder

OTHER = TableId("public", "others")


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Lives]:
    """Two tables that have applied all of a log of two commits; only the first has rows in it."""
    with quick_folder(tmp_path) as folder:
        diary = Diary(folder / "log")
        diary.commit(inserts(1, 2))
        diary.commit(inserts(3))
        diary.close()
        found = Lives(ChangeLog.open(diary.path), Layout(root=tmp_path / "lake"))
        commit = found.grow()
        there = Cursor(commit=commit, seq=found.index.next_seq(commit) - 1, position=found.index.end_of(commit))
        for table, version in ((SHOP.table, 3), (OTHER, 8)):
            found.tables[table] = TableLife(
                table, Place(path=tmp_path / "lake" / table.name, log_id=found.log.log_id), state=TableState.LIVE,
                cursor=there, shape=SHOP, version=version,
            )  # fmt: skip
        found.tables[OTHER].shape = replace(SHOP, table=OTHER, relation=99)
        yield found


def test_a_point_has_the_version_of_every_table_that_is_there(lives: Lives) -> None:
    point = point_at(lives, lives.index.commit)
    assert point is not None
    assert (point.versions, point.missing) == ({SHOP.table: 3, OTHER: 8}, {})


def stand(life: TableLife, position: Lsn, seq: int) -> None:
    assert life.cursor is not None
    life.cursor = replace(life.cursor, position=position, seq=seq, commit=0)


def fail(life: TableLife) -> None:
    life.fail(TableUnusable("it is full", hint="Make room."))


@pytest.mark.parametrize(
    ("become", "state", "why"),
    [
        (lambda life: life.lock.acquire(), "live", "it was being worked on"),
        (lambda life: stand(life, ZERO, 0), "live", "it was behind the others"),
        (lambda life: stand(life, Lsn(1 << 60), 99), "live", "it was ahead of the others"),
        (lambda life: setattr(life, "replay", "a-load"), "live", "it was just loaded, and not all"),
        (lambda life: setattr(life, "halted", True), "live", "it waits for a load"),
        (lambda life: setattr(life, "version", None), "live", "its folder is gone"),
        (lambda life: setattr(life, "cursor", None), "live", "it is not loaded yet"),
        (lambda life: setattr(life, "state", TableState.SEEDING), "seeding", "it is being loaded"),
        (lambda life: setattr(life, "state", TableState.PAUSED), "paused", "it is paused"),
        (lambda life: setattr(life, "state", TableState.LOADED), "loaded", "it was loaded once"),
        (fail, "failed", "table-unusable"),
    ],
    ids=["busy", "behind", "ahead", "replayed", "halted", "gone", "bare", "seeding", "paused", "once", "failed"],
)
def test_a_table_that_is_not_there_is_left_out_and_holds_back_no_other(
    lives: Lives, become: Callable[[TableLife], object], state: str, why: str
) -> None:
    become(lives.tables[SHOP.table])
    point = point_at(lives, lives.index.commit)
    assert point is not None
    assert point.versions == {OTHER: 8}
    absence = point.missing[SHOP.table]
    assert (list(point.missing), absence.state) == ([SHOP.table], state)
    assert absence.why.startswith(why)
    assert absence.passing == (state == "live")


def test_a_table_of_an_earlier_commit_is_at_no_later_point_but_a_quiet_one_is(lives: Lives) -> None:
    index = lives.index
    for life in lives.tables.values():
        stand(life, index.end_of(1), index.next_seq(1) - 1)
    first, last = point_at(lives, 1), point_at(lives, 2)
    assert first is not None
    assert last is not None
    assert first.versions == {SHOP.table: 3, OTHER: 8}
    assert last.versions == {OTHER: 8}, "it has no row in the second commit"


def test_where_no_table_is_there_is_no_point_and_one_that_never_was_is_not_missing(lives: Lives) -> None:
    lives.tables[SHOP.table].gone, lives.tables[SHOP.table].state = True, TableState.NEW
    point = point_at(lives, lives.index.commit)
    assert point is not None
    assert point.missing == {}
    fail(lives.tables[OTHER])
    assert point_at(lives, lives.index.commit) is None


def test_a_table_is_asked_for_its_version_once(lives: Lives) -> None:
    """A folder without a table tells of none; nobody is kept out of it afterwards."""
    lives.tables[OTHER].version = None
    point = point_at(lives, lives.index.commit)
    assert point is not None
    assert point.missing == {OTHER: Absence(state="live", why="its folder is gone")}
    assert lives.tables[OTHER].lock.acquire(blocking=False)
