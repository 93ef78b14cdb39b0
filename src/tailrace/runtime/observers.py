"""Events that a runtime reports to observers, and its health and status for callers.

An observer cannot disturb the runtime: its exception is logged, and the other observers are still called. Events
contain names, counts and positions; never a row's values. Every failure is reported, be it an error of ours or not.
"""

from __future__ import annotations

import enum
import logging
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tailrace.errors import RuntimeFailed, TailraceError
from tailrace.model.position_kinds import Position
from tailrace.model.schema import TableId

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Started:
    """The runtime runs: a new one, a resumed one, or one resumed in a snapshot."""

    position: Position
    rows: int
    """Rows committed by this runtime and those before it."""
    resumed: bool
    snapshot: bool


@dataclass(frozen=True, kw_only=True)
class StartFailed:
    """The start failed: the error says who acts next. It can be started again."""

    error: TailraceError


@dataclass(frozen=True, kw_only=True)
class PollFailed:
    """A poll raised this error and handed out nothing. The next poll retries."""

    error: TailraceError


@dataclass(frozen=True, kw_only=True)
class StreamOpened:
    """The source streams the changes committed after this position."""

    after: Position


@dataclass(frozen=True, kw_only=True)
class Lost:
    """The source or the sink failed; the next attempt follows after a wait."""

    code: str
    reason: str
    wait_seconds: float


@dataclass(frozen=True, kw_only=True)
class SchemaSeen:
    """A table has a schema not seen before; the schema history has it."""

    table: TableId
    columns: int


@dataclass(frozen=True, kw_only=True)
class Delivered:
    """A batch was handed out."""

    kind: str
    rows: int
    end: Position


@dataclass(frozen=True, kw_only=True)
class Committed:
    """An acknowledgement is durable. If the position has moved, the source was informed."""

    position: Position
    rows: int
    """All rows ever acknowledged under this key."""


@dataclass(frozen=True, kw_only=True)
class RowsRejected:
    """The sink rejects some rows of a batch for good."""

    rows: int
    tables: tuple[TableId, ...]
    reason: str
    """The first row's reason."""


@dataclass(frozen=True, kw_only=True)
class RuleHalted:
    """A rule could not be applied: nothing is handed out until it can be."""

    rule: str
    table: str
    error: TailraceError


@dataclass(frozen=True, kw_only=True)
class RowsDeadLettered:
    """Rows that a rule failed at were accepted by `on_dead_letter`."""

    rule: str
    table: TableId
    rows: int
    cause: str


@dataclass(frozen=True, kw_only=True)
class RuleUnmatched:
    """A rule had matched no table, or no row, when the runtime stopped."""

    rule: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class SnapshotBegun:
    """The runtime is about to read tables."""

    id: str
    tables: tuple[TableId, ...]
    incremental: bool
    resumed: bool


@dataclass(frozen=True, kw_only=True)
class TableRead:
    """All rows of a table were handed out."""

    id: str
    table: TableId


@dataclass(frozen=True, kw_only=True)
class SnapshotEnded:
    """All tables were read and acknowledged, or the snapshot was stopped or failed."""

    id: str
    rows: int
    stopped: bool
    error: TailraceError | None = None


@dataclass(frozen=True)
class Paused:
    """The runtime is paused: it hands out nothing until it is resumed."""


@dataclass(frozen=True)
class Resumed:
    """A pause has ended."""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The runtime cannot continue: the error says who acts next."""

    error: TailraceError


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """The runtime has closed its source."""

    position: Position
    rows: int
    unacknowledged: int
    """Rows that were handed out and will be sent again."""
    injected: int = 0
    """Rows of `enqueue` that were not delivered.

    They exist in memory only: the next `start()` of this runtime delivers them.
    """


Fact: TypeAlias = (
    Started
    | StartFailed
    | PollFailed
    | StreamOpened
    | Lost
    | SchemaSeen
    | Delivered
    | Committed
    | RowsRejected
    | RuleHalted
    | RowsDeadLettered
    | RuleUnmatched
    | SnapshotBegun
    | TableRead
    | SnapshotEnded
    | Paused
    | Resumed
    | Failed
    | Stopped
)
Observer: TypeAlias = Callable[[Fact], None]
"""A function called in the runtime's own thread. Slow observers delay the changes."""


