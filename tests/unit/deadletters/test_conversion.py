"""Dead letters converted to another schema: parsed texts, kept values, and blocked rows."""

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
    new_column = Column(name="v", source_type="x", type=kind)
    return replace(schema, columns=tuple(new_column if column.name == "v" else column for column in schema.columns))


def value_of(column: Column, text: str) -> pa.Scalar | None:
    return values.parse_value(text, column.type)


def whole(schema: TableSchema, *rows: Change) -> pa.Table:
    """Return changes with every column, as dead letters have them."""
    table, schema_fields = changes(schema, *rows), schema.change_schema()
    columns = [
        table.column(field.name) if field.name in table.column_names else pa.nulls(table.num_rows, field.type)
        for field in schema_fields
    ]
    return pa.Table.from_arrays(columns, schema=schema_fields)


def converted(new: TableSchema, *rows: Change, old: TableSchema = OLD, **more: Any) -> tuple[list[Any], list[Any], Any]:
    """Return the values of `v`, their unfit texts, and the blocked rows."""
    result = convert_rows(old, new, whole(old, *rows), value_of, **more)
    assert result.changes.schema.equals(new.change_schema())
    found = result.changes.column("v") if "v" in new.names else result.changes.column("id")
    return found.cast(pa.string()).to_pylist(), result.changes.column(change.UNFIT).to_pylist(), result.blocked


def bad(key: int, text: str) -> Change:
    return insert(key, unfit=("v",), unfit_text=text)


@pytest.mark.parametrize(
    ("kind", "found"), [(pa.string(), ["NaN", None, "1.50"]), (pa.decimal128(12, 2), [None, None, "1.50"])]
)
def test_an_unfit_text_is_parsed_as_the_new_type_and_fitting_values_stay(kind: pa.DataType, found: list[Any]) -> None:
    rule = rule_failure_text("hash", "no key")
    values_now, unfit, blocked = converted(to(kind), bad(1, "NaN"), bad(2, rule), insert(3, v=Decimal("1.50")))
    assert (values_now, blocked) == (found, {})
    unfit_cells = [{"column": "v", "text": "NaN"}]
    assert unfit == [None if kind == pa.string() else unfit_cells, [{"column": "v", "text": rule}], None]


def test_a_value_that_the_new_type_may_not_hold_blocks_its_row() -> None:
    values_now, unfit, blocked = converted(to(pa.float64()), insert(1, v=Decimal(1)), bad(2, "NaN"), insert(3))
    assert (values_now, unfit, list(blocked), blocked[0][1]) == ([None, "nan", None], [None] * 3, [0], "v")


@pytest.mark.slow
def test_a_time_beyond_python_s_range_is_parsed() -> None:
    old = to(pa.int64())
    made = convert_rows(old, to(pa.timestamp("us")), whole(old, bad(1, "200000-01-01 00:00:00")), value_of)
    micros = made.changes.column("v").cast(pa.int64()).to_pylist()
    assert micros == [int(np.datetime64("200000-01-01", "us").astype(np.int64))]


@pytest.mark.parametrize(
    ("kind", "text", "read"),
    [(pa.string(), "caf\\xe9", False), (pa.list_(pa.string()), "{caf\\xe9}", False),
     (pa.list_(pa.string()), "{{a},{b}}", True)],
)  # fmt: skip
def test_the_description_of_invalid_text_is_not_parsed(kind: pa.DataType, text: str, read: bool) -> None:
    values_now, unfit, _ = converted(to(pa.string()), bad(1, text), old=to(kind))
    assert (values_now, unfit[0] is None) == ([text] if read else [None], read)


def test_a_dropped_column_blocks_only_if_the_table_keeps_it() -> None:
    new_schema = replace(OLD, columns=(OLD.columns[0], OLD.columns[2]))
    _, unfit, blocked = converted(new_schema, bad(1, "NaN"), insert(2))
    assert (unfit, blocked) == ([None, None], {})
    assert list(converted(new_schema, bad(1, "NaN"), insert(2), lake_only_columns={"v"})[2]) == [0]


def test_unsent_columns_are_listed_only_if_they_still_exist() -> None:
    new_schema = replace(OLD, columns=OLD.columns[:2])
    made = convert_rows(
        OLD, new_schema, whole(OLD, update(1, unchanged=("t", "v")), update(2, unchanged=("t",))), value_of
    )
    assert made.changes.column(change.UNCHANGED).to_pylist() == [["v"], None]


def test_existing_rows_are_not_guessed_when_nothing_is_known_of_them() -> None:
    some = whole(OLD, insert(1))
    assert convert_rows_at_rest(OLD, OLD, some, value_of) is some
    assert convert_rows_at_rest(OLD, to(pa.decimal128(12, 2)), some, value_of) is None
