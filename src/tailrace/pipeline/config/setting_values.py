"""Check single values of the settings file, and word their problems.

Sizes and durations are read as people write them: `50GB`, `128MiB`, `7d`, `10min`. A number without a unit is bytes or
seconds. An ambiguous value is refused, never rounded or guessed: `5m` could be minutes or months, and `50G` could be
either kind of gigabyte.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, SecretStr
from pydantic_core import PydanticCustomError

from tailrace.capture.postgres import address
from tailrace.errors import ConfigError
from tailrace.pipeline.config.document import Loc, Number
from tailrace.storage.objects import ENDPOINT, STORES_HINT, ObjectPath

LOG_BYTES_MIN = 1 << 20
"""The smallest log limit. A smaller one lacks its unit: `max_bytes: 50` would make the log trim everything."""
FILE_SIZE_MAX = 256 << 20
"""The largest size that a lake table's files may aim at."""


def refusal(message: str, hint: str, at: Loc = ()) -> PydanticCustomError:
    """Return an error for pydantic; `at` is the path below the checked value."""
    # The text travels as a value, because a template would take braces in it for placeholders.
    return PydanticCustomError("refused", "{message}", {"message": message, "hint": hint, "at": at})


def refuse(errors: Iterable[PydanticCustomError]) -> None:
    """Raise all these errors as one.

    A model can give pydantic only one error, so the others travel inside it.
    """
    contexts = [dict(refusal.context or {}) for refusal in errors]
    if contexts:
        raise PydanticCustomError("refused", "{message}", {**contexts[0], "more": contexts[1:]})


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,63}", name):
        raise refusal("must be 1 to 63 letters, digits, `_` or `-`", "For example: `name: shop`.")
    return name


def _check_slot_name(name: str) -> str:
    if not address.is_slot_name(name):
        raise refusal(f"must be {address.SLOT_FORM}", "For example: `slot: {name: tailrace_shop}`.")
    return name


def _check_publication_name(name: str) -> str:
    if not address.is_publication_name(name):
        raise refusal(f"must be {address.PUBLICATION_FORM}", "For example: `publication: {name: tailrace_shop}`.")
    return name


_NOT_YET = {"mysql": "MySQL", "mariadb": "MariaDB", "sqlserver": "SQL Server", "mssql": "SQL Server"}
"""Planned sources, by the scheme of their URL."""
_URL_HINT = "It looks like `postgresql://user:${PGPASSWORD}@host:5432/database`."
_ENCODE_HINT = (
    "Percent-encode special characters in user and password (`@` is %40, `/` is %2F, `%` is %25), "
    "or write the password as `${PGPASSWORD}`: a variable there is encoded for you."
)


def _check_url(url: str) -> str:
    """Refuse a URL that libpq cannot parse; libpq's own messages quote parts of it."""
    scheme, separator, _ = url.partition("://")
    if not separator or not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
        raise refusal("must be a URL that begins with `postgresql://`", _URL_HINT)
    if scheme.split("+")[0].lower() in _NOT_YET:
        kind = _NOT_YET[scheme.split("+")[0].lower()]
        raise refusal(f"names {kind} (`{scheme}://`), which is not available yet", "Use a `postgresql://` source.")
    if scheme not in ("postgresql", "postgres"):
        raise refusal(f"begins with `{scheme}://`, which is not a known source", _URL_HINT)
    wrong = address.find_url_problem(url)
    if wrong is not None:
        raise refusal(wrong.value, f"{_URL_HINT} {_ENCODE_HINT}" if wrong is address.UrlProblem.PORT else _ENCODE_HINT)
    return url


_BRACKETS = re.compile(r"\[!?\]?[^\]]*\]")
"""Finds one `[…]` of a glob. As in fnmatch, a `]` right after the opening is a literal one."""


def split_glob(glob: str) -> Iterator[tuple[str, str]]:
    """Yield every split of a glob into schema and table.

    There is one at each dot outside brackets.
    """
    hidden = _BRACKETS.sub(lambda found: "x" * len(found.group()), glob)
    for at, character in enumerate(hidden):
        if character == ".":
            yield glob[:at], glob[at + 1 :]


def _check_brackets(glob: str) -> str:
    if "[" in _BRACKETS.sub("", glob):
        raise refusal(
            f"holds `{glob}`, which opens a bracket and does not close it",
            "Close it, or write `[[]` for a bracket that is part of a name.",
        )
    return glob


def _check_glob(glob: str) -> str:
    _check_brackets(glob)
    splits = list(split_glob(glob))
    if not splits:
        raise refusal(
            f"holds `{glob}`, which names no schema",
            f'Write schema and table with a dot between them: "public.{glob or "*"}".',
        )
    if not any(schema and table for schema, table in splits):
        raise refusal(
            f"holds `{glob}`, which lacks a schema or a table",
            'Write both, with a dot between them; `*` matches any: "public.*".',
        )
    return glob


