"""The tables that a workload runs on: every kind of identity, name and type that a server has to offer.

Each table says how it is made, how a row of it is found, and which values its columns are given, all as SQL. Values
under `rare` have no place in a lake table's column; only what reads the log meets them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

SECOND_SCHEMA = "Zweites.Schema"
LONG_NAME = "länge_" + "x" * 56
"""63 bytes, the most that a name has room for."""
_PLAIN = re.compile(r"[a-z_][a-z0-9_]*")
_RESERVED = {"all", "select", "user", "table"}


def quoted(name: str) -> str:
    """The name as SQL writes it."""
    if _PLAIN.fullmatch(name) and name not in _RESERVED:
        return name
    return '"' + name.replace('"', '""') + '"'


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column and values for it. The first value is the plainest."""

    name: str
    type: str
    values: tuple[str, ...]
    rare: tuple[str, ...] = ()

    @property
    def sql(self) -> str:
        return quoted(self.name)


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table of the workload."""

    name: str
    make: tuple[str, ...]
    key: tuple[Column, ...]
    """The columns that a row is found by; they need not be the table's key."""
    columns: tuple[Column, ...]
    schema: str = "public"
    unique: bool = True
    """Whether the server holds `key` to one row."""
    whole_key: tuple[str, ...] = ()
    """With REPLICA IDENTITY FULL: the columns of the primary key."""
    full: bool | None = False
    """Whether REPLICA IDENTITY is FULL; None: now and then."""
    inserts_only: bool = False
    """Updates and deletes cannot be told."""
    logged: bool = True
    leaves: tuple[str, ...] = ()
    """The partitions, if there are."""
    hidden: tuple[str, ...] = ()
    """Generated columns."""
    ddl: tuple[str, ...] = ()
    """Changes of its shape, each on its own; those that do not apply are refused by the server."""
    often: bool = False
    """Whether it is to be met twice as often as others."""
    with_table: str = ""
    """Another table that comes along."""

    @property
    def sql(self) -> str:
        return quoted(self.name) if self.schema == "public" else f"{quoted(self.schema)}.{quoted(self.name)}"

    def column(self, name: str) -> Column:
        return next(column for column in (*self.key, *self.columns) if column.name == name)


def column(name: str, kind: str, *values: str, rare: Sequence[str] = ()) -> Column:
    return Column(name=name, type=kind, values=values, rare=tuple(rare))


IDS = tuple(str(n) for n in range(1, 9))
BIG = (
    "repeat('ab', 1500)",
    "null",
    "repeat(md5('1'), 150)",
    "''",
    "repeat('ä€', 900)",
    "(select string_agg(md5(g::text), '') from generate_series(1, 400) g)",
)
"""Most are stored out of line."""
TEXTS = (
    "'a'",
    "null",
    "''",
    "'ä€😀'",
    r"""e'tab\t nl\n cr\r back\\slash q\' "double"'""",
    "'null'",
    "'unchanged-toast-datum'",
    r"e'\x01\x7f'",
    "' x[integer]:1 '",
    "'it''s ''quoted'''",
)
COUNTS = ("1", "null", "-7", "2147483647")
MORE_SHAPES = (
    "add column if not exists x1 int default 5",
    "add column if not exists x1 text default 'it''s'",
    "add column if not exists x2 timestamptz default '2024-01-01 00:00+02'",
    "add column if not exists x2 numeric(10, 3) default 1.5, add column if not exists x3 text",
    "add column if not exists x3 text default clock_timestamp()::text",
    "add column if not exists x4 int[] not null default '{1,2}'",
    "drop column if exists x1",
    "drop column if exists x2",
    "drop column if exists x3",
    "drop column if exists x1, add column x1 bool default true",
    "rename column x1 to x3",
    "rename column x3 to x1",
    "alter column x1 type text using x1::text",
    "alter column x2 type text using x2::text",
)
"""Columns that come, go and change; the statements of the workload do not name them."""


