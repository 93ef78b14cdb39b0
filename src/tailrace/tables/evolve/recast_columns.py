"""How the columns of a lake table come to be those of a new shape.

A table may hold more columns than its shape has: those that the source dropped and the policy keeps. They stay under
their names, beside the source's own; one whose name is needed again is put aside under another.
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
    """The table's columns after a recast: the shape's own, then those that are kept."""

    columns: tuple[Column, ...]
    source_names: tuple[str | None, ...]
    """For each the old column that it comes from; None for one that is new."""
    backfilled: dict[str, pa.Scalar]

    @property
    def fields(self) -> pa.Schema:
        return pa.schema([(column.name, column.type) for column in self.columns])

    @property
    def added(self) -> tuple[Column, ...]:
        return tuple(column for column, old in zip(self.columns, self.source_names, strict=True) if old is None)

    @property
    def others(self) -> set[str]:
        """The columns that were not there under their name."""
        return {column.name for column, old in zip(self.columns, self.source_names, strict=True) if old != column.name}


ColumnsSource = DeltaTable | Mapping[str, pa.DataType]
"""A table whose columns are to be known, or these."""


def column_types(table: ColumnsSource) -> dict[str, pa.DataType]:
    """The columns that the table holds, in its own order."""
    if isinstance(table, Mapping):
        return dict(table)
    return {field.name: field.type for field in pa.schema(table.schema().to_arrow())}


def retained_columns(table: ColumnsSource, schema: TableSchema) -> tuple[Column, ...]:
    """The columns that the table holds beside those of its shape."""
    names = set(schema.names)
    return tuple(
        Column(name=name, source_type="", type=_plain(kind))
        for name, kind in column_types(table).items()
        if name not in names
    )


def plan_columns(table: ColumnsSource, recast: Recast) -> RecastColumns:
    """What becomes of every column."""
    new = recast.schema
    comes_from = {now: was for was, now in recast.renamed}
    taken: list[str | None] = [
        None if name in (*recast.added, *recast.kept_apart) else comes_from.get(name, name) for name in new.names
    ]
    columns, own = list(new.columns), {name.lower() for name in new.names}
    kept = {name: kind for name, kind in column_types(table).items() if name not in (*taken, *recast.dropped)}
    names = own | {name.lower() for name in kept}
    for name, kind in kept.items():
        aside, number = name, 0
        if name.lower() not in own:
            names.discard(name.lower())
        while aside.lower() in names:
            number += 1
            aside = f"{name}__dropped{number if number > 1 else ''}"
        names.add(aside.lower())
        columns.append(Column(name=aside, source_type="", type=_plain(kind)))
        taken.append(name)
    return RecastColumns(columns=tuple(columns), source_names=tuple(taken), backfilled=dict(recast.backfilled))


def only_adds(table: ColumnsSource, laid: RecastColumns) -> bool:
    """Whether every column that the table holds stays as it is, and rows have null in those that are new."""
    held = {name: _plain(kind) for name, kind in column_types(table).items()}
    pairs = zip(laid.columns, laid.source_names, strict=True)
    return {column.name: column.type for column, old in pairs if old == column.name} == held and not laid.backfilled


def is_metadata_only(table: DeltaTable, laid: RecastColumns) -> bool:
    """Whether no file changes: columns come empty, go, or have other names. What the table is partitioned by is in no
    file, so it must stay what it is."""
    held = {name: _plain(kind) for name, kind in column_types(table).items()}
    pairs, apart = list(zip(laid.columns, laid.source_names, strict=True)), table.metadata().partition_columns
    if laid.backfilled or any({column.name, old} & {*apart} and column.name != old for column, old in pairs):
        return False
    return all(held[old] == column.type for column, old in pairs if old is not None)


def recast_rows(table: DeltaTable, laid: RecastColumns) -> Iterator[pa.RecordBatch]:
    """All rows of the table as they are to be."""
    names = [old for old in laid.source_names if old is not None]
    for batch in pa.RecordBatchReader.from_stream(table.scan(columns=names)):
        columns = [
            _column(batch, column, old, laid.backfilled)
            for column, old in zip(laid.columns, laid.source_names, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=laid.fields)


def _column(batch: pa.RecordBatch, column: Column, old: str | None, filled: dict[str, pa.Scalar]) -> Any:
    if old is not None:
        return batch.column(old).cast(column.type)
    if column.name in filled:
        return pa.repeat(filled[column.name], batch.num_rows)
    return pa.nulls(batch.num_rows, column.type)


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type as shapes have it: delta-rs tells of views and large types, and of fields that are not null."""
    if pa.types.is_string_view(kind) or pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_binary_view(kind) or pa.types.is_large_binary(kind):
        return pa.binary()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_list_view(kind):
        return pa.list_(_plain(kind.value_type))
    return kind
