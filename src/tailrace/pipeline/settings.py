"""The settings file: what it may say, and every mistake in it with its line and remedy.

A `PipelineSettings` that exists is usable as far as the file alone can tell: nothing here opens a connection.
Loading and checking read the file the same way, so a file that checks clean loads. The URL never stands in a
`repr`, an error or a problem, and neither does any other value that could hold a secret.

Reading goes: bytes → YAML nodes (which know their lines) → plain values with variables replaced → the models.
The file is longer than most because a key, its rule and the words for breaking it change together.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args
from urllib.parse import quote

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from tailrace.errors import ConfigError
from tailrace.model.policies import Policies, Policy
from tailrace.pipeline.quantities import DURATION_HINT, SIZE_HINT, Refused, parse_duration, parse_size

if TYPE_CHECKING:
    # Importing them costs an import of pyarrow, which `tailrace check` has no use for.
    from tailrace.changelog.keeper import Keeping
    from tailrace.model.schema import TableId
    from tailrace.tables.features import Features
    from tailrace.tables.forms import Form
    from tailrace.tables.layout import Layout

FILE_BYTES_MAX = 1 << 20
VALUES_MAX = 10_000
"""An alias of an alias of an alias can stand for more values than fit in memory."""
DEPTH_MAX = 20
PUBLICATION_BYTES_MAX = 63 - len("_inserts")
"""PostgreSQL cuts longer names without a word. The second publication, for tables that can publish inserts
only, is named after the first."""
LOG_BYTES_MIN = 1 << 20
"""A smaller limit is a unit that was forgotten: `max_bytes: 50` would make the log let go of everything."""
FILE_SIZE_MAX = 256 << 20
"""Of a file of a lake table: none is written larger (`tables/staging.py`)."""
SEALS_PER_MAX_BYTES = 8
"""Only sealed commits can be let go, so a log with a limit seals before much of it is unsealed."""

Loc = tuple[str | int, ...]
"""Where a value stands: `("source", "tables", 0)` is the first glob."""


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


def _refusal(message: str, hint: str, at: Loc = ()) -> PydanticCustomError:
    """`at`: where below the value that was looked at."""
    # The text travels as a value: a template would read braces in it as places to fill.
    return PydanticCustomError("refused", "{message}", {"message": message, "hint": hint, "at": at})


# ---- values ----------------------------------------------------------------------------------------------


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,63}", name):
        raise _refusal("must be 1 to 63 letters, digits, `_` or `-`", "For example: `name: shop`.")
    return name


def _check_slot_name(name: str) -> str:
    if not re.fullmatch(r"[a-z0-9_]{1,63}", name):
        raise _refusal(
            "must be 1 to 63 lower-case letters, digits or `_`, as the server demands of slots",
            "For example: `slot: {name: tailrace_shop}`.",
        )
    return name


def _check_publication_name(name: str) -> str:
    fits = 0 < len(name.encode()) <= PUBLICATION_BYTES_MAX
    if not fits or not name.isprintable() or re.search(r"[\"'\\]", name):
        raise _refusal(
            f"must be 1 to {PUBLICATION_BYTES_MAX} bytes of printable text without quotes and backslashes",
            "For example: `publication: {name: tailrace_shop}`.",
        )
    return name


_NOT_YET = {"mysql": "MySQL", "mariadb": "MariaDB", "sqlserver": "SQL Server", "mssql": "SQL Server"}
"""Sources that are planned, by the scheme of their URL."""
_URL_HINT = "It looks like `postgresql://user:${PGPASSWORD}@host:5432/database`."
_ENCODE_HINT = (
    "Percent-encode special characters in user and password (`@` is %40, `/` is %2F, `%` is %25), "
    "or write the password as `${PGPASSWORD}`: a variable there is encoded for you."
)


def _check_url(url: str) -> str:
    """What libpq would stumble over, said before it does: its own messages quote pieces of the URL."""
    scheme, separator, rest = url.partition("://")
    if not separator or not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
        raise _refusal("must be a URL that begins with `postgresql://`", _URL_HINT)
    if scheme.split("+")[0].lower() in _NOT_YET:
        kind = _NOT_YET[scheme.split("+")[0].lower()]
        raise _refusal(
            f"names {kind} (`{scheme}://`), which is not available yet", "Use a `postgresql://` source."
        )
    if scheme not in ("postgresql", "postgres"):
        raise _refusal(f"begins with `{scheme}://`, which is no source we know", _URL_HINT)
    if re.search(r"[\s\x00-\x1f\x7f]", url):
        raise _refusal("must not hold spaces or control characters", _ENCODE_HINT)
    authority = re.split(r"[/?]", rest, maxsplit=1)[0]
    if authority.count("@") > 1 or re.search(r"%(?![0-9A-Fa-f]{2})", authority):
        raise _refusal("holds a special character in user or password", _ENCODE_HINT)
    for host in authority.rpartition("@")[2].split(","):
        port = re.sub(r"^(\[[^\]]*\]|[^:]*):?", "", host)
        if port and not (re.fullmatch(r"[0-9]{1,5}", port) and 0 < int(port) < 65536):
            raise _refusal("has a port that is not a number from 1 to 65535", f"{_URL_HINT} {_ENCODE_HINT}")
    return url


_BRACKETS = re.compile(r"\[!?\]?[^\]]*\]")
"""One `[…]` of a glob; as in fnmatch a `]` right after the opening stands for itself."""


def _splits(glob: str) -> Iterator[tuple[str, str]]:
    """Every way to read a glob as schema and table: at each dot that stands outside brackets."""
    hidden = _BRACKETS.sub(lambda found: "x" * len(found.group()), glob)
    for at, letter in enumerate(hidden):
        if letter == ".":
            yield glob[:at], glob[at + 1 :]


def _check_brackets(glob: str) -> str:
    if "[" in _BRACKETS.sub("", glob):
        raise _refusal(
            f"holds `{glob}`, which opens a bracket and does not close it",
            "Close it, or write `[[]` for a bracket that is part of a name.",
        )
    return glob


def _check_glob(glob: str) -> str:
    _check_brackets(glob)
    splits = list(_splits(glob))
    if not splits:
        raise _refusal(
            f"holds `{glob}`, which names no schema",
            f'Write schema and table with a dot between them: "public.{glob or "*"}".',
        )
    if not any(schema and table for schema, table in splits):
        raise _refusal(
            f"holds `{glob}`, which lacks a schema or a table",
            'Write both, with a dot between them; `*` stands for any: "public.*".',
        )
    return glob


def _check_format(name: object) -> object:
    if name == "iceberg":
        raise _refusal("names `iceberg`, which is not available yet", "Use `format: delta`.")
    if isinstance(name, str) and name != "delta":
        raise _refusal(f"names `{name}`, which is no table format", "Use `format: delta`.")
    return name


_NAMES_HINT = "For example: `{schema}/{table}`, `{pipeline}/{table}` or `{pipeline}/{schema}/{table}`."


def _check_template(template: str) -> str:
    """Folders' names, at most three deep. What a table's name brings in is encoded where it must be."""
    parts = re.sub(r"\{(schema|table|pipeline)\}", "x", template).split("/")
    if len(parts) > 3 or not all(re.fullmatch(r"[A-Za-z0-9_=-][A-Za-z0-9_.=-]*", part) for part in parts):
        raise _refusal(
            "must be one to three folders' names of letters, digits, `_-=.`, {schema}, {table} and {pipeline}",
            _NAMES_HINT,
        )  # fmt: skip
    if "_delta_log" in parts:
        raise _refusal("names `_delta_log`, which is Delta's own", _NAMES_HINT)
    return template


def _check_templates(template: str) -> str:
    """One for many tables."""
    if "{table}" not in _check_template(template):
        raise _refusal("lacks {table}, so that all tables would have one folder", _NAMES_HINT)
    return template


def _check_folder(given: object) -> object:
    if not isinstance(given, str):
        return given
    if not given.strip() or not given.isprintable():
        raise _refusal("must be a folder's path", "For example: `./shop/changes`.")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", given):
        raise _refusal(
            "must be a folder on this machine; object stores are not available yet",
            "Give a plain path, without `…://`.",
        )
    try:
        return Path(given).resolve()
    except (OSError, RuntimeError):
        raise _refusal("is a path that leads in a circle", "Look at the symbolic links in it.") from None


@dataclass(frozen=True)
class Number:
    """A number as the file has it; whoever takes numbers knows what they count."""

    text: str


def _written(given: object, hint: str) -> str:
    if isinstance(given, Number):
        return given.text
    if isinstance(given, str):
        return given
    said = "has no value" if given is None else "must be a number, with or without a unit"
    raise _refusal(said, hint)


def _check_size(given: object) -> int:
    try:
        size = parse_size(_written(given, SIZE_HINT))
    except Refused as refused:
        raise _refusal(f"{refused}", refused.hint) from None
    if size < LOG_BYTES_MIN:
        raise _refusal("is less than 1 MiB", f"Was a unit forgotten? {SIZE_HINT}")
    return size


def _check_duration(given: object) -> float:
    try:
        return parse_duration(_written(given, DURATION_HINT))
    except Refused as refused:
        raise _refusal(f"{refused}", refused.hint) from None


def _check_count(given: object) -> int:
    text = _written(given, "For example: `commits: 4096`.")
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
        raise _refusal("must be a whole number from 1 on", "For example: `commits: 4096`.")
    return int(text)


def _check_connections(given: object) -> int:
    text = _written(given, "For example: `connections: 4`.")
    if not re.fullmatch(r"[1-9][0-9]?", text):
        raise _refusal("must be a whole number from 1 to 99", "For example: `connections: 4`.")
    return int(text)


def _check_columns(names: tuple[str, ...]) -> tuple[str, ...]:
    if len({name.lower() for name in names}) < len(names):
        raise _refusal("names a column twice", "Name each once, for example: `partition_by: [region, day]`.")
    return names


def _check_file_size(given: object) -> int:
    size = _check_size(given)
    if size > FILE_SIZE_MAX:
        raise _refusal("is more than 256 MiB", "No file of a lake table is written larger: `file: 256MiB`.")
    return size


def _check_share(given: object) -> float:
    example = "For example: `budget: 10%`."
    text = _written(given, example)
    if not re.fullmatch(r"[1-9][0-9]?%", text):
        raise _refusal("must be a share of the time, from 1% to 99%", example)
    return int(text[:-1]) / 100


def _check_long_ago(given: object) -> float | None:
    """A duration of at least an hour, or none."""
    if _is_none(given):
        return None
    found = _check_duration(given)
    if found < 3600:
        raise _refusal("must be an hour or longer", "For example: `remove_after: 7d`.")
    return found


def _check_spark_setting(given: object) -> object:
    """A setting of Spark's as Spark takes it: as text."""
    if isinstance(given, Number):
        return given.text
    return str(given).lower() if isinstance(given, bool) else given