def _keyed() -> Table:
    return Table(
        name="keyed",
        make=(
            "create table keyed (id int8 primary key, gone int, n int4, name text, big text, price numeric(12, 2))",
            "alter table keyed add column rest int not null default 7",
            "alter table keyed drop column gone, alter column big set storage external",
        ),
        key=(column("id", "int8", *IDS),),
        columns=(
            column("n", "int4", *COUNTS),
            column("name", "text", *TEXTS),
            column("big", "text", *BIG),
            column("price", "numeric(12, 2)", "1.5", "null", "0", "-9999999999.99", rare=["'NaN'"]),
        ),
        ddl=(
            *MORE_SHAPES,
            "drop constraint keyed_pkey, add primary key (id, rest)",
            "drop constraint keyed_pkey, add primary key (id)",
            "alter column n type int8",
            "alter column n type int4",
            "alter column price type numeric(16, 4)",
            "alter column price type numeric",
            "alter column name type varchar(300)",
            "alter column name set not null, alter column n set default 3",
        ),
    )


def _composite() -> Table:
    return Table(
        name="composite",
        make=(
            "create table composite (name text, shop int4, big text, code text, n int4, rest int not null default 7)",
            "alter table composite add primary key (code, shop), alter column big set storage external",
        ),
        key=(column("code", "text", "'a'", "'b'", "''", "'ä ''q'''"), column("shop", "int4", "1", "2", "-3")),
        columns=(column("name", "text", *TEXTS), column("big", "text", *BIG), column("n", "int4", *COUNTS)),
        full=None,
        often=True,
        whole_key=("code", "shop"),
        ddl=(*MORE_SHAPES, "replica identity full", "replica identity default"),
    )


def _text_key() -> Table:
    """A key so long that it is stored out of line: the server then tells the old key with every update."""
    return Table(
        name="text_key",
        make=(
            "create table text_key (k text primary key, n int4, v jsonb, big text)",
            "alter table text_key alter column k set storage external, alter column big set storage external",
        ),
        key=(column("k", "text", "'a'", "repeat('k', 2400)", "''", "'ä''\"'", "repeat('ö', 1200) || '1'"),),
        columns=(
            column("n", "int4", *COUNTS),
            column("v", "jsonb", '\'{"b": [1, null], "a": "x"}\'', "null", "'null'", "'\"it''s\"'"),
            column("big", "text", *BIG),
        ),
        ddl=MORE_SHAPES,
    )


def _keyless() -> Table:
    return Table(
        name="keyless",
        make=(
            "create table keyless (a int, b text, c float8, big text)",
            "alter table keyless replica identity full, alter column big set storage external",
        ),
        key=(column("a", "int", "1", "2", "3"),),
        columns=(
            column("b", "text", *TEXTS),
            # To a native subscriber 0 and -0 are equal, so it may take one row for the other.
            column("c", "float8", "0.1", "null", "'NaN'", "0", rare=["'-0'"]),
            column("big", "text", *BIG),
        ),
        unique=False,
        full=True,
        often=True,
        ddl=MORE_SHAPES,
    )


def _full_keyed() -> Table:
    return Table(
        name="full_keyed",
        make=(
            "create table full_keyed (big text, id int primary key, n int, name text)",
            "alter table full_keyed replica identity full, alter column big set storage external",
        ),
        key=(column("id", "int", *IDS),),
        columns=(column("big", "text", *BIG), column("n", "int", *COUNTS), column("name", "text", *TEXTS)),
        full=True,
        whole_key=("id",),
        often=True,
        ddl=MORE_SHAPES,
    )


def _by_index() -> Table:
    return Table(
        name="by_index",
        make=(
            "create table by_index (id int primary key, code text not null, big text, n int, part int not null)",
            "create unique index by_index_code on by_index (code, part)",
            "alter table by_index replica identity using index by_index_code, alter column big set storage external",
        ),
        key=(column("code", "text", "'a'", "'b'", "'ä'"), column("part", "int", "1", "2")),
        columns=(column("id", "int", *IDS), column("big", "text", *BIG), column("n", "int", *COUNTS)),
        ddl=MORE_SHAPES,
    )


def _silent() -> Table:
    return Table(
        name="silent",
        make=(
            "create table silent (id int primary key, v text, big text)",
            "alter table silent replica identity nothing",
        ),
        key=(column("id", "int", *IDS),),
        columns=(column("v", "text", *TEXTS), column("big", "text", *BIG)),
        inserts_only=True,
        ddl=MORE_SHAPES,
    )


