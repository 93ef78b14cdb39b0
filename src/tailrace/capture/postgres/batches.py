"""Rows of a window to a batch per table: every value is found, then every type converted in one pass.

What costs is not the row but the call, and a window may touch hundreds of tables. So the columns of all tables
that have one type are laid end to end and converted together, and each batch takes its slices of the result.

A value the server left out is *absent*, not null: it is taken from the old row where the server sent that,
else named in `_unchanged`. A value that its column's type cannot hold is null in the column and stands as
text in `_unfit`; it is never only null.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.capture.postgres import values
from tailrace.capture.postgres.invalid_text import TextHandling, check_text
from tailrace.capture.postgres.values import ABSENT, NULL, Bytes, Cells, Ints, u32
from tailrace.kernels import kernel
from tailrace.model import change
from tailrace.model.batch import ChangeBatch
from tailrace.model.change import OPERATION_NAMES, Operation
from tailrace.model.schema import Column, TableSchema

_TRUNCATE = Operation.TRUNCATE.code
_INSTANT = pa.timestamp("us", "UTC")
MOVED, FULL_BEFORE = 1, 2
"""What `Rows.how` can say of a row: its key changed; its whole old row was sent."""


@dataclass(frozen=True, kw_only=True)
class WindowRows:
    """Where each change of a window lies, one entry a row, and what is known of the transactions."""

    slot: npt.NDArray[np.int32]
    op: npt.NDArray[np.int32]
    flags: npt.NDArray[np.int32]
    tx: npt.NDArray[np.int32]
    index: npt.NDArray[np.int32]
    new: Ints
    old: Ints
    tx_end: npt.NDArray[np.uint64] | None
    """None in a part of a transaction: nobody knows yet."""
    tx_time: Ints
    tx_id: Ints


@kernel
def _cells(
    b: Bytes,
    first: Ints,
    second: Ints,
    begins: Ints,
    columns_at: Ints,
    places: Ints,
    at: Ints,
    size: Ints,
    absent: Ints,
) -> None:
    """Every value of the rows: from the tuple at `first`, and what it leaves out from the one at `second`.

    `second` matters where the server sent the old row too: a large value that did not change stands only there.
    Rows from `begins[k]` to `begins[k + 1]` are batch k's; its columns are those from `columns_at[k]` to
    `columns_at[k + 1]`, and `places` says where the cells of each column begin in `at` and `size`. `absent` counts
    each batch's values that were not sent at all.
    """
    for k in range(begins.size - 1):
        low, high = columns_at[k], columns_at[k + 1]
        for r in range(begins[k], begins[k + 1]):
            row = r - begins[k]
            if first[r] < 0:
                for c in range(low, high):
                    size[places[c] + row] = NULL
                continue
            i = first[r] + 2
            missing = 0
            for c in range(low, high):
                kind = b[i]
                i += 1
                if kind == 116:
                    n = u32(b, i)
                    at[places[c] + row] = i + 4
                    size[places[c] + row] = n
                    i += 4 + n
                elif kind == 110:
                    size[places[c] + row] = NULL
                else:
                    size[places[c] + row] = ABSENT
                    missing += 1
            if missing and second[r] >= 0:
                i = second[r] + 2
                for c in range(low, high):
                    kind = b[i]
                    i += 1
                    n = np.int64(0)
                    if kind == 116:
                        n = u32(b, i)
                        i += 4
                        if size[places[c] + row] == ABSENT:
                            at[places[c] + row] = i
                            size[places[c] + row] = n
                            missing -= 1
                    i += n
            absent[k] += missing


@kernel
def _absent(size: Any, rows: Any, columns: Any) -> None:
    """The (row, column) pairs whose value was not sent, in row order."""
    found = 0
    for r in range(size.shape[1]):
        for c in range(size.shape[0]):
            if size[c, r] == ABSENT:
                rows[found] = r
                columns[found] = c
                found += 1


class TableLayout:
    """A table's shape, with what every batch of it needs made ready."""

    def __init__(self, schema: TableSchema, kinds: dict[pa.DataType, int]) -> None:
        self.schema = schema
        self.kinds = np.array([kinds.setdefault(column.type, len(kinds)) for column in schema.columns], np.int64)
        """A number for each column's type, the same in all shapes of one decoder."""
        self.fields = schema.change_schema()
        self._fields: dict[tuple[str, ...], pa.Schema] = {}

    def fields_with(self, optional: tuple[str, ...], *, position: bool) -> pa.Schema:
        """The Arrow schema of a batch that has these optional columns, and `_position` or not."""
        key = (*optional, change.POSITION) if position else optional
        if key not in self._fields:
            left_out = {change.POSITION, *change.OPTIONAL} - set(key)
            self._fields[key] = pa.schema([field for field in self.fields if field.name not in left_out])
        return self._fields[key]