def _is_none(given: object) -> bool:
    return isinstance(given, str) and given.strip().lower() == "none"


Size = Annotated[int, BeforeValidator(_check_size)]
Limit = Annotated[int | None, BeforeValidator(lambda given: None if _is_none(given) else _check_size(given))]
Duration = Annotated[float, BeforeValidator(_check_duration)]
LongAgo = Annotated[float | None, BeforeValidator(_check_long_ago)]
FileSize = Annotated[int, BeforeValidator(_check_file_size)]
Share = Annotated[float, BeforeValidator(_check_share)]
Age = Annotated[
    float | None, BeforeValidator(lambda given: None if _is_none(given) else _check_duration(given))
]
Count = Annotated[int, BeforeValidator(_check_count)]
Connections = Annotated[int, BeforeValidator(_check_connections)]
Mode = Literal["initial", "always", "initial_only", "when_needed", "schema_only", "never"]
"""When a table is loaded; docs/guides/loading.md says what each means."""
Kept = Literal["mirror", "history", "append"]
"""What a lake table holds; docs/guides/modes.md."""
MetadataName = Literal["_op", "_seq", "_position", "_tx", "_tx_index", "_committed_at"]
"""As `tables.forms.METADATA`."""
BadRow = Literal["stop", "dead-letter"]
"""What becomes of a change that its lake table cannot take; docs/guides/dead-letters.md."""
Name = Annotated[str, AfterValidator(_check_name)]
SlotName = Annotated[str, AfterValidator(_check_slot_name)]
PublicationName = Annotated[str, AfterValidator(_check_publication_name)]
Url = Annotated[SecretStr, AfterValidator(lambda secret: SecretStr(_check_url(secret.get_secret_value())))]
Glob = Annotated[str, AfterValidator(_check_glob)]
Template = Annotated[str, AfterValidator(_check_template)]
Templates = Annotated[str, AfterValidator(_check_templates)]
PrefixGlob = Annotated[str, AfterValidator(_check_brackets)]
Folder = Annotated[Path, BeforeValidator(_check_folder)]
Columns = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], AfterValidator(_check_columns)]


