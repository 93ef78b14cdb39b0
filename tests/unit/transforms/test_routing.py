"""Rows sent to other tables, and rows without what makes them changes."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tailrace.errors import RuleInvalid, Unsupported
from tailrace.model import change
from tailrace.model.batch import ChangeBatch, Window
from tailrace.model.change import Operation
from tailrace.model.position import Lsn
from tailrace.model.schema import Column, Identity, TableId, TableSchema
from tailrace.transforms.rules import Mask, Outbox, Route, Unwrap
from tests.support.transforms import PEOPLE, batch, changed, only, person, plan_of, values

INSERT, UPDATE, DELETE, READ = Operation.INSERT, Operation.UPDATE, Operation.DELETE, Operation.READ
OUTBOX = TableSchema(
    table=TableId("public", "outbox"), relation=7, key=("id",), identity=Identity.KEY,
    columns=tuple(
        Column(name=name, source_type="text", type=pa.string())
        for name in ("id", "aggregatetype", "aggregateid", "payload")
    ),
)  # fmt: skip


def by_table(batches: tuple[ChangeBatch, ...]) -> dict[str, ChangeBatch]:
    return {str(batch.schema.table): batch for batch in batches}


def test_a_table_gets_another_name() -> None:
    found = plan_of(Route(to="lake.{schema}_{table}")).apply(batch(changed(INSERT, person(1)))).batches
    assert found[0].schema.table == TableId("lake", "public_people")
    assert found[0].schema.relation == PEOPLE.relation


def test_rows_go_to_the_table_that_a_condition_says_and_move_between_them() -> None:
    rows = batch(
        changed(INSERT, person(1, None, None, "DE")), changed(INSERT, person(2, None, None, "FR")),
        changed(UPDATE, person(1, None, None, "FR"), before=person(1, None, None, "DE")),
    )  # fmt: skip
    plan = plan_of(Route(to="{schema}.germans", when="country == 'DE'"), Mask(columns=("mail",)))
    found = by_table(plan.apply(rows).batches)
    ops = {table: [(row[change.OP], row["id"]) for row in only([made])] for table, made in found.items()}
    assert ops == {
        "public.people": [("insert", 2), ("insert", 1)], "public.germans": [("insert", 1), ("delete", 1)],
    }  # fmt: skip
    assert found["public.germans"].schema.relation != PEOPLE.relation


def test_rows_that_went_two_ways_are_numbered_apart() -> None:
    was, now = person(1, None, None, "DE"), person(1, None, None, "FR")
    rows = batch(changed(UPDATE, now, before=was), changed(INSERT, person(2)))
    window = Window(start=Lsn(1), end=Lsn(5), batches=(rows,), transactions=1, rows=2)
    found = plan_of(Route(to="public.germans", when="country == 'DE'")).window(window)
    assert found is not None
    numbers = [number for made in found.batches for number in made.data.column(change.SEQ).to_pylist()]
    assert (sorted(numbers), found.rows) == ([0, 1, 2], 3)


def message(number: str, kind: str | None) -> dict[str, str | None]:
    return {"id": number, "aggregatetype": kind, "aggregateid": "a", "payload": "{}"}


def test_an_outbox_sends_each_message_where_its_type_says() -> None:
    rows = batch(
        changed(INSERT, message("1", "order")), changed(DELETE, {"id": "1"}), changed(INSERT, message("2", "bill")),
        changed(READ, message("3", "order")), schema=OUTBOX,
    )  # fmt: skip
    found = by_table(plan_of(Outbox(to="events.{type}")).apply(rows).batches)
    assert {table: [row[0] for row in values([made], "id")] for table, made in found.items()} == {
        "events.order": ["1", "3"], "events.bill": ["2"],
    }  # fmt: skip
    assert found["events.bill"].schema.names == ["id", "aggregateid", "payload"]


def test_a_message_without_a_type_is_set_aside() -> None:
    rows = batch(changed(INSERT, message("1", None)), changed(INSERT, message("2", "bill")), schema=OUTBOX)
    applied = plan_of(Outbox(name="box", on_error="dead-letter")).apply(rows)
    assert list(by_table(applied.batches)) == ["outbox.bill"]
    assert [(letter.rule, len(letter.batch)) for letter in applied.letters] == [("box", 1)]


def test_rows_that_go_to_several_tables_are_not_loaded_into_one() -> None:
    data = pa.RecordBatch.from_pylist([message("1", "order")], pa.schema(OUTBOX.row_fields()))
    with pytest.raises(Unsupported, match="several"):
        plan_of(Outbox()).rows(OUTBOX, data)


def test_unwrapped_rows_have_no_old_ones_and_no_deletes() -> None:
    first, second = person(1, "a"), person(1, "b")
    rows = batch(changed(UPDATE, second, before=first), changed(DELETE, second, before=second))
    found = plan_of(Unwrap(metadata={"_op": "op"})).apply(rows).batches
    assert [(row["op"], row["mail"], row.get(change.BEFORE)) for row in only(found)] == [("update", "b", None)]


def test_deletes_are_marked_and_leave_what_was_not_told_alone() -> None:
    told = person(2, "x")
    rows = batch(changed(INSERT, person(1, "a")), changed(DELETE, person(1)), changed(DELETE, told, before=told))
    found = only(plan_of(Unwrap(deletes="mark")).apply(rows).batches)
    assert [(row[change.OP], row["deleted"], row["mail"]) for row in found] == [
        ("insert", False, "a"), ("update", True, None), ("update", True, "x"),
    ]  # fmt: skip
    assert [row[change.UNCHANGED] for row in found] == [None, ["mail", "amount", "country"], None]


def test_a_marker_that_is_there_already_is_refused() -> None:
    with pytest.raises(RuleInvalid, match="there already"):
        plan_of(Unwrap(deletes="mark", marker="mail")).transformed_schema(PEOPLE)


@pytest.mark.parametrize("to", ["people", "{nobody}.x", "a{.b"])
def test_a_target_names_schema_and_table(to: str) -> None:
    with pytest.raises(ValueError, match=r"schema\.table"):
        Route(to=to)
