"""SHA-256 and HMAC-SHA-256 of whole columns, compiled.

In Python the call per value would be the main cost. A string is hashed as its UTF-8, a binary as it is, and anything
else as Arrow prints it. Null stays null. Equal values have equal digests in snapshot and stream, so a hashed key is
still a key.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.kernels import kernel

BLOCK = 64
_FRACTIONS = [
    0x428A2F98, 0x71374491, 0xB5C0FBCF, 0xE9B5DBA5, 0x3956C25B, 0x59F111F1, 0x923F82A4, 0xAB1C5ED5, 0xD807AA98,
    0x12835B01, 0x243185BE, 0x550C7DC3, 0x72BE5D74, 0x80DEB1FE, 0x9BDC06A7, 0xC19BF174, 0xE49B69C1, 0xEFBE4786,
    0x0FC19DC6, 0x240CA1CC, 0x2DE92C6F, 0x4A7484AA, 0x5CB0A9DC, 0x76F988DA, 0x983E5152, 0xA831C66D, 0xB00327C8,
    0xBF597FC7, 0xC6E00BF3, 0xD5A79147, 0x06CA6351, 0x14292967, 0x27B70A85, 0x2E1B2138, 0x4D2C6DFC, 0x53380D13,
    0x650A7354, 0x766A0ABB, 0x81C2C92E, 0x92722C85, 0xA2BFE8A1, 0xA81A664B, 0xC24B8B70, 0xC76C51A3, 0xD192E819,
    0xD6990624, 0xF40E3585, 0x106AA070, 0x19A4C116, 0x1E376C08, 0x2748774C, 0x34B0BCB5, 0x391C0CB3, 0x4ED8AA4A,
    0x5B9CCA4F, 0x682E6FF3, 0x748F82EE, 0x78A5636F, 0x84C87814, 0x8CC70208, 0x90BEFFFA, 0xA4506CEB, 0xBEF9A3F7,
    0xC67178F2,
]  # fmt: skip
_K = np.array(_FRACTIONS, np.uint32)
_START = np.array(
    [0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19], np.uint32
)
_NOTHING = bytes(1)
"""Read-only like Arrow's buffers: a writable one would need another compiled kernel."""
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)


@kernel
def _rotated(x: Any, n: Any) -> Any:
    return np.uint32((x >> np.uint32(n)) | (x << np.uint32(32 - n)))


@kernel
def _compress(state: Any, b: Any, at: Any, w: Any, k: Any) -> None:
    """Add one block to the state."""
    for i in range(16):
        p = at + 4 * i
        w[i] = np.uint32(
            (np.uint32(b[p]) << np.uint32(24))
            | (np.uint32(b[p + 1]) << np.uint32(16))
            | (np.uint32(b[p + 2]) << np.uint32(8))
            | np.uint32(b[p + 3])
        )
    for i in range(16, 64):
        x, y = w[i - 15], w[i - 2]
        s0 = _rotated(x, 7) ^ _rotated(x, 18) ^ np.uint32(x >> np.uint32(3))
        s1 = _rotated(y, 17) ^ _rotated(y, 19) ^ np.uint32(y >> np.uint32(10))
        w[i] = np.uint32(w[i - 16] + s0 + w[i - 7] + s1)
    a, bb, c, d = state[0], state[1], state[2], state[3]
    e, f, g, h = state[4], state[5], state[6], state[7]
    for i in range(64):
        s1 = _rotated(e, 6) ^ _rotated(e, 11) ^ _rotated(e, 25)
        ch = (e & f) ^ ((~e) & g)
        t1 = np.uint32(h + s1 + ch + k[i] + w[i])
        s0 = _rotated(a, 2) ^ _rotated(a, 13) ^ _rotated(a, 22)
        maj = (a & bb) ^ (a & c) ^ (bb & c)
        t2 = np.uint32(s0 + maj)
        h, g, f, e = g, f, e, np.uint32(d + t1)
        d, c, bb, a = c, bb, a, np.uint32(t1 + t2)
    state[0] += a
    state[1] += bb
    state[2] += c
    state[3] += d
    state[4] += e
    state[5] += f
    state[6] += g
    state[7] += h


