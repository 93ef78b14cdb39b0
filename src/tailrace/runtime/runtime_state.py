"""What a runtime is, has done, and leaves behind."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tailrace.errors import TailraceError
from tailrace.model.batch import AnyWindow, ChangeBatch
from tailrace.model.position import ZERO
from tailrace.model.position_kinds import Position
from tailrace.runtime.output_batch import Batch


class State(enum.Enum):
    """None is stored."""

    IDLE = "idle"
    """Never started, or a start failed."""
    RUNNING = "running"
    STOPPING = "stopping"
    """It lets go of the source."""
    STOPPED = "stopped"
    """It may be started again."""


@dataclass
class Progress:
    """What the loop has done since it was made."""

    windows: int = 0
    transactions: int = 0
    rows: int = 0
    """Those of a transaction that has come in part are counted as they come."""
    reconnects: int = 0
    source_end: Position = ZERO
    """The furthest position the source has shown."""
    last_error: TailraceError | None = None


@dataclass(frozen=True, kw_only=True)
class Drained:
    """What was not acknowledged when a runtime stopped. All of it but what was injected comes again."""

    in_flight: Batch | None
    buffered: tuple[AnyWindow, ...]
    """Read, and not handed out."""
    pending: tuple[AnyWindow, ...]
    """Parts of a transaction that has not ended."""
    injected: tuple[ChangeBatch, ...]
