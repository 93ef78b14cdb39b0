"""A snapshot as the checkpoint stores it: its tables, its rows and its progress.

It continues only under the settings it was started with. Other settings are refused: the snapshot is never dropped
silently or mixed with another.
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
    """A snapshot: what it reads, and how far it is."""

    id: str
    tables: tuple[TableId, ...]
    incremental: bool
    where: str | None
    rows: int = 0
    scan_record: Mapping[str, Any] | None = None
    """The source's own record of the scan."""

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


def require_compatible_snapshot(point: ResumePoint | None, bulk: Sequence[TableId], live: Sequence[TableId]) -> None:
    """Refuse settings that contradict each other or the checkpoint's snapshot."""
    if bulk and live:
        raise ConfigError(
            "`snapshot_tables` and `incremental_snapshot` exclude each other",
            hint="Read tables before the stream or during it: pass one of the two.",
        )
    if point is None or point.snapshot_job is None:
        return
    job = SnapshotJob.from_json(point.snapshot_job)
    if job.incremental:
        return
    if live:
        raise ConfigError(
            "checkpoint is in the middle of a snapshot that precedes the stream",
            hint="Pass `snapshot_tables` until it is over, then call `control.snapshot` for an incremental one.",
        )
    if not bulk:
        raise ConfigError(
            "checkpoint is in the middle of a snapshot, and no snapshot tables are named",
            tables=", ".join(map(str, job.tables)),
            hint="Name the same `snapshot_tables` until it is over.",
        )
    if set(bulk) != set(job.tables):
        raise ConfigError(
            "checkpoint is in the middle of a snapshot of other tables",
            tables=", ".join(map(str, job.tables)),
            hint="Name the same `snapshot_tables` until it is over.",
        )
