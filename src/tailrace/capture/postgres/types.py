"""The Arrow type of each PostgreSQL type. A type that is not named here arrives as its exact text.

Stream and snapshot get the same answer: both ask with a type's number and modifier, with domains already replaced by
their base types. `RULES` names all types that a server is delivered with. The documentation page on types is generated
from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pyarrow as pa

_TEXT, _UTC, _NAIVE = pa.string(), pa.timestamp("us", "UTC"), pa.timestamp("us")
_DIGITS_MAX = 38
_HEADER = 4  # PostgreSQL's VARHDRSZ, added to every numeric modifier
_SAMPLE = pa.decimal128(_DIGITS_MAX, 2)

UNFIT_HINT = (
    "Correct the row at the source, or give the column a type without a limit (text, or numeric without "
    "precision), then run again: the table is reloaded. With `tables.on_bad_row: dead-letter` it is loaded "
    "without such rows."
)


@dataclass(frozen=True)
class TypeRule:
    """The Arrow type of some of PostgreSQL's types, and a note on their values."""

    arrow: pa.DataType
    types: dict[str, tuple[int, int]]
    """A type's number and that of its array (0: it has none)."""
    note: str
    listed: bool = True
    """True if its arrays are lists; otherwise they are text too."""


def _text(note: str, types: str) -> TypeRule:
    """Return a rule for types that arrive as text, arrays included.

    `types` is `name number array`, one after the other.
    """
    matches = re.findall(r"(\S+) (\d+) (\d+)", types)
    return TypeRule(_TEXT, {name: (int(oid), int(array)) for name, oid, array in matches}, note, listed=False)


# https://github.com/postgres/postgres/blob/master/src/include/catalog/pg_type.dat holds these numbers;
# they never change.
RULES: tuple[TypeRule, ...] = (
    TypeRule(pa.bool_(), {"boolean": (16, 1000)}, "every value fits"),
    TypeRule(pa.int16(), {"smallint": (21, 1005)}, "every value fits"),
    TypeRule(pa.int32(), {"integer": (23, 1007)}, "every value fits"),
    TypeRule(pa.int64(), {"bigint": (20, 1016), "oid": (26, 1028)}, "every value fits"),
    TypeRule(pa.float32(), {"real": (700, 1021)}, "`NaN`, `Infinity`, `-Infinity` and `-0` are kept"),
    TypeRule(pa.float64(), {"double precision": (701, 1022)}, "`NaN`, `Infinity`, `-Infinity` and `-0` are kept"),
    TypeRule(_SAMPLE, {"numeric(p, s)": (1700, 1231)}, "`NaN` does not fit"),
    TypeRule(
        _TEXT,
        {
            "text": (25, 1009),
            "varchar(n)": (1043, 1015),
            "char(n)": (1042, 1014),
            '"char"': (18, 1002),
            "name": (19, 1003),
        },
        "every value fits; `char(n)` keeps its padding",
    ),
    TypeRule(pa.binary(), {"bytea": (17, 1001)}, "every value fits"),
    TypeRule(pa.date32(), {"date": (1082, 1182)}, "`infinity` becomes `9999-12-31`, `-infinity` `0001-01-01`"),
    TypeRule(
        _NAIVE,
        {"timestamp": (1114, 1115)},
        "infinity as for `date`; after `294247-01-10 04:00:54.775807` it does not fit",
    ),
    TypeRule(_UTC, {"timestamptz": (1184, 1185)}, "as for `timestamp`"),
    _text("exact text; `24:00:00` stays", "time 1083 1183 timetz 1266 1270"),
    _text("as `1 year 2 mons -3 days 04:05:06.7`", "interval 1186 1187"),
    _text("as in the locale `C`, with two decimals: `-$1,234.56`", "money 790 791"),
    _text("the digits", "bit(n) 1560 1561 varbit(n) 1562 1563"),
    _text("in lower case", "uuid 2950 2951"),
    _text("as it was written", "json 114 199"),
    _text("as the server prints it", "jsonb 3802 3807 jsonpath 4072 4073 xml 142 143"),
    _text("as the server prints it", "inet 869 1041 cidr 650 651 macaddr 829 1040 macaddr8 774 775"),
    _text(
        "all digits of the numbers",
        "point 600 1017 line 628 629 lseg 601 1018 box 603 1020 path 602 1019 polygon 604 1027 circle 718 719",
    ),
    _text(
        "as `[1,5)`, `empty`, `(,)`",
        "int4range 3904 3905 int8range 3926 3927 numrange 3906 3907 daterange 3912 3913 "
        "tsrange 3908 3909 tstzrange 3910 3911",
    ),
    _text(
        "as `{[1,5),[7,)}`",
        "int4multirange 4451 6150 int8multirange 4536 6157 nummultirange 4532 6151 datemultirange 4535 6155 "
        "tsmultirange 4533 6152 tstzmultirange 4534 6153",
    ),
    _text("as the server prints it", "tsvector 3614 3643 tsquery 3615 3645"),
    _text(
        "as the server prints it",
        "xid 28 1011 xid8 5069 271 cid 29 1012 tid 27 1010 pg_lsn 3220 3221 pg_snapshot 5038 5039 "
        "txid_snapshot 2970 2949",
    ),
    _text(
        "the name, with its schema, that the object had then; its number if there was none",
        "regclass 2205 2210 regtype 2206 2211 regproc 24 1008 regprocedure 2202 2207 regoper 2203 2208 "
        "regoperator 2204 2209 regrole 4096 4097 regnamespace 4089 4090 regconfig 3734 3735 "
        "regdictionary 3769 3770 regcollation 4191 4192",
    ),
    _text("as the server prints it", "refcursor 1790 2201 aclitem 1033 1034 int2vector 22 1006 oidvector 30 1013"),
    _text(
        "the server's own; as it prints them",
        "pg_node_tree 194 0 pg_ndistinct 3361 0 pg_dependencies 3402 0 pg_mcv_list 5017 0 "
        "pg_brin_bloom_summary 4600 0 pg_brin_minmax_multi_summary 4601 0 gtsvector 3642 3644",
    ),
)
"""All types that a server is delivered with."""

