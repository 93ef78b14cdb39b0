"""Columnar batches of changes, and windows of whole transactions.

A batch holds rows of one table in one schema version, in `_seq` order. A window ends on a transaction boundary, unless
it is *open*. A transaction too large to hold is delivered as open windows, followed by one that finishes it. Until the
log has stored a window, `_seq` counts from zero at the window's first row; the log adds the number it starts from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeAlias

import pyarrow as pa

from tailrace.model.event import Event, events_of
from tailrace.model.position_kinds import P_co, Position, covers, reaches
from tailrace.model.schema import TableSchema


@dataclass(frozen=True, kw_only=True)
class ChangeBatch:
    """Rows of one table and one schema version.

    `data` follows `schema.change_schema()` exactly, with two exceptions. Optional columns that are null in every row
    may be left out. Rows of an open window have no `_position` yet.
    """

    schema: TableSchema
    data: pa.RecordBatch
    moves: int = 0
    truncates: int = 0
    unfit: int = 0
    ends: tuple[int, int] | None = None
    """`_seq` of the first and the last row; None if the creator of the batch did not know them."""

    def __len__(self) -> int:
        return int(self.data.num_rows)

    def with_all_columns(self) -> pa.RecordBatch:
        """Return the rows with every optional column; missing ones are filled with nulls."""
        fields, names = self.schema.change_schema(), set(self.data.schema.names)
        columns = [
            self.data.column(field.name) if field.name in names else pa.nulls(len(self), field.type) for field in fields
        ]
        return pa.RecordBatch.from_arrays(columns, schema=fields)

    def events(self) -> Iterator[Event]:
        """Yield the rows one by one."""
        return events_of(self.schema, self.data)


@dataclass(frozen=True, kw_only=True)
class Window(Generic[P_co]):
    """Whole transactions after `start`, up to and including `end`; or a part of one.

    A window may be empty: then only the position moves.

    A part of one transaction is an *open* window; the windows that continue it follow. The end of the transaction is
    not known yet, so the position stays, and the rows have no `_position`. None of these rows counts until the window
    that finishes the transaction. A window that continues nothing, after open windows that were not finished, means
    that their transaction will be delivered again from its beginning.
    """

    start: P_co
    end: P_co
    batches: tuple[ChangeBatch, ...] = ()
    transactions: int = 0
    rows: int = 0
    last_committed_at: int | None = field(default=None)
    """The newest commit time of its transactions, µs since 1970.

    Mostly that of the last one. But a server's clock may go back, and transactions that commit at the same moment are
    not always in the order of their times.
    """
    open: bool = False
    """True if its one transaction has not ended."""
    continues: bool = False
    """True if it begins inside the transaction of the open windows before it."""
    continued_end: P_co | None = None
    """The end of that transaction, if it ends here; whole transactions may follow."""

    def __post_init__(self) -> None:
        if self.open:
            if self.end != self.start or self.transactions or not self.batches:
                raise ValueError("an open window has rows, no whole transaction, and does not move the position")
            if self.continued_end is not None:
                raise ValueError("a transaction cannot both continue and end")
        elif self.continues != (self.continued_end is not None):
            raise ValueError("a window that continues a transaction finishes it, and has `continued_end`")
        elif self.continued_end is not None and not (
            self.transactions and reaches(self.end, self.continued_end) and not covers(self.start, self.continued_end)
        ):
            raise ValueError("a continued transaction ends within its window, and counts there")

    @property
    def is_empty(self) -> bool:
        """True if only the position moves. The rows that a window continues count as its own."""
        return not self.batches and not self.continues


AnyWindow: TypeAlias = Window[Position]
"""A window of any source."""
