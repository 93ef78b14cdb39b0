"""One change as an object, and the write that it means for a mirror.

It is for people and callbacks.

`row_write` is the one function that decides what a sink has to do with a row. An unsent value is not null, so a change
with unsent values is a `Merge`, never a `Replace`. A change that cannot be written gives the reason.

Writes are applied in order, one by one. Where the key changes and the server did not send a large value, the old row
has to stay until the new one has been built from it. So the delete is `Nothing`, and the `Merge` after it removes the
row of its `base`. The two are neighbours in one batch, and must not be separated. `model.mirror` applies the writes.
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
"""The version of an event's layout, and of its JSON."""

Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Replace:
    """Set the row, whatever it was before.

    Without a key the row is added; one row that equals `old`, if there is an `old`, is removed.
    """

    key: Row | None
    row: Row
    old: Row | None = None


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Set these columns of the row; the `unchanged` ones keep their values.

    If `base` is another key, the row was stored under that key until now and is to be removed there. If a row of `key`
    exists already, the change arrives for the second time, and that row has the values. If neither row exists, there is
    nothing to write: the change that created, moved or deleted the row since is delivered again too.
    """

    key: Row
    columns: Row
    unchanged: tuple[str, ...]
    base: Row
    """The key the row had before; differs from `key` where the key was changed."""


@dataclass(frozen=True, kw_only=True)
class Delete:
    """Remove the row; without a key, one row that equals `old`."""

    key: Row | None
    old: Row | None = None


@dataclass(frozen=True)
class Truncate:
    """Remove all rows."""


@dataclass(frozen=True, kw_only=True)
class Nothing:
    """Write nothing, for the reason `why`."""

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
    """Its index within the transaction."""
    committed_at: datetime | None = None
    values: Row
    """The table's columns. A delete has those that the server sent, and None for the others."""
    unchanged: tuple[str, ...]
    """Unsent columns, whose values did not change. They are None in `values`, and not null in the table."""
    before: Row | None
    """The old row, where the source sent it. For a delete, the columns sent: the whole row, or the key alone."""
    moved_from: Row | None
    """The old key, where it changed; the event before is the delete of that key."""
    kept_for: Row | None = None
    """Deletes only: the key of the next event, which takes unsent values from this row."""
    unfit: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Values that the column's type cannot hold, as text: None in `values`."""
    schema: TableSchema = field(repr=False, compare=False)
    version: int = ENVELOPE

    @property
    def after(self) -> Row | None:
        """The row after the change; None if it was removed."""
        gone = self.operation in (Operation.DELETE, Operation.TRUNCATE)
        return None if gone else self.values

    @property
    def key(self) -> Row | None:
        """The key's columns. None for a keyless table and for a change that concerns no row."""
        if not self.schema.key or self.operation in (Operation.TRUNCATE, Operation.MESSAGE, Operation.SCHEMA):
            return None
        return {name: self.values[name] for name in self.schema.key}

    def row_write(self) -> RowWrite:
        """Return the write that a mirror of the table has to do."""
        operation = self.operation
        if operation in (Operation.MESSAGE, Operation.SCHEMA):
            return Nothing(why=f"a {operation.value} concerns no row")
        if operation is Operation.TRUNCATE:
            return Truncate()
        if self.unfit:
            names = ", ".join(sorted(self.unfit))
            return Nothing(why=f"a value does not fit the type of its column: {names}")
        if self.kept_for is not None:
            return Nothing(why="the row continues under another key: the next change takes it from here")
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
    """Yield the rows of a batch. Whole columns are converted to Python objects, which costs least."""
    columns = dict(zip(data.schema.names, data.columns, strict=True))
    count = data.num_rows

    def listed(name: str) -> list[Any]:
        return python_values(columns[name]) if name in columns else [None] * count

    names, table = schema.names, str(schema.table)
    stored = {change.stored_name(name): name for name in names}
    values = zip(*(listed(committed_at) for committed_at in stored), strict=True) if names else iter([()] * count)
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
    for kept_for, op, seq, position, tx, index, committed_at, unchanged, before, moved, unfit, row in rows:
        current, old = dict(zip(names, row, strict=True)), _named(before, stored)
        if old is None and op == deleted and sent:
            old = {name: current[name] for name in sent}
        yield Event(
            operation=operations[op],
            table=table,
            seq=seq,
            position=position,
            transaction=tx,
            tx_index=index,
            committed_at=committed_at,
            values=current,
            unchanged=tuple(unchanged or ()),
            before=old,
            moved_from=_keyed(moved, schema),
            kept_for=kept_for,
            unfit={cell["column"]: cell["text"] for cell in unfit or ()},
            schema=schema,
        )


