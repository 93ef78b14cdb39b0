"""What a command prints: data to stdout, failures to stderr, and never a secret in either.

Nothing here raises because nobody reads any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from tailrace.cli import logs

FREE_TEXT = ("message", "detail", "hint", "note")
"""Where words of a server or a library may stand; everything else is data and printed as it is."""


def print_out(text: str) -> None:
    """Data, to stdout. If nobody reads it any more (`| head`), that is their business."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python flushes stdout once more at exit; give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_json(data: dict[str, Any]) -> None:
    """One object on one line."""

    def redacted(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: redacted(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [redacted(item, key) for item in value]
        return logs.redact(value) if isinstance(value, str) and key in FREE_TEXT else value

    print_out(json.dumps(redacted(data)))


def print_error(message: str, hint: str) -> None:
    """The two lines of a failure, to stderr, without secrets."""
    with contextlib.suppress(OSError):
        print(f"error: {logs.redact(logs.one_line(message))}", file=sys.stderr)
        print(f"hint: {logs.redact(logs.one_line(hint))}", file=sys.stderr, flush=True)
