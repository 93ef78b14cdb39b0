"""What flows: columnar batches of changes, and windows of whole transactions.

A batch holds rows of one table in one schema version, in `_seq` order. A window ends on a transaction
boundary, unless it is *open*: a transaction too large to hold comes as open windows and one that finishes it.
Until the log has taken a window, `_seq` counts from zero at the window's first row; the log adds the number it
starts from.
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
    """Rows of one table and one schema version; `data` follows `schema.change_schema()` exactly,
    except that optional columns which are null throughout may be left out, and that rows of an open window
    have no `_position` yet."""

    schema: TableSchema
    data: pa.RecordBatch
    moves: int = 0
    truncates: int = 0
    unfit: int = 0
    ends: tuple[int, int] | None = None
    """`_seq` of the first and the last row, where whoever made the batch knew."""

    def __len__(self) -> int:
        return int(self.data.num_rows)

    def with_all_columns(self) -> pa.RecordBatch:
        """The rows with every optional column in place, as nulls where this batch leaves one out."""
        fields, names = self.schema.change_schema(), set(self.data.schema.names)
        columns = [
            self.data.column(field.name) if field.name in names else pa.nulls(len(self), field.type) for field in fields
        ]
        return pa.RecordBatch.from_arrays(columns, schema=fields)

    def events(self) -> Iterator[Event]:
        """The rows one by one."""
        return events_of(self.schema, self.data)


@dataclass(frozen=True, kw_only=True)
class Window(Generic[P_co]):
    """Whole transactions, from just after `start` up to and including `end`. May be empty: then only the
    position moves.

    Or a part of one transaction: an *open* window, whose rows are followed by those of the windows that
    continue it. Where the transaction ends is not known yet, so the position stays and the rows have no
    `_position`; nothing of them counts until the window that finishes the transaction. A window that continues
    nothing says that open windows before it, if they were not finished, will come again from their beginning.
    """

    start: P_co
    end: P_co
    batches: tuple[ChangeBatch, ...] = ()
    transactions: int = 0
    rows: int = 0
    last_committed_at: int | None = field(default=None)
    """The newest of its transactions' times, µs since 1970. Mostly the last one's; but a server's clock may go back,
    and those that commit at once are not always in the order of their times."""
    open: bool = False
    """Its one transaction has not ended."""
    continues: bool = False
    """It begins inside the transaction of the open windows before it."""
    continued_end: P_co | None = None
    """Where that transaction ends, if it ends here; whole ones may follow."""

    def __post_init__(self) -> None:
        if self.open:
            if self.end != self.start or self.transactions or not self.batches:
                raise ValueError("an open window has rows, no whole transaction, and does not move the position")
            if self.continued_end is not None:
                raise ValueError("a transaction does not both go on and end")
        elif self.continues != (self.continued_end is not None):
            raise ValueError("a window that continues a transaction finishes it, and says where")
        elif self.continued_end is not None and not (
            self.transactions and reaches(self.end, self.continued_end) and not covers(self.start, self.continued_end)
        ):
            raise ValueError("a continued transaction ends within its window, and counts there")

    @property
    def is_empty(self) -> bool:
        """Whether only the position moves. The rows that a window continues are its own as well."""
        return not self.batches and not self.continues


AnyWindow: TypeAlias = Window[Position]
"""Of whichever source."""
