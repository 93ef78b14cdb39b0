"""Offsets in the log by commit, position and time, also inside a large commit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from tailrace.changelog.format.trimmed import TrimmedTable, TrimRecord, write_trimmed
from tailrace.changelog.maintain.retention import RetentionPolicy, trim
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.read.offsets import LogOffset, ending_offset, starting_offset
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write.writer import LogWriter
from tailrace.errors import ConfigError, LogTrimmed
from tailrace.model import change
from tailrace.model.batch import ChangeBatch, Window
from tailrace.model.position import Lsn
from tests.support.changes import SHOP, insert
from tests.support.logs import OTHER, Diary, inserts, quick_folder, seal
from tests.support.windows import SOURCE, batch

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
TABLES = frozenset([1, 2])
# Commits of transactions, each with the position it ended at and the second it was committed.
COMMITS = [[(110, 10), (120, 11), (130, 12)], [], [(310, 20)], [(410, 30), (420, 29), (430, 40)]]


def transactions(*found: tuple[int, int]) -> list[ChangeBatch]:
    """Return one row of each transaction in each of two tables."""
    made = []
    for turn, schema in enumerate((SHOP, OTHER)):
        rows = batch(schema, *(insert(key) for key in range(len(found))))
        columns = {
            change.SEQ: [2 * index + turn for index in range(len(found))],
            change.POSITION: [str(Lsn(position)) for position, _ in found],
            change.COMMITTED_AT: [second * 1_000_000 for _, second in found],
        }
        data = rows.data
        for name, values in columns.items():
            index = data.schema.get_field_index(name)
            data = data.set_column(index, data.schema.field(index), pa.array(values, data.schema.field(index).type))
        made.append(replace(rows, data=data))
    return made


@pytest.fixture(params=[False, True], ids=["hot", "sealed"])
def log(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ChangeLog]:
    with quick_folder(tmp_path) as folder:
        writer = LogWriter(folder / "log", SOURCE)
        for number, found in enumerate(COMMITS, start=1):
            batches = transactions(*found) if found else []
            writer.append(
                Window(
                    start=writer.position,
                    end=Lsn(number * 100 + 50),
                    batches=tuple(batches),
                    transactions=len(found),
                    rows=2 * len(found),
                    last_committed_at=max((second * 1_000_000 for _, second in found), default=None),
                )
            )
        writer.close()
        if request.param:
            seal(writer.path)
        yield ChangeLog.open(writer.path)


def at(seconds: float) -> datetime:
    return EPOCH + timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("position", "place"),
    [
        (100, LogOffset(0)), (110, LogOffset(0, 2)), (119, LogOffset(0, 2)),
        (120, LogOffset(0, 4)), (130, LogOffset(1)), (150, LogOffset(1)),
        (309, LogOffset(2)), (310, LogOffset(3)), (409, LogOffset(3)),
        (420, LogOffset(3, 12)), (430, LogOffset(4)), (450, LogOffset(4)),
    ],
)  # fmt: skip
def test_an_offset_at_a_position_is_after_all_that_ended_up_to_it(
    log: ChangeLog, position: int, place: LogOffset
) -> None:
    assert starting_offset(log, Lsn(position), TABLES) == place
    assert ending_offset(log, Lsn(position), TABLES) == place


@pytest.mark.parametrize(
    ("second", "begin", "end"),
    [
        (10, LogOffset(0), LogOffset(0, 2)), (11, LogOffset(0, 2), LogOffset(0, 4)),
        (11.5, LogOffset(0, 4), LogOffset(0, 4)), (12, LogOffset(0, 4), LogOffset(2)), (20, LogOffset(2), LogOffset(3)),
        (25, LogOffset(3), LogOffset(3)), (30, LogOffset(3), LogOffset(3, 12)), (41, LogOffset(4), LogOffset(4)),
    ],
)  # fmt: skip
def test_an_offset_at_a_time_is_before_the_first_transaction_then_or_later(
    log: ChangeLog, second: float, begin: LogOffset, end: LogOffset
) -> None:
    assert starting_offset(log, at(second), TABLES) == begin
    assert ending_offset(log, at(second), TABLES) == end


def test_an_earlier_transaction_of_another_table_later_in_the_log_hides_nothing(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "log", SOURCE)
    one, other = (some.data for some in transactions((110, 30)))
    other = other.set_column(
        other.schema.get_field_index(change.COMMITTED_AT),
        other.schema.field(change.COMMITTED_AT),
        pa.array([29_000_000], other.schema.field(change.COMMITTED_AT).type),
    )
    batches = (ChangeBatch(schema=SHOP, data=one), ChangeBatch(schema=OTHER, data=other))
    writer.append(
        Window(
            start=writer.position, end=Lsn(150), batches=batches, transactions=2, rows=2, last_committed_at=30_000_000
        )
    )
    writer.close()
    log = ChangeLog.open(writer.path)

    begin = starting_offset(log, at(30), TABLES)
    rows = [seq for batch in log.read(1, 1, after_seq=begin.seq) for seq in batch.data.column(change.SEQ).to_pylist()]
    assert 1 in rows, "it was committed at that time"
    assert ending_offset(log, at(29), TABLES) == begin


def test_a_commit_number_includes_the_whole_commit(log: ChangeLog) -> None:
    assert (starting_offset(log, 3, TABLES), ending_offset(log, 3, TABLES)) == (LogOffset(2), LogOffset(3))
    assert starting_offset(log, 5, TABLES) == starting_offset(log, "latest", TABLES) == LogOffset(4)
    assert (starting_offset(log, "earliest", TABLES), ending_offset(log, "earliest", TABLES)) == (
        LogOffset(0),
        LogOffset(0),
    )


@pytest.mark.parametrize("point", [0, 6, Lsn(451)])
def test_an_offset_the_log_does_not_have_yet_is_refused(log: ChangeLog, point: int | Lsn) -> None:
    for resolve, option in ((starting_offset, "startingPosition"), (ending_offset, "endingPosition")):
        with pytest.raises(ConfigError) as caught:
            resolve(log, point, TABLES)
        assert f"`{option}`" in caught.value.hint


def test_a_time_ahead_of_the_log_is_refused_as_a_start_and_allowed_as_an_end(log: ChangeLog) -> None:
    ahead = datetime.now(UTC) + timedelta(hours=1)
    with pytest.raises(ConfigError, match=r"has not been read up to this time.*`latest`"):
        starting_offset(log, ahead, TABLES)
    assert ending_offset(log, ahead, TABLES) == LogOffset(4)


def test_a_time_is_reached_by_the_sources_clock_and_by_commits_of_a_quiet_source(tmp_path: Path) -> None:
    diary = Diary(tmp_path / "log")
    diary.commit(inserts(1), at=1_000_000)
    asked = datetime.now(UTC)
    with pytest.raises(ConfigError, match="not been read up to"):
        starting_offset(ChangeLog.open(diary.path), asked, TABLES)
    diary.commit()
    assert starting_offset(ChangeLog.open(diary.path), asked, TABLES) == LogOffset(2)
    ahead = asked + timedelta(minutes=1)
    diary.commit(inserts(2), at=round((asked.timestamp() + 90) * 1e6))
    diary.close()
    assert starting_offset(ChangeLog.open(diary.path), ahead, TABLES) == LogOffset(2)


def test_a_start_time_before_the_first_transaction_is_refused(log: ChangeLog) -> None:
    with pytest.raises(ConfigError, match=r"the log begins later.*`earliest` for all that the log has"):
        starting_offset(log, at(9), TABLES)
    assert ending_offset(log, at(9), TABLES) == LogOffset(0)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_start_before_the_log_is_refused_and_a_later_one_is_not(tmp_path: Path, sealed: bool) -> None:
    before = datetime.now(UTC)
    diary = Diary(tmp_path / "log")
    diary.commit()
    begun = datetime.now(UTC)
    diary.commit(inserts(1), at=round((begun.timestamp() + 60) * 1e6))
    diary.close()
    if sealed:
        seal(diary.path)
    made = ChangeLog.open(diary.path)
    for point in (Lsn(99), before - timedelta(seconds=1)):
        with pytest.raises(ConfigError, match="the log begins later"):
            starting_offset(made, point, TABLES)
    assert starting_offset(made, Lsn(100), TABLES) == LogOffset(1)
    assert starting_offset(made, begun, TABLES) == LogOffset(1)


def test_a_start_before_the_kept_rows_is_refused_with_the_possible_ones(tmp_path: Path) -> None:
    with quick_folder(tmp_path) as folder:
        diary = Diary(folder / "log")
        diary.commit(inserts(1), at=10_000_000)
        seal(diary.path)
        with Sealer(diary.path) as sealer:
            trim(sealer, RetentionPolicy(age_seconds=0.0), now=4e9)
        diary.commit(inserts(2), at=20_000_000)
        diary.commit(inserts(3), at=30_000_000)
        diary.close()
        trimmed = ChangeLog.open(diary.path)
        assert trimmed.trimmed().commit == 1
        for point in (Lsn(50), at(9), at(10), at(19)):
            with pytest.raises(LogTrimmed, match=r"no longer holds changes from that time.*`earliest`"):
                starting_offset(trimmed, point, TABLES)
        assert starting_offset(trimmed, Lsn(100), TABLES) == LogOffset(1)
        assert starting_offset(trimmed, at(20), TABLES) == LogOffset(1), "the kept rows begin at that very time"
        assert starting_offset(trimmed, at(21), TABLES) == LogOffset(2)


def test_an_offset_of_one_table_does_not_depend_on_trimmed_rows_of_another(tmp_path: Path) -> None:
    with quick_folder(tmp_path) as folder:
        diary = Diary(folder / "log")
        for number in range(1, 4):
            diary.commit(inserts(number), inserts(number, schema=OTHER), at=number * 10_000_000)
        seal(diary.path)
        diary.close()
        made = ChangeLog.open(diary.path)
        made.schemas.load()
        mine, other = (made.table_numbers(str(schema.table))[0] for schema in (SHOP, OTHER))
        write_trimmed(diary.path, TrimRecord(tables={other: TrimmedTable(last_seq=6, commit=3, rows=3, bytes=1)}))
        made = ChangeLog.open(diary.path)
        assert starting_offset(made, at(20), frozenset([mine])) == LogOffset(1)
        assert starting_offset(made, Lsn(150), frozenset([mine])) == LogOffset(1)
