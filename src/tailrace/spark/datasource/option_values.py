"""Parse the values of Spark options. Refuse an invalid one with the option's name and an example.

The options that are present decide what is read: a database table or a change log. So a misspelled option is looked for
among those of both.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from types import TracebackType

from tailrace.errors import ConfigError, TailraceError
from tailrace.model.schema import TableId

TABLE_OPTIONS = ("url", "table", "columns", "where", "chunkBytes", "maxPartitions", "snapshotSeconds", "idleSeconds")
LOG_OPTIONS = (
    "log", "path", "logEndpoint", "logRegion", "checkpointLocation", "url", "table", "tables", "shape",
    "startingPosition", "endingPosition", "maxRowsPerTrigger", "maxBytesPerTrigger", "onSchemaChange", "consumer",
    "rowsPerPartition", "maxPartitions",
)  # fmt: skip
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "kB": 10**3, "MB": 10**6, "GB": 10**9}
QUOTED = r'"(?:[^"]|"")+"'
"""A name, or a part of one, in quotes."""
_COLUMN = rf'\s*(?:{QUOTED}|[^\s",][^",]*)\s*'


def option_error(name: str, why: str, hint: str) -> ConfigError:
    """Return the error for an option."""
    return ConfigError(f"the option `{name}` {why}", hint=hint)


def as_option_error(error: TailraceError) -> TailraceError:
    """Return the error with the hint for readers without a settings file. They set options."""
    return type(error)(error.message, hint=error.option_hint, **error.fields) if error.option_hint else error


def canonical_options(values: Mapping[str, str], options: Sequence[str]) -> dict[str, str]:
    """Return the options under their documented names; Spark ignores case."""
    known = {name.lower(): name for name in options}
    if any(name.lower().startswith("option.") for name in values):  # as Spark stores those of a table
        raise ConfigError(
            "a table of Spark's catalog cannot be of this format: Spark reads it without its options",
            hint="Create a view with the same options: CREATE TEMPORARY VIEW … USING cdc OPTIONS (…).",
        )
    for name in values:
        if name.lower() not in known:
            raise _unknown(name)
    return {known[name.lower()]: value for name, value in values.items()}


def _unknown(name: str) -> ConfigError:
    known = {name.lower(): name for name in (*TABLE_OPTIONS, *LOG_OPTIONS)}
    if name.lower() in known:
        only = "is for a database table, and other options here are for a change log"
        return option_error(known[name.lower()], only, "Leave it out.")
    all_of_them = (
        f"Use the options of a database table ({', '.join(TABLE_OPTIONS)}) or those of a change log "
        f"({', '.join(LOG_OPTIONS)})."
    )
    close = difflib.get_close_matches(name.lower(), known, n=1)
    return option_error(name, "is not known", f"Did you mean `{known[close[0]]}`?" if close else all_of_them)


def parse_source_url(text: str) -> str:
    # A list of settings such as `host=… password=…` would be taken for a name in messages.
    if not re.match(r"postgres(ql)?://", text):
        raise option_error("url", "is not a URL of PostgreSQL", "For example: postgresql://user@host:5432/database")
    return text


def parse_choice(name: str, text: str, values: Sequence[str]) -> str:
    """Return the value if it is one of these words; refuse it otherwise."""
    word = text.strip().lower()
    if word not in values:
        raise option_error(name, "has an unknown value", f"Use one of {', '.join(values)}.")
    return word


def parse_table_name(name: str, text: str) -> TableId:
    match = re.fullmatch(rf"({QUOTED}|[^\".]+)\.({QUOTED}|[^\".]+)", text.strip())
    if match is None:
        raise option_error(
            name,
            "is not the name of a table with its schema",
            'For example: public.orders. Quote a name with a dot in it: "a.b"."c".',
        )
    return TableId(unquote(match[1]), unquote(match[2]))


def parse_column_names(name: str, text: str) -> tuple[str, ...]:
    if not re.fullmatch(rf"{_COLUMN}(,{_COLUMN})*", text):
        raise option_error(name, "is not a list of names", 'For example: id, state, total. Quoted: "a, b", "c".')
    names = tuple(unquote(name.strip()) for name in re.findall(rf"(?:{QUOTED}|[^\",])+", text))
    if len(set(names)) < len(names):
        raise option_error(name, "has a name twice", "Name each once.")
    return names


def unquote(name: str) -> str:
    """Return a name without the quotes around it, if it has some."""
    return name[1:-1].replace('""', '"') if name.startswith('"') else name


def parse_size(name: str, text: str) -> int:
    match = re.fullmatch(r"([0-9]+) ?([A-Za-z]*)", text.strip())
    unit = match and {unit.lower(): size for unit, size in _UNITS.items()}.get(match[2].lower())
    if match is None or not unit or not 0 < int(match[1]) * unit < 1 << 60:
        raise option_error(
            name, "is not a size", f"For example: 64MiB; the units are {', '.join(filter(None, _UNITS))}."
        )
    return int(match[1]) * unit


def parse_count(name: str, text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text.strip()):
        raise option_error(name, "is not a whole number above 0", "For example: 200")
    return int(text)


def parse_seconds(name: str, text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", text.strip()) or float(text) <= 0:
        raise option_error(name, "is not a number of seconds", "For example: 3600")
    return float(text)


class WithoutTraceback:
    """Raise our errors without a traceback, from a method that Spark calls.

    Spark prints the whole traceback of a Python source before the error's text, with those of its causes. A user who
    misspelled an option has no use for our lines. Other exceptions are left as they are, because there the lines help.
    """

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _trace: TracebackType | None) -> None:
        if isinstance(error, TailraceError):
            raise error.with_traceback(None) from None


without_traceback = WithoutTraceback()
