"""Values of every PostgreSQL type at and beyond its edges, and what they mean, read without any of our kernels.

A *plain* value is one that can be compared whatever it came from: floats as their bits, dates and timestamps
as numbers, decimals without their point, text as bytes.
"""

from __future__ import annotations

import re
import struct
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa

UNFIT = object()
"""What a text is that its column's type cannot hold."""


def quoted(*texts: str) -> list[str]:
    """SQL literals."""
    return ["'" + text.replace("'", "''") + "'" for text in texts]


TRICKY = [
    "", " ", "NULL", "null", "\\N", "\\.", "a\tb\nc\rd\be\ff\vg", 'say "hi"', "it's", "back\\slash", "\\\\", "{", "}",
    "{}", "a,b", "(1,2)", "naïve 🦆 ß", "\x01\x7f", "\u2028\ufeff", "-", "x" * 5000,
]  # fmt: skip
_LARGE = "(select string_agg(md5(n::text), '' order by n) from generate_series(1, 500) n)"
"""So large that it is kept beside the row and not sent again when it did not change."""
_NINES = "9" * 38
_INSTANTS = [
    "infinity", "-infinity", "4714-11-24 00:00:00 BC",
    "4713-11-24 00:00:00 BC", "0044-03-15 12:00:00.5 BC", "0001-12-31 23:59:59.999999 BC",
    "0001-01-01 00:00:00", "1582-10-10 00:00:00", "1969-12-31 23:59:59.999999", "1970-01-01 00:00:00",
    "2000-02-29 12:34:56.000001", "2016-12-31 23:59:60", "2026-01-02 03:04:05.6", "9999-12-31 23:59:59.999999",
    "10000-01-01 00:00:00", "19999-12-31 23:59:59.999999", "294247-01-10 04:00:54.775807",
]  # fmt: skip

