"""Split changes into those that a keyed table can take, and dead letters.

This is `on_bad_row: dead-letter`. Invariant: a row of the table is one whole state of the source row, never a mix of
two. A key whose newest change was rejected is *dead*: its row stays as it was. A change that builds on the missing one
(a partial update, a key move) is rejected too. A whole change or a delete makes the key normal again, and clears its
earlier dead letters. The result does not depend on how the changes were split into batches. If a person drops a dead
letter, later changes build on the row as it is.

In a history (`split_rejects_of_versions`) a later change does not bring back the version that is missing. Its dead
letter is *superseded*, and stays until a person drops it.

Pure: no I/O except `key_exists`, which is called only for rows that partial changes build on. Only for tables with a
key; for others see `keyless`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.errors import BaseRowMissing, TailraceError, TransformFailed, ValueUnfit
from tailrace.kernels import kernel
from tailrace.model import change
from tailrace.model.change import OPERATION_NAMES, Operation
from tailrace.model.schema import TableSchema
from tailrace.tables.fold.fold import ALIVE, GONE, UNTOUCHED
from tailrace.tables.fold.folded_changes import Codes, Flags, key_ordinals
from tailrace.tables.fold.row_ids import Ints, key_numbers, one_array
from tailrace.tables.limits import find_unstorable_rows, find_unstorable_values

NO_SEQS: Ints = np.empty(0, np.int64)

KeyExists = Callable[[pa.Table], Flags]
"""Flag the keys that the table holds; they are given under their columns' own names."""

_UPDATED, _DELETED = Operation.UPDATE.code, Operation.DELETE.code
_UNFIT, _MISSING, _BUILDS_ON_DEAD = 1, 2, 3
_NOWHERE = -1

REPLAY_HINT = (
    "Correct the row at the source, then run `tailrace dead-letters FILE replay TABLE`. Or reload the table with "
    "`tailrace snapshot FILE TABLE`."
)


@dataclass(frozen=True, kw_only=True)
class DeadLetterKeys:
    """Keys of open dead letters. One row each, with the key's columns in the table's order."""

    seqs: Ints
    columns: list[Any]
    unidentified: Ints = field(default_factory=NO_SEQS.copy)
    """`_seq` of further ones whose row is unknown: only a TRUNCATE clears them."""

    @classmethod
    def none(cls, schema: TableSchema) -> DeadLetterKeys:
        columns = [pa.array([], schema.columns[i].type) for i in key_ordinals(schema)]
        return cls(seqs=NO_SEQS, columns=columns)


@dataclass(frozen=True, kw_only=True)
class SplitResult:
    """The result of splitting a batch."""

    changes: pa.Table
    """Changes that the table can take, in order."""
    dead_letters: pa.Table
    """Changes that it cannot take, as the log has them, in order."""
    causes: list[TailraceError]
    """The cause of each dead letter."""
    cleared: Ints
    """`_seq` of earlier dead letters whose rows have been replaced or deleted since."""
    superseded: Ints = field(default_factory=NO_SEQS.copy)
    """`_seq` of dead letters, new or earlier, that nothing builds on any more. They stay."""


def has_unfit(changes: pa.Table | pa.RecordBatch) -> bool:
    """Return whether a value arrived that its column cannot hold.

    If not, nothing else is checked.
    """
    column = changes.column(change.UNFIT)
    return bool(column.null_count < len(column))


def split_rejects(
    schema: TableSchema,
    changes: pa.Table,
    dead: DeadLetterKeys,
    key_exists: KeyExists,
    partition_by: Mapping[str, str] | None = None,
    *,
    can_refetch: bool = False,
) -> SplitResult:
    """Split changes that are in `_seq` order and have every column.

    `partition_by` maps partition columns to their lake names, which may differ. With `can_refetch` a partial change
    without a base counts as a whole one: its row is refetched.
    """
    return _split(schema, changes, dead, key_exists, partition_by or {}, keep_superseded=False, can_refetch=can_refetch)


