"""Digests of columns equal those of the standard library, value by value."""

from __future__ import annotations

import hashlib
import hmac
from datetime import date
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.transforms.steps.hashes import hmac_sha256, sha256

SECRET = bytes(range(32))
LONG = bytes(range(200))
texts = st.lists(st.none() | st.text(max_size=200), max_size=30)


@settings(max_examples=60, deadline=None)
@given(texts, st.integers(0, 3))
def test_digests_of_strings_equal_those_of_hashlib(given: list[str | None], skipped: int) -> None:
    column = pa.array(given, pa.string()).slice(min(skipped, len(given)))
    wanted = [None if text is None else hashlib.sha256(text.encode()).hexdigest() for text in column.to_pylist()]
    assert sha256(column).to_pylist() == wanted


@settings(max_examples=60, deadline=None)
@given(texts, st.sampled_from([SECRET, LONG, b""]))
def test_codes_of_strings_equal_those_of_hmac(given: list[str | None], secret: bytes) -> None:
    wanted = [None if text is None else hmac.new(secret, text.encode(), "sha256").hexdigest() for text in given]
    assert hmac_sha256(pa.array(given, pa.string()), secret).to_pylist() == wanted


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1, 55, 56, 57, 63, 64, 65, 119, 120, 127, 128, 129, 1000])
def test_every_padding_is_right(size: int) -> None:
    data = bytes(byte % 251 for byte in range(size))
    column = pa.array([data], pa.binary())
    assert sha256(column).to_pylist() == [hashlib.sha256(data).hexdigest()]
    assert hmac_sha256(column, SECRET).to_pylist() == [hmac.new(SECRET, data, "sha256").hexdigest()]


def test_other_types_are_hashed_as_strings() -> None:
    for value, kind, text in [
        (7, pa.int64(), "7"),
        (Decimal("1.50"), pa.decimal128(5, 2), "1.50"),
        (True, pa.bool_(), "true"),
        (date(2020, 2, 3), pa.date32(), "2020-02-03"),
    ]:
        assert sha256(pa.array([value, None], kind)).to_pylist() == [hashlib.sha256(text.encode()).hexdigest(), None]


@pytest.mark.slow
def test_the_result_is_a_valid_column() -> None:
    made = sha256(pa.array(["a", None, "b"]))
    made.validate(full=True)
    assert made.type == pa.string()
