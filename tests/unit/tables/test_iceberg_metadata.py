"""What an Iceberg table's metadata says: its columns' numbers, our position, and who else was there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tailrace.errors import ForeignWrite, TableUnusable
from tailrace.model.position import Lsn
from tailrace.model.schema import Column
from tailrace.tables.base import Cursor
from tailrace.tables.deltalog import Position
from tailrace.tables.iceberglog import OWNER, Metadata, said_of
from tailrace.tables.icebergshape import (
    columns_of,
    file_fields,
    fresh_fields,
    laid_fields,
    refuse_iceberg_names,
)
from tailrace.tables.recast import Laid
from tests.support.changes import SHOP, table_schema

CURSOR = Cursor(seq=7, commit=1, position=Lsn(160), load="a-load")
MINE = Position(log="a-log", cursor=CURSOR, schema=SHOP)


def column(name: str, kind: pa.DataType) -> Column:
    return Column(name=name, source_type="", type=kind)


# --- columns -----------------------------------------------------------------------------------------------

NESTED = table_schema({"id": pa.int16(), "tags": pa.list_(pa.list_(pa.string())), "n": pa.decimal128(5, 2)})


def test_columns_are_numbered_before_what_is_in_them() -> None:
    inner = {"type": "list", "element-id": 5, "element": "string", "element-required": False}
    outer = {"type": "list", "element-id": 4, "element": inner, "element-required": False}
    assert [(field["id"], field["type"]) for field in fresh_fields(NESTED.columns)] == [
        (1, "int"), (2, outer), (3, "decimal(5, 2)"),
    ]  # fmt: skip


def test_files_know_their_columns_by_the_same_numbers() -> None:
    def numbers(field: pa.Field) -> list[int]:
        inside = numbers(field.type.value_field) if pa.types.is_list(field.type) else []
        return [int(field.metadata[b"PARQUET:field_id"]), *inside]

    assert [numbers(field) for field in file_fields(NESTED)] == [[1], [2, 4, 5], [3]]


def test_a_table_s_columns_are_known_as_arrow_has_them() -> None:
    assert columns_of(fresh_fields(NESTED.columns)) == {
        "id": pa.int32(), "tags": pa.list_(pa.list_(pa.string())), "n": pa.decimal128(5, 2),
    }  # fmt: skip
    assert columns_of([{"name": "x", "type": "uuid"}]) == {"x": pa.null()}


def test_a_type_that_iceberg_does_not_have_is_refused() -> None:
    with pytest.raises(TableUnusable, match="column=x"):
        fresh_fields([column("x", pa.time64("us"))])


@pytest.mark.parametrize("name", ["_deleted", "_FILE", "_row_id"])
def test_a_name_of_iceberg_s_own_is_refused_with_what_to_do(name: str) -> None:
    with pytest.raises(TableUnusable, match="Iceberg's own") as refused:
        refuse_iceberg_names(table_schema({"id": pa.int64(), name: pa.string()}))
    assert "columns:" in refused.value.hint


def laid(*columns: tuple[Column, str | None], **filled: Any) -> Laid:
    values = {name: pa.scalar(value) for name, value in filled.items()}
    return Laid(columns=tuple(c for c, _ in columns), taken=tuple(old for _, old in columns), filled=values)


def test_a_column_keeps_its_number_and_one_that_comes_gets_one_that_none_ever_had() -> None:
    held = fresh_fields(NESTED.columns)
    found = laid_fields(
        held,
        laid((column("key", pa.int32()), "id"), (column("n", pa.list_(pa.int64())), None),
             (column("n__dropped", pa.decimal128(9, 2)), "n")), 9,
    )  # fmt: skip
    assert found is not None
    assert [(field["id"], field["name"]) for field in found] == [(1, "key"), (10, "n"), (3, "n__dropped")]
    assert found[1]["type"]["element-id"] == 11
    assert found[2]["type"] == "decimal(9, 2)"


@pytest.mark.parametrize(
    ("was", "now", "stays"),
    [
        (pa.int32(), pa.int64(), True), (pa.int16(), pa.int32(), True), (pa.float32(), pa.float64(), True),
        (pa.decimal128(5, 2), pa.decimal128(9, 2), True), (pa.decimal128(5, 2), pa.decimal128(9, 3), False),
        (pa.decimal128(9, 2), pa.decimal128(5, 2), False), (pa.int64(), pa.int32(), False),
        (pa.int32(), pa.string(), False), (pa.list_(pa.int32()), pa.list_(pa.int64()), False),
        (pa.list_(pa.int32()), pa.int32(), False),
    ],
)  # fmt: skip
def test_files_stay_as_they_are_where_iceberg_reads_them_as_the_wider_type(
    was: pa.DataType, now: pa.DataType, stays: bool
) -> None:
    held = fresh_fields([column("a", was)])
    assert (laid_fields(held, laid((column("a", now), "a")), 9) is not None) == stays


def test_values_that_are_filled_in_are_written() -> None:
    held = fresh_fields([column("a", pa.int32())])
    assert laid_fields(held, laid((column("b", pa.int32()), None), b=1), 1) is None


# --- the position ------------------------------------------------------------------------------------------


def snapshot(number: int, parent: int | None, summary: dict[str, str], operation: str = "append") -> dict[str, Any]:
    return {
        "snapshot-id": number, "parent-snapshot-id": parent, "schema-id": 0,
        "summary": {"operation": operation, **summary},
    }  # fmt: skip


def metadata(*snapshots: dict[str, Any], position: Position = MINE, **said: Any) -> Metadata:
    _, properties = said_of(position, "x")
    whole = {
        "current-schema-id": 0, "last-column-id": 4, "properties": properties,
        "schemas": [{"schema-id": 0, "fields": fresh_fields(SHOP.columns)}],
        "snapshots": list(snapshots), "current-snapshot-id": snapshots[-1]["snapshot-id"] if snapshots else None,
    }  # fmt: skip
    return Metadata(Path("/lake/public/t"), {**whole, **said})


OURS, _ = said_of(MINE, "a-token")


def test_a_position_reads_back_equal() -> None:
    found = metadata(snapshot(1, None, OURS))
    assert (found.position(), found.owner, found.snapshot, found.source()) == (MINE, "a-log", 1, SHOP.table)


def test_each_shape_stands_once_however_many_snapshots_name_it() -> None:
    later = replace(MINE, cursor=replace(CURSOR, seq=8))
    summary, properties = said_of(later, "x")
    assert properties == said_of(MINE, "y")[1]
    assert len(summary["tailrace"]) < 250


def test_files_that_were_only_written_anew_keep_the_position() -> None:
    assert metadata(snapshot(1, None, OURS), snapshot(2, 1, {}, "replace")).position() == MINE


@pytest.mark.parametrize("operation", ["append", "overwrite", "delete"])
def test_a_snapshot_of_someone_else_stops_the_table_even_under_maintenance(operation: str) -> None:
    theirs = [snapshot(2, 1, {}, operation), snapshot(3, 2, {}, "replace")]
    for count in (1, 2):
        with pytest.raises(ForeignWrite) as refused:
            metadata(snapshot(1, None, OURS), *theirs[:count]).position()
        assert (refused.value.fields["version"], refused.value.fields["operation"]) == (2, operation)
        assert "tailrace snapshot" in refused.value.hint


def test_columns_that_someone_else_changed_stop_the_table() -> None:
    changed = {**metadata(snapshot(1, None, OURS)).said, "current-schema-id": 1}
    with pytest.raises(ForeignWrite, match="columns"):
        Metadata(Path("/lake/public/t"), changed).position()


def test_a_snapshot_of_another_log_is_someone_else_s() -> None:
    other, _ = said_of(replace(MINE, log="another"), "x")
    with pytest.raises(ForeignWrite):
        metadata(snapshot(1, None, OURS), snapshot(2, 1, other)).position()


def test_a_table_whose_snapshot_of_ours_is_gone_is_not_taken_for_a_new_one() -> None:
    with pytest.raises(TableUnusable, match="no longer holds"):
        metadata(snapshot(2, 1, {}, "replace")).position()


def test_a_summary_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(TableUnusable, match="version=1"):
        metadata(snapshot(1, None, {"tailrace": "{}"})).position()


def test_a_table_that_is_not_ours_says_so() -> None:
    assert metadata(properties={"x": "y"}).owner is None
    assert metadata(properties={OWNER: "another"}).owner == "another"


def test_what_was_staged_and_never_published_is_known() -> None:
    stray = snapshot(5, 1, {**OURS, "wap.id": "t"})
    theirs = snapshot(6, 1, {"wap.id": "t"})
    published = snapshot(2, 1, {**OURS, "wap.id": "u"})
    found = metadata(snapshot(1, None, OURS), stray, theirs, published)
    assert (found.strays(), found.says("wap.id", "u"), found.says("wap.id", "t")) == ([5], True, False)


def test_rows_that_were_struck_out_are_not_counted() -> None:
    counts = {"total-records": "10", "total-position-deletes": "3"}
    assert metadata(snapshot(1, None, OURS | counts)).rows() == 7
    assert metadata().rows() == 0
