"""A table's copy: a value is what its type prints, whatever casts exist.

An error in the middle is the server's own.
"""

from __future__ import annotations

import struct
import time
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg import sql

from tailrace.capture.postgres import copy as copying
from tailrace.capture.postgres.catalogue import Catalogue
from tailrace.capture.postgres.connect import connect
from tailrace.capture.postgres.copy import copy_rows, copy_rows_marking_unfit, selected
from tailrace.capture.postgres.copy_binary import PRINTED
from tailrace.demo.server import EmbeddedPostgres
from tailrace.errors import SourceError, ValueUnfit
from tailrace.model.schema import TableId, TableSchema
from tests.support.databases import database
from tests.support.pgcopy import copied, numeric, row

SETUP = """
create type pair as (a int, b text);
create type mood as enum ('sad', 'ok');
create function shouted(mood) returns text immutable language sql return 'never this';
create function shouted(pair) returns text immutable language sql return 'nor this';
create cast (mood as text) with function shouted(mood);
create cast (pair as text) with function shouted(pair);
create domain feeling as mood;
create publication everything for all tables;
"""


class Scene:
    """A database, a connection to it, and a load of its tables."""

    def __init__(self, server: EmbeddedPostgres, name: str) -> None:
        self.admin = server.connect(name, autocommit=True)
        self.admin.execute(SETUP)
        self.session = connect(server.url(name))
        self.session.execute("begin isolation level repeatable read read only")

    def run(self, statement: str) -> None:
        self.session.execute("rollback")
        self.admin.execute(statement.encode())
        self.session.execute("begin isolation level repeatable read read only")

    def describe(self, table: str) -> TableSchema:
        return Catalogue(self.session).describe(TableId("public", table), ("everything",))

    def batches(self, table: str, where: str = "") -> list[pa.RecordBatch]:
        source = sql.SQL(f"from only public.{table} {where}")
        deadline = time.monotonic() + 60
        return list(copy_rows(self.session, self.describe(table), source, deadline=deadline))

    def rows(self, table: str, where: str = "") -> list[dict[str, Any]]:
        return [row for batch in self.batches(table, where) for row in batch.to_pylist()]

    def close(self) -> None:
        self.session.close()
        self.admin.close()


@pytest.fixture
def scene(server: EmbeddedPostgres) -> Iterator[Scene]:
    with database(server, f"copy_{uuid.uuid4().hex[:12]}") as name:
        made = Scene(server, name)
        yield made
        made.close()


def test_no_cast_changes_what_a_type_prints(scene: Scene) -> None:
    scene.run("""
        create table t (i inet, c cidr, l "char", m mood, f feeling, p pair, a mood[], b char(3));
        insert into t values ('10.0.0.1', '10/8', 'x', 'sad', 'ok', row(null, null), '{sad,NULL}', 'x');
        insert into t values (null)
    """)
    assert scene.rows("t") == [
        {
            "i": "10.0.0.1",
            "c": "10.0.0.0/8",
            "l": "x",
            "m": "sad",
            "f": "ok",
            "p": "(,)",
            "a": "{sad,NULL}",
            "b": "x  ",
        },
        dict.fromkeys("iclmfpab"),
    ]


def test_the_base_type_of_a_domain_decides_how_it_is_sent(scene: Scene) -> None:
    scene.run("""
        create domain price as numeric(6, 2); create domain net as price; create domain moment as timestamptz;
        create table t (n net, m moment); insert into t values (1.5, 'infinity'), (-9999.99, '2000-01-01 00:00+00')
    """)
    (batch,) = scene.batches("t")
    assert [str(one) for one in batch.column(0).to_pylist()] == ["1.50", "-9999.99"]
    assert batch.column(1).cast(pa.int64()).to_pylist() == [253_402_300_799_999_999, 946_684_800_000_000]
    kinds, columns = selected(scene.session, scene.describe("t"), sql.SQL("from public.t"))
    assert PRINTED not in kinds
    assert columns.as_string(scene.session) == '"n", "m"'


def test_every_nan_is_one(scene: Scene) -> None:
    scene.run("create table t (d float8, r real)")
    scene.run("insert into t values (-('NaN'::float8), -('NaN'::real)), ('NaN', 'NaN')")
    (batch,) = scene.batches("t")
    assert batch.column(0).view(pa.int64()).to_pylist() == [0x7FF8 << 48] * 2
    assert batch.column(1).view(pa.int32()).to_pylist() == [0x7FC00000] * 2


