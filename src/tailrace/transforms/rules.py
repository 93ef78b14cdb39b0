"""Rules as a user declares them, in a settings file or in Python.

Both make the same objects. A rule is data: it contains no secret, opens nothing and can be pickled. It names its keys,
and each name has a key source, which is read only where rules are applied. Rules apply in the order given, and a rule
names columns as the rule before has left them. Nothing here needs Arrow, so a settings file is checked without it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from tailrace.errors import ConfigError
from tailrace.transforms.declaration import Declaration, declaration_error

RULES_MAX = 200
MASK_MAX = 64
"""Most characters that a mask may leave at either end."""

DISTINCT_TABLES_HINT = (
    'Send each to its own table, as `to: "lake.{schema}_{table}"` does, and read them together in a view. For one '
    "table of all partitions, name their parent in `source.tables`."
)
"""Hint for rules that would make one table of several."""

Scalar = bool | int | Decimal | str | None
OnError = Literal["halt", "dead-letter"]
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]


class KeySource(Declaration):
    """The source of a key: an environment variable or a file.

    It has 32 bytes as hex or base64.
    """

    env: Annotated[str, Field(min_length=1)] | None = None
    file: Path | None = None

    @model_validator(mode="after")
    def _has_one_source(self) -> KeySource:
        if (self.env is None) == (self.file is None):
            raise declaration_error("needs either `env` or `file`", "For example: `{env: TAILRACE_KEY}`.")
        return self


class Rule(Declaration):
    """Fields that all rules have."""

    do: str
    name: Annotated[str, Field(min_length=1, max_length=100)] = ""
    """The name in errors and reports; by default its kind and its number."""
    tables: Names = ("*.*",)
    """Patterns `schema.table`, as in `source.tables`."""
    when: str | None = None
    """A condition on rows; the rule applies only where it is true.

    For an outbox, other rows are not messages.
    """
    on_error: OnError = "halt"

    @property
    def digest(self) -> str:
        """A hash that changes whenever the rule's effect does."""
        fields = self.model_dump(mode="json", exclude={"name", "tables", "on_error"})
        return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:8]

    @field_validator("tables")
    @classmethod
    def _names_a_schema(cls, tables: tuple[str, ...]) -> tuple[str, ...]:
        for glob in tables:
            if not re.fullmatch(r".+\..+", glob):
                raise declaration_error(f"has `{glob}`, which names no schema", f'Write `"public.{glob}"`.')
        return tables

    @property
    def exact_tables(self) -> bool:
        """True if `tables` has no wildcards."""
        return not any(re.search(r"[*?[]", glob) for glob in self.tables)


class Mask(Rule):
    """Replace all characters except some at the ends."""

    do: Literal["mask"] = "mask"
    columns: Names
    keep_first: Annotated[int, Field(ge=0, le=MASK_MAX)] = 0
    keep_last: Annotated[int, Field(ge=0, le=MASK_MAX)] = 0
    char: Annotated[str, Field(min_length=1, max_length=1)] = "*"


class Redact(Rule):
    """Replace every value that is not null by one text."""

    do: Literal["redact"] = "redact"
    columns: Names
    text: str = "[redacted]"


class Null(Rule):
    """Replace every value by null."""

    do: Literal["null"] = "null"
    columns: Names


class TruncateValues(Rule):
    """Cut strings after so many characters, and binaries after so many bytes."""

    do: Literal["truncate"] = "truncate"
    columns: Names
    length: Annotated[int, Field(ge=0, le=2**31 - 1)]


class Sha256(Rule):
    """Replace values by their SHA-256, in hex."""

    do: Literal["sha256"] = "sha256"
    columns: Names


class Hmac(Rule):
    """Replace values by their HMAC-SHA-256 under a key, in hex.

    Without the key nobody can find a value by trying candidates.
    """

    do: Literal["hmac"] = "hmac"
    columns: Names
    key: str


class Encrypt(Rule):
    """Encrypt values with AES-256-GCM, bound to the table and the column."""

    do: Literal["encrypt"] = "encrypt"
    columns: Names
    key: str
    """Id of the key. Every value has it, so old values stay readable while their keys are named."""


class Decrypt(Rule):
    """Decrypt what `encrypt` has made, with any of the named keys."""

    do: Literal["decrypt"] = "decrypt"
    columns: Names
    to: str = "string"
    of_table: str | None = None
    """The table where the value was encrypted, if its name was another one."""
    of_column: str | None = None
    """The column where the value was encrypted, if its name was another one."""


class Filter(Rule):
    """Keep only rows for which the expression is true."""

    do: Literal["filter"] = "filter"
    where: str


class Include(Rule):
    """Keep only columns that match a pattern."""

    do: Literal["include"] = "include"
    columns: Names


class Exclude(Rule):
    """Drop columns that match a pattern."""

    do: Literal["exclude"] = "exclude"
    columns: Names


