"""A real lake table of the shop, and a hand that applies changes to it one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tailrace.model.position import Lsn
from tailrace.model.schema import TableSchema
from tailrace.tables.fold.fold import fold
from tailrace.tables.port import AppliedPosition, Refetch, WriteResult
from tests.support.changes import SHOP, Change, changes, record_batches
from tests.support.engines import commits_of, open_table, rows_of

LOG = "0b1c9a3e-6f3b-4e7e-9d80-5e1d5d6a7b11"
BIG = ("big",)
ROWS = [{"id": i, "name": f"n{i}", "big": f"large {i}", "n": i} for i in range(1, 6)]


def at(seq: int) -> AppliedPosition:
    return AppliedPosition(seq=seq, commit=seq // 10, position=Lsn(seq * 16))


class Mirror:
    """A table under test: each `apply` goes ten numbers further."""

    def __init__(self, folder: Path, schema: TableSchema = SHOP, rows: Any = (), log: str = LOG) -> None:
        self.schema, self.folder = schema, folder
        self.table = open_table(folder, log)
        self.table.load(schema, record_batches(schema, rows), at(0))

    @property
    def seq(self) -> int:
        found = self.table.applied_position()
        assert found is not None
        return found.seq

    @property
    def version(self) -> int:
        return commits_of(self.folder)

    def apply(self, *rows: Change, reread: Refetch | None = None) -> WriteResult:
        seq = self.seq
        result = fold(self.schema, changes(self.schema, *rows), can_refetch=reread is not None)
        return self.table.apply(self.schema, result, at(seq), at(seq + 10), refetch=reread)

    def content(self) -> list[dict[str, Any]]:
        return content(self.folder, self.schema)


def content(folder: Path, schema: TableSchema) -> list[dict[str, Any]]:
    return [dict(zip(schema.names, row.values(), strict=True)) for row in rows_of(folder).to_pylist()]


def by_id(rows: list[dict[str, Any]]) -> dict[Any, Any]:
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row["big"] for row in rows}
