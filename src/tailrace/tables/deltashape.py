"""Shapes and files as Delta has them, and how a table is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable
from deltalake import Schema as DeltaSchema
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, create_table_with_add_actions

from tailrace.errors import TableUnusable
from tailrace.model.schema import Column, TableSchema
from tailrace.tables.deltalog import REPLACE_HINT, data_path, has_commits
from tailrace.tables.folder import unreadable
from tailrace.tables.partitions import Parts
from tailrace.tables.staging import StagedFile

NTZ = "timestampNtz"
"""The feature that a table with timestamps without a zone has."""


def create_table(
    folder: Path, fields: DeltaSchema, adds: list[AddAction], partition_by: Sequence[str], properties: CommitProperties
) -> None:
    """A new table; one that was made meanwhile is not overwritten."""
    try:
        create_table_with_add_actions(
            str(folder), fields, adds, mode="error", partition_by=list(partition_by), commit_properties=properties
        )
    except DeltaError as exc:
        if has_commits(folder):
            raise CommitFailedError("a table was made here meanwhile") from exc
        raise


def repartition(
    folder: Path, table: DeltaTable, fields: DeltaSchema, adds: list[AddAction], partition_by: Sequence[str],
    properties: CommitProperties,
) -> None:  # fmt: skip
    """Make the files all that a table holds that was partitioned otherwise: no other commit changes that."""
    create_table_with_add_actions(
        str(folder), fields, adds, mode="overwrite", partition_by=list(partition_by),
        configuration=table.metadata().configuration, commit_properties=properties,
    )  # fmt: skip


def parts_of(table: DeltaTable) -> Parts:
    """What the rows of every data file of the version that was opened have in the columns that it is partitioned by;
    nothing for a table that is not."""
    names = table.metadata().partition_columns
    if not names:
        return {}
    adds = pa.table(table.get_add_actions(flatten=True))
    columns = {name: adds.column(f"partition.{name}") for name in names}
    paths = map(data_path, adds.column("path").to_pylist())
    return {path: {name: column[i] for name, column in columns.items()} for i, path in enumerate(paths)}


def delta_fields(schema: TableSchema) -> DeltaSchema:
    """The columns."""
    return DeltaSchema.from_arrow(pa.schema(schema.row_fields()))


def is_naive(column: Column) -> bool:
    """Whether it holds timestamps without a zone."""
    kind = column.type.value_type if pa.types.is_list(column.type) else column.type
    return pa.types.is_timestamp(kind) and kind.tz is None


def add_action(path: Path, folder: Path, file: StagedFile) -> AddAction:
    """What makes a staged file one of the table's, if it is still what was written."""
    try:
        found = (folder / file.path).stat()
    except FileNotFoundError:
        found = None
    except OSError as exc:
        raise unreadable(path, exc) from exc
    if found is None or found.st_size != file.size:
        raise TableUnusable(
            "a staged file is gone, or not what was written", path=path, file=file.path,
            hint="Load the table again; nobody else may write or remove files in its folder meanwhile.",
        )  # fmt: skip
    return AddAction(
        path=file.path, size=file.size, partition_values=file.values, modification_time=found.st_mtime_ns // 1_000_000,
        data_change=True, stats=file.stats,
    )  # fmt: skip


def refuse_features(path: Path, table: DeltaTable, partition_by: Sequence[str]) -> None:
    """Refuse files that do not say, with what is known of their partitions, which rows the table holds."""
    others = set(table.protocol().reader_features or ()) - {NTZ}
    if table.metadata().partition_columns != list(partition_by):
        others.add("partitions")
    if others:
        raise TableUnusable(
            "the table has features that its files cannot be read with as they are", path=path,
            features=", ".join(sorted(others)), hint=REPLACE_HINT,
        )  # fmt: skip
