"""Changes of one table folded to its last state: one row per key, or per image where there is no key.

What must stay true: *absent is not null*. A value the server did not send comes from the row's previous state
in the batch, through any chain of key moves, else from the table's row under the key the chain began with;
where neither exists the fold refuses or, if rows can be read again, says that no row of the table has it. A row
that was deleted lends its values to the move that deleted it and to nothing after that. The result does not
depend on how the changes were cut into batches.

Pure: no Spark, no I/O. No Python object per row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.errors import RELOAD_TABLE_HINT, BaseRowMissing, TailraceError, TransformFailed, ValueUnfit
from tailrace.kernels import kernel
from tailrace.model import change
from tailrace.model.change import OPERATION_NAMES, Operation
from tailrace.model.schema import TableSchema
from tailrace.tables.fold.row_ids import Ints, image_numbers, key_numbers

UPSERT, DELETE, END_VERSION, MARK_DELETED = 0, 1, 2, 3
"""What stands in `op`. The last two are of tables that keep what the source no longer has: end the row's current
version, and mark the row as deleted; each only if it is there."""

Codes = npt.NDArray[np.int8]
Flags = npt.NDArray[np.bool_]

_UPDATED, _DELETED = Operation.UPDATE.code, Operation.DELETE.code
UNTOUCHED, ALIVE, GONE = 0, 1, 2
"""What is known of a key on the way through a batch."""
NOWHERE = -1

_UNFIT_HINT = (
    "Exclude the table, or change the column's type to one without a limit, such as text or plain numeric, "
    "then reload the table. `tables.on_bad_row: dead-letter` lets it go on without such rows."
)
_RULE_HINT = (
    "Mend the row at the source or the rule, then reload the table. `tables.on_bad_row: dead-letter` lets it go on "
    "without such rows."
)
_TEXT_HINT = (
    "The text is not UTF-8, which a SQL_ASCII database does not check. Mend it at the source, or set "
    "`source.invalid_text: replace` to have it replaced from now on; then reload the table."
)


@dataclass(frozen=True, kw_only=True)
class TruncateEffect:
    """What becomes of rows that a TRUNCATE took away, in a table that keeps them: all that no folded row is about."""

    values: dict[str, pa.Scalar]
    """By the names of the lake table's own columns."""
    tx: int


@dataclass(frozen=True, kw_only=True)
class FoldedChanges:
    """What a batch comes to. `rows` follows `folded_schema`; when `truncated`, they are all the table holds."""

    truncated: bool
    rows: pa.Table
    truncate_effect: TruncateEffect | None = None
    latest_time: int | None = None
    """The latest time of commit among the changes, µs since 1970, where the table's form asks for it."""

    @property
    def empty(self) -> bool:
        return not self.truncated and self.truncate_effect is None and not self.rows.num_rows

    @property
    def partial(self) -> bool:
        """Whether values are to be taken from the table's rows."""
        absent = self.rows.column("absent")
        return bool(absent.null_count < len(absent))


def folded_schema(schema: TableSchema) -> pa.Schema:
    """`c0…cN` are the table's own columns in order; `absent` lists the ordinals of those whose value stands in
    the table's row `base` (its key before this batch; null: in no row of it, whatever has the key now), and `moved`
    says whether that row had another key since; `copies` counts equal rows of a keyless table."""
    own = [pa.field(f"c{i}", column.type) for i, column in enumerate(schema.columns)]
    key = [own[i] for i in key_ordinals(schema)]
    return pa.schema(
        [
            *own,
            pa.field("op", pa.int8(), nullable=False),
            pa.field("absent", pa.list_(pa.int16())),
            pa.field("base", pa.struct(key)),
            pa.field("moved", pa.bool_(), nullable=False),
            pa.field("copies", pa.int64(), nullable=False),
        ]
    )


def key_ordinals(schema: TableSchema) -> list[int]:
    """The key's columns by number, in the table's column order."""
    return [i for i, column in enumerate(schema.columns) if column.name in schema.key]


def fold(schema: TableSchema, changes: pa.Table, *, rereads: bool = False) -> FoldedChanges:
    """Fold changes that stand in `_seq` order; optional columns may be missing, foreign ones are ignored. With
    `rereads` a row may lack values that have no base: whoever applies it reads it from the source again."""
    operations = operation_codes(changes)
    truncates = np.flatnonzero(operations == Operation.TRUNCATE.code)
    if truncates.size:
        after = int(truncates[-1]) + 1
        changes, operations = changes.slice(after), operations[after:]
    batch = FoldInput(schema, changes, operations, empty_before=truncates.size > 0)
    rows = _fold_keyed(batch, rereads=rereads) if schema.key else _fold_keyless(batch)
    return FoldedChanges(truncated=truncates.size > 0, rows=rows)


class FoldInput:
    """The changes after the last TRUNCATE, by column."""

    def __init__(self, schema: TableSchema, changes: pa.Table, operations: Codes, *, empty_before: bool) -> None:
        self.schema, self.operations, self.size = schema, operations, changes.num_rows
        self.empty_before = empty_before
        self._changes = changes
        self.own = [as_type(changes.column(change.stored_name(column.name)), column.type) for column in schema.columns]

    def optional(self, name: str) -> Any | None:
        """An optional column as one array; None when it is null throughout."""
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


