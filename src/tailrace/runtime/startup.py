"""The start of a runtime: load the position, prepare the source, resume a snapshot.

The order matters. An unreadable checkpoint is an error, never "none". A new position is saved before its first row.
What was made at a source for a failed start is removed again. A snapshot during the stream never makes a start fail: it
is resumed later, or given up.
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
    """Refuse arguments that cannot make a runtime."""
    require_methods("source", source, ("live",), "Pass `PostgresCapture(…)`, or an own source with `live(after)`.")
    require_methods("checkpoint", checkpoint, ("load", "save"), 'Pass a store: `FileCheckpointStore("state")`.')
    if history is not None:
        hint = 'Pass `FileSchemaHistory("schemas")`, or None.'
        require_methods("schema_history", history, ("record", "latest", "versions", "tables"), hint)
    if limits is not None:
        require_instance("limits", limits, Limits, "Pass `Limits(rows=…, bytes=…, seconds=…)`.")
    if target is not None:
        position_type_of(target)  # type: ignore[arg-type] # it checks the type
    for what, function in functions.items():
        if function is not None:
            require_callable(what, function, f"Pass a function: `{what}=function`, without calling it.")
    if not isinstance(observers, Collection):
        raise ConfigError("`observers` is not a list", found=type(observers).__name__, hint="Pass `[function]`.")
    for observer in observers:
        require_callable("observers", observer, "Pass functions that take one event: `observers=[function]`.")
    for what, value in seconds.items():
        require_seconds(what, value, endless=True)


def prepare_start(
    source: object,
    store: PositionStore,
    history: SchemaHistory | None,
    snapshots: SnapshotRunner,
    bulk: Sequence[TableId],
    live: Sequence[TableId],
) -> tuple[ResumePoint, bool]:
    """Return where to begin, saved, and whether there was a saved point before."""
    saved = store.load()
    try:
        require_compatible_snapshot(saved, bulk, live)
    except (KeyError, TypeError, ValueError) as error:
        raise StateCorrupt(
            "snapshot in the checkpoint cannot be read", hint="Restore the checkpoint from a copy, or `delete` it."
        ) from error
    beginning = first_position(source)
    _require_position_type(saved, beginning)
    _remember_schemas(source, history)
    if not isinstance(source, PreparedSource):
        point = saved or ResumePoint(position=beginning)
    else:
        identity = source.identify()
        _require_same_source(saved, identity)
        origin = saved.source if saved is not None and saved.source is not None else identity
        prepared = source.prepare(saved.position if saved is not None else None, origin)
        point = replace(saved or ResumePoint(position=prepared if prepared is not None else beginning), source=origin)
    if point.snapshot_job is not None:
        point = point.with_seqs_skipped()
    try:
        point = _with_snapshot(point, saved, snapshots, bulk, live)
        require_position_type(point.position, beginning)
        if point != saved:
            store.save(point)
    except BaseException:
        snapshots.close()
        if saved is None:
            _undo(source, store)
        raise
    return point, saved is not None


def _with_snapshot(
    point: ResumePoint,
    saved: ResumePoint | None,
    snapshots: SnapshotRunner,
    bulk: Sequence[TableId],
    live: Sequence[TableId],
) -> ResumePoint:
    """Return the point with the snapshot that continues or begins."""
    if saved is not None and saved.snapshot_job is not None:
        try:
            return snapshots.resume(point)
        except TailraceError as error:
            if not snapshots.is_incremental:
                raise
            snapshots.drop_reader()
            if snapshots.should_retry(error):
                return point
            snapshots.give_up(error)
            return replace(point, snapshot_job=None)
    if saved is None and (bulk or live):
        return snapshots.begin(point, bulk or live, live=not bulk)
    return point


def _undo(source: object, store: PositionStore) -> None:
    """Remove what a failed start made at the source, unless a checkpoint knows of it.

    The start can be repeated, by another process too. So nothing may stay that no checkpoint knows of.
    """
    if isinstance(source, RevertibleSource):
        try:
            if store.load() is None:
                source.unprepare()
        except TailraceError as error:
            log.warning(
                "could not undo the preparation of the source", extra={"code": error.code, "reason": error.message}
            )


def _remember_schemas(source: object, history: SchemaHistory | None) -> None:
    if history is None:
        return
    if history.retention is None:
        log.warning("the schema history keeps every version of every table: it grows with each schema change")
    if isinstance(source, SchemaAwareSource):
        newest = [history.latest(table) for table in history.tables()]
        source.remember_schemas(
            [
                version.schema.source_schema
                for version in newest
                if version is not None and version.event is not SchemaEvent.DROP
            ]
        )


def _require_position_type(point: ResumePoint | None, beginning: Position) -> None:
    if point is not None and type(point.position) is not type(beginning):
        raise StateForeign(
            "checkpoint has positions of another kind than the source",
            found=position_type_of(point.position).value,
            expected=position_type_of(beginning).value,
            hint="Give each source its own key. A source without PostgreSQL positions must define `beginning`.",
        )


def _require_same_source(point: ResumePoint | None, identity: SourceId) -> None:
    known = point.source if point is not None else None
    if known is None:
        return
    if (known.kind, known.system, known.database) != (identity.kind, identity.system, identity.database):
        raise StateForeign(
            "checkpoint belongs to another source",
            expected=f"{known.kind} {known.system}/{known.database}",
            found=f"{identity.kind} {identity.system}/{identity.database}",
            hint="Give each source its own key, or connect to the checkpoint's database.",
        )
