"""The live stream: one thread owns and reads the replication connection. It reads lazily; the loop takes windows.

What must hold: keep-alives are answered while the loop is busy or holds back. Nothing is confirmed that `confirm` was
not called with. A delivered window is whole transactions, or a part of one that is too large to hold, and nothing else
is delivered between its parts.

Back-pressure is not reading: the buffer has a limit, and the server waits. So memory has a limit whatever the size of a
transaction. There are three buffers (one filling, one waiting, one being decoded), and each has room for the largest
row.

Waking for every message costs more than the message. So a reader that is behind naps for a moment and then takes
everything that has arrived.
"""

from __future__ import annotations

import select
import struct
import threading
import time
from collections.abc import Callable

import numpy as np
from psycopg import pq
from psycopg.pq.abc import PGconn

from tailrace.capture.postgres import wire
from tailrace.capture.postgres.config import PostgresSettings
from tailrace.capture.postgres.connect import command, map_error_text
from tailrace.capture.postgres.decode import EPOCH_2000, Decoder, Describe
from tailrace.capture.postgres.invalid_text import text_handling_of
from tailrace.capture.postgres.values import Bytes, Ints
from tailrace.errors import SourceError, SourceUnreachable, TailraceError
from tailrace.model.batch import Window
from tailrace.model.position import Lsn

WINDOW_BYTES = 8 << 20
"""A window closes at this size."""
WINDOW_SECONDS = 0.010
"""A window closes at this age while changes trickle in."""
WINDOW_SECONDS_BEHIND = 0.300
"""A window closes at this age while there is a backlog. Then larger commits are cheaper."""
BIG_BYTES = 16 << 20
"""A transaction larger than this is delivered in parts of about this size.

It is twice a window, so that what fits into a window is never split: each part costs the log a file. It is small,
because a part takes several times its size while it is decoded and written.
"""
BUFFER_BYTES_MAX = 32 << 20
"""Size from which reading stops while the loop is busy."""
DRAIN_BYTES = 1 << 20
"""Bytes read between two looks at the clock."""
BUSY_BYTES = 20 << 10
BUSY_BYTES_PER_SECOND = 2 << 20
"""Pace above which we count as behind, if more than `BUSY_BYTES` was read at once.

After a pause of our own much has arrived that is not a backlog, so both conditions are needed.
"""
BUSY_SECONDS = 0.03
"""Time for which we still count as behind: the server pauses between two large transactions."""
NAP_SECONDS = 0.025
"""Pause while behind. The longer it is, the more the server sends at once, and the less both sides pay."""
IDLE_SECONDS = 0.05
STATUS_SECONDS = 0.1
"""Confirmations are sent at most this often."""
STATUS_SECONDS_MAX = 10.0
"""Confirmations are sent at least this often, or three times in the server's time-out."""