def _split(
    schema: TableSchema,
    changes: pa.Table,
    dead: DeadLetterKeys,
    key_exists: KeyExists,
    partition_by: Mapping[str, str],
    *,
    keep_superseded: bool,
    can_refetch: bool = False,
) -> SplitResult:
    """Split a batch; with `keep_superseded` every reject stays a dead letter, even if replaced since."""
    codes = pc.index_in(changes.column(change.OP), value_set=OPERATION_NAMES)
    operations = np.asarray(codes.to_numpy(), dtype=np.int8)
    truncates = np.flatnonzero(operations == Operation.TRUNCATE.code)
    first = int(truncates[-1]) + 1 if truncates.size else 0
    rows = changes.slice(first).combine_chunks()
    batch = _NumberedChanges.of(schema, rows, operations[first:], dead, partition_by)
    walked = _classify(batch, schema, key_exists, emptied=truncates.size > 0, can_refetch=can_refetch)
    rejected = walked.cause > 0
    still_dead = walked.dead[batch.own] & (np.arange(rows.num_rows) >= walked.since[batch.own])
    open_rejects = rejected & (batch.lost | still_dead)
    chosen = np.flatnonzero(rejected if keep_superseded else open_rejects)
    replaced = rows.column(change.SEQ).to_numpy()[rejected & ~open_rejects]
    # A row that the table cannot hold is not in it, so its delete is skipped.
    applicable = ~rejected & ~((batch.operations == _DELETED) & batch.unheld_key)
    taken = rows.filter(pa.array(applicable))
    unfit_index = taken.schema.get_field_index(change.UNFIT)
    taken = taken.set_column(unfit_index, taken.schema.field(unfit_index), pa.nulls(taken.num_rows, change.UNFIT_TYPE))
    cleared = dead.seqs[walked.renewed[batch.dead]]
    if truncates.size:
        cleared = np.concatenate([dead.seqs, dead.unidentified])
    return SplitResult(
        changes=pa.concat_tables([changes.slice(first - 1, 1), taken]) if first else taken,
        dead_letters=rows.take(pa.array(chosen)),
        cleared=cleared,
        superseded=replaced if keep_superseded else NO_SEQS,
        causes=[_cause(schema, rows, row, int(walked.cause[row]), partition_by) for row in chosen.tolist()],
    )


def split_rejects_between_truncates(
    schema: TableSchema,
    changes: pa.Table,
    dead: DeadLetterKeys,
    key_exists: KeyExists,
    partition_by: Mapping[str, str] | None = None,
    *,
    can_refetch: bool = False,
) -> SplitResult:
    """Split changes for a table that keeps rows after a TRUNCATE.

    The rows' state before it counts, and its rejects are cleared.
    """
    pieces = _between_truncates(changes)
    found = [split_rejects(schema, piece, dead, key_exists, partition_by, can_refetch=can_refetch) for piece in pieces]
    return replace(found[-1], changes=pa.concat_tables([one.changes for one in found]))


def split_rejects_of_versions(
    schema: TableSchema,
    changes: pa.Table,
    dead: DeadLetterKeys,
    key_exists: KeyExists,
    partition_by: Mapping[str, str] | None = None,
) -> SplitResult:
    """Split changes for a history.

    Every reject is a dead letter, whatever follows.
    """
    columns = partition_by or {}
    found = [
        _split(schema, piece, dead, key_exists, columns, keep_superseded=True) for piece in _between_truncates(changes)
    ]
    truncated = [one.dead_letters.column(change.SEQ).to_numpy() for one in found[:-1]]
    return SplitResult(
        changes=pa.concat_tables([one.changes for one in found]),
        dead_letters=pa.concat_tables([one.dead_letters for one in found]),
        causes=[cause for one in found for cause in one.causes],
        cleared=NO_SEQS,
        superseded=np.unique(
            np.concatenate([*truncated, *(seqs for one in found for seqs in (one.superseded, one.cleared))])
        ),
    )


def _between_truncates(changes: pa.Table) -> Iterator[pa.Table]:
    """Yield the changes up to the first TRUNCATE, then from each to the next."""
    truncated, begin = pc.equal(changes.column(change.OP), Operation.TRUNCATE.value).to_numpy(), 0
    for end in [*np.flatnonzero(truncated).tolist(), changes.num_rows]:
        yield changes.slice(begin, end - begin)
        begin = end


