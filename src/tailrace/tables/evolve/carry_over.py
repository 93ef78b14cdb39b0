"""How the rows of a table that keeps the past become rows of another shape, so that a load can be compared with them.

Nothing that the table holds is lost: a value stays in its column where the new type has the very same one, and beside
it, under another name, where it has not. What the source made of its rows is not known after that, so the shape says
that a load is owed until one has landed; a crash in between forgets nothing.

Pure: no Spark, no I/O.
"""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from tailrace.errors import SchemaChanged
from tailrace.model.evolution import Evolution, ExistingValue, SchemaChange, SchemaChangeKind, compare_schemas
from tailrace.model.policies import EvolutionPolicies, EvolutionPolicy
from tailrace.model.schema import TableSchema
from tailrace.tables.evolve.schema_plan import INTEGERS, ParseValue, Recast, column_of, type_contains
from tailrace.tables.schema_errors import REPLACED_HINT
from tailrace.tables.spec import TableMode, TableSpec

DIGITS = dict(zip(INTEGERS, (5, 10, 19), strict=True))
"""How many an integer can have."""
PLAIN_SCALE_MAX = 6
"""Decimals with more digits after the point are printed with an exponent where they are small."""


def carry_over(
    form: TableSpec, old: TableSchema, new: TableSchema, policies: EvolutionPolicies, value_of: ParseValue
) -> Recast | SchemaChanged:
    """The recast; or the error that the table stops with, where its rows would not be known by their key any more."""
    before, after = _comparable(old, new)
    found = compare_schemas(before, after)
    aside = tuple(
        str(item.column)
        for item in found.changes
        if item.kind is SchemaChangeKind.RETYPE
        and not keeps_values(*(c.type for c in column_of(before, after, str(item.column))))
    )
    renamed = {str(item.old): str(item.new) for item in found.changes if item.kind is SchemaChangeKind.RENAME}
    if form.mode is not TableMode.APPEND:
        if tuple(renamed.get(name, name) for name in old.key) != new.key:
            return _stop(old, "another key")
        if lost := [name for name in new.key if name in aside]:
            return _stop(old, f"retyped {', '.join(lost)}, of the key, to what cannot hold it")
    drops = policies.drop is EvolutionPolicy.APPLY
    return Recast(
        schema=new.with_owed(True),
        added=tuple(str(item.column) for item in found.changes if item.kind is SchemaChangeKind.ADD),
        renamed=tuple(pair for pair in renamed.items() if pair[1] not in aside),
        backfilled=_filled(after, found, value_of),
        dropped=tuple(str(item.column) for item in found.changes if item.kind is SchemaChangeKind.DROP and drops),
        kept_apart=aside,
    )


def _comparable(old: TableSchema, new: TableSchema) -> tuple[TableSchema, TableSchema]:
    """Both, with what tells which column is which: of a table that was made again only the name does."""
    if old.relation != new.relation:
        return replace(old, facts=None), replace(new, facts=None)
    return old.with_owed(False), new


def _filled(new: TableSchema, found: Evolution, value_of: ParseValue) -> tuple[tuple[str, pa.Scalar], ...]:
    """Constants that rows at rest have in what was added. One that is not understood comes with the load."""

    def value(item: SchemaChange) -> pa.Scalar | None:
        column = next(column for column in new.columns if column.name == item.column)
        return value_of(column, item.constant or "")

    filled = [
        (str(item.column), value(item)) for item in found.changes if item.existing_value is ExistingValue.CONSTANT
    ]
    return tuple((name, constant) for name, constant in filled if constant is not None)


def _stop(old: TableSchema, change: str) -> SchemaChanged:
    return SchemaChanged(
        "the table must be loaded anew, and what it keeps of the past cannot be carried over",
        table=old.table,
        change=change,
        hint=REPLACED_HINT,
    )


def keeps_values(was: pa.DataType, now: pa.DataType) -> bool:
    """Whether every value of one type is the same value in the other, or the text that the source prints of it."""
    if type_contains(was, now):
        return True
    if was in INTEGERS:
        if pa.types.is_decimal(now):
            return bool(now.precision - now.scale >= DIGITS[was])
        if pa.types.is_floating(now):
            return bool(was == pa.int16() or (was == pa.int32() and now == pa.float64()))
        return bool(pa.types.is_string(now))
    plain = pa.types.is_decimal(was) and 0 <= was.scale <= PLAIN_SCALE_MAX
    return bool(plain and pa.types.is_string(now))
