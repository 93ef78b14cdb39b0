"""What the engine under test writes is read by others: Polars, DuckDB, Spark and delta-rs, in every type of
docs/reference/types.md and in every form.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tailrace.tables.fold.fold import fold
from tailrace.tables.spec import PLAIN_MIRROR, TableMode, TableSpec
from tests.support.changes import COMPOSITE, changes, delete, insert, record_batches, table_schema, update
from tests.support.engines import only_spark, open_table, session
from tests.support.forms import Account, Formed, ordered, pieces, stored, story
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


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows that were loaded, that came, and that changed."""
    folder = tmp_path_factory.mktemp("types") / "t"
    made = open_table(folder, LOG)
    made.load(EVERY, record_batches(EVERY, [LOADED, {"id": 3, "text": "old"}, {"id": 4}]), at(0))
    rows = [insert(2, **{k: v for k, v in CAME.items() if k != "id"}), update(3), delete(4)]
    made.apply(EVERY, fold(EVERY, changes(EVERY, *rows)), at(0), at(10))
    return folder


FIELDS = pa.schema([pa.field(column.name, column.type) for column in EVERY.columns])


def same(found: pa.Table) -> bool:
    """By text: NaN is itself there, and -0.0 is not 0.0."""
    expected = pa.Table.from_pylist([LOADED, CAME, NOTHING], FIELDS)
    return str(found.cast(FIELDS).sort_by("id").to_pylist()) == str(expected.to_pylist())


def by_polars(folder: Path) -> pa.Table:
    return pl.read_delta(str(folder)).to_arrow()


def by_delta_rs(folder: Path) -> pa.Table:
    return pa.table(DeltaTable(str(folder)).scan())


def by_duckdb(folder: Path) -> pa.Table:
    # Its own `delta` extension is downloaded when it is first used, which is not to be had everywhere tests run. So
    # delta-rs says which rows are the table's, and hands them over as they are asked for.
    lake = DeltaTable(str(folder)).scan()
    with duckdb.connect() as connection:
        connection.execute("set timezone = 'UTC'")
        return connection.register("lake", lake).sql("select * from lake").to_arrow_table()


def by_spark(folder: Path) -> pa.Table:
    return pa.table(session().read.format("delta").load(str(folder)).toArrow())


READERS = [by_polars, by_delta_rs, by_duckdb, pytest.param(by_spark, marks=only_spark)]


@pytest.mark.parametrize("read", READERS)
def test_every_type_is_read_as_it_came(table: Path, read: Callable[[Path], pa.Table]) -> None:
    assert same(read(table))


def test_duckdb_reads_the_files_themselves_in_the_types_that_are_documented(table: Path) -> None:
    files = [str(table / name) for name in open_table(table, LOG).files()]
    with duckdb.connect() as connection:
        connection.execute("set timezone = 'UTC'")
        connection.execute(f"create table t as select * from read_parquet({files}, union_by_name = true)")
        kinds = dict(connection.execute("select column_name, data_type from duckdb_columns()").fetchall())
        assert same(connection.sql("select * from t").to_arrow_table())
    assert {name: kinds[name] for name in ONES} == KINDS
    assert {name: kinds[f"{name}_list"] for name in ONES} == {name: f"{kind}[]" for name, kind in KINDS.items()}


NAMES = [None, "x", "a/b %", "é=1 水"]
FORMS = {
    "mirror": PLAIN_MIRROR,
    "soft delete": TableSpec(soft_delete=True, metadata=("_op", "_seq", "_tx")),
    "history": TableSpec(mode=TableMode.HISTORY, metadata=("_op",)),
    "partitioned": TableSpec(partition_by=("name",)),
}
KINDS_OF_STEPS = ["insert"] * 3 + ["update"] * 3 + ["delete", "move"]


Made = Callable[[str], tuple[Path, list[dict[str, Any]]]]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Makes a table of a form, once: its folder, and what it must hold."""

    @functools.cache
    def make(name: str) -> tuple[Path, list[dict[str, Any]]]:
        some, form, folder = random.Random(20261118), FORMS[name], tmp_path_factory.mktemp("forms") / "t"
        begun, transactions = story(
            [
                (
                    some.choice(KINDS_OF_STEPS),
                    some.randint(0, 7),
                    some.randint(0, 7),
                    some.choice(NAMES),
                    some.choice([(), ("big",)]),
                    some.random() < 0.5,
                    some.randint(900, 1100),
                )
                for _ in range(40)
            ]
        )
        batch = stored(COMPOSITE, transactions)
        table = Formed(open_table(folder, LOG, form), form, folder, COMPOSITE, begun)
        account = Account.of(COMPOSITE, begun, batch)
        for piece in pieces(batch, {batch.num_rows // 3, 2 * batch.num_rows // 3}):
            assert table.take(piece).committed
        if form.mode is TableMode.HISTORY:
            return folder, account.versions
        return folder, list((account.marked if form.soft_delete else account.live).values())

    return make


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("form", FORMS)
def test_a_table_of_any_form_is_read_as_it_is(made: Made, form: str, read: Callable[[Path], pa.Table]) -> None:
    folder, rows = made(form)
    assert len(rows) >= 4, "there is something to read"
    assert ordered(read(folder).to_pylist()) == ordered(rows)
