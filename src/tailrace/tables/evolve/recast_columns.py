"""Map a lake table's columns to those of a new schema.

A table may have more columns than its schema: those that the source dropped and the policy keeps. They stay under their
names after the source's own columns. If such a name is needed again, the old column is renamed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from tailrace.model.schema import Column, TableSchema
from tailrace.tables.evolve.schema_plan import Recast


@dataclass(frozen=True, kw_only=True)
class RecastColumns:
    """The table's columns after a recast: the schema's own, then the retained ones."""

    columns: tuple[Column, ...]
    source_names: tuple[str | None, ...]
    """The old column that each column is from; None for a new one."""
    backfilled: dict[str, pa.Scalar]

    @property
    def fields(self) -> pa.Schema:
        return pa.schema([(column.name, column.type) for column in self.columns])

    @property
    def added(self) -> tuple[Column, ...]:
        return tuple(column for column, old in zip(self.columns, self.source_names, strict=True) if old is None)

    @property
    def others(self) -> set[str]:
        """The columns that did not exist under their present name."""
        return {column.name for column, old in zip(self.columns, self.source_names, strict=True) if old != column.name}


ColumnsSource = DeltaTable | Mapping[str, pa.DataType]
"""A table to take the columns from, or the columns themselves."""


def column_types(table: ColumnsSource) -> dict[str, pa.DataType]:
    """Return the types of the table's columns, in its own order."""
    if isinstance(table, Mapping):
        return dict(table)
    return {field.name: field.type for field in pa.schema(table.schema().to_arrow())}


def retained_columns(table: ColumnsSource, schema: TableSchema) -> tuple[Column, ...]:
    """Return the table's columns that are not in its schema."""
    names = set(schema.names)
    return tuple(
        Column(name=name, source_type="", type=_plain(kind))
        for name, kind in column_types(table).items()
        if name not in names
    )


def plan_columns(table: ColumnsSource, recast: Recast) -> RecastColumns:
    """Plan which old column each new column is from."""
    new = recast.schema
    old_names = {now: was for was, now in recast.renamed}
    sources: list[str | None] = [
        None if name in (*recast.added, *recast.kept_apart) else old_names.get(name, name) for name in new.names
    ]
    columns, own_names = list(new.columns), {name.lower() for name in new.names}
    retained = {name: kind for name, kind in column_types(table).items() if name not in (*sources, *recast.dropped)}
    used_names = own_names | {name.lower() for name in retained}
    for name, kind in retained.items():
        free_name, number = name, 0
        if name.lower() not in own_names:
            used_names.discard(name.lower())
        while free_name.lower() in used_names:
            number += 1
            free_name = f"{name}__dropped{number if number > 1 else ''}"
        used_names.add(free_name.lower())
        columns.append(Column(name=free_name, source_type="", type=_plain(kind)))
        sources.append(name)
    return RecastColumns(columns=tuple(columns), source_names=tuple(sources), backfilled=dict(recast.backfilled))


def only_adds(table: ColumnsSource, plan: RecastColumns) -> bool:
    """Return whether all columns stay unchanged and new ones are null in every row."""
    current = {name: _plain(kind) for name, kind in column_types(table).items()}
    pairs = zip(plan.columns, plan.source_names, strict=True)
    return {column.name: column.type for column, old in pairs if old == column.name} == current and not plan.backfilled


def is_metadata_only(table: DeltaTable, plan: RecastColumns) -> bool:
    """Return whether the recast changes no file.

    Then columns are added empty, dropped or renamed. Partition columns are in no file, so they must stay as they are.
    """
    current = {name: _plain(kind) for name, kind in column_types(table).items()}
    pairs, partition_columns = (
        list(zip(plan.columns, plan.source_names, strict=True)),
        table.metadata().partition_columns,
    )
    if plan.backfilled or any(
        {column.name, old} & {*partition_columns} and column.name != old for column, old in pairs
    ):
        return False
    return all(current[old] == column.type for column, old in pairs if old is not None)


def recast_rows(table: DeltaTable, plan: RecastColumns) -> Iterator[pa.RecordBatch]:
    """Yield all rows of the table with the new columns."""
    names = [old for old in plan.source_names if old is not None]
    for batch in pa.RecordBatchReader.from_stream(table.scan(columns=names)):
        columns = [
            _column(batch, column, old, plan.backfilled)
            for column, old in zip(plan.columns, plan.source_names, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=plan.fields)


def _column(batch: pa.RecordBatch, column: Column, old: str | None, filled: dict[str, pa.Scalar]) -> Any:
    if old is not None:
        return batch.column(old).cast(column.type)
    if column.name in filled:
        return pa.repeat(filled[column.name], batch.num_rows)
    return pa.nulls(batch.num_rows, column.type)


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the type as our schemas have it.

    delta-rs reports view types, large types and non-null fields instead.
    """
    if pa.types.is_string_view(kind) or pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_binary_view(kind) or pa.types.is_large_binary(kind):
        return pa.binary()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_list_view(kind):
        return pa.list_(_plain(kind.value_type))
    return kind
