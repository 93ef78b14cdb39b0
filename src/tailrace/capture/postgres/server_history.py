"""Checks that a server's past is the one that a log was read from.

A server that takes over from another begins a new timeline, which branches off the old one at a known position. A log
that ends at or before that position continues. One that ends after it has transactions that never happened on this
server, and continuing would mix two histories. So it is refused, at every start and whenever a stream is opened. The
check is before the slot is looked at: the slot of a copy proves nothing about the log.
"""

from __future__ import annotations

from psycopg.pq.abc import PGconn

from tailrace.capture.port import SourceId
from tailrace.capture.postgres.connect import command
from tailrace.errors import NEW_LOG_HINT, PROGRAM_HINT, HistoryDiverged, SourceUnreachable
from tailrace.model.position import Lsn


def identify(session: PGconn) -> tuple[SourceId, Lsn]:
    """Return the database of a replication session, and the end of its log."""
    if command(session, "SELECT pg_catalog.pg_is_in_recovery()") == ["t"]:
        raise SourceUnreachable(
            "the server is a standby that has not been promoted",
            hint="Promote it, or name the primary in `source.url`. Several hosts and "
            "`?target_session_attrs=read-write` find it automatically.",
        ).with_option_hint(
            "Promote it, or name the primary in the option `url`. Several hosts and "
            "`?target_session_attrs=read-write` find it automatically."
        )
    system, timeline, end, database = command(session, "IDENTIFY_SYSTEM")
    source_id = SourceId(kind="postgresql", system=system or "", database=database or "", timeline=int(timeline or 0))
    return source_id, Lsn.parse(end or "")


def require_same_history(session: PGconn, origin: SourceId, position: Lsn) -> SourceId:
    """Refuse a server whose past does not contain `position` of `origin`; return the server's id."""
    server, end = identify(session)
    if server.system != origin.system:
        raise _diverged("this is another server", origin, server, position)
    if not origin.timeline or origin.timeline == server.timeline:
        if end < position:
            raise _diverged("the server's log ends before ours; it may be an older copy", origin, server, position, end)
        return server
    branches = branch_points(_history(session, server.timeline)) if server.timeline > 1 else {}
    branched = branches.get(origin.timeline)
    if branched is None:
        raise _diverged("the log's timeline is not in the server's past", origin, server, position)
    if branched < position:
        raise _diverged("the server's history branched off before our position", origin, server, position, branched)
    return server


def branch_points(history: str) -> dict[int, Lsn]:
    """Return where the server left each timeline of its past, from a timeline's history file."""
    branches: dict[int, Lsn] = {}
    for line in history.splitlines():
        fields = line.split(None, 2)
        if len(fields) >= 2 and not fields[0].startswith("#"):
            branches[int(fields[0])] = Lsn.parse(fields[1])
    return branches


def _history(session: PGconn, timeline: int) -> str:
    row = command(session, f"TIMELINE_HISTORY {timeline}")
    return (row[1] or "") if len(row) > 1 else ""


def _diverged(why: str, origin: SourceId, server: SourceId, position: Lsn, until: Lsn | None = None) -> HistoryDiverged:
    return HistoryDiverged(
        why,
        position=position,
        log_timeline=origin.timeline or "unknown",
        server_timeline=server.timeline,
        **{"shared_until": until} if until is not None else {},
        hint="The log holds changes that never happened on this server. Point `source.url` at the server that has "
        f"them. If it is gone: {NEW_LOG_HINT} {PROGRAM_HINT}",
    )
