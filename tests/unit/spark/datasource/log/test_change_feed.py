"""Rows with `shape=changelog` have the columns and rules of Spark's `changes` and Delta's change data feed."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from tailrace.changelog.read.offsets import LogOffset
from tailrace.changelog.write.writer import LogWriter
from tailrace.errors import SourceNotReady, Unsupported, ValueUnfit
from tailrace.model.schema import Identity
from tailrace.spark.datasource.log.log_part import read_part
from tailrace.spark.datasource.log.log_plan import LogPlanner
from tests.support.changes import SHOP, Change, delete, insert, move, table_schema, truncate, update
from tests.support.frames import frame, rows_of_parts, steps, stream
from tests.support.logs import KEYLESS_OTHER, Diary, seal
from tests.support.windows import SOURCE, batch, window

FULL = replace(SHOP, identity=Identity.FULL)
NOTHING = {"name": None, "big": None, "n": None}


def feed(diary: Diary, table: str = "public.things", **options: object) -> list[tuple[Any, ...]]:
    rows = stream(diary.path, table=table, shape="changelog", **options)
    return [(row["_change_type"], row["id"], row["n"], row["_commit_version"]) for row in rows]


def row(key: int, n: int) -> dict[str, Any]:
    return {"id": key, **NOTHING, "n": n}


def changed(key: int, before: int, n: int) -> Change:
    return update(key, n=n, before=row(key, before))


@pytest.mark.parametrize("sealed", [False, True])
def test_each_kind_of_change_has_whole_rows(diary: Diary, sealed: bool) -> None:
    diary.commit((FULL, [insert(1, n=10), insert(2, n=20)]))
    diary.commit((FULL, [changed(1, 10, 11), delete(2, n=20)]))
    diary.commit((FULL, [*move(1, 3, n=11)][:1]), (FULL, [insert(3, n=11)]))
    if sealed:
        seal(diary.path)
    assert feed(diary) == [
        ("insert", 1, 10, 1),
        ("insert", 2, 20, 1),
        ("update_preimage", 1, 10, 2),
        ("update_postimage", 1, 11, 2),
        ("delete", 2, 20, 2),
        ("delete", 1, None, 3),
        ("insert", 3, 11, 3),
    ]


def test_the_columns_are_the_tables_own_and_then_the_feeds(diary: Diary) -> None:
    diary.commit((FULL, [insert(1)]))
    fields = frame(diary.path, table="public.things", shape="changelog").fields
    assert fields.names == ["id", "name", "big", "n", "_change_type", "_commit_version", "_commit_timestamp"]
    assert [str(field.type) for field in fields][-3:] == ["string", "int64", "timestamp[us, tz=UTC]"]


def test_columns_rows_and_rules_are_those_of_deltas_own_feed(diary: Diary, tmp_path: Path) -> None:
    """Delta's own feed has the same three changes of a table. Each of its versions is a commit of the log."""
    delta, fields = str(tmp_path / "delta"), pa.schema(SHOP.row_fields())
    first = pa.Table.from_pylist([row(1, 10), row(2, 20)], schema=fields)
    write_deltalake(delta, first, configuration={"delta.enableChangeDataFeed": "true"})
    merged = pa.Table.from_pylist([row(1, 11), row(3, 30)], schema=fields)
    merge = DeltaTable(delta).merge(merged, predicate="t.id = s.id", source_alias="s", target_alias="t")
    merge.when_matched_update_all().when_not_matched_insert_all().execute()
    DeltaTable(delta).delete("id = 2")
    peer = pa.table(DeltaTable(delta).load_cdf(starting_version=0).read_all())

    diary.commit((FULL, [insert(1, n=10), insert(2, n=20)]))
    diary.commit((FULL, [changed(1, 10, 11), insert(3, n=30)]))
    diary.commit((FULL, [delete(2, n=20)]))
    log_frame = frame(diary.path, table="public.things", shape="changelog", maxRowsPerTrigger=1, rowsPerPartition=1)
    assert log_frame.fields.names == peer.schema.names
    assert [_plain(field.type) for field in log_frame.fields] == [_plain(field.type) for field in peer.schema]
    batches = [rows for _, rows in steps(log_frame)]
    assert [{item["_commit_version"] for item in rows} for rows in batches] == [{1}, {2}, {3}], "whole, and alone"
    reported = [item for rows in batches for item in rows]
    assert _comparable(reported, 1) == _comparable(peer.to_pylist(), 0)
    for feed_of in (reported, sorted(peer.to_pylist(), key=lambda item: item["_commit_version"])):
        times = [item["_commit_timestamp"] for item in feed_of]
        assert times == sorted(times), "times never go back"
    for rows in batches:
        assert len({item["_commit_timestamp"] for item in rows}) == 1


