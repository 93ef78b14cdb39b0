"""The calls of Spark to a stream, in the orders that occur: offsets, acknowledgement and refusals."""

from __future__ import annotations

import pickle
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows

from tailrace.changelog.format.schemas import record_known_table
from tailrace.changelog.maintain.retention import RetentionPolicy, trim
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.read.consumers import RetentionHold, read_holds
from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import ConfigError, LogForeign, SchemaChanged
from tailrace.model.position import Lsn
from tailrace.spark.datasource.log.log_options import LogOptions
from tailrace.spark.datasource.log.log_schema import resolve_frame
from tailrace.spark.datasource.log.log_stream import LogStream, Offset
from tailrace.spark.datasource.log.stream_41 import Spark41StreamReader
from tailrace.spark.datasource.log.stream_42 import LogStreamReader
from tailrace.spark.session.arrow_types import spark_schema
from tailrace.storage.objects import ObjectPath
from tests.support.changes import SHOP, insert
from tests.support.frames import frame
from tests.support.logs import OTHER, STEP, WIDER, Diary, inserts, seal

ALL = ReadAllAvailable()


def reader(diary: Diary, capture: Any = None, **options: object) -> LogStreamReader:
    log_frame = frame(diary.path, **({"table": "public.things"} if "tables" not in options else {}), **options)
    return LogStreamReader(log_frame, spark_schema(log_frame.fields), capture)


def ids(stream: LogStream, start: Offset, end: Offset) -> list[int]:
    return [
        row["id"] for part in stream.partitions(start, end) for batch in stream.read(part) for row in batch.to_pylist()
    ]


def hold(diary: Diary) -> RetentionHold:
    (only_hold,) = read_holds(diary.path)
    return only_hold


def test_an_offset_is_a_commit_and_the_logs_id(diary: Diary) -> None:
    diary.commit(inserts(1))
    stream = reader(diary)
    start = stream.initialOffset()
    end = stream.latestOffset(start, ALL)
    assert (start, end) == ({"log": diary.writer.log_id, "commit": 0}, {"log": diary.writer.log_id, "commit": 1})
    assert ids(stream, start, end) == [1]
    assert stream.latestOffset(end, ALL) == end, "with nothing new, the same"
    assert stream.reportLatestOffset() == end


def test_after_a_restart_the_first_question_may_be_for_the_rows(diary: Diary) -> None:
    diary.commit(inserts(1))
    diary.commit(inserts(2))
    offsets = [{"log": diary.writer.log_id, "commit": commit} for commit in (1, 2)]
    assert ids(pickle.loads(pickle.dumps(reader(diary))), *offsets) == [2]


def test_a_start_may_be_a_time_and_may_lie_inside_of_a_commit(diary: Diary) -> None:
    for key in range(1, 4):
        diary.commit(inserts(key), at=key * 1_000_000)
    stream = reader(diary, startingPosition="1970-01-01T00:00:02Z")
    start = stream.initialOffset()
    assert ids(stream, start, stream.latestOffset(start, ALL)) == [2, 3]
    diary.commit(inserts(4, 5))
    inside = {"log": diary.writer.log_id, "commit": 3, "seq": 4}
    assert ids(stream, inside, stream.latestOffset(inside, ALL)) == [5]


def test_available_now_ends_with_what_was_there_when_it_began(diary: Diary) -> None:
    for key in range(4):
        diary.commit(inserts(key))
    stream = reader(diary, maxRowsPerTrigger=2)
    stream.prepareForTriggerAvailableNow()
    diary.commit(inserts(9))
    offset, seen = stream.initialOffset(), []
    while (end := stream.latestOffset(offset, stream.getDefaultReadLimit())) != offset:
        seen.append(ids(stream, offset, end))
        offset = end
    assert seen == [[0, 1], [2, 3]]


