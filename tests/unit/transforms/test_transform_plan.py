"""Rules over changes: every image of a row passes them, and unsent values stay unsent."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tailrace.errors import ConfigError, RuleInvalid, TransformFailed
from tailrace.model import change
from tailrace.model.batch import Window
from tailrace.model.catalogue_facts import CatalogueFacts, ColumnFacts, StorageFacts
from tailrace.model.change import Operation
from tailrace.model.position import Lsn
from tailrace.model.schema import Column, Identity, TableSchema
from tailrace.transforms.output_schema import is_changed_by_rule
from tailrace.transforms.rules import (
    Cast,
    Compute,
    Copy,
    Decrypt,
    Encrypt,
    Exclude,
    Function,
    Hmac,
    Include,
    KeySource,
    Mask,
    Null,
    Redact,
    Rename,
    Rule,
    Set,
    Sha256,
    Transforms,
    TruncateValues,
    Unwrap,
)
from tests.support.transforms import PEOPLE, batch, changed, only, person, plan_of, values

INSERT, UPDATE, DELETE, TRUNCATE = Operation.INSERT, Operation.UPDATE, Operation.DELETE, Operation.TRUNCATE
MAIL = "ann@example.org"
HIDING = [
    Mask(columns=("mail",), keep_first=2), Redact(columns=("mail",)), Null(columns=("mail",)),
    Sha256(columns=("mail",)), Hmac(columns=("mail",), key="old"), Encrypt(columns=("mail",), key="old"),
    TruncateValues(columns=("mail",), length=3),
    Exclude(columns=("mail",)), Include(columns=("id", "amount")), Set(column="mail", value="x"),
    Compute(column="mail", expression="substring(mail, 1, 2)"), Cast(columns=("mail",), to="binary"),
]  # fmt: skip


@pytest.mark.parametrize("rule", HIDING[:-1], ids=lambda rule: rule.do)
def test_a_hidden_value_is_in_no_image_of_the_row(rule: Rule) -> None:
    rows = batch(
        changed(INSERT, person(1, MAIL)),
        changed(UPDATE, person(1, MAIL, "2"), before=person(1, MAIL)),
        changed(DELETE, person(1, MAIL), before=person(1, MAIL)),
        changed(INSERT, person(3, MAIL), moved_from={"id": 1}),
    )
    found = plan_of(rule).apply(rows).batches
    assert [row[change.OP] for row in only(found)] == ["insert", "update", "delete", "insert"]
    assert MAIL.encode() not in found[0].data.serialize().to_pybytes()
    assert found[0].moves == 1


@pytest.mark.parametrize("rule", HIDING, ids=lambda rule: rule.do)
def test_lesson_8_snapshot_rows_have_the_schema_and_the_values_of_stream_rows(rule: Rule) -> None:
    plan = plan_of(rule)
    people = [person(1, MAIL, "10.50", "DE"), person(2, None, None, None), person(3, "é", "-1", "FR")]
    streamed = plan.apply(batch(*(changed(INSERT, one) for one in people))).batches[0]
    read = plan.transform_rows(PEOPLE, pa.RecordBatch.from_pylist(people, pa.schema(PEOPLE.row_fields())))
    target = plan.transformed_schema(PEOPLE)
    assert streamed.schema is target
    assert read.schema == pa.schema(target.row_fields())
    if rule.do != "encrypt":
        assert read.to_pylist() == streamed.data.select(target.names).to_pylist()
    assert [column.type for column in target.columns] == [field.type for field in read.schema]


def marked(rule: Rule, *unfit: list[dict[str, str]] | None) -> tuple[list[dict[str, Any]], list[Any]]:
    people = [person(at + 1, MAIL, "1" if cells is None else None, "DE") for at, cells in enumerate(unfit)]
    data = pa.RecordBatch.from_pylist(people, pa.schema(PEOPLE.row_fields()))
    rows, cells = plan_of(rule).transform_marked_rows(PEOPLE, data, pa.array(unfit, change.UNFIT_TYPE))
    return rows.to_pylist(), cells.to_pylist()


def test_an_unfit_snapshot_row_is_marked_and_hides_what_rules_hide() -> None:
    nan = [{"column": "amount", "text": "NaN"}]
    rows, cells = marked(Redact(columns=("mail",)), None, nan)
    assert (cells, [row["amount"] for row in rows]) == ([None, nan], [Decimal(1), None])
    assert MAIL not in str((rows, cells))
    rows, cells = marked(Exclude(columns=("amount",)), None, nan)
    assert (cells, "amount" in rows[0]) == ([None, None], False), "what does not fit is not asked for"
    assert marked(Mask(tables=("other.*",), columns=("mail",)), nan)[1] == [nan], "no rule concerns it"


def test_a_snapshot_row_that_a_rule_fails_at_is_marked_or_refused_as_declared() -> None:
    rule = Cast(columns=("mail",), to="int32", on_error="dead-letter")
    (row,), (cells,) = marked(rule, None)
    assert (row["mail"], cells[0]["column"]) == (None, "mail")
    assert change.parse_rule_failure(cells[0]["text"]) is not None
    with pytest.raises(TransformFailed):
        marked(Cast(columns=("mail",), to="int32"), None)


def test_the_same_schema_gives_the_same_object() -> None:
    plan = plan_of(Mask(columns=("mail",)))
    assert plan.transformed_schema(PEOPLE) is plan.transformed_schema(PEOPLE)
    assert plan.transformed_schema(PEOPLE).source_schema is PEOPLE


def test_a_table_without_matching_rules_is_unchanged() -> None:
    plan = plan_of(Mask(tables=("other.*",), columns=("mail",)))
    rows = batch(changed(INSERT, person(1, MAIL)))
    assert plan.apply(rows).batches == (rows,)
    assert plan.transformed_schema(PEOPLE) is PEOPLE


def test_an_unsent_value_stays_unsent_under_its_new_name() -> None:
    rules = (
        Mask(columns=("mail",)),
        Rename(columns={"mail": "address"}),
        Copy(column="address", to="again"),
        Compute(column="size", expression="length(address)"),
    )
    found = plan_of(*rules).apply(batch(changed(UPDATE, person(1, None, "5"), unchanged=["mail"]))).batches
    row = only(found)[0]
    assert row[change.UNCHANGED] == ["address", "again", "size"]
    assert (row["address"], row["again"], row["size"]) == (None, None, None)


def test_a_set_or_dropped_column_is_no_longer_unsent() -> None:
    rows = batch(changed(UPDATE, person(1), unchanged=["mail", "country"]))
    found = plan_of(Set(column="mail", value="x"), Exclude(columns=("country",))).apply(rows).batches
    assert change.UNCHANGED not in found[0].data.schema.names
    assert values(found, "mail") == [("x",)]


def test_a_value_computed_from_a_sent_and_an_unsent_one_fails() -> None:
    rows = batch(changed(UPDATE, person(1, None, None, "DE"), unchanged=["mail"]))
    with pytest.raises(TransformFailed, match="was not sent"):
        plan_of(Compute(column="both", expression="concat(mail, country)")).apply(rows)


def test_a_condition_on_an_unsent_value_fails_rather_than_guesses() -> None:
    rows = batch(changed(UPDATE, person(1, MAIL), unchanged=["country"]))
    rule = Mask(columns=("mail",), when="country == 'DE'", on_error="dead-letter")
    with pytest.raises(TransformFailed, match="was not sent"):
        plan_of(rule.model_copy(update={"on_error": "halt"})).apply(rows)
    found = plan_of(rule).apply_marking(rows)
    assert only(found)[0]["mail"] is None
    assert MAIL.encode() not in found[0].data.serialize().to_pybytes()


def test_a_rule_hides_its_value_although_its_condition_needs_one_that_an_earlier_rule_failed_at() -> None:
    rows = batch(changed(INSERT, person(1, MAIL, None, "odd")), changed(INSERT, person(2, MAIL, None, "3")))
    numbers = Cast(columns=("country",), to="int32", on_error="dead-letter")
    found = plan_of(numbers, Redact(columns=("mail",), text="-", when="country > 5")).apply_marking(rows)
    assert [row["mail"] for row in only(found)] == ["-", MAIL]


def test_a_condition_chooses_rows_image_by_image() -> None:
    rows = batch(
        changed(UPDATE, person(1, MAIL, None, "FR"), before=person(1, MAIL, None, "DE")),
        changed(UPDATE, person(2, MAIL, None, "DE"), before=person(2, MAIL, None, "FR")),
        changed(UPDATE, person(3, MAIL, None, None)),
    )
    found = plan_of(Redact(columns=("mail",), text="-", when="country == 'DE'")).apply(rows).batches
    assert [(row["mail"], row[change.BEFORE] and row[change.BEFORE]["mail"]) for row in only(found)] == [
        (MAIL, "-"),
        ("-", MAIL),
        (MAIL, None),
    ]


def test_a_condition_with_another_type_keeps_other_values_as_strings() -> None:
    rows = batch(changed(INSERT, person(1, None, "1.50", "DE")), changed(INSERT, person(2, None, "2.50")))
    found = plan_of(Redact(columns=("amount",), text="-", when="country == 'DE'")).apply(rows).batches
    assert values(found, "amount") == [("-",), ("2.50",)]


def test_a_value_known_only_as_text_is_never_shown_by_a_rule_that_hides_it() -> None:
    rows = batch(changed(INSERT, person(1, MAIL), unfit={"amount": "NaN", "_before.amount": "NaN"}))
    with pytest.raises(TransformFailed):
        plan_of(Sha256(columns=("amount",))).apply(rows)
    amount = ("amount",)
    for rule in (Redact(columns=amount), Null(columns=amount), Exclude(columns=amount), Set(column="amount")):
        found = plan_of(rule).apply(rows).batches
        assert change.UNFIT not in found[0].data.schema.names, rule.do
    renamed = plan_of(Rename(columns={"amount": "sum"})).apply(rows).batches
    assert only(renamed)[0][change.UNFIT] == [{"column": "sum", "text": "NaN"}]


# The key.


@pytest.mark.parametrize(
    "rule",
    [
        Mask(columns=("id",)),
        Redact(columns=("id",)),
        Null(columns=("id",)),
        Encrypt(columns=("id",), key="old"),
        Exclude(columns=("id",)),
        Include(columns=("mail",)),
        Set(column="id", value=1),
        Copy(column="amount", to="id"),
        Compute(column="id", expression="id * 2"),
        Cast(columns=("id",), to="int16"),
        Cast(columns=("id",), to="float64"),
        Function(columns=("id",), function=lambda rows: rows),
        Sha256(columns=("id",), when="country == 'DE'"),
    ],
    ids=lambda rule: rule.do,
)
def test_a_rule_that_would_destroy_the_key_is_refused_by_name(rule: Rule) -> None:
    rule = rule.model_copy(update={"name": "the-rule"})
    with pytest.raises(RuleInvalid, match="key") as raised:
        plan_of(rule).transformed_schema(PEOPLE)
    assert raised.value.fields["rule"] == "the-rule"
    assert str(raised.value.fields["table"]) == "public.people"


@pytest.mark.parametrize("rule", [
    Sha256(columns=("id",)), Hmac(columns=("id",), key="old"), Cast(columns=("id",), to="string"),
])  # fmt: skip
def test_a_key_that_stays_unique_is_changed_alike_in_every_image(rule: Rule) -> None:
    rows = batch(
        changed(INSERT, person(1)),
        changed(DELETE, person(1)),
        changed(INSERT, person(2), moved_from={"id": 1}),
        changed(UPDATE, person(1), before=person(1)),
    )
    found = plan_of(rule).apply(rows).batches
    one, gone, two, updated = only(found)
    assert one["id"] == gone["id"] == two[change.MOVED_FROM]["id"] == updated[change.BEFORE]["id"] != two["id"]
    assert found[0].schema.key == ("id",)


def test_a_renamed_key_is_the_key_still() -> None:
    rows = batch(changed(INSERT, person(2), moved_from={"id": 1}))
    found = plan_of(Rename(columns={"id": "number"})).apply(rows).batches
    assert found[0].schema.key == ("number",)
    assert only(found)[0][change.MOVED_FROM] == {"number": 1}


def test_rules_on_a_keyless_table_must_give_equal_values_each_time() -> None:
    keyless = TableSchema(table=PEOPLE.table, relation=4, columns=PEOPLE.columns, key=(), identity=Identity.FULL)
    mail = ("mail",)
    for rule in (Encrypt(columns=mail, key="old"), Function(columns=mail, function=lambda rows: rows), Unwrap()):
        with pytest.raises(RuleInvalid, match="destroy the key"):
            plan_of(rule).transformed_schema(keyless)
    assert plan_of(Mask(columns=("mail",))).transformed_schema(keyless).key == ()


# What is refused before any row.


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Mask(tables=("public.people",), columns=("emial",)), "does not have"),
        (Mask(tables=("public.people",), columns=("mail",), when="land == 'DE'"), "names the column"),
        (Mask(columns=("mail",), when="amount"), "is not a condition"),
        (TruncateValues(columns=("amount",), length=2), "cannot be used on a column"),
        (Cast(columns=("mail",), to="decimal(60,1)"), "is not a type"),
        (Rename(columns={"mail": "country"}), "the same name"),
        (Exclude(tables=("public.*",), columns=("*",)), "key"),
        (Function(columns=("mail",), function="no.such:thing"), "cannot be found"),
        (Function(columns=("mail",), function=lambda rows: 3), "did not return a record batch"),
        (Set(column="made"), "has no type"),
        (Compute(column="wide", expression="amount * amount * amount * amount"), "more than 38 digits"),
        (Compute(column="wide", expression=" * ".join(["amount"] * 30)), "precision"),
    ],
    ids=lambda value: getattr(value, "do", ""),
)
def test_a_rule_that_cannot_work_is_refused_before_the_first_row(rule: Rule, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(rule).transformed_schema(PEOPLE)


@pytest.mark.parametrize(
    ("rule", "message", "instead"),
    [
        (Exclude(columns=("mail",), when="amount > 1"), "in all rows or in none", "`null` with `when`"),
        (Include(columns=("mail",), when="amount > 1"), "in all rows or in none", "`null` with `when`"),
        (Rename(columns={"mail": "m"}, when="amount > 1"), "in all rows or in none", "`copy` with `when`"),
        (Decrypt(columns=("mail",), when="amount > 1"), "do not fit a column of string", "to: binary"),
    ],
    ids=lambda value: getattr(value, "do", ""),
)
def test_a_rule_that_cannot_have_when_says_what_to_use_instead(rule: Rule, message: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        Transforms.model_validate({"rules": (rule,), "keys": {"old": KeySource(env="OLD")}})
    assert instead in raised.value.hint


def test_a_cast_with_when_keeps_other_values_that_fit_and_fails_at_those_that_do_not() -> None:
    rule = Cast(name="numbers", columns=("mail",), to="int32", when="country == 'DE'", on_error="dead-letter")
    rows = batch(
        changed(INSERT, person(1, "7", country="DE")),
        changed(INSERT, person(2, "8", country="FR")),
        changed(INSERT, person(3, MAIL, country="DE")),
        changed(INSERT, person(4, MAIL, country="FR")),
        changed(UPDATE, person(1, "9", country="FR"), before=person(1, "7", country="DE")),
    )
    applied = plan_of(rule).apply(rows)
    assert values(applied.batches, "id", "mail") == [(1, 7), (2, 8), (1, 9)]
    assert only(applied.batches)[2][change.BEFORE]["mail"] == 7
    assert [dead_letter.batch.data.column("id").to_pylist() for dead_letter in applied.dead_letters] == [[3], [4]]
    assert {dead_letter.cause for dead_letter in applied.dead_letters} == {"the value does not fit int32"}


def test_decrypt_with_when_works_where_other_rows_can_stay_binary() -> None:
    schema = replace(
        PEOPLE, columns=(PEOPLE.columns[0], replace(PEOPLE.columns[1], type=pa.binary()), *PEOPLE.columns[2:])
    )
    rows = batch(
        changed(INSERT, person(1, country="DE") | {"mail": b"plain"}),
        changed(INSERT, person(2, country="FR") | {"mail": b"plain"}),
        schema=schema,
    )
    sealed = Encrypt(columns=("mail",), key="old", when="country == 'DE'")
    found = plan_of(sealed, Decrypt(columns=("mail",), to="binary", when="country == 'DE'")).apply(rows).batches
    assert values(found, "mail") == [(b"plain",), (b"plain",)]


def test_a_rule_that_never_matched_is_reported() -> None:
    plan = plan_of(
        Mask(name="used", columns=("mail",)),
        Mask(name="elsewhere", tables=("other.*",), columns=("mail",)),
        Mask(name="misspelt", columns=("emial",)),
        Redact(name="nobody", columns=("mail",), when="country == 'XX'"),
    )
    plan.apply(batch(changed(INSERT, person(1, MAIL))))
    assert {(one.rule, one.no_table) for one in plan.unmatched_rules()} == {
        ("elsewhere", True),
        ("misspelt", True),
        ("nobody", False),
    }


# A user's own function.


def shout(rows: pa.RecordBatch) -> pa.RecordBatch:
    loud = pc.utf8_upper(rows.column("mail"))
    return pa.RecordBatch.from_arrays([loud, pc.utf8_length(loud)], names=["mail", "size"])


def picky(rows: pa.RecordBatch) -> pa.RecordBatch:
    if MAIL in rows.column("mail").to_pylist():
        raise RuntimeError(f"I do not like {MAIL}")
    return rows


def test_a_user_function_makes_columns() -> None:
    rows = batch(changed(UPDATE, person(1, "a"), before=person(1, "b")), changed(UPDATE, person(2), unchanged=["mail"]))
    rule = Function(columns=("mail",), function="tests.unit.transforms.test_transform_plan:shout")
    found = plan_of(rule).apply(rows).batches
    assert values(found, "mail", "size") == [("A", 1), (None, None)]
    assert only(found)[0][change.BEFORE]["size"] == 1
    assert only(found)[1][change.UNCHANGED] == ["mail", "size"]


def test_a_failing_function_is_reported_by_rule_and_never_with_its_own_message() -> None:
    rows = batch(changed(INSERT, person(1, "a")), changed(INSERT, person(2, MAIL)))
    with pytest.raises(TransformFailed) as raised:
        plan_of(Function(name="mine", columns=("mail",), function=picky)).apply(rows)
    assert MAIL not in str(raised.value)
    applied = plan_of(Function(name="mine", columns=("mail",), function=picky, on_error="dead-letter")).apply(rows)
    assert values(applied.batches, "id") == [(1,)]
    assert [(dead_letter.rule, len(dead_letter.batch)) for dead_letter in applied.dead_letters] == [("mine", 1)]


# Windows.


def window(*batches: Any) -> Window:
    return Window(start=Lsn(1), end=Lsn(9), batches=batches, transactions=1, rows=sum(map(len, batches)))


def test_a_window_without_matching_rules_is_the_same_object() -> None:
    given = window(batch(changed(INSERT, person(1))))
    assert plan_of(Mask(tables=("other.*",), columns=("mail",))).transform_window(given) is given


def test_truncates_pass_the_rules() -> None:
    plan = plan_of(Mask(columns=("mail",)), Set(column="made", value=1))
    found = plan.apply(batch(changed(TRUNCATE, person(0)))).batches
    assert found[0].truncates == 1


# What is known of the source's columns.


def facts(*fills: str | None) -> CatalogueFacts:
    columns = tuple(
        ColumnFacts(number=at + 1, nullable=True, default=None, fast_default=fill, definition_version=1)
        for at, fill in enumerate(fills)
    )
    storage = (StorageFacts(relation=41, name="people", file=1, attached=False),)
    return CatalogueFacts(columns=columns, storage=storage, columns_ever=4)


def test_facts_follow_their_columns_and_reveal_no_hidden_value() -> None:
    from dataclasses import replace

    known = replace(PEOPLE, facts=facts(None, MAIL, None, "DE"))
    rules = (Mask(columns=("mail",)), Exclude(columns=("amount",)), Set(column="made", value=1))
    target = plan_of(*rules).transformed_schema(known)
    assert target.facts is not None
    assert [column.number for column in target.facts.columns[:3]] == [1, 2, 4]
    assert target.facts.columns[3].number < 0
    assert [column.fast_default for column in target.facts.columns] == [None, "", "DE", None]
    assert target.facts.unpublished == (3,)
    again = TableSchema.from_json(target.to_json())
    assert (again, again.facts, again.source_schema) == (target, target.facts, known)
    assert MAIL not in str(target.to_json())


def test_another_rule_changes_the_schema_and_another_name_does_not() -> None:
    def shape(**fields: Any) -> TableSchema:
        return plan_of(Mask(columns=("mail",), **fields)).transformed_schema(PEOPLE)

    assert shape() == shape(name="other", on_error="dead-letter")
    assert shape() != shape(keep_last=1)
    assert shape() != PEOPLE


def test_a_dropped_column_is_marked_in_the_schema_so_that_tables_drop_it_too() -> None:
    shape = plan_of(Exclude(columns=("country",))).transformed_schema(PEOPLE)
    assert shape.columns[0] != PEOPLE.columns[0]
    assert not is_changed_by_rule(shape.columns[0])


def test_a_column_named_like_a_metadata_column_is_kept_separate() -> None:
    odd = TableSchema(
        table=PEOPLE.table,
        relation=5,
        key=("_op",),
        identity=Identity.FULL,
        columns=tuple(Column(name=name, source_type="text", type=pa.string()) for name in ("_op", "_seq_")),
    )
    row = {"_op_": "k", "_seq__": "v"}
    stored = batch({change.OP: "update", **row, change.BEFORE: row}, schema=odd)
    found = only(plan_of(Mask(columns=("_seq_",))).apply(stored).batches)[0]
    assert (found["_op_"], found["_seq__"], found[change.BEFORE]) == ("k", "*", {"_op_": "k", "_seq__": "*"})


def test_arithmetic_on_decimals_is_exact() -> None:
    rows = batch(changed(INSERT, person(1, None, "0.10")))
    found = plan_of(Compute(column="tax", expression="amount * 0.19", type="decimal(20,4)")).apply(rows).batches
    assert values(found, "tax") == [(Decimal("0.0190"),)]


def test_a_failing_load_says_when_rows_become_dead_letters() -> None:
    rule = Cast(columns=("mail",), to="int32", on_error="dead-letter")
    data = pa.RecordBatch.from_pylist([person(1, "no number")], pa.schema(PEOPLE.row_fields()))
    with pytest.raises(TransformFailed) as raised:
        plan_of(rule).transform_rows(PEOPLE, data)
    assert "a load of a mirror with a key makes dead letters" in raised.value.hint
    assert "on_error" not in raised.value.hint, "that is what it has"


@pytest.mark.parametrize("given", [None, 3, [], pa.RecordBatch.from_pylist([{"mail": "m"}])], ids=type)
def test_a_value_that_is_not_a_batch_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="not a change batch") as raised:
        plan_of(Null(columns=("mail",))).apply(given)
    assert "batch_of" in raised.value.hint
    with pytest.raises(ConfigError, match="not a table schema"):
        plan_of(Null(columns=("mail",))).transformed_schema(given)


def test_a_failure_at_a_row_without_a_position_has_no_position() -> None:
    injected = batch(changed(Operation.INSERT, person(1, "m", "1", "DE")))
    place = injected.data.schema.get_field_index(change.POSITION)
    injected = replace(injected, data=injected.data.set_column(place, change.POSITION, pa.array([""])))
    with pytest.raises(TransformFailed) as raised:
        plan_of(Cast(columns=("mail",), to="int32")).apply(injected)
    assert "position" not in raised.value.fields


def test_an_include_that_keeps_every_column_counts_as_matched() -> None:
    plan = plan_of(Include(name="all", columns=("*",)), Exclude(name="none", columns=("zap*",)))
    given = batch(changed(Operation.INSERT, person(1, "m", "1", "DE")))
    assert only(plan.apply(given).batches) == only([given])
    assert plan.transformed_schema(PEOPLE) == PEOPLE
    assert [rule.rule for rule in plan.unmatched_rules()] == ["none"]
