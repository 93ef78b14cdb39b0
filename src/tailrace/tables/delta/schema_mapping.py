"""Shapes and files as Delta has them, and how a table is made of them."""

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
"""The feature that a table with timestamps without a zone has."""
VARIANT = "variantType"
"""One that delta-rs gives such a table whose properties are set with it. No table of ours has columns of that type."""


def create_table(folder: Path, fields: DeltaSchema, adds: list[AddAction], position: CommitRecord) -> None:
    """A new table; one that was made meanwhile is not overwritten."""
    try:
        create_table_with_add_actions(
            str(folder),
            fields,
            adds,
            mode="error",
            partition_by=list(position.spec.partition_by),
            commit_properties=position.properties(),
        )
    except DeltaError as exc:
        if has_commits(folder):
            raise CommitFailedError("a table was made here meanwhile") from exc
        raise


def repartition(
    folder: Path, table: DeltaTable, fields: DeltaSchema, adds: list[AddAction], position: CommitRecord
) -> None:
    """Make the files all that a table holds that was partitioned otherwise: no other commit changes that, and this one
    compares with nothing."""
    if DeltaTable(str(folder)).version() != table.version():
        raise CommitFailedError("someone committed to the table meanwhile")
    create_table_with_add_actions(
        str(folder),
        fields,
        adds,
        mode="overwrite",
        partition_by=list(position.spec.partition_by),
        configuration=table.metadata().configuration,
        commit_properties=position.properties(),
    )


def partition_values_of(table: DeltaTable, adds: pa.Table | None = None) -> PartitionValues:
    """What the rows of every data file of the version that was opened have in the columns that it is partitioned by;
    nothing for a table that is not. `adds`: the list of the files, for those who have it."""
    names = table.metadata().partition_columns
    if not names:
        return {}
    adds = pa.table(table.get_add_actions(flatten=True)) if adds is None else adds
    columns = {name: adds.column(f"partition.{name}") for name in names}
    paths = map(data_path, adds.column("path").to_pylist())
    return {path: {name: column[i] for name, column in columns.items()} for i, path in enumerate(paths)}


def has_odd_file_names(table: DeltaTable) -> bool:
    """Whether delta-rs would not find a file of the table again to take it out. It does so by the name in the log, and
    would write one otherwise that Spark's connector has written: with letters of any alphabet, as they are."""
    if not table.metadata().partition_columns:
        return False
    return not all(map(str.isascii, pa.table(table.get_add_actions(flatten=True)).column("path").to_pylist()))


def remove_actions(
    folder: Path, gone: Iterable[str], parts: PartitionValues, *, changes_rows: bool
) -> Iterator[RemoveAction]:
    """What takes files out of a table whose files have these values in common."""
    now = time.time_ns() // 1_000_000
    for name in gone:
        yield RemoveAction(name, changes_rows, now, (folder / name).stat().st_size, texts_of(parts.get(name, {})))


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
            "a staged file is gone, or not what was written",
            path=path,
            file=file.path,
            hint="Load the table again; nobody else may write or remove files in its folder meanwhile.",
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
    """Refuse files that do not say, with what is known of their partitions, which rows the table holds."""
    others = set(table.protocol().reader_features or ()) - {NTZ, VARIANT}
    if table.metadata().partition_columns != list(partition_by):
        others.add("partitions")
    if others:
        raise TableUnusable(
            "the table has features that its files cannot be read with as they are",
            path=path,
            features=", ".join(sorted(others)),
            hint=REPLACE_HINT,
        )
