"""Cuts a table into chunks that can be read separately, without reading the table.

By place: ranges of pages. This is the fastest to read, but right only while all are read in one snapshot, because a row
may move. By key: ranges of the key, right also when each is read in a snapshot of its own. What such a chunk holds
depends on nothing but the key, and whatever moves between two of them is in the log.

A rewrite (TRUNCATE, VACUUM FULL, some ALTER TABLE) gives a table a new file. The plan records the files it was made
for, and a chunk is refused if it would be read from another file.
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
"""Chunks of one table at most; a larger table has larger chunks."""
SAMPLE_PAGES_MIN = 128
ORDERED_PART = 0.95
"""Share of neighbours in key order, in a sample, that are also neighbours on disk.

From here on, key ranges are read as fast as pages.
"""


class ChunkKind(enum.Enum):
    """The kind of ranges that the chunks of a plan are."""

    PLACE = "place"
    KEY = "key"
    EITHER = "either"
    """Whichever is faster. Only valid in a request."""


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """A table that stores rows: the table itself, or one of its partitions."""

    oid: int
    schema: str
    name: str
    file: int
    """`pg_relation_filenode`: changes with a rewrite."""
    pages: int
    bytes: int
    """Large values included."""

    @property
    def identifier(self) -> sql.Identifier:
        return sql.Identifier(self.schema, self.name)

    @property
    def rows_sql(self) -> sql.Composed:
        """The SQL to read from. A partitioned table that is read as one has no file of its own."""
        return sql.SQL("only {}" if self.file > 0 else "{}").format(self.identifier)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A part of a leaf: from the first bound up to, but without, the last. Without bounds: all of it."""

    number: int
    leaf: Leaf
    bytes: int
    """Approximate."""
    pages: tuple[int, int | None] | None = None
    from_key: tuple[str, ...] | None = None
    to_key: tuple[str, ...] | None = None
    key: tuple[tuple[str, str], ...] = ()
    """Name and type of the bounds' columns, in the order of the index."""

    def conditions_sql(self) -> list[sql.Composable]:
        """Return the SQL conditions of the chunk's rows."""
        conditions: list[sql.Composable] = []
        if self.pages is not None:
            first, end = self.pages
            conditions.append(sql.SQL("ctid >= {}::tid").format(f"({first},0)"))
            if end is not None:
                conditions.append(sql.SQL("ctid < {}::tid").format(f"({end},0)"))
        for sign, bound in ((">=", self.from_key), ("<", self.to_key)):
            if bound is not None:
                names = sql.SQL(", ").join(sql.Identifier(name) for name, _ in self.key)
                # The type is the server's own text.
                values = sql.SQL(", ").join(
                    sql.Literal(value) + sql.SQL(f"::{kind}") for value, (_, kind) in zip(bound, self.key, strict=True)
                )
                conditions.append(sql.SQL(f"({{}}) {sign} ({{}})").format(names, values))
        return conditions

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
"""Detects a rewrite of the table `c`.

It is the table's file or, as a negative number, a sum over the files of all its partitions.
"""

# For a partitioned table the partitions whose changes are in the server's log, if we may read each of them. Otherwise,
# and for any other table, the table itself: its children, if it has any, are tables of their own.
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

# The columns of the index of a key, in the index's order.
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
    """Cut a table into chunks of about `chunk_bytes`. A keyless table is always cut by place."""
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
    """Return the tables that store the table's rows now."""
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
    """Return keys that cut the leaf into parts of about the same size.

    Also return whether the leaf is in key order on disk.

    They are from a sample of whole pages: reading those costs the same for a table of any size.
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
    page_numbers = [row[0] for row in rows]
    rising = sum(a <= b for a, b in itertools.pairwise(page_numbers))
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
    """Return ranges of pages. It is one chunk if the leaf is small or has no usable key.

    The last range is open, for a table grows.
    """
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
    """Return each text that the value may have at the source, the least first.

    For elements of a list only the least is returned.

    The server reads each text as this very value, whatever the type and in any year. Infinity at the source is the last
    moment here, and minus infinity the first (`capture/postgres/values.py`). So such a moment may have been either, and
    a lookup by key must use both texts.
    """
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
    text, (first, last) = _moment(count, unit, zone), ends
    if count == first:
        return ("-infinity", text)
    return (text, "infinity") if count == last else (text,)


def _moment(count: int, unit: Literal["D", "us"], zone: str) -> str:
    """Return a date or a time as text, in any year. Python's calendar has only those from 1 to 9999."""
    text = str(np.datetime64(count, unit)).replace("T", " ")
    year, rest = text[: text.index("-", 1)], text[text.index("-", 1) :] + zone
    return f"{year}{rest}" if int(year) > 0 else f"{1 - int(year):04}{rest} BC"