class _MessageBuffer:
    """Messages placed end to end, and the state of reading them."""

    def __init__(self) -> None:
        self.bytes: Bytes = np.empty(BIG_BYTES + 4 * DRAIN_BYTES, np.uint8)
        self.starts: Ints = np.zeros((WINDOW_BYTES * 2) // 64, np.int64)
        self.state: Ints = np.zeros(wire.STATE_SIZE, np.int64)

    @property
    def whole(self) -> bool:
        """True if there is a whole transaction."""
        return bool(self.state[wire.WHOLE_MESSAGES])

    @property
    def big(self) -> bool:
        """True if an open transaction has reached the most that we ever hold."""
        return int(self.state[wire.BYTES] - self.state[wire.WHOLE_BYTES]) >= BIG_BYTES

    @property
    def offered(self) -> tuple[int, int]:
        """Bytes and messages to deliver.

        They reach to the end of the last whole transaction; without a whole one they are all.
        """
        if self.whole:
            return int(self.state[wire.WHOLE_BYTES]), int(self.state[wire.WHOLE_MESSAGES])
        return int(self.state[wire.BYTES]), int(self.state[wire.MESSAGES])

    @property
    def end(self) -> Lsn:
        """The position after the whole transactions. The kernels see its 64 bits as a signed word."""
        return Lsn(int(self.state[wire.END]) % (1 << 64))

    def make_room(self) -> None:
        """Double whichever buffer is full; the pending message may need more."""
        filled = int(self.state[wire.BYTES])
        needed = filled + int(self.state[wire.PENDING_SIZE])
        if self.state[wire.PENDING] and needed > self.bytes.size:
            # Not `concatenate`: it would touch, and so allocate, memory that may never be needed.
            larger = np.empty(max(self.bytes.size * 2, needed), np.uint8)
            larger[:filled] = self.bytes[:filled]
            self.bytes = larger
        if self.state[wire.MESSAGES] + 2 > self.starts.size:
            self.starts = np.concatenate([self.starts, np.zeros(self.starts.size, np.int64)])

    def take_rest(self, other: _MessageBuffer) -> None:
        """Take over what `other` holds after the part that it offers."""
        old = other.state
        self.state[:] = old
        begin, first = other.offered
        size, messages = int(old[wire.BYTES]) - begin, int(old[wire.MESSAGES]) - first
        while self.bytes.size < size:
            self.bytes = np.empty(self.bytes.size * 2, np.uint8)
        while self.starts.size < messages + 2:
            self.starts = np.zeros(self.starts.size * 2, np.int64)
        self.bytes[:size] = other.bytes[begin : begin + size]
        self.starts[: messages + 1] = other.starts[first : first + messages + 1] - begin
        self.state[wire.BYTES], self.state[wire.MESSAGES] = size, messages
        for field in (wire.WHOLE_BYTES, wire.WHOLE_MESSAGES):
            self.state[field] = 0
        # The pending message and a wanted reply now belong to the new buffer alone.
        old[wire.PENDING] = old[wire.REPLY_WANTED] = 0


class PostgresStream:
    """Windows after a position, from the slot, for one caller."""

    def __init__(
        self,
        settings: PostgresSettings,
        session: PGconn,
        timeline: int,
        after: Lsn,
        describe: Describe,
        xid_near: int,
        release: Callable[[], None],
    ) -> None:
        text = text_handling_of(session, replaced=settings.invalid_text_replaced)
        self._decoder, self._release = Decoder(describe, xid_near, settings.messages, text), release
        self._last: Window | None = None
        self._connection = session
        self.timeline = timeline
        """The timeline of the server's history, as this session's server has it."""
        self._timeout = _server_timeout(self._connection)
        self._start(settings, after)
        self._wire = wire.Wire(self._connection)
        self._confirmed, self._reported, self._reported_at = after, after, 0.0
        self._filling, self._spare = _MessageBuffer(), [_MessageBuffer(), _MessageBuffer()]
        self._ready: _MessageBuffer | None = None
        self._wanted = False
        """True while the caller waits for a window."""
        self._decoding = False
        self._end = after
        self._opened_at: float | None = None
        self._behind_until = self._drained_at = 0.0
        self._failure: TailraceError | None = None
        self._stopping = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="tailrace-wal", daemon=True)
        self._thread.start()

    def _start(self, settings: PostgresSettings, after: Lsn) -> None:
        names = ",".join(f'"{name}"' for name in settings.publications)
        options = f"proto_version '1', publication_names '{names}', messages '{settings.messages is not None}'"
        if not settings.origins:
            options += ", origin 'none'"
        command(self._connection, f'START_REPLICATION SLOT "{settings.slot}" LOGICAL {after} ({options})')

    # The caller's side.

    def read(self, after: Lsn, wait_seconds: float) -> Window | None:
        if self._decoding:
            raise SourceUnreachable(
                "data from the server was not decoded", hint="Nothing to do: the stream is opened again."
            )
        if self._last is not None and after < self._last.end:
            return self._last  # the caller could not keep it
        self._last = None
        with self._changed:
            self._wanted = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ready is not None or self._failure is not None, wait_seconds)
            self._wanted = False
            ready, self._ready = self._ready, None
            if ready is None and self._failure is not None:
                raise self._failure
            end = self._end
            self._changed.notify_all()
        if ready is None:
            # The position must not move between two parts of a transaction.
            return Window(start=after, end=end) if end > after and not self._decoder.inside else None
        self._decoding = True  # stays set if this fails: the lost data must not be skipped
        window = self._decode(ready, after)
        self._decoding = False
        with self._changed:
            if ready.bytes.size <= 2 * BUFFER_BYTES_MAX:  # one that held a huge row is freed
                self._spare.append(ready)
        if window is None or (window.is_empty and window.end == after):
            return None
        self._last = None if window.is_empty or window.open else window
        return window

    def _decode(self, ready: _MessageBuffer, after: Lsn) -> Window | None:
        size, messages = ready.offered
        if not ready.whole:
            return self._decoder.decode_part(ready.bytes[:size], ready.starts, messages, after)
        end = max(after, ready.end)
        return self._decoder.decode(ready.bytes[:size], ready.starts, messages, after, end)

    @property
    def held_bytes(self) -> int:
        """Bytes read from the server that the caller has not taken yet."""
        with self._changed:
            buffers = [self._filling] if self._ready is None else [self._filling, self._ready]
            return sum(int(buffer.state[wire.BYTES]) for buffer in buffers)

    def confirm(self, position: Lsn) -> None:
        self._confirmed = position

    def close(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()
        self._wire.release_pending(self._filling.state)
        try:
            if self._failure is None:
                self._report()
        finally:
            self._connection.finish()
            self._release()

    # The reading thread's side.

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._step()
        except TailraceError as error:
            self._fail(error)
        except Exception as error:  # the thread's boundary: the caller must get any error
            self._fail(
                SourceError(
                    f"the reading thread failed: {type(error).__name__}: {error}",
                    hint="Restart the capture; if it happens again, report it.",
                )
            )

    def _fail(self, error: TailraceError) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def _step(self) -> None:
        buffer = self._filling
        filled = int(buffer.state[wire.BYTES])
        if self._ready is not None and (buffer.big or filled >= BUFFER_BYTES_MAX):
            self._report_if_due()
            with self._changed:
                self._changed.wait(IDLE_SECONDS)
            return
        why = self._wire.drain_messages(buffer.bytes, buffer.starts, buffer.state, filled + DRAIN_BYTES)
        if why == wire.FULL:
            buffer.make_room()
        added = int(buffer.state[wire.BYTES]) - filled
        now = time.monotonic()
        if added and self._opened_at is None:
            self._opened_at = now
        if added >= BUSY_BYTES and added >= BUSY_BYTES_PER_SECOND * (now - self._drained_at):
            self._behind_until = now + BUSY_SECONDS
        self._drained_at = now
        ended = why in (wire.ENDED, wire.BROKEN)
        self._hand_over(now, dry=why != wire.FULL and now >= self._behind_until, wanted=self._wanted or ended)
        self._report_if_due()
        if ended:
            raise self._what_happened()
        if why == wire.DRY:
            self._rest(now)

    def _rest(self, now: float) -> None:
        if now < self._behind_until:
            time.sleep(NAP_SECONDS)
        elif self._filling.whole and not self._wanted:
            # The caller is busy. What arrives meanwhile is read in one go: waking for each message only costs.
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._stopping, BUSY_SECONDS)
        else:
            select.select([self._wire.socket], [], [], IDLE_SECONDS)

    def _hand_over(self, now: float, *, dry: bool, wanted: bool) -> None:
        """Offer whole transactions, if it is time and the last offer was taken.

        If none is whole and no more may be held, offer a part of a transaction. Nothing is offered before the caller
        asks, unless a window is full: what arrives meanwhile would wait for the next window.
        """
        buffer = self._filling
        if self._ready is not None:
            return
        if not buffer.whole and not buffer.big:
            if not buffer.state[wire.OPEN]:
                self._end = max(self._end, buffer.end)
            return
        full = buffer.big or buffer.state[wire.WHOLE_BYTES] >= WINDOW_BYTES
        if not (wanted or full):
            return
        age = now - (self._opened_at or 0.0)
        limit = WINDOW_SECONDS_BEHIND if now < self._behind_until else WINDOW_SECONDS
        if not (dry or full or age >= limit):
            return
        with self._changed:
            following = self._spare.pop() if self._spare else _MessageBuffer()
            following.take_rest(buffer)
            self._filling, self._ready = following, buffer
            if buffer.whole:
                self._end = buffer.end
            self._changed.notify_all()
        self._opened_at = now if following.state[wire.BYTES] else None

    def _report_if_due(self) -> None:
        since = time.monotonic() - self._reported_at
        state = self._filling.state
        moved = self._confirmed != self._reported and since >= STATUS_SECONDS
        if state[wire.REPLY_WANTED] or moved or since >= min(STATUS_SECONDS_MAX, self._timeout / 3):
            state[wire.REPLY_WANTED] = 0
            self._report()

    def _report(self) -> None:
        """Report the confirmed position to the server, which may discard what is before it."""
        confirmed = self._confirmed
        clock = time.time_ns() // 1000 - EPOCH_2000
        message = struct.pack(">cQQQqB", b"r", confirmed.value, confirmed.value, confirmed.value, clock, 0)
        try:
            self._connection.put_copy_data(message)
            self._connection.flush()
        except Exception as error:
            raise self._what_happened() from error
        self._reported, self._reported_at = confirmed, time.monotonic()

    def _what_happened(self) -> TailraceError:
        result = self._connection.get_result()
        state = result.error_field(pq.DiagnosticField.SQLSTATE) if result is not None else None
        message = result.get_error_message() if result is not None else ""
        return map_error_text(
            message or self._connection.get_error_message() or "the stream ended", state=(state or b"").decode()
        )


def _server_timeout(connection: PGconn) -> float:
    """Return the seconds after which the server drops a silent reader. No time-out counts as a long one."""
    row = command(connection, "SELECT setting FROM pg_settings WHERE name = 'wal_sender_timeout'")
    return (int(row[0] or 0) if row else 0) / 1000 or 3600.0
