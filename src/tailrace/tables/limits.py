"""What a Delta table cannot hold, refused by name before a row is written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.errors import TableUnusable, ValueUnfit
from tailrace.model.schema import TableSchema

# delta-rs computes statistics with a calendar that ends in the year 262142 and dies on a date past it.
DAYS_MAX = 95_000_000


def own_batches(schema: TableSchema, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Rows under the table's own names and types, each batch looked at."""
    fields = pa.schema(schema.row_fields())
    for batch in batches:
        refuse_far_dates(schema, batch.columns)
        yield pa.RecordBatch.from_arrays(batch.columns, schema=fields)


def refuse_far_dates(schema: TableSchema, columns: Iterable[Any]) -> None:
    """Refuse a date that delta-rs cannot write."""
    for column, values in zip(schema.columns, columns, strict=True):
        if pa.types.is_date32(column.type) and len(values) > values.null_count:
            ends = pc.min_max(values.cast(pa.int32()))
            if max(-ends["min"].as_py(), ends["max"].as_py()) > DAYS_MAX:
                raise ValueUnfit(
                    "a date lies past the year 262000, which delta-rs cannot write",
                    table=schema.table, column=column.name,
                    hint="Exclude the table, or change the column's type to text, then reload the table.",
                )  # fmt: skip


def far_dates(
    schema: TableSchema, columns: Iterable[Any], rows: int
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Of so many rows, the table's own columns: those with such a date, and those with one in their key."""
    far, far_key = np.zeros(rows, np.bool_), np.zeros(rows, np.bool_)
    for column, values in zip(schema.columns, columns, strict=True):
        if pa.types.is_date32(column.type):
            found = far_values(values)
            far |= found
            if column.name in schema.key:
                far_key |= found
    return far, far_key


def far_values(dates: Any) -> npt.NDArray[np.bool_]:
    """Which of these dates delta-rs cannot write."""
    days = dates.cast(pa.int32()).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    found: npt.NDArray[np.bool_] = np.abs(days) > DAYS_MAX
    return found


def refuse_names(schema: TableSchema) -> None:
    """Refuse columns that no Delta table can have."""
    if not schema.columns:
        raise TableUnusable(
            "the table has no columns, and Delta has no such tables", table=schema.table,
            hint="Exclude it in `source.exclude`.",
        )  # fmt: skip
    seen: dict[str, str] = {}
    for name in schema.names:
        other = seen.setdefault(name.lower(), name)
        if other != name:
            raise TableUnusable(
                "two columns differ only in case, which Delta does not allow",
                table=schema.table, columns=f"{other}, {name}",
                hint="Rename one at the source, or publish the table without it, or exclude the table.",
            )  # fmt: skip


_NOT_FOR_SPARK = re.compile(r"[ ,;{}()\n\t=]")


def refuse_spark_names(schema: TableSchema) -> None:
    """Refuse columns that no Delta table can have, or that Spark's connector gives to none: it merges into tables that
    have such columns, but changes no shape with one."""
    refuse_names(schema)
    for name in schema.names:
        if _NOT_FOR_SPARK.search(name):
            raise TableUnusable(
                "Spark's connector changes no table with a column of such a name", table=schema.table, column=name,
                hint="Set `tables.engine: delta-rs` for this change; afterwards `spark` goes on.",
            )  # fmt: skip
