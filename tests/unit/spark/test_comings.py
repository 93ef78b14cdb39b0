"""Tables that come into the publication while there are readers: what is missing is never passed over in silence."""

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


def come(diary: Diary, schema: TableSchema = SHOP, *, relation: int | None = None, ahead: int = 0) -> Lsn:
    """The table comes in, so far ahead of what the log has; from where on it is complete."""
    tables, at = [(schema.table, relation or schema.relation)], diary.writer.position.value + ahead
    announce_tables(diary.path, tables, Lsn(at), commit=diary.writer.commit)
    confirm_tables(diary.path, tables, Lsn(at + 1))
    return Lsn(at + 1)


def ranged(log: LogPath, **options: object) -> Rows:
    made = frame(log, **options)
    parts = LogBatchReader(made, from_arrow_schema(made.fields)).partitions()
    return rows_of_parts(made, [part.value for part in parts])


def ids(rows: Rows) -> list[int]:
    return [row["id"] for row in rows]


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("what", [{"table": "public.things"}, {"tables": "public.*"}])
def test_a_table_that_was_out_for_a_while_ends_a_stream_after_everything_before(
    diary: Diary, sealed: bool, what: dict[str, str]
) -> None:
    come(diary)
    diary.commit(inserts(1))
    view = LogPlanner(frame(diary.path, **what))
    assert view.next_end(LogOffset(0), 1, limited=True) == 1
    diary.commit(inserts(7, schema=OTHER))
    whole = come(diary, ahead=STEP // 2)
    assert view.next_end(LogOffset(0), 2, limited=True) == (1 if "table" in what else 2), "the log is not there yet"
    diary.commit(inserts(8, schema=OTHER))
    diary.commit(inserts(3))
    if sealed:
        seal(diary.path)
    view = LogPlanner(frame(diary.path, **what))
    assert view.next_end(LogOffset(0), 4, limited=True) <= 2
    with pytest.raises(LogGap, match=rf"not captured for a while.*`startingPosition` {whole}"):
        view.next_end(LogOffset(2), 4, limited=True)
    for offset in (LogOffset(0), LogOffset(1), LogOffset(2)):
        with pytest.raises(LogGap):
            view.plan_parts(offset, 4)
    assert view.next_end(LogOffset(3), 4, limited=True) == 4, "who stands after it lacks nothing"
    with pytest.raises(LogGap):
        ranged(diary.path, **what)


@pytest.mark.parametrize("ahead", [0, STEP // 2])
def test_what_the_error_says_is_possible_and_leaves_out_no_row(diary: Diary, ahead: int) -> None:
    come(diary)
    diary.commit(inserts(1))
    whole = come(diary, ahead=ahead)
    diary.commit(inserts(3), inserts(7, schema=OTHER))
    diary.commit(inserts(4))
    for read in (stream, ranged):
        assert ids(read(diary.path, table="public.things", startingPosition=whole)) == [3, 4]
        assert ids(read(diary.path, table="public.things", startingPosition=3)) == [4]
    assert len(stream(diary.path, tables="*", startingPosition=whole)) == 3
    with pytest.raises(LogGap):
        stream(diary.path, table="public.things", startingPosition=Lsn(whole.value - 1))
    with pytest.raises(LogGap):
        stream(diary.path, table="public.things", startingPosition=2)


def test_a_range_that_ends_before_it_or_begins_after_it_is_whole(diary: Diary) -> None:
    come(diary)
    for key in (1, 2):
        diary.commit(inserts(key))
    come(diary)
    for key in (3, 4):
        diary.commit(inserts(key))
    come(diary)
    diary.commit(inserts(5))
    assert ids(ranged(diary.path, table="public.things", endingPosition=2)) == [1, 2]
    assert ids(ranged(diary.path, table="public.things", startingPosition=4, endingPosition=4)) == [4]
    for begin, end in ((1, 3), (2, 4), (4, 5)):
        with pytest.raises(LogGap):
            ranged(diary.path, table="public.things", startingPosition=begin, endingPosition=end)


def test_other_tables_are_not_concerned(diary: Diary) -> None:
    come(diary)
    diary.commit(inserts(1), inserts(7, schema=OTHER))
    come(diary)
    diary.commit(inserts(2), inserts(8, schema=OTHER))
    assert ids(stream(diary.path, table="public.other")) == [7, 8]


def test_a_table_that_was_renamed_meanwhile_is_known_by_its_number(diary: Diary) -> None:
    come(diary)
    diary.commit(inserts(1))
    come(diary, OTHER, relation=SHOP.relation)
    diary.commit(inserts(2))
    with pytest.raises(LogGap):
        stream(diary.path, table="public.things", startingPosition=1)


def test_one_that_was_made_anew_ends_a_stream_that_names_it_and_only_warns_one_with_a_pattern(
    diary: Diary, caplog: pytest.LogCaptureFixture
) -> None:
    come(diary)
    diary.commit(inserts(1))
    whole = come(diary, relation=99)
    diary.commit(inserts(3))
    for what in ({"table": "public.things"}, {"tables": "public.things, sales.*"}):
        with pytest.raises(LogGap, match="created again"):
            stream(diary.path, **what)
    with caplog.at_level(logging.WARNING):
        assert len(stream(diary.path, tables="public.*")) == 2
    (said,) = caplog.records
    assert said.getMessage().startswith(f"the log has table public.things from {whole} on")


@pytest.mark.parametrize("what", [{"table": "public.other"}, {"tables": "*"}])
def test_a_table_that_is_new_to_the_log_is_told_of_once_and_ends_nothing(
    diary: Diary, what: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    come(diary)
    diary.commit(inserts(1))
    whole = come(diary, OTHER)
    diary.commit(inserts(2))
    diary.commit(inserts(7, schema=OTHER))
    view = LogPlanner(frame(diary.path, **what))
    with caplog.at_level(logging.WARNING):
        assert view.next_end(LogOffset(0), 3, limited=True) == 3
        view.plan_parts(LogOffset(0), 3)
        assert [getattr(record, "complete_from", None) for record in caplog.records] == [str(whole)]
        assert LogPlanner(frame(diary.path, **what)).next_end(LogOffset(2), 3, limited=True) == 3
        assert len(caplog.records) == 1, "whoever stands after it lacks nothing"


def test_a_start_from_before_a_table_was_in_the_log_is_refused_if_the_table_is_named(diary: Diary) -> None:
    come(diary)
    diary.commit(inserts(1), at=1_000_000)
    whole = come(diary, OTHER, ahead=STEP // 2)
    diary.commit(inserts(7, schema=OTHER), at=2_000_000)
    for point in (1, 2, Lsn(STEP), "1970-01-01T00:00:01Z"):
        for read in (stream, ranged):
            with pytest.raises(ConfigError, match=rf"the start is before.*`earliest`.*{whole}"):
                read(diary.path, table="public.other", startingPosition=point)
        assert stream(diary.path, tables="public.*", startingPosition=point), "a pattern takes what comes"
    for point in (whole, "earliest"):
        assert ids(stream(diary.path, table="public.other", startingPosition=point)) == [7]
    assert stream(diary.path, table="public.other", startingPosition="latest") == []


def test_what_was_there_when_the_log_began_is_whole(diary: Diary, caplog: pytest.LogCaptureFixture) -> None:
    come(diary, ahead=STEP // 2)
    diary.commit()
    diary.commit(inserts(1))
    with caplog.at_level(logging.WARNING):
        assert ids(stream(diary.path, table="public.things", startingPosition=1)) == [1]
    assert caplog.records == []


def test_it_is_told_also_when_the_log_has_let_go_of_what_lies_around_it(diary: Diary) -> None:
    come(diary)
    diary.commit(inserts(1))
    come(diary)
    for key in range(5):
        diary.commit(inserts(key, schema=OTHER))
    seal(diary.path)
    with Sealer(diary.path) as sealer:
        trim(sealer, RetentionPolicy(age_seconds=0.0), now=4e9)
    diary.commit(inserts(9, schema=OTHER))
    made = frame(diary.path, table="public.things")
    assert LogPlanner(made).log.trimmed().commit == 6
    with pytest.raises(LogGap):
        steps(made, after=LogOffset(1))
    for after in (2, 6):
        assert steps(made, after=LogOffset(after)) == [], "nor is who stands after it told something wrong"
