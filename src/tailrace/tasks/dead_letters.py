"""Apply changes to a lake table, and make those that it cannot take dead letters.

Invariants: a rejected change is durable as a dead letter before the table commit whose position passes it. Dead letters
that a commit clears stay open until the commit exists. While no change is rejected and no dead letter is open, the only
cost is listing a folder.
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
from tailrace.deadletters.step_file import DeadLetterBatch
from tailrace.deadletters.store import DeadLetterStore
from tailrace.errors import BaseRowMissing, DeadLettersFull, TransformFailed, ValueUnfit
from tailrace.model import change
from tailrace.model.schema import Column, TableSchema
from tailrace.storage.files import LogPath
from tailrace.tables.fold.by_mode import fold_by_mode
from tailrace.tables.fold.folded_changes import Flags, key_ordinals
from tailrace.tables.fold.row_ids import one_array
from tailrace.tables.fold.row_versions import LATEST, latest_times
from tailrace.tables.port import AppliedPosition, Refetch, RepairableTable, WriteResult
from tailrace.tables.spec import TableMode, TableSpec
from tailrace.transforms.output_schema import is_changed_by_rule

DEAD_LETTERS_MAX = 10_000
"""Limit of open dead letters per table. All their keys are in memory while changes are split."""

REJECTABLE_ERRORS = (ValueUnfit, TransformFailed, BaseRowMissing)
"""Errors for changes that a table cannot take and that may become dead letters."""

STOPPED_HINT = (
    "The table has open dead letters, and `on_bad_row: stop` refuses changes that build on them. Set `on_bad_row: "
    "dead-letter` and restart, mend the row at the source, then run `tailrace dead-letters FILE replay TABLE`. Or "
    "reload the table: `tailrace snapshot FILE TABLE`."
)


@dataclass(frozen=True, kw_only=True)
class ApplyStep:
    """The parameters of one apply to one table."""

    log: LogPath
    schema: TableSchema
    spec: TableSpec
    expected: AppliedPosition
    position_after: AppliedPosition
    dead_letters_enabled: bool
    """True if rejected changes become dead letters. Otherwise they are errors, and earlier dead letters stay open."""
    refetch: Refetch | None = None

    @property
    def may_refetch(self) -> bool:
        """True if a change with unsent values that neither table nor batch has is refetched.

        With dead letters enabled, such a change becomes a dead letter instead.
        """
        return self.refetch is not None and not self.dead_letters_enabled


@dataclass(frozen=True, kw_only=True)
class ApplyStepResult:
    """Result of an apply: the write, and the number of dead letters."""

    applied: WriteResult
    dead_letters: int = 0


def apply_with_dead_letters(table: RepairableTable, step: ApplyStep, changes: pa.Table) -> ApplyStepResult:
    """Apply changes in one commit, with what the table cannot take as dead letters.

    The position is committed even if no row is left to write, because the driver resumes from it.
    """
    store = DeadLetterStore(step.log, step.schema.table)
    if not store.has_any and not (step.dead_letters_enabled and has_unfit(changes)):
        try:
            return ApplyStepResult(applied=_apply(table, step, changes))
        except REJECTABLE_ERRORS:
            if not step.dead_letters_enabled:
                raise
    current = table.applied_position()
    if current is not None and current.seq >= step.position_after.seq:
        return ApplyStepResult(applied=WriteResult(committed=False, applied_position=current))
    if current != step.expected:
        return ApplyStepResult(applied=_apply(table, step, changes.slice(0, 0)))  # raises: the table is elsewhere
    store.recover(step.expected.load, table.replay_id())
    store.discard_after(step.expected.seq)
    split = split_by_mode(partial(table.keys_exist, step.schema), step, changes, store)
    store_dead_letters(step, split, store)
    write = _apply(table, step, split.changes)
    store.remove_closed(step.position_after.seq)
    failpoints.hit("letters.tidied")
    return ApplyStepResult(applied=write, dead_letters=split.dead_letters.num_rows)


def store_dead_letters(step: ApplyStep, split: SplitResult, store: DeadLetterStore) -> None:
    """Store rejected changes as dead letters, up to the limit. They count once the table has the step's position."""
    refuse_too_many(step, split, store)
    if split.dead_letters.num_rows or split.cleared.size or split.superseded.size:
        store.write(
            step.schema,
            step.position_after.seq,
            split.dead_letters,
            split.causes,
            split.cleared.tolist(),
            superseded=split.superseded.tolist(),
        )
        failpoints.hit("letters.written")


def _apply(table: RepairableTable, step: ApplyStep, changes: pa.Table) -> WriteResult:
    folded = fold_by_mode(step.spec, step.schema, changes, can_refetch=step.may_refetch)
    return table.apply(step.schema, folded, step.expected, step.position_after, touch=True, refetch=step.refetch)