BUILT_IN: dict[str, list[str]] = {
    "boolean": ["true", "false"],
    "smallint": ["(-32768)", "32767", "0"],
    "integer": ["(-2147483648)", "2147483647", "0"],
    "bigint": ["(-9223372036854775808)", "9223372036854775807", "0"],
    "oid": ["0", "'4294967295'", "2147483648"],
    "real": [
        *quoted("3.4028235e38", "-3.4028235e38", "1e-45", "1.17549435e-38", "0.1", "-0", "16777216"),
        *quoted("NaN", "Infinity", "-Infinity"), "-('NaN'::real)",
    ],
    "double precision": [
        *quoted("1.7976931348623157e308", "-5e-324", "2.2250738585072014e-308", "0.1", "0.30000000000000004", "-0"),
        *quoted("1e23", "9007199254740993", "NaN", "Infinity", "-Infinity"), "-('NaN'::float8)",
    ],
    "numeric": quoted(
        "NaN", "Infinity", "-Infinity", _NINES, _NINES + "9", "-" + "9" * 1000, "0", "-0.50", "1.500", "1e-16383",
        "1e131071", "0." + "0" * 999 + "1", "123456789012345678901234567890.123456789012345678901234567890",
    ),
    "numeric(10,2)": quoted("99999999.99", "-99999999.99", "0", "-0.01", "1.005"),
    "numeric(38,0)": quoted(_NINES, "-" + _NINES, "18446744073709551616", "-1"),
    "numeric(38,10)": quoted("9" * 28 + "." + "9" * 10, "-0.0000000001", "12"),
    "numeric(38,38)": quoted("0." + _NINES, "-0." + "0" * 37 + "1"),
    "numeric(39,0)": quoted(_NINES + "9", "-" + _NINES + "9", "NaN"),
    "numeric(1000,500)": quoted("9" * 500 + "." + "9" * 500, "NaN"),
    "numeric(3,-2)": quoted("99900", "-99900", "149", "0"),
    "numeric(3,5)": quoted("0.00999", "-0.00001"),
    "text": [*quoted(*TRICKY), _LARGE],
    "varchar": quoted(*TRICKY[:6]),
    "varchar(10)": quoted("", "1234567890", "ß"),
    "char(5)": quoted("", "a", "ab   ", "é"),
    "bpchar": quoted("", "a  "),
    '"char"': quoted("a", "", "\\", "\x01", "\\377", "\\200"),
    "name": quoted("", "n" * 63, 'Quo"ted', "é", " x "),
    "bytea": [*quoted("\\x", "\\x00", "\\x" + bytes(range(256)).hex(), "\\x5c78"), f"decode({_LARGE}, 'hex')"],
    "date": quoted(
        "infinity", "-infinity", "4714-11-24 BC", "0044-03-15 BC", "0001-12-31 BC", "0001-01-01", "1900-03-01",
        "1970-01-01", "2000-02-29", "9999-12-31", "10000-01-01", "5874897-12-31",
    ),
    "timestamp": quoted(*_INSTANTS),
    "timestamp(0)": quoted("2026-01-02 03:04:05.5", "infinity"),
    "timestamp(3)": quoted("2026-01-02 03:04:05.6789"),
    "timestamptz": quoted(
        *_INSTANTS, "2026-01-02 03:04:05.25+05:30", "1890-01-01 00:00:00-00:17:30", "0001-01-01 00:00:00+14",
    ),
    "timestamptz(3)": quoted("2026-01-02 03:04:05.6789+02"),
    "time": quoted("00:00:00", "24:00:00", "23:59:59.999999", "12:34:56.7", "23:59:60"),
    "time(3)": quoted("23:59:59.9999"),
    "timetz": quoted("00:00:00+00", "24:00:00+15:59", "00:00:00-15:59:59", "12:34:56.789012+05:30:15"),
    "timetz(0)": quoted("12:34:56.7-08"),
    "interval": quoted(
        "0", "1 year 2 mons -3 days 04:05:06.7", "-1 mons +1 day -00:00:00.000001", "178000000 years",
        "-178000000 years", "2147483647 days", "2562047788:00:54.775807", "P1Y2M3DT4H5M6S",
    ),
    "interval year to month": quoted("13 mons"),
    "interval second(3)": quoted("1.23456"),
    "money": quoted("0", "1234.56", "-0.01", "92233720368547758.07", "-92233720368547758.08", "1000000000000000.99"),
    "bit": ["B'0'", "B'1'"],
    "bit(10)": ["B'1010101010'", "B'0000000000'"],
    "varbit": ["B''", "B'1'", "repeat('10', 100)"],
    "varbit(5)": ["B'101'"],
    "uuid": quoted(
        "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11", "00000000-0000-0000-0000-000000000000",
        "ffffffff-ffff-ffff-ffff-ffffffffffff",
    ),
    "json": [
        *quoted('{"a": "\\u0000",  "a": [1.50, {"b": null}], "é": "\\ud83e\\udd86"}'),
        *quoted("null", '""', " [ ] ", '"\\t"', "1e400"),
        "repeat('[', 1000) || repeat(']', 1000)", "E'{\"a\":\\n1}'",
    ],
    "jsonb": [
        *quoted('{"b": 1, "a": [1.50, {"b": null}], "b": 2, "é": "\\u00e9\\n"}'),
        *quoted("null", '"\\\\u0000"', "[]", "1e400", "-0.10"),
        "repeat('[', 1000) || repeat(']', 1000)",
    ],
    "jsonpath": quoted('$.a[*] ? (@.b > 1 && @.c like_regex "^x")', "strict $", '$."é"'),
    "inet": quoted("192.168.0.1", "192.168.0.1/24", "0.0.0.0/0", "::1", "2001:db8::1/64", "::ffff:1.2.3.4/128"),
    "cidr": quoted("192.168/24", "10.0.0.1/32", "::/0", "2001:db8::/32"),
    "macaddr": quoted("08:00:2b:01:02:03", "FF-FF-FF-FF-FF-FF"),
    "macaddr8": quoted("08:00:2b:01:02:03:04:05", "00:00:00:00:00:00:00:00"),
    "point": quoted("(1,2)", "(NaN,-Infinity)", "(0.1,1e-300)", "(999999999999999999999999,0)"),
    "line": quoted("{4,5,6}", "{0.1,-1,0.30000000000000004}"),
    "lseg": quoted("[(0.1,0),(3,7)]"),
    "box": quoted("((3,7),(15,18))", "((0,0),(0.1,-Infinity))"),
    "path": quoted("[(0,0),(1,1.1)]", "((0,0),(1,1),(2,0))"),
    "polygon": quoted("((0,0),(1,1),(2,0.1))"),
    "circle": quoted("<(5,7.7),10>", "<(0,0),0>"),
    "int4range": quoted("empty", "(,)", "[1,5]", "[-2147483648,)", "(,3)"),
    "int8range": quoted("empty", "[-9223372036854775808,9223372036854775807)", "(,]"),
    "numrange": quoted("(1.50,NaN]", "[,Infinity)", "[0.1,0.1]"),
    "daterange": quoted("[2026-01-01,2026-12-31]", "[0044-03-15 BC,infinity]", "(,)"),
    "tsrange": quoted("[2026-01-02 03:04:05.6,infinity)", "(0044-03-15 12:00:00 BC,)", "empty"),
    "tstzrange": quoted("[2026-01-02 03:04:05+05:30,2026-02-02 00:00:00+00]", "[,infinity]"),
    "int4multirange": quoted("{}", "{[1,3),[5,)}", "{(,)}"),
    "int8multirange": quoted("{[1,3),[3,9223372036854775807)}"),
    "nummultirange": quoted("{(1.50,2],[3,3]}"),
    "datemultirange": quoted("{[2026-01-01,2026-01-02],[0044-03-15 BC,0044-03-16 BC)}"),
    "tsmultirange": quoted("{[2026-01-02 03:04:05,2026-01-03 00:00:00.000001)}"),
    "tstzmultirange": quoted("{[2026-01-02 03:04:05+02,),(,2020-01-01 00:00:00+00)}"),
    "tsvector": quoted("", "a:1A b:2,3C 'it''s':4 'é'", "'quo\\\\te' 'x y'"),
    "tsquery": quoted("", "a & b | !'c d':*AB <-> 'it''s'"),
    "xid": quoted("0", "4294967295"),
    "xid8": quoted("0", "18446744073709551615"),
    "cid": quoted("0", "4294967295"),
    "tid": quoted("(0,1)", "(4294967295,65535)"),
    "pg_lsn": quoted("0/0", "16/B374D848", "FFFFFFFF/FFFFFFFF"),
    "pg_snapshot": quoted("10:20:10,14,15", "1:1:"),
    "txid_snapshot": quoted("10:20:10,14,15"),
    "regclass": quoted("pg_class", 'odd."A ""b"', "information_schema.tables", "0", "4294967295"),
    "regtype": quoted("integer", "timestamp with time zone[]", "odd.mood", "0", "4294967295"),
    "regproc": quoted("now", "odd.twice", "0", "4294967295"),
    "regprocedure": quoted("abs(numeric)", "odd.twice(integer)", "0"),
    "regoper": quoted("pg_catalog.||/", "0"),
    "regoperator": quoted("+(integer,integer)", "-(none,integer)", "0"),
    "regrole": quoted("postgres", "0", "4294967295"),
    "regnamespace": quoted("public", "odd", "pg_catalog"),
    "regconfig": quoted("simple", "english"),
    "regdictionary": quoted("simple"),
    "regcollation": quoted('"C"', '"POSIX"'),
    "refcursor": quoted("", 'cur "x"'),
    "aclitem": quoted("postgres=r*w/postgres", "=X/postgres"),
    "int2vector": quoted("", "1 -2 32767"),
    "oidvector": quoted("", "1 4294967295"),
    "pg_node_tree": ["(select ev_action from pg_rewrite order by oid limit 1)"],
    "pg_ndistinct": ["(select stxdndistinct from pg_statistic_ext_data limit 1)"],
    "pg_dependencies": ["(select stxddependencies from pg_statistic_ext_data limit 1)"],
    "pg_mcv_list": ["(select stxdmcv from pg_statistic_ext_data limit 1)"],
    # Nothing but the server's own indexes can make a value of these.
    "pg_brin_bloom_summary": ["null"],
    "pg_brin_minmax_multi_summary": ["null"],
    "gtsvector": ["null"],
}  # fmt: skip
"""By type: SQL for values that fit."""

