"""What others paid for, where only a real server can show it; the numbers are those of DESIGN.md's list."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime
from typing import Any

import psycopg
import pytest

from tailrace.capture.postgres.config import PostgresSettings
from tailrace.capture.postgres.source import PostgresCapture
from tailrace.errors import ValueUnfit
from tailrace.model.event import Event, Nothing
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.output_batch import Batch, BatchKind, Limits
from tailrace.state.checkpoint_stores import MemoryCheckpointStore
from tests.support.served import Mirror, drive, reached, rows_of, sql

LEFT, RIGHT, ODD = (TableId("public", name) for name in ("lefts", "rights", "odd"))
TABLES = """
create table lefts (id int8 primary key, pad text);
create table rights (id int8 primary key, pad text);
create table odd (
  id int4 primary key, day date, at timestamptz, plain timestamp, f float8, small float4, wide numeric(60, 12),
  free numeric, money numeric(10, 2)
);
create table apart (id int8 primary key, n int4);
"""
FAR = "123456789012345678901234567890123456789.000000000001"
"""More than 38 digits."""


@pytest.fixture
def source(database: str, request: pytest.FixtureRequest) -> Iterator[PostgresCapture]:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(TABLES)
    made = PostgresCapture(
        PostgresSettings(
            url=database, wanted=lambda table: table in (LEFT, RIGHT, ODD), slot="lessons", publication="lessons"
        )
    )
    made.scan_chunk_bytes = 16_384
    yield made
    if not request.session.testsfailed:  # a runtime that was left running holds the slot
        made.drop()


@pytest.fixture
def store() -> MemoryCheckpointStore:
    return MemoryCheckpointStore()


def events(batches: list[Batch], kind: BatchKind) -> list[Event]:
    return [event for batch in batches if batch.kind is kind for event in batch.events()]


def keys(found: list[Event], table: TableId) -> list[int]:
    return sorted(event.values["id"] for event in found if event.schema.table == table)


@contextmanager
def repeated(source: PostgresCapture, act: Callable[[psycopg.Connection, int], None]) -> Iterator[None]:
    """Somebody does this again and again, each time in a transaction of its own."""
    stop, failed = threading.Event(), list[Exception]()

    def write() -> None:
        try:
            with psycopg.connect(source.settings.url) as connection:
                number = 0
                while not stop.wait(0.002):
                    number += 1
                    act(connection, number)
                    connection.commit()
        except psycopg.Error as error:
            failed.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        stop.set()
        writer.join()
    assert not failed


def test_lesson_18_a_snapshot_of_several_tables_agrees_with_the_log_at_one_stated_position(
    source: PostgresCapture, store: MemoryCheckpointStore
) -> None:
    """Every transaction writes to both tables: at one position they have the same keys, in many chunks as in one."""
    for table in (LEFT, RIGHT):
        sql(source, f"insert into {table} select i, repeat('x', 200) from generate_series(1, 1500) i")

    def both(connection: psycopg.Connection, number: int) -> None:
        for table in (LEFT, RIGHT) if number % 2 else (RIGHT, LEFT):
            connection.execute(f"insert into {table} values ({10_000 + number}, 'late')")
            connection.execute(f"delete from {table} where id = {number}")

    runtime = CdcRuntime(source, store, snapshot_tables=(LEFT, RIGHT), limits=Limits(rows=100))
    mirror = Mirror()
    with repeated(source, both):
        runtime.start()
        stated = runtime.position
        batches = drive(runtime, mirror, lambda: runtime.control.status().snapshot is None)
    read = events(batches, BatchKind.SNAPSHOT)
    assert keys(read, LEFT) == keys(read, RIGHT), "of one moment"
    assert {event.position for event in read} == {str(stated)}
    batches += drive(runtime, mirror, reached(runtime, source))
    streamed = events(batches, BatchKind.STREAM)
    assert streamed, "somebody wrote while it was read"
    assert all(Lsn.parse(event.position or "") > stated for event in streamed)
    for table in (LEFT, RIGHT):
        late = {event.values["id"] for event in streamed if event.schema.table == table and event.after}
        assert not late & set(keys(read, table)), "nothing is in both"
        assert mirror.of(table) == rows_of(source, table)
    runtime.stop()


@pytest.mark.parametrize("how", ["snapshot_tables", "incremental_snapshot"])
def test_lesson_19_ddl_on_a_table_that_is_not_captured_never_breaks_capture(
    source: PostgresCapture, store: MemoryCheckpointStore, how: str
) -> None:
    """Nor in the middle of a transaction that is, nor while tables are read."""
    sql(source, "insert into lefts select i, repeat('x', 200) from generate_series(1, 500) i")

    def alter(connection: psycopg.Connection, number: int) -> None:
        run = connection.execute
        run(f"insert into lefts values ({1000 + number}, 'before')")
        run(f"alter table apart add c{number} int4 default {number}")
        run("insert into apart (id, n) values (1, 2)")
        run(f"alter table apart rename to apart_{number}")
        run(f"alter table apart_{number} alter n type text, drop column c{number}")
        run(f"truncate apart_{number}")
        run(f"create type mood_{number} as enum ('a', 'b')")
        run(f"create table apart (id mood_{number} primary key, n int4)")
        run(f"drop table apart_{number}")
        run("drop table apart; create table apart (id int8 primary key, n int4)")
        run(f"update lefts set pad = 'after' where id = {1000 + number}")

    runtime = CdcRuntime(source, store, **{how: (LEFT,)}, limits=Limits(rows=20))  # type: ignore[arg-type] # either
    mirror = Mirror()
    with repeated(source, alter):
        runtime.start()
        drive(runtime, mirror, lambda: runtime.rows_committed >= 600)
    found = drive(runtime, mirror, reached(runtime, source))
    assert mirror.of(LEFT) == rows_of(source, LEFT)
    assert {event.table for batch in found for event in batch.events()} <= {str(LEFT)}
    assert runtime.progress.reconnects == 0
    runtime.stop()


ODD_ROWS = f"""
insert into odd values
  (1, 'infinity', 'infinity', 'infinity', 'infinity', '-infinity', '{FAR}', '{FAR}', 1.5),
  (2, '-infinity', '-infinity', '-infinity', 'NaN', 'NaN', 'NaN', 'NaN', -99999999.99),
  (3, '10000-01-01', '10000-01-01 00:00:00Z', '12345-06-07 08:09:10.111213', '-0', '1e-45', -1, 'infinity', 0),
  (4, '0044-03-15 BC', '0044-03-15 00:00:00Z BC', '4713-01-01 BC', '5e-324', 'infinity', 0, '-infinity', null)
