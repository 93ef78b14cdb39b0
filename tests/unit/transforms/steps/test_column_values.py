"""Work on single columns equals the same work in plain Python."""

from __future__ import annotations

from datetime import time
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.errors import ConfigError
from tailrace.transforms.steps import column_values

texts = st.lists(st.none() | st.text(alphabet="aé€😀 b", max_size=12), max_size=20)
plain_texts = st.lists(st.none() | st.text(alphabet="ab@. ", max_size=12), max_size=20)


def masked(text: str | None, first: int, last: int) -> str | None:
    if text is None:
        return None
    if len(text) <= first + last:
        return "*" * len(text)
    return text[:first] + "*" * (len(text) - first - last) + text[len(text) - last :]


@settings(max_examples=100, deadline=None)
@given(texts | plain_texts, st.integers(0, 4), st.integers(0, 4), st.integers(0, 3))
def test_a_mask_leaves_the_ends_and_never_a_whole_string(
    given: list[str | None], first: int, last: int, begin: int
) -> None:
    made = column_values.mask(pa.array(given, pa.string()).slice(begin), first, last, "*")
    made.validate(full=True)
    assert made.to_pylist() == [masked(text, first, last) for text in given[begin:]]


@pytest.mark.parametrize("text", ["plain", "größer"])
def test_a_mask_character_may_be_longer_than_a_byte(text: str) -> None:
    assert column_values.mask(pa.array([text, None, ""]), 1, 1, "•").to_pylist() == [
        text[0] + "•" * (len(text) - 2) + text[-1],
        None,
        "",
    ]


@settings(max_examples=50, deadline=None)
@given(texts, st.integers(0, 6))
def test_strings_are_cut_by_characters(given: list[str | None], length: int) -> None:
    made = column_values.truncate(pa.array(given, pa.string()), length)
    assert made.to_pylist() == [None if text is None else text[:length] for text in given]


def test_binaries_are_cut_by_bytes() -> None:
    assert column_values.truncate(pa.array([b"abc", None, b""]), 2).to_pylist() == [b"ab", None, b""]


def test_numbers_are_masked_as_strings() -> None:
    assert column_values.mask(pa.array([12345, None]), 0, 2, "#").to_pylist() == ["###45", None]


def test_redact_replaces_every_value_by_one_text_and_null_stays_null() -> None:
    assert column_values.redact(pa.array([[1], None, []]), "-").to_pylist() == ["-", None, "-"]


def test_values_that_do_not_fit_a_cast_fail_alone() -> None:
    made, (fault,) = column_values.cast(pa.array(["1", "x", None, "40000", "3"]), pa.int16())
    assert made.to_pylist() == [1, None, None, None, 3]
    assert fault.rows.tolist() == [False, True, False, True, False]


def test_a_cast_is_exact_or_fails() -> None:
    made, faults = column_values.cast(
        pa.array([Decimal("1.50"), Decimal("2.00")], pa.decimal128(5, 2)), pa.decimal128(5, 1)
    )
    assert (made.to_pylist(), faults) == ([Decimal("1.5"), Decimal("2.0")], ())
    made, (fault,) = column_values.cast(pa.array([Decimal("1.55")], pa.decimal128(5, 2)), pa.decimal128(5, 1))
    assert fault.reason == "the value does not fit decimal(5, 1)"
    assert made.to_pylist() == [None]


INFINITE = float("inf")


@pytest.mark.parametrize(("given", "kind", "wanted"), [
    (pa.array([1, None, 2**40, -5]), pa.decimal128(10, 2), [Decimal(1), None, None, Decimal(-5)]),
    (pa.array([Decimal("1" * 38), Decimal(2)], pa.decimal128(38, 0)), pa.decimal128(38, 2), [None, Decimal(2)]),
    (pa.array([1e300, INFINITE, 1.5, None]), pa.float32(), [None, INFINITE, 1.5, None]),
    (pa.array(["1e400", "-Infinity", "1.5", None]), pa.float64(), [None, -INFINITE, 1.5, None]),
    (pa.array([0, 1, 2, None]), pa.bool_(), [False, True, None, None]),
    (pa.array([-1, 1, 86_400_000_000]), pa.time64("us"), [None, time(0, 0, 0, 1), None]),
])  # fmt: skip
def test_values_that_arrow_would_change_do_not_fit(given: pa.Array, kind: pa.DataType, wanted: list[object]) -> None:
    made, faults = column_values.cast(given, kind)
    assert made.to_pylist() == wanted
    lost = [value is not None and kept is None for value, kept in zip(given.to_pylist(), wanted, strict=True)]
    assert [fault.rows.tolist() for fault in faults] == [lost]


def test_nan_casts_to_any_float() -> None:
    made, faults = column_values.cast(pa.array([float("nan")]), pa.float32())
    assert (str(made[0]), faults) == ("nan", ())


@pytest.mark.parametrize("value", [1.5, Decimal("1.5"), "1.5", 2**31, True, Decimal("1e999999999")])
def test_a_set_value_is_not_truncated(value: Decimal | float | str | bool) -> None:
    given = Decimal(str(value)) if isinstance(value, float) else value
    with pytest.raises(ConfigError, match="value is not of the type int32"):
        column_values.to_scalar(given, pa.int32())
    assert column_values.to_scalar(Decimal("2.0"), pa.int32()).as_py() == 2


def test_a_number_that_fits_no_default_type_needs_a_type() -> None:
    with pytest.raises(ConfigError, match="fits no column type") as raised:
        column_values.to_scalar(2**70, None)
    assert "decimal(38, 0)" in raised.value.hint
    assert column_values.to_scalar(2**70, pa.decimal128(38, 0)).as_py() == 2**70


@pytest.mark.parametrize("name", ["varchar", "decimal(39,2)", "decimal(3,5)", ""])
def test_an_unknown_type_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a type"):
        column_values.parse_type(name)
