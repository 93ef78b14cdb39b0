"""How a table is cut into chunks that can be read apart from each other, planned without reading the table.

By place: ranges of pages, the fastest to read, and right only while all are read in one snapshot: a row may move.
By key: ranges of the key, right also when each is read in a snapshot of its own, for what a chunk holds depends
on nothing but the key, and whatever moves between two of them is in the log.

A rewrite (TRUNCATE, VACUUM FULL, some ALTER TABLE) gives a table a new file. Which files a plan was made for
stands in it, and every chunk is refused that would be read from another.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import time
from typing import Any, Literal

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import sql

from tailrace.capture.postgres.catalogue import Catalogue
from tailrace.capture.postgres.connect import map_error
from tailrace.capture.postgres.values import FIRST_DAY, FIRST_INSTANT, LAST_DAY, LAST_INSTANT
from tailrace.model.schema import TableId, TableSchema

CHUNK_BYTES = 64 << 20
CHUNKS_MAX = 10_000
"""Of one table; a larger one has larger chunks."""
SAMPLE_PAGES_MIN = 128
ORDERED_PART = 0.95
"""Of the neighbours in a sample in key order, how many must also be so on disk for key ranges to be read
as fast as pages."""


class ChunkKind(enum.Enum):
    """What the chunks of a plan are ranges of."""

    PLACE = "place"
    KEY = "key"
    EITHER = "either"
    """As it is faster. Only to ask with."""


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """A table that rows lie in: the table itself, or one of its partitions."""

    oid: int
    schema: str
    name: str
    file: int
    """`pg_relation_filenode`: another one after a rewrite."""
    pages: int
    bytes: int
    """Large values included."""

    @property
    def identifier(self) -> sql.Identifier:
        return sql.Identifier(self.schema, self.name)

    @property
    def rows_sql(self) -> sql.Composed:
        """What to read from. A partitioned table that is read as one has no file of its own."""
        return sql.SQL("only {}" if self.file > 0 else "{}").format(self.identifier)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A part of a leaf: from the first bound, without the last. No bounds: all of it."""

    number: int
    leaf: Leaf
    bytes: int
    """About."""
    pages: tuple[int, int | None] | None = None
    from_key: tuple[str, ...] | None = None
    to_key: tuple[str, ...] | None = None
    key: tuple[tuple[str, str], ...] = ()
    """Name and type of the columns that the bounds are of, in the order of the index."""

    def conditions_sql(self) -> list[sql.Composable]:
        """What the rows of the chunk fulfil, as SQL."""
        found: list[sql.Composable] = []
        if self.pages is not None:
            first, end = self.pages
            found.append(sql.SQL("ctid >= {}::tid").format(f"({first},0)"))
            if end is not None:
                found.append(sql.SQL("ctid < {}::tid").format(f"({end},0)"))
        for sign, bound in ((">=", self.from_key), ("<", self.to_key)):
            if bound is not None:
                names = sql.SQL(", ").join(sql.Identifier(name) for name, _ in self.key)
                # The type is the server's own text.
                values = sql.SQL(", ").join(
                    sql.Literal(value) + sql.SQL(f"::{kind}") for value, (_, kind) in zip(bound, self.key, strict=True)
                )
                found.append(sql.SQL(f"({{}}) {sign} ({{}})").format(names, values))
        return found

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Chunk:
        def bound(name: str) -> tuple[Any, ...] | None:
            return None if stored[name] is None else tuple(stored[name])

        return cls(
            number=stored["number"],
            leaf=Leaf(**stored["leaf"]),
            bytes=stored["bytes"],
            pages=bound("pages"),
            from_key=bound("from_key"),
            to_key=bound("to_key"),
            key=tuple((name, kind) for name, kind in stored["key"]),
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All chunks of a table: each of its rows is in one of them."""

    schema: TableSchema
    leaves: tuple[Leaf, ...]
    chunks: tuple[Chunk, ...]
    cut: ChunkKind

    @property
    def bytes(self) -> int:
        return sum(leaf.bytes for leaf in self.leaves)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": self.schema.to_json(),
            "leaves": [asdict(leaf) for leaf in self.leaves],
            "chunks": [chunk.to_json() for chunk in self.chunks],
            "cut": self.cut.value,
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Plan:
        return cls(
            schema=TableSchema.from_json(stored["schema"]),
            leaves=tuple(Leaf(**leaf) for leaf in stored["leaves"]),
            chunks=tuple(Chunk.from_json(chunk) for chunk in stored["chunks"]),
            cut=ChunkKind(stored["cut"]),
        )


FILE = """coalesce(nullif(pg_relation_filenode(c.oid), 0)::int8, (
  select (-sum(pg_relation_filenode(t.relid)::int8))::int8 from pg_partition_tree(c.oid) t where t.isleaf), 0)"""
"""What tells a rewrite of the table `c`: its file or, negative, something of the files of all its partitions."""

# Of a partitioned table the partitions whose changes are in the server's log, if we may read each of them; else, and
# of any other table, the table itself: its children, if it has any, are tables of their own.
_LEAVES = f"""
with leaf as (
  select l.oid from pg_class c cross join lateral pg_partition_tree(c.oid) t join pg_class l on l.oid = t.relid
  where c.oid = %(table)s and c.relkind = 'p' and t.isleaf and l.relpersistence = 'p' and l.relkind = 'r'
)
select c.oid::int8, n.nspname::text, c.relname::text, {FILE},
       coalesce(pg_relation_size(c.oid), 0) / current_setting('block_size')::int8, coalesce(pg_table_size(c.oid), 0)
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where case when (select bool_and(has_table_privilege(oid, 'select')) from leaf) then c.oid in (select oid from leaf)
           else c.oid = %(table)s end
order by c.oid
"""

# The columns of the index that a key is known by, in the index's order.
_INDEX = """
select array_agg(a.attname::text order by k.place), array_agg(format_type(a.atttypid, a.atttypmod) order by k.place)
from pg_index i
join unnest(i.indkey::int2[]) with ordinality k(attnum, place) on k.place <= i.indnkeyatts
join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
where i.indrelid = %s and i.indisvalid and i.indisunique and i.indimmediate and i.indpred is null
group by i.indexrelid having array_agg(a.attname::text order by a.attname::text) = %s
"""


def plan_table(
    connection: psycopg.Connection,
    table: TableId,
    publications: Sequence[str] | None,
    cut: ChunkKind,
    chunk_bytes: int = CHUNK_BYTES,
) -> Plan:
    """Cut a table into chunks of about so many bytes. A table without a key is always cut by place."""
    catalogue = Catalogue(connection)
    with catalogue.one_view():
        schema = catalogue.describe(table, publications)
    try:
        leaves = find_leaves(connection, schema)
        total = sum(leaf.bytes for leaf in leaves)
        size = max(chunk_bytes, -(-total // CHUNKS_MAX))
        if not schema.key:
            cut = ChunkKind.PLACE
        keyed: list[tuple[Leaf, _Key | None, list[tuple[str, ...]]]] = []
        ordered = True
        for leaf in leaves:
            count = max(1, round(leaf.bytes / size))
            key = _key_of(connection, leaf, schema) if cut is not ChunkKind.PLACE and count > 1 else None
            bounds: list[tuple[str, ...]] = []
            if key is not None:
                bounds, in_order = _bounds(connection, leaf, key, count)
                ordered = ordered and in_order
            keyed.append((leaf, key, bounds))
    except psycopg.Error as error:
        raise map_error(error) from error
    if cut is ChunkKind.EITHER:
        cut = ChunkKind.KEY if ordered else ChunkKind.PLACE
    numbers = itertools.count()
    chunks = [
        chunk
        for leaf, key, bounds in keyed
        for chunk in (
            _by_key(leaf, key, bounds, numbers) if cut is ChunkKind.KEY and key else _by_place(leaf, size, numbers, cut)
        )
    ]
    return Plan(schema=schema, leaves=leaves, chunks=tuple(chunks), cut=cut)


def find_leaves(connection: psycopg.Connection, schema: TableSchema) -> tuple[Leaf, ...]:
    """Where the table's rows lie now."""
    rows = connection.execute(_LEAVES, {"table": schema.relation}, prepare=False).fetchall()
    return tuple(
        Leaf(oid=oid, schema=namespace, name=name, file=file, pages=pages, bytes=size)
        for oid, namespace, name, file, pages, size in rows
    )


_Key = tuple[tuple[str, str], ...]


def _key_of(connection: psycopg.Connection, leaf: Leaf, schema: TableSchema) -> _Key | None:
    row = connection.execute(_INDEX, (leaf.oid, sorted(schema.key)), prepare=False).fetchone()
    return tuple(zip(row[0], row[1], strict=True)) if row else None


def _bounds(connection: psycopg.Connection, leaf: Leaf, key: _Key, count: int) -> tuple[list[tuple[str, ...]], bool]:
    """Keys that cut the leaf into parts of about the same size, and whether it lies in their order on disk.

    From a sample of whole pages: reading those costs the same for a table of any size.
    """
    pages = max(SAMPLE_PAGES_MIN, count * 2)
    part = min(100.0, 100.0 * pages / max(leaf.pages, 1))
    # Qualified, or the order would be that of the texts.
    names = [sql.Identifier("sampled", name) for name, _ in key]
    query = "select (ctid::text::point)[0]::int8, {} from only {} sampled tablesample system ({}) order by {}"
    rows = connection.execute(
        sql.SQL(query).format(
            sql.SQL(", ").join(sql.SQL("{}::text").format(name) for name in names),
            leaf.identifier,
            sql.Literal(part),
            sql.SQL(", ").join(names),
        ),
        prepare=False,
    ).fetchall()
    places = [row[0] for row in rows]
    rising = sum(a <= b for a, b in itertools.pairwise(places))
    picked = dict.fromkeys(rows[len(rows) * n // count][1:] for n in range(1, count)) if rows else {}
    return list(picked), rising >= ORDERED_PART * (len(rows) - 1)


def _by_key(leaf: Leaf, key: _Key, bounds: list[tuple[str, ...]], numbers: itertools.count[int]) -> list[Chunk]:
    edges = [None, *bounds, None]
    size = leaf.bytes // (len(edges) - 1)
    return [
        Chunk(number=next(numbers), leaf=leaf, bytes=size, from_key=start, to_key=end, key=key)
        for start, end in itertools.pairwise(edges)
    ]


def _by_place(leaf: Leaf, size: int, numbers: itertools.count[int], cut: ChunkKind) -> list[Chunk]:
    """Ranges of pages; the last one is open, for a table grows. All of it, if it is small or has no usable key."""
    count = max(1, round(leaf.bytes / size)) if cut is ChunkKind.PLACE else 1
    step = -(-leaf.pages // count) or 1
    starts = list(range(0, leaf.pages, step)) or [0]
    if len(starts) == 1:
        return [Chunk(number=next(numbers), leaf=leaf, bytes=leaf.bytes)]
    ends = [*starts[1:], None]
    return [
        Chunk(number=next(numbers), leaf=leaf, bytes=leaf.bytes // len(starts), pages=(start, end))
        for start, end in zip(starts, ends, strict=True)
    ]


def key_texts(scalar: pa.Scalar) -> tuple[str, ...]:
    """All that the value may be at the source, the least first. Of what is in a list only that."""
    kind = scalar.type
    if pa.types.is_date(kind):
        return _moments(int(scalar.value), "D", (FIRST_DAY, LAST_DAY), zone="")
    if pa.types.is_timestamp(kind):
        return _moments(int(scalar.value), "us", (FIRST_INSTANT, LAST_INSTANT), zone="+00" if kind.tz else "")
    if pa.types.is_list(kind):
        return ("{" + ",".join(map(_element, scalar.values)) + "}",)
    return (_plain(scalar.as_py()),)


def _plain(value: Any) -> str:
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    return value.isoformat() if isinstance(value, time) else str(value)


def _element(scalar: pa.Scalar) -> str:
    if not scalar.is_valid:
        return "NULL"
    return '"' + key_texts(scalar)[0].replace("\\", "\\\\").replace('"', '\\"') + '"'


def _moments(count: int, unit: Literal["D", "us"], ends: tuple[int, int], *, zone: str) -> tuple[str, ...]:
    said, (first, last) = _moment(count, unit, zone), ends
    if count == first:
        return ("-infinity", said)
    return (said, "infinity") if count == last else (said,)


def _moment(count: int, unit: Literal["D", "us"], zone: str) -> str:
    """A date or a time, in any year: Python's calendar has those from 1 to 9999 alone."""
    said = str(np.datetime64(count, unit)).replace("T", " ")
    year, rest = said[: said.index("-", 1)], said[said.index("-", 1) :] + zone
    return f"{year}{rest}" if int(year) > 0 else f"{1 - int(year):04}{rest} BC"
