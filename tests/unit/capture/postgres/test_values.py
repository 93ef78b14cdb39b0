"""Text to typed columns: exactly the value, or unfit; never an added null, never a byte outside."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.capture.postgres import values
from tailrace.capture.postgres.values import ABSENT, NULL, Cells, ConvertedColumn
from tests.support.guarded import run_guarded

Text = str | bytes | int | None
DAYS, MICROS, UTC = pa.date32(), pa.timestamp("us"), pa.timestamp("us", "UTC")
# Two shared cores are too slow for a deadline.
AT_LEISURE = settings(deadline=None)
KINDS = [
    pa.int16(), pa.int32(), pa.int64(), pa.bool_(), pa.float32(), pa.float64(), pa.string(), pa.binary(),
    pa.decimal128(38, 0), pa.decimal128(10, 2), pa.decimal128(5, 5), DAYS, MICROS, UTC,
    pa.list_(pa.int32()), pa.list_(pa.string()), pa.list_(pa.binary()), pa.list_(pa.decimal128(10, 2)),
    pa.list_(UTC), pa.list_(pa.bool_()), pa.list_(pa.float64()),
]  # fmt: skip
"""Every kernel, at least once."""


def column(kind: pa.DataType, *texts: Text) -> ConvertedColumn:
    """Return the texts as a column, read twice with other bytes around each, which must not matter."""
    results = []
    for around in (b"9", b"-", b'}"'):
        parts, at, size = [around], [], []
        for text in texts:
            given_size = text if isinstance(text, int) else NULL if text is None else None
            cell = b"" if text is None or isinstance(text, int) else _bytes(text)
            at.append(sum(map(len, parts)))
            size.append(len(cell) if given_size is None else given_size)
            parts += [cell, around]
        buffer = np.frombuffer(b"".join(parts), np.uint8).copy()
        results.append(values.convert_cells(Cells(buffer, np.array(at, np.int64), np.array(size, np.int64)), kind))
    for other in results[1:]:
        assert other.unfit.tolist() == results[0].unfit.tolist()
        assert equal(other.column, results[0].column)
    results[0].column.validate(full=not pa.types.is_string(kind))
    assert len(results[0].column) == len(texts)
    assert results[0].column.type == kind
    return results[0]


def equal(one: pa.Array, other: pa.Array) -> bool:
    """Return whether both are equal, with NaN equal to NaN."""
    return bool(one.equals(other)) or str(one.to_pylist()) == str(other.to_pylist())


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


def value(kind: pa.DataType, text: str | bytes) -> Any:
    """Return the one value, which must fit; dates and timestamps as the number Arrow stores."""
    found = column(kind, text)
    assert found.unfit.size == 0, text
    assert found.column.null_count == 0, text
    return _raw(found.column)[0]


def _raw(found: pa.Array) -> list[Any]:
    if found.type == DAYS:
        return list(found.cast(pa.int32()).to_pylist())
    if pa.types.is_timestamp(found.type):
        return list(found.cast(pa.int64()).to_pylist())
    return list(found.to_pylist())


def is_unfit(kind: pa.DataType, text: str | bytes) -> bool:
    found = column(kind, text)
    assert found.column.null_count == found.unfit.size
    return bool(found.unfit.tolist() == [0])


def days(text: str) -> int:
    return int(np.datetime64(text, "D").astype(np.int64))


def micros(text: str) -> int:
    return int(np.datetime64(text, "us").astype(np.int64))


# --- exact values ------------------------------------------------------------------------------------------

EXACT: list[tuple[pa.DataType, str | bytes, Any]] = [
    (pa.int16(), "-32768", -(2**15)),
    (pa.int16(), "32767", 2**15 - 1),
    (pa.int32(), "-2147483648", -(2**31)),
    (pa.int32(), "2147483647", 2**31 - 1),
    (pa.int64(), "-9223372036854775808", -(2**63)),
    (pa.int64(), "9223372036854775807", 2**63 - 1),
    (pa.int64(), "0", 0),
    (pa.int64(), "-0", 0),
    (pa.bool_(), "t", True),
    (pa.bool_(), "f", False),
    (pa.float64(), "0.1", 0.1),
    (pa.float64(), "-0", -0.0),
    (pa.float64(), "1.7976931348623157e+308", 1.7976931348623157e308),
    (pa.float64(), "5e-324", 5e-324),
    (pa.float64(), "Infinity", float("inf")),
    (pa.float64(), "-Infinity", float("-inf")),
    (pa.float32(), "0.1", float(np.float32(0.1))),
    (pa.float32(), "3.4028235e+38", float(np.finfo(np.float32).max)),
    (pa.float32(), "1e-45", float(np.float32(1e-45))),
    (pa.float32(), "-Infinity", float("-inf")),
    (pa.string(), "", ""),
    (pa.string(), "naïve 🦆\t\n\\N", "naïve 🦆\t\n\\N"),
    (pa.binary(), r"\x", b""),
    (pa.binary(), r"\x00ff7f80", b"\x00\xff\x7f\x80"),
    (pa.decimal128(38, 0), "9" * 38, Decimal("9" * 38)),
    (pa.decimal128(38, 0), "-" + "9" * 38, Decimal("-" + "9" * 38)),
    (pa.decimal128(38, 38), "0." + "0" * 37 + "1", Decimal("1e-38")),
    (pa.decimal128(38, 10), "-" + "1" * 28 + "." + "2" * 10, Decimal("-" + "1" * 28 + "." + "2" * 10)),
    (pa.decimal128(38, 0), str(2**64), Decimal(2**64)),
    (pa.decimal128(38, 0), str(-(2**64)), Decimal(-(2**64))),
    (pa.decimal128(38, 0), str(2**96 - 1), Decimal(2**96 - 1)),
    (pa.decimal128(10, 2), "0", Decimal("0.00")),
    (pa.decimal128(10, 2), "-0.00", Decimal("0.00")),
    (pa.decimal128(10, 2), "12", Decimal("12.00")),
    (pa.decimal128(10, 2), "-12.3", Decimal("-12.30")),
    (pa.decimal128(10, 2), "00012.34", Decimal("12.34")),
    (pa.decimal128(5, 5), "0.00123", Decimal("0.00123")),
    (DAYS, "1970-01-01", 0),
    (DAYS, "2000-02-29", days("2000-02-29")),
    (DAYS, "1900-03-01", days("1900-03-01")),
    (DAYS, "0001-01-01", values.FIRST_DAY),
    (DAYS, "9999-12-31", values.LAST_DAY),
    (DAYS, "0001-12-31 BC", days("0000-12-31")),
    (DAYS, "0044-03-15 BC", days("-0043-03-15")),
    (DAYS, "4713-01-01 BC", days("-4712-01-01")),
    (DAYS, "10000-01-01", values.LAST_DAY + 1),
    (DAYS, "5874897-12-31", days("5874897-12-31")),
    (DAYS, "infinity", values.LAST_DAY),
    (DAYS, "-infinity", values.FIRST_DAY),
    (MICROS, "1970-01-01 00:00:00", 0),
    (MICROS, "1969-12-31 23:59:59.999999", -1),
    (MICROS, "2026-01-02 03:04:05.6", micros("2026-01-02T03:04:05.6")),
    (MICROS, "2026-01-02 03:04:05.67", micros("2026-01-02T03:04:05.67")),
    (MICROS, "2026-01-02 03:04:05.678", micros("2026-01-02T03:04:05.678")),
    (MICROS, "2026-01-02 03:04:05.6789", micros("2026-01-02T03:04:05.6789")),
    (MICROS, "2026-01-02 03:04:05.67891", micros("2026-01-02T03:04:05.67891")),
    (MICROS, "2026-01-02 03:04:05.000001", micros("2026-01-02T03:04:05.000001")),
    (MICROS, "0044-03-15 12:00:00.5 BC", micros("-0043-03-15T12:00:00.5")),
    (MICROS, "10000-01-01 00:00:00", values.LAST_INSTANT + 1),
    (MICROS, "294246-12-31 23:59:59", micros("294246-12-31T23:59:59")),
    (MICROS, "294247-01-10 04:00:54.775807", 2**63 - 1),
    (MICROS, "294247-01-09 23:59:59.999999", micros("294247-01-09T23:59:59.999999")),
    (MICROS, "infinity", values.LAST_INSTANT),
    (MICROS, "-infinity", values.FIRST_INSTANT),
    (UTC, "2026-01-02 03:04:05+00", micros("2026-01-02T03:04:05")),
    (UTC, "2026-01-02 03:04:05.25+05:30", micros("2026-01-01T21:34:05.25")),
    (UTC, "2026-01-02 03:04:05-03", micros("2026-01-02T06:04:05")),
    (UTC, "1890-01-01 00:00:00-00:17:30", micros("1890-01-01T00:17:30")),
    (UTC, "4713-01-01 00:00:00+00 BC", micros("-4712-01-01T00:00:00")),
    (UTC, "infinity", values.LAST_INSTANT),
    (UTC, "-infinity", values.FIRST_INSTANT),
    (pa.list_(pa.int32()), "{}", []),
    (pa.list_(pa.int32()), "{1,-2,NULL}", [1, -2, None]),
    (pa.list_(pa.bool_()), "{t,NULL,f}", [True, None, False]),
    (pa.list_(pa.float64()), "{NaN,1.5,-Infinity}", [float("nan"), 1.5, float("-inf")]),
    (pa.list_(pa.binary()), r'{"\\x01ff",NULL,"\\x"}', [b"\x01\xff", None, b""]),
    (pa.list_(pa.decimal128(10, 2)), "{1.50,NULL,-2}", [Decimal("1.50"), None, Decimal("-2.00")]),
    (pa.list_(pa.string()), "{a}", ["a"]),
    (pa.list_(pa.string()), '{"a b","c,d"}', ["a b", "c,d"]),
    (pa.list_(pa.string()), r'{"say \"hi\"","back\\slash"}', ['say "hi"', "back\\slash"]),
    (pa.list_(pa.string()), '{"{x}","}","{"}', ["{x}", "}", "{"]),
    (pa.list_(pa.string()), '{NULL,"NULL",null,""}', [None, "NULL", "null", ""]),
    (pa.list_(pa.string()), "{é,🦆}", ["é", "🦆"]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "expected"), EXACT, ids=str)
def test_a_value_is_read_exactly(kind: pa.DataType, text: str | bytes, expected: Any) -> None:
    assert str(value(kind, text)) == str(expected)


def test_an_array_of_timestamps_holds_instants() -> None:
    found = column(pa.list_(UTC), '{"2026-01-02 03:04:05+00",NULL,infinity}')
    assert _raw(found.column.flatten()) == [micros("2026-01-02T03:04:05"), None, values.LAST_INSTANT]


def test_a_float_that_is_not_a_number_is_one_and_not_null() -> None:
    for kind in (pa.float32(), pa.float64()):
        assert np.isnan(value(kind, "NaN"))


def test_minus_zero_keeps_its_sign() -> None:
    assert np.signbit(value(pa.float64(), "-0"))


UNFIT: list[tuple[pa.DataType, str | bytes]] = [
    (pa.int16(), "32768"),
    (pa.int16(), "-32769"),
    (pa.int32(), "2147483648"),
    (pa.int32(), "-2147483649"),
    (pa.int64(), "9223372036854775808"),
    (pa.int64(), "-9223372036854775809"),
    (pa.int64(), "9999999999999999999"),
    (pa.int64(), "-9999999999999999999"),
    (pa.int64(), "1" + "0" * 19),
    (pa.int32(), ""),
    (pa.int32(), "-"),
    (pa.int32(), "1.0"),
    (pa.int32(), "+1"),
    (pa.int32(), " 1"),
    (pa.bool_(), ""),
    (pa.bool_(), "true"),
    (pa.bool_(), "x"),
    (pa.float64(), ""),
    (pa.float64(), "one"),
    (pa.float32(), "1.5x"),
    (pa.decimal128(10, 2), "NaN"),
    (pa.decimal128(10, 2), "Infinity"),
    (pa.decimal128(10, 2), "-Infinity"),
    (pa.decimal128(10, 2), ""),
    (pa.decimal128(10, 2), "-"),
    (pa.decimal128(10, 2), "."),
    (pa.decimal128(10, 2), "1."),
    (pa.decimal128(10, 2), "1.2.3"),
    (pa.decimal128(10, 2), "1.234"),
    (pa.decimal128(10, 2), "123456789.00"),
    (pa.decimal128(10, 2), "123456789"),
    (pa.decimal128(10, 2), "1e3"),
    (pa.decimal128(38, 0), "1" + "0" * 38),
    (pa.decimal128(38, 0), "9" * 200),
    (pa.binary(), ""),
    (pa.binary(), "\\"),
    (pa.binary(), "01"),
    (pa.binary(), r"\x0"),
    (pa.binary(), r"\x0g"),
    (DAYS, ""),
    (DAYS, "2026"),
    (DAYS, "2026-1-02"),
    (DAYS, "2026-01-02 AD"),
    (DAYS, "Infinity"),
    (MICROS, ""),
    (MICROS, "2026-01-02"),
    (MICROS, "2026-01-02T03:04:05"),
    (MICROS, "2026-01-02 03:04"),
    (MICROS, "2026-01-02 03:04:05 pm"),
    (MICROS, "294276-12-31 23:59:59.999999"),  # the server's last instant; 64 bits from 1970 end in 294247
    (MICROS, "294247-01-10 04:00:54.775808"),
    (MICROS, "294247-01-11 00:00:00"),
    (UTC, "294247-01-10 04:00:54-01"),
    (pa.list_(pa.int32()), "{{1,2},{3,4}}"),
    (pa.list_(pa.int32()), "[0:1]={1,2}"),
    (pa.list_(pa.int32()), "{1,x}"),
    (pa.list_(pa.int32()), "{1,}"),
    (pa.list_(pa.int32()), "{,1}"),
    (pa.list_(pa.int32()), "{1,2"),
    (pa.list_(pa.int32()), "{"),
    (pa.list_(pa.int32()), "}"),
    (pa.list_(pa.int32()), ""),
    (pa.list_(pa.string()), "{{a}}"),
    (pa.list_(pa.string()), '{"a}'),
    (pa.list_(pa.string()), '{"a"b}'),
    (pa.list_(pa.string()), "{a\\}"),
    (pa.list_(pa.decimal128(10, 2)), "{1.00,NaN}"),
    # Things no server prints; a reader that guesses would store a value that was never there.
    (DAYS, "2026-13-01"),
    (DAYS, "2026-00-01"),
    (DAYS, "2026-01-32"),
    (DAYS, "2026-02-29"),
    (DAYS, "999999999-01-01"),
    (MICROS, "2026-01-02 25:00:00"),
    (MICROS, "2026-01-02 03:60:00"),
    (MICROS, "2026-01-02 03:04:61"),
    (MICROS, "2026-01-02 03:04:05."),
    (MICROS, "2026-01-02 03:04:05.1234567"),
    (UTC, "2026-01-02 03:04:05+"),
    (UTC, "2026-01-02 03:04:05+00:"),
    (UTC, "2026-01-02 03:04:05+00:00:00:"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text"), UNFIT, ids=str)
def test_a_text_that_the_type_cannot_hold_is_unfit(kind: pa.DataType, text: str | bytes) -> None:
    assert is_unfit(kind, text)


# --- columns -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_column_without_rows_is_a_column(kind: pa.DataType) -> None:
    assert column(kind).column.to_pylist() == []


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_nulls_and_unsent_values_are_null_and_fit(kind: pa.DataType) -> None:
    found = column(kind, None, ABSENT, None)
    assert found.column.to_pylist() == [None, None, None]
    assert found.unfit.size == 0


def test_an_unfit_value_does_not_touch_its_neighbours() -> None:
    found = column(pa.list_(pa.int32()), "{1,2}", "{3,x}", None, "{{4}}", "{5}", ABSENT)
    assert found.column.to_pylist() == [[1, 2], None, None, None, [5], None]
    assert found.unfit.tolist() == [1, 3]
    binaries = column(pa.binary(), r"\x01", r"\x02zz", None, r"\x03")
    assert binaries.column.to_pylist() == [b"\x01", None, None, b"\x03"]
    assert binaries.unfit.tolist() == [1]


def test_many_rows_with_every_ninth_null_keep_their_order() -> None:
    texts: list[Text] = [None if n % 9 == 0 else str(n) for n in range(1000)]
    found = column(pa.int64(), *texts)
    assert found.column.to_pylist() == [None if n % 9 == 0 else n for n in range(1000)]


def test_a_type_without_a_kernel_is_refused() -> None:
    with pytest.raises(TypeError, match="no kernel"):
        column(pa.month_day_nano_interval(), "1 day")


def test_positions_are_printed_as_the_server_does() -> None:
    positions = np.array([0, 0x16_B374D848, 2**64 - 1, 2**32], np.uint64)
    assert values.format_positions(positions).to_pylist() == ["0/0", "16/B374D848", "FFFFFFFF/FFFFFFFF", "1/0"]


# --- any value ---------------------------------------------------------------------------------------------


@given(st.integers(-(2**63), 2**63 - 1))
@AT_LEISURE
def test_every_integer_survives(number: int) -> None:
    assert value(pa.int64(), str(number)) == number


@given(st.integers(-(10**38) + 1, 10**38 - 1), st.integers(0, 38))
@AT_LEISURE
def test_every_decimal_survives(unscaled: int, scale: int) -> None:
    # The default context rounds to 28 digits; a tuple does not.
    digits = tuple(map(int, str(abs(unscaled))))
    number = Decimal((int(unscaled < 0), digits, -scale))
    assert value(pa.decimal128(38, scale), f"{number:f}") == number


def printed(instant: int) -> str:
    """Return a timestamp as PostgreSQL prints it."""
    text = str(np.datetime64(instant, "us"))
    found = re.fullmatch(r"(-?\d+)-(\d\d-\d\d)T(\d\d:\d\d:\d\d)\.(\d{6})", text)
    assert found is not None, text
    year, rest, time, fraction = int(found[1]), found[2], found[3], found[4].rstrip("0")
    era = " BC" if year <= 0 else ""
    return f"{1 - year if year <= 0 else year:04d}-{rest} {time}" + (f".{fraction}" if fraction else "") + era


@given(st.integers(micros("-4712-01-01"), micros("294246-12-31")))
@AT_LEISURE
def test_every_timestamp_survives(instant: int) -> None:
    assert value(MICROS, printed(instant)) == instant


@given(st.integers(days("-4712-01-01"), days("5874897-12-31")))
@AT_LEISURE
def test_every_date_survives(day: int) -> None:
    text = str(np.datetime64(day, "D"))
    year, _, rest = text.rpartition("-")[0].rpartition("-")[0], "", text[-5:]
    number = int(year)
    written = f"{1 - number:04d}-{rest} BC" if number <= 0 else f"{number:04d}-{rest}"
    assert value(DAYS, written) == day


@given(st.lists(st.none() | st.text(st.characters(exclude_characters="\0", codec="utf-8"))))
@AT_LEISURE
def test_every_array_of_texts_survives(items: list[str | None]) -> None:
    quoted = ["NULL" if item is None else '"' + re.sub(r'(["\\])', r"\\\1", item) + '"' for item in items]
    assert value(pa.list_(pa.string()), "{" + ",".join(quoted) + "}") == items


@given(st.binary())
@AT_LEISURE
def test_every_bytea_survives(data: bytes) -> None:
    assert value(pa.binary(), "\\x" + data.hex()) == data


@given(st.floats())
@AT_LEISURE
def test_every_float_survives(number: float) -> None:
    text = {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}.get(repr(number), repr(number))
    assert repr(value(pa.float64(), text)) == repr(number)


NEAR_NUMBERS = st.text("0123456789-.9", max_size=44) | st.text(max_size=6)


@given(NEAR_NUMBERS)
@AT_LEISURE
def test_a_text_like_an_integer_is_one_or_is_unfit(text: str) -> None:
    found = column(pa.int64(), text)
    if re.fullmatch("-?[0-9]{1,19}", text) and -(2**63) <= int(text) < 2**63:
        assert found.column.to_pylist() == [int(text)]
    else:
        assert found.unfit.tolist() == [0]


@given(NEAR_NUMBERS)
@AT_LEISURE
def test_a_text_like_a_decimal_is_one_or_is_unfit(text: str) -> None:
    found = column(pa.decimal128(12, 3), text)
    parts = re.fullmatch(r"-?([0-9]+)(?:\.([0-9]+))?", text)
    if parts and len(parts[1].lstrip("0")) <= 9 and len(parts[2] or "") <= 3:
        assert found.column.to_pylist() == [Decimal(text)]
    else:
        assert found.unfit.tolist() == [0]


@given(st.sampled_from(KINDS), st.lists(st.none() | st.binary(max_size=40), max_size=8))
@settings(deadline=None, max_examples=300)
def test_any_bytes_are_a_value_or_unfit(kind: pa.DataType, texts: list[bytes | None]) -> None:
    found = column(kind, *texts)
    unfit = set(found.unfit.tolist())
    for place, (text, valid) in enumerate(zip(texts, found.column.is_valid().to_pylist(), strict=True)):
        assert valid == (text is not None and place not in unfit)


@pytest.mark.slow
def test_no_kernel_reads_outside_its_buffer() -> None:
    done = run_guarded("tests.support.fuzzing:values_at_the_edge", "5000")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
