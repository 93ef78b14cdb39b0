"""Which changes are set aside, against sentences about it and against the plainest model of a table."""

from __future__ import annotations

import itertools
from datetime import date, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.deadletters.keyed import DeadLetterKeys, SplitResult, split_rejects, split_rejects_of_versions
from tailrace.errors import BaseRowMissing, ValueUnfit
from tailrace.model import change
from tailrace.model.schema import TableSchema
from tailrace.tables.fold import row_ids
from tailrace.tables.fold.fold import Flags, fold, key_ordinals
from tests.support.changes import (
    COMPOSITE,
    SHOP,
    Change,
    Model,
    Row,
    apply_in_memory,
    arrival,
    changes,
    delete,
    insert,
    move,
    table_schema,
    truncate,
    update,
)

BIG, BAD = ("big",), ("n",)


def completed(schema: TableSchema, *rows: Change, first: int = 0) -> pa.Table:
    """As the log gives them: every optional column in place."""
    given = changes(schema, *rows, first=first)
    columns = [
        given.column(field.name) if field.name in given.column_names else pa.nulls(len(rows), field.type)
        for field in schema.change_schema()
    ]
    return pa.Table.from_arrays(columns, schema=schema.change_schema())


def sifted(
    *rows: Change,
    dead: DeadLetterKeys | None = None,
    holds: bool = True,
    schema: TableSchema = SHOP,
    rereads: bool = False,
) -> SplitResult:
    def held(keys: pa.Table) -> Flags:
        return np.full(keys.num_rows, holds)

    return split_rejects(
        schema, completed(schema, *rows), dead or DeadLetterKeys.none(schema), held, can_refetch=rereads
    )


def seqs(table: pa.Table) -> list[int]:
    found: list[int] = table.column(change.SEQ).to_pylist()
    return found


def dead(*keys: int) -> DeadLetterKeys:
    return DeadLetterKeys(seqs=np.arange(100, 100 + len(keys)), columns=[pa.array(keys, pa.int64())])


def test_a_change_that_does_not_fit_is_set_aside_and_the_others_are_taken() -> None:
    found = sifted(insert(1, n=1), insert(2, unfit=BAD), insert(3, n=3))
    assert (seqs(found.changes), seqs(found.dead_letters)) == ([0, 2], [1])
    assert [(type(cause), cause.fields["column"], cause.fields["position"]) for cause in found.causes] == [
        (ValueUnfit, "n", "0/1")
    ]


def test_a_letter_keeps_the_text_that_did_not_fit() -> None:
    assert sifted(update(1, unfit=BAD)).dead_letters.column(change.UNFIT).to_pylist() == [
        [{"column": "n", "text": "SECRET"}]
    ]


def test_no_cause_says_a_value() -> None:
    assert "SECRET" not in str(sifted(update(1, unfit=BAD)).causes[0])


@pytest.mark.parametrize("after", [update(1, n=2), insert(1, n=2), delete(1)])
def test_a_whole_change_or_a_delete_after_it_leaves_no_letter(after: Change) -> None:
    found = sifted(update(1, unfit=BAD), after)
    assert (seqs(found.changes), seqs(found.dead_letters)) == ([1], [])


def test_a_partial_change_of_a_row_that_was_set_aside_is_set_aside_too() -> None:
    found = sifted(update(1, unfit=BAD), update(1, unchanged=BIG, n=2), update(2, unchanged=BIG, n=2))
    assert (seqs(found.changes), seqs(found.dead_letters)) == ([2], [0, 1])
    assert isinstance(found.causes[1], BaseRowMissing)


def test_a_partial_change_of_a_row_with_an_open_letter_is_set_aside() -> None:
    found = sifted(update(1, unchanged=BIG), update(2, unchanged=BIG), dead=dead(1))
    assert (seqs(found.changes), seqs(found.dead_letters), found.cleared.tolist()) == ([1], [0], [])


@pytest.mark.parametrize("after", [update(1, n=2), delete(1), truncate()])
def test_what_replaces_the_row_clears_its_letters(after: Change) -> None:
    found = sifted(after, dead=dead(1))
    assert (seqs(found.changes), seqs(found.dead_letters), found.cleared.tolist()) == ([0], [], [100])