@dataclass(frozen=True)
class _CellLayout:
    """Where the cells of every column of every batch lie: columns of one type end to end."""

    begins: Ints
    columns_at: Ints
    places: Ints
    by_kind: Ints
    """The columns in the order they are laid out."""
    at: Ints
    size: Ints


def build_batches(
    b: Bytes,
    shapes: Sequence[TableLayout],
    types: Sequence[pa.DataType],
    rows: WindowRows,
    order: Ints,
    begins: Ints,
    text: TextHandling,
) -> list[ChangeBatch]:
    """A batch for each shape: of the rows that `order` names from `begins[k]` to `begins[k + 1]`."""
    new, old, how, op = rows.new[order], rows.old[order], rows.flags[order], rows.op[order]
    laid = _lay_out(shapes, begins)
    absent = np.zeros(len(shapes), np.int64)
    _cells(
        b,
        np.where(new >= 0, new, old),
        np.where(new >= 0, old, -1),
        laid.begins,
        laid.columns_at,
        laid.places,
        laid.at,
        laid.size,
        absent,
    )
    columns, unfit = _convert(b, shapes, types, laid, text)
    about = _about(rows, order, op)
    special = np.bitwise_or.reduceat(how, begins[:-1]) != 0
    truncates = np.add.reduceat((op == _TRUNCATE).astype(np.int64), begins[:-1])
    found = []
    for k, shape in enumerate(shapes):
        low, n = int(begins[k]), int(begins[k + 1] - begins[k])
        optional, moves, unfits = {}, 0, 0
        if absent[k] or special[k] or k in unfit:
            mine, piece = unfit.get(k, []), slice(low, low + n)
            optional = _optional(b, shape.schema, laid, k, int(absent[k]), old[piece], how[piece], mine, text)
            moves, unfits = int(np.count_nonzero(how[piece] & MOVED)), sum(len(item.cells) for item in mine)
            if mine:
                optional[change.UNFIT] = unfit_column(mine, n)
        names = tuple(name for name in change.OPTIONAL if name in optional)
        arrays = [column.slice(low, n) for column in about]
        arrays += [optional[name] for name in names]
        arrays += columns[laid.columns_at[k] : laid.columns_at[k + 1]]
        fields = shape.fields_with(names, position=rows.tx_end is not None)
        found.append(
            ChangeBatch(
                schema=shape.schema,
                data=pa.RecordBatch.from_arrays(arrays, schema=fields),
                moves=moves,
                truncates=int(truncates[k]),
                unfit=unfits,
                ends=(int(order[low]), int(order[low + n - 1])),
            )
        )
    return found


