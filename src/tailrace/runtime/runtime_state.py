"""A runtime's state, progress, and what it returns when it stops."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tailrace.errors import TailraceError
from tailrace.model.batch import AnyWindow, ChangeBatch
from tailrace.model.position import ZERO
from tailrace.model.position_kinds import Position
from tailrace.runtime.output_batch import Batch


class State(enum.Enum):
    """The states of a runtime. None is stored."""

    IDLE = "idle"
    """Never started, or a start failed."""
    RUNNING = "running"
    STOPPING = "stopping"
    """The runtime closes its source."""
    STOPPED = "stopped"
    """The runtime is stopped and can be started again."""


@dataclass
class Progress:
    """Counters of a loop since it was created."""

    windows: int = 0
    transactions: int = 0
    rows: int = 0
    """Acknowledged rows. Rows of a part of a transaction count when the part is acknowledged."""
    reconnects: int = 0
    source_end: Position = ZERO
    """The furthest position that the source has shown."""
    last_error: TailraceError | None = None


@dataclass(frozen=True, kw_only=True)
class Drained:
    """Rows that were not acknowledged at a stop. The source sends all but the injected ones again."""

    in_flight: Batch | None
    buffered: tuple[AnyWindow, ...]
    """Windows that were read and not handed out."""
    pending: tuple[AnyWindow, ...]
    """Parts of a transaction that has not ended."""
    injected: tuple[ChangeBatch, ...]
