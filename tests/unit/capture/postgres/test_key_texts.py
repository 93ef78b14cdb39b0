"""A key's value is written as text, and the server reads the text as exactly this value."""

from __future__ import annotations

from datetime import UTC, date, datetime, time

import numpy as np
import pyarrow as pa
import pytest

from tailrace.capture.postgres.chunks import key_texts

DAY, MOMENT, ZONED = pa.date32(), pa.timestamp("us"), pa.timestamp("us", "UTC")


def at(text: str, kind: pa.DataType) -> pa.Scalar:
    number = int(np.datetime64(text, "D" if kind == DAY else "us").astype(np.int64))
    return pa.array([number], pa.int32() if kind == DAY else pa.int64()).view(kind)[0]


@pytest.mark.parametrize(("scalar", "texts"), [
    (at("2024-02-29", DAY), ("2024-02-29",)),
    (at("12345-06-07", DAY), ("12345-06-07",)),
    (at("5874897-12-31", DAY), ("5874897-12-31",)),
    (at("0000-12-31", DAY), ("0001-12-31 BC",)),
    (at("-0043-03-15", DAY), ("0044-03-15 BC",)),
    (at("0001-01-01", DAY), ("-infinity", "0001-01-01")),
    (at("9999-12-31", DAY), ("9999-12-31", "infinity")),
    (at("12345-06-07T08:09:10.5", MOMENT), ("12345-06-07 08:09:10.500000",)),
    (at("-0043-03-15T12:00", ZONED), ("0044-03-15 12:00:00.000000+00 BC",)),
    (at("0001-01-01T00:00", ZONED), ("-infinity", "0001-01-01 00:00:00.000000+00")),
    (at("9999-12-31T23:59:59.999999", MOMENT), ("9999-12-31 23:59:59.999999", "infinity")),
    (pa.scalar(datetime(2020, 1, 1, tzinfo=UTC), ZONED), ("2020-01-01 00:00:00.000000+00",)),
    (pa.scalar(date(1, 1, 2)), ("0001-01-02",)),
    (pa.scalar(time(1, 2, 3)), ("01:02:03",)),
    (pa.scalar(b"\x00\xff"), ("\\x00ff",)),
    (pa.scalar(7), ("7",)),
    (pa.scalar([1, None, 3]), ('{"1",NULL,"3"}',)),
    (pa.scalar([], pa.list_(pa.string())), ("{}",)),
    (pa.scalar(['a "b" \\ {c},d', "", "NULL"]), ('{"a \\"b\\" \\\\ {c},d","","NULL"}',)),
    (pa.scalar([b"\x00"]), ('{"\\\\x00"}',)),
])  # fmt: skip
def test_a_key_is_written_as_the_server_writes_it(scalar: pa.Scalar, texts: tuple[str, ...]) -> None:
    assert key_texts(scalar) == texts
