"""Targets that are wrong on purpose: what the judge is there to notice."""

from __future__ import annotations

import numpy as np

from tailrace.capture.postgres.values import Bytes, Word
from tailrace.kernels import kernel
from tests.fuzz.targets import Place


@kernel
def _sum(b: Bytes, begin: Word, end: Word) -> Word:
    total = 0
    for i in range(begin, end):
        total += b[i]
    return total


@kernel
def _beyond(b: Bytes, reach: Word) -> Word:
    """Reads an array of its own, which no page guards, `reach` places behind its end."""
    own = np.zeros(b.size, np.uint8)
    total = 0
    for i in range(b.size + reach):
        total += own[i]
    return total


@kernel
def _spin(b: Bytes) -> Word:
    turns = 0
    while b[0] == 33:
        turns += 1
    return turns


def behind(data: bytes, place: Place) -> bytes:
    """One byte behind the input."""
    return b"rows" if _sum(place(data), 0, len(data) + bool(data)) >= 0 else b""


def before(data: bytes, place: Place) -> bytes:
    """As far before the input as it is long, and more: an index below zero counts from the end."""
    return b"rows" if _sum(place(data), -2 * len(data), len(data)) >= 0 else b""


def unguarded(data: bytes, place: Place) -> bytes:
    """One place behind an array of the kernel's own."""
    return b"rows" if _beyond(place(data), len(data) and 1) >= 0 else b""


def endless(data: bytes, place: Place) -> bytes:
    """A compiled loop that does not end."""
    return b"rows" if _spin(place(data or b" ")) >= 0 else b""


def greedy(data: bytes, place: Place) -> bytes:
    """As much memory as the input says."""
    return bytes(np.ones(int.from_bytes(data, "big"), np.uint8)[:4].tobytes())


def fickle(data: bytes, place: Place) -> bytes:
    """An answer that depends on where the bytes lie."""
    return str(place(data).ctypes.data % 4096).encode()


TARGETS = {
    "behind": behind, "before": before, "unguarded": unguarded, "endless": endless, "greedy": greedy,
    "fickle": fickle,
}  # fmt: skip
