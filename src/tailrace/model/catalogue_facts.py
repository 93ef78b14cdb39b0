"""Catalogue facts: what a source's catalogue says of a table beyond its rows.

A catalogue describes the present, and rows may be older. So a schema has facts only if the catalogue still showed
exactly its columns and types when it was read. Otherwise the facts are unknown, and no conclusion may be drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tailrace.model.position import ZERO, Lsn

UNKNOWN = "unknown"
"""Stored in a record instead of a fact."""


@dataclass(frozen=True, kw_only=True)
class ColumnFacts:
    """Catalogue facts of one column."""

    number: int
    """Survives a rename of the column, and is never reused for another column."""
    nullable: bool
    default: str | None
    """The default's expression; None: no default."""
    fast_default: str | None
    """The value, as text, of rows older than the column; None: rows were not filled without being rewritten."""
    definition_version: int
    """Changes whenever the column's definition is changed."""


@dataclass(frozen=True, kw_only=True)
class StorageFacts:
    """The storage of a table's rows: the table itself, or each partition."""

    relation: int
    name: str
    file: int | None
    """Changes whenever all rows are rewritten."""
    attached: bool
    """True if it existed before it became a partition, and so may have had rows."""


@dataclass(frozen=True, kw_only=True)
class CatalogueFacts:
    """The catalogue facts of one version of a table's schema."""

    columns: tuple[ColumnFacts, ...]
    """In the order of the schema's columns."""
    storage: tuple[StorageFacts, ...]
    columns_ever: int
    """Number of columns that the table has ever had, published or not. The next one gets a greater number."""
    unpublished: tuple[int, ...] = ()
    """Numbers of the current columns that are not published."""
    position: Lsn = field(default=ZERO, compare=False)
    """The source's position when the catalogue was read. Of two reads, the one at the later position is newer."""
    rows_unknown: bool = False
    """Lake tables only: the columns changed, and the rows have not been reloaded yet."""

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(column.number for column in self.columns)

    def same_but_file(self, other: CatalogueFacts) -> bool:
        """Return whether the facts are equal but for the file of an unpartitioned table.

        That file alone proves nothing.
        """
        if len(self.storage) > 1 or len(other.storage) > 1:
            return self == other
        return self._without_files() == other._without_files()

    def _without_files(self) -> CatalogueFacts:
        return replace(self, storage=tuple(replace(item, file=None) for item in self.storage))

    def to_json(self) -> dict[str, Any]:
        return {
            "columns": [
                [column.number, column.nullable, column.default, column.fast_default, column.definition_version]
                for column in self.columns
            ],
            "storage": [[item.relation, item.name, item.file, item.attached] for item in self.storage],
            "made": self.columns_ever,
            "others": list(self.unpublished),
            "at": str(self.position),
            **({"owed": True} if self.rows_unknown else {}),
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> CatalogueFacts:
        return cls(
            columns=tuple(
                ColumnFacts(
                    number=number, nullable=nullable, default=default, fast_default=fill, definition_version=stamp
                )
                for number, nullable, default, fill, stamp in stored["columns"]
            ),
            storage=tuple(
                StorageFacts(relation=relation, name=name, file=file, attached=attached)
                for relation, name, file, attached in stored["storage"]
            ),
            columns_ever=stored["made"],
            unpublished=tuple(stored.get("others", ())),
            position=Lsn.parse(stored["at"]) if "at" in stored else ZERO,
            rows_unknown=stored.get("owed", False),
        )
