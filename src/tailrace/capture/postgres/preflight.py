"""Check the server's settings and history, and check or create the replication slot.

Each thing that may be missing has a text that says how to correct it. A slot of ours is created only for a log without
a commit, or after the caller has recorded a gap. A new slot skips changes. It is created after
the publications (`publications.py`), because a slot that is older than its publication can never be read.
"""

from __future__ import annotations

import logging
import time

import psycopg

from tailrace.capture.port import Lag, SourceId
from tailrace.capture.postgres import server_history
from tailrace.capture.postgres.config import PostgresSettings
from tailrace.capture.postgres.connect import connect_replication, map_error, patient_command
from tailrace.errors import (
    NEW_LOG_HINT,
    POSITION_LOST_HINT,
    PROGRAM_HINT,
    PositionLost,
    SlotBusy,
    SourceNotReady,
    SourceRefused,
)
from tailrace.model.position import Lsn

log = logging.getLogger(__name__)

SLOT_WAIT_SECONDS_MAX = 30.0
VERSION_MIN = 150000
ORIGIN_VERSION_MIN = 160000
_PAUSE_SECONDS = 0.2


def check_server(connection: psycopg.Connection) -> None:
    """Refuse a server that cannot be captured from; the hint says what to change."""
    version = connection.info.server_version
    if version < VERSION_MIN:
        raise SourceNotReady(
            "the server is too old",
            version=version // 10000,
            needed=VERSION_MIN // 10000,
            hint="Upgrade it to PostgreSQL 15 or newer.",
        )
    level = query_value(connection, "show wal_level")
    if level != "logical":
        raise SourceNotReady(
            "the server does not write a logical log",
            wal_level=level,
            hint="Run `ALTER SYSTEM SET wal_level = logical;` as a superuser and restart the server.",
        )
    if not query_value(connection, "select rolreplication or rolsuper from pg_roles where rolname = current_user"):
        raise SourceRefused(
            "the role may not replicate",
            role=connection.info.user,
            hint=f'Run `ALTER ROLE "{connection.info.user}" REPLICATION;` as a superuser.',
        )


def check_origin(connection: psycopg.Connection, settings: PostgresSettings) -> None:
    """Refuse a server that cannot leave out replicated changes, if the settings leave them out."""
    version = connection.info.server_version
    if not settings.origins and version < ORIGIN_VERSION_MIN:
        raise SourceNotReady(
            "the server cannot leave out changes that were replicated to it",
            version=version // 10000,
            needed=ORIGIN_VERSION_MIN // 10000,
            hint="Upgrade it, or remove `source.origin`.",
        )


def identify(url: str) -> SourceId:
    """Return which database this is."""
    session = connect_replication(url)
    try:
        return server_history.identify(session)[0]
    finally:
        session.finish()


def check_history(url: str, origin: SourceId, position: Lsn) -> None:
    """Refuse a server whose past is not the one that `position` was read from."""
    session = connect_replication(url)
    try:
        server_history.require_same_history(session, origin, position)
    finally:
        session.finish()


def insert_position(connection: psycopg.Connection) -> Lsn:
    return Lsn.parse(str(query_value(connection, "select pg_current_wal_insert_lsn()::text")))


def ensure_slot(
    connection: psycopg.Connection, settings: PostgresSettings, position: Lsn | None, *, take_over: bool = False
) -> Lsn | None:
    """Make sure the slot can deliver everything after `position`. None asks for a new slot.

    Returns the consistent point of a newly created slot. A slot of ours that belongs to a log without a commit is
    created again: it is unknown what was confirmed on it. One that may be another program's is left alone.
    """
    slot = _slot(connection, settings.slot)
    if position is None:
        if slot is not None and settings.slot_create:
            if not settings.recreate_slot:
                raise SourceNotReady(
                    "the replication slot exists already, and no checkpoint records how far it was read",
                    slot=settings.slot,
                    hint="Check that the checkpoint's folder and key are right, and that no other program reads the "
                    f"slot. If it is unused, run SELECT pg_drop_replication_slot('{settings.slot}'); or give "
                    "`PostgresSettings(recreate_slot=True)`.",
                )
            drop_slot(connection, settings.slot, take_over=take_over)
            slot = None
        if slot is not None:
            return Lsn.parse(slot["confirmed"])
        if not settings.slot_create:
            raise SourceNotReady(
                "the replication slot does not exist",
                slot=settings.slot,
                hint=f"Run SELECT pg_create_logical_replication_slot('{settings.slot}', 'pgoutput');",
            )
        return _create_slot(settings)
    remedy = "Changes since then are gone. " + (
        POSITION_LOST_HINT if settings.slot_create else f"{NEW_LOG_HINT} {PROGRAM_HINT}"
    )
    if slot is None:
        raise PositionLost("the replication slot is gone", slot=settings.slot, position=position, hint=remedy)
    if slot["wal_status"] == "lost" or slot["confirmed"] is None:
        raise PositionLost("the server discarded log that we had not read", slot=settings.slot, hint=remedy)
    if Lsn.parse(slot["confirmed"]) > position:
        raise PositionLost(
            "the slot is ahead of the log",
            slot=settings.slot,
            confirmed=slot["confirmed"],
            position=position,
            hint=f"Check whether the log was restored to an older state. {NEW_LOG_HINT} {PROGRAM_HINT}",
        )
    return None