class Rename(Rule):
    """Rename columns."""

    do: Literal["rename"] = "rename"
    columns: Annotated[dict[str, Annotated[str, Field(min_length=1)]], Field(min_length=1)]


class Copy(Rule):
    """Copy a column under another name."""

    do: Literal["copy"] = "copy"
    column: str
    to: Annotated[str, Field(min_length=1)]


class Set(Rule):
    """Set one value in every row, in an existing or a new column."""

    do: Literal["set"] = "set"
    column: Annotated[str, Field(min_length=1)]
    value: Scalar = None
    type: str | None = None
    """Type of a new column; by default that of the value."""

    @field_validator("value", mode="before")
    @classmethod
    def _is_one_value(cls, value: Any) -> Any:
        if not (value is None or isinstance(value, str | int | float | Decimal)):
            raise declaration_error("must be a string, a number, true, false or null", "For example: `value: 10.50`.")
        if isinstance(value, float | Decimal) and not math.isfinite(value):
            hint = 'Write it as a string, with the type: `value: "NaN"`, `type: float64`.'
            raise declaration_error("must be a finite number", hint)
        return value


class Cast(Rule):
    """Change the type of columns. With `when`, all other values must fit the new type as they are."""

    do: Literal["cast"] = "cast"
    columns: Names
    to: str


class Compute(Rule):
    """Compute a column from others."""

    do: Literal["compute"] = "compute"
    column: Annotated[str, Field(min_length=1)]
    expression: str
    type: str | None = None


class Route(Rule):
    """Send rows to a table of another name; with `when`, only some rows."""

    do: Literal["route"] = "route"
    to: Annotated[str, Field(min_length=1)]
    """`schema.table`, in which `{schema}` and `{table}` are the source table's."""

    @field_validator("to")
    @classmethod
    def _names_a_schema(cls, to: str) -> str:  # type: ignore[override]  # of another field
        return _check_target(to, ("schema", "table"))


class Outbox(Rule):
    """Send inserted rows as messages to the table that their type names.

    Updates and deletes are ignored. With `when`, only some rows are messages, and the others are dropped.
    """

    do: Literal["outbox"] = "outbox"
    type_column: str = "aggregatetype"
    key_column: str = "id"
    to: Annotated[str, Field(min_length=1)] = "outbox.{type}"

    @field_validator("to")
    @classmethod
    def _names_a_schema(cls, to: str) -> str:  # type: ignore[override]  # of another field
        return _check_target(to, ("schema", "table", "type"))


class Unwrap(Rule):
    """Make plain rows of changes: no old rows, and deletes dropped or marked."""

    do: Literal["unwrap"] = "unwrap"
    deletes: Literal["drop", "mark"] = "drop"
    marker: Annotated[str, Field(min_length=1)] = "deleted"
    metadata: dict[Literal["_op", "_position", "_tx", "_tx_index", "_committed_at"], str] = Field(default_factory=dict)
    """Metadata columns to keep, and their names."""


class Function(Rule):
    """Apply a user function to some columns.

    It gets a record batch of the named columns and returns one with as many rows.
    """

    do: Literal["function"] = "function"
    columns: Names
    function: str | Callable[..., Any]
    """Either `package.module:name` or the function itself."""

    @field_validator("function", mode="before")
    @classmethod
    def _is_function_or_path(cls, function: Any) -> Any:
        if not (re.fullmatch(r"[\w.]+:\w+", function) if isinstance(function, str) else callable(function)):
            raise declaration_error("must be `package.module:name`", "For example: `function: shop.clean:addresses`.")
        return function

    @property
    def digest(self) -> str:
        named = self.function if isinstance(self.function, str) else f"{self.function.__module__}:{self.function}"
        fields = [self.columns, self.when, re.sub(r" at 0x[0-9a-f]+", "", named)]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:8]


RULE_TYPES: dict[str, type[Rule]] = {
    str(kind.model_fields["do"].default): kind
    for kind in (
        Mask, Redact, Null, TruncateValues, Sha256, Hmac, Encrypt, Decrypt, Filter, Include, Exclude, Rename, Copy, Set,
        Cast, Compute, Route, Outbox, Unwrap, Function,
    )
}  # fmt: skip
_PARSED = ("when", "where", "expression", "to", "type")
TYPED_RULES = ("cast", "decrypt", "set", "compute")
"""Rules that name a type, in `to` or `type`."""
_NULL_HINT = "Use `null` with `when`, which keeps the column and removes the values; or `tables`, to choose tables."
UNCONDITIONAL = {
    "include": _NULL_HINT, "exclude": _NULL_HINT,
    "rename": "Use `copy` with `when`, which makes a column that is null in other rows; or `tables`, to choose tables.",
}  # fmt: skip
"""Rules that cannot have `when`, and what to use instead.

They change which columns a table has, and a column exists for all rows or for none.
"""

