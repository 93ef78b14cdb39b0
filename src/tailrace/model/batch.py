"""What flows: columnar batches of changes, and windows of whole transactions.

A batch holds rows of one table in one schema version, in `_seq` order. A window ends on a transaction
boundary. Until the log has taken a window, `_seq` counts from zero at the window's first row; the log adds
the number it starts from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from tailrace.model import change
from tailrace.model.change import Operation
from tailrace.model.position import Lsn
from tailrace.model.schema import TableSchema


@dataclass(frozen=True, kw_only=True)
class Event:
    """One change as an object: for people and callbacks, never on the hot path."""

    operation: Operation
    table: str
    seq: int
    position: str
    transaction: int
    values: dict[str, Any]
    unchanged: tuple[str, ...]
    before: dict[str, Any] | None
    moved_from: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class ChangeBatch:
    """Rows of one table and one schema version; `data` follows `schema.change_schema()` exactly,
    except that optional columns which are null throughout may be left out."""

    schema: TableSchema
    data: pa.RecordBatch
    moves: int = 0
    truncates: int = 0
    unfit: int = 0

    def __len__(self) -> int:
        return int(self.data.num_rows)

    def events(self) -> Iterator[Event]:
        """The rows one by one."""
        stored = [change.stored_name(name) for name in self.schema.names]
        for row in self.data.to_pylist():
            yield Event(
                operation=Operation(row[change.OP]),
                table=str(self.schema.table),
                seq=row[change.SEQ],
                position=row[change.POSITION],
                transaction=row[change.TX],
                values={name: row[at] for name, at in zip(self.schema.names, stored, strict=True)},
                unchanged=tuple(row.get(change.UNCHANGED) or ()),
                before=row.get(change.BEFORE),
                moved_from=row.get(change.MOVED_FROM),
            )


@dataclass(frozen=True, kw_only=True)
class Window:
    """Whole transactions, from just after `start` up to and including `end`. May be empty: then only the
    position moves."""

    start: Lsn
    end: Lsn
    batches: tuple[ChangeBatch, ...] = ()
    transactions: int = 0
    rows: int = 0
    last_committed_at: int | None = field(default=None)
    """Of its last transaction, µs since 1970."""

    @property
    def empty(self) -> bool:
        return not self.batches
