"""Rows that lie together because they have the same values in the columns that a table is partitioned by.

What must stay true: what every reader finds in such a column is what was written. Its values are not in the data files.
Delta has them as text in the table's own log, and names the files' folders by them, from which some readers take them.
So a value is held only if all of them read it back: an empty text, which Delta takes for null, is not, nor one that is
no folder's name; nor a type whose text is not the same to all. These are refused, never changed.

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
"""The values of one partition as Delta's log has them, by column."""
PartitionValues = Mapping[str, Mapping[str, pa.Scalar]]
"""Of data files by name the values that all rows of each have; nothing of a file that holds its columns itself."""

NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"
"""Where rows with null lie; a text that says this is taken for null."""
DAYS = (-719_162, 2_932_896)
"""The years from 1 to 9999: others are not written alike."""
DAY_MICROS = 86_400_000_000
_NAMEABLE = re.compile(r"\w[\w .-]*")

_OTHER_HINT = (
    "Choose other columns in `partition_by`, in `tables` or for this table in `tables.rules`; `[]` is none. Of a table "
    "that is there all that it holds is then replaced: `tailrace snapshot FILE TABLE`."
)
_MISFIT_HINT = (
    "An empty text is null to Delta's readers, a folder's name has at most 255 bytes, and years go from 1 to 9999. "
    "Mend the row at the source, or choose other columns in `partition_by`. `tables.on_bad_row: dead-letter` lets a "
    "table that is loaded go on without such changes. If the lake table itself has the value, in a column that is to "
    "be the partition's now: mend it, then `tailrace snapshot FILE TABLE`; one that keeps the past is begun anew "
    "beside it, by another `name` in `tables.rules`."
)


def refuse_columns(stored: TableSchema, names: Sequence[str]) -> None:
    """Refuse columns that a table of this shape cannot be partitioned by."""
    columns = {column.name: column for column in stored.columns}
    for name in names:
        if name not in columns:
            raise TableUnusable(
                "the table has no such column to be partitioned by",
                table=stored.table,
                column=name,
                hint=f"If the source calls it otherwise now, write `columns: {{its name now: {name}}}` for the table "
                f"in `tables.rules` and start again: it goes on with all that it holds. {_OTHER_HINT}",
            )
        if names.count(name) > 1:
            # Once as the source calls it, and once as the lake does.
            raise TableUnusable(
                "the table would be partitioned by one column twice",
                table=stored.table,
                column=name,
                hint="Name it once in `partition_by`: as at the source, or as `columns` calls it in the lake.",
            )
        if not _can_name(columns[name].type):
            raise _refused("a table cannot be partitioned by a column of this type", stored, name)
        if not _NAMEABLE.fullmatch(name):
            raise TableUnusable(
                "a column of this name cannot name folders",
                table=stored.table,
                column=name,
                hint="Give it another name in `tables.rules` (`columns:`), or partition by other columns.",
            )
    if names and len(names) == len(columns):
        raise _refused("a table must have a column that it is not partitioned by", stored, names[-1])


def _refused(what: str, stored: TableSchema, name: str) -> TableUnusable:
    return TableUnusable(what, table=stored.table, column=name, hint=_OTHER_HINT)


def _can_name(kind: pa.DataType) -> bool:
    """Decimals are left out because delta-rs writes those between -1 and 0 wrong, floats because of NaN and -0.0, and
    timestamps with a zone because their text has none: each reader takes it for one of its own zone."""
    if pa.types.is_timestamp(kind):
        return kind.tz is None
    kinds = (pa.types.is_integer, pa.types.is_string, pa.types.is_boolean, pa.types.is_date32)
    return any(is_kind(kind) for is_kind in kinds)


# --- values ------------------------------------------------------------------------------------------------


def refuse_unusable_values(schema: TableSchema, names: Sequence[str], rows: pa.Table | pa.RecordBatch) -> None:
    """Refuse rows, the table's own columns, with a value that cannot be read back."""
    for name in names:
        if find_unusable_values(name, rows.column(name)).any():
            raise partition_value_error(schema, name)


def partition_value_error(schema: TableSchema, name: str) -> ValueUnfit:
    """What is told of a value in this column that cannot be read back."""
    return ValueUnfit("a value cannot be that of a partition", table=schema.table, column=name, hint=_MISFIT_HINT)


