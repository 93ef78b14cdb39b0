"""Split rows by the values of the columns that a table is partitioned by.

Invariant: every reader finds in a partition column exactly the value that was written. These values are not in the data
files. Delta keeps them as text in the table's own log and names the files' folders by them, and some readers take them
from the folders. So a value is allowed only if all readers read it back unchanged. An empty text is not allowed,
because Delta takes it for null. Neither is a text that cannot be a folder's name, nor a type whose text readers
interpret differently. Such values are refused, never changed.

Pure: no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.errors import TableUnusable, ValueUnfit
from tailrace.model.schema import Column, TableSchema
from tailrace.tables.fold.row_ids import image_numbers
from tailrace.tables.table_paths import NAME_BYTES_MAX

PartitionTexts = dict[str, str | None]
"""The values of one partition as text, by column, as Delta's log has them."""
PartitionValues = Mapping[str, Mapping[str, pa.Scalar]]
"""By data file: the values that all its rows share. A file that holds its partition columns itself has no entry."""

NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"
"""The folder for null values. Readers take a text equal to it for null."""
DAYS = (-719_162, 2_932_896)
"""First and last day of the years 1 to 9999. Readers print other years differently."""
DAY_MICROS = 86_400_000_000
_NAMEABLE = re.compile(r"\w[\w .-]*")

_OTHER_HINT = (
    "Choose other columns in `partition_by`, in `tables` or for this table in `tables.rules`; `[]` means none. An "
    "existing table must then be replaced as a whole: `tailrace snapshot FILE TABLE`."
)
_MISFIT_HINT = (
    "Delta's readers take an empty text for null, a folder's name has at most 255 bytes, and years run from 1 to 9999. "
    "Correct the row at the source, or choose other columns in `partition_by`. With `tables.on_bad_row: dead-letter` a "
    "loaded table continues without such changes. If the lake table already has the value in a column that becomes a "
    "partition column: correct the value, then run `tailrace snapshot FILE TABLE`. For a table that keeps the past, "
    "start a new one under another `name` in `tables.rules`."
)


def refuse_columns(stored: TableSchema, names: Sequence[str]) -> None:
    """Refuse columns that a table with this schema cannot be partitioned by."""
    columns = {column.name: column for column in stored.columns}
    for name in names:
        if name not in columns:
            raise TableUnusable(
                "the partition column does not exist in the table",
                table=stored.table,
                column=name,
                hint=f"If the source has renamed it, write `columns: {{its new name: {name}}}` for the table in "
                f"`tables.rules` and start again: the table keeps all its rows. {_OTHER_HINT}",
            )
        if names.count(name) > 1:
            # Once by its name at the source, and once by its name in the lake.
            raise TableUnusable(
                "the table would be partitioned by one column twice",
                table=stored.table,
                column=name,
                hint="Name it once in `partition_by`: by its source name, or by the lake name that `columns` gives it.",
            )
        if not _can_name(columns[name].type):
            raise _column_error("a table cannot be partitioned by a column of this type", stored, name)
        if not _NAMEABLE.fullmatch(name):
            raise TableUnusable(
                "a partition column's name cannot be used in folder names",
                table=stored.table,
                column=name,
                hint="Rename it in `tables.rules` (`columns:`), or partition by other columns.",
            )
    if names and len(names) == len(columns):
        raise _column_error("a table needs a column that it is not partitioned by", stored, names[-1])


def _column_error(message: str, stored: TableSchema, name: str) -> TableUnusable:
    return TableUnusable(message, table=stored.table, column=name, hint=_OTHER_HINT)


def _can_name(kind: pa.DataType) -> bool:
    """Return whether a column of this type can be a partition column.

    Decimals are excluded because delta-rs writes those between -1 and 0 wrong, and floats because of NaN and -0.0.
    Timestamps with a zone are excluded because their text has no zone: each reader assumes its own.
    """
    if pa.types.is_timestamp(kind):
        return kind.tz is None
    kinds = (pa.types.is_integer, pa.types.is_string, pa.types.is_boolean, pa.types.is_date32)
    return any(is_kind(kind) for is_kind in kinds)


# --- values ------------------------------------------------------------------------------------------------


def refuse_unusable_values(schema: TableSchema, names: Sequence[str], rows: pa.Table | pa.RecordBatch) -> None:
    """Refuse rows with a partition value that readers cannot read back."""
    for name in names:
        if find_unusable_values(name, rows.column(name)).any():
            raise partition_value_error(schema, name)


