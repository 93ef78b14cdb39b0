"""Checks and creates what a capture needs: the server's settings, publication and slot.

The first start creates the publication, then the slot: a slot that is older than its publication can never be read. A
table whose updates the server could not describe never enters a publication that publishes updates: the server would
then refuse the application's own. The file is longer than most because each thing that may be missing has a text that
says how to correct it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import psycopg
from psycopg import sql

from tailrace.capture.port import Lag, SourceId
from tailrace.capture.postgres import server_history
from tailrace.capture.postgres.catalogue import KEY_OF_INDEX, Catalogue, SourceTable, table_id
from tailrace.capture.postgres.config import PostgresSettings
from tailrace.capture.postgres.connect import connect_replication, map_error, patient_command
from tailrace.capture.postgres.relation_facts import PARTITION_TREE_SQL, TEXT_AS_BYTES_SQL
from tailrace.errors import (
    NEW_LOG_HINT,
    POSITION_LOST_HINT,
    PROGRAM_HINT,
    ConfigError,
    PositionLost,
    SlotBusy,
    SourceNotReady,
    SourceRefused,
)
from tailrace.model.position import Lsn
from tailrace.model.schema import Identity, TableId

log = logging.getLogger(__name__)

SLOT_WAIT_SECONDS_MAX = 30.0
VERSION_MIN = 150000
ORIGIN_VERSION_MIN = 160000
GENERATED_VERSION_MIN = 180000
"""From this version on a publication can publish generated columns: the stored ones."""
_PAUSE_SECONDS = 0.2


# The same as `pg_publication_tables`, without the locks that it takes on every table from 16 on. A publication that
# publishes through roots lists a partition only if none above it is in it; any other lists the leaves.
_PUBLISHED = f"""
with member as (
  select p.pubname, p.pubviaroot, c.oid from pg_publication p join pg_class c on c.relkind in ('r', 'p')
  join pg_namespace n on n.oid = c.relnamespace
  where p.pubname = any(%s) and (
    p.puballtables and n.nspname !~ '^pg_' and n.nspname <> 'information_schema'
    or exists (select from pg_publication_rel r where r.prpubid = p.oid and r.prrelid = c.oid)
    or exists (select from pg_publication_namespace s where s.pnpubid = p.oid and s.pnnspid = c.relnamespace))
), sent as (
  select pubname, oid from member m where pubviaroot and not exists (
    select from pg_partition_ancestors(m.oid) a(oid) join member above on above.oid = a.oid
    where above.pubname = m.pubname and a.oid <> m.oid)
  union
  select m.pubname, t.oid from member m cross join lateral {PARTITION_TREE_SQL.format(table="m.oid")} t
  where not m.pubviaroot and (select relkind from pg_class where oid = t.oid) <> 'p'
)
select {TEXT_AS_BYTES_SQL.format(text="n.nspname::text")}, {TEXT_AS_BYTES_SQL.format(text="c.relname::text")},
  sent.pubname