@kernel
def _finish(state: Any, b: Any, at: Any, size: Any, before: Any, pad: Any, w: Any, k: Any) -> None:
    """Add the bytes from `at`, and the padding; `before` bytes are in the state already."""
    whole = size // 64
    for i in range(whole):
        _compress(state, b, at + 64 * i, w, k)
    rest = size - 64 * whole
    end = 64 if rest < 56 else 128
    for i in range(rest):
        pad[i] = b[at + 64 * whole + i]
    pad[rest] = 128
    for i in range(rest + 1, end):
        pad[i] = 0
    bits = np.uint64(size + before) * np.uint64(8)
    for i in range(8):
        pad[end - 1 - i] = np.uint8((bits >> np.uint64(8 * i)) & np.uint64(255))
    _compress(state, pad, 0, w, k)
    if end == 128:
        _compress(state, pad, 64, w, k)


@kernel
def _digests(
    b: Any, offsets: Any, valid: Any, inner: Any, outer: Any, before: Any, k: Any, hexa: Any, out: Any
) -> None:
    """Write the hex digest of every valid row; with `before` = 64 an HMAC."""
    w, pad = np.empty(64, np.uint32), np.empty(128, np.uint8)
    state, last = np.empty(8, np.uint32), np.empty(32, np.uint8)
    position = 0
    for r in range(valid.size):
        if not valid[r]:
            continue
        state[:] = inner
        _finish(state, b, offsets[r], offsets[r + 1] - offsets[r], before, pad, w, k)
        if before:
            for i in range(32):
                last[i] = np.uint8((state[i // 4] >> np.uint32(24 - 8 * (i % 4))) & np.uint32(255))
            state[:] = outer
            _finish(state, last, 0, 32, before, pad, w, k)
        for i in range(32):
            byte = (state[i // 4] >> np.uint32(24 - 8 * (i % 4))) & np.uint32(255)
            out[position + 2 * i] = hexa[byte >> np.uint32(4)]
            out[position + 2 * i + 1] = hexa[byte & np.uint32(15)]
        position += 64


def as_bytes(values: pa.Array) -> pa.Array:
    """Return the bytes of each value that are hashed or encrypted."""
    kind = values.type
    if pa.types.is_binary(kind):
        return values
    if not pa.types.is_string(kind):
        values = values.cast(pa.string())
    return values.cast(pa.binary())


def sha256(values: pa.Array) -> pa.Array:
    """Return the digest of each value, in hex."""
    return _hash(as_bytes(values), _START, _START, 0)


def hmac_sha256(values: pa.Array, key: bytes) -> pa.Array:
    """Return the authentication code of each value under the key, in hex."""
    secret = (hashlib.sha256(key).digest() if len(key) > BLOCK else key).ljust(BLOCK, b"\0")
    states = []
    for pad in (0x36, 0x5C):
        state = _START.copy()
        block = np.frombuffer(bytes(byte ^ pad for byte in secret), np.uint8)
        _compress(state, block, 0, np.empty(64, np.uint32), _K)
        states.append(state)
    return _hash(as_bytes(values), states[0], states[1], BLOCK)


def _hash(values: pa.Array, inner: npt.NDArray[np.uint32], outer: npt.NDArray[np.uint32], before: int) -> pa.Array:
    n = len(values)
    valid = np.asarray(pc.is_valid(values).to_numpy(zero_copy_only=False), np.bool_)
    offsets = np.frombuffer(values.buffers()[1], np.int32)[values.offset : values.offset + n + 1].astype(np.int64)
    content = values.buffers()[2]
    data = np.frombuffer(content if content is not None and content.size else _NOTHING, np.uint8)
    out = np.empty(BLOCK * int(valid.sum()), np.uint8)
    _digests(data, offsets, valid, inner, outer, before, _K, _HEX, out)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(valid)]) * BLOCK
    if ends[-1] > np.iinfo(np.int32).max:
        half = n // 2
        parts = [_hash(part, inner, outer, before) for part in (values.slice(0, half), values.slice(half))]
        return pa.concat_arrays(parts)
    mask = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little").tobytes())
    buffers = [mask, pa.py_buffer(ends.astype(np.int32).tobytes()), pa.py_buffer(out)]
    return pa.Array.from_buffers(pa.string(), n, buffers)