AnyRule = Annotated[
    Mask | Redact | Null | TruncateValues | Sha256 | Hmac | Encrypt | Decrypt | Filter | Include | Exclude | Rename
    | Copy | Set | Cast | Compute | Route | Outbox | Unwrap | Function,
    Field(discriminator="do"),
]  # fmt: skip


class Transforms(Declaration):
    """All rules in order, and the keys that they name."""

    keys: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")], KeySource] = Field(default_factory=dict)
    rules: Annotated[tuple[AnyRule, ...], Field(max_length=RULES_MAX)] = ()

    def __bool__(self) -> bool:
        return bool(self.rules)

    @field_validator("rules", mode="before")
    @classmethod
    def _null_is_a_rule(cls, rules: Any) -> Any:
        """Read `do: null`, which is null in YAML, as the rule `null`."""
        if isinstance(rules, Rule):
            raise declaration_error("must be a list", "Put the rule into one: `rules=[…]`.")

        def read(rule: Any) -> Any:
            is_null = isinstance(rule, dict) and rule.get("do", "") is None
            return {**rule, "do": "null"} if is_null else rule

        return [read(rule) for rule in rules] if isinstance(rules, list | tuple) else rules

    @model_validator(mode="after")
    def _names_are_unique(self) -> Transforms:
        named = tuple(
            rule if rule.name else rule.model_copy(update={"name": f"{rule.do} #{at}"})
            for at, rule in enumerate(self.rules, 1)
        )
        object.__setattr__(self, "rules", named)
        seen: set[str] = set()
        for rule in named:
            if rule.name in seen:
                raise declaration_error(f"two rules are called `{rule.name}`", "Give each its own name.")
            seen.add(rule.name)
            for problem in _problems(rule, self.keys):
                raise problem
        return self


RulesInput: TypeAlias = Transforms | Sequence[Rule] | Mapping[str, Any]
"""Rules as a program may pass them. A list is in order; a mapping is as in a settings file."""


def parse_rules(value: RulesInput) -> Transforms:
    """Return the rules as `Transforms`; refuse anything else."""
    match value:
        case Transforms():
            return value
        case Mapping():
            return Transforms.model_validate(value)
        case list() | tuple():
            return Transforms.model_validate({"rules": value})
    raise ConfigError(
        "value is not a list of rules",
        found=type(value).__name__,
        hint="Pass a list of rules, or `Transforms(rules=[…], keys={…})` where they need keys.",
    )


def _problems(rule: Rule, keys: dict[str, KeySource]) -> Iterator[PydanticCustomError]:
    if rule.when is not None and rule.do in UNCONDITIONAL:
        yield declaration_error(
            f"rule `{rule.name}`: `when` cannot be used with `{rule.do}`: a table has a column in all rows or in none",
            UNCONDITIONAL[rule.do],
        )
    if rule.when is not None and isinstance(rule, Decrypt) and rule.to != "binary":
        yield declaration_error(
            f"rule `{rule.name}`: with `when`, values that `decrypt` skips are binary and do not fit a column of "
            f"{rule.to}",
            "Decrypt all rows, or `to: binary`.",
        )
    if isinstance(rule, Hmac | Encrypt) and rule.key not in keys:
        yield declaration_error(
            f"rule `{rule.name}` names the key `{rule.key}`, which is not defined",
            "Define it under `transforms.keys`, for example: `keys: {main: {env: TAILRACE_KEY}}`.",
        )
    values = {name: value for name in _PARSED if (value := getattr(rule, name, None)) is not None}
    expressions = {name: value for name, value in values.items() if name not in ("to", "type")}
    types = {name: value for name, value in values.items() if name in ("to", "type") and rule.do in TYPED_RULES}
    if expressions or types:
        yield from _unparsable(rule, expressions, types)
    if isinstance(rule, Decrypt) and not keys:
        yield declaration_error(f"rule `{rule.name}` has no key to decrypt with", "Define one under `transforms.keys`.")


def _unparsable(rule: Rule, expressions: dict[str, str], types: dict[str, str]) -> Iterator[PydanticCustomError]:
    """Yield expressions and types that cannot be parsed. Arrow is imported only for this."""
    from tailrace.transforms.expression import Expression
    from tailrace.transforms.steps.column_values import parse_type

    for parse, texts in ((Expression, expressions), (parse_type, types)):
        for name, text in texts.items():
            try:
                parse(text)
            except ConfigError as error:
                yield declaration_error(f"rule `{rule.name}`, `{name}`: {error.message}", error.hint)


def _check_target(to: str, known: tuple[str, ...]) -> str:
    plain = re.sub(r"\{(" + "|".join(known) + r")\}", "x", to)
    if "{" in plain or "}" in plain or not re.fullmatch(r"[^.]+\..+", plain):
        placeholders = ", ".join(f"{{{name}}}" for name in known)
        raise declaration_error(
            f"must be `schema.table`, with {placeholders} where wanted", 'For example: `to: "{schema}.{table}"`.'
        )
    return to
