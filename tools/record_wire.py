"""Record what a real server sends, as goldens for the decoder: `.venv/bin/python tools/record_wire.py [VERSION]`.

Each story is a database of its own. Written to tests/fixtures/wire-format-1, where a test replays them. Run it again
for a new kind of message or a new type; the old files stay, for they hold what was once made of the bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import psycopg

from tailrace.demo.server import EmbeddedPostgres
from tailrace.testing.recorded_wire import record

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "wire-format-1"

STORIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "keys": (
        """
        create table orders (id int8 primary key, status text, note text);
        alter table orders alter note set storage external;
        """,
        (
            "insert into orders values (1, 'new', repeat('large ', 500)), (2, null, '')",
            "update orders set status = 'paid' where id = 1",
            "begin; update orders set id = 11 where id = 1; update orders set id = 12 where id = 11; commit",
            "delete from orders where id = 2",
            "truncate orders",
        ),
    ),
    "identities": (
        """
        create table whole (id int primary key, big text);
        alter table whole alter big set storage external;
        alter table whole replica identity full;
        create table loose (a int, b text);
        alter table loose replica identity full;
        create table "Odd ""one" ("_op" int, b int not null, "Ünï" text, primary key (b, "_op"));
        """,
        (
            "insert into whole values (1, repeat('x', 3000)); update whole set id = 2; delete from whole",
            "insert into loose values (1, 'x'), (1, 'x'); update loose set b = 'y'; delete from loose",
            'insert into "Odd ""one" values (1, 2, \'é\'); update "Odd ""one" set "_op" = 7',
        ),
    ),
    "shapes": (
        "create table things (id int primary key, a text, b int)",
        (
            "insert into things values (1, 'x', 1)",
            "alter table things add c numeric(10, 2) default 1.5",
            "insert into things values (2, 'y', 2, 2.5)",
            "alter table things drop a; alter table things alter b type int8",
            "insert into things values (3, 3000000000, 3.5)",
        ),
    ),
    "types": (
        """
        create table every (
          id int8 primary key, s int2, b bool, r real, d float8, n numeric(12, 3), n0 numeric, c char(5), t text,
          y bytea, da date, ts timestamp, tz timestamptz, ti time, i interval, u uuid, j jsonb, la int[], ta text[]
        )
        """,
        (
            """insert into every values (9223372036854775807, -32768, true, 1.5e-10, '-Infinity', -123456789.125, 'NaN',
               'abc', E'tab\\t\\\\', '\\x00ff', '0044-03-15 BC', 'infinity', '2026-01-02 03:04:05.678901+05:30',
               '24:00', '1 year -3 days', '00000000-0000-4000-8000-0000000000ff', '{"b": "é"}', '{}',
               '{a,"b \\" c",NULL}')""",
            "insert into every (id, d, da, ts) values (2, 'NaN', '5874897-12-31', '12345-06-07 08:09:10')",
            "insert into every values (3)",
        ),
    ),
}  # fmt: skip


def main(version: int) -> None:
    """Record every story from a server of this version."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with EmbeddedPostgres(version=version) as server:
        for name, (tables, work) in STORIES.items():
            with server.connect(autocommit=True) as session:
                session.execute(f"create database {name}".encode())
            with psycopg.connect(server.url(name), autocommit=True) as session:
                session.execute(tables.encode())
                session.execute("create publication golden for all tables")
                session.execute("select pg_create_logical_replication_slot('golden', 'pgoutput')")
                for statement in work:
                    session.execute(statement.encode())
                path = FOLDER / f"pg{version}-{name}.json"
                recording = record(server.url(name), slot="golden", publications=["golden"])
                recording.save(path)
                session.execute("select pg_drop_replication_slot('golden')")
            print(path.name, len(recording.messages), "messages", recording.error or "")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 16)
