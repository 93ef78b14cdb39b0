"""Recast rows of a table that keeps the past, before a reload compares them.

No value in the table is lost. A value stays in its column if the new type has the very same value. Otherwise it stays
under another name next to the column. After that it is unknown what the source made of its rows. So the schema is
marked as owing a load until one has been committed, and a crash in between does not forget that.

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
"""Digits that an integer type can have."""
PLAIN_SCALE_MAX = 6
"""Largest scale at which small decimals are printed without an exponent."""


def carry_over(
    spec: TableSpec, old: TableSchema, new: TableSchema, policies: EvolutionPolicies, value_of: ParseValue
) -> Recast | SchemaChanged:
    """Return the recast, or the error for rows that would no longer match their keys."""
    before, after = _comparable(old, new)
    found = compare_schemas(before, after)
    kept_apart = tuple(
        str(item.column)
        for item in found.changes
        if item.kind is SchemaChangeKind.RETYPE
        and not keeps_values(*(c.type for c in column_of(before, after, str(item.column))))
    )
    renamed = {str(item.old): str(item.new) for item in found.changes if item.kind is SchemaChangeKind.RENAME}
    if spec.mode is not TableMode.APPEND:
        if tuple(renamed.get(name, name) for name in old.key) != new.key:
            return _stop(old, "another key")
        if lost := [name for name in new.key if name in kept_apart]:
            return _stop(old, f"retyped {', '.join(lost)}, of the key, to what cannot hold it")
    drops = policies.drop is EvolutionPolicy.APPLY
    return Recast(
        schema=new.with_owed(True),
        added=tuple(str(item.column) for item in found.changes if item.kind is SchemaChangeKind.ADD),
        renamed=tuple(pair for pair in renamed.items() if pair[1] not in kept_apart),
        backfilled=_filled(after, found, value_of),
        dropped=tuple(str(item.column) for item in found.changes if item.kind is SchemaChangeKind.DROP and drops),
        kept_apart=kept_apart,
    )


def _comparable(old: TableSchema, new: TableSchema) -> tuple[TableSchema, TableSchema]:
    """Return both schemas with the facts by which their columns are matched.

    A table that was created again is matched by column names only.
    """
    if old.relation != new.relation:
        return replace(old, facts=None), replace(new, facts=None)
    return old.with_owed(False), new


def _filled(new: TableSchema, found: Evolution, value_of: ParseValue) -> tuple[tuple[str, pa.Scalar], ...]:
    """Return constants that existing rows have in added columns.

    A constant that cannot be parsed is omitted: the reload brings it.
    """

    def value(item: SchemaChange) -> pa.Scalar | None:
        column = next(column for column in new.columns if column.name == item.column)
        return value_of(column, item.constant or "")

    constants = [
        (str(item.column), value(item)) for item in found.changes if item.existing_value is ExistingValue.CONSTANT
    ]
    return tuple((name, constant) for name, constant in constants if constant is not None)


def _stop(old: TableSchema, change: str) -> SchemaChanged:
    return SchemaChanged(
        "the table must be reloaded, and the past that it keeps cannot be carried over",
        table=old.table,
        change=change,
        hint=REPLACED_HINT,
    )


def keeps_values(was: pa.DataType, now: pa.DataType) -> bool:
    """Return whether the new type keeps every value of the old one.

    It keeps each as the same value, or as the text that the source prints of it.
    """
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