from sent join pg_class c on c.oid = sent.oid
join pg_namespace n on n.oid = c.relnamespace where c.relpersistence = 'p'
"""


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
    level = _value(connection, "show wal_level")
    if level != "logical":
        raise SourceNotReady(
            "the server does not write a logical log",
            wal_level=level,
            hint="Run `ALTER SYSTEM SET wal_level = logical;` as a superuser and restart the server.",
        )
    if not _value(connection, "select rolreplication or rolsuper from pg_roles where rolname = current_user"):
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


def select_tables(connection: psycopg.Connection, settings: PostgresSettings) -> list[SourceTable]:
    """Return the tables to capture. Of a partitioned one that is its root, if that is wanted, and not the partitions.

    A publication that is not ours decides alone. Without `publish_via_partition_root` it publishes the partitions, each
    as a table of its own; then those are captured and the root is not.
    """
    candidates = [table for table in Catalogue(connection).tables() if table.logged and settings.wanted(table.table)]
    published = set() if settings.publication_create else set(publications_by_table(connection, settings))
    published_oids = {table.oid for table in candidates if table.table in published}
    with_parts = {oid for table in candidates if table.oid in published_oids for oid in table.ancestors}
    roots = {table.oid for table in candidates if table.oid not in with_parts} | published_oids
    return [table for table in candidates if table.oid in roots and not roots.intersection(table.ancestors)]


@dataclass(frozen=True, kw_only=True)
class _Uncapturable:
    """A relation that a pattern can match but the server does not log."""

    table: TableId
    kind: str
    remedy: str
    roots: tuple[int, ...]
    """The roots that it is a partition of, if any."""


def _uncapturable(connection: psycopg.Connection) -> list[_Uncapturable]:
    query = """
      select n.nspname, c.relname, c.relkind::text,
             array(select a.relid::oid::int8 from pg_partition_ancestors(c.oid) a(relid) where a.relid <> c.oid)
      from pg_class c join pg_namespace n on n.oid = c.relnamespace
      where (c.relkind in ('v', 'm', 'f') or c.relkind in ('r', 'p') and c.relpersistence = 'u')
      and n.nspname !~ '^pg_' and n.nspname <> 'information_schema' order by 1, 2
    """
    try:
        rows = connection.execute(query, prepare=False).fetchall()
    except psycopg.Error as error:
        raise map_error(error) from error
    relations = []
    for schema, name, kind, roots in rows:
        what, remedy = _KINDS[kind]
        quoted = sql.Identifier(schema, name).as_string(connection)
        relations.append(
            _Uncapturable(table=TableId(schema, name), kind=what, remedy=remedy.format(name=quoted), roots=tuple(roots))
        )
    return relations


_LOGGED = "Its changes are not in the server's log. Run ALTER TABLE {name} SET LOGGED; or exclude it."
_KINDS = {
    "r": ("an unlogged table", _LOGGED),
    "p": ("an unlogged table", "Create {name} again without UNLOGGED, or exclude it."),
    "f": ("a foreign table", "Its rows are on another server: capture {name} there."),
    "v": ("a view", "It has no rows of its own: name the tables that {name} reads."),
    "m": ("a materialized view", "The server does not publish it: name the tables that {name} reads."),
}


def explain_uncapturable(connection: psycopg.Connection, settings: PostgresSettings, tables: list[SourceTable]) -> None:
    """Report relations that the settings want and capture cannot read.

    It is an error if one is named, or if there is nothing else; otherwise a warning. A pattern that also matches views
    causes no warning: they are not tables.
    """
    uncapturable = _uncapturable(connection)
    matched = [item for item in uncapturable if settings.wanted(item.table)]
    named = [item for item in matched if settings.named is not None and settings.named(item.table)]
    if named or (matched and not tables):
        first = (named or matched)[0]
        others = len(named or matched) - 1
        raise ConfigError(
            f"{first.kind} cannot be captured",
            table=first.table,
            **({"and_others": others} if others else {}),
            hint=first.remedy,
        )
    captured = {table.oid for table in tables}
    for item in uncapturable:
        if captured.intersection(item.roots):
            log.warning(
                "a partition cannot be captured, its rows are left out",
                extra={"table": str(item.table), "kind": item.kind, "hint": item.remedy},
            )
        elif item in matched and item.kind in ("an unlogged table", "a foreign table"):
            log.warning("%s cannot be captured", item.kind, extra={"table": str(item.table), "hint": item.remedy})


@dataclass(frozen=True, kw_only=True)
class PublishedTables:
    """Tables that are in a publication of ours, or about to be added."""

    tables: tuple[tuple[TableId, int], ...]
    """Each with the server's number for it."""
    position: Lsn
    """The server's position. What is written to a table before it is published is never received."""
    done: bool = False
    moved: frozenset[int] = frozenset()
    """Tables that are in the other publication, and leave that one only afterwards."""


