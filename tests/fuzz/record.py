"""Records what a real server sends, as inputs to begin from: `python -m tests.fuzz.record [VERSION]`.

Every kind of message that the stream can hold, every type as the server prints it, and a copy of the same tables. A
file of messages is one transaction, with the descriptions of its tables before it: a server sends those once in a
session. Run it again when the decoder learns of a new kind of message.
"""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from psycopg import sql
from psycopg.pq.abc import PGconn

from tailrace.capture.postgres.connect import command, connect, connect_replication
from tailrace.capture.postgres.copy import selected
from tailrace.demo.server import EmbeddedPostgres
from tests.fuzz.frames import framed
from tests.support.pgoutput import describe_one

CORPUS = Path(__file__).parent / "corpus"
SECONDS_MAX = 30.0
_ENVELOPE = 25
_CLOCK = slice(17, 25)

TABLES = """
create type mood as enum ('sad', 'ok');
create type pair as (a int, b text);
create domain positive as numeric(8, 2) check (value > 0);
create table plain (id int primary key, note text, price numeric(10, 2), at timestamptz);
create table whole (id int primary key, big text, x float8, list int[]);
alter table whole replica identity full;
alter table whole alter big set storage external;
alter table whole set (toast_tuple_target = 128);
create table named (a int not null, b text not null, c text);
create unique index named_b on named (b);
alter table named replica identity using index named_b;
create table keyless (a int, b text);
alter table keyless replica identity nothing;
create table child (id int primary key, plain int references plain);
create table "Odd ""one" ("_op" int primary key, "Ünïcode" mood, p pair, d positive);
create table every (
  id bigint primary key, s smallint, b boolean, r real, d double precision, n numeric(12, 3), n0 numeric,
  c char(5), v varchar(9), t text, y bytea, da date, ts timestamp, tz timestamptz, ti time, i interval, u uuid,
  j json, jb jsonb, ip inet, bi bit(5), ra int4range, la int[], ta text[], tza timestamptz[], ba bytea[], fa float8[],
  na numeric(6, 2)[], boa boolean[], daa date[], o oid, pt point
);
create publication every_table for all tables;
"""

WORK = (
    "insert into plain values (1, 'a', 1.25, '2026-01-02 03:04:05.6+00'), (2, null, null, null)",
    "update plain set note = 'b' where id = 1; update plain set id = 3 where id = 2; delete from plain where id = 1",
    "insert into whole values (1, repeat('x', 300), 'NaN', '{1,NULL,-3}')",
    "update whole set x = 2.5; update whole set id = 2, list = null; delete from whole",
    "insert into named values (1, 'k', null); update named set a = 2; update named set b = 'l'; delete from named",
    "insert into keyless values (1, 'x'), (1, 'x'), (null, null)",
    'insert into "Odd ""one" values (1, \'sad\', \'(1,"a b")\', 3.5), (2, \'ok\', null, null)',
    """insert into every values (
       9223372036854775807, -32768, true, 1.5e-10, '-Infinity', -123456789.125, 'NaN', 'abc', 'né', E'tab\\t\\\\\\n',
       '\\x00ff', '0044-03-15 BC', 'infinity', '2026-01-02 03:04:05.678901+05:30', '24:00', '1 year -3 days',
       '00000000-0000-4000-8000-0000000000ff',
       '{"a": [1, null]}', '{"b": "\\u00e9"}', '10.0.0.1/8', '10101', '[1,5)', '{}', '{a,"b \\" c",NULL,"NULL","{}"}',
       '{"2026-01-02 03:04:05+00",infinity}', '{"\\\\x01","\\\\x"}', '{NaN,1e300,-0}', '{1.25,NULL}', '{t,f}',
       '{2026-01-02,-infinity}', 4294967295, '(1,2)'); insert into every values (2)""",
    "insert into whole values (3, repeat('y', 2100), 1, null)",
    "update whole set x = 2 where id = 3",
    "truncate plain, child, whole restart identity cascade",
    "begin; savepoint s; insert into plain values (9); rollback to s; insert into plain values (10); commit",
    "select pg_logical_emit_message(true, 'orders', 'inside'), pg_logical_emit_message(true, '', '')",
    "select pg_logical_emit_message(false, 'outside', '\\x00ff'::bytea)",
    "alter table plain add more text default 'x'; insert into plain values (11, 'a', 1, now(), 'y')",
    "select pg_replication_origin_create('elsewhere'); select pg_replication_origin_session_setup('elsewhere')",
    "insert into plain values (12)",
    "select pg_replication_origin_session_reset(); alter table plain drop note; insert into plain values (13)",
)  # fmt: skip