def _no_key() -> Table:
    return Table(
        name="no_key",
        make=("create table no_key (a int, v text)",),
        key=(column("a", "int", "1", "2"),),
        columns=(column("v", "text", *TEXTS),),
        unique=False,
        inserts_only=True,
    )


def _deferred() -> Table:
    """A key that is looked at late identifies nothing."""
    return Table(
        name="deferred",
        make=("create table deferred (id int primary key deferrable initially deferred, v text)",),
        key=(column("id", "int", "1", "2", "3"),),
        columns=(column("v", "text", *TEXTS),),
        unique=False,
        inserts_only=True,
    )


def _parted() -> Table:
    """One partition has its columns in another order and once had more; one has partitions of its own."""
    return Table(
        name="parted",
        make=(
            "create table parted (id int, region text, big text, n int) partition by list (region)",
            "alter table parted add primary key (id, region)",
            "create table parted_eu partition of parted for values in ('eu')",
            "create table parted_us (gone int, n int, region text not null, big text, id int not null)",
            "alter table parted_us drop column gone, alter column big set storage external",
            "alter table parted attach partition parted_us for values in ('us')",
            "create table parted_rest partition of parted default partition by range (id)",
            "create table parted_low partition of parted_rest for values from (minvalue) to (4)",
            "create table parted_high partition of parted_rest default",
        ),
        key=(column("id", "int", *IDS), column("region", "text", "'eu'", "'us'", "'ä'")),
        columns=(column("big", "text", *BIG), column("n", "int", *COUNTS)),
        often=True,
        leaves=("parted_eu", "parted_us", "parted_rest", "parted_low", "parted_high"),
        ddl=MORE_SHAPES,
    )


def _odd_names() -> Table:
    return Table(
        name='Größe "x" 表.a',
        make=(
            'create table "Größe ""x"" 表.a" ("Id" int primary key, "_op" text, "a b" text, "ö]:\'[" text)',
            'alter table "Größe ""x"" 表.a" add column "select" int, add column "_seq_" int',
            'alter table "Größe ""x"" 表.a" alter column "a b" set storage external',
        ),
        key=(column("Id", "int", *IDS),),
        columns=(
            column("_op", "text", *TEXTS),
            column("a b", "text", *BIG),
            column("select", "int", *COUNTS),
            column("ö]:'[", "text", *TEXTS),
            column("_seq_", "int", *COUNTS),
        ),
        ddl=MORE_SHAPES,
    )


def _long_name() -> Table:
    return Table(
        name=LONG_NAME,
        make=(f"create table {quoted(LONG_NAME)} (id int primary key, {quoted(LONG_NAME)} text)",),
        key=(column("id", "int", *IDS),),
        columns=(column(LONG_NAME, "text", *TEXTS),),
    )


def _twin() -> Table:
    return Table(
        name="keyed",
        schema=SECOND_SCHEMA,
        make=(
            f"create schema if not exists {quoted(SECOND_SCHEMA)}",
            f"create table {quoted(SECOND_SCHEMA)}.keyed (other text, id int8 primary key)",
        ),
        key=(column("id", "int8", *IDS),),
        columns=(column("other", "text", *TEXTS),),
        ddl=MORE_SHAPES,
    )


def _parent() -> Table:
    return Table(
        name="parent",
        make=("create table parent (id int primary key, name text)",),
        key=(column("id", "int", *IDS),),
        columns=(column("name", "text", *TEXTS),),
        with_table="child",
    )


def _child() -> Table:
    return Table(
        name="child",
        make=(
            "create table child (id int primary key, parent int, kept text)",
            "alter table child add foreign key (parent) references parent on delete cascade on update cascade",
        ),
        key=(column("id", "int", *IDS),),
        columns=(
            column("parent", "int", *(f"(select id from parent where id = {n})" for n in (1, 2, 3, 4)), "null"),
            column("kept", "text", *TEXTS),
        ),
        with_table="parent",
    )


