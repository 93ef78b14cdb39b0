"""What a lake table is made of its source's rows: their last state, every change of them, or every version.

A form is recorded in the table's own commits. A table made in one is never written in another: rows of two forms in
one table would mean nothing. What a form adds stands in columns of its own, after those of the source; a column of
the source that has the name of one is refused, never hidden.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from tailrace.errors import TableUnusable, Unsupported
from tailrace.model import change
from tailrace.model.position import ZERO
from tailrace.model.schema import Column, Identity, TableId, TableSchema
from tailrace.tables.partitions import refuse_columns


class TableMode(enum.Enum):
    """What a table holds."""

    MIRROR = "mirror"
    """Each row of the source as it is now."""
    HISTORY = "history"
    """Each row of the source as it was, one row for each transaction that changed it."""
    APPEND = "append"
    """Each change, one row for each."""


DELETED = "_deleted"
ICEBERG_DELETED = "_is_deleted"
"""In an Iceberg table, where the other name is the connector's own."""
VALID_FROM, VALID_TO, CURRENT = "_valid_from", "_valid_to", "_current"

TIME = pa.timestamp("us", "UTC")
_TYPES: Mapping[str, pa.DataType] = {
    **{field.name: field.type for field in change.REQUIRED},
    change.UNCHANGED: pa.list_(pa.string()),
    VALID_FROM: TIME, VALID_TO: TIME, CURRENT: pa.bool_(),
}  # fmt: skip

METADATA = tuple(field.name for field in change.REQUIRED)
"""What a table may say of the change that each row comes from, by name."""
_OF_APPEND = (*METADATA, change.UNCHANGED)
_OF_HISTORY = (VALID_FROM, VALID_TO, CURRENT, change.SEQ, change.TX)

