"""Gaps: a follower gets an error exactly where the source had discarded changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.changelog.format.gaps import GAPS_FILE, Gap, read_gaps, record_gap
from tailrace.changelog.maintain.verify import verify
from tailrace.changelog.read.reader import ChangeLog
from tailrace.cli import log_view
from tailrace.control import log_actions
from tailrace.errors import LogCorrupt, LogGap
from tailrace.model.position import Lsn
from tests.support.logs import STEP, Diary, inserts, seal


def gap_before(diary: Diary) -> Gap:
    """Record a gap before the log's next commit."""
    position = diary.writer.position
    made = Gap(commit=diary.writer.commit + 1, start=position, end=Lsn(position.value + STEP))
    record_gap(diary.path, made)
    return made


@pytest.fixture
def diary(tmp_path: Path) -> Iterator[Diary]:
    """Rows 1 and 2, a gap, row 3."""
    made = Diary(tmp_path / "log")
    made.commit(inserts(1))
    made.commit(inserts(2))
    gap_before(made)
    made.commit()
    made.commit(inserts(3))
    yield made
    made.close()


def followed(
    path: Path, after: int | Lsn | None = None, consumer: str | None = None
) -> tuple[list[int], LogGap | None]:
    found: list[int] = []
    try:
        for batch in ChangeLog.open(path).follow(after, consumer=consumer):
            found += batch.data.column("id").to_pylist()
    except LogGap as error:
        return found, error
    return found, None


@pytest.mark.parametrize("sealed", [False, True])
def test_a_reader_gets_the_rows_before_a_gap_and_then_an_error(diary: Diary, sealed: bool) -> None:
    if sealed:
        seal(diary.path)
    found, error = followed(diary.path)
    assert found == [1, 2]
    assert error is not None
    assert "follow(after=3)" in error.hint
    assert followed(diary.path, 2)[0] == [], "the same error for a reader of everything before the gap"
    assert followed(diary.path, 2)[1] is not None
    assert followed(diary.path, 3) == ([3], None)
    assert followed(diary.path, read_gaps(diary.path)[0].end) == ([3], None)


def test_log_show_names_the_gap(diary: Diary) -> None:
    gap_before(diary)  # its commit was never made
    shown = log_actions.read_overview(diary.path)
    assert shown.gaps == (3,)
    assert "changes missing before commit 3" in log_view.log_text(shown)


def test_a_consumer_gets_the_error_until_it_gives_a_start(diary: Diary) -> None:
    assert followed(diary.path, consumer="me")[0] == [1, 2]
    found, error = followed(diary.path, consumer="me")
    assert found == []
    assert error is not None
    assert followed(diary.path, 3, consumer="me") == ([3], None)
    assert followed(diary.path, consumer="me") == ([], None)


def test_a_gap_without_its_commit_does_not_count(diary: Diary) -> None:
    never = gap_before(diary)
    assert followed(diary.path, 3) == ([3], None)
    again = Gap(commit=never.commit, start=never.start, end=Lsn(never.end.value + STEP))
    record_gap(diary.path, again)
    assert [gap.commit for gap in read_gaps(diary.path)] == [3, 5]
    assert read_gaps(diary.path)[-1] == again
    diary.commit()
    assert followed(diary.path, 3)[1] is not None


@pytest.mark.parametrize("quiet", [False, True])
def test_a_gap_whose_slot_was_never_created_does_not_count(diary: Diary, quiet: bool) -> None:
    here = diary.writer.position
    record_gap(diary.path, Gap(commit=diary.writer.commit + 1, start=here, end=here))
    diary.commit(*([] if quiet else [inserts(4)]))
    diary.commit(inserts(5))
    assert followed(diary.path, 3) == ([3, 5] if quiet else [3, 4, 5], None)
    assert log_actions.read_overview(diary.path).gaps == (3,)
    gap_before(diary)
    diary.commit()
    assert followed(diary.path, 5)[1] is not None


def test_a_damaged_gap_record_is_reported(diary: Diary) -> None:
    record = diary.path / GAPS_FILE
    record.write_bytes(record.read_bytes().replace(b'"commit": 3', b'"commit": 2'))
    with pytest.raises(LogCorrupt, match="the record of the log's gaps cannot be read"):
        followed(diary.path)
    (flaw,) = verify(diary.path).flaws
    assert "the record of the log's gaps" in flaw.message


def test_the_schema_stream_is_followed_across_a_gap(diary: Diary) -> None:
    assert len(log_actions.read_schema_versions(diary.path)) == 1


@pytest.mark.parametrize("sealed", [False, True])
def test_a_log_without_its_gap_record_is_not_read_across_the_gap(diary: Diary, sealed: bool) -> None:
    if sealed:
        seal(diary.path)
    (diary.path / GAPS_FILE).unlink()
    with pytest.raises(LogCorrupt, match="is missing, or older than the log") as error:
        followed(diary.path)
    assert "Restore it" in error.value.hint
    diary.close()
    with pytest.raises(LogCorrupt, match="is missing"):
        Diary(diary.path)
