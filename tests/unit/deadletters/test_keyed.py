"""Rejects of a keyed table: single rules, and random histories against a simple model."""

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
from tailrace.tables.fold.fold import fold
from tailrace.tables.fold.folded_changes import Flags, key_ordinals
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
    """Return changes as the log has them: with every optional column."""
    table = changes(schema, *rows, first=first)
    columns = [
        table.column(field.name) if field.name in table.column_names else pa.nulls(len(rows), field.type)
        for field in schema.change_schema()
    ]
    return pa.Table.from_arrays(columns, schema=schema.change_schema())


def split(
    *rows: Change,
    dead: DeadLetterKeys | None = None,
    holds: bool = True,
    schema: TableSchema = SHOP,
    can_refetch: bool = False,
) -> SplitResult:
    def key_exists(keys: pa.Table) -> Flags:
        return np.full(keys.num_rows, holds)

    return split_rejects(
        schema, completed(schema, *rows), dead or DeadLetterKeys.none(schema), key_exists, can_refetch=can_refetch
    )


def seqs(table: pa.Table) -> list[int]:
    found: list[int] = table.column(change.SEQ).to_pylist()
    return found


def dead(*keys: int) -> DeadLetterKeys:
    return DeadLetterKeys(seqs=np.arange(100, 100 + len(keys)), columns=[pa.array(keys, pa.int64())])


def test_an_unfit_change_is_rejected_and_the_others_are_applied() -> None:
    found = split(insert(1, n=1), insert(2, unfit=BAD), insert(3, n=3))
    assert (seqs(found.changes), seqs(found.dead_letters)) == ([0, 2], [1])
    assert [(type(cause), cause.fields["column"], cause.fields["position"]) for cause in found.causes] == [
        (ValueUnfit, "n", "0/1")
    ]


def test_a_dead_letter_keeps_the_text_that_did_not_fit() -> None:
    assert split(update(1, unfit=BAD)).dead_letters.column(change.UNFIT).to_pylist() == [
        [{"column": "n", "text": "SECRET"}]
    ]


def test_a_cause_has_no_value() -> None:
    assert "SECRET" not in str(split(update(1, unfit=BAD)).causes[0])


@pytest.mark.parametrize("after", [update(1, n=2), insert(1, n=2), delete(1)])
def test_a_later_whole_change_or_delete_leaves_no_dead_letter(after: Change) -> None:
    found = split(update(1, unfit=BAD), after)
    assert (seqs(found.changes), seqs(found.dead_letters)) == ([1], [])


def test_a_partial_change_of_a_rejected_row_is_rejected_too() -> None:
    found = split(update(1, unfit=BAD), update(1, unchanged=BIG, n=2), update(2, unchanged=BIG, n=2))
    assert (seqs(found.changes), seqs(found.dead_letters)) == ([2], [0, 1])
    assert isinstance(found.causes[1], BaseRowMissing)


def test_a_partial_change_of_a_row_with_an_open_dead_letter_is_rejected() -> None:
    found = split(update(1, unchanged=BIG), update(2, unchanged=BIG), dead=dead(1))
    assert (seqs(found.changes), seqs(found.dead_letters), found.cleared.tolist()) == ([1], [0], [])


@pytest.mark.parametrize("after", [update(1, n=2), delete(1), truncate()])
def test_a_change_that_replaces_the_row_clears_its_dead_letters(after: Change) -> None:
    found = split(after, dead=dead(1))
    assert (seqs(found.changes), seqs(found.dead_letters), found.cleared.tolist()) == ([0], [], [100])


def test_a_truncate_clears_the_dead_letters_of_unchanged_rows() -> None:
    found = split(update(1, unfit=BAD), truncate(), insert(2, n=1), dead=dead(7, 8))
    assert (seqs(found.changes), seqs(found.dead_letters), found.cleared.tolist()) == ([1, 2], [], [100, 101])


def test_the_dead_letters_of_other_rows_stay_open() -> None:
    assert split(update(1, n=1), dead=dead(1, 2, 1)).cleared.tolist() == [100, 102]


def test_a_row_that_is_rejected_again_has_only_new_dead_letters() -> None:
    found = split(update(1, n=1), update(1, unfit=BAD), dead=dead(1))
    assert (seqs(found.changes), seqs(found.dead_letters), found.cleared.tolist()) == ([0], [1], [100])


def test_a_partial_key_move_of_a_dead_row_removes_the_old_row_and_rejects_the_new_one() -> None:
    found = split(*move(1, 2, unchanged=BIG, n=5), update(2, unchanged=BIG, n=6), dead=dead(1))
    assert (seqs(found.changes), seqs(found.dead_letters), found.cleared.tolist()) == ([0], [1, 2], [100])


