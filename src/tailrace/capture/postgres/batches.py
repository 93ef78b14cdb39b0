"""Rows of a window to one table's batch: every value is found, then every column converted in one pass.

A value the server left out is *absent*, not null: it is taken from the old row where the server sent that,
else named in `_unchanged`. A value that its column's type cannot hold is null in the column and stands as
text in `_unfit`; it is never only null.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.capture.postgres import values
from tailrace.capture.postgres.values import ABSENT, NULL, Bytes, Cells, Ints, Word, u32
from tailrace.kernels import kernel
from tailrace.model import change
from tailrace.model.batch import ChangeBatch
from tailrace.model.change import OPERATION_NAMES, Operation
from tailrace.model.schema import Column, TableSchema

_TRUNCATE = Operation.TRUNCATE.code
MOVED, FULL_BEFORE = 1, 2
"""What `Rows.how` can say of a row: its key changed; its whole old row was sent."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Where each change of a window lies, one entry a row, and what is known of the transactions."""

    slot: npt.NDArray[np.int32]
    op: npt.NDArray[np.int32]
    how: npt.NDArray[np.int32]
    tx: npt.NDArray[np.int32]
    index: npt.NDArray[np.int32]
    new: Ints
    old: Ints
    tx_end: npt.NDArray[np.uint64] | None
    """None in a part of a transaction: nobody knows yet."""
    tx_time: Ints
    tx_id: Ints


@kernel
def _cells(b: Bytes, first: Ints, second: Ints, columns: Word, at: Any, size: Any) -> None:
    """Every value of the rows: from the tuple at `first`, and what it leaves out from the one at `second`.

    `second` matters where the server sent the old row too: a large value that did not change stands only there.
    """
    for r in range(first.size):
        if first[r] < 0:
            for c in range(columns):
                size[c, r] = NULL
            continue
        i = first[r] + 2
        absent = 0
        for c in range(columns):
            kind = b[i]
            i += 1
            if kind == 116:
                n = u32(b, i)
                at[c, r] = i + 4
                size[c, r] = n
                i += 4 + n
            elif kind == 110:
                size[c, r] = NULL
            else:
                size[c, r] = ABSENT
                absent += 1
        if absent and second[r] >= 0:
            i = second[r] + 2
            for c in range(columns):
                kind = b[i]
                i += 1
                n = np.int64(0)
                if kind == 116:
                    n = u32(b, i)
                    i += 4
                    if size[c, r] == ABSENT:
                        at[c, r] = i
                        size[c, r] = n
                i += n


@kernel
def _absent(size: Any, rows: Any, columns: Any) -> Word:
    """The (row, column) pairs whose value was not sent, in row order; filled only as far as there is room."""
    found = 0
    for r in range(size.shape[1]):
        for c in range(size.shape[0]):
            if size[c, r] == ABSENT:
                if found < rows.size:
                    rows[found] = r
                    columns[found] = c
                found += 1
    return found


def _find_cells(b: Bytes, schema: TableSchema, first: Ints, second: Ints) -> tuple[list[Cells], Any]:
    columns, n = len(schema.columns), first.size
    at, size = np.zeros((columns, n), np.int64), np.empty((columns, n), np.int64)
    _cells(b, first, second, columns, at, size)
    return [Cells(b, at[c], size[c]) for c in range(columns)], size


def batch_of(b: Bytes, schema: TableSchema, rows: Rows, picked: Ints) -> ChangeBatch:
    new, old, how = rows.new[picked], rows.old[picked], rows.how[picked]
    main = np.where(new >= 0, new, old)
    cells, size = _find_cells(b, schema, main, np.where(new >= 0, old, -1))
    tx = rows.tx[picked]
    columns: dict[str, pa.Array] = {
        change.OP: OPERATION_NAMES.take(pa.array(rows.op[picked])),
        change.SEQ: pa.array(picked),
        change.TX: pa.array(rows.tx_id[tx]),
        change.TX_INDEX: pa.array(rows.index[picked]),
        change.COMMITTED_AT: pa.array(rows.tx_time[tx]).view(pa.timestamp("us", "UTC")),
    }
    if rows.tx_end is not None:
        columns[change.POSITION] = values.format_positions(rows.tx_end[tx])
    own, unfit = typed_columns(schema, cells)
    columns |= _optional(b, schema, size, old, how, unfit)
    if unfit:
        columns[change.UNFIT] = _unfit_column(unfit, len(picked))
    columns |= own
    fields = schema.change_schema()
    data = pa.RecordBatch.from_arrays(
        [columns[name] for name in fields.names if name in columns],
        schema=pa.schema([field for field in fields if field.name in columns]),
    )
    return ChangeBatch(
        schema=schema,
        data=data,
        moves=int(np.count_nonzero(how & MOVED)),
        truncates=int(np.count_nonzero(rows.op[picked] == _TRUNCATE)),
        unfit=sum(len(item.cells) for item in unfit),
    )


