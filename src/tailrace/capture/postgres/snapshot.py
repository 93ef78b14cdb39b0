"""Reading tables as of one position: a temporary slot's exported snapshot, and COPY.

The slot is made after the table is in the publication, waits for every open writer, and names the point: what
committed before is in the snapshot, what commits after is in the stream, nothing is in both. It holds back
the server's clean-up while it is open, so it has a time limit.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import psycopg
import pyarrow as pa
from psycopg import sql

from tailrace.capture.postgres.catalogue import Catalogue
from tailrace.capture.postgres.connect import command, connect, connect_replication, explain
from tailrace.capture.postgres.copy import CTID, copy_rows
from tailrace.errors import SourceError, SourceUnreachable, ValueUnfit
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId, TableSchema

OPEN_SECONDS_MAX = 3600.0


class ExactSnapshot:
    """One exported snapshot and the position it stands for. Use it in a `with` block."""

    point: Lsn
    name: str
    """What a reader in another process imports."""

    def __init__(self, url: str, publications: tuple[str, ...], *, invalid_text_replaced: bool = False) -> None:
        self._url = url
        self._publications = publications
        self._invalid_text_replaced = invalid_text_replaced

    def __enter__(self) -> ExactSnapshot:
        self._session = connect_replication(self._url)
        try:
            slot = f"tailrace_load_{uuid.uuid4().hex[:16]}"
            made = f"CREATE_REPLICATION_SLOT {slot} TEMPORARY LOGICAL pgoutput (SNAPSHOT 'export')"
            row = command(self._session, made)
        except BaseException:
            self._session.finish()
            raise
        self.point, self.name = Lsn.parse(row[1] or ""), row[2] or ""
        return self

    def __exit__(self, *_: object) -> None:
        self._session.finish()

    def reader(self) -> SnapshotReader:
        """A reader of this snapshot, here or, pickled, in another process."""
        return SnapshotReader(self._url, self.name, self._publications, self._invalid_text_replaced)


class SnapshotReader:
    """Reads what an exported snapshot sees. Plain data until it is entered, so it can be sent to a task."""

    def __init__(
        self, url: str, name: str, publications: tuple[str, ...], invalid_text_replaced: bool = False
    ) -> None:
        self._url = url
        self._name = name
        self._publications = publications
        self._invalid_text_replaced = invalid_text_replaced

    def __enter__(self) -> SnapshotReader:
        self._connection = connect(self._url)
        try:
            self._connection.execute("begin isolation level repeatable read read only")
            self._connection.execute(sql.SQL("set transaction snapshot {}").format(self._name))
        except psycopg.errors.UndefinedObject as error:
            self._connection.close()
            raise SourceUnreachable("the snapshot is gone", hint="The load is started again.") from error
        except psycopg.Error as error:
            self._connection.close()
            raise explain(error, self._url) from error
        self._deadline = time.monotonic() + OPEN_SECONDS_MAX
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def describe(self, table: TableId) -> TableSchema:
        return Catalogue(self._connection).describe(table, self._publications)

    def _partitions(self, schema: TableSchema) -> tuple[bool, list[int]]:
        """Whether the table is partitioned, and the partitions whose changes are never in the server's log."""
        query = """
          select c.relkind = 'p', array(
            select l.oid::int8 from pg_partition_tree(c.oid) t join pg_class l on l.oid = t.relid
            where t.isleaf and (l.relpersistence <> 'p' or l.relkind = 'f'))
          from pg_class c where c.oid = %s::oid
        """
        row = self._connection.execute(query, (schema.relation,)).fetchone()
        return (row[0], row[1]) if row else (False, [])

    def _from(self, schema: TableSchema) -> sql.Composed:
        """The rows of the table that the stream speaks of."""
        name = sql.Identifier(schema.table.schema, schema.table.name)
        partitioned, unlogged = self._partitions(schema)
        # The children of an inheritance parent are tables of their own; those of a partitioned one are not.
        source = name if partitioned else sql.SQL("only {}").format(name)
        conditions: list[sql.Composable] = []
        if picked := Catalogue(self._connection).row_filter(schema.table, self._publications):
            # The server's own text, every name in it qualified.
            conditions.append(sql.SQL(f"({picked})"))
        if unlogged:
            conditions.append(sql.SQL("tableoid <> all ({}::oid[])").format(unlogged))
        query = sql.SQL("from {}").format(source)
        return sql.SQL(" where ").join([query, sql.SQL(" and ").join(conditions)]) if conditions else query

    def rows(self, schema: TableSchema) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._copied(schema)
        except ValueUnfit:
            # Read again to say where the row is: asking for its place from the start would cost every load.
            placed = replace(schema, columns=(CTID, *schema.columns))
            again = SnapshotReader(self._url, self._name, self._publications, self._invalid_text_replaced)
            with suppress(SourceError), again:
                for _ in again._copied(placed):
                    pass
            raise

    def _copied(self, schema: TableSchema) -> Iterator[pa.RecordBatch]:
        return copy_rows(
            self._connection,
            schema,
            self._from(schema),
            deadline=self._deadline,
            invalid_text_replaced=self._invalid_text_replaced,
        )
