"""Parse the option `tables`: names of tables, and patterns of them.

A part in quotes is taken as it is written; so is one without `*`, `?` and `[…]`. The one dot between them separates
schema and table. A name that has a dot itself is quoted, here as in `table`.
"""

from __future__ import annotations

import fnmatch
import glob
import re
from dataclasses import dataclass

from tailrace.model.schema import TableId
from tailrace.spark.datasource.option_values import QUOTED, option_error, unquote

_BRACKETS = r'\[!?\]?[^\]",]*\]'
_PART = rf'\s*(?:{QUOTED}|(?:{_BRACKETS}|[^\s".,\[])(?:{_BRACKETS}|[^".,\[])*)\s*'
_ENTRY = re.compile(rf"({_PART})\.({_PART})")
_COMMA = re.compile(r',(?=(?:[^"]*"[^"]*")*[^"]*$)')
"""A comma that is not in quotes."""
_LIST_HINT = (
    "For example: public.orders, sales.*; `*` is all. Quote a name that has a dot in it, or one of `,`, `*`, `?` and "
    '`[`: "a.b"."c", "a.b".*'
)


@dataclass(frozen=True)
class TablePattern:
    """A table, or a pattern for the two parts of its name."""

    schema: str
    name: str
    """Schema and name are globs. A literal name is an escaped glob."""
    table: TableId | None = None
    """The only table that it can match."""

    @classmethod
    def of(cls, table: TableId) -> TablePattern:
        """Return the pattern that matches this table only."""
        return cls(glob.escape(table.schema), glob.escape(table.name), table)

    def matches(self, table: TableId) -> bool:
        """Return whether the pattern matches the table."""
        return fnmatch.fnmatchcase(table.schema, self.schema) and fnmatch.fnmatchcase(table.name, self.name)

    @property
    def to_setting(self) -> str:
        """The pattern as a pipeline's `source.tables` has it. A dot that is part of a name is in brackets there."""
        return ".".join(_dots_hidden(part) for part in (self.schema, self.name))


def parse_table_patterns(name: str, text: str) -> tuple[TablePattern, ...]:
    """Parse the entries of an option, with commas between."""
    patterns = [_pattern(name, entry.strip()) for entry in _COMMA.split(text)]
    if len(set(patterns)) < len(patterns):
        raise option_error(name, "has a name twice", "Name each once.")
    return tuple(patterns)


def format_table_name(table: TableId) -> str:
    """Return a table's name as options take it."""
    parts = (table.schema, table.name) if table.schema else (table.name,)
    return ".".join(_quoted(part) if re.search(r'[".,*?\[\s]', part) else part for part in parts)


def _quoted(part: str) -> str:
    return '"' + part.replace('"', '""') + '"'


def _pattern(option: str, entry: str) -> TablePattern:
    if entry == "*":
        return TablePattern("*", "*")
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise option_error(
            option, f"has `{entry}`, which is neither a table with its schema nor a pattern for one", _LIST_HINT
        )
    schema, name = match[1].strip(), match[2].strip()
    if _is_glob(schema) or _is_glob(name):
        return TablePattern(_glob(schema), _glob(name))
    return TablePattern.of(TableId(unquote(schema), unquote(name)))


def _is_glob(part: str) -> bool:
    return re.search(r"[*?\[]", part) is not None and not part.startswith('"')


def _glob(part: str) -> str:
    return part if _is_glob(part) else glob.escape(unquote(part))


def _dots_hidden(part: str) -> str:
    """Return a part with brackets around each dot that has none yet."""
    return re.sub(rf"{_BRACKETS}|\.", lambda match: "[.]" if match[0] == "." else match[0], part)
