"""Hold the result of a fold: its rows, their schema, and a TRUNCATE.

Every fold returns rows of `folded_schema`, whatever the table's mode, so a writer needs to know only these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.model.schema import TableSchema
from tailrace.tables.fold.row_ids import Ints

UPSERT, DELETE, END_VERSION, MARK_DELETED = 0, 1, 2, 3
"""The values of `op`.

The last two are for tables that keep the past: end the row's current version, and mark the row as deleted. Each applies
only if the row exists.
"""

Codes = npt.NDArray[np.int8]
Flags = npt.NDArray[np.bool_]
NOWHERE = -1


@dataclass(frozen=True, kw_only=True)
class TruncateEffect:
    """The effect of a TRUNCATE on retained rows: applies where no folded row does."""

    values: dict[str, pa.Scalar]
    """New values, by the lake table's own column names."""
    tx: int


@dataclass(frozen=True, kw_only=True)
class FoldedChanges:
    """The result of folding a batch.

    `rows` follows `folded_schema`. If `truncated`, they are all the rows that the table then has.
    """

    truncated: bool
    rows: pa.Table
    truncate_effect: TruncateEffect | None = None
    latest_time: int | None = None
    """Latest commit time among the changes, µs since 1970, where the table spec needs it."""

    @property
    def empty(self) -> bool:
        return not self.truncated and self.truncate_effect is None and not self.rows.num_rows

    @property
    def partial(self) -> bool:
        """True if values must be taken from the table's rows."""
        absent = self.rows.column("absent")
        return bool(absent.null_count < len(absent))


def folded_schema(schema: TableSchema) -> pa.Schema:
    """Return the Arrow schema of folded rows.

    - `c0…cN`: the table's own columns in order.
    - `op`: what to do with the row.
    - `absent`: the ordinals of columns whose values must be taken from the table's row `base`.
    - `base`: that row's key before this batch. Null means that no row of the table has the values, whatever row has the
      key now.
    - `moved`: true if that row had another key since.
    - `copies`: the count of equal rows, in a keyless table.
    """
    own = [pa.field(f"c{i}", column.type) for i, column in enumerate(schema.columns)]
    key = [own[i] for i in key_ordinals(schema)]
    return pa.schema(
        [
            *own,
            pa.field("op", pa.int8(), nullable=False),
            pa.field("absent", pa.list_(pa.int16())),
            pa.field("base", pa.struct(key)),
            pa.field("moved", pa.bool_(), nullable=False),
            pa.field("copies", pa.int64(), nullable=False),
        ]
    )


def key_ordinals(schema: TableSchema) -> list[int]:
    """Return the ordinals of the key's columns, in the table's column order."""
    return [i for i, column in enumerate(schema.columns) if column.name in schema.key]


def take_rows(columns: Sequence[Any], rows_per_column: Sequence[Ints]) -> list[Any]:
    """Return the rows at these indices, column by column; null for -1."""
    taken, indices = [], {}
    for column, rows in zip(columns, rows_per_column, strict=True):
        if id(rows) not in indices:
            indices[id(rows)] = pa.array(rows, mask=rows == NOWHERE)
        whole = rows.size == len(column) and not indices[id(rows)].null_count
        taken.append(column if whole and _is_range(rows) else column.take(indices[id(rows)]))
    return taken


def _is_range(rows: Ints) -> bool:
    return bool((rows == np.arange(rows.size)).all())


def ordinal_lists(missing: Flags, ordinals: npt.NDArray[np.int16]) -> pa.Array:
    """Return per row the ordinals of its missing columns; null for none."""
    rows, columns = np.nonzero(missing)
    counts = np.bincount(rows, minlength=missing.shape[0])
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(ordinals[columns]), mask=pa.array(counts == 0))


def folded_rows(
    schema: TableSchema,
    columns: list[Any],
    deleted: Flags | Codes,
    *,
    absent: Any = None,
    base: Any = None,
    moved: Flags | None = None,
    copies: Ints | None = None,
) -> pa.Table:
    """Return rows as `folded_schema` defines them; `deleted` may hold codes for `op` instead of flags."""
    arrow_schema = folded_schema(schema)
    size = deleted.size
    rest = [
        pa.array(deleted.astype(np.int8)),
        pa.nulls(size, arrow_schema.field("absent").type) if absent is None else absent,
        pa.nulls(size, arrow_schema.field("base").type) if base is None else base,
        pa.array(np.zeros(size, np.bool_) if moved is None else moved),
        pa.array(np.ones(size, np.int64) if copies is None else copies),
    ]
    return pa.Table.from_arrays([*columns, *rest], schema=arrow_schema)
