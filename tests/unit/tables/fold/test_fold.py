"""The fold: single rules, and random histories against a simple model of a table."""

from __future__ import annotations

import time
from collections import Counter
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.errors import BaseRowMissing, ValueUnfit
from tailrace.model import change
from tailrace.model.schema import Identity, TableSchema
from tailrace.tables.fold.fold import fold
from tailrace.tables.fold.folded_changes import DELETE, UPSERT, FoldedChanges, folded_schema
from tests.support.changes import (
    KEYLESS,
    SHOP,
    Change,
    KeylessModel,
    Model,
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

BIG = ("big",)


def folded(*rows: Change, schema: TableSchema = SHOP, can_refetch: bool = False) -> dict[Any, dict[str, Any]]:
    """Return the folded rows by key."""
    result = fold(schema, changes(schema, *rows), can_refetch=can_refetch)
    assert result.rows.schema.equals(folded_schema(schema))
    result.rows.validate(full=True)
    return {row["c0"]: row for row in result.rows.to_pylist()}


def state(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["op"], row["c2"], row["absent"], (row["base"] or {}).get("c0")


# --- the last state per key --------------------------------------------------------------------------------


def test_two_quick_updates_of_one_row_leave_the_second() -> None:
    rows = folded(insert(1, big="a", n=1), update(1, big="b", n=2), update(1, big="c", n=3))
    assert [(row["c2"], row["c3"], row["op"]) for row in rows.values()] == [("c", 3, UPSERT)]


def test_every_key_has_one_row_in_the_order_of_its_last_change() -> None:
    result = fold(SHOP, changes(SHOP, insert(3), insert(1), insert(2), update(3)))
    assert result.rows.column("c0").to_pylist() == [1, 2, 3]
    assert result.rows.column("copies").to_pylist() == [1, 1, 1]


def test_a_row_inserted_and_deleted_is_a_delete() -> None:
    assert folded(insert(1, big="a"), delete(1))[1]["op"] == DELETE


def test_a_row_deleted_and_inserted_is_the_new_one() -> None:
    assert state(folded(delete(1), insert(1, big=None))[1]) == (UPSERT, None, None, None)


def test_a_null_that_was_sent_is_a_null() -> None:
    assert state(folded(insert(1, big="a"), update(1, big=None))[1]) == (UPSERT, None, None, None)


def test_a_key_update_leaves_no_old_row_behind() -> None:
    rows = folded(*move(1, 2, big="a"))
    assert (rows[1]["op"], rows[2]["op"]) == (DELETE, UPSERT)


def test_nothing_folds_to_nothing() -> None:
    for schema in (SHOP, KEYLESS):
        result = fold(schema, changes(schema))
        assert (result.truncated, result.rows.num_rows) == (False, 0)
        assert result.rows.schema.equals(folded_schema(schema))


def test_unknown_columns_are_ignored_and_reserved_names_are_found() -> None:
    schema = table_schema({"id": pa.int64(), "_op": pa.string(), "_seq_": pa.int32()})
    table = changes(schema, Change(op="insert", values={"id": 1, "_op": "mine", "_seq_": 7}))
    table = table.append_column(change.COMMIT, pa.array([5]))
    assert fold(schema, table).rows.select(["c0", "c1", "c2"]).to_pylist() == [{"c0": 1, "c1": "mine", "c2": 7}]


def test_a_batch_in_many_chunks_folds_like_one() -> None:
    rows = [insert(1, big="a"), *move(1, 2, unchanged=BIG), insert(1, big="b"), update(2, unchanged=BIG, n=4)]
    whole = changes(SHOP, *rows)
    chunked = pa.concat_tables([whole.slice(i, 1) for i in range(len(rows) + 1)])
    assert fold(SHOP, chunked).rows.equals(fold(SHOP, whole).rows)


# --- unsent is not null ------------------------------------------------------------------------------------


def test_an_unsent_value_is_taken_from_the_same_row_earlier_in_the_batch() -> None:
    assert state(folded(insert(1, big="a"), update(1, unchanged=BIG, n=2))[1]) == (UPSERT, "a", None, None)


def test_an_unsent_value_that_no_change_has_is_left_to_the_table() -> None:
    row = folded(update(1, unchanged=BIG, n=2), update(1, unchanged=BIG, n=3))[1]
    assert state(row) == (UPSERT, None, [2], 1)
    assert row["c3"] == 3


def test_columns_are_unsent_one_by_one() -> None:
    rows = folded(
        update(1, unchanged=("name", "big"), n=1),
        update(1, unchanged=BIG, name="x", n=2),
        update(2, unchanged=("name", "big"), n=1),
        update(2, unchanged=("name",), big="y", n=2),
    )
    assert (rows[1]["c1"], state(rows[1])) == ("x", (UPSERT, None, [2], 1))
    assert (rows[2]["c1"], state(rows[2])) == (None, (UPSERT, "y", [1], 2))


def test_a_key_move_takes_the_large_value_from_the_batch() -> None:
    assert state(folded(insert(1, big="a"), *move(1, 2, unchanged=BIG))[2]) == (UPSERT, "a", None, None)


def test_a_key_move_takes_the_large_value_from_the_table() -> None:
    rows = folded(*move(1, 2, unchanged=BIG))
    assert state(rows[2]) == (UPSERT, None, [2], 1)
    assert rows[1]["op"] == DELETE


def test_a_chain_of_key_moves_leads_back_to_its_first_key() -> None:
    rows = folded(*move(1, 2, unchanged=BIG), update(2, unchanged=BIG, n=5), *move(2, 3, unchanged=BIG))
    assert state(rows[3]) == (UPSERT, None, [2], 1)
    assert (rows[1]["op"], rows[2]["op"]) == (DELETE, DELETE)


def test_a_move_there_and_back_keeps_the_row_its_own_base() -> None:
    rows = folded(*move(1, 2, unchanged=BIG), update(2, unchanged=BIG, n=5), *move(2, 1, unchanged=BIG))
    assert state(rows[1]) == (UPSERT, None, [2], 1)
    assert rows[2]["op"] == DELETE


def test_a_swap_through_a_third_key_crosses_the_bases() -> None:
    rows = folded(*move(1, 9, unchanged=BIG), *move(2, 1, unchanged=BIG), *move(9, 2, unchanged=BIG))
    assert state(rows[1]) == (UPSERT, None, [2], 2)
    assert state(rows[2]) == (UPSERT, None, [2], 1)
    assert rows[9]["op"] == DELETE


def test_a_key_move_to_a_key_deleted_in_the_batch_keeps_its_own_value() -> None:
    rows = folded(update(2, big="stale"), delete(2), *move(1, 2, unchanged=BIG))
    assert state(rows[2]) == (UPSERT, None, [2], 1)


def test_a_new_row_under_an_old_key_takes_nothing_from_the_earlier_row() -> None:
    rows = folded(update(1, big="stale"), delete(1), insert(1, big="fresh"), update(1, unchanged=BIG, n=3))
    assert state(rows[1]) == (UPSERT, "fresh", None, None)


def test_the_key_that_was_moved_away_from_can_be_used_again() -> None:
    rows = folded(*move(1, 2, unchanged=BIG), insert(1, big="new"), update(1, unchanged=BIG, n=1))
    assert state(rows[1]) == (UPSERT, "new", None, None)
    assert state(rows[2]) == (UPSERT, None, [2], 1)


def test_a_moved_row_that_is_deleted_is_only_deletes() -> None:
    rows = folded(*move(1, 2, unchanged=BIG), delete(2))
    assert [row["op"] for row in rows.values()] == [DELETE, DELETE]
    assert [row["absent"] for row in rows.values()] == [None, None]


BASELESS = [
    (delete(1), update(1, unchanged=BIG)),
    (insert(1, big="a"), delete(1), update(1, unchanged=BIG)),
    (arrival(1, unchanged=BIG),),
    (delete(1), insert(5), Change(op="insert", values={"id": 2}, unchanged=BIG, moved_from={"id": 1})),
    (delete(1), *move(1, 2, unchanged=BIG)),
    (truncate(), update(1, unchanged=BIG)),
    (truncate(), *move(1, 2, unchanged=BIG)),
    (insert(1, big="a"), truncate(), update(1, unchanged=BIG)),
]


@pytest.mark.parametrize("rows", [*BASELESS, (update(1, unchanged=("id",)),)])
def test_a_partial_change_without_a_base_is_refused_with_its_position(rows: tuple[Change, ...]) -> None:
    with pytest.raises(BaseRowMissing) as refused:
        folded(*rows)
    assert refused.value.fields["position"] == f"0/{len(rows) - 1:X}"
    assert refused.value.hint


@pytest.mark.parametrize("rows", BASELESS)
def test_with_refetch_a_row_without_a_base_has_no_base_in_the_table(rows: tuple[Change, ...]) -> None:
    *_, last = folded(*rows, can_refetch=True).values()
    assert state(last) == (UPSERT, None, [2], None)


def test_a_change_that_builds_on_a_row_without_a_base_has_none_either() -> None:
    rows = folded(
        update(1, big="stale"),
        delete(1),
        arrival(1, unchanged=BIG, name="a"),
        *move(1, 2, unchanged=BIG),
        update(2, unchanged=("name", "big"), n=4),
        can_refetch=True,
    )
    assert (state(rows[2]), rows[2]["c3"]) == ((UPSERT, None, [2], None), 4)
    assert rows[1]["op"] == DELETE


def test_a_row_without_a_base_is_whole_once_its_value_arrives() -> None:
    rows = folded(arrival(1, unchanged=BIG), update(1, big="x"), update(1, unchanged=BIG, n=3), can_refetch=True)
    assert state(rows[1]) == (UPSERT, "x", None, None)


def test_a_change_without_a_part_of_its_key_cannot_be_refetched() -> None:
    with pytest.raises(BaseRowMissing):
        folded(update(1, unchanged=("id",)), can_refetch=True)


# --- truncate ----------------------------------------------------------------------------------------------


def test_a_truncate_drops_earlier_changes() -> None:
    result = fold(SHOP, changes(SHOP, insert(1), truncate(), insert(2), truncate(), insert(3, big="x")))
    assert result.truncated
    assert result.rows.column("c0").to_pylist() == [3]


def test_a_truncate_alone_leaves_nothing() -> None:
    for schema in (SHOP, KEYLESS):
        result = fold(schema, changes(schema, truncate()))
        assert (result.truncated, result.rows.num_rows) == (True, 0)


def test_after_a_truncate_rows_of_the_batch_still_lend_their_values() -> None:
    rows = folded(truncate(), insert(1, big="a"), *move(1, 2, unchanged=BIG))
    assert state(rows[2]) == (UPSERT, "a", None, None)


# --- values that do not fit --------------------------------------------------------------------------------


def test_an_unfit_value_that_stays_is_refused_by_name_and_never_by_value() -> None:
    with pytest.raises(ValueUnfit) as refused:
        folded(insert(1), insert(2, unfit=("n",)))
    assert refused.value.fields == {"table": SHOP.table, "column": "n", "position": "0/1"}
    assert "SECRET" not in str(refused.value)
    assert "text" in refused.value.hint


def test_an_unfit_value_that_is_carried_along_is_refused() -> None:
    with pytest.raises(ValueUnfit, match="big"):
        folded(insert(1, unfit=BIG), *move(1, 2, unchanged=BIG))


def test_an_unfit_value_that_was_replaced_deleted_or_truncated_does_not_matter() -> None:
    folded(insert(1, unfit=("n",)), update(1, n=1))
    folded(insert(1, unfit=("n",)), delete(1))
    folded(insert(1, unfit=("n",)), truncate())
    folded(insert(1, unfit=BIG), update(1, big="x"), update(1, unchanged=BIG))
    folded(delete(1, unfit=("n",)))


def test_an_unfit_key_is_always_refused() -> None:
    with pytest.raises(ValueUnfit, match="id"):
        folded(insert(None, unfit=("id",)), delete(None, unfit=("id",)))


def test_an_unfit_value_of_a_keyless_row_is_refused_unless_the_row_is_deleted_again() -> None:
    row = {"a": None, "b": "x"}
    with pytest.raises(ValueUnfit, match="column=a"):
        fold(KEYLESS, changes(KEYLESS, insert(row), insert(row, unfit=("a",))))
    inserted_and_deleted = fold(
        KEYLESS, changes(KEYLESS, insert(row), insert(row, unfit=("a",)), delete(row, unfit=("a",)))
    )
    assert inserted_and_deleted.rows.column("copies").to_pylist() == [1]


# --- every type of key -------------------------------------------------------------------------------------

KEYS: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int16(), [1, -1, 32767]),
    (pa.int64(), [-(1 << 63), (1 << 63) - 1, 0]),
    (pa.string(), ["", "a", "A", "é", "e\u0301"]),
    (pa.string(), ["0b1c9a3e-6f3b-4e7e-9d80-5e1d5d6a7b11", "0b1c9a3e-6f3b-4e7e-9d80-5e1d5d6a7b12"]),
    (pa.binary(), [b"", b"\0", b"\0\0", b"\xff"]),
    (pa.bool_(), [True, False]),
    (pa.date32(), [date(1, 1, 1), date(9999, 12, 31)]),
    (pa.timestamp("us"), [datetime(2020, 1, 1), datetime(2020, 1, 1, 0, 0, 0, 1)]),
    (pa.timestamp("us", "UTC"), [datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 1, 1, tzinfo=UTC)]),
    (pa.decimal128(38, 5), [Decimal("0.00001"), Decimal("-0.00001"), Decimal("1e30")]),
    (pa.float64(), [0.0, 1e308, float("inf"), 5e-324]),
    (pa.list_(pa.int32()), [[], [1], [1, None], [None, 1], [1, 1]]),
    (pa.list_(pa.string()), [["ab"], ["a", "b"], ["a", None], []]),
]


