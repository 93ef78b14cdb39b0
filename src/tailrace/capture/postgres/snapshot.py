"""Reading tables as of one position: a temporary slot's exported snapshot, and COPY.

The slot is made after the table is in the publication, waits for every open writer, and names the point: what
committed before is in the snapshot, what commits after is in the stream, nothing is in both. It holds back
the server's clean-up while it is open, so it has a time limit.

COPY's text form is the very text that the stream carries, so both pass through the same kernels and a value
cannot differ by the way it came.
"""

from __future__ import annotations

import select
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import pq, sql
from psycopg.pq.abc import PGconn, PGresult

from tailrace.capture.postgres import wire
from tailrace.capture.postgres.batches import Unfit, typed_columns
from tailrace.capture.postgres.catalogue import Catalogue
from tailrace.capture.postgres.connect import (
    command,
    connect,
    connect_replication,
    explain,
    explain_text,
    text_as_it_is,
)
from tailrace.capture.postgres.text import Text, text_of
from tailrace.capture.postgres.values import NULL, Bytes, Cells, Ints, Word
from tailrace.errors import SourceError, SourceUnreachable, TailraceError, ValueUnfit
from tailrace.kernels import kernel
from tailrace.model import change
from tailrace.model.position import Lsn
from tailrace.model.schema import Column, TableId, TableSchema

BATCH_BYTES = 4 << 20
OPEN_SECONDS_MAX = 3600.0
_CTID = Column(name="ctid", source_type="tid", type=pa.string())
"""Where a row is in its table. No table has a column of its own of that name."""
_WAIT_SECONDS = 5.0


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

    def _query(self, schema: TableSchema) -> sql.Composed:
        """The rows of the table that the stream speaks of."""
        columns = sql.SQL(", ").join(sql.Identifier(name) for name in schema.names)
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
        query = sql.SQL("select {} from {}").format(columns, source)
        return sql.SQL(" where ").join([query, sql.SQL(" and ").join(conditions)]) if conditions else query

    def rows(self, schema: TableSchema) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._copied(schema)
        except ValueUnfit:
            # Read again to say where the row is: asking for its place from the start would cost every load.
            placed = replace(schema, columns=(_CTID, *schema.columns))
            again = SnapshotReader(self._url, self._name, self._publications, self._invalid_text_replaced)
            with suppress(SourceError), again:
                for _ in again._copied(placed):
                    pass
            raise

    def _copied(self, schema: TableSchema) -> Iterator[pa.RecordBatch]:
        text = sql.SQL("copy ({}) to stdout").format(self._query(schema)).as_bytes(self._connection)
        connection = self._connection.pgconn
        sent = text_of(connection, replaced=self._invalid_text_replaced)
        with text_as_it_is(connection):
            connection.send_query(text)
            _await_copy(connection)
            yield from batches_of(schema, _pieces(connection, self._deadline), sent)
            _finish(connection)


def batches_of(
    schema: TableSchema, pieces: Iterable[tuple[Bytes, int]], text: Text = Text.SOUND
) -> Iterator[pa.RecordBatch]:
    """COPY's text, in pieces of whole rows, as batches of the table's own columns."""
    fields = pa.schema(schema.row_fields())
    for buffer, size in pieces:
        yield _rows_of(schema, fields, buffer, size, text)


def _await_copy(connection: PGconn) -> None:
    connection.flush()
    result = connection.get_result()
    if result is None or result.status != pq.ExecStatus.COPY_OUT:
        raise _explained(result)


def _finish(connection: PGconn) -> None:
    """Hear the end of the COPY: an error there means that rows are missing."""
    while (result := connection.get_result()) is not None:
        if result.status != pq.ExecStatus.COMMAND_OK:
            raise _explained(result)


def _explained(result: PGresult | None) -> TailraceError:
    if result is None:
        return explain_text("the server ended the session")
    state = result.error_field(pq.DiagnosticField.SQLSTATE) or b""
    return explain_text(result.get_error_message(), state=state.decode())


