"""The tables of a source in memory, built from its transactions, and their scans.

A row is an object here: this is for tests, and for programs whose tables are small. A scan reads what was committed
when it begins. A chunk of a scan sees all transactions but those that are `hidden`. At a database, a commit that waits
for a standby is in the stream, and in no snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from tailrace.capture.port import ScanPiece
from tailrace.errors import SourceTableMissing, Unsupported
from tailrace.model.batch import ChangeBatch
from tailrace.model.event import Row
from tailrace.model.mirror import Key, Mirror
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId, TableSchema


@dataclass
class MemoryTable:
    """One table and its rows."""

    schema: TableSchema
    mirror: Mirror

    def sorted(self) -> list[tuple[Key, Row]]:
        return sorted(self.mirror.rows.items(), key=lambda item: item[0])


class MemoryTables:
    """All tables that the transactions have built."""

    def __init__(self) -> None:
        self._tables: dict[TableId, MemoryTable] = {}

    def apply(self, batches: Iterable[ChangeBatch]) -> None:
        """Apply one transaction. Each batch is in order; the batches' `_seq` is ignored."""
        for event in (event for batch in batches for event in batch.events()):
            table = self._tables.setdefault(event.schema.table, MemoryTable(event.schema, Mirror()))
            table.schema = event.schema
            table.mirror.apply(event.row_write())

    def get(self, table: TableId) -> MemoryTable:
        if table not in self._tables:
            raise SourceTableMissing(
                "the source does not have the table", table=table, hint="Commit a row of it first, or check its name."
            )
        return self._tables[table]

    def copy(self) -> MemoryTables:
        copied = MemoryTables()
        copied._tables = {name: MemoryTable(table.schema, table.mirror.copy()) for name, table in self._tables.items()}
        return copied


@dataclass(frozen=True, kw_only=True)
class MemoryScanProgress:
    """The acknowledged part: tables before `table_index`, and of that table all keys up to `after_key`."""

    tables: tuple[TableId, ...]
    incremental: bool
    table_index: int = 0
    after_key: Key | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "tables": [[table.schema, table.name] for table in self.tables],
            "live": self.incremental,
            "at": self.table_index,
            "after": None if self.after_key is None else list(self.after_key),
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> MemoryScanProgress:
        after = stored["after"]
        return cls(
            tables=tuple(TableId(*names) for names in stored["tables"]),
            incremental=stored["live"],
            table_index=stored["at"],
            after_key=None if after is None else tuple(after),
        )


class MemoryScan:
    """Tables being read. `view` returns them as they are now; a fresh bulk scan keeps its first view."""

    def __init__(
        self,
        progress: MemoryScanProgress,
        view: Callable[[], tuple[MemoryTables, Lsn]],
        hidden: Collection[int],
        chunk_rows: int,
        *,
        fresh: bool,
    ) -> None:
        self._progress, self._hidden, self._chunk_rows = progress, hidden, chunk_rows
        first = view()
        self.start = first[1]
        self._view, self._first = view, first if fresh and not progress.incremental else None
        for table in progress.tables[progress.table_index :]:
            schema = first[0].get(table).schema  # a missing table is reported now, not later
            if progress.incremental and not schema.key:
                raise Unsupported(
                    "a keyless table cannot be read while the stream runs",
                    table=table,
                    hint="Name it in `snapshot_tables`, or give it a key.",
                )
        self._rows: list[tuple[Key, Row]] = []
        self._schema: TableSchema | None = None
        self._seen = self.start
        self._last = False

    def record(self) -> Mapping[str, Any]:
        return self._progress.to_json()

    @property
    def done(self) -> bool:
        return not self._rows and self._progress.table_index >= len(self._progress.tables)

    def begin(self, delivered: Collection[int]) -> bool:
        if not set(delivered).isdisjoint(self._hidden):
            return False
        tables, self._seen = self._first or self._view()
        table = tables.get(self._progress.tables[self._progress.table_index])
        after = self._progress.after_key
        remaining = [(key, row) for key, row in table.sorted() if after is None or key > after]
        self._rows, self._schema = remaining[: self._chunk_rows], table.schema
        self._last = len(remaining) <= self._chunk_rows
        return True

    def next(self, rows_max: int) -> ScanPiece | None:
        if not self._rows or self._schema is None:
            if self._last:
                self._progress, self._last = (
                    replace(self._progress, table_index=self._progress.table_index + 1, after_key=None),
                    False,
                )
            return None
        piece, self._rows = self._rows[:rows_max], self._rows[rows_max:]
        schema, progress, last = self._schema, self._progress, self._last and not self._rows
        data = pa.RecordBatch.from_pylist([row for _, row in piece], schema=pa.schema(schema.row_fields()))

        def record(rows: int) -> Mapping[str, Any]:
            if last and rows >= len(piece):
                return replace(progress, table_index=progress.table_index + 1, after_key=None).to_json()
            if not rows or not schema.key:
                return progress.to_json()
            return replace(progress, after_key=piece[rows - 1][0]).to_json()

        self._progress = replace(progress, after_key=piece[-1][0])
        return ScanPiece(schema=schema, data=data, position=self._seen, table_done=last, record=record)

    def close(self) -> None:
        self._rows = []