def test_a_truncate_clears_the_letters_of_rows_that_did_not_change() -> None:
    found = sifted(update(1, unfit=BAD), truncate(), insert(2, n=1), dead=dead(7, 8))
    assert (seqs(found.changes), seqs(found.dead_letters), found.cleared.tolist()) == ([1, 2], [], [100, 101])


def test_the_letters_of_other_rows_stay_open() -> None:
    assert sifted(update(1, n=1), dead=dead(1, 2, 1)).cleared.tolist() == [100, 102]


def test_a_row_that_dies_again_has_only_its_new_letters() -> None:
    found = sifted(update(1, n=1), update(1, unfit=BAD), dead=dead(1))
    assert (seqs(found.changes), seqs(found.dead_letters), found.cleared.tolist()) == ([0], [1], [100])


def test_a_partial_move_of_a_dead_row_takes_the_old_row_away_and_sets_the_new_one_aside() -> None:
    found = sifted(*move(1, 2, unchanged=BIG, n=5), update(2, unchanged=BIG, n=6), dead=dead(1))
    assert (seqs(found.changes), seqs(found.dead_letters), found.cleared.tolist()) == ([0], [1, 2], [100])


def test_a_whole_move_of_a_dead_row_makes_it_live() -> None:
    found = sifted(*move(1, 2, big="x", n=5), dead=dead(1))
    assert (seqs(found.changes), seqs(found.dead_letters), found.cleared.tolist()) == ([0, 1], [], [100])


def test_a_partial_change_whose_row_the_table_lacks_is_set_aside() -> None:
    found = sifted(update(1, unchanged=BIG), *move(2, 3, unchanged=BIG), update(4, n=1), holds=False)
    assert (seqs(found.changes), seqs(found.dead_letters)) == ([1, 3], [0, 2])
    assert {type(cause) for cause in found.causes} == {BaseRowMissing}


def test_where_rows_can_be_read_again_one_without_a_base_is_as_good_as_whole() -> None:
    rows = (delete(1), update(1, unchanged=BIG), arrival(2, unchanged=BIG), update(2, unchanged=BIG), update(3, n=1))
    found = sifted(*rows, update(4, unchanged=BIG), dead=dead(2, 4), rereads=True)
    assert (seqs(found.changes), seqs(found.dead_letters), found.cleared.tolist()) == ([0, 1, 2, 3, 4], [5], [100])
    assert seqs(sifted(*rows).dead_letters) == [1, 2, 3], "and otherwise it is set aside"


def test_a_partial_change_after_a_delete_is_set_aside() -> None:
    found = sifted(delete(1), update(1, unchanged=BIG))
    assert (seqs(found.changes), seqs(found.dead_letters)) == ([0], [1])


def test_the_table_is_asked_only_for_rows_that_are_built_on() -> None:
    asked: list[list[Any]] = []

    def held(keys: pa.Table) -> Flags:
        asked.append(keys.column("id").to_pylist())
        return np.ones(keys.num_rows, np.bool_)

    rows = completed(SHOP, update(1, n=1), update(2, unchanged=BIG), *move(3, 4, unchanged=BIG), *move(5, 6, n=1))
    split_rejects(SHOP, rows, DeadLetterKeys.none(SHOP), held)
    assert asked == [[2, 3]]


def test_a_key_that_does_not_fit_is_set_aside_with_everything_that_happens_to_it() -> None:
    found = sifted(insert(None, unfit=("id",)), update(None, unfit=("id",)), delete(None, unfit=("id",)), insert(1))
    assert (seqs(found.changes), seqs(found.dead_letters)) == ([3], [0, 1, 2])