def split_by_mode(key_exists: KeyExists, step: ApplyStep, changes: pa.Table, store: DeadLetterStore) -> SplitResult:
    """Split off changes that the table cannot take. Considers its rows and its open dead letters.

    The changes must have every column.
    """
    schema, spec, seq = step.schema, step.spec, step.expected.seq
    partition_by = spec.partitions_of(schema)
    if spec.mode is TableMode.APPEND:
        return split_rejects_of_append(schema, changes, partition_by)
    if not schema.key:
        bundles = ((bundle.schema, bundle.changes) for bundle in store.read_open(seq))
        return split_rejects_keyless(
            schema, changes, DeadLetterImages.of(schema, bundles, value_from_text), partition_by
        )
    dead = keys_of_dead_letters(schema, store.read_open_keys(seq))
    if spec.mode is TableMode.HISTORY:  # versions are never refetched
        return _split_history(schema, changes, dead, key_exists, partition_by)
    split = split_rejects_between_truncates if spec.soft_delete else split_rejects
    exists_or_refetched = key_exists if step.refetch is None else assume_all_exist  # missing rows are refetched
    return split(schema, changes, dead, exists_or_refetched, partition_by, can_refetch=step.may_refetch)


def value_from_text(column: Column, text: str) -> pa.Scalar | None:
    """Parse a text from the source as a value of the column. None for a column that a rule changes."""
    return None if is_changed_by_rule(column) else values.parse_value(text, column.type)


def _split_history(
    schema: TableSchema, changes: pa.Table, dead: DeadLetterKeys, key_exists: KeyExists, partition_by: dict[str, str]
) -> SplitResult:
    # Rejected changes count for the commit times of the others, so times are added before the split.
    if LATEST not in changes.column_names:
        changes = changes.append_column(LATEST, pa.array(latest_times(changes)))
    split = split_rejects_of_versions(schema, changes, dead, key_exists, partition_by)
    return replace(split, dead_letters=split.dead_letters.drop_columns([LATEST]))


def assume_all_exist(keys: pa.Table) -> Flags:
    """Return True for each key, as if the table had a row for it."""
    return np.ones(keys.num_rows, np.bool_)


def refuse_too_many(step: ApplyStep, split: SplitResult, store: DeadLetterStore) -> None:
    """Raise if dead letters are not enabled, or if there are too many."""
    if split.causes and not step.dead_letters_enabled:
        first = split.causes[0]
        raise type(first)(first.message, hint=STOPPED_HINT, **first.fields)
    open_count = store.count(step.expected.seq) - int(split.cleared.size)
    if open_count + split.dead_letters.num_rows > DEAD_LETTERS_MAX:
        raise DeadLettersFull(
            "the table has too many dead letters",
            table=step.schema.table,
            letters=open_count,
            more=split.dead_letters.num_rows,
            most=DEAD_LETTERS_MAX,
            first_cause=split.causes[0].headline,
            hint="Correct the rows at the source, then reload the table: `tailrace snapshot FILE TABLE`.",
        )


def keys_of_dead_letters(schema: TableSchema, bundles: list[DeadLetterBatch]) -> DeadLetterKeys:
    """Return the keys of open dead letters as columns of the table's current schema.

    Key columns are matched by their order in the key, because a column may have been renamed since. Dead letters whose
    key does not fit the schema are returned as unidentified.
    """
    keys = DeadLetterKeys.none(schema)
    seqs, lost = [keys.seqs], [keys.unidentified]
    columns = [[column] for column in keys.columns]
    for bundle in bundles:
        own = key_columns(bundle)
        numbers = bundle.changes.column(change.SEQ).to_numpy()
        if len(own) != len(columns):
            lost.append(numbers)
            continue
        usable = has_usable_key(bundle)
        seqs.append(numbers[usable])
        lost.append(numbers[~usable])
        for i, column in enumerate(own):
            columns[i].append(column.filter(pa.array(usable)).combine_chunks().cast(columns[i][0].type))
    joined = [pa.concat_arrays(list(map(one_array, parts))) for parts in columns]
    return DeadLetterKeys(seqs=np.concatenate(seqs), columns=joined, unidentified=np.concatenate(lost))


def key_columns(bundle: DeadLetterBatch) -> list[Any]:
    """Return the key columns of dead letters, in the order of the table's key."""
    schema, rows = bundle.schema, bundle.changes
    return [rows.column(change.stored_name(schema.columns[i].name)) for i in key_ordinals(schema)]


def has_usable_key(bundle: DeadLetterBatch) -> Flags:
    """Return for each dead letter whether every key column has a usable value."""
    key = set(bundle.schema.key)
    unfit = bundle.changes.column(change.UNFIT).to_pylist()
    return np.array([not any(entry["column"] in key for entry in entries or ()) for entries in unfit], np.bool_)
