"""Builders of changes, and the plainest possible model of what they mean.

`changes(SHOP, insert(1, big="x"), *move(1, 2, unchanged=("big",)))` is a batch as the log holds it. `Model` is a
table at the source: it makes the changes a real server would send, partial ones included, and knows the rows
that must be there afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from tailrace.model import change
from tailrace.model.schema import Column, Identity, TableId, TableSchema
from tailrace.tables.fold.folded_changes import UPSERT, FoldedChanges

Row = dict[str, Any]


def table_schema(
    columns: dict[str, pa.DataType], key: Sequence[str] = ("id",), identity: Identity = Identity.KEY
) -> TableSchema:
    return TableSchema(
        table=TableId("public", "things"),
        relation=16384,
        columns=tuple(Column(name=name, source_type=str(kind), type=kind) for name, kind in columns.items()),
        key=tuple(key),
        identity=identity,
    )


SHOP = table_schema({"id": pa.int64(), "name": pa.string(), "big": pa.string(), "n": pa.int32()})
"""A table with a key; `big` and `name` are what a server may leave out."""

KEYLESS = table_schema({"a": pa.int64(), "b": pa.string()}, key=(), identity=Identity.FULL)


@dataclass(frozen=True, kw_only=True)
class Change:
    op: str
    values: Row = field(default_factory=dict)
    unchanged: tuple[str, ...] | None = None
    before: Row | None = None
    moved_from: Row | None = None
    unfit: tuple[str, ...] | None = None
    unfit_text: str = "SECRET"
    """Of what does not fit."""


def _key(key: Any) -> Row:
    return dict(key) if isinstance(key, dict) else {"id": key}


def insert(key: Any, *, unfit: tuple[str, ...] | None = None, unfit_text: str = "SECRET", **values: Any) -> Change:
    return Change(op="insert", values=_key(key) | values, unfit=unfit, unfit_text=unfit_text)


def update(
    key: Any,
    *,
    unchanged: tuple[str, ...] | None = None,
    unfit: tuple[str, ...] | None = None,
    before: Row | None = None,
    unfit_text: str = "SECRET",
    **values: Any,
) -> Change:
    return Change(
        op="update", values=_key(key) | values, unchanged=unchanged, unfit=unfit, before=before, unfit_text=unfit_text
    )


def delete(key: Any, *, unfit: tuple[str, ...] | None = None, **values: Any) -> Change:
    return Change(op="delete", values=_key(key) | values, unfit=unfit)


def move(old: Any, new: Any, *, unchanged: tuple[str, ...] | None = None, **values: Any) -> tuple[Change, Change]:
    """A key update: the two neighbouring rows it arrives as."""
    arrival = Change(op="insert", values=_key(new) | values, unchanged=unchanged, moved_from=_key(old))
    return delete(old), arrival


def arrival(key: Any, *, unchanged: tuple[str, ...], **values: Any) -> Change:
    """A row that enters a condition by an update: an insert, without the values that did not change."""
    return Change(op="insert", values=_key(key) | values, unchanged=unchanged)


def truncate() -> Change:
    return Change(op="truncate")


def changes(schema: TableSchema, *rows: Change, first: int = 0) -> pa.Table:
    """The rows as one stored batch; optional columns that are null throughout are left out."""
    stored = [_stored(schema, row, first + i) for i, row in enumerate(rows)]
    table = pa.Table.from_pylist(stored, schema=schema.change_schema())
    unused = [name for name in change.OPTIONAL if table.column(name).null_count == len(rows)]
    return table.drop_columns(unused) if unused else table


def _stored(schema: TableSchema, row: Change, seq: int) -> Row:
    return {
        change.OP: row.op,
        change.SEQ: seq,
        change.POSITION: f"0/{seq:X}",
        change.TX: seq,
        change.TX_INDEX: 0,
        change.COMMITTED_AT: 0,
        change.UNCHANGED: None if row.unchanged is None else list(row.unchanged),
        change.BEFORE: _renamed(row.before),
        change.MOVED_FROM: _renamed(row.moved_from),
        change.UNFIT: None if row.unfit is None else [{"column": name, "text": row.unfit_text} for name in row.unfit],
        **{change.stored_name(name): row.values.get(name) for name in schema.names},
    }


def _renamed(row: Row | None) -> Row | None:
    return None if row is None else {change.stored_name(name): value for name, value in row.items()}


def record_batches(schema: TableSchema, rows: Iterable[Row]) -> list[pa.RecordBatch]:
    """Rows as a snapshot hands them to a load."""
    return list(pa.Table.from_pylist(list(rows), schema=pa.schema(schema.row_fields())).to_batches())


def apply_in_memory(schema: TableSchema, table: dict[Any, Row], folded: FoldedChanges) -> dict[Any, Row]:
    """What an engine must make of a fold, row by row: every old row is read before any is written."""
    result = {} if folded.truncated else dict(table)
    rows = folded.rows.to_pylist()
    for row in rows:
        result.pop(_key_of(schema, row), None)
    for row in rows:
        if row["op"] == UPSERT:
            values = {name: row[f"c{i}"] for i, name in enumerate(schema.names)}
            for ordinal in row["absent"] or ():
                name = schema.names[ordinal]
                values[name] = table[tuple(row["base"].values())][name]
            result[_key_of(schema, row)] = values
    return result


def _key_of(schema: TableSchema, row: Row) -> Any:
    return tuple(row[f"c{i}"] for i, name in enumerate(schema.names) if name in schema.key)


COMPOSITE = table_schema(
    {"name": pa.string(), "shop": pa.int32(), "big": pa.string(), "code": pa.string(), "n": pa.int32()},
    key=("code", "shop"),
)
"""The key's columns stand apart and in another order than the key."""