USER_DEFINED_TYPES = {
    "c": ("composite types", 'as `(1,"a b",)`'),
    "e": ("enums", "the label"),
    "r": ("ranges you define", "as `[1,5)`"),
    "m": ("multiranges you define", "as `{[1,5)}`"),
    "d": ("arrays of domains", "as `{1,NULL}`"),
}
"""By the catalogue's letter: types that a database builds from others.

They arrive as text, and so do their arrays; a domain itself counts as its base type.
"""

_NUMERIC, _NUMERIC_ARRAY = 1700, 1231
_SCALARS = {oid: rule.arrow for rule in RULES for oid, _ in rule.types.values()}
_LISTS = {array: pa.list_(rule.arrow) for rule in RULES if rule.listed for _, array in rule.types.values()}
_NUMBERS = frozenset(number for rule in RULES for numbers in rule.types.values() for number in numbers) - {0}


def arrow_type(oid: int, modifier: int) -> pa.DataType:
    """Return the Arrow type for a type's number and modifier (-1: none)."""
    if oid == _NUMERIC:
        return _decimal(modifier) or _TEXT
    if oid == _NUMERIC_ARRAY:
        decimal = _decimal(modifier)
        return pa.list_(decimal) if decimal is not None else _TEXT
    return _SCALARS.get(oid) or _LISTS.get(oid, _TEXT)


def is_known(oid: int, kind: str = "b") -> bool:
    """Return whether it is documented how the type arrives.

    `kind` is the catalogue's `typtype`, for an array its element's. An unknown type is an extension's, or a newer
    server's: it arrives as its exact text all the same.
    """
    return oid in _NUMBERS or kind in USER_DEFINED_TYPES


def _decimal(modifier: int) -> pa.DataType | None:
    """Return decimal(p, s). None where the values need more than 38 digits or have no limit."""
    if modifier < _HEADER:
        return None
    precision = ((modifier - _HEADER) >> 16) & 0xFFFF
    scale = ((modifier - _HEADER) & 0x7FF ^ 1024) - 1024  # eleven bits, signed since PostgreSQL 15
    if scale < 0:
        precision, scale = precision - scale, 0
    precision = max(precision, scale)
    return pa.decimal128(precision, scale) if 0 < precision <= _DIGITS_MAX else None
