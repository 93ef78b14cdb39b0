"""The tables of a source in memory, as its transactions have made them, and how they are read.

A row is an object here: this is for tests, and for programs whose tables are small. Reading begins with what was
committed by then. A chunk of a scan sees all transactions but those that are `hidden`: at a database a commit that
waits for a standby is in the stream, and in no snapshot.
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
    """What the transactions have made."""

    def __init__(self) -> None:
        self._tables: dict[TableId, MemoryTable] = {}

    def apply(self, batches: Iterable[ChangeBatch]) -> None:
        """One transaction. What its batches have as `_seq` does not matter; each is in order."""
        for event in (event for batch in batches for event in batch.events()):
            table = self._tables.setdefault(event.schema.table, MemoryTable(event.schema, Mirror()))
            table.schema = event.schema
            table.mirror.apply(event.row_write())

    def get(self, table: TableId) -> MemoryTable:
        if table not in self._tables:
            raise SourceTableMissing("the source does not have the table", table=table, hint="Has it had a row?")
        return self._tables[table]

    def copy(self) -> MemoryTables:
        made = MemoryTables()
        made._tables = {name: MemoryTable(table.schema, table.mirror.copy()) for name, table in self._tables.items()}
        return made


@dataclass(frozen=True, kw_only=True)
class MemoryScanProgress:
    """What was acknowledged: tables before `at`, and of that one all keys up to `after`."""

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
    """Tables being read. `view` gives them as they are now; a bulk scan that is fresh keeps what it saw first."""

    def __init__(
        self,
        cursor: MemoryScanProgress,
        view: Callable[[], tuple[MemoryTables, Lsn]],
        hidden: Collection[int],
        chunk_rows: int,
        *,
        fresh: bool,
    ) -> None:
        self._cursor, self._hidden, self._chunk_rows = cursor, hidden, chunk_rows
        first = view()
        self.start = first[1]
        self._view, self._first = view, first if fresh and not cursor.incremental else None
        for table in cursor.tables[cursor.table_index :]:
            schema = first[0].get(table).schema  # one that is missing is told now, not when its turn comes
            if cursor.incremental and not schema.key:
                raise Unsupported(
                    "a table without a key cannot be read beside the stream",
                    table=table,
                    hint="Name it in `snapshot_tables`, or give it a key.",
                )
        self._rows: list[tuple[Key, Row]] = []
        self._schema: TableSchema | None = None
        self._seen = self.start
        self._last = False

    def record(self) -> Mapping[str, Any]:
        return self._cursor.to_json()

    @property
    def done(self) -> bool:
        return not self._rows and self._cursor.table_index >= len(self._cursor.tables)

    def begin(self, delivered: Collection[int]) -> bool:
        if not set(delivered).isdisjoint(self._hidden):
            return False
        tables, self._seen = self._first or self._view()
        table = tables.get(self._cursor.tables[self._cursor.table_index])
        after = self._cursor.after_key
        left = [(key, row) for key, row in table.sorted() if after is None or key > after]
        self._rows, self._schema = left[: self._chunk_rows], table.schema
        self._last = len(left) <= self._chunk_rows
        return True

    def next(self, rows_max: int) -> ScanPiece | None:
        if not self._rows or self._schema is None:
            if self._last:
                self._cursor, self._last = (
                    replace(self._cursor, table_index=self._cursor.table_index + 1, after_key=None),
                    False,
                )
            return None
        given, self._rows = self._rows[:rows_max], self._rows[rows_max:]
        schema, cursor, last = self._schema, self._cursor, self._last and not self._rows
        data = pa.RecordBatch.from_pylist([row for _, row in given], schema=pa.schema(schema.row_fields()))

        def record(rows: int) -> Mapping[str, Any]:
            if last and rows >= len(given):
                return replace(cursor, table_index=cursor.table_index + 1, after_key=None).to_json()
            if not rows or not schema.key:
                return cursor.to_json()
            return replace(cursor, after_key=given[rows - 1][0]).to_json()

        self._cursor = replace(cursor, after_key=given[-1][0])
        return ScanPiece(schema=schema, data=data, position=self._seen, table_done=last, record=record)

    def close(self) -> None:
        self._rows = []
