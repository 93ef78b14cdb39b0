"""Control of a running runtime from other threads: pause, resume, snapshots and status.

Nothing is done here. Requests are stored, and the runtime's own thread carries them out at its next poll. A thread that
waits inside `poll` is woken at once, so a paused runtime reacts to `resume` without another poll.
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
"""Most snapshots that may wait for the one under way."""
SNAPSHOT_ID = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True, kw_only=True)
class SnapshotRequest:
    """A request for a snapshot, from a caller of `Control`."""

    tables: tuple[TableId, ...]
    where: str | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])


def require_distinct_tables(tables: Iterable[TableId]) -> tuple[TableId, ...]:
    """Return the tables; refuse anything but distinct `TableId`s.

    In a string the dot between schema and name would be ambiguous: a name may contain one.
    """
    if not isinstance(tables, Iterable):
        raise ConfigError("tables are not a list", found=type(tables).__name__, hint="Pass `[TableId(…)]`.")
    checked = tuple(tables)
    for table in checked:
        if not isinstance(table, TableId):
            raise ConfigError(
                "table is not a `TableId`",
                found=type(table).__name__,
                hint='Pass schema and name separately: `[TableId("public", "orders")]`.',
            )
    twice = next((table for table in checked if checked.count(table) > 1), None)
    if twice is not None:
        raise ConfigError("table is named twice", table=twice, hint="Name it once: all its rows would be read twice.")
    return checked


class Control:
    """A handle on a runtime, for any thread, valid as long as the runtime exists."""

    def __init__(
        self, status: Callable[[], Status], *, snapshots: bool, under_way: Callable[[], str | None] = lambda: None
    ) -> None:
        self._status, self._snapshots, self._under_way = status, snapshots, under_way
        self._starting: str | None = None
        """Id of a request that no longer waits and is not under way yet."""
        self._changed = threading.Condition()
        self._paused = False
        self._requests: deque[SnapshotRequest] = deque()
        self._stopped: set[str] = set()
        self._stop_current = False
        self._cancelled: list[str] = []
        """Ids of requests that were stopped while they waited, and not reported yet."""

    def pause(self) -> None:
        """Hand out nothing from the next poll on. A batch handed out before can still be acknowledged."""
        with self._changed:
            self._paused = True
            self._changed.notify_all()

    def resume(self) -> None:
        """End a pause."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    @property
    def paused(self) -> bool:
        return self._paused

    def snapshot(self, *tables: TableId, where: str | None = None) -> str:
        """Ask for tables to be read again while the stream continues; return the snapshot's id.

        `where` limits it to rows that fulfil a condition in the source's SQL. Snapshots are read in the order of the
        requests.
        """
        if not self._snapshots:
            raise Unsupported(
                "runtime cannot read tables",
                hint="Use a source that can, and a checkpoint store instead of a change log.",
            )
        if not tables:
            raise ConfigError("snapshot has no tables", hint="Name them: `control.snapshot(TableId(…))`.")
        if where is not None and len(tables) > 1:
            raise ConfigError("condition is for several tables", hint="Ask for one snapshot per table.")
        if where is not None and not isinstance(where, str):
            raise ConfigError("condition is not a string", hint='Pass what would follow WHERE: `where="id > 7"`.')
        request = SnapshotRequest(tables=require_distinct_tables(tables), where=where)
        with self._changed:
            if len(self._requests) >= REQUESTS_MAX:
                raise RuntimeRefused(
                    "too many snapshots are waiting",
                    waiting=len(self._requests),
                    hint="Wait until some of them are done.",
                )
            self._requests.append(request)
            self._changed.notify_all()
        return request.id

    def stop_snapshot(self, snapshot: str | None = None) -> bool:
        """Stop a snapshot; return whether there was one to stop.

        Without an id it stops the current one and all that wait now. Rows read so far stay delivered. After a snapshot
        before the stream, the stream starts at the snapshot's position.
        """
        if snapshot is not None and not (isinstance(snapshot, str) and SNAPSHOT_ID.fullmatch(snapshot)):
            raise ConfigError(
                "snapshot id is not valid",
                found=type(snapshot).__name__,
                hint="Pass what `control.snapshot(…)` has returned, or `SnapshotBegun.id`. To stop all, pass no id.",
            )
        with self._changed:
            active = {request.id for request in self._requests} | ({self._under_way(), self._starting} - {None})
            self._cancelled += [request.id for request in self._requests if snapshot in (None, request.id)]
            self._requests = deque(request for request in self._requests if snapshot not in (None, request.id))
            if snapshot is None:
                self._stop_current = True
            else:
                self._stopped.add(snapshot)
            self._changed.notify_all()
            return bool(active) if snapshot is None else snapshot in active

    def status(self) -> Status:
        return self._status()

    def health(self) -> Health:
        return self._status().health

    # The runtime calls these in its own thread.

    def wait(self, seconds: float) -> None:
        """Wait until the runtime is not paused, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: not self._paused, seconds)

    def next_request(self) -> SnapshotRequest | None:
        """Take the next snapshot request. Call it only while no snapshot is under way."""
        with self._changed:
            self._forget_stops()
            request = self._requests.popleft() if self._requests else None
            self._starting = None if request is None else request.id
            return request

    def clear_starting(self) -> None:
        """Note that the request taken last is under way, waits again, or was given up."""
        with self._changed:
            self._starting = None

    def put_back_request(self, request: SnapshotRequest) -> None:
        """Put back a request that could not be started now."""
        with self._changed:
            if not self._stop_current and request.id not in self._stopped:
                self._requests.appendleft(request)
            else:
                self._cancelled.append(request.id)

    def take_cancelled(self) -> list[str]:
        """Return the snapshots that were stopped before they began, each once."""
        with self._changed:
            cancelled, self._cancelled = self._cancelled, []
            return cancelled

    def is_cancelled(self, snapshot: str) -> bool:
        """Return whether the current snapshot was stopped. The answer stays the same until it is over."""
        with self._changed:
            return self._stop_current or snapshot in self._stopped

    def _forget_stops(self) -> None:
        self._stop_current = False
        self._stopped.clear()
