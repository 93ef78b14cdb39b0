"""One schema over all versions of a table, with types that hold every value."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest

from tailrace.changelog.read.merged_schema import conform_to_schema, fits_schema, merged_schema
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write.writer import LogWriter
from tailrace.model import change
from tailrace.model.batch import ChangeBatch
from tailrace.model.schema import Column, Identity, TableSchema
from tests.support.changes import SHOP, delete, insert, move
from tests.support.windows import SOURCE, batch, window


def column(name: str, kind: pa.DataType) -> Column:
    return Column(name=name, source_type="any", type=kind)


def schema_of(*columns: Column) -> TableSchema:
    return replace(SHOP, columns=columns, key=(columns[0].name,))


ID = column("id", pa.int64())


def only(value: object, kind: pa.DataType) -> ChangeBatch:
    """A batch of one row of a table (id, value)."""
    schema = schema_of(ID, column("value", kind))
    base = batch(SHOP, insert(1)).data
    fields = schema.change_schema()
    known = {change.OP, change.SEQ, change.POSITION, change.TX, change.TX_INDEX, change.COMMITTED_AT}
    columns = [base.column(field.name) if field.name in known else pa.nulls(1, field.type) for field in fields]
    columns[fields.get_field_index("value")] = pa.array([value], kind)
    return ChangeBatch(schema=schema, data=pa.RecordBatch.from_arrays(columns, schema=fields))


def test_columns_of_the_newest_version_precede_those_of_older_versions() -> None:
    old = schema_of(ID, column("gone", pa.string()), column("kept", pa.int32()))
    new = schema_of(ID, column("added", pa.bool_()), column("kept", pa.int32()))
    assert merged_schema([old, new]).names == ["id", "added", "kept", "gone"]


@pytest.mark.parametrize(
    ("old", "new", "merged"),
    [
        (pa.int16(), pa.int64(), pa.int64()),
        (pa.int64(), pa.int32(), pa.int64()),
        (pa.float32(), pa.float64(), pa.float64()),
        (pa.decimal128(10, 2), pa.decimal128(9, 4), pa.decimal128(12, 4)),
        (pa.decimal128(38, 0), pa.decimal128(38, 20), pa.string()),
        (pa.int64(), pa.float64(), pa.string()),
        (pa.date32(), pa.timestamp("us"), pa.string()),
        (pa.list_(pa.int32()), pa.list_(pa.int64()), pa.list_(pa.int64())),
        (pa.binary(), pa.string(), pa.string()),
    ],
)
def test_a_retyped_column_gets_the_narrowest_type_that_holds_both(
    old: pa.DataType, new: pa.DataType, merged: pa.DataType
) -> None:
    versions = [schema_of(ID, column("value", old)), schema_of(ID, column("value", new))]
    assert merged_schema(versions).columns[1].type == merged
    assert merged_schema(versions[::-1]).columns[1].type == merged


@pytest.mark.parametrize(
    ("value", "kind", "wanted", "read"),
    [
        (7, pa.int32(), pa.int64(), 7),
        (Decimal("1.50"), pa.decimal128(10, 2), pa.decimal128(12, 4), Decimal("1.5000")),
        (7, pa.int64(), pa.string(), "7"),
        (dt.date(2024, 2, 29), pa.date32(), pa.string(), "2024-02-29"),
        (b"\x00\xff", pa.binary(), pa.string(), "\\x00ff"),
        ([1, None], pa.list_(pa.int32()), pa.string(), "[1, null]"),
        ([3_700_000, None], pa.list_(pa.date32()), pa.string(), '["12100-04-04", null]'),
        ([1, None], pa.list_(pa.int32()), pa.list_(pa.int64()), [1, None]),
        (None, pa.int64(), pa.string(), None),
    ],
)
def test_values_are_kept_exactly(value: object, kind: pa.DataType, wanted: pa.DataType, read: object) -> None:
    found = conform_to_schema(only(value, kind), schema_of(ID, column("value", wanted)))
    assert found.data.column("value").to_pylist() == [read]


def test_the_view_is_read_from_the_log_with_old_keys_and_missing_columns(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "log", SOURCE)
    wider = replace(SHOP, columns=(*SHOP.columns, column("added", pa.bool_())))
    writer.append(window(0, 10, batch(SHOP, insert(1), *move(1, 2)), batch(wider, insert(3), first=3)))
    writer.close()
    log = ChangeLog.open(tmp_path / "log")
    assert [found.schema for found in log.follow(table=str(SHOP.table))] == [SHOP, wider]
    views = list(log.follow(table=str(SHOP.table), merged=True))
    assert {found.schema for found in views} == {wider}
    assert [row["added"] for found in views for row in found.data.to_pylist()] == [None] * 4
    assert [row["_moved_from"] for row in views[0].data.to_pylist()][-1] is not None


def test_the_view_keeps_the_replica_identity_of_a_deleted_row(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "log", SOURCE)
    full = replace(SHOP, identity=Identity.FULL)
    writer.append(window(0, 10, batch(SHOP, delete(1)), batch(full, delete(2, name="a", n=3), first=1)))
    writer.close()
    views = ChangeLog.open(tmp_path / "log").follow(table=str(SHOP.table), merged=True)
    old_rows = [event.before for found in views for event in found.events()]
    assert old_rows == [{"id": 1}, {"id": 2, "name": "a", "big": None, "n": 3}]


KEYS = {
    "altered": [SHOP, replace(SHOP, key=("id", "n"))],
    "added": [replace(SHOP, key=()), SHOP],
    "taken away": [SHOP, replace(SHOP, key=())],
    "renamed": [SHOP, replace(SHOP, columns=(column("number", pa.int64()), *SHOP.columns[1:]), key=("number",))],
    "retyped": [SHOP, replace(SHOP, columns=(column("id", pa.string()), *SHOP.columns[1:]))],
    "made twice over": [SHOP, replace(SHOP, key=("n",)), replace(SHOP, key=("name",)), replace(SHOP, key=("id",))],
}


@pytest.mark.parametrize("versions", KEYS.values(), ids=KEYS)
def test_every_version_fits_its_view_after_any_key_change(versions: list[TableSchema]) -> None:
    view = merged_schema(versions)
    assert view.key == versions[-1].key
    assert all(fits_schema(version, view) for version in versions)
    old = (
        conform_to_schema(batch(SHOP, *move(1, 2)), view).data.column("_moved_from").to_pylist()[1]
        if SHOP in versions
        else {}
    )
    assert not old or str(old["id"]) == "1", "an old key has the columns it had"


def test_a_version_with_a_key_unknown_to_the_view_does_not_fit() -> None:
    assert not fits_schema(replace(SHOP, key=("n",)), merged_schema([SHOP]))
    assert fits_schema(replace(SHOP, key=()), merged_schema([SHOP])), "without a key there is no old key"
