"""Moves libpq's copy stream into one contiguous buffer, by compiled code.

Reading a message through Python costs more than the server needs to send it. Here a compiled loop calls `PQgetCopyData`
on the connection that psycopg opened, so TLS, passwords and service files are libpq's business. It places the messages
end to end. One thread owns a connection at a time: libpq connections are not thread-safe.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from psycopg import pq
from psycopg.pq.abc import PGconn

from tailrace.capture.postgres.values import Bytes, Ints, Word, u64
from tailrace.errors import SourceUnreachable
from tailrace.kernels import kernel

DRY, FULL, ENDED, BROKEN = 0, 1, 2, 3
"""Reasons why a drain returns: nothing to read, no room, end of copy, failed connection."""

# Indices of the state array that a drain reads and writes.
BYTES, MESSAGES = 0, 1
"""Filled so far."""
WHOLE_BYTES, WHOLE_MESSAGES = 2, 3
"""Filled up to the end of the last whole transaction, or message outside of one."""
END = 4
"""The position after the last whole transaction, or after everything if none is open."""
OPEN = 5
"""Set while a transaction has begun and not ended."""
REPLY_WANTED = 6
PENDING, PENDING_SIZE = 7, 8
"""A message that found no room: its address and length. The next drain takes it first."""
STATE_SIZE = 9

_ASYNC = 1
_ENVELOPE = 25  # 'w', start, end, clock
_CLOCK_AT, CLOCK_SIZE = 17, 8
_KEEPALIVE_SIZE = 18
_BEGIN, _COMMIT, _MESSAGE, _XLOG_DATA, _KEEPALIVE = ord("B"), ord("C"), ord("M"), ord("w"), ord("k")
_MESSAGE_LSN_AT = 2


@functools.cache
def _libpq() -> Ints:
    """Return the addresses of libpq's functions for the compiled loops: get, read, free, copy."""
    library = ctypes.CDLL(_libpq_path())
    names = (library.PQgetCopyData, library.PQconsumeInput, library.PQfreemem, ctypes.CDLL(None).memcpy)
    return np.array([ctypes.cast(function, ctypes.c_void_p).value for function in names], np.int64)


def _libpq_path() -> str:
    """Return the library that psycopg uses: the one inside its binary wheel, else the system's."""
    if pq.__impl__ == "binary":
        import psycopg_binary

        bundled = Path(psycopg_binary.__file__).parent.with_name("psycopg_binary.libs")
        for path in sorted(bundled.glob("libpq-*.so*")):
            return str(path)
    found = ctypes.util.find_library("pq")
    if not found:
        raise SourceUnreachable("libpq was not found", hint="Install psycopg[binary], or the system's libpq.")
    return found


@intrinsic  # type: ignore[untyped-decorator] # numba ships no types
def _call(typing: Any, address: Any, a: Any, b: Any, c: Any) -> Any:
    """Call the C function at an address with three words. An address is data, so the code can be cached."""
    signature = types.int64(types.int64, types.int64, types.int64, types.int64)

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        word = ir.IntType(64)
        function = builder.inttoptr(args[0], cgutils.voidptr_t)
        function = builder.bitcast(function, ir.FunctionType(word, [word, word, word]).as_pointer())
        return builder.call(function, args[1:])

    return signature, build


@kernel
def _next_message(libpq: Ints, connection: Word, out: Ints, state: Ints) -> Word:
    """Store one message's address in `out[0]` (to be freed) and return its length.

    The length is 0 if there is no message yet, -1 at the end, -2 on an error.
    """
    if state[PENDING] != 0:
        out[0] = state[PENDING]
        state[PENDING] = 0
        return state[PENDING_SIZE]
    size = np.int32(_call(libpq[0], connection, out.ctypes.data, _ASYNC))
    if size == 0:
        if np.int32(_call(libpq[1], connection, 0, 0)) == 0:
            return -2
        size = np.int32(_call(libpq[0], connection, out.ctypes.data, _ASYNC))
    return np.int64(size)


@kernel
def _why(size: Word) -> Word:
    return DRY if size == 0 else (ENDED if size == -1 else BROKEN)


@kernel
def _note(b: Bytes, at: Word, body: Word, starts: Ints, state: Ints) -> None:
    """Record the end of the message at `at`, and whether it ends a transaction."""
    n = state[MESSAGES]
    starts[n] = at
    starts[n + 1] = at + body
    state[BYTES] = at + body
    state[MESSAGES] = n + 1
    if b[at] == _BEGIN:
        state[OPEN] = 1
    elif b[at] == _COMMIT and body >= 18:
        state[OPEN] = 0
        state[WHOLE_BYTES] = at + body
        state[WHOLE_MESSAGES] = n + 1
        state[END] = u64(b, at + 10)  # the commit's end: restarting at its start repeats the transaction
    elif b[at] == _MESSAGE and state[OPEN] == 0 and body >= _MESSAGE_LSN_AT + 8:
        state[WHOLE_BYTES] = at + body
        state[WHOLE_MESSAGES] = n + 1
        state[END] = u64(b, at + _MESSAGE_LSN_AT)  # where its record ends, like a commit's


