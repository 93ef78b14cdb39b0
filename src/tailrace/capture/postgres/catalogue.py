"""Reads the server's catalogue, for what the replication stream does not contain.

A table's schema is put together in one function (`_schemas`) from names, type numbers and key. These are from a
relation message or from the catalogue, so stream and snapshot cannot disagree.
"""

from __future__ import annotations

import functools
import itertools
import logging
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg

from tailrace.capture.postgres.connect import map_error
from tailrace.capture.postgres.relation_facts import (
    COLUMN_IS_SENT_SQL,
    PARTITION_TREE_SQL,
    TEXT_AS_BYTES_SQL,
    AnnouncedColumns,
    read_facts,
)
from tailrace.capture.postgres.types import arrow_type, is_known
from tailrace.errors import ProtocolViolation, SourceTableMissing, Unsupported
from tailrace.model.schema import Column, Identity, TableId, TableSchema

log = logging.getLogger(__name__)

KEY_OF_INDEX = "(i.indkey::int2[])[0:i.indnkeyatts - 1]"  # an int2vector counts from 0

# A table can be updated while it publishes updates only if its replica identity can be used. For a partitioned table
# that is the identity of every leaf, since REPLICA IDENTITY does not reach them. A deferrable key does not count.
# Neither does one with a column that is never sent: 18 refuses the application's updates then, also for a virtual
# column under FULL.
_USABLE = f"""not exists (
  select from {PARTITION_TREE_SQL} m join pg_class p on p.oid = m.oid and (p.relkind <> 'p' or p.oid = {{table}})
  where p.relreplident <> (select relreplident from pg_class where oid = {{table}})
     or exists (select from pg_attribute a where p.relreplident = 'f' and a.attrelid = p.oid and a.attgenerated = 'v')
     or not (p.relreplident = 'f' or exists (
       select from pg_index i where i.indrelid = p.oid and i.indisvalid and i.indimmediate
       and case p.relreplident when 'd' then i.indisprimary when 'i' then i.indisreplident else false end
       and not exists (
         select from pg_attribute a
         where a.attrelid = p.oid and a.attnum = any({KEY_OF_INDEX}) and not {COLUMN_IS_SENT_SQL}))))"""

_TABLES = f"""
select c.oid::int8, {TEXT_AS_BYTES_SQL.format(text="n.nspname::text")},
       {TEXT_AS_BYTES_SQL.format(text="c.relname::text")},
       c.relpersistence = 'p', c.relreplident::text, c.reltuples::float8::int8, {_USABLE.format(table="c.oid")},
       array(select a.relid::oid::int8 from pg_partition_ancestors(c.oid) a(relid) where a.relid <> c.oid)
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where c.relkind in ('r', 'p') and n.nspname !~ '^pg_' and n.nspname <> 'information_schema'
order by 2, 3
"""

_COLUMNS = f"""
select a.attname, a.atttypid::int8, a.atttypmod from pg_attribute a
where a.attrelid = %s and a.attnum > 0 and not a.attisdropped and ({COLUMN_IS_SENT_SQL} or %s)
order by a.attnum
"""

# The same as `pg_publication_tables` for a table outside of any tree. That view looks at every table of a publication,
# and waits for a lock on any of them. A publication of all tables, or of a schema, has no lists and conditions.
_PUBLISHED = """
select (
  select array_agg(a.attname::text) from pg_attribute a
  where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped and case
    when r.prattrs is not null then a.attnum = any(r.prattrs::int2[])
    else a.attgenerated = '' or a.attgenerated::text = to_jsonb(p) ->> 'pubgencols' end
), pg_get_expr(r.prqual, r.prrelid)
from pg_publication p join pg_class c on c.relkind = 'r' and not c.relispartition and c.relpersistence = 'p'
join pg_namespace n on n.oid = c.relnamespace
left join pg_publication_namespace s on s.pnpubid = p.oid and s.pnnspid = n.oid
left join pg_publication_rel r on r.prpubid = p.oid and r.prrelid = c.oid and s.oid is null
where p.pubname = any(%s) and n.nspname = %s and c.relname = %s
  and (p.puballtables or s.oid is not null or r.oid is not null)
"""

