"""Refuse rows and columns that a Delta table cannot hold, before any row is written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.errors import TableUnusable, ValueUnfit
from tailrace.model.schema import Column, TableSchema
from tailrace.tables.partitions import find_unusable_values

# delta-rs computes statistics with a calendar that ends in the year 262142 and dies on a date past it.
DAYS_MAX = 95_000_000


def own_batches(schema: TableSchema, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield rows under the table's own names and types; refuse values that delta-rs cannot write."""
    arrow_schema = pa.schema(schema.row_fields())
    for batch in batches:
        refuse_far_dates(schema, batch.columns)
        yield pa.RecordBatch.from_arrays(batch.columns, schema=arrow_schema)


def refuse_far_dates(schema: TableSchema, columns: Iterable[Any]) -> None:
    """Refuse a date that delta-rs cannot write."""
    for column, values in zip(schema.columns, columns, strict=True):
        if pa.types.is_date32(column.type) and len(values) > values.null_count:
            ends = pc.min_max(values.cast(pa.int32()))
            if max(-ends["min"].as_py(), ends["max"].as_py()) > DAYS_MAX:
                raise ValueUnfit(
                    "a date lies past the year 262000, which delta-rs cannot write",
                    table=schema.table,
                    column=column.name,
                    hint="Exclude the table, or change the column's type to text, then reload the table.",
                )


def find_unstorable_rows(
    schema: TableSchema, columns: Iterable[Any], rows: int, partition_by: Mapping[str, str] | None = None
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Flag rows with a value that the table cannot hold. Flag separately those with one in their key.

    `columns` are the table's own columns of `rows` rows. `partition_by` maps their names to those of partition columns
    in the lake, which may differ.
    """
    bad, bad_key = np.zeros(rows, np.bool_), np.zeros(rows, np.bool_)
    for column, values in zip(schema.columns, columns, strict=True):
        flags = find_unstorable_values(column, values, partition_by or {})
        if flags is not None:
            bad |= flags
            if column.name in schema.key:
                bad_key |= flags
    return bad, bad_key


def find_unstorable_values(
    column: Column, values: Any, partition_by: Mapping[str, str]
) -> npt.NDArray[np.bool_] | None:
    """Flag one column's values that cannot be stored; None if its type allows all values."""
    if column.name in partition_by:
        return find_unusable_values(partition_by[column.name], values)
    return far_values(values) if pa.types.is_date32(column.type) else None


def far_values(dates: Any) -> npt.NDArray[np.bool_]:
    """Flag the dates that delta-rs cannot write."""
    days = dates.cast(pa.int32()).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    flags: npt.NDArray[np.bool_] = np.abs(days) > DAYS_MAX
    return flags


def refuse_names(schema: TableSchema) -> None:
    """Refuse columns that no Delta table can have."""
    if not schema.columns:
        raise TableUnusable(
            "the table has no columns, which Delta does not allow",
            table=schema.table,
            hint="Exclude it in `source.exclude`.",
        )
    seen: dict[str, str] = {}
    for name in schema.names:
        other = seen.setdefault(name.lower(), name)
        if other != name:
            raise TableUnusable(
                "two columns differ only in case, which Delta does not allow",
                table=schema.table,
                columns=f"{other}, {name}",
                hint="Rename one of them in the lake (`columns` in `tables.rules`) or at the source. Or exclude the "
                "table.",
            )


_NOT_FOR_SPARK = re.compile(r"[ ,;{}()\n\t=]")


def refuse_spark_names(schema: TableSchema) -> None:
    """Refuse columns that no Delta table, or no change by Spark's connector, can have.

    The connector merges into tables that have columns with such names. It only refuses to change a schema with one.
    """
    refuse_names(schema)
    for name in schema.names:
        if _NOT_FOR_SPARK.search(name):
            raise TableUnusable(
                "Spark's connector cannot change a table with a column of this name",
                table=schema.table,
                column=name,
                hint="Set `tables.engine: delta-rs` for this change. Afterwards set `spark` again.",
            )