def _animals() -> Table:
    return Table(
        name="animals",
        make=("create table animals (id int primary key, name text)",),
        key=(column("id", "int", *IDS),),
        columns=(column("name", "text", *TEXTS),),
        with_table="birds",
        ddl=MORE_SHAPES,
    )


def _birds() -> Table:
    return Table(
        name="birds",
        make=("create table birds (wings int, primary key (id)) inherits (animals)",),
        key=(column("id", "int", *IDS),),
        columns=(column("name", "text", *TEXTS), column("wings", "int", *COUNTS)),
        with_table="animals",
    )


def _counted() -> Table:
    return Table(
        name="counted",
        make=(
            "create table counted (id int generated by default as identity primary key, a int, s serial, v text)",
            "alter table counted add column twice int generated always as (a * 2) stored",
        ),
        key=(column("id", "int", *IDS, "default"),),
        columns=(column("a", "int", "1", "null", "-7"), column("v", "text", *TEXTS)),
        hidden=("twice",),
        ddl=MORE_SHAPES,
    )


def _unlogged() -> Table:
    return Table(
        name="scratch",
        make=("create unlogged table scratch (id int primary key, v text)",),
        key=(column("id", "int", *IDS),),
        columns=(column("v", "text", *TEXTS),),
        logged=False,
        with_table="no_key",  # with none that can be captured there is nothing to read
    )


def _typed(name: str, *columns: Column, full: bool = False) -> Table:
    declared = ", ".join(f"{each.sql} {each.type}" for each in columns)
    return Table(
        name=name,
        make=(
            f"create table {name} (id int primary key, {declared})",
            *([f"alter table {name} replica identity full"] if full else []),
        ),
        key=(column("id", "int", *IDS),),
        columns=columns,
        full=full,
        whole_key=("id",) if full else (),
    )


def _numbers() -> Table:
    floats = ("1.1", "null", "'NaN'", "'-0'", "'Infinity'", "'-Infinity'", "0.1")
    return _typed(
        "numbers",
        column("b", "bool", "true", "false", "null"),
        column("i2", "int2", "1", "null", "-32768", "32767"),
        column("i4", "int4", "1", "null", "-2147483648", "2147483647"),
        column("i8", "int8", "1", "null", "-9223372036854775808", "9007199254740993"),
        column("f4", "float4", *floats, "1e-45", "3.4028235e38", "16777217"),
        column("f8", "float8", *floats, "5e-324", "1.7976931348623157e308", "2.2250738585072014e-308", "1e23"),
        column(
            "free",
            "numeric",
            "1.500",
            "null",
            "'NaN'",
            "'Infinity'",
            "'-Infinity'",
            "1e60",
            "-0.00",
            "1e-30",
            "123456789012345678901234567890123456789.987654321",
        ),
        column("n12", "numeric(12, 2)", "0.05", "null", "-9999999999.99", "0", rare=["'NaN'"]),
        column(
            "n38",
            "numeric(38, 10)",
            "1e-10",
            "null",
            "1234567890123456789012345678.0000000001",
            "-9999999999999999999999999999.9999999999",
        ),
        column("n50", "numeric(50, 2)", "1.5", "null", "1e47", "'NaN'"),
        column("up", "numeric(3, -2)", "12345", "null", "-99900"),
        column("down", "numeric(2, 4)", "0.0012", "null", "-0.0099"),
        column("cash", "money", "'12.34'", "null", "'-92233720368547758.08'", "0"),
        column("small", "small", "5", "null", "-1"),
        column("o", "oid", "1", "null", "4294967295"),
    )


