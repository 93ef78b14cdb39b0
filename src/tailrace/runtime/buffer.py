"""What was read from the stream and not handed out yet: windows, in order, numbered, as large as a batch may be.

Nothing here moves a position. What is here stays at the source too, so it can be forgotten at any time, and comes
again. A transaction that is to be handed out whole is gathered here; one that may come in parts is cut.
"""

from __future__ import annotations

from collections import deque

from tailrace.errors import ConfigError
from tailrace.model.batch import Window
from tailrace.model.position import ZERO, Lsn
from tailrace.runtime.batch import Limits, Transactions, bytes_of, gathered, joined, numbered, parted, split


class Buffer:
    """Windows between a stream and a batch. `as_they_come` cuts, joins and numbers nothing."""

    def __init__(self, limits: Limits, *, as_they_come: bool) -> None:
        self._limits = limits
        self._as_they_come = as_they_come
        self._windows: deque[Window] = deque()
        self._sizes: deque[int] = deque()
        """In bytes, of each; asking Arrow for it is not free."""
        self._parts: list[Window] = []
        """Of a transaction that has not ended and is to be handed out whole."""
        self._next_seq = 0
        self.upto = ZERO
        """Everything that ended up to here was taken."""

    def forget(self, position: Lsn, rows: int) -> None:
        """Begin anew at a position, behind so many rows."""
        self._windows.clear()
        self._sizes.clear()
        self._parts.clear()
        self.upto, self._next_seq = position, rows

    def take(self, window: Window) -> None:
        """Keep a window that has rows, or finishes a transaction."""
        if not window.continues and not self._as_they_come:
            self._drop_unfinished()  # they come again with it
        self.upto = window.end
        if self._as_they_come:
            self._keep(window)
            return
        first = self._next_seq
        self._next_seq += window.rows
        window = numbered(window, first)
        if self._limits.transactions is Transactions.SPLIT:
            for part in parted(window):
                self._keep(part)
        elif window.open:
            self._parts.append(window)
            self._require_room()
        else:
            self._keep(gathered(self._parts, window))
            self._parts.clear()

    def _keep(self, window: Window) -> None:
        self._windows.append(window)
        self._sizes.append(0 if self._as_they_come else bytes_of(window))

    def _require_room(self) -> None:
        size = sum(map(bytes_of, self._parts))
        if size > self._limits.transaction_bytes:
            raise ConfigError(
                "a transaction is too large to be handed out whole", bytes=size, limit=self._limits.transaction_bytes,
                hint="Take it in parts (`Limits(transactions=Transactions.SPLIT)`), or raise `transaction_bytes`.",
            )  # fmt: skip

    def next(self) -> Window | None:
        """As much as a batch holds."""
        if not self._windows:
            return None
        picked, size = [self._windows.popleft()], self._sizes.popleft()
        if self._as_they_come:
            return picked[0]
        rows = picked[0].rows
        while self._windows and not picked[0].open and self._joins(self._windows[0], rows, size + self._sizes[0]):
            picked.append(self._windows.popleft())
            rows, size = rows + picked[-1].rows, size + self._sizes.popleft()
        found, rest = split(joined(picked), self._limits, size)
        if rest is not None:
            self.put_back(rest)
        return found

    def _joins(self, window: Window, rows: int, size: int) -> bool:
        if window.open or window.continues:
            return False
        return rows + window.rows <= self._limits.rows and size <= self._limits.bytes

    @property
    def full(self) -> bool:
        """Whether more would not fit into the next batch anyway."""
        if self._as_they_come:
            return bool(self._windows)
        return self.rows >= self._limits.rows or sum(self._sizes) >= self._limits.bytes

    @property
    def rows(self) -> int:
        """To be handed out."""
        return sum(window.rows for window in tuple(self._windows))  # another thread may ask

    def __bool__(self) -> bool:
        return bool(self._windows)

    @property
    def gathering(self) -> bool:
        """Whether a transaction is under way here."""
        return bool(self._parts) or bool(self._windows and self._windows[-1].open)

    def put_back(self, window: Window) -> None:
        """The rest of what was handed out comes next."""
        self._windows.appendleft(window)
        self._sizes.appendleft(bytes_of(window))

    def take_back(self) -> None:
        """It is still handed out."""
        self._windows.popleft()
        self._sizes.popleft()

    def lose(self, position: Lsn, rows: int) -> bool:
        """The stream is gone, while nothing of it was handed out and not acknowledged: what has not come whole comes
        again, and what has is kept. Whether nothing is left."""
        self._drop_unfinished()
        if not self._windows or self._as_they_come:
            self.forget(position, rows)
            return True
        self.upto = self._windows[-1].end
        return False

    def _drop_unfinished(self) -> None:
        for part in self._parts:
            self._next_seq -= part.rows
        self._parts.clear()
        while self._windows and self._windows[-1].open:
            self._next_seq -= self._windows.pop().rows
            self._sizes.pop()

    def drain(self) -> tuple[tuple[Window, ...], tuple[Window, ...]]:
        """All that is here: what could be handed out, and parts of a transaction that has not ended."""
        whole, parts = tuple(self._windows), tuple(self._parts)
        self._windows.clear()
        self._sizes.clear()
        self._parts.clear()
        return whole, parts
