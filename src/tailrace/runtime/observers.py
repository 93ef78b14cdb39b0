"""What a runtime tells of itself: facts as they happen, to observers; a verdict and a status, to whoever asks.

An observer can not disturb the runtime: what it raises is logged, and the others are told all the same. Facts hold
names, counts and positions; never a row's values. Whatever fails is told, be it an error of ours or not.
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
    """It runs. A new one, one that goes on, or one that goes on with a snapshot."""

    position: Position
    rows: int
    """Committed by it and by those before it."""
    resumed: bool
    snapshot: bool


@dataclass(frozen=True, kw_only=True)
class StartFailed:
    """It could not be started: who acts next stands in the error. It may be started again."""

    error: TailraceError


@dataclass(frozen=True, kw_only=True)
class PollFailed:
    """A poll has raised this, and handed nothing out: the next one tries the same again."""

    error: TailraceError


@dataclass(frozen=True, kw_only=True)
class StreamOpened:
    """The source streams what committed after this."""

    after: Position


@dataclass(frozen=True, kw_only=True)
class Lost:
    """The source, or the sink, is lost; it is tried again after a while."""

    code: str
    reason: str
    wait_seconds: float


@dataclass(frozen=True, kw_only=True)
class SchemaSeen:
    """A table has a shape that was not seen before; it is in the schema history."""

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
    """An acknowledgement is durable, and the source was told if the position has moved."""

    position: Position
    rows: int
    """All, ever."""


@dataclass(frozen=True, kw_only=True)
class RowsRejected:
    """The sink does not take some rows of a batch, and will not."""

    rows: int
    tables: tuple[TableId, ...]
    reason: str
    """Of the first."""


@dataclass(frozen=True, kw_only=True)
class RuleHalted:
    """A rule could not be applied: nothing is handed out until it can be."""

    rule: str
    table: str
    error: TailraceError


@dataclass(frozen=True, kw_only=True)
class RowsDeadLettered:
    """Rows that a rule could not be applied to were taken by `on_letter`."""

    rule: str
    table: TableId
    rows: int
    cause: str


@dataclass(frozen=True, kw_only=True)
class RuleUnmatched:
    """A rule has had nothing to do by the time of stopping: no table, or no row, was one for it."""

    rule: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class SnapshotBegun:
    """Tables are about to be read."""

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
    """All tables were read, and acknowledged; or somebody stopped it, or it failed."""

    id: str
    rows: int
    stopped: bool
    error: TailraceError | None = None


@dataclass(frozen=True)
class Paused:
    """Nothing is handed out until somebody resumes it."""


@dataclass(frozen=True)
class Resumed:
    """It goes on."""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """It can not go on: who acts next stands in the error."""

    error: TailraceError


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """It has let go of the source."""

    position: Position
    rows: int
    unacknowledged: int
    """Rows that were handed out, and come again."""
    injected: int = 0
    """Rows of `enqueue` that were not delivered. They are in memory alone: the next `start()` of this runtime has
    them."""


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
"""Called in the runtime's own thread: what takes long holds the changes up."""


def to_tailrace_error(error: Exception) -> TailraceError:
    """Any failure as an error that can be told."""
    if isinstance(error, TailraceError):
        return error
    # Only where it happened: the text of an error that nobody foresaw may hold a row's values.
    frame = traceback.extract_tb(error.__traceback__)[-1]
    made = RuntimeFailed(
        f"unexpected {type(error).__name__} in {frame.name} ({Path(frame.filename).name}:{frame.lineno})",
        hint="Mend what has raised it. Nothing was passed: the same is tried again.",
    )
    made.__cause__ = error
    return made


class ObserverList:
    """Tells all observers."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def __bool__(self) -> bool:
        return bool(self._observers)

    def __call__(self, fact: Fact) -> None:
        for observer in self._observers:
            try:
                observer(fact)
            except Exception as error:  # an observer's own business
                log.warning(
                    "an observer failed",
                    extra={"fact": type(fact).__name__, "reason": to_tailrace_error(error).message},
                )


class Verdict(enum.Enum):
    """How a runtime is."""

    HEALTHY = "healthy"
    """It delivers."""
    IDLE = "idle"
    """There is nothing to deliver, or it is paused."""
    STALLED = "stalled"
    """It should deliver, and does not: the reason says why, the remedy what to do."""
    NOT_RUNNING = "not_running"


@dataclass(frozen=True, kw_only=True)
class Health:
    """A verdict, and what is behind it."""

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
    """The verdict. `state`: what it is instead of running; `unacknowledged`: rows of the batch under way, if one is."""
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
    """How a runtime stands, for whoever asks from another thread. Each number is true, though not all of one moment."""

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
    """The snapshot under way: how many of how many tables, in words."""
    health: Health
