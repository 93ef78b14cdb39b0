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
from tailrace.deadletters.keyed import DeadKeys, Holds, Sifted, has_unfit, sift, sift_kept, sift_versions
from tailrace.deadletters.keyless import DeadImages, sift_each, sift_images
from tailrace.deadletters.store import Bundle, Letters
from tailrace.errors import BaseRowMissing, DeadLettersFull, TransformFailed, ValueUnfit
from tailrace.model import change
from tailrace.model.schema import Column, TableSchema
from tailrace.storage.files import LogPath
from tailrace.tables.fold.by_mode import fold_into
from tailrace.tables.fold.fold import Flags, key_ordinals
from tailrace.tables.fold.row_ids import one_array
from tailrace.tables.fold.row_versions import LATEST, latest_times
from tailrace.tables.port import Applied, Cursor, MendedTable, Reread
from tailrace.tables.spec import Form, TableMode
from tailrace.transforms.output_schema import is_touched

LETTERS_MAX = 10_000
"""Open ones of one table. All their keys are held in memory while changes are told apart."""

NOT_TAKEN = (ValueUnfit, TransformFailed, BaseRowMissing)
"""What is raised for changes that a table cannot take, and that may be set aside."""

STOPPED_HINT = (
    "The table has dead letters, and `on_bad_row: stop` does not go past what builds on them. Set `on_bad_row: "
    "dead-letter` again and start anew, mend the row at the source, and run `tailrace dead-letters FILE replay TABLE`; "
    "or load the table anew with `tailrace snapshot FILE TABLE`."
)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One stretch of changes for one table."""

    log: LogPath
    schema: TableSchema
    form: Form
    expected: Cursor
    cursor: Cursor
    on: bool
    """Whether changes are set aside; otherwise one that cannot be applied is an error, and letters of before stay."""
    reread: Reread | None = None

    @property
    def rereads(self) -> bool:
        """Whether the table can take a change that leaves out values which neither it nor the batch has: its row is
        read again. Whoever keeps letters sets such a change aside."""
        return self.reread is not None and not self.on


@dataclass(frozen=True, kw_only=True)
class Done:
    """What an apply came to, and what it set aside."""

    applied: Applied
    letters: int = 0


def apply_with_letters(table: MendedTable, step: Step, changes: pa.Table) -> Done:
    """One commit. Where nothing is left to write the position is still committed: the driver goes on from it."""
    letters = Letters(step.log, step.schema.table)
    if not letters.any and not (step.on and has_unfit(changes)):
        try:
            return Done(applied=_apply(table, step, changes))
        except NOT_TAKEN:
            if not step.on:
                raise
    here = table.cursor()
    if here is not None and here.seq >= step.cursor.seq:
        return Done(applied=Applied(committed=False, cursor=here))
    if here != step.expected:
        return Done(applied=_apply(table, step, changes.slice(0, 0)))  # which says why not
    letters.settle(step.expected.load, table.late())
    letters.void(step.expected.seq)
    sifted = sifted_by(partial(table.holds, step.schema), step, changes, letters)
    keep_letters(step, sifted, letters)
    applied = _apply(table, step, sifted.changes)
    letters.tidy(step.cursor.seq)
    failpoints.hit("letters.tidied")
    return Done(applied=applied, letters=sifted.letters.num_rows)


def keep_letters(step: Step, sifted: Sifted, letters: Letters) -> None:
    """Make letters of what was left out, if there is any and not too much; they count once the table is there."""
    refuse_too_many(step, sifted, letters)
    if sifted.letters.num_rows or sifted.cleared.size or sifted.passed.size:
        letters.write(
            step.schema,
            step.cursor.seq,
            sifted.letters,
            sifted.causes,
            sifted.cleared.tolist(),
            passed=sifted.passed.tolist(),
        )
        failpoints.hit("letters.written")


def _apply(table: MendedTable, step: Step, changes: pa.Table) -> Applied:
    folded = fold_into(step.form, step.schema, changes, rereads=step.rereads)
    return table.apply(step.schema, folded, step.expected, step.cursor, touch=True, reread=step.reread)


def sifted_by(holds: Holds, step: Step, changes: pa.Table, letters: Letters) -> Sifted:
    """Changes, which have every column, told apart by what the table holds and by the letters that are open."""
    schema, form, here = step.schema, step.form, step.expected.seq
    by = form.partitions_of(schema)
    if form.mode is TableMode.APPEND:
        return sift_each(schema, changes, by)
    if not schema.key:
        known = ((bundle.shape, bundle.changes) for bundle in letters.open(here))
        return sift_images(schema, changes, DeadImages.of(schema, known, letter_value), by)
    dead = dead_keys(schema, letters.keys(here))
    if form.mode is TableMode.HISTORY:  # of which no version is ever read again
        return _sifted_versions(schema, changes, dead, holds, by)
    apart = sift_kept if form.soft_delete else sift
    asked = holds if step.reread is None else all_held  # what is missing is read again
    return apart(schema, changes, dead, asked, by, rereads=step.rereads)


def letter_value(column: Column, text: str) -> pa.Scalar | None:
    """A text that the source sent as a value of the column; none of one that a rule works on."""
    return None if is_touched(column) else values.value_of(text, column.type)


def _sifted_versions(
    schema: TableSchema, changes: pa.Table, dead: DeadKeys, holds: Holds, partition_by: dict[str, str]
) -> Sifted:
    """What is set aside counts for the times of the others all the same."""
    if LATEST not in changes.column_names:
        changes = changes.append_column(LATEST, pa.array(latest_times(changes)))
    found = sift_versions(schema, changes, dead, holds, partition_by)
    return replace(found, letters=found.letters.drop_columns([LATEST]))


def all_held(keys: pa.Table) -> Flags:
    """Of each key, that the table has a row of it."""
    return np.ones(keys.num_rows, np.bool_)


def refuse_too_many(step: Step, sifted: Sifted, letters: Letters) -> None:
    """Raise where nothing may be set aside, or more is than a person could look at."""
    if sifted.causes and not step.on:
        first = sifted.causes[0]
        raise type(first)(first.message, hint=STOPPED_HINT, **first.fields)
    there = letters.count(step.expected.seq) - int(sifted.cleared.size)
    if there + sifted.letters.num_rows > LETTERS_MAX:
        raise DeadLettersFull(
            "more changes of the table could not be applied than are set aside",
            table=step.schema.table,
            letters=there,
            more=sifted.letters.num_rows,
            most=LETTERS_MAX,
            first_cause=sifted.causes[0].headline,
            hint="Mend the table at the source, then run `tailrace snapshot FILE TABLE`: it is loaded anew.",
        )


def dead_keys(schema: TableSchema, bundles: list[Bundle]) -> DeadKeys:
    """The keys of open letters as columns of the table's shape now; those whose key does not fit are lost.

    By their order in the key: a column may have been renamed since.
    """
    found = DeadKeys.none(schema)
    seqs, lost = [found.seqs], [found.lost]
    columns = [[column] for column in found.columns]
    for bundle in bundles:
        mine = key_columns(bundle)
        numbers = bundle.changes.column(change.SEQ).to_numpy()
        if len(mine) != len(columns):
            lost.append(numbers)
            continue
        whole = fitting_keys(bundle)
        seqs.append(numbers[whole])
        lost.append(numbers[~whole])
        for place, column in enumerate(mine):
            columns[place].append(column.filter(pa.array(whole)).combine_chunks().cast(columns[place][0].type))
    joined = [pa.concat_arrays(list(map(one_array, parts))) for parts in columns]
    return DeadKeys(seqs=np.concatenate(seqs), columns=joined, lost=np.concatenate(lost))


def key_columns(bundle: Bundle) -> list[Any]:
    """The key's columns of some letters, in the table's order."""
    shape, rows = bundle.shape, bundle.changes
    return [rows.column(change.stored_name(shape.columns[i].name)) for i in key_ordinals(shape)]


def fitting_keys(bundle: Bundle) -> Flags:
    """Which letters have a key that can be asked for."""
    key = set(bundle.shape.key)
    unfit = bundle.changes.column(change.UNFIT).to_pylist()
    return np.array([not any(entry["column"] in key for entry in said or ()) for said in unfit], np.bool_)
