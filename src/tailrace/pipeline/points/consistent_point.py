"""Which version each table has at one commit of the log: what the ledger is told.

A version is told only of a table that holds every change up to the commit and none after it; so whoever reads these
versions sees each transaction whole, or not at all. Any other table is left out, and it is said why: it holds back
nobody else.
"""

from __future__ import annotations

from tailrace.errors import TailraceError
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId
from tailrace.pipeline.points.ledger import Absence, ConsistentPoint
from tailrace.pipeline.report import TableState
from tailrace.pipeline.tables.managed_table import ManagedTable
from tailrace.pipeline.tables.registry import TableRegistry

_STANDS_STILL = {
    TableState.NEW: "it is not loaded yet",
    TableState.SEEDING: "it is being loaded",
    TableState.LOADED: "it was loaded once, and its changes are not applied",
    TableState.PAUSED: "it is paused",
    TableState.REFRESHING: "it is loaded anew",
}


def build_point(lives: TableRegistry, commit: int) -> ConsistentPoint | None:
    """The version of every table that is at the commit; None if none is.

    For whoever applies, between two micro-batches: what others do beside them keeps a table out, and nothing worse.
    """
    position = lives.index.end_of(commit)
    versions, missing, identities = dict[TableId, int](), dict[TableId, Absence](), dict[TableId, str]()
    times = [lives.index.committed_until(commit)]
    for life in list(lives.tables.values()):
        found = _version(lives, life, commit, position)
        if isinstance(found, int):
            versions[life.table] = found
            times.append(life.loaded_at)
            if life.lake_table_id is not None:
                identities[life.table] = life.lake_table_id
        elif not life.missing_at_source:
            missing[life.table] = Absence(state=life.state.value, why=found)
    if not versions:
        return None
    # What was loaded may be younger than all that the log has, so what the source's clock showed then counts as well.
    committed_at = max((known for known in times if known is not None), default=0)
    return ConsistentPoint(
        commit=commit,
        position=position,
        committed_at=committed_at,
        versions=versions,
        missing=missing,
        lake_table_ids=identities,
    )


def _version(lives: TableRegistry, life: ManagedTable, commit: int, position: Lsn) -> int | str:
    """The table's version at the commit, or why it has none there."""
    if not life.state.is_applying:
        return life.error.code if life.error is not None else _STANDS_STILL.get(life.state, "it goes no further")
    if life.apply_suspended:
        return "it waits for a load of it that is under way"
    if not life.lock.acquire(blocking=False):
        return "it was being worked on"
    try:
        return _held_version(lives, life, commit, position)
    except TailraceError as error:
        return error.code
    finally:
        life.lock.release()


def _held_version(lives: TableRegistry, life: ManagedTable, commit: int, position: Lsn) -> int | str:
    if life.applied_position is None:
        return "it is not loaded yet"
    if life.outcome_unknown_until:
        return "a task that was at work on it broke off"
    if life.catch_up_load is not None:
        return "it was just loaded, and not all that changed meanwhile is applied"
    if life.ahead_of_position:
        return "a row of it was read again, and not all that changed meanwhile is applied"
    if life.applied_position.position > position:
        return "it was ahead of the others"
    if lives.has_gap(life) or lives.pending(life, commit):
        return "it was behind the others" if life.error is None else life.error.code
    if life.lake_version is None:
        table = life.location.open_for_reading()
        version = table.version()
        table.applied_position()  # refuses what others have written, up to that version
        life.lake_version = version
    if life.lake_table_id is None:
        life.lake_table_id = life.location.open_for_reading().identity()
    return "its folder is gone" if life.lake_version is None else life.lake_version
