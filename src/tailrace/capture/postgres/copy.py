"""COPY's rows as Arrow batches, of any query over a table's own columns.

COPY's text form is the very text that the stream carries, so both pass through the same kernels and a value
cannot differ by the way it came.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterable, Iterator

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import pq, sql
from psycopg.pq.abc import PGconn, PGresult

from tailrace.capture.postgres import wire
from tailrace.capture.postgres.batches import Unfit, typed_columns
from tailrace.capture.postgres.connect import explain_text, text_as_it_is
from tailrace.capture.postgres.text import Text, text_of
from tailrace.capture.postgres.values import NULL, Bytes, Cells, Ints, Word
from tailrace.errors import SourceError, SourceUnreachable, TailraceError, ValueUnfit
from tailrace.kernels import kernel
from tailrace.model import change
from tailrace.model.schema import Column, TableSchema

BATCH_BYTES = 4 << 20
CTID = Column(name="ctid", source_type="tid", type=pa.string())
"""Where a row is in its table. No table has a column of its own of that name."""
_WAIT_SECONDS = 5.0


def copy_rows(
    connection: psycopg.Connection,
    schema: TableSchema,
    source: sql.Composable,
    *,
    deadline: float,
    invalid_text_replaced: bool = False,
) -> Iterator[pa.RecordBatch]:
    """The table's columns of the rows that `source` names (`from … where …`), in bounded batches.

    Gives up at the deadline (of the monotonic clock).
    """
    columns = sql.SQL(", ").join(sql.Identifier(name) for name in schema.names)
    text = sql.SQL("copy (select {} {}) to stdout").format(columns, source).as_bytes(connection)
    session = connection.pgconn
    sent = text_of(session, replaced=invalid_text_replaced)
    with text_as_it_is(session):
        session.send_query(text)
        _await_copy(session)
        yield from batches_of(schema, _pieces(session, deadline), sent)
        _finish(session)


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
    place = {"ctid": own[CTID.name][int(unfit.rows[0])].as_py()} if schema.columns[0] is CTID else {}
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
