"""A file's statistics in Delta's log: a reader that skips by them misses no row."""

from __future__ import annotations

import json
import math
import tempfile
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.model.position import Lsn
from tailrace.tables.delta.table import DeltaRsTable
from tailrace.tables.port import AppliedPosition
from tailrace.tables.staging import StagedFile, stage
from tests.support.changes import record_batches, table_schema

START = AppliedPosition(seq=0, commit=0, position=Lsn(1))
EPOCH = datetime(1970, 1, 1)
PLAIN = pa.timestamp("us")
ZONED = pa.timestamp("us", "UTC")


def stats(folder: Path, kind: pa.DataType, values: list[Any], *, group: int | None = None) -> dict[str, Any]:
    """The statistics of a file with these values in a column `v`; `group` makes row groups of that many."""
    schema = table_schema({"id": pa.int64(), "v": kind})
    rows = [{"id": i, "v": value} for i, value in enumerate(values)]
    with pytest.MonkeyPatch.context() as patch:
        if group is not None:
            patch.setattr("tailrace.tables.staging.GROUP_ROWS_MAX", group)
        (file,) = stage(folder / "t", f"s{len(list(folder.glob('t/*')))}", schema, record_batches(schema, rows))
    found: dict[str, Any] = json.loads(file.stats, parse_float=Decimal)
    assert found["numRecords"] == file.rows == len(values)
    return found


def bounds(folder: Path, kind: pa.DataType, values: list[Any], *, group: int | None = None) -> tuple[Any, Any]:
    found = stats(folder, kind, values, group=group)
    return found["minValues"].get("v"), found["maxValues"].get("v")


@pytest.mark.parametrize(("kind", "values", "expected"), [
    (pa.int16(), [3, None, -5], (-5, 3)),
    (pa.int64(), [-(1 << 63), (1 << 63) - 1], (-(1 << 63), (1 << 63) - 1)),
    (pa.float32(), [1.5, -0.0], (Decimal("-0.0"), Decimal("1.5"))),
    (pa.float64(), [5e-324, 1e308], (Decimal("5e-324"), Decimal("1e308"))),
    (pa.decimal128(5, 2), [Decimal("-1.50"), Decimal("0.01")], (Decimal("-1.50"), Decimal("0.01"))),
    (pa.decimal128(15, 0), [Decimal(-7), Decimal(7)], (-7, 7)),
    (pa.decimal128(38, 9), [Decimal("-12345678901234567890123456789.123456789"), Decimal(0)],
     (Decimal("-12345678901234567890123456789.123456789"), 0)),
    (pa.date32(), [date(1, 1, 1), date(9999, 12, 31)], ("0001-01-01", "9999-12-31")),
    (PLAIN, [datetime(2020, 1, 1, 0, 0, 0, 1001)], ("2020-01-01T00:00:00.001", "2020-01-01T00:00:00.002")),
    (ZONED, [datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC)],
     ("1969-12-31T23:59:59.999Z", "1970-01-01T00:00:00.000Z")),
    (PLAIN, [datetime(1, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999_999)], ("0001-01-01T00:00:00.000", None)),
    (pa.string(), ["é", "z"], ("z", "é")),
    (pa.string(), ["", "x" * 32], ("", "x" * 32)),
    (pa.string(), ["a" * 40, "b" * 40], ("a" * 32, "b" * 31 + "c")),
    (pa.string(), ["a" * 31 + "\ud7ff" + "tail"], ("a" * 31 + "\ud7ff", "a" * 31 + "\ue000")),
    (pa.string(), ["b" + "\U0010ffff" * 40], ("b" + "\U0010ffff" * 31, "c")),
    (pa.string(), ["\U0010ffff" * 40], ("\U0010ffff" * 32, None)),
])  # fmt: skip
def test_bounds_are_the_extremes_rounded_outwards(
    tmp_path: Path, kind: pa.DataType, values: list[Any], expected: tuple[Any, Any]
) -> None:
    assert bounds(tmp_path, kind, values) == expected


@pytest.mark.parametrize(("kind", "values"), [
    (pa.int32(), [None, None]),
    (pa.float64(), [1.0, math.nan]),
    (pa.float32(), [math.nan]),
    (pa.float64(), [math.inf, -math.inf]),
    (pa.binary(), [b"a"]),
    (pa.bool_(), [True, False]),
    (pa.list_(pa.int32()), [[1]]),
    (pa.string(), ["x" * 5000]),
])  # fmt: skip
def test_values_without_valid_bounds_have_none(tmp_path: Path, kind: pa.DataType, values: list[Any]) -> None:
    assert bounds(tmp_path, kind, values) == (None, None)


def test_a_date_that_cannot_be_written_has_no_bound(tmp_path: Path) -> None:
    schema = table_schema({"id": pa.int64(), "v": pa.date32()})
    days = pa.array([0, 90_000_000], pa.int32()).view(pa.date32())
    (file,) = stage(tmp_path, "x", schema, [pa.record_batch([pa.array([1, 2]), days], names=["id", "v"])])
    found = json.loads(file.stats)
    assert found["minValues"]["v"] == "1970-01-01"
    assert "v" not in found["maxValues"]


