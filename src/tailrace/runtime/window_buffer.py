"""What was read from the stream and not handed out yet: windows, in order, as large as a batch may be.

Nothing here moves a position. What is here stays at the source too, so it can be forgotten at any time, and comes
again. A transaction that is to be handed out whole is gathered here; one that may come in parts is cut. Rows are
numbered when they leave: a snapshot may take numbers while they wait.
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
    """Windows between a stream and a batch. `as_they_come` cuts, joins and numbers nothing."""

    def __init__(self, limits: Limits, *, as_they_come: bool) -> None:
        self._limits = limits
        self._as_they_come = as_they_come
        self._windows: deque[tuple[AnyWindow, int]] = deque()
        """Each with its size in bytes; asking Arrow for it is not free."""
        self._parts: list[AnyWindow] = []
        """Of a transaction that has not ended and is to be handed out whole."""
        self.read_until: Position = ZERO
        """Everything that ended up to here was taken."""

    def reset(self, position: Position) -> None:
        """Begin anew at a position."""
        self._windows.clear()
        self._parts.clear()
        self.read_until = position

    def add(self, window: AnyWindow) -> None:
        """Keep a window that has rows, or finishes a transaction."""
        if not window.continues and not self._as_they_come:
            self._drop_unfinished()  # they come again with it
        self.read_until = window.end
        if self._as_they_come:
            self._keep(window)
            return
        if self._limits.transactions is Transactions.SPLIT:
            for part in split_off_transaction_end(window):
                self._keep(part)
        elif window.open:
            self._parts.append(window)
            self._require_room()
        else:
            self._keep(join_parts(self._parts, window))
            self._parts.clear()

    def _keep(self, window: AnyWindow) -> None:
        self._windows.append((window, 0 if self._as_they_come else window_bytes(window)))

    def _require_room(self) -> None:
        size = sum(map(window_bytes, self._parts))
        if size > self._limits.transaction_bytes:
            raise ConfigError(
                "a transaction is too large to be handed out whole",
                bytes=size,
                limit=self._limits.transaction_bytes,
                hint="Take it in parts (`Limits(transactions=Transactions.SPLIT)`), or raise `transaction_bytes`.",
            )

    def next(self, first_seq: int) -> AnyWindow | None:
        """As much as a batch holds, its first row with this number."""
        if not self._windows:
            return None
        first, size = self._windows.popleft()
        if self._as_they_come:
            return first
        picked, rows = [first], first.rows
        while self._windows and not first.open and self._joins(*self._windows[0], rows, size):
            window, its_size = self._windows.popleft()
            picked.append(window)
            rows, size = rows + window.rows, size + its_size
        found, rest = split_to_limits(join_windows(number_in_sequence(picked, first_seq)), self._limits, size)
        if rest is not None:
            self.put_back(rest)
        return found

    def _joins(self, window: AnyWindow, its_size: int, rows: int, size: int) -> bool:
        if window.open or window.continues:
            return False
        return rows + window.rows <= self._limits.rows and size + its_size <= self._limits.bytes

    @property
    def full(self) -> bool:
        """Whether more would not fit into the next batch anyway."""
        if self._as_they_come:
            return bool(self._windows)
        return self.rows >= self._limits.rows or sum(size for _, size in self._windows) >= self._limits.bytes

    @property
    def rows(self) -> int:
        """To be handed out."""
        return sum(window.rows for window, _ in tuple(self._windows))  # another thread may ask

    def __bool__(self) -> bool:
        return bool(self._windows)

    @property
    def has_open_transaction(self) -> bool:
        """Whether a transaction is under way here."""
        return bool(self._parts) or bool(self._windows and self._windows[-1][0].open)

    def put_back(self, window: AnyWindow) -> None:
        """The rest of what was handed out comes next."""
        self._windows.appendleft((window, window_bytes(window)))

    def undo_put_back(self, window: AnyWindow) -> None:
        """What was put back is still handed out."""
        if self._windows and self._windows[0][0] is window:
            self._windows.popleft()

    def handle_stream_loss(self, position: Position) -> bool:
        """The stream is gone, while nothing of it was handed out and not acknowledged: what has not come whole comes
        again, and what has is kept. Whether nothing is left."""
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
        """All that is here, numbered as it would come: what could be handed out, and parts of a transaction that has
        not ended."""
        all_of_it: Sequence[AnyWindow] = [*(window for window, _ in self._windows), *self._parts]
        if not self._as_they_come:
            all_of_it = number_in_sequence(all_of_it, first_seq)
        whole, parts = tuple(all_of_it[: len(self._windows)]), tuple(all_of_it[len(self._windows) :])
        self._windows.clear()
        self._parts.clear()
        return whole, parts
