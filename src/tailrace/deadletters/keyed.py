"""Changes that a lake table cannot take, told from those that it can: what `on_bad_row: dead-letter` does with them.

What must stay true: a row of the table is whole, of some moment, and never half of two. A key whose newest change was
set aside is *dead*: its row stays as it was, and what builds on the change that is missing (a partial update, a move)
is set aside too. A whole change or a delete of the key makes it live again, and what was set aside before is cleared.
The result does not depend on how the changes were cut into batches. A letter that a person drops is no letter any more:
what comes later then builds on the row as it stands.

Where every version of a row counts (`sift_versions`) what makes a key live again does not bring the version that is
missing: the letter of that has *passed*, and stays until a person drops it.

Pure: no I/O but `holds`, which is asked only for rows that partial changes build on. Only for tables with a key; for
others see `sifting_images`.
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
from tailrace.tables.fold.fold import ALIVE, GONE, UNTOUCHED, Codes, Flags, key_ordinals
from tailrace.tables.fold.row_ids import Ints, key_numbers, one_array
from tailrace.tables.limits import find_unstorable_rows, find_unstorable_values

NO_SEQS: Ints = np.empty(0, np.int64)

KeyExists = Callable[[pa.Table], Flags]
"""Given keys, the key's columns by their own names: which of them the table holds."""

_UPDATED, _DELETED = Operation.UPDATE.code, Operation.DELETE.code
_UNFIT, _MISSING, _BUILDS_ON_DEAD = 1, 2, 3
_NOWHERE = -1

REPLAY_HINT = (
    "Mend the row at the source, then run `tailrace dead-letters FILE replay TABLE`; or load the table anew with "
    "`tailrace snapshot FILE TABLE`."
)


@dataclass(frozen=True, kw_only=True)
class DeadLetterKeys:
    """The keys of letters that are still open: one row per letter, the key's columns in the table's order."""

    seqs: Ints
    columns: list[Any]
    unidentified: Ints = field(default_factory=NO_SEQS.copy)
    """Those beside them of which nobody can say which row they are about: only a TRUNCATE clears them."""

    @classmethod
    def none(cls, schema: TableSchema) -> DeadLetterKeys:
        columns = [pa.array([], schema.columns[i].type) for i in key_ordinals(schema)]
        return cls(seqs=NO_SEQS, columns=columns)


@dataclass(frozen=True, kw_only=True)
class SplitResult:
    """What a batch comes to."""

    changes: pa.Table
    """What the table can take, in order."""
    dead_letters: pa.Table
    """What it cannot, as the log has it, in order."""
    causes: list[TailraceError]
    """Why, letter by letter."""
    cleared: Ints
    """`_seq` of earlier letters whose rows have been replaced or deleted since."""
    superseded: Ints = field(default_factory=NO_SEQS.copy)
    """`_seq` of letters, these or earlier ones, that stay though nothing builds on them any more."""


def has_unfit(changes: pa.Table | pa.RecordBatch) -> bool:
    """Whether a value came that its column cannot hold; all that is looked at where nothing is wrong."""
    column = changes.column(change.UNFIT)
    return bool(column.null_count < len(column))


def split_rejects(
    schema: TableSchema,
    changes: pa.Table,
    dead: DeadLetterKeys,
    holds: KeyExists,
    partition_by: Mapping[str, str] | None = None,
    *,
    rereads: bool = False,
) -> SplitResult:
    """Tell the changes, which stand in `_seq` order and have every column, apart. The lake table is partitioned by
    these columns, which may have other names there. With `rereads` a partial change without a base is as good as a
    whole one: its row is read from the source again."""
    return _sift(schema, changes, dead, holds, partition_by or {}, every=False, rereads=rereads)


