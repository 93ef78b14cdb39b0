"""Changes inputs piece by piece: bytes put in blindly would mostly break the lengths.

Lengths and counts are set to the edges of what they can be, messages are left out, repeated and put in from other
inputs, texts are bent in a few bytes. What is changed follows from the seed alone.
"""

from __future__ import annotations

import random
import struct

from tests.fuzz.frames import framed, frames
from tests.support.fuzzing import mutated
from tests.support.pgcopy import END, HEAD

NUMBERS = (0, 1, 2, 4, 0x7F, 0xFF, 0x100, 0x640, 0x641, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
"""What a length or a count is replaced by: the edges of what it can be."""
EDGES = (9999, 10_000, 0x4000, 0xC000, (1 << 31) - 2, (1 << 31) - 10_958, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
"""And what a value is: a digit, a sign, the ends of time."""
TYPES = (
    16, 17, 18, 20, 21, 23, 25, 26, 700, 701, 1042, 1043, 1082, 1083, 1114, 1184, 1186, 1266, 1700, 2950, 3802, 3904,
    1000, 1001, 1005, 1007, 1009, 1014, 1015, 1016, 1021, 1022, 1028, 1115, 1182, 1185, 1231, 2951, 705, 600, 869, 0,
)  # fmt: skip
MODIFIERS = (-1, 4, 0xA0006, 0x260004, 0x50007 + 4, 0x307FE + 4, 0x270004, 0x7FFFFFFF, -0x80000000)
HEADS = {"decode": 2, "read": 2, "value": 8, "copy": 1}
"""How many bytes stand before the pieces, or in a copy say more than a length."""


class Mutator:
    """Changes an input in a way that keeps most of it meaningful."""

    def __init__(self, target: str, seeds: list[bytes]) -> None:
        self._target = target
        self._stock = sorted({piece for seed in seeds for piece in self._pieces(seed) if piece})

    def _pieces(self, data: bytes) -> list[bytes]:
        if self._target == "copy":
            length = int.from_bytes(data[:2], "big") & 0x3FFF
            return [data[2 : 2 + length], data[2 + length :]]
        return [piece for _, piece in frames(data[HEADS[self._target] :])]

    def _joined(self, head: bytes, parts: list[bytes]) -> bytes:
        if self._target == "copy":
            relation, text = [*parts, b"", b""][:2]
            return struct.pack(">H", (len(relation) & 0x3FFF) | (head[0] & 0xC0) << 8) + relation + text
        return head + framed(parts)

    def __call__(self, data: bytes, size_max: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.1:
            return mutated(rng, data)[:size_max]
        head, parts = (data + bytes(8))[: HEADS[self._target]], self._pieces(data)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            head, parts = self._changed(rng, head, parts)
        return self._joined(head, parts)[:size_max]

    def _changed(self, rng: random.Random, head: bytes, parts: list[bytes]) -> tuple[bytes, list[bytes]]:
        what, place = rng.random(), rng.randrange(len(parts)) if parts else 0
        if what < 0.1:
            return self._other_head(rng, head), parts
        if what < 0.2 or not parts:
            piece = rng.choice(self._stock) if self._stock else b"?"
            return head, [*parts[:place], piece, *parts[place:]]
        if what < 0.25:
            return head, [*parts[:place], *parts[place + 1 :]]
        if what < 0.3:
            return head, [*parts[:place], parts[place], *parts[place:]]
        return head, [*parts[:place], self._bent(rng, parts[place]), *parts[place + 1 :]]

    def _other_head(self, rng: random.Random, head: bytes) -> bytes:
        if self._target == "value":
            return struct.pack(">Ii", rng.choice(TYPES), rng.choice(MODIFIERS))
        return rng.randbytes(len(head))

    def _bent(self, rng: random.Random, piece: bytes) -> bytes:
        if piece.startswith(HEAD) and rng.random() < 0.6:
            return _other_cell(rng, piece)
        if len(piece) >= 5 and rng.random() < 0.3:
            code = rng.choice((">H", ">I"))
            number = struct.pack(code, rng.choice(NUMBERS) & (0xFFFF if code == ">H" else 0xFFFFFFFF))
            at = rng.randrange(len(piece) - len(number))
            return piece[:at] + number + piece[at + len(number) :]
        if rng.random() < 0.3:
            begin, end = sorted(rng.randrange(len(piece) + 1) for _ in range(2))
            other = rng.choice(self._stock) if self._stock and rng.random() < 0.5 else piece
            first, last = sorted(rng.randrange(len(other) + 1) for _ in range(2))
            return piece[:begin] + other[first:last] + piece[rng.choice((begin, end)) :]
        return mutated(rng, piece)


def _other_cell(rng: random.Random, copy: bytes) -> bytes:
    """A copy with another value in it, and all lengths right."""
    cells, at = [], len(HEAD)
    while at + 2 <= len(copy) and copy[at : at + 2] != END:
        (fields,), at = struct.unpack_from(">H", copy, at), at + 2
        for _ in range(fields):
            length = int.from_bytes(copy[at : at + 4], "big", signed=True)
            if at + 4 + max(length, 0) > len(copy):
                break
            cells.append((at, max(length, 0)))
            at += 4 + max(length, 0)
    if not cells:
        return copy
    at, length = rng.choice(cells)
    cell = copy[at + 4 : at + 4 + length]
    how = rng.random()
    if how < 0.1:
        return copy[:at] + b"\xff\xff\xff\xff" + copy[at + 4 + length :]
    if how < 0.4 and cell:  # numbers at the edges of what they can be
        size = rng.choice((2, 4, 8))
        number = rng.choice((rng.choice(NUMBERS), *EDGES)) & (1 << 8 * size) - 1
        place = rng.randrange(0, len(cell), 2)
        other = (cell[:place] + number.to_bytes(size, "big") + cell[place + size :])[: max(len(cell), size)]
    else:
        other = mutated(rng, cell)
    return copy[:at] + struct.pack(">I", len(other)) + other + copy[at + 4 + length :]