@dataclass(frozen=True)
class Unfit:
    """Cells of one column whose text its type cannot hold, and the rows they stand in."""

    name: str
    rows: Ints
    cells: Cells


def typed_columns(schema: TableSchema, cells: list[Cells]) -> tuple[dict[str, pa.Array], list[Unfit]]:
    """The table's own columns under their stored names, and what did not fit."""
    own: dict[str, pa.Array] = {}
    unfit: list[Unfit] = []
    for column, cell in zip(schema.columns, cells, strict=True):
        own[change.stored_name(column.name)] = _typed(cell, column, column.name, unfit)
    return own, unfit


def _typed(cells: Cells, column: Column, name: str, unfit: list[Unfit]) -> pa.Array:
    converted = values.typed(cells, column.type)
    if converted.unfit.size:
        rows = converted.unfit
        unfit.append(Unfit(name, rows, Cells(cells.buffer, cells.at[rows], cells.size[rows])))
    return converted.column


def _unfit_column(unfit: list[Unfit], rows: int) -> pa.Array:
    """`_unfit`: the exact text of what a column's type cannot hold. Rare, so plain Python."""
    found: dict[int, list[dict[str, str]]] = {}
    for item in unfit:
        texts = values.text_column(item.cells).cast(pa.binary()).to_pylist()
        for row, raw in zip(item.rows.tolist(), texts, strict=True):
            # A database without an encoding (SQL_ASCII) sends whatever it was given.
            text = raw.decode(errors="backslashreplace")
            found.setdefault(row, []).append({"column": item.name, "text": text})
    return pa.array([found.get(row) for row in range(rows)], change.UNFIT_TYPE)


def _optional(
    b: Bytes, schema: TableSchema, size: Any, old: Ints, how: Any, unfit: list[Unfit]
) -> dict[str, pa.Array]:
    """The columns that most batches do not need; absent when null throughout."""
    found: dict[str, pa.Array] = {}
    none = np.empty(0, np.int32)
    count = _absent(size, none, none)
    if count:
        rows, which = np.empty(count, np.int32), np.empty(count, np.int32)
        _absent(size, rows, which)
        found[change.UNCHANGED] = _names_per_row(schema, rows, which, old.size)
    full = how & FULL_BEFORE != 0
    if full.any():
        found[change.BEFORE] = _old(b, schema, np.where(full, old, -1), schema.names, change.BEFORE, unfit)
    gone = how & MOVED != 0
    if gone.any():
        found[change.MOVED_FROM] = _old(
            b, schema, np.where(gone, old, -1), schema.key, change.MOVED_FROM, unfit
        )
    return found


def _names_per_row(schema: TableSchema, rows: Any, which: Any, n: int) -> pa.Array:
    counts = np.bincount(rows, minlength=n)
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])
    names = pa.array(schema.names, pa.string()).take(pa.array(which))
    return pa.ListArray.from_arrays(pa.array(offsets), names, mask=pa.array(counts == 0))


def _old(
    b: Bytes, schema: TableSchema, tuples: Ints, names: Sequence[str], into: str, unfit: list[Unfit]
) -> pa.Array:
    """The old tuple as a struct of the named columns; null where there is none.

    What does not fit is noted under the struct's name and the column's, e.g. `_before.price`.
    """
    cells, _ = _find_cells(b, schema, tuples, np.full(tuples.size, -1, np.int64))
    picked = [
        (cell, column) for cell, column in zip(cells, schema.columns, strict=True) if column.name in names
    ]
    return pa.StructArray.from_arrays(
        [_typed(cell, column, f"{into}.{column.name}", unfit) for cell, column in picked],
        fields=[pa.field(change.stored_name(column.name), column.type) for _, column in picked],
        mask=pa.array(tuples < 0),
    )
