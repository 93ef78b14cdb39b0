"""Transforms in the settings file: every mistake has its line, and numbers are what is written."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from tailrace.errors import ConfigError
from tailrace.pipeline.document import Problem
from tailrace.pipeline.settings import check_settings, load_settings
from tailrace.transforms.rules import Set

FRAME = """\
name: shop
source: {url: postgresql://a@h/d, tables: ["public.*"]}
log: ./changes
tables: {path: ./lake}
transforms:
  keys: {main: {env: SHOP_KEY}}
  rules:
"""
FIRST_RULE = 8


def written(tmp_path: Path, *rules: str, frame: str = FRAME) -> Path:
    file = tmp_path / "tailrace.yaml"
    file.write_text(frame + "".join(f"    - {rule}\n" for rule in rules))
    return file


def problem(tmp_path: Path, *rules: str) -> Problem:
    (found,) = check_settings(written(tmp_path, *rules))
    return found


@pytest.mark.parametrize(("rule", "where", "message", "hint"), [
    ("{do: maskk, columns: [a]}", "transforms.rules[1]", "has a `do` that is no rule", "mask, redact, null"),
    ("{columns: [a]}", "transforms.rules[1]", "lacks `do`", "do: mask"),
    ("{do: mask, columns: [a], keep_lst: 4}", "transforms.rules[1].keep_lst", "is not a key we know", "`keep_last`"),
    ("{do: mask}", "transforms.rules[1].columns", "is missing", "columns: [email]"),
    ("{do: mask, columns: []}", "transforms.rules[1].columns", "must not be empty", ""),
    ("{do: mask, columns: [a], keep_last: 400}", "transforms.rules[1].keep_last", "less than or equal to 64", ""),
    ("{do: mask, columns: [a], tables: [users]}", "transforms.rules[1].tables", "names no schema", "public.users"),
    ("{do: mask, columns: [a], on_error: skip}", "transforms.rules[1].on_error", "'halt' and 'dead-letter'", ""),
    ("{do: function, columns: [a], function: nowhere}", "transforms.rules[1].function", "package.module:name", ""),
])  # fmt: skip
def test_a_mistake_in_a_rule_is_told_at_its_line(
    tmp_path: Path, rule: str, where: str, message: str, hint: str
) -> None:
    found = problem(tmp_path, "{do: sha256, columns: [a]}", rule)
    assert (found.where, found.line) == (where, FIRST_RULE + 1)
    assert message in found.message
    assert hint in found.hint


@pytest.mark.parametrize(("rule", "message"), [
    ("{do: hmac, columns: [a], key: other}", "names the key `other`"),
    ("{do: exclude, columns: [a], when: a == 1}", "makes every row another shape"),
    ("{do: filter, where: 'a = 1'}", "it is not an expression"),
    ("{do: mask, columns: [a], when: system('x')}", "there is no function `system`"),
    ("{do: cast, columns: [a], to: varchar}", "`varchar` is no type"),
    ("{do: route, to: a.b}", "is for programs"),
    ("{do: sha256, columns: [a], on_error: dead-letter}", "the tables do not"),
    ("{do: sha256, columns: [a], name: one}\n    - {do: sha256, columns: [b], name: one}", "two rules are called"),
])  # fmt: skip
def test_rules_that_do_not_go_together_are_refused(tmp_path: Path, rule: str, message: str) -> None:
    found = problem(tmp_path, rule)
    assert message in found.message
    assert found.hint
    with pytest.raises(ConfigError, match="transforms"):
        load_settings(tmp_path / "tailrace.yaml")


def test_numbers_are_taken_as_they_are_written(tmp_path: Path) -> None:
    given = ["10.10", "7", "true", "'7'", "null"]
    rules = [f"{{do: set, column: a{at}, value: {value}}}" for at, value in enumerate(given)]
    found = load_settings(written(tmp_path, *rules)).transforms.rules
    values = [rule.value for rule in found if isinstance(rule, Set)]
    assert values == [Decimal("10.10"), 7, True, "7", None]
    assert str(values[0]) == "10.10"


def test_a_keys_file_lies_beside_the_settings(tmp_path: Path) -> None:
    frame = FRAME.replace("{env: SHOP_KEY}", "{file: ./main.key}")
    found = load_settings(written(tmp_path, "{do: hmac, columns: [a], key: main}", frame=frame)).transforms
    assert found.keys["main"].file == tmp_path / "main.key"


def test_a_key_has_one_place(tmp_path: Path) -> None:
    file = written(tmp_path, "{do: hmac, columns: [a], key: main}", frame=FRAME.replace("{env: SHOP_KEY}", "{}"))
    (found,) = check_settings(file)
    assert (found.where, found.line) == ("transforms.keys.main", 6)
    assert "either `env` or `file`" in found.message