def ensure_publications(
    connection: psycopg.Connection,
    settings: PostgresSettings,
    publishing: Callable[[PublishedTables], None] = lambda updatable: None,
) -> list[SourceTable]:
    """Make both publications contain exactly the wanted tables; return those.

    `publishing` is called with tables before they are added, and with all that are published at the end.
    """
    tables = select_tables(connection, settings)
    explain_uncapturable(connection, settings, tables)
    if not settings.publication_create:
        if not _publication_exists(connection, settings.publication):
            raise SourceNotReady(
                "the publication does not exist",
                publication=settings.publication,
                hint=_publication_sql(connection, settings, tables),
            )
        _explain_partitions(connection, settings, tables)
        return tables
    if not tables:
        return []  # the caller refuses this; tables stay published, for the settings may be wrong
    updatable = [table for table in tables if table.identity is not Identity.NONE]
    for table in (unsent := _identity_unsent(connection, settings.publication, updatable)):
        log.warning(
            "table left out: its replica identity has a generated column, which the publication does not publish",
            extra={
                "table": str(table.table),
                "hint": f'Run ALTER PUBLICATION "{settings.publication}" SET (publish_generated_columns = stored);',
            },
        )
    updatable = [table for table in updatable if table not in unsent]
    insert_only = [table for table in tables if table.identity is Identity.NONE]
    try:
        # Removed from the one first: a table must not publish updates it cannot describe, not even for a moment.
        in_other = frozenset(_members(connection, settings.publication_inserts))
        _reconcile(
            connection, settings.publication, updatable, "insert, update, delete, truncate", publishing, in_other
        )
        _reconcile(connection, settings.publication_inserts, insert_only, "insert, truncate", publishing)
    except psycopg.Error as error:
        raise map_error(error) from error
    publishing(PublishedTables(tables=_numbered([*updatable, *insert_only]), position=_inserted(connection), done=True))
    return [*updatable, *insert_only]


def _explain_partitions(connection: psycopg.Connection, settings: PostgresSettings, tables: list[SourceTable]) -> None:
    """Warn of a table whose partitions are published instead, none of which is wanted."""
    known = publications_by_table(connection, settings)
    missing = {table.oid: table for table in tables if table.table not in known}
    pieces = [table for table in Catalogue(connection).tables() if table.table in known]
    for oid in missing.keys() & {oid for table in pieces for oid in table.ancestors}:
        log.warning(
            "the publication publishes the table's partitions and not the table",
            extra={
                "table": str(missing[oid].table),
                "hint": f'Name the partitions in `source.tables`, or run ALTER PUBLICATION "{settings.publication}" '
                "SET (publish_via_partition_root = true);",
            },
        )


def _identity_unsent(connection: psycopg.Connection, publication: str, tables: list[SourceTable]) -> list[SourceTable]:
    """Return the tables whose updates the server would refuse while they are in this publication.

    Such a publication was created without generated columns. It is left as it is, since its tables would change schema.
    """
    if connection.info.server_version < GENERATED_VERSION_MIN:
        return []
    query = f"""
      select c.oid::int8 from pg_class c
      where exists (select from pg_publication where pubname = %s and pubgencols <> 's') and c.oid = any(%s::oid[])
      and exists (
        select from pg_attribute a where a.attrelid = c.oid and a.attgenerated = 's'
        and (c.relreplident = 'f' or exists (
          select from pg_index i where i.indrelid = c.oid and a.attnum = any({KEY_OF_INDEX})
          and case c.relreplident when 'd' then i.indisprimary else i.indisreplident end)))
    """
    try:
        rows = connection.execute(query, (publication, [table.oid for table in tables]), prepare=False)
        unsent = {oid for (oid,) in rows}
    except psycopg.Error as error:
        raise map_error(error) from error
    return [table for table in tables if table.oid in unsent]


def publications_by_table(connection: psycopg.Connection, settings: PostgresSettings) -> dict[TableId, set[str]]:
    """Return the publications of ours that contain each table now."""
    publications: dict[TableId, set[str]] = {}
    try:
        for schema, table, publication in connection.execute(_PUBLISHED, (list(settings.publications),)):
            if (name := table_id(schema, table)) is not None:
                publications.setdefault(name, set()).add(publication)
    except psycopg.Error as error:
        raise map_error(error) from error
    return publications


def _publication_sql(connection: psycopg.Connection, settings: PostgresSettings, tables: list[SourceTable]) -> str:
    names = sql.SQL(", ").join(sql.Identifier(t.table.schema, t.table.name) for t in tables)
    text = sql.SQL("CREATE PUBLICATION {} FOR TABLE {} WITH ({});").format(
        sql.Identifier(settings.publication), names, _options(connection)
    )
    return "Run " + text.as_string(connection)


def _options(connection: psycopg.Connection) -> sql.SQL:
    """Return how our publications publish: roots, not partitions, and generated columns if supported."""
    generated = connection.info.server_version >= GENERATED_VERSION_MIN
    return sql.SQL("publish_via_partition_root = true" + (", publish_generated_columns = stored" if generated else ""))


