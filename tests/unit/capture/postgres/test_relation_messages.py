"""A relation message contains table, columns and key; anything else is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.capture.postgres.catalogue import parse_relation
from tailrace.errors import ProtocolViolation
from tailrace.model.schema import TableId
from tests.support.pgoutput import INT4, NUMERIC, TEXT, Sent, numeric

ORDERS = Sent(
    oid=0xFFFFFFFE,
    schema="Shop",
    name="or ders",
    key=("id", "Where"),
    columns=(("id", INT4, -1), ("Where", TEXT, -1), ("sum", NUMERIC, numeric(10, 2)), ("naïve", TEXT, -1)),
)


def test_everything_in_the_message_is_read() -> None:
    oid, table, replica, columns, flagged = parse_relation(ORDERS.relation())
    assert (oid, table, replica) == (0xFFFFFFFE, TableId("Shop", "or ders"), "d")
    assert columns == list(ORDERS.columns)
    assert flagged == ("id", "Where")


def test_full_identity_flags_no_column() -> None:
    whole = Sent(oid=1, name="t", replica="f", columns=ORDERS.columns)
    _, _, replica, _, flagged = parse_relation(whole.relation())
    assert (replica, flagged) == ("f", ())


def test_an_empty_schema_name_means_pg_catalog() -> None:
    assert parse_relation(Sent(oid=1, schema="", name="t", columns=()).relation())[1] == TableId("pg_catalog", "t")


def test_a_table_without_columns_has_none() -> None:
    assert parse_relation(Sent(oid=1, name="t", columns=()).relation())[3] == []


def test_names_with_dots_stay_in_their_parts() -> None:
    one = parse_relation(Sent(oid=1, schema="a.b", name="c", columns=()).relation())[1]
    other = parse_relation(Sent(oid=1, schema="a", name="b.c", columns=()).relation())[1]
    assert one != other
    assert (one.schema, other.name) == ("a.b", "b.c")


def test_the_longest_names_are_whole() -> None:
    name = "é" * 31
    assert parse_relation(Sent(oid=1, name=name, columns=((name, TEXT, -1),)).relation())[3][0][0] == name


def test_a_message_cut_anywhere_is_refused() -> None:
    message = ORDERS.relation()
    for size in range(1, len(message)):
        with pytest.raises(ProtocolViolation):
            parse_relation(message[:size])


def test_a_name_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(ProtocolViolation):
        parse_relation(ORDERS.relation().replace("é".encode()[:1], b"\xff"))


@given(st.binary(max_size=80).map(lambda rest: b"R" + rest))
@settings(deadline=None)
def test_any_bytes_are_a_relation_or_a_refusal(message: bytes) -> None:
    try:
        _, _, _, columns, flagged = parse_relation(message)
    except ProtocolViolation:
        return
    assert set(flagged) <= {name for name, _, _ in columns}
