"""What the engine under test writes is read by others, value by value, in every type of docs/reference/types.md."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tailrace.tables.fold import fold
from tests.support.changes import changes, delete, insert, record_batches, table_schema, update
from tests.support.engines import open_table
from tests.support.mirrors import LOG, at

ONES: dict[str, tuple[pa.DataType, Any]] = {
    "flag": (pa.bool_(), False),
    "small": (pa.int16(), -(1 << 15)),
    "whole": (pa.int32(), (1 << 31) - 1),
    "large": (pa.int64(), -(1 << 63)),
    "real": (pa.float32(), -math.inf),
    "double": (pa.float64(), -0.0),
    "d5": (pa.decimal128(5, 2), Decimal("-1.50")),
    "d15": (pa.decimal128(15, 2), Decimal("123456789012.34")),
    "d38": (pa.decimal128(38, 9), Decimal("-12345678901234567890123456789.123456789")),
    "text": (pa.string(), "it's é \U0001f600\n"),
    "bytes": (pa.binary(), b"\0\xff"),
    "day": (pa.date32(), date(1, 1, 1)),
    "naive": (pa.timestamp("us"), datetime(1969, 12, 31, 23, 59, 59, 999_999)),
    "zoned": (pa.timestamp("us", "UTC"), datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)),
}
EVERY = table_schema({
    "id": pa.int64(), **{name: kind for name, (kind, _) in ONES.items()},
    **{f"{name}_list": pa.list_(kind) for name, (kind, _) in ONES.items()},
})  # fmt: skip
LOADED: dict[str, Any] = {
    "id": 1, **{name: value for name, (_, value) in ONES.items()},
    **{f"{name}_list": [value, None, value] for name, (_, value) in ONES.items()},
}  # fmt: skip
CAME = {**LOADED, "id": 2, "double": math.nan, "text": "", "text_list": [], "day": date(9999, 12, 31)}
NOTHING = {"id": 3}
KINDS = {
    "flag": "BOOLEAN", "small": "SMALLINT", "whole": "INTEGER", "large": "BIGINT", "real": "FLOAT", "double": "DOUBLE",
    "d5": "DECIMAL(5,2)", "d15": "DECIMAL(15,2)", "d38": "DECIMAL(38,9)", "text": "VARCHAR", "bytes": "BLOB",
    "day": "DATE", "naive": "TIMESTAMP", "zoned": "TIMESTAMP WITH TIME ZONE",
}  # fmt: skip
"""As DuckDB calls them."""


@pytest.fixture
def table(tmp_path: Path) -> Any:
    """Rows that were loaded, that came, and that changed."""
    made = open_table(tmp_path, LOG)
    made.load(EVERY, record_batches(EVERY, [LOADED, {"id": 3, "text": "old"}, {"id": 4}]), at(0))
    rows = [insert(2, **{k: v for k, v in CAME.items() if k != "id"}), update(3), delete(4)]
    made.apply(EVERY, fold(EVERY, changes(EVERY, *rows)), at(0), at(10))
    return made


FIELDS = pa.schema([pa.field(column.name, column.type) for column in EVERY.columns])


def same(found: pa.Table) -> bool:
    """By text: NaN is itself there, and -0.0 is not 0.0."""
    expected = pa.Table.from_pylist([LOADED, CAME, NOTHING], FIELDS)
    return str(found.cast(FIELDS).sort_by("id").to_pylist()) == str(expected.to_pylist())


def test_polars_duckdb_and_delta_rs_read_every_type(table: Any, tmp_path: Path) -> None:
    assert same(pl.read_delta(str(tmp_path)).to_arrow())
    assert same(pa.table(DeltaTable(str(tmp_path)).scan()))
    files = [str(tmp_path / name) for name in table.files()]
    with duckdb.connect() as connection:
        connection.execute("set timezone = 'UTC'")
        connection.execute(f"create table t as select * from read_parquet({files}, union_by_name = true)")
        kinds = dict(connection.execute("select column_name, data_type from duckdb_columns()").fetchall())
        assert same(connection.sql("select * from t").to_arrow_table())
    assert {name: kinds[name] for name in ONES} == KINDS
    assert {name: kinds[f"{name}_list"] for name in ONES} == {name: f"{kind}[]" for name, kind in KINDS.items()}