def test_nulls_are_counted_except_for_lists(tmp_path: Path) -> None:
    assert stats(tmp_path, pa.binary(), [None, b"", None])["nullCount"] == {"id": 0, "v": 2}
    assert stats(tmp_path, pa.list_(pa.int8()), [None, [None]])["nullCount"] == {"id": 0}


def test_bounds_span_all_row_groups_and_one_that_lacks_them_leaves_none(tmp_path: Path) -> None:
    assert bounds(tmp_path, pa.int32(), [5, None, None, 1, 3, 9], group=2) == (1, 9)
    assert bounds(tmp_path, pa.float64(), [5.0, 1.0, math.nan, 2.0], group=1) == (None, None)
    assert bounds(tmp_path, pa.string(), ["a", "b", "x" * 5000], group=1) == (None, None)


def test_only_the_key_has_statistics_past_the_first_columns(tmp_path: Path) -> None:
    kinds = {f"c{i}": pa.int64() for i in range(40)} | {"id": pa.int64(), "last": pa.int64()}
    schema = table_schema(kinds)
    (file,) = stage(tmp_path / "t", "x", schema, record_batches(schema, [dict.fromkeys(kinds, 1)]))
    assert set(json.loads(file.stats)["minValues"]) == {*(f"c{i}" for i in range(32)), "id"}


# --- no matching row is skipped -----------------------------------------------------------------------------

MICROS = st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999)
TEXT = st.one_of(
    st.text(max_size=4),
    st.text("ab\U0010ffff\ud7ff\ue000é'", min_size=30, max_size=36),
    st.sampled_from(["x" * 40, "x" * 5000]),
)
EDGES = [0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1e308]
CASES: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "int": (pa.int32(), st.integers(-(1 << 31), (1 << 31) - 1)),
    "float": (pa.float64(), st.floats() | st.sampled_from(EDGES)),
    "real": (pa.float32(), st.floats(width=32) | st.sampled_from([v for v in EDGES if v not in (5e-324, 1e308)])),
    "small": (pa.decimal128(9, 2), st.decimals(-9_999_999, 9_999_999, places=2)),
    "large": (pa.decimal128(38, 9), st.decimals(-(10**28), 10**28, places=9)),
    "date": (pa.date32(), st.dates() | st.sampled_from([date.min, date.max])),
    "naive": (PLAIN, MICROS.map(lambda n: EPOCH + timedelta(microseconds=n))),
    "zoned": (ZONED, MICROS.map(lambda n: EPOCH.replace(tzinfo=UTC) + timedelta(microseconds=n))),
    "text": (pa.string(), TEXT),
}  # fmt: skip


def sql(value: Any) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    if isinstance(value, datetime):
        zone, kind = ("", "None") if value.tzinfo is None else ("Z", 'Some("UTC")')
        text = value.replace(tzinfo=None).isoformat()
        return f"arrow_cast('{text}{zone}', 'Timestamp(Microsecond, {kind})')"
    if isinstance(value, date):
        return f"DATE '{value.isoformat()}'"
    if isinstance(value, Decimal):
        return f"CAST('{value:f}' AS DECIMAL(38, 9))"
    if isinstance(value, float):
        return f"CAST('{value}' AS DOUBLE)"
    return str(value)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_scan_that_skips_files_finds_the_same_rows(name: str, data: st.DataObject) -> None:
    kind, values = CASES[name]
    files = data.draw(st.lists(st.lists(values | st.none(), min_size=1, max_size=4), min_size=1, max_size=4))
    flat = [value for file in files for value in file if value is not None]
    probe = data.draw(st.sampled_from(flat) | values if flat else values)
    schema = table_schema({"id": pa.int64(), "v": kind})
    with tempfile.TemporaryDirectory() as folder:
        staged: list[StagedFile] = []
        for n, file in enumerate(files):
            rows = [{"id": n * 10 + i, "v": value} for i, value in enumerate(file)]
            staged += stage(Path(folder) / "t", f"p{n}", schema, record_batches(schema, rows))
        DeltaRsTable(Path(folder) / "t", "log").commit_load(schema, staged, START)
        table = DeltaTable(f"{folder}/t")
        # Nothing can be skipped by a condition on something that has no statistics.
        for sign in ("=", "<", "<=", ">", ">="):
            skipping = pa.table(table.scan(columns=["id"], predicate=f"v {sign} {sql(probe)}"))
            whole = pa.table(
                table.scan(columns=["id"], predicate=f"(CASE WHEN id >= 0 THEN v END) {sign} {sql(probe)}")
            )
            assert sorted(skipping["id"].to_pylist()) == sorted(whole["id"].to_pylist()), sign
