"""Transforms in a settings file: what is different there from rules that a program makes.

A file's numbers are kept as they are written until a rule takes them, so 10.50 is never a float. Places in the file
are told without the kind of rule that the models put into them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrace.errors import TableUnusable
from tailrace.transforms import declaration
from tailrace.transforms.rules import DISTINCT_TABLES_HINT, RULE_TYPES, Outbox, Route, Transforms

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from tailrace.model.schema import TableId

Loc = tuple[str | int, ...]
OUTBOX_HINT = "Name it, for it is asked which types there are: `tables: [public.outbox]`; each has a rule of its own."

EXAMPLES = {
    "transforms": "`transforms:` and below it, indented, `rules:`, and `keys:` where rules need some",
    "transforms.keys": "`keys: {main: {env: TAILRACE_KEY}}`, or `{file: /run/secrets/key}`",
    "transforms.rules": '`- {do: mask, tables: ["public.users"], columns: [email], keep_last: 4}`; '
    f"`do` is one of {', '.join(RULE_TYPES)}",
}


def unsupported_rules(transforms: Transforms) -> Iterator[tuple[str, str]]:
    """What a pipeline cannot do, in words, and what to do instead."""
    for rule in transforms.rules:
        if isinstance(rule, Outbox) and (len(rule.tables) > 1 or not rule.exact_tables):
            yield f"has the rule `{rule.name}`, which does not name one table", OUTBOX_HINT
        if isinstance(rule, Outbox) and "{type}" not in rule.to:
            yield (
                f"has the rule `{rule.name}`, which sends all messages to one table",
                'Write `{type}` into `to`, for example `to: "events.{type}"`; or use `route`.',
            )
        if not isinstance(rule, Route):
            continue
        if rule.when is not None and not rule.exact_tables:
            yield (
                f"has the rule `{rule.name}`, which sends some rows of whichever tables have its columns elsewhere",
                "Name the tables, for a pipeline must know which there will be: `tables: [public.orders]`.",
            )
        if "{" not in rule.to and (len(rule.tables) > 1 or not rule.exact_tables):
            yield f"has the rule `{rule.name}`, which would make one table of several", DISTINCT_TABLES_HINT


def is_message_table(transforms: Transforms, table: TableId) -> bool:
    """Whether the table is one that an outbox sends messages to."""
    boxes = [rule for rule in transforms.rules if isinstance(rule, Outbox)]
    if not boxes:
        return False
    from tailrace.transforms.output_tables import may_produce

    return may_produce(boxes, table)


def refuse_modes(table: TableId, mode: str | None, soft_delete: bool | None) -> None:
    """Refuse what a rule of `tables.rules` wants messages to be."""
    if soft_delete or mode not in (None, "mirror"):
        raise TableUnusable(
            "messages are kept by their key, each as it came",
            table=table,
            hint="Leave `mode` and `soft_delete` out of the `tables.rules` that match the outbox's tables.",
        )


def may_have_rows(transforms: Transforms, table: TableId, *, wanted: bool) -> bool:
    """Whether rules leave rows in a table of this name. `wanted` says whether the source's own of this name is."""
    from tailrace.transforms.output_tables import may_produce, output_tables

    return (wanted and table in output_tables(transforms.rules, table)) or may_produce(transforms.rules, table)


def rule_with_dead_letters(transforms: Transforms) -> str | None:
    """A rule that sets rows aside."""
    return next((rule.name for rule in transforms.rules if rule.on_error == "dead-letter"), None)


def with_plain_numbers(given: Any) -> Any:
    """The same with numbers as numbers, exactly as they were written."""
    if isinstance(given, dict):
        return {key: with_plain_numbers(value) for key, value in given.items()}
    if isinstance(given, list):
        return [with_plain_numbers(value) for value in given]
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


def with_key_paths(transforms: Any, folder: Path) -> Any:
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


def loc_in_file(loc: Loc) -> Loc:
    """Where a value stands in the file."""
    tagged = loc[:2] == ("transforms", "rules") and len(loc) > 3 and loc[3] in RULE_TYPES
    return (*loc[:3], *loc[4:]) if tagged else loc


def problem_text(loc: Loc, detail: ErrorDetails) -> str | None:
    """What is wrong with a rule or a key; None: this is neither."""
    return declaration.error_text(detail) if loc[:1] == ("transforms",) else None


def keys_of(loc: Loc, rule: Any) -> list[str] | None:
    """The keys that a rule may have; None: this is no rule."""
    if loc[:2] != ("transforms", "rules") or len(loc) != 3 or not isinstance(rule, dict):
        return None
    kind = RULE_TYPES.get(str(rule.get("do") or "null") if "do" in rule else "")
    return list(kind.model_fields) if kind else ["do"]
