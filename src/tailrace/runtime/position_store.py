"""Stores of a runtime's resume point: one record that is durable when `save` returns.

The stream's position and the progress of a snapshot are in the same record, so a crash never leaves one without the
other. There are two kinds. A checkpoint store is for a sink that knows nothing of positions. The change log has the
rows and the point in one commit.
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
"""Format of a checkpoint's metadata. Format 1 has no `passed` count, which reads as 0."""
SEQS_SKIPPED = 100_000_000_000
"""Numbers skipped at once: more than were handed out after any saved point.

That is one batch, or one transaction in parts. One of so many rows would be several terabytes of a server's log.
"""
_NAMES = {"postgres": "postgresql"}
_HINT = (
    "Restore the checkpoint from a copy, or `delete` it and call `seed_checkpoint` with a position that the sink "
    "certainly has."
)


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """A runtime's progress: everything up to here was acknowledged."""

    position: Position
    rows: int = 0
    """All rows ever acknowledged."""
    transactions: int = 0
    source: SourceId | None = None
    """The source and history that the position belongs to; None if unknown."""
    transaction: int | None = None
    """The last transaction up to the position, if known."""
    snapshot_job: Mapping[str, Any] | None = None
    """The snapshot under way, as `SnapshotJob.to_json` wrote it."""
    skipped_seqs: int = 0
    """Numbers that were skipped: no row has them, or only one that was not acknowledged."""

    @property
    def next_seq(self) -> int:
        """`_seq` of the next row."""
        return self.rows + self.skipped_seqs

    def with_seqs_skipped(self) -> ResumePoint:
        """Return the point with a next `_seq` that no row ever had.

        A process that died may have handed out rows after the point. Other rows may follow now, where a snapshot
        continues or begins. The result must be saved before its numbers are used.
        """
        return replace(self, skipped_seqs=self.skipped_seqs + SEQS_SKIPPED)


@runtime_checkable
class PositionStore(Protocol):
    """A store of a runtime's resume point."""

    takes_windows: bool
    """True if it takes the source's windows unchanged and numbers their rows itself."""

    def load(self) -> ResumePoint | None:
        """Return the last point saved; None only if there never was one."""

    def save(self, point: ResumePoint) -> None:
        """Make the point durable. When this raises, the store has the old point or this one."""


class CheckpointPositionStore:
    """A store that saves the point as a checkpoint under a key."""

    takes_windows = False

    def __init__(self, store: CheckpointStore, key: str) -> None:
        self._store, self._key = store, check_key(key)
        self._kind = "custom"
        """The checkpoint's name for a source that does not say what it is."""

    def load(self) -> ResumePoint | None:
        checkpoint = self._store.load(self._key)
        if checkpoint is None:
            return None
        hint = "Return what was saved, `Checkpoint.from_json(…)` of it, or None if nothing ever was."
        require_instance("load(…)", checkpoint, Checkpoint, hint)
        self._kind = checkpoint.source_type
        try:
            return _resume_point(checkpoint)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateCorrupt(
                "checkpoint's metadata was not written by a runtime", key=self._key, hint=unreadable_hint(error, _HINT)
            ) from error

    def save(self, point: ResumePoint) -> None:
        kind = point.source.kind if point.source else self._kind
        self._store.save(
            self._key,
            Checkpoint(
                source_type=_NAMES.get(kind, kind),
                position=point.position,
                metadata=_metadata(point),
                transaction=None if point.transaction is None else str(point.transaction),
            ),
        )


def _metadata(point: ResumePoint) -> dict[str, Any]:
    return {
        "runtime": FORMAT,
        "rows": point.rows,
        "transactions": point.transactions,
        "source": asdict(point.source) if point.source else None,
        "snapshot": point.snapshot_job,
        "passed": point.skipped_seqs,
    }


def _resume_point(checkpoint: Checkpoint) -> ResumePoint:
    position, stored = checkpoint.position, checkpoint.metadata
    if "runtime" not in stored:  # saved by hand, so the rest means nothing to us
        return ResumePoint(position=position)
    if stored["runtime"] not in (1, FORMAT):
        raise UnknownFormat(stored["runtime"], FORMAT)
    source = SourceId(**stored["source"]) if stored["source"] else None
    scan = stored["snapshot"]
    if scan is not None and not isinstance(scan, dict):
        raise TypeError("snapshot is not an object")
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
    """A log in which windows become durable.

    `append` returns only when the window and its end are durable together. It refuses a window that does not start at
    `position`. An open window moves nothing: its rows wait until the window that ends their transaction makes all of
    them durable at once. A window that continues no transaction drops the waiting rows: the source sends them again.
    """

    position: Lsn

    def append(self, window: Window[Lsn]) -> object: ...


class LogSink:
    """The change log as both the sink and the store of the point.

    One append does both.
    """

    takes_windows = True

    def __init__(self, log: DurableLog) -> None:
        require_methods("log", log, ("append",), 'Pass `LogWriter("changes", source.identify())`.')
        self._log = log

    def write(self, batch: Batch) -> tuple[()]:
        _lsn(batch.end)
        self._log.append(cast("Window[Lsn]", batch.window))  # data and position in one atomic commit
        return ()

    def flush(self, caught_up: bool) -> None:
        """Do nothing: what was appended is durable."""

    def load(self) -> ResumePoint | None:
        return ResumePoint(position=self._log.position) if self._log.position > ZERO else None

    def save(self, point: ResumePoint) -> None:
        """Append an empty commit if the position moved without changes; else do nothing."""
        position = _lsn(point.position)
        if position > self._log.position:
            self._log.append(Window(start=self._log.position, end=position))


def _lsn(position: Position) -> Lsn:
    if not isinstance(position, Lsn):
        raise ConfigError(
            "change log cannot keep positions of this kind, only PostgreSQL's",
            found=position_type_of(position).value,
            hint="Use a checkpoint store and another kind of sink.",
        )
    return position
