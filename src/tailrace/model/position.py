"""Positions in a source log, as types that order and print as the server does.

A position is never a string inside Tailrace: `"0/9" > "0/10"` must not be able to happen.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from numbers import Integral

from tailrace.errors import ConfigError

TEXT_SHOWN_MAX = 200
_LSN = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")


@functools.total_ordering
@dataclass(frozen=True)
class Lsn:
    """A byte position in PostgreSQL's write-ahead log."""

    value: int

    def __post_init__(self) -> None:
        if not isinstance(self.value, int | Integral) or not 0 <= self.value < 1 << 64:
            raise ConfigError(
                "a log sequence number must be a whole number of 64 bits",
                value=repr(self.value)[:TEXT_SHOWN_MAX],
                hint='Parse its text: `Lsn.parse("16/B374D848")`.',
            )

    @classmethod
    def parse(cls, text: str) -> Lsn:
        """Parse the server's own text, e.g. `16/B374D848`; anything else is an error."""
        match = _LSN.fullmatch(text) if isinstance(text, str) else None
        if not match:
            raise invalid_position_error("a log sequence number", text, "It looks like 16/B374D848.")
        return cls((int(match.group(1), 16) << 32) | int(match.group(2), 16))

    def __str__(self) -> str:
        return f"{self.value >> 32:X}/{self.value & 0xFFFFFFFF:X}"

    def __lt__(self, other: Lsn) -> bool:
        return self.value < other.value

    def __sub__(self, other: Lsn) -> int:
        """Return the bytes between two positions."""
        return self.value - other.value


ZERO = Lsn(0)
"""Before everything: no server uses it."""


def invalid_position_error(what: str, text: object, hint: str) -> ConfigError:
    """Return the error for a value that is not such a position.

    The text is shown on one line, whatever it contains.
    """
    if not isinstance(text, str):
        return ConfigError(f"not {what}", found=type(text).__name__, hint=f"Give a text. {hint}")
    shown = text if text.isprintable() else ascii(text)
    return ConfigError(
        f"not {what}", text=shown if len(shown) <= TEXT_SHOWN_MAX else f"{shown[:TEXT_SHOWN_MAX]}…", hint=hint
    )