@dataclass(frozen=True, kw_only=True)
class _NumberedChanges:
    """The changes after the last TRUNCATE, with keys as numbers."""

    operations: Codes
    own: Ints
    old: Ints
    dead: Ints
    """Numbers of the keys of open dead letters."""
    bad: Flags
    """Changes with a new value that the table cannot hold."""
    lost: Flags
    """Changes whose key itself does not fit, so that their row is unknown."""
    unheld_key: Flags
    partial: Flags
    keys: list[Any]
    """The columns that the keys were numbered from."""
    key_rows: Ints
    """The row of each number in `keys`."""
    limit: int

    @classmethod
    def of(
        cls,
        schema: TableSchema,
        rows: pa.Table,
        operations: Codes,
        dead: DeadLetterKeys,
        partition_by: Mapping[str, str],
    ) -> _NumberedChanges:
        size, ordinals = rows.num_rows, key_ordinals(schema)
        own = [one_array(rows.column(change.stored_name(schema.columns[i].name))) for i in ordinals]
        moved = one_array(rows.column(change.MOVED_FROM))
        movers = np.flatnonzero(moved.is_valid().to_numpy(zero_copy_only=False))
        before = moved.take(pa.array(movers))
        columns = [
            pa.concat_arrays([mine, pc.struct_field(before, [i]).cast(mine.type), gone.cast(mine.type)])
            for i, (mine, gone) in enumerate(zip(own, map(one_array, dead.columns), strict=True))
        ]
        numbered = key_numbers(columns)
        numbers = numbered.numbers
        old = np.full(size, _NOWHERE, np.int64)
        old[movers] = numbers[size : size + movers.size]
        key_rows = np.zeros(numbered.limit, np.int64)
        key_rows[numbers] = np.arange(numbers.size)
        unfit, lost = unfit_rows(schema, rows)
        own_columns = (rows.column(change.stored_name(column.name)) for column in schema.columns)
        unheld, unheld_key = find_unstorable_rows(schema, own_columns, size, partition_by)
        deletes = operations == _DELETED
        return cls(
            operations=operations,
            own=numbers[:size],
            old=old,
            dead=numbers[size + movers.size :],
            bad=(unfit | unheld) & ~deletes,
            lost=lost,
            unheld_key=unheld_key,
            partial=pc.list_value_length(one_array(rows.column(change.UNCHANGED))).fill_null(0).to_numpy() > 0,
            keys=columns,
            key_rows=key_rows,
            limit=numbered.limit,
        )

    def named(self, schema: TableSchema, numbers: Ints) -> pa.Table:
        """Return the keys with these numbers."""
        indices = pa.array(self.key_rows[numbers])
        names = [schema.columns[i].name for i in key_ordinals(schema)]
        return pa.Table.from_arrays([column.take(indices) for column in self.keys], names=names)


@dataclass(frozen=True, kw_only=True)
class _Walked:
    cause: Codes
    dead: Flags
    since: Ints
    renewed: Flags


def _classify(
    batch: _NumberedChanges, schema: TableSchema, key_exists: KeyExists, *, emptied: bool, can_refetch: bool
) -> _Walked:
    """Walk once to find table rows that are built on. Walk again if some do not exist."""
    state = np.zeros(batch.limit, np.int8)
    walked, built_on = _walk(batch, state, emptied, can_refetch)
    candidates = np.flatnonzero(built_on)
    if candidates.size:
        missing = candidates[~key_exists(batch.named(schema, candidates))]
        if missing.size:
            state[missing] = GONE
            walked, _ = _walk(batch, state, emptied, can_refetch)
    return walked


def _walk(batch: _NumberedChanges, state: Codes, emptied: bool, can_refetch: bool) -> tuple[_Walked, Flags]:
    dead = np.zeros(batch.limit, np.bool_)
    if not emptied:
        dead[batch.dead] = True
    built_on, renewed = np.zeros(batch.limit, np.bool_), np.zeros(batch.limit, np.bool_)
    since = np.zeros(batch.limit, np.int64)
    cause = np.zeros(batch.own.size, np.int8)
    _follow(
        batch.operations,
        batch.own,
        batch.old,
        batch.bad,
        batch.lost,
        batch.partial,
        emptied,
        can_refetch,
        state.copy(),
        dead,
        built_on,
        renewed,
        since,
        cause,
        np.full(batch.limit, _NOWHERE, np.int64),
        np.zeros(batch.limit, np.int8),
        np.zeros(batch.limit, np.bool_),
    )
    return _Walked(cause=cause, dead=dead, since=since, renewed=renewed), built_on


