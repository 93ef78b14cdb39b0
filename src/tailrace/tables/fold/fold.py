"""Fold changes of one table to its last state. That is one row per key, or per image without a key.

Invariant: *unsent is not null*. A value that the server did not send is taken from the row's previous state in the
batch, through any chain of key moves. Otherwise it is taken from the table's row under the key that the chain began
with. If neither exists, the fold refuses, or, if rows can be refetched, reports that no row of the table has the value.
A deleted row lends its values to the key move that deleted it and to nothing after that. The result does not depend on
how the changes were split into batches.

Pure: no Spark, no I/O. No Python object per row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.errors import RELOAD_TABLE_HINT, BaseRowMissing, TailraceError, TransformFailed, ValueUnfit
from tailrace.kernels import kernel
from tailrace.model import change
from tailrace.model.change import OPERATION_NAMES, Operation
from tailrace.model.schema import TableSchema
from tailrace.tables.fold.folded_changes import (
    NOWHERE,
    Codes,
    Flags,
    FoldedChanges,
    folded_rows,
    folded_schema,
    key_ordinals,
    ordinal_lists,
    take_rows,
)
from tailrace.tables.fold.row_ids import Ints, image_numbers, key_numbers

_UPDATED, _DELETED = Operation.UPDATE.code, Operation.DELETE.code
UNTOUCHED, ALIVE, GONE = 0, 1, 2
"""States of a key during the walk through a batch."""

_UNFIT_HINT = (
    "Exclude the table, or change the column's type to one without a limit, such as text or plain numeric, "
    "then reload the table. With `tables.on_bad_row: dead-letter` it continues without such rows."
)
_RULE_HINT = (
    "Correct the row at the source or the rule, then reload the table. With `tables.on_bad_row: dead-letter` it "
    "continues without such rows."
)
_TEXT_HINT = (
    "The text is not UTF-8, which a SQL_ASCII database does not check. Correct it at the source, or set "
    "`source.invalid_text: replace` to replace such text from now on. Then reload the table."
)


def fold(schema: TableSchema, changes: pa.Table, *, can_refetch: bool = False) -> FoldedChanges:
    """Fold changes that are in `_seq` order. Optional columns may be missing, unknown ones are ignored.

    With `can_refetch` a row may lack values that have no base: the code that applies it refetches the row.
    """
    operations = operation_codes(changes)
    truncates = np.flatnonzero(operations == Operation.TRUNCATE.code)
    if truncates.size:
        after = int(truncates[-1]) + 1
        changes, operations = changes.slice(after), operations[after:]
    batch = FoldInput(schema, changes, operations, empty_before=truncates.size > 0)
    rows = _fold_keyed(batch, can_refetch=can_refetch) if schema.key else _fold_keyless(batch)
    return FoldedChanges(truncated=truncates.size > 0, rows=rows)


class FoldInput:
    """The changes after the last TRUNCATE, by column."""

    def __init__(self, schema: TableSchema, changes: pa.Table, operations: Codes, *, empty_before: bool) -> None:
        self.schema, self.operations, self.size = schema, operations, changes.num_rows
        self.empty_before = empty_before
        self._changes = changes
        self.own = [as_type(changes.column(change.stored_name(column.name)), column.type) for column in schema.columns]

    def optional(self, name: str) -> Any | None:
        """Return an optional column as one array; None if it is null throughout."""
        if name not in self._changes.column_names:
            return None
        column = self._changes.column(name)
        return None if column.null_count == self.size else column.combine_chunks()

    def position(self, row: int) -> str:
        return str(self._changes.column(change.POSITION)[row].as_py())

    def base_missing(self, row: int, what: str) -> BaseRowMissing:
        return BaseRowMissing(what, table=self.schema.table, position=self.position(row), hint=RELOAD_TABLE_HINT)


def operation_codes(changes: pa.Table) -> Codes:
    codes = pc.index_in(as_type(changes.column(change.OP), pa.string()), value_set=OPERATION_NAMES)
    if codes.null_count:
        raise ValueError("a table's changes hold an operation that is not one of a row")
    return np.asarray(codes.to_numpy(), dtype=np.int8)


def as_type(column: Any, kind: pa.DataType) -> Any:
    return column if column.type == kind else column.cast(kind)


# --- tables with a key -------------------------------------------------------------------------------------


def _fold_keyed(batch: FoldInput, *, can_refetch: bool) -> pa.Table:
    keys = KeyNumbers(batch)
    rows = np.arange(batch.size)
    last = np.full(keys.limit, NOWHERE, np.int64)
    last[keys.own] = rows
    final = np.sort(last[last >= 0])
    alive = batch.operations[final] != _DELETED
    picked = [final] * len(batch.own)
    unsent = UnsentValues.of(batch)
    if unsent is None:
        refuse_unfit(batch, picked, alive)
        return folded_rows(batch.schema, take_rows(batch.own, picked), ~alive)
    source, root, moved = _follow_all(batch, keys, unsent, can_refetch)
    final_keys = keys.own[final]
    for index, ordinal in enumerate(unsent.ordinals):
        picked[ordinal] = np.where(alive, source[final_keys, index], final)
    refuse_unfit(batch, picked, alive)
    missing = (source[final_keys] == NOWHERE) & alive[:, None]
    absent = ordinal_lists(missing, np.array(unsent.ordinals, np.int16))
    partial = missing.any(axis=1)
    base = keys.structs(np.where(partial, root[final_keys], NOWHERE))
    taken = take_rows(batch.own, picked)
    return folded_rows(batch.schema, taken, ~alive, absent=absent, base=base, moved=moved[final_keys] & partial)


class KeyNumbers:
    """Every key of the batch as a number. A row has its own, and its old one if it moved (else -1)."""

    def __init__(self, batch: FoldInput) -> None:
        ordinals = key_ordinals(batch.schema)
        moved = batch.optional(change.MOVED_FROM)
        self._columns = [batch.own[i] for i in ordinals]
        movers = np.empty(0, np.int64)
        if moved is not None:
            movers = np.flatnonzero(moved.is_valid().to_numpy(zero_copy_only=False))
            old = moved.take(pa.array(movers))
            fields = [pc.struct_field(old, [i]) for i in range(len(ordinals))]
            self._columns = [
                pa.chunked_array([*own.chunks, as_type(field, own.type)], own.type)
                for own, field in zip(self._columns, fields, strict=True)
            ]
        numbered = key_numbers(self._columns)
        self.limit = numbered.limit
        self.own = numbered.numbers[: batch.size]
        self.old = np.full(batch.size, NOWHERE, np.int64)
        self.old[movers] = numbered.numbers[batch.size :]
        self._numbers = numbered.numbers
        self._fields = [folded_schema(batch.schema).field(i) for i in ordinals]

    def structs(self, numbers: Ints) -> pa.StructArray:
        """Return the keys with these numbers, as `base` holds them; null for -1."""
        row_of = np.zeros(self.limit, np.int64)
        row_of[self._numbers] = np.arange(self._numbers.size)
        missing = numbers == NOWHERE
        indices = pa.array(row_of[np.where(missing, 0, numbers)], mask=missing)
        columns = [column.take(indices).combine_chunks() for column in self._columns]
        return pa.StructArray.from_arrays(columns, fields=self._fields, mask=pa.array(missing))


@dataclass(frozen=True, kw_only=True)
class UnsentValues:
    """Unsent values of a batch. There is a flag per row for each column that has any."""

    ordinals: list[int]
    flags: Flags

    @classmethod
    def of(cls, batch: FoldInput) -> UnsentValues | None:
        unchanged = batch.optional(change.UNCHANGED)
        if unchanged is None:
            return None
        names = pa.array(batch.schema.names, pa.string())
        which = pc.index_in(as_type(unchanged.flatten(), pa.string()), value_set=names)
        if which.null_count:
            raise ValueError("a change names a column that its table does not have")
        rows, columns = pc.list_parent_indices(unchanged).to_numpy(), which.to_numpy()
        ordinals = np.unique(columns)
        if not ordinals.size:
            return None
        flags = np.zeros((batch.size, ordinals.size), np.bool_)
        flags[rows, np.searchsorted(ordinals, columns)] = True
        unsent = cls(ordinals=[int(i) for i in ordinals], flags=flags)
        unsent._refuse_keys(batch)
        return unsent

    def _refuse_keys(self, batch: FoldInput) -> None:
        for index, ordinal in enumerate(self.ordinals):
            if batch.schema.columns[ordinal].name in batch.schema.key:
                row = int(np.argmax(self.flags[:, index]))
                raise batch.base_missing(row, "a change arrived without a part of its key")


def _follow_all(
    batch: FoldInput, keys: KeyNumbers, unsent: UnsentValues, can_refetch: bool
) -> tuple[Ints, Ints, Flags]:
    """Find the rows that give unsent values, per key.

    Returns per key and column with unsent values the row that has the value, or -1. Per key it also returns the key of
    the table's row that has the values, or -1, and whether that row had another key since.
    """
    source = np.full((keys.limit, len(unsent.ordinals)), NOWHERE, np.int64)
    root = np.arange(keys.limit)
    state = np.zeros(keys.limit, np.int8)
    left_at = np.full(keys.limit, NOWHERE, np.int64)
    moved = np.zeros(keys.limit, np.bool_)
    wrong = _follow(
        batch.operations,
        keys.own,
        keys.old,
        unsent.flags,
        batch.empty_before,
        can_refetch,
        source,
        root,
        state,
        left_at,
        moved,
    )
    if wrong >= 0:
        raise batch.base_missing(int(wrong), "a partial change arrived for a row that does not exist")
    return source, root, moved


@kernel
def _follow(
    operations: Codes,
    own: Ints,
    old: Ints,
    unsent: Flags,
    empty_before: bool,
    can_refetch: bool,
    source: Ints,
    root: Ints,
    state: Codes,
    left_at: Ints,
    moved: Flags,
) -> int:
    """Walk the changes in order. Return the first row whose unsent values have no base, or -1.

    With `can_refetch` such rows are allowed. A deleted key keeps its last state until it is used again, and `left_at`
    records when it was deleted. Only the row right after that may take values from it, as the other half of a key move.
    """
    columns = source.shape[1]
    for i in range(own.size):
        k = own[i]
        known = state[k] == ALIVE or (state[k] == UNTOUCHED and not empty_before)
        if operations[i] == _DELETED:
            left_at[k] = i if known else NOWHERE
            state[k] = GONE
            continue
        base = -1
        if operations[i] == _UPDATED:
            base = k if known else -1
        elif old[i] >= 0 and i > 0 and left_at[old[i]] == i - 1:
            base = old[i]
        lacks = False
        for c in range(columns):
            if not unsent[i, c]:
                source[k, c] = i
            elif base >= 0:
                source[k, c] = source[base, c]
            elif can_refetch:
                source[k, c], lacks = NOWHERE, True
            else:
                return i
        if base >= 0:
            root[k] = root[base]
        else:
            root[k] = NOWHERE if lacks else k
        moved[k] = base >= 0 and (moved[base] or operations[i] != _UPDATED)
        state[k] = ALIVE
    return -1


# --- tables without a key ----------------------------------------------------------------------------------


def _fold_keyless(batch: FoldInput) -> pa.Table:
    """Return the net copies per image. An inserted row counts +1, a deleted one -1."""
    unsent = UnsentValues.of(batch)
    if unsent is not None:
        row = int(np.argmax(unsent.flags.any(axis=1)))
        raise batch.base_missing(row, "a partial change arrived for a table without a key")
    images, weights = _images(batch)
    if not weights.size:
        return folded_rows(batch.schema, batch.own, np.zeros(0, np.bool_))
    unfit = images.pop()
    numbered = image_numbers([*images, unfit] if unfit.null_count < weights.size else images)
    net = np.zeros(numbered.limit, np.int64)
    np.add.at(net, numbered.numbers, weights)
    last = np.full(numbered.limit, NOWHERE, np.int64)
    last[numbered.numbers] = np.arange(weights.size)
    rows = np.sort(last[net != 0])
    surviving = unfit.take(pa.array(rows))
    if surviving.null_count < rows.size:
        index = int(np.argmax(surviving.is_valid().to_numpy()))
        raise _unfit_image(batch, int(rows[index]), str(surviving[index][0]["column"].as_py()))
    copies = net[numbered.numbers[rows]]
    columns = take_rows(images, [rows] * len(images))
    return folded_rows(batch.schema, columns, copies < 0, copies=copies)


def _images(batch: FoldInput) -> tuple[list[Any], Ints]:
    """Return all images with their weights, `_unfit` as the last column.

    The image of every change is followed by that of every row that an update replaced.
    """
    updates = np.flatnonzero(batch.operations == _UPDATED)
    weights = np.where(batch.operations == _DELETED, -1, 1)
    unfit = batch.optional(change.UNFIT)
    unfit = pa.nulls(batch.size, change.UNFIT_TYPE) if unfit is None else unfit
    if not updates.size:
        return [*batch.own, pa.chunked_array([unfit])], weights
    before = batch.optional(change.BEFORE)
    old = None if before is None else before.take(pa.array(updates))
    if old is None or old.null_count:
        index = 0 if old is None else int(np.argmin(old.is_valid().to_numpy(zero_copy_only=False)))
        raise batch.base_missing(int(updates[index]), "an update of a table without a key arrived without the old row")
    images = [
        pa.chunked_array([*own.chunks, as_type(pc.struct_field(old, [i]), own.type)], own.type)
        for i, own in enumerate(batch.own)
    ]
    unfit_before = old_unfit(batch.schema, unfit.take(pa.array(updates)))
    unfits = pa.chunked_array([own_unfit(batch.schema, unfit), unfit_before])
    return [*images, unfits], np.concatenate([weights, np.full(updates.size, -1)])


def _unfit_image(batch: FoldInput, image: int, column: str) -> TailraceError:
    """Return the error for an image, numbered as in `_images`."""
    if image < batch.size:
        return _unfit(batch, image, column)
    updates = np.flatnonzero(batch.operations == _UPDATED)
    return _unfit(batch, int(updates[image - batch.size]), f"{change.BEFORE}.{column}")


def own_unfit(schema: TableSchema, unfit: pa.Array) -> pa.Array:
    """Return the entries of `_unfit` about a change's own values."""
    return _unfit_of(unfit, {name: name for name in schema.names})


