"""Applying changes to a lake table while those that it cannot take are set aside as dead letters.

What must stay true: a change is durable as a letter before the commit that passes it, and letters that the commit
clears are open until it is made. While nothing is wrong and no letter is open this costs a look into a folder.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace import failpoints
from tailrace.capture.postgres import values
from tailrace.deadletters.keyed import (
    DeadLetterKeys,
    KeyExists,
    SplitResult,
    has_unfit,
    split_rejects,
    split_rejects_between_truncates,
    split_rejects_of_versions,
)
from tailrace.deadletters.keyless import DeadLetterImages, split_rejects_keyless, split_rejects_of_append
from tailrace.deadletters.store import DeadLetterBatch, DeadLetterStore
from tailrace.errors import BaseRowMissing, DeadLettersFull, TransformFailed, ValueUnfit
from tailrace.model import change
from tailrace.model.schema import Column, TableSchema
from tailrace.storage.files import LogPath
from tailrace.tables.fold.by_mode import fold_by_mode
from tailrace.tables.fold.fold import Flags, key_ordinals
from tailrace.tables.fold.row_ids import one_array
from tailrace.tables.fold.row_versions import LATEST, latest_times
from tailrace.tables.port import AppliedPosition, Refetch, RepairableTable, WriteResult
from tailrace.tables.spec import TableMode, TableSpec
from tailrace.transforms.output_schema import is_changed_by_rule

DEAD_LETTERS_MAX = 10_000
"""Open ones of one table. All their keys are held in memory while changes are told apart."""

REJECTABLE_ERRORS = (ValueUnfit, TransformFailed, BaseRowMissing)
"""What is raised for changes that a table cannot take, and that may be set aside."""

STOPPED_HINT = (
    "The table has dead letters, and `on_bad_row: stop` does not go past what builds on them. Set `on_bad_row: "
    "dead-letter` again and start anew, mend the row at the source, and run `tailrace dead-letters FILE replay TABLE`; "
    "or load the table anew with `tailrace snapshot FILE TABLE`."
)


@dataclass(frozen=True, kw_only=True)
class ApplyStep:
    """One stretch of changes for one table."""

    log: LogPath
    schema: TableSchema
    spec: TableSpec
    expected: AppliedPosition
    position_after: AppliedPosition
    dead_letters_enabled: bool
    """Whether changes are set aside; otherwise one that cannot be applied is an error, and letters of before stay."""
    refetch: Refetch | None = None

    @property
    def may_refetch(self) -> bool:
        """Whether the table can take a change that leaves out values which neither it nor the batch has: its row is
        read again. Whoever keeps letters sets such a change aside."""
        return self.refetch is not None and not self.dead_letters_enabled


@dataclass(frozen=True, kw_only=True)
class ApplyStepResult:
    """What an apply came to, and what it set aside."""

    applied: WriteResult
    dead_letters: int = 0


def apply_with_dead_letters(table: RepairableTable, step: ApplyStep, changes: pa.Table) -> ApplyStepResult:
    """One commit. Where nothing is left to write the position is still committed: the driver goes on from it."""
    letters = DeadLetterStore(step.log, step.schema.table)
    if not letters.has_any and not (step.dead_letters_enabled and has_unfit(changes)):
        try:
            return ApplyStepResult(applied=_apply(table, step, changes))
        except REJECTABLE_ERRORS:
            if not step.dead_letters_enabled:
                raise
    here = table.applied_position()
    if here is not None and here.seq >= step.position_after.seq:
        return ApplyStepResult(applied=WriteResult(committed=False, applied_position=here))
    if here != step.expected:
        return ApplyStepResult(applied=_apply(table, step, changes.slice(0, 0)))  # which says why not
    letters.recover(step.expected.load, table.replay_id())
    letters.discard_after(step.expected.seq)
    sifted = split_by_mode(partial(table.keys_exist, step.schema), step, changes, letters)
    store_dead_letters(step, sifted, letters)
    applied = _apply(table, step, sifted.changes)
    letters.remove_closed(step.position_after.seq)
    failpoints.hit("letters.tidied")
    return ApplyStepResult(applied=applied, dead_letters=sifted.dead_letters.num_rows)


def store_dead_letters(step: ApplyStep, sifted: SplitResult, letters: DeadLetterStore) -> None:
    """Make letters of what was left out, if there is any and not too much; they count once the table is there."""
    refuse_too_many(step, sifted, letters)
    if sifted.dead_letters.num_rows or sifted.cleared.size or sifted.superseded.size:
        letters.write(
            step.schema,
            step.position_after.seq,
            sifted.dead_letters,
            sifted.causes,
            sifted.cleared.tolist(),
            passed=sifted.superseded.tolist(),
        )
        failpoints.hit("letters.written")


def _apply(table: RepairableTable, step: ApplyStep, changes: pa.Table) -> WriteResult:
    folded = fold_by_mode(step.spec, step.schema, changes, rereads=step.may_refetch)
    return table.apply(step.schema, folded, step.expected, step.position_after, touch=True, reread=step.refetch)


def split_by_mode(holds: KeyExists, step: ApplyStep, changes: pa.Table, letters: DeadLetterStore) -> SplitResult:
    """Changes, which have every column, told apart by what the table holds and by the letters that are open."""
    schema, form, here = step.schema, step.spec, step.expected.seq
    by = form.partitions_of(schema)
    if form.mode is TableMode.APPEND:
        return split_rejects_of_append(schema, changes, by)
    if not schema.key:
        known = ((bundle.schema, bundle.changes) for bundle in letters.read_open(here))
        return split_rejects_keyless(schema, changes, DeadLetterImages.of(schema, known, value_from_text), by)
    dead = keys_of_dead_letters(schema, letters.read_open_keys(here))
    if form.mode is TableMode.HISTORY:  # of which no version is ever read again
        return _split_history(schema, changes, dead, holds, by)
    apart = split_rejects_between_truncates if form.soft_delete else split_rejects
    asked = holds if step.refetch is None else assume_all_exist  # what is missing is read again
    return apart(schema, changes, dead, asked, by, rereads=step.may_refetch)


def value_from_text(column: Column, text: str) -> pa.Scalar | None:
    """A text that the source sent as a value of the column; none of one that a rule works on."""
    return None if is_changed_by_rule(column) else values.parse_value(text, column.type)


def _split_history(
    schema: TableSchema, changes: pa.Table, dead: DeadLetterKeys, holds: KeyExists, partition_by: dict[str, str]
) -> SplitResult:
    """What is set aside counts for the times of the others all the same."""
    if LATEST not in changes.column_names:
        changes = changes.append_column(LATEST, pa.array(latest_times(changes)))
    found = split_rejects_of_versions(schema, changes, dead, holds, partition_by)
    return replace(found, dead_letters=found.dead_letters.drop_columns([LATEST]))


def assume_all_exist(keys: pa.Table) -> Flags:
    """Of each key, that the table has a row of it."""
    return np.ones(keys.num_rows, np.bool_)


def refuse_too_many(step: ApplyStep, sifted: SplitResult, letters: DeadLetterStore) -> None:
    """Raise where nothing may be set aside, or more is than a person could look at."""
    if sifted.causes and not step.dead_letters_enabled:
        first = sifted.causes[0]
        raise type(first)(first.message, hint=STOPPED_HINT, **first.fields)
    there = letters.count(step.expected.seq) - int(sifted.cleared.size)
    if there + sifted.dead_letters.num_rows > DEAD_LETTERS_MAX:
        raise DeadLettersFull(
            "more changes of the table could not be applied than are set aside",
            table=step.schema.table,
            letters=there,
            more=sifted.dead_letters.num_rows,
            most=DEAD_LETTERS_MAX,
            first_cause=sifted.causes[0].headline,
            hint="Mend the table at the source, then run `tailrace snapshot FILE TABLE`: it is loaded anew.",
        )


def keys_of_dead_letters(schema: TableSchema, bundles: list[DeadLetterBatch]) -> DeadLetterKeys:
    """The keys of open letters as columns of the table's shape now; those whose key does not fit are lost.

    By their order in the key: a column may have been renamed since.
    """
    found = DeadLetterKeys.none(schema)
    seqs, lost = [found.seqs], [found.unidentified]
    columns = [[column] for column in found.columns]
    for bundle in bundles:
        mine = key_columns(bundle)
        numbers = bundle.changes.column(change.SEQ).to_numpy()
        if len(mine) != len(columns):
            lost.append(numbers)
            continue
        whole = has_usable_key(bundle)
        seqs.append(numbers[whole])
        lost.append(numbers[~whole])
        for place, column in enumerate(mine):
            columns[place].append(column.filter(pa.array(whole)).combine_chunks().cast(columns[place][0].type))
    joined = [pa.concat_arrays(list(map(one_array, parts))) for parts in columns]
    return DeadLetterKeys(seqs=np.concatenate(seqs), columns=joined, unidentified=np.concatenate(lost))


def key_columns(bundle: DeadLetterBatch) -> list[Any]:
    """The key's columns of some letters, in the table's order."""
    shape, rows = bundle.schema, bundle.changes
    return [rows.column(change.stored_name(shape.columns[i].name)) for i in key_ordinals(shape)]


def has_usable_key(bundle: DeadLetterBatch) -> Flags:
    """Which letters have a key that can be asked for."""
    key = set(bundle.schema.key)
    unfit = bundle.changes.column(change.UNFIT).to_pylist()
    return np.array([not any(entry["column"] in key for entry in said or ()) for said in unfit], np.bool_)
