"""Output tables: each belongs to one source table, so that no work on one affects another."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest

from tailrace.errors import RuleInvalid
from tailrace.model.change import Operation
from tailrace.model.schema import TableId
from tailrace.transforms.output_tables import OutputTables
from tailrace.transforms.rules import Mask, Outbox, Rename, Route, Rule, Transforms
from tailrace.transforms.transform_plan import TransformPlan
from tests.support.transforms import PEOPLE, batch, changed, person
from tests.unit.transforms.steps.test_routes_step import OUTBOX, message

GERMANS = Route(tables=("public.people",), to="de.{table}", when="country == 'DE'")


def named(text: str) -> TableId:
    return TableId(*text.split("."))


def apart(*rules: Rule) -> TransformPlan:
    return TransformPlan(Transforms.model_validate({"rules": rules}), names=OutputTables(rules))


def test_the_last_rule_without_a_condition_sets_the_default_target() -> None:
    names = OutputTables((Route(to="a.{table}"), GERMANS, Route(to="lake.{schema}_{table}")))
    assert names.tables_for(named("public.people")) == (named("lake.public_people"), named("de.people"))
    assert names.tables_for(named("public.orders")) == (named("lake.public_orders"),)
    assert names.source_table(named("de.people")) == named("public.people")


@pytest.mark.parametrize(("rules", "said"), [
    ((Route(to="lake.all"),), "two tables would become one"),
    ((Route(tables=("public.people",), to="public.orders"),), "two tables would become one"),
    ((GERMANS, Route(tables=("public.people",), to="de.people", when="country == 'AT'")), "to the same table"),
    ((Outbox(tables=("public.people",)), Route(to="lake.{table}")), "sends an outbox's rows elsewhere"),
    ((Outbox(tables=("x.outbox",), to="public.{type}"),), "a name that messages of an outbox may use"),
])  # fmt: skip
def test_a_table_has_one_source_table_and_one_route(rules: tuple[Rule, ...], said: str) -> None:
    names = OutputTables(rules)
    with pytest.raises(RuleInvalid, match=said) as raised:
        _ = [names.tables_for(named(table)) for table in ("public.people", "public.orders")]
    assert raised.value.hint


def test_rows_of_two_tables_with_one_target_are_refused_in_every_process() -> None:
    plan = apart(Route(tables=("public.people",), to="lake.orders"), Outbox(tables=("x.outbox",), to="lake.{type}"))
    for one in (plan, pickle.loads(pickle.dumps(plan))):
        with pytest.raises(RuleInvalid, match="a name that messages"):
            one.apply_marking(batch(changed(Operation.INSERT, person(1))))


def test_the_type_column_of_messages_must_be_unchanged() -> None:
    swapped = Rename(columns={"aggregatetype": "kind", "payload": "aggregatetype"})
    for rule in (Mask(columns=("aggregatetype",)), swapped):
        with pytest.raises(RuleInvalid, match="changed the type"):
            apart(rule, Outbox(tables=("public.outbox",))).transformed_schema(OUTBOX)
    late = apart(Outbox(tables=("public.outbox",)), Mask(columns=("payload",)))
    assert late.transformed_schema(OUTBOX, named("outbox.order")).table == named("outbox.order")


def test_a_load_gets_the_rows_of_its_own_table() -> None:
    data = pa.RecordBatch.from_pylist(
        [person(1, "a", None, "DE"), person(2, "b", None, "FR"), person(3, "c")], pa.schema(PEOPLE.row_fields())
    )
    plan = apart(GERMANS, Mask(columns=("mail",)))
    unfit = pa.nulls(3, pa.list_(pa.struct([("column", pa.string()), ("text", pa.string())])))
    for table, ids in (("de.people", [1]), ("public.people", [2, 3]), ("x.y", [])):
        assert plan.transform_rows(PEOPLE, data, named(table)).column("id").to_pylist() == ids
        assert plan.transform_marked_rows(PEOPLE, data, unfit, named(table))[0].column("id").to_pylist() == ids


def test_an_undecidable_row_is_marked_in_both_tables_and_is_one_dead_letter() -> None:
    rule = GERMANS.model_copy(update={"on_error": "dead-letter"})
    rows = batch(changed(Operation.UPDATE, person(1), unchanged=["country"]))
    made = apart(rule).apply_marking(rows)
    assert sorted(str(one.schema.table) for one in made) == ["de.people", "public.people"]
    assert all(one.data.column("_unfit")[0].as_py() for one in made)
    applied = apart(rule).apply(rows)
    assert (applied.batches, len(applied.dead_letters)) == ((), 1)


def test_another_condition_changes_the_schema_of_both_tables_and_another_name_does_not() -> None:
    one, other = apart(GERMANS), apart(GERMANS.model_copy(update={"when": "country == 'AT'"}))
    for table in ("de.people", "public.people"):
        assert one.transformed_schema(PEOPLE, named(table)) != other.transformed_schema(PEOPLE, named(table))
    whole = apart(Route(to="lake.{table}")).transformed_schema(PEOPLE)
    assert (whole.columns, whole.relation, whole.source_schema) == (PEOPLE.columns, PEOPLE.relation, PEOPLE)


def test_a_key_move_is_no_new_message_and_an_empty_type_is_no_type() -> None:
    rows = batch(
        changed(Operation.INSERT, message("1", "order")),
        changed(Operation.DELETE, {"id": "1"}),
        changed(Operation.INSERT, message("2", "order"), moved_from={"id": "1"}),
        schema=OUTBOX,
    )
    (made,) = apart(Outbox(tables=("public.outbox",))).apply(rows).batches
    assert made.data.column("id").to_pylist() == ["1"]
    empty = batch(changed(Operation.INSERT, message("1", "")), schema=OUTBOX)
    applied = apart(Outbox(tables=("public.outbox",), on_error="dead-letter")).apply(empty)
    assert (applied.batches, len(applied.dead_letters)) == ((), 1)
