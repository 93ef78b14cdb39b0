"""What PostgreSQL's catalogue tells of tables beyond what a relation message says: see `model/facts.py`.

Asked for many tables at once, and within one transaction, so that the answers belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tailrace.model.facts import ColumnFacts, Facts, Storage

Ask = Callable[[str, tuple[object, ...]], list[tuple[Any, ...]]]
Announced = Sequence[tuple[str, int, int]]
"""Name, type and modifier of each column."""

SENT = "(a.attgenerated = '' or a.attgenerated = 's' and current_setting('server_version_num')::int >= 180000)"
"""Generated columns are published by 18 and newer alone, and only the stored ones. (15 lists them all as published.)"""

# A partitioned table has no rows, so what older rows were filled with is known to its partitions. The text of an
# array of one element holds that element's text, quoted where the delimiter is a comma.
_COLUMNS = f"""
select a.attrelid::int8, a.attname, a.atttypid::int8, a.atttypmod, a.attnum, not a.attnotnull,
       case when a.attidentity <> '' then 'generated as identity' else pg_get_expr(d.adbin, d.adrelid) end,
       case when t.typdelim = ',' then (f.attmissingval::text::text[])[1]
            else substr(f.attmissingval::text, 2, length(f.attmissingval::text) - 2) end,
       a.xmin::text::int8
from pg_attribute a
left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
left join pg_type t on t.oid = a.atttypid
left join lateral (
  select x.attmissingval from pg_attribute x
  where x.attname = a.attname and x.atthasmissing
    and x.attrelid in (select a.attrelid union select relid from pg_partition_tree(a.attrelid) where isleaf)
  limit 1) f on true
where a.attrelid = any(%s::oid[]) and a.attnum > 0 and not a.attisdropped and {SENT}
order by 1, a.attnum
"""

_PUBLISHED = """
select c.oid::int8, p.attnames::text[] from pg_publication_tables p
join pg_namespace n on n.nspname = p.schemaname
join pg_class c on c.relnamespace = n.oid and c.relname = p.tablename
where p.pubname = any(%s) and c.oid = any(%s::oid[])
"""

# A table that was made as a partition has a row type as old as its place in the tree.
_STORAGE = """
select t.oid::int8, c.oid::int8, format('%%s.%%s', n.nspname, c.relname), pg_relation_filenode(c.oid)::int8,
       coalesce(c.oid <> t.oid and i.xmin <> y.xmin, false)
from unnest(%s::oid[]) t(oid)
cross join lateral (select t.oid as oid union select relid from pg_partition_tree(t.oid)) m
join pg_class c on c.oid = m.oid
join pg_namespace n on n.oid = c.relnamespace
left join pg_type y on y.oid = c.reltype
left join pg_inherits i on i.inhrelid = c.oid
order by 1, 2
"""


def read_facts(
    ask: Ask, publications: Sequence[str], announced: Sequence[tuple[int, Announced]]
) -> list[Facts | None]:
    """For each announced table its facts, if its columns are the very ones that the catalogue shows."""
    oids = list({oid for oid, _ in announced})
    published: dict[int, set[str]] = {}
    for oid, names in ask(_PUBLISHED, (list(publications), oids)):
        published.setdefault(oid, set()).update(names or ())
    shown: dict[int, list[tuple[str, int, int]]] = {}
    columns: dict[int, list[ColumnFacts]] = {}
    for oid, name, kind, modifier, number, nullable, default, fill, stamp in ask(_COLUMNS, (oids,)):
        if name in published.get(oid, ()):
            shown.setdefault(oid, []).append((name, kind, modifier))
            columns.setdefault(oid, []).append(
                ColumnFacts(number=number, nullable=nullable, default=default, fill=fill, stamp=stamp)
            )
    storage: dict[int, list[Storage]] = {}
    for oid, relation, name, file, attached in ask(_STORAGE, (oids,)):
        storage.setdefault(oid, []).append(Storage(relation=relation, name=name, file=file, attached=attached))
    return [
        Facts(columns=tuple(columns.get(oid, ())), storage=tuple(storage.get(oid, ())))
        if oid in published and shown.get(oid, []) == list(told)
        else None
        for oid, told in announced
    ]