NEWER: dict[int, dict[str, list[str]]] = {17: {"interval": quoted("infinity", "-infinity")}}
"""What only servers from this version on can hold."""

XML = quoted('<a b="1">é &amp; <![CDATA[x]]></a>', "only text", '<?xml version="1.0" encoding="UTF-8"?><a/>')
"""For servers that were built with it."""

SETUP = r"""
create schema odd;
create table odd."A ""b" (id int);
create function odd.twice(n int) returns int language sql immutable as 'select n * 2';
create type odd.mood as enum ('sad', 'o k', 'quo"te', 'com,ma', 'é', 'NULL', 'back\slash');
create type odd.pair as (a int, b text);
create type odd.nest as (p odd.pair, q odd.pair[], r numeric(10,2), "S" odd.mood, t timestamptz);
create type odd.floatrange as range (subtype = float8);
create domain odd.whole as int check (value > 0);
create domain odd.price as numeric(10,2);
create domain odd.net as odd.price;
create domain odd.tags as text[];
create domain odd.prices as numeric(10,2)[];
create domain odd.feeling as odd.mood;
create domain odd.couple as odd.pair;
create domain odd.moment as timestamptz(3);
create domain odd.any_number as numeric;
create type odd.shout;
create function odd.shout_in(cstring) returns odd.shout language internal immutable strict as 'textin';
create function odd.shout_out(odd.shout) returns cstring language internal immutable strict as 'textout';
create type odd.shout (input = odd.shout_in, output = odd.shout_out, like = text);
create table odd.studied as select n % 3 as a, n % 3 as b from generate_series(1, 300) n;
create statistics odd.studies on a, b from odd.studied;
analyze odd.studied;
"""
"""What the values need. `odd.shout` is a type that no server brings along, as an extension would make it."""