def _publication_exists(connection: psycopg.Connection, name: str) -> bool:
    return bool(_value(connection, "select exists (select from pg_publication where pubname = %s)", name))


def _reconcile(
    connection: psycopg.Connection,
    name: str,
    tables: list[SourceTable],
    publish: str,
    publishing: Callable[[PublishedTables], None],
    in_other: frozenset[int] = frozenset(),
) -> None:
    publication = sql.Identifier(name)
    if not _publication_exists(connection, name):
        connection.execute(
            sql.SQL("create publication {} with (publish = {}, {})").format(publication, publish, _options(connection))
        )
    members = _members(connection, name)
    wanted = {table.oid for table in tables}
    for oid, path in members.items():
        if oid not in wanted:
            connection.execute(
                sql.SQL("alter publication {} drop table only {}").format(publication, sql.Identifier(*path))
            )
    if added := [table for table in tables if table.oid not in members]:
        # Before the change: what is written until then is never received, and that must be recorded whatever happens
        # next.
        publishing(PublishedTables(tables=_numbered(added), position=_inserted(connection), moved=in_other))
    for table in added:
        connection.execute(
            sql.SQL("alter publication {} add table only {}").format(
                publication, sql.Identifier(table.table.schema, table.table.name)
            )
        )


def _members(connection: psycopg.Connection, name: str) -> dict[int, tuple[str, str]]:
    rows = connection.execute(
        "select r.prrelid::int8, n.nspname, c.relname from pg_publication_rel r "
        "join pg_publication p on p.oid = r.prpubid join pg_class c on c.oid = r.prrelid "
        "join pg_namespace n on n.oid = c.relnamespace where p.pubname = %s",
        (name,),
    )
    return {oid: (schema, table) for oid, schema, table in rows}


def _numbered(tables: list[SourceTable]) -> tuple[tuple[TableId, int], ...]:
    return tuple((table.table, table.oid) for table in tables)


def _inserted(connection: psycopg.Connection) -> Lsn:
    return Lsn.parse(str(_value(connection, "select pg_current_wal_insert_lsn()::text")))


def ensure_slot(
    connection: psycopg.Connection, settings: PostgresSettings, position: Lsn | None, *, take_over: bool = False
) -> Lsn | None:
    """Make sure the slot can deliver everything after `position`. None means the log has no commit yet.

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
    ended = _value(
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
        pid = _value(connection, "select active_pid from pg_replication_slots where slot_name = %s and active", name)
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


def drop_publications(connection: psycopg.Connection, settings: PostgresSettings) -> list[str]:
    """Remove the publications we created; return their names."""
    removed = []
    for name in (settings.publication, settings.publication_inserts):
        if settings.publication_create and _publication_exists(connection, name):
            try:
                connection.execute(sql.SQL("drop publication {}").format(sql.Identifier(name)))
            except psycopg.Error as error:
                raise map_error(error) from error
            removed.append(name)
    return removed


def lag(connection: psycopg.Connection, slot: str) -> Lag:
    """Return the end of the server's log, and how much of it our slot retains."""
    end = Lsn.parse(str(_value(connection, "select pg_current_wal_lsn()::text")))
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
    inserted = _inserted(connection)
    delay = int(str(_value(connection, "select setting from pg_settings where name = 'wal_writer_delay'")))
    deadline = time.monotonic() + 3 * delay / 1000 + 0.2
    while True:
        flushed = Lsn.parse(str(_value(connection, "select pg_current_wal_flush_lsn()::text")))
        if flushed >= inserted or time.monotonic() >= deadline:
            return min(flushed, inserted)
        time.sleep(_PAUSE_SECONDS / 10)


def server_time(connection: psycopg.Connection) -> int:
    """Return the server's clock, in µs since 1970. What is committed by now has no later time."""
    return int(str(_value(connection, "select (extract(epoch from clock_timestamp()) * 1000000)::bigint")))


def _value(connection: psycopg.Connection, query: str, *arguments: object) -> object:
    try:
        row = connection.execute(query, arguments, prepare=False).fetchone()
    except psycopg.Error as error:
        raise map_error(error) from error
    return row[0] if row else None
