"""Turns the rows of a window into one batch per table.

First every value is found, then each type is converted in one pass. The cost is in the calls, not in the rows, and a
window may touch hundreds of tables. So the columns of all tables that have one type are placed end to end and converted
together. Each batch takes its slices of the result.

An unsent value (`ABSENT`) is not null. It is taken from the old row where the server sent that, else named in
`_unchanged`. A value that its column's type cannot hold is null in the column, and its text is in `_unfit`; it is never
only null.
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
"""Flags in `WindowRows.flags`: the row's key changed; its whole old row was sent."""


@dataclass(frozen=True, kw_only=True)
class WindowRows:
    """The offsets of each change of a window, one entry per row, and its transactions."""

    slot: npt.NDArray[np.int32]
    op: npt.NDArray[np.int32]
    flags: npt.NDArray[np.int32]
    tx: npt.NDArray[np.int32]
    index: npt.NDArray[np.int32]
    new: Ints
    old: Ints
    tx_end: npt.NDArray[np.uint64] | None
    """None in a part of a transaction, whose end is not known yet."""
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
    """Find every value of the rows.

    Values are in the tuple at `first`; unsent ones may be in the tuple at `second`.

    `second` matters where the server sent the old row too: a large value that did not change is only there.

    Rows from `begins[k]` to `begins[k + 1]` are batch k's; its columns are those from `columns_at[k]` to `columns_at[k
    + 1]`. `places` has the index in `at` and `size` where the cells of each column begin. `absent` counts each batch's
    values that were not sent at all.
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
    """List the (row, column) pairs whose value was not sent, in row order."""
    found = 0
    for r in range(size.shape[1]):
        for c in range(size.shape[0]):
            if size[c, r] == ABSENT:
                rows[found] = r
                columns[found] = c
                found += 1


class TableLayout:
    """A table's schema, with what every batch of it needs prepared."""

    def __init__(self, schema: TableSchema, kinds: dict[pa.DataType, int]) -> None:
        self.schema = schema
        self.kinds = np.array([kinds.setdefault(column.type, len(kinds)) for column in schema.columns], np.int64)
        """A number for each column's type, the same in all schemas of one decoder."""
        self.fields = schema.change_schema()
        self._fields: dict[tuple[str, ...], pa.Schema] = {}

    def fields_with(self, optional: tuple[str, ...], *, position: bool) -> pa.Schema:
        """Return the Arrow schema of a batch with these optional columns."""
        key = (*optional, change.POSITION) if position else optional
        if key not in self._fields:
            left_out = {change.POSITION, *change.OPTIONAL} - set(key)
            self._fields[key] = pa.schema([field for field in self.fields if field.name not in left_out])
        return self._fields[key]


@dataclass(frozen=True)
class _CellLayout:
    """The index of every column's cells in every batch. Columns of one type are end to end."""

    begins: Ints
    columns_at: Ints
    places: Ints
    by_kind: Ints
    """The columns in the order of their cells."""
    at: Ints
    size: Ints


def build_batches(
    b: Bytes,
    layouts: Sequence[TableLayout],
    types: Sequence[pa.DataType],
    rows: WindowRows,
    order: Ints,
    begins: Ints,
    text: TextHandling,
) -> list[ChangeBatch]:
    """Return a batch for each schema. Batch k has the rows in `order` from `begins[k]` to `begins[k + 1]`."""
    new, old, how, op = rows.new[order], rows.old[order], rows.flags[order], rows.op[order]
    cells = _lay_out(layouts, begins)
    absent = np.zeros(len(layouts), np.int64)
    _cells(
        b,
        np.where(new >= 0, new, old),
        np.where(new >= 0, old, -1),
        cells.begins,
        cells.columns_at,
        cells.places,
        cells.at,
        cells.size,
        absent,
    )
    columns, unfit = _convert(b, layouts, types, cells, text)
    about = _about(rows, order, op)
    special = np.bitwise_or.reduceat(how, begins[:-1]) != 0
    truncates = np.add.reduceat((op == _TRUNCATE).astype(np.int64), begins[:-1])
    batches = []
    for k, layout in enumerate(layouts):
        low, n = int(begins[k]), int(begins[k + 1] - begins[k])
        optional, moves, unfits = {}, 0, 0
        if absent[k] or special[k] or k in unfit:
            unfit_cells, rows_of_batch = unfit.get(k, []), slice(low, low + n)
            optional = _optional(
                b, layout.schema, cells, k, int(absent[k]), old[rows_of_batch], how[rows_of_batch], unfit_cells, text
            )
            moves, unfits = (
                int(np.count_nonzero(how[rows_of_batch] & MOVED)),
                sum(len(item.cells) for item in unfit_cells),
            )
            if unfit_cells:
                optional[change.UNFIT] = unfit_column(unfit_cells, n)
        names = tuple(name for name in change.OPTIONAL if name in optional)
        arrays = [column.slice(low, n) for column in about]
        arrays += [optional[name] for name in names]
        arrays += columns[cells.columns_at[k] : cells.columns_at[k + 1]]
        fields = layout.fields_with(names, position=rows.tx_end is not None)
        batches.append(
            ChangeBatch(
                schema=layout.schema,
                data=pa.RecordBatch.from_arrays(arrays, schema=fields),
                moves=moves,
                truncates=int(truncates[k]),
                unfit=unfits,
                ends=(int(order[low]), int(order[low + n - 1])),
            )
        )
    return batches


