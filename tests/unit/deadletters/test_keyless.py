"""Rejects of keyless tables and of append mode: single rules, and a multiset at the source."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.deadletters.keyed import SplitResult
from tailrace.deadletters.keyless import DeadLetterImages, split_rejects_keyless, split_rejects_of_append
from tailrace.errors import ValueUnfit
from tailrace.model import change
from tailrace.model.schema import TableSchema
from tailrace.tables.fold.fold import fold
from tests.support.changes import KEYLESS, SHOP, Change, KeylessModel, changes, delete, insert, truncate, update

BAD = "bad"
"""In column `b`: a value that the column cannot hold."""
OTHER = replace(KEYLESS, columns=KEYLESS.columns[:1])


def completed(*rows: Change, schema: TableSchema = KEYLESS, first: int = 0) -> pa.Table:
    table = changes(schema, *map(sent, rows), first=first)
    columns = [
        table.column(field.name) if field.name in table.column_names else pa.nulls(len(rows), field.type)
        for field in schema.change_schema()
    ]
    return pa.Table.from_arrays(columns, schema=schema.change_schema())


def sent(row: Change) -> Change:
    """Return a change as the log has it: unfit values are null, with their texts in `_unfit`."""
    unfit = [name for name, value in row.values.items() if value == BAD]
    old = [name for name, value in (row.before or {}).items() if value == BAD]
    unfit_names = (*unfit, *(f"{change.BEFORE}.{name}" for name in old), *(row.unfit or ()))
    return replace(
        row,
        values={name: None if name in unfit else value for name, value in row.values.items()},
        unfit=unfit_names or None,
        before=row.before and {name: None if name in old else value for name, value in row.before.items()},
    )


def open_dead_letters(*rows: Change, schema: TableSchema = KEYLESS, first: int = 100) -> DeadLetterImages:
    return DeadLetterImages.of(KEYLESS, [(schema, completed(*rows, schema=schema, first=first))])


def split(*rows: Change, dead: DeadLetterImages | None = None) -> SplitResult:
    return split_rejects_keyless(KEYLESS, completed(*rows), dead or open_dead_letters(), {})


def seqs(table: pa.Table) -> list[int]:
    found: list[int] = table.column(change.SEQ).to_pylist()
    return found


def test_an_update_to_an_unfit_row_deletes_the_old_row_and_rejects_the_new_one() -> None:
    found = split(update({}, before={"a": 1, "b": "x"}, a=1, b=BAD))
    assert [(row["_op"], row["a"], row["b"]) for row in found.changes.to_pylist()] == [("delete", 1, "x")]
    (dead_letter,) = found.dead_letters.to_pylist()
    assert (dead_letter["_op"], dead_letter["a"], dead_letter["_unfit"][0]["column"]) == ("insert", 1, "b")
    assert isinstance(found.causes[0], ValueUnfit)


def test_an_update_of_an_unfit_row_clears_its_dead_letter_and_deletes_no_row_with_a_null() -> None:
    dead = open_dead_letters(insert({"a": 1}, b=BAD))
    found = split(update({}, before={"a": 1, "b": BAD}, a=1, b="y"), dead=dead)
    assert [(row["_op"], row["b"], row["_unfit"]) for row in found.changes.to_pylist()] == [("insert", "y", None)]
    assert (found.cleared.tolist(), found.dead_letters.num_rows) == ([100], 0)


def test_of_equal_rows_the_oldest_dead_letter_is_cleared_and_a_dropped_one_is_not_required() -> None:
    dead = open_dead_letters(insert({"a": 1}, b=BAD), insert({"a": 1}, b=BAD), insert({"a": 2}, b=BAD))
    found = split(delete({"a": 1}, b=BAD), delete({"a": 3}, b=BAD), dead=dead)
    assert (found.cleared.tolist(), found.dead_letters.num_rows, found.changes.num_rows) == ([100], 0, 0)


def test_a_truncate_clears_every_dead_letter_of_any_schema() -> None:
    other = completed(insert({"a": BAD}), schema=OTHER, first=7)
    dead = DeadLetterImages.of(KEYLESS, [(OTHER, other), (KEYLESS, completed(insert({"a": 1}, b=BAD), first=9))])
    assert split(delete({"a": None}, b=BAD), dead=dead).cleared.size == 0
    found = split(truncate(), insert({"a": 5}, b=BAD), dead=dead)
    assert (sorted(found.cleared.tolist()), seqs(found.dead_letters), seqs(found.changes)) == ([7, 9], [1], [0])


def test_the_fold_does_not_take_an_unfit_image_for_one_with_a_null() -> None:
    with pytest.raises(ValueUnfit):
        fold(KEYLESS, completed(update({}, before={"a": 1, "b": BAD}, a=1, b="y")))
    folded = fold(KEYLESS, completed(insert({"a": 1}, b=BAD), update({}, before={"a": 1, "b": BAD}, a=1, b="y")))
    assert [(row["c1"], row["copies"]) for row in folded.rows.to_pylist()] == [("y", 1)]


def test_in_append_mode_each_unfit_change_is_rejected_whatever_follows() -> None:
    history = [insert(1, n=1), update(1, unfit=("n",)), update(1, n=2), delete(1, unfit=("id",)), truncate()]
    found = split_rejects_of_append(SHOP, completed(*history, schema=SHOP), {})
    assert (seqs(found.changes), seqs(found.dead_letters), found.cleared.size) == ([0, 2, 4], [1, 3], 0)
    assert found.changes.column(change.UNFIT).null_count == 3


IMAGES = st.tuples(st.integers(0, 1), st.sampled_from(["x", None, BAD, BAD]))
STEPS = st.lists(
    st.tuples(st.sampled_from(["insert", "insert", "update", "delete", "truncate"]), IMAGES, IMAGES, st.booleans()),
    max_size=40,
)


class Lake:
    """A multiset in memory that rejects rows it cannot hold, batch by batch."""

    def __init__(self) -> None:
        self.rows: Counter[tuple[Any, ...]] = Counter()
        self.dead_letters = DeadLetterImages.of(KEYLESS, [])

    def take(self, batch: pa.Table) -> None:
        found = split_rejects_keyless(KEYLESS, batch, self.dead_letters, {})
        result = fold(KEYLESS, found.changes)
        self.rows = Counter() if result.truncated else self.rows
        for row in result.rows.to_pylist():
            self.rows[(row["c0"], row["c1"])] += row["copies"]
        before = self.dead_letters.changes
        stay = before.filter(pa.array(~np.isin(before.column(change.SEQ).to_numpy(), found.cleared)))
        self.dead_letters = DeadLetterImages.of(KEYLESS, [(KEYLESS, stay), (KEYLESS, found.dead_letters)])


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(steps=STEPS)
def test_rows_and_dead_letters_together_are_the_rows_of_the_source(steps: list[tuple[Any, ...]]) -> None:
    model, history, splits = KeylessModel(), list[Change](), [0]
    for *step, splits_here in steps:
        history += model.step(*step)
        splits += [len(history)] if splits_here else []
    whole, lake, once = completed(*history), Lake(), Lake()
    for first, last in itertools.pairwise(sorted({*splits, len(history)})):
        lake.take(whole.slice(first, last - first))
    once.take(whole)
    assert (+lake.rows, seqs(lake.dead_letters.changes)) == (+once.rows, seqs(once.dead_letters.changes))
    assert +lake.rows == Counter({image: n for image, n in model.rows.items() if n and image[1] != BAD})
    waiting = Counter(lake.dead_letters.changes.column("a").to_pylist())
    assert waiting == Counter({image[0]: n for image, n in model.rows.items() if n and image[1] == BAD})