@pytest.mark.parametrize(("kind", "values"), KEYS, ids=lambda value: str(value)[:24])
def test_keys_of_every_type_are_distinguished_and_found_again(kind: pa.DataType, values: list[Any]) -> None:
    schema = table_schema({"v": pa.int32(), "k": kind, "big": pa.string()}, key=("k",))
    rows = [insert({"k": value}, v=0, big=str(i)) for i, value in enumerate(values)]
    rows += [update({"k": value}, v=i, unchanged=BIG) for i, value in enumerate(values)]
    result = fold(schema, changes(schema, *rows)).rows.to_pylist()
    assert [(row["c1"], row["c2"]) for row in result] == [(value, str(i)) for i, value in enumerate(values)]


@pytest.mark.parametrize(("kind", "values"), KEYS, ids=lambda value: str(value)[:24])
def test_a_key_of_several_columns_moves_by_any_of_them(kind: pa.DataType, values: list[Any]) -> None:
    schema = table_schema({"v": pa.int32(), "k": kind, "big": pa.string(), "part": pa.int16()}, key=("k", "part"))
    rows = [
        row
        for i, value in enumerate(values)
        for row in move({"k": value, "part": 1}, {"k": value, "part": 2}, v=i, unchanged=BIG)
    ]
    result = fold(schema, changes(schema, *rows)).rows.to_pylist()
    assert [row["c1"] for row in result if row["op"] == DELETE] == values
    arrived = [row for row in result if row["op"] == UPSERT]
    assert [row["c0"] for row in arrived] == list(range(len(values)))
    assert [row["base"] for row in arrived] == [{"c1": value, "c3": 1} for value in values]


