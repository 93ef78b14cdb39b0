"""A table's name, and one version of its schema.

Two schemas are equal when a row of one can be read as a row of the other. Nothing that can differ between two readings
of the same rows (a catalogue look-up, the order of discovery) affects equality.
"""

from __future__ import annotations

import base64
import enum
import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from tailrace.errors import ConfigError
from tailrace.model import change
from tailrace.model.catalogue_facts import UNKNOWN, CatalogueFacts
from tailrace.validation import require_instance


@dataclass(frozen=True, order=True)
class TableId:
    """A table's name at the source. Its parts are kept separate: `a.b`.`c` is not `a`.`b.c`.

    No source has a schema without a name: the system streams use the empty name.
    """

    schema: str
    name: str

    def __post_init__(self) -> None:
        if not (isinstance(self.schema, str) and isinstance(self.name, str)):
            raise ConfigError(
                "the name of a table is invalid",
                schema=ascii(self.schema),
                name=ascii(self.name),
                hint='Give schema and name, two texts: `TableId("public", "orders")`.',
            )

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}" if self.schema else self.name

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> TableId:
        """Return the table that a record names."""
        return cls(stored["schema"], stored["table"])


class Identity(enum.Enum):
    """The replica identity: the part of the old row sent with an update or delete."""

    KEY = "key"
    """The key's old values, when they changed or the row was deleted."""
    FULL = "full"
    """The whole old row."""
    NONE = "none"
    """Nothing: only inserts and truncates can be published."""


RULE_MARK = " · "
"""Precedes each rule in a column's `source_type`.

The rule changed the column's values, or filtered the rows.
"""


COLUMNS_HINT = "Name each column once."


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column: its name verbatim, the source's type, and the Arrow type of its values."""

    name: str
    source_type: str
    type: pa.DataType

    def __post_init__(self) -> None:
        require_instance("name", self.name, str, "Give the column's name as it is at the source.")
        require_instance("source_type", self.source_type, str, 'Give the source\'s name of the type: `"bigint"`.')
        require_instance("type", self.type, pa.DataType, "Give an Arrow type: `pa.int64()`.")

    @property
    def rule_marks(self) -> list[str]:
        """The rules that have changed the column."""
        return self.source_type.split(RULE_MARK)[1:]


