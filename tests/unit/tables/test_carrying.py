"""What becomes of a past that is kept when the table has another shape: nothing of it is lost."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from tailrace.errors import SchemaChanged
from tailrace.model.policies import DEFAULT_POLICIES, EvolutionPolicies, EvolutionPolicy
from tailrace.model.schema import TableSchema
from tailrace.tables.evolve.carry_over import carry_over, keeps_values
from tailrace.tables.evolve.schema_plan import Recast, ReloadNeeded, plan_evolution
from tailrace.tables.spec import TableMode, TableSpec
from tests.unit.tables.test_evolving import ID, OLD, A, B, shape, value_of

HISTORY, APPEND, MARKED = (
    TableSpec(mode=TableMode.HISTORY),
    TableSpec(mode=TableMode.APPEND),
    TableSpec(soft_delete=True),
)
EVERY = (HISTORY, APPEND, MARKED)


def rewritten(*columns: tuple[int, str, pa.DataType], **given: Any) -> TableSchema:
    """A shape of rows that the source wrote anew."""
    return shape(*columns, file=6, stamp=2, **given)


def carried(
    new: TableSchema,
    form: TableSpec = HISTORY,
    *,
    old: TableSchema = OLD,
    policies: EvolutionPolicies = DEFAULT_POLICIES,
) -> Recast:
    found = carry_over(form, old, new, policies, value_of)
    assert isinstance(found, Recast), found
    return found


@pytest.mark.parametrize(
    ("was", "now", "kept"),
    [
        (pa.int32(), pa.int64(), True),
        (pa.int64(), pa.int32(), False),
        (pa.int32(), pa.decimal128(12, 2), True),
        (pa.int32(), pa.decimal128(11, 2), False),
        (pa.int64(), pa.decimal128(19, 0), True),
        (pa.int32(), pa.float64(), True),
        (pa.int64(), pa.float64(), False),
        (pa.int32(), pa.float32(), False),
        (pa.int16(), pa.float32(), True),
        (pa.int64(), pa.string(), True),
        (pa.decimal128(10, 6), pa.string(), True),
        (pa.decimal128(10, 7), pa.string(), False),
        (pa.float64(), pa.string(), False),
        (pa.string(), pa.int32(), False),
        (pa.timestamp("us"), pa.timestamp("us", "UTC"), False),
        (pa.bool_(), pa.string(), False),
    ],
)
def test_which_values_are_the_same_in_another_type(was: pa.DataType, now: pa.DataType, kept: bool) -> None:
    assert keeps_values(was, now) is kept


@pytest.mark.parametrize(
    ("was", "now", "values", "become"),
    [
        (pa.int32(), pa.decimal128(12, 2), [-(2**31)], [Decimal("-2147483648.00")]),
        (pa.int64(), pa.decimal128(19, 0), [-(2**63)], [Decimal(-(2**63))]),
        (pa.int64(), pa.string(), [-(2**63), 0], ["-9223372036854775808", "0"]),
        (pa.decimal128(10, 6), pa.string(), [Decimal("0.000001"), Decimal("-1.5")], ["0.000001", "-1.500000"]),
        (pa.int32(), pa.float64(), [2**31 - 1], [2147483647.0]),
    ],
)  # fmt: skip
def test_what_is_called_the_same_is_so_when_it_is_cast(
    was: pa.DataType, now: pa.DataType, values: list[object], become: list[object]
) -> None:
    assert keeps_values(was, now)
    assert pa.array(values, was).cast(now).to_pylist() == become


@pytest.mark.parametrize("form", EVERY, ids=str)
def test_a_wider_type_keeps_the_column_and_a_load_is_owed(form: TableSpec) -> None:
    new = rewritten(ID, (2, "a", pa.int64()), B)
    found = carried(new, form)
    assert (found.added, found.renamed, found.dropped, found.kept_apart) == ((), (), (), ())
    assert found.schema == new
    assert new.facts is not None
    assert found.schema.facts == replace(new.facts, rows_unknown=True)
    assert isinstance(plan_evolution(found.schema, new, DEFAULT_POLICIES, value_of, form), ReloadNeeded)


@pytest.mark.parametrize("form", EVERY, ids=str)
def test_a_type_that_cannot_hold_it_begins_empty_beside_what_it_was(form: TableSpec) -> None:
    found = carried(rewritten(ID, (2, "a", pa.int16()), B), form)
    assert (found.kept_apart, found.added, found.dropped) == (("a",), (), ())
    assert found.descriptions == ("start a empty, and keep its old values in another column",)


def test_a_column_that_is_renamed_and_cannot_hold_it_is_another_one() -> None:
    found = carried(rewritten(ID, (2, "z", pa.int16()), B))
    assert (found.kept_apart, found.renamed) == (("z",), ())


def test_what_is_added_is_filled_where_a_constant_is_known_and_else_left_to_the_load() -> None:
    columns = (ID, A, B, (4, "c", pa.int32()), (5, "d", pa.int32()), (6, "e", pa.int32()))
    found = carried(rewritten(*columns, fills={"c": "7", "e": "odd"}))
    assert found.added == ("c", "d", "e")
    assert found.backfilled == (("c", pa.scalar(7, pa.int32())),)


@pytest.mark.parametrize(
    ("policy", "dropped"),
    [(EvolutionPolicy.KEEP_NULL, ()), (EvolutionPolicy.APPLY, ("b",)), (EvolutionPolicy.STOP, ())],
)
def test_what_is_dropped_stays_unless_the_settings_say_otherwise(
    policy: EvolutionPolicy, dropped: tuple[str, ...]
) -> None:
    assert carried(rewritten(ID, A), policies=EvolutionPolicies(drop=policy)).dropped == dropped


def test_a_table_that_was_made_again_goes_on_by_the_names_of_its_columns() -> None:
    again = shape((1, "b", pa.string()), (2, "id", pa.int64()), (3, "x", pa.int32()), relation=10)
    found = carried(again)
    assert (found.renamed, found.added, found.kept_apart, found.dropped) == ((), ("x",), (), ())


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (shape(ID, A, B, key=("a",)), "another key"),
        (shape(ID, A, B, key=("id", "a")), "another key"),
        (rewritten((1, "id", pa.int32()), A, B), "retyped id, of the key"),
        (shape((1, "ident", pa.int64()), A, B, relation=10, key=("ident",)), "another key"),
    ],
)
def test_rows_that_are_not_known_by_their_key_any_more_stop_the_table_but_changes_have_none(
    new: TableSchema, said: str
) -> None:
    for form in (HISTORY, MARKED):
        found = carry_over(form, OLD, new, DEFAULT_POLICIES, value_of)
        assert isinstance(found, SchemaChanged)
        assert said in found.headline
        assert "another `name`" in found.hint
    assert carried(new, APPEND).schema == new


def test_a_key_that_is_renamed_or_wider_is_the_same_key() -> None:
    new = rewritten((1, "ident", pa.string()), A, B, key=("ident",))
    assert carried(new, MARKED).renamed == (("id", "ident"),)


def test_a_table_of_changes_without_a_key_keeps_a_column_that_is_dropped() -> None:
    old, new = replace(OLD, key=()), replace(shape(ID, A), key=())
    assert isinstance(plan_evolution(old, new, DEFAULT_POLICIES, value_of), ReloadNeeded)
    found = plan_evolution(old, new, DEFAULT_POLICIES, value_of, APPEND)
    assert isinstance(found, Recast)
    assert found.dropped == ()
