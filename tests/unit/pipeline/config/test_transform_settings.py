"""Transforms in the settings file: every mistake has its line, and numbers keep their exact text."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from tailrace.errors import ConfigError, TableUnusable
from tailrace.model.schema import TableId
from tailrace.pipeline.config.document import Problem
from tailrace.pipeline.config.settings_file import check_settings, load_settings
from tailrace.tables.spec import TableMode, TableSpec
from tailrace.transforms.rules import RULE_TYPES, Set

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
    ("{do: maskk, columns: [a]}", "transforms.rules[1]", "has an unknown `do`", "mask, redact, null"),
    ("{columns: [a]}", "transforms.rules[1]", "lacks `do`", "do: mask"),
    ("{do: mask, columns: [a], keep_lst: 4}", "transforms.rules[1].keep_lst", "is not a known key", "`keep_last`"),
    ("{do: mask}", "transforms.rules[1].columns", "is missing", "columns: [email]"),
    ("{do: mask, columns: []}", "transforms.rules[1].columns", "must not be empty", ""),
    ("{do: mask, columns: [a], keep_last: 400}", "transforms.rules[1].keep_last", "must be 64 or less", ""),
    ("{do: mask, columns: [a], tables: [users]}", "transforms.rules[1].tables", "names no schema", "public.users"),
    ("{do: mask, columns: [a], on_error: skip}", "transforms.rules[1].on_error", "'halt' and 'dead-letter'", ""),
    ("{do: function, columns: [a], function: nowhere}", "transforms.rules[1].function", "package.module:name", ""),
])  # fmt: skip
def test_a_mistake_in_a_rule_is_reported_with_its_line(
    tmp_path: Path, rule: str, where: str, message: str, hint: str
) -> None:
    found = problem(tmp_path, "{do: sha256, columns: [a]}", rule)
    assert (found.where, found.line) == (where, FIRST_RULE + 1)
    assert message in found.message
    assert hint in found.hint


@pytest.mark.parametrize(("rule", "message"), [
    ("{do: hmac, columns: [a], key: other}", "names the key `other`"),
    ("{do: exclude, columns: [a], when: a == 1}", "a column in all rows or in none"),
    ("{do: include, columns: [a], when: a == 1}", "a column in all rows or in none"),
    ("{do: rename, columns: {a: b}, when: a == 1}", "a column in all rows or in none"),
    ("{do: decrypt, columns: [a], when: a == 1}", "do not fit a column of string"),
    ("{do: filter, where: 'a = 1'}", "it is not an expression"),
    ("{do: mask, columns: [a], when: system('x')}", "`system` is not a function"),
    ("{do: cast, columns: [a], to: varchar}", "`varchar` is not a type"),
    ("{do: outbox, tables: ['public.*']}", "does not name one table"),
    ("{do: outbox, tables: [public.outbox], to: a.b}", "all messages to one table"),
    ("{do: route, to: a.b}", "several tables into one"),
    ("{do: route, to: a.b, tables: [public.a, public.b]}", "several tables into one"),
    ("{do: route, to: 'a.{table}', when: a == 1}", "does not name its tables"),
    ("{do: sha256, columns: [a], on_error: dead-letter}", "makes dead letters"),
    ("{do: sha256, columns: [a], name: one}\n    - {do: sha256, columns: [b], name: one}", "two rules are called"),
])  # fmt: skip
def test_incompatible_rules_are_refused(tmp_path: Path, rule: str, message: str) -> None:
    found = problem(tmp_path, rule)
    assert message in found.message
    assert found.hint
    with pytest.raises(ConfigError, match="transforms"):
        load_settings(tmp_path / "tailrace.yaml")


def test_the_rule_null_is_not_read_as_yaml_null(tmp_path: Path) -> None:
    for do in ("null", "'null'", "~"):
        (found,) = load_settings(written(tmp_path, f"{{do: {do}, columns: [a]}}")).transforms.rules
        assert (found.do, found.name) == ("null", "null #1")
    found_problem = problem(tmp_path, "{do: null, colums: [a], columns: [a]}")
    assert "`columns`" in found_problem.hint


def test_every_other_rule_takes_a_condition(tmp_path: Path) -> None:
    rest = {
        "columns: [a]": "mask redact null sha256",
        "columns: [a], key: main": "hmac encrypt",
        "columns: [a], to: binary": "decrypt cast",
        "columns: [a], length: 3": "truncate",
        "where: a == 1": "filter",
        "column: a, to: b": "copy",
        "column: a, value: 1": "set",
        "column: a, expression: b": "compute",
        "tables: [a.b], to: 'a.{table}'": "route",
        "tables: [a.b]": "outbox unwrap",
        "columns: [b], function: a:b": "function",
    }
    rules = [f"{{do: {do}, {given}, when: c == 1}}" for given, dos in rest.items() for do in dos.split()]
    found = load_settings(written(tmp_path, *rules)).transforms.rules
    assert {rule.do for rule in found} == RULE_TYPES.keys() - {"include", "exclude", "rename"}


def test_every_mistake_in_a_file_is_reported(tmp_path: Path) -> None:
    rules = "{do: mask}", "{do: hmac, columns: [a], key: main, colums: [b]}", "{do: zap}"
    found = check_settings(written(tmp_path, *rules))
    assert [one.where for one in found] == [
        "transforms.rules[0].columns",
        "transforms.rules[1].colums",
        "transforms.rules[2]",
    ]


def test_numbers_keep_their_exact_text(tmp_path: Path) -> None:
    given = ["10.10", "7", "true", "'7'", "null"]
    rules = [f"{{do: set, column: a{at}, value: {value}}}" for at, value in enumerate(given)]
    found = load_settings(written(tmp_path, *rules)).transforms.rules
    values = [rule.value for rule in found if isinstance(rule, Set)]
    assert values == [Decimal("10.10"), 7, True, "7", None]
    assert str(values[0]) == "10.10"


def test_a_key_file_is_relative_to_the_settings_file(tmp_path: Path) -> None:
    frame = FRAME.replace("{env: SHOP_KEY}", "{file: ./main.key}")
    found = load_settings(written(tmp_path, "{do: hmac, columns: [a], key: main}", frame=frame)).transforms
    assert found.keys["main"].file == tmp_path / "main.key"


def test_a_key_has_exactly_one_source(tmp_path: Path) -> None:
    file = written(tmp_path, "{do: hmac, columns: [a], key: main}", frame=FRAME.replace("{env: SHOP_KEY}", "{}"))
    (found,) = check_settings(file)
    assert (found.where, found.line) == ("transforms.keys.main", 6)
    assert "either `env` or `file`" in found.message


def test_a_pipeline_has_the_tables_that_its_routes_produce(tmp_path: Path) -> None:
    settings = load_settings(
        written(
            tmp_path,
            "{do: route, tables: [public.orders], to: shop.sales}",
            "{do: route, tables: [public.people], to: 'de.{table}', when: country == 'DE'}",
            "{do: outbox, tables: [public.outbox], to: 'events.{type}'}",
        )
    )
    has = {
        name: settings.has(TableId(*name.split(".")))
        for name in (
            "public.orders",
            "shop.sales",
            "public.people",
            "de.people",
            "events.order",
            "events.a/b",
            "shop.other",
            "x.y",
        )
    }
    assert [name for name, there in has.items() if there] == [
        "shop.sales",
        "public.people",
        "de.people",
        "events.order",
        "events.a/b",
    ]


def test_message_tables_keep_messages_and_refuse_a_mode(tmp_path: Path) -> None:
    rule = "{do: outbox, tables: [public.outbox], to: 'events.{type}'}"
    frame = FRAME.replace("{path: ./lake}", "{path: ./lake, mode: append, rules: {'events.log': {mode: history}}}")
    tables = load_settings(written(tmp_path, rule, frame=frame)).tables
    assert tables.spec_of(TableId("events", "order")) == TableSpec(holds_messages=True)
    assert tables.spec_of(TableId("public", "order")).mode is TableMode.APPEND
    with pytest.raises(TableUnusable, match="message tables"):
        tables.spec_of(TableId("events", "log"))