@dataclass(frozen=True, kw_only=True)
class TableSchema:
    """One version of a table's schema. `key` names the columns a mirror is merged on; empty means keyless."""

    table: TableId
    relation: int
    """The source's own number for the table; survives a rename, not a re-creation."""
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    identity: Identity
    former_key: tuple[str, ...] = ()
    """Columns that left the key; only in a view over versions (`merged_schema`), never stored."""
    facts: CatalogueFacts | None = field(default=None, compare=False, repr=False)
    """The catalogue facts; None: unknown. They do not count for equality."""
    source_version: TableSchema | None = field(default=None, compare=False, repr=False)
    """The schema at the source, where rules derived this one from it; None: this is the source's own."""

    def __post_init__(self) -> None:
        require_instance("table", self.table, TableId, 'Give `TableId("public", "orders")`.')
        # The key may name columns that are not here: a view of some columns, or of those in a partition's files.
        if len(set(self.names)) < len(self.columns):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise ConfigError("a table has two columns of one name", table=self.table, column=twice, hint=COLUMNS_HINT)

    @property
    def source_schema(self) -> TableSchema:
        """The schema at the source."""
        return self.source_version or self

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    def same_rows(self, other: TableSchema) -> bool:
        """Return whether rows of both fit one mirror table."""
        mine = [(column.name, column.type) for column in self.columns]
        return mine == [(column.name, column.type) for column in other.columns] and self.key == other.key

    @property
    def owed(self) -> bool:
        """Lake tables only: True if a load was begun and has not been committed."""
        return self.facts is not None and self.facts.rows_unknown

    def with_owed(self, owed: bool) -> TableSchema:
        """Return the same schema with `owed` set; unchanged without facts, which hold the mark."""
        return replace(self, facts=replace(self.facts, rows_unknown=owed)) if self.facts else self

    def same_with_facts(self, other: TableSchema) -> bool:
        """Return whether both schema and catalogue facts are equal."""
        return self == other and self.facts == other.facts

    def covers(self, other: TableSchema) -> bool:
        """Return whether the other is the same schema, without facts unknown here."""
        return self == other and (other.facts is None or self.facts == other.facts)

    def row_fields(self) -> list[pa.Field]:
        """Return the table's own columns, verbatim: those of a mirror table."""
        return [pa.field(column.name, column.type) for column in self.columns]

    def change_schema(self) -> pa.Schema:
        """Return the Arrow schema of a stored change of this version, with every optional column."""
        row = [pa.field(change.stored_name(column.name), column.type) for column in self.columns]
        ever = {*self.key, *self.former_key}
        key = [field for field, column in zip(row, self.columns, strict=True) if column.name in ever]
        optional = [
            pa.field(change.UNCHANGED, pa.list_(pa.string())),
            pa.field(change.BEFORE, pa.struct(row)),
            pa.field(change.MOVED_FROM, pa.struct(key)),
            pa.field(change.UNFIT, change.UNFIT_TYPE),
        ]
        return pa.schema([*change.REQUIRED, *optional, *row])

    def to_json(self) -> dict[str, Any]:
        """Return a record that reads back equal; Arrow types are stored in Arrow's own encoding."""
        fields = pa.schema([pa.field(column.name, column.type) for column in self.columns])
        return {
            "schema": self.table.schema,
            "name": self.table.name,
            "relation": self.relation,
            "columns": [
                {"name": column.name, "source_type": column.source_type, "type": str(column.type)} | facts
                for column, facts in zip(self.columns, self._column_facts(), strict=True)
            ],
            "arrow": base64.b64encode(fields.serialize()).decode(),
            "key": list(self.key),
            "identity": self.identity.value,
            "facts": self.facts.to_json() if self.facts else UNKNOWN,
            **({"origin": self.source_version.to_json()} if self.source_version else {}),
        }

    def _column_facts(self) -> list[dict[str, Any]]:
        """Return the catalogue facts of each column, for people."""
        if self.facts is None:
            return [{"number": UNKNOWN, "nullable": UNKNOWN, "default": UNKNOWN}] * len(self.columns)
        return [
            {"number": column.number, "nullable": column.nullable, "default": column.default}
            for column in self.facts.columns
        ]

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> TableSchema:
        fields = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(stored["arrow"])))
        return cls(
            table=TableId(stored["schema"], stored["name"]),
            relation=stored["relation"],
            columns=tuple(
                Column(name=column["name"], source_type=column["source_type"], type=field.type)
                for column, field in zip(stored["columns"], fields, strict=True)
            ),
            key=tuple(stored["key"]),
            identity=Identity(stored["identity"]),
            facts=CatalogueFacts.from_json(stored["facts"]) if stored.get("facts", UNKNOWN) != UNKNOWN else None,
            source_version=cls.from_json(stored["origin"]) if "origin" in stored else None,
        )


def unknown_column_error(schema: TableSchema, columns: list[str]) -> ConfigError:
    """Return the error for rows that name columns the schema does not have."""
    return ConfigError(
        "the table has no such column",
        table=schema.table,
        columns=", ".join(sorted(columns)),
        hint=f"It has {', '.join(schema.names)}. Another version of the schema has other columns.",
    )


def wrong_type_error(schema: TableSchema) -> ConfigError:
    """Return the error for a value of another type than its column's.

    Arrow's own message contains the value, so it is only chained.
    """
    kinds = ", ".join(f"{column.name} {column.type}" for column in schema.columns)
    return ConfigError(
        "a value does not have its column's type", table=schema.table, hint=f"Give values of these types: {kinds}."
    )


def table_token(table: TableId) -> str:
    """Return the name that files and folders about this table have."""
    return hashlib.sha256(f"{len(table.schema)}.{table.schema}.{table.name}".encode()).hexdigest()[:16]
