"""Rows as 128-bit numbers: they agree with `identity` on what is the same, however the rows are cut."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.tables.fold.row_hashes import RowHashSet, hash_images, hash_keys
from tailrace.tables.fold.row_ids import image_numbers, key_numbers

VALUES: dict[pa.DataType, list[Any]] = {
    pa.bool_(): [None, True, False],
    pa.int16(): [None, 0, -1, 256],
    pa.int64(): [None, 0, 1 << 62, -(1 << 62)],
    pa.float32(): [None, 0.0, -0.0, math.nan, math.inf, 1.5],
    pa.float64(): [None, 0.0, -0.0, math.nan, -math.nan, -math.inf],
    pa.string(): [None, "", "a", "ab", "abcdefgh", "abcdefghi", "abcdefgh\0", "é" * 20],
    pa.binary(): [None, b"", b"\0", b"\0\0", b"\0" * 8],
    pa.date32(): [None, date(1970, 1, 1), date(1, 1, 1)],
    pa.timestamp("us"): [None, datetime(1970, 1, 1), datetime(9999, 1, 1)],
    pa.timestamp("us", "UTC"): [None, datetime(1970, 1, 1, tzinfo=UTC)],
    pa.decimal128(38, 2): [None, Decimal(0), Decimal("-0.01"), Decimal("1e30")],
    pa.list_(pa.string()): [None, [], [None], [""], ["a", "b"], ["ab"], ["", "ab"]],
    pa.list_(pa.float64()): [None, [0.0], [-0.0], [math.nan], [1.0, None]],
}
ROWS = st.lists(st.tuples(*(st.sampled_from(values) for values in VALUES.values())), max_size=30)


def columns(rows: list[tuple[Any, ...]]) -> list[pa.Array]:
    return [pa.array([row[i] for row in rows], kind) for i, kind in enumerate(VALUES)]


@given(ROWS, st.integers(0, 30))
@settings(deadline=None)  # the first call compiles
def test_rows_have_the_same_number_exactly_when_they_are_the_same(rows: list[Any], cut: int) -> None:
    whole = columns(rows)
    for prints, numbers in ((hash_images, image_numbers), (hash_keys, key_numbers)):
        for some in ([column] for column in whole):
            found = [tuple(pair) for pair in prints(some, 7).tolist()]
            expected = numbers(some).numbers.tolist()
            assert [found.index(pair) for pair in found] == [expected.index(number) for number in expected]
        together = prints(whole, 7)
        halves = [prints([column[:cut] for column in whole], 7), prints([column[cut:] for column in whole], 7)]
        chunked = prints([pa.chunked_array([column[:cut], column[cut:]]) for column in whole], 7)
        assert (together == np.concatenate(halves)).all()
        assert (together == chunked).all()


def test_values_do_not_run_into_each_other() -> None:
    pairs = [("ab", "c"), ("a", "bc"), ("", "abc"), (None, "abc"), ("abc", None), ("abc", "")]
    prints = hash_images([pa.array([pair[i] for pair in pairs]) for i in (0, 1)], 1)
    assert len(np.unique(prints[:, 0])) == len(np.unique(prints[:, 1])) == len(pairs)


def test_another_seed_gives_other_numbers() -> None:
    column = [pa.array([1, 2, 3])]
    assert not (hash_images(column, 1) == hash_images(column, 1 << 64)).any()


@pytest.mark.slow
def test_a_million_rows_that_differ_little_have_as_many_numbers() -> None:
    numbers = np.arange(1_000_000)
    prints = hash_images([pa.array(numbers & 1023), pa.array((numbers >> 10) << 40)], 3)
    for half in (0, 1):
        assert np.unique(prints[:, half]).size == numbers.size


def test_a_type_that_no_table_has_is_refused() -> None:
    with pytest.raises(TypeError, match="time64"):
        hash_images([pa.array([1], pa.time64("us"))], 1)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3))), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)))
)
def test_a_set_finds_what_it_holds_also_where_one_half_is_the_same(held: list[Any], asked: list[Any]) -> None:
    held = sorted(set(held), reverse=True)
    prints = RowHashSet(np.array(held, np.uint64).reshape(-1, 2))
    found = prints.find(np.array(asked, np.uint64).reshape(-1, 2))
    assert (len(prints), [place >= 0 for place in found]) == (len(held), [pair in held for pair in asked])
    places = {pair: place for pair, place in zip(asked, found.tolist(), strict=True) if place >= 0}
    assert len(set(places.values())) == len(places)