def build_message_batch(b: Bytes, shape: TableLayout, rows: WindowRows, order: Ints, text: TextHandling) -> ChangeBatch:
    """The batch of the `message` stream: of such a row `new` is where its prefix begins, and `old` its content."""
    text = TextHandling.REPLACED if text is TextHandling.REFUSED else text  # a prefix is no value of anybody's column
    prefix, content = rows.new[order], rows.old[order]
    sizes = b[content[:, None] + np.arange(-4, 0)].view(">u4").astype(np.int64).reshape(-1)
    arrays = [
        *_about(rows, order, rows.op[order]),
        check_text(values.convert_cells(Cells(b, prefix, content - prefix - 5), pa.string()), text).column,
        values.text_column(Cells(b, content, sizes)).cast(pa.binary()),
        pa.array(b[prefix - 9] & 1 == 1),
    ]
    fields = shape.fields_with((), position=rows.tx_end is not None)
    return ChangeBatch(schema=shape.schema, data=pa.RecordBatch.from_arrays(arrays, schema=fields))


def _about(rows: WindowRows, order: Ints, op: npt.NDArray[np.int32]) -> list[pa.Array]:
    """The columns that every change has, for all rows at once."""
    tx = rows.tx[order]
    found = [OPERATION_NAMES.take(pa.array(op)), pa.array(order)]
    if rows.tx_end is not None:
        found.append(values.format_positions(rows.tx_end[tx]))
    found += [pa.array(rows.tx_id[tx]), pa.array(rows.index[order])]
    return [*found, pa.array(rows.tx_time[tx]).view(_INSTANT)]


def _lay_out(shapes: Sequence[TableLayout], begins: Ints) -> _CellLayout:
    counts = np.array([shape.kinds.size for shape in shapes], np.int64)
    kinds = np.concatenate([shape.kinds for shape in shapes])
    lengths = np.repeat(np.diff(begins), counts)
    by_kind = np.argsort(kinds, kind="stable")
    ends = np.cumsum(lengths[by_kind])
    places = np.empty_like(ends)
    places[by_kind] = ends - lengths[by_kind]
    total = int(ends[-1]) if ends.size else 0
    columns_at = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    return _CellLayout(begins, columns_at, places, by_kind, np.zeros(total, np.int64), np.empty(total, np.int64))


def _convert(
    b: Bytes, shapes: Sequence[TableLayout], types: Sequence[pa.DataType], laid: _CellLayout, text: TextHandling
) -> tuple[list[pa.Array], dict[int, list[UnfitCells]]]:
    """Every column of every batch, and by batch what did not fit."""
    kinds = np.concatenate([shape.kinds for shape in shapes])[laid.by_kind]
    lengths = np.repeat(np.diff(laid.begins), np.diff(laid.columns_at)).tolist()
    columns: list[pa.Array] = [None] * kinds.size
    unfit: dict[int, list[UnfitCells]] = {}
    cuts = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), kinds.size] if kinds.size else []
    by_kind, places = laid.by_kind.tolist(), laid.places.tolist()
    for low, high in itertools.pairwise(cuts):
        begin, last = places[by_kind[low]], by_kind[high - 1]
        end = places[last] + lengths[last]
        cells = Cells(b, laid.at[begin:end], laid.size[begin:end])
        converted = check_text(values.convert_cells(cells, types[kinds[low]]), text)
        for column in by_kind[low:high]:
            columns[column] = converted.column.slice(places[column] - begin, lengths[column])
        if converted.unfit.size:
            _share_out(b, converted.unfit + begin, shapes, laid, by_kind[low:high], unfit)
    return columns, unfit


def _share_out(
    b: Bytes,
    cells: Ints,
    shapes: Sequence[TableLayout],
    laid: _CellLayout,
    columns: list[int],
    unfit: dict[int, list[UnfitCells]],
) -> None:
    """Cells that did not fit, given to the batches and columns they belong to."""
    starts = laid.places[columns]
    owners = np.searchsorted(starts, cells, side="right") - 1
    for owner in np.unique(owners).tolist():
        column, mine = columns[owner], cells[owners == owner]
        k = int(np.searchsorted(laid.columns_at, column, side="right")) - 1
        name = shapes[k].schema.columns[column - int(laid.columns_at[k])].name
        where = Cells(b, laid.at[mine], laid.size[mine])
        unfit.setdefault(k, []).append(UnfitCells(name, mine - starts[owner], where))