_PAIRS = ['(1,"a ""b"" \\\\ ,")', "(,)", '(-1,"")', "(0,NULL)"]
MADE: dict[str, list[str]] = {
    "odd.mood": quoted("sad", "o k", 'quo"te', "com,ma", "é", "NULL", "back\\slash"),
    "odd.pair": quoted(*_PAIRS),
    "odd.nest": [
        "row(row(1, 'a,\"b\"')::odd.pair, array[row(2, null)::odd.pair, null], 1.5, 'o k', '2026-01-02 03:04:05+05')",
        "row(null, null, null, null, null)", "row(null, '{}'::odd.pair[], 'NaN', 'quo\"te', 'infinity')",
    ],
    "odd.floatrange": quoted("[0.1,Infinity)", "empty"),
    "odd.floatmultirange": quoted("{[0.1,0.2),[1,2]}"),
    "odd.shout": quoted("hey", "", 'quo"te'),
    "odd.whole": ["1", "2147483647"],
    "odd.price": quoted("99999999.99", "-0.01"),
    "odd.net": quoted("1.5"),
    "odd.tags": quoted("{}", '{a,NULL,"NULL","b,c"}'),
    "odd.prices": quoted("{1.50,NULL,-99999999.99}"),
    "odd.feeling": quoted("o k"),
    "odd.couple": quoted(_PAIRS[0]),
    "odd.moment": quoted("2026-01-02 03:04:05.6789+02", "-infinity"),
    "odd.any_number": quoted("NaN", "9" * 100),
    "information_schema.cardinal_number": ["1"],
    "information_schema.sql_identifier": quoted("é"),
    "information_schema.time_stamp": quoted("2026-01-02 03:04:05.678+02"),
    "information_schema.yes_or_no": quoted("YES"),
}  # fmt: skip
"""Types made in the database: enums, composites, ranges, domains, and one of its own."""

