"""Sizes and durations as people write them: `50GB`, `128MiB`, `7d`, `10min`.

A number without a unit is bytes or seconds. What cannot be meant is refused, never rounded or guessed: `5m` could be
minutes or months, `50G` could be either kind of gigabyte.
"""

from __future__ import annotations

import re

SIZE_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip
DURATION_UNITS = {"": 1, "s": 1, "min": 60, "h": 3_600, "d": 86_400}
BYTES_MAX = 1 << 60
SECONDS_MAX = 100 * 365 * 86_400

SIZE_HINT = "For example: `50GB`; the units are B, kB, MB, GB, TB and KiB, MiB, GiB, TiB."
DURATION_HINT = "For example: `7d`; the units are s, min, h and d."

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)")


class InvalidQuantity(ValueError):
    """The text is no such quantity; says why, without quoting it, and `hint` says what would be one."""

    def __init__(self, why: str, hint: str) -> None:
        super().__init__(why)
        self.hint = hint


def parse_size(text: str) -> int:
    """A number of bytes."""
    found = _parse(text, SIZE_UNITS, "is not a size", SIZE_HINT)
    if found > BYTES_MAX:
        raise InvalidQuantity("is more than any disk holds", SIZE_HINT)
    return int(found)


def parse_duration(text: str) -> float:
    """A number of seconds."""
    found = _parse(text, DURATION_UNITS, "is not a length of time", DURATION_HINT)
    if found > SECONDS_MAX:
        raise InvalidQuantity("is more than a hundred years", DURATION_HINT)
    return found


def _parse(text: str, units: dict[str, int], why: str, hint: str) -> float:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[2].lower() not in units:
        raise InvalidQuantity(why, hint)
    return float(match[1]) * units[match[2].lower()]
