"""Changes missing from the log are never skipped silently, when tables join the publication while there are readers."""

from __future__ import annotations

import logging

import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from tailrace.changelog.format.coverage import announce_tables, confirm_tables
from tailrace.changelog.maintain.retention import RetentionPolicy, trim
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.read.offsets import LogOffset
from tailrace.errors import ConfigError, LogGap
from tailrace.model.position import Lsn
from tailrace.model.schema import TableSchema
from tailrace.spark.datasource.log.log_part import LogBatchReader
from tailrace.spark.datasource.log.log_plan import LogPlanner
from tailrace.storage.files import LogPath
from tests.support.changes import SHOP
from tests.support.frames import Rows, frame, rows_of_parts, steps, stream
from tests.support.logs import OTHER, STEP, Diary, inserts, seal


def start_capture(diary: Diary, schema: TableSchema = SHOP, *, relation: int | None = None, ahead: int = 0) -> Lsn:
    """Start to capture the table, this far ahead of the log; return from where on it is complete."""
    tables, position = [(schema.table, relation or schema.relation)], diary.writer.position.value + ahead
    announce_tables(diary.path, tables, Lsn(position), commit=diary.writer.commit)
    confirm_tables(diary.path, tables, Lsn(position + 1))
    return Lsn(position + 1)


def ranged(log: LogPath, **options: object) -> Rows:
    log_frame = frame(log, **options)
    parts = LogBatchReader(log_frame, from_arrow_schema(log_frame.fields)).partitions()
    return rows_of_parts(log_frame, [part.value for part in parts])


