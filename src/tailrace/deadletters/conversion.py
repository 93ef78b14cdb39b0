"""Convert the changes of dead letters to the schema that their table has now.

The result is what each change would be if it arrived today. Invariant: nothing is guessed, and no value becomes null. A
text that did not fit is parsed as a value of the column's present type. If it still does not fit it stays in `_unfit`,
as in any change. If a value would be lost, because its column has changed too much, its row is held back
(`ConversionResult.blocked`).

A row of a keyless mirror must equal the source's row. So it is converted as the source changed its existing rows
(`convert_rows_at_rest`), or not at all if that is unknown.

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
"""Kinds of schema change that leave the other columns of existing rows as they were."""


@dataclass(frozen=True, kw_only=True)
class ConversionResult:
    """Changes converted to another schema."""

    changes: pa.Table
    """Changes with every column; without their old rows."""
    blocked: Mapping[int, tuple[str, str]]
    """Rows that would lose a value: the reason, and the column."""


def convert_rows(
    old: TableSchema,
    new: TableSchema,
    changes: pa.Table,
    value_of: ParseValue,
    *,
    lake_only_columns: Collection[str] = (),
    constants: Mapping[str, pa.Scalar] | None = None,
) -> ConversionResult:
    """Convert changes of schema `old`, which have every column, to schema `new`.

    `lake_only_columns` are columns that only the lake table still has, by their names in `old`. `constants` are the
    values of added columns in all rows.
    """
    size, old_indices, unfit_texts = changes.num_rows, _old_indices(old, new), _texts(old, changes)
    blocked, unfit = dict[int, tuple[str, str]](), [list[dict[str, str]]() for _ in range(size)]
    columns_by_name = dict[str, Any]()
    for column, old_index in zip(new.columns, old_indices, strict=True):
        if old_index is None:
            constant = (constants or {}).get(column.name)
            columns_by_name[column.name] = (
                pa.nulls(size, column.type) if constant is None else pa.repeat(constant, size)
            )
            continue
        old_column = old.columns[old_index]
        values = one_array(changes.column(change.stored_name(old_column.name)))
        if keeps_values(old_column.type, column.type):
            values = values.cast(column.type)
        else:
            _block(blocked, values, "the column's type no longer holds the change's value", column.name)
            values = pa.nulls(size, column.type)
        parsed = {
            row: _parse(old_column, column, text, value_of)
            for row, text in unfit_texts.get(old_column.name, {}).items()
        }
        for row in (row for row, value in parsed.items() if value is None):
            unfit[row].append({"column": column.name, "text": unfit_texts[old_column.name][row]})
        columns_by_name[column.name] = _replace_rows(
            values, {row: value for row, value in parsed.items() if value is not None}
        )
    for old_index in set(range(len(old.columns))) - set(old_indices):
        if (name := old.columns[old_index].name) in lake_only_columns:
            why = "the change has a value in a column that the source has dropped and the table keeps"
            _block(blocked, changes.column(change.stored_name(name)), why, name)
            blocked |= dict.fromkeys(unfit_texts.get(name, {}), (why, name))
    new_names = {
        old.columns[old_index].name: new.names[index]
        for index, old_index in enumerate(old_indices)
        if old_index is not None
    }
    metadata = {
        change.UNCHANGED: _renamed(changes.column(change.UNCHANGED), new_names),
        change.UNFIT: pa.array([cells or None for cells in unfit], change.UNFIT_TYPE),
    }
    columns = {change.stored_name(name): values for name, values in columns_by_name.items()} | metadata
    columns |= {field.name: changes.column(field.name) for field in change.REQUIRED}
    fields = new.change_schema()
    arrays = [columns[field.name] if field.name in columns else pa.nulls(size, field.type) for field in fields]
    return ConversionResult(changes=pa.Table.from_arrays(arrays, schema=fields), blocked=blocked)


def convert_rows_at_rest(
    old: TableSchema, new: TableSchema, changes: pa.Table, value_of: ParseValue
) -> pa.Table | None:
    """Convert rows that the source has had all along to what they are there now.

    None if the source would have to be read for that.
    """
    if old.same_rows(new):
        return changes
    found = compare_schemas(old, new)
    if old.relation != new.relation or found.rewritten is not False:
        return None
    constants = dict[str, pa.Scalar]()
    for item in found.changes:
        if item.kind is SchemaChangeKind.ADD and item.existing_value is ExistingValue.CONSTANT:
            constant = value_of(new.columns[new.names.index(str(item.column))], item.constant or "")
            if constant is None:
                return None
            constants[str(item.column)] = constant
        elif item.kind is SchemaChangeKind.RETYPE:
            if not is_wider(*column_of(old, new, str(item.column))):
                return None
        elif item.kind not in _LEAVES_ROWS and (
            item.kind is not SchemaChangeKind.ADD or item.existing_value is not ExistingValue.NULL
        ):
            return None
    converted = convert_rows(old, new, changes, value_of, constants=constants)
    return None if converted.blocked else converted.changes


def _old_indices(old: TableSchema, new: TableSchema) -> list[int | None]:
    """Return each new column's index in the old schema, matched by number where known."""
    before: list[int | str] = list(old.names)
    after: list[int | str] = list(new.names)
    if old.relation == new.relation and old.facts and new.facts:
        before, after = list(old.facts.numbers), list(new.facts.numbers)
    return [before.index(one) if one in before else None for one in after]


def _texts(schema: TableSchema, changes: pa.Table) -> dict[str, dict[int, str]]:
    """Return the unfit texts of a change's own values, by column and row."""
    texts = dict[str, dict[int, str]]()
    for row, cells in enumerate(changes.column(change.UNFIT).to_pylist()):
        for cell in cells or ():
            if cell["column"] in schema.names:
                texts.setdefault(cell["column"], {})[row] = cell["text"]
    return texts


def _parse(old: Column, new: Column, text: str, value_of: ParseValue) -> pa.Scalar | None:
    """Parse the text as a value of the column; None if that fails.

    A value that a rule failed at was never stored. Bytes that are not text are stored only as a description.
    """
    if change.parse_rule_failure(text) is not None or pa.types.is_string(old.type):
        return None
    if pa.types.is_list(old.type) and pa.types.is_string(old.type.value_type) and "\\" in text:
        return None
    return value_of(new, text)


def _replace_rows(values: Any, replacements: Mapping[int, pa.Scalar]) -> Any:
    """Return the values with some rows replaced."""
    if not replacements:
        return values
    indices = np.arange(len(values))
    indices[list(replacements)] = len(values) + np.arange(len(replacements))
    return pa.concat_arrays([values, *(pa.repeat(value, 1) for value in replacements.values())]).take(pa.array(indices))


def _block(blocked: dict[int, tuple[str, str]], values: Any, why: str, column: str) -> None:
    for row in np.flatnonzero(one_array(values).is_valid().to_numpy(zero_copy_only=False)).tolist():
        blocked.setdefault(row, (why, column))


def _renamed(unchanged: Any, names: Mapping[str, str]) -> Any:
    """Return `_unchanged` with the columns' new names. Rare, so plain Python."""
    if unchanged.null_count == len(unchanged):
        return unchanged
    lists = [[names[name] for name in columns or () if name in names] or None for columns in unchanged.to_pylist()]
    return pa.array(lists, pa.list_(pa.string()))