def _fold_keyed(batch: FoldInput, *, rereads: bool) -> pa.Table:
    keys = KeyNumbers(batch)
    rows = np.arange(batch.size)
    last = np.full(keys.limit, NOWHERE, np.int64)
    last[keys.own] = rows
    final = np.sort(last[last >= 0])
    alive = batch.operations[final] != _DELETED
    picked = [final] * len(batch.own)
    gaps = UnsentValues.of(batch)
    if gaps is None:
        refuse_unfit(batch, picked, alive)
        return folded_rows(batch.schema, take_places(batch.own, picked), ~alive)
    source, root, moved = _follow_all(batch, keys, gaps, rereads)
    at = keys.own[final]
    for place, ordinal in enumerate(gaps.ordinals):
        picked[ordinal] = np.where(alive, source[at, place], final)
    refuse_unfit(batch, picked, alive)
    missing = (source[at] == NOWHERE) & alive[:, None]
    absent = ordinal_lists(missing, np.array(gaps.ordinals, np.int16))
    partial = missing.any(axis=1)
    base = keys.structs(np.where(partial, root[at], NOWHERE))
    taken = take_places(batch.own, picked)
    return folded_rows(batch.schema, taken, ~alive, absent=absent, base=base, moved=moved[at] & partial)


class KeyNumbers:
    """Every key of the batch as a number: each row's own, and the one it moved from (-1: it did not)."""

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
        """The keys with these numbers, as `base` holds them; null for -1."""
        somewhere = np.zeros(self.limit, np.int64)
        somewhere[self._numbers] = np.arange(self._numbers.size)
        none = numbers == NOWHERE
        places = pa.array(somewhere[np.where(none, 0, numbers)], mask=none)
        columns = [column.take(places).combine_chunks() for column in self._columns]
        return pa.StructArray.from_arrays(columns, fields=self._fields, mask=pa.array(none))


@dataclass(frozen=True, kw_only=True)
class UnsentValues:
    """Which values the server did not send: a flag per row for each column that has any."""

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
        found = cls(ordinals=[int(i) for i in ordinals], flags=flags)
        found._refuse_keys(batch)
        return found

    def _refuse_keys(self, batch: FoldInput) -> None:
        for place, ordinal in enumerate(self.ordinals):
            if batch.schema.columns[ordinal].name in batch.schema.key:
                row = int(np.argmax(self.flags[:, place]))
                raise batch.base_missing(row, "a change came without a part of its key")


def _follow_all(batch: FoldInput, keys: KeyNumbers, gaps: UnsentValues, rereads: bool) -> tuple[Ints, Ints, Flags]:
    """Per key and gappy column the row that gives the value (-1: none does); the key of the table's row that does (-1:
    none), and whether the row had another since."""
    source = np.full((keys.limit, len(gaps.ordinals)), NOWHERE, np.int64)
    root = np.arange(keys.limit)
    state = np.zeros(keys.limit, np.int8)
    left_at = np.full(keys.limit, NOWHERE, np.int64)
    moved = np.zeros(keys.limit, np.bool_)
    wrong = _follow(
        batch.operations,
        keys.own,
        keys.old,
        gaps.flags,
        batch.empty_before,
        rereads,
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
    gap: Flags,
    empty_before: bool,
    rereads: bool,
    source: Ints,
    root: Ints,
    state: Codes,
    left_at: Ints,
    moved: Flags,
) -> int:
    """Walk the changes in order; the first row whose missing values have no base, if none can be read again, or -1.

    A deleted key keeps its last state until it is used again, and `left_at` says when it went: only the row
    right after may take values from it, as the other half of a move.
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
            if not gap[i, c]:
                source[k, c] = i
            elif base >= 0:
                source[k, c] = source[base, c]
            elif rereads:
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
    """Net copies per image: +1 for a row that came, -1 for one that went."""
    gaps = UnsentValues.of(batch)
    if gaps is not None:
        row = int(np.argmax(gaps.flags.any(axis=1)))
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
        at = int(np.argmax(surviving.is_valid().to_numpy()))
        raise _unfit_image(batch, int(rows[at]), str(surviving[at][0]["column"].as_py()))
    copies = net[numbered.numbers[rows]]
    columns = take_places(images, [rows] * len(images))
    return folded_rows(batch.schema, columns, copies < 0, copies=copies)


def _images(batch: FoldInput) -> tuple[list[Any], Ints]:
    """The image of every change, then of every row an update replaced; `_unfit` last; and their weights."""
    updates = np.flatnonzero(batch.operations == _UPDATED)
    weights = np.where(batch.operations == _DELETED, -1, 1)
    unfit = batch.optional(change.UNFIT)
    unfit = pa.nulls(batch.size, change.UNFIT_TYPE) if unfit is None else unfit
    if not updates.size:
        return [*batch.own, pa.chunked_array([unfit])], weights
    before = batch.optional(change.BEFORE)
    old = None if before is None else before.take(pa.array(updates))
    if old is None or old.null_count:
        at = 0 if old is None else int(np.argmin(old.is_valid().to_numpy(zero_copy_only=False)))
        raise batch.base_missing(int(updates[at]), "an update of a table without a key came without the old row")
    images = [
        pa.chunked_array([*own.chunks, as_type(pc.struct_field(old, [i]), own.type)], own.type)
        for i, own in enumerate(batch.own)
    ]
    went = old_unfit(batch.schema, unfit.take(pa.array(updates)))
    unfits = pa.chunked_array([own_unfit(batch.schema, unfit), went])
    return [*images, unfits], np.concatenate([weights, np.full(updates.size, -1)])


def _unfit_image(batch: FoldInput, image: int, column: str) -> TailraceError:
    """An image as `_images` numbers them, those that updates replaced last."""
    if image < batch.size:
        return _unfit(batch, image, column)
    updates = np.flatnonzero(batch.operations == _UPDATED)
    return _unfit(batch, int(updates[image - batch.size]), f"{change.BEFORE}.{column}")


def own_unfit(schema: TableSchema, unfit: pa.Array) -> pa.Array:
    """Of `_unfit` what it says of a change's own values."""
    return _said_of(unfit, {name: name for name in schema.names})


