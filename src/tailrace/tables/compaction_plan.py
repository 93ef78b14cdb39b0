"""Which files of a table are joined, and when.

Every commit leaves small files behind, and readers pay for each. Joining all of them every time would write the same
rows again and again; so a file is joined only with others of about its size. What comes of eight of them is of the next
size, so a row is written anew once for each of these steps, and no more, on its way into a file as large as wished.
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
"""Below half of the size aimed at: 64 MiB, 8 MiB, 1 MiB, 128 KiB, 16 KiB."""
FILES_MIN = STEP
"""Of one step, before they are joined."""
TELLING_ROWS_MIN = 10_000
"""Of a table, before its files tell how many rows make one of a size."""
REMEMBERED_DAYS = 7
"""After a file may be removed, in which a pipeline that stood still can come to do it."""
RETENTION_PROPERTY = "delta.deletedFileRetentionDuration"


@dataclass(frozen=True, kw_only=True)
class UpkeepPlan:
    """What is done for a table besides changing its rows."""

    file_bytes: int | None
    """Aimed at; None: files are not joined."""
    remove_after_seconds: float | None
    """How old files that the table no longer needs must be to be removed; None: they stay."""


@dataclass(frozen=True, kw_only=True)
class UpkeepResult:
    """What came of it."""

    files_compacted: int = 0
    files_written: int = 0
    bytes: int = 0
    """Written."""
    files_removed: int = 0


def files_to_compact(sizes: Mapping[str, int], file_bytes: int, parts: PartitionValues | None = None) -> list[str]:
    """Names of files that are to become one, or one for each of several partitions; none while there are too few of any
    size."""
    if not parts:
        return _alike(sizes, file_bytes)
    together: dict[str, dict[str, int]] = {}
    for name, size in sizes.items():
        together.setdefault(folder_of(texts_of(parts[name])), {})[name] = size
    found, total = list[str](), 0
    for some in together.values():
        joined = _alike(some, file_bytes) if total < file_bytes else []
        found, total = [*found, *joined], total + sum(some[name] for name in joined)
    return found


def _alike(sizes: Mapping[str, int], file_bytes: int) -> list[str]:
    least = 0
    for step in range(STEPS, -1, -1):
        size = file_bytes // int(STEP**step)
        small = sorted((found, name) for name, found in sizes.items() if least <= found < size // 2)
        if len(small) >= FILES_MIN:
            totals = itertools.accumulate(found for found, _ in small)
            return [name for (_, name), total in zip(small, totals, strict=True) if total <= file_bytes]
        least = size // 2
    return []


def rows_per_file(table: DeltaTable, file_bytes: int) -> int:
    """How many rows make a file of that size, as the table's files tell; 0: they do not."""
    adds = pa.table(table.get_add_actions(flatten=True))
    size, rows = (pc.sum(adds.column(name), min_count=0).as_py() for name in ("size_bytes", "num_records"))
    # A file of a few rows is mostly head and foot, and tells nothing.
    return max(file_bytes * rows // size, 1) if rows >= TELLING_ROWS_MIN else 0


def retention_interval(after_seconds: float) -> str:
    """How long a table must keep in mind which files it no longer needs, as its settings say it: usually a week."""
    return f"interval {math.ceil(after_seconds / 86_400) + REMEMBERED_DAYS} days"


def remove_files(folder: Path, table: DeltaTable, after_seconds: float, properties: CommitProperties) -> int:
    """Remove files that commits have taken out long enough ago; others (staged, or of nobody) are not touched."""
    hours = math.ceil(after_seconds / 3600)
    gone = table.vacuum(hours, dry_run=True, enforce_retention_duration=False)
    there = [name for name in gone if (folder / name).exists()]  # it is told of those that went before, too
    if there:
        table.vacuum(hours, dry_run=False, enforce_retention_duration=False, commit_properties=properties)
    return len(there)
