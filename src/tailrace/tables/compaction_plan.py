"""Choose which files of a Delta table to compact.

Every commit leaves small files behind, which make reading slower. Compacting all of them every time would rewrite the
same rows again and again. So a file is compacted only with others of about its size, and eight of them make one of the
next size. A row is rewritten at most once per size step on its way into a file of the target size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable

from tailrace.tables.partitions import PartitionValues, folder_of, texts_of

STEP = 8
STEPS = 4
"""Size steps below half of the target: 64 MiB, 8 MiB, 1 MiB, 128 KiB, 16 KiB."""
FILES_MIN = STEP
"""Files of one step that are needed before they are compacted."""
ESTIMATE_ROWS_MIN = 10_000
"""Rows that a table needs before its files give a rows-per-file estimate."""
RETENTION_MARGIN_DAYS = 7
"""Extra days in which a pipeline that was stopped can still remove a file."""
RETENTION_PROPERTY = "delta.deletedFileRetentionDuration"


@dataclass(frozen=True, kw_only=True)
class UpkeepPlan:
    """The work on a table that changes no rows."""

    file_bytes: int | None
    """Target size of a file; None: no compaction."""
    remove_after_seconds: float | None
    """Age at which unneeded files are removed; None: they stay."""


@dataclass(frozen=True, kw_only=True)
class UpkeepResult:
    """The result of upkeep."""

    files_compacted: int = 0
    files_written: int = 0
    bytes: int = 0
    """Size of the files that were written."""
    files_removed: int = 0


def files_to_compact(sizes: Mapping[str, int], file_bytes: int, parts: PartitionValues | None = None) -> list[str]:
    """Return the names of files to compact, into one file per partition.

    Returns none while there are too few files of any size.
    """
    if not parts:
        return _similar(sizes, file_bytes)
    by_partition: dict[str, dict[str, int]] = {}
    for name, size in sizes.items():
        by_partition.setdefault(folder_of(texts_of(parts[name])), {})[name] = size
    chosen, total = list[str](), 0
    for partition in by_partition.values():
        similar = _similar(partition, file_bytes) if total < file_bytes else []
        chosen, total = [*chosen, *similar], total + sum(partition[name] for name in similar)
    return chosen


def _similar(sizes: Mapping[str, int], file_bytes: int) -> list[str]:
    lower = 0
    for step in range(STEPS, -1, -1):
        limit = file_bytes // int(STEP**step)
        small = sorted((size, name) for name, size in sizes.items() if lower <= size < limit // 2)
        if len(small) >= FILES_MIN:
            totals = itertools.accumulate(size for size, _ in small)
            return [name for (_, name), total in zip(small, totals, strict=True) if total <= file_bytes]
        lower = limit // 2
    return []


def rows_per_file(table: DeltaTable, file_bytes: int) -> int:
    """Estimate how many rows make a file of this size; 0: unknown. Uses the table's files."""
    adds = pa.table(table.get_add_actions(flatten=True))
    size, rows = (pc.sum(adds.column(name), min_count=0).as_py() for name in ("size_bytes", "num_records"))
    # A file of a few rows is mostly header and footer, so its size says nothing about the rows.
    return max(file_bytes * rows // size, 1) if rows >= ESTIMATE_ROWS_MIN else 0


def retention_interval(after_seconds: float) -> str:
    """Return the setting for how long a table's log keeps the names of unneeded files.

    Usually a week.
    """
    return f"interval {math.ceil(after_seconds / 86_400) + RETENTION_MARGIN_DAYS} days"


def remove_files(folder: Path, table: DeltaTable, after_seconds: float, properties: CommitProperties) -> int:
    """Remove files that commits have taken out long enough ago; return their number.

    Other files, staged or unknown, are not touched.
    """
    hours = math.ceil(after_seconds / 3600)
    removable = table.vacuum(hours, dry_run=True, enforce_retention_duration=False)
    present = [name for name in removable if (folder / name).exists()]  # vacuum also lists files that are already gone
    if present:
        table.vacuum(hours, dry_run=False, enforce_retention_duration=False, commit_properties=properties)
    return len(present)