def _plain(kind: pa.DataType) -> str:
    """Return one name for a type: Delta's reader has other Arrow types for Delta's `string`, `long` and `timestamp`."""
    if pa.types.is_timestamp(kind):
        return "timestamp"
    return {"string_view": "string", "uint64": "int64"}.get(str(kind), str(kind))


def _comparable(rows: list[dict[str, Any]], first: int) -> list[tuple[Any, ...]]:
    return sorted(
        (item["_commit_version"] - first, item["id"], item["_change_type"], item["name"], item["n"]) for item in rows
    )


def test_a_key_changes_at_most_once_in_a_version(diary: Diary) -> None:
    diary.commit((FULL, [insert(1, n=1), insert(2, n=1), insert(3, n=1), insert(4, n=1)]))
    diary.commit(
        (
            FULL,
            [
                changed(1, 1, 2),
                changed(1, 2, 3),
                delete(2, n=1),
                insert(2, n=5),
                changed(3, 1, 2),
                delete(3, n=2),
                insert(9, n=0),
                delete(9, n=0),
                delete(4, n=1),
                insert(4, n=7),
                changed(4, 7, 8),
                delete(4, n=8),
                insert(5, n=1),
                changed(5, 1, 2),
            ],
        )
    )
    assert feed(diary)[4:] == [
        ("update_preimage", 1, 1, 2),
        ("update_postimage", 1, 3, 2),
        ("update_preimage", 2, 1, 2),
        ("update_postimage", 2, 5, 2),
        ("delete", 3, 1, 2),
        ("delete", 4, 1, 2),
        ("insert", 5, 2, 2),
    ]


@pytest.mark.parametrize("sealed", [False, True])
def test_a_feed_leads_from_state_to_state_after_random_changes(diary: Diary, sealed: bool) -> None:
    chance, state = random.Random(7), dict[int, int]()
    states: list[dict[int, int]] = []
    for _ in range(40):
        changes: list[Change] = []
        for _ in range(chance.randrange(1, 12)):
            key, n = chance.randrange(6), chance.randrange(100)
            if key not in state:
                changes.append(insert(key, n=n))
                state[key] = n
            elif chance.random() < 0.5:
                changes.append(changed(key, state[key], n))
                state[key] = n
            else:
                changes.append(delete(key, n=state.pop(key)))
        diary.commit((FULL, changes))
        states.append(dict(state))
    if sealed:
        seal(diary.path)
    reported = feed(diary, rowsPerPartition=20, maxRowsPerTrigger=50)
    rebuilt: dict[int, int] = {}
    for version, expected in enumerate(states, start=1):
        of_version = [item for item in reported if item[3] == version]
        for kind, key, n, _ in of_version:
            if kind in ("delete", "update_preimage"):
                assert rebuilt.pop(key) == n
        for kind, key, n, _ in of_version:
            if kind in ("insert", "update_postimage"):
                assert rebuilt.setdefault(key, n) is n
        assert rebuilt == expected
        assert len({key for kind, key, *_ in of_version if kind == "update_postimage"}) == sum(
            kind == "update_preimage" for kind, *_ in of_version
        )


def test_a_key_may_be_a_list_of_dates_that_pythons_calendar_does_not_have(tmp_path: Path) -> None:
    days = table_schema({"id": pa.list_(pa.date32()), "n": pa.int32()}, identity=Identity.FULL)
    writer = LogWriter(tmp_path / "log", SOURCE)
    writer.append(window(0, 100, batch(days, insert([3_700_000], n=1), insert([None], n=2))))
    writer.close()
    log_frame = frame(writer.path, table="public.things", shape="changelog")
    (part,) = LogPlanner(log_frame).plan_parts(LogOffset(0), 1)
    (rows,) = read_part(log_frame, part, log_frame.fields)
    assert rows.column("n").to_pylist() == [1, 2]


def test_a_version_has_one_time_which_never_decreases(diary: Diary) -> None:
    for at in (5_000_000, 3_000_000, 9_000_000):  # the source's clock
        diary.commit((FULL, [insert(1), insert(2)]), at=at)
    rows = stream(diary.path, table="public.things", shape="changelog")
    times = [row["_commit_timestamp"] for row in rows]
    assert times == sorted(times)
    assert len({(row["_commit_version"], row["_commit_timestamp"]) for row in rows}) == 3


