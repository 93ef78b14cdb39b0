"""Rows fetched by their keys, and scans that resume after one.

The server must read exactly the key's value, whatever its type, in the requested order of columns. A scan that fails
leaves nothing open.
"""

from __future__ import annotations

import json
import resource
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tailrace.capture.port import Scan
from tailrace.capture.postgres.config import PostgresSettings
from tailrace.capture.postgres.source import PostgresCapture
from tailrace.demo.server import EmbeddedPostgres
from tailrace.errors import SourceUnreachable
from tailrace.model.schema import TableId
from tailrace.tables.fold.row_ids import image_numbers


class Shop:
    """A schema of its own, and a capture of all its tables."""

    def __init__(self, server: EmbeddedPostgres) -> None:
        self.name = f"keys_{uuid.uuid4().hex[:12]}"
        self.connection = server.connect()
        self.run(f"create schema {self.name}")
        self.capture = PostgresCapture(
            PostgresSettings(
                url=server.url(), wanted=lambda table: table.schema == self.name, slot=self.name, publication=self.name
            )
        )
        self.capture.scan_chunk_bytes = 16_384

    def run(self, text: str) -> None:
        self.connection.execute(psycopg.sql.SQL(text.replace("{s}", self.name)))

    def table(self, name: str) -> TableId:
        return TableId(self.name, name)

    def close(self) -> None:
        self.capture.drop()
        self.connection.close()


@pytest.fixture
def shop(server: EmbeddedPostgres) -> Iterator[Shop]:
    made = Shop(server)
    yield made
    made.close()


def read(scan: Scan, column: str, rows: int | None = None) -> tuple[list[Any], dict[str, Any]]:
    """Return values of the next rows, at least `rows` of them if given, and the record after those."""
    found: list[Any] = []
    record: Any = scan.record()
    while not scan.done and (rows is None or len(found) < rows):
        while not scan.begin(()):
            pass
        while (rows is None or len(found) < rows) and (piece := scan.next(100)) is not None:
            found += piece.data.column(column).to_pylist()
            record = piece.record(len(piece.data))
    scan.close()
    return found, json.loads(json.dumps(record))


def refetched(shop: Shop, name: str) -> pa.Table:
    """Return all rows of a table, read and then fetched by their keys, in the order of the key's first column."""
    with shop.capture.snapshot() as exact, exact.reader() as reader:
        schema = reader.describe(shop.table(name))
        whole = pa.Table.from_batches(reader.rows(schema))
    with shop.capture.row_reader(60) as reader:
        reader.lock_schema(schema)
        found = pa.Table.from_batches(reader.rows_by_key(schema, whole.select(schema.key)), whole.schema)
    found, whole = (rows.sort_by(schema.key[0]) for rows in (found, whole))
    assert found.num_rows == whole.num_rows
    same = image_numbers(pa.concat_tables([found, whole]).columns).numbers  # NaN is NaN there
    assert same[: len(found)].tolist() == same[len(found) :].tolist()
    return found


def test_a_scan_resumes_in_a_partition_that_has_grown(shop: Shop) -> None:
    shop.run("create table {s}.sales (a int, b int, pad text, primary key (b, a)) partition by range (a)")
    shop.run("create table {s}.sales_old partition of {s}.sales for values from (0) to (100000)")
    shop.run("create table {s}.sales_new partition of {s}.sales for values from (100000) to (200000)")
    shop.run("insert into {s}.sales select n, n, repeat('x', 100) from generate_series(0, 999) n")
    shop.run("insert into {s}.sales select 100000 + n, -n, '' from generate_series(0, 119) n")
    shop.capture.prepare(None)

    before, record = read(shop.capture.scan([shop.table("sales")], live=True), "a", 1_100)
    shop.run("insert into {s}.sales select 150000 + n, 1000 + n, repeat('x', 100) from generate_series(0, 999) n")
    resumed = shop.capture.resume_scan(record)
    assert resumed is not None
    after, _ = read(resumed, "a")

    assert len(before) == 1_100
    assert {*before, *after} >= {*range(1_000), *range(100_000, 100_120)}  # the stream brings the others


def test_a_scan_resumes_after_a_key_that_is_a_list(shop: Shop) -> None:
    shop.run("create table {s}.tags (words text[] primary key, pad text)")
    shop.run(
        "insert into {s}.tags select array[n::text, 'a \"b\" \\ {c},d', '', 'NULL', null], repeat('x', 100) "
        "from generate_series(1, 1000) n"
    )
    shop.capture.prepare(None)
    found, record = read(shop.capture.scan([shop.table("tags")], live=True), "words", 400)
    resumed = shop.capture.resume_scan(record)
    assert resumed is not None
    rest, _ = read(resumed, "words")
    assert sorted(int(words[0]) for words in found + rest) == list(range(1, 1_001))


