"""The rules, as a person declares them: the same objects from a settings file and from a program.

A rule is data: it holds no secret, opens nothing and can be pickled. Keys are named, and each name says where the key
lies; whoever applies the rules reads it there. Rules apply in the order they are given, and a column is named as the
rule before has left it. Nothing here needs Arrow, so a settings file is checked without it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from tailrace.errors import ConfigError

RULES_MAX = 200
MASK_MAX = 64
"""Characters that a mask may leave at either end."""

_FROZEN = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, populate_by_name=True)
Scalar = bool | int | Decimal | str | None
OnError = Literal["halt", "dead-letter"]
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]


def refusal(message: str, hint: str) -> PydanticCustomError:
    """What is wrong with a rule, and what to do; the settings' reader shows both."""
    return PydanticCustomError("refused", "{message}", {"message": message, "hint": hint})


class KeySource(BaseModel):
    """Where a key lies: 32 bytes as hex or base64, in a variable of the environment or in a file."""

    model_config = _FROZEN
    env: Annotated[str, Field(min_length=1)] | None = None
    file: Path | None = None

    @model_validator(mode="after")
    def _is_one_place(self) -> KeySource:
        if (self.env is None) == (self.file is None):
            raise refusal("needs either `env` or `file`", "For example: `{env: TAILRACE_KEY}`.")
        return self


class Rule(BaseModel):
    """What all rules have."""

    model_config = _FROZEN
    do: str
    name: Annotated[str, Field(min_length=1, max_length=100)] = ""
    """What errors and reports call it; by default its kind and its place."""
    tables: Names = ("*.*",)
    """Patterns `schema.table`, as in `source.tables`."""
    when: str | None = None
    """An expression: rows of which it is not true are left alone."""
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
                raise refusal(f"holds `{glob}`, which names no schema", f'Write `"public.{glob}"`.')
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


class Truncate(Rule):
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


class Cast(Rule):
    """Another type."""

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
    """Inserted rows are messages, each for the table that its type names; nothing else that happens to them counts."""

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
    metadata: dict[Literal["_op", "_position", "_tx", "_tx_index", "_committed_at"], str] = {}
    """What is kept of a change, and under which name."""


class Function(Rule):
    """A function of the user's: a record batch of the named columns to one of as many rows."""

    do: Literal["function"] = "function"
    columns: Names
    function: str | Callable[..., Any]
    """`package.module:name`, or the function itself."""

    @field_validator("function")
    @classmethod
    def _is_a_place(cls, function: str | Callable[..., Any]) -> str | Callable[..., Any]:
        if isinstance(function, str) and not re.fullmatch(r"[\w.]+:\w+", function):
            raise refusal("must be `package.module:name`", "For example: `function: shop.clean:addresses`.")
        return function

    @property
    def digest(self) -> str:
        named = self.function if isinstance(self.function, str) else f"{self.function.__module__}:{self.function}"
        said = [self.columns, self.when, re.sub(r" at 0x[0-9a-f]+", "", named)]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:8]


KINDS: dict[str, type[Rule]] = {
    str(kind.model_fields["do"].default): kind
    for kind in (
        Mask, Redact, Null, Truncate, Sha256, Hmac, Encrypt, Decrypt, Filter, Include, Exclude, Rename, Copy, Set, Cast,
        Compute, Route, Outbox, Unwrap, Function,
    )
}  # fmt: skip
TYPED = ("cast", "decrypt", "set", "compute")
"""Rules that name a type, in `to` or `type`."""
SHAPES_ROWS = ("include", "exclude", "rename", "cast", "outbox", "unwrap")
"""Rules that make every row another shape: there is no row that they could leave alone."""

AnyRule = Annotated[
    Mask | Redact | Null | Truncate | Sha256 | Hmac | Encrypt | Decrypt | Filter | Include | Exclude | Rename | Copy
    | Set | Cast | Compute | Route | Outbox | Unwrap | Function,
    Field(discriminator="do"),
]  # fmt: skip


class Transforms(BaseModel):
    """All rules, in order, and the keys that they name."""

    model_config = _FROZEN
    keys: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")], KeySource] = {}
    rules: Annotated[tuple[AnyRule, ...], Field(max_length=RULES_MAX)] = ()

    def __bool__(self) -> bool:
        return bool(self.rules)

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
                raise refusal(f"two rules are called `{rule.name}`", "Give each its own name.")
            seen.add(rule.name)
            for said in _troubles(rule, self.keys):
                raise said
        return self


def _troubles(rule: Rule, keys: dict[str, KeySource]) -> Iterator[PydanticCustomError]:
    if rule.when is not None and rule.do in SHAPES_ROWS:
        yield refusal(
            f"rule `{rule.name}`: `when` cannot go with `{rule.do}`, which makes every row another shape",
            "Use `null` or `redact` with `when`, or `tables` to choose tables.",
        )
    if isinstance(rule, Hmac | Encrypt) and rule.key not in keys:
        yield refusal(
            f"rule `{rule.name}` names the key `{rule.key}`, and there is none of that name",
            "Name it under `transforms.keys`, for example: `keys: {main: {env: TAILRACE_KEY}}`.",
        )
    written = {name: said for name in ("when", "where", "expression") if (said := getattr(rule, name, None))}
    types = {name: said for name in ("to", "type") if rule.do in TYPED and (said := getattr(rule, name, None))}
    if written or types:
        yield from _misread(rule, written, types)
    if isinstance(rule, Decrypt) and not keys:
        yield refusal(f"rule `{rule.name}` has no key to decrypt with", "Name one under `transforms.keys`.")


def _misread(rule: Rule, written: dict[str, str], types: dict[str, str]) -> Iterator[PydanticCustomError]:
    """Expressions and types that are none. Arrow is needed to say so, and only where there are some."""
    from tailrace.transforms.columns import type_named
    from tailrace.transforms.expression import Expression

    for read, said in ((Expression, written), (type_named, types)):
        for name, text in said.items():
            try:
                read(text)
            except ConfigError as error:
                yield refusal(f"rule `{rule.name}`, `{name}`: {error.message}", error.hint)


def _check_target(to: str, known: tuple[str, ...]) -> str:
    plain = re.sub(r"\{(" + "|".join(known) + r")\}", "x", to)
    if "{" in plain or "}" in plain or not re.fullmatch(r"[^.]+\..+", plain):
        places = ", ".join(f"{{{name}}}" for name in known)
        raise refusal(f"must be `schema.table`, with {places} where wanted", 'For example: `to: "{schema}.{table}"`.')
    return to
