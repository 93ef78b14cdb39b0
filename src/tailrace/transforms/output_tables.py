"""Output tables: the tables that rules make of a source table, known from names alone.

No query and no row is needed. A lake table of a pipeline is loaded from one source table. So each output name belongs
to one source table, and only once: with several, a TRUNCATE or a load of one would remove rows of the others.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

from tailrace.errors import RuleInvalid
from tailrace.model.schema import TableId
from tailrace.transforms.rules import DISTINCT_TABLES_HINT, Outbox, Route, Rule


def target_table(template: str, table: TableId, **more: str) -> TableId:
    """Return the table that a template names."""
    schema, _, name = template.partition(".")

    def fill(text: str) -> str:
        for key, value in {"schema": table.schema, "table": table.name, **more}.items():
            text = text.replace(f"{{{key}}}", value)
        return text

    return TableId(fill(schema), fill(name))


def output_tables(rules: Iterable[Rule], table: TableId) -> tuple[TableId, ...]:
    """Return where rows of a table go, the default target first.

    Targets with a condition follow it.
    """
    default, conditional = table, list[TableId]()
    for rule in rules:
        if isinstance(rule, Route) and matches_any(rule.tables, table):
            target = target_table(rule.to, table)
            if rule.when is None:
                default = target
            else:
                conditional.append(target)
    return (default, *conditional)


def can_still_produce(rules: Iterable[Rule], source: TableId, made: TableId) -> bool:
    """Return whether rows of a source table may go to a table."""
    rules = tuple(rules)
    outboxes = (rule for rule in rules if isinstance(rule, Outbox) and matches_any(rule.tables, source))
    return made in output_tables(rules, source) or any(_may_name(rule.to, made) for rule in outboxes)


def may_produce(rules: Iterable[Rule], table: TableId) -> bool:
    """Return whether a rule may make a table of this name from another one."""
    return any(_may_name(rule.to, table) for rule in rules if isinstance(rule, Route | Outbox))


def _may_name(template: str, table: TableId) -> bool:
    def pattern(part: str) -> str:
        return ".+".join(map(re.escape, re.split(r"\{\w+\}", part)))

    schema, _, name = template.partition(".")
    schema_match = re.fullmatch(pattern(schema), table.schema, re.DOTALL)
    return schema_match is not None and re.fullmatch(pattern(name), table.name, re.DOTALL) is not None


class OutputTables:
    """The output tables of each source table; no two source tables share one."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules = tuple(rules)
        self._outboxes = tuple(rule for rule in self._rules if isinstance(rule, Outbox))
        self._known: dict[TableId, tuple[TableId, ...]] = {}
        self._source: dict[TableId, TableId] = {}

    def tables_for(self, table: TableId) -> tuple[TableId, ...]:
        """Return where rows of a source table go; refuse conflicting rules."""
        if table not in self._known:
            targets = self._produced_tables(table)
            for index, target in enumerate(targets):
                if target in targets[:index]:
                    raise RuleInvalid(
                        "two rules send one table's rows to the same table",
                        table=table,
                        to=target,
                        hint="Merge the rules into one, with `or` between the conditions.",
                    )
                if may_produce(self._outboxes, target):
                    raise RuleInvalid(
                        "table has a name that messages of an outbox may use",
                        table=target,
                        hint='Give the `outbox` another `to`, with a schema of its own: `to: "events.{type}"`.',
                    )
                self.claim(target, table)
            self._known[table] = targets
        return self._known[table]

    def _produced_tables(self, table: TableId) -> tuple[TableId, ...]:
        """Return the targets; for an outbox only its own table, for rejected rows, or none."""
        targets, outbox = output_tables(self._rules, table), self.outbox_rule(table)
        if outbox is None:
            return targets
        if targets != (table,):
            raise RuleInvalid(
                "another rule sends an outbox's rows elsewhere, too",
                rule=outbox.name,
                table=table,
                hint="Remove the `route`, or have its `tables` not match the outbox.",
            )
        return targets if outbox.on_error == "dead-letter" else ()

    def outbox_rule(self, table: TableId) -> Outbox | None:
        """Return the rule that makes messages of the table's rows."""
        return next((rule for rule in self._outboxes if matches_any(rule.tables, table)), None)

    def claim(self, table: TableId, source: TableId) -> None:
        """Note that an output table belongs to this source table; refuse a second one."""
        if (other := self._source.setdefault(table, source)) != source:
            raise RuleInvalid(
                "two tables would become one", tables=f"{other} and {source}", to=table, hint=DISTINCT_TABLES_HINT
            )

    def source_table(self, made: TableId) -> TableId | None:
        """Return the source table of an output table, if it is known."""
        return self._source.get(made)

    @property
    def has_outboxes(self) -> bool:
        """True if some output tables are known only from rows."""
        return bool(self._outboxes)


def matches(glob: str, table: TableId) -> bool:
    """Return whether a pattern `schema.table` matches the table.

    Each part may have `*`, `?` and `[…]`; names are compared verbatim. A name may contain a dot, so the pattern is
    split at each of its dots.
    """
    splits = [at for at, char in enumerate(glob) if char == "."]
    return any(
        fnmatch.fnmatchcase(table.schema, glob[:at]) and fnmatch.fnmatchcase(table.name, glob[at + 1 :])
        for at in splits
    )


def matches_any(globs: Iterable[str], table: TableId) -> bool:
    return any(matches(glob, table) for glob in globs)