_PUBLISHED_IN_TREE = """
select attnames::text[], rowfilter from pg_publication_tables
where pubname = any(%s) and schemaname = %s and tablename = %s
"""

_INDEX_KEYS = """
select i.indrelid::int8, i.indisprimary, i.indisreplident, array_agg(a.attname::text order by a.attnum)
from pg_index i
join unnest(i.indkey::int2[]) with ordinality k(attnum, place) on place <= i.indnkeyatts
join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
where i.indrelid = any(%s::oid[]) and i.indisvalid and i.indimmediate and (i.indisprimary or i.indisreplident)
group by i.indexrelid
"""

# A domain is replaced by its base type, which cannot change once it is made.
_TYPES = """
with recursive given as (
  select * from unnest(%s::oid[], %s::int4[]) with ordinality t(oid, typmod, n)
), base(n, oid, typmod) as (
  select n, oid, typmod from given
  union all
  select b.n, t.typbasetype, case when t.typtypmod >= 0 then t.typtypmod else b.typmod end
  from base b join pg_type t on t.oid = b.oid where t.typtype = 'd'
)
select format_type(g.oid, g.typmod), b.oid::int8, b.typmod, coalesce(e.typtype, t.typtype, 'b')::text
from given g join base b using (n) left join pg_type t on t.oid = b.oid
left join pg_type e on e.oid = t.typelem and t.typcategory = 'A'
where t.typtype is distinct from 'd' order by n
"""

# Also: the kind of table, if it still exists, and whether its key is sent whole.
_USABLE_OF = f"""
select t.oid::int8, (select relkind::text from pg_class where oid = t.oid), {_USABLE.format(table="t.oid")},
not exists (
  select from pg_class c join pg_index i on i.indrelid = c.oid
  join pg_attribute a on a.attrelid = c.oid and a.attnum = any({KEY_OF_INDEX})
  where c.oid = t.oid and case c.relreplident when 'i' then i.indisreplident else i.indisprimary end
    and not {COLUMN_IS_SENT_SQL})
from unnest(%s::oid[]) t(oid)
"""

_NO_TYPE = "???"
"""The server's name of a type that no longer exists."""

COLUMNS_MAX = 1664
"""Columns of a row at most: MaxTupleAttributeNumber."""
NAME_MAX = 255
"""Characters of a column's name, which is stored with every unsent value. Servers allow 63 bytes."""


@dataclass(frozen=True, kw_only=True)
class AnnouncedTable:
    """The known facts of a table before its types are looked up in the catalogue."""

    table: TableId
    oid: int
    replica: str
    columns: AnnouncedColumns
    flagged: tuple[str, ...] = ()
    """The key's columns, where a message flags them."""


@dataclass(frozen=True, kw_only=True)
class CurrentIdentity:
    """The catalogue's current view of a table's identity, whenever its rows were written."""

    kind: str | None
    """`p` for a partitioned table; None: the table no longer exists."""
    usable: bool
    """True if the server can describe updates and deletes."""
    key_is_sent: bool
    """True if every column of the key can be sent."""
    primary: tuple[str, ...]
    replica: tuple[str, ...]
    """The columns of the index that the replica identity uses; `primary` has those of the primary key."""


@dataclass(frozen=True, kw_only=True)
class SourceTable:
    """A table as the catalogue lists it."""

    oid: int
    table: TableId
    logged: bool
    identity: Identity
    rows_estimated: int
    ancestors: tuple[int, ...]
    origin: TableId | None = None
    """Its name at the source, where rules change the name of its rows' table."""

    @property
    def identity_note(self) -> str | None:
        """A note for the table's owner about changes that the server cannot describe."""
        if self.identity is not Identity.NONE:
            return None
        table = self.origin or self.table
        name = ".".join('"' + part.replace('"', '""') + '"' for part in (table.schema, table.name))
        return (
            "Only inserts and truncates are captured: the table has no usable replica identity. For updates and "
            f"deletes run: ALTER TABLE {name} REPLICA IDENTITY FULL;"
        )


