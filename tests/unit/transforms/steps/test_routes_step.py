"""Rows sent to other tables, and plain rows made of changes."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from tailrace.errors import ConfigError, RuleInvalid, TransformFailed, Unsupported
from tailrace.model import change
from tailrace.model.batch import ChangeBatch, Window
from tailrace.model.change import Operation
from tailrace.model.position import Lsn
from tailrace.model.schema import Column, Identity, TableId, TableSchema
from tailrace.transforms.output_schema import is_changed_by_rule
from tailrace.transforms.rules import Cast, Mask, Outbox, Route, Unwrap
from tests.support.transforms import PEOPLE, batch, changed, only, person, plan_of, values

INSERT, UPDATE, DELETE, READ = Operation.INSERT, Operation.UPDATE, Operation.DELETE, Operation.READ
OUTBOX = TableSchema(
    table=TableId("public", "outbox"),
    relation=7,
    key=("id",),
    identity=Identity.KEY,
    columns=tuple(
        Column(name=name, source_type="text", type=pa.string())
        for name in ("id", "aggregatetype", "aggregateid", "payload")
    ),
)


def by_table(batches: tuple[ChangeBatch, ...]) -> dict[str, ChangeBatch]:
    return {str(batch.schema.table): batch for batch in batches}


def test_a_route_without_a_condition_renames_the_table() -> None:
    found = plan_of(Route(to="lake.{schema}_{table}")).apply(batch(changed(INSERT, person(1)))).batches
    assert found[0].schema.table == TableId("lake", "public_people")
    assert found[0].schema.relation == PEOPLE.relation


def test_rows_go_to_the_table_of_their_condition_and_move_between_tables() -> None:
    rows = batch(
        changed(INSERT, person(1, None, None, "DE")),
        changed(INSERT, person(2, None, None, "FR")),
        changed(UPDATE, person(1, None, None, "FR"), before=person(1, None, None, "DE")),
    )
    plan = plan_of(Route(to="{schema}.germans", when="country == 'DE'"), Mask(columns=("mail",)))
    found = by_table(plan.apply(rows).batches)
    ops = {table: [(row[change.OP], row["id"]) for row in only([made])] for table, made in found.items()}
    assert ops == {"public.people": [("insert", 2), ("insert", 1)], "public.germans": [("insert", 1), ("delete", 1)]}
    assert found["public.germans"].schema.relation != PEOPLE.relation


def test_rows_of_two_targets_have_different_numbers() -> None:
    was, now = person(1, None, None, "DE"), person(1, None, None, "FR")
    rows = batch(changed(UPDATE, now, before=was), changed(INSERT, person(2)))
    window = Window(start=Lsn(1), end=Lsn(5), batches=(rows,), transactions=1, rows=2)
    found = plan_of(Route(to="public.germans", when="country == 'DE'")).transform_window(window)
    assert found is not None
    numbers = [number for made in found.batches for number in made.data.column(change.SEQ).to_pylist()]
    assert (sorted(numbers), found.rows) == ([0, 1, 2], 3)


def message(number: str, kind: str | None) -> dict[str, str | None]:
    return {"id": number, "aggregatetype": kind, "aggregateid": "a", "payload": "{}"}


def test_an_outbox_sends_each_message_to_the_table_of_its_type() -> None:
    rows = batch(
        changed(INSERT, message("1", "order")),
        changed(DELETE, {"id": "1"}),
        changed(INSERT, message("2", "bill")),
        changed(READ, message("3", "order")),
        schema=OUTBOX,
    )
    found = by_table(plan_of(Outbox(to="events.{type}")).apply(rows).batches)
    assert {table: [row[0] for row in values([made], "id")] for table, made in found.items()} == {
        "events.order": ["1", "3"],
        "events.bill": ["2"],
    }
    assert found["events.bill"].schema.names == ["id", "aggregateid", "payload"]


def test_a_message_without_a_type_becomes_a_dead_letter() -> None:
    rows = batch(changed(INSERT, message("1", None)), changed(INSERT, message("2", "bill")), schema=OUTBOX)
    applied = plan_of(Outbox(name="box", on_error="dead-letter")).apply(rows)
    assert list(by_table(applied.batches)) == ["outbox.bill"]
    assert [(dead_letter.rule, len(dead_letter.batch)) for dead_letter in applied.dead_letters] == [("box", 1)]


def test_a_message_without_a_type_halts_and_names_the_rule() -> None:
    rows = batch(changed(INSERT, message("1", "bill")), changed(INSERT, message("2", None)), schema=OUTBOX)
    with pytest.raises(TransformFailed, match="box"):
        plan_of(Outbox(name="box")).apply(rows)


SOME = Outbox(name="box", to="events.{type}", when="payload != '' and aggregateid != 'test'")


def test_outbox_rows_for_which_the_condition_is_false_are_no_messages() -> None:
    given = [message("1", "order"), message("2", "order") | {"payload": ""}, message("3", "bill"), message("4", None)]
    given += [message("5", "bill") | {"aggregateid": "test"}, message("6", None) | {"payload": None}]
    rows = batch(*(changed(INSERT, row) for row in given[:3] + given[4:]), schema=OUTBOX)
    for made in (plan_of(SOME).apply(rows).batches, plan_of(SOME).apply_marking(rows)):
        assert {table: values([one], "id") for table, one in by_table(made).items()} == {
            "events.order": [("1",)],
            "events.bill": [("3",)],
        }
    data = pa.RecordBatch.from_pylist(given[:3] + given[4:], pa.schema(OUTBOX.row_fields()))
    assert plan_of(SOME).transform_rows(OUTBOX, data, TableId("events", "order")).column("id").to_pylist() == ["1"]
    with pytest.raises(TransformFailed, match="names no type"):
        plan_of(SOME).apply(batch(changed(INSERT, given[3]), schema=OUTBOX))


def test_an_undecidable_message_becomes_a_dead_letter() -> None:
    odd = changed(INSERT, message("1", "order"), unfit={"payload": "x"})
    applied = plan_of(SOME.model_copy(update={"on_error": "dead-letter"})).apply(
        batch(odd, changed(INSERT, message("2", "order")), schema=OUTBOX)
    )
    assert values(applied.batches, "id") == [("2",)]
    assert [(dead_letter.rule, len(dead_letter.batch)) for dead_letter in applied.dead_letters] == [("box", 1)]


def test_another_condition_of_an_outbox_changes_the_schema_of_its_tables() -> None:
    order, other = TableId("events", "order"), SOME.model_copy(update={"when": "payload != ''"})
    plain = SOME.model_copy(update={"when": None})
    schemas = [plan_of(rule).transformed_schema(OUTBOX, order) for rule in (SOME, other, plain)]
    assert len({shape.columns for shape in schemas}) == 3
    assert not any(is_changed_by_rule(column) for shape in schemas for column in shape.columns), (
        "rows can be asked for by key"
    )


def test_a_failed_row_is_one_dead_letter_although_it_could_go_to_two_tables() -> None:
    numbers = Cast(name="numbers", columns=("mail",), to="int32", on_error="dead-letter")
    rows = batch(changed(INSERT, person(1, "7")), changed(INSERT, person(2, "odd")))
    for when in ("mail > 5", "mail is None"):
        applied = plan_of(numbers, Route(to="elsewhere.people", when=when)).apply(rows)
        assert values(applied.batches, "id") == [(1,)]
        assert [(dead_letter.rule, len(dead_letter.batch)) for dead_letter in applied.dead_letters] == [("numbers", 1)]


def test_rows_that_go_to_several_tables_are_not_loaded_into_one() -> None:
    data = pa.RecordBatch.from_pylist([message("1", "order")], pa.schema(OUTBOX.row_fields()))
    with pytest.raises(Unsupported, match="several"):
        plan_of(Outbox()).transform_rows(OUTBOX, data)


def test_unwrapped_rows_have_no_old_ones_and_no_deletes() -> None:
    first, second = person(1, "a"), person(1, "b")
    rows = batch(changed(UPDATE, second, before=first), changed(DELETE, second, before=second))
    found = plan_of(Unwrap(metadata={"_op": "op"})).apply(rows).batches
    assert [(row["op"], row["mail"], row.get(change.BEFORE)) for row in only(found)] == [("update", "b", None)]


def test_marked_deletes_leave_unsent_values_unchanged() -> None:
    come, reported = changed(INSERT, person(1, "a")), changed(DELETE, person(2, "x"))
    found = only(plan_of(Unwrap(deletes="mark")).apply(batch(come, reported)).batches)
    assert [(row[change.OP], row["deleted"], row["mail"]) for row in found] == [
        ("insert", False, "a"),
        ("update", True, "x"),
    ]
    assert change.UNCHANGED not in found[1], "the source sends the whole row"
    bare = batch(come, changed(DELETE, person(1)), schema=replace(PEOPLE, identity=Identity.KEY))
    found = only(plan_of(Unwrap(deletes="mark")).apply(bare).batches)
    assert [(row[change.OP], row["deleted"]) for row in found] == [("insert", False), ("update", True)]
    assert [row[change.UNCHANGED] for row in found] == [None, ["mail", "amount", "country"]]


GERMAN, FRENCH = person(1, "a", country="DE"), person(2, "b", country="FR")


def test_only_some_rows_are_unwrapped() -> None:
    rows = batch(
        *(changed(UPDATE, row | {"mail": "x"}, before=row) for row in (GERMAN, FRENCH)),
        *(changed(DELETE, row) for row in (GERMAN, FRENCH)),
    )
    found = only(plan_of(Unwrap(metadata={"_op": "op"}, when="country == 'DE'")).apply(rows).batches)
    assert [(row[change.OP], row["id"], row["op"]) for row in found] == [
        ("update", 1, "update"),
        ("update", 2, None),
        ("delete", 2, None),
    ]
    assert [row[change.BEFORE] for row in found] == [None, FRENCH | {"op": None}, None]
    assert found[2]["mail"] == "b"


def test_only_some_deletes_are_marked() -> None:
    rows = batch(changed(INSERT, FRENCH), changed(DELETE, GERMAN), changed(DELETE, FRENCH))
    found = only(plan_of(Unwrap(deletes="mark", when="country == 'DE'")).apply(rows).batches)
    assert [(row[change.OP], row["id"], row["deleted"], row["mail"]) for row in found] == [
        ("insert", 2, None, "b"),
        ("update", 1, True, "a"),
        ("delete", 2, None, "b"),
    ]
    assert change.UNCHANGED not in found[2]


def test_unwrap_needs_a_condition_on_columns_that_deletes_have() -> None:
    bare = replace(PEOPLE, identity=Identity.KEY)
    with pytest.raises(RuleInvalid, match="does not send of a deleted row") as raised:
        plan_of(Unwrap(when="country == 'DE'")).transformed_schema(bare)
    assert "REPLICA IDENTITY FULL" in raised.value.hint
    rows = batch(changed(DELETE, {"id": 1}), changed(DELETE, {"id": 7}), schema=bare)
    (found,) = plan_of(Unwrap(when="id > 5")).apply(rows).batches
    assert found.data.column("id").to_pylist() == [1]


def test_an_undecidable_row_becomes_a_dead_letter_as_it_was_sent() -> None:
    rule = Unwrap(name="plain", deletes="mark", when="1 / (id - 1) == 1", on_error="dead-letter")
    rows = batch(changed(DELETE, GERMAN), changed(DELETE, FRENCH))
    applied = plan_of(rule).apply(rows)
    assert [(row[change.OP], row["id"]) for row in only(applied.batches)] == [("update", 2)]
    assert [
        (dead_letter.cause, dead_letter.batch.data.column("_op").to_pylist()) for dead_letter in applied.dead_letters
    ] == [("it divides by zero", ["delete"])]


def test_a_failed_delete_is_reported_although_deletes_are_dropped() -> None:
    numbers = Cast(name="numbers", columns=("mail",), to="int32")
    with pytest.raises(TransformFailed, match="numbers"):
        plan_of(numbers, Unwrap()).apply(batch(changed(DELETE, person(1, "odd"))))


def test_a_marker_with_the_name_of_a_column_is_refused() -> None:
    with pytest.raises(RuleInvalid, match="exists already"):
        plan_of(Unwrap(deletes="mark", marker="mail")).transformed_schema(PEOPLE)


@pytest.mark.parametrize("to", ["people", "{nobody}.x", "a{.b"])
def test_a_target_names_schema_and_table(to: str) -> None:
    with pytest.raises(ConfigError, match=r"schema\.table"):
        Route(to=to)
