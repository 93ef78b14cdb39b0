"""Read a YAML file as plain values with line numbers, and list its problems.

Variables are replaced. This module does not know what the values mean. No problem contains a value: it could be a
secret.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

FILE_BYTES_MAX = 1 << 20
VALUES_MAX = 10_000
"""Limit for aliases of aliases, which can expand to more values than fit in memory."""
DEPTH_MAX = 20

Loc = tuple[str | int, ...]
"""Path of a value in the file: `("source", "tables", 0)` is the first glob."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One mistake. Lines and columns count from 1; line 0 means the file as a whole."""

    line: int
    column: int
    where: str
    message: str
    hint: str

    def to_json(self) -> dict[str, str | int]:
        return asdict(self)


@dataclass(frozen=True)
class Number:
    """A number as written in the file. The setting that takes it knows its unit."""

    text: str


def read_text(file: Path) -> str | Problem:
    """Return the file's text, or the problem that prevents reading it."""

    def whole(message: str, hint: str, line: int = 0) -> Problem:
        return Problem(line=line, column=min(line, 1), where="", message=message, hint=hint)

    try:
        with file.open("rb") as stream:
            content = stream.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return whole("the file does not exist", "Check the path.")
    except IsADirectoryError:
        return whole("this is a folder", "Give the path of the settings file in it.")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return whole(f"the file cannot be read: {reason.lower()}", "Check the path and the file's permissions.")
    if len(content) > FILE_BYTES_MAX:
        return whole("the file is larger than 1 MiB", "Is it the right file?")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return whole("the file is not UTF-8 text", "Save it as UTF-8.", line=content[: error.start].count(b"\n") + 1)


def dotted(loc: Loc) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")


_VARIABLE = re.compile(r"\$\$|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}|\$\{")
_PASSWORD = re.compile(r"[A-Za-z0-9+.-]+://(?:\$\{[^}]*\}|[^:/?@])*:(?P<password>(?:\$\{[^}]*\}|[^/?@])*)@")
"""Finds the password in a URL.

A variable holds the password itself, as PGPASSWORD does. It is percent-encoded when it is inserted, because libpq would
take an `@` in it for the end of the password.
"""

_NOT_READ = object()
"""Replaces a value whose own problem is already reported."""

_NO_TEXT = object()
"""Replaces dates and other YAML types that no setting takes."""


