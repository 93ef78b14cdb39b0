"""Build a consistent point. It is the version of each lake table at one commit of the log.

A table is in the point only if it has every change up to the commit and none after it. So a reader of these versions
sees each transaction whole or not at all. Every other table is listed as missing, with the reason, and does not hold
back the rest.
"""

from __future__ import annotations

from tailrace.errors import TailraceError
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId
from tailrace.pipeline.points.ledger import FOLDER_GONE, Absence, ConsistentPoint
from tailrace.pipeline.report import TableState
from tailrace.pipeline.tables.managed_table import ManagedTable
from tailrace.pipeline.tables.registry import TableRegistry

_REASONS = {
    TableState.NEW: "it is not loaded yet",
    TableState.SEEDING: "it is being loaded",
    TableState.LOADED: "it was loaded once, and its changes are not applied",
    TableState.PAUSED: "it is paused",
    TableState.REFRESHING: "it is being reloaded",
}


def build_point(registry: TableRegistry, commit: int) -> ConsistentPoint | None:
    """Return the version of every table that is at the commit. None if no table is.

    Called by the applying process between two micro-batches. Concurrent work on a table only keeps it out of the point.
    """
    position = registry.index.end_of(commit)
    versions, missing, identities = dict[TableId, int](), dict[TableId, Absence](), dict[TableId, str]()
    times = [registry.index.committed_until(commit)]
    for managed in list(registry.tables.values()):
        version = _version(registry, managed, commit, position)
        if isinstance(version, int):
            versions[managed.table] = version
            times.append(managed.loaded_at)
            if managed.lake_table_id is not None:
                identities[managed.table] = managed.lake_table_id
        elif not managed.missing_at_source:
            missing[managed.table] = Absence(state=managed.state.value, why=version)
    if not versions:
        return None
    # Loaded rows may be newer than everything in the log, so the source's time of each load counts too.
    committed_at = max((time for time in times if time is not None), default=0)
    return ConsistentPoint(
        commit=commit,
        position=position,
        committed_at=committed_at,
        versions=versions,
        missing=missing,
        lake_table_ids=identities,
    )


def _version(registry: TableRegistry, managed: ManagedTable, commit: int, position: Lsn) -> int | str:
    """Return the table's version at the commit, or the reason why it has none."""
    if not managed.state.is_applying:
        return managed.error.code if managed.error is not None else _REASONS.get(managed.state, "it is stopped")
    if managed.apply_suspended:
        return "it waits for its running load"
    if not managed.lock.acquire(blocking=False):
        return "it was busy"
    try:
        return _locked_version(registry, managed, commit, position)
    except TailraceError as error:
        return error.code
    finally:
        managed.lock.release()


def _locked_version(registry: TableRegistry, managed: ManagedTable, commit: int, position: Lsn) -> int | str:
    if managed.applied_position is None:
        return "it is not loaded yet"
    if managed.outcome_unknown_until:
        return "the outcome of its last task is not known"
    if managed.catch_up_load is not None:
        return "it was just loaded, and its catch-up has not ended"
    if managed.ahead_of_position:
        return "one of its rows was refetched, and the log has not passed that read"
    if managed.applied_position.position > position:
        return "it was ahead of the others"
    if registry.has_gap(managed) or registry.pending(managed, commit):
        return "it was behind the others" if managed.error is None else managed.error.code
    if managed.lake_version is None:
        table = managed.location.open_for_reading()
        version = table.version()
        table.applied_position()  # refuses foreign writes up to that version
        managed.lake_version = version
    if managed.lake_table_id is None:
        managed.lake_table_id = managed.location.open_for_reading().identity()
    return FOLDER_GONE if managed.lake_version is None else managed.lake_version
