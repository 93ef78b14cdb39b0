"""Which Arrow type a PostgreSQL type arrives as. Anything not named here arrives as its exact text.

The same answer for stream and snapshot: both come here with a type's number and modifier, domains already
replaced by what they stand on.
"""

from __future__ import annotations

import pyarrow as pa

_TEXT, _UTC, _NAIVE = pa.string(), pa.timestamp("us", "UTC"), pa.timestamp("us")

# https://github.com/postgres/postgres/blob/master/src/include/catalog/pg_type.dat holds these numbers;
# they never change.
_SCALARS: dict[int, pa.DataType] = {
    16: pa.bool_(),
    17: pa.binary(),
    18: _TEXT,  # "char"
    19: _TEXT,  # name
    20: pa.int64(),
    21: pa.int16(),
    23: pa.int32(),
    25: _TEXT,
    700: pa.float32(),
    701: pa.float64(),
    1042: _TEXT,  # character(n)
    1043: _TEXT,  # character varying
    1082: pa.date32(),
    1114: _NAIVE,
    1184: _UTC,
}
_NUMERIC, _NUMERIC_ARRAY = 1700, 1231
_ARRAYS: dict[int, int] = {
    1000: 16, 1001: 17, 1002: 18, 1003: 19, 1005: 21, 1007: 23, 1009: 25, 1014: 1042, 1015: 1043, 1016: 20,
    1021: 700, 1022: 701, 1115: 1114, 1182: 1082, 1185: 1184, _NUMERIC_ARRAY: _NUMERIC,
}  # fmt: skip
_DIGITS_MAX = 38
_HEADER = 4  # PostgreSQL's VARHDRSZ, added to every numeric modifier


def arrow_type(oid: int, modifier: int) -> pa.DataType:
    """The Arrow type for a type's number and modifier (-1: none)."""
    if oid in _ARRAYS:
        element = _ARRAYS[oid]
        if element == _NUMERIC:
            decimal = _decimal(modifier)
            return pa.list_(decimal) if decimal is not None else _TEXT
        return pa.list_(_SCALARS[element])
    if oid == _NUMERIC:
        return _decimal(modifier) or _TEXT
    return _SCALARS.get(oid, _TEXT)


def _decimal(modifier: int) -> pa.DataType | None:
    """decimal(p, s), or None where the values need more than 38 digits or were given no limit."""
    if modifier < _HEADER:
        return None
    precision = ((modifier - _HEADER) >> 16) & 0xFFFF
    scale = ((modifier - _HEADER) & 0x7FF ^ 1024) - 1024  # eleven bits, signed since PostgreSQL 15
    if scale < 0:
        precision, scale = precision - scale, 0
    precision = max(precision, scale)
    return pa.decimal128(precision, scale) if precision <= _DIGITS_MAX else None
