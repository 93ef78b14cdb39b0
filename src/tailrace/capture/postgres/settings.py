"""What a PostgreSQL capture needs to know; plain data, so that it can be pickled and sent anywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tailrace.model.schema import TableId


@dataclass(frozen=True, kw_only=True)
class PostgresSettings:
    """One database, the tables wanted of it, and the names of what we make there."""

    url: str = field(repr=False)
    wanted: Callable[[TableId], bool]
    """Whether a table is to be captured."""
    slot: str
    slot_create: bool = True
    publication: str
    publication_create: bool = True

    @property
    def publications(self) -> tuple[str, ...]:
        """All that we read."""
        return (
            (self.publication, self.publication_inserts) if self.publication_create else (self.publication,)
        )

    @property
    def publication_inserts(self) -> str:
        """For tables whose updates and deletes the server could not describe."""
        return f"{self.publication}_inserts"[:63]