def build_message_batch(
    b: Bytes, layout: TableLayout, rows: WindowRows, order: Ints, text: TextHandling
) -> ChangeBatch:
    """Return the batch of the `message` stream.

    For such a row `new` is the offset of the prefix, and `old` that of the content.
    """
    text = TextHandling.REPLACED if text is TextHandling.REFUSED else text  # a prefix is not a value of a table
    prefix, content = rows.new[order], rows.old[order]
    sizes = b[content[:, None] + np.arange(-4, 0)].view(">u4").astype(np.int64).reshape(-1)
    arrays = [
        *_about(rows, order, rows.op[order]),
        check_text(values.convert_cells(Cells(b, prefix, content - prefix - 5), pa.string()), text).column,
        values.text_column(Cells(b, content, sizes)).cast(pa.binary()),
        pa.array(b[prefix - 9] & 1 == 1),
    ]
    fields = layout.fields_with((), position=rows.tx_end is not None)
    return ChangeBatch(schema=layout.schema, data=pa.RecordBatch.from_arrays(arrays, schema=fields))


def _about(rows: WindowRows, order: Ints, op: npt.NDArray[np.int32]) -> list[pa.Array]:
    """Return the metadata columns of every change, for all rows at once."""
    tx = rows.tx[order]
    metadata = [OPERATION_NAMES.take(pa.array(op)), pa.array(order)]
    if rows.tx_end is not None:
        metadata.append(values.format_positions(rows.tx_end[tx]))
    metadata += [pa.array(rows.tx_id[tx]), pa.array(rows.index[order])]
    return [*metadata, pa.array(rows.tx_time[tx]).view(_INSTANT)]


def _lay_out(layouts: Sequence[TableLayout], begins: Ints) -> _CellLayout:
    counts = np.array([layout.kinds.size for layout in layouts], np.int64)
    kinds = np.concatenate([layout.kinds for layout in layouts])
    lengths = np.repeat(np.diff(begins), counts)
    by_kind = np.argsort(kinds, kind="stable")
    ends = np.cumsum(lengths[by_kind])
    places = np.empty_like(ends)
    places[by_kind] = ends - lengths[by_kind]
    total = int(ends[-1]) if ends.size else 0
    columns_at = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    return _CellLayout(begins, columns_at, places, by_kind, np.zeros(total, np.int64), np.empty(total, np.int64))


def _convert(
    b: Bytes, layouts: Sequence[TableLayout], types: Sequence[pa.DataType], cell_layout: _CellLayout, text: TextHandling
) -> tuple[list[pa.Array], dict[int, list[UnfitCells]]]:
    """Convert every column of every batch; return the columns, and by batch the unfit cells."""
    kinds = np.concatenate([layout.kinds for layout in layouts])[cell_layout.by_kind]
    lengths = np.repeat(np.diff(cell_layout.begins), np.diff(cell_layout.columns_at)).tolist()
    columns: list[pa.Array] = [None] * kinds.size
    unfit: dict[int, list[UnfitCells]] = {}
    cuts = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), kinds.size] if kinds.size else []
    by_kind, places = cell_layout.by_kind.tolist(), cell_layout.places.tolist()
    for low, high in itertools.pairwise(cuts):
        begin, last = places[by_kind[low]], by_kind[high - 1]
        end = places[last] + lengths[last]
        cells = Cells(b, cell_layout.at[begin:end], cell_layout.size[begin:end])
        converted = check_text(values.convert_cells(cells, types[kinds[low]]), text)
        for column in by_kind[low:high]:
            columns[column] = converted.column.slice(places[column] - begin, lengths[column])
        if converted.unfit.size:
            _share_out(b, converted.unfit + begin, layouts, cell_layout, by_kind[low:high], unfit)
    return columns, unfit


