"""Where a runtime's place is kept: how far it is, in one record that is durable when `save` returns.

The stream's position and the cursor of a snapshot under way stand in the same record, so a crash never finds one
without the other. Two kinds: a checkpoint store, beside a sink that knows nothing of positions; and the change log,
whose commit holds the rows and the place in one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

from tailrace.capture.base import SourceId
from tailrace.errors import StateCorrupt, StateForeign
from tailrace.model.batch import Window
from tailrace.model.position import ZERO, Lsn
from tailrace.runtime.batch import Batch
from tailrace.state.checkpoint import Checkpoint, CheckpointStore, check_key

FORMAT = 1
"""Of what stands in a checkpoint's metadata."""
_NAMES = {"postgres": "postgresql"}


@dataclass(frozen=True, kw_only=True)
class Place:
    """How far a runtime is: everything up to here was acknowledged."""

    position: Lsn
    rows: int = 0
    """How many rows were acknowledged, ever; the next one has this `_seq`."""
    transactions: int = 0
    source: SourceId | None = None
    """The history that the position is of; None: nobody said."""
    transaction: int | None = None
    """The last one that is in it, where that is known."""
    scan: Mapping[str, Any] | None = None
    """The snapshot under way, as its source wrote it down."""


@runtime_checkable
class Keeper(Protocol):
    """Keeps a runtime's place."""

    takes_windows: bool
    """Whether it takes the source's windows as they come, and numbers their rows itself."""

    def load(self) -> Place | None:
        """The last place saved; None only if there never was one."""

    def save(self, place: Place) -> None:
        """Make it durable. When this raises, the place before or this one is kept, and nothing else."""


class StoreKeeper:
    """Keeps the place as a checkpoint under a key."""

    takes_windows = False

    def __init__(self, store: CheckpointStore, key: str) -> None:
        self._store, self._key = store, check_key(key)
        self._kind = "custom"
        """What the checkpoint calls a source that does not say which it is."""

    def load(self) -> Place | None:
        checkpoint = self._store.load(self._key)
        if checkpoint is None:
            return None
        self._kind = checkpoint.source_type
        if not isinstance(checkpoint.position, Lsn):
            raise StateForeign(
                "the checkpoint counts in positions that this source does not have", key=self._key,
                found=checkpoint.position_type.value, hint="Give each source a key of its own.",
            )  # fmt: skip
        try:
            return _place(checkpoint.position, checkpoint)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateCorrupt(
                "the checkpoint's metadata is not what a runtime writes", key=self._key,
                hint="Restore the checkpoint from a copy, or `delete` it and seed it with a position that the sink "
                "certainly has.",
            ) from error  # fmt: skip

    def save(self, place: Place) -> None:
        kind = place.source.kind if place.source else self._kind
        self._store.save(self._key, Checkpoint(
            source_type=_NAMES.get(kind, kind), position=place.position, metadata=_metadata(place),
            transaction=None if place.transaction is None else str(place.transaction),
        ))  # fmt: skip


def _metadata(place: Place) -> dict[str, Any]:
    return {
        "runtime": FORMAT, "rows": place.rows, "transactions": place.transactions,
        "source": asdict(place.source) if place.source else None, "snapshot": place.scan,
    }  # fmt: skip


def _place(position: Lsn, checkpoint: Checkpoint) -> Place:
    stored = checkpoint.metadata
    if not stored:  # seeded by hand
        return Place(position=position)
    if stored["runtime"] != FORMAT:
        raise ValueError("a format that this version does not know")
    source = SourceId(**stored["source"]) if stored["source"] else None
    scan = stored["snapshot"]
    if scan is not None and not isinstance(scan, dict):
        raise TypeError("a snapshot is an object")
    return Place(
        position=position, rows=int(stored["rows"]), transactions=int(stored["transactions"]), source=source,
        transaction=None if checkpoint.transaction is None else int(checkpoint.transaction), scan=scan,
    )  # fmt: skip


class DurableLog(Protocol):
    """Where windows become durable. `append` returns only when the window and its end are durable together;
    it refuses a window that does not start at `position`.

    An open window moves nothing: its rows are kept aside until the window that finishes their transaction makes
    all of them durable at once. A window that continues none forgets what was kept aside: it comes again."""

    position: Lsn

    def append(self, window: Window) -> object: ...


class LogSink:
    """The change log as a sink and as the keeper of the place: one append is both."""

    takes_windows = True

    def __init__(self, log: DurableLog) -> None:
        self._log = log

    def write(self, batch: Batch) -> tuple[()]:
        self._log.append(batch.window)  # data and position in one atomic commit
        return ()

    def flush(self, caught_up: bool) -> None:
        """What was appended is durable."""

    def load(self) -> Place | None:
        return Place(position=self._log.position) if self._log.position > ZERO else None

    def save(self, place: Place) -> None:
        """Nothing to do for what was appended; a position that moved without changes is an empty commit."""
        if place.position > self._log.position:
            self._log.append(Window(start=self._log.position, end=place.position))