def test_unfit_values_are_returned_with_rows_that_are_otherwise_the_same(scene: Scene) -> None:
    scene.run("""
        create table t (id int, b bool, s int2, big int8, o oid, r real, d float8, day date, at timestamp,
          tz timestamptz, n numeric(6, 2), raw bytea, c char(3), v varchar, j json, jb jsonb, u uuid, a int[],
          m mood, i inet);
        insert into t values (1, true, -3, 1 << 40, 7, 1.25, 0.1, '1999-12-31', 'infinity', '2000-01-01 00:00:00.5+02',
          -1.5, '\\x00ff', 'x', '', '{"a" : 1}', '{"a" : 1}', '9f2b2c3e-2f57-4d0a-8a44-1c6f3f6b2a10', '{1,NULL}', 'ok',
          '10.0.0.1')
    """)
    scene.run("insert into t (id) values (2)")
    whole = scene.rows("t")
    scene.run("insert into t (id, n, day) values (3, 'NaN', '2001-01-01'), (4, 4, null)")
    found = list(
        copy_rows_marking_unfit(
            scene.session, scene.describe("t"), sql.SQL("from public.t"), deadline=time.monotonic() + 60
        )
    )
    rows = [row for batch, _ in found for row in batch.to_pylist()]
    unfit = [cells for _, column in found for cells in column.to_pylist()]
    assert rows[:2] == whole
    assert (rows[2]["n"], str(rows[2]["day"]), rows[3]["n"]) == (None, "2001-01-01", 4)
    assert unfit == [None, None, [{"column": "n", "text": "NaN"}], None]


def test_a_row_larger_than_the_buffer_is_read_whole(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "BATCH_BYTES", 1 << 12)
    scene.run("""
        create table t (id int, big text, raw bytea);
        insert into t select n, repeat('x', n * n * 10), decode(repeat('ab', n * 100), 'hex')
          from generate_series(1, 60) n
    """)
    batches = scene.batches("t", "order by id")
    assert len(batches) > 10
    rows = [row for batch in batches for row in batch.to_pylist()]
    assert [(row["id"], len(row["big"]), row["raw"]) for row in rows] == [
        (n, n * n * 10, b"\xab" * n * 100) for n in range(1, 61)
    ]


def test_a_table_without_columns_has_rows_and_one_without_rows_has_none(scene: Scene) -> None:
    scene.run("create table t (); insert into t select from generate_series(1, 3); create table u (id int, a int[])")
    assert sum(batch.num_rows for batch in scene.batches("t")) == 3
    assert scene.batches("u") == []


def test_more_rows_than_one_batch_holds_all_arrive(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "BATCH_BYTES", 1 << 14)
    scene.run("""
        create table t (id int, note text, a int[]);
        insert into t select n, nullif(n % 3, 0)::text, array[n] from generate_series(1, 5000) n
    """)
    batches = scene.batches("t")
    assert len(batches) > 5
    assert [row for batch in batches for row in batch.to_pylist()] == [
        {"id": n, "note": str(n % 3) if n % 3 else None, "a": [n]} for n in range(1, 5001)
    ]


def test_an_error_in_the_middle_is_the_servers_own(scene: Scene) -> None:
    scene.run("create table t (id int); insert into t select generate_series(-5000, 0)")
    with pytest.raises(SourceError, match="division by zero") as caught:
        scene.rows("t", "where 1 / id < 0")
    assert caught.value.fields["sqlstate"] == "22012"


def test_a_dropped_table_is_reported_with_the_servers_code(scene: Scene) -> None:
    scene.run("create table t (id int)")
    schema = scene.describe("t")
    scene.run("drop table t")
    with pytest.raises(SourceError) as caught:
        list(copy_rows(scene.session, schema, sql.SQL("from public.t"), deadline=time.monotonic() + 60))
    assert caught.value.fields["sqlstate"] == "42P01"


def test_outside_of_a_transaction_nothing_is_read(scene: Scene) -> None:
    scene.run("create table t (id int)")
    schema = scene.describe("t")
    scene.session.execute("rollback")
    with pytest.raises(AssertionError):
        list(copy_rows(scene.session, schema, sql.SQL("from public.t"), deadline=time.monotonic() + 60))


def test_a_column_of_another_type_than_described_is_read_by_its_text(scene: Scene) -> None:
    scene.run("create table t (id bigint, n int); insert into t values (7, 8)")
    schema = scene.describe("t")
    scene.run("alter table t alter id type int, alter n type text using n || '9'")
    (batch,) = copy_rows(scene.session, schema, sql.SQL("from public.t"), deadline=time.monotonic() + 60)
    assert batch.to_pylist() == [{"id": 7, "n": 89}]
    scene.run("alter table t alter n type numeric(4, 1) using 1")
    with pytest.raises(ValueUnfit, match="does not fit"):
        list(copy_rows(scene.session, schema, sql.SQL("from public.t"), deadline=time.monotonic() + 60))


def test_the_bytes_of_the_unit_tests_are_those_of_a_server(scene: Scene) -> None:
    """The unit tests of the kernels build their input by hand: it must equal what a server sends."""
    texts = ["0.00", "1.50", "-99999999.99", "10000.00", "0.01", "NaN"]
    values = ", ".join(f"('{text}')" for text in texts)
    scene.run(f"create table t (n numeric(10, 2)); insert into t values {values}")
    with psycopg.ClientCursor(scene.session).copy("copy public.t to stdout (format binary)") as sent:
        assert b"".join(map(bytes, sent)) == copied(*(row(numeric(text)) for text in texts))
    scene.run("create table u (d date, j jsonb); insert into u values ('1999-12-31', '[1, 2]')")
    with psycopg.ClientCursor(scene.session).copy("copy public.u to stdout (format binary)") as sent:
        assert b"".join(map(bytes, sent)) == copied(row(struct.pack(">i", -1), b"\1[1, 2]"))
