"""How a runtime begins: it finds its place, gets the source ready for it, and takes up a snapshot that was under way.

In that order. A place that cannot be read is an error, never "none". What is new is on record before its first row;
what was made at a source for a start that failed is taken back. A snapshot beside the stream keeps no start from
succeeding: it is taken up later, or given up.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace

from tailrace.capture.port import (
    PreparedSource,
    RevertibleSource,
    SchemaAwareSource,
    SourceId,
    first_position,
    require_position_type,
)
from tailrace.errors import ConfigError, StateCorrupt, StateForeign, TailraceError
from tailrace.model.position_kinds import Position, position_type_of
from tailrace.model.schema import TableId
from tailrace.runtime.output_batch import Limits
from tailrace.runtime.position_store import PositionStore, ResumePoint
from tailrace.runtime.snapshot_job import require_compatible_snapshot
from tailrace.runtime.snapshots import SnapshotRunner
from tailrace.state.schema_history import SchemaEvent, SchemaHistory
from tailrace.validation import require_callable, require_instance, require_methods, require_seconds

log = logging.getLogger(__name__)


def require_arguments(
    source: object,
    checkpoint: object,
    history: object,
    *,
    limits: object,
    target: object,
    observers: object,
    functions: dict[str, object],
    seconds: dict[str, object],
) -> None:
    """Refuse what a runtime cannot be made of."""
    require_methods("source", source, ("live",), "Give `PostgresCapture(…)`, or one of your own with `live(after)`.")
    require_methods("checkpoint", checkpoint, ("load", "save"), 'Give a store: `FileCheckpointStore("state")`.')
    if history is not None:
        hint = 'Give `FileSchemaHistory("shapes")`, or nothing.'
        require_methods("schema_history", history, ("record", "latest", "versions", "tables"), hint)
    if limits is not None:
        require_instance("limits", limits, Limits, "Give `Limits(rows=…, bytes=…, seconds=…)`.")
    if target is not None:
        position_type_of(target)  # type: ignore[arg-type] # that is what it finds out
    for what, function in functions.items():
        if function is not None:
            require_callable(what, function, f"Give a function: `{what}=function`, without calling it.")
    if not isinstance(observers, Collection):
        raise ConfigError("`observers` is not a list", found=type(observers).__name__, hint="Give `[function]`.")
    for observer in observers:
        require_callable("observers", observer, "Give functions, each of one fact: `observers=[function]`.")
    for what, value in seconds.items():
        require_seconds(what, value, endless=True)


def prepare_start(
    source: object,
    keeper: PositionStore,
    history: SchemaHistory | None,
    snapshots: SnapshotRunner,
    bulk: Sequence[TableId],
    live: Sequence[TableId],
) -> tuple[ResumePoint, bool]:
    """Where to begin, saved, and whether there was a place already."""
    place = keeper.load()
    try:
        require_compatible_snapshot(place, bulk, live)
    except (KeyError, TypeError, ValueError) as error:
        raise StateCorrupt(
            "the snapshot in the checkpoint cannot be read", hint="Restore the checkpoint from a copy, or `delete` it."
        ) from error
    beginning = first_position(source)
    _require_kind(place, beginning)
    _learn(source, history)
    if not isinstance(source, PreparedSource):
        found = place or ResumePoint(position=beginning)
    else:
        identity = source.identify()
        _require_same(place, identity)
        origin = place.source if place is not None and place.source is not None else identity
        begun = source.prepare(place.position if place is not None else None, origin)
        found = replace(place or ResumePoint(position=begun if begun is not None else beginning), source=origin)
    if found.snapshot_job is not None:
        found = found.with_seqs_skipped()
    try:
        found = _scanning(found, place, snapshots, bulk, live)
        require_position_type(found.position, beginning)
        if found != place:
            keeper.save(found)
    except BaseException:
        snapshots.close()
        if place is None:
            _undo(source, keeper)
        raise
    return found, place is not None


def _scanning(
    found: ResumePoint,
    place: ResumePoint | None,
    snapshots: SnapshotRunner,
    bulk: Sequence[TableId],
    live: Sequence[TableId],
) -> ResumePoint:
    """The place with the snapshot that goes on, or begins."""
    if place is not None and place.snapshot_job is not None:
        try:
            return snapshots.resume(found)
        except TailraceError as error:
            if not snapshots.is_incremental:
                raise
            snapshots.drop_reader()
            if snapshots.should_retry(error):
                return found
            snapshots.give_up(error)
            return replace(found, snapshot_job=None)
    if place is None and (bulk or live):
        return snapshots.begin(found, bulk or live, live=not bulk)
    return found


def _undo(source: object, keeper: PositionStore) -> None:
    """A start that failed can be made again, by another process too: what nothing knows of does not stay."""
    if isinstance(source, RevertibleSource):
        try:
            if keeper.load() is None:
                source.unprepare()
        except TailraceError as error:
            log.warning("what was made at the source stays", extra={"code": error.code, "reason": error.message})


def _learn(source: object, history: SchemaHistory | None) -> None:
    if history is None:
        return
    if history.retention is None:
        log.warning("the schema history keeps every version of every table: it grows with each change of a shape")
    if isinstance(source, SchemaAwareSource):
        newest = [history.latest(table) for table in history.tables()]
        source.remember_schemas(
            [
                version.schema.source_schema
                for version in newest
                if version is not None and version.event is not SchemaEvent.DROP
            ]
        )


def _require_kind(place: ResumePoint | None, beginning: Position) -> None:
    if place is not None and type(place.position) is not type(beginning):
        raise StateForeign(
            "the checkpoint counts in positions that this source does not have",
            found=position_type_of(place.position).value,
            expected=position_type_of(beginning).value,
            hint="Give each source a key of its own. A source that does not count as PostgreSQL does says so by its "
            "`beginning`.",
        )


def _require_same(place: ResumePoint | None, identity: SourceId) -> None:
    known = place.source if place is not None else None
    if known is None:
        return
    if (known.kind, known.system, known.database) != (identity.kind, identity.system, identity.database):
        raise StateForeign(
            "the checkpoint is of another source",
            expected=f"{known.kind} {known.system}/{known.database}",
            found=f"{identity.kind} {identity.system}/{identity.database}",
            hint="Give each source a key of its own, or connect to the database that this one is of.",
        )
