"""Kill whoever seals, joins, cleans up or trims, at every named place: nothing is lost, comes twice or is left."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace import failpoints
from tailrace.changelog.maintain.seal_contents import SealLimits
from tailrace.changelog.read.consumers import TableProgress, write_table_progress
from tailrace.changelog.read.index import LogIndex
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write.writer import LogWriter
from tailrace.errors import LogTrimmed
from tailrace.model import change
from tests.support.changes import SHOP, insert, move
from tests.support.killed import Killed, put_in_order
from tests.support.logs import (
    OTHER,
    Diary,
    Row,
    assert_nothing_left_over,
    glob_rows,
    in_order,
    inserts,
    quick_folder,
    rows_of,
    seal,
)
from tests.support.windows import SOURCE, named, rows_window

KINDS = ("seal.", "clean.", "trim.")
PLACES = [name for name in failpoints.NAMES if name.startswith(KINDS)]
RENAMED = named("public", "renamed", SHOP.relation)
TURNS = range(1, 100) if os.environ.get("TAILRACE_SOAK_ROUNDS") else (1, 2, 4, 9, 20, 45)
"""At which passing of a place to kill; where there are many, not at each unless there is time."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with quick_folder(tmp_path) as found:
        yield found


def write(path: Path) -> Diary:
    """A log that has everything to do: seals to make and to join, large files, rows to let go and rows to keep."""
    diary = Diary(path)
    diary.commit(inserts(1), inserts(1, schema=OTHER))
    diary.commit()
    diary.commit(inserts(2, 3))
    seal(path, join=False, grace_seconds=None, limits=SealLimits(commits=1))
    diary.piece(inserts(4), inserts(2, schema=OTHER))
    diary.finish((RENAMED, [insert(5), *move(5, 6)]))
    diary.commit(inserts(3, schema=OTHER))
    diary.commit(inserts(7, schema=RENAMED))
    diary.close()
    # The other table has covered its first row; the rest of it is held, and nothing else.
    write_table_progress(path, [TableProgress(table=OTHER.table, numbers=(2,), commit=1, seq=2)])
    return diary


def kept(path: Path, diary: Diary) -> list[Row]:
    """The rows that are not recorded as gone."""
    gone = ChangeLog.open(path).trimmed()
    number = {SHOP.relation: 1, OTHER.relation: 2}
    return [row for row in diary.rows() if not gone.is_trimmed(number[row.schema.relation], row.seq)]


def assert_readable(path: Path, diary: Diary) -> None:
    """Whatever state it is in: each row once, or its reader is told; the glob shows none twice and no leftover."""
    log = ChangeLog.open(path)
    assert in_order(rows_of(log.follow())) == kept(path, diary)
    assert rows_of(log.follow(1, table="public.other")) == diary.rows(1, OTHER)
    if log.trimmed().trimmed_after(1, 0) is None:
        assert in_order(rows_of(log.follow(0, table="public.things"))) == diary.rows(schema=SHOP)
    else:
        with pytest.raises(LogTrimmed):
            list(log.follow(0, table="public.things"))
    for table, schema in ((1, SHOP), (2, OTHER)):
        shown = [row[change.SEQ] for row in glob_rows(path, table)]
        assert shown == sorted(set(shown))
        assert set(shown) <= {row.seq for row in diary.rows(schema=schema)}


def assert_in_order(path: Path, diary: Diary) -> None:
    """As if nobody had ever been killed."""
    assert_readable(path, diary)
    assert_nothing_left_over(path)
    log = ChangeLog.open(path)
    assert log.trimmed().tables.keys() >= {0, 1}
    rows = [row for row in kept(path, diary) if row.schema == OTHER]
    assert [row[change.SEQ] for row in glob_rows(path, 2)] == [row.seq for row in rows]
    index = LogIndex(log)
    index.grow()
    counts = (len(diary.noted), len(diary.rows(schema=SHOP)), len(diary.rows(schema=OTHER)))
    assert (index.rows, index.rows_captured(1), index.rows_captured(2)) == counts
    writer = LogWriter(path, SOURCE)
    assert (writer.commit, writer.next_seq) == (6, len(diary.noted) + 1)
    writer.append(rows_window(writer.position.value, writer.position.value + 100, 99))
    writer.close()
    assert [row.values["id"] for row in rows_of(ChangeLog.open(path).follow(6))] == [99]


def test_killed_at_every_place_the_log_is_whole_and_the_next_one_finishes_the_work(
    folder: Path, tmp_path: Path
) -> None:
    diary = write(folder / "log")
    hits = tmp_path / "hits"
    hits.touch()
    with Killed(hits) as killed:
        for name in PLACES:
            for turn in TURNS:
                path = folder / f"{name}-{turn}"
                shutil.copytree(folder / "log", path, symlinks=True)
                ended = killed.at(name, turn, path)
                assert ended in (0, -9), (name, turn, ended)
                assert_readable(path, diary)
                put_in_order(path)
                assert_in_order(path, diary)
                shutil.rmtree(path)
                if ended == 0:
                    break
            else:
                pytest.fail(f"{name} is passed more often than was thought")
    counted = Counter(hits.read_text().split())
    assert set(counted) == set(PLACES), counted


def test_killed_again_and_again_while_others_finish_its_work_nothing_is_lost(folder: Path, tmp_path: Path) -> None:
    """Each one who is killed finds what the one before left."""
    diary = write(folder / "log")
    with Killed(tmp_path / "hits") as killed:
        for turn in (1, 3):
            for name in (*PLACES, *reversed(PLACES)):
                killed.at(name, turn, folder / "log")
                assert_readable(folder / "log", diary)
    put_in_order(folder / "log")
    assert_in_order(folder / "log", diary)
