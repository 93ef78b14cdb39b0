"""Builds tables and changes for tests, as a server would send them.

There are whole rows, partial ones, and keys that change.

```python
orders = table("public.orders", id=pa.int64(), status=pa.string(), note=pa.string())
changes(orders, insert({"id": 1, "status": "new"}), move({"id": 1}, {"id": 2, "status": "new"}, unchanged=("note",)))
```

A column that a row does not name is null; one that is `unchanged` was not sent, which is not the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from tailrace.errors import ConfigError
from tailrace.model import change
from tailrace.model.batch import ChangeBatch
from tailrace.model.change import Operation
from tailrace.model.schema import Column, Identity, TableId, TableSchema, unknown_column_error, wrong_type_error
from tailrace.validation import require_instance

Row = Mapping[str, Any]


def table(
    name: str,
    /,
    *,
    key: Sequence[str] | None = None,
    relation: int | None = None,
    columns: Mapping[str, pa.DataType] | None = None,
    **named: pa.DataType,
) -> TableSchema:
    """Return a table with this `schema.name` and these columns. The first is the key by default.

    `key` names other key columns. `relation` is the server's number for the table. The same number under another name
    is a renamed table; another number under the same name is a table that was dropped and created again. By default
    each name has its own number, the same each time.
    """
    types = dict(columns or {}) | named
    schema, _, plain = name.rpartition(".") if isinstance(name, str) else ("", "", "")
    if not schema or not plain:
        raise ConfigError("the name of a table is invalid", name=ascii(name), hint='Write `table("public.orders", …)`.')
    keyed = tuple(types)[:1] if key is None else tuple(key)
    if lacking := [column for column in keyed if column not in types]:
        raise ConfigError(
            "the key names a column that the table does not have",
            table=name,
            column=lacking[0],
            hint="Name only columns of the table in `key`.",
        )
    number = zlib.crc32(f"{schema}\0{plain}".encode()) if relation is None else relation
    return TableSchema(
        table=TableId(schema, plain),
        relation=number,
        key=keyed,
        identity=Identity.KEY if keyed else Identity.FULL,
        columns=tuple(Column(name=column, source_type=str(kind), type=kind) for column, kind in types.items()),
    )


def altered(
    schema: TableSchema,
    *,
    add: Mapping[str, pa.DataType] | None = None,
    drop: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    retype: Mapping[str, pa.DataType] | None = None,
) -> TableSchema:
    """Return the next version of a table's schema, as ALTER TABLE makes it."""
    renamed, retyped = dict(rename or {}), dict(retype or {})
    unknown = {*drop, *renamed, *retyped} - set(schema.names)
    if unknown or set(drop) & set(schema.key):
        raise ConfigError(
            "a column cannot be changed in this way",
            table=schema.table,
            columns=", ".join(sorted(unknown or drop)),
            hint="Name columns that the table has; a key column cannot be dropped.",
        )
    kept = [column for column in schema.columns if column.name not in drop]
    columns = [
        replace(
            column,
            name=renamed.get(column.name, column.name),
            type=retyped.get(column.name, column.type),
            source_type=str(retyped[column.name]) if column.name in retyped else column.source_type,
        )
        for column in kept
    ]
    columns += [Column(name=name, source_type=str(kind), type=kind) for name, kind in (add or {}).items()]
    return replace(schema, columns=tuple(columns), key=tuple(renamed.get(name, name) for name in schema.key))


@dataclass(frozen=True, kw_only=True)
class Change:
    """One row of a batch."""

    operation: Operation
    values: Row
    unchanged: tuple[str, ...] = ()
    before: Row | None = None
    moved_from: Row | None = None

    def __post_init__(self) -> None:
        for name in ("values", "before", "moved_from"):
            value = getattr(self, name)
            if value is not None or name == "values":
                require_instance(name, value, Mapping, 'Give values by column: `insert({"id": 1})`.')


def insert(row: Row) -> tuple[Change, ...]:
    return (Change(operation=Operation.INSERT, values=row),)


def update(row: Row, *, unchanged: Sequence[str] = (), before: Row | None = None) -> tuple[Change, ...]:
    """Return an update; `before` is the old row, where the source sends it."""
    return (Change(operation=Operation.UPDATE, values=row, unchanged=tuple(unchanged), before=before),)


def delete(row: Row) -> tuple[Change, ...]:
    """Return a delete of a key or, in a keyless table, of the whole row."""
    return (Change(operation=Operation.DELETE, values=row),)


def move(old_key: Row, row: Row, *, unchanged: Sequence[str] = ()) -> tuple[Change, ...]:
    """Return an update of the key, as the two rows in which it arrives."""
    inserted = Change(operation=Operation.INSERT, values=row, unchanged=tuple(unchanged), moved_from=old_key)
    return (*delete(old_key), inserted)


def truncate() -> tuple[Change, ...]:
    return (Change(operation=Operation.TRUNCATE, values={}),)


def changes(schema: TableSchema, *parts: Sequence[Change]) -> ChangeBatch:
    """Return a batch of one table for `MemoryCapture.commit`, which assigns the metadata columns."""
    require_instance("schema", schema, TableSchema, "Give the result of `table(…)` first: `changes(orders, …)`.")
    rows = [row for part in parts for row in (part if isinstance(part, tuple | list) else (part,))]
    for row in rows:
        require_instance("change", row, Change, "Give `insert({…})`, `update({…})`, `delete({…})` or another change.")
    if not rows:
        raise ConfigError("a batch needs a change", hint="Use `Quiet` to move the log without changes.")
    for row in rows:
        unknown = {*row.values, *row.unchanged, *(row.before or ()), *(row.moved_from or ())} - set(schema.names)
        if unknown:
            raise unknown_column_error(schema, [str(name) for name in unknown])
    try:
        stored = pa.Table.from_pylist([_stored(schema, row) for row in rows], schema=schema.change_schema())
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise wrong_type_error(schema) from error
    stored = stored.drop_columns([name for name in change.OPTIONAL if stored.column(name).null_count == len(rows)])
    (data,) = stored.combine_chunks().to_batches()
    return ChangeBatch(
        schema=schema,
        data=data,
        moves=sum(row.moved_from is not None for row in rows),
        truncates=sum(row.operation is Operation.TRUNCATE for row in rows),
    )


def _stored(schema: TableSchema, row: Change) -> dict[str, Any]:
    return {
        change.OP: row.operation.value,
        change.SEQ: 0,
        change.POSITION: "",
        change.TX: 0,
        change.TX_INDEX: 0,
        change.COMMITTED_AT: 0,
        change.UNCHANGED: list(row.unchanged) or None,
        change.BEFORE: _named(row.before),
        change.MOVED_FROM: _named(row.moved_from),
        change.UNFIT: None,
        **{change.stored_name(name): row.values.get(name) for name in schema.names},
    }


def _named(row: Row | None) -> dict[str, Any] | None:
    return None if row is None else {change.stored_name(name): value for name, value in row.items()}
