"""One change as an object, and what it means for a table that mirrors the source: for people and callbacks.

`row_write` is the one place that says what a sink has to do with a row. A value that the server did not send is not
null, so a change that has such columns is a `Merge`, never a `Replace`. What cannot be written says why.

Writes are followed in order, one by one. So where a key changes and the server did not send a large value, the old row
stays until the new one has been made from it: the delete is `Nothing`, and the `Merge` behind it takes the row of its
`base` away. The two are neighbours in one batch, and nothing may cut between them. `model.mirror` follows the writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.model import change
from tailrace.model.change import Operation
from tailrace.model.schema import Identity, TableSchema

ENVELOPE = 1
"""The version of what an event, and its JSON, looks like."""

Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Replace:
    """The row is this, whatever it was. Without a key it is added, and one that equals `old`, if given, goes."""

    key: Row | None
    row: Row
    old: Row | None = None


@dataclass(frozen=True, kw_only=True)
class Merge:
    """These columns of the row are new; the `unchanged` ones stay as the row has them.

    Where `base` is another key the row stood there until now, and is to go from there. If a row of `key` is there
    already the change comes for the second time, and that row has the values. If neither is there, there is nothing
    to write: what made, moved or deleted the row since comes again too.
    """

    key: Row
    columns: Row
    unchanged: tuple[str, ...]
    base: Row
    """The key the row had before: another one where the key was changed."""


@dataclass(frozen=True, kw_only=True)
class Delete:
    """The row goes; without a key, one row that equals `old`."""

    key: Row | None
    old: Row | None = None


@dataclass(frozen=True)
class Truncate:
    """All rows go."""


@dataclass(frozen=True, kw_only=True)
class Nothing:
    """There is nothing to write, and why."""

    why: str


RowWrite: TypeAlias = Replace | Merge | Delete | Truncate | Nothing


@dataclass(frozen=True, kw_only=True)
class Event:
    """One change as an object: never on the hot path."""

    operation: Operation
    table: str
    seq: int
    position: str | None
    """None in an open window: its transaction has not ended."""
    transaction: int
    tx_index: int = 0
    """Its place in the transaction."""
    committed_at: datetime | None = None
    values: Row
    """The table's columns; of a delete those that the server sent, the others as None."""
    unchanged: tuple[str, ...]
    """Columns that the server did not send because they did not change: None in `values`, and not null in the table."""
    before: Row | None
    """The row as it was, where the source told it. Of a delete what was sent: the whole row, or the key alone."""
    moved_from: Row | None
    """The old key, where it changed; the event before is the delete of that key."""
    kept_for: Row | None = None
    """Of a delete: the key of the next event, which takes what the server did not send from this very row."""
    unfit: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Values that the column's type cannot hold, as text: None in `values`."""
    schema: TableSchema = field(repr=False, compare=False)
    version: int = ENVELOPE

    @property
    def after(self) -> Row | None:
        """The row as it is now; None if it is gone."""
        gone = self.operation in (Operation.DELETE, Operation.TRUNCATE)
        return None if gone else self.values

    @property
    def key(self) -> Row | None:
        """The key's columns; None for a table without one, and for what is about no row."""
        if not self.schema.key or self.operation in (Operation.TRUNCATE, Operation.MESSAGE, Operation.SCHEMA):
            return None
        return {name: self.values[name] for name in self.schema.key}

    def row_write(self) -> RowWrite:
        """What a mirror of the table has to do."""
        operation = self.operation
        if operation in (Operation.MESSAGE, Operation.SCHEMA):
            return Nothing(why=f"a {operation.value} is about no row")
        if operation is Operation.TRUNCATE:
            return Truncate()
        if self.unfit:
            names = ", ".join(sorted(self.unfit))
            return Nothing(why=f"a value does not fit the type of its column: {names}")
        if self.kept_for is not None:
            return Nothing(why="the row goes on under another key: the next change takes it from here")
        if operation is Operation.DELETE:
            if self.key is None and self.before is None and all(value is None for value in self.values.values()):
                return Nothing(why="the table has no key, and the source did not send the old row")
            return Delete(key=self.key, old=None if self.key else self.before or self.values)
        if self.key is None:
            return self._keyless()
        if self.unchanged:
            sent = {name: value for name, value in self.values.items() if name not in self.unchanged}
            return Merge(key=self.key, columns=sent, unchanged=self.unchanged, base=self.moved_from or self.key)
        return Replace(key=self.key, row=self.values)

    def _keyless(self) -> RowWrite:
        if self.unchanged:
            return Nothing(why="the table has no key, and the source did not send the whole row")
        if self.operation is Operation.UPDATE and self.before is None:
            return Nothing(why="the table has no key, and the source did not send the old row")
        return Replace(key=None, row=self.values, old=self.before)


