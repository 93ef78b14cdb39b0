"""Hash rows to 128-bit numbers, to find rows of one scan in another.

Neither scan is held in memory. Equal rows have equal hashes. Different rows have equal hashes with a chance of 2^-128,
which is less than that of an unnoticed memory error. Equality is as in `row_ids`, for images and for keys. Hashes with
different `seed`s are unrelated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.kernels import kernel
from tailrace.tables.fold.row_ids import Ints, float_bits, integer_bits

RowHashes = npt.NDArray[np.uint64]
"""Two columns: the halves of each hash."""

_WORD = 8


def hash_images(columns: Sequence[Any], seed: int) -> RowHashes:
    """Return one hash per row, of all its values."""
    return _hashes(columns, seed, signed_zero=True)


def hash_keys(columns: Sequence[Any], seed: int) -> RowHashes:
    """Return one hash per row, of its key."""
    return _hashes(columns, seed, signed_zero=False)


class RowHashSet:
    """A set of hashes to look up others in. It takes 16 bytes each, and 24 more while it is built."""

    def __init__(self, hashes: RowHashes) -> None:
        order = np.argsort(hashes[:, 0])
        self._first, self._second = hashes[order, 0], hashes[order, 1]
        same = np.flatnonzero(np.append(True, self._first[1:] != self._first[:-1]))
        self._run = int(np.diff(np.append(same, self._first.size)).max()) if self._first.size else 0

    def __len__(self) -> int:
        return int(self._first.size)

    def find(self, hashes: RowHashes) -> Ints:
        """Return the index of each hash in the set, or -1."""
        found = np.full(len(hashes), -1, np.int64)
        order = np.argsort(hashes[:, 0])  # in this order, neighbouring lookups are close in memory
        start = np.empty(len(hashes), np.int64)
        start[order] = np.searchsorted(self._first, hashes[order, 0])
        for step in range(self._run):
            at = np.minimum(start + step, len(self) - 1)
            hit = (self._first[at] == hashes[:, 0]) & (self._second[at] == hashes[:, 1])
            found[hit] = at[hit]
        return found


def _hashes(columns: Sequence[Any], seed: int, *, signed_zero: bool) -> RowHashes:
    state = np.empty((len(columns[0]), 2), np.uint64)
    state[:, 0], state[:, 1] = seed & 0xFFFF_FFFF_FFFF_FFFF, seed >> 64
    for column in columns:
        _absorb_column(column, state, signed_zero)
    return state


def _absorb_column(column: Any, state: RowHashes, signed_zero: bool) -> None:
    if isinstance(column, pa.ChunkedArray):
        start = 0
        for chunk in column.chunks:
            _absorb_column(chunk, state[start : start + len(chunk)], signed_zero)
            start += len(chunk)
        return
    if not len(column):
        return
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    _absorb(*_bytes(column, signed_zero), valid, state)


def _bytes(column: Any, signed_zero: bool) -> tuple[Any, Ints]:
    """Return the bytes of all values, and the offsets where each begins and ends."""
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
        return _data(column.buffers()[2]), offsets.astype(np.int64)
    if pa.types.is_list(kind):
        elements = _hashes([column.values], 0, signed_zero=signed_zero)
        return elements.reshape(-1).view(np.uint8), column.offsets.to_numpy().astype(np.int64) * 2 * _WORD
    if pa.types.is_decimal(kind):
        size = kind.byte_width
        return _data(column.buffers()[1]), (column.offset + np.arange(len(column) + 1)) * size
    if pa.types.is_boolean(kind):
        column = column.cast(pa.int8())
    bits = float_bits(column, signed_zero) if pa.types.is_floating(kind) else integer_bits(column)
    if bits is None:
        raise TypeError(f"a table has no columns of the type {kind}")
    return bits.view(np.uint8), np.arange(len(column) + 1) * _WORD


def _data(buffer: Any) -> Any:
    return np.empty(0, np.uint8) if buffer is None else np.frombuffer(buffer, np.uint8)


@kernel
def _absorb(data: npt.NDArray[np.uint8], offsets: Ints, valid: npt.NDArray[np.bool_], state: RowHashes) -> None:
    """Mix each value's length and bytes into its row's hash, as MurmurHash3 does."""
    first, second = np.uint64(0x87C37B91114253D5), np.uint64(0x4CF5AD432745937F)
    for row in range(valid.size):
        a, b = state[row, 0], state[row, 1]
        start, stop = (offsets[row], offsets[row + 1]) if valid[row] else (0, -1)
        word = np.uint64(stop - start)
        while True:
            mixed = word * first
            mixed = ((mixed << np.uint64(31)) | (mixed >> np.uint64(33))) * second
            a ^= mixed
            a = ((a << np.uint64(27)) | (a >> np.uint64(37))) + b
            a = a * np.uint64(5) + np.uint64(0x52DCE729)
            mixed = word * second
            mixed = ((mixed << np.uint64(33)) | (mixed >> np.uint64(31))) * first
            b ^= mixed
            b = ((b << np.uint64(31)) | (b >> np.uint64(33))) + a
            b = b * np.uint64(5) + np.uint64(0x38495AB5)
            if start >= stop:
                break
            word = np.uint64(0)
            for index in range(min(8, stop - start)):
                word |= np.uint64(data[start + index]) << np.uint64(8 * index)
            start += 8
        state[row, 0], state[row, 1] = a, b