SHAPES: dict[str, list[str]] = {
    "numeric[]": quoted("{{1.5,NaN},{NULL,Infinity}}", "[0:1]={1,2}", "{}"),
    "uuid[]": quoted("{{00000000-0000-0000-0000-000000000000},{NULL}}"),
    "time[]": quoted("[-1:0]={24:00:00,NULL}", "{}"),
    "odd.mood[]": quoted('{{sad,NULL},{"NULL",é}}', "[5:5]={sad}"),
    "jsonb[]": ['array[\'{"a": "b,c"}\'::jsonb, null]'],
    "int[4]": quoted("{1,2}", "{NULL}"),
    "int[][]": quoted("{1,2,3}"),
}
"""Arrays of other shapes than the one that every type is tried with."""

TOO_MUCH: list[tuple[str, str]] = [
    ("numeric(10,2)", "NaN"),
    ("numeric(38,0)", "NaN"),
    ("odd.net", "NaN"),
    ("timestamp", "294247-01-10 04:00:54.775808"),
    ("timestamp", "294276-12-31 23:59:59.999999"),
    ("timestamptz", "294276-12-31 23:59:59.999999+00"),
    ("int[]", "{{1,2},{3,NULL}}"),
    ("int[]", "[0:2]={1,2,3}"),
    ("oid[]", "{{{1}}}"),
    ("text[]", r'{{"a \"b\"",NULL},{"NULL",""}}'),
    ("odd.tags", "[2:2]={é}"),
    ("numeric(10,2)[]", "{1.50,NaN}"),
    ("timestamp[]", '{"2026-01-02 03:04:05","294276-12-31 23:59:59"}'),
]
"""Values that their column's type cannot hold, as the server prints them."""

EXTENSIONS: dict[str, dict[str, list[str]]] = {
    "hstore": {"hstore": quoted('"a"=>"1", "b c"=>NULL, "quo\\"te"=>"é"', "")},
    "ltree": {
        "ltree": quoted("Top.Collections.Pictures", ""), "lquery": quoted("Top.*{1,2}.!a|b"),
        "ltxtquery": quoted("a & b*"),
    },
    "citext": {"citext": quoted("MiXed", "")},
    "cube": {"cube": quoted("(1,2),(3,4.5)", "(0.1)")},
    "isn": {"isbn13": quoted("978-0-393-04002-9"), "issn": quoted("0378-5955")},
    "seg": {"seg": quoted("1.5", "<0.2 .. 1.5")},
    "vector": {
        "vector": quoted("[1,2.5,-3]"), "vector(2)": quoted("[0.1,1e-5]"), "halfvec": quoted("[1,2]"),
        "sparsevec": quoted("{1:1,3:2}/5"),
    },
}  # fmt: skip
"""By extension, where a server has it."""


# --- what a text means -------------------------------------------------------------------------------------


