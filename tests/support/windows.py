"""Windows for the log and the loop, built from the changes of `changes`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tailrace.capture.port import SourceId
from tailrace.model import change
from tailrace.model.batch import ChangeBatch, Window
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId, TableSchema
from tests.support.changes import SHOP, Change, changes, insert

SOURCE = SourceId(kind="memory", system="one", database="shop", timeline=1)


def named(schema: str, name: str, relation: int, like: TableSchema = SHOP) -> TableSchema:
    """A table of the same shape under another name."""
    return replace(like, table=TableId(schema, name), relation=relation)


def batch(schema: TableSchema, *rows: Change, first: int = 0) -> ChangeBatch:
    """A batch whose `_seq` counts from `first`, as a source hands it over."""
    (data,) = changes(schema, *rows, first=first).combine_chunks().to_batches()
    return ChangeBatch(
        schema=schema,
        data=data,
        moves=sum(row.moved_from is not None for row in rows),
        truncates=sum(row.op == "truncate" for row in rows),
        unfit=sum(len(row.unfit or ()) for row in rows),
    )


def window(start: int, end: int, *batches: ChangeBatch, transactions: int = 1) -> Window:
    """Whole transactions between two positions; without batches only the position moves."""
    return Window(
        start=Lsn(start),
        end=Lsn(end),
        batches=batches,
        transactions=transactions if batches else 0,
        rows=sum(map(len, batches)),
        last_committed_at=1_000_000 if batches else None,
    )


def open_window(at: int, *batches: ChangeBatch, continues: bool = False) -> Window:
    """A part of a transaction that has not ended; its rows have no `_position`."""
    return Window(
        start=Lsn(at),
        end=Lsn(at),
        open=True,
        continues=continues,
        rows=sum(map(len, batches)),
        batches=tuple(_without_position(batch) for batch in batches),
    )


def finishing_window(
    start: int, end: int, *batches: ChangeBatch, continued_end: int | None = None, transactions: int = 1
) -> Window:
    """The rest of the transaction of the open windows before it, and what followed it."""
    return Window(
        start=Lsn(start),
        end=Lsn(end),
        continues=True,
        continued_end=Lsn(continued_end or end),
        batches=batches,
        transactions=transactions,
        rows=sum(map(len, batches)),
        last_committed_at=1_000_000,
    )


def _without_position(batch: ChangeBatch) -> ChangeBatch:
    names = [name for name in batch.data.schema.names if name != change.POSITION]
    return replace(batch, data=batch.data.select(names))


def rows_window(start: int, end: int, *keys: int, schema: TableSchema = SHOP) -> Window:
    """A window that inserts these keys."""
    return window(start, end, batch(schema, *[insert(key, name=f"n{key}") for key in keys]))


def ids(batches: Sequence[ChangeBatch]) -> list[tuple[int, Any]]:
    """(`_seq`, id) of every row, in order of `_seq`."""
    return sorted(
        pair
        for found in batches
        for pair in zip(found.data.column(change.SEQ).to_pylist(), found.data.column("id").to_pylist(), strict=True)
    )
