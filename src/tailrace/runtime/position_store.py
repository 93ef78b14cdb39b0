"""Where a runtime's place is kept: how far it is, in one record that is durable when `save` returns.

The stream's position and the cursor of a snapshot under way stand in the same record, so a crash never finds one
without the other. Two kinds: a checkpoint store, beside a sink that knows nothing of positions; and the change log,
whose commit holds the rows and the place in one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, cast, runtime_checkable

from tailrace.capture.port import SourceId
from tailrace.errors import ConfigError, StateCorrupt
from tailrace.model.batch import Window
from tailrace.model.position import ZERO, Lsn
from tailrace.model.position_kinds import Position, position_type_of
from tailrace.runtime.output_batch import Batch
from tailrace.state.checkpoint import Checkpoint, CheckpointStore, check_key
from tailrace.storage.records import UnknownFormat, unreadable_hint
from tailrace.validation import require_instance, require_methods

FORMAT = 2
"""Of what stands in a checkpoint's metadata. Format 1 has passed no numbers over, and is read as that."""
SEQS_SKIPPED = 100_000_000_000
"""So many numbers are passed over at once: more than were handed out behind any place. That is one batch, or one
transaction in parts, and one of so many rows would be several terabytes of a server's log."""
_NAMES = {"postgres": "postgresql"}
_HINT = "Restore the checkpoint from a copy, or `delete` it and seed it with a position that the sink certainly has."


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """How far a runtime is: everything up to here was acknowledged."""

    position: Position
    rows: int = 0
    """How many rows were acknowledged, ever."""
    transactions: int = 0
    source: SourceId | None = None
    """The history that the position is of; None: nobody said."""
    transaction: int | None = None
    """The last one that is in it, where that is known."""
    snapshot_job: Mapping[str, Any] | None = None
    """The snapshot under way, as its source wrote it down."""
    skipped_seqs: int = 0
    """How many numbers were passed over: no row has them, or one that was not acknowledged."""

    @property
    def next_seq(self) -> int:
        """`_seq` of the next row."""
        return self.rows + self.skipped_seqs

    def with_seqs_skipped(self) -> ResumePoint:
        """The same place, with numbers to come that no row was ever handed out with, whoever did that and died. To be
        saved before they are used. Where a snapshot goes on or begins, other rows may come next than before."""
        return replace(self, skipped_seqs=self.skipped_seqs + SEQS_SKIPPED)


@runtime_checkable
class PositionStore(Protocol):
    """Keeps a runtime's place."""

    takes_windows: bool
    """Whether it takes the source's windows as they come, and numbers their rows itself."""

    def load(self) -> ResumePoint | None:
        """The last place saved; None only if there never was one."""

    def save(self, place: ResumePoint) -> None:
        """Make it durable. When this raises, the place before or this one is kept, and nothing else."""


class CheckpointPositionStore:
    """Keeps the place as a checkpoint under a key."""

    takes_windows = False

    def __init__(self, store: CheckpointStore, key: str) -> None:
        self._store, self._key = store, check_key(key)
        self._kind = "custom"
        """What the checkpoint calls a source that does not say which it is."""

    def load(self) -> ResumePoint | None:
        checkpoint = self._store.load(self._key)
        if checkpoint is None:
            return None
        hint = "`load` gives back what was saved, `Checkpoint.from_json(…)` of it, or None if nothing ever was."
        require_instance("load(…)", checkpoint, Checkpoint, hint)
        self._kind = checkpoint.source_type
        try:
            return _place(checkpoint)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateCorrupt(
                "the checkpoint's metadata is not what a runtime writes",
                key=self._key,
                hint=unreadable_hint(error, _HINT),
            ) from error

    def save(self, place: ResumePoint) -> None:
        kind = place.source.kind if place.source else self._kind
        self._store.save(
            self._key,
            Checkpoint(
                source_type=_NAMES.get(kind, kind),
                position=place.position,
                metadata=_metadata(place),
                transaction=None if place.transaction is None else str(place.transaction),
            ),
        )


def _metadata(place: ResumePoint) -> dict[str, Any]:
    return {
        "runtime": FORMAT,
        "rows": place.rows,
        "transactions": place.transactions,
        "source": asdict(place.source) if place.source else None,
        "snapshot": place.snapshot_job,
        "passed": place.skipped_seqs,
    }


def _place(checkpoint: Checkpoint) -> ResumePoint:
    position, stored = checkpoint.position, checkpoint.metadata
    if "runtime" not in stored:  # seeded by hand, whatever else it says
        return ResumePoint(position=position)
    if stored["runtime"] not in (1, FORMAT):
        raise UnknownFormat(stored["runtime"], FORMAT)
    source = SourceId(**stored["source"]) if stored["source"] else None
    scan = stored["snapshot"]
    if scan is not None and not isinstance(scan, dict):
        raise TypeError("a snapshot is an object")
    return ResumePoint(
        position=position,
        rows=int(stored["rows"]),
        transactions=int(stored["transactions"]),
        source=source,
        transaction=None if checkpoint.transaction is None else int(checkpoint.transaction),
        snapshot_job=scan,
        skipped_seqs=int(stored["passed"]) if stored["runtime"] > 1 else 0,
    )


class DurableLog(Protocol):
    """Where windows become durable. `append` returns only when the window and its end are durable together;
    it refuses a window that does not start at `position`.

    An open window moves nothing: its rows are kept aside until the window that finishes their transaction makes
    all of them durable at once. A window that continues none forgets what was kept aside: it comes again."""

    position: Lsn

    def append(self, window: Window[Lsn]) -> object: ...


class LogSink:
    """The change log as a sink and as the keeper of the place: one append is both."""

    takes_windows = True

    def __init__(self, log: DurableLog) -> None:
        require_methods("log", log, ("append",), 'Give `LogWriter("changes", source.identify())`.')
        self._log = log

    def write(self, batch: Batch) -> tuple[()]:
        _lsn(batch.end)
        self._log.append(cast("Window[Lsn]", batch.window))  # data and position in one atomic commit
        return ()

    def flush(self, caught_up: bool) -> None:
        """What was appended is durable."""

    def load(self) -> ResumePoint | None:
        return ResumePoint(position=self._log.position) if self._log.position > ZERO else None

    def save(self, place: ResumePoint) -> None:
        """Nothing to do for what was appended; a position that moved without changes is an empty commit."""
        position = _lsn(place.position)
        if position > self._log.position:
            self._log.append(Window(start=self._log.position, end=position))


def _lsn(position: Position) -> Lsn:
    if not isinstance(position, Lsn):
        raise ConfigError(
            "a change log keeps PostgreSQL's positions, and no others yet",
            found=position_type_of(position).value,
            hint="Give the runtime a checkpoint store, and a sink of another kind.",
        )
    return position
