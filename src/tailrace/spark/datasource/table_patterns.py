"""What the option `tables` names: tables, and patterns of them.

A part in quotes is taken as it is written; so is one without `*`, `?` and `[…]`. Schema and table are told apart by the
one dot between them: a name that has a dot itself is quoted, here as in `table`.
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
"""One that is not in quotes."""
_LIST_HINT = (
    "For example: public.orders, sales.*; `*` is all. A name with a dot in it is quoted, as is one with `,`, `*`, `?` "
    'or `[`: "a.b"."c", "a.b".*'
)


@dataclass(frozen=True)
class TablePattern:
    """A table, or a pattern for the two parts of its name."""

    schema: str
    name: str
    """Globs, names that are taken as they are among them."""
    table: TableId | None = None
    """The only one that it can mean."""

    @classmethod
    def of(cls, table: TableId) -> TablePattern:
        """The one that means this table."""
        return cls(glob.escape(table.schema), glob.escape(table.name), table)

    def matches(self, table: TableId) -> bool:
        """Whether the table is meant."""
        return fnmatch.fnmatchcase(table.schema, self.schema) and fnmatch.fnmatchcase(table.name, self.name)

    @property
    def to_setting(self) -> str:
        """The same as a pipeline's `source.tables` has it, where a dot that is part of a name stands in brackets."""
        return ".".join(_dots_hidden(part) for part in (self.schema, self.name))


def parse_table_patterns(name: str, text: str) -> tuple[TablePattern, ...]:
    """What an option lists, with commas between."""
    found = [_pattern(name, entry.strip()) for entry in _COMMA.split(text)]
    if len(set(found)) < len(found):
        raise option_error(name, "has a name twice", "Name each once.")
    return tuple(found)


def format_table_name(table: TableId) -> str:
    """A table's name as options take it."""
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
            option, f"has `{entry}`, which is no table with its schema and no pattern for one", _LIST_HINT
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
    """With brackets around each dot that has none yet."""
    return re.sub(rf"{_BRACKETS}|\.", lambda found: "[.]" if found[0] == "." else found[0], part)