def _sift(
    schema: TableSchema,
    changes: pa.Table,
    dead: DeadLetterKeys,
    holds: KeyExists,
    by: Mapping[str, str],
    *,
    every: bool,
    rereads: bool = False,
) -> SplitResult:
    """With `every` all that was set aside is a letter, also what was replaced since; that has passed."""
    codes = pc.index_in(changes.column(change.OP), value_set=OPERATION_NAMES)
    operations = np.asarray(codes.to_numpy(), dtype=np.int8)
    truncates = np.flatnonzero(operations == Operation.TRUNCATE.code)
    first = int(truncates[-1]) + 1 if truncates.size else 0
    rows = changes.slice(first).combine_chunks()
    batch = _NumberedChanges.of(schema, rows, operations[first:], dead, by)
    walked = _walk_all(batch, schema, holds, emptied=truncates.size > 0, rereads=rereads)
    aside = walked.cause > 0
    still = walked.dead[batch.own] & (np.arange(rows.num_rows) >= walked.since[batch.own])
    waits = aside & (batch.lost | still)
    letters = np.flatnonzero(aside if every else waits)
    replaced = rows.column(change.SEQ).to_numpy()[aside & ~waits]
    # A row that the table cannot hold need not be taken out of it.
    kept = ~aside & ~((batch.operations == _DELETED) & batch.unheld_key)
    taken = rows.filter(pa.array(kept))
    place = taken.schema.get_field_index(change.UNFIT)
    taken = taken.set_column(place, taken.schema.field(place), pa.nulls(taken.num_rows, change.UNFIT_TYPE))
    cleared = dead.seqs[walked.renewed[batch.dead]]
    if truncates.size:
        cleared = np.concatenate([dead.seqs, dead.unidentified])
    return SplitResult(
        changes=pa.concat_tables([changes.slice(first - 1, 1), taken]) if first else taken,
        dead_letters=rows.take(pa.array(letters)),
        cleared=cleared,
        superseded=replaced if every else NO_SEQS,
        causes=[_cause(schema, rows, row, int(walked.cause[row]), by) for row in letters.tolist()],
    )


def split_rejects_between_truncates(
    schema: TableSchema,
    changes: pa.Table,
    dead: DeadLetterKeys,
    holds: KeyExists,
    partition_by: Mapping[str, str] | None = None,
    *,
    rereads: bool = False,
) -> SplitResult:
    """The same for a table that keeps the rows that a TRUNCATE takes away: what they were before counts, and what of it
    could not be taken is cleared."""
    pieces = _between_truncates(changes)
    found = [split_rejects(schema, piece, dead, holds, partition_by, rereads=rereads) for piece in pieces]
    return replace(found[-1], changes=pa.concat_tables([one.changes for one in found]))


def split_rejects_of_versions(
    schema: TableSchema,
    changes: pa.Table,
    dead: DeadLetterKeys,
    holds: KeyExists,
    partition_by: Mapping[str, str] | None = None,
) -> SplitResult:
    """The same for a table that keeps every version: what was set aside is a letter, whatever comes after it."""
    by = partition_by or {}
    found = [_sift(schema, piece, dead, holds, by, every=True) for piece in _between_truncates(changes)]
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
    """The changes up to the first TRUNCATE, then from each to the next."""
    truncated, begin = pc.equal(changes.column(change.OP), Operation.TRUNCATE.value).to_numpy(), 0
    for end in [*np.flatnonzero(truncated).tolist(), changes.num_rows]:
        yield changes.slice(begin, end - begin)
        begin = end


@dataclass(frozen=True, kw_only=True)
class _NumberedChanges:
    """The changes after the last TRUNCATE as numbers."""

    operations: Codes
    own: Ints
    old: Ints
    dead: Ints
    """The keys of open letters."""
    bad: Flags
    """A value that would come into the table cannot."""
    lost: Flags
    """The key itself does not fit, so that nobody can say which row it is."""
    unheld_key: Flags
    partial: Flags
    keys: list[Any]
    """The columns that the numbers were made of, and where each number stands in them."""
    places: Ints
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
        places = np.zeros(numbered.limit, np.int64)
        places[numbers] = np.arange(numbers.size)
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
            places=places,
            limit=numbered.limit,
        )

    def named(self, schema: TableSchema, numbers: Ints) -> pa.Table:
        """The keys with these numbers."""
        places = pa.array(self.places[numbers])
        names = [schema.columns[i].name for i in key_ordinals(schema)]
        return pa.Table.from_arrays([column.take(places) for column in self.keys], names=names)


@dataclass(frozen=True, kw_only=True)
class _Walked:
    cause: Codes
    dead: Flags
    since: Ints
    renewed: Flags


def _walk_all(
    batch: _NumberedChanges, schema: TableSchema, holds: KeyExists, *, emptied: bool, rereads: bool
) -> _Walked:
    """Walk once to learn which rows of the table are built on, and again if some of them are not there."""
    state = np.zeros(batch.limit, np.int8)
    walked, asked = _walk(batch, state, emptied, rereads)
    wanted = np.flatnonzero(asked)
    if wanted.size:
        missing = wanted[~holds(batch.named(schema, wanted))]
        if missing.size:
            state[missing] = GONE
            walked, _ = _walk(batch, state, emptied, rereads)
    return walked