def _times() -> Table:
    days = ("'2024-02-29'", "null", "'infinity'", "'-infinity'", "'0044-03-15 BC'", "'12024-01-01'", "'0001-01-01'")
    far = ("'294276-12-31 23:59:59.999999'", "'4714-11-24 00:00:00 BC'")
    moments = (*days, "'1969-12-31 23:59:59.999999'", "'2024-06-30 23:59:60'", "'1900-01-01 00:00:00.5'")
    return _typed(
        "times",
        column("d", "date", *days, "'9999-12-31'", rare=["'4714-11-24 BC'", "'5874897-12-31'"]),
        column("t", "time", "'12:30'", "null", "'24:00'", "'23:59:59.999999'", "'00:00'"),
        column("t3", "time(3)", "'12:30:01.23456'", "null"),
        column("tz", "timetz", "'12:00+05:30'", "null", "'24:00:00-15:59'", "'00:00:00.1+02:03:04'"),
        column("ts", "timestamp", *moments, rare=far),
        column("ts0", "timestamp(0)", "'2024-01-01 00:00:00.6'", "null"),
        column("at", "timestamptz", "'2024-01-01 12:00:00.000001+02'", *moments, rare=far),
        column(
            "i",
            "interval",
            "'1 year -2 mons +3 days -04:05:06.789'",
            "null",
            "'0'",
            "'-178000000 years'",
            "'1 day 02:00'",
            "'-00:00:00.000001'",
        ),
        column("dr", "daterange", "'[2024-01-01,2024-02-01)'", "null", "'empty'", "'(,)'", "'[-infinity,infinity]'"),
        column("tr", "tstzrange", "'[2024-01-01 00:00+00,)'", "null", "'empty'"),
        column("tsr", "tsrange", "'(,\"0044-03-15 00:00:00 BC\"]'", "null"),
    )


def _texts() -> Table:
    return _typed(
        "texts",
        column("v", "varchar(9)", "'NULL'", "null", "''", "'ü€😀'"),
        column("c", "char(4)", "'ab'", "null", "''", "'äöü'"),
        column("c1", '"char"', "'x'", "null", "''", "'''' "),
        column("nm", "name", "'a name'", "null", "''"),
        column("raw", "bytea", r"'\x00ff61'", "null", r"'\x'", "decode(repeat('ff00', 1500), 'hex')"),
        column("u", "uuid", "'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'", "null"),
        column("j", "json", '\'{"b":1,  "a": [null, "\\u00e9"]}\'', "null", "'null'", "' \"x\" '"),
        column("jb", "jsonb", '\'{"b":1,  "a": 2.50}\'', "null", "'[]'", "'\"it''s\"'", "'1e5'"),
        column("m", "mood", "'so so'", "null", "'it''s'"),
        column("label", "label", "'x'", "null", "''"),
        column("ip", "inet", "'10.0.0.1'", "null", "'::1/64'", "'10.0.0.1/8'"),
        column("net", "cidr", "'10.0.0.0/8'", "null", "'2001:db8::/32'"),
        column("mac", "macaddr", "'08:00:2b:01:02:03'", "null"),
        column("mac8", "macaddr8", "'08:00:2b:01:02:03:04:05'", "null"),
        column("b3", "bit(3)", "B'101'", "null"),
        column("vb", "varbit", "B'1'", "null", "B''", "B'10101010101'"),
        column("tv", "tsvector", "'fat:2B ''it''''s'' rat:1'", "null", "''"),
        column("tq", "tsquery", "'fat & (rat | !cat:*)'", "null"),
        column("jp", "jsonpath", "'$.a[*] ? (@ > 1)'", "null"),
        column("lsn", "pg_lsn", "'16/B374D848'", "null"),
    )


