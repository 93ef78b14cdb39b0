"""COPY's binary form by hand: what a server would send, and things that no server would.

`copied(row(b"\\0\\0\\0\\1", b"x"))` is a copy of one row of an integer and a text.
https://www.postgresql.org/docs/current/sql-copy.html#SQL-COPY-BINARY-FORMAT
"""

from __future__ import annotations

import struct

HEAD = b"PGCOPY\n\xff\r\n\0" + bytes(8)
END = b"\xff\xff"


def row(*cells: bytes | None) -> bytes:
    """A row; None is null."""
    parts = [b"\xff\xff\xff\xff" if cell is None else struct.pack(">i", len(cell)) + cell for cell in cells]
    return struct.pack(">h", len(cells)) + b"".join(parts)


def copied(*rows: bytes) -> bytes:
    """A whole copy."""
    return HEAD + b"".join(rows) + END


def numeric(text: str) -> bytes:
    """A number as `numeric_send` sends it: digits of 10,000, the zeros at both ends left out."""
    signs = {"NaN": 0xC000, "Infinity": 0xD000, "-Infinity": 0xF000}
    if text in signs:
        return struct.pack(">hhHh", 0, 0, signs[text], 0)
    whole, _, fraction = text.removeprefix("-").partition(".")
    places, whole = len(fraction), whole.zfill(-(-len(whole) // 4) * 4)
    fraction = fraction.ljust(-(-places // 4) * 4, "0")
    digits = [int((whole + fraction)[at : at + 4]) for at in range(0, len(whole + fraction), 4)]
    weight = len(whole) // 4 - 1
    while digits and digits[0] == 0:
        del digits[0]
        weight -= 1
    while digits and digits[-1] == 0:
        del digits[-1]
    head = struct.pack(">hhHh", len(digits), weight if digits else 0, 0x4000 * text.startswith("-"), places)
    return head + b"".join(struct.pack(">h", digit) for digit in digits)