@dataclass
class Model:
    """A table at the source: `step` does what it is told if it can be done, and returns what the server sends."""

    schema: TableSchema = COMPOSITE
    rows: dict[int, Row] = field(default_factory=dict)
    away: dict[int, Row] = field(default_factory=dict)
    """Rows that a condition hides, and that change unseen (`leave`) until they come back (`enter`)."""

    @staticmethod
    def key(number: int) -> Row:
        return {"shop": number // 2, "code": "é" if number % 2 else ""}

    def table(self) -> dict[Any, Row]:
        """The rows by key, in the table's column order."""
        by_key = {}
        for number, row in self.rows.items():
            whole = {name: (self.key(number) | row)[name] for name in self.schema.names}
            by_key[tuple(whole[name] for name in self.schema.names if name in self.schema.key)] = whole
        return by_key

    def step(self, kind: str, at: int, to: int, value: str | None, unchanged: tuple[str, ...]) -> list[Change]:
        if kind == "truncate":
            self.rows.clear()
            self.away.clear()
            return [truncate()]
        if kind == "leave" and at in self.rows | self.away:
            self.away[at] = (self.rows.pop(at, None) or self.away[at]) | {"big": value}
            return [delete(self.key(at))]
        if kind == "enter" and at in self.away:
            self.rows[at] = self.away.pop(at)
            (told,) = self.step("update", at, to, value, unchanged)
            return [told if to % 2 else replace(told, op="insert")]
        if kind == "insert" and at not in self.rows | self.away:
            self.rows[at] = {"name": value, "big": value, "n": to}
            return [insert(self.key(at), **self.rows[at])]
        if at not in self.rows or kind in ("leave", "enter"):
            return []
        if kind == "delete":
            del self.rows[at]
            return [delete(self.key(at))]
        row: Row = {"name": value, "big": value, "n": to}
        new = row | {name: self.rows[at][name] for name in unchanged}
        sent = {name: given for name, given in row.items() if name not in unchanged}
        if kind == "move" and to not in self.rows | self.away:
            del self.rows[at]
            self.rows[to] = new
            return list(move(self.key(at), self.key(to), unchanged=unchanged or None, **sent))
        self.rows[at] = new
        return [update(self.key(at), unchanged=unchanged or None, **sent)]


@dataclass
class KeylessModel:
    """A table without a key, as a multiset of images."""

    rows: Counter[tuple[Any, ...]] = field(default_factory=Counter)

    def step(self, kind: str, image: tuple[Any, ...], other: tuple[Any, ...]) -> list[Change]:
        new = dict(zip(KEYLESS.names, image, strict=True))
        old = dict(zip(KEYLESS.names, other, strict=True))
        if kind == "truncate":
            self.rows.clear()
            return [truncate()]
        if kind == "insert":
            self.rows[image] += 1
            return [insert({}, **new)]
        if not self.rows[other]:
            return []
        self.rows[other] -= 1
        if kind == "delete":
            return [delete({}, **old)]
        self.rows[image] += 1
        return [update({}, before=old, **new)]