def test_a_whole_key_move_of_a_dead_row_makes_it_normal_again() -> None:
    found = split(*move(1, 2, big="x", n=5), dead=dead(1))
    assert (seqs(found.changes), seqs(found.dead_letters), found.cleared.tolist()) == ([0, 1], [], [100])


def test_a_partial_change_of_a_missing_row_is_rejected() -> None:
    found = split(update(1, unchanged=BIG), *move(2, 3, unchanged=BIG), update(4, n=1), holds=False)
    assert (seqs(found.changes), seqs(found.dead_letters)) == ([1, 3], [0, 2])
    assert {type(cause) for cause in found.causes} == {BaseRowMissing}


def test_with_refetch_a_change_without_a_base_counts_as_whole() -> None:
    rows = (delete(1), update(1, unchanged=BIG), arrival(2, unchanged=BIG), update(2, unchanged=BIG), update(3, n=1))
    found = split(*rows, update(4, unchanged=BIG), dead=dead(2, 4), can_refetch=True)
    assert (seqs(found.changes), seqs(found.dead_letters), found.cleared.tolist()) == ([0, 1, 2, 3, 4], [5], [100])
    assert seqs(split(*rows).dead_letters) == [1, 2, 3], "without refetch they are rejected"


def test_a_partial_change_after_a_delete_is_rejected() -> None:
    found = split(delete(1), update(1, unchanged=BIG))
    assert (seqs(found.changes), seqs(found.dead_letters)) == ([0], [1])


def test_only_rows_that_are_built_on_are_looked_up() -> None:
    lookups: list[list[Any]] = []

    def key_exists(keys: pa.Table) -> Flags:
        lookups.append(keys.column("id").to_pylist())
        return np.ones(keys.num_rows, np.bool_)

    rows = completed(SHOP, update(1, n=1), update(2, unchanged=BIG), *move(3, 4, unchanged=BIG), *move(5, 6, n=1))
    split_rejects(SHOP, rows, DeadLetterKeys.none(SHOP), key_exists)
    assert lookups == [[2, 3]]


def test_every_change_with_an_unfit_key_is_rejected() -> None:
    found = split(insert(None, unfit=("id",)), update(None, unfit=("id",)), delete(None, unfit=("id",)), insert(1))
    assert (seqs(found.changes), seqs(found.dead_letters)) == ([3], [0, 1, 2])


def test_a_date_later_than_delta_can_store_is_rejected() -> None:
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


def test_an_unusable_partition_value_is_rejected() -> None:
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
    long_name = completed(SHOP, insert(1, name="x" * 245))
    for lake_column, dead_letters in {"title": [], "a_longer_title": [0]}.items():
        found = split_rejects(
            SHOP, long_name, DeadLetterKeys.none(SHOP), lambda _: np.ones(1, np.bool_), {"name": lake_column}
        )
        assert seqs(found.dead_letters) == dead_letters, "the folder's name has the column's lake name"


def test_the_extreme_dates_that_delta_can_store_are_applied() -> None:
    schema = table_schema({"id": pa.int64(), "day": pa.date32()})
    found = split(insert(1, day=date.max), insert(2, day=date.min + timedelta(days=1)), schema=schema)
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
    """A table in memory that rejects changes it cannot take, batch by batch."""

    def __init__(self) -> None:
        self.rows: dict[Any, Row] = {}
        self.dead_letters: dict[int, Any] = {}

    def apply(self, batch: pa.Table) -> None:
        names = [COMPOSITE.names[i] for i in key_ordinals(COMPOSITE)]
        types = [COMPOSITE.columns[i].type for i in key_ordinals(COMPOSITE)]
        keys = list(self.dead_letters.values())
        dead = DeadLetterKeys(
            seqs=np.array(list(self.dead_letters), np.int64),
            columns=[pa.array([key[i] for key in keys], kind) for i, kind in enumerate(types)],
        )

        def holds(wanted: pa.Table) -> Flags:
            return np.array([tuple(row[name] for name in names) in self.rows for row in wanted.to_pylist()], np.bool_)

        found = split_rejects(COMPOSITE, batch, dead, holds)
        self.rows = apply_in_memory(COMPOSITE, self.rows, fold(COMPOSITE, found.changes))
        for seq in found.cleared.tolist():
            del self.dead_letters[seq]
        for row in found.dead_letters.to_pylist():
            self.dead_letters[row[change.SEQ]] = tuple(row[name] for name in names)