VALUES: dict[str, tuple[str, ...]] = {
    "smallint": ("-32768", "32767", "0"),
    "integer": ("-2147483648", "2147483647"),
    "bigint": ("-9223372036854775808", "9223372036854775807"),
    "oid": ("4294967295",),
    "boolean": ("t", "f"),
    "real": ("1.1754944e-38", "NaN", "-Infinity", "-0"),
    "double precision": ("1.7976931348623157e+308", "NaN", "Infinity", "-0"),
    "numeric(10,2)": ("-99999999.99", "0.05", "7"),
    "numeric(38,0)": ("99999999999999999999999999999999999999", "-1"),
    "numeric(5,7)": ("-0.0099999",),
    "numeric(3,-2)": ("12300",),
    "numeric": ("NaN", "-Infinity", "1e100", "0.00000000000000000001"),
    "text": ("", "né\u4e2d\U0001f600", "a\tb\\\n"),
    "bytea": ("\\x", "\\x00ff10"),
    "date": ("0044-03-15 BC", "5874897-12-31", "infinity", "-infinity", "2024-02-29"),
    "timestamp": ("4713-01-01 00:00:00 BC", "infinity", "2026-01-02 03:04:05.678901", "12345-06-07 08:09:10"),
    "timestamptz": ("0044-03-15 12:00:00+00 BC", "-infinity", "2026-01-02 03:04:05.6+05:30", "99999-01-01 00:00+00"),
    "time": ("24:00:00", "01:02:03.5"),
    "interval": ("1 year 2 mons -3 days 04:05:06.7",),
    "int[]": ("{}", "{1,NULL,-3}", "[2:3]={1,2}", "{{1,2},{3,4}}"),
    "text[]": ('{a,"b \\" c",NULL,"NULL","","{}","a,b","\\\\"}',),
    "bytea[]": ('{"\\\\x01","\\\\x",NULL}',),
    "float8[]": ("{NaN,1e300,-0,Infinity}",),
    "numeric(6,2)[]": ("{1.25,NULL,-9999.99}",),
    "boolean[]": ("{t,f,NULL}",),
    "date[]": ('{2026-01-02,infinity,"0044-03-15 BC"}',),
    "timestamptz[]": ('{"2026-01-02 03:04:05+00",-infinity}',),
    "timestamp[]": ('{"2026-01-02 03:04:05.000001",infinity}',),
    "bigint[]": ("{-9223372036854775808}",),
    "smallint[]": ("{-1,2}",),
    "real[]": ("{1.5,NaN}",),
    "jsonb": ('{"a": [1, null, "\\u00e9"]}',),
    "uuid": ("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",),
    "int4range": ("[1,5)", "empty"),
}


def main(version: int) -> None:
    """Record everything from a server of this version."""
    with EmbeddedPostgres(version=version) as server, server.connect(autocommit=True) as session:
        session.execute(TABLES)
        session.execute("select pg_create_logical_replication_slot('recorded', 'pgoutput')")
        for statement in WORK:
            session.execute(statement.encode())
        last = session.execute("select pg_current_wal_lsn() - '0/0'").fetchone()
        assert last is not None
        stream = connect_replication(server.url())
        try:
            sent = _sent(stream, int(last[0]))
        finally:
            stream.finish()
        for number, transaction in enumerate(_transactions(sent)):
            name = f"pg{version}-{number:02}"
            _keep("read", name, bytes(2) + framed(transaction))
            if bodies := _bodies(transaction):
                _keep("decode", name, bytes([number, 0]) + framed(bodies))
        _record_copies(server, version, sent)
        _record_values(server, version)