def _pieces(connection: PGconn, deadline: float) -> Iterator[tuple[Bytes, int]]:
    """Whole rows in pieces of about BATCH_BYTES. A piece is valid until the next one is asked for."""
    source = wire.Wire(connection)
    buffer, state = np.empty(BATCH_BYTES * 2, np.uint8), np.zeros(wire.STATE_SIZE, np.int64)
    while True:
        why = source.drain_copy(buffer, state, BATCH_BYTES)
        if why == wire.FULL and not state[wire.BYTES]:
            buffer = np.empty(int(state[wire.PENDING_SIZE]) * 2, np.uint8)
            continue
        if why in (wire.FULL, wire.ENDED) and state[wire.BYTES]:
            yield buffer, int(state[wire.BYTES])
            state[wire.BYTES] = 0
        if why == wire.ENDED:
            return
        if why == wire.BROKEN:
            raise SourceUnreachable("the connection broke during a load", hint="The load is started again.")
        if time.monotonic() > deadline:
            raise SourceError(
                "a load took too long and was given up",
                seconds=OPEN_SECONDS_MAX,
                hint="It holds back the server's clean-up. Load at a quieter time.",
            )
        if why == wire.DRY:
            select.select([source.socket], [], [], _WAIT_SECONDS)


@kernel
def _copy_cells(b: Bytes, end: Word, columns: Word, at: Ints, size: Ints) -> Word:
    """Find the fields of COPY's text form and undo its escapes in place; the number of rows, -1 if malformed.

    `at` and `size` hold one entry a field, row by row. An escape only ever shrinks, so writing never
    overtakes reading.
    """
    i, w, field, cells = 0, 0, 0, 0
    start = 0
    null = False
    whole = True
    while i < end:
        c = b[i]
        i += 1
        whole = c == 10
        if c == 9 or c == 10:
            if cells >= at.size or (null and w > start):
                return -1
            at[cells] = start
            size[cells] = NULL if null else w - start
            cells += 1
            field += 1
            start, null = w, False
            if c == 10:
                if field != columns:
                    return -1
                field = 0
        elif c == 92 and i < end:
            c = b[i]
            i += 1
            if c == 78 and w == start and not null:
                null = True
                continue
            if c == 98:
                c = 8
            elif c == 102:
                c = 12
            elif c == 110:
                c = 10
            elif c == 114:
                c = 13
            elif c == 116:
                c = 9
            elif c == 118:
                c = 11
            b[w] = c
            w += 1
        else:
            b[w] = c
            w += 1
    if not whole:
        return -1
    return cells // columns


def _rows_of(schema: TableSchema, fields: pa.Schema, buffer: Bytes, size: int, text: Text) -> pa.RecordBatch:
    columns = len(schema.columns)
    # A field takes a byte at least: its end. A table without columns still has its line ends.
    at, sizes = np.empty(size, np.int64), np.empty(size, np.int64)
    rows = _copy_cells(buffer, size, max(columns, 1), at, sizes)
    if rows < 0:
        raise SourceError(
            "the server's copy cannot be read",
            table=schema.table,
            hint="Report it with the server's version.",
        )
    cells = [
        Cells(buffer, np.ascontiguousarray(at[c : rows * columns : columns]),
              np.ascontiguousarray(sizes[c : rows * columns : columns]))
        for c in range(columns)
    ]  # fmt: skip
    own, unfit = typed_columns(schema, cells, text)
    if unfit:
        raise _unfit(schema, own, unfit[0])
    if not columns:  # then nothing else would say how many rows there are
        return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))
    return pa.RecordBatch.from_arrays([own[change.stored_name(name)] for name in schema.names], schema=fields)


def _unfit(schema: TableSchema, own: dict[str, pa.Array], unfit: Unfit) -> ValueUnfit:
    column = next(column for column in schema.columns if column.name == unfit.name)
    place = {"ctid": own[_CTID.name][int(unfit.rows[0])].as_py()} if schema.columns[0] is _CTID else {}
    return ValueUnfit(
        "a value does not fit its column's type", table=schema.table, column=column.name, type=column.source_type,
        **place, hint=TEXT_HINT if pa.types.is_string(column.type) else UNFIT_HINT,
    )  # fmt: skip


UNFIT_HINT = (
    "Exclude the table, or give the column a type without a limit (text, or numeric without precision), "
    "then run again: the table is loaded anew."
)
TEXT_HINT = (
    "The value is not UTF-8, which a SQL_ASCII database does not check. Mend it at the source, or set "
    "`source.invalid_text: replace`, then run again: the table is loaded anew."
)
