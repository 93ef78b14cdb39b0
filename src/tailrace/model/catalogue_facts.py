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
    fill: str | None
    """What rows have that are older than the column, as text; None: nothing was filled in without touching them."""
    stamp: int
    """Another one whenever the column's definition was changed."""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Where rows of the table lie: the table itself, or each partition."""

    relation: int
    name: str
    file: int | None
    """Another one whenever all rows were written anew."""
    attached: bool
    """Whether it existed before it became a partition, and so may have had rows."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the catalogue told of one version of a table's shape."""

    columns: tuple[ColumnFacts, ...]
    """In the order of the shape's columns."""
    storage: tuple[Storage, ...]
    made: int
    """How many columns the table has ever had, published or not: the next one gets a greater number."""
    others: tuple[int, ...] = ()
    """The numbers of the columns that it has now and that are not published."""
    at: Lsn = field(default=ZERO, compare=False)
    """Where the source was when it was asked: of two answers, the one from further on is the newer."""
    owed: bool = False
    """Of a lake table alone: whether it has these columns, and nobody knows yet what the source has in its rows."""

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(column.number for column in self.columns)

    def alike(self, other: Facts) -> bool:
        """Whether nothing differs but the file of a table without partitions: that alone proves nothing."""
        if len(self.storage) > 1 or len(other.storage) > 1:
            return self == other
        return self._without_files() == other._without_files()

    def _without_files(self) -> Facts:
        return replace(self, storage=tuple(replace(item, file=None) for item in self.storage))

    def to_json(self) -> dict[str, Any]:
        return {
            "columns": [
                [column.number, column.nullable, column.default, column.fill, column.stamp] for column in self.columns
            ],
            "storage": [[item.relation, item.name, item.file, item.attached] for item in self.storage],
            "made": self.made,
            "others": list(self.others),
            "at": str(self.at),
            **({"owed": True} if self.owed else {}),
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Facts:
        return cls(
            columns=tuple(
                ColumnFacts(number=number, nullable=nullable, default=default, fill=fill, stamp=stamp)
                for number, nullable, default, fill, stamp in stored["columns"]
            ),
            storage=tuple(
                Storage(relation=relation, name=name, file=file, attached=attached)
                for relation, name, file, attached in stored["storage"]
            ),
            made=stored["made"],
            others=tuple(stored.get("others", ())),
            at=Lsn.parse(stored["at"]) if "at" in stored else ZERO,
            owed=stored.get("owed", False),
        )
