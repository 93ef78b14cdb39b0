"""Row hashes agree with `row_ids` about which rows are equal, in any batches."""

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
def test_rows_have_equal_hashes_exactly_when_they_are_equal(rows: list[Any], cut: int) -> None:
    whole = columns(rows)
    for hashes, numbers in ((hash_images, image_numbers), (hash_keys, key_numbers)):
        for column_list in ([column] for column in whole):
            found = [tuple(pair) for pair in hashes(column_list, 7).tolist()]
            expected = numbers(column_list).numbers.tolist()
            assert [found.index(pair) for pair in found] == [expected.index(number) for number in expected]
        together = hashes(whole, 7)
        halves = [hashes([column[:cut] for column in whole], 7), hashes([column[cut:] for column in whole], 7)]
        chunked = hashes([pa.chunked_array([column[:cut], column[cut:]]) for column in whole], 7)
        assert (together == np.concatenate(halves)).all()
        assert (together == chunked).all()


def test_values_do_not_run_into_each_other() -> None:
    pairs = [("ab", "c"), ("a", "bc"), ("", "abc"), (None, "abc"), ("abc", None), ("abc", "")]
    hashes = hash_images([pa.array([pair[i] for pair in pairs]) for i in (0, 1)], 1)
    assert len(np.unique(hashes[:, 0])) == len(np.unique(hashes[:, 1])) == len(pairs)


def test_another_seed_gives_other_hashes() -> None:
    column = [pa.array([1, 2, 3])]
    assert not (hash_images(column, 1) == hash_images(column, 1 << 64)).any()


@pytest.mark.slow
def test_a_million_similar_rows_have_distinct_hashes() -> None:
    numbers = np.arange(1_000_000)
    hashes = hash_images([pa.array(numbers & 1023), pa.array((numbers >> 10) << 40)], 3)
    for half in (0, 1):
        assert np.unique(hashes[:, half]).size == numbers.size


def test_an_unsupported_type_is_refused() -> None:
    with pytest.raises(TypeError, match="time64"):
        hash_images([pa.array([1], pa.time64("us"))], 1)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3))), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)))
)
def test_a_set_finds_its_hashes_even_if_one_half_is_equal(members: list[Any], lookups: list[Any]) -> None:
    members = sorted(set(members), reverse=True)
    hashes = RowHashSet(np.array(members, np.uint64).reshape(-1, 2))
    found = hashes.find(np.array(lookups, np.uint64).reshape(-1, 2))
    assert (len(hashes), [index >= 0 for index in found]) == (len(members), [pair in members for pair in lookups])
    indices = {pair: index for pair, index in zip(lookups, found.tolist(), strict=True) if index >= 0}
    assert len(set(indices.values())) == len(indices)
