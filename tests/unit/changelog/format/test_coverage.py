"""The coverage record: from when the log has every change of a table."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.changelog.format.coverage import (
    COVERAGE_FILE,
    CaptureStart,
    CaptureStartKind,
    Coverage,
    announce_tables,
    confirm_tables,
    read_coverage,
)
from tailrace.changelog.format.trimmed import TrimRecord, write_trimmed
from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import LogCorrupt
from tailrace.model.position import ZERO, Lsn
from tailrace.model.schema import TableId
from tests.support.logs import Diary

T, U = TableId("public", "t"), TableId("public", "u")


def kinds(log: Path) -> list[tuple[str, int, str]]:
    return [(start.table.name, start.relation, start.kind.value) for start in read_coverage(log).starts]


def capture_start(log: Path, *tables: tuple[TableId, int], at: int, moved: tuple[int, ...] = ()) -> None:
    announce_tables(log, tables, Lsn(at), commit=at // 100, moved=moved)
    confirm_tables(log, tables, Lsn(at + 10))


def test_a_log_without_a_record_lacks_nothing(tmp_path: Path) -> None:
    assert read_coverage(tmp_path) == Coverage()
    assert Coverage().complete_from(T) is None


def test_a_start_is_new_again_or_of_another_table_of_the_name(tmp_path: Path) -> None:
    capture_start(tmp_path, (T, 1), (U, 2), at=100)
    capture_start(tmp_path, (T, 1), at=200)
    capture_start(tmp_path, (U, 3), at=300)
    assert kinds(tmp_path) == [("t", 1, "new"), ("u", 2, "new"), ("t", 1, "again"), ("u", 3, "another")]
    found = read_coverage(tmp_path)
    assert (found.complete_from(T), found.complete_from(U)) == (Lsn(200), Lsn(300))
    assert found.starts[2] == CaptureStart(
        table=T, relation=1, kind=CaptureStartKind.AGAIN, commit=2, announced_at=Lsn(200), confirmed_at=Lsn(210)
    )


def test_a_table_that_moves_between_publications_was_never_out(tmp_path: Path) -> None:
    capture_start(tmp_path, (T, 1), at=100)
    capture_start(tmp_path, (T, 1), at=200, moved=(1,))
    assert kinds(tmp_path)[-1] == ("t", 1, "moved")
    assert read_coverage(tmp_path).complete_from(T) == Lsn(200)


def test_an_announced_but_unconfirmed_start_does_not_count(tmp_path: Path) -> None:
    announce_tables(tmp_path, [(T, 1)], Lsn(100))
    announce_tables(tmp_path, [(T, 1)], Lsn(200))
    assert kinds(tmp_path) == [("t", 1, "new")]
    assert read_coverage(tmp_path).starts[0].complete_from == Lsn(200)
    confirm_tables(tmp_path, [(T, 1)], Lsn(250))
    confirm_tables(tmp_path, [(T, 1)], Lsn(300))
    assert read_coverage(tmp_path).starts[0].complete_from == Lsn(250)


def test_a_confirmed_table_without_a_record_was_always_in(tmp_path: Path) -> None:
    confirm_tables(tmp_path, [(T, 1)], Lsn(100))
    (found,) = read_coverage(tmp_path).starts
    assert (found.commit, found.announced_at, read_coverage(tmp_path).complete_from(T)) == (0, ZERO, None)
    capture_start(tmp_path, (T, 1), at=200)
    assert kinds(tmp_path)[-1] == ("t", 1, "again")


def test_starts_before_the_kept_rows_are_dropped_except_the_last_of_each_table(tmp_path: Path) -> None:
    for at in (100, 200, 300):
        capture_start(tmp_path, (T, 1), at=at)
    capture_start(tmp_path, (U, 2), at=310)
    write_trimmed(tmp_path, TrimRecord(commit=3, position=Lsn(350)))
    capture_start(tmp_path, (T, 1), at=400)
    capture_start(tmp_path, (T, 1), at=500)
    assert [(start.table, start.announced_at.value) for start in read_coverage(tmp_path).starts] == [
        (U, 310),
        (T, 400),
        (T, 500),
    ]


def test_a_damaged_coverage_record_is_reported(tmp_path: Path) -> None:
    capture_start(tmp_path, (T, 1), at=100)
    (tmp_path / COVERAGE_FILE).write_text((tmp_path / COVERAGE_FILE).read_text().replace('"t"', '"v"'))
    with pytest.raises(LogCorrupt, match="Restore it"):
        read_coverage(tmp_path)


def test_an_open_log_sees_later_records(tmp_path: Path) -> None:
    diary = Diary(tmp_path / "log")
    log = ChangeLog.open(diary.path)
    assert log.coverage().complete_from(T) is None
    capture_start(diary.path, (T, 1), at=100)
    assert log.coverage().complete_from(T) == Lsn(100)
    diary.close()