def old_unfit(schema: TableSchema, unfit: pa.Array) -> pa.Array:
    """Return the entries of `_unfit` about the replaced row, under that row's column names."""
    return _unfit_of(unfit, {f"{change.BEFORE}.{name}": name for name in schema.names})


def _unfit_of(unfit: pa.Array, names: Mapping[str, str]) -> pa.Array:
    """Return the entries about some columns, renamed. Rare, so plain Python."""
    if unfit.null_count == len(unfit):
        return unfit
    rows = [
        [{"column": names[cell["column"]], "text": cell["text"]} for cell in cells or () if cell["column"] in names]
        for cells in unfit.to_pylist()
    ]
    return pa.array([cells or None for cells in rows], change.UNFIT_TYPE)


# --- shared ------------------------------------------------------------------------------------------------


def refuse_unfit(batch: FoldInput, picked: list[Ints], alive: Flags) -> None:
    """Refuse unfit values if they stay in the table or are in a key."""
    unfit = batch.optional(change.UNFIT)
    if unfit is None:
        return
    entries = unfit.flatten()
    rows = pc.list_parent_indices(unfit).to_numpy()
    names = pc.struct_field(entries, [0])
    _refuse_unfit_moves(batch, rows, names)
    indices = pc.index_in(names, value_set=pa.array(batch.schema.names))
    # Entries about `_before` are not used for a table with a key.
    columns = indices.fill_null(NOWHERE).to_numpy()
    for ordinal in np.unique(columns[columns != NOWHERE]).tolist():
        name = batch.schema.columns[ordinal].name
        bad = rows[columns == ordinal]
        if name not in batch.schema.key:
            bad = bad[np.isin(bad, picked[ordinal][alive])]
        if bad.size:
            raise _unfit(batch, int(bad[0]), name)


def _refuse_unfit_moves(batch: FoldInput, rows: Ints, names: Any) -> None:
    """Refuse unfit values in a key that a row moved from: it is needed complete."""
    moved = pc.starts_with(names, f"{change.MOVED_FROM}.").to_numpy(zero_copy_only=False)
    if moved.any():
        index = int(np.argmax(moved))
        raise _unfit(batch, int(rows[index]), str(names[index].as_py()))


def _unfit(batch: FoldInput, row: int, column: str) -> TailraceError:
    own = column.rpartition(".")[2]
    unfit = batch.optional(change.UNFIT)
    for cell in (unfit[row].as_py() if unfit is not None else None) or ():
        if (rule := change.parse_rule_failure(cell["text"])) is not None and cell["column"] == column:
            return TransformFailed(
                "a rule could not be applied",
                rule=rule,
                table=batch.schema.table,
                column=column,
                position=batch.position(row),
                hint=_RULE_HINT,
            )
    is_text = any(item.name in (column, own) and pa.types.is_string(item.type) for item in batch.schema.columns)
    return ValueUnfit(
        "a value does not fit the column's type",
        table=batch.schema.table,
        column=column,
        position=batch.position(row),
        hint=_TEXT_HINT if is_text else _UNFIT_HINT,
    )
