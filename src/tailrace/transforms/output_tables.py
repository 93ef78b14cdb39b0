"""Which tables rules make of a table, told by names alone: nobody has to ask the source, or to see a row.

A table that a pipeline makes has one table at the source that its loads are read from. So each name is made of one
table, and only once: of several, a TRUNCATE or a load of the one would take away rows of the others.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

from tailrace.errors import RuleInvalid
from tailrace.model.schema import TableId
from tailrace.transforms.rules import DISTINCT_TABLES_HINT, Outbox, Route, Rule


def target_table(template: str, table: TableId, **more: str) -> TableId:
    """The table that a template means."""
    schema, _, name = template.partition(".")

    def filled(text: str) -> str:
        for key, value in {"schema": table.schema, "table": table.name, **more}.items():
            text = text.replace(f"{{{key}}}", value)
        return text

    return TableId(filled(schema), filled(name))


def output_tables(rules: Iterable[Rule], table: TableId) -> tuple[TableId, ...]:
    """Where rows of a table go: most of them to the first, and those that a condition is true of to the others."""
    rest, sent = table, list[TableId]()
    for rule in rules:
        if isinstance(rule, Route) and matches_any(rule.tables, table):
            to = target_table(rule.to, table)
            if rule.when is None:
                rest = to
            else:
                sent.append(to)
    return (rest, *sent)


def can_still_produce(rules: Iterable[Rule], source: TableId, made: TableId) -> bool:
    """Whether rows of a source's table may go to a table."""
    rules = tuple(rules)
    boxes = (rule for rule in rules if isinstance(rule, Outbox) and matches_any(rule.tables, source))
    return made in output_tables(rules, source) or any(_means(rule.to, made) for rule in boxes)


def may_produce(rules: Iterable[Rule], table: TableId) -> bool:
    """Whether a rule may make a table of this name of another."""
    return any(_means(rule.to, table) for rule in rules if isinstance(rule, Route | Outbox))


def _means(template: str, table: TableId) -> bool:
    def pattern(part: str) -> str:
        return ".+".join(map(re.escape, re.split(r"\{\w+\}", part)))

    schema, _, name = template.partition(".")
    found = re.fullmatch(pattern(schema), table.schema, re.DOTALL)
    return found is not None and re.fullmatch(pattern(name), table.name, re.DOTALL) is not None


class OutputTables:
    """What was made of which table, each of one."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules = tuple(rules)
        self._boxes = tuple(rule for rule in self._rules if isinstance(rule, Outbox))
        self._known: dict[TableId, tuple[TableId, ...]] = {}
        self._source: dict[TableId, TableId] = {}

    def tables_for(self, table: TableId) -> tuple[TableId, ...]:
        """Where rows of a source's table go."""
        if table not in self._known:
            made = self._made_of(table)
            for at, one in enumerate(made):
                if one in made[:at]:
                    raise RuleInvalid(
                        "two rules send rows of one table to the same table",
                        table=table,
                        to=one,
                        hint="Make one rule of them, with `or` between the conditions.",
                    )
                if may_produce(self._boxes, one):
                    raise RuleInvalid(
                        "a table has a name that messages may go to",
                        table=one,
                        hint='Give the `outbox` another `to`, with a schema of its own: `to: "events.{type}"`.',
                    )
                self.claim(one, table)
            self._known[table] = made
        return self._known[table]

    def _made_of(self, table: TableId) -> tuple[TableId, ...]:
        """An outbox leaves only rows without a type where they were, to be set aside."""
        made, box = output_tables(self._rules, table), self.outbox_rule(table)
        if box is None:
            return made
        if made != (table,):
            raise RuleInvalid(
                "rows of an outbox are sent elsewhere by another rule, too",
                rule=box.name,
                table=table,
                hint="Remove the `route`, or have its `tables` not match the outbox.",
            )
        return made if box.on_error == "dead-letter" else ()

    def outbox_rule(self, table: TableId) -> Outbox | None:
        """The rule that makes messages of the table's rows."""
        return next((rule for rule in self._boxes if matches_any(rule.tables, table)), None)

    def claim(self, made: TableId, source: TableId) -> None:
        """A table is made of this one, and must not be of another."""
        if (other := self._source.setdefault(made, source)) != source:
            raise RuleInvalid(
                "two tables would become one", tables=f"{other} and {source}", to=made, hint=DISTINCT_TABLES_HINT
            )

    def source_table(self, made: TableId) -> TableId | None:
        """The source's table, if it was asked about."""
        return self._source.get(made)

    @property
    def has_outboxes(self) -> bool:
        """Whether there are tables that only rows tell of."""
        return bool(self._boxes)


def matches(glob: str, table: TableId) -> bool:
    """A name may itself hold a dot, so the pattern is split at any one of its own."""
    dots = [at for at, letter in enumerate(glob) if letter == "."]
    return any(
        fnmatch.fnmatchcase(table.schema, glob[:at]) and fnmatch.fnmatchcase(table.name, glob[at + 1 :]) for at in dots
    )


def matches_any(globs: Iterable[str], table: TableId) -> bool:
    return any(matches(glob, table) for glob in globs)
