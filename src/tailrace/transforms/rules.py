"""The rules, as a person declares them: the same objects from a settings file and from a program.

A rule is data: it holds no secret, opens nothing and can be pickled. Keys are named, and each name says where the key
lies; whoever applies the rules reads it there. Rules apply in the order they are given, and a column is named as the
rule before has left it. Nothing here needs Arrow, so a settings file is checked without it.
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
"""Characters that a mask may leave at either end."""

DISTINCT_TABLES_HINT = (
    'Send each to a table of its own, as `to: "lake.{schema}_{table}"` does, and read them together in a view; '
    "partitions come as one table if `source.tables` names the table that they are of."
)
"""Where several tables would become one."""

Scalar = bool | int | Decimal | str | None
OnError = Literal["halt", "dead-letter"]
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]


class KeySource(Declaration):
    """Where a key lies: 32 bytes as hex or base64, in a variable of the environment or in a file."""

    env: Annotated[str, Field(min_length=1)] | None = None
    file: Path | None = None

    @model_validator(mode="after")
    def _is_one_place(self) -> KeySource:
        if (self.env is None) == (self.file is None):
            raise declaration_error("needs either `env` or `file`", "For example: `{env: TAILRACE_KEY}`.")
        return self


class Rule(Declaration):
    """What all rules have."""

    do: str
    name: Annotated[str, Field(min_length=1, max_length=100)] = ""
    """What errors and reports call it; by default its kind and its place."""
    tables: Names = ("*.*",)
    """Patterns `schema.table`, as in `source.tables`."""
    when: str | None = None
    """An expression: rows of which it is not true are left alone; of an outbox, they are no messages."""
    on_error: OnError = "halt"

    @property
    def digest(self) -> str:
        """Another one whenever the rule does something else."""
        said = self.model_dump(mode="json", exclude={"name", "tables", "on_error"})
        return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:8]

    @field_validator("tables")
    @classmethod
    def _names_a_schema(cls, tables: tuple[str, ...]) -> tuple[str, ...]:
        for glob in tables:
            if not re.fullmatch(r".+\..+", glob):
                raise declaration_error(f"holds `{glob}`, which names no schema", f'Write `"public.{glob}"`.')
        return tables

    @property
    def exact_tables(self) -> bool:
        """Whether it names tables, and no patterns of them."""
        return not any(re.search(r"[*?[]", glob) for glob in self.tables)


class Mask(Rule):
    """All characters but some at the ends become another one."""

    do: Literal["mask"] = "mask"
    columns: Names
    keep_first: Annotated[int, Field(ge=0, le=MASK_MAX)] = 0
    keep_last: Annotated[int, Field(ge=0, le=MASK_MAX)] = 0
    char: Annotated[str, Field(min_length=1, max_length=1)] = "*"


class Redact(Rule):
    """Every value that is not null becomes one text."""

    do: Literal["redact"] = "redact"
    columns: Names
    text: str = "[redacted]"


class Null(Rule):
    """Every value becomes null."""

    do: Literal["null"] = "null"
    columns: Names


class TruncateValues(Rule):
    """Texts are cut after so many characters, and binaries after so many bytes."""

    do: Literal["truncate"] = "truncate"
    columns: Names
    length: Annotated[int, Field(ge=0, le=2**31 - 1)]


class Sha256(Rule):
    """The SHA-256 of a value, in hex."""

    do: Literal["sha256"] = "sha256"
    columns: Names


class Hmac(Rule):
    """The HMAC-SHA-256 of a value under a key, in hex: without the key, nobody can try values out."""

    do: Literal["hmac"] = "hmac"
    columns: Names
    key: str


class Encrypt(Rule):
    """AES-256-GCM under a key, bound to the table and the column."""

    do: Literal["encrypt"] = "encrypt"
    columns: Names
    key: str
    """The id of the key, which every value carries; older ones stay readable as long as their keys are named."""


class Decrypt(Rule):
    """What `encrypt` has made, with whichever of the named keys it was made."""

    do: Literal["decrypt"] = "decrypt"
    columns: Names
    to: str = "string"
    of_table: str | None = None
    """Where it was encrypted, if the table had another name there,"""
    of_column: str | None = None
    """and the column."""


class Filter(Rule):
    """Only rows of which the expression is true."""

    do: Literal["filter"] = "filter"
    where: str


class Include(Rule):
    """Only columns that match a pattern."""

    do: Literal["include"] = "include"
    columns: Names


class Exclude(Rule):
    """No columns that match a pattern."""

    do: Literal["exclude"] = "exclude"
    columns: Names


class Rename(Rule):
    """Columns get other names."""

    do: Literal["rename"] = "rename"
    columns: Annotated[dict[str, Annotated[str, Field(min_length=1)]], Field(min_length=1)]


class Copy(Rule):
    """A column, once more under another name."""

    do: Literal["copy"] = "copy"
    column: str
    to: Annotated[str, Field(min_length=1)]


class Set(Rule):
    """One value in every row, in a column that is there or is made."""

    do: Literal["set"] = "set"
    column: Annotated[str, Field(min_length=1)]
    value: Scalar = None
    type: str | None = None
    """Of a column that is made; by default that of the value."""

    @field_validator("value", mode="before")
    @classmethod
    def _is_one_value(cls, value: Any) -> Any:
        if not (value is None or isinstance(value, str | int | float | Decimal)):
            raise declaration_error("must be a text, a number, true, false or null", "For example: `value: 10.50`.")
        if isinstance(value, float | Decimal) and not math.isfinite(value):
            hint = 'Write it as a text, with the type: `value: "NaN"`, `type: float64`.'
            raise declaration_error("must be a finite number", hint)
        return value


class Cast(Rule):
    """Another type. It is the column's, so that with `when` the other values have to fit it as they are."""

    do: Literal["cast"] = "cast"
    columns: Names
    to: str


