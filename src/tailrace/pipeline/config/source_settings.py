"""Define the settings of the source, and which tables they name.

Names are compared verbatim, case included. A URL appears in no `repr`, because it may contain a password.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tailrace.pipeline.config.setting_values import (
    Glob,
    PrefixGlob,
    PublicationName,
    SlotName,
    Url,
    refusal,
    split_glob,
)

if TYPE_CHECKING:
    # Importing it costs an import of pyarrow, which `tailrace check` has no use for.
    from tailrace.model.schema import TableId

FROZEN = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class SlotSettings(BaseModel):
    """The replication slot: named after the log's id and created if missing, by default."""

    model_config = FROZEN
    name: SlotName | None = None
    create: bool = True

    @model_validator(mode="after")
    def _is_findable(self) -> SlotSettings:
        _refuse_unnamed(self, "slot")
        return self


class PublicationSettings(BaseModel):
    """The publication: named after the log's id and created if missing, by default."""

    model_config = FROZEN
    name: PublicationName | None = None
    create: bool = True

    @model_validator(mode="after")
    def _is_findable(self) -> PublicationSettings:
        _refuse_unnamed(self, "publication")
        return self


def _refuse_unnamed(settings: SlotSettings | PublicationSettings, what: str) -> None:
    if not settings.create and settings.name is None:
        raise refusal(
            f"`create: false` needs a `name`: otherwise the {what} is unknown",
            f"Add `name:`, the name of the {what} you made.",
        )


class SourceSettings(BaseModel):
    """The database, and which of its tables are copied."""

    model_config = FROZEN
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
        """The URL with its password: pass it to the driver and to nothing else."""
        return self.secret_url.get_secret_value()


def matches(source: SourceSettings, table: TableId) -> bool:
    """Return whether the pipeline copies this table.

    It does if a glob of `tables` matches the table and none of `exclude` does. A glob is `schema-glob.table-glob`.
    Names are compared verbatim, case included. A name may itself hold a dot, so a glob matches if any split at one of
    its dots outside brackets does.
    """

    def matched(globs: Sequence[str]) -> bool:
        return any(glob_matches(glob, table) for glob in globs)

    return matched(source.tables) and not matched(source.exclude)


def is_named(name: str, table: TableId) -> bool:
    """Return whether a name or glob from a person means this table."""
    return name == str(table) or glob_matches(name, table)


def glob_matches(glob: str, table: TableId) -> bool:
    return any(
        fnmatch.fnmatchcase(table.schema, schema) and fnmatch.fnmatchcase(table.name, name)
        for schema, name in split_glob(glob)
    )


def names_table(source: SourceSettings, table: TableId) -> bool:
    """Return whether an entry of `tables` is exactly this table's name, not a pattern."""
    pairs = [pair for glob in source.tables for pair in split_glob(glob)]
    return any((_literal(schema), _literal(name)) == (table.schema, table.name) for schema, name in pairs)


def _literal(glob: str) -> str | None:
    """Return the one name that a glob can match; None if it is a pattern.

    A single character in brackets means itself.
    """
    alone = re.compile(r"\[([^!])\]")
    return None if re.search(r"[*?[]", alone.sub("", glob)) else alone.sub(r"\1", glob)


def matches_message(source: SourceSettings, prefix: str) -> bool:
    """Return whether the pipeline keeps application messages with this prefix."""
    return any(fnmatch.fnmatchcase(prefix, glob) for glob in source.messages)