def check_format(name: object) -> object:
    if isinstance(name, str) and name not in ("delta", "iceberg"):
        raise refusal(f"names `{name}`, which is not a table format", "Use `format: delta`, or `format: iceberg`.")
    return name


_NAMES_HINT = "For example: `{schema}/{table}`, `{pipeline}/{table}` or `{pipeline}/{schema}/{table}`."


def _check_template(template: str) -> str:
    """Check a path template of at most three folders.

    Table names are encoded where necessary when they are inserted.
    """
    parts = re.sub(r"\{(schema|table|pipeline)\}", "x", template).split("/")
    if len(parts) > 3 or not all(re.fullmatch(r"[A-Za-z0-9_=-][A-Za-z0-9_.=-]*", part) for part in parts):
        raise refusal(
            "must be one to three folder names of letters, digits, `_-=.`, {schema}, {table} and {pipeline}",
            _NAMES_HINT,
        )
    if "_delta_log" in parts:
        raise refusal("names `_delta_log`, which is Delta's own", _NAMES_HINT)
    return template


def _check_templates(template: str) -> str:
    """Check a path template that serves many tables."""
    if "{table}" not in _check_template(template):
        raise refusal("lacks {table}: all tables would share one folder", _NAMES_HINT)
    return template


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_BUCKET = re.compile(r"s3a?://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/|$)")


_LAKE_HINT = (
    "Give a plain path, without `…://`; on a cluster, a path in a file system that all machines share. Only the log "
    "may be in a store (`log: s3://…`). See docs/guides/object-stores.md."
)


def check_folder(value: object) -> object:
    if not isinstance(value, str):
        return value
    if not value.strip() or not value.isprintable():
        raise refusal("must be the path of a folder", "For example: `./shop/changes`.")
    if _URL.match(value):
        raise refusal("must be a folder: lake tables need a file system, and are not in object stores", _LAKE_HINT)
    try:
        return Path(value).resolve()
    except (OSError, RuntimeError):
        raise refusal("is a path with a loop of symbolic links", "Check the symbolic links in it.") from None


def _check_log_path(value: object) -> Path | ObjectPath:
    """Return a folder, or a path in an object store."""
    if not isinstance(value, str) or not _URL.match(value):
        folder = check_folder(value)
        if isinstance(folder, (Path, ObjectPath)):
            return folder
        raise refusal("must be the path of a folder", "For example: `./shop/changes`.")
    if importlib.util.find_spec("obstore") is None:
        raise refusal("needs the package `obstore`", "Install it: `pip install 'tailrace[objects]'`.")
    try:
        if _BUCKET.match(value) and value.isprintable():
            return ObjectPath.parse(value)
    except ConfigError:
        pass
    raise refusal(
        "must be the path of a folder, or `s3://bucket/prefix`",
        f"For example: `s3://my-bucket/shop/changes`. {STORES_HINT}",
    )


def _check_endpoint(value: str) -> str:
    if not ENDPOINT.fullmatch(value):
        raise refusal("must be only the address of an S3 server", "For example: `https://minio.example:9000`.")
    return value


def _text_of(value: object, hint: str) -> str:
    if isinstance(value, Number):
        return value.text
    if isinstance(value, str):
        return value
    problem = "has no value" if value is None else "must be a number, with or without a unit"
    raise refusal(problem, hint)


def _check_size(value: object) -> int:
    try:
        size = parse_size(_text_of(value, SIZE_HINT))
    except InvalidQuantity as refused:
        raise refusal(f"{refused}", refused.hint) from None
    if size < LOG_BYTES_MIN:
        raise refusal("is less than 1 MiB", f"Was a unit forgotten? {SIZE_HINT}")
    return size


def _check_duration(value: object) -> float:
    try:
        return parse_duration(_text_of(value, DURATION_HINT))
    except InvalidQuantity as refused:
        raise refusal(f"{refused}", refused.hint) from None


def _check_count(value: object) -> int:
    text = _text_of(value, "For example: `commits: 4096`.")
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
        raise refusal("must be a whole number, 1 or larger", "For example: `commits: 4096`.")
    return int(text)


def _check_connections(value: object) -> int:
    text = _text_of(value, "For example: `connections: 4`.")
    if not re.fullmatch(r"[1-9][0-9]?", text):
        raise refusal("must be a whole number from 1 to 99", "For example: `connections: 4`.")
    return int(text)


def _check_columns(names: tuple[str, ...]) -> tuple[str, ...]:
    if len({name.lower() for name in names}) < len(names):
        raise refusal("names a column twice", "Name each once, for example: `partition_by: [region, day]`.")
    return names