def test_a_date_past_what_delta_holds_is_set_aside() -> None:
    schema = table_schema({"id": pa.int64(), "day": pa.date32()})
    near = date(2026, 1, 1)
    rows = completed(schema, insert(1, day=near), insert(2, day=near), delete(2, day=near))
    far = pa.array([0, 99_000_000, 99_000_000], pa.int32()).view(pa.date32())
    rows = rows.set_column(rows.schema.get_field_index("day"), schema.change_schema().field("day"), far)
    found = split_rejects(
        schema, rows.slice(0, 2), DeadLetterKeys.none(schema), lambda keys: np.ones(keys.num_rows, np.bool_)
    )
    assert (seqs(found.changes), seqs(found.dead_letters), found.causes[0].fields["column"]) == ([0], [1], "day")
    found = split_rejects(schema, rows, DeadLetterKeys.none(schema), lambda keys: np.ones(keys.num_rows, np.bool_))
    assert (seqs(found.changes), seqs(found.dead_letters)) == ([0, 2], [])


def test_a_value_that_no_partition_can_have_is_set_aside() -> None:
    rows = completed(
        SHOP,
        insert(1, name="a"),
        update(1, name="", unchanged=BIG),
        insert(2, name=""),
        update(2, name="b", n=1),
        update(3, unchanged=("name", "big"), n=1),
        delete(4, name=""),
    )
    found = split_rejects(
        SHOP, rows, DeadLetterKeys.none(SHOP), lambda keys: np.ones(keys.num_rows, np.bool_), {"name": "title"}
    )
    assert (seqs(found.changes), seqs(found.dead_letters)) == ([0, 3, 4, 5], [1])
    assert found.causes[0].fields["column"] == "name"
    assert "partition" in found.causes[0].message
    long = completed(SHOP, insert(1, name="x" * 245))
    for lake, letters in {"title": [], "a_longer_title": [0]}.items():
        found = split_rejects(SHOP, long, DeadLetterKeys.none(SHOP), lambda _: np.ones(1, np.bool_), {"name": lake})
        assert seqs(found.dead_letters) == letters, "it is the lake's name that makes the folder's"


def test_a_row_of_a_day_that_delta_holds_is_taken() -> None:
    schema = table_schema({"id": pa.int64(), "day": pa.date32()})
    found = sifted(insert(1, day=date.max), insert(2, day=date.min + timedelta(days=1)), schema=schema)
    assert seqs(found.changes) == [0, 1]


# --- any story ---------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "update", "update", "delete", "move", "truncate"]),
        st.integers(0, 3),
        st.integers(0, 3),
        st.text("ab", max_size=2),
        st.sampled_from([(), ("big",), ("big", "name")]),
        st.booleans(),
    ),
    max_size=30,
)


class Lake:
    """A table in memory that sets aside what it cannot take, batch by batch."""

    def __init__(self) -> None:
        self.rows: dict[Any, Row] = {}
        self.letters: dict[int, Any] = {}

    def take(self, batch: pa.Table) -> None:
        names = [COMPOSITE.names[i] for i in key_ordinals(COMPOSITE)]
        types = [COMPOSITE.columns[i].type for i in key_ordinals(COMPOSITE)]
        keys = list(self.letters.values())
        dead = DeadLetterKeys(
            seqs=np.array(list(self.letters), np.int64),
            columns=[pa.array([key[i] for key in keys], kind) for i, kind in enumerate(types)],
        )

        def holds(wanted: pa.Table) -> Flags:
            return np.array([tuple(row[name] for name in names) in self.rows for row in wanted.to_pylist()], np.bool_)

        found = split_rejects(COMPOSITE, batch, dead, holds)
        self.rows = apply_in_memory(COMPOSITE, self.rows, fold(COMPOSITE, found.changes))
        for seq in found.cleared.tolist():
            del self.letters[seq]
        for row in found.dead_letters.to_pylist():
            self.letters[row[change.SEQ]] = tuple(row[name] for name in names)


def told(steps: list[tuple[Any, ...]]) -> tuple[list[Change], dict[Any, Row], list[dict[Any, Row]]]:
    """The changes, some of which do not fit; the rows at the end, and after each change."""
    model, sent, states = Model(), [], []
    for *step, bad in steps:
        for item in model.step(*step):
            poisoned = bad and item.op not in ("delete", "truncate")
            sent.append(Change(**{**item.__dict__, "unfit": BAD if poisoned else None}))
            states.append(model.table())
    return sent, model.table(), states