def to_tailrace_error(error: Exception) -> TailraceError:
    """Return any failure as an error that is safe to report."""
    if isinstance(error, TailraceError):
        return error
    # Only where it happened: the text of an unexpected error may contain a row's values.
    frame = traceback.extract_tb(error.__traceback__)[-1]
    failure = RuntimeFailed(
        f"unexpected {type(error).__name__} in {frame.name} ({Path(frame.filename).name}:{frame.lineno})",
        hint="Fix the code that raised it. No row was skipped: the next poll retries.",
    )
    failure.__cause__ = error
    return failure


class ObserverList:
    """Calls all observers with each event."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def __bool__(self) -> bool:
        return bool(self._observers)

    def __call__(self, fact: Fact) -> None:
        for observer in self._observers:
            try:
                observer(fact)
            except Exception as error:  # its failure must not stop the runtime
                log.warning(
                    "observer failed", extra={"fact": type(fact).__name__, "reason": to_tailrace_error(error).message}
                )


class Verdict(enum.Enum):
    """A runtime's health in one word."""

    HEALTHY = "healthy"
    """The runtime delivers."""
    IDLE = "idle"
    """The runtime has nothing to deliver, or is paused."""
    STALLED = "stalled"
    """The runtime should deliver and does not. Reason and remedy say more."""
    NOT_RUNNING = "not_running"


@dataclass(frozen=True, kw_only=True)
class Health:
    """A verdict with its reason and remedy."""

    verdict: Verdict
    reason: str = ""
    remedy: str = ""


def assess_health(
    *,
    state: str | None,
    paused: bool,
    error: TailraceError | None,
    unacknowledged: int | None,
    given_seconds: float,
    polled_seconds: float,
    quiet_seconds: float,
    reading: bool,
    limit_seconds: float,
) -> Health:
    """Return the runtime's health.

    `state` is its state if it does not run; `unacknowledged` counts the rows of the batch under way, if there is one.
    """
    if state is not None:
        return Health(verdict=Verdict.NOT_RUNNING, reason=f"it is {state}", remedy="Start it.")
    if error is not None:
        return Health(verdict=Verdict.STALLED, reason=error.message, remedy=error.hint)
    if unacknowledged is not None:
        if given_seconds < limit_seconds:
            return Health(verdict=Verdict.HEALTHY)
        reason = f"a batch of {unacknowledged:,} rows has not been acknowledged for {given_seconds:.0f} s"
        return Health(verdict=Verdict.STALLED, reason=reason, remedy="Deliver it and call `commit(batch.ack)`.")
    if paused:
        return Health(verdict=Verdict.IDLE, reason="it is paused", remedy="Resume it: `control.resume()`.")
    if polled_seconds >= limit_seconds:
        reason = f"nobody has polled it for {polled_seconds:.0f} s"
        return Health(verdict=Verdict.STALLED, reason=reason, remedy="Look at what the thread does that polls it.")
    if quiet_seconds >= limit_seconds and not reading:
        return Health(verdict=Verdict.IDLE, reason="the source has had no changes for a while")
    return Health(verdict=Verdict.HEALTHY)


@dataclass(frozen=True, kw_only=True)
class Status:
    """A runtime's status, for other threads. Each number is true, but not all at the same moment."""

    state: str
    paused: bool
    position: str | None
    rows: int
    transactions: int
    unacknowledged: int
    buffered: int
    injected: int
    reconnects: int
    snapshot: str | None
    """Progress of the current snapshot in words: tables read, of how many."""
    health: Health
