"""A row of a renamed table belongs to the name under which it was written."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from tailrace.changelog.read.offsets import LogOffset
from tailrace.errors import LogGap
from tailrace.model.schema import Identity, TableId
from tailrace.spark.datasource.log.log_part import LogBatchReader
from tailrace.spark.datasource.log.log_plan import LogPlanner
from tailrace.storage.files import LogPath
from tests.support.changes import SHOP, insert, truncate
from tests.support.frames import Rows, frame, rows_of_parts, steps, stream
from tests.support.logs import OTHER, WIDER, Diary, inserts, seal

THINGS = {"table": "public.things"}
RENAMED = replace(SHOP, table=TableId("public", "things_old"))
RENAMED_OTHER = replace(OTHER, table=SHOP.table)
"""Two tables are swapped: `things` becomes `things_old`, and `other` becomes `things`."""


def ids(rows: Rows) -> list[int]:
    return [row["id"] for row in rows]


def ranged(log: LogPath, **options: object) -> list[int]:
    log_frame = frame(log, **options)
    parts = LogBatchReader(log_frame, from_arrow_schema(log_frame.fields)).partitions()
    return ids(rows_of_parts(log_frame, [part.value for part in parts]))


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("selection", [THINGS, {**THINGS, "shape": "envelope"}, {"tables": "public.things"}])
def test_rows_under_another_name_belong_to_another_table_with_one_warning(
    diary: Diary, selection: dict[str, str], sealed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    diary.commit(inserts(1))
    diary.commit(inserts(2), inserts(3, schema=RENAMED))
    diary.commit((RENAMED, [truncate()]))
    if sealed:
        seal(diary.path)
    with caplog.at_level(logging.WARNING):
        (_, rows), *more = steps(frame(diary.path, **selection))
    assert (len(rows), more) == (2, [])
    (record,) = caplog.records
    assert record.getMessage() == (
        "table public.things is called public.things_old from commit 2 on: changes after that are not requested"
    )
    assert len(stream(diary.path, table="public.things_old")) == 2
    assert len(stream(diary.path, tables="public.*")) == 4


@pytest.mark.parametrize("sealed", [False, True])
def test_a_name_that_moves_to_another_table_ends_a_stream_after_everything_before(diary: Diary, sealed: bool) -> None:
    diary.commit(inserts(1), inserts(70, 71, schema=OTHER))
    diary.commit(inserts(2))
    log_frame = frame(diary.path, **THINGS)
    planner = LogPlanner(log_frame)
    diary.commit(inserts(3, schema=RENAMED))
    diary.commit(inserts(72, schema=RENAMED_OTHER), (RENAMED, [truncate()]))
    diary.commit(inserts(73, schema=RENAMED_OTHER), inserts(4, schema=RENAMED))
    if sealed:
        seal(diary.path)
    assert planner.next_end(LogOffset(0), 5, limited=True) == 2
    assert ids(rows_of_parts(log_frame, planner.plan_parts(LogOffset(0), 2))) == [1, 2]
    for step in (lambda: planner.next_end(LogOffset(2), 5, limited=True), lambda: planner.plan_parts(LogOffset(0), 5)):
        with pytest.raises(LogGap, match=r"another table has this name now.*commit=4.*`startingPosition` 5"):
            step()
    assert ids(stream(diary.path, **THINGS, startingPosition=5)) == [73], "the start that the error names"
    assert ranged(diary.path, **THINGS, endingPosition=3) == [1, 2]
    with pytest.raises(LogGap):
        ranged(diary.path, **THINGS)


def test_a_pattern_selects_rows_written_under_its_names(diary: Diary, caplog: pytest.LogCaptureFixture) -> None:
    diary.commit(inserts(1), inserts(70, schema=OTHER))
    diary.commit(inserts(2, schema=RENAMED), inserts(71, schema=RENAMED_OTHER))
    with caplog.at_level(logging.WARNING):
        assert len(stream(diary.path, tables="public.thing[s]")) == 2
    assert sorted(record.getMessage().rpartition(": ")[2] for record in caplog.records) == [
        "changes after that are not requested",
        "changes before that are not requested",
    ]


def test_a_table_renamed_to_the_requested_name_is_read_from_then_on(diary: Diary) -> None:
    diary.commit(inserts(70, schema=OTHER))
    diary.commit(inserts(71, schema=RENAMED_OTHER))
    assert ids(stream(diary.path, **THINGS)) == [71]


def test_other_names_add_no_columns_and_no_errors(diary: Diary) -> None:
    full = replace(SHOP, identity=Identity.FULL)
    diary.commit((full, [insert(1, n=1)]))
    diary.commit((replace(WIDER, table=RENAMED.table), [truncate(), insert(2, added=True)]))
    assert "added" not in frame(diary.path, **THINGS).fields.names
    assert ids(stream(diary.path, **THINGS)) == [1]
    assert ids(stream(diary.path, **THINGS, shape="changelog")) == [1]
