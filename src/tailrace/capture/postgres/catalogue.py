"""The server's catalogue, asked for what the replication stream does not say.

The shape of a table is put together in one place (`_shapes`) from names, type numbers and key, whether these
come from a relation message or from the catalogue, so that stream and snapshot cannot disagree.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import psycopg

from tailrace.capture.postgres.connect import explain
from tailrace.capture.postgres.types import arrow_type
from tailrace.errors import ProtocolViolation, SourceError, Unsupported
from tailrace.model.schema import Column, Identity, TableId, TableSchema

# Generated columns are published by 18 and newer alone, and only the stored ones.
_SENT = "(a.attgenerated = '' or a.attgenerated = 's' and current_setting('server_version_num')::int >= 180000)"
_KEY_OF_INDEX = "(i.indkey::int2[])[0:i.indnkeyatts - 1]"  # an int2vector counts from 0

# A table can be updated while it publishes updates only if its replica identity can be used: of a partitioned
# table that of every leaf, since REPLICA IDENTITY does not reach them. A deferrable key is none, and neither is one
# with a column that is never sent: 18 refuses the application's updates then, also of a virtual column under FULL.
_USABLE = f"""not exists (
  select from (select {{table}} as oid union select relid from pg_partition_tree({{table}}) where isleaf) m
  join pg_class p on p.oid = m.oid
  where p.relreplident <> (select relreplident from pg_class where oid = {{table}})
     or exists (select from pg_attribute a where p.relreplident = 'f' and a.attrelid = p.oid and a.attgenerated = 'v')
     or not (p.relreplident = 'f' or exists (
       select from pg_index i where i.indrelid = p.oid and i.indisvalid and i.indimmediate
       and case p.relreplident when 'd' then i.indisprimary when 'i' then i.indisreplident else false end
       and not exists (
         select from pg_attribute a where a.attrelid = p.oid and a.attnum = any({_KEY_OF_INDEX}) and not {_SENT}))))"""

_TABLES = f"""
select c.oid::int8, n.nspname, c.relname, c.relpersistence = 'p', c.relreplident::text,
       c.reltuples::float8::int8, {_USABLE.format(table="c.oid")},
       array(select a.relid::oid::int8 from pg_partition_ancestors(c.oid) a(relid) where a.relid <> c.oid)
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where c.relkind in ('r', 'p') and n.nspname !~ '^pg_' and n.nspname <> 'information_schema'
order by 2, 3
"""

# 15 lists the generated columns as published, and does not send them.
_COLUMNS = f"""
select a.attname, a.atttypid::int8, a.atttypmod from pg_attribute a
where a.attrelid = %s and a.attnum > 0 and not a.attisdropped and {_SENT}
order by a.attnum
"""

_PUBLISHED = """
select attnames::text[], rowfilter from pg_publication_tables
where pubname = any(%s) and schemaname = %s and tablename = %s
"""

_INDEX_KEY = """
select a.attname from pg_index i
join unnest(i.indkey::int2[]) with ordinality k(attnum, place) on place <= i.indnkeyatts
join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
where i.indrelid = %s and i.indisvalid and i.indimmediate and case when %s then i.indisreplident else i.indisprimary end
order by a.attnum
"""

# A domain is replaced by what it stands on, which cannot change once it is made.
_TYPES = """
with recursive given as (
  select * from unnest(%s::oid[], %s::int4[]) with ordinality t(oid, typmod, n)
), base(n, oid, typmod) as (
  select n, oid, typmod from given
  union all
  select b.n, t.typbasetype, case when t.typtypmod >= 0 then t.typtypmod else b.typmod end
  from base b join pg_type t on t.oid = b.oid where t.typtype = 'd'
)
select format_type(g.oid, g.typmod), b.oid::int8, b.typmod
from given g join base b using (n) left join pg_type t on t.oid = b.oid
where t.typtype is distinct from 'd' order by n
"""

# The last column says whether the key is sent whole: a message flags what is left of it.
_USABLE_OF = f"""
select t.oid::int8, {_USABLE.format(table="t.oid")}, not exists (
  select from pg_class c join pg_index i on i.indrelid = c.oid
  join pg_attribute a on a.attrelid = c.oid and a.attnum = any({_KEY_OF_INDEX})
  where c.oid = t.oid and case c.relreplident when 'i' then i.indisreplident else i.indisprimary end and not {_SENT})
