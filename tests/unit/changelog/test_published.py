"""When tables came into the publication: what is kept of it, and what a table that comes in was to the log before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.changelog.format.coverage import NAME, Coming, Kind, Published, announce, confirm, read_published
from tailrace.changelog.format.trimmed import Trimmed, write_trimmed
from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import LogCorrupt
from tailrace.model.position import ZERO, Lsn
from tailrace.model.schema import TableId
from tests.support.logs import Diary

T, U = TableId("public", "t"), TableId("public", "u")


def kinds(log: Path) -> list[tuple[str, int, str]]:
    return [(coming.table.name, coming.relation, coming.kind.value) for coming in read_published(log).comings]


def come(log: Path, *tables: tuple[TableId, int], at: int, moved: tuple[int, ...] = ()) -> None:
    announce(log, tables, Lsn(at), commit=at // 100, moved=moved)
    confirm(log, tables, Lsn(at + 10))


def test_a_log_without_a_record_lacks_nothing(tmp_path: Path) -> None:
    assert read_published(tmp_path) == Published()
    assert Published().since(T) is None


def test_a_table_is_new_or_in_again_or_another_of_its_name(tmp_path: Path) -> None:
    come(tmp_path, (T, 1), (U, 2), at=100)
    come(tmp_path, (T, 1), at=200)
    come(tmp_path, (U, 3), at=300)
    assert kinds(tmp_path) == [("t", 1, "new"), ("u", 2, "new"), ("t", 1, "again"), ("u", 3, "another")]
    found = read_published(tmp_path)
    assert (found.since(T), found.since(U)) == (Lsn(200), Lsn(300))
    assert found.comings[2] == Coming(table=T, relation=1, kind=Kind.AGAIN, commit=2, since=Lsn(200), whole=Lsn(210))


def test_one_that_goes_to_the_other_publication_was_never_out(tmp_path: Path) -> None:
    come(tmp_path, (T, 1), at=100)
    come(tmp_path, (T, 1), at=200, moved=(1,))
    assert kinds(tmp_path)[-1] == ("t", 1, "moved")
    assert read_published(tmp_path).since(T) == Lsn(200)


def test_one_that_was_announced_and_did_not_come_in_was_not_there(tmp_path: Path) -> None:
    announce(tmp_path, [(T, 1)], Lsn(100))
    announce(tmp_path, [(T, 1)], Lsn(200))
    assert kinds(tmp_path) == [("t", 1, "new")]
    assert read_published(tmp_path).comings[0].complete_from == Lsn(200)
    confirm(tmp_path, [(T, 1)], Lsn(250))
    confirm(tmp_path, [(T, 1)], Lsn(300))
    assert read_published(tmp_path).comings[0].complete_from == Lsn(250)


def test_one_that_is_in_and_that_nothing_is_known_of_was_always_in(tmp_path: Path) -> None:
    confirm(tmp_path, [(T, 1)], Lsn(100))
    (found,) = read_published(tmp_path).comings
    assert (found.commit, found.since, read_published(tmp_path).since(T)) == (0, ZERO, None)
    come(tmp_path, (T, 1), at=200)
    assert kinds(tmp_path)[-1] == ("t", 1, "again")


def test_what_lies_before_all_that_is_kept_goes_but_for_the_last_of_each_table(tmp_path: Path) -> None:
    for at in (100, 200, 300):
        come(tmp_path, (T, 1), at=at)
    come(tmp_path, (U, 2), at=310)
    write_trimmed(tmp_path, Trimmed(commit=3, position=Lsn(350)))
    come(tmp_path, (T, 1), at=400)
    come(tmp_path, (T, 1), at=500)
    assert [(coming.table, coming.since.value) for coming in read_published(tmp_path).comings] == [
        (U, 310),
        (T, 400),
        (T, 500),
    ]


def test_a_record_that_is_damaged_is_told(tmp_path: Path) -> None:
    come(tmp_path, (T, 1), at=100)
    (tmp_path / NAME).write_text((tmp_path / NAME).read_text().replace('"t"', '"v"'))
    with pytest.raises(LogCorrupt, match="Restore it"):
        read_published(tmp_path)


def test_an_open_log_sees_what_comes_later(tmp_path: Path) -> None:
    diary = Diary(tmp_path / "log")
    log = ChangeLog.open(diary.path)
    assert log.published().since(T) is None
    come(diary.path, (T, 1), at=100)
    assert log.published().since(T) == Lsn(100)
    diary.close()
