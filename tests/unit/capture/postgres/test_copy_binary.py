"""COPY's binary format: exactly the values of the stream, or an error; never a row that does not exist."""

from __future__ import annotations

import datetime as dt
import struct
import uuid
from decimal import Context, Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.capture.postgres import values
from tailrace.capture.postgres.copy_binary import CTID, KINDS, PRINTED, BinaryRows, binary_kind
from tailrace.capture.postgres.invalid_text import TextHandling
from tailrace.capture.postgres.types import arrow_type
from tailrace.capture.postgres.values import NULL, Cells
from tailrace.errors import SourceError, ValueUnfit
from tailrace.model.schema import TableSchema
from tests.support import pgoutput
from tests.support.changes import table_schema
from tests.support.pgcopy import END, HEAD, copied, numeric, row
from tests.support.pgoutput import INT4, NUMERIC, TEXT, Sent, decode, transaction

BOOL, INT2, INT8, OID, FLOAT4, FLOAT8, DATE, TIMESTAMP, TIMESTAMPTZ = 16, 21, 20, 26, 700, 701, 1082, 1114, 1184
BYTEA, CHAR, BPCHAR, NAME, JSON, JSONB, UUID, INT4_ARRAY = 17, 18, 1042, 19, 114, 3802, 2950, 1007
TEXTS = table_schema({"a": pa.string(), "b": pa.string()}, key=("a",))
WIDE = Context(prec=80)
BEHIND = b"\0\2\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"
"""Bytes after a piece in its buffer, which must not matter."""


def read(
    schema: TableSchema, types: list[tuple[int, int]], *pieces: bytes, text: TextHandling = TextHandling.SOUND
) -> list[pa.RecordBatch]:
    """Return the batches of a copy in pieces, each in a buffer with room after it."""
    kinds = [binary_kind(*of, column.type) for of, column in zip(types, schema.columns, strict=True)]
    laid = [(np.frombuffer(piece + BEHIND, np.uint8).copy(), len(piece)) for piece in pieces]
    batches = list(BinaryRows(schema, kinds, text).batches(laid))
    for batch in batches:
        assert batch.schema.equals(pa.schema(schema.row_fields()))
        batch.validate(full=True)
    return batches


def read_texts(*pieces: bytes) -> list[dict[str, Any]]:
    return [one for batch in read(TEXTS, [(TEXT, -1)] * 2, *pieces) for one in batch.to_pylist()]


def column_of(number: int, modifier: int, *cells: bytes | None) -> pa.Array:
    """Return a column of these values; every other row of it is null."""
    kind = arrow_type(number, modifier)
    schema = table_schema({"v": kind}, key=("v",))
    (batch,) = read(schema, [(number, modifier)], copied(*(row(one) for cell in cells for one in (cell, None))))
    return batch.column(0)


def printed(number: int, modifier: int, *texts: str | None) -> pa.Array:
    """Return the values that the stream's kernels read from the texts."""
    raw = [text.encode() if text is not None else None for text in texts]
    size = np.array([NULL if one is None else len(one) for one in raw], np.int64)
    at = np.cumsum(np.maximum(size, 0)) - np.maximum(size, 0)
    b = np.frombuffer(b"".join(one or b"" for one in raw), np.uint8).copy()
    found = values.convert_cells(Cells(b, at, size), arrow_type(number, modifier))
    assert not found.unfit.size
    return found.column


def bits(column: pa.Array) -> list[Any]:
    """Return the values as stored bits: NaNs are not equal to each other, and Python has few years."""
    sizes = {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}
    whole = sizes.get(column.type.bit_width) if pa.types.is_primitive(column.type) else None
    return list((column.view(whole) if whole else column).to_pylist())


# --- every kernel ------------------------------------------------------------------------------------------

_TO_1970 = 946_684_800_000_000
_INSTANTS = [
    (0, "2000-01-01 00:00:00"), (-1, "1999-12-31 23:59:59.999999"), (-_TO_1970, "1970-01-01 00:00:00"),
    ((1 << 63) - 1 - _TO_1970, "294247-01-10 04:00:54.775807"), (-211_813_488_000_000_000, "4714-11-24 00:00:00 BC"),
    ((1 << 63) - 1, "infinity"), (-(1 << 63), "-infinity"), (820_638_245_600_000, "2026-01-02 03:04:05.6"),
]  # fmt: skip


