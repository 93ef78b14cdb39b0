"""An Iceberg table's metadata: its columns' ids, our position, and foreign writes."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tailrace.errors import ForeignWrite, TableUnusable
from tailrace.model.position import Lsn
from tailrace.model.schema import Column
from tailrace.tables.delta.commit_log import CommitRecord
from tailrace.tables.evolve.recast_columns import RecastColumns
from tailrace.tables.iceberg.catalogs import Catalog
from tailrace.tables.iceberg.commit_log import OWNER, IcebergMetadata, summary_and_properties
from tailrace.tables.iceberg.schema_mapping import (
    Field,
    Spec,
    are_same,
    columns_of,
    file_fields,
    fresh_fields,
    partition_json,
    plan_partition_change,
    recast_fields,
    refuse_iceberg_names,
)
from tailrace.tables.iceberg.table import IcebergTable
from tailrace.tables.port import AppliedPosition
from tests.support.changes import SHOP, table_schema

POSITION = AppliedPosition(seq=7, commit=1, position=Lsn(160), load="a-load")
OUR_RECORD = CommitRecord(log="a-log", applied_position=POSITION, schema=SHOP)


def column(name: str, kind: pa.DataType) -> Column:
    return Column(name=name, source_type="", type=kind)


# --- columns -----------------------------------------------------------------------------------------------

NESTED = table_schema({"id": pa.int16(), "tags": pa.list_(pa.list_(pa.string())), "n": pa.decimal128(5, 2)})


def test_columns_get_ids_before_nested_elements() -> None:
    inner = {"type": "list", "element-id": 5, "element": "string", "element-required": False}
    outer = {"type": "list", "element-id": 4, "element": inner, "element-required": False}
    assert [(field["id"], field["type"]) for field in fresh_fields(NESTED.columns)] == [
        (1, "int"),
        (2, outer),
        (3, "decimal(5, 2)"),
    ]


def test_files_have_the_same_column_ids() -> None:
    def numbers(field: pa.Field) -> list[int]:
        inside = numbers(field.type.value_field) if pa.types.is_list(field.type) else []
        return [int(field.metadata[b"PARQUET:field_id"]), *inside]

    assert [numbers(field) for field in file_fields(NESTED)] == [[1], [2, 4, 5], [3]]


def test_a_table_s_columns_are_mapped_to_arrow_types() -> None:
    assert columns_of(fresh_fields(NESTED.columns)) == {
        "id": pa.int32(),
        "tags": pa.list_(pa.list_(pa.string())),
        "n": pa.decimal128(5, 2),
    }
    assert columns_of([{"name": "x", "type": "uuid"}]) == {"x": pa.null()}


def test_a_type_that_iceberg_does_not_have_is_refused() -> None:
    with pytest.raises(TableUnusable, match="column=x"):
        fresh_fields([column("x", pa.time64("us"))])


@pytest.mark.parametrize("name", ["_deleted", "_FILE", "_row_id"])
def test_a_name_that_iceberg_reserves_is_refused_with_a_hint(name: str) -> None:
    with pytest.raises(TableUnusable, match="Iceberg reserves") as refused:
        refuse_iceberg_names(table_schema({"id": pa.int64(), name: pa.string()}))
    assert "columns:" in refused.value.hint


def recast_columns(*columns: tuple[Column, str | None], **backfilled: Any) -> RecastColumns:
    values = {name: pa.scalar(value) for name, value in backfilled.items()}
    return RecastColumns(
        columns=tuple(c for c, _ in columns), source_names=tuple(old for _, old in columns), backfilled=values
    )


def test_a_column_keeps_its_id_and_a_new_one_gets_an_unused_id() -> None:
    old_fields = fresh_fields(NESTED.columns)
    found = recast_fields(
        old_fields,
        recast_columns(
            (column("key", pa.int32()), "id"),
            (column("n", pa.list_(pa.int64())), None),
            (column("n__dropped", pa.decimal128(9, 2)), "n"),
        ),
        9,
    )
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
    old_fields = fresh_fields([column("a", was)])
    assert (recast_fields(old_fields, recast_columns((column("a", now), "a")), 9) is not None) == stays


def test_a_backfill_rewrites_the_rows() -> None:
    old_fields = fresh_fields([column("a", pa.int32())])
    assert recast_fields(old_fields, recast_columns((column("b", pa.int32()), None), b=1), 1) is None


# --- partitions ----------------------------------------------------------------------------------------------


def fields_of(**kinds: pa.DataType) -> list[Field]:
    return fresh_fields([column(name, kind) for name, kind in kinds.items()])


PLAIN_SPEC: Spec = {"spec-id": 0, "fields": []}
WAS = fields_of(id=pa.int64(), name=pa.string(), n=pa.int32())
BY_NAME: Spec = {
    "spec-id": 1, "fields": [{"source-id": 2, "field-id": 1000, "name": "name", "transform": "identity"}]
}  # fmt: skip


def test_a_table_that_is_partitioned_as_before_keeps_its_snapshots() -> None:
    now = fields_of(id=pa.int64(), name=pa.string(), other=pa.string())
    found = plan_partition_change(now, ["name"], [PLAIN_SPEC, BY_NAME], WAS)
    assert not found.drops_snapshots
    assert plan_partition_change(WAS, ["name"], [PLAIN_SPEC], WAS).drops_snapshots is False


@pytest.mark.parametrize(
    ("now", "names"),
    [
        (WAS, ["n"]), (WAS, []), (WAS, ["name", "n"]),
        (fields_of(name=pa.string(), id=pa.int64()), ["name"]),
        (fields_of(id=pa.int64(), title=pa.string()), ["title"]),
        (fields_of(id=pa.int64(), tags=pa.list_(pa.string())), []),
    ],
    ids=str,
)  # fmt: skip
def test_partition_specs_of_changed_columns_are_removed(now: list[Field], names: list[str]) -> None:
    found = plan_partition_change(now, names, [PLAIN_SPEC, BY_NAME], WAS)
    assert found.drops_snapshots
    assert [part["field-id"] for part in found.spec["fields"]] == [1001 + at for at in range(len(names))]


def test_a_partition_column_of_another_type_drops_the_snapshots() -> None:
    assert plan_partition_change(fields_of(id=pa.int64(), name=pa.int64()), ["name"], [BY_NAME], WAS).drops_snapshots


def test_a_column_with_another_one_s_name_is_not_the_same() -> None:
    first, name, n = WAS
    assert are_same(WAS, [first, name, {**n, "name": "m"}], ["name"])
    assert not are_same(WAS, [first, {**name, "name": "name__dropped"}, {**n, "name": "name"}], ["name"])
    assert not are_same(WAS, [first, name, {**n, "type": "long"}], ["n"])
    assert not are_same(WAS, [*WAS, {"id": 9, "name": "new", "type": "int"}], ["new"])


def test_partition_values_are_written_as_iceberg_reads_them() -> None:
    values = {
        "t": pa.scalar('q"\n'),
        "d": pa.scalar(date(1, 1, 1)),
        "at": pa.scalar(datetime(2020, 1, 2, 3, 4, 5, 1)),
        "n": pa.scalar(2**63 - 1),
        "b": pa.scalar(True),
        "none": pa.scalar(None, pa.string()),
    }
    numbers = {name: 1000 + at for at, name in enumerate(values)}
    assert json.loads(partition_json(values, numbers)) == {
        "1000": 'q"\n',
        "1001": "0001-01-01",
        "1002": "2020-01-02T03:04:05.000001",
        "1003": 2**63 - 1,
        "1004": True,
        "1005": None,
    }


# --- the position ------------------------------------------------------------------------------------------


def snapshot(number: int, parent: int | None, summary: dict[str, str], operation: str = "append") -> dict[str, Any]:
    return {
        "snapshot-id": number,
        "parent-snapshot-id": parent,
        "schema-id": 0,
        "summary": {"operation": operation, **summary},
    }


def metadata(*snapshots: dict[str, Any], record: CommitRecord = OUR_RECORD, **changes: Any) -> IcebergMetadata:
    _, properties = summary_and_properties(record, "x")
    whole = {
        "current-schema-id": 0,
        "last-column-id": 4,
        "properties": properties,
        "schemas": [{"schema-id": 0, "fields": fresh_fields(SHOP.columns)}],
        "snapshots": list(snapshots),
        "current-snapshot-id": snapshots[-1]["snapshot-id"] if snapshots else None,
    }
    return IcebergMetadata(Path("/lake/public/t"), {**whole, **changes})


OURS, _ = summary_and_properties(OUR_RECORD, "a-token")


def test_a_position_reads_back_equal() -> None:
    found = metadata(snapshot(1, None, OURS))
    assert (found.commit_record(), found.owner, found.snapshot, found.source()) == (OUR_RECORD, "a-log", 1, SHOP.table)


def test_each_schema_is_stored_once_for_any_number_of_snapshots() -> None:
    later = replace(OUR_RECORD, applied_position=replace(POSITION, seq=8))
    summary, properties = summary_and_properties(later, "x")
    assert properties == summary_and_properties(OUR_RECORD, "y")[1]
    assert len(summary["tailrace"]) < 250


def test_rewritten_files_keep_the_position() -> None:
    assert metadata(snapshot(1, None, OURS), snapshot(2, 1, {}, "replace")).commit_record() == OUR_RECORD
    joined = {"added-records": "8", "deleted-records": "10"}
    assert metadata(snapshot(1, None, OURS), snapshot(2, 1, joined, "replace")).commit_record() == OUR_RECORD


def test_a_replace_snapshot_that_adds_rows_is_a_foreign_write() -> None:
    more = {"added-records": "1"}
    with pytest.raises(ForeignWrite):
        metadata(snapshot(1, None, OURS), snapshot(2, 1, more, "replace")).commit_record()


@pytest.mark.parametrize("operation", ["append", "overwrite", "delete"])
def test_a_foreign_write_stops_the_table_even_before_maintenance(operation: str) -> None:
    theirs = [snapshot(2, 1, {}, operation), snapshot(3, 2, {}, "replace")]
    for count in (1, 2):
        with pytest.raises(ForeignWrite) as refused:
            metadata(snapshot(1, None, OURS), *theirs[:count]).commit_record()
        assert (refused.value.fields["version"], refused.value.fields["operation"]) == (2, operation)
        assert "tailrace snapshot" in refused.value.hint


def test_columns_that_others_changed_stop_the_table() -> None:
    changed = {**metadata(snapshot(1, None, OURS)).document, "current-schema-id": 1}
    with pytest.raises(ForeignWrite, match="columns"):
        IcebergMetadata(Path("/lake/public/t"), changed).commit_record()


def test_a_snapshot_of_another_log_is_a_foreign_write() -> None:
    other, _ = summary_and_properties(replace(OUR_RECORD, log="another"), "x")
    with pytest.raises(ForeignWrite):
        metadata(snapshot(1, None, OURS), snapshot(2, 1, other)).commit_record()


def test_a_table_without_our_snapshot_is_not_taken_for_a_new_one() -> None:
    with pytest.raises(TableUnusable, match="no longer holds"):
        metadata(snapshot(2, 1, {}, "replace")).commit_record()


def test_a_summary_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(TableUnusable, match="version=1"):
        metadata(snapshot(1, None, {"tailrace": "{}"})).commit_record()


def test_a_table_that_is_not_ours_says_so() -> None:
    assert metadata(properties={"x": "y"}).owner is None
    assert metadata(properties={OWNER: "another"}).owner == "another"


def test_staged_snapshots_that_were_never_published_are_found() -> None:
    stray = snapshot(5, 1, {**OURS, "wap.id": "t"})
    theirs = snapshot(6, 1, {"wap.id": "t"})
    published = snapshot(2, 1, {**OURS, "wap.id": "u"})
    found = metadata(snapshot(1, None, OURS), stray, theirs, published)
    assert (found.orphan_snapshots(), found.has_in_summary("wap.id", "u"), found.has_in_summary("wap.id", "t")) == (
        [5],
        True,
        False,
    )


def test_deleted_rows_are_not_counted() -> None:
    counts = {"total-records": "10", "total-position-deletes": "3"}
    assert metadata(snapshot(1, None, OURS | counts)).rows() == 7
    assert metadata().rows() == 0


# --- what a rebuild starts from ----------------------------------------------------------------------------


def numbered(number: int, parent: int | None, summary: dict[str, str], schema: int = 0) -> dict[str, Any]:
    """Return a snapshot with a sequence number, which says which of two is newer; ids do not."""
    return {**snapshot(number, parent, summary), "sequence-number": number % 100, "schema-id": schema}


def test_our_versions_are_listed_newest_first_even_after_a_rollback() -> None:
    theirs, _ = summary_and_properties(replace(OUR_RECORD, log="another"), "x")
    back: dict[str, Any] = {"current-snapshot-id": 901, "snapshot-log": [{"snapshot-id": at} for at in (901, 703, 901)]}
    found = metadata(
        numbered(901, None, OURS), numbered(502, 901, {}), numbered(703, 502, OURS), numbered(404, 703, theirs), **back
    )
    assert list(found.own_versions("a-log")) == [(703, OUR_RECORD), (901, OUR_RECORD)]


def test_a_staged_snapshot_or_one_without_a_schema_is_not_a_version() -> None:
    other, _ = summary_and_properties(replace(OUR_RECORD, schema=NESTED), "x")
    staged = numbered(3, 2, {**OURS, "wap.id": "w"})
    newest: dict[str, Any] = {"current-snapshot-id": 2}
    found = metadata(numbered(1, None, other), numbered(2, 1, OURS), staged, **newest)
    assert list(found.own_versions("a-log")) == [(2, OUR_RECORD)]


def copied(number: int | None, partition_by: list[str]) -> dict[str, Any]:
    """Return a copy of a table whose columns and partitions others have changed."""
    more = [*fresh_fields(SHOP.columns), {"id": 9, "name": "more", "required": False, "type": "int"}]
    schemas = [{"schema-id": 0, "fields": fresh_fields(SHOP.columns)}, {"schema-id": 1, "fields": more}]
    parts = {0: [], 1: [(1, "id")], 2: [(9, "more")]}
    specs = [
        {
            "spec-id": at,
            "fields": [
                {"source-id": of, "field-id": 1000 + at, "name": name, "transform": "identity"} for of, name in columns
            ],
        }
        for at, columns in parts.items()
    ]
    changes: dict[str, Any] = {
        "current-schema-id": 1,
        "schemas": schemas,
        "default-spec-id": 2,
        "partition-specs": specs,
        "last-sequence-number": 8,
        "statistics": [{}],
        "refs": {"main": {}, "a-tag": {}},
        "properties": {OWNER: "a-log", "write.data.path": "/elsewhere", "write.wap.enabled": "true"},
    }
    table = metadata(numbered(1, None, OURS), numbered(2, 1, {}, 1), **changes)
    return table.copy_as_of(number, Path("/beside"), partition_by)


def test_a_copy_has_the_old_state_and_continues_the_numbers() -> None:
    copy = copied(1, ["id"])
    assert (copy["current-snapshot-id"], copy["current-schema-id"], copy["default-spec-id"]) == (1, 0, 1)
    assert [item["snapshot-id"] for item in copy["snapshots"]] == [1]
    assert [spec["spec-id"] for spec in copy["partition-specs"]] == [0, 1], "of columns that it has"
    assert (copy["location"], copy["last-sequence-number"], copy["last-column-id"]) == ("/beside", 8, 4)
    assert copy["properties"] == {OWNER: "a-log", "write.wap.enabled": "true"}, "its files are its own"
    assert set(copy["refs"]) == {"main"}
    assert "statistics" not in copy
    assert copied(1, [])["default-spec-id"] == 0


def test_a_copy_without_a_snapshot_is_empty() -> None:
    copy = copied(None, ["id"])
    assert (copy["snapshots"], copy["refs"], copy["last-sequence-number"]) == ([], {}, 8)
    assert "current-snapshot-id" not in copy
    assert len(copy["partition-specs"]) == 3


def test_a_copy_that_cannot_be_partitioned_as_it_was_is_refused() -> None:
    with pytest.raises(TableUnusable, match="partitioned as it was"):
        copied(1, ["n"])


# --- the folder ----------------------------------------------------------------------------------------------


def test_a_folder_with_other_contents_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "public" / "t"
    table = IcebergTable(path, "a-log", Catalog(kind="jdbc", root=tmp_path, uri=f"jdbc:sqlite:{tmp_path}/none.db"))
    for left in ("metadata", "data", "_staged", "_tailrace", "rebuilt", ".hidden"):
        (path / left).mkdir(parents=True)
        assert table.applied_position() is None, "leftovers of a dead load"
    for stray in ("_delta_log", "thesis.tex"):
        (path / stray).touch()
        for ask in (table.applied_position, lambda: table.refuse_foreign(SHOP.table)):
            with pytest.raises(TableUnusable, match="not an Iceberg table") as refused:
                ask()
            assert refused.value.fields["found"] == "_delta_log"
    other = IcebergTable(path / "thesis.tex", "a-log", Catalog(kind="jdbc", root=tmp_path, uri="jdbc:sqlite:/none.db"))
    with pytest.raises(TableUnusable, match="cannot be used"):
        other.applied_position()


def test_no_table_is_made_inside_another_one(tmp_path: Path) -> None:
    (tmp_path / "t" / "metadata").mkdir(parents=True)
    (tmp_path / "t" / "metadata" / "v1.metadata.json").write_text("{}")
    inside = IcebergTable(tmp_path / "t" / "inner", "a-log", Catalog(kind="hadoop", root=tmp_path))
    with pytest.raises(TableUnusable, match="inside another table"):
        inside.refuse_foreign(SHOP.table)
    rebuilt = IcebergTable(tmp_path / "t" / "rebuilt" / "1" / "table", "a-log", Catalog(kind="hadoop", root=tmp_path))
    rebuilt.refuse_foreign(SHOP.table)
    assert rebuilt.applied_position() is None, "the table itself is rebuilt there"