@kernel
def drain_messages(libpq: Ints, connection: Word, b: Bytes, starts: Ints, state: Ints, bytes_max: Word) -> Word:
    """Append replication messages to `b` until `bytes_max` are there or nothing more can be read.

    `starts[k]` is where message k begins, without its envelope, and `starts[k + 1]` where it ends. A message that an
    application wrote outside of a transaction is followed by the server's clock: nothing else has its time.
    """
    out = np.zeros(1, np.int64)
    head = np.zeros(_KEEPALIVE_SIZE, np.uint8)
    while True:
        at = state[BYTES]
        if at >= bytes_max or state[MESSAGES] + 2 > starts.size:
            return FULL
        size = _next_message(libpq, connection, out, state)
        if size <= 0:
            return _why(size)
        body = size - _ENVELOPE
        if at + body + CLOCK_SIZE > b.size:
            state[PENDING] = out[0]
            state[PENDING_SIZE] = size
            return FULL
        _call(libpq[3], head.ctypes.data, out[0], min(size, _KEEPALIVE_SIZE))
        if head[0] == _XLOG_DATA and body > 0:
            _call(libpq[3], b.ctypes.data + at, out[0] + _ENVELOPE, body)
            if b[at] == _MESSAGE and state[OPEN] == 0:
                _call(libpq[3], b.ctypes.data + at + body, out[0] + _CLOCK_AT, CLOCK_SIZE)
                body += CLOCK_SIZE
            _note(b, at, body, starts, state)
        elif head[0] == _KEEPALIVE and size >= _KEEPALIVE_SIZE:
            if state[OPEN] == 0:
                state[END] = max(state[END], u64(head, 1))
            if head[_KEEPALIVE_SIZE - 1] != 0:
                state[REPLY_WANTED] = 1
        _call(libpq[2], out[0], 0, 0)


@kernel
def drain_copy(libpq: Ints, connection: Word, b: Bytes, state: Ints, bytes_max: Word) -> Word:
    """Append rows of a COPY to `b`, up to `bytes_max` or all that are readable."""
    out = np.zeros(1, np.int64)
    while True:
        at = state[BYTES]
        if at >= bytes_max:
            return FULL
        size = _next_message(libpq, connection, out, state)
        if size <= 0:
            return _why(size)
        if at + size > b.size:
            state[PENDING] = out[0]
            state[PENDING_SIZE] = size
            return FULL
        _call(libpq[3], b.ctypes.data + at, out[0], size)
        _call(libpq[2], out[0], 0, 0)
        state[BYTES] = at + size
        state[MESSAGES] += 1


@kernel
def let_go(libpq: Ints, state: Ints) -> None:
    """Free the message that found no room: it will not be read any more."""
    if state[PENDING] != 0:
        _call(libpq[2], state[PENDING], 0, 0)
        state[PENDING] = 0


class Wire:
    """A connection in copy mode, seen by the compiled loops."""

    def __init__(self, connection: PGconn) -> None:
        self._libpq = _libpq()
        self._connection = connection
        # All implementations of the protocol class have it; the class itself does not declare it.
        self._pointer = int(connection.pgconn_ptr)  # type: ignore[attr-defined] # see above

    @property
    def socket(self) -> int:
        return self._connection.socket

    def drain_messages(self, b: Bytes, starts: Ints, state: Ints, bytes_max: int) -> int:
        return int(drain_messages(self._libpq, self._pointer, b, starts, state, bytes_max))

    def drain_copy(self, b: Bytes, state: Ints, bytes_max: int) -> int:
        return int(drain_copy(self._libpq, self._pointer, b, state, bytes_max))

    def release_pending(self, state: Ints) -> None:
        """Free what was taken from the connection and not delivered; the last call."""
        let_go(self._libpq, state)


def warm() -> None:
    """Compile the loops, on a connection that was never opened and so has no data."""
    connection = Wire(pq.PGconn.connect_start(b"host=/nonexistent"))
    b, starts, state = np.empty(64, np.uint8), np.zeros(8, np.int64), np.zeros(STATE_SIZE, np.int64)
    connection.drain_messages(b, starts, state, 64)
    connection.drain_copy(b, state, 64)
    connection.release_pending(state)
