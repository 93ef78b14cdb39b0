"""Applying changes to a lake table while those that it cannot take are set aside as dead letters.

What must stay true: a change is durable as a letter before the commit that passes it, and letters that the commit
clears are open until it is made. While nothing is wrong and no letter is open this costs a look into a folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace import failpoints
from tailrace.changelog.files import LogPath
from tailrace.changelog.letters import Bundle, Letters
from tailrace.errors import BaseRowMissing, DeadLettersFull, ValueUnfit
from tailrace.model import change
from tailrace.model.schema import TableSchema
from tailrace.tables.base import Applied, Cursor, MendedTable, Reread
from tailrace.tables.fold import Flags, key_ordinals
from tailrace.tables.formed import fold_into
from tailrace.tables.forms import Form, TableMode
from tailrace.tables.identity import one_array
from tailrace.tables.sifting import DeadKeys, Holds, Sifted, has_unfit, sift, sift_kept

LETTERS_MAX = 10_000
"""Open ones of one table. All their keys are held in memory while changes are told apart."""

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


@dataclass(frozen=True, kw_only=True)
class Done:
    """What an apply came to, and what it set aside."""

    applied: Applied
    letters: int = 0


def apply_with_letters(table: MendedTable, step: Step, changes: pa.Table) -> Done:
    """One commit. Where nothing is left to write the position is still committed: the driver goes on from it."""
    if step.form.mode is not TableMode.MIRROR:
        return Done(applied=_apply(table, step, changes))
    letters = Letters(step.log, step.schema.table)
    if not letters.any and not (step.on and step.schema.key and has_unfit(changes)):
        try:
            return Done(applied=_apply(table, step, changes))
        except (ValueUnfit, BaseRowMissing):
            if not step.on or not step.schema.key:
                raise
    here = table.cursor()
    if here is not None and here.seq >= step.cursor.seq:
        return Done(applied=Applied(committed=False, cursor=here))
    if here != step.expected:
        return Done(applied=_apply(table, step, changes.slice(0, 0)))  # which says why not
    letters.settle(step.expected.load)
    letters.void(step.expected.seq)
    if not step.schema.key:  # its key was taken away: nobody can say which rows the letters speak of
        return Done(applied=_apply(table, step, changes))
    sifted = sifted_by(partial(table.holds, step.schema), step, changes, letters.keys(step.expected.seq))
    keep_letters(step, sifted, letters)
    applied = _apply(table, step, sifted.changes)
    letters.tidy(step.cursor.seq)
    failpoints.hit("letters.tidied")
    return Done(applied=applied, letters=sifted.letters.num_rows)


def keep_letters(step: Step, sifted: Sifted, letters: Letters) -> None:
    """Make letters of what was left out, if there is any and not too much; they count once the table is there."""
    refuse_too_many(step, sifted, letters)
    if sifted.letters.num_rows or sifted.cleared.size:
        letters.write(step.schema, step.cursor.seq, sifted.letters, sifted.causes, sifted.cleared.tolist())
        failpoints.hit("letters.written")


def _apply(table: MendedTable, step: Step, changes: pa.Table) -> Applied:
    folded = fold_into(step.form, step.schema, changes)
    return table.apply(step.schema, folded, step.expected, step.cursor, touch=True, reread=step.reread)


def sifted_by(holds: Holds, step: Step, changes: pa.Table, bundles: list[Bundle]) -> Sifted:
    """Changes, which have every column, told apart by what the table holds and by the letters that are open."""
    by = step.form.partitions_of(step.schema)
    apart = sift_kept if step.form.soft_delete else sift
    asked = holds if step.reread is None else all_held  # what is missing is read again
    return apart(step.schema, changes, dead_keys(step.schema, bundles), asked, by)


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
            "more changes of the table could not be applied than are set aside", table=step.schema.table,
            letters=there, more=sifted.letters.num_rows, most=LETTERS_MAX, first_cause=sifted.causes[0].headline,
            hint="Mend the table at the source, then run `tailrace snapshot FILE TABLE`: it is loaded anew.",
        )  # fmt: skip


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