def ids(rows: Rows) -> list[int]:
    return [row["id"] for row in rows]


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("selection", [{"table": "public.things"}, {"tables": "public.*"}])
def test_a_table_not_captured_for_a_while_ends_a_stream_after_everything_before(
    diary: Diary, sealed: bool, selection: dict[str, str]
) -> None:
    start_capture(diary)
    diary.commit(inserts(1))
    planner = LogPlanner(frame(diary.path, **selection))
    assert planner.next_end(LogOffset(0), 1, limited=True) == 1
    diary.commit(inserts(7, schema=OTHER))
    complete_from = start_capture(diary, ahead=STEP // 2)
    assert planner.next_end(LogOffset(0), 2, limited=True) == (1 if "table" in selection else 2), (
        "the log is not there yet"
    )
    diary.commit(inserts(8, schema=OTHER))
    diary.commit(inserts(3))
    if sealed:
        seal(diary.path)
    planner = LogPlanner(frame(diary.path, **selection))
    assert planner.next_end(LogOffset(0), 4, limited=True) <= 2
    with pytest.raises(LogGap, match=rf"not captured for a while.*`startingPosition` {complete_from}"):
        planner.next_end(LogOffset(2), 4, limited=True)
    for offset in (LogOffset(0), LogOffset(1), LogOffset(2)):
        with pytest.raises(LogGap):
            planner.plan_parts(offset, 4)
    assert planner.next_end(LogOffset(3), 4, limited=True) == 4, "a reader after the gap lacks nothing"
    with pytest.raises(LogGap):
        ranged(diary.path, **selection)


@pytest.mark.parametrize("ahead", [0, STEP // 2])
def test_the_start_that_the_error_names_works_and_skips_no_row(diary: Diary, ahead: int) -> None:
    start_capture(diary)
    diary.commit(inserts(1))
    complete_from = start_capture(diary, ahead=ahead)
    diary.commit(inserts(3), inserts(7, schema=OTHER))
    diary.commit(inserts(4))
    for read in (stream, ranged):
        assert ids(read(diary.path, table="public.things", startingPosition=complete_from)) == [3, 4]
        assert ids(read(diary.path, table="public.things", startingPosition=3)) == [4]
    assert len(stream(diary.path, tables="*", startingPosition=complete_from)) == 3
    with pytest.raises(LogGap):
        stream(diary.path, table="public.things", startingPosition=Lsn(complete_from.value - 1))
    with pytest.raises(LogGap):
        stream(diary.path, table="public.things", startingPosition=2)


def test_a_range_before_or_after_a_gap_is_complete(diary: Diary) -> None:
    start_capture(diary)
    for key in (1, 2):
        diary.commit(inserts(key))
    start_capture(diary)
    for key in (3, 4):
        diary.commit(inserts(key))
    start_capture(diary)
    diary.commit(inserts(5))
    assert ids(ranged(diary.path, table="public.things", endingPosition=2)) == [1, 2]
    assert ids(ranged(diary.path, table="public.things", startingPosition=4, endingPosition=4)) == [4]
    for begin, end in ((1, 3), (2, 4), (4, 5)):
        with pytest.raises(LogGap):
            ranged(diary.path, table="public.things", startingPosition=begin, endingPosition=end)


def test_other_tables_are_not_affected_by_a_gap(diary: Diary) -> None:
    start_capture(diary)
    diary.commit(inserts(1), inserts(7, schema=OTHER))
    start_capture(diary)
    diary.commit(inserts(2), inserts(8, schema=OTHER))
    assert ids(stream(diary.path, table="public.other")) == [7, 8]


def test_a_renamed_table_is_recognised_by_its_relation(diary: Diary) -> None:
    start_capture(diary)
    diary.commit(inserts(1))
    start_capture(diary, OTHER, relation=SHOP.relation)
    diary.commit(inserts(2))
    with pytest.raises(LogGap):
        stream(diary.path, table="public.things", startingPosition=1)


def test_a_table_created_again_ends_a_stream_that_names_it_and_only_warns_one_with_a_pattern(
    diary: Diary, caplog: pytest.LogCaptureFixture
) -> None:
    start_capture(diary)
    diary.commit(inserts(1))
    complete_from = start_capture(diary, relation=99)
    diary.commit(inserts(3))
    for selection in ({"table": "public.things"}, {"tables": "public.things, sales.*"}):
        with pytest.raises(LogGap, match="created again"):
            stream(diary.path, **selection)
    with caplog.at_level(logging.WARNING):
        assert len(stream(diary.path, tables="public.*")) == 2
    (record,) = caplog.records
    assert record.getMessage().startswith(f"the log has table public.things from {complete_from} on")


@pytest.mark.parametrize("selection", [{"table": "public.other"}, {"tables": "*"}])
def test_a_table_new_to_the_log_is_warned_of_once_and_ends_nothing(
    diary: Diary, selection: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    start_capture(diary)
    diary.commit(inserts(1))
    complete_from = start_capture(diary, OTHER)
    diary.commit(inserts(2))
    diary.commit(inserts(7, schema=OTHER))
    planner = LogPlanner(frame(diary.path, **selection))
    with caplog.at_level(logging.WARNING):
        assert planner.next_end(LogOffset(0), 3, limited=True) == 3
        planner.plan_parts(LogOffset(0), 3)
        assert [getattr(record, "complete_from", None) for record in caplog.records] == [str(complete_from)]
        assert LogPlanner(frame(diary.path, **selection)).next_end(LogOffset(2), 3, limited=True) == 3
        assert len(caplog.records) == 1, "a reader after the start lacks nothing"


def test_a_start_from_before_a_table_was_in_the_log_is_refused_if_the_table_is_named(diary: Diary) -> None:
    start_capture(diary)
    diary.commit(inserts(1), at=1_000_000)
    complete_from = start_capture(diary, OTHER, ahead=STEP // 2)
    diary.commit(inserts(7, schema=OTHER), at=2_000_000)
    for start in (1, 2, Lsn(STEP), "1970-01-01T00:00:01Z"):
        for read in (stream, ranged):
            with pytest.raises(ConfigError, match=rf"the start is before.*`earliest`.*{complete_from}"):
                read(diary.path, table="public.other", startingPosition=start)
        assert stream(diary.path, tables="public.*", startingPosition=start), "a pattern matches tables that join later"
    for start in (complete_from, "earliest"):
        assert ids(stream(diary.path, table="public.other", startingPosition=start)) == [7]
    assert stream(diary.path, table="public.other", startingPosition="latest") == []


def test_a_table_captured_since_the_log_began_is_complete(diary: Diary, caplog: pytest.LogCaptureFixture) -> None:
    start_capture(diary, ahead=STEP // 2)
    diary.commit()
    diary.commit(inserts(1))
    with caplog.at_level(logging.WARNING):
        assert ids(stream(diary.path, table="public.things", startingPosition=1)) == [1]
    assert caplog.records == []


def test_a_gap_is_reported_after_the_rows_around_it_were_trimmed(diary: Diary) -> None:
    start_capture(diary)
    diary.commit(inserts(1))
    start_capture(diary)
    for key in range(5):
        diary.commit(inserts(key, schema=OTHER))
    seal(diary.path)
    with Sealer(diary.path) as sealer:
        trim(sealer, RetentionPolicy(age_seconds=0.0), now=4e9)
    diary.commit(inserts(9, schema=OTHER))
    log_frame = frame(diary.path, table="public.things")
    assert LogPlanner(log_frame).log.trimmed().commit == 6
    with pytest.raises(LogGap):
        steps(log_frame, after=LogOffset(1))
    for after in (2, 6):
        assert steps(log_frame, after=LogOffset(after)) == [], "a reader after the gap gets no error"
