"""Reads a query over a table's own columns with COPY, as Arrow batches.

The server is asked first for the types of the query's columns, with domains replaced by their base types. A type that
`copy_binary` has a kernel for is sent in binary, which costs the server least. Any other is sent as the exact text that
its output function prints, as in the stream.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import pq, sql
from psycopg.pq.abc import PGconn, PGresult

from tailrace.capture.postgres import wire
from tailrace.capture.postgres.connect import map_error, map_error_text, unchecked_text
from tailrace.capture.postgres.copy_binary import PRINTED, BinaryRows, binary_kind
from tailrace.capture.postgres.invalid_text import text_handling_of
from tailrace.capture.postgres.values import Bytes, Ints
from tailrace.errors import SourceSlow, SourceUnreachable, TailraceError
from tailrace.model.schema import TableSchema

BATCH_BYTES = 4 << 20
_WAIT_SECONDS = 5.0
_NAP_SECONDS = 0.001
"""Pause while rows arrive. To be woken for every few of them costs both sides more than the rows."""

# A cast that is a function need not return what the type prints: `inet` gets its mask, `char(n)` loses its padding.
_CASTS = """
select castsource::int8 from pg_cast
where casttarget = 'text'::regtype and castmethod <> 'i' and castsource = any(%s::oid[])
"""
# Tested by the number of nulls, because a row of nulls `is null` and prints as `(,)`.
_FORMATTED = "case num_nulls({0}) when 0 then format('%s', {0}) end"


def copy_rows(
    connection: psycopg.Connection,
    schema: TableSchema,
    source: sql.Composable,
    *,
    deadline: float,
    invalid_text_replaced: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Yield the table's columns in bounded batches, for the rows that `source` names (`from … where …`).

    Stops with an error at the deadline (of the monotonic clock). The connection must be in a transaction.
    """
    text = text_handling_of(connection.pgconn, replaced=invalid_text_replaced)
    kinds, columns = selected(connection, schema, source)
    with _copying(connection, columns, source):
        yield from BinaryRows(schema, kinds, text).batches(_pieces(connection.pgconn, deadline))


def copy_rows_marking_unfit(
    connection: psycopg.Connection,
    schema: TableSchema,
    source: sql.Composable,
    *,
    deadline: float,
    invalid_text_replaced: bool = False,
) -> Iterator[tuple[pa.RecordBatch, pa.Array]]:
    """Yield the rows as `copy_rows` does, and for each batch the `_unfit` column.

    A value that its column's type cannot hold is null in the batch, and its text is in `_unfit`. Costs more: every
    value is sent as text.
    """
    text = text_handling_of(connection.pgconn, replaced=invalid_text_replaced)
    kinds, columns = selected(connection, schema, source, printed=True)
    with _copying(connection, columns, source):
        yield from BinaryRows(schema, kinds, text).marked(_pieces(connection.pgconn, deadline))


@contextmanager
def _copying(connection: psycopg.Connection, columns: sql.Composed, source: sql.Composable) -> Iterator[None]:
    session = connection.pgconn
    query = sql.SQL("copy (select {} {}) to stdout (format binary)").format(columns, source)
    with unchecked_text(session):
        session.send_query(query.as_bytes(connection))
        _await_copy(session)
        yield


def selected(
    connection: psycopg.Connection, schema: TableSchema, source: sql.Composable, *, printed: bool = False
) -> tuple[list[int], sql.Composed]:
    """Return how each column is sent, and the select list for that. With `printed` all are sent as text.

    The connection must be in a transaction: its locks keep the types as they are.
    """
    in_transaction = connection.pgconn.transaction_status == pq.TransactionStatus.INTRANS
    assert in_transaction, "types may change before the rows are read"
    names = [sql.Identifier(name) for name in schema.names]
    query = sql.SQL("select {} {}").format(sql.SQL(", ").join(names), source)
    types = _types(connection.pgconn, query.as_bytes(connection))
    found_kinds = [binary_kind(*of, column.type) for of, column in zip(types, schema.columns, strict=True)]
    kinds = [PRINTED] * len(found_kinds) if printed else found_kinds
    texts = {number for (number, _), kind in zip(types, kinds, strict=True) if kind == PRINTED}
    try:
        cast_rows = connection.execute(_CASTS, (list(texts),), prepare=False).fetchall() if texts else []
    except psycopg.Error as error:
        raise map_error(error) from error
    cast = {number for (number,) in cast_rows}
    plain, text, formatted = sql.SQL("{}"), sql.SQL("{}::text"), sql.SQL(_FORMATTED)
    parts = [
        (plain if kind != PRINTED else formatted if number in cast else text).format(name)
        for name, kind, (number, _) in zip(names, kinds, types, strict=True)
    ]
    return kinds, sql.SQL(", ").join(parts)


def _types(session: PGconn, query: bytes) -> list[tuple[int, int]]:
    """Return the numbers and modifiers of the types of the query's columns, without running it."""
    result = session.prepare(b"", query)
    if result.status == pq.ExecStatus.COMMAND_OK:
        result = session.describe_prepared(b"")
    if result.status != pq.ExecStatus.COMMAND_OK:
        raise _explained(result)
    return [(result.ftype(column), result.fmod(column)) for column in range(result.nfields)]


def _await_copy(connection: PGconn) -> None:
    connection.flush()
    result = connection.get_result()
    if result is None or result.status != pq.ExecStatus.COPY_OUT:
        raise _explained(result)


def _finish(connection: PGconn) -> None:
    """Read the end of the COPY: an error there means that rows are missing."""
    while (result := connection.get_result()) is not None:
        if result.status != pq.ExecStatus.COMMAND_OK:
            raise _explained(result)


def _explained(result: PGresult | None) -> TailraceError:
    if result is None:
        return map_error_text("the server ended the session")
    state = result.error_field(pq.DiagnosticField.SQLSTATE) or b""
    return map_error_text(result.get_error_message(), state=state.decode())


def _pieces(connection: PGconn, deadline: float) -> Iterator[tuple[Bytes, int]]:
    """Yield whole rows in pieces of about BATCH_BYTES. A piece is valid until the next one is requested.

    After the last piece, the server has confirmed that there are no more.
    """
    source = wire.Wire(connection)
    state = np.zeros(wire.STATE_SIZE, np.int64)
    try:
        yield from _drained(source, state, deadline)
    finally:
        source.release_pending(state)
    _finish(connection)


def _drained(source: wire.Wire, state: Ints, deadline: float) -> Iterator[tuple[Bytes, int]]:
    buffer = np.empty(BATCH_BYTES * 2, np.uint8)
    while True:
        before = int(state[wire.BYTES])
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
            raise SourceUnreachable("the connection broke during a load", hint="Nothing to do: the load is retried.")
        if time.monotonic() > deadline:
            raise SourceSlow(
                "the read took too long and was stopped",
                hint="It is retried. If it happens again, raise `load.chunk_timeout`, or load at a quieter time.",
            )
        if why == wire.DRY and state[wire.BYTES] > before:
            time.sleep(_NAP_SECONDS)
        elif why == wire.DRY:
            select.select([source.socket], [], [], _WAIT_SECONDS)