@dataclass
class Document:
    """A file's values, the position of each, and its problems. Problems are only ever added."""

    environment: Mapping[str, str]
    needs: str
    """The keys that such a file must hold; shown if it is empty."""
    urls: Collection[Loc] = ()
    """Paths of the values that may contain a password."""
    text: str = ""
    data: Any = None
    problems: list[Problem] = field(default_factory=list)
    keys: dict[Loc, int] = field(default_factory=dict)
    """Start of each key, as an index into the text."""
    values: dict[Loc, int] = field(default_factory=dict)
    unread: set[Loc] = field(default_factory=set)

    def parse(self, text: str) -> None:
        """Fill `data`; it stays None if there is nothing to validate."""
        self.text = text
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.reader.ReaderError as error:
            self.add(
                (),
                error.position,
                "the file holds a character that YAML does not allow",
                "Remove the control character on this line.",
            )
        except yaml.MarkedYAMLError as error:
            self.add_syntax(error)
        except RecursionError:
            self.add((), 0, "the file is nested too deeply", "Is it the right file?")
        else:
            if node is None:
                self.add((), 0, "the file is empty", f"It needs {self.needs}.")
            elif not isinstance(node, yaml.MappingNode):
                self.add(
                    (), node.start_mark.index, "the file must be a mapping of keys to values", f"It needs {self.needs}."
                )
            else:
                self.data = self.read(node, ())

    def read(self, node: yaml.Node, loc: Loc) -> Any:
        """Return a node as plain data, with variables replaced."""
        self.values[loc] = node.start_mark.index
        if len(loc) > DEPTH_MAX or len(self.values) > VALUES_MAX:
            self.unread.add(loc)
            if len(self.values) <= VALUES_MAX + 1:
                self.add(
                    loc,
                    node.start_mark.index,
                    "is nested too deeply or holds too many values",
                    "Look for an alias (`*name`) that contains itself.",
                )
            return _NOT_READ
        if isinstance(node, yaml.MappingNode):
            return self.read_mapping(node, loc)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*loc, at)) for at, item in enumerate(node.value)]
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if kind == "null":
            return None
        if kind == "bool":
            return yaml.SafeLoader.bool_values.get(node.value.lower(), _NO_TEXT)
        if kind in ("int", "float"):
            return Number(node.value)
        return self.expand(node, loc) if isinstance(node, yaml.ScalarNode) and kind == "str" else _NO_TEXT

    def read_mapping(self, node: yaml.MappingNode, loc: Loc) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in node.value:
            at = key.start_mark.index
            if not isinstance(key, yaml.ScalarNode):
                self.add(loc, at, "has a key that is not text", f"It needs {self.needs}.")
            elif key.value in values:
                first, _ = self.line_and_column(self.keys[(*loc, key.value)])
                self.add((*loc, key.value), at, f"is set twice; first on line {first}", "Keep one of them.")
            else:
                self.keys[(*loc, key.value)] = at
                values[key.value] = self.read(value, (*loc, key.value))
        return values

    def expand(self, node: yaml.ScalarNode, loc: Loc) -> Any:
        """Return a scalar's text with `${VAR}` replaced; `$$` and any other `$` is a dollar."""
        begin = node.start_mark.index
        secret = _PASSWORD.match(node.value) if loc in self.urls else None

        def replaced(match: re.Match[str]) -> str:
            nonlocal begin
            if match.group() == "$$":
                return "$"
            # Search behind the previous match, so that each variable gets its own line.
            at = self.text.find(match.group(), begin, node.end_mark.index)
            begin = at + 1 if at >= 0 else begin
            name, default = match.group("name"), match.group("default")
            if name is None or "${" in (default or ""):
                self.unread.add(loc)
                self.add(
                    loc,
                    max(at, node.start_mark.index),
                    "has a `${` that does not begin a variable",
                    "Write `${NAME}` or `${NAME:-default}`, not nested; `$$` is a literal dollar.",
                )
                return ""
            if name not in self.environment and default is None:
                self.unread.add(loc)
                self.add(
                    loc,
                    max(at, node.start_mark.index),
                    f"needs the environment variable {name}, which is not set",
                    f"Set it, or give a default: `${{{name}:-default}}`.",
                )
            value = self.environment.get(name, "") or default or ""
            inside = secret is not None and secret.start("password") <= match.start() < secret.end("password")
            return quote(value, safe="") if inside else value

        text = _VARIABLE.sub(replaced, node.value)
        return _NOT_READ if loc in self.unread else text

    def line_and_column(self, index: int) -> tuple[int, int]:
        before = self.text[:index]
        return before.count("\n") + 1, index - (before.rfind("\n") + 1) + 1

    def add(self, loc: Loc, index: int, message: str, hint: str) -> None:
        line, column = self.line_and_column(index)
        self.problems.append(Problem(line=line, column=column, where=dotted(loc), message=message, hint=hint))

    def add_syntax(self, error: yaml.MarkedYAMLError) -> None:
        reason = " ".join(part for part in (error.context, error.problem) if part)
        mark = error.problem_mark or error.context_mark
        at = mark.index if mark else 0
        if "'\\t'" in reason or self.text[at : at + 1] == "\t":
            self.add((), at, "there is a tab where YAML allows only spaces", "Use spaces, also for indentation.")
        elif "alias" in reason or "anchor" in reason:
            # The parser's own text quotes what follows the star, which may be a secret.
            self.add(
                (),
                at,
                "a `*` or `&` at the beginning of a value means something else in YAML",
                'Put the value in quotes: "*.orders".',
            )
        elif "mapping values are not allowed" in reason:
            self.add(
                (),
                at,
                "there is a `:` where YAML expects no key",
                "Check the indentation, or put a value that holds `: ` in quotes.",
            )
        elif "single document" in reason:
            self.add((), at, "a second document begins here", "Keep one document: remove the `---`.")
        else:
            self.add(
                (),
                at,
                f"this is not YAML: {error.problem}",
                "Check indentation, quotes and brackets on this line and the one before.",
            )

    def value(self, loc: Loc) -> Any:
        value = self.data
        for part in loc:
            value = value[part]
        return value