def in_utc(text: str) -> str:
    """Return the same moment as a type with a time zone prints it."""
    return text if "infinity" in text else text.removesuffix(" BC") + "+00" + " BC" * text.endswith("BC")


SENT: list[tuple[int, int, list[tuple[bytes, str]]]] = [
    (BOOL, -1, [(b"\1", "t"), (b"\0", "f")]),
    (INT2, -1, [(struct.pack(">h", n), str(n)) for n in (-32768, 32767, 0, -1)]),
    (INT4, -1, [(struct.pack(">i", n), str(n)) for n in (-(1 << 31), (1 << 31) - 1, 0, -1)]),
    (INT8, -1, [(struct.pack(">q", n), str(n)) for n in (-(1 << 63), (1 << 63) - 1, 0, -1)]),
    (OID, -1, [(struct.pack(">I", n), str(n)) for n in (0, 1 << 31, (1 << 32) - 1)]),
    (FLOAT4, -1, [
        *((struct.pack(">f", float(text)), text) for text in (
            "3.4028235e+38", "1e-45", "1.1754944e-38", "0.1", "-0", "NaN", "Infinity", "-Infinity")),
        (b"\xff\xc0\0\1", "NaN"), (b"\x7f\x80\0\1", "NaN"),
    ]),
    (FLOAT8, -1, [
        *((struct.pack(">d", float(text)), text) for text in (
            "1.7976931348623157e+308", "-5e-324", "0.30000000000000004", "-0", "NaN", "Infinity", "-Infinity")),
        (b"\xff\xf8" + bytes(6), "NaN"), (b"\x7f\xf0" + bytes(5) + b"\1", "NaN"),
    ]),
    (DATE, -1, [(struct.pack(">i", days), text) for days, text in (
        (0, "2000-01-01"), (-10957, "1970-01-01"), (-2451545, "4714-11-24 BC"), (2145031948, "5874897-12-31"),
        ((1 << 31) - 1, "infinity"), (-(1 << 31), "-infinity"))]),
    (TIMESTAMP, -1, [(struct.pack(">q", micros), text) for micros, text in _INSTANTS]),
    (TIMESTAMPTZ, -1, [(struct.pack(">q", micros), in_utc(text)) for micros, text in _INSTANTS]),
    *((NUMERIC, pgoutput.numeric(*of), [(numeric(text), text) for text in texts]) for of, texts in {
        (10, 2): ("99999999.99", "-99999999.99", "0.00", "-0.01", "1.00", "10000.00", "0.10", "12345.60"),
        (38, 0): ("9" * 38, "-" + "9" * 38, "18446744073709551616", "1" + "0" * 37, "-1", "0", "10000"),
        (38, 10): ("9" * 28 + "." + "9" * 10, "-0.0000000001", "12.0000000000"),
        (38, 38): ("0." + "9" * 38, "-0." + "0" * 37 + "1"),
        (3, -2): ("99900", "-99900", "0"),
        (3, 5): ("0.00999", "-0.00001"),
        (1, 0): ("9", "-9"),
        (20, 1): ("1844674407370955161.5", "-1844674407370955161.6"),
    }.items()),
    *((of, -1, [(text.encode(), text) for text in ("", "a", "né 🦆", "x" * 15, "y" * 16, "z" * 17, "long " * 100)])
      for of in (TEXT, BPCHAR, 1043, NAME, JSON)),
    (BYTEA, -1, [(raw, "\\x" + raw.hex()) for raw in (b"", b"\0", bytes(range(256)))]),
    (JSONB, -1, [(b"\1" + text.encode(), text) for text in ("{}", '{"é": [1, null]}', '"' + "x" * 99 + '"')]),
    (UUID, -1, [(uuid.UUID(text).bytes, text) for text in (
        "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "00000000-0000-0000-0000-000000000000")]),
]  # fmt: skip


@pytest.mark.parametrize(("number", "modifier", "cases"), SENT, ids=lambda one: one if isinstance(one, int) else "")
def test_a_value_equals_its_text(number: int, modifier: int, cases: list[tuple[bytes, str]]) -> None:
    assert binary_kind(number, modifier, arrow_type(number, modifier)) != PRINTED
    found = column_of(number, modifier, *(sent for sent, _ in cases))
    wanted = printed(number, modifier, *(one for _, text in cases for one in (text, None)))
    assert bits(found) == bits(wanted)
    assert found.null_count == len(cases)


def test_every_kernel_is_tried() -> None:
    assert {number for number, _, _ in SENT} == set(KINDS)


@pytest.mark.parametrize(("number", "modifier", "sent"), [
    (NUMERIC, pgoutput.numeric(10, 2), numeric("NaN")),
    (NUMERIC, pgoutput.numeric(10, 2), numeric("Infinity")),
    (NUMERIC, pgoutput.numeric(10, 2), numeric("-Infinity")),
    (NUMERIC, pgoutput.numeric(10, 2), numeric("100000000.00")),
    (NUMERIC, pgoutput.numeric(10, 2), numeric("-100000000")),
    (NUMERIC, pgoutput.numeric(10, 2), numeric("1.005")),
    (NUMERIC, pgoutput.numeric(38, 0), numeric("1" + "0" * 38)),
    (NUMERIC, pgoutput.numeric(38, 0), numeric("9" * 200)),
    (NUMERIC, pgoutput.numeric(38, 0), struct.pack(">hhHhh", 1, 32767, 0, 0, 1)),
    (NUMERIC, pgoutput.numeric(10, 2), struct.pack(">hhHhh", 1, -1, 0, 2, 1234)),
    (NUMERIC, pgoutput.numeric(10, 2), struct.pack(">hhHhh", 1, -32768, 0, 2, 1)),
    (TIMESTAMP, -1, struct.pack(">q", (1 << 63) - _TO_1970)),
    (TIMESTAMPTZ, -1, struct.pack(">q", (1 << 63) - 2)),
    (DATE, -1, struct.pack(">i", (1 << 31) - 2)),
])  # fmt: skip
def test_an_unfit_value_stops_the_load_and_is_not_shown(number: int, modifier: int, sent: bytes) -> None:
    schema = table_schema({"id": pa.int32(), "v": arrow_type(number, modifier)})
    with pytest.raises(ValueUnfit) as caught:
        read(schema, [(INT4, -1), (number, modifier)], copied(row(b"\0\0\0\1", None), row(b"\0\0\0\2", sent)))
    assert caught.value.fields["column"] == "v"
    assert set(caught.value.fields) == {"table", "column", "type"}


def test_the_location_of_the_first_unfit_row_is_reported() -> None:
    price = arrow_type(NUMERIC, pgoutput.numeric(4, 2))
    schema = table_schema({"price": price}, key=("price",))
    placed = TableSchema(**{**vars(schema), "columns": (CTID, *schema.columns)})
    rows = [row(f"(0,{n})".encode(), numeric(text)) for n, text in enumerate(("1.00", "NaN", "2.00", "NaN"), 1)]
    with pytest.raises(ValueUnfit) as caught:
        read(placed, [(27, -1), (NUMERIC, pgoutput.numeric(4, 2))], copied(*rows))
    assert caught.value.fields["ctid"] == "(0,2)"


@given(st.integers(1, 38), st.data())
@settings(deadline=None)
def test_every_number_survives(precision: int, data: st.DataObject) -> None:
    scale = data.draw(st.integers(0, precision))
    whole = data.draw(st.lists(st.integers(-(10**precision) + 1, 10**precision - 1), min_size=1, max_size=8))
    texts = [f"{Decimal(number).scaleb(-scale, context=WIDE):f}" for number in whole]
    found = column_of(NUMERIC, pgoutput.numeric(precision, scale), *map(numeric, texts))
    assert [int(one.scaleb(scale, context=WIDE)) for one in found.to_pylist()[::2]] == whole


@given(st.lists(st.datetimes(), max_size=8))
@settings(deadline=None)
def test_every_moment_survives(moments: list[dt.datetime]) -> None:
    micros = [(moment - dt.datetime(2000, 1, 1)) // dt.timedelta(microseconds=1) for moment in moments]
    found = column_of(TIMESTAMP, -1, bytes(8), *(struct.pack(">q", one) for one in micros))
    assert found.to_pylist()[2::2] == moments


@given(st.lists(st.floats(allow_nan=False), max_size=8))
@settings(deadline=None)
def test_every_float_survives(numbers: list[float]) -> None:
    found = column_of(FLOAT8, -1, bytes(8), *(struct.pack(">d", number) for number in numbers))
    assert found.to_pylist()[2::2] == numbers


# --- rows --------------------------------------------------------------------------------------------------


def test_null_is_not_the_empty_text() -> None:
    assert read_texts(copied(row(None, b""), row(b"", None), row(None, None))) == [
        {"a": None, "b": ""},
        {"a": "", "b": None},
        {"a": None, "b": None},
    ]


def test_several_pieces_are_several_batches_in_order() -> None:
    rows = [row(str(n).encode(), None) for n in range(3)]
    assert [one["a"] for one in read_texts(HEAD + rows[0] + rows[1], rows[2], END)] == ["0", "1", "2"]
    assert [one["a"] for one in read_texts(HEAD, rows[0], rows[1] + rows[2] + END)] == ["0", "1", "2"]


def test_a_table_without_rows_gives_no_batch() -> None:
    assert read(TEXTS, [(TEXT, -1)] * 2, copied()) == []


def test_a_table_without_columns_still_has_rows() -> None:
    (batch,) = read(table_schema({}, key=()), [], copied(row(), row(), row()))
    assert batch.num_rows == 3


def test_unknown_content_of_the_head_is_skipped() -> None:
    assert read_texts(HEAD[:-4] + b"\0\0\0\3abc" + row(b"x", None) + END) == [{"a": "x", "b": None}]


BROKEN = {
    "nothing": b"", "no head": row(b"a", b"b") + END, "half a head": HEAD[:-1],
    "another head": HEAD[:3] + b"x" + HEAD[4:] + END,
    "flags": HEAD[:-8] + b"\0\1\0\0" + HEAD[-4:] + END, "more head than bytes": HEAD[:-4] + b"\0\0\0\3" + END,
    "no end": HEAD + row(b"a", b"b"), "half an end": HEAD + row(b"a", b"b") + b"\xff", "two ends": copied() + END,
    "rows behind the end": copied() + row(b"a", b"b"), "too few fields": copied(row(b"a")),
    "too many fields": copied(row(b"a", b"b", b"c")), "a field that is cut": HEAD + row(b"a", b"bcd")[:-1],
    "a length that is cut": HEAD + row(b"a", b"bcd")[:-5],
    "a length below zero": HEAD + b"\0\2\xff\xff\xff\xfe" + bytes(64),
    "a length beyond the end": HEAD + b"\0\2\x7f\xff\xff\xff" + bytes(64),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_invalid_copy_data_is_refused(what: str) -> None:
    with pytest.raises(SourceError, match="cannot be read"):
        read_texts(BROKEN[what])


def test_nothing_may_follow_the_end_in_another_piece() -> None:
    with pytest.raises(SourceError, match="cannot be read"):
        read_texts(copied(row(b"a", b"b")), row(b"c", b"d") + END)


@pytest.mark.parametrize(("number", "modifier", "sent"), [
    *((number, -1, bytes(size)) for number, size in (
        (BOOL, 0), (BOOL, 2), (INT2, 1), (INT4, 5), (INT8, 7), (OID, 3), (FLOAT4, 8), (FLOAT8, 4), (DATE, 8),
        (TIMESTAMP, 9), (TIMESTAMPTZ, 0), (UUID, 15),
    )),
    (JSONB, -1, b""), (JSONB, -1, b"\2{}"), (JSONB, -1, b"{}"),
    (NUMERIC, pgoutput.numeric(9, 2), b""), (NUMERIC, pgoutput.numeric(9, 2), bytes(7)),
    (NUMERIC, pgoutput.numeric(9, 2), numeric("1.25")[:-1]), (NUMERIC, pgoutput.numeric(9, 2), numeric("1.25") + b"\0"),
    (NUMERIC, pgoutput.numeric(9, 2), struct.pack(">HhHh", 65535, 0, 0, 2)),
    (NUMERIC, pgoutput.numeric(9, 2), struct.pack(">hhHhh", 1, 0, 0, 2, 10_000)),
    (NUMERIC, pgoutput.numeric(9, 2), struct.pack(">hhHhh", 1, 0, 0, 2, -1)),
])  # fmt: skip
def test_a_value_that_no_server_sends_is_refused(number: int, modifier: int, sent: bytes) -> None:
    with pytest.raises(SourceError, match="cannot be read"):
        column_of(number, modifier, sent)


def test_a_type_without_a_kernel_is_sent_as_its_text() -> None:
    schema = table_schema({"a": pa.list_(pa.int32()), "b": pa.string(), "c": pa.string()}, key=("b",))
    types = [(INT4_ARRAY, -1), (CHAR, -1), (NUMERIC, -1)]
    assert [binary_kind(*of, column.type) for of, column in zip(types, schema.columns, strict=True)] == [PRINTED] * 3
    (batch,) = read(schema, types, copied(row(b"{1,NULL}", b"\\377", b"NaN"), row(None, None, None)))
    assert batch.to_pylist() == [{"a": [1, None], "b": "\\377", "c": "NaN"}, {"a": None, "b": None, "c": None}]


def test_a_type_other_than_described_is_sent_as_its_text() -> None:
    assert binary_kind(INT8, -1, pa.int32()) == PRINTED
    assert binary_kind(NUMERIC, pgoutput.numeric(10, 2), pa.decimal128(10, 3)) == PRINTED
    assert binary_kind(TIMESTAMP, -1, pa.timestamp("us", "UTC")) == PRINTED


@pytest.mark.parametrize("number", [TEXT, CHAR])
def test_bytes_that_are_not_text_are_refused_or_replaced(number: int) -> None:
    schema = table_schema({"a": pa.string()}, key=("a",))
    sent = copied(row(b"good"), row(b"caf\xe9"), row(None))
    with pytest.raises(ValueUnfit, match="does not fit"):
        read(schema, [(number, -1)], sent, text=TextHandling.REFUSED)
    (batch,) = read(schema, [(number, -1)], sent, text=TextHandling.REPLACED)
    assert batch.column(0).to_pylist() == ["good", "caf�", None]


def test_a_column_named_like_a_metadata_column_keeps_its_name() -> None:
    schema = table_schema({"_op": pa.string(), "_seq": pa.int32()}, key=("_seq",))
    (batch,) = read(schema, [(TEXT, -1), (INT4, -1)], copied(row(b"x", b"\0\0\0\7")))
    assert batch.to_pylist() == [{"_op": "x", "_seq": 7}]


PLAIN = st.none() | st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=40)


def raw(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


@given(st.lists(st.tuples(PLAIN, PLAIN), max_size=10))
@settings(deadline=None)
def test_every_text_survives(rows: list[tuple[str | None, str | None]]) -> None:
    found = read_texts(copied(*(row(*map(raw, one)) for one in rows)))
    assert [(one["a"], one["b"]) for one in found] == rows


@given(PLAIN)
@settings(deadline=None)
def test_snapshot_and_stream_read_the_same_text_as_the_same_value(text: str | None) -> None:
    table = Sent(oid=1, name="things", columns=(("id", INT4, -1), ("b", TEXT, -1)))
    (batch,) = decode(transaction(table.relation(), table.insert(1, text))).batches
    streamed = {name: batch.data.column(name)[0].as_py() for name in ("id", "b")}
    (copy,) = read(batch.schema, [(INT4, -1), (TEXT, -1)], copied(row(b"\0\0\0\1", raw(text))))
    assert copy.to_pylist() == [streamed]
