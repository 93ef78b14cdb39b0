"""A buffer of windows between the stream and the batches.

Nothing here moves a position. The source still has everything in the buffer, so the buffer may be cleared at any time
and the source sends it again. A transaction that is handed out whole is gathered here; one that may be handed out in
parts is cut. Rows get their numbers when they leave: a snapshot may take numbers while they wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tailrace.errors import ConfigError
from tailrace.model.batch import AnyWindow
from tailrace.model.position import ZERO
from tailrace.model.position_kinds import Position
from tailrace.runtime.output_batch import (
    Limits,
    Transactions,
    join_parts,
    join_windows,
    number_in_sequence,
    split_off_transaction_end,
    split_to_limits,
    window_bytes,
)


class WindowBuffer:
    """Windows in order, between the stream and the batches.

    `as_they_come` cuts, joins and numbers nothing.
    """

    def __init__(self, limits: Limits, *, as_they_come: bool) -> None:
        self._limits = limits
        self._as_they_come = as_they_come
        self._windows: deque[tuple[AnyWindow, int]] = deque()
        """Windows with their sizes in bytes. A size is kept because Arrow needs time to compute it."""
        self._parts: list[AnyWindow] = []
        """Parts of a transaction that has not ended and is to be handed out whole."""
        self.read_until: Position = ZERO
        """The end of the last window taken."""

    def reset(self, position: Position) -> None:
        """Empty the buffer and continue at a position."""
        self._windows.clear()
        self._parts.clear()
        self.read_until = position

    def add(self, window: AnyWindow) -> None:
        """Store a window that has rows, or ends a transaction."""
        if not window.continues and not self._as_they_come:
            self._drop_unfinished()  # the source repeats them with it
        self.read_until = window.end
        if self._as_they_come:
            self._append(window)
            return
        if self._limits.transactions is Transactions.SPLIT:
            for part in split_off_transaction_end(window):
                self._append(part)
        elif window.open:
            self._parts.append(window)
            self._require_room()
        else:
            self._append(join_parts(self._parts, window))
            self._parts.clear()

    def _append(self, window: AnyWindow) -> None:
        self._windows.append((window, 0 if self._as_they_come else window_bytes(window)))

    def _require_room(self) -> None:
        size = sum(map(window_bytes, self._parts))
        if size > self._limits.transaction_bytes:
            raise ConfigError(
                "transaction is too large to be handed out whole",
                bytes=size,
                limit=self._limits.transaction_bytes,
                hint="Take it in parts (`Limits(transactions=Transactions.SPLIT)`), or raise `transaction_bytes`.",
            )

    def next(self, first_seq: int) -> AnyWindow | None:
        """Return as many rows as a batch holds, numbered from `first_seq`; None if empty."""
        if not self._windows:
            return None
        first, size = self._windows.popleft()
        if self._as_they_come:
            return first
        picked, rows = [first], first.rows
        while self._windows and not first.open and self._fits(*self._windows[0], rows, size):
            window, its_size = self._windows.popleft()
            picked.append(window)
            rows, size = rows + window.rows, size + its_size
        batch, rest = split_to_limits(join_windows(number_in_sequence(picked, first_seq)), self._limits, size)
        if rest is not None:
            self.put_back(rest)
        return batch

    def _fits(self, window: AnyWindow, its_size: int, rows: int, size: int) -> bool:
        if window.open or window.continues:
            return False
        return rows + window.rows <= self._limits.rows and size + its_size <= self._limits.bytes

    @property
    def full(self) -> bool:
        """True if the buffer has enough for the next batch."""
        if self._as_they_come:
            return bool(self._windows)
        return self.rows >= self._limits.rows or sum(size for _, size in self._windows) >= self._limits.bytes

    @property
    def rows(self) -> int:
        """Rows to be handed out."""
        return sum(window.rows for window, _ in tuple(self._windows))  # another thread may ask

    def __bool__(self) -> bool:
        return bool(self._windows)

    @property
    def has_open_transaction(self) -> bool:
        """True if the buffer has a part of a transaction that has not ended."""
        return bool(self._parts) or bool(self._windows and self._windows[-1][0].open)

    def put_back(self, window: AnyWindow) -> None:
        """Put back the rest of what was handed out: it is next."""
        self._windows.appendleft((window, window_bytes(window)))

    def undo_put_back(self, window: AnyWindow) -> None:
        """Remove what was put back: it is still handed out."""
        if self._windows and self._windows[0][0] is window:
            self._windows.popleft()

    def handle_stream_loss(self, position: Position) -> bool:
        """Remove unfinished transactions after a lost stream; return whether nothing is left.

        Whole transactions stay, unless windows are passed on as they are. Call it while nothing of the stream is handed
        out and not acknowledged.
        """
        self._drop_unfinished()
        if not self._windows or self._as_they_come:
            self.reset(position)
            return True
        self.read_until = self._windows[-1][0].end
        return False

    def _drop_unfinished(self) -> None:
        self._parts.clear()
        while self._windows and self._windows[-1][0].open:
            self._windows.pop()

    def drain(self, first_seq: int) -> tuple[tuple[AnyWindow, ...], tuple[AnyWindow, ...]]:
        """Empty the buffer and return its windows, numbered as they would be handed out.

        The first tuple could be handed out; the second are parts of a transaction that has not ended.
        """
        windows: Sequence[AnyWindow] = [*(window for window, _ in self._windows), *self._parts]
        if not self._as_they_come:
            windows = number_in_sequence(windows, first_seq)
        whole, parts = tuple(windows[: len(self._windows)]), tuple(windows[len(self._windows) :])
        self._windows.clear()
        self._parts.clear()
        return whole, parts