def test_rows_are_refetched_by_keys_outside_of_pythons_calendar(shop: Shop) -> None:
    shop.run("create table {s}.stays (id int, until timestamptz, day date, primary key (id, until, day))")
    shop.run("""
      insert into {s}.stays values (1, 'infinity', 'infinity'), (2, '-infinity', '-infinity'),
      (3, '12345-06-07 08:09:10.5+00', '12345-06-07'), (4, '0044-03-15 12:00+00 BC', '0044-03-15 BC'),
      (5, '9999-12-31 23:59:59.999999+00', '9999-12-31'), (6, '2020-01-01 00:00+00', '2020-01-01')
    """)
    shop.capture.prepare(None)
    found = refetched(shop, "stays")
    assert found.filter(pc.equal(found["id"], 6))["until"][0].as_py() == datetime(2020, 1, 1, tzinfo=UTC)


def test_a_scan_that_cannot_begin_leaves_no_snapshot_open(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.run("create table {s}.items (id int primary key)")
    shop.capture.prepare(None)

    def fail(*_: object, **__: object) -> NoReturn:
        raise SourceUnreachable("gone for a moment", hint="It is retried.")

    monkeypatch.setattr(shop.capture, "describe", fail)
    with pytest.raises(SourceUnreachable) as kept:  # and with it whatever its frames hold
        shop.capture.scan([shop.table("items")], live=False)
    left = "select count(*) from pg_replication_slots where temporary and database = current_database()"
    deadline = time.monotonic() + 10
    while shop.connection.execute(left).fetchone() != (0,) and time.monotonic() < deadline:
        time.sleep(0.1)  # the server notices a little later that a session has ended
    assert shop.connection.execute(left).fetchone() == (0,), kept


def test_rows_with_any_type_of_key_are_refetched(shop: Shop) -> None:
    shop.run("create type {s}.mood as enum ('so so', 'fi''ne')")
    shop.run("create domain {s}.code as varchar(9)")
    shop.run("""
      create table {s}.mixed (i int2, n numeric, f float8, r real, t text, c char(5), v {s}.code, u uuid, b bytea,
        o bool, e {s}.mood, iv interval, a inet, bt bit(3), q "char", l text[], k int[], ts timestamp, tm time, m money,
        rg int4range, "odd ""name" oid, pad text,
        primary key (i, n, f, r, t, c, v, u, b, o, e, iv, a, bt, q, l, k, ts, tm, m, rg, "odd ""name"))
    """)
    shop.run("""
      insert into {s}.mixed values
        (1, 1.50, 'NaN', 0.1, 'a''b\\"{},', 'ab', 'x', '7f1e0c8e-0000-4000-8000-000000000001', '\\x00ff', true,
         'fi''ne', '1 year -2 days', '10.0.0.1/8', B'101', 'z', array['a,b', '"', null], array[1, null],
         '2020-01-01 00:00:00.5', '24:00', '-$1,234.56', '[1,5)', 4294967295, repeat('x', 10)),
        (2, 'NaN', '-Infinity', '-0', '', '', '', '7f1e0c8e-0000-4000-8000-000000000002', '', false, 'so so',
         '0', '::1', B'000', '', '{}', '{}', '-infinity', '00:00', '0', 'empty', 0, null)
    """)
    shop.capture.prepare(None)
    found = refetched(shop, "mixed")
    assert found.column("i").to_pylist() == [1, 2]


def test_any_number_of_rows_is_refetched(shop: Shop) -> None:
    shop.run("create table {s}.many (a int, b text, primary key (a, b))")
    shop.run("insert into {s}.many select n, 'k' || n from generate_series(1, 30000) n")
    shop.capture.prepare(None)
    assert refetched(shop, "many").num_rows == 30_000


def test_an_abandoned_read_keeps_nothing_of_an_unread_row(shop: Shop) -> None:
    shop.run("create table {s}.wide (id int primary key, pad text)")
    shop.run("alter table {s}.wide alter pad set storage external")
    shop.run("insert into {s}.wide values (1, ''), (2, repeat('x', 32 << 20))")
    shop.capture.prepare(None)

    def give_up() -> int:
        with shop.capture.snapshot() as exact, exact.reader() as reader:
            rows = reader.rows(reader.describe(shop.table("wide")))
            assert len(next(rows)) == 1
            rows.close()  # type: ignore[attr-defined] # it is a generator
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    give_up()
    before = give_up()
    assert max(give_up() for _ in range(8)) < before + (64 << 20)