def _create_slot(settings: PostgresSettings) -> Lsn:
    session = connect_replication(settings.url)
    try:
        row = patient_command(
            session, f"CREATE_REPLICATION_SLOT \"{settings.slot}\" LOGICAL pgoutput (SNAPSHOT 'nothing')"
        )
    finally:
        session.finish()
    return Lsn.parse(row[1] or "")


def _slot(connection: psycopg.Connection, name: str) -> dict[str, str] | None:
    query = (
        "select confirmed_flush_lsn::text, wal_status, active, "
        "pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::int8 from pg_replication_slots where slot_name = %s"
    )
    try:
        row = connection.execute(query, (name,)).fetchone()
    except psycopg.Error as error:
        raise map_error(error) from error
    return dict(zip(("confirmed", "wal_status", "active", "retained"), row, strict=True)) if row else None


def terminate_slot_reader(connection: psycopg.Connection, name: str) -> None:
    """End the server's process that reads the slot. One whose client hangs would hold it for long."""
    ended = query_value(
        connection,
        "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = %s and active",
        name,
    )
    if ended is not None:
        log.warning("ended the session that read the slot", extra={"slot": name})


def wait_for_slot(
    connection: psycopg.Connection, name: str, wait_seconds: float = SLOT_WAIT_SECONDS_MAX, *, take_over: bool = False
) -> None:
    """Wait until no process reads the slot. The server notices late that a reader was killed."""
    deadline = time.monotonic() + wait_seconds
    while True:
        if take_over:
            terminate_slot_reader(connection, name)
        pid = query_value(
            connection, "select active_pid from pg_replication_slots where slot_name = %s and active", name
        )
        if pid is None:
            return
        if time.monotonic() >= deadline:
            raise SlotBusy(
                "another process reads the replication slot",
                slot=name,
                server_pid=pid,
                hint="Stop the other capture; only one can read a slot. If it hangs, start this with `--take-over`, "
                f"or end its session: SELECT pg_terminate_backend({pid});",
            )
        time.sleep(_PAUSE_SECONDS)


def drop_slot(connection: psycopg.Connection, name: str, *, take_over: bool = False) -> bool:
    """Remove the slot once no process reads it; return whether there was one."""
    if _slot(connection, name) is None:
        return False
    wait_for_slot(connection, name, take_over=take_over)
    try:
        connection.execute("select pg_drop_replication_slot(%s)", (name,))
    except psycopg.Error as error:
        raise map_error(error) from error
    return True


def lag(connection: psycopg.Connection, slot: str) -> Lag:
    """Return the end of the server's log, and how much of it our slot retains."""
    end = Lsn.parse(str(query_value(connection, "select pg_current_wal_lsn()::text")))
    slot_state = _slot(connection, slot)
    if slot_state is None:
        return Lag(end=end, confirmed=None, retained_bytes=None)
    confirmed = Lsn.parse(slot_state["confirmed"]) if slot_state["confirmed"] else None
    return Lag(end=end, confirmed=confirmed, retained_bytes=int(slot_state["retained"] or 0))


def committed_until(connection: psycopg.Connection) -> Lsn:
    """Return a position at or after everything committed until now, which the server will send.

    The insert position covers commits that were not waited for (`synchronous_commit = off`). But a page that an open
    transaction has begun may stay unflushed for long, and unflushed log is never sent. Every commit made before is
    flushed within three rounds of the server's log writer, so after that time the flushed position is used.
    """
    inserted = insert_position(connection)
    delay = int(str(query_value(connection, "select setting from pg_settings where name = 'wal_writer_delay'")))
    deadline = time.monotonic() + 3 * delay / 1000 + 0.2
    while True:
        flushed = Lsn.parse(str(query_value(connection, "select pg_current_wal_flush_lsn()::text")))
        if flushed >= inserted or time.monotonic() >= deadline:
            return min(flushed, inserted)
        time.sleep(_PAUSE_SECONDS / 10)


def server_time(connection: psycopg.Connection) -> int:
    """Return the server's clock, in µs since 1970. What is committed by now has no later time."""
    return int(str(query_value(connection, "select (extract(epoch from clock_timestamp()) * 1000000)::bigint")))


def query_value(connection: psycopg.Connection, query: str, *arguments: object) -> object:
    try:
        row = connection.execute(query, arguments, prepare=False).fetchone()
    except psycopg.Error as error:
        raise map_error(error) from error
    return row[0] if row else None
