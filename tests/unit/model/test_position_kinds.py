"""Positions parse what servers show, refuse what they never show, and order as the server does."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.errors import ConfigError
from tailrace.model.position import Lsn
from tailrace.model.position_kinds import (
    TEXT_CHARACTERS_MAX,
    BinlogPosition,
    CustomPosition,
    MariadbGtidSet,
    MysqlGtidSet,
    Position,
    PositionType,
    SqlServerLsn,
    bytes_between,
    covers,
    parse_position,
    position_type_of,
    reaches,
)

A, B = "3e11fa47-71ca-11e1-9e33-c80aa9429562", "4e11fa47-71ca-11e1-9e33-c80aa9429562"


@pytest.mark.parametrize(
    ("kind", "text", "shown"),
    [
        ("postgresql-lsn", "16/b374d848", "16/B374D848"),
        ("mysql-binlog", "mysql-bin.000042:1547", None),
        ("mysql-binlog", "a.b-c.1000000:4", None),
        ("mysql-gtid", f"{A}:1-77", None),
        ("mysql-gtid", f"{A.upper()}:5:1-3:4", f"{A}:1-5"),
        ("mysql-gtid", f"{B}:1,\n{A}:2-3", f"{A}:2-3,{B}:1"),
        ("mysql-gtid", f"{A}:1-2:red:7:BLUE:3-4,{A}:9", f"{A}:1-2:9:blue:3-4:red:7"),
        ("mariadb-gtid", "7-2-5, 0-1-100", "0-1-100,7-2-5"),
        ("sqlserver-lsn", "0x0000002D000000480003", "0000002d:00000048:0003"),
        ("sqlserver-lsn", "0000002D:00000048:0003", "0000002d:00000048:0003"),
        ("custom", "offset 7, shard é", None),
    ],
)
def test_a_position_is_parsed_as_its_server_shows_it(kind: str, text: str, shown: str | None) -> None:
    found = parse_position(PositionType(kind), text)
    assert str(found) == (shown or text)
    assert parse_position(PositionType(kind), str(found)) == found
    assert position_type_of(found).value == kind
    assert pickle.loads(pickle.dumps(found)) == found
    assert hash(found) == hash(parse_position(PositionType(kind), text))


NONSENSE = {
    "postgresql-lsn": ["", "16", "16/", "/1", "16/B374D8480", "g/1", "16/1 ", "-1/1", "16/1\n"],
    "mysql-binlog": [
        "", "mysql-bin.000042", "mysql-bin.000042:", "mysql-bin.000042:3", "mysql-bin.000042:-4", "mysql-bin:5",
        "mysql-bin.42:5", "mysql-bin.000000:4", "../mysql-bin.000001:4", "a b.000001:4", "mysql-bin.000001:4\n",
        "mysql-bin.000001:9999999999999999999", "mysql-bin.000001:٤",
    ],
    "mysql-gtid": [
        "", " ", ",", A, f"{A}:", f"{A}:0", f"{A}:5-2", f"{A}:1-", f"{A}:-1", f"{A}:1,", f"{A[:-1]}:1", f"{A}:tag",
        f"{A}:1:tag", f"{A}:a:b:1", f"{A}:{'t' * 33}:1", f"{A}:1--2", f"{A}:9223372036854775807", f"{A};1", "0-1-100",
    ],
    "mariadb-gtid": [
        "", "0-1", "0-1-2-3", "0-1-0", "0-0-1", "4294967296-1-1", "0-4294967296-1", "0-1-18446744073709551616",
        "0-1-1,", "0-1-1,0-2-2", "a-1-1", "0--1-1", f"{A}:1-5",
    ],
    "sqlserver-lsn": [
        "", "0x", "0x0000002D00000048000", "0x0000002D0000004800033", "0000002D:00000048", "2D:48:3",
        "0x00000000000000000000", "0000002D:00000048:000g", "0000002D000000480003",
    ],
    "custom": ["", "a\nb", "a\0", "\x7f"],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in NONSENSE.items() for text in texts])
def test_an_invalid_text_is_refused_with_an_example(kind: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_position(PositionType(kind), text)
    assert caught.value.hint


@pytest.mark.parametrize("kind", list(PositionType))
@settings(max_examples=50)
@given(text=st.text(max_size=60))
def test_any_text_is_read_whole_or_refused(kind: PositionType, text: str) -> None:
    try:
        found = parse_position(kind, text)
    except ConfigError:
        return
    assert parse_position(kind, str(found)) == found


def test_an_endless_text_is_refused_before_it_is_looked_at() -> None:
    with pytest.raises(ConfigError, match="too long"):
        parse_position(PositionType.MYSQL_GTID, "x" * (TEXT_CHARACTERS_MAX + 1))


@pytest.mark.parametrize("given", [None, 3, b"0/1", ["0/1"]], ids=str)
@pytest.mark.parametrize(
    "parse",
    [Lsn.parse, BinlogPosition.parse, MysqlGtidSet.parse, MariadbGtidSet.parse, SqlServerLsn.parse, CustomPosition],
    ids=str,
)
def test_what_is_not_text_is_refused_with_an_example(parse: Callable[[Any], object], given: Any) -> None:
    with pytest.raises(ConfigError, match=f"found={type(given).__name__}") as raised:
        parse(given)
    assert raised.value.hint.startswith("Give a text. It ")


def test_a_refused_text_is_shown_on_one_line() -> None:
    with pytest.raises(ConfigError) as raised:
        CustomPosition("a\nb")
    assert r"'a\nb'" in str(raised.value)


@pytest.mark.parametrize(
    "make",
    [
        (Lsn, -1),
        (Lsn, "7"),
        (Lsn, None),
        (SqlServerLsn, "a", 0, 0),
        (SqlServerLsn, 1, 0, 1 << 16),
        (BinlogPosition, "mysql-bin.000001", "7"),
    ],
    ids=str,
)
def test_invalid_numbers_are_refused_with_a_hint(make: tuple[Any, ...]) -> None:
    kind, *given = make
    with pytest.raises(ConfigError) as raised:
        kind(*given)
    assert raised.value.hint


def test_values_that_no_server_has_are_refused() -> None:
    for make in (
        lambda: BinlogPosition("mysql-bin.000001", 3),
        lambda: BinlogPosition("a/b.000001", 4),
        lambda: MysqlGtidSet({}),
        lambda: MysqlGtidSet({(A, ""): ((2, 1),)}),
        lambda: MysqlGtidSet({("x", ""): ((1, 1),)}),
        lambda: MysqlGtidSet({(A, "A"): ((1, 1),)}),
        lambda: MysqlGtidSet({(A, ""): ()}),
        lambda: MariadbGtidSet({}),
        lambda: MariadbGtidSet({0: (1, 0)}),
        lambda: SqlServerLsn(0, 0, 0),
        lambda: SqlServerLsn(1 << 32, 0, 0),
        lambda: CustomPosition("x" * (TEXT_CHARACTERS_MAX + 1)),
    ):
        with pytest.raises(ConfigError):
            make()


# --- order -------------------------------------------------------------------------------------------------


def gtids(text: str) -> MysqlGtidSet:
    return MysqlGtidSet.parse(text)


def maria(text: str) -> MariadbGtidSet:
    return MariadbGtidSet.parse(text)


FOLLOWS: list[tuple[Position, Position]] = [
    (Lsn.parse("0/10"), Lsn.parse("0/9")),
    (BinlogPosition("b.1000000", 4), BinlogPosition("b.999999", 900)),
    (BinlogPosition("b.000001", 10), BinlogPosition("b.000001", 9)),
    (gtids(f"{A}:1-10"), gtids(f"{A}:1-9")),
    (gtids(f"{A}:1-10,{B}:1"), gtids(f"{A}:3:5-7")),
    (maria("0-2-10"), maria("0-1-9")),
    (maria("0-1-9,1-1-1"), maria("0-1-9")),
    (SqlServerLsn(2, 0, 1), SqlServerLsn(1, 9, 9)),
    (CustomPosition("10"), CustomPosition("9")),
    (CustomPosition("0010"), CustomPosition("9")),
]
NEITHER: list[tuple[Position, Position]] = [
    (BinlogPosition("one.000001", 4), BinlogPosition("two.000002", 4)),
    (gtids(f"{A}:1-5"), gtids(f"{A}:3-9")),
    (gtids(f"{A}:1-5"), gtids(f"{B}:1-5")),
    (gtids(f"{A}:1-5"), gtids(f"{A}:tag:1-5")),
    (maria("0-1-9"), maria("1-1-9")),
    (maria("0-1-9"), maria("0-2-9")),
    (Lsn(1), CustomPosition("1")),
    (BinlogPosition("b.000001", 4), SqlServerLsn(1, 1, 1)),
]


@pytest.mark.parametrize(("new", "old"), FOLLOWS, ids=str)
def test_a_later_position_follows_an_earlier_one_and_not_the_other_way(new: Position, old: Position) -> None:
    assert reaches(new, old)
    assert not reaches(old, new)
    assert reaches(new, new)


@pytest.mark.parametrize(("one", "other"), NEITHER, ids=str)
def test_positions_of_two_histories_follow_in_neither_way(one: Position, other: Position) -> None:
    assert not reaches(one, other)
    assert not reaches(other, one)


def test_custom_positions_that_are_not_numbers_have_no_order() -> None:
    assert reaches(CustomPosition("b"), CustomPosition("a"))
    assert reaches(CustomPosition("a"), CustomPosition("b"))
    assert reaches(CustomPosition("9" * 5000), CustomPosition("8" * 5000)), "and numbers of any length do"
    assert not reaches(CustomPosition("8" * 5000), CustomPosition("9" * 5000))


@pytest.mark.parametrize(("new", "old"), FOLLOWS, ids=str)
def test_a_later_position_covers_an_earlier_one(new: Position, old: Position) -> None:
    assert covers(new, old)
    assert not covers(old, new)
    assert covers(new, new)


@pytest.mark.parametrize(("one", "other"), [*NEITHER, (CustomPosition("page a"), CustomPosition("page b"))], ids=str)
def test_without_an_order_only_equal_positions_cover_each_other(one: Position, other: Position) -> None:
    assert not covers(one, other)
    assert not covers(other, one)
    assert covers(one, one)


def test_bytes_between_positions_are_known_of_postgresql_only() -> None:
    assert bytes_between(Lsn(5), Lsn(12)) == 7
    assert bytes_between(CustomPosition("5"), CustomPosition("12")) == 0


numbers = st.lists(st.tuples(st.sampled_from([A, B]), st.integers(1, 30)), min_size=1, max_size=20)


@given(one=numbers, other=numbers)
def test_sets_of_gtids_are_sets(one: list[tuple[str, int]], other: list[tuple[str, int]]) -> None:
    mine, theirs = (gtids(",".join(f"{uuid}:{n}" for uuid, n in items)) for items in (one, other))
    assert reaches(mine, theirs) == (set(one) >= set(other))
    assert (mine == theirs) == (set(one) == set(other))
