"""Map columns to Iceberg fields, which have ids that files and tables know them by.

A load, like any replacement of every row, assigns ids from one, as Iceberg does for a new table. So tasks can assign
the ids in files before the table is known. Otherwise a column keeps its id through every rename. An added column gets
an id that no column ever had, so a dropped column's values never reappear.

A table is partitioned by unchanged column values (`identity`); its metadata names them by id. Iceberg can read and
write a table only if every partition spec in its metadata is of existing columns. So a partition spec that does not fit
the table's new columns is removed, with all earlier snapshots.

Pure: no I/O.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tailrace.errors import TableUnusable
from tailrace.model.schema import Column, TableSchema
from tailrace.tables.evolve.recast_columns import RecastColumns
from tailrace.tables.limits import refuse_names

Field = dict[str, Any]
"""One column as in Iceberg's metadata."""
Spec = dict[str, Any]
"""A present or past partition spec, as in Iceberg's metadata."""

RESERVED = frozenset([
    "_file", "_pos", "_deleted", "_spec_id", "_partition", "_row_id", "_last_updated_sequence_number", "_change_type",
    "_change_ordinal", "_commit_snapshot_id",
])  # fmt: skip
"""Names of the connector's own metadata columns. It cannot read a table that has a column of such a name."""

IDENTITY = "identity"
FIRST_PARTITION = 1000
"""The first id of partition fields, as in Iceberg."""

_NUMBER = b"PARQUET:field_id"
_NAMES: list[tuple[pa.DataType, str]] = [
    (pa.bool_(), "boolean"), (pa.int8(), "int"), (pa.int16(), "int"), (pa.int32(), "int"), (pa.int64(), "long"),
    (pa.float32(), "float"), (pa.float64(), "double"), (pa.string(), "string"), (pa.binary(), "binary"),
    (pa.date32(), "date"), (pa.timestamp("us"), "timestamp"), (pa.timestamp("us", "UTC"), "timestamptz"),
]  # fmt: skip
_TYPES = {name: kind for kind, name in _NAMES if kind not in (pa.int8(), pa.int16())}
_DECIMAL = re.compile(r"decimal\((\d+), ?(\d+)\)")
_WIDER = {("int", "long"), ("float", "double")}
"""Type changes that leave the files as they are.

A decimal may also get more digits before its point.
"""


def fresh_fields(columns: Sequence[Column]) -> list[Field]:
    """Assign ids from one, as Iceberg does. The columns are first, then their nested fields."""
    numbers = itertools.count(len(columns) + 1)
    return [_field(number, column, numbers) for number, column in enumerate(columns, start=1)]


def recast_fields(old_fields: Sequence[Field], plan: RecastColumns, last: int) -> list[Field] | None:
    """Return the columns after a schema change that keeps every file. None if rows must be rewritten.

    `last` is the highest id that a column of the table ever had.
    """
    if plan.backfilled:
        return None
    numbers, by_name = itertools.count(last + 1), {field["name"]: field for field in old_fields}
    fields: list[Field] = []
    for column, old in zip(plan.columns, plan.source_names, strict=True):
        if old is None:
            fields.append(_field(next(numbers), column, numbers))
            continue
        kind = _type(column, column.type, numbers)
        old_field = by_name[old]
        if _same(old_field["type"], kind):
            fields.append({**old_field, "name": column.name})
        elif _widens(old_field["type"], kind):
            fields.append({**old_field, "name": column.name, "type": kind})
        else:
            return None
    return fields


def are_same(old_fields: Sequence[Field], fields: Sequence[Field], names: Sequence[str]) -> bool:
    """Return whether the columns with these names are unchanged."""
    before, after = (
        {field["name"]: (field["id"], field["type"]) for field in columns} for columns in (old_fields, fields)
    )
    return all(before.get(name) == after[name] for name in names)


def _field(number: int, column: Column, numbers: Iterator[int]) -> Field:
    kind = _type(column, column.type, numbers)
    return {"id": number, "name": column.name, "required": False, "type": kind}


def _type(column: Column, kind: pa.DataType, numbers: Iterator[int]) -> Any:
    if pa.types.is_list(kind):
        number = next(numbers)
        element = _type(column, kind.value_type, numbers)
        return {"type": "list", "element-id": number, "element": element, "element-required": False}
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision}, {kind.scale})"
    for known, name in _NAMES:
        if known == kind:
            return name
    raise TableUnusable(
        "a column has a type that Iceberg does not have",
        column=column.name,
        type=str(kind),
        hint="Publish the table without the column, or exclude the table.",
    )


