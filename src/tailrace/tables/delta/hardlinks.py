"""Link the files of a table's version under second names, with their recorded facts.

A hard link takes no space while the first name exists. A data file's content never changes; files are only removed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from tailrace.tables.delta.commit_log import data_path, fsync, stats_of, sync_folders
from tailrace.tables.delta.schema_mapping import partition_values_of
from tailrace.tables.partitions import folder_of, texts_of
from tailrace.tables.staging import StagedFile


def link_files(folder: Path, table: DeltaTable, into: Path, name: str, *, copies: bool) -> list[StagedFile]:
    """Link the files of the opened version into another folder; on disk when this returns.

    If a link cannot be made, the file is copied if `copies` is set; otherwise an `OSError` is raised.
    """
    adds = pa.table(table.get_add_actions(flatten=True))
    names = [data_path(path) for path in adds.column("path").to_pylist()]
    parts = partition_values_of(table)
    stats = stats_of(folder, table.version(), set(names))
    rows = _counts(folder, names, adds)
    linked = []
    for number, (old, count) in enumerate(zip(names, rows, strict=True)):
        values = texts_of(parts.get(old, {}))
        new = str(Path(folder_of(values)) / f"part-{name}-{number:06d}.parquet")
        (into / new).parent.mkdir(parents=True, exist_ok=True)
        _link(folder / old, into / new, copies=copies)
        counted, size = json.dumps({"numRecords": count}), (into / new).stat().st_size
        linked.append(StagedFile(path=new, size=size, rows=count, stats=stats.get(old, counted), values=values))
    sync_folders(into, [file.path for file in linked])
    return linked


def link_staged(folder: Path, staged: Sequence[StagedFile], into: Path, name: str, *, copies: bool) -> list[StagedFile]:
    """Link staged files that a table has in this folder under their own names."""
    linked = []
    for number, file in enumerate(staged):
        new = str(Path(folder_of(file.values)) / f"part-{name}-{number:06d}.parquet")
        (into / new).parent.mkdir(parents=True, exist_ok=True)
        _link(folder / Path(file.path).name, into / new, copies=copies)
        linked.append(replace(file, path=new))
    sync_folders(into, [file.path for file in linked])
    return linked


def _counts(folder: Path, names: list[str], adds: pa.Table) -> list[int]:
    """Return each file's row count, from the log's statistics or else from the file's footer."""
    counts = adds.column("num_records").to_pylist() if "num_records" in adds.column_names else [None] * len(names)
    return [
        pq.read_metadata(folder / name).num_rows if count is None else count
        for name, count in zip(names, counts, strict=True)
    ]


def _link(old: Path, new: Path, *, copies: bool) -> None:
    try:
        os.link(old, new)
    except FileNotFoundError:
        raise
    except OSError:
        if not copies:
            raise
        shutil.copyfile(old, new)
        fsync(new)
