"""Numbers as people read them."""

from __future__ import annotations

UNKNOWN = "?"


def human_bytes(count: int | None) -> str:
    """`1.2 MiB`."""
    if count is None:
        return UNKNOWN
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def human_seconds(seconds: float | None) -> str:
    """`0.4 s`, `3 min 5 s`, `2 d 4 h`."""
    if seconds is None:
        return UNKNOWN
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    for length, unit, below, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= length:
            return f"{whole // length} {unit} {whole % length // below} {part}"
    return f"{whole // 60} min {whole % 60} s"


def human_count(count: int | None, noun: str = "") -> str:
    """`1,234`, or `1,234 rows`."""
    number = UNKNOWN if count is None else f"{count:,}"
    return f"{number} {noun}{'' if count == 1 else 's'}" if noun else number


def human_rate(per_second: float) -> str:
    """`1,234 rows/s`."""
    return f"{per_second:,.0f} rows/s"
