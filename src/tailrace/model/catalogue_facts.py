"""What a source's catalogue tells of a table beyond what comes with its rows.

A catalogue speaks of now, and rows may be of yesterday. So a shape has facts only if the catalogue still showed its
very columns and types when it was asked; otherwise they are unknown, and nothing may be concluded.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tailrace.model.position import ZERO, Lsn

UNKNOWN = "unknown"
"""What stands in a record in place of a fact."""


@dataclass(frozen=True, kw_only=True)
class ColumnFacts:
    """One column."""

    number: int
    """Keeps its value when the column is renamed, and is never given to another column of the table."""
    nullable: bool
    default: str | None
    """The expression; None: it has none."""
    fast_default: str | None
    """What rows have that are older than the column, as text; None: nothing was filled in without touching them."""
    definition_version: int
    """Another one whenever the column's definition was changed."""


@dataclass(frozen=True, kw_only=True)
class StorageFacts:
    """Where rows of the table lie: the table itself, or each partition."""

    relation: int
    name: str
    file: int | None
    """Another one whenever all rows were written anew."""
    attached: bool
    """Whether it existed before it became a partition, and so may have had rows."""


@dataclass(frozen=True, kw_only=True)
class CatalogueFacts:
    """What the catalogue told of one version of a table's shape."""

    columns: tuple[ColumnFacts, ...]
    """In the order of the shape's columns."""
    storage: tuple[StorageFacts, ...]
    columns_ever: int
    """How many columns the table has ever had, published or not: the next one gets a greater number."""
    unpublished: tuple[int, ...] = ()
    """The numbers of the columns that it has now and that are not published."""
    position: Lsn = field(default=ZERO, compare=False)
    """Where the source was when it was asked: of two answers, the one from further on is the newer."""
    rows_unknown: bool = False
    """Of a lake table alone: whether it has these columns, and nobody knows yet what the source has in its rows."""

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(column.number for column in self.columns)

    def same_but_file(self, other: CatalogueFacts) -> bool:
        """Whether nothing differs but the file of a table without partitions: that alone proves nothing."""
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
