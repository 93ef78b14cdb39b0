"""What is set aside where no key ties changes together, against sentences and against a multiset at the source."""

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
"""In `b`: a value that its column cannot hold."""
OTHER = replace(KEYLESS, columns=KEYLESS.columns[:1])


def completed(*rows: Change, schema: TableSchema = KEYLESS, first: int = 0) -> pa.Table:
    given = changes(schema, *map(sent, rows), first=first)
    columns = [
        given.column(field.name) if field.name in given.column_names else pa.nulls(len(rows), field.type)
        for field in schema.change_schema()
    ]
    return pa.Table.from_arrays(columns, schema=schema.change_schema())


def sent(row: Change) -> Change:
    """As the log has it: what does not fit is null, and its text stands beside."""
    unfit = [name for name, value in row.values.items() if value == BAD]
    old = [name for name, value in (row.before or {}).items() if value == BAD]
    said = (*unfit, *(f"{change.BEFORE}.{name}" for name in old), *(row.unfit or ()))
    return replace(
        row,
        values={name: None if name in unfit else value for name, value in row.values.items()},
        unfit=said or None,
        before=row.before and {name: None if name in old else value for name, value in row.before.items()},
    )


def open_letters(*rows: Change, schema: TableSchema = KEYLESS, first: int = 100) -> DeadLetterImages:
    return DeadLetterImages.of(KEYLESS, [(schema, completed(*rows, schema=schema, first=first))])


def sifted(*rows: Change, dead: DeadLetterImages | None = None) -> SplitResult:
    return split_rejects_keyless(KEYLESS, completed(*rows), dead or open_letters(), {})


def seqs(table: pa.Table) -> list[int]:
    found: list[int] = table.column(change.SEQ).to_pylist()
    return found


def test_an_update_to_a_row_that_does_not_fit_takes_the_old_row_away_and_is_the_letter_of_the_new_one() -> None:
    found = sifted(update({}, before={"a": 1, "b": "x"}, a=1, b=BAD))
    assert [(row["_op"], row["a"], row["b"]) for row in found.changes.to_pylist()] == [("delete", 1, "x")]
    (letter,) = found.dead_letters.to_pylist()
    assert (letter["_op"], letter["a"], letter["_unfit"][0]["column"]) == ("insert", 1, "b")
    assert isinstance(found.causes[0], ValueUnfit)


def test_an_update_of_a_row_that_did_not_fit_clears_its_letter_and_takes_no_row_with_a_null_away() -> None:
    dead = open_letters(insert({"a": 1}, b=BAD))
    found = sifted(update({}, before={"a": 1, "b": BAD}, a=1, b="y"), dead=dead)
    assert [(row["_op"], row["b"], row["_unfit"]) for row in found.changes.to_pylist()] == [("insert", "y", None)]
    assert (found.cleared.tolist(), found.dead_letters.num_rows) == ([100], 0)


def test_of_equal_rows_the_oldest_letter_goes_and_one_that_was_dropped_is_not_missed() -> None:
    dead = open_letters(insert({"a": 1}, b=BAD), insert({"a": 1}, b=BAD), insert({"a": 2}, b=BAD))
    found = sifted(delete({"a": 1}, b=BAD), delete({"a": 3}, b=BAD), dead=dead)
    assert (found.cleared.tolist(), found.dead_letters.num_rows, found.changes.num_rows) == ([100], 0, 0)


def test_a_truncate_clears_every_letter_also_those_of_another_shape() -> None:
    other = completed(insert({"a": BAD}), schema=OTHER, first=7)
    dead = DeadLetterImages.of(KEYLESS, [(OTHER, other), (KEYLESS, completed(insert({"a": 1}, b=BAD), first=9))])
    assert sifted(delete({"a": None}, b=BAD), dead=dead).cleared.size == 0
    found = sifted(truncate(), insert({"a": 5}, b=BAD), dead=dead)
    assert (sorted(found.cleared.tolist()), seqs(found.dead_letters), seqs(found.changes)) == ([7, 9], [1], [0])


def test_the_fold_takes_no_image_that_does_not_fit_for_one_with_a_null() -> None:
    with pytest.raises(ValueUnfit):
        fold(KEYLESS, completed(update({}, before={"a": 1, "b": BAD}, a=1, b="y")))
    went = fold(KEYLESS, completed(insert({"a": 1}, b=BAD), update({}, before={"a": 1, "b": BAD}, a=1, b="y")))
    assert [(row["c1"], row["copies"]) for row in went.rows.to_pylist()] == [("y", 1)]


def test_of_a_table_of_changes_each_that_does_not_fit_is_left_out_whatever_comes_after() -> None:
    told = [insert(1, n=1), update(1, unfit=("n",)), update(1, n=2), delete(1, unfit=("id",)), truncate()]
    found = split_rejects_of_append(SHOP, completed(*told, schema=SHOP), {})
    assert (seqs(found.changes), seqs(found.dead_letters), found.cleared.size) == ([0, 2, 4], [1, 3], 0)
    assert found.changes.column(change.UNFIT).null_count == 3


IMAGES = st.tuples(st.integers(0, 1), st.sampled_from(["x", None, BAD, BAD]))
STEPS = st.lists(
    st.tuples(st.sampled_from(["insert", "insert", "update", "delete", "truncate"]), IMAGES, IMAGES, st.booleans()),
    max_size=40,
)


class Lake:
    """A multiset in memory that sets aside what it cannot hold, batch by batch."""

    def __init__(self) -> None:
        self.rows: Counter[tuple[Any, ...]] = Counter()
        self.letters = DeadLetterImages.of(KEYLESS, [])

    def take(self, batch: pa.Table) -> None:
        found = split_rejects_keyless(KEYLESS, batch, self.letters, {})
        result = fold(KEYLESS, found.changes)
        self.rows = Counter() if result.truncated else self.rows
        for row in result.rows.to_pylist():
            self.rows[(row["c0"], row["c1"])] += row["copies"]
        before = self.letters.changes
        stay = before.filter(pa.array(~np.isin(before.column(change.SEQ).to_numpy(), found.cleared)))
        self.letters = DeadLetterImages.of(KEYLESS, [(KEYLESS, stay), (KEYLESS, found.dead_letters)])


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(steps=STEPS)
def test_the_rows_and_the_letters_are_together_the_rows_of_the_source(steps: list[tuple[Any, ...]]) -> None:
    model, told, cuts = KeylessModel(), list[Change](), [0]
    for *step, cut in steps:
        told += model.step(*step)
        cuts += [len(told)] if cut else []
    whole, lake, once = completed(*told), Lake(), Lake()
    for first, last in itertools.pairwise(sorted({*cuts, len(told)})):
        lake.take(whole.slice(first, last - first))
    once.take(whole)
    assert (+lake.rows, seqs(lake.letters.changes)) == (+once.rows, seqs(once.letters.changes))
    assert +lake.rows == Counter({image: n for image, n in model.rows.items() if n and image[1] != BAD})
    waiting = Counter(lake.letters.changes.column("a").to_pylist())
    assert waiting == Counter({image[0]: n for image, n in model.rows.items() if n and image[1] == BAD})
