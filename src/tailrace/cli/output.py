"""Print a command's data to stdout and its failures to stderr, never with a secret.

Nothing here raises because the reader of stdout has gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from typing import Any

from tailrace.cli import log_lines
from tailrace.errors import TailraceError

FREE_TEXT = ("message", "detail", "hint", "note")
"""Keys whose text may come from a server or a library.

Everything else is printed as it is.
"""


def print_out(text: str) -> None:
    """Print data to stdout; a reader that has gone (`| head`) is not an error."""
    write_out(f"{text}\n")


def write_out(text: str) -> bool:
    """Write the text unchanged; return whether stdout still has a reader.

    A failing write is an error.
    """
    if sys.stdout is None:  # it was closed before the start (`>&-`)
        return False
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
        return True
    except OSError as error:
        # Python flushes stdout once more at exit; give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return False
        raise TailraceError(
            f"the output cannot be written: {error.strerror}",
            hint="Free space where the output goes, or send it elsewhere.",
        ) from error


def wait_while_read(seconds: float) -> bool:
    """Wait this long, or until stdout has no reader; return whether it has one.

    A pipe whose reader has gone shows it without a write.
    """
    try:
        poller = select.poll()
        poller.register(sys.stdout.fileno(), 0)
        events = poller.poll(seconds * 1000)
    except (OSError, ValueError, AttributeError):  # no file, or a system without poll
        time.sleep(seconds)
        return True
    if any(event & (select.POLLERR | select.POLLHUP) for _, event in events):
        return False
    if events:  # a terminal that cannot be polled returns at once
        time.sleep(seconds)
    return True


def print_json(data: dict[str, Any]) -> None:
    """Print one object on one line."""

    def redacted(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: redacted(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [redacted(item, key) for item in value]
        return log_lines.redact(value) if isinstance(value, str) and key in FREE_TEXT else value

    print_out(json.dumps(redacted(data)))


def print_error(message: str, hint: str) -> None:
    """Print the two lines of a failure to stderr, without secrets."""
    if sys.stderr is None:  # `print` would then use stdout, which is for data
        return
    with contextlib.suppress(OSError):
        print(f"error: {log_lines.redact(log_lines.one_line(message))}", file=sys.stderr)
        print(f"hint: {log_lines.redact(log_lines.one_line(hint))}", file=sys.stderr, flush=True)


UNKNOWN = "?"


def human_bytes(count: int | None) -> str:
    """Return a size, e.g. `1.2 MiB`."""
    if count is None:
        return UNKNOWN
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def human_seconds(seconds: float | None) -> str:
    """Return a duration, e.g. `0.4 s`, `3 min 5 s`, `2 d 4 h`."""
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
    """Return a number, e.g. `1,234` or `1,234 rows`."""
    number = UNKNOWN if count is None else f"{count:,}"
    return f"{number} {noun}{'' if count == 1 else 's'}" if noun else number


def human_rate(per_second: float) -> str:
    """Return a rate, e.g. `1,234 rows/s`."""
    return f"{per_second:,.0f} rows/s"
