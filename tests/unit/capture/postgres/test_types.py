"""The Arrow type of each PostgreSQL type; any other type is text, and the documentation agrees."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tailrace.capture.postgres.types import RULES, arrow_type, is_known
from tests.support.pgoutput import NUMERIC, numeric
from tools import type_page

TEXT, UTC, NAIVE = pa.string(), pa.timestamp("us", "UTC"), pa.timestamp("us")


@pytest.mark.parametrize(
    ("oid", "expected"),
    [
        (16, pa.bool_()), (17, pa.binary()), (18, TEXT), (19, TEXT), (20, pa.int64()), (21, pa.int16()),
        (23, pa.int32()), (25, TEXT), (26, pa.int64()), (700, pa.float32()), (701, pa.float64()), (1042, TEXT),
        (1043, TEXT), (1082, pa.date32()), (1114, NAIVE), (1184, UTC),
    ],
)  # fmt: skip
def test_a_known_type_is_typed(oid: int, expected: pa.DataType) -> None:
    assert arrow_type(oid, -1) == expected


@pytest.mark.parametrize(
    ("array", "element"),
    [
        (1000, 16), (1001, 17), (1002, 18), (1003, 19), (1005, 21), (1007, 23), (1009, 25), (1014, 1042),
        (1015, 1043), (1016, 20), (1021, 700), (1022, 701), (1028, 26), (1115, 1114), (1182, 1082), (1185, 1184),
    ],
)  # fmt: skip
def test_an_array_of_a_known_type_is_a_list_of_it(array: int, element: int) -> None:
    assert arrow_type(array, -1) == pa.list_(arrow_type(element, -1))


@pytest.mark.parametrize(
    ("what", "oid"),
    [
        ("json", 114), ("jsonb", 3802), ("uuid", 2950), ("uuid[]", 2951), ("time", 1083), ("timetz", 1266),
        ("interval", 1186), ("money", 790), ("inet", 869), ("xml", 142), ("point", 600), ("int4range", 3904),
        ("regclass", 2205), ("xid", 28), ("pg_lsn", 3220),
        ("bit", 1560), ("tsvector", 3614), ("an enum of the user's", 16999), ("nothing", 0),
    ],
)  # fmt: skip
def test_every_other_type_is_its_text(what: str, oid: int) -> None:
    assert arrow_type(oid, -1) == TEXT


@pytest.mark.parametrize(
    ("precision", "scale", "expected"),
    [
        (1, 0, pa.decimal128(1, 0)),
        (10, 2, pa.decimal128(10, 2)),
        (38, 0, pa.decimal128(38, 0)),
        (38, 38, pa.decimal128(38, 38)),
        (39, 0, TEXT),
        (1000, 2, TEXT),
        (3, 5, pa.decimal128(5, 5)),  # 0.00001 to 0.00999
        (2, 39, TEXT),
        (3, -2, pa.decimal128(5, 0)),  # hundreds, up to 99900
        (38, -1, TEXT),
        (36, -2, pa.decimal128(38, 0)),
        (5, -1000, TEXT),
        (5, 1000, TEXT),
    ],
)
def test_a_numeric_holds_what_its_modifier_allows(precision: int, scale: int, expected: pa.DataType) -> None:
    assert arrow_type(NUMERIC, numeric(precision, scale)) == expected


def test_a_numeric_without_a_limit_is_its_text() -> None:
    assert arrow_type(NUMERIC, -1) == TEXT


def test_an_array_of_numerics_follows_its_element() -> None:
    assert arrow_type(1231, numeric(10, 2)) == pa.list_(pa.decimal128(10, 2))
    assert arrow_type(1231, -1) == TEXT
    assert arrow_type(1231, numeric(39, 0)) == TEXT


def test_a_length_limit_does_not_matter() -> None:
    assert arrow_type(1043, 24) == TEXT
    assert arrow_type(1015, 24) == pa.list_(TEXT)
    assert arrow_type(1184, 3) == UTC


def test_no_number_is_in_two_rules() -> None:
    numbers = [n for rule in RULES for pair in rule.types.values() for n in pair if n]
    assert len(numbers) == len(set(numbers))


@pytest.mark.parametrize(
    ("what", "oid", "kind", "known"),
    [
        ("an integer", 23, "b", True),
        ("an array of boxes", 1020, "b", True),
        ("an extension's type", 16999, "b", False),
        ("an enum", 16999, "e", True),
        ("a composite type", 16999, "c", True),
        ("an array of a domain", 16999, "d", True),
        ("a range", 16999, "r", True),
        ("a multirange", 16999, "m", True),
        ("nothing", 0, "b", False),
    ],
)
def test_a_type_of_an_extension_is_unknown(what: str, oid: int, kind: str, known: bool) -> None:
    assert is_known(oid, kind) is known


def test_the_page_on_types_is_generated_from_the_rules() -> None:
    text = type_page.PAGE.read_text()
    assert type_page.page(text) == text, "run `.venv/bin/python tools/type_page.py`"


def test_the_page_names_every_type() -> None:
    text = type_page.PAGE.read_text()
    assert [name for rule in RULES for name in rule.types if f"`{name}`" not in text] == []
