"""A key's values as text that the server reads as these very values, whatever their type and in any year.

What has no end at the source stands for the last moment here, and the other way round for the first
(`capture/postgres/values.py`). So a moment may have been either, and whoever asks by it asks for both.
"""

from __future__ import annotations

from datetime import time
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from tailrace.capture.postgres.values import FIRST_DAY, FIRST_INSTANT, LAST_DAY, LAST_INSTANT


def key_texts(scalar: pa.Scalar) -> tuple[str, ...]:
    """All that the value may be at the source, the least first. Of what is in a list only that."""
    kind = scalar.type
    if pa.types.is_date(kind):
        return _moments(int(scalar.value), "D", (FIRST_DAY, LAST_DAY), zone="")
    if pa.types.is_timestamp(kind):
        return _moments(int(scalar.value), "us", (FIRST_INSTANT, LAST_INSTANT), zone="+00" if kind.tz else "")
    if pa.types.is_list(kind):
        return ("{" + ",".join(map(_element, scalar.values)) + "}",)
    return (_plain(scalar.as_py()),)


def _plain(value: Any) -> str:
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    return value.isoformat() if isinstance(value, time) else str(value)


def _element(scalar: pa.Scalar) -> str:
    if not scalar.is_valid:
        return "NULL"
    return '"' + key_texts(scalar)[0].replace("\\", "\\\\").replace('"', '\\"') + '"'


def _moments(count: int, unit: Literal["D", "us"], ends: tuple[int, int], *, zone: str) -> tuple[str, ...]:
    said, (first, last) = _moment(count, unit, zone), ends
    if count == first:
        return ("-infinity", said)
    return (said, "infinity") if count == last else (said,)


def _moment(count: int, unit: Literal["D", "us"], zone: str) -> str:
    """A date or a time, in any year: Python's calendar has those from 1 to 9999 alone."""
    said = str(np.datetime64(count, unit)).replace("T", " ")
    year, rest = said[: said.index("-", 1)], said[said.index("-", 1) :] + zone
    return f"{year}{rest}" if int(year) > 0 else f"{1 - int(year):04}{rest} BC"