def history(steps: list[tuple[Any, ...]]) -> tuple[list[Change], dict[Any, Row], list[dict[Any, Row]]]:
    """Return changes, some unfit; the final rows; and the rows after each change."""
    model, sent, states = Model(), [], []
    for *step, bad in steps:
        for item in model.step(*step):
            poisoned = bad and item.op not in ("delete", "truncate")
            sent.append(Change(**{**item.__dict__, "unfit": BAD if poisoned else None}))
            states.append(model.table())
    return sent, model.table(), states


@settings(max_examples=300, deadline=None)
@given(steps=STEPS, splits=st.lists(st.integers(0, 60), max_size=6))
def test_rows_are_right_or_have_a_dead_letter_in_any_batches(steps: list[Any], splits: list[int]) -> None:
    sent, at_source, states = history(steps)
    whole = completed(COMPOSITE, *sent)
    lake, once = Lake(), Lake()
    # The two halves of a key move are in one transaction, and never in two batches.
    splits = [split_at for split_at in splits if split_at < len(sent) and sent[split_at].moved_from is None]
    for first, last in itertools.pairwise(sorted({0, len(sent), *splits})):
        lake.apply(whole.slice(first, last - first))
    once.apply(whole)
    assert (lake.rows, sorted(lake.dead_letters)) == (once.rows, sorted(once.dead_letters))
    open_keys = set(lake.dead_letters.values())
    for key in {*at_source, *lake.rows} - open_keys:
        assert lake.rows.get(key) == at_source.get(key), "a row without a dead letter is as at the source"
    for key in open_keys & lake.rows.keys():
        assert any(state.get(key) == lake.rows[key] for state in states), "a row is one whole state of the source row"


class History:
    """A history's rejects, batch by batch; `Lake` says which keys have a current version."""

    def __init__(self) -> None:
        self.lake = Lake()
        self.dead_letters: dict[int, Any] = {}
        self.superseded: set[int] = set()

    def apply(self, batch: pa.Table) -> None:
        ordinals = key_ordinals(COMPOSITE)
        names, types = [COMPOSITE.names[i] for i in ordinals], [COMPOSITE.columns[i].type for i in ordinals]
        waiting = {seq: key for seq, key in self.dead_letters.items() if seq not in self.superseded}
        columns = [pa.array([key[i] for key in waiting.values()], kind) for i, kind in enumerate(types)]
        dead, there = DeadLetterKeys(seqs=np.array(list(waiting), np.int64), columns=columns), set(self.lake.rows)

        def holds(wanted: pa.Table) -> Flags:
            return np.array([tuple(row[name] for name in names) in there for row in wanted.to_pylist()], np.bool_)

        found = split_rejects_of_versions(COMPOSITE, batch, dead, holds)
        assert found.cleared.size == 0
        assert len(found.causes) == found.dead_letters.num_rows
        self.superseded |= set(found.superseded.tolist())
        self.dead_letters |= {
            row[change.SEQ]: tuple(row[name] for name in names) for row in found.dead_letters.to_pylist()
        }
        self.lake.apply(batch)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS, splits=st.lists(st.integers(0, 60), max_size=6))
def test_a_history_clears_no_dead_letter_in_any_batches(steps: list[Any], splits: list[int]) -> None:
    sent, _, _ = history(steps)
    whole = completed(COMPOSITE, *sent)
    past, once = History(), History()
    splits = [split_at for split_at in splits if split_at < len(sent) and sent[split_at].moved_from is None]
    for first, last in itertools.pairwise(sorted({0, len(sent), *splits})):
        past.apply(whole.slice(first, last - first))
    once.apply(whole)
    assert (past.dead_letters, past.superseded) == (once.dead_letters, once.superseded)
    poisoned = {seq for seq, item in enumerate(sent) if item.unfit}
    assert poisoned <= past.dead_letters.keys(), "every unfit change has a dead letter"
    assert past.dead_letters.keys() - past.superseded == past.lake.dead_letters.keys(), (
        "changes that build on one are rejected as in a mirror"
    )


def test_keys_with_wide_offsets_are_distinguished_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    named = table_schema({"id": pa.string(), "big": pa.string(), "n": pa.int64()})
    story = [update("a", unfit=BAD), update("b", n=1), update("a", unchanged=BIG, n=2), *move("c", "d", unchanged=BIG)]
    plain = split(*story, schema=named)
    monkeypatch.setattr(row_ids, "_OFFSETS_32_BYTES_MAX", 0)
    wide = split(*story, schema=named)
    assert (seqs(plain.dead_letters), seqs(plain.changes)) == (seqs(wide.dead_letters), seqs(wide.changes))
    assert seqs(wide.dead_letters) == [0, 2]
