"""Rows as VARIANT values: Spark's own reader returns the values that were encoded."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal, localcontext
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.variant_utils import VariantUtils

from tailrace.errors import ValueUnfit
from tailrace.spark.datasource.log.variant_rows import VALUE_BYTES_MAX, objects

NOON = dt.datetime(2026, 1, 2, 12, 0, 0, 7)
COLUMNS: dict[str, tuple[list[Any], pa.DataType]] = {
    "yes": ([True, None, False], pa.bool_()),
    "small": ([-1, None, 32767], pa.int16()),
    "middle": ([-1, None, 1 << 30], pa.int32()),
    "large": ([-(1 << 63), None, 1 << 62], pa.int64()),
    "single": ([1.5, None, -0.25], pa.float32()),
    "double": ([1.1, None, 1e300], pa.float64()),
    "exact": ([Decimal("-1.50"), None, Decimal("123456789012345678901234567890.12")], pa.decimal128(38, 2)),
    "text": (["", None, "é" * 200], pa.string()),
    "bytes": ([b"", None, b"\x00\xff"], pa.binary()),
    "day": ([dt.date(1969, 12, 31), None, dt.date(2026, 1, 2)], pa.date32()),
    "then": ([NOON, None, NOON], pa.timestamp("us")),
    "there": ([NOON.replace(tzinfo=dt.UTC), None, NOON.replace(tzinfo=dt.UTC)], pa.timestamp("us", "UTC")),
    "list": ([[1, None], None, []], pa.list_(pa.int32())),
    "lists": ([[["a"], None], None, [["b", "c"], []]], pa.list_(pa.list_(pa.string()))),
    "long": ([list(range(300)), None, [1]], pa.list_(pa.int64())),
}


def read(rows: pa.StructArray) -> list[Any]:
    with localcontext(prec=38):
        return [
            None if row is None else VariantUtils.to_python(row["value"], row["metadata"]) for row in rows.to_pylist()
        ]


@pytest.mark.parametrize("begin", [0, 1], ids=["whole", "slice"])
def test_every_type_is_read_back(begin: int) -> None:
    arrays = [pa.array(values, kind)[begin:] for values, kind in COLUMNS.values()]
    expected = [{name: values[i] for name, (values, _) in COLUMNS.items()} for i in range(begin, 3)]
    assert read(objects(list(COLUMNS), arrays)) == expected


@pytest.mark.parametrize("count", [1, 255, 256, 257, 1600])
def test_any_number_of_columns_fits(count: int) -> None:
    names = [f"column {i}" for i in range(count)]
    rows = objects(names, [pa.array([i]) for i in range(count)])
    assert read(rows) == [{name: i for i, name in enumerate(names)}]


def test_a_missing_row_is_null() -> None:
    assert read(objects(["a"], [pa.array([1, 2])], pa.array([True, False]))) == [None, {"a": 2}]


def test_a_row_too_large_for_variant_is_refused() -> None:
    with pytest.raises(ValueUnfit, match="`table` instead of `tables`"):
        objects(["a"], [pa.array(["x" * (VALUE_BYTES_MAX + 1)])])