@settings(max_examples=300, deadline=None)
@given(steps=STEPS, cuts=st.lists(st.integers(0, 60), max_size=6))
def test_rows_are_right_or_have_a_letter_and_the_cuts_do_not_matter(steps: list[Any], cuts: list[int]) -> None:
    sent, at_source, states = told(steps)
    whole = completed(COMPOSITE, *sent)
    lake, once = Lake(), Lake()
    # The two halves of a move are of one transaction, and never come apart.
    cuts = [cut for cut in cuts if cut < len(sent) and sent[cut].moved_from is None]
    for first, last in itertools.pairwise(sorted({0, len(sent), *cuts})):
        lake.take(whole.slice(first, last - first))
    once.take(whole)
    assert (lake.rows, sorted(lake.letters)) == (once.rows, sorted(once.letters))
    open_keys = set(lake.letters.values())
    for key in {*at_source, *lake.rows} - open_keys:
        assert lake.rows.get(key) == at_source.get(key), "a row without a letter is as at the source"
    for key in open_keys & lake.rows.keys():
        assert any(state.get(key) == lake.rows[key] for state in states), "a row is whole, of some moment"


class Past:
    """What a table of versions sets aside, batch by batch; which keys it has a current version of is `Lake`'s."""

    def __init__(self) -> None:
        self.lake = Lake()
        self.letters: dict[int, Any] = {}
        self.passed: set[int] = set()

    def take(self, batch: pa.Table) -> None:
        ordinals = key_ordinals(COMPOSITE)
        names, types = [COMPOSITE.names[i] for i in ordinals], [COMPOSITE.columns[i].type for i in ordinals]
        waiting = {seq: key for seq, key in self.letters.items() if seq not in self.passed}
        columns = [pa.array([key[i] for key in waiting.values()], kind) for i, kind in enumerate(types)]
        dead, there = DeadLetterKeys(seqs=np.array(list(waiting), np.int64), columns=columns), set(self.lake.rows)

        def holds(wanted: pa.Table) -> Flags:
            return np.array([tuple(row[name] for name in names) in there for row in wanted.to_pylist()], np.bool_)

        found = split_rejects_of_versions(COMPOSITE, batch, dead, holds)
        assert found.cleared.size == 0
        assert len(found.causes) == found.dead_letters.num_rows
        self.passed |= set(found.superseded.tolist())
        self.letters |= {row[change.SEQ]: tuple(row[name] for name in names) for row in found.dead_letters.to_pylist()}
        self.lake.take(batch)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS, cuts=st.lists(st.integers(0, 60), max_size=6))
def test_where_versions_count_no_letter_is_ever_cleared_and_the_cuts_do_not_matter(
    steps: list[Any], cuts: list[int]
) -> None:
    sent, _, _ = told(steps)
    whole = completed(COMPOSITE, *sent)
    past, once = Past(), Past()
    cuts = [cut for cut in cuts if cut < len(sent) and sent[cut].moved_from is None]
    for first, last in itertools.pairwise(sorted({0, len(sent), *cuts})):
        past.take(whole.slice(first, last - first))
    once.take(whole)
    assert (past.letters, past.passed) == (once.letters, once.passed)
    poisoned = {seq for seq, item in enumerate(sent) if item.unfit}
    assert poisoned <= past.letters.keys(), "what could not be stored has a letter"
    assert past.letters.keys() - past.passed == past.lake.letters.keys(), "what builds on one is told as in a mirror"


def test_keys_that_need_wide_offsets_are_told_apart_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    named = table_schema({"id": pa.string(), "big": pa.string(), "n": pa.int64()})
    story = [update("a", unfit=BAD), update("b", n=1), update("a", unchanged=BIG, n=2), *move("c", "d", unchanged=BIG)]
    plain = sifted(*story, schema=named)
    monkeypatch.setattr(row_ids, "_OFFSETS_32_BYTES_MAX", 0)
    wide = sifted(*story, schema=named)
    assert (seqs(plain.dead_letters), seqs(plain.changes)) == (seqs(wide.dead_letters), seqs(wide.changes))
    assert seqs(wide.dead_letters) == [0, 2]