def events_of(schema: TableSchema, data: pa.RecordBatch) -> Iterator[Event]:
    """The rows of a batch, one by one. Columns are turned to Python objects whole, which is what costs least."""
    columns = dict(zip(data.schema.names, data.columns, strict=True))
    count = data.num_rows

    def listed(name: str) -> list[Any]:
        return python_values(columns[name]) if name in columns else [None] * count

    names, table = schema.names, str(schema.table)
    stored = {change.stored_name(name): name for name in names}
    values = zip(*(listed(at) for at in stored), strict=True) if names else iter([()] * count)
    operations = {operation.value: operation for operation in Operation}
    sent, deleted = _sent_of_deletes(schema), Operation.DELETE.value
    kept = _kept(schema, data) if {change.MOVED_FROM, change.UNCHANGED} <= columns.keys() else [None] * count
    rows = zip(
        kept,
        listed(change.OP),
        listed(change.SEQ),
        listed(change.POSITION),
        listed(change.TX),
        listed(change.TX_INDEX),
        listed(change.COMMITTED_AT),
        listed(change.UNCHANGED),
        listed(change.BEFORE),
        listed(change.MOVED_FROM),
        listed(change.UNFIT),
        values,
        strict=True,
    )
    for kept_for, op, seq, position, tx, index, at, unchanged, before, moved, unfit, row in rows:
        told, old = dict(zip(names, row, strict=True)), _named(before, stored)
        if old is None and op == deleted and sent:
            old = {name: told[name] for name in sent}
        yield Event(
            operation=operations[op],
            table=table,
            seq=seq,
            position=position,
            transaction=tx,
            tx_index=index,
            committed_at=at,
            values=told,
            unchanged=tuple(unchanged or ()),
            before=old,
            moved_from=_keyed(moved, schema),
            kept_for=kept_for,
            unfit={cell["column"]: cell["text"] for cell in unfit or ()},
            schema=schema,
        )


def _sent_of_deletes(schema: TableSchema) -> list[str]:
    """The columns that a delete has: it stands in the row's own, of which the source may send the key alone."""
    keys = {*schema.key, *schema.former_key}
    return [name for name in schema.names if schema.identity is Identity.FULL or name in keys]


def _kept(schema: TableSchema, data: pa.RecordBatch) -> list[Row | None]:
    """For each row the key of the next one, if that takes values from it. Rare, so what is not so costs a look."""
    found: list[Row | None] = [None] * data.num_rows
    moved, unchanged = data.column(change.MOVED_FROM), data.column(change.UNCHANGED)
    unfit = data.column(change.UNFIT) if change.UNFIT in data.schema.names else None
    keys = [(name, data.column(change.stored_name(name))) for name in schema.key]
    for at in np.flatnonzero(moved.is_valid().to_numpy(zero_copy_only=False)).tolist():
        old = moved[at]
        if not at or not unchanged[at].as_py() or (unfit is not None and unfit[at].as_py()):
            continue
        if data.column(change.OP)[at - 1].as_py() != Operation.DELETE.value:
            continue
        if all(old[change.stored_name(name)] == column[at - 1] for name, column in keys):
            found[at - 1] = {name: python_values(column.slice(at, 1))[0] for name, column in keys}
    return found


def python_values(column: pa.Array) -> list[Any]:
    """The column's values as Python has them; a moment that Python's calendar does not have is its text."""
    kind = column.type
    if pa.types.is_date32(kind) or (pa.types.is_timestamp(kind) and kind.unit == "us" and kind.tz in (None, "UTC")):
        return _there(column, _moments(column))
    if pa.types.is_struct(kind) and kind.num_fields:
        parts = [python_values(part) for part in column.flatten()]
        names = [kind.field(place).name for place in range(kind.num_fields)]
        return _there(column, [dict(zip(names, row, strict=True)) for row in zip(*parts, strict=True)])
    if pa.types.is_list(kind) and pa.types.is_temporal(kind.value_type):
        values = iter(python_values(column.flatten()))
        sizes = pc.fill_null(pc.list_value_length(column), 0).to_pylist()
        return _there(column, [list(itertools.islice(values, size)) for size in sizes])
    plain: list[Any] = column.to_pylist()
    return plain


def _moments(column: pa.Array) -> list[Any]:
    """Dates or times. Arrow looks for the time zone of every single one; there is one."""
    unit: Literal["D", "us"] = "us"
    if pa.types.is_date32(column.type):
        unit = "D"
        moments = column.view(pa.int32()).fill_null(0).to_numpy().astype("datetime64[D]").tolist()
    else:
        moments = column.view(pa.int64()).fill_null(0).to_numpy().view("datetime64[us]").tolist()
        if column.type.tz:
            moments = [moment.replace(tzinfo=UTC) if isinstance(moment, datetime) else moment for moment in moments]
    # Beyond what Python's calendar has, numpy gives a number.
    return [str(np.datetime64(moment, unit)) if isinstance(moment, int) else moment for moment in moments]


def _there(column: pa.Array, values: list[Any]) -> list[Any]:
    if not column.null_count:
        return values
    return [value if there else None for value, there in zip(values, column.is_valid().to_pylist(), strict=True)]


def _named(row: Row | None, stored: Mapping[str, str]) -> Row | None:
    return None if row is None else {stored.get(name, name): value for name, value in row.items()}


def _keyed(row: Row | None, schema: TableSchema) -> Row | None:
    """An old key, its columns in the order of `Event.key`: whoever goes by the values alone finds the same row."""
    return None if row is None else {name: row[change.stored_name(name)] for name in schema.key}