"""


def test_lesson_20_odd_values_are_kept_or_mapped_by_a_stated_rule_and_read_and_streamed_alike(
    source: PostgresCapture, store: MemoryCheckpointStore
) -> None:
    """docs/reference/types.md states the rules."""
    sql(source, ODD_ROWS)
    runtime, mirror = CdcRuntime(source, store, snapshot_tables=(ODD,)), Mirror()
    runtime.start()
    batches = drive(runtime, mirror, lambda: runtime.rows_committed == 4)
    sql(source, "update odd set id = id + 10")
    batches += drive(runtime, mirror, reached(runtime, source))
    read = {event.values["id"]: event for event in events(batches, BatchKind.SNAPSHOT)}
    streamed = {event.values["id"] - 10: event for event in events(batches, BatchKind.STREAM) if event.after}
    assert sorted(read) == sorted(streamed) == [1, 2, 3, 4]
    for key, event in read.items():
        assert not event.unfit
        assert str({**event.values, "id": 0}) == str({**streamed[key].values, "id": 0}), "NaN is not equal to itself"
    said: dict[int, dict[str, Any]] = {key: event.values for key, event in read.items()}
    end = datetime(9999, 12, 31, 23, 59, 59, 999999)
    assert (said[1]["day"], said[1]["at"], said[1]["plain"]) == (date(9999, 12, 31), end.replace(tzinfo=UTC), end)
    assert (said[1]["f"], said[1]["small"], said[1]["wide"], said[1]["free"]) == (float("inf"), float("-inf"), FAR, FAR)
    assert (said[2]["day"], said[2]["plain"]) == (date(1, 1, 1), datetime(1, 1, 1))
    assert str((said[2]["f"], said[2]["small"], said[2]["wide"], said[2]["free"])) == "(nan, nan, 'NaN', 'NaN')"
    assert (str(said[3]["day"]), str(said[3]["at"])[:11], said[3]["free"]) == ("10000-01-01", "10000-01-01", "Infinity")
    assert str(said[3]["plain"]).replace("T", " ") == "12345-06-07 08:09:10.111213"
    assert (str(said[3]["f"]), said[4]["f"], said[4]["free"]) == ("-0.0", 5e-324, "-Infinity")
    assert str(said[4]["day"]) == "-043-03-15"
    assert [(key, name) for key, values in said.items() for name in values if values[name] is None] == [(4, "money")]
    runtime.stop()


def test_lesson_20_a_value_that_does_not_fit_is_told_in_the_stream_and_refused_in_a_snapshot_never_null(
    source: PostgresCapture, store: MemoryCheckpointStore
) -> None:
    runtime, mirror = CdcRuntime(source, store), Mirror()
    runtime.start()
    sql(source, "insert into odd (id, money) values (1, 'NaN'), (2, 3)")
    found = events(drive(runtime, mirror, reached(runtime, source)), BatchKind.STREAM)
    assert [event.unfit for event in found] == [{"money": "NaN"}, {}]
    assert isinstance(found[0].row_write(), Nothing)
    assert [row["id"] for row in mirror.of(ODD)] == [2]
    runtime.stop()
    source.drop()
    again = CdcRuntime(source, store, key="read", snapshot_tables=(ODD,))
    again.start()
    with pytest.raises(ValueUnfit) as refused:
        drive(again, mirror, lambda: False)
    assert "money" in str(refused.value)
    assert "odd" in str(refused.value)
    again.force_stop()
