"""List one version of a table as columns and files, for readers of plain Parquet.

The result is complete or an error. A missing file is found here, and not by the reader.
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
    """The columns that a table had, and the files with its rows."""

    columns: pa.Schema
    files: list[Path]
    partitions: pa.Table
    """The partition columns, which are not in the files: one row per file."""


def needs_connector(path: Path, version: int) -> bool:
    """Return whether a version's files alone do not say which rows it has."""
    folder = find_folder(path.absolute())
    try:
        return folder is not None and features_of(DeltaTable(str(folder), version=version)).any
    except (DeltaError, OSError):
        return False  # the later read raises the error


def files_at(path: Path, version: int) -> VersionFiles:
    """Return the files of one version of a table."""
    folder = find_folder(path.absolute())
    if folder is None:
        raise TableUnusable("the table no longer exists", path=path, hint="Check if its folder was moved away.")
    try:
        table = DeltaTable(str(folder), version=version)
        adds = pa.table(table.get_add_actions(flatten=True))
        files = [folder / data_path(name) for name in adds.column("path").to_pylist()]
    except (DeltaError, OSError) as error:
        raise TableUnusable(
            "the table no longer has this version",
            path=path,
            version=version,
            hint="Old versions are removed by `VACUUM` (`tables.upkeep.remove_after`) and after 30 days. Use a later "
            "time, or leave this table out: `tables=[…]`.",
        ) from error
    refuse_features(path, table, table.metadata().partition_columns)
    if not all(file.exists() for file in files):
        raise TableUnusable(
            "files of this version were removed",
            path=path,
            version=version,
            hint="Old files are removed by `VACUUM` (`tables.upkeep.remove_after`). Use a later time, or leave this "
            "table out: `tables=[…]`.",
        )
    columns, names = pa.schema(table.schema().to_arrow()), table.metadata().partition_columns
    partitions = {name: adds.column(f"partition.{name}").cast(columns.field(name).type) for name in names}
    return VersionFiles(columns, files, pa.table(partitions))
