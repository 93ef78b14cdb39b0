"""Encrypted columns: ciphertext or nothing, and only the right key, table and column decrypt it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tailrace.errors import ConfigError, TransformFailed
from tailrace.model import change
from tailrace.model.change import Operation
from tailrace.model.schema import TableId
from tailrace.transforms.rules import Decrypt, Encrypt, KeySource, Rename, Transforms
from tailrace.transforms.secrets import Cipher, Keyring
from tailrace.transforms.transform_plan import TransformPlan
from tests.support.transforms import KEYS, PEOPLE, batch, changed, only, person, plan_of, values

SECRET = "ann@example.org"
FORMAT_1 = "01036e65770a4f970fcf3fee523a9f30097e9e039ec9343f8bea13fecae485cbf11a441f7db6356b726ba49872dfd899"
"""The same value, encrypted by format 1."""
INSERT, UPDATE = Operation.INSERT, Operation.UPDATE
ENCRYPT = Encrypt(name="seal", columns=("mail",), key="new")


def sealed(mail: str | None = SECRET, key: str = "new") -> Any:
    return plan_of(Encrypt(columns=("mail",), key=key)).apply(batch(changed(INSERT, person(1, mail)))).batches[0]


def opened(sealed: Any, *rules: Any) -> list[Any]:
    return [row[0] for row in values(plan_of(*rules).apply(sealed).batches, "mail")]


def test_what_was_encrypted_decrypts() -> None:
    made = sealed()
    assert made.schema.columns[1].type == pa.binary()
    assert SECRET.encode() not in made.data.column("mail")[0].as_py()
    assert opened(made, Decrypt(columns=("mail",))) == [SECRET]


def test_every_value_has_a_nonce_of_its_own() -> None:
    rows = [changed(INSERT, person(number, SECRET)) for number in range(50)]
    found = {row[0] for row in values(plan_of(ENCRYPT).apply(batch(*rows)).batches, "mail")}
    assert len(found) == 50


def test_null_stays_null() -> None:
    assert sealed(None).data.column("mail").to_pylist() == [None]


def test_a_value_has_its_key_id_so_keys_can_be_rotated() -> None:
    rows = [sealed(key=key).data for key in ("old", "new")]
    assert [row.column("mail")[0].as_py()[2:5] for row in rows] == [b"old", b"new"]
    both = [changed(INSERT, {**person(1), "mail": row.column("mail")[0].as_py()}) for row in rows]
    assert opened(batch(*both, schema=sealed().schema), Decrypt(columns=("mail",))) == [SECRET, SECRET]


def test_a_ciphertext_is_bound_to_its_table_and_column() -> None:
    made = plan_of(Rename(columns={"mail": "other"})).apply(sealed()).batches[0]
    with pytest.raises(TransformFailed):
        plan_of(Decrypt(columns=("other",))).apply(made)
    found = plan_of(Decrypt(columns=("other",), of_column="mail")).apply(made).batches
    assert values(found, "other") == [(SECRET,)]
    with pytest.raises(TransformFailed):
        plan_of(Decrypt(columns=("mail",), of_table="public.others")).apply(sealed())


def test_schema_and_name_of_a_table_are_bound_separately() -> None:
    """`a.b`.`c` is not `a`.`b.c`."""
    there, elsewhere = (replace(PEOPLE, table=TableId(*names)) for names in (("a.b", "c"), ("a", "b.c")))
    made = plan_of(ENCRYPT).apply(batch(changed(INSERT, person(1, SECRET)), schema=there)).batches[0]
    moved = replace(made, schema=replace(made.schema, table=elsewhere.table))
    assert opened(made, Decrypt(columns=("mail",))) == [SECRET]
    with pytest.raises(TransformFailed):
        opened(moved, Decrypt(columns=("mail",)))
    assert opened(moved, Decrypt(columns=("mail",), of_table="a.b.c")) == [SECRET], "who names both may mean either"


def test_values_of_format_1_are_still_decrypted() -> None:
    made = sealed()
    row = changed(INSERT, {**person(1), "mail": bytes.fromhex(FORMAT_1)})
    assert opened(batch(row, schema=made.schema), Decrypt(columns=("mail",))) == [SECRET]
    with pytest.raises(TransformFailed):
        opened(batch(row, schema=made.schema), Decrypt(columns=("mail",), of_column="other"))


@pytest.mark.parametrize("broken", [b"", b"\x02", b"\x03" + b"x" * 60, b"\x02\x03zzz" + b"x" * 60])
def test_a_tampered_value_is_not_decrypted(broken: bytes) -> None:
    made = sealed()
    row = changed(INSERT, {**person(1), "mail": broken})
    rule = Decrypt(name="open", columns=("mail",), on_error="dead-letter")
    applied = plan_of(rule).apply(batch(row, schema=made.schema))
    assert applied.batches == ()
    assert [(dead_letter.rule, dead_letter.column, dead_letter.positions) for dead_letter in applied.dead_letters] == [
        ("open", "mail", ["0/1"])
    ]


class Failing:
    """A cipher that fails at some values, like one whose device is gone."""

    def __init__(self, cipher: Cipher, failing: set[int]) -> None:
        self._cipher, self._failing, self._count = cipher, failing, 0

    def encrypt(self, nonce: bytes, data: bytes, associated_data: bytes | None) -> bytes:
        self._count += 1
        if self._count in self._failing:
            raise RuntimeError(data.decode())
        return self._cipher.encrypt(nonce, data, associated_data)

    def decrypt(self, nonce: bytes, data: bytes, associated_data: bytes | None) -> bytes:
        return self._cipher.decrypt(nonce, data, associated_data)


class Ring(Keyring):
    """A keyring with failing ciphers."""

    def __init__(self, failing: set[int]) -> None:
        super().__init__({"new": KeySource(env="NEW")}, KEYS)
        self._failing = failing

    def cipher(self, name: str) -> Cipher:
        return Failing(super().cipher(name), self._failing)


def failing_plan(rule: Encrypt, *at: int) -> TransformPlan:
    return TransformPlan(Transforms(rules=(rule,), keys={"new": KeySource(env="NEW")}), keyring=Ring(set(at)))


def test_lesson_7_a_failing_encryption_halts_and_never_emits_plaintext() -> None:
    rows = batch(changed(INSERT, person(1, SECRET)), changed(UPDATE, person(2, SECRET), before=person(2, SECRET)))
    for at in (1, 2, 3):
        with pytest.raises(TransformFailed) as raised:
            failing_plan(ENCRYPT, at).apply(rows)
        assert SECRET not in str(raised.value)
        assert raised.value.fields["rule"] == "seal"
        assert raised.value.__cause__ is None


def test_lesson_7_a_failing_encryption_makes_a_dead_letter_and_never_emits_plaintext() -> None:
    rule = ENCRYPT.model_copy(update={"on_error": "dead-letter"})
    rows = batch(*(changed(INSERT, person(number, SECRET)) for number in range(4)))
    applied = failing_plan(rule, 2).apply(rows)
    assert [row[0] for row in values(applied.batches, "id")] == [0, 2, 3]
    assert SECRET.encode() not in applied.batches[0].data.serialize().to_pybytes()
    assert [dead_letter.batch.data.column("id").to_pylist() for dead_letter in applied.dead_letters] == [[1]]
    # Once the cause is mended, what was set aside goes through.
    assert len(plan_of(rule).apply(applied.dead_letters[0].batch).batches[0]) == 1


def test_lesson_7_a_marked_row_has_null_and_the_rules_name_instead_of_the_value() -> None:
    rule = ENCRYPT.model_copy(update={"on_error": "dead-letter"})
    found = failing_plan(rule, 1).apply_marking(batch(changed(INSERT, person(1, SECRET, "5"))))
    row = only(found)[0]
    assert row["mail"] is None
    message = [change.parse_rule_failure(cell["text"]) for cell in row[change.UNFIT]]
    assert message == ["seal: the value cannot be encrypted with the key `new`"]
    assert SECRET.encode() not in found[0].data.serialize().to_pybytes()


@pytest.mark.parametrize("text", ["", "00", "zz" * 32, "é" * 32])
def test_an_invalid_key_is_refused_and_never_shown(text: str) -> None:
    ring = Keyring({"main": KeySource(env="KEY")}, {"KEY": text})
    with pytest.raises(ConfigError, match="not 32 bytes") as raised:
        ring.key("main")
    assert not text or text not in str(raised.value)


def test_a_key_may_be_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("ERERERERERERERERERERERERERERERERERERERERERE=\n")
    assert Keyring({"main": KeySource(file=file)}).key("main") == b"\x11" * 32
    with pytest.raises(ConfigError, match="cannot be read"):
        Keyring({"main": KeySource(file=tmp_path / "none")}).key("main")
    with pytest.raises(ConfigError, match="is not set"):
        Keyring({"main": KeySource(env="NO_SUCH")}, {}).key("main")


def test_no_key_is_in_what_is_pickled_or_shown() -> None:
    import pickle

    plan = plan_of(ENCRYPT)
    plan.transformed_schema(PEOPLE)
    assert b"\x22" * 32 not in pickle.dumps(plan)
    assert "22" * 32 not in repr(vars(plan))
