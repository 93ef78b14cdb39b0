"""A data file's statistics as Delta's log holds them, from the file's own footer.

A reader skips a file whose bounds exclude what it looks for, so a bound may be too wide but never too narrow,
and a bound that cannot be written exactly or rounded outwards is left out. NaN is above every number for Spark
and unordered for Parquet: a column that has any has no bounds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tailrace.model.schema import TableSchema

TEXT_CHARS_MAX = 32
"""As Spark cuts text."""
COLUMNS_MAX = 32
"""As many columns from the left have statistics in any Delta table; ours have them for the key as well."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_DAY = date(1970, 1, 1).toordinal()
_EXACT = Context(prec=80)


def delta_stats(schema: TableSchema, footer: pq.FileMetaData, nan: Collection[str]) -> str:
    """Delta's statistics of one file as JSON; `nan` names the columns in which there is a NaN."""
    low, high, nulls = [], [], []
    for ordinal, column in enumerate(schema.columns):
        if pa.types.is_nested(column.type) or (ordinal >= COLUMNS_MAX and column.name not in schema.key):
            continue
        name = json.dumps(column.name)
        parts = [footer.row_group(group).column(ordinal).statistics for group in range(footer.num_row_groups)]
        if all(part is not None and part.has_null_count for part in parts):
            nulls.append(f"{name}:{sum(part.null_count for part in parts)}")
        if column.name not in nan:
            bounds = _bounds(column.type, footer, ordinal)
            low += [f"{name}:{text}" for text in bounds[:1] if text]
            high += [f"{name}:{text}" for text in bounds[1:] if text]
    return (
        f'{{"numRecords":{footer.num_rows},"minValues":{{{",".join(low)}}},'
        f'"maxValues":{{{",".join(high)}}},"nullCount":{{{",".join(nulls)}}}}}'
    )


def _bounds(kind: pa.DataType, footer: pq.FileMetaData, ordinal: int) -> tuple[str | None, ...]:
    """The least and the greatest value as JSON; None for one that cannot be told, nothing if neither can."""
    rule = _rule(kind)
    if rule is None:
        return ()
    decode, write = rule
    ends: list[tuple[Any, Any]] = []
    for part in _filled(footer, ordinal):
        if part is None or not part.has_min_max:
            return ()
        ends.append((decode(part.min_raw), decode(part.max_raw)))
    if not ends:
        return ()
    return write(min(end[0] for end in ends), False), write(max(end[1] for end in ends), True)


def _filled(footer: pq.FileMetaData, ordinal: int) -> Iterator[Any]:
    """What is known of each row group in which the column is not null throughout."""
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        found = group.column(ordinal).statistics
        if found is None or not found.has_null_count or found.null_count < group.num_rows:
            yield found


Write = Callable[[Any, bool], str | None]
"""A bound as JSON, rounded down, or up where the flag is set; None if there is no such bound."""


def _rule(kind: pa.DataType) -> tuple[Callable[[Any], Any], Write] | None:
    """How a type's bounds are read from the footer and written; None for a type that has none in Delta."""
    if pa.types.is_integer(kind):
        return int, lambda value, _: str(value)
    if pa.types.is_floating(kind):
        return float, lambda value, _: repr(value) if math.isfinite(value) else None
    if pa.types.is_decimal(kind):
        return _unscaled, lambda value, _: _decimal(value, kind.scale)
    if pa.types.is_date(kind):
        return int, lambda value, _: _date(value)
    if pa.types.is_timestamp(kind):
        zone = "" if kind.tz is None else "Z"
        return int, lambda value, up: _timestamp(value, zone, up=up)
    if pa.types.is_string(kind):
        return bytes, lambda value, up: _text(value, up=up)
    return None


def _unscaled(raw: Any) -> int:
    return int.from_bytes(raw, "big", signed=True) if isinstance(raw, bytes) else int(raw)


def _decimal(value: int, scale: int) -> str:
    return format(Decimal(value).scaleb(-scale, _EXACT), "f")


def _date(days: int) -> str | None:
    try:
        return f'"{date.fromordinal(days + _EPOCH_DAY).isoformat()}"'
    except (ValueError, OverflowError):
        return None


def _timestamp(micros: int, zone: str, *, up: bool) -> str | None:
    """To the millisecond: readers take no more digits for granted."""
    millis = -(-micros // 1000) if up else micros // 1000
    try:
        moment = _EPOCH + timedelta(milliseconds=millis)
    except OverflowError:
        return None
    return f'"{moment.replace(tzinfo=None).isoformat(timespec="milliseconds")}{zone}"'


def _text(raw: bytes, *, up: bool) -> str | None:
    text = raw.decode("utf-8")
    if len(text) <= TEXT_CHARS_MAX:
        return json.dumps(text)
    cut = text[:TEXT_CHARS_MAX]
    bound = _above(cut) if up else cut
    return None if bound is None else json.dumps(bound)


def _above(prefix: str) -> str | None:
    """The least text that is greater than all that begin with the prefix; None if there is none."""
    kept = prefix.rstrip("\U0010ffff")
    if not kept:
        return None
    after = ord(kept[-1]) + 1
    return kept[:-1] + chr(0xE000 if 0xD800 <= after < 0xE000 else after)
