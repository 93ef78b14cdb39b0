"""One version of a table as columns and files, for whoever reads Parquet and knows no Delta.

A version is told whole or not at all: files that were removed since are missed here, and not by the reader.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from tailrace.errors import TableUnusable
from tailrace.tables.delta.commit_log import data_path
from tailrace.tables.delta.features import features_of
from tailrace.tables.delta.schema_mapping import refuse_features
from tailrace.tables.table_folder import find_folder


class VersionFiles(NamedTuple):
    """The columns that a table had, and the files that its rows were in."""

    columns: pa.Schema
    files: list[Path]
    partitions: pa.Table
    """What is not in the files: a row for each of them, with the columns that the table is partitioned by."""


def needs_connector(path: Path, version: int) -> bool:
    """Whether the files of a version do not say by themselves which rows it has."""
    folder = find_folder(path.absolute())
    try:
        return folder is not None and features_of(DeltaTable(str(folder), version=version)).any
    except (DeltaError, OSError):
        return False  # whoever reads it says what is wrong


def files_at(path: Path, version: int) -> VersionFiles:
    """One version of a table."""
    folder = find_folder(path.absolute())
    if folder is None:
        raise TableUnusable("there is no table any more", path=path, hint="Was its folder moved away?")
    try:
        table = DeltaTable(str(folder), version=version)
        adds = pa.table(table.get_add_actions(flatten=True))
        files = [folder / data_path(name) for name in adds.column("path").to_pylist()]
    except (DeltaError, OSError) as error:
        raise TableUnusable(
            "the table no longer has this version",
            path=path,
            version=version,
            hint="Old ones go with `VACUUM` (`tables.upkeep.remove_after`) and after 30 days. Ask for a "
            "later time, or for other tables alone: `tables=[…]`.",
        ) from error
    refuse_features(path, table, table.metadata().partition_columns)
    if not all(file.exists() for file in files):
        raise TableUnusable(
            "files of this version were removed",
            path=path,
            version=version,
            hint="They go with `VACUUM` (`tables.upkeep.remove_after`). Ask for a later time, or for other tables "
            "alone: `tables=[…]`.",
        )
    columns, names = pa.schema(table.schema().to_arrow()), table.metadata().partition_columns
    partitions = {name: adds.column(f"partition.{name}").cast(columns.field(name).type) for name in names}
    return VersionFiles(columns, files, pa.table(partitions))