_COLLISION_HINT = (
    "Leave the name out of `tables.metadata`, do without `soft_delete` or choose another `mode`, whichever adds it; or "
    "give the source's column another name in `tables.rules` (`columns:`)."
)
_TWINS_HINT = "Give one of them another name in `tables.rules` (`columns:`); case makes no difference."
_KEYLESS_HINT = "Give the table a primary key or a replica identity with one, or use `mode: append`, or a plain mirror."


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """One table's form."""

    mode: TableMode = TableMode.MIRROR
    soft_delete: bool = False
    """Of a mirror: rows that are deleted stay, marked"""
    deleted_column: str = DELETED
    """in this column."""
    metadata: tuple[str, ...] = ()
    """Which of `METADATA` stand with each row, besides those that the mode needs."""
    renamed_columns: tuple[tuple[str, str], ...] = ()
    """Columns that have another name in the lake: the source's, the lake's."""
    partition_by: tuple[str, ...] = ()
    """Columns, by their names in the lake, whose values say which rows lie together."""
    holds_messages: bool = False
    """Of a mirror: its rows are messages, and stay as they are when the source no longer has them."""

    def __post_init__(self) -> None:
        if self.soft_delete and self.mode is not TableMode.MIRROR:
            raise ValueError("only a mirror marks what is deleted")
        if self.holds_messages and (self.soft_delete or self.mode is not TableMode.MIRROR):
            raise ValueError("messages are kept as they are")
        if not set(self.metadata) <= set(METADATA):
            raise ValueError("there is no such metadata column")

    @property
    def added_columns(self) -> tuple[Column, ...]:
        """The columns beside the source's own, in order."""
        needed = {TableMode.MIRROR: (), TableMode.HISTORY: _OF_HISTORY, TableMode.APPEND: _OF_APPEND}[self.mode]
        wanted = [name for name in METADATA if name in self.metadata and name not in needed]
        marks = (Column(name=self.deleted_column, source_type="", type=pa.bool_()),) if self.soft_delete else ()
        return (*marks, *(Column(name=name, source_type="", type=_TYPES[name]) for name in (*needed, *wanted)))

    @property
    def keeps_past(self) -> bool:
        """Whether the table holds what the source no longer has, so that loading it anew must not replace it."""
        return self.mode is not TableMode.MIRROR or self.soft_delete or self.holds_messages

    @property
    def needs_exact_load(self) -> bool:
        """Whether only a load in one snapshot will do: a row that is read after a change of it is applied again, which
        a mirror does not notice. Or the log must bring the table there first: messages may be gone at the source."""
        return self.mode is not TableMode.MIRROR or self.holds_messages

    def stored_schema(self, schema: TableSchema) -> TableSchema:
        """The lake table's own shape; refuses a source table that cannot have this form."""
        if self == PLAIN_MIRROR:
            return schema
        self._refuse_keyless(schema)
        own = [replace(column, name=self.lake_name(column.name)) for column in schema.columns]
        taken: set[str] = set()
        for column in (*own, *self.added_columns):
            if column.name.lower() in taken:
                what, hint = "two columns of the lake table would have one name", _TWINS_HINT
                if column in self.added_columns:
                    what, hint = "a column has the name of one that the table's form adds", _COLLISION_HINT
                raise TableUnusable(what, table=schema.table, column=column.name, hint=hint)
            taken.add(column.name.lower())
        key = () if self.mode is TableMode.APPEND else tuple(map(self.lake_name, schema.key))
        stored = replace(schema, columns=(*own, *self.added_columns), key=key, facts=None)
        refuse_columns(stored, self.partition_by)
        return stored

    def is_equivalent(self, other: TableSpec, schema: TableSchema) -> bool:
        """Whether both make the same of the source's table; names of columns that it does not have make no
        difference."""
        mine, theirs = (
            replace(form, renamed_columns=tuple(pair for pair in form.renamed_columns if pair[0] in schema.names))
            for form in (self, other)
        )
        return mine == theirs

    def lake_name(self, column: str) -> str:
        """What a column of the source is called in the lake."""
        return dict(self.renamed_columns).get(column, column)

    def partitions_of(self, schema: TableSchema) -> dict[str, str]:
        """Columns of the source that the lake table is partitioned by: their names there, and in the lake."""
        return {name: own for name in schema.names if (own := self.lake_name(name)) in self.partition_by}

    def can_repair(self, schema: TableSchema) -> bool:
        """Whether a row that the table lacks can be asked for by its key and put in; what one change of many was, or
        which of equal rows, the source does not tell."""
        return self.mode is not TableMode.APPEND and bool(schema.key)

    def refuse_partial_load(self, table: TableId) -> None:
        """Refuse to read a part of the table again where every change or version is kept."""
        if self.needs_exact_load:
            what = "messages" if self.holds_messages else f"a table in `mode: {self.mode.value}`"
            raise Unsupported(
                f"a part of {what} cannot be read again",
                table=table,
                hint="Ask without --where: the whole table is read.",
            )

    def _refuse_keyless(self, schema: TableSchema) -> None:
        if self.mode is TableMode.APPEND:
            return
        if not schema.key and (self.keeps_past or self.metadata):
            what = "a history" if self.mode is TableMode.HISTORY else "a mirror with columns of its own"
            raise TableUnusable(f"{what} needs a table with a key", table=schema.table, hint=_KEYLESS_HINT)
        if schema.identity is Identity.NONE and self.keeps_past and not self.holds_messages:
            raise TableUnusable(
                "the source does not tell which rows are updated and deleted", table=schema.table, hint=_KEYLESS_HINT
            )

    def to_json(self) -> dict[str, Any]:
        return {
            "mode": self.mode.value,
            "soft_delete": self.soft_delete,
            "metadata": list(self.metadata),
            "columns": [list(pair) for pair in self.renamed_columns],
            **({"mark": self.deleted_column} if self.deleted_column != DELETED else {}),
            **({"partition_by": list(self.partition_by)} if self.partition_by else {}),
            **({"keeps": True} if self.holds_messages else {}),
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> TableSpec:
        return cls(
            mode=TableMode(stored["mode"]),
            soft_delete=stored["soft_delete"],
            metadata=tuple(stored["metadata"]),
            renamed_columns=tuple((old, new) for old, new in stored["columns"]),
            deleted_column=stored.get("mark", DELETED),
            partition_by=tuple(stored.get("partition_by", ())),
            holds_messages=stored.get("keeps", False),
        )

    def __str__(self) -> str:
        """In a word or two, for people."""
        return (
            "messages"
            if self.holds_messages
            else f"{self.mode.value}, soft delete"
            if self.soft_delete
            else self.mode.value
        )

    @property
    def described(self) -> str:
        """All of it, for people."""
        apart = [f"partitioned by {' and '.join(self.partition_by)}"] if self.partition_by else []
        return ", ".join([str(self), *self.metadata, *(f"{old} as {new}" for old, new in self.renamed_columns), *apart])


PLAIN_MIRROR = TableSpec()
"""A mirror with nothing beside the source's own columns."""


@dataclass(frozen=True, kw_only=True)
class LoadOrigin:
    """Where rows that a load reads come from: they are as they were there, or later."""

    seq: int
    position: str
    read_at: int
    """When the load began, µs since 1970 by the clock of this machine."""


NO_ORIGIN = LoadOrigin(seq=0, position=str(ZERO), read_at=0)
"""Where the form asks for nothing."""
