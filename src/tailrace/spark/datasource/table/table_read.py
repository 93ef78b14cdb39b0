"""`spark.read.format("cdc")` of a database. It returns a table as a DataFrame, read in parallel as of one moment.

The table is cut into chunks. Every task reads its own in one exported snapshot, which a separate process holds
(`snapshot_holder.py`). So the rows are those of one moment, however long the read takes and whatever is written
meanwhile. Types are those of a load. Nothing is written to the source, and a read needs no right but SELECT.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import psycopg
import pyarrow as pa
from psycopg import sql
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from tailrace.capture.postgres.catalogue import Catalogue
from tailrace.capture.postgres.chunks import Chunk, ChunkKind, Leaf, find_leaves, plan_table
from tailrace.capture.postgres.connect import INSUFFICIENT_PRIVILEGE, connect, map_error
from tailrace.capture.postgres.row_condition import require_valid_condition
from tailrace.errors import ConfigError, SourceRewritten, SourceTableMissing, TailraceError, Unsupported
from tailrace.model.schema import TableSchema
from tailrace.spark.datasource.option_values import as_option_error, without_traceback
from tailrace.spark.datasource.table.snapshot_holder import SnapshotHandle, hold_snapshot
from tailrace.spark.datasource.table.table_options import RECREATE_HINT, ReadOptions, TableReadPart
from tailrace.spark.session.arrow_types import arrow_schema, spark_schema

PLANS_MAX = 5
"""Maximal number of plans for one read, while the table is rewritten again and again."""


def snapshot_schema(options: ReadOptions) -> StructType:
    """Return the columns of a read."""
    with _read_errors(options), connect(options.url) as connection:
        return _spark_schema(_check_table(connection, options))


class TableBatchReader(DataSourceReader):
    """A read of a table, planned and read in parallel.

    It holds plain data only: Spark pickles it before it has planned, and runs its methods in other processes.

    It takes no filters. Spark 4.3 plans once for a DataFrame. It would run the DataFrame's next query with the filters
    of the query before.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        options = self._options
        with without_traceback, _read_errors(options):
            for _ in range(PLANS_MAX):
                with connect(options.url) as connection:
                    schema = _check_table(connection, options)
                    _refuse_other(schema, self._schema)
                    leaves, chunks = _plan(connection, schema, options)
                    # Look for a rewrite in between: a snapshot does not keep what a TRUNCATE has removed.
                    snapshot = hold_snapshot(
                        options.url, seconds_max=options.snapshot_seconds, idle_seconds=options.idle_seconds
                    )
                    try:
                        if _files(_leaves(connection, schema)) == _files(leaves):
                            return self._parts(schema, chunks, snapshot)
                    except TailraceError:
                        snapshot.release()
                        raise
                    snapshot.release()
            raise SourceRewritten(
                "the table is rewritten again and again while a read of it is planned",
                table=options.table,
                hint="Read the table when nobody truncates, rewrites or alters it.",
            )

    def _parts(self, schema: TableSchema, chunks: Sequence[Chunk], snapshot: SnapshotHandle) -> list[InputPartition]:
        options = self._options
        count = -(-sum(chunk.bytes for chunk in chunks) // options.chunk_bytes)
        return [
            InputPartition(
                TableReadPart(
                    schema=schema,
                    chunks=part,
                    condition=options.where,
                    snapshot=snapshot.name,
                    snapshot_id=snapshot.id,
                    seconds_max=options.snapshot_seconds,
                )
            )
            for part in _split_chunks(chunks, min(max(count, 1), options.partitions_max))
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Compiled code, imported only where rows are read.
        from tailrace.spark.datasource.table.table_part import read_part

        fields = arrow_schema(self._schema)
        with without_traceback, _read_errors(self._options):
            for batch in read_part(self._options.url, partition.value):
                yield batch.cast(fields)


# The table at the source.


def _check_table(connection: psycopg.Connection, options: ReadOptions) -> TableSchema:
    """Return the schema to read, after checking that it can be read."""
    try:
        schema = Catalogue(connection).describe(options.table, None)
    except SourceTableMissing:
        raise SourceTableMissing(
            "the table is not there",
            table=options.table,
            hint='Write names as they are, case included. Quote one with a dot in it: "a.b"."c".',
        ) from None
    if not schema.columns:
        raise Unsupported(
            "the table has no columns", table=options.table, hint="There is nothing to read: name another `table`."
        )
    if options.columns is not None:
        known = {column.name: column for column in schema.columns}
        for name in options.columns:
            if name not in known:
                raise ConfigError(
                    "the table has no such column",
                    table=options.table,
                    column=name,
                    hint=f"Name one of {', '.join(known)}.",
                )
        schema = replace(schema, columns=tuple(known[name] for name in options.columns), facts=None)
    names = sql.SQL(", ").join(map(sql.Identifier, schema.names))
    table = sql.Identifier(options.table.schema, options.table.name)
    try:
        # The server checks rights when a query begins.
        connection.execute(sql.SQL("select {} from {} limit 0").format(names, table), prepare=False)
    except psycopg.Error as error:
        raise map_error(error, options.url) from error
    if options.where is not None:
        require_valid_condition(connection, schema, options.where)
    return schema


# Partitions of a partitioned table that a load leaves out, because no log has their changes.
_UNLOGGED = """
select l.oid::int8, n.nspname::text, l.relname::text, coalesce(pg_relation_filenode(l.oid), 0)::int8,
       coalesce(pg_relation_size(l.oid), 0) / current_setting('block_size')::int8, coalesce(pg_table_size(l.oid), 0)
from pg_class c cross join lateral pg_partition_tree(c.oid) t
join pg_class l on l.oid = t.relid join pg_namespace n on n.oid = l.relnamespace
where c.oid = %s and c.relkind = 'p' and t.isleaf and l.relkind <> 'p' and (l.relpersistence <> 'p' or l.relkind <> 'r')
order by l.oid
"""


def _leaves(connection: psycopg.Connection, schema: TableSchema) -> tuple[Leaf, ...]:
    """Return where the rows are now."""
    try:
        leaves = find_leaves(connection, schema)
        if [leaf.oid for leaf in leaves] == [schema.relation]:
            return leaves
        rows = connection.execute(_UNLOGGED, (schema.relation,), prepare=False).fetchall()
    except psycopg.Error as error:
        raise map_error(error) from error
    return leaves + tuple(
        Leaf(oid=oid, schema=namespace, name=name, file=file, pages=pages, bytes=size)
        for oid, namespace, name, file, pages, size in rows
    )


def _files(leaves: Iterable[Leaf]) -> set[tuple[int, int]]:
    return {(leaf.oid, leaf.file) for leaf in leaves}


def _plan(
    connection: psycopg.Connection, schema: TableSchema, options: ReadOptions
) -> tuple[tuple[Leaf, ...], list[Chunk]]:
    """Return where the rows are, and the chunks that hold them all."""
    leaves = _leaves(connection, schema)
    plan = plan_table(connection, options.table, None, ChunkKind.PLACE, options.chunk_bytes)
    chunks = list(plan.chunks)
    planned = {leaf.oid for leaf in plan.leaves}
    for leaf in leaves:
        if leaf.oid not in planned:
            chunks.append(Chunk(number=len(chunks), leaf=leaf, bytes=leaf.bytes))
    if _is_stored_view(connection, schema):
        # A materialised view cannot be locked, so one query reads it.
        chunks = [Chunk(number=0, leaf=replace(leaves[0], file=0), bytes=leaves[0].bytes)]
    return leaves, chunks


def _is_stored_view(connection: psycopg.Connection, schema: TableSchema) -> bool:
    row = connection.execute(
        "select relkind = 'm' from pg_class where oid = %s", (schema.relation,), prepare=False
    ).fetchone()
    return row is not None and bool(row[0])


def _split_chunks(chunks: Sequence[Chunk], count: int) -> list[tuple[Chunk, ...]]:
    """Divide the chunks into this many parts of about the same size, or fewer."""
    total = max(sum(chunk.bytes for chunk in chunks), 1)
    parts: dict[int, list[Chunk]] = {}
    offset = 0
    for chunk in chunks:
        parts.setdefault(min(offset * count // total, count - 1), []).append(chunk)
        offset += chunk.bytes
    return [tuple(part) for part in parts.values()]


# The table in Spark.


def _spark_schema(schema: TableSchema) -> StructType:
    return spark_schema(pa.schema(schema.row_fields()))


def _refuse_other(schema: TableSchema, requested: StructType) -> None:
    """Refuse to read into another schema than the table has."""
    own = [(field.name, field.dataType) for field in _spark_schema(schema)]
    if own != [(field.name, field.dataType) for field in requested]:
        raise ConfigError(
            "the table has other columns or types than the DataFrame",
            table=schema.table,
            hint=f"Leave out `.schema(…)`, or {RECREATE_HINT[0].lower()}{RECREATE_HINT[1:]}: the table may have been "
            "altered.",
        )


@contextmanager
def _read_errors(options: ReadOptions) -> Iterator[None]:
    """Raise errors with the hints of this read.

    Spark prints no more of an exception than its text and where it was raised.
    """
    try:
        yield
    except TailraceError as error:
        hint = as_option_error(error).hint
        if error.fields.get("sqlstate") == INSUFFICIENT_PRIVILEGE:
            hint = f"Grant it: GRANT SELECT ON {options.table} TO …; and USAGE on its schema."
        raise type(error)(error.message, hint=hint, **error.fields) from None