_STAMPS = f"""
select asked.place, md5(string_agg(
  concat_ws(':', l.oid, l.relfilenode, l.relreplident, a.attnum, a.xmin), ',' order by l.oid, a.attnum)
  || coalesce((select string_agg(i.indexrelid || ':' || i.indisprimary || i.indisreplident, ',' order by i.indexrelid)
    from pg_index i where i.indrelid = c.oid and (i.indisprimary or i.indisreplident)), ''))
from unnest(%s::text[], %s::text[]) with ordinality asked(nspname, relname, place)
  join pg_namespace n on n.nspname = asked.nspname
  join pg_class c on c.relnamespace = n.oid and c.relname = asked.relname and c.relkind in ('r', 'p')
  cross join lateral {PARTITION_TREE_SQL.format(table="c.oid")} t join pg_class l on l.oid = t.oid
  left join pg_attribute a on a.attrelid = l.oid and a.attnum > 0
group by asked.place, c.oid
"""


class Catalogue:
    """Queries over one ordinary connection."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection

    def tables(self) -> list[SourceTable]:
        """Return all ordinary and partitioned tables but the system's own."""
        tables = []
        for row in self._rows(_TABLES):
            oid, schema, name, logged, replica, estimate, usable, ancestors = row
            if (table := table_id(schema, name)) is None:
                continue
            tables.append(
                SourceTable(
                    oid=oid,
                    table=table,
                    logged=logged,
                    rows_estimated=max(0, estimate),
                    identity=_identity(replica, usable),
                    ancestors=tuple(ancestors),
                )
            )
        return tables

    def next_transaction(self) -> int:
        """Return the server's next 64-bit transaction id."""
        return int(self._rows("select pg_snapshot_xmax(pg_current_snapshot())::text::int8")[0][0])

    def describe(self, table: TableId, publications: Sequence[str] | None, *, unpublished: bool = False) -> TableSchema:
        """Return the table's current schema, with the columns that these publications publish.

        Without such columns: if no publication has the table, the schema is empty, or with `unpublished` has all
        columns that a publication would publish. With `publications=None` it has all columns, for anything that can be
        read as a table. It needs several queries: call it in `one_view`, or in a snapshot.
        """
        kinds = [*"rp"] if publications is not None else [*"rpvmf"]
        rows = self._rows(
            "select c.oid::int8, c.relreplident::text from pg_class c join pg_namespace n on n.oid = c.relnamespace "
            "where n.nspname = %s and c.relname = %s and c.relkind::text = any(%s)",
            (table.schema, table.name, kinds),
        )
        if not rows:
            raise SourceTableMissing(
                "the table does not exist",
                table=table,
                hint="Check whether it was dropped or renamed, and check `source.tables`.",
            )
        oid, replica = rows[0]
        columns = self._rows(_COLUMNS, (oid, publications is None))
        if publications is not None:
            published = self._published(table, publications, {name for name, _, _ in columns})
            if published or not unpublished:
                columns = [column for column in columns if column[0] in published]
        announced = AnnouncedTable(table=table, oid=oid, replica=replica, columns=columns)
        return self._schemas([announced], publications or (), {})[0]

    def definition_versions(self, tables: Sequence[TableId]) -> dict[TableId, str]:
        """Return, per existing table, a text that changes with its definition or storage."""
        names = [[table.schema for table in tables], [table.name for table in tables]]
        return {tables[ordinal - 1]: stamp for ordinal, stamp in self._rows(_STAMPS, tuple(names))}

    def row_filter(self, table: TableId, publications: Sequence[str]) -> str | None:
        """Return the SQL condition of the rows that these publications publish. None if they publish all.

        The server combines the conditions of several publications with OR, for inserts, updates and deletes separately.
        One without a condition lets everything pass. A load takes every row that any of the three may send: the base of
        a later update must be there. A native subscriber copies the same rows.
        """
        conditions = {condition for _, condition in self._publication_entries(table, publications)}
        if None in conditions:
            return None
        return " OR ".join(sorted(condition for condition in conditions if condition)) or None

    def _publication_entries(
        self, table: TableId, publications: Sequence[str]
    ) -> list[tuple[list[str] | None, str | None]]:
        """Return the columns that each publication sends of the table, and its row condition."""
        named = (list(publications), table.schema, table.name)
        return self._rows(_PUBLISHED, named) or self._rows(_PUBLISHED_IN_TREE, named)

    def _published(self, table: TableId, publications: Sequence[str], columns: set[str]) -> set[str]:
        """Return the columns that are sent."""
        entries = self._publication_entries(table, publications)
        lists = {frozenset(columns.intersection(names or ())) for names, _ in entries}
        if len(lists) > 1:
            raise Unsupported(
                "the publications list different columns of the table, which the server does not send",
                table=table,
                publications=", ".join(publications),
                hint="Give the table the same column list in each, or take it out of one: ALTER PUBLICATION … DROP "
                "TABLE …;",
            )
        return set().union(*lists)

    def describe_messages(
        self, messages: Sequence[bytes], publications: Sequence[str], known: Mapping[int, TableSchema]
    ) -> list[TableSchema]:
        """Return the schemas that relation messages announce. All at once, because a start announces each of many
        tables.

        The rows may be older than what the catalogue shows. A message lacks some facts: a key that it does not flag,
        the base type of a domain. These are taken from the catalogue only while that still shows the message's columns.
        Otherwise they are those of the last schema the table was `known` to have.
        """
        announced = [
            # Under REPLICA IDENTITY FULL every column is flagged.
            AnnouncedTable(
                table=table, oid=oid, replica=replica, columns=columns, flagged=flagged if replica in "di" else ()
            )
            for oid, table, replica, columns, flagged in map(parse_relation, messages)
        ]
        with self.one_view():
            return self._schemas(announced, publications, known)

    @contextmanager
    def one_view(self) -> Iterator[None]:
        """Run all queries inside as of one moment. Where a transaction is open, that one decides."""
        if self._connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            yield
            return
        try:
            with self._connection.transaction():
                self._connection.execute("set transaction isolation level repeatable read, read only")
                yield
        except psycopg.Error as error:
            raise map_error(error) from error

    def _schemas(
        self, announced: Sequence[AnnouncedTable], publications: Sequence[str], known: Mapping[int, TableSchema]
    ) -> list[TableSchema]:
        oids, columns = [item.oid for item in announced], [column for item in announced for column in item.columns]
        types = iter(self._rows(_TYPES, ([kind for _, kind, _ in columns], [modifier for _, _, modifier in columns])))
        keys: dict[tuple[int, str], tuple[str, ...]] = {}
        for oid, primary, replica, names in self._rows(_INDEX_KEYS, (oids,)):
            keys.update({(oid, kind): tuple(names) for kind, is_one in (("p", primary), ("i", replica)) if is_one})
        now = {
            oid: CurrentIdentity(
                kind=kind,
                usable=usable,
                key_is_sent=sent,
                primary=keys.get((oid, "p"), ()),
                replica=keys.get((oid, "i"), ()),
            )
            for oid, kind, usable, sent in self._rows(_USABLE_OF, (oids,))
        }
        facts = read_facts(self._rows, publications, [(item.oid, item.columns) for item in announced])
        schemas = []
        for item, fact in zip(announced, facts, strict=True):
            typed_columns = []
            for (name, _, _), (source_type, base, modifier, kind) in zip(
                item.columns, itertools.islice(types, len(item.columns)), strict=True
            ):
                if not is_known(base, kind) and source_type != _NO_TYPE:
                    _note_once(source_type)
                typed_columns.append(
                    Column(name=name, source_type=source_type or _NO_TYPE, type=arrow_type(base, modifier))
                )
            before = known.get(item.oid) if fact is None else None
            if before is not None:
                typed_columns = [_as_before(column, before) for column in typed_columns]
            key, identity = key_and_identity(item, now[item.oid], before, shown=fact is not None)
            schemas.append(
                TableSchema(
                    table=item.table,
                    relation=item.oid,
                    columns=tuple(typed_columns),
                    key=key,
                    identity=identity,
                    facts=fact,
                )
            )
        return schemas

    def _rows(self, query: str, arguments: tuple[object, ...] | dict[str, object] = ()) -> list[tuple]:  # type: ignore[type-arg] # rows of any shape
        try:
            return self._connection.execute(query, arguments, prepare=False).fetchall()
        except psycopg.Error as error:
            raise map_error(error) from error


