"""Map schemas and files to Delta's terms, and make tables of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable
from deltalake import Schema as DeltaSchema
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from tailrace.errors import TableUnusable
from tailrace.model.schema import Column, TableSchema
from tailrace.tables.delta.commit_log import REPLACE_HINT, CommitRecord, data_path, has_commits
from tailrace.tables.partitions import PartitionValues, texts_of
from tailrace.tables.staging import StagedFile
from tailrace.tables.table_folder import unreadable

NTZ = "timestampNtz"
"""The feature of a table with timestamps without a zone."""
VARIANT = "variantType"
"""A feature that delta-rs adds to such a table when its properties are set.

None of our tables has columns of that type.
"""


def create_table(folder: Path, fields: DeltaSchema, adds: list[AddAction], record: CommitRecord) -> None:
    """Create a new table; never overwrite one that another process has made."""
    try:
        create_table_with_add_actions(
            str(folder),
            fields,
            adds,
            mode="error",
            partition_by=list(record.spec.partition_by),
            commit_properties=record.properties(),
        )
    except DeltaError as exc:
        if has_commits(folder):
            raise CommitFailedError("another process has made a table here") from exc
        raise


def repartition(
    folder: Path, table: DeltaTable, fields: DeltaSchema, adds: list[AddAction], record: CommitRecord
) -> None:
    """Replace all rows of a table by these files, with other partition columns.

    No other kind of commit changes the partitioning. It is not a compare-and-swap, so the version is checked first.
    """
    if DeltaTable(str(folder)).version() != table.version():
        raise CommitFailedError("another process has committed to the table")
    create_table_with_add_actions(
        str(folder),
        fields,
        adds,
        mode="overwrite",
        partition_by=list(record.spec.partition_by),
        configuration=table.metadata().configuration,
        commit_properties=record.properties(),
    )


def partition_values_of(table: DeltaTable, adds: pa.Table | None = None) -> PartitionValues:
    """Return the partition values of every data file of the opened version; empty without partitions.

    `adds` is the list of the files, if the caller has it.
    """
    names = table.metadata().partition_columns
    if not names:
        return {}
    adds = pa.table(table.get_add_actions(flatten=True)) if adds is None else adds
    columns = {name: adds.column(f"partition.{name}") for name in names}
    paths = map(data_path, adds.column("path").to_pylist())
    return {path: {name: column[i] for name, column in columns.items()} for i, path in enumerate(paths)}


def has_odd_file_names(table: DeltaTable) -> bool:
    """Return whether delta-rs could not find one of the table's files to remove it.

    It looks files up by their names in the log, and encodes non-ASCII names in another way than Spark's connector.
    """
    if not table.metadata().partition_columns:
        return False
    return not all(map(str.isascii, pa.table(table.get_add_actions(flatten=True)).column("path").to_pylist()))


def remove_actions(
    folder: Path, removed: Iterable[str], parts: PartitionValues, *, changes_rows: bool
) -> Iterator[RemoveAction]:
    """Yield the actions that remove files, with their partition values."""
    now = time.time_ns() // 1_000_000
    for name in removed:
        yield RemoveAction(name, changes_rows, now, (folder / name).stat().st_size, texts_of(parts.get(name, {})))


def delta_fields(schema: TableSchema) -> DeltaSchema:
    """Return the schema's columns as Delta's schema."""
    return DeltaSchema.from_arrow(pa.schema(schema.row_fields()))


def is_naive(column: Column) -> bool:
    """Return whether a column holds timestamps without a zone."""
    kind = column.type.value_type if pa.types.is_list(column.type) else column.type
    return pa.types.is_timestamp(kind) and kind.tz is None


def add_action(path: Path, folder: Path, file: StagedFile) -> AddAction:
    """Return the action that adds a staged file; refuse a changed file."""
    try:
        found = (folder / file.path).stat()
    except FileNotFoundError:
        found = None
    except OSError as exc:
        raise unreadable(path, exc) from exc
    if found is None or found.st_size != file.size:
        raise TableUnusable(
            "a staged file is missing or was changed",
            path=path,
            file=file.path,
            hint="Reload the table. Let no other process write or remove files in its folder meanwhile.",
        )
    return AddAction(
        path=file.path,
        size=file.size,
        partition_values=file.values,
        modification_time=found.st_mtime_ns // 1_000_000,
        data_change=True,
        stats=file.stats,
    )


def refuse_features(path: Path, table: DeltaTable, partition_by: Sequence[str]) -> None:
    """Refuse a table whose files alone do not state which rows it has."""
    unsupported = set(table.protocol().reader_features or ()) - {NTZ, VARIANT}
    if table.metadata().partition_columns != list(partition_by):
        unsupported.add("partitions")
    if unsupported:
        raise TableUnusable(
            "the table has features with which its files cannot be read directly",
            path=path,
            features=", ".join(sorted(unsupported)),
            hint=REPLACE_HINT,
        )
