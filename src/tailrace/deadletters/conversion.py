"""The changes of dead letters in the shape that their table has now: what each would be if it came today.

What must stay true: nothing is guessed, and no value is nulled. A text that did not fit is read as a value of the type
that its column has now. What still has no place stands in `_unfit`, as in any change; a value that would be lost,
because its column is another one by now, holds its row back (`Refitted.stuck`).

A row of a mirror without a key must be what the source has: it changes with the rows at rest (`at_rest`), or it cannot
be told.

Pure: no Spark, no I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.model import change
from tailrace.model.evolution import ExistingValue, SchemaChangeKind, compare_schemas
from tailrace.model.schema import Column, TableSchema
from tailrace.tables.evolve.carry_over import keeps_values
from tailrace.tables.evolve.schema_plan import ParseValue, column_of, is_wider
from tailrace.tables.fold.row_ids import one_array

_LEAVES_ROWS = (SchemaChangeKind.DROP, SchemaChangeKind.RENAME, SchemaChangeKind.NULLABILITY, SchemaChangeKind.DEFAULT)
"""What leaves the other columns of rows at rest as they were."""


@dataclass(frozen=True, kw_only=True)
class ConversionResult:
    """Changes of another shape."""

    changes: pa.Table
    """With every column; they say nothing of rows of before."""
    blocked: Mapping[int, tuple[str, str]]
    """Rows that would lose a value: why, and the column."""


def convert_rows(
    old: TableSchema,
    new: TableSchema,
    changes: pa.Table,
    value_of: ParseValue,
    *,
    kept: Collection[str] = (),
    filled: Mapping[str, pa.Scalar] | None = None,
) -> ConversionResult:
    """Changes of the shape `old`, which have every column, as changes of the shape `new`; `kept` are columns, by their
    names in `old`, that only the lake table still has, and `filled` what all have in columns that were added."""
    size, places, texts = changes.num_rows, _places(old, new), _texts(old, changes)
    stuck, left = dict[int, tuple[str, str]](), [list[dict[str, str]]() for _ in range(size)]
    own = dict[str, Any]()
    for column, place in zip(new.columns, places, strict=True):
        if place is None:
            constant = (filled or {}).get(column.name)
            own[column.name] = pa.nulls(size, column.type) if constant is None else pa.repeat(constant, size)
            continue
        was = old.columns[place]
        values = one_array(changes.column(change.stored_name(was.name)))
        if keeps_values(was.type, column.type):
            values = values.cast(column.type)
        else:
            _hold_back(stuck, values, "the change has a value of a type that the column no longer has", column.name)
            values = pa.nulls(size, column.type)
        read = {row: _read(was, column, text, value_of) for row, text in texts.get(was.name, {}).items()}
        for row in (row for row, value in read.items() if value is None):
            left[row].append({"column": column.name, "text": texts[was.name][row]})
        own[column.name] = _put(values, {row: value for row, value in read.items() if value is not None})
    for place in set(range(len(old.columns))) - set(places):
        if (name := old.columns[place].name) in kept:
            why = "the change has a value in a column that the source has dropped and the table keeps"
            _hold_back(stuck, changes.column(change.stored_name(name)), why, name)
            stuck |= dict.fromkeys(texts.get(name, {}), (why, name))
    renamed = {old.columns[place].name: new.names[at] for at, place in enumerate(places) if place is not None}
    said = {
        change.UNCHANGED: _renamed(changes.column(change.UNCHANGED), renamed),
        change.UNFIT: pa.array([cells or None for cells in left], change.UNFIT_TYPE),
    }
    columns = {change.stored_name(name): values for name, values in own.items()} | said
    columns |= {field.name: changes.column(field.name) for field in change.REQUIRED}
    fields = new.change_schema()
    made = [columns[field.name] if field.name in columns else pa.nulls(size, field.type) for field in fields]
    return ConversionResult(changes=pa.Table.from_arrays(made, schema=fields), blocked=stuck)


def convert_rows_at_rest(
    old: TableSchema, new: TableSchema, changes: pa.Table, value_of: ParseValue
) -> pa.Table | None:
    """Rows of the shape `old` that were at the source all along, as what they are there now; None if that cannot be
    told without reading them."""
    if old.same_rows(new):
        return changes
    found = compare_schemas(old, new)
    if old.relation != new.relation or found.rewritten is not False:
        return None
    filled = dict[str, pa.Scalar]()
    for item in found.changes:
        if item.kind is SchemaChangeKind.ADD and item.existing_value is ExistingValue.CONSTANT:
            constant = value_of(new.columns[new.names.index(str(item.column))], item.constant or "")
            if constant is None:
                return None
            filled[str(item.column)] = constant
        elif item.kind is SchemaChangeKind.RETYPE:
            if not is_wider(*column_of(old, new, str(item.column))):
                return None
        elif item.kind not in _LEAVES_ROWS and (
            item.kind is not SchemaChangeKind.ADD or item.existing_value is not ExistingValue.NULL
        ):
            return None
    made = convert_rows(old, new, changes, value_of, filled=filled)
    return None if made.blocked else made.changes


def _places(old: TableSchema, new: TableSchema) -> list[int | None]:
    """Where each column of the new shape stands in the old: found by its number where that is known."""
    before: list[int | str] = list(old.names)
    after: list[int | str] = list(new.names)
    if old.relation == new.relation and old.facts and new.facts:
        before, after = list(old.facts.numbers), list(new.facts.numbers)
    return [before.index(one) if one in before else None for one in after]


def _texts(schema: TableSchema, changes: pa.Table) -> dict[str, dict[int, str]]:
    """What did not fit of a change's own values, by column and row."""
    found = dict[str, dict[int, str]]()
    for row, said in enumerate(changes.column(change.UNFIT).to_pylist()):
        for cell in said or ():
            if cell["column"] in schema.names:
                found.setdefault(cell["column"], {})[row] = cell["text"]
    return found


def _read(was: Column, now: Column, text: str, value_of: ParseValue) -> pa.Scalar | None:
    """The text as a value of the column; None if there is none. What a rule failed at was never written down, and of
    bytes that are no text only a description was."""
    if change.parse_rule_failure(text) is not None or pa.types.is_string(was.type):
        return None
    if pa.types.is_list(was.type) and pa.types.is_string(was.type.value_type) and "\\" in text:
        return None
    return value_of(now, text)


def _put(values: Any, given: Mapping[int, pa.Scalar]) -> Any:
    """The values, but for some rows."""
    if not given:
        return values
    places = np.arange(len(values))
    places[list(given)] = len(values) + np.arange(len(given))
    return pa.concat_arrays([values, *(pa.repeat(value, 1) for value in given.values())]).take(pa.array(places))


def _hold_back(stuck: dict[int, tuple[str, str]], values: Any, why: str, column: str) -> None:
    for row in np.flatnonzero(one_array(values).is_valid().to_numpy(zero_copy_only=False)).tolist():
        stuck.setdefault(row, (why, column))


def _renamed(unchanged: Any, names: Mapping[str, str]) -> Any:
    """`_unchanged` by the columns' new names; rare, so plain Python."""
    if unchanged.null_count == len(unchanged):
        return unchanged
    found = [[names[name] for name in said or () if name in names] or None for said in unchanged.to_pylist()]
    return pa.array(found, pa.list_(pa.string()))
