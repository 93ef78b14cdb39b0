"""Micro-batches over a log deliver every row once, in whole commits, and skip nothing."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from tailrace.changelog.format.gaps import Gap, record_gap
from tailrace.changelog.format.schemas import known_tables, record_known_table
from tailrace.changelog.maintain.retention import RetentionPolicy, trim
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.read.offsets import LogOffset, starting_offset
from tailrace.errors import ConfigError, LogGap, LogTrimmed, LogUnusable, SchemaChanged, SourceNotReady
from tailrace.model.position import Lsn
from tailrace.model.schema import Column, Identity
from tailrace.spark.datasource.log.log_part import LogBatchReader
from tailrace.spark.datasource.log.log_plan import LogPlanner
from tailrace.storage.objects import ObjectPath
from tests.support.changes import SHOP, delete, insert, move
from tests.support.frames import frame, rows_of_parts, steps, stream
from tests.support.logs import KEYLESS_OTHER, OTHER, RETYPED, STEP, WIDER, Diary, inserts, seal, write_everything

NARROWER = replace(SHOP, columns=SHOP.columns[:-1])
LATER = 4e9


@pytest.mark.parametrize("sealed", ["not", "half", "all"])
@pytest.mark.parametrize(
    "selection", [{"table": "public.things"}, {"tables": "*"}, {"tables": "*.other, public.keyless"}]
)
def test_every_row_is_delivered_once_with_its_commit(diary: Diary, sealed: str, selection: dict[str, str]) -> None:
    write_everything(diary)
    if sealed == "half":
        seal(diary.path, join=False)
        write_everything(diary)
    if sealed == "all":
        seal(diary.path)
    for parts, limit in ((1, 10**6), (2, 10**6), (1000, 10**6), (2, 1), (1000, 4)):
        log_frame = frame(diary.path, maxPartitions=parts, rowsPerPartition=1, maxRowsPerTrigger=limit, **selection)
        delivered = [(row["_seq"], row["_commit"]) for _, rows in steps(log_frame) for row in rows]
        expected = [(n.row.seq, n.commit) for n in diary.noted if log_frame.options.matches(n.row.schema.table)]
        assert sorted(delivered) == expected
        assert expected


@pytest.mark.parametrize("limits", [{"maxRowsPerTrigger": 4}, {"maxBytesPerTrigger": 500}])
def test_a_log_in_a_store_is_read_like_one_in_a_folder(limits: dict[str, int]) -> None:
    diary = Diary(ObjectPath.parse(f"memory://{uuid.uuid4().hex}/log"))
    write_everything(diary)
    seal(diary.path)
    write_everything(diary)
    diary.close()
    rows = stream(diary.path, tables="*", rowsPerPartition=1, **limits)
    delivered = sorted((row["_seq"], row["_commit"]) for row in rows)
    assert delivered == [(n.row.seq, n.commit) for n in diary.noted]


@pytest.mark.parametrize("sealed", [False, True])
def test_a_commit_is_never_split_and_a_limit_is_kept_otherwise(diary: Diary, sealed: bool) -> None:
    for count in (1, 2, 1, 5, 1, 1):
        diary.commit(inserts(*range(count)))
        diary.commit(inserts(*range(7), schema=OTHER))
    if sealed:
        seal(diary.path)
    limited = steps(frame(diary.path, table="public.things", maxRowsPerTrigger=3))
    assert [(end, len(rows)) for end, rows in limited] == [(3, 3), (5, 1), (7, 5), (11, 2)]
    whole = steps(frame(diary.path, table="public.things"))
    assert [(end, len(rows)) for end, rows in whole] == [(11, 11)]


def test_bytes_are_a_limit_too(diary: Diary) -> None:
    for _ in range(4):
        diary.commit(inserts(1, big="x" * 10_000))
    assert len(steps(frame(diary.path, table="public.things", maxBytesPerTrigger="25kB"))) == 2
    assert len(steps(frame(diary.path, table="public.things", maxBytesPerTrigger="1B"))) == 4
    seal(diary.path)
    assert len(steps(frame(diary.path, table="public.things", maxBytesPerTrigger="1B"))) == 4


def test_commits_of_other_tables_make_no_micro_batch(diary: Diary) -> None:
    diary.commit(inserts(1))
    planner = LogPlanner(frame(diary.path, table="public.things"))
    for _ in range(3):
        diary.commit(inserts(2, schema=OTHER))
        diary.commit()
        assert planner.next_end(LogOffset(1), planner.newest(), limited=True) == 1


def test_a_table_created_again_is_read_on_and_a_new_one_is_found(diary: Diary) -> None:
    diary.commit(inserts(1))
    planner = LogPlanner(frame(diary.path, tables="public.*"))
    assert planner.next_end(LogOffset(0), 1, limited=True) == 1
    diary.commit(inserts(2, schema=replace(SHOP, relation=99)), inserts(3, schema=OTHER))
    assert planner.next_end(LogOffset(1), 2, limited=True) == 2
    assert len(rows_of_parts(frame(diary.path, tables="public.*"), planner.plan_parts(LogOffset(1), 2))) == 2
    assert [row["id"] for row in stream(diary.path, table="public.things")] == [1, 2]


@pytest.mark.parametrize("sealed", [False, True])
def test_a_schema_that_does_not_fit_stops_the_stream_after_everything_before_it(diary: Diary, sealed: bool) -> None:
    diary.commit(inserts(1))
    log_frame = frame(diary.path, table="public.things")
    diary.commit(inserts(2))
    diary.commit((WIDER, [insert(3, added=True)]))
    if sealed:
        seal(diary.path)
    planner = LogPlanner(log_frame)
    assert planner.next_end(LogOffset(0), 3, limited=True) == 2
    assert [row["id"] for row in rows_of_parts(log_frame, planner.plan_parts(LogOffset(0), 2))] == [1, 2]
    with pytest.raises(SchemaChanged, match="Start the stream again"):
        planner.next_end(LogOffset(2), 3, limited=True)
    with pytest.raises(SchemaChanged):
        planner.plan_parts(LogOffset(0), 3)
    restarted = stream(diary.path, table="public.things")
    assert [(row["id"], row["added"]) for row in restarted] == [(1, None), (2, None), (3, True)]


@pytest.mark.parametrize("sealed", [False, True])
def test_a_changed_key_ends_a_stream_once_and_not_for_good(diary: Diary, sealed: bool) -> None:
    diary.commit((SHOP, [insert(1, n=1), *move(1, 2, n=1)]))
    log_frame = frame(diary.path, table="public.things")
    diary.commit((replace(SHOP, key=("n",)), [insert(3, n=3), delete(3, n=3)]))
    diary.commit((replace(SHOP, key=()), [insert(4)]))
    if sealed:
        seal(diary.path)
    with pytest.raises(SchemaChanged):
        steps(log_frame, after=LogOffset(1))
    rows = stream(diary.path, table="public.things")
    assert [row["id"] for row in rows] == [1, 1, 2, 3, 3, 4]
    assert [row["_moved_from"] for row in rows if row["_moved_from"]] == [{"id": 1, "n": None}]


def test_a_stream_continues_with_a_schema_that_fits(diary: Diary) -> None:
    diary.commit(inserts(1, n=4))
    log_frame = frame(diary.path, table="public.things")
    diary.commit((NARROWER, [insert(2)]))
    ((_, rows),) = steps(log_frame)
    assert [(row["id"], row["n"]) for row in rows] == [(1, 4), (2, None)]


def test_rows_of_another_schema_can_be_delivered_whole_in_a_column_of_their_own(diary: Diary) -> None:
    diary.commit(inserts(1, n=4))
    log_frame = frame(diary.path, table="public.things", onSchemaChange="envelope")
    other = replace(
        SHOP,
        columns=(
            *SHOP.columns[:-1],
            Column(name="n", source_type="text", type=pa.string()),
            Column(name="added", source_type="int4", type=pa.int32()),
        ),
    )
    diary.commit((other, [insert(2, name="b", n="many", added=7)]))
    ((_, rows),) = steps(log_frame)
    assert [(row["id"], row["name"], row["n"]) for row in rows] == [(1, "n1", 4), (2, "b", None)]
    assert rows[0]["_row"] is None
    assert b"many" in rows[1]["_row"]["value"]
    assert b"added" in rows[1]["_row"]["metadata"]


def test_a_gap_is_reported_after_everything_before_it(diary: Diary) -> None:
    diary.commit(inserts(1))
    gap = Gap(commit=2, start=Lsn(STEP), end=Lsn(2 * STEP))
    record_gap(diary.path, gap)
    diary.commit()
    planner = LogPlanner(frame(diary.path, table="public.things"))
    assert planner.next_end(LogOffset(0), 2, limited=True) == 1
    with pytest.raises(LogGap, match="`startingPosition` 3"):
        planner.next_end(LogOffset(1), 2, limited=True)
    diary.commit(inserts(2))
    assert [row["id"] for row in stream(diary.path, table="public.things", startingPosition=3)] == [2]


def test_trimmed_rows_are_reported_and_not_skipped(diary: Diary) -> None:
    diary.commit(inserts(1))
    diary.commit(inserts(2, schema=OTHER))
    seal(diary.path)
    with Sealer(diary.path) as sealer:
        trim(sealer, RetentionPolicy(age_seconds=0.0), now=LATER)
    diary.commit(inserts(3))
    planner = LogPlanner(frame(diary.path, table="public.things"))
    with pytest.raises(LogTrimmed, match="`consumer`"):
        planner.next_end(LogOffset(0), 3, limited=True)
    with pytest.raises(LogTrimmed):
        planner.plan_parts(LogOffset(0), 3)
    kept = stream(diary.path, table="public.things")
    assert [row["id"] for row in kept] == [3], "earliest is the oldest that is kept"


def test_a_large_commit_is_divided_between_tasks(diary: Diary) -> None:
    diary.piece(inserts(*range(50)))
    diary.piece(inserts(*range(50, 100)))
    diary.finish(inserts(*range(100, 150)))
    planner = LogPlanner(frame(diary.path, table="public.things", rowsPerPartition=40))
    assert len(planner.plan_parts(LogOffset(0), 1)) == 3
    rows = stream(diary.path, table="public.things", rowsPerPartition=40)
    assert [row["id"] for row in rows] == list(range(150))


def test_a_commit_no_larger_than_a_part_is_not_divided(diary: Diary) -> None:
    for key in range(0, 120, 20):
        diary.commit(inserts(*range(key, key + 19)), inserts(key + 19, schema=WIDER))
    planner = LogPlanner(frame(diary.path, table="public.things", rowsPerPartition=30))
    assert [part.last for part in planner.plan_parts(LogOffset(0), 6)] == [2, 4, 6]


def test_an_unknown_table_is_reported_with_those_that_exist(diary: Diary) -> None:
    with pytest.raises(ConfigError, match="A table is known once its capture runs"):
        frame(diary.path, table="public.thing")
    record_known_table(diary.path, OTHER)
    diary.commit(inserts(1))
    one = {"table": "public.thing"}
    for selection in (one, {**one, "shape": "envelope"}, {"tables": "public.*, public.thing"}):
        with pytest.raises(ConfigError, match=r"It has public\.things, public\.other\."):
            frame(diary.path, **selection)


def test_a_table_that_never_changed_has_the_columns_that_its_capture_saw(diary: Diary) -> None:
    diary.commit()
    record_known_table(diary.path, WIDER)
    record_known_table(diary.path, replace(KEYLESS_OTHER, identity=Identity.KEY))
    log_frame = frame(diary.path, table="public.things")
    assert log_frame.fields.names[-5:] == WIDER.names
    assert frame(diary.path, tables="public.things").schema is None
    assert steps(log_frame) == []
    with pytest.raises(SourceNotReady, match="REPLICA IDENTITY FULL"):
        frame(diary.path, table="public.keyless", shape="changelog")
    diary.commit((SHOP, [insert(1)]))
    assert [row["id"] for _, rows in steps(log_frame) for row in rows] == [1]
    assert frame(diary.path, table="public.things").fields.names[-4:] == SHOP.names, (
        "the schema of the rows replaces the recorded one"
    )
    diary.commit((RETYPED, [insert(2)]))
    with pytest.raises(SchemaChanged):
        steps(log_frame, after=LogOffset(2))


def test_a_damaged_record_of_a_known_table_is_ignored(diary: Diary) -> None:
    record_known_table(diary.path, SHOP)
    (file,) = diary.path.glob("expected/*.json")
    file.write_text(file.read_text().replace("public", "secret"))
    assert known_tables(diary.path) == []
    with pytest.raises(ConfigError):
        frame(diary.path, table="public.things")


def test_a_missing_log_is_reported(tmp_path: Path) -> None:
    for selection in ({"table": "public.t"}, {"tables": "*"}):
        with pytest.raises(LogUnusable, match="there is no log here"):
            frame(tmp_path / "none", **selection)


def test_earliest_is_the_beginning_of_the_log_and_latest_its_end(diary: Diary) -> None:
    diary.commit(inserts(1))
    planner = LogPlanner(frame(diary.path, table="public.things"))
    assert starting_offset(planner.log, "latest", planner.tables(1)) == LogOffset(1)
    assert starting_offset(planner.log, "earliest", planner.tables(1)) == LogOffset(0)


@pytest.mark.parametrize(
    ("begin", "end"), [("2", "4"), ("0/64", "0/190"), ("1970-01-01T00:00:02Z", "1970-01-01T00:00:04Z")]
)
@pytest.mark.parametrize("sealed", [False, True])
def test_a_range_is_by_commit_position_or_time(diary: Diary, begin: str, end: str, sealed: bool) -> None:
    for key in range(1, 6):
        diary.commit(inserts(key), at=key * 1_000_000)
    if sealed:
        seal(diary.path)
    log_frame = frame(diary.path, table="public.things", startingPosition=begin, endingPosition=end, rowsPerPartition=1)
    reader = LogBatchReader(log_frame, from_arrow_schema(log_frame.fields))
    parts = reader.partitions()
    assert [row["id"] for part in parts for batch in reader.read(part) for row in batch.to_pylist()] == [2, 3, 4]
    assert len(parts) == (1 if sealed else 3)


def test_a_range_may_be_empty_but_not_the_wrong_way_round(diary: Diary) -> None:
    diary.commit(inserts(1))
    diary.commit(inserts(2))
    for options in ({"startingPosition": "latest"}, {"endingPosition": "earliest"}):
        log_frame = frame(diary.path, table="public.things", **options)
        assert LogBatchReader(log_frame, from_arrow_schema(log_frame.fields)).partitions() == []
    log_frame = frame(diary.path, table="public.things", startingPosition=2, endingPosition="0/0")
    with pytest.raises(ConfigError, match="the range ends before it begins"):
        LogBatchReader(log_frame, from_arrow_schema(log_frame.fields)).partitions()