def test_only_the_start_of_a_micro_batch_is_acknowledged(diary: Diary) -> None:
    stream = reader(diary_with(diary, 3), maxRowsPerTrigger=1, consumer="mine")
    start = stream.initialOffset()
    assert hold(diary).commit == 0
    first = stream.latestOffset(start, ReadMaxRows(1))
    stream.partitions(start, first)
    second = stream.latestOffset(first, ReadMaxRows(1))
    stream.commit(first)
    stream.partitions(first, second)
    stream.commit(second)
    stream.stop()
    assert hold(diary).commit == 1
    again = reader(diary, consumer="mine")
    again.partitions(first, second)
    assert hold(diary).commit == 1
    again.latestOffset(second, ALL)
    assert hold(diary).commit == 2


def test_commits_without_requested_rows_are_acknowledged_too(diary: Diary) -> None:
    stream = reader(diary_with(diary, 1), consumer="mine")
    end = stream.latestOffset(stream.initialOffset(), ALL)
    diary.commit(inserts(1, schema=OTHER))
    assert stream.latestOffset(end, ALL) == end
    stream.stop()
    assert hold(diary).commit == 2


def test_an_available_now_query_stores_its_offset(diary: Diary) -> None:
    stream = reader(diary_with(diary, 1), consumer="mine")
    stream.prepareForTriggerAvailableNow()
    end = stream.latestOffset(stream.initialOffset(), ALL)
    stream.latestOffset(end, ALL)
    assert hold(diary).commit == 1


def test_a_consumer_name_is_for_one_table(diary: Diary) -> None:
    diary.commit(inserts(1), inserts(1, schema=OTHER))
    reader(diary, consumer="mine").initialOffset()
    with pytest.raises(ConfigError, match="this consumer reads another table"):
        reader(diary, tables="*", consumer="mine").initialOffset()


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, ReadAllAvailable()), ({"maxRowsPerTrigger": 5}, ReadMaxRows(5)),
        ({"maxBytesPerTrigger": 5}, ReadMaxBytes(5)),
        ({"maxRowsPerTrigger": 5, "maxBytesPerTrigger": 5}, ReadMaxRows(5)),
    ],
)  # fmt: skip
def test_spark_gets_the_limit_of_the_options(diary: Diary, options: dict[str, object], limit: ReadLimit) -> None:
    assert reader(diary_with(diary, 1), **options).getDefaultReadLimit() == limit


def test_no_limit_applies_when_spark_asks_for_all(diary: Diary) -> None:
    stream = reader(diary_with(diary, 5), maxRowsPerTrigger=1)
    assert stream.latestOffset(stream.initialOffset(), ALL)["commit"] == 5


def test_a_checkpoint_of_another_log_or_of_a_later_state_is_refused(diary: Diary) -> None:
    stream = reader(diary_with(diary, 1))
    with pytest.raises(LogForeign, match="to another log"):
        stream.latestOffset({"log": "other", "commit": 1}, ALL)
    with pytest.raises(LogForeign, match="ahead of the log"):
        stream.partitions({"log": diary.writer.log_id, "commit": 1}, {"log": diary.writer.log_id, "commit": 2})


def test_a_log_in_a_store_is_not_read_at_every_question_of_spark() -> None:
    diary = Diary(ObjectPath.parse(f"memory://{uuid.uuid4().hex}/log"))
    stream = reader(diary_with(diary, 2), consumer="nightly")
    start = stream.initialOffset()
    end = stream.latestOffset(start, ALL)
    assert ids(stream, start, end) == [0, 1]
    started = time.monotonic()
    assert [stream.latestOffset(end, ALL) for _ in range(4)] == [end] * 4
    assert time.monotonic() - started >= 0.3, "each look at a store costs money"
    diary.commit(inserts(2))
    assert ids(stream, end, stream.latestOffset(end, ALL)) == [2]
    stream.stop()
    diary.close()
    assert hold(diary).commit == 2


