"""A function of the caller's own between the source and a batch: Arrow in, Arrow out, for stream and snapshot alike.

It changes values, never which rows there are, nor what a change says of itself: an acknowledgement counts rows of the
source. Where it fails nothing is handed out, and nothing behind it; the same rows are tried again at the next poll.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from tailrace.errors import ConfigError
from tailrace.model import change
from tailrace.model.batch import AnyWindow, ChangeBatch
from tailrace.model.system_streams import is_system

Transform: TypeAlias = Callable[[ChangeBatch], ChangeBatch]
_OWN = (change.OP, change.SEQ, change.TX, change.TX_INDEX, change.COMMITTED_AT)


def transform_window(window: AnyWindow, transform: Transform | None) -> AnyWindow:
    """The window as the function makes it."""
    if transform is None:
        return window
    return replace(window, batches=tuple(_applied(batch, transform) for batch in window.batches))


def _applied(batch: ChangeBatch, transform: Transform) -> ChangeBatch:
    if is_system(batch.schema):
        return batch
    made = transform(batch)
    if not isinstance(made, ChangeBatch):
        raise ConfigError(
            "a transform gave no batch",
            table=batch.schema.table,
            found=type(made).__name__,
            hint="Return what it was given with other values: `dataclasses.replace(rows, data=…)`.",
        )
    names = set(made.data.schema.names)
    missing = [column for column in made.schema.names if change.stored_name(column) not in names]
    if len(made) != len(batch) or missing or any(not _same(batch, made, name) for name in _OWN):
        raise ConfigError(
            "a transform took or added rows, or changed what changes say of themselves",
            table=batch.schema.table,
            hint="It may change values and columns; `schema` names every column that `data` has.",
        )
    return made


def _same(batch: ChangeBatch, made: ChangeBatch, name: str) -> bool:
    if name not in made.data.schema.names:
        return False
    mine, theirs = batch.data.column(name), made.data.column(name)
    return theirs is mine or bool(theirs.equals(mine))