# ---- models ----------------------------------------------------------------------------------------------

_FROZEN = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class SlotSettings(BaseModel):
    """The replication slot: named by the log's id unless named here; created if missing unless forbidden."""

    model_config = _FROZEN
    name: SlotName | None = None
    create: bool = True

    @model_validator(mode="after")
    def _is_findable(self) -> SlotSettings:
        _refuse_nameless(self, "slot")
        return self


class PublicationSettings(BaseModel):
    """The publication: named by the log's id unless named here; created if missing unless forbidden."""

    model_config = _FROZEN
    name: PublicationName | None = None
    create: bool = True

    @model_validator(mode="after")
    def _is_findable(self) -> PublicationSettings:
        _refuse_nameless(self, "publication")
        return self


def _refuse_nameless(given: SlotSettings | PublicationSettings, what: str) -> None:
    if not given.create and given.name is None:
        raise _refusal(
            f"`create: false` needs a `name`: there is no other way to know which {what} is meant",
            f"Add `name:`, the name of the {what} you made.",
        )


class SourceSettings(BaseModel):
    """The database and which of its tables are copied."""

    model_config = _FROZEN
    secret_url: Url = Field(alias="url")
    tables: tuple[Glob, ...] = Field(min_length=1)
    exclude: tuple[Glob, ...] = ()
    messages: tuple[PrefixGlob, ...] = ("*",)
    origin: Literal["any", "none"] = "any"
    invalid_text: Literal["refuse", "replace"] = "refuse"
    slot: SlotSettings = SlotSettings()
    publication: PublicationSettings = PublicationSettings()

    @property
    def url(self) -> str:
        """The URL with its password: hand it to the driver and to nothing else."""
        return self.secret_url.get_secret_value()


class RetentionSettings(BaseModel):
    """What the log keeps of rows that nobody needs any more: the younger ones, and not more than so many."""

    model_config = _FROZEN
    age: Age = 7 * 86_400.0
    bytes: Limit = None


class SealSettings(BaseModel):
    """When commits become Parquet files: past any one of these."""

    model_config = _FROZEN
    bytes: Size = 128 << 20
    commits: Count = 4_096
    age: Duration = 600.0