def _find_cells(b: Bytes, schema: TableSchema, tuples: Ints) -> list[Cells]:
    """The values of whole tuples of one table, column by column; nulls where there is no tuple."""
    columns, n = len(schema.columns), tuples.size
    at, size = np.zeros(columns * n, np.int64), np.empty(columns * n, np.int64)
    none, places = np.full(n, -1, np.int64), np.arange(columns, dtype=np.int64) * n
    _cells(b, tuples, none, np.array([0, n]), np.array([0, columns]), places, at, size, np.zeros(1, np.int64))
    return [Cells(b, at[c * n : (c + 1) * n], size[c * n : (c + 1) * n]) for c in range(columns)]


@dataclass(frozen=True)
class UnfitCells:
    """Cells of one column whose text its type cannot hold, and the rows they stand in."""

    name: str
    rows: Ints
    cells: Cells


def convert_noting_unfit(
    cells: Cells, column: Column, name: str, unfit: list[UnfitCells], text: TextHandling
) -> pa.Array:
    """The cells as a column, null where they do not fit; those are noted."""
    converted = check_text(values.convert_cells(cells, column.type), text)
    if converted.unfit.size:
        rows = converted.unfit
        unfit.append(UnfitCells(name, rows, Cells(cells.buffer, cells.at[rows], cells.size[rows])))
    return converted.column


def unfit_column(unfit: list[UnfitCells], rows: int) -> pa.Array:
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
    b: Bytes,
    schema: TableSchema,
    laid: _CellLayout,
    k: int,
    absent: int,
    old: Ints,
    how: Any,
    unfit: list[UnfitCells],
    text: TextHandling,
) -> dict[str, pa.Array]:
    """The columns that most batches do not need; absent when null throughout."""
    found: dict[str, pa.Array] = {}
    if absent:
        places = laid.places[laid.columns_at[k] : laid.columns_at[k + 1]]
        size = np.stack([laid.size[place : place + old.size] for place in places])
        rows, which = np.empty(absent, np.int32), np.empty(absent, np.int32)
        _absent(size, rows, which)
        found[change.UNCHANGED] = _names_per_row(schema, rows, which, old.size)
    full = how & FULL_BEFORE != 0
    if full.any():
        tuples = np.where(full, old, -1)
        found[change.BEFORE] = _old(b, schema, tuples, schema.names, change.BEFORE, unfit, text)
    gone = how & MOVED != 0
    if gone.any():
        tuples = np.where(gone, old, -1)
        found[change.MOVED_FROM] = _old(b, schema, tuples, schema.key, change.MOVED_FROM, unfit, text)
    return found


def _names_per_row(schema: TableSchema, rows: Any, which: Any, n: int) -> pa.Array:
    counts = np.bincount(rows, minlength=n)
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])
    names = pa.array(schema.names, pa.string()).take(pa.array(which))
    return pa.ListArray.from_arrays(pa.array(offsets), names, mask=pa.array(counts == 0))


def _old(
    b: Bytes,
    schema: TableSchema,
    tuples: Ints,
    names: Sequence[str],
    into: str,
    unfit: list[UnfitCells],
    text: TextHandling,
) -> pa.Array:
    """The old tuple as a struct of the named columns; null where there is none.

    What does not fit is noted under the struct's name and the column's, e.g. `_before.price`.
    """
    cells = _find_cells(b, schema, tuples)
    picked = [(cell, column) for cell, column in zip(cells, schema.columns, strict=True) if column.name in names]
    return pa.StructArray.from_arrays(
        [convert_noting_unfit(cell, column, f"{into}.{column.name}", unfit, text) for cell, column in picked],
        fields=[pa.field(change.stored_name(column.name), column.type) for _, column in picked],
        mask=pa.array(tuples < 0),
    )