def _lists() -> Table:
    unfit = ("'{{1,2},{3,4}}'", "'[0:1]={4,5}'")
    return _typed(
        "lists",
        column("i", "int4[]", "'{1,NULL,-3}'", "null", "'{}'", "'{2147483647}'", rare=unfit),
        column("i2", "int2[]", "'{1,-32768}'", "null", rare=unfit),
        column("i8", "int8[]", "'{9007199254740993}'", "null", rare=unfit),
        column("f", "float8[]", "'{NaN,-0,0.1,NULL}'", "null", "'{Infinity}'"),
        column("f4", "float4[]", "'{1.1,NaN}'", "null"),
        column("n", "numeric(6, 2)[]", "'{0.05,-1,NULL}'", "null", rare=["'{NaN}'"]),
        column("free", "numeric[]", "'{1.50,NaN}'", "null", "'{{1},{2}}'"),
        column(
            "t",
            "text[]",
            r"""array['a,b', null, 'NULL', 'q"r', '', '\', e'x\ny', '{z}', 'null', ' sp ']""",
            "null",
            "'{}'",
            "'{\"\"}'",
            "array['it''s', 'ä€😀']",
            rare=["'{{a},{b}}'", "'[-1:-1]={x}'"],
        ),
        column("v", "varchar(9)[]", "'{a,NULL}'", "null"),
        column("c", "char(3)[]", "'{a,NULL}'", "null"),
        column("b", "bool[]", "'{t,f,NULL}'", "null", "'{}'"),
        column("raw", "bytea[]", r"array['\x00ff'::bytea, null]", "null"),
        column("d", "date[]", "'{2024-02-29,NULL,infinity}'", "null"),
        column("ts", "timestamp[]", "'{\"0044-03-15 00:00:00 BC\",-infinity}'", "null"),
        column("at", "timestamptz[]", "'{2024-01-01 12:00:00.000001+02}'", "null"),
        column("u", "uuid[]", "'{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}'", "null"),
        column("m", "mood[]", "'{\"so so\",NULL}'", "null"),
        column("j", "jsonb[]", 'array[\'{"a": "x,y"}\'::jsonb]', "null"),
        column("ints", "ints", "'{1,2}'", "null", rare=["'{{1},{2}}'"]),
    )


def _shapes() -> Table:
    return _typed(
        "shapes",
        column("r4", "int4range", "'[1,5)'", "null", "'empty'", "'(,)'"),
        column("r8", "int8range", "'(,5]'", "null"),
        column("rn", "numrange", "'(1.50,2.0]'", "null"),
        column("mr", "int4multirange", "'{[1,3),[5,7)}'", "null", "'{}'"),
        column("p", "point", "'(1,2.5)'", "null", "'(NaN,-0)'"),
        column("l", "line", "'{1,-1,0}'", "null"),
        column("ls", "lseg", "'[(0,0),(1,1.5)]'", "null"),
        column("bx", "box", "'(1,1),(0,0)'", "null"),
        column("pa", "path", "'[(0,0),(1,1)]'", "null", "'((0,0),(1,1))'"),
        column("po", "polygon", "'((0,0),(1,1),(1,0))'", "null"),
        column("ci", "circle", "'<(0,0),1e-10>'", "null"),
        column("pair", "pair", '\'(1,"a, ""b""")\'', "null", "'(,)'", "row(null, '')::pair"),
        column("pairs", "pair[]", "array[(1, 'x,y')::pair, null]", "null", "'{}'"),
        column("x", "xid", "'7'", "null"),
        column("ti", "tid", "'(0,1)'", "null"),
        column("rc", "regclass", "'pg_class'", "null"),
        column("rt", "regtype", "'int4'", "null"),
        column("ov", "oidvector", "'1 2 3'", "null"),
        column("iv", "int2vector", "'1 -2'", "null"),
        column("sn", "pg_snapshot", "'10:20:10,14'", "null"),
        full=True,
    )


def _extended() -> Table:
    return _typed(
        "extended",
        column("h", "hstore", '\'a=>1, "b \\"q"=>NULL\'', "null", "''"),
        column("lt", "ltree", "'Top.Science'", "null"),
        column("ct", "citext", "'MiXed'", "null", "''"),
        column("cts", "citext[]", "'{A,b}'", "null"),
        column("x", "xml", "'<a b=\"c\">ä</a>'", "null"),
    )


TYPES = (
    "create type mood as enum ('so so', 'it''s', 'ok')",
    "create domain small as int check (value < 10)",
    "create domain label as varchar(20)",
    "create domain ints as int[]",
    "create type pair as (a int, b text)",
)
"""What the tables below are declared with."""

EXTENSIONS = ("create extension hstore", "create extension ltree", "create extension citext")
"""Only a server with its contrib folder has them."""

TABLES = (
    _keyed(), _composite(), _text_key(), _keyless(), _full_keyed(), _by_index(), _silent(), _no_key(), _deferred(),
    _parted(), _odd_names(), _long_name(), _twin(), _parent(), _child(), _animals(), _birds(), _counted(), _unlogged(),
    _numbers(), _times(), _texts(), _lists(), _shapes(),
)  # fmt: skip
EXTENDED = _extended()
