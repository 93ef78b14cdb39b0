"""Filters: a row that enters is an insert, one that leaves a delete, and numbers have no gap.

The oracle is a table: applying the filtered changes must leave what filtering the applied changes leaves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.errors import TransformFailed
from tailrace.model import change
from tailrace.model.batch import ChangeBatch, Window
from tailrace.model.change import Operation
from tailrace.model.position import Lsn
from tailrace.transforms.row_images import is_constant, open_batch
from tailrace.transforms.rules import Cast, Filter, Mask, Rule
from tests.support.transforms import batch, changed, only, person, plan_of, values

INSERT, UPDATE, DELETE, TRUNCATE = Operation.INSERT, Operation.UPDATE, Operation.DELETE, Operation.TRUNCATE
GERMANS = Filter(name="germans", where="country == 'DE'")


def filtered(*rows: dict[str, Any], rule: Rule = GERMANS) -> list[dict[str, Any]]:
    found = plan_of(rule).apply(batch(*rows)).batches
    return only(found) if found else []


def de(number: int) -> dict[str, Any]:
    return person(number, "m", "1", "DE")


def fr(number: int) -> dict[str, Any]:
    return person(number, "m", "1", "FR")


def test_operations_are_recognised_wherever_a_batch_begins_and_whichever_rows_are_kept() -> None:
    kinds = [*Operation, *reversed(Operation)]
    rows = batch(*(changed(kind, de(at)) for at, kind in enumerate(kinds)))
    for begin in (0, 3, len(kinds)):
        some = open_batch(replace(rows, data=rows.data.slice(begin)))
        keep = np.arange(some.count) % 2 == 0
        left = kinds[begin:]
        for _ in range(2):
            for kind in Operation:
                assert some.is_op(kind).tolist() == [one is kind for one in left]
            some.take(keep)
            left = left[::2] if len(left) == len(keep) else left
            keep = np.ones(some.count, np.bool_)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(["", "a", "aa", "ab"]) | st.none(), max_size=6) | st.lists(st.just("0/1A"), max_size=6),
    st.integers(0, 2),
)
def test_strings_are_constant_only_if_all_are_equal(given: list[str | None], begin: int) -> None:
    left = given[begin:]
    assert is_constant(pa.array(given, pa.string()).slice(begin)) == (None not in left and len(set(left)) == 1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([7, 8]) | st.none(), max_size=5), st.sampled_from([pa.int32(), pa.int64()]))
def test_numbers_are_constant_only_if_all_are_equal(given: list[int | None], kind: pa.DataType) -> None:
    assert is_constant(pa.array(given, kind)) == (None not in given and len(set(given)) == 1)


def test_a_few_kept_rows_do_not_hold_the_memory_of_all() -> None:
    rows = open_batch(batch(*(changed(INSERT, de(number)) for number in range(1000))))
    whole = rows.metadata[change.OP].buffers()[2].size
    rows.take(np.arange(1000) < 10)
    assert rows.metadata[change.OP].buffers()[2].size < whole / 10


def test_an_update_that_leaves_is_a_delete_of_the_old_row() -> None:
    (row,) = filtered(changed(UPDATE, fr(1), before=de(1)))
    assert (row[change.OP], row["id"], row["country"]) == ("delete", 1, "DE")


def test_an_update_that_enters_is_an_insert() -> None:
    (row,) = filtered(changed(UPDATE, de(1), before=fr(1)))
    assert (row[change.OP], row["country"], row.get(change.BEFORE)) == ("insert", "DE", None)


def test_an_unwanted_row_without_its_old_row_is_deleted_by_its_key() -> None:
    gone, stays = filtered(changed(UPDATE, fr(1)), changed(UPDATE, de(2)))
    assert (gone[change.OP], gone["id"], gone["country"], gone["mail"]) == ("delete", 1, None, None)
    assert (stays[change.OP], stays["id"]) == ("update", 2)


def test_a_row_that_was_never_wanted_leaves_no_trace() -> None:
    assert not filtered(
        changed(INSERT, fr(1)),
        changed(UPDATE, fr(1), before=fr(1)),
        changed(DELETE, fr(1), before=fr(1)),
        changed(INSERT, person(2)),
    )


def test_truncates_and_deletes_with_only_a_key_pass_a_filter() -> None:
    found = filtered(changed(DELETE, person(1)), changed(TRUNCATE, person(0)))
    assert [row[change.OP] for row in found] == ["delete", "truncate"]


def test_a_condition_on_the_key_alone_decides_deletes_too() -> None:
    rule = Filter(where="id > 5")
    assert [row["id"] for row in filtered(changed(DELETE, person(1)), changed(DELETE, person(9)), rule=rule)] == [9]


def test_a_row_that_enters_with_a_new_key_moved_from_nowhere() -> None:
    (row,) = filtered(changed(INSERT, de(2), before=fr(1), moved_from={"id": 1}))
    assert row.get(change.MOVED_FROM) is None


def test_a_filter_on_a_value_that_was_not_sent_fails() -> None:
    with pytest.raises(TransformFailed, match="was not sent"):
        filtered(changed(UPDATE, person(1, "m"), unchanged=["country"]))


@pytest.mark.parametrize(
    "rule",
    [
        Filter(name="odd", where="id * 10000000000 > 0"),
        Mask(name="odd", columns=("mail",), when="id * 10000000000 > 0"),
        Filter(name="odd", where="country == 'DE'", when="10 / (id - 7) > 0"),
    ],
    ids=["where", "when", "both"],
)
def test_a_condition_that_cannot_be_computed_for_a_row_fails_only_there(rule: Rule) -> None:
    rows = batch(*(changed(INSERT, person(number, "secret-mail", "1", "DE")) for number in (1, 2, 7, 7 * 10**12, 4)))
    with pytest.raises(TransformFailed) as raised:
        plan_of(rule).apply(rows)
    assert "secret" not in str(raised.value)
    applied = plan_of(rule.model_copy(update={"on_error": "dead-letter"})).apply(rows)
    failing = 7 if rule.when and rule.do == "filter" else 7 * 10**12
    assert [dead_letter.batch.data.column("id").to_pylist() for dead_letter in applied.dead_letters] == [[failing]]
    assert len(applied.batches[0]) == 4


def test_a_filter_with_a_condition_applies_only_where_it_is_true() -> None:
    rule = Filter(where="amount > 5", when="country == 'DE'")
    rows = [
        changed(INSERT, person(number, None, amount, country))
        for number, amount, country in [
            (1, "1", "DE"),
            (2, "9", "DE"),
            (3, "1", "FR"),
            (4, None, "DE"),
            (5, None, None),
        ]
    ]
    assert [row["id"] for row in filtered(*rows, rule=rule)] == [2, 3, 5]


def test_rows_of_a_window_are_numbered_without_a_gap() -> None:
    first = batch(*(changed(INSERT, (de if number % 2 else fr)(number)) for number in range(5)))
    given = Window(start=Lsn(1), end=Lsn(9), batches=(first,), transactions=1, rows=5)
    found = plan_of(GERMANS).transform_window(given)
    assert found is not None
    assert (found.rows, found.batches[0].ends) == (2, (0, 1))
    assert found.batches[0].data.column(change.SEQ).to_pylist() == [0, 1]
    assert found.batches[0].data.column(change.TX_INDEX).to_pylist() == [1, 3]


def test_a_window_without_rows_left_still_moves_the_position() -> None:
    given = Window(start=Lsn(1), end=Lsn(9), batches=(batch(changed(INSERT, fr(1))),), transactions=1, rows=1)
    found = plan_of(GERMANS).transform_window(given)
    assert found is not None
    assert (found.batches, found.rows, found.start, found.end, found.is_empty) == ((), 0, Lsn(1), Lsn(9), True)


# The oracle.

Row = dict[str, Any]
steps = st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["DE", "FR", None]), st.sampled_from("wdt")), max_size=25)


def history(given: list[tuple[int, str | None, str]], *, full: bool) -> tuple[list[dict[str, Any]], dict[int, Row]]:
    """Return the changes that a source would send for these steps, and the table after them."""
    table: dict[int, Row] = {}
    reported: list[dict[str, Any]] = []
    for number, country, what in given:
        row, old = person(number, f"m{len(reported)}", "1", country), table.get(number)
        if what == "t" and len(reported) % 5 == 0:
            reported.append(changed(TRUNCATE, person(0)))
            table.clear()
        elif what == "d":
            if old is not None:
                reported.append(changed(DELETE, old if full else person(number), before=old if full else None))
                del table[number]
        elif old is None:
            reported.append(changed(INSERT, row))
            table[number] = row
        else:
            reported.append(changed(UPDATE, row, before=old if full else None))
            table[number] = row
    return reported, table


def applied(batches: tuple[ChangeBatch, ...]) -> dict[int, Row]:
    """Return the table after the changes; fail at a change that a true mirror could not apply."""
    table: dict[int, Row] = {}
    for row in only(batches) if batches else []:
        values = {name: row[name] for name in ("id", "mail", "country")}
        match row[change.OP]:
            case "truncate":
                table.clear()
            case "delete":
                table.pop(row["id"], None)
            case _:
                table[row["id"]] = values
    return table


@settings(max_examples=150, deadline=None)
@given(steps, st.booleans())
def test_filtering_changes_leaves_what_filtering_the_table_leaves(
    given: list[tuple[int, str | None, str]], full: bool
) -> None:
    reported, table = history(given, full=full)
    if not reported:
        return
    found = plan_of(GERMANS, Mask(columns=("mail",), keep_last=2)).apply(batch(*reported)).batches

    def masked(text: str) -> str:
        return text if len(text) < 1 else "*" * (len(text) - 2) + text[-2:] if len(text) > 2 else "*" * len(text)

    wanted = {
        number: {"id": number, "mail": masked(row["mail"]), "country": "DE"}
        for number, row in table.items()
        if row["country"] == "DE"
    }
    assert applied(found) == wanted


@settings(max_examples=50, deadline=None)
@given(steps)
def test_with_old_rows_sent_every_change_fits_its_target_table(given: list[tuple[int, str | None, str]]) -> None:
    reported, _ = history(given, full=True)
    found = plan_of(GERMANS).apply(batch(*reported)).batches if reported else ()
    there: set[int] = set()
    for row in only(found) if found else []:
        match row[change.OP]:
            case "truncate":
                there.clear()
            case "insert":
                assert row["id"] not in there
                there.add(row["id"])
            case "update":
                assert row["id"] in there
            case "delete":
                assert row["id"] in there
                there.remove(row["id"])


def test_values_helper_is_of_one_batch() -> None:
    assert values(plan_of(GERMANS).apply(batch(changed(INSERT, de(1)))).batches, "id") == [(1,)]


def test_a_failed_row_becomes_a_dead_letter_whatever_a_later_filter_decides() -> None:
    numbers = Cast(name="numbers", columns=("mail",), to="int32", on_error="dead-letter")
    rows = batch(changed(INSERT, person(1, "7")), changed(INSERT, person(2, "odd")), changed(UPDATE, person(3, "odd")))
    for where in ("mail > 5", "id == 1"):
        applied = plan_of(numbers, Filter(where=where)).apply(rows)
        assert values(applied.batches, "id") == [(1,)]
        (dead_letter,) = applied.dead_letters
        assert (dead_letter.rule, values([dead_letter.batch], "id")) == ("numbers", [(2,), (3,)])


@pytest.mark.parametrize("where", ["mail > 5", "id == 1"])
def test_a_rule_halts_whatever_a_later_filter_decides(where: str) -> None:
    plan = plan_of(Cast(name="numbers", columns=("mail",), to="int32"), Filter(where=where))
    with pytest.raises(TransformFailed, match="numbers"):
        plan.apply(batch(changed(INSERT, person(1, "7")), changed(INSERT, person(2, "odd"))))