class Compute(Rule):
    """A column made of others."""

    do: Literal["compute"] = "compute"
    column: Annotated[str, Field(min_length=1)]
    expression: str
    type: str | None = None


class Route(Rule):
    """Rows go to a table of another name; with `when`, only some."""

    do: Literal["route"] = "route"
    to: Annotated[str, Field(min_length=1)]
    """`schema.table`, where `{schema}` and `{table}` are those of the source."""

    @field_validator("to")
    @classmethod
    def _names_a_schema(cls, to: str) -> str:  # type: ignore[override]  # of another field
        return _check_target(to, ("schema", "table"))


class Outbox(Rule):
    """Inserted rows are messages, each for the table that its type names; nothing else that happens to them counts.
    With `when` only some are, and the others go nowhere."""

    do: Literal["outbox"] = "outbox"
    type_column: str = "aggregatetype"
    key_column: str = "id"
    to: Annotated[str, Field(min_length=1)] = "outbox.{type}"

    @field_validator("to")
    @classmethod
    def _names_a_schema(cls, to: str) -> str:  # type: ignore[override]  # of another field
        return _check_target(to, ("schema", "table", "type"))


class Unwrap(Rule):
    """Rows without what makes them changes: no old row; what is deleted goes unsaid, or is marked."""

    do: Literal["unwrap"] = "unwrap"
    deletes: Literal["drop", "mark"] = "drop"
    marker: Annotated[str, Field(min_length=1)] = "deleted"
    metadata: dict[Literal["_op", "_position", "_tx", "_tx_index", "_committed_at"], str] = Field(default_factory=dict)
    """What is kept of a change, and under which name."""


class Function(Rule):
    """A function of the user's: a record batch of the named columns to one of as many rows."""

    do: Literal["function"] = "function"
    columns: Names
    function: str | Callable[..., Any]
    """`package.module:name`, or the function itself."""

    @field_validator("function", mode="before")
    @classmethod
    def _is_a_place(cls, function: Any) -> Any:
        if not (re.fullmatch(r"[\w.]+:\w+", function) if isinstance(function, str) else callable(function)):
            raise declaration_error("must be `package.module:name`", "For example: `function: shop.clean:addresses`.")
        return function

    @property
    def digest(self) -> str:
        named = self.function if isinstance(self.function, str) else f"{self.function.__module__}:{self.function}"
        said = [self.columns, self.when, re.sub(r" at 0x[0-9a-f]+", "", named)]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:8]


RULE_TYPES: dict[str, type[Rule]] = {
    str(kind.model_fields["do"].default): kind
    for kind in (
        Mask, Redact, Null, TruncateValues, Sha256, Hmac, Encrypt, Decrypt, Filter, Include, Exclude, Rename, Copy, Set,
        Cast, Compute, Route, Outbox, Unwrap, Function,
    )
}  # fmt: skip
_READ = ("when", "where", "expression", "to", "type")
TYPED_RULES = ("cast", "decrypt", "set", "compute")
"""Rules that name a type, in `to` or `type`."""
_NULL_HINT = "Use `null` with `when`, which leaves the column and takes the values; or `tables`, to choose tables."
UNCONDITIONAL = {
    "include": _NULL_HINT, "exclude": _NULL_HINT,
    "rename": "Use `copy` with `when`, which makes a column that is null in other rows; or `tables`, to choose tables.",
}  # fmt: skip
"""Rules about which columns a table has, and what to use instead for some rows: a column is there for all or none."""