def test_the_two_zeros_are_one_key_and_so_are_all_nans() -> None:
    schema = table_schema({"id": pa.float64(), "v": pa.int32()})
    rows = fold(
        schema,
        changes(
            schema, insert(-0.0, v=1), *move(-0.0, 0.0, v=2), insert(float("nan"), v=3), update(-float("nan"), v=4)
        ),
    ).rows
    assert rows.column("c1").to_pylist() == [2, 4]


# --- tables without a key ----------------------------------------------------------------------------------


def images(*rows: Change, schema: TableSchema = KEYLESS) -> list[tuple[Any, ...]]:
    result = fold(schema, changes(schema, *rows)).rows
    assert result.schema.equals(folded_schema(schema))
    return [
        (*(row[f"c{i}"] for i in range(len(schema.columns))), row["op"], row["copies"]) for row in result.to_pylist()
    ]


X, Y, NULLS = {"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": None, "b": None}


def test_a_keyless_table_is_a_multiset() -> None:
    assert images(insert(X), insert(X), insert(Y), delete(X)) == [(1, "y", UPSERT, 1), (1, "x", UPSERT, 1)]


def test_deletes_of_one_image_are_counted() -> None:
    assert images(delete(X), delete(X), insert(NULLS), delete(NULLS), delete(NULLS)) == [
        (1, "x", DELETE, -2),
        (None, None, DELETE, -1),
    ]


