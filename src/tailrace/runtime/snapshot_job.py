"""A snapshot as it stands in the checkpoint: which tables, which rows, and how far it is.

It goes on as what it was begun as: under other settings it is refused, never left out or mixed with another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tailrace.errors import ConfigError
from tailrace.model.schema import TableId
from tailrace.runtime.position_store import ResumePoint


@dataclass(frozen=True, kw_only=True)
class SnapshotJob:
    """A snapshot: what is read, and how far it is."""

    id: str
    tables: tuple[TableId, ...]
    incremental: bool
    where: str | None
    rows: int = 0
    scan_record: Mapping[str, Any] | None = None
    """The source's own record."""

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "tables": [[table.schema, table.name] for table in self.tables],
            "live": self.incremental,
            "where": self.where,
            "rows": self.rows,
            "cursor": self.scan_record,
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> SnapshotJob:
        return cls(
            id=stored["id"],
            tables=tuple(TableId(*names) for names in stored["tables"]),
            incremental=stored["live"],
            where=stored["where"],
            rows=stored["rows"],
            scan_record=stored["cursor"],
        )


def require_compatible_snapshot(place: ResumePoint | None, bulk: Sequence[TableId], live: Sequence[TableId]) -> None:
    """Refuse settings that do not go together, or not with the snapshot that the place tells of."""
    if bulk and live:
        raise ConfigError(
            "`snapshot_tables` and `incremental_snapshot` do not go together",
            hint="Read tables before the stream, or beside it: give one of the two.",
        )
    if place is None or place.snapshot_job is None:
        return
    job = SnapshotJob.from_json(place.snapshot_job)
    if job.incremental:
        return
    if live:
        raise ConfigError(
            "the checkpoint is in the middle of a snapshot that comes before the stream, and goes on as one",
            hint="Give `snapshot_tables` until it is over, then `control.snapshot` for an incremental one.",
        )
    if not bulk:
        raise ConfigError(
            "the checkpoint is in the middle of a snapshot, and no snapshot tables are named",
            tables=", ".join(map(str, job.tables)),
            hint="Name the same `snapshot_tables` until it is over.",
        )
    if set(bulk) != set(job.tables):
        raise ConfigError(
            "the checkpoint is in the middle of a snapshot of other tables",
            tables=", ".join(map(str, job.tables)),
            hint="Name the same `snapshot_tables` until it is over.",
        )
