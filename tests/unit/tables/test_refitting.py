"""Changes of letters in another shape: what is read anew, what is carried over, and what holds its row back."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tailrace.capture.postgres import values
from tailrace.deadletters.conversion import convert_rows, convert_rows_at_rest
from tailrace.model import change
from tailrace.model.change import rule_failure_text
from tailrace.model.schema import Column, TableSchema
from tests.support.changes import Change, changes, insert, table_schema, update

OLD = table_schema({"id": pa.int64(), "v": pa.decimal128(10, 2), "t": pa.string()})


def to(kind: pa.DataType, schema: TableSchema = OLD) -> TableSchema:
    now = Column(name="v", source_type="x", type=kind)
    return replace(schema, columns=tuple(now if one.name == "v" else one for one in schema.columns))


def value_of(column: Column, text: str) -> pa.Scalar | None:
    return values.parse_value(text, column.type)


def whole(schema: TableSchema, *rows: Change) -> pa.Table:
    """Changes with every column, as letters have them."""
    made, fields = changes(schema, *rows), schema.change_schema()
    columns = [
        made.column(one.name) if one.name in made.column_names else pa.nulls(made.num_rows, one.type) for one in fields
    ]
    return pa.Table.from_arrays(columns, schema=fields)


def refitted(new: TableSchema, *rows: Change, old: TableSchema = OLD, **more: Any) -> tuple[list[Any], list[Any], Any]:
    """The values of `v`, what of them does not fit, and the rows that are held back."""
    made = convert_rows(old, new, whole(old, *rows), value_of, **more)
    assert made.changes.schema.equals(new.change_schema())
    found = made.changes.column("v") if "v" in new.names else made.changes.column("id")
    return found.cast(pa.string()).to_pylist(), made.changes.column(change.UNFIT).to_pylist(), made.blocked


def bad(key: int, text: str) -> Change:
    return insert(key, unfit=("v",), unfit_text=text)


@pytest.mark.parametrize(
    ("kind", "found"), [(pa.string(), ["NaN", None, "1.50"]), (pa.decimal128(12, 2), [None, None, "1.50"])]
)
def test_a_text_is_read_as_the_type_of_now_and_what_fitted_stays_what_it_was(
    kind: pa.DataType, found: list[Any]
) -> None:
    rule = rule_failure_text("hash", "no key")
    values_now, unfit, stuck = refitted(to(kind), bad(1, "NaN"), bad(2, rule), insert(3, v=Decimal("1.50")))
    assert (values_now, stuck) == (found, {})
    left = [{"column": "v", "text": "NaN"}]
    assert unfit == [None if kind == pa.string() else left, [{"column": "v", "text": rule}], None]


def test_a_value_that_the_new_type_may_not_hold_holds_its_row_back() -> None:
    values_now, unfit, stuck = refitted(to(pa.float64()), insert(1, v=Decimal(1)), bad(2, "NaN"), insert(3))
    assert (values_now, unfit, list(stuck), stuck[0][1]) == ([None, "nan", None], [None] * 3, [0], "v")


@pytest.mark.slow
def test_a_time_that_no_program_of_ours_can_show_is_read_all_the_same() -> None:
    old = to(pa.int64())
    made = convert_rows(old, to(pa.timestamp("us")), whole(old, bad(1, "200000-01-01 00:00:00")), value_of)
    micros = made.changes.column("v").cast(pa.int64()).to_pylist()
    assert micros == [int(np.datetime64("200000-01-01", "us").astype(np.int64))]


@pytest.mark.parametrize(
    ("kind", "text", "read"),
    [(pa.string(), "caf\\xe9", False), (pa.list_(pa.string()), "{caf\\xe9}", False),
     (pa.list_(pa.string()), "{{a},{b}}", True)],
)  # fmt: skip
def test_of_bytes_that_are_no_text_only_a_description_is_known(kind: pa.DataType, text: str, read: bool) -> None:
    values_now, unfit, _ = refitted(to(pa.string()), bad(1, text), old=to(kind))
    assert (values_now, unfit[0] is None) == ([text] if read else [None], read)


def test_a_column_that_went_holds_back_only_where_the_table_keeps_it() -> None:
    gone = replace(OLD, columns=(OLD.columns[0], OLD.columns[2]))
    _, unfit, stuck = refitted(gone, bad(1, "NaN"), insert(2))
    assert (unfit, stuck) == ([None, None], {})
    assert list(refitted(gone, bad(1, "NaN"), insert(2), kept={"v"})[2]) == [0]


def test_what_did_not_come_is_said_of_columns_that_are_there() -> None:
    gone = replace(OLD, columns=OLD.columns[:2])
    made = convert_rows(OLD, gone, whole(OLD, update(1, unchanged=("t", "v")), update(2, unchanged=("t",))), value_of)
    assert made.changes.column(change.UNCHANGED).to_pylist() == [["v"], None]


def test_rows_at_rest_are_not_guessed_where_nothing_is_known_of_them() -> None:
    some = whole(OLD, insert(1))
    assert convert_rows_at_rest(OLD, OLD, some, value_of) is some
    assert convert_rows_at_rest(OLD, to(pa.decimal128(12, 2)), some, value_of) is None