def folder_name_bytes_left(name: str) -> int:
    """How many bytes are left for a value's text, encoded, in the name of a folder."""
    return NAME_BYTES_MAX - len(name.encode()) - 1


def find_unusable_values(name: str, values: Any) -> npt.NDArray[np.bool_]:
    """Which of a column's values cannot be those of a partition."""
    none: npt.NDArray[np.bool_] = np.zeros(len(values), np.bool_)
    if pa.types.is_string(values.type):
        sizes = pc.fill_null(pc.binary_length(values), 1).to_numpy()
        room = folder_name_bytes_left(name)
        flags: npt.NDArray[np.bool_] = sizes == 0
        # Encoded a text is at most three times as long.
        for at in np.flatnonzero((sizes * 3 > room) | (sizes == len(NULL_FOLDER))).tolist():
            text = values[at].as_py()
            flags[at] = text is not None and (text == NULL_FOLDER or len(_encoded(text)) > room)
        return flags
    if pa.types.is_date32(values.type):
        days = values.cast(pa.int32())
        return _outside(days, *DAYS)
    if pa.types.is_timestamp(values.type):
        return _outside(values.cast(pa.int64()), DAYS[0] * DAY_MICROS, (DAYS[1] + 1) * DAY_MICROS - 1)
    return none


def _outside(values: Any, low: int, high: int) -> npt.NDArray[np.bool_]:
    numbers = values.fill_null(low).to_numpy(zero_copy_only=False)
    flags: npt.NDArray[np.bool_] = (numbers < low) | (numbers > high)
    return flags


def texts_of(values: Mapping[str, pa.Scalar]) -> PartitionTexts:
    """As Delta's log has them."""
    return {name: _text(value) for name, value in values.items()}


def _text(value: pa.Scalar) -> str | None:
    if not value.is_valid:
        return None
    return str(value.cast(pa.string()).as_py())


def partition_texts(values: Any, most: int) -> frozenset[str] | None:
    """The different values of a column, but for null; None if there are more."""
    some = pc.unique(values)
    return None if len(some) > most else frozenset(text for value in some if (text := _text(value)) is not None)


def values_of(texts: PartitionTexts, columns: Iterable[Column]) -> dict[str, pa.Scalar]:
    """The same as values."""
    return {column.name: _value(texts[column.name], column.type) for column in columns if column.name in texts}


def _value(text: str | None, kind: pa.DataType) -> pa.Scalar:
    return pa.scalar(None, kind) if text is None else pa.scalar(text).cast(kind)


def folder_of(texts: PartitionTexts) -> str:
    """Where the files of a partition lie, below the table's folder; as delta-rs names it."""
    parts = [f"{name}={NULL_FOLDER if text is None else _encoded(text)}" for name, text in texts.items()]
    return "/".join(parts)


def _encoded(text: str) -> str:
    return quote(text, safe="").replace("~", "%7E")


# --- files -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Rows of one partition, without the columns that it is one by unless they were to stay."""

    values: PartitionTexts
    rows: pa.Table

    @property
    def folder(self) -> str:
        return folder_of(self.values)


def schema_in_files(schema: TableSchema, names: Sequence[str]) -> TableSchema:
    """The shape of the data files: all columns but those that the table is partitioned by."""
    return replace(schema, columns=tuple(c for c in schema.columns if c.name not in names), facts=None)


def split_by_partition(rows: pa.Table, names: Sequence[str], *, whole: bool = False) -> Iterator[Partition]:
    """The rows by partition; those of one keep their order, and if they are to be `whole` their columns, too."""
    if not rows.num_rows:
        return
    numbers = image_numbers([rows.column(name) for name in names]).numbers
    order = np.argsort(numbers, kind="stable")
    starts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
    ends = [*starts[1:].tolist(), order.size]
    rows = rows if starts.size == 1 else rows.take(pa.array(order))
    own = rows if whole else rows.drop_columns(list(names))
    for start, end in zip(starts.tolist(), ends, strict=True):
        texts = texts_of({name: rows.column(name)[start] for name in names})
        yield Partition(values=texts, rows=own.slice(start, end - start))
