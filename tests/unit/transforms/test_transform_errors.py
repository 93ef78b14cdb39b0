"""Reasons of rule failures: a person can act on them, and they contain no value of the row."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from tailrace.errors import TransformFailed
from tailrace.model import change
from tailrace.model.batch import ChangeBatch
from tailrace.model.change import Operation
from tailrace.model.schema import Column, TableId
from tailrace.transforms.rules import Cast, Compute, Decrypt, Encrypt, Filter, Function, Mask, Outbox, Rule
from tests.support.transforms import PEOPLE, batch, changed, person, plan_of

INSERT, UPDATE = Operation.INSERT, Operation.UPDATE
SECRET = "ann's secret"
SEALED = replace(
    PEOPLE, columns=(PEOPLE.columns[0], Column(name="mail", source_type="bytea", type=pa.binary()), *PEOPLE.columns[2:])
)


def raising(rows: pa.RecordBatch) -> pa.RecordBatch:
    if rows.num_rows:
        raise LookupError(f"what is {rows.column('mail')[0].as_py()}?")
    return rows


def shortened(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows.slice(1)


def sealed(table: TableId = PEOPLE.table) -> bytes:
    """Return a mail encrypted with the key `old` in this table."""
    rows = batch(changed(INSERT, person(1, SECRET)), schema=replace(PEOPLE, table=table))
    (made,) = plan_of(Encrypt(columns=("mail",), key="old")).apply(rows).batches
    found: bytes = made.data.column("mail")[0].as_py()
    return found


def one(**given: object) -> ChangeBatch:
    return batch(changed(INSERT, person(1, SECRET, "12.50") | given))


def binary(value: bytes) -> ChangeBatch:
    return batch(changed(INSERT, person(1) | {"mail": value}), schema=SEALED)


CAUSES: dict[str, tuple[Rule, ChangeBatch, str]] = {
    "a function raises": (Function(columns=("mail",), function=raising), one(), "the function raised LookupError"),
    "a function loses rows": (
        Function(columns=("mail",), function=shortened), one(), "another number of rows",
    ),
    "a division by zero": (Compute(column="made", expression="id / (id - 1)"), one(), "it divides by zero"),
    "decimals divided by zero": (Compute(column="made", expression="amount / (id - 1)"), one(), "it divides by zero"),
    "an overflow": (
        Compute(column="made", expression="id * 9223372036854775807 * 9"), one(), "its result is too large a number",
    ),
    "a result of another type": (
        Compute(column="made", expression="id + 40000", type="int16"), one(), "its result does not fit int16",
    ),
    "a condition": (Filter(where="1 / (id - 1) > 0"), one(), "it divides by zero"),
    "a condition of a rule": (Mask(columns=("mail",), when="1 / (id - 1) > 0"), one(), "it divides by zero"),
    "a cast": (Cast(columns=("mail",), to="int32"), one(), "the value does not fit int32"),
    "a cast that would round": (
        Cast(columns=("amount",), to="decimal(10,1)"), one(amount=person(1, amount="0.25")["amount"]),
        r"the value does not fit decimal\(10, 1\)",
    ),
    "a value that is no ciphertext": (
        Decrypt(columns=("mail",)), binary(SECRET.encode()), "the value was not made by `encrypt`",
    ),
    "a key that nobody names": (
        Decrypt(columns=("mail",)), binary(bytes([2, len(SECRET)]) + SECRET.encode() + bytes(40)),
        "encrypted with a key that is not defined",
    ),
    "a ciphertext of elsewhere": (
        Decrypt(columns=("mail",)), binary(sealed(TableId("public", "others"))),
        "cannot be decrypted with the key `old`: it was changed since, or encrypted for another table or column",
    ),
    "a text that is no number": (
        Decrypt(columns=("mail",), to="int32"), binary(sealed()), "the decrypted value does not fit int32",
    ),
    "a value that was not sent": (
        Compute(column="made", expression="concat(mail, country)"),
        batch(changed(UPDATE, person(1, None, country=SECRET), unchanged=["mail"])), "was not sent",
    ),
    "a value that did not fit before": (
        Compute(column="made", expression="amount + 1"), batch(changed(INSERT, person(1), unfit={"amount": SECRET})),
        "a value that it needs does not fit its column's type",
    ),
    "a message without a type": (
        Outbox(tables=("public.people",), type_column="country"), one(), "the row names no type",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("rule", "rows", "message"), CAUSES.values(), ids=CAUSES)
def test_a_failure_has_its_reason_and_no_value_of_the_row(rule: Rule, rows: ChangeBatch, message: str) -> None:
    with pytest.raises(TransformFailed, match=message) as raised:
        plan_of(rule).apply(rows)
    assert SECRET not in str(raised.value)
    with pytest.raises(TransformFailed, match=message):
        plan_of(rule).apply_marking(rows)
    lenient = rule.model_copy(update={"on_error": "dead-letter", "name": "mine"})
    (dead_letter,) = plan_of(lenient).apply(rows).dead_letters
    assert dead_letter.cause in str(raised.value)
    (marked,) = plan_of(lenient).apply_marking(rows)
    assert f"mine: {dead_letter.cause}" in [
        change.parse_rule_failure(cell["text"]) for cell in marked.data.column(change.UNFIT)[0].as_py()
    ]


def test_what_a_function_raised_is_chained_and_nothing_else_is() -> None:
    with pytest.raises(TransformFailed) as raised:
        plan_of(Function(columns=("mail",), function=raising)).apply(one())
    assert isinstance(raised.value.__cause__, LookupError)
    with pytest.raises(TransformFailed) as raised:
        plan_of(Cast(columns=("mail",), to="int32")).apply(one())
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__ or raised.value.__context__ is None


def test_rows_that_fail_for_different_reasons_have_separate_failures() -> None:
    rows = batch(
        *(
            changed(INSERT, person(at) | {"mail": value})
            for at, value in enumerate([sealed(), SECRET.encode(), sealed(TableId("public", "others")), sealed()])
        ),
        schema=SEALED,
    )
    applied = plan_of(Decrypt(columns=("mail",), on_error="dead-letter")).apply(rows)
    causes = {one.cause.partition(":")[0]: one.batch.data.column("id").to_pylist() for one in applied.dead_letters}
    assert causes == {
        "the value was not made by `encrypt`": [1],
        "the value cannot be decrypted with the key `old`": [2],
    }
    assert applied.batches[0].data.column("mail").to_pylist() == [SECRET] * 2


def test_in_a_load_the_cause_is_the_same() -> None:
    data = pa.RecordBatch.from_pylist([person(1, SECRET)], pa.schema(PEOPLE.row_fields()))
    with pytest.raises(TransformFailed, match="the function raised LookupError") as raised:
        plan_of(Function(columns=("mail",), function=raising)).transform_rows(PEOPLE, data)
    assert isinstance(raised.value.__cause__, LookupError)