def test_rows_without_a_key_are_reported_one_by_one(diary: Diary) -> None:
    diary.commit(
        (
            KEYLESS_OTHER,
            [
                insert({"a": 1}, b="x"),
                insert({"a": 1}, b="x"),
                update({"a": 2}, b="y", before={"a": 1, "b": "x"}),
                delete({"a": 1}, b="x"),
            ],
        )
    )
    rows = stream(diary.path, table="public.keyless", shape="changelog")
    assert [(row["_change_type"], row["a"]) for row in rows] == [
        ("insert", 1),
        ("insert", 1),
        ("update_preimage", 1),
        ("update_postimage", 2),
        ("delete", 1),
    ]


def test_old_rows_that_are_not_sent_whole_are_refused(diary: Diary) -> None:
    diary.commit((SHOP, [insert(1)]))
    with pytest.raises(SourceNotReady, match=r"ALTER TABLE public\.things REPLICA IDENTITY FULL"):
        frame(diary.path, table="public.things", shape="changelog")
    diary.commit((FULL, [insert(2)]))
    log_frame = frame(diary.path, table="public.things", shape="changelog")
    with pytest.raises(SourceNotReady, match="Begin after the commit"):
        steps(log_frame)
    assert feed(diary, startingPosition=2) == [("insert", 2, None, 2)]


@pytest.mark.parametrize("sealed", [False, True])
def test_what_a_feed_cannot_represent_is_refused_after_everything_before_it(diary: Diary, sealed: bool) -> None:
    diary.commit((FULL, [insert(1)]))
    diary.commit((FULL, [insert(2)]))
    diary.commit((FULL, [insert(3), truncate()]))
    diary.commit((FULL, [insert(4, unfit=("n",))]))
    diary.commit((FULL, [insert(5)]))
    if sealed:
        seal(diary.path)
    log_frame = frame(diary.path, table="public.things", shape="changelog")
    planner = LogPlanner(log_frame)
    assert planner.next_end(LogOffset(0), 5, limited=True) == 2
    assert [row["id"] for row in rows_of_parts(log_frame, planner.plan_parts(LogOffset(0), 2))] == [1, 2]
    with pytest.raises(Unsupported, match=r"TRUNCATE.*commit=3"):
        planner.next_end(LogOffset(2), 5, limited=True)
    with pytest.raises(ValueUnfit, match=r"commit=4.*Begin after the commit"):
        planner.next_end(LogOffset(3), 5, limited=True)
    with pytest.raises(Unsupported):
        planner.plan_parts(LogOffset(0), 5)
    assert planner.next_end(LogOffset(4), 5, limited=True) == 5
    assert feed(diary, startingPosition=5) == [("insert", 5, None, 5)]


def test_a_truncate_before_an_offset_inside_a_commit_is_ignored(diary: Diary) -> None:
    diary.commit((FULL, [truncate(), insert(1)]))
    log_frame = frame(diary.path, table="public.things", shape="changelog")
    ((_, rows),) = steps(log_frame, after=LogOffset(0, 1))
    assert [row["id"] for row in rows] == [1]


def test_rows_are_reported_by_the_key_they_had_when_written(diary: Diary) -> None:
    other = replace(FULL, key=("n",))
    diary.commit((FULL, [insert(1), insert(2)]), (other, [insert(3, n=3)]))
    diary.commit((other, [update(4, n=3, before=row(3, 3)), delete(4, n=3)]))
    diary.commit((replace(FULL, key=()), [insert(7, n=1), insert(7, n=1)]))
    assert feed(diary) == [
        ("insert", 1, None, 1),
        ("insert", 2, None, 1),
        ("insert", 3, 3, 1),
        ("delete", 3, 3, 2),
        ("insert", 7, 1, 3),
        ("insert", 7, 1, 3),
    ]


def test_a_commit_is_read_by_one_task(diary: Diary) -> None:
    diary.piece((FULL, [insert(key) for key in range(50)]))
    diary.finish((FULL, [insert(key) for key in range(50, 100)]))
    planner = LogPlanner(frame(diary.path, table="public.things", shape="changelog", rowsPerPartition=10))
    assert len(planner.plan_parts(LogOffset(0), 1)) == 1
    assert len(feed(diary, rowsPerPartition=10)) == 100
