"""Expressions compute what SQL would: typed, null for null, decimals to the last digit."""

from __future__ import annotations

import operator
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.errors import ConfigError
from tailrace.transforms.expression import Expression

OPERATORS = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip


def evaluated(text: str, **columns: pa.Array) -> list[Any]:
    rows = len(next(iter(columns.values()))) if columns else 1
    found: list[Any] = Expression(text).evaluate(columns, rows).to_pylist()
    return found


integers = st.integers(-(2**63), 2**63 - 1)
decimals = st.decimals(min_value=-(10**8), max_value=10**8, places=2, allow_nan=False)
literals = st.decimals(min_value=-(10**9), max_value=10**9, places=4, allow_nan=False) | st.integers(-(2**70), 2**70)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.none() | decimals, min_size=1, max_size=10), st.sampled_from(sorted(OPERATORS)), literals)
def test_decimals_compare_exactly(given: list[Decimal | None], sign: str, literal: Decimal | int) -> None:
    column = pa.array(given, pa.decimal128(12, 2))
    wanted = [None if value is None else OPERATORS[sign](value, literal) for value in given]
    assert evaluated(f"x {sign} {literal}", x=column) == wanted


@settings(max_examples=100, deadline=None)
@given(st.lists(st.none() | integers, min_size=1, max_size=10), st.sampled_from(sorted(OPERATORS)), literals)
def test_integers_compare_exactly_with_anything(given: list[int | None], sign: str, literal: Decimal | int) -> None:
    wanted = [None if value is None else OPERATORS[sign](value, literal) for value in given]
    assert evaluated(f"{literal} {sign} x", x=pa.array(given, pa.int64())) == [
        None if value is None else OPERATORS[sign](literal, value) for value in given
    ]
    assert evaluated(f"x {sign} {literal}", x=pa.array(given, pa.int64())) == wanted


def test_a_tenth_is_a_tenth() -> None:
    column = pa.array([Decimal("0.10"), Decimal("0.30")], pa.decimal128(5, 2))
    assert evaluated("x == 0.1", x=column) == [True, False]
    assert evaluated("x + 0.2 == 0.3", x=column) == [True, False]
    assert evaluated("x < 1e1 and x > 1e-2", x=column) == [True, True]
    assert evaluated("y < 1.5e3", y=pa.array([1499, 1500])) == [True, False]


def test_null_is_not_true_and_not_false() -> None:
    x = pa.array([True, False, None])
    assert evaluated("x and False", x=x) == [False, False, False]
    assert evaluated("x or True", x=x) == [True, True, True]
    assert evaluated("not x", x=x) == [False, True, None]
    assert evaluated("x is None", x=x) == [False, False, True]
    assert evaluated("x is not None", x=x) == [True, True, False]
    assert evaluated("y == z", y=pa.array([1, 2]), z=pa.array([1, None])) == [True, None]


@pytest.mark.parametrize("text", ["x == None", "None != x", "x < None", "x in (1, None)", "x not in [None]"])
def test_a_comparison_that_is_never_true_is_refused_with_a_correction(text: str) -> None:
    with pytest.raises(ConfigError, match=r"None.* write `.*is None"):
        Expression(text)


def test_strings_dates_and_timestamps_compare_by_their_types() -> None:
    assert evaluated("x >= '2020-01-02'", x=pa.array([date(2020, 1, 1), date(2020, 1, 3), None])) == [False, True, None]
    moments = pa.array([datetime(2020, 1, 1, 12), datetime(2020, 1, 1, 14)], pa.timestamp("us"))
    assert evaluated("x < '2020-01-01 13:00:00'", x=moments) == [True, False]
    assert evaluated("'a' < x <= 'c'", x=pa.array(["a", "b", "c", "d"])) == [False, True, True, False]


def test_a_list_behaves_as_in_sql() -> None:
    assert evaluated("x in ('a', 'b')", x=pa.array(["a", "z", None])) == [True, False, None]
    assert evaluated("x not in (1, 2.5)", x=pa.array([1, 2, 3])) == [False, True, True]