AnyRule = Annotated[
    Mask | Redact | Null | TruncateValues | Sha256 | Hmac | Encrypt | Decrypt | Filter | Include | Exclude | Rename
    | Copy | Set | Cast | Compute | Route | Outbox | Unwrap | Function,
    Field(discriminator="do"),
]  # fmt: skip


class Transforms(Declaration):
    """All rules, in order, and the keys that they name."""

    keys: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")], KeySource] = Field(default_factory=dict)
    rules: Annotated[tuple[AnyRule, ...], Field(max_length=RULES_MAX)] = ()

    def __bool__(self) -> bool:
        return bool(self.rules)

    @field_validator("rules", mode="before")
    @classmethod
    def _null_is_a_rule(cls, rules: Any) -> Any:
        """To YAML `do: null` says nothing; here it is the rule of that name."""
        if isinstance(rules, Rule):
            raise declaration_error("must be a list", "Put the rule into one: `rules=[…]`.")

        def read(rule: Any) -> Any:
            unsaid = isinstance(rule, dict) and rule.get("do", "") is None
            return {**rule, "do": "null"} if unsaid else rule

        return [read(rule) for rule in rules] if isinstance(rules, list | tuple) else rules

    @model_validator(mode="after")
    def _names_are_apart(self) -> Transforms:
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
            for said in _troubles(rule, self.keys):
                raise said
        return self


RulesInput: TypeAlias = Transforms | Sequence[Rule] | Mapping[str, Any]
"""Rules as a program may give them: a list is the rules in order, a mapping what a settings file has."""


def parse_rules(given: RulesInput) -> Transforms:
    """The rules that were given."""
    match given:
        case Transforms():
            return given
        case Mapping():
            return Transforms.model_validate(given)
        case list() | tuple():
            return Transforms.model_validate({"rules": given})
    raise ConfigError(
        "what was given for rules is none",
        found=type(given).__name__,
        hint="Give a list of rules, or `Transforms(rules=[…], keys={…})` where they need keys.",
    )


def _troubles(rule: Rule, keys: dict[str, KeySource]) -> Iterator[PydanticCustomError]:
    if rule.when is not None and rule.do in UNCONDITIONAL:
        yield declaration_error(
            f"rule `{rule.name}`: `when` cannot go with `{rule.do}`: a table has a column in all rows or in none",
            UNCONDITIONAL[rule.do],
        )
    if rule.when is not None and isinstance(rule, Decrypt) and rule.to != "binary":
        yield declaration_error(
            f"rule `{rule.name}`: with `when`, what `decrypt` leaves alone is binary and cannot stay in a column of "
            f"{rule.to}",
            "Decrypt all rows, or `to: binary`.",
        )
    if isinstance(rule, Hmac | Encrypt) and rule.key not in keys:
        yield declaration_error(
            f"rule `{rule.name}` names the key `{rule.key}`, and there is none of that name",
            "Name it under `transforms.keys`, for example: `keys: {main: {env: TAILRACE_KEY}}`.",
        )
    given = {name: said for name in _READ if (said := getattr(rule, name, None)) is not None}
    written = {name: said for name, said in given.items() if name not in ("to", "type")}
    types = {name: said for name, said in given.items() if name in ("to", "type") and rule.do in TYPED_RULES}
    if written or types:
        yield from _misread(rule, written, types)
    if isinstance(rule, Decrypt) and not keys:
        yield declaration_error(f"rule `{rule.name}` has no key to decrypt with", "Name one under `transforms.keys`.")


def _misread(rule: Rule, written: dict[str, str], types: dict[str, str]) -> Iterator[PydanticCustomError]:
    """Expressions and types that are none. Arrow is needed to say so, and only where there are some."""
    from tailrace.transforms.expression import Expression
    from tailrace.transforms.steps.column_values import parse_type

    for read, said in ((Expression, written), (parse_type, types)):
        for name, text in said.items():
            try:
                read(text)
            except ConfigError as error:
                yield declaration_error(f"rule `{rule.name}`, `{name}`: {error.message}", error.hint)


def _check_target(to: str, known: tuple[str, ...]) -> str:
    plain = re.sub(r"\{(" + "|".join(known) + r")\}", "x", to)
    if "{" in plain or "}" in plain or not re.fullmatch(r"[^.]+\..+", plain):
        places = ", ".join(f"{{{name}}}" for name in known)
        raise declaration_error(
            f"must be `schema.table`, with {places} where wanted", 'For example: `to: "{schema}.{table}"`.'
        )
    return to
