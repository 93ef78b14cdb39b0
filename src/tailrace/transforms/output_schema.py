"""Output schemas: what rules make of a table's schema, the same for snapshot and stream.

They are computed once, before the first row. An output schema keeps the schema at the source (`origin`). A column that
a rule has changed has the rule's mark in its type's name, so another rule makes another schema. A reader that keeps
rows of the old one then sees a schema change and reloads them.
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
"""Marks of rules that choose rows and columns, but change no values.

A dropped column cannot carry a mark, so the first column does.
"""
ROUTED = 1 << 33
"""First number of tables that only rules have made. No source's own number is so large."""


@dataclass
class OutputColumn:
    """A column between two rules."""

    type: pa.DataType
    source_type: str
    source_index: int | None
    """Index of the source column it was; None if a rule has created it."""
    is_changed: bool = False
    """True if a rule has changed its values."""

    def mark(self, rule: Rule, type_: pa.DataType | None = None) -> None:
        """Note that a rule has changed the values."""
        self.source_type += f"{RULE_MARK}{rule.do}#{rule.digest}"
        self.type = self.type if type_ is None else type_
        self.is_changed = True


@dataclass
class OutputSchema:
    """A table's schema between two rules."""

    source: TableSchema
    table: TableId
    columns: dict[str, OutputColumn]
    key: tuple[str, ...]

    @classmethod
    def from_table(cls, schema: TableSchema) -> OutputSchema:
        columns = {
            column.name: OutputColumn(column.type, column.source_type, index)
            for index, column in enumerate(schema.columns)
        }
        return cls(source=schema, table=schema.table, columns=columns, key=schema.key)

    @property
    def row_is_key(self) -> bool:
        """True if rows are identified by all their values.

        Such a table has no key, and the source sends old rows.
        """
        return not self.key and self.source.identity is Identity.FULL

    @property
    def types(self) -> dict[str, pa.DataType]:
        return {name: column.type for name, column in self.columns.items()}

    def mark_rows(self, rule: Rule) -> None:
        """Note that a rule chooses the rows or columns."""
        next(iter(self.columns.values())).source_type += f"{RULE_MARK}{rule.do}#{rule.digest}"

    def rule_error(self, rule: Rule, message: str, hint: str, **fields: object) -> RuleInvalid:
        return RuleInvalid(message, rule=rule.name, table=self.source.table, hint=hint, **fields)

    def to_table_schema(self) -> TableSchema:
        """Return the schema after all rules."""
        columns = tuple(
            Column(name=name, source_type=column.source_type, type=column.type) for name, column in self.columns.items()
        )
        same = columns == self.source.columns and self.key == self.source.key and self.table == self.source.table
        if same:
            return self.source
        facts = _facts(self.source.facts, self.columns) if self.source.facts else None
        origin = _without_values(self.source)
        return replace(self.source, table=self.table, columns=columns, key=self.key, facts=facts, source_version=origin)


def _without_values(schema: TableSchema) -> TableSchema:
    """Return the schema without the catalogue's default values: a rule may hide them."""
    if schema.facts is None:
        return schema
    bare = tuple(replace(column, default=None, fast_default=None) for column in schema.facts.columns)
    return replace(schema, facts=replace(schema.facts, columns=bare))


def _facts(facts: CatalogueFacts, columns: dict[str, OutputColumn]) -> CatalogueFacts:
    """Return the catalogue facts of the output columns.

    They are those of the source's columns, except for the values. A column that no source has gets a number below zero,
    so it never counts as one that was added at the source. A column with changed values has an empty text as the
    default of its existing rows: no real value is stored that way.
    """

    def facts_of(name: str, column: OutputColumn) -> ColumnFacts:
        if column.source_index is None:
            number = -1 - zlib.crc32(name.encode())
            return ColumnFacts(number=number, nullable=True, default=None, fast_default=None, definition_version=0)
        source_column = facts.columns[column.source_index]
        if not column.is_changed:
            return source_column
        return replace(
            source_column, nullable=True, default=None, fast_default=None if source_column.fast_default is None else ""
        )

    kept = {column.source_index for column in columns.values()}
    dropped = [source_column.number for index, source_column in enumerate(facts.columns) if index not in kept]
    return replace(
        facts,
        columns=tuple(facts_of(name, column) for name, column in columns.items()),
        unpublished=tuple(sorted({*facts.unpublished, *dropped})),
    )


def is_changed_by_rule(column: Column) -> bool:
    """Return whether a rule has changed the column's values."""
    return any(not mark.startswith(ROW_RULE_MARKS) for mark in column.rule_marks)


def routed_schema(schema: TableSchema, table: TableId) -> TableSchema:
    """Return the schema for rows that rules send to another table."""
    number = ROUTED + zlib.crc32(f"{table.schema}\0{table.name}\0{schema.relation}".encode())
    return replace(schema, table=table, relation=number, source_version=schema.source_version or schema)