def test_functions_and_choices() -> None:
    x, y = pa.array([" Ann ", None]), pa.array(["B", "C"])
    assert evaluated("upper(trim(x))", x=x) == ["ANN", None]
    assert evaluated("coalesce(x, 'none')", x=x) == [" Ann ", "none"]
    assert evaluated("concat(y, '-', length(y))", y=y) == ["B-1", "C-1"]
    assert evaluated("substring(y, 1, 1) if y == 'B' else 'other'", y=y) == ["B", "other"]
    assert evaluated("contains(col('odd name'), 'n')", **{"odd name": x}) == [True, None]
    assert evaluated("year(d) * 100 + month(d)", d=pa.array([date(2024, 5, 6)])) == [202405]
    assert Expression("upper(col('a b')) == c").columns == ("c", "a b")


N, D = pa.array([10, 10, None, 7]), pa.array([2, 0, None, 0])


@pytest.mark.parametrize(("text", "wanted"), [
    ("n / d if d != 0 else 0", [5, 0, 0, 0]),
    ("0 if d == 0 else n / d", [5, 0, None, 0]),
    ("d != 0 and n / d > 1", [True, False, None, False]),
    ("d == 0 or n / d > 9", [False, True, None, True]),
    ("(n / d if d != 0 else -1) if n is not None else -2", [5, -1, -2, -1]),
    ("d == 0 or (n > 9 and n / d == 5)", [True, True, None, True]),
])  # fmt: skip
def test_a_part_that_a_condition_excludes_is_not_computed_for_the_row(text: str, wanted: list[Any]) -> None:
    assert evaluated(text, n=N, d=D) == wanted


def test_a_part_without_a_condition_fails_only_at_its_rows() -> None:
    made, (fault,) = Expression("n > 8 and n / d > 1").evaluate_condition({"n": N, "d": D}, 4)
    assert made.tolist() == [True, False, False, False]
    assert fault.rows.tolist() == [False, True, False, False]


def test_decimals_are_computed_with_as_many_digits_as_needed() -> None:
    large = Decimal("9" * 28 + ".9999999999")
    column = pa.array([Decimal("1.1"), large, None], pa.decimal128(38, 10))
    assert evaluated("x * 2", x=column) == [Decimal("2.2"), Decimal("19999999999999999999999999999.9999999998"), None]
    assert evaluated("x + y > 3", x=column, y=pa.array([1, 1, 1])) == [False, True, None]


@pytest.mark.parametrize(("text", "wanted"), [
    ("x > 1.55", [True, False, None]), ("x in (1.55, 1)", [False, True, None]), ("x == y", [False, False, None]),
    ("coalesce(x, 0.5)", [Decimal("9" * 38), Decimal(1), Decimal("0.5")]),
    ("x if x > 1 else 1.555", [Decimal("9" * 38), Decimal("1.555"), Decimal("1.555")]),
])  # fmt: skip
def test_decimals_of_any_size_can_be_combined(text: str, wanted: list[Any]) -> None:
    column = pa.array([Decimal("9" * 38), Decimal(1), None], pa.decimal128(38, 0))
    small = pa.array([Decimal("0." + "9" * 38)] * 3, pa.decimal128(38, 38))
    assert evaluated(text, x=column, y=small) == wanted


@pytest.mark.parametrize("text", [
    "", "x +", "__import__('os')", "x.y", "[a for a in b]", "lambda: 1", "x[0]", "f(x=1)", "open('a')", "upper()",
    "x ** 2", "x := 1", "f'{x}'", "b'x' == x", "1j", "col(x)", "x" * 5000, "*x", "matches(x, '(')",
    "x > 1e99999999999999999999", "x > 1e999999999", "x < -1e-999999999", "matches(x, None)", "replace(x, 'a', None)",
])  # fmt: skip
def test_an_expression_outside_the_language_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expression is invalid"):
        Expression(text)


@pytest.mark.parametrize(
    "text",
    [
        "x == 'a'",
        "x and True",
        "y > 3",
        "z == 1",
        "d > 'soon'",
        "y + 1",
        "x in 'a'",
        "substring(y, 99999999999999999999, 1) == 'a'",
    ],
)
def test_values_of_different_types_are_not_compared(text: str) -> None:
    types = {"x": pa.int64(), "y": pa.string(), "d": pa.date32()}
    with pytest.raises(ConfigError, match=r"expression (cannot be computed|names the column)"):
        Expression(text).result_type(types)