from unnest(%s::oid[]) t(oid)
"""


@dataclass(frozen=True, kw_only=True)
class _Told:
    """What is known of a table before the catalogue is asked for its types."""

    table: TableId
    oid: int
    replica: str
    columns: Sequence[tuple[str, int, int]]
    """Name, type and modifier of each."""
    key: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SourceTable:
    """A table as the catalogue lists it."""

    oid: int
    table: TableId
    logged: bool
    identity: Identity
    rows_estimated: int
    ancestors: tuple[int, ...]


class Catalogue:
    """Answers from one ordinary connection."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection

    def tables(self) -> list[SourceTable]:
        """Every ordinary and partitioned table that is not the system's own."""
        found = []
        for row in self._rows(_TABLES):
            oid, schema, name, logged, replica, estimate, usable, ancestors = row
            found.append(
                SourceTable(
                    oid=oid,
                    table=TableId(schema, name),
                    logged=logged,
                    rows_estimated=max(0, estimate),
                    identity=_identity(replica, usable),
                    ancestors=tuple(ancestors),
                )
            )
        return found

    def next_transaction(self) -> int:
        """The server's next 64-bit transaction id."""
        return int(self._rows("select pg_snapshot_xmax(pg_current_snapshot())::text::int8")[0][0])

    def describe(self, table: TableId, publications: Sequence[str]) -> TableSchema:
        """The table's shape as the catalogue has it now: the columns that these publications publish."""
        found = self._rows(
            "select c.oid::int8, c.relreplident::text from pg_class c join pg_namespace n on n.oid = c.relnamespace "
            "where n.nspname = %s and c.relname = %s and c.relkind in ('r', 'p')", (table.schema, table.name),
        )  # fmt: skip
        if not found:
            raise SourceError(
                "the table is not there",
                table=table,
                hint="Was it dropped or renamed? Check `source.tables`.",
            )
        oid, replica = found[0]
        columns = self._rows(_COLUMNS, (oid,))
        published = self._published(table, publications, {name for name, _, _ in columns})
        columns = [column for column in columns if column[0] in published]
        key = self._key(oid, replica, None)
        return self._shapes([
            _Told(table=table, oid=oid, replica=replica, columns=columns, key=key if published.issuperset(key) else ())
        ])[0]  # fmt: skip

    def row_filter(self, table: TableId, publications: Sequence[str]) -> str | None:
        """The SQL condition of the rows that these publications speak of; None if they speak of all.

        The server combines the conditions of several publications with OR, for inserts, updates and deletes apart;
        one without a condition lets everything pass. A load takes every row that any of the three can be told
        of: the base of a later update must be there. That is also what a native subscriber copies.
        """
        rows = self._rows(_PUBLISHED, (list(publications), table.schema, table.name))
        conditions = [condition for _, condition in rows]
        if not conditions or None in conditions:
            return None
        return " OR ".join(sorted(set(conditions)))

    def _published(self, table: TableId, publications: Sequence[str], columns: set[str]) -> set[str]:
        """Which of the columns are sent."""
        rows = self._rows(_PUBLISHED, (list(publications), table.schema, table.name))
        lists = {frozenset(columns.intersection(names)) for names, _ in rows}
        if len(lists) > 1:
            raise Unsupported(
                "the publications list different columns of the table, which the server does not send",
                table=table,
                publications=", ".join(publications),
                hint="Give the table the same column list in each, or take it out of one: "
                "ALTER PUBLICATION … DROP TABLE …;",
            )
        return set().union(*lists)

    def describe_messages(self, messages: Sequence[bytes]) -> list[TableSchema]:
        """The shapes that relation messages announce; asked at once, for at a start each of many tables is announced.

        The key under REPLICA IDENTITY FULL, and that of a table whose updates are not published, is not in
        the message, so it is the catalogue's; elsewhere the message's own flags decide.
        """
        told = []
        for oid, table, replica, columns, flagged in map(parse_relation, messages):
            key = self._key(oid, replica, flagged)
            known = {name for name, _, _ in columns}.issuperset(key)
            told.append(_Told(table=table, oid=oid, replica=replica, columns=columns, key=key if known else ()))
        return self._shapes(told)

    def _key(self, oid: int, replica: str, flagged: tuple[str, ...] | None) -> tuple[str, ...]:
        if flagged is not None and replica in ("d", "i") and flagged:
            return flagged
        return tuple(row[0] for row in self._rows(_INDEX_KEY, (oid, replica == "i")))

    def _shapes(self, told: Sequence[_Told]) -> list[TableSchema]:
        columns = [column for item in told for column in item.columns]
        kinds, modifiers = [kind for _, kind, _ in columns], [modifier for _, _, modifier in columns]
        types = iter(self._rows(_TYPES, (kinds, modifiers)))
        found = self._rows(_USABLE_OF, ([item.oid for item in told],))
        usable, whole = {oid: is_so for oid, is_so, _ in found}, {oid: is_so for oid, _, is_so in found}
        return [
            TableSchema(
                table=item.table, relation=item.oid, key=item.key if whole[item.oid] else (),
                identity=_identity(item.replica, usable[item.oid]),
                columns=tuple(
                    Column(name=name, source_type=source_type or "unknown", type=arrow_type(base, modifier))
                    for (name, _, _), (source_type, base, modifier) in zip(
                        item.columns, itertools.islice(types, len(item.columns)), strict=True
                    )
                ),
            )
            for item in told
        ]  # fmt: skip

    def _rows(self, query: str, arguments: tuple[object, ...] | dict[str, object] = ()) -> list[tuple]:  # type: ignore[type-arg] # rows of any shape
        try:
            return self._connection.execute(query, arguments, prepare=False).fetchall()
        except psycopg.Error as error:
            raise explain(error) from error


def _identity(replica: str, usable: bool) -> Identity:
    if not usable:
        return Identity.NONE
    return Identity.FULL if replica == "f" else Identity.KEY


def parse_relation(message: bytes) -> tuple[int, TableId, str, list[tuple[str, int, int]], tuple[str, ...]]:
    """A relation message's number, name, replica identity, columns (name, type, modifier) and flagged names."""
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
        # An empty schema name stands for pg_catalog.
        return oid, TableId(schema.decode() or "pg_catalog", name.decode()), replica, columns, tuple(flagged)
    except (struct.error, ValueError, IndexError) as error:
        raise ProtocolViolation(
            "a relation message cannot be read", hint="Report it with the server's version."
        ) from error