def _keep(target: str, name: str, data: bytes) -> None:
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)


def _sent(stream: PGconn, last: int) -> list[bytes]:
    """Every message up to that position."""
    command(
        stream,
        "START_REPLICATION SLOT recorded LOGICAL 0/0 "
        "(proto_version '1', publication_names 'every_table', messages 'true')",
    )
    found, deadline = [], time.monotonic() + SECONDS_MAX
    while time.monotonic() < deadline:
        size, message = stream.get_copy_data(0)
        assert size > 0, stream.get_error_message()
        found.append(bytes(message))
        if found[-1][:1] == b"k" and struct.unpack_from(">Q", message, 1)[0] >= last:
            return found
    raise TimeoutError("the server did not send everything in time")


def _transactions(sent: list[bytes]) -> Iterator[list[bytes]]:
    """Each by itself, what describes its tables before it; keep-alives as they come."""
    known: dict[bytes, bytes] = {}
    held: list[bytes] = []
    inside = False
    for message in sent:
        kind, held = message[_ENVELOPE : _ENVELOPE + 1], [*held, message]
        if message[:1] != b"w":
            continue
        inside = kind == b"B" or (inside and kind != b"C")
        if inside:
            continue
        new = {one[26:30] for one in held if one[_ENVELOPE : _ENVELOPE + 1] == b"R"}
        used = {one[26:30] for one in held if one[_ENVELOPE : _ENVELOPE + 1] in (b"I", b"U", b"D")}
        used |= {one[at : at + 4] for one in held if one[25:26] == b"T" for at in range(31, len(one), 4)}
        yield [known[oid] for oid in sorted(used - new) if oid in known] + held
        known |= {one[26:30]: one for one in held if one[_ENVELOPE : _ENVELOPE + 1] == b"R"}
        held = []
    if held:
        yield held


def _bodies(transaction: list[bytes]) -> list[bytes]:
    """The messages as the reader lays them out: without envelope, and one outside of a transaction with the clock."""
    found, inside = [], False
    for message in transaction:
        if message[:1] == b"w":
            body = message[_ENVELOPE:]
            inside = body[:1] == b"B" or (inside and body[:1] != b"C")
            found.append(body if inside or body[:1] != b"M" else body + message[_CLOCK])
    return found


def _record_copies(server: EmbeddedPostgres, version: int, sent: list[bytes]) -> None:
    """A copy of every table that still has the columns it was described with last."""
    relations = {one[26:30]: one[_ENVELOPE:] for one in sent if one[_ENVELOPE : _ENVELOPE + 1] == b"R"}
    with connect(server.url()) as session, session.transaction():
        for number, (oid, relation) in enumerate(sorted(relations.items())):
            row = session.execute("select %s::oid::regclass::text", struct.unpack(">I", oid)).fetchone()
            assert row is not None
            source = sql.SQL(f"from {row[0]}")
            _, columns = selected(session, describe_one(relation), source)
            statement = sql.SQL("copy (select {} {}) to stdout (format binary)").format(columns, source)
            with session.cursor().copy(statement) as copied:
                data = b"".join(bytes(piece) for piece in copied)
            _keep("copy", f"pg{version}-{number:02}", struct.pack(">H", len(relation)) + relation + data)


def _record_values(server: EmbeddedPostgres, version: int) -> None:
    with connect(server.url()) as session:
        for number, (kind, texts) in enumerate(VALUES.items()):
            session.execute(f"create temp table one (v {kind})".encode())
            row = session.execute(
                "select atttypid::int8, atttypmod from pg_attribute where attrelid = 'one'::regclass and attnum = 1",
                prepare=False,
            ).fetchone()
            assert row is not None
            for text in texts:
                session.execute("insert into one values (%s)", (text,), prepare=False)
            rows = session.execute("select format('%s', v) from one", prepare=False).fetchall()
            printed = [one[0].encode() for one in rows]
            _keep("value", f"pg{version}-{number:02}", struct.pack(">Ii", *row) + framed(printed) + b"\xff\xff")
            session.execute("drop table one")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 16)
