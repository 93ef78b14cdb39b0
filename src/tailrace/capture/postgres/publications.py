"""Check and create publications, and select the tables that they contain.

A table whose updates the server could not describe never enters a publication that publishes updates: the server would
then refuse the application's own. Tables are reported before they are added, because what is written until then is
never received. A publication that is not ours is read and never changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import psycopg
from psycopg import sql

from tailrace.capture.postgres.catalogue import KEY_OF_INDEX, Catalogue, SourceTable, table_id
from tailrace.capture.postgres.config import PostgresSettings
from tailrace.capture.postgres.connect import map_error
from tailrace.capture.postgres.preflight import insert_position, query_value
from tailrace.capture.postgres.relation_facts import PARTITION_TREE_SQL, TEXT_AS_BYTES_SQL
from tailrace.errors import ConfigError, SourceNotReady
from tailrace.model.position import Lsn
from tailrace.model.schema import Identity, TableId

log = logging.getLogger(__name__)

GENERATED_VERSION_MIN = 180000
"""From this version on a publication can publish generated columns: the stored ones."""


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
class _UncapturableKind:
    """A kind of relation that the server does not log, with texts for people."""

    text: str
    remedy: str
    """With a field for the relation's name."""
    is_table: bool
    """True if a pattern of tables is meant to match it."""


@dataclass(frozen=True, kw_only=True)
class _Uncapturable:
    """A relation that a pattern can match but the server does not log."""

    table: TableId
    kind: _UncapturableKind
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
        what = _KINDS[kind]
        quoted = sql.Identifier(schema, name).as_string(connection)
        relations.append(
            _Uncapturable(
                table=TableId(schema, name), kind=what, remedy=what.remedy.format(name=quoted), roots=tuple(roots)
            )
        )
    return relations


_KINDS = {
    "r": _UncapturableKind(
        text="an unlogged table",
        remedy="Its changes are not in the server's log. Run ALTER TABLE {name} SET LOGGED; or exclude it.",
        is_table=True,
    ),
    "p": _UncapturableKind(
        text="an unlogged table", remedy="Create {name} again without UNLOGGED, or exclude it.", is_table=True
    ),
    "f": _UncapturableKind(
        text="a foreign table", remedy="Its rows are on another server: capture {name} there.", is_table=True
    ),
    "v": _UncapturableKind(
        text="a view", remedy="It has no rows of its own: name the tables that {name} reads.", is_table=False
    ),
    "m": _UncapturableKind(
        text="a materialized view",
        remedy="The server does not publish it: name the tables that {name} reads.",
        is_table=False,
    ),
}
"""By `pg_class.relkind`."""


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
            f"{first.kind.text} cannot be captured",
            table=first.table,
            **({"and_others": others} if others else {}),
            hint=first.remedy,
        )
    captured = {table.oid for table in tables}
    for item in uncapturable:
        if captured.intersection(item.roots):
            log.warning(
                "a partition cannot be captured, its rows are left out",
                extra={"table": str(item.table), "kind": item.kind.text, "hint": item.remedy},
            )
        elif item in matched and item.kind.is_table:
            log.warning("%s cannot be captured", item.kind.text, extra={"table": str(item.table), "hint": item.remedy})


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
    publishing(
        PublishedTables(tables=_numbered([*updatable, *insert_only]), position=insert_position(connection), done=True)
    )
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
    return bool(query_value(connection, "select exists (select from pg_publication where pubname = %s)", name))


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
        publishing(PublishedTables(tables=_numbered(added), position=insert_position(connection), moved=in_other))
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
