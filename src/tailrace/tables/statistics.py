"""Make a data file's statistics for Delta's log from the file's own footer.

A reader skips a file whose bounds exclude what it looks for. So a bound may be too wide but never too narrow, and a
bound that cannot be written exactly or rounded outwards is omitted. Engines order NaN above every number, but Parquet's
own statistics ignore it. Floats therefore have no statistics in the footer; their values are checked as they are
written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tailrace.model.schema import TableSchema

TEXT_CHARS_MAX = 32
"""Length at which Spark cuts text."""
COLUMNS_MAX = 32
"""Columns from the left that have statistics in any Delta table. Ours have them for the key too."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_DAY = date(1970, 1, 1).toordinal()
_EXACT = Context(prec=80)


class FloatBounds:
    """The bounds of a float column, whose values are added in parts."""

    def __init__(self) -> None:
        self.nulls = 0
        self._ends: list[float] = []
        self._nan = False

    def see(self, values: Any) -> None:
        self.nulls += values.null_count
        if self._nan or values.null_count == len(values):
            return
        self._nan = pc.any(pc.is_nan(values)).as_py()
        extremes = pc.min_max(values).as_py()
        ends = [*self._ends, extremes["min"], extremes["max"]]
        self._ends = [min(ends), max(ends)]

    def bounds(self) -> tuple[str | None, ...]:
        """Return the bounds as JSON.

        A zero is -0.0 as the lower bound and 0.0 as the upper, because not all engines compare its sign.
        """
        if self._nan or not self._ends:
            return ()
        low, high = (-0.0 if self._ends[0] == 0 else self._ends[0]), (self._ends[1] + 0.0)
        return tuple(repr(end) if math.isfinite(end) else None for end in (low, high))


def footer_columns(schema: TableSchema) -> list[str]:
    """Return the columns that need statistics in a file's footer."""
    return [column.name for column in schema.columns if _rule(column.type) or _is_counted(column.type)]


def _is_counted(kind: pa.DataType) -> bool:
    """Return whether a type's only statistic is the count of nulls."""
    return bool(pa.types.is_boolean(kind) or pa.types.is_binary(kind))


def delta_stats(schema: TableSchema, footer: pq.FileMetaData, floats: Mapping[str, FloatBounds]) -> str:
    """Return one file's Delta statistics as JSON."""
    low, high, nulls = [], [], []
    null_count: int | None
    for ordinal, column in enumerate(schema.columns):
        if pa.types.is_nested(column.type) or (ordinal >= COLUMNS_MAX and column.name not in schema.key):
            continue
        name = _quoted(column.name)
        if column.name in floats:
            bounds, null_count = floats[column.name].bounds(), floats[column.name].nulls
        else:
            bounds, null_count = _bounds(column.type, footer, ordinal), _nulls(footer, ordinal)
        low += [f"{name}:{text}" for text in bounds[:1] if text]
        high += [f"{name}:{text}" for text in bounds[1:] if text]
        nulls += [f"{name}:{null_count}"] if null_count is not None else []
    return (
        f'{{"numRecords":{footer.num_rows},"minValues":{{{",".join(low)}}},'
        f'"maxValues":{{{",".join(high)}}},"nullCount":{{{",".join(nulls)}}}}}'
    )


def _nulls(footer: pq.FileMetaData, ordinal: int) -> int | None:
    parts = [footer.row_group(group).column(ordinal).statistics for group in range(footer.num_row_groups)]
    known = all(part is not None and part.has_null_count for part in parts)
    return sum(part.null_count for part in parts) if known else None


def _bounds(kind: pa.DataType, footer: pq.FileMetaData, ordinal: int) -> tuple[str | None, ...]:
    """Return the least and the greatest value as JSON. None for an unknown one, nothing without either."""
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
    """Yield the statistics of each row group in which the column is not null throughout."""
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        found = group.column(ordinal).statistics
        if found is None or not found.has_null_count or found.null_count < group.num_rows:
            yield found


Write = Callable[[Any, bool], str | None]
"""Write a bound as JSON, rounded down, or up if the flag is set. None if there is no such bound."""


def _rule(kind: pa.DataType) -> tuple[Callable[[Any], Any], Write] | None:
    """Return how a type's bounds are decoded from the footer and written. None if Delta has none."""
    if pa.types.is_integer(kind):
        return int, lambda value, _: str(value)
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
    """Write a timestamp to the millisecond, because readers do not rely on more digits."""
    millis = -(-micros // 1000) if up else micros // 1000
    try:
        moment = _EPOCH + timedelta(milliseconds=millis)
    except OverflowError:
        return None
    return f'"{moment.replace(tzinfo=None).isoformat(timespec="milliseconds")}{zone}"'


def _text(raw: bytes, *, up: bool) -> str | None:
    text = raw.decode("utf-8")
    if len(text) <= TEXT_CHARS_MAX:
        return _quoted(text)
    cut = text[:TEXT_CHARS_MAX]
    bound = _above(cut) if up else cut
    return None if bound is None else _quoted(bound)


def _quoted(text: str) -> str:
    # Not escaped: delta-rs misreads a character that is escaped as two.
    return json.dumps(text, ensure_ascii=False)


def _above(prefix: str) -> str | None:
    """Return the least text above all that start with the prefix, if one exists."""
    kept = prefix.rstrip("\U0010ffff")
    if not kept:
        return None
    after = ord(kept[-1]) + 1
    return kept[:-1] + chr(0xE000 if 0xD800 <= after < 0xE000 else after)
