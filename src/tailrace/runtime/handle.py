"""A handle on a running runtime for other threads: pause, resume, ask for a snapshot, stop one, ask how it is.

Nothing is done here: wishes are noted, and the runtime's own thread does them when it polls next. Whoever waits inside
`poll` is woken at once, so a paused runtime hears `resume` without being polled again.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tailrace.errors import ConfigError, RuntimeRefused, Unsupported
from tailrace.model.schema import TableId
from tailrace.runtime.observers import Health, Status

REQUESTS_MAX = 100
"""Snapshots that wait for the one under way."""
SNAPSHOT_ID = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True, kw_only=True)
class SnapshotRequest:
    """A snapshot that somebody asked for."""

    tables: tuple[TableId, ...]
    where: str | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])


def require_distinct_tables(tables: Iterable[TableId]) -> tuple[TableId, ...]:
    """The tables, if each is named once, and by a `TableId`: a dot in a text could stand anywhere in the name."""
    if not isinstance(tables, Iterable):
        raise ConfigError("that is no list of tables", found=type(tables).__name__, hint="Give `[TableId(…)]`.")
    found = tuple(tables)
    for table in found:
        if not isinstance(table, TableId):
            raise ConfigError(
                "a table is not named by a `TableId`",
                found=type(table).__name__,
                hint='Give schema and name apart: `[TableId("public", "orders")]`.',
            )
    twice = next((table for table in found if found.count(table) > 1), None)
    if twice is not None:
        raise ConfigError("a table is named twice", table=twice, hint="Name it once: all its rows would come twice.")
    return found


class Control:
    """Usable from any thread, for as long as its runtime lives."""

    def __init__(
        self, status: Callable[[], Status], *, snapshots: bool, under_way: Callable[[], str | None] = lambda: None
    ) -> None:
        self._status, self._snapshots, self._under_way = status, snapshots, under_way
        self._beginning: str | None = None
        """It waits no more, and is not under way yet."""
        self._changed = threading.Condition()
        self._paused = False
        self._wishes: deque[SnapshotRequest] = deque()
        self._stopped: set[str] = set()
        self._stop_under_way = False
        self._never_begun: list[str] = []
        """Given up while they waited, and not told of yet."""

    def pause(self) -> None:
        """Hand nothing out from the next poll on. What was handed out can be acknowledged."""
        with self._changed:
            self._paused = True
            self._changed.notify_all()

    def resume(self) -> None:
        """Go on."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    @property
    def paused(self) -> bool:
        return self._paused

    def snapshot(self, *tables: TableId, where: str | None = None) -> str:
        """Read tables again while the stream goes on, or those of their rows that fulfil a condition in the source's
        SQL; the snapshot's id. They are read in the order of asking."""
        if not self._snapshots:
            raise Unsupported("this runtime cannot read tables", hint="Its source cannot, or a log keeps its place.")
        if not tables:
            raise ConfigError("a snapshot needs tables", hint="Name them: `control.snapshot(TableId(…))`.")
        if where is not None and len(tables) > 1:
            raise ConfigError("a condition is for one table", hint="Ask for a snapshot of each table.")
        if where is not None and not isinstance(where, str):
            raise ConfigError("a condition is a text", hint='It is what would follow WHERE: `where="id > 7"`.')
        wish = SnapshotRequest(tables=require_distinct_tables(tables), where=where)
        with self._changed:
            if len(self._wishes) >= REQUESTS_MAX:
                raise RuntimeRefused(
                    "too many snapshots wait", waiting=len(self._wishes), hint="Wait until some of them are done."
                )
            self._wishes.append(wish)
            self._changed.notify_all()
        return wish.id

    def stop_snapshot(self, snapshot: str | None = None) -> bool:
        """Give up a snapshot, or the one under way and all that wait now; whether there was one. What was read of it
        stays delivered. Where it came before the stream, the stream goes on from its moment."""
        if snapshot is not None and not (isinstance(snapshot, str) and SNAPSHOT_ID.fullmatch(snapshot)):
            raise ConfigError(
                "that is no snapshot's id",
                found=type(snapshot).__name__,
                hint="Give what `control.snapshot(…)` has returned, or `SnapshotBegun.id`. Nothing gives up all.",
            )
        with self._changed:
            going = {wish.id for wish in self._wishes} | ({self._under_way(), self._beginning} - {None})
            self._never_begun += [wish.id for wish in self._wishes if snapshot in (None, wish.id)]
            self._wishes = deque(wish for wish in self._wishes if snapshot not in (None, wish.id))
            if snapshot is None:
                self._stop_under_way = True
            else:
                self._stopped.add(snapshot)
            self._changed.notify_all()
            return bool(going) if snapshot is None else snapshot in going

    def status(self) -> Status:
        return self._status()

    def health(self) -> Health:
        return self._status().health

    # What the runtime calls, in its own thread.

    def wait(self, seconds: float) -> None:
        """Until somebody wants something, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: not self._paused, seconds)

    def next_request(self) -> SnapshotRequest | None:
        """The next snapshot that was asked for, while none is under way: there is nothing to stop any more."""
        with self._changed:
            self._forget_stops()
            wish = self._wishes.popleft() if self._wishes else None
            self._beginning = None if wish is None else wish.id
            return wish

    def clear_starting(self) -> None:
        """What was asked for is under way now, or waits again, or is given up."""
        with self._changed:
            self._beginning = None

    def put_back_request(self, wish: SnapshotRequest) -> None:
        """It could not be begun now."""
        with self._changed:
            if not self._stop_under_way and wish.id not in self._stopped:
                self._wishes.appendleft(wish)
            else:
                self._never_begun.append(wish.id)

    def take_cancelled(self) -> list[str]:
        """Snapshots that were given up before they began, each once."""
        with self._changed:
            found, self._never_begun = self._never_begun, []
            return found

    def is_cancelled(self, snapshot: str) -> bool:
        """Whether somebody has stopped this snapshot, which is under way. It stays so until it is over."""
        with self._changed:
            return self._stop_under_way or snapshot in self._stopped

    def _forget_stops(self) -> None:
        self._stop_under_way = False
        self._stopped.clear()
