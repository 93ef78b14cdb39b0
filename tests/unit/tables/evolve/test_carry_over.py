"""The past that a table keeps, after a schema change: no value is lost."""

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
from tests.unit.tables.evolve.test_schema_plan import ID, OLD, A, B, schema_of, value_of

HISTORY, APPEND, MARKED = (
    TableSpec(mode=TableMode.HISTORY),
    TableSpec(mode=TableMode.APPEND),
    TableSpec(soft_delete=True),
)
EVERY = (HISTORY, APPEND, MARKED)


def rewritten(*columns: tuple[int, str, pa.DataType], **facts: Any) -> TableSchema:
    """A schema whose rows the source has rewritten."""
    return schema_of(*columns, file=6, stamp=2, **facts)


def carry(
    new: TableSchema,
    spec: TableSpec = HISTORY,
    *,
    old: TableSchema = OLD,
    policies: EvolutionPolicies = DEFAULT_POLICIES,
) -> Recast:
    found = carry_over(spec, old, new, policies, value_of)
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
def test_types_that_keep_every_value(was: pa.DataType, now: pa.DataType, kept: bool) -> None:
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
def test_values_that_count_as_kept_are_equal_after_a_cast(
    was: pa.DataType, now: pa.DataType, values: list[object], become: list[object]
) -> None:
    assert keeps_values(was, now)
    assert pa.array(values, was).cast(now).to_pylist() == become


@pytest.mark.parametrize("spec", EVERY, ids=str)
def test_a_wider_type_keeps_the_column_and_a_load_is_owed(spec: TableSpec) -> None:
    new = rewritten(ID, (2, "a", pa.int64()), B)
    found = carry(new, spec)
    assert (found.added, found.renamed, found.dropped, found.kept_apart) == ((), (), (), ())
    assert found.schema == new
    assert new.facts is not None
    assert found.schema.facts == replace(new.facts, rows_unknown=True)
    assert isinstance(plan_evolution(found.schema, new, DEFAULT_POLICIES, value_of, spec), ReloadNeeded)


@pytest.mark.parametrize("spec", EVERY, ids=str)
def test_a_type_that_cannot_hold_the_values_starts_empty_and_the_old_column_stays(spec: TableSpec) -> None:
    found = carry(rewritten(ID, (2, "a", pa.int16()), B), spec)
    assert (found.kept_apart, found.added, found.dropped) == (("a",), (), ())
    assert found.descriptions == ("start a empty, and keep its old values in another column",)


def test_a_renamed_column_that_cannot_hold_the_values_is_a_new_column() -> None:
    found = carry(rewritten(ID, (2, "z", pa.int16()), B))
    assert (found.kept_apart, found.renamed) == (("z",), ())


def test_an_added_column_is_filled_with_a_known_constant_or_left_to_the_load() -> None:
    columns = (ID, A, B, (4, "c", pa.int32()), (5, "d", pa.int32()), (6, "e", pa.int32()))
    found = carry(rewritten(*columns, fills={"c": "7", "e": "odd"}))
    assert found.added == ("c", "d", "e")
    assert found.backfilled == (("c", pa.scalar(7, pa.int32())),)


@pytest.mark.parametrize(
    ("policy", "dropped"),
    [(EvolutionPolicy.KEEP_NULL, ()), (EvolutionPolicy.APPLY, ("b",)), (EvolutionPolicy.STOP, ())],
)
def test_a_dropped_column_stays_unless_the_policy_drops_it(policy: EvolutionPolicy, dropped: tuple[str, ...]) -> None:
    assert carry(rewritten(ID, A), policies=EvolutionPolicies(drop=policy)).dropped == dropped


def test_columns_of_a_recreated_table_are_matched_by_name() -> None:
    again = schema_of((1, "b", pa.string()), (2, "id", pa.int64()), (3, "x", pa.int32()), relation=10)
    found = carry(again)
    assert (found.renamed, found.added, found.kept_apart, found.dropped) == ((), ("x",), (), ())


@pytest.mark.parametrize(
    ("new", "change"),
    [
        (schema_of(ID, A, B, key=("a",)), "another key"),
        (schema_of(ID, A, B, key=("id", "a")), "another key"),
        (rewritten((1, "id", pa.int32()), A, B), "retyped id, of the key"),
        (schema_of((1, "ident", pa.int64()), A, B, relation=10, key=("ident",)), "another key"),
    ],
)
def test_another_key_stops_a_table_unless_it_is_in_append_mode(new: TableSchema, change: str) -> None:
    for spec in (HISTORY, MARKED):
        found = carry_over(spec, OLD, new, DEFAULT_POLICIES, value_of)
        assert isinstance(found, SchemaChanged)
        assert change in found.headline
        assert "another `name`" in found.hint
    assert carry(new, APPEND).schema == new


def test_a_renamed_or_wider_key_is_the_same_key() -> None:
    new = rewritten((1, "ident", pa.string()), A, B, key=("ident",))
    assert carry(new, MARKED).renamed == (("id", "ident"),)


def test_a_keyless_table_in_append_mode_keeps_a_dropped_column() -> None:
    old, new = replace(OLD, key=()), replace(schema_of(ID, A), key=())
    assert isinstance(plan_evolution(old, new, DEFAULT_POLICIES, value_of), ReloadNeeded)
    found = plan_evolution(old, new, DEFAULT_POLICIES, value_of, APPEND)
    assert isinstance(found, Recast)
    assert found.dropped == ()
