"""The files of a version of a table under second names, with all that is known of them.

A hard link costs no room while the first name is there: data files are never changed in place, only let go of.
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
    """The files of the version that was opened, under new names in another folder; on disk when this returns.

    Where a link cannot be made the file is copied if that is wished; otherwise that is an `OSError`.
    """
    adds = pa.table(table.get_add_actions(flatten=True))
    names = [data_path(path) for path in adds.column("path").to_pylist()]
    parts = partition_values_of(table)
    stats = stats_of(folder, table.version(), set(names))
    rows = _counts(folder, names, adds)
    made = []
    for number, (old, count) in enumerate(zip(names, rows, strict=True)):
        values = texts_of(parts.get(old, {}))
        new = str(Path(folder_of(values)) / f"part-{name}-{number:06d}.parquet")
        (into / new).parent.mkdir(parents=True, exist_ok=True)
        _link(folder / old, into / new, copies=copies)
        counted, size = json.dumps({"numRecords": count}), (into / new).stat().st_size
        made.append(StagedFile(path=new, size=size, rows=count, stats=stats.get(old, counted), values=values))
    sync_folders(into, [file.path for file in made])
    return made


def link_staged(folder: Path, staged: Sequence[StagedFile], into: Path, name: str, *, copies: bool) -> list[StagedFile]:
    """The same of files that were staged, and that a table has in this folder under their own names."""
    made = []
    for number, file in enumerate(staged):
        new = str(Path(folder_of(file.values)) / f"part-{name}-{number:06d}.parquet")
        (into / new).parent.mkdir(parents=True, exist_ok=True)
        _link(folder / Path(file.path).name, into / new, copies=copies)
        made.append(replace(file, path=new))
    sync_folders(into, [file.path for file in made])
    return made


def _counts(folder: Path, names: list[str], adds: pa.Table) -> list[int]:
    """The rows of each file. Where whoever wrote it kept no statistics, its own footer says."""
    told = adds.column("num_records").to_pylist() if "num_records" in adds.column_names else [None] * len(names)
    return [
        pq.read_metadata(folder / name).num_rows if count is None else count
        for name, count in zip(names, told, strict=True)
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