def old_unfit(schema: TableSchema, unfit: pa.Array) -> pa.Array:
    """Of `_unfit` what it says of the row that an update replaced, as that row's own."""
    return _said_of(unfit, {f"{change.BEFORE}.{name}": name for name in schema.names})


def _said_of(unfit: pa.Array, names: Mapping[str, str]) -> pa.Array:
    """By their new names, what is said of some columns. Rare, so plain Python."""
    if unfit.null_count == len(unfit):
        return unfit
    found = [
        [{"column": names[cell["column"]], "text": cell["text"]} for cell in said or () if cell["column"] in names]
        for said in unfit.to_pylist()
    ]
    return pa.array([said or None for said in found], change.UNFIT_TYPE)


# --- shared ------------------------------------------------------------------------------------------------


def refuse_unfit(batch: FoldInput, picked: list[Ints], alive: Flags) -> None:
    """Refuse if a value that stays, or any row's key, is one that the column's type cannot hold."""
    unfit = batch.optional(change.UNFIT)
    if unfit is None:
        return
    entries = unfit.flatten()
    rows = pc.list_parent_indices(unfit).to_numpy()
    names = pc.struct_field(entries, [0])
    _refuse_unfit_moves(batch, rows, names)
    found = pc.index_in(names, value_set=pa.array(batch.schema.names))
    # What stands in `_before` is not used for a table with a key.
    columns = found.fill_null(NOWHERE).to_numpy()
    for ordinal in np.unique(columns[columns != NOWHERE]).tolist():
        name = batch.schema.columns[ordinal].name
        bad = rows[columns == ordinal]
        if name not in batch.schema.key:
            bad = bad[np.isin(bad, picked[ordinal][alive])]
        if bad.size:
            raise _unfit(batch, int(bad[0]), name)


def _refuse_unfit_moves(batch: FoldInput, rows: Ints, names: Any) -> None:
    """A key that a row moved from is needed whole."""
    moved = pc.starts_with(names, f"{change.MOVED_FROM}.").to_numpy(zero_copy_only=False)
    if moved.any():
        at = int(np.argmax(moved))
        raise _unfit(batch, int(rows[at]), str(names[at].as_py()))


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


def take_places(columns: Sequence[Any], places: Sequence[Ints]) -> list[Any]:
    """The rows at these places, column by column; null for -1."""
    taken, indices = [], {}
    for column, rows in zip(columns, places, strict=True):
        if id(rows) not in indices:
            indices[id(rows)] = pa.array(rows, mask=rows == NOWHERE)
        whole = rows.size == len(column) and not indices[id(rows)].null_count
        taken.append(column if whole and _in_place(rows) else column.take(indices[id(rows)]))
    return taken


def _in_place(rows: Ints) -> bool:
    return bool((rows == np.arange(rows.size)).all())


def ordinal_lists(missing: Flags, ordinals: npt.NDArray[np.int16]) -> pa.Array:
    rows, places = np.nonzero(missing)
    counts = np.bincount(rows, minlength=missing.shape[0])
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(ordinals[places]), mask=pa.array(counts == 0))


def folded_rows(
    schema: TableSchema,
    columns: list[Any],
    deleted: Flags | Codes,
    *,
    absent: Any = None,
    base: Any = None,
    moved: Flags | None = None,
    copies: Ints | None = None,
) -> pa.Table:
    """Rows as `folded_schema` has them; where `deleted` holds codes they are what is done with each."""
    fields = folded_schema(schema)
    size = deleted.size
    rest = [
        pa.array(deleted.astype(np.int8)),
        pa.nulls(size, fields.field("absent").type) if absent is None else absent,
        pa.nulls(size, fields.field("base").type) if base is None else base,
        pa.array(np.zeros(size, np.bool_) if moved is None else moved),
        pa.array(np.ones(size, np.int64) if copies is None else copies),
    ]
    return pa.Table.from_arrays([*columns, *rest], schema=fields)
