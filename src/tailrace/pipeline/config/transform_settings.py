"""Transforms in a settings file, where they differ from rules that a program makes.

Numbers keep the text of the file until a rule takes them, so 10.50 is never a float. Reported paths leave out the rule
kind that the models insert.
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
OUTBOX_HINT = "Name one table per rule, e.g. `tables: [public.outbox]`: Tailrace reads from it which types exist."

EXAMPLES = {
    "transforms": "`transforms:` and below it, indented, `rules:`, and `keys:` where rules need some",
    "transforms.keys": "`keys: {main: {env: TAILRACE_KEY}}`, or `{file: /run/secrets/key}`",
    "transforms.rules": '`- {do: mask, tables: ["public.users"], columns: [email], keep_last: 4}`; '
    f"`do` is one of {', '.join(RULE_TYPES)}",
}


def unsupported_rules(transforms: Transforms) -> Iterator[tuple[str, str]]:
    """Yield what a pipeline cannot do, with a hint for each."""
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
                f"has the rule `{rule.name}`, which routes rows by `when` and does not name its tables",
                "Name the tables, e.g. `tables: [public.orders]`: a pipeline must know its lake tables.",
            )
        if "{" not in rule.to and (len(rule.tables) > 1 or not rule.exact_tables):
            yield f"has the rule `{rule.name}`, which would put several tables into one", DISTINCT_TABLES_HINT


def is_message_table(transforms: Transforms, table: TableId) -> bool:
    """Return whether an outbox sends messages to this table."""
    boxes = [rule for rule in transforms.rules if isinstance(rule, Outbox)]
    if not boxes:
        return False
    from tailrace.transforms.output_tables import may_produce

    return may_produce(boxes, table)


def refuse_modes(table: TableId, mode: str | None, soft_delete: bool | None) -> None:
    """Refuse settings in `tables.rules` that message tables cannot have."""
    if soft_delete or mode not in (None, "mirror"):
        raise TableUnusable(
            "message tables have no mode of their own",
            table=table,
            hint="Remove `mode` and `soft_delete` from the `tables.rules` that match the outbox's tables: "
            "messages are kept by their key, unchanged.",
        )


def may_have_rows(transforms: Transforms, table: TableId, *, wanted: bool) -> bool:
    """Return whether the rules leave rows in a table of this name.

    `wanted` says whether the source's own table of this name is copied.
    """
    from tailrace.transforms.output_tables import may_produce, output_tables

    return (wanted and table in output_tables(transforms.rules, table)) or may_produce(transforms.rules, table)


def rule_with_dead_letters(transforms: Transforms) -> str | None:
    """Return the name of a rule that rejects rows to dead letters."""
    return next((rule.name for rule in transforms.rules if rule.on_error == "dead-letter"), None)


def with_plain_numbers(value: Any) -> Any:
    """Return the value with numbers as numbers, exactly as written."""
    if isinstance(value, dict):
        return {key: with_plain_numbers(value) for key, value in value.items()}
    if isinstance(value, list):
        return [with_plain_numbers(value) for value in value]
    text = getattr(value, "text", None)
    if not isinstance(text, str):
        return value
    try:
        return int(text.replace("_", ""), 10)
    except ValueError:
        pass
    try:
        return Decimal(text.replace("_", ""))
    except InvalidOperation:
        return text


def with_key_paths(transforms: Any, folder: Path) -> Any:
    """Return the transforms with key files relative to the settings' folder."""
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
    """Return the path of a value as the file has it."""
    tagged = loc[:2] == ("transforms", "rules") and len(loc) > 3 and loc[3] in RULE_TYPES
    return (*loc[:3], *loc[4:]) if tagged else loc


def problem_text(loc: Loc, detail: ErrorDetails) -> str | None:
    """Return the problem of a rule or a key; None if the value is neither."""
    return declaration.error_text(detail) if loc[:1] == ("transforms",) else None


def keys_of(loc: Loc, rule: Any) -> list[str] | None:
    """Return the keys that a rule may have; None if this is not a rule."""
    if loc[:2] != ("transforms", "rules") or len(loc) != 3 or not isinstance(rule, dict):
        return None
    kind = RULE_TYPES.get(str(rule.get("do") or "null") if "do" in rule else "")
    return list(kind.model_fields) if kind else ["do"]