def table_id(schema: bytes, name: bytes) -> TableId | None:
    """Return the table's name. None, with one warning, if it is not text: settings cannot name it either."""
    try:
        return TableId(schema.decode(), name.decode())
    except UnicodeDecodeError:
        _warn_once((schema + b"." + name).decode(errors="backslashreplace"))
        return None


@functools.cache
def _warn_once(name: str) -> None:
    log.warning(
        "a table whose name is not UTF-8 cannot be captured",
        extra={"table": name, "hint": "Rename it at the source: a SQL_ASCII database does not check names."},
    )


@functools.cache
def _note_once(source_type: str) -> None:
    log.info("a type of an extension arrives as text", extra={"type": source_type})


def _as_before(column: Column, before: TableSchema) -> Column:
    """Return the column as it was known, where its type no longer exists."""
    known = {column.name: column for column in before.columns}
    return known.get(column.name, column) if column.source_type == _NO_TYPE else column


def key_and_identity(
    announced: AnnouncedTable, now: CurrentIdentity, before: TableSchema | None, *, shown: bool
) -> tuple[tuple[str, ...], Identity]:
    """Return a table's key columns, and its replica identity.

    A message is right about its rows, but it does not contain everything. The rest is the catalogue's, or what was
    known `before` where the catalogue no longer shows the message's columns.
    """
    names = [name for name, _, _ in announced.columns]
    whole = now.replica if announced.replica == "i" else now.primary
    # If a column list leaves out a part of the key, only the rest is flagged, and that is not a key.
    cut = shown and set(announced.flagged) < set(whole) and not set(whole).issubset(names)
    if announced.flagged and not cut:
        key, proven = announced.flagged, now.kind != "p"
    else:
        key, proven = (whole if now.key_is_sent and not cut else ()), False
    identity = Identity.KEY if proven else _identity(announced.replica, now.usable)
    if before is not None and not announced.flagged:
        same = names == before.names
        if same or (now.kind is None and set(before.key).issubset(names)):
            key = before.key
        if same and (identity is Identity.FULL) == (before.identity is Identity.FULL):
            identity = before.identity
    return key if set(key).issubset(names) else (), identity