def test_an_update_of_a_keyless_row_removes_the_old_image() -> None:
    assert sorted(images(update(Y, before=X))) == [(1, "x", DELETE, -1), (1, "y", UPSERT, 1)]


def test_an_update_to_the_same_image_is_nothing() -> None:
    assert images(update(X, before=X), insert(Y), delete(Y)) == []


def test_a_keyless_update_without_its_old_row_is_refused() -> None:
    for rows in ((insert(X), update(Y)), (update(Y, before=X), update(Y))):
        with pytest.raises(BaseRowMissing) as refused:
            images(*rows)
        assert refused.value.fields["position"] == "0/1"


def test_a_keyless_update_with_unsent_values_is_refused() -> None:
    with pytest.raises(BaseRowMissing):
        images(update(Y, before=X, unchanged=("b",)))


IMAGES: list[tuple[pa.DataType, list[Any]]] = [
    *KEYS,
    (pa.float64(), [0.0, -0.0, float("nan"), float("inf"), None]),
    (pa.float32(), [0.0, -0.0, float("nan"), None]),
    (pa.list_(pa.float64()), [None, [], [None], [float("nan")], [0.0], [-0.0], [0.0, None]]),
    (pa.list_(pa.binary()), [None, [], [b""], [b"", b""], [None]]),
    (pa.list_(pa.decimal128(10, 2)), [None, [Decimal("1.00")], [Decimal("1.01")]]),
    (pa.binary(), [None, b"", b"\0"]),
    (pa.string(), [None, "", "null"]),
]