def _check_file_size(value: object) -> int:
    size = _check_size(value)
    if size > FILE_SIZE_MAX:
        raise refusal("is more than 256 MiB", "Give at most `file: 256MiB`: no file of a lake table is larger.")
    return size


def _check_share(value: object) -> float:
    example = "For example: `budget: 10%`."
    text = _text_of(value, example)
    if not re.fullmatch(r"[1-9][0-9]?%", text):
        raise refusal("must be a share of one core, from 1% to 99%", example)
    return int(text[:-1]) / 100


def _check_long_ago(value: object) -> float | None:
    """Return a duration of at least an hour, or None."""
    if _is_word_none(value):
        return None
    seconds = _check_duration(value)
    if seconds < 3600:
        raise refusal("must be an hour or longer", "For example: `remove_after: 7d`.")
    return seconds


def check_spark_setting(value: object) -> object:
    """Return a Spark setting as text, as Spark takes it."""
    if isinstance(value, Number):
        return value.text
    return str(value).lower() if isinstance(value, bool) else value


def _is_word_none(value: object) -> bool:
    return isinstance(value, str) and value.strip().lower() == "none"


Size = Annotated[int, BeforeValidator(_check_size)]
Limit = Annotated[int | None, BeforeValidator(lambda value: None if _is_word_none(value) else _check_size(value))]
Duration = Annotated[float, BeforeValidator(_check_duration)]
LongAgo = Annotated[float | None, BeforeValidator(_check_long_ago)]
FileSize = Annotated[int, BeforeValidator(_check_file_size)]
Share = Annotated[float, BeforeValidator(_check_share)]
Age = Annotated[float | None, BeforeValidator(lambda value: None if _is_word_none(value) else _check_duration(value))]
Count = Annotated[int, BeforeValidator(_check_count)]
Connections = Annotated[int, BeforeValidator(_check_connections)]
LoadModeName = Literal["initial", "always", "initial_only", "when_needed", "schema_only", "never"]
"""The load mode of a table; see docs/guides/loading.md."""
TableModeName = Literal["mirror", "history", "append"]
"""The mode of a lake table; see docs/guides/modes.md."""
MetadataName = Literal["_op", "_seq", "_position", "_tx", "_tx_index", "_committed_at"]
"""Metadata columns, as in `tables.spec.METADATA`."""
BadRow = Literal["stop", "dead-letter"]
"""The treatment of a change that its lake table cannot take; see docs/guides/dead-letters.md."""
Name = Annotated[str, AfterValidator(_check_name)]
SlotName = Annotated[str, AfterValidator(_check_slot_name)]
PublicationName = Annotated[str, AfterValidator(_check_publication_name)]
Url = Annotated[SecretStr, AfterValidator(lambda secret: SecretStr(_check_url(secret.get_secret_value())))]
Glob = Annotated[str, AfterValidator(_check_glob)]
Template = Annotated[str, AfterValidator(_check_template)]
Templates = Annotated[str, AfterValidator(_check_templates)]
PrefixGlob = Annotated[str, AfterValidator(_check_brackets)]
Folder = Annotated[Path, BeforeValidator(check_folder)]
LogFolder = Annotated[Path | ObjectPath, PlainValidator(_check_log_path)]
Endpoint = Annotated[str, AfterValidator(_check_endpoint)]
Columns = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], AfterValidator(_check_columns)]


SIZE_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip
DURATION_UNITS = {"": 1, "s": 1, "min": 60, "h": 3_600, "d": 86_400}
BYTES_MAX = 1 << 60
SECONDS_MAX = 100 * 365 * 86_400

SIZE_HINT = "For example: `50GB`; the units are B, kB, MB, GB, TB and KiB, MiB, GiB, TiB."
DURATION_HINT = "For example: `7d`; the units are s, min, h and d."

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)")


class InvalidQuantity(ValueError):
    """A text that is not such a quantity.

    The message says why, without quoting the text; `hint` shows a valid one.
    """

    def __init__(self, why: str, hint: str) -> None:
        super().__init__(why)
        self.hint = hint


def parse_size(text: str) -> int:
    """Return a size in bytes."""
    size = _parse(text, SIZE_UNITS, "is not a size", SIZE_HINT)
    if size > BYTES_MAX:
        raise InvalidQuantity("is more than any disk holds", SIZE_HINT)
    return int(size)


def parse_duration(text: str) -> float:
    """Return a duration in seconds."""
    seconds = _parse(text, DURATION_UNITS, "is not a length of time", DURATION_HINT)
    if seconds > SECONDS_MAX:
        raise InvalidQuantity("is more than a hundred years", DURATION_HINT)
    return seconds


def _parse(text: str, units: dict[str, int], why: str, hint: str) -> float:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[2].lower() not in units:
        raise InvalidQuantity(why, hint)
    return float(match[1]) * units[match[2].lower()]
