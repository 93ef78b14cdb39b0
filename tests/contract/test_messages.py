"""Messages that applications write with `pg_logical_emit_message`, read from a real server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tailrace.capture.postgres.source import PostgresCapture
from tailrace.model.batch import Window
from tailrace.model.system_streams import MESSAGE_STREAM
from tests.support.benches import PostgresBench, Streams, take


@pytest.fixture
def listening(postgres: PostgresBench) -> Iterator[Streams]:
    """Streams that request messages, except those whose prefix begins with `not`."""
    settings = replace(postgres.capture.settings, messages=lambda prefix: not prefix.startswith("not"))
    opened = Streams(PostgresCapture(settings))
    yield opened
    opened.close_all()


def rows(windows: list[Window]) -> list[dict[str, Any]]:
    return [
        row | {"table": batch.schema.table.name}
        for window in windows
        for batch in window.batches
        for row in batch.data.to_pylist()
    ]


def messages(windows: list[Window]) -> list[tuple[str, bytes, bool]]:
    return [
        (row["prefix"], row["content"], row["transactional"])
        for row in rows(windows)
        if row["table"] == MESSAGE_STREAM.table.name
    ]


def emit(postgres: PostgresBench, *, transactional: bool, prefix: str, content: str = "hello") -> None:
    postgres.execute(f"select pg_logical_emit_message({transactional}, '{prefix}', '{content}')")


def test_a_message_arrives_inside_and_outside_of_a_transaction(postgres: PostgresBench, listening: Streams) -> None:
    emit(postgres, transactional=True, prefix="é1")
    emit(postgres, transactional=False, prefix="é2", content="")
    postgres.execute("select pg_logical_emit_message(true, 'bytes', '\\x00ff'::bytea)")
    windows = take(listening.open(postgres.begin), postgres.begin, 3)
    assert messages(windows) == [("é1", b"hello", True), ("é2", b"", False), ("bytes", b"\x00\xff", True)]
    inside, outside, _ = rows(windows)
    assert inside["_tx"] > 0
    assert outside["_tx"] == 0
    assert outside["_committed_at"] >= inside["_committed_at"]


def test_a_message_has_its_position_among_the_rows_of_its_transaction(
    postgres: PostgresBench, listening: Streams
) -> None:
    with postgres.connection.transaction():
        # Without savepoints: where one ends, the server itself gives a message after the row that follows it.
        postgres.execute(f"insert into {postgres.schema}.items values (1)")
        emit(postgres, transactional=True, prefix="between")
        postgres.execute(f"insert into {postgres.schema}.items values (2)")
    windows = take(listening.open(postgres.begin), postgres.begin, 3)
    order = [row["_op"] for row in sorted(rows(windows), key=lambda row: row["_tx_index"])]
    assert order == ["insert", "message", "insert"]
    assert len({row["_tx"] for row in rows(windows)}) == 1


def test_a_rolled_back_message_never_arrives_unless_it_was_outside_of_the_transaction(
    postgres: PostgresBench, listening: Streams
) -> None:
    with postgres.connection.transaction(force_rollback=True):
        emit(postgres, transactional=True, prefix="inside")
        emit(postgres, transactional=False, prefix="outside")
    emit(postgres, transactional=True, prefix="after")
    windows = take(listening.open(postgres.begin), postgres.begin, 2)
    assert [prefix for prefix, _, _ in messages(windows)] == ["outside", "after"]


def test_messages_are_delivered_once_however_often_the_stream_is_opened(
    postgres: PostgresBench, listening: Streams
) -> None:
    position, heard = postgres.begin, []
    for n in range(6):
        emit(postgres, transactional=n % 3 == 0, prefix=f"n{n}")
        if n % 2:
            postgres.write(("items", n))
        stream = listening.open(position)
        windows = take(stream, position, 1 + n % 2, confirm=n == 3)
        heard += messages(windows)
        position = windows[-1].end
        listening.close(stream)
    assert [prefix for prefix, _, _ in heard] == [f"n{n}" for n in range(6)]


def test_a_message_that_was_not_made_durable_is_delivered_again(postgres: PostgresBench, listening: Streams) -> None:
    emit(postgres, transactional=False, prefix="again")
    for _ in range(2):
        stream = listening.open(postgres.begin)
        assert [prefix for prefix, _, _ in messages(take(stream, postgres.begin, 1))] == ["again"]
        listening.close(stream)


def test_messages_of_other_applications_are_left_out(postgres: PostgresBench, listening: Streams) -> None:
    for transactional in (True, False):
        emit(postgres, transactional=transactional, prefix="not for us")
        emit(postgres, transactional=transactional, prefix="for us")
    windows = take(listening.open(postgres.begin), postgres.begin, 2)
    assert [prefix for prefix, _, _ in messages(windows)] == ["for us", "for us"]


def test_without_a_request_for_messages_none_is_delivered(postgres: PostgresBench, postgres_streams: Streams) -> None:
    emit(postgres, transactional=True, prefix="a")
    emit(postgres, transactional=False, prefix="b")
    postgres.write(("items", 1))
    windows = take(postgres_streams.open(postgres.begin), postgres.begin, 1)
    assert messages(windows) == []


def test_a_large_message_arrives_whole(postgres: PostgresBench, listening: Streams) -> None:
    postgres.give_in_parts(500)
    with postgres.connection.transaction():
        postgres.execute("select pg_logical_emit_message(true, 'large', repeat('x', 3000000))")
        postgres.write_many(0, 4_000)
        postgres.execute("select pg_logical_emit_message(true, 'last', 'y')")
    postgres.execute("select pg_logical_emit_message(false, 'outside', repeat('z', 3000000))")
    windows = take(listening.open(postgres.begin), postgres.begin, 4_003)
    assert windows[0].open
    assert messages(windows) == [
        ("large", b"x" * 3_000_000, True),
        ("last", b"y", True),
        ("outside", b"z" * 3_000_000, False),
    ]
