"""What is written in options, as values; each refused that cannot be meant, with the option's name and an example.

What an option is called decides what is meant, a table as it is or a change log. So one that is misspelled is looked
for among those of both.
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
    """The error for an option."""
    return ConfigError(f"the option `{name}` {why}", hint=hint)


def as_option_error(error: TailraceError) -> TailraceError:
    """Return the error with the hint for a reader who has options and no settings file."""
    return type(error)(error.message, hint=error.option_hint, **error.fields) if error.option_hint else error


def canonical_options(given: Mapping[str, str], options: Sequence[str]) -> dict[str, str]:
    """The options under the names they are documented by; Spark does not tell upper case from lower."""
    known = {name.lower(): name for name in options}
    if any(name.lower().startswith("option.") for name in given):  # as Spark stores those of a table
        raise ConfigError(
            "a table of Spark's catalog cannot be of this format: Spark reads it without its options",
            hint="Make a view: CREATE TEMPORARY VIEW … USING cdc OPTIONS (…), with the same options.",
        )
    for name in given:
        if name.lower() not in known:
            raise _unknown(name)
    return {known[name.lower()]: value for name, value in given.items()}


def _unknown(name: str) -> ConfigError:
    known = {name.lower(): name for name in (*TABLE_OPTIONS, *LOG_OPTIONS)}
    if name.lower() in known:
        only = "is for a table of a database as it is, and others here are for a change log"
        return option_error(known[name.lower()], only, "Leave it out.")
    all_of_them = (
        f"The options of a table as it is are {', '.join(TABLE_OPTIONS)}; those of a change log are "
        f"{', '.join(LOG_OPTIONS)}."
    )
    close = difflib.get_close_matches(name.lower(), known, n=1)
    return option_error(name, "is not known", f"Did you mean `{known[close[0]]}`?" if close else all_of_them)


def parse_source_url(text: str) -> str:
    # A list of settings such as `host=… password=…` would be taken for a name in messages.
    if not re.match(r"postgres(ql)?://", text):
        raise option_error("url", "is not a URL of PostgreSQL", "For example: postgresql://user@host:5432/database")
    return text


def parse_choice(name: str, text: str, values: Sequence[str]) -> str:
    """One of these words."""
    found = text.strip().lower()
    if found not in values:
        raise option_error(name, "is none of its values", f"They are {', '.join(values)}.")
    return found


def parse_table_name(name: str, text: str) -> TableId:
    match = re.fullmatch(rf"({QUOTED}|[^\".]+)\.({QUOTED}|[^\".]+)", text.strip())
    if match is None:
        raise option_error(
            name,
            "is not the name of a table with its schema",
            'For example: public.orders. A name with a dot in it is quoted: "a.b"."c".',
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
    """A name without the quotes around it, if it has some."""
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
    """Around what Spark calls."""

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _trace: TracebackType | None) -> None:
        if isinstance(error, TailraceError):
            raise error.with_traceback(None) from None


without_traceback = WithoutTraceback()