def partition_value_error(schema: TableSchema, name: str) -> ValueUnfit:
    """Return the error for a value that cannot be a partition value of this column."""
    return ValueUnfit("a value cannot be a partition value", table=schema.table, column=name, hint=_MISFIT_HINT)


def folder_name_bytes_left(name: str) -> int:
    """Return how many bytes a folder's name leaves for a value's encoded text."""
    return NAME_BYTES_MAX - len(name.encode()) - 1


def find_unusable_values(name: str, values: Any) -> npt.NDArray[np.bool_]:
    """Flag a column's values that cannot be partition values."""
    no_flags: npt.NDArray[np.bool_] = np.zeros(len(values), np.bool_)
    if pa.types.is_string(values.type):
        sizes = pc.fill_null(pc.binary_length(values), 1).to_numpy()
        bytes_left = folder_name_bytes_left(name)
        flags: npt.NDArray[np.bool_] = sizes == 0
        # Encoding makes a text at most three times as long.
        for at in np.flatnonzero((sizes * 3 > bytes_left) | (sizes == len(NULL_FOLDER))).tolist():
            text = values[at].as_py()
            flags[at] = text is not None and (text == NULL_FOLDER or len(_encoded(text)) > bytes_left)
        return flags
    if pa.types.is_date32(values.type):
        days = values.cast(pa.int32())
        return _outside(days, *DAYS)
    if pa.types.is_timestamp(values.type):
        return _outside(values.cast(pa.int64()), DAYS[0] * DAY_MICROS, (DAYS[1] + 1) * DAY_MICROS - 1)
    return no_flags


def _outside(values: Any, low: int, high: int) -> npt.NDArray[np.bool_]:
    numbers = values.fill_null(low).to_numpy(zero_copy_only=False)
    flags: npt.NDArray[np.bool_] = (numbers < low) | (numbers > high)
    return flags


def texts_of(values: Mapping[str, pa.Scalar]) -> PartitionTexts:
    """Return partition values as Delta's log has them."""
    return {name: _text(value) for name, value in values.items()}


def _text(value: pa.Scalar) -> str | None:
    if not value.is_valid:
        return None
    return str(value.cast(pa.string()).as_py())


def partition_texts(values: Any, most: int) -> frozenset[str] | None:
    """Return a column's distinct values but null, as text. None if there are more than `most`."""
    distinct = pc.unique(values)
    return None if len(distinct) > most else frozenset(text for value in distinct if (text := _text(value)) is not None)


def values_of(texts: PartitionTexts, columns: Iterable[Column]) -> dict[str, pa.Scalar]:
    """Return partition texts as typed values."""
    return {column.name: _value(texts[column.name], column.type) for column in columns if column.name in texts}


def _value(text: str | None, kind: pa.DataType) -> pa.Scalar:
    return pa.scalar(None, kind) if text is None else pa.scalar(text).cast(kind)


def folder_of(texts: PartitionTexts) -> str:
    """Return the folder of a partition's files, below the table's folder, as delta-rs names it."""
    parts = [f"{name}={NULL_FOLDER if text is None else _encoded(text)}" for name, text in texts.items()]
    return "/".join(parts)


def _encoded(text: str) -> str:
    return quote(text, safe="").replace("~", "%7E")


# --- files -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Rows of one partition, usually without the partition columns."""

    values: PartitionTexts
    rows: pa.Table

    @property
    def folder(self) -> str:
        return folder_of(self.values)


def schema_in_files(schema: TableSchema, names: Sequence[str]) -> TableSchema:
    """Return the schema of the data files: all columns but the partition columns."""
    return replace(schema, columns=tuple(c for c in schema.columns if c.name not in names), facts=None)


def split_by_partition(rows: pa.Table, names: Sequence[str], *, whole: bool = False) -> Iterator[Partition]:
    """Yield the rows by partition, in their order; `whole` keeps the partition columns."""
    if not rows.num_rows:
        return
    numbers = image_numbers([rows.column(name) for name in names]).numbers
    order = np.argsort(numbers, kind="stable")
    starts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
    ends = [*starts[1:].tolist(), order.size]
    rows = rows if starts.size == 1 else rows.take(pa.array(order))
    kept = rows if whole else rows.drop_columns(list(names))
    for start, end in zip(starts.tolist(), ends, strict=True):
        texts = texts_of({name: rows.column(name)[start] for name in names})
        yield Partition(values=texts, rows=kept.slice(start, end - start))
