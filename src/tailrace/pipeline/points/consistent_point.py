"""Which version each table has at one commit of the log: what the ledger is told.

A version is told only of a table that holds every change up to the commit and none after it; so whoever reads these
versions sees each transaction whole, or not at all. Any other table is left out, and it is said why: it holds back
nobody else.
"""

from __future__ import annotations

from tailrace.errors import TailraceError
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId
from tailrace.pipeline.points.ledger import Absence, Point
from tailrace.pipeline.report import TableState
from tailrace.pipeline.tables.registry import Lives, TableLife

_STANDS_STILL = {
    TableState.NEW: "it is not loaded yet",
    TableState.SEEDING: "it is being loaded",
    TableState.LOADED: "it was loaded once, and its changes are not applied",
    TableState.PAUSED: "it is paused",
    TableState.REFRESHING: "it is loaded anew",
}


def point_at(lives: Lives, commit: int) -> Point | None:
    """The version of every table that is at the commit; None if none is.

    For whoever applies, between two micro-batches: what others do beside them keeps a table out, and nothing worse.
    """
    position = lives.index.end_of(commit)
    versions, missing, identities = dict[TableId, int](), dict[TableId, Absence](), dict[TableId, str]()
    times = [lives.index.committed_upto(commit)]
    for life in list(lives.tables.values()):
        found = _version(lives, life, commit, position)
        if isinstance(found, int):
            versions[life.table] = found
            times.append(life.loaded_at)
            if life.identity is not None:
                identities[life.table] = life.identity
        elif not life.gone:
            missing[life.table] = Absence(state=life.state.value, why=found)
    if not versions:
        return None
    # What was loaded may be younger than all that the log has, so what the source's clock showed then counts as well.
    committed_at = max((known for known in times if known is not None), default=0)
    return Point(
        commit=commit,
        position=position,
        committed_at=committed_at,
        versions=versions,
        missing=missing,
        identities=identities,
    )


def _version(lives: Lives, life: TableLife, commit: int, position: Lsn) -> int | str:
    """The table's version at the commit, or why it has none there."""
    if not life.state.going_on:
        return life.error.code if life.error is not None else _STANDS_STILL.get(life.state, "it goes no further")
    if life.halted:
        return "it waits for a load of it that is under way"
    if not life.lock.acquire(blocking=False):
        return "it was being worked on"
    try:
        return _held_version(lives, life, commit, position)
    except TailraceError as error:
        return error.code
    finally:
        life.lock.release()


def _held_version(lives: Lives, life: TableLife, commit: int, position: Lsn) -> int | str:
    if life.cursor is None:
        return "it is not loaded yet"
    if life.doubted_until:
        return "a task that was at work on it broke off"
    if life.replay is not None:
        return "it was just loaded, and not all that changed meanwhile is applied"
    if life.mixed:
        return "a row of it was read again, and not all that changed meanwhile is applied"
    if life.cursor.position > position:
        return "it was ahead of the others"
    if lives.lacks(life) or lives.pending(life, commit):
        return "it was behind the others" if life.error is None else life.error.code
    if life.version is None:
        table = life.place.look()
        version = table.version()
        table.cursor()  # refuses what others have written, up to that version
        life.version = version
    if life.identity is None:
        life.identity = life.place.look().identity()
    return "its folder is gone" if life.version is None else life.version
