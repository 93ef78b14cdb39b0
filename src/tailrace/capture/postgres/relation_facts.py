"""Reads the catalogue facts of tables beyond what a relation message has: see `model/catalogue_facts.py`.

Many tables are read at once, and within one transaction, so that the answers belong together. No table is locked for
it: capture must not wait for an ALTER TABLE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tailrace.model.catalogue_facts import CatalogueFacts, ColumnFacts, StorageFacts
from tailrace.model.position import ZERO, Lsn

RunQuery = Callable[[str, tuple[object, ...]], list[tuple[Any, ...]]]
AnnouncedColumns = Sequence[tuple[str, int, int]]
"""Name, type and modifier of each column."""

COLUMN_IS_SENT_SQL = (
    "(a.attgenerated = '' or a.attgenerated = 's' and current_setting('server_version_num')::int >= 180000)"
)
"""Generated columns are published only by 18 and newer, and only stored ones. (15 lists them all as published.)"""

PARTITION_TREE_SQL = """(
  with recursive tree(oid) as (
    select {table} union all
    select i.inhrelid from tree join pg_inherits i on i.inhparent = tree.oid
    join pg_class c on c.oid = i.inhrelid and c.relispartition)
  select oid from tree)"""
"""A table and all partitions below it. The server's own `pg_partition_tree` locks each of them."""

TEXT_AS_BYTES_SQL = "convert_to({text}, case getdatabaseencoding() when 'SQL_ASCII' then 'SQL_ASCII' else 'UTF8' end)"
"""UTF-8, or the raw bytes of a database without an encoding.

Asked for text, such a database would refuse the whole answer.
"""

# A partitioned table has no rows, so its partitions know what older rows were filled with. The text of an array of one
# element holds that element's text, quoted where the delimiter is a comma. An expression is printed without its table,
# which would be locked for it; that of a generated column cannot be.
_DEFAULT = """case
  when a.attidentity <> '' then 'generated as identity' when a.attgenerated <> '' then 'generated'
  else pg_get_expr(d.adbin, 0) end"""
_FILL = """case
  when t.typdelim = ',' then (f.attmissingval::text::text[])[1]
  else substr(f.attmissingval::text, 2, length(f.attmissingval::text) - 2) end"""
_COLUMNS = f"""
select a.attrelid::int8, a.attname, a.atttypid::int8, a.atttypmod, a.attgenerated <> '', {COLUMN_IS_SENT_SQL},
       a.attnum, not a.attnotnull, {TEXT_AS_BYTES_SQL.format(text=_DEFAULT)}, {TEXT_AS_BYTES_SQL.format(text=_FILL)},
       a.xmin::text::int8
from pg_attribute a
left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
left join pg_type t on t.oid = a.atttypid
left join lateral (
  select x.attmissingval from {PARTITION_TREE_SQL.format(table="a.attrelid")} m
  join pg_attribute x on x.attrelid = m.oid and x.attname = a.attname and x.atthasmissing
  limit 1) f on true
where a.attrelid = any(%s::oid[]) and a.attnum > 0 and not a.attisdropped
order by 1, a.attnum
"""

_LISTED = """
select r.prrelid::int8, r.prattrs::int2[] from pg_publication_rel r join pg_publication p on p.oid = r.prpubid
where p.pubname = any(%s) and r.prrelid = any(%s::oid[]) and r.prattrs is not null
"""

# From the catalogue's rows, as everything else here: functions would describe the present, whatever the view is. ATTACH
# writes every column of the partition again, after its entry in the tree; a partition created as one has them before.
# If the columns were written again since, a row type older than the tree entry detects most cases.
_STORAGE = f"""
select t.oid::int8, r.relnatts, c.oid::int8, n.nspname || '.' || c.relname, nullif(c.relfilenode, 0)::int8,
       c.oid <> t.oid and coalesce(
         (select bool_or(a.cmin::text::int8 >= i.cmin::text::int8) from pg_attribute a
          where a.attrelid = c.oid and a.attnum > 0 and a.xmin = i.xmin),
         i.xmin <> y.xmin, false),
       case when pg_is_in_recovery() then pg_last_wal_replay_lsn() else pg_current_wal_insert_lsn() end::text
from unnest(%s::oid[]) t(oid)
join pg_class r on r.oid = t.oid
cross join lateral {PARTITION_TREE_SQL.format(table="t.oid")} m
join pg_class c on c.oid = m.oid
join pg_namespace n on n.oid = c.relnamespace
left join pg_type y on y.oid = c.reltype
left join pg_inherits i on i.inhrelid = c.oid
order by 1, 3
"""


def read_facts(
    run_query: RunQuery, publications: Sequence[str], announced: Sequence[tuple[int, AnnouncedColumns]]
) -> list[CatalogueFacts | None]:
    """Return the facts of each announced table whose columns the catalogue still shows."""
    oids = list({oid for oid, _ in announced})
    lists: dict[int, list[int]] = dict(run_query(_LISTED, (list(publications), oids)))
    shown: dict[int, list[_CatalogueColumn]] = {}
    unsent: dict[int, list[int]] = {}
    for oid, name, kind, modifier, generated, sent, number, nullable, default, fill, stamp in run_query(
        _COLUMNS, (oids,)
    ):
        if sent and (oid not in lists or number in lists[oid]):
            fact = ColumnFacts(
                number=number,
                nullable=nullable,
                default=_text(default),
                fast_default=_text(fill),
                definition_version=stamp,
            )
            shown.setdefault(oid, []).append(_CatalogueColumn((name, kind, modifier), generated, fact))
        else:
            unsent.setdefault(oid, []).append(number)
    storage: dict[int, list[StorageFacts]] = {}
    columns_ever: dict[int, int] = {}
    source_position = ZERO
    for oid, columns_made, relation, name, file, attached, position in run_query(_STORAGE, (oids,)):
        columns_ever[oid], source_position = columns_made, Lsn.parse(position)
        storage.setdefault(oid, []).append(StorageFacts(relation=relation, name=name, file=file, attached=attached))
    return [
        _matched(columns, shown.get(oid, []), unsent.get(oid, []), storage[oid], columns_ever[oid], source_position)
        if oid in storage
        else None
        for oid, columns in announced
    ]


class _CatalogueColumn(NamedTuple):
    """A column as the catalogue has it now."""

    announced: tuple[str, int, int]
    generated: bool
    fact: ColumnFacts


def _text(sent: bytes | None) -> str | None:
    return None if sent is None else sent.decode(errors="backslashreplace")


def _matched(
    announced: AnnouncedColumns,
    shown: list[_CatalogueColumn],
    others: list[int],
    storage: list[StorageFacts],
    columns_ever: int,
    source_position: Lsn,
) -> CatalogueFacts | None:
    # The message decides whether a generated column is published.
    same = [column for column in shown if not column.generated or column.announced in announced]
    if [column.announced for column in same] != list(announced):
        return None
    unsent = [*others, *(column.fact.number for column in shown if column not in same)]
    return CatalogueFacts(
        columns=tuple(column.fact for column in same),
        storage=tuple(storage),
        columns_ever=columns_ever,
        unpublished=tuple(sorted(unsent)),
        position=source_position,
    )
