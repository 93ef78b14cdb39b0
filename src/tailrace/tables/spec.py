"""Define the table spec: what a lake table is made of, chosen in the settings.

A lake table holds the last state of its source's rows, every change of them, or every version. A table's spec is
recorded in its own commits. A table made with one spec is never written with another, because rows of two specs in one
table would have no meaning. Columns that the spec adds follow those of the source. If a source column has the name of
an added one, the table is refused; the column is never hidden.
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
    """The kind of rows that a table holds."""

    MIRROR = "mirror"
    """Each row of the source as it is now."""
    HISTORY = "history"
    """Each version of a source row: one row for each transaction that changed it."""
    APPEND = "append"
    """Each change as one row."""


DELETED = "_deleted"
ICEBERG_DELETED = "_is_deleted"
"""The name in Iceberg tables, where the connector reserves the other one."""
VALID_FROM, VALID_TO, CURRENT = "_valid_from", "_valid_to", "_current"

TIME = pa.timestamp("us", "UTC")
_TYPES: Mapping[str, pa.DataType] = {
    **{field.name: field.type for field in change.REQUIRED},
    change.UNCHANGED: pa.list_(pa.string()),
    VALID_FROM: TIME, VALID_TO: TIME, CURRENT: pa.bool_(),
}  # fmt: skip

METADATA = tuple(field.name for field in change.REQUIRED)
"""The metadata columns that a table may have: facts of the change that each row is from."""
_OF_APPEND = (*METADATA, change.UNCHANGED)
_OF_HISTORY = (VALID_FROM, VALID_TO, CURRENT, change.SEQ, change.TX)

_COLLISION_HINT = (
    "Remove what adds the column: the name in `tables.metadata`, `soft_delete` or the `mode`. Or rename the source's "
    "column in `tables.rules` (`columns:`)."
)
_TWINS_HINT = "Rename one of them in `tables.rules` (`columns:`). Names that differ only in case count as equal."
_KEYLESS_HINT = "Give the table a primary key or a replica identity with one, or use `mode: append`, or a plain mirror."


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """The spec of one lake table."""

    mode: TableMode = TableMode.MIRROR
    soft_delete: bool = False
    """Mirror only: deleted rows stay, with `deleted_column` = true."""
    deleted_column: str = DELETED
    """Name of the column that marks deleted rows."""
    metadata: tuple[str, ...] = ()
    """Names from `METADATA` that each row has, in addition to those the mode needs."""
    renamed_columns: tuple[tuple[str, str], ...] = ()
    """Columns with another name in the lake, as pairs: source name, lake name."""
    partition_by: tuple[str, ...] = ()
    """Partition columns, by their names in the lake."""
    holds_messages: bool = False
    """Mirror only: its rows are messages, which stay unchanged when the source no longer has them."""

    def __post_init__(self) -> None:
        if self.soft_delete and self.mode is not TableMode.MIRROR:
            raise ValueError("soft delete needs a mirror")
        if self.holds_messages and (self.soft_delete or self.mode is not TableMode.MIRROR):
            raise ValueError("messages need a mirror without soft delete")
        if not set(self.metadata) <= set(METADATA):
            raise ValueError("unknown metadata column")

    @property
    def added_columns(self) -> tuple[Column, ...]:
        """The columns in addition to the source's own, in order."""
        needed = {TableMode.MIRROR: (), TableMode.HISTORY: _OF_HISTORY, TableMode.APPEND: _OF_APPEND}[self.mode]
        wanted = [name for name in METADATA if name in self.metadata and name not in needed]
        marks = (Column(name=self.deleted_column, source_type="", type=pa.bool_()),) if self.soft_delete else ()
        return (*marks, *(Column(name=name, source_type="", type=_TYPES[name]) for name in (*needed, *wanted)))

    @property
    def keeps_past(self) -> bool:
        """True if the table holds what the source no longer has. A reload must not replace such a table."""
        return self.mode is not TableMode.MIRROR or self.soft_delete or self.holds_messages

    @property
    def needs_exact_load(self) -> bool:
        """True if only a load in one snapshot is correct.

        A chunked load may read a row after one of its changes and apply that change again. A mirror does not notice
        that, but the other modes would. Messages must first be brought up to date from the log, because the source may
        have removed them.
        """
        return self.mode is not TableMode.MIRROR or self.holds_messages

    def stored_schema(self, schema: TableSchema) -> TableSchema:
        """Return the lake table's own schema. Refuse a source table that this spec does not fit."""
        if self == PLAIN_MIRROR:
            return schema
        self._refuse_keyless(schema)
        own = [replace(column, name=self.lake_name(column.name)) for column in schema.columns]
        taken: set[str] = set()
        for column in (*own, *self.added_columns):
            if column.name.lower() in taken:
                message, hint = "two columns of the lake table would have the same name", _TWINS_HINT
                if column in self.added_columns:
                    message, hint = "a column has the name of one that the table spec adds", _COLLISION_HINT
                raise TableUnusable(message, table=schema.table, column=column.name, hint=hint)
            taken.add(column.name.lower())
        key = () if self.mode is TableMode.APPEND else tuple(map(self.lake_name, schema.key))
        stored = replace(schema, columns=(*own, *self.added_columns), key=key, facts=None)
        refuse_columns(stored, self.partition_by)
        return stored

    def is_equivalent(self, other: TableSpec, schema: TableSchema) -> bool:
        """Return whether both specs make the same table from this source table.

        Renames of columns that the source table does not have make no difference.
        """
        mine, theirs = (
            replace(spec, renamed_columns=tuple(pair for pair in spec.renamed_columns if pair[0] in schema.names))
            for spec in (self, other)
        )
        return mine == theirs

    def lake_name(self, column: str) -> str:
        """Return a source column's name in the lake."""
        return dict(self.renamed_columns).get(column, column)

    def partitions_of(self, schema: TableSchema) -> dict[str, str]:
        """Map partition columns from their source names to their lake names."""
        return {name: lake_name for name in schema.names if (lake_name := self.lake_name(name)) in self.partition_by}

    def can_repair(self, schema: TableSchema) -> bool:
        """Return whether a missing row can be read from the source by key and inserted.

        The source cannot say which of many changes a row was from, nor which of equal rows is missing.
        """
        return self.mode is not TableMode.APPEND and bool(schema.key)

    def refuse_partial_load(self, table: TableId) -> None:
        """Refuse to reload a part of a table that keeps every change or version."""
        if self.needs_exact_load:
            described = "messages" if self.holds_messages else f"a table in `mode: {self.mode.value}`"
            raise Unsupported(
                f"a part of {described} cannot be reloaded",
                table=table,
                hint="Run the command without --where to reload the whole table.",
            )

    def _refuse_keyless(self, schema: TableSchema) -> None:
        if self.mode is TableMode.APPEND:
            return
        if not schema.key and (self.keeps_past or self.metadata):
            described = "a history" if self.mode is TableMode.HISTORY else "a mirror with columns of its own"
            raise TableUnusable(f"{described} needs a table with a key", table=schema.table, hint=_KEYLESS_HINT)
        if schema.identity is Identity.NONE and self.keeps_past and not self.holds_messages:
            raise TableUnusable(
                "the source does not send which rows are updated and deleted", table=schema.table, hint=_KEYLESS_HINT
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
        """Describe the spec in a word or two."""
        return (
            "messages"
            if self.holds_messages
            else f"{self.mode.value}, soft delete"
            if self.soft_delete
            else self.mode.value
        )

    @property
    def described(self) -> str:
        """The whole spec as text, for people."""
        partitions = [f"partitioned by {' and '.join(self.partition_by)}"] if self.partition_by else []
        return ", ".join(
            [str(self), *self.metadata, *(f"{old} as {new}" for old, new in self.renamed_columns), *partitions]
        )


PLAIN_MIRROR = TableSpec()
"""A mirror with no columns but the source's own."""


@dataclass(frozen=True, kw_only=True)
class LoadOrigin:
    """The point that a load's rows are from. A row is as it was there, or later."""

    seq: int
    position: str
    read_at: int
    """Start of the load, in µs since 1970 by this machine's clock."""


NO_ORIGIN = LoadOrigin(seq=0, position=str(ZERO), read_at=0)
"""The origin for a spec that records none."""