@pytest.mark.parametrize(("kind", "values"), IMAGES, ids=lambda value: str(value)[:24])
def test_images_are_equal_only_when_every_bit_is(kind: pa.DataType, values: list[Any]) -> None:
    schema = table_schema({"v": kind, "w": kind}, key=(), identity=Identity.FULL)
    pairs = [{"v": v, "w": w} for v in values for w in values]
    assert len(images(*map(insert, pairs), schema=schema)) == len(pairs)
    assert images(*map(insert, pairs), *map(delete, pairs), schema=schema) == []


# --- against the model, with changes split into any batches ------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["insert"] * 4 + ["update"] * 4 + ["move"] * 5 + ["delete"] * 2 + ["truncate"]),
        st.integers(0, 5),
        st.integers(0, 5),
        st.sampled_from(["a", "b", "", None]),
        st.sampled_from([(), BIG, BIG, ("name", "big"), ("name",)]),
        st.booleans(),
    ),
    max_size=60,
)


@given(STEPS)
@settings(max_examples=400, deadline=None)
def test_any_history_in_any_batches_ends_in_the_source_s_rows(steps: list[tuple[Any, ...]]) -> None:
    model, pending = Model(), []
    table: dict[Any, dict[str, Any]] = {}
    for *step, cut in [*steps, ("none", 99, 0, None, (), True)]:
        pending += model.step(*step)
        if cut:
            table = apply_in_memory(model.schema, table, fold(model.schema, changes(model.schema, *pending)))
            assert table == model.table()
            pending = []


IMAGE = st.tuples(st.sampled_from([None, 0, 1]), st.sampled_from([None, "", "x"]))


@given(
    st.lists(
        st.tuples(st.sampled_from(["insert", "insert", "update", "delete", "truncate"]), IMAGE, IMAGE, st.booleans()),
        max_size=60,
    )
)
@settings(max_examples=200, deadline=None)
def test_any_keyless_history_in_any_batches_ends_in_the_source_s_rows(steps: list[tuple[Any, ...]]) -> None:
    model, pending = KeylessModel(), []
    table: Counter[tuple[Any, ...]] = Counter()
    for *step, cut in [*steps, ("delete", (9, None), (9, None), True)]:
        pending += model.step(*step)
        if cut:
            result: FoldedChanges = fold(KEYLESS, changes(KEYLESS, *pending))
            table = Counter() if result.truncated else table
            for row in result.rows.to_pylist():
                table[(row["c0"], row["c1"])] += row["copies"]
            assert min(table.values(), default=0) >= 0
            assert +table == +model.rows
            pending = []


# --- speed -------------------------------------------------------------------------------------------------


def test_a_hundred_thousand_changes_fold_in_a_blink() -> None:
    size, random = 100_000, np.random.default_rng(1)
    schema = table_schema({"id": pa.int64()} | {f"n{i}": pa.int64() for i in range(6)} | {"big": pa.string()})
    partial = random.random(size) < 0.3
    names = pa.ListArray.from_arrays(
        pa.array(np.concatenate([[0], np.cumsum(partial)]).astype(np.int32)),
        pa.array(["big"] * int(partial.sum())),
        mask=pa.array(~partial),
    )
    numbers = {name: pa.array(random.integers(0, 1 << 40, size)) for name in schema.names[1:-1]}
    table = pa.table(
        {
            change.OP: pa.array(["update"]).take(pa.array(np.zeros(size, np.int64))),
            change.POSITION: pa.array(["0/0"]).take(pa.array(np.zeros(size, np.int64))),
            change.UNCHANGED: names,
            "id": pa.array(random.integers(0, 30_000, size) * 1_000_003),
            **numbers,
            "big": numbers["n0"].cast(pa.string()),
        }
    )
    fold(schema, table.slice(0, 10))  # compiles the kernel
    took = []
    for _ in range(3):
        start = time.process_time()  # processor time, because other processes may run too
        fold(schema, table)
        took.append(time.process_time() - start)
    assert min(took) < 0.3  # about 0.03 on two idle cores
