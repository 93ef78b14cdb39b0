"""Transforms in a settings file: what is different there from rules that a program makes.

A file's numbers are kept as they are written until a rule takes them, so 10.50 is never a float. Places in the file
are told without the kind of rule that the models put into them.
"""

from __future__ import annotations

import os
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from tailrace.transforms.rules import KINDS, Transforms

Loc = tuple[str | int, ...]
NOT_IN_FILES = ("route", "outbox")
"""Rules that send rows to tables that the source does not have: a pipeline's tables are the source's."""

EXAMPLES = {
    "transforms": "`transforms:` and below it, indented, `rules:`, and `keys:` where rules need some",
    "transforms.keys": "`keys: {main: {env: TAILRACE_KEY}}`, or `{file: /run/secrets/key}`",
    "transforms.rules": '`- {do: mask, tables: ["public.users"], columns: [email], keep_last: 4}`; '
    f"`do` is one of {', '.join(kind for kind in KINDS if kind not in NOT_IN_FILES)}",
}
WANTED = {
    "union_tag_invalid": "has a `do` that is no rule",
    "union_tag_not_found": "lacks `do`, which says what the rule does",
}


def refused_rules(transforms: Transforms) -> str | None:
    """What a pipeline cannot do, in words; None: nothing."""
    for rule in transforms.rules:
        if rule.do in NOT_IN_FILES:
            return f"has the rule `{rule.name}`: `{rule.do}` is for programs that read the changes, not for pipelines"
    return None


def wants_letters(transforms: Transforms) -> str | None:
    """A rule that sets rows aside."""
    return next((rule.name for rule in transforms.rules if rule.on_error == "dead-letter"), None)


def plain(given: Any) -> Any:
    """The same with numbers as numbers, exactly as they were written."""
    if isinstance(given, dict):
        return {key: plain(value) for key, value in given.items()}
    if isinstance(given, list):
        return [plain(value) for value in given]
    text = getattr(given, "text", None)
    if not isinstance(text, str):
        return given
    try:
        return int(text.replace("_", ""), 10)
    except ValueError:
        pass
    try:
        return Decimal(text.replace("_", ""))
    except InvalidOperation:
        return text


def anchored(transforms: Any, folder: Path) -> Any:
    """The same with the files of keys as the settings' folder knows them."""
    keys = transforms.get("keys") if isinstance(transforms, dict) else None
    if not isinstance(keys, dict):
        return transforms

    def anchor(key: Any) -> Any:
        file = key.get("file") if isinstance(key, dict) else None
        if not isinstance(file, str) or not file:
            return key
        return {**key, "file": os.path.join(folder, os.path.expanduser(file))}

    return {**transforms, "keys": {name: anchor(key) for name, key in keys.items()}}


def place(loc: Loc) -> Loc:
    """Where a value stands in the file."""
    tagged = loc[:2] == ("transforms", "rules") and len(loc) > 3 and loc[3] in KINDS
    return (*loc[:3], *loc[4:]) if tagged else loc


def keys_of(loc: Loc, rule: Any) -> list[str] | None:
    """The keys that a rule may have; None: this is no rule."""
    if loc[:2] != ("transforms", "rules") or len(loc) != 3 or not isinstance(rule, dict):
        return None
    kind = KINDS.get(str(rule.get("do")))
    return list(kind.model_fields) if kind else ["do"]