def test_a_table_that_never_changed_is_streamed_from_its_first_change_on(diary: Diary) -> None:
    diary.commit(inserts(1, schema=OTHER))
    record_known_table(diary.path, SHOP)
    stream = reader(diary, consumer="mine")
    start = stream.initialOffset()
    assert stream.latestOffset(start, ALL) == start
    diary.commit(inserts(7))
    log = ChangeLog.open(diary.path)
    log.schemas.load()
    (retention,) = read_holds(diary.path, log.schemas.numbers_named)
    assert retention.needs(log.table_numbers("public.things")[0], last_seq=2, last_commit=2), (
        "the log keeps rows for it"
    )
    assert ids(stream, start, stream.latestOffset(start, ALL)) == [7]


class RecordingCapture:
    """A capture that records the calls to it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def start(self) -> None:
        self.asked.append("start")

    def catch_up(self) -> None:
        self.asked.append("catch up")

    def check(self) -> None:
        self.asked.append("check")

    def stop(self) -> None:
        self.asked.append("stop")


def test_a_capture_is_started_before_the_log_is_opened_then_checked_and_stopped(diary: Diary) -> None:
    capture = RecordingCapture()
    stream = reader(diary_with(diary, 1), capture)
    assert capture.asked == [], "Spark makes readers in several processes"
    start = stream.initialOffset()
    stream.prepareForTriggerAvailableNow()
    stream.latestOffset(start, ALL)
    stream.stop()
    assert capture.asked == ["start", "catch up", "check", "stop"]
    assert hold(diary).name == "spark"


@pytest.mark.parametrize("position", ["latest", str(Lsn(2 * STEP))])
def test_a_start_is_resolved_in_a_log_that_has_caught_up(diary: Diary, position: str) -> None:
    class Late(RecordingCapture):
        def catch_up(self) -> None:
            super().catch_up()
            diary.commit(inserts(2))  # committed at the source while nobody captured

    capture = Late()
    stream = reader(diary_with(diary, 1), capture, startingPosition=position)
    start = stream.initialOffset()
    diary.commit(inserts(3))
    assert ids(stream, start, stream.latestOffset(start, ALL)) == [3]
    assert capture.asked == ["start", "catch up", "check"]


@pytest.mark.parametrize("position", ["2020-01-01T00:00:00Z", "2099-01-01T00:00:00Z", "16/B374D848", "7"])
def test_a_start_in_the_past_of_a_new_log_is_refused_before_anything_is_captured(tmp_path: Path, position: str) -> None:
    options = {"log": str(tmp_path / "log"), "url": "postgresql://x@127.0.0.1:1/none", "tables": "*"}
    log_frame = resolve_frame(LogOptions.parse({**options, "startingPosition": position}))
    for method in ("initialOffset", "prepareForTriggerAvailableNow"):
        capture = RecordingCapture()
        stream = LogStreamReader(log_frame, spark_schema(log_frame.fields), capture)
        with pytest.raises(ConfigError, match=r"the log is new.*read the table as a whole"):
            getattr(stream, method)()
        assert capture.asked == []


def test_nothing_is_captured_for_a_checkpoint_of_another_or_a_missing_log(diary: Diary, tmp_path: Path) -> None:
    offset, capture = {"log": "another", "commit": 1}, RecordingCapture()
    stream = reader(diary_with(diary, 1), capture)
    with pytest.raises(LogForeign, match="to another log"):
        stream.latestOffset(offset, ALL)
    log_frame = resolve_frame(
        LogOptions.parse({"log": str(tmp_path / "log"), "url": "postgresql://x@127.0.0.1:1/x", "tables": "*"})
    )
    stream = LogStreamReader(log_frame, spark_schema(log_frame.fields), capture)
    with pytest.raises(LogForeign, match="is not here"):
        stream.partitions(offset, offset)
    assert capture.asked == []


# Spark 4.1, which does not say where it is.


def reader_41(diary: Diary, capture: Any = None, **options: object) -> Spark41StreamReader:
    log_frame = frame(diary.path, table="public.things", **options)
    return Spark41StreamReader(log_frame, spark_schema(log_frame.fields), capture)


def test_a_spark_that_does_not_say_where_it_is_gets_every_row_once(diary: Diary) -> None:
    stream = reader_41(diary_with(diary, 2), consumer="mine")
    start = stream.initialOffset()
    first = stream.latestOffset()
    assert stream.latestOffset() == first, "asked again before it has planned"
    assert ids(stream, start, first) == [0, 1]
    diary.commit(inserts(5, schema=OTHER))
    assert stream.latestOffset() == first, "without requested rows, the same"
    stream.stop()
    assert hold(diary).commit == 3
    diary.commit(inserts(2))
    second = stream.latestOffset()
    assert ids(stream, first, second) == [2]


def test_after_a_restart_the_first_batch_goes_from_sparks_offset_to_the_newest_row(diary: Diary) -> None:
    first = reader_41(diary_with(diary, 3)).latestOffset()
    diary.commit(inserts(3))
    diary.commit(inserts(9, schema=OTHER))
    again = reader_41(diary, consumer="mine")
    end = again.latestOffset()
    assert (first["commit"], end["commit"]) == (3, 4)
    assert ids(again, first, end) == [3]
    assert hold(diary).commit == 3, "what lies before is done"
    assert again.latestOffset() == end
    again.stop()
    quiet = reader_41(diary, consumer="mine")
    assert quiet.latestOffset() == end, "with nothing since, no micro-batch"
    assert hold(diary).commit == 5, "and the offset stays the same"


@pytest.mark.parametrize("consumer", [{}, {"consumer": "mine"}])
def test_after_a_restart_trimmed_rows_do_not_take_the_stream_back(diary: Diary, consumer: dict[str, str]) -> None:
    stream = reader_41(diary_with(diary, 3), **consumer)
    start = stream.initialOffset()
    end = stream.latestOffset()
    assert ids(stream, start, end) == [0, 1, 2]
    assert stream.latestOffset() == end
    stream.stop()
    diary.commit(inserts(9, schema=OTHER))
    seal(diary.path)
    with Sealer(diary.path) as sealer:
        trim(sealer, RetentionPolicy(age_seconds=0.0), now=4e9)
    diary.commit(inserts(9, schema=OTHER))
    again = reader_41(diary, **consumer)
    assert again.latestOffset() == end, "no micro-batch"
    diary.commit(inserts(3))
    newest = again.latestOffset()
    assert ids(again, end, newest) == [3]
    assert again.latestOffset() == newest


def test_a_micro_batch_backwards_is_empty_and_moves_nothing(diary: Diary) -> None:
    stream = reader_41(diary_with(diary, 3))
    ahead, behind = ({"log": diary.writer.log_id, "commit": commit} for commit in (3, 1))
    assert stream.partitions(ahead, behind) == []
    assert stream.latestOffset() == ahead


def test_without_available_now_the_capture_catches_up_before_the_first_batch(diary: Diary) -> None:
    capture = RecordingCapture()
    stream = reader_41(diary_with(diary, 1), capture)
    stream.initialOffset()
    stream.latestOffset()
    stream.latestOffset()
    assert capture.asked == ["start", "catch up", "check", "check"]


def test_a_later_schema_ends_a_stream_after_everything_before(diary: Diary) -> None:
    stream = reader_41(diary_with(diary, 1))
    start = stream.initialOffset()
    diary.commit((WIDER, [insert(2, added=True)]))
    end = stream.latestOffset()
    assert ids(stream, start, end) == [0]
    with pytest.raises(SchemaChanged):
        stream.latestOffset()


def diary_with(diary: Diary, commits: int) -> Diary:
    for key in range(commits):
        diary.commit(inserts(key))
    return diary