def _sent_of_deletes(schema: TableSchema) -> list[str]:
    """Return the columns that a delete carries.

    A delete is stored in the row's own columns, of which the source may send the key alone.
    """
    keys = {*schema.key, *schema.former_key}
    return [name for name in schema.names if schema.identity is Identity.FULL or name in keys]


def _kept(schema: TableSchema, data: pa.RecordBatch) -> list[Row | None]:
    """Return, per row, the key of the next row if that takes values from it.

    Such rows are rare, so a batch without any costs only a look.
    """
    kept_for: list[Row | None] = [None] * data.num_rows
    moved, unchanged = data.column(change.MOVED_FROM), data.column(change.UNCHANGED)
    unfit = data.column(change.UNFIT) if change.UNFIT in data.schema.names else None
    keys = [(name, data.column(change.stored_name(name))) for name in schema.key]
    for index in np.flatnonzero(moved.is_valid().to_numpy(zero_copy_only=False)).tolist():
        old = moved[index]
        if not index or not unchanged[index].as_py() or (unfit is not None and unfit[index].as_py()):
            continue
        if data.column(change.OP)[index - 1].as_py() != Operation.DELETE.value:
            continue
        if all(old[change.stored_name(name)] == column[index - 1] for name, column in keys):
            kept_for[index - 1] = {name: python_values(column.slice(index, 1))[0] for name, column in keys}
    return kept_for


def python_values(column: pa.Array) -> list[Any]:
    """Return the column's values as Python objects; moments outside Python's calendar as text."""
    kind = column.type
    if pa.types.is_date32(kind) or (pa.types.is_timestamp(kind) and kind.unit == "us" and kind.tz in (None, "UTC")):
        return _there(column, _moments(column))
    if pa.types.is_struct(kind) and kind.num_fields:
        parts = [python_values(part) for part in column.flatten()]
        names = [kind.field(index).name for index in range(kind.num_fields)]
        return _there(column, [dict(zip(names, row, strict=True)) for row in zip(*parts, strict=True)])
    if pa.types.is_list(kind) and pa.types.is_temporal(kind.value_type):
        values = iter(python_values(column.flatten()))
        sizes = pc.fill_null(pc.list_value_length(column), 0).to_pylist()
        return _there(column, [list(itertools.islice(values, size)) for size in sizes])
    plain: list[Any] = column.to_pylist()
    return plain


def _moments(column: pa.Array) -> list[Any]:
    """Convert dates or times. Arrow would look up the time zone of every value; there is only one."""
    unit: Literal["D", "us"] = "us"
    if pa.types.is_date32(column.type):
        unit = "D"
        moments = column.view(pa.int32()).fill_null(0).to_numpy().astype("datetime64[D]").tolist()
    else:
        moments = column.view(pa.int64()).fill_null(0).to_numpy().view("datetime64[us]").tolist()
        if column.type.tz:
            moments = [moment.replace(tzinfo=UTC) if isinstance(moment, datetime) else moment for moment in moments]
    # Outside Python's calendar, numpy gives a number.
    return [str(np.datetime64(moment, unit)) if isinstance(moment, int) else moment for moment in moments]


def _there(column: pa.Array, values: list[Any]) -> list[Any]:
    if not column.null_count:
        return values
    return [value if there else None for value, there in zip(values, column.is_valid().to_pylist(), strict=True)]


def _named(row: Row | None, stored: Mapping[str, str]) -> Row | None:
    return None if row is None else {stored.get(name, name): value for name, value in row.items()}


def _keyed(row: Row | None, schema: TableSchema) -> Row | None:
    """Return an old key with its columns in the order of `Event.key`.

    So a caller that looks the row up by the values alone finds the same row.
    """
    return None if row is None else {name: row[change.stored_name(name)] for name in schema.key}