@kernel
def _follow(
    operations: Codes,
    own: Ints,
    old: Ints,
    bad: Flags,
    lost: Flags,
    partial: Flags,
    emptied: bool,
    can_refetch: bool,
    state: Codes,
    dead: Flags,
    built_on: Flags,
    renewed: Flags,
    since: Ints,
    cause: Codes,
    left_at: Ints,
    left_why: Codes,
    left_untouched: Flags,
) -> None:
    """Find why each change is rejected (0: it is not), and each key's state. Walks in order.

    As in the fold, a deleted row lends its values only to the row right after it, as the other half of a key move.
    `left_why` says whether it could.
    """
    for i in range(own.size):
        if lost[i]:
            cause[i] = _UNFIT
            continue
        k = own[i]
        known = state[k] == ALIVE or (state[k] == UNTOUCHED and not emptied)
        why = _BUILDS_ON_DEAD if dead[k] else (0 if known else _MISSING)
        if operations[i] == _DELETED:
            left_at[k], left_why[k], left_untouched[k] = i, why, state[k] == UNTOUCHED
            state[k], dead[k], renewed[k] = GONE, False, True
            continue
        base, untouched = k, state[k] == UNTOUCHED
        if operations[i] != _UPDATED:
            why, base = _MISSING, old[i]
            if base >= 0 and i > 0 and left_at[base] == i - 1:
                why, untouched = left_why[base], left_untouched[base]
        if why == _MISSING and can_refetch:
            why, untouched = 0, False
        if bad[i]:
            why = _UNFIT
        elif not partial[i]:
            why = 0
        elif why == 0 and untouched:
            built_on[base] = True
        if why:
            cause[i] = why
            if not dead[k]:
                since[k] = i
            dead[k] = True
        else:
            state[k], dead[k], renewed[k] = ALIVE, False, True


def unfit_rows(schema: TableSchema, rows: pa.Table) -> tuple[Flags, Flags]:
    """Flag rows with an unfit value of their own, and those with an unfit key.

    Entries about `_before` or `_moved_from` are not values that the table would get.
    """
    unfit = one_array(rows.column(change.UNFIT))
    row_of = pc.list_parent_indices(unfit).to_numpy()
    names = pc.struct_field(unfit.flatten(), [0])
    unfit_flags, unfit_key_flags = np.zeros(rows.num_rows, np.bool_), np.zeros(rows.num_rows, np.bool_)
    unfit_flags[row_of[pc.is_in(names, value_set=pa.array(schema.names)).to_numpy(zero_copy_only=False)]] = True
    unfit_key_flags[
        row_of[pc.is_in(names, value_set=pa.array(schema.key, pa.string())).to_numpy(zero_copy_only=False)]
    ] = True
    return unfit_flags, unfit_key_flags


def _cause(schema: TableSchema, rows: pa.Table, row: int, why: int, partition_by: Mapping[str, str]) -> TailraceError:
    position = rows.column(change.POSITION)[row].as_py()
    if why == _UNFIT:
        return unfit_cause(schema, rows, row, partition_by)
    message = "a partial change arrived for a row that does not exist"
    if why == _BUILDS_ON_DEAD:
        message = "a partial change builds on a dead letter"
    return BaseRowMissing(message, table=schema.table, position=position, hint=REPLAY_HINT)


def unfit_cause(
    schema: TableSchema, rows: pa.Table, row: int, partition_by: Mapping[str, str], hint: str = REPLAY_HINT
) -> TailraceError:
    """Return the error for a row that the table cannot hold. The changes must have every column."""
    position, cells = rows.column(change.POSITION)[row].as_py(), rows.column(change.UNFIT)[row].as_py() or []
    own = [entry["column"] for entry in cells if entry["column"] in schema.names]
    if rules := [rule for entry in cells if (rule := change.parse_rule_failure(entry["text"])) is not None]:
        return TransformFailed(
            "a rule could not be applied",
            rule=rules[0],
            table=schema.table,
            column=", ".join(own),
            position=position,
            hint=hint,
        )
    columns = own or _unstorable_columns(schema, rows.slice(row, 1), partition_by)
    message = "a value does not fit the column's type" if own else _unstorable_message(columns, partition_by)
    return ValueUnfit(message, table=schema.table, column=", ".join(columns), position=position, hint=hint)


def _unstorable_message(columns: Iterable[str], partition_by: Mapping[str, str]) -> str:
    """Return the message for values of the right type that cannot be stored."""
    if set(columns) & set(partition_by):
        return "a value cannot be a partition value"
    return "a date is later than Delta can store"


def _unstorable_columns(schema: TableSchema, row: pa.Table, partition_by: Mapping[str, str]) -> list[str]:
    values_by_column = ((column, one_array(row.column(change.stored_name(column.name)))) for column in schema.columns)
    flags_by_column = (
        (column.name, find_unstorable_values(column, values, partition_by)) for column, values in values_by_column
    )
    return [name for name, flags in flags_by_column if flags is not None and flags.any()]