class LogSettings(BaseModel):
    """The change log: its folder, and how it is kept in order."""

    model_config = _FROZEN
    path: Folder
    max_bytes: Limit = None
    retention: RetentionSettings = RetentionSettings()
    seal: SealSettings = SealSettings()
    grace: Duration = 300.0

    @property
    def keeping(self) -> Keeping:
        """The same for the one who keeps the log in order."""
        from tailrace.changelog.keeper import Keeping
        from tailrace.changelog.retention import Policy

        seal_bytes = self.seal.bytes
        if self.max_bytes is not None:
            seal_bytes = min(seal_bytes, self.max_bytes // SEALS_PER_MAX_BYTES)
        policy = Policy(age_seconds=self.retention.age, bytes=self.retention.bytes, max_bytes=self.max_bytes)
        return Keeping(
            seal_bytes=seal_bytes, seal_commits=self.seal.commits, seal_seconds=self.seal.age,
            grace_seconds=self.grace, policy=policy,
        )  # fmt: skip


class EvolutionSettings(BaseModel):
    """What to do about each kind of change to a table's shape; docs/guides/evolution.md says what each means."""

    model_config = _FROZEN
    add: Literal["apply", "stop", "refresh"] = "apply"
    drop: Literal["keep-null", "apply", "stop", "refresh"] = "keep-null"
    rename: Literal["apply", "stop", "refresh"] = "apply"
    widen: Literal["apply", "stop", "refresh"] = "apply"
    retype: Literal["refresh", "stop"] = "refresh"
    rewrite: Literal["refresh", "stop"] = "refresh"
    key: Literal["refresh", "stop"] = "refresh"
    recreate: Literal["refresh", "stop"] = "refresh"
    partition: Literal["refresh", "stop"] = "refresh"

    @property
    def policies(self) -> Policies:
        return Policies(**{kind: Policy(said) for kind, said in self.model_dump().items()})


class UpkeepSettings(BaseModel):
    """What is done for lake tables besides changing their rows; docs/guides/upkeep.md."""

    model_config = _FROZEN
    join: bool = True
    file: FileSize = 128 << 20
    budget: Share = 0.1
    remove_after: LongAgo = None


class RuleSettings(BaseModel):
    """What some tables are to be; where it says nothing, what `tables` says for all counts."""

    model_config = _FROZEN
    mode: Kept | None = None
    soft_delete: bool | None = None
    metadata: tuple[MetadataName, ...] | None = None
    partition_by: Columns | None = None
    on_bad_row: BadRow | None = None
    name: Template | None = None
    deletion_vectors: bool | None = None
    column_mapping: bool | None = None
    columns: dict[str, Annotated[str, Field(min_length=1)]] = {}

    @model_validator(mode="after")
    def _names_are_apart(self) -> RuleSettings:
        seen: dict[str, str] = {}
        for old, new in self.columns.items():
            if "\0" in new:
                raise _refusal("must not hold a zero byte", "No table can have such a column.", ("columns", old))
            if (other := seen.setdefault(new.lower(), old)) != old:
                raise _refusal(f"is what `{other}` is called, too", "Give each its own name.", ("columns", old))
        return self


class TablesSettings(BaseModel):
    """The lake tables: each in its folder, `<path>/<schema>/<table>` unless named otherwise."""

    model_config = _FROZEN
    _pipeline: str = PrivateAttr(default="")
    format: Annotated[Literal["delta"], BeforeValidator(_check_format)] = "delta"
    engine: Literal["delta-rs", "spark"] = "delta-rs"
    path: Folder
    mode: Kept = "mirror"
    soft_delete: bool = False
    metadata: tuple[MetadataName, ...] = ()
    partition_by: Columns = ()
    names: Templates = "{schema}/{table}"
    rules: dict[Glob, RuleSettings] = {}
    evolution: EvolutionSettings = EvolutionSettings()
    upkeep: UpkeepSettings = UpkeepSettings()
    on_bad_row: BadRow = "stop"
    deletion_vectors: bool = False
    column_mapping: bool = False

    @model_validator(mode="after")
    def _only_mirrors_mark(self) -> TablesSettings:
        asked: list[tuple[Loc, bool | None, Kept]] = [((), self.soft_delete, self.mode)]
        asked += [(("rules", glob), rule.soft_delete, rule.mode or self.mode) for glob, rule in self.rules.items()]
        for at, marks, mode in asked:
            if marks and mode != "mirror":
                raise _refusal(
                    f"is for `mode: mirror`: a table in `mode: {mode}` keeps what is deleted anyway",
                    "Remove it, or write `mode: mirror`.", (*at, "soft_delete"),
                )  # fmt: skip
        return self

    @model_validator(mode="after")
    def _spark_partitions_nothing(self) -> TablesSettings:
        if self.engine != "spark":
            return self
        asked: list[tuple[Loc, object]] = [((), self.partition_by)]
        asked += [(("rules", glob), rule.partition_by) for glob, rule in self.rules.items()]
        for at, wanted in asked:
            if wanted:
                raise _refusal(
                    "is not known to `engine: spark`", "Remove it, or write `engine: delta-rs`.", (*at, "partition_by")
                )
        return self

    @model_validator(mode="after")
    def _features_are_for_spark(self) -> TablesSettings:
        rules: list[tuple[Loc, TablesSettings | RuleSettings]] = [((), self)]
        rules += [(("rules", glob), rule) for glob, rule in self.rules.items()]
        for at, said in rules if self.engine != "spark" else ():
            for name in ("deletion_vectors", "column_mapping"):
                if getattr(said, name):
                    raise _refusal(
                        "is for `engine: spark`: delta-rs does not write such tables",
                        "Remove it, or write `engine: spark`.", (*at, name),
                    )  # fmt: skip
        return self

    def _features_of(self, table: TableId) -> Features:
        from tailrace.tables.features import Features

        rule = self._rule_of(table)
        return Features(
            deletion_vectors=self.deletion_vectors if rule.deletion_vectors is None else rule.deletion_vectors,
            column_mapping=self.column_mapping if rule.column_mapping is None else rule.column_mapping,
        )

    def form_of(self, table: TableId) -> Form:
        """The last pattern that matches decides; what it does not say, and without one, is as for all."""
        from tailrace.tables.forms import Form, TableMode

        rule = self._rule_of(table)
        mode = rule.mode or self.mode
        soft_delete = self.soft_delete if rule.soft_delete is None else rule.soft_delete
        metadata = self.metadata if rule.metadata is None else rule.metadata
        partition_by = self.partition_by if rule.partition_by is None else rule.partition_by
        return Form(
            mode=TableMode(mode), soft_delete=soft_delete and mode == "mirror", metadata=tuple(sorted(set(metadata))),
            columns=tuple(sorted(rule.columns.items())),
            partition_by=tuple(rule.columns.get(name, name) for name in partition_by),
        )  # fmt: skip

    def _name_of(self, table: TableId) -> str:
        return self._rule_of(table).name or self.names

    def _rule_of(self, table: TableId) -> RuleSettings:
        found = [rule for glob, rule in self.rules.items() if _glob_matches(glob, table)]
        return found[-1] if found else RuleSettings()

    @property
    def layout(self) -> Layout:
        """Where each table lies, and what it is."""
        from tailrace.tables.layout import Layout

        return Layout(
            root=self.path, form_of=self.form_of, name_of=self._name_of, pipeline=self._pipeline, engine=self.engine,
            features_of=self._features_of,
        )  # fmt: skip

    def sets_aside(self, table: TableId) -> bool:
        """Whether changes that the table cannot take are set aside; the last pattern that matches decides."""
        return (self._rule_of(table).on_bad_row or self.on_bad_row) == "dead-letter"


class LoadSettings(BaseModel):
    """How tables are read from the source: when, in which way, and how much of the source that may take."""

    model_config = _FROZEN
    mode: Mode = "initial"
    modes: dict[Glob, Mode] = {}
    way: Literal["auto", "exact", "chunked"] = "auto"
    connections: Connections = 2
    chunk: Size = 64 << 20
    time_limit: Duration = 3_600.0
    chunk_timeout: Duration = 900.0
    throttle: bool = True
    secret_standby: Url | None = Field(default=None, alias="standby")

    @model_validator(mode="after")
    def _standby_is_of_use(self) -> LoadSettings:
        if self.standby and self.way == "exact":
            raise _refusal(
                "has `standby` beside `way: exact`, and a snapshot is exported by the source itself",
                "Leave `way` out, or write `way: chunked`; or leave `standby` out.",
            )
        return self

    @property
    def standby(self) -> str | None:
        """The URL of the server to read from, with its password, if it is not the source itself."""
        return self.secret_standby.get_secret_value() if self.secret_standby else None

    def mode_of(self, table: TableId) -> Mode:
        """The last pattern that matches decides; without one, `mode`."""
        found = [mode for glob, mode in self.modes.items() if _glob_matches(glob, table)]
        return found[-1] if found else self.mode


class SparkSettings(BaseModel):
    """The Spark that the work runs on; by default one of our own, on this machine."""

    model_config = _FROZEN
    master: str | None = None
    settings: dict[str, Annotated[str, BeforeValidator(_check_spark_setting)]] = {}


class PipelineSettings(BaseModel):
    """One pipeline. `file` is where the settings came from; relative paths start at its folder."""

    model_config = _FROZEN
    name: Name
    source: SourceSettings
    log: LogSettings
    tables: TablesSettings
    load: LoadSettings = LoadSettings()
    spark: SparkSettings = SparkSettings()
    file: Path

    @model_validator(mode="before")
    @classmethod
    def _anchor_paths(cls, given: Any) -> Any:
        return _anchored(given) if isinstance(given, dict) and "file" in given else given

    @model_validator(mode="after")
    def _tables_know_the_name(self) -> PipelineSettings:
        self.tables._pipeline = self.name
        return self

    @model_validator(mode="after")
    def _folders_are_apart(self) -> PipelineSettings:
        if said := _overlap(self.log.path, self.tables.path):
            raise _refusal(said, _OVERLAP_HINT)
        return self


def _anchored(given: dict[str, Any]) -> dict[str, Any]:
    """The same settings with absolute paths, and `log: folder` written out as `log: {path: folder}`."""
    # Not `resolve`: a mounted settings file is often a link into a folder that is replaced at every change.
    file = Path(os.path.abspath(given["file"]))

    def anchor(holder: Any) -> Any:
        path = holder.get("path") if isinstance(holder, dict) else None
        if not isinstance(path, (str, Path)) or not str(path).strip() or "://" in str(path):
            return holder
        return {**holder, "path": os.path.join(file.parent, os.path.expanduser(path))}

    log = given.get("log")
    anchored = {
        **given,
        "file": file,
        "log": anchor({"path": log} if isinstance(log, (str, Path)) else log),
        "tables": anchor(given.get("tables")),
    }
    return {key: value for key, value in anchored.items() if key in given}


_OVERLAP_HINT = "Give the log and the tables folders side by side, e.g. `./shop/changes` and `./shop/lake`."


def _overlap(log: Path, tables: Path) -> str | None:
    if log == tables:
        return "is the log's folder"
    if log in tables.parents:
        return "lies inside the log's folder"
    return "holds the log's folder" if tables in log.parents else None


def matches(source: SourceSettings, table: TableId) -> bool:
    """Whether the pipeline copies this table: some glob of `tables` matches it and none of `exclude` does.

    A glob is `schema-glob.table-glob`; names are compared verbatim, case included. A name may itself hold a
    dot, so the glob matches if it does so when split at any one of its dots (those in brackets aside).
    """

    def matched(globs: Sequence[str]) -> bool:
        return any(_glob_matches(glob, table) for glob in globs)

    return matched(source.tables) and not matched(source.exclude)


def _glob_matches(glob: str, table: TableId) -> bool:
    return any(
        fnmatch.fnmatchcase(table.schema, schema) and fnmatch.fnmatchcase(table.name, name)
        for schema, name in _splits(glob)
    )


def names(source: SourceSettings, table: TableId) -> bool:
    """Whether an entry of `tables` is this table's name, and no pattern."""
    plain = [glob for glob in source.tables if not re.search(r"[*?[]", glob)]
    return any((table.schema, table.name) in _splits(glob) for glob in plain)


def matches_message(source: SourceSettings, prefix: str) -> bool:
    """Whether the pipeline keeps what an application wrote under this prefix."""
    return any(fnmatch.fnmatchcase(prefix, glob) for glob in source.messages)


# ---- loading and checking --------------------------------------------------------------------------------


def load_settings(path: str | Path, environment: Mapping[str, str] = os.environ) -> PipelineSettings:
    """The settings in a file, or a ConfigError that tells the first problem and how many more there are."""
    settings, problems = _examine(Path(path), environment)
    if settings is not None:
        return settings
    first = problems[0]
    place = f"{path}:{first.line}: " if first.line else f"{path}: "
    message = place + (f"`{first.where}` " if first.where else "") + first.message
    if len(problems) > 1:
        message += f" (and {len(problems) - 1} more problem{'s' if len(problems) > 2 else ''})"
    raise ConfigError(message, hint=f"{first.hint} `tailrace check {path}` lists every problem.")


def check_settings(path: str | Path, environment: Mapping[str, str] = os.environ) -> list[Problem]:
    """Every problem that the file alone shows, in the order of its lines; empty if it can be used."""
    return _examine(Path(path), environment)[1]


def _examine(file: Path, environment: Mapping[str, str]) -> tuple[PipelineSettings | None, list[Problem]]:
    text = _read(file)
    document = _Document(environment)
    if isinstance(text, Problem):
        return None, [text]
    document.parse(text)
    settings = None
    if isinstance(document.data, dict):
        if "file" in document.data:
            document.add_unknown_key(("file",))
        try:
            settings = PipelineSettings.model_validate({**document.data, "file": file})
        except ValidationError as error:
            for detail in error.errors(include_url=False, include_input=False):
                document.add_refusal(detail)
            document.add_overlap(file)
    problems = sorted(document.problems, key=lambda problem: (problem.line, problem.column))
    return (None if problems else settings), problems


def _read(file: Path) -> str | Problem:
    """The file's text, or why there is none."""

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
        said = getattr(error, "strerror", None) or str(error)
        return whole(f"the file cannot be read: {said.lower()}", "Check the path and the file's permissions.")
    if len(content) > FILE_BYTES_MAX:
        return whole("the file is larger than 1 MiB", "Is it the right file?")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return whole(
            "the file is not UTF-8 text", "Save it as UTF-8.", line=content[: error.start].count(b"\n") + 1
        )


_SHAPES: dict[Loc, type[BaseModel]] = {
    (): PipelineSettings,
    ("source",): SourceSettings,
    ("source", "slot"): SlotSettings,
    ("source", "publication"): PublicationSettings,
    ("log",): LogSettings,
    ("log", "retention"): RetentionSettings,
    ("log", "seal"): SealSettings,
    ("tables",): TablesSettings,
    ("tables", "evolution"): EvolutionSettings,
    ("tables", "upkeep"): UpkeepSettings,
    ("load",): LoadSettings,
    ("spark",): SparkSettings,
}

_MODES = ", ".join(get_args(Mode))
_EXAMPLES = {
    "": "name, source, log and tables; docs/reference/configuration.md has an example",
    "name": "`name: shop`",
    "source": "`source:` and below it, indented, `url:` and `tables:`",
    "source.url": "`url: postgresql://user:${PGPASSWORD}@host:5432/database`",
    "source.tables": '`tables: ["public.*"]`',
    "source.exclude": '`exclude: ["public.audit_*"]`',
    "source.messages": '`messages: ["orders", "mail-*"]`',
    "source.origin": "`origin: any`, or `origin: none`",
    "source.invalid_text": "`invalid_text: refuse`, or `invalid_text: replace`",
    "source.slot": "`slot: {name: tailrace_shop, create: true}`",
    "source.publication": "`publication: {name: tailrace_shop, create: true}`",
    "log": "`log: ./shop/changes`",
    "log.retention": "`retention: {age: 7d, bytes: 20GB}`",
    "log.seal": "`seal: {bytes: 128MiB, commits: 4096, age: 10min}`",
    "tables": "`tables:` and below it, indented, `format: delta` and `path:`",
    "tables.format": "`format: delta`",
    "tables.engine": "`engine: delta-rs`, or `engine: spark`",
    "tables.path": "`path: ./shop/lake`",
    "tables.mode": "`mode: mirror`, `mode: history` or `mode: append`",
    "tables.soft_delete": "`soft_delete: true`",
    "tables.metadata": f"`metadata: [_seq, _op]`; there are {', '.join(get_args(MetadataName))}",
    "tables.partition_by": "`partition_by: [region]`",
    "tables.names": '`names: "{pipeline}/{schema}/{table}"`',
    "tables.rules": '`rules: {"public.orders": {mode: history}, "public.log_*": {mode: append}}`',
    "tables.evolution": "`evolution: {drop: apply, retype: stop}`",
    "tables.upkeep": "`upkeep: {file: 128MiB, budget: 10%, remove_after: 7d}`",
    "tables.on_bad_row": "`on_bad_row: stop`, or `on_bad_row: dead-letter`",
    "tables.deletion_vectors": "`deletion_vectors: true`, with `engine: spark`",
    "tables.column_mapping": "`column_mapping: true`, with `engine: spark`",
    "load": "`load: {connections: 4, time_limit: 1h}`",
    "load.mode": f"`mode: initial`; there are {_MODES}",
    "load.modes": f'`modes: {{"public.audit_*": never}}`; there are {_MODES}',
    "load.way": "`way: auto`, `way: exact` or `way: chunked`",
    "load.throttle": "`throttle: false`",
    "load.standby": "`standby: postgresql://user:${PGPASSWORD}@standby:5432/database`",
    "spark": "`spark: {settings: {spark.driver.memory: 2g}}`",
    "spark.master": '`master: "local[4]"`',
    "spark.settings": "`settings: {spark.driver.memory: 2g}`",
}

_WANTED = {
    "string_type": "must be text",
    "path_type": "must be a folder's path",
    "tuple_type": "must be a list",
    "too_short": "must not be empty",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "literal_error": "has a value it cannot have",
    "model_type": "must be a mapping",
    "dict_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
}
"""What pydantic's own refusals mean here; anything else is shown in its own words."""


def _keys(loc: Loc) -> list[str]:
    is_rule = loc[:2] == ("tables", "rules") and len(loc) == 3
    shape = RuleSettings if is_rule else _SHAPES.get(loc)
    fields = shape.model_fields.items() if shape else ()
    return [found.alias or name for name, found in fields if name != "file"]


def _example(loc: Loc) -> str:
    while _dotted(loc) not in _EXAMPLES:
        loc = loc[:-1]
    return f"For example: {_EXAMPLES[_dotted(loc)]}."


def _folder_of(holder: object) -> Path | None:
    try:
        found = _check_folder(holder.get("path")) if isinstance(holder, dict) else None
    except PydanticCustomError:
        return None
    return found if isinstance(found, Path) else None


def _dotted(loc: Loc) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")


_VARIABLE = re.compile(r"\$\$|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}|\$\{")
_PASSWORD = re.compile(r"[A-Za-z0-9+.-]+://(?:\$\{[^}]*\}|[^:/?@])*:(?P<password>(?:\$\{[^}]*\}|[^/?@])*)@")
"""Where the password stands in a URL. A variable holds the password itself, as PGPASSWORD does, so it is
percent-encoded on the way in: libpq would take an `@` in it for the end of the password."""

_URLS: tuple[Loc, ...] = (("source", "url"), ("load", "standby"))

_NOT_READ = object()
"""Stands for a value whose own problem is already told."""

_NO_TEXT = object()
"""Stands for a date or what else YAML knows: no setting takes one."""


@dataclass
class _Document:
    """A file's values, where each stands, and what is wrong with it. Problems are only ever added."""

    environment: Mapping[str, str]
    text: str = ""
    data: Any = None
    problems: list[Problem] = field(default_factory=list)
    keys: dict[Loc, int] = field(default_factory=dict)
    """Where each key begins, as an index into the text."""
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
                self.add((), 0, "the file is empty", f"It needs {_EXAMPLES['']}.")
            elif not isinstance(node, yaml.MappingNode):
                self.add(
                    (),
                    node.start_mark.index,
                    "the file must be a mapping of keys to values",
                    f"It needs {_EXAMPLES['']}.",
                )
            else:
                self.data = self.read(node, ())

    def read(self, node: yaml.Node, loc: Loc) -> Any:
        """A node as plain data, with variables replaced."""
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
        found: dict[str, Any] = {}
        for key, value in node.value:
            at = key.start_mark.index
            if not isinstance(key, yaml.ScalarNode):
                self.add(loc, at, "has a key that is not text", f"It needs {_EXAMPLES['']}.")
            elif key.value in found:
                first, _ = self.line_and_column(self.keys[(*loc, key.value)])
                self.add((*loc, key.value), at, f"is given twice; first on line {first}", "Keep one of them.")
            else:
                self.keys[(*loc, key.value)] = at
                found[key.value] = self.read(value, (*loc, key.value))
        return found

    def expand(self, node: yaml.ScalarNode, loc: Loc) -> Any:
        """A scalar's text with `${VAR}` replaced; `$$` is a dollar, a dollar before anything else too."""
        begin = node.start_mark.index
        secret = _PASSWORD.match(node.value) if loc in _URLS else None

        def replaced(found: re.Match[str]) -> str:
            nonlocal begin
            if found.group() == "$$":
                return "$"
            # Where it stands in the file: the search goes on behind the one before.
            at = self.text.find(found.group(), begin, node.end_mark.index)
            begin = at + 1 if at >= 0 else begin
            name, default = found.group("name"), found.group("default")
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
            inside = secret is not None and secret.start("password") <= found.start() < secret.end("password")
            return quote(value, safe="") if inside else value

        text = _VARIABLE.sub(replaced, node.value)
        return _NOT_READ if loc in self.unread else text

    def line_and_column(self, index: int) -> tuple[int, int]:
        before = self.text[:index]
        return before.count("\n") + 1, index - (before.rfind("\n") + 1) + 1

    def add(self, loc: Loc, index: int, message: str, hint: str) -> None:
        line, column = self.line_and_column(index)
        self.problems.append(
            Problem(line=line, column=column, where=_dotted(loc), message=message, hint=hint)
        )

    def add_syntax(self, error: yaml.MarkedYAMLError) -> None:
        said = " ".join(part for part in (error.context, error.problem) if part)
        mark = error.problem_mark or error.context_mark
        at = mark.index if mark else 0
        if "'\\t'" in said or self.text[at : at + 1] == "\t":
            self.add(
                (), at, "a tab stands where YAML allows only spaces", "Use spaces, also for indentation."
            )
        elif "alias" in said or "anchor" in said:
            # Its own words quote what follows the star, which may be a secret.
            self.add(
                (),
                at,
                "a `*` or `&` at the beginning of a value means something else in YAML",
                'Put the value in quotes: "*.orders".',
            )
        elif "mapping values are not allowed" in said:
            self.add(
                (),
                at,
                "a `:` stands where YAML expects no key",
                "Check the indentation, or put a value that holds `: ` in quotes.",
            )
        elif "single document" in said:
            self.add((), at, "a second document begins here", "Keep one document: remove the `---`.")
        else:
            self.add(
                (),
                at,
                f"this is not YAML: {error.problem}",
                "Check indentation, quotes and brackets on this line and the one before.",
            )

    def add_unknown_key(self, loc: Loc) -> None:
        *parent, key = loc
        known = _keys(tuple(parent))
        close = difflib.get_close_matches(str(key), known, n=1)
        homes = [
            f"under `{_dotted(home)}`" if home else "at the top" for home in _SHAPES if key in _keys(home)
        ]
        if close:
            hint = f"Did you mean `{close[0]}`?"
        elif homes:
            hint = f"It belongs {' or '.join(homes)}."
        else:
            hint = f"Remove it. Known here: {', '.join(known)}."
        self.add(loc, self.keys.get(loc, 0), "is not a key we know", hint)

    def add_refusal(self, detail: ErrorDetails) -> None:
        """Turn pydantic's refusal into a problem at the nearest thing that the file does say."""
        loc = detail["loc"]
        if any(loc[: len(unread)] == unread for unread in self.unread):
            return
        if detail["type"] == "extra_forbidden":
            self.add_unknown_key(loc)
            return
        if detail["type"] == "missing":
            parent = loc[:-1]
            self.add(loc, self.keys.get(parent, self.values.get(parent, 0)), "is missing", _example(loc))
            return
        if loc == ():
            return  # The rule about the two folders: `add_overlap` tells it.
        context = detail.get("ctx", {})
        loc = (*loc, *context.get("at", ()))
        while loc not in self.values:
            loc = loc[:-1]
        if detail["type"] == "too_short" and self.value(loc):
            return  # Pydantic counts only the globs that are well; the file does hold some.
        message = context.get("message") or _WANTED.get(detail["type"], detail["msg"])
        if detail["type"] == "literal_error":
            message += f": there are {context['expected'].replace(' or ', ' and ')}"
        if detail["type"] in _WANTED and self.value(loc) is None:
            message = "has no value"
        self.add(loc, self.values[loc], message, context.get("hint") or _example(loc))

    def add_overlap(self, file: Path) -> None:
        """The rule about the two folders, which the models reach only when all else is well."""
        anchored = _anchored({**self.data, "file": file})
        log, tables = (_folder_of(anchored.get(key)) for key in ("log", "tables"))
        if log and tables and (said := _overlap(log, tables)):
            self.add(("tables", "path"), self.values[("tables", "path")], said, _OVERLAP_HINT)

    def value(self, loc: Loc) -> Any:
        found = self.data
        for part in loc:
            found = found[part]
        return found
