"""What rules make of a table's shape: worked out once, before any row comes, and the same for snapshot and stream.

The shape that comes out remembers the one at the source (`origin`). A column that a rule has worked on says so in its
type's name, so another rule makes another shape: whoever keeps rows of the old one is told, and loads them anew.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import pyarrow as pa

from tailrace.errors import RuleInvalid
from tailrace.model.catalogue_facts import CatalogueFacts, ColumnFacts
from tailrace.model.schema import RULE_MARK, Column, Identity, TableId, TableSchema
from tailrace.transforms.rules import Rule

ROW_RULE_MARKS = ("filter#", "unwrap#", "include#", "exclude#", "route#", "outbox#")
"""Rules that say which rows and columns there are: what they leave out has nothing to mark, so the first column has
it. Their values are what they were."""
ROUTED = 1 << 33
"""Tables that only rules have made are numbered from here: no source's own number is so large."""


@dataclass
class OutputColumn:
    """A column on its way through the rules."""

    type: pa.DataType
    source_type: str
    source_index: int | None
    """Of the column at the source that it was, if it was one;"""
    is_changed: bool = False
    """and whether its values are others now."""

    def mark(self, rule: Rule, kind: pa.DataType | None = None) -> None:
        """A rule has worked on the values."""
        self.source_type += f"{RULE_MARK}{rule.do}#{rule.digest}"
        self.type = self.type if kind is None else kind
        self.is_changed = True


@dataclass
class OutputSchema:
    """A table on its way through the rules."""

    source: TableSchema
    table: TableId
    columns: dict[str, OutputColumn]
    key: tuple[str, ...]

    @classmethod
    def from_table(cls, schema: TableSchema) -> OutputSchema:
        columns = {
            column.name: OutputColumn(column.type, column.source_type, place)
            for place, column in enumerate(schema.columns)
        }
        return cls(source=schema, table=schema.table, columns=columns, key=schema.key)

    @property
    def row_is_key(self) -> bool:
        """Whether rows are known by all they have: there is no key, and old rows are told."""
        return not self.key and self.source.identity is Identity.FULL

    @property
    def types(self) -> dict[str, pa.DataType]:
        return {name: made.type for name, made in self.columns.items()}

    def mark_rows(self, rule: Rule) -> None:
        """A rule says which rows or columns there are."""
        next(iter(self.columns.values())).source_type += f"{RULE_MARK}{rule.do}#{rule.digest}"

    def rule_error(self, rule: Rule, message: str, hint: str, **fields: object) -> RuleInvalid:
        return RuleInvalid(message, rule=rule.name, table=self.source.table, hint=hint, **fields)

    def to_table_schema(self) -> TableSchema:
        """What comes out."""
        columns = tuple(
            Column(name=name, source_type=made.source_type, type=made.type) for name, made in self.columns.items()
        )
        same = columns == self.source.columns and self.key == self.source.key and self.table == self.source.table
        if same:
            return self.source
        facts = _facts(self.source.facts, self.columns) if self.source.facts else None
        origin = _without_values(self.source)
        return replace(self.source, table=self.table, columns=columns, key=self.key, facts=facts, source_version=origin)


def _without_values(schema: TableSchema) -> TableSchema:
    """The shape without constants that the catalogue tells of its columns: a rule may hide them."""
    if schema.facts is None:
        return schema
    bare = tuple(replace(column, default=None, fast_default=None) for column in schema.facts.columns)
    return replace(schema, facts=replace(schema.facts, columns=bare))


def _facts(facts: CatalogueFacts, columns: dict[str, OutputColumn]) -> CatalogueFacts:
    """What is known of the source's columns holds for what was made of them, but for the values.

    A column that no source has gets a number below zero: it is never taken for one that was added at the source. What
    rows at rest have in one whose values are others now is told by a text that no value is.
    """

    def told(name: str, made: OutputColumn) -> ColumnFacts:
        if made.source_index is None:
            number = -1 - zlib.crc32(name.encode())
            return ColumnFacts(number=number, nullable=True, default=None, fast_default=None, definition_version=0)
        known = facts.columns[made.source_index]
        if not made.is_changed:
            return known
        return replace(known, nullable=True, default=None, fast_default=None if known.fast_default is None else "")

    kept = {made.source_index for made in columns.values()}
    left_out = [known.number for place, known in enumerate(facts.columns) if place not in kept]
    return replace(
        facts,
        columns=tuple(told(name, made) for name, made in columns.items()),
        unpublished=tuple(sorted({*facts.unpublished, *left_out})),
    )


def is_changed_by_rule(column: Column) -> bool:
    """Whether a rule has worked on the column's values."""
    return any(not mark.startswith(ROW_RULE_MARKS) for mark in column.rule_marks)


def routed_schema(schema: TableSchema, table: TableId) -> TableSchema:
    """The same shape for rows that rules send to another table."""
    number = ROUTED + zlib.crc32(f"{table.schema}\0{table.name}\0{schema.relation}".encode())
    return replace(schema, table=table, relation=number, source_version=schema.source_version or schema)