def _same(one: Any, other: Any) -> bool:
    """Return whether two types are the same except for the ids in them."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one["type"] == other["type"] == "list" and _same(one["element"], other["element"])
    return not isinstance(one, dict) and not isinstance(other, dict) and _spaced(one) == _spaced(other)


def _spaced(name: str) -> str:
    return name.replace(" ", "")


def _widens(one: Any, other: Any) -> bool:
    if isinstance(one, dict) or isinstance(other, dict):
        return False
    if (one, other) in _WIDER:
        return True
    few, many = _DECIMAL.fullmatch(one), _DECIMAL.fullmatch(other)
    return bool(few and many and few[2] == many[2] and int(few[1]) <= int(many[1]))


def columns_of(fields: Sequence[Field]) -> dict[str, pa.DataType]:
    """Return the columns' types in table order. Columns that others have added may have a null type."""
    return {field["name"]: _arrow(field["type"]) for field in fields}


def _arrow(kind: Any) -> pa.DataType:
    if isinstance(kind, dict):
        return pa.list_(_arrow(kind["element"])) if kind["type"] == "list" else pa.null()
    if found := _DECIMAL.fullmatch(kind):
        return pa.decimal128(int(found[1]), int(found[2]))
    return _TYPES.get(kind, pa.null())


@dataclass(frozen=True, kw_only=True)
class PartitionChange:
    """The new partition spec of a table whose rows are all replaced."""

    spec: Spec
    drops_snapshots: bool
    """True if the new columns do not fit an old partition spec.

    That spec is removed, and so must be every older snapshot, which could not be read any more.
    """


def plan_partition_change(
    fields: Sequence[Field], names: Sequence[str], specs: Sequence[Spec], old_fields: Sequence[Field]
) -> PartitionChange:
    """Plan the partition spec of a table with new columns and partition columns.

    `old_fields` are the old columns, and `specs` are all partition specs in its metadata.
    """
    highest = max((field["field-id"] for spec in specs for field in spec["fields"]), default=FIRST_PARTITION - 1)
    numbers = {field["name"]: field["id"] for field in fields}
    partition_fields = [
        {"source-id": numbers[name], "field-id": highest + at, "name": name, "transform": IDENTITY}
        for at, name in enumerate(names, start=1)
    ]
    old_specs = [spec for spec in specs if spec["fields"]]
    types, before = ({field["id"]: field["type"] for field in columns} for columns in (fields, old_fields))
    same = all(types[part["source-id"]] == before.get(part["source-id"]) for part in partition_fields)
    same = same and all(_sources(spec["fields"]) == _sources(partition_fields) for spec in old_specs)
    return PartitionChange(
        spec={"spec-id": 0, "fields": partition_fields}, drops_snapshots=bool(old_specs) and not same
    )


def _sources(parts: Sequence[Mapping[str, Any]]) -> list[tuple[int, str, str]]:
    return [(part["source-id"], part["name"], part["transform"]) for part in parts]


def partition_json(values: Mapping[str, pa.Scalar], numbers: Mapping[str, int]) -> str:
    """Return one partition's values as Iceberg reads them, by field id."""
    values_by_id = {str(numbers[name]): value.as_py() for name, value in values.items()}
    return json.dumps(values_by_id, default=lambda moment: moment.isoformat())


def refuse_iceberg_names(schema: TableSchema) -> None:
    """Refuse columns that no lake table can have, or whose names Iceberg reserves."""
    refuse_names(schema)
    for name in schema.names:
        if name.lower() in RESERVED:
            raise TableUnusable(
                "a column has a name that Iceberg reserves",
                table=schema.table,
                column=name,
                hint="Rename the column in `tables.rules` (`columns:`), or exclude the table.",
            )


def schema_json(fields: Sequence[Field]) -> str:
    """Return the columns as Iceberg reads them."""
    return json.dumps({"type": "struct", "schema-id": 0, "fields": list(fields)})


def file_fields(schema: TableSchema) -> pa.Schema:
    """Return a data file's fields with their ids."""
    pairs = zip(schema.row_fields(), fresh_fields(schema.columns), strict=True)
    return pa.schema([_numbered(field, iceberg_field["id"], iceberg_field["type"]) for field, iceberg_field in pairs])


def _numbered(field: pa.Field, number: int, iceberg_type: Any) -> pa.Field:
    kind = field.type
    if isinstance(iceberg_type, dict):
        kind = pa.list_(_numbered(kind.value_field, iceberg_type["element-id"], iceberg_type["element"]))
    return pa.field(field.name, kind, metadata={_NUMBER: str(number).encode()})
