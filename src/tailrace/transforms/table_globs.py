"""Which tables a pattern means: `schema.table`, each with `*`, `?` and `[…]`, names compared verbatim."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from tailrace.model.schema import TableId


def matches(glob: str, table: TableId) -> bool:
    """A name may itself hold a dot, so the pattern is split at any one of its own."""
    dots = [at for at, letter in enumerate(glob) if letter == "."]
    return any(
        fnmatch.fnmatchcase(table.schema, glob[:at]) and fnmatch.fnmatchcase(table.name, glob[at + 1 :]) for at in dots
    )


def matches_any(globs: Iterable[str], table: TableId) -> bool:
    return any(matches(glob, table) for glob in globs)