def _identity(replica: str, usable: bool) -> Identity:
    if not usable or replica == "n":
        return Identity.NONE
    return Identity.FULL if replica == "f" else Identity.KEY


def parse_relation(message: bytes) -> tuple[int, TableId, str, list[tuple[str, int, int]], tuple[str, ...]]:
    """Parse a relation message: number, name, replica identity, columns (name, type, modifier), flagged names."""
    try:
        (oid,) = struct.unpack_from(">I", message, 1)
        schema, name, rest = message[5:].split(b"\0", 2)
        replica, (count,) = chr(rest[0]), struct.unpack_from(">H", rest, 1)
        columns, flagged, at = [], [], 3
        for _ in range(count):
            end = rest.index(b"\0", at + 1)
            column = rest[at + 1 : end].decode()
            kind, modifier = struct.unpack_from(">Ii", rest, end + 1)
            columns.append((column, kind, modifier))
            if rest[at] & 1:
                flagged.append(column)
            at = end + 9
        names = {column for column, _, _ in columns}
        if len(names) < count or count > COLUMNS_MAX or max(map(len, names), default=0) > NAME_MAX:
            raise ValueError("no server has such a table")
        # An empty schema name stands for pg_catalog.
        return oid, TableId(schema.decode() or "pg_catalog", name.decode()), replica, columns, tuple(flagged)
    except (struct.error, ValueError, IndexError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise ProtocolViolation(
                "the name of a table or column is not UTF-8", hint="Rename it at the source."
            ) from error
        raise ProtocolViolation(
            "a relation message cannot be read", hint="Report it with the server's version."
        ) from error
