"""Mistakes in rules that a program declares are our own errors, with a hint."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

from tailrace.capture.memory.source import MemoryCapture
from tailrace.errors import ConfigError, TailraceError
from tailrace.runtime.loop import CdcRuntime
from tailrace.state.checkpoint_stores import MemoryCheckpointStore
from tailrace.transforms.rules import (
    RULE_TYPES,
    Cast,
    Encrypt,
    Filter,
    Function,
    KeySource,
    Mask,
    Null,
    Route,
    Rule,
    Set,
    Transforms,
)
from tailrace.transforms.transform_plan import TransformPlan
from tests.support.transforms import PEOPLE

SECRET = "s3cret-word"


def declared(**rule: Any) -> Callable[[], object]:
    return lambda: Transforms.model_validate({"rules": [rule]})


def made(kind: type[Any], **given: Any) -> Callable[[], object]:
    """Build a rule as code without type checks may."""
    return lambda: kind(**given)


def of_rule(kind: type[Any], **given: Any) -> Callable[[], object]:
    return lambda: made(Transforms, rules=[kind(**given)])()


@pytest.mark.parametrize(
    ("make", "said", "hint"),
    [
        (made(Mask, columns=["a"], colums=["b"]), r"`colums` is not a known key \(rule=mask\)", "`columns`?"),
        (made(Mask, columns=["a"], zap=SECRET), "`zap` is not a known key", "Use one of do, name, tables, when"),
        (made(Mask), "`columns` is missing", "docs/guides"),
        (made(Mask, columns=[]), "`columns` must not be empty", "docs/guides"),
        (made(Mask, columns="email"), "`columns` must be a list", "docs/guides"),
        (made(Mask, columns=["a"], keep_last=400), "`keep_last` must be 64 or less", "docs/guides"),
        (made(Mask, columns=["a"], keep_last=-1), "`keep_last` must be 0 or more", "docs/guides"),
        (made(Mask, columns=["a"], keep_last="some"), "`keep_last` must be a whole number", "docs/guides"),
        (made(Mask, columns=["a"], name="x" * 101), "`name` must have 100 characters or less", "docs/guides"),
        (made(Set, column="a", value=[]), "`value` must be a string, a number, true, false or null", "value: 10.50"),
        (
            made(Set, column="a", value=float("nan")),
            r"^`value` must be a finite number \(rule=set\) \[",
            '`value: "NaN"`',
        ),
        (
            declared(do="set", column="a", value=float("-inf")),
            r"^`rules\[0\].value` must be a finite number \[",
            "float64",
        ),
        (made(Function, columns=["a"], function=3), "`function` must be `package.module:name`", "shop.clean:addresses"),
        (made(Transforms, keys={"a b": {"env": "K"}}), "`keys.a b` is not a key id", "docs/guides"),
        (made(Transforms, keys={"k": {"file": 3}}), "`keys.k.file` must be a file's path", "docs/guides"),
        (made(Transforms, rules=[Null(columns=("a",))] * 201), "`rules` must be 200 or less", "docs/guides"),
        (made(Mask, columns=["a"], on_error="skip"), "there are 'halt' and 'dead-letter'", "docs/guides"),
        (made(Mask, columns=["a"], tables=["users"]), "`tables` has `users`, which names no schema", "public.users"),
        (made(Route, to="nowhere"), "must be `schema.table`", "{schema}.{table}"),
        (made(KeySource), "needs either `env` or `file`", "{env: TAILRACE_KEY}"),
        (of_rule(Cast, columns=["a"], to="varchar"), "`varchar` is not a type", "Use one of bool, int16"),
        (of_rule(Filter, where="a = 1"), "it is not an expression", "country == 'DE'"),
        (of_rule(Filter, where=""), "it is not an expression", "country == 'DE'"),
        (of_rule(Mask, columns=["a"], when=""), "it is not an expression", "country == 'DE'"),
        (of_rule(Cast, columns=["a"], to=""), "`` is not a type", "Use one of bool, int16"),
        (of_rule(Encrypt, columns=["a"], key="k"), "names the key `k`", "transforms.keys"),
        (made(Transforms, rules=[Null(name="x", columns=("a",))] * 2), "two rules are called `x`", "its own name"),
        (declared(do="zap"), r"`rules\[0\]` has an unknown `do`", "Use one of 'mask', 'redact'"),
        (declared(columns=["a"]), r"`rules\[0\]` lacks `do`", "docs/guides"),
        (declared(do="mask"), r"`rules\[0\].columns` is missing", "docs/guides"),
        (
            declared(do="mask", columns=["a"], keep_last=SECRET, on_error=SECRET),
            r"\(and 1 more problem\)",
            "docs/guides",
        ),
        (declared(do="cast", columns=["a"], to="\ud800"), r"`\\ud800` is not a type", "Use one of bool, int16"),
        (made(Rule), r"^`do` is missing \[", "docs/guides"),
        (made(Transforms, rules=Mask(columns=("a",))), r"^`rules` must be a list \[", "`rules=[…]`"),
        (lambda: Transforms.model_validate(SECRET), "must be a mapping", "docs/guides"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_our_own_error_with_a_hint(make: Callable[[], object], said: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        make()
    assert hint in raised.value.hint
    assert SECRET not in f"{raised.value}{raised.value.__cause__}"
    assert isinstance(pickle.loads(pickle.dumps(raised.value)), TailraceError)


@pytest.mark.parametrize("do", RULE_TYPES)
def test_every_mistake_in_a_rule_is_reported_in_our_words(do: str) -> None:
    odd = [None, "", 3, -1, 3.5, True, [], [1], {}, {"a": 1}, {1: 2}, object(), "x" * 200, 10**30, b"\xff"]
    odd += [float("nan"), float("inf")]
    well: dict[str, Any] = {
        "columns": {"a": "b"} if do == "rename" else ["a"],
        "column": "a",
        "to": "s.t",
        "key": "k",
        "where": "a == 1",
        "length": 3,
        "expression": "a",
        "function": "m:f",
    }
    kind = RULE_TYPES[do]
    base = {name: well[name] for name, field in kind.model_fields.items() if field.is_required()}
    for name in kind.model_fields:
        for said in [said for value in odd if (said := refusal_of(kind, {**base, name: value}))]:
            assert said.startswith(f"`{name}"), said
            assert not re.search(r"[Ii]nput|should|valid |<class", said), said


def refusal_of(kind: type[Any], given: dict[str, Any]) -> str:
    try:
        kind(**given)
    except ConfigError as error:
        return error.message
    return ""


@pytest.mark.parametrize(
    "given",
    [
        [Mask(columns=("mail",))],
        (Mask(columns=("mail",)),),
        {"rules": [{"do": "mask", "columns": ["mail"]}]},
        Transforms(rules=(Mask(columns=("mail",)),)),
        TransformPlan([Mask(columns=("mail",))]),
    ],
    ids=lambda given: type(given).__name__,
)
def test_a_runtime_accepts_rules_in_every_form(given: Any) -> None:
    runtime = CdcRuntime(MemoryCapture(), MemoryCheckpointStore(), transforms=given)
    plan = runtime._rules._plan
    assert plan is not None
    assert [rule.name for rule in plan.transforms.rules] == ["mask #1"]
    assert plan.transformed_schema(PEOPLE).columns[1].source_type.startswith("text · mask#")


@pytest.mark.parametrize("given", [[], (), {}, Transforms()], ids=lambda given: type(given).__name__)
def test_empty_rules_count_as_no_rules(given: Any) -> None:
    assert CdcRuntime(MemoryCapture(), MemoryCheckpointStore(), transforms=given)._rules._plan is None


@pytest.mark.parametrize(
    "given", [Mask(columns=("mail",)), "rules.yaml", 3, [3], [Mask], {"rulez": []}, [{"do": "zap"}]], ids=str
)
def test_a_value_that_is_not_rules_is_refused_by_runtime_and_plan(given: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        CdcRuntime(MemoryCapture(), MemoryCheckpointStore(), transforms=given)
    assert raised.value.hint
    with pytest.raises(ConfigError):
        TransformPlan(given)