def _walk(batch: _NumberedChanges, state: Codes, emptied: bool, rereads: bool) -> tuple[_Walked, Flags]:
    dead = np.zeros(batch.limit, np.bool_)
    if not emptied:
        dead[batch.dead] = True
    asked, renewed = np.zeros(batch.limit, np.bool_), np.zeros(batch.limit, np.bool_)
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
        rereads,
        state.copy(),
        dead,
        asked,
        renewed,
        since,
        cause,
        np.full(batch.limit, _NOWHERE, np.int64),
        np.zeros(batch.limit, np.int8),
        np.zeros(batch.limit, np.bool_),
    )
    return _Walked(cause=cause, dead=dead, since=since, renewed=renewed), asked


@kernel
def _follow(
    operations: Codes,
    own: Ints,
    old: Ints,
    bad: Flags,
    lost: Flags,
    partial: Flags,
    emptied: bool,
    rereads: bool,
    state: Codes,
    dead: Flags,
    asked: Flags,
    renewed: Flags,
    since: Ints,
    cause: Codes,
    left_at: Ints,
    left_why: Codes,
    left_untouched: Flags,
) -> None:
    """Walk the changes in order: why each is set aside (0: it is not), and what becomes of the keys.

    As in the fold, a row that was deleted lends its values only to the row right after it, as the other half of a
    move; `left_why` says whether it could.
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
        if why == _MISSING and rereads:
            why, untouched = 0, False
        if bad[i]:
            why = _UNFIT
        elif not partial[i]:
            why = 0
        elif why == 0 and untouched:
            asked[base] = True
        if why:
            cause[i] = why
            if not dead[k]:
                since[k] = i
            dead[k] = True
        else:
            state[k], dead[k], renewed[k] = ALIVE, False, True


def unfit_rows(schema: TableSchema, rows: pa.Table) -> tuple[Flags, Flags]:
    """The rows with a value of their own that does not fit, and those whose key it is.

    What is said of `_before` or `_moved_from` is not a value that comes into the table.
    """
    unfit = one_array(rows.column(change.UNFIT))
    where = pc.list_parent_indices(unfit).to_numpy()
    names = pc.struct_field(unfit.flatten(), [0])
    own, key = np.zeros(rows.num_rows, np.bool_), np.zeros(rows.num_rows, np.bool_)
    own[where[pc.is_in(names, value_set=pa.array(schema.names)).to_numpy(zero_copy_only=False)]] = True
    key[where[pc.is_in(names, value_set=pa.array(schema.key, pa.string())).to_numpy(zero_copy_only=False)]] = True
    return own, key


def _cause(schema: TableSchema, rows: pa.Table, row: int, why: int, partition_by: Mapping[str, str]) -> TailraceError:
    position = rows.column(change.POSITION)[row].as_py()
    if why == _UNFIT:
        return unfit_cause(schema, rows, row, partition_by)
    message = "a partial change arrived for a row that does not exist"
    if why == _BUILDS_ON_DEAD:
        message = "a partial change builds on one that is in dead letters"
    return BaseRowMissing(message, table=schema.table, position=position, hint=REPLAY_HINT)


def unfit_cause(
    schema: TableSchema, rows: pa.Table, row: int, partition_by: Mapping[str, str], hint: str = REPLAY_HINT
) -> TailraceError:
    """Why a row, one of changes that have every column, is none that the table can hold."""
    position, said = rows.column(change.POSITION)[row].as_py(), rows.column(change.UNFIT)[row].as_py() or []
    own = [entry["column"] for entry in said if entry["column"] in schema.names]
    if by_rule := [rule for entry in said if (rule := change.parse_rule_failure(entry["text"])) is not None]:
        return TransformFailed(
            "a rule could not be applied",
            rule=by_rule[0],
            table=schema.table,
            column=", ".join(own),
            position=position,
            hint=hint,
        )
    found = own or _unheld_columns(schema, rows.slice(row, 1), partition_by)
    message = "a value does not fit the column's type" if own else _unheld_message(found, partition_by)
    return ValueUnfit(message, table=schema.table, column=", ".join(found), position=position, hint=hint)


def _unheld_message(columns: Iterable[str], partition_by: Mapping[str, str]) -> str:
    """What is wrong with values of the right type."""
    if set(columns) & set(partition_by):
        return "a value cannot be that of a partition"
    return "a date lies past what Delta can hold"


def _unheld_columns(schema: TableSchema, row: pa.Table, partition_by: Mapping[str, str]) -> list[str]:
    ones = ((column, one_array(row.column(change.stored_name(column.name)))) for column in schema.columns)
    found = ((column.name, find_unstorable_values(column, values, partition_by)) for column, values in ones)
    return [name for name, flags in found if flags is not None and flags.any()]