def _share_out(
    b: Bytes,
    cells: Ints,
    layouts: Sequence[TableLayout],
    cell_layout: _CellLayout,
    columns: list[int],
    unfit: dict[int, list[UnfitCells]],
) -> None:
    """Assign unfit cells to the batches and columns that they belong to."""
    starts = cell_layout.places[columns]
    owners = np.searchsorted(starts, cells, side="right") - 1
    for owner in np.unique(owners).tolist():
        column, mine = columns[owner], cells[owners == owner]
        k = int(np.searchsorted(cell_layout.columns_at, column, side="right")) - 1
        name = layouts[k].schema.columns[column - int(cell_layout.columns_at[k])].name
        where = Cells(b, cell_layout.at[mine], cell_layout.size[mine])
        unfit.setdefault(k, []).append(UnfitCells(name, mine - starts[owner], where))


def _find_cells(b: Bytes, schema: TableSchema, tuples: Ints) -> list[Cells]:
    """Return the values of whole tuples of one table, column by column. Nulls where there is no tuple."""
    columns, n = len(schema.columns), tuples.size
    at, size = np.zeros(columns * n, np.int64), np.empty(columns * n, np.int64)
    none, places = np.full(n, -1, np.int64), np.arange(columns, dtype=np.int64) * n
    _cells(b, tuples, none, np.array([0, n]), np.array([0, columns]), places, at, size, np.zeros(1, np.int64))
    return [Cells(b, at[c * n : (c + 1) * n], size[c * n : (c + 1) * n]) for c in range(columns)]


@dataclass(frozen=True)
class UnfitCells:
    """Cells of one column whose text its type cannot hold, and their rows."""

    name: str
    rows: Ints
    cells: Cells


def convert_noting_unfit(
    cells: Cells, column: Column, name: str, unfit: list[UnfitCells], text: TextHandling
) -> pa.Array:
    """Return the cells as a column, null where they do not fit. Add those to `unfit`."""
    converted = check_text(values.convert_cells(cells, column.type), text)
    if converted.unfit.size:
        rows = converted.unfit
        unfit.append(UnfitCells(name, rows, Cells(cells.buffer, cells.at[rows], cells.size[rows])))
    return converted.column


def unfit_column(unfit: list[UnfitCells], rows: int) -> pa.Array:
    """Build `_unfit`: the exact text of values that the column's type cannot hold. Rare, so plain Python."""
    by_row: dict[int, list[dict[str, str]]] = {}
    for item in unfit:
        texts = values.text_column(item.cells).cast(pa.binary()).to_pylist()
        for row, raw in zip(item.rows.tolist(), texts, strict=True):
            # A database without an encoding (SQL_ASCII) sends bytes as they were stored.
            text = raw.decode(errors="backslashreplace")
            by_row.setdefault(row, []).append({"column": item.name, "text": text})
    return pa.array([by_row.get(row) for row in range(rows)], change.UNFIT_TYPE)


def _optional(
    b: Bytes,
    schema: TableSchema,
    cell_layout: _CellLayout,
    k: int,
    absent: int,
    old: Ints,
    how: Any,
    unfit: list[UnfitCells],
    text: TextHandling,
) -> dict[str, pa.Array]:
    """Build the columns that most batches do not need. Leave out those that are null in every row."""
    columns: dict[str, pa.Array] = {}
    if absent:
        places = cell_layout.places[cell_layout.columns_at[k] : cell_layout.columns_at[k + 1]]
        size = np.stack([cell_layout.size[begin : begin + old.size] for begin in places])
        rows, which = np.empty(absent, np.int32), np.empty(absent, np.int32)
        _absent(size, rows, which)
        columns[change.UNCHANGED] = _names_per_row(schema, rows, which, old.size)
    full = how & FULL_BEFORE != 0
    if full.any():
        tuples = np.where(full, old, -1)
        columns[change.BEFORE] = _old(b, schema, tuples, schema.names, change.BEFORE, unfit, text)
    moved = how & MOVED != 0
    if moved.any():
        tuples = np.where(moved, old, -1)
        columns[change.MOVED_FROM] = _old(b, schema, tuples, schema.key, change.MOVED_FROM, unfit, text)
    return columns


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
    """Return the old tuple as a struct of the named columns. Null where there is none.

    Unfit values are recorded under the struct's name and the column's, e.g. `_before.price`.
    """
    cells = _find_cells(b, schema, tuples)
    picked = [(cell, column) for cell, column in zip(cells, schema.columns, strict=True) if column.name in names]
    return pa.StructArray.from_arrays(
        [convert_noting_unfit(cell, column, f"{into}.{column.name}", unfit, text) for cell, column in picked],
        fields=[pa.field(change.stored_name(column.name), column.type) for _, column in picked],
        mask=pa.array(tuples < 0),
    )