def meaning(kind: pa.DataType, text: str) -> Any:
    """The plain value of what the server printed, in a column of this type; `UNFIT` if it cannot hold it."""
    if pa.types.is_list(kind):
        return _array(kind.value_type, text)
    if pa.types.is_string(kind):
        return text.encode()
    if pa.types.is_binary(kind):
        return bytes.fromhex(text.removeprefix("\\x"))
    if pa.types.is_boolean(kind):
        return {"t": True, "f": False}[text]
    if pa.types.is_integer(kind):
        return int(text)
    if pa.types.is_float32(kind):
        return bits_of(struct.unpack("f", struct.pack("f", float(text)))[0])
    if pa.types.is_float64(kind):
        return bits_of(float(text))
    if pa.types.is_decimal(kind):
        return UNFIT if text == "NaN" else _unscaled(Fraction(text), kind)
    if pa.types.is_date32(kind):
        return _days({"infinity": "9999-12-31", "-infinity": "0001-01-01"}.get(text, text))
    return _micros({"infinity": "9999-12-31 23:59:59.999999", "-infinity": "0001-01-01 00:00:00"}.get(text, text))


def plain(column: pa.Array) -> list[Any]:
    """The plain values of an Arrow column."""
    kind = column.type
    if pa.types.is_list(kind):
        items = plain(column.flatten())
        lengths, taken, found = column.value_lengths().to_pylist(), 0, []
        for length in lengths:
            found.append(None if length is None else items[taken : taken + length])
            taken += length or 0
        return found
    if pa.types.is_timestamp(kind):
        return list(column.cast(pa.int64()).to_pylist())
    if pa.types.is_date32(kind):
        return list(column.cast(pa.int32()).to_pylist())
    if pa.types.is_string(kind):
        return list(column.cast(pa.binary()).to_pylist())
    if pa.types.is_floating(kind):
        return [None if value is None else bits_of(value) for value in column.to_pylist()]
    if pa.types.is_decimal(kind):
        return [None if value is None else _unscaled(value, kind) for value in column.to_pylist()]
    return list(column.to_pylist())


def bits_of(number: float) -> bytes:
    """A float that can be compared: NaN is not equal to itself, and -0 is to 0."""
    return struct.pack(">d", number)


def _unscaled(number: Decimal | Fraction, kind: pa.Decimal128Type) -> int:
    scaled = Fraction(number) * 10**kind.scale
    assert scaled.denominator == 1
    return int(scaled)


_DATE = r"(?P<year>\d{4,})-(?P<rest>\d\d-\d\d)"
_CLOCK = r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)(?:\.(?P<fraction>\d{1,6}))?(?P<zone>\+00)?"


def _day(found: re.Match[str]) -> int:
    year = int(found["year"])
    year = 1 - year if found["bc"] else year
    sign = "-" if year < 0 else ""
    return int(np.datetime64(f"{sign}{abs(year):04d}-{found['rest']}", "D").astype(np.int64))


def _days(text: str) -> int:
    found = re.fullmatch(_DATE + "(?P<bc> BC)?", text)
    assert found is not None, text
    return _day(found)


def _micros(text: str) -> Any:
    found = re.fullmatch(f"{_DATE} {_CLOCK}(?P<bc> BC)?", text)
    assert found is not None, text
    clock = (int(found["hour"]) * 60 + int(found["minute"])) * 60 + int(found["second"])
    micros = (_day(found) * 86_400 + clock) * 1_000_000 + int((found["fraction"] or "").ljust(6, "0"))
    return micros if micros < 2**63 else UNFIT


_ELEMENT = re.compile(r'"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<bare>[^",{}\\]+)', re.DOTALL)


def _array(kind: pa.DataType, text: str) -> Any:
    if not text.startswith("{"):
        return UNFIT
    items: list[Any] = []
    at = 1
    while text[at] != "}":
        found = _ELEMENT.match(text, at)
        if found is None:
            return UNFIT
        if found["bare"] == "NULL":
            items.append(None)
        else:
            quoted_text = found["quoted"] or ""
            bare = found["bare"] or re.sub(r"\\(.)", r"\1", quoted_text, flags=re.DOTALL)
            items.append(meaning(kind, bare))
        at = found.end() + (text[found.end()] == ",")
    assert at == len(text) - 1, text
    return UNFIT if UNFIT in items else items
