"""The columns of an Iceberg table: each has a number, by which files and table know it, whatever it is called.

A load and whatever else replaces every row numbers the columns anew, from one, as Iceberg does for a new table. So
tasks can number the columns of files that they write before it is known what the table is. Otherwise a column keeps its
number through every change of its name, and one that is added gets a number that no column ever had: a dropped column's
values never come back.

A table is partitioned by columns as they are (`identity`), which its metadata calls by their numbers. Iceberg can read
and write a table only if every partitioning in its metadata is one of columns that it has. So one that the table's new
columns do not mean is forgotten, with all snapshots of before.

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
"""One column, as Iceberg's metadata has it."""
Spec = dict[str, Any]
"""What a table is, or was, partitioned by, in the same way."""

RESERVED = frozenset([
    "_file", "_pos", "_deleted", "_spec_id", "_partition", "_row_id", "_last_updated_sequence_number", "_change_type",
    "_change_ordinal", "_commit_snapshot_id",
])  # fmt: skip
"""What the connector tells of each row; a table with a column of such a name cannot be read by it."""

IDENTITY = "identity"
FIRST_PARTITION = 1000
"""Columns of partitions are numbered from here, as Iceberg does it."""

_NUMBER = b"PARQUET:field_id"
_NAMES: list[tuple[pa.DataType, str]] = [
    (pa.bool_(), "boolean"), (pa.int8(), "int"), (pa.int16(), "int"), (pa.int32(), "int"), (pa.int64(), "long"),
    (pa.float32(), "float"), (pa.float64(), "double"), (pa.string(), "string"), (pa.binary(), "binary"),
    (pa.date32(), "date"), (pa.timestamp("us"), "timestamp"), (pa.timestamp("us", "UTC"), "timestamptz"),
]  # fmt: skip
_TYPES = {name: kind for kind, name in _NAMES if kind not in (pa.int8(), pa.int16())}
_DECIMAL = re.compile(r"decimal\((\d+), ?(\d+)\)")
_WIDER = {("int", "long"), ("float", "double")}
"""What a column may become while its files stay as they are; a decimal may get more digits before its point."""


def fresh_fields(columns: Sequence[Column]) -> list[Field]:
    """Columns numbered from one: the table's own first, then what is in them, as Iceberg does for a new table."""
    numbers = itertools.count(len(columns) + 1)
    return [_field(number, column, numbers) for number, column in enumerate(columns, start=1)]


def recast_fields(held: Sequence[Field], laid: RecastColumns, last: int) -> list[Field] | None:
    """The columns after a change of shape that leaves every file as it is; None if rows must be written anew. `last` is
    the highest number that a column of the table ever had."""
    if laid.backfilled:
        return None
    numbers, by_name = itertools.count(last + 1), {field["name"]: field for field in held}
    found: list[Field] = []
    for column, old in zip(laid.columns, laid.source_names, strict=True):
        if old is None:
            found.append(_field(next(numbers), column, numbers))
            continue
        kind = _type(column, column.type, numbers)
        was = by_name[old]
        if _same(was["type"], kind):
            found.append({**was, "name": column.name})
        elif _widens(was["type"], kind):
            found.append({**was, "name": column.name, "type": kind})
        else:
            return None
    return found


def are_same(held: Sequence[Field], fields: Sequence[Field], names: Sequence[str]) -> bool:
    """Whether columns of these names are what they were."""
    was, now = ({field["name"]: (field["id"], field["type"]) for field in some} for some in (held, fields))
    return all(was.get(name) == now[name] for name in names)


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
        hint="Publish the table without it, or exclude the table.",
    )


def _same(one: Any, other: Any) -> bool:
    """Whether two types are the same but for the numbers in them."""
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
    """The columns that a table holds, in its own order; of one that others have added the type may be unknown."""
    return {field["name"]: _arrow(field["type"]) for field in fields}


def _arrow(kind: Any) -> pa.DataType:
    if isinstance(kind, dict):
        return pa.list_(_arrow(kind["element"])) if kind["type"] == "list" else pa.null()
    if found := _DECIMAL.fullmatch(kind):
        return pa.decimal128(int(found[1]), int(found[2]))
    return _TYPES.get(kind, pa.null())


@dataclass(frozen=True, kw_only=True)
class PartitionChange:
    """How a table whose rows are all replaced comes to be partitioned."""

    spec: Spec
    drops_snapshots: bool
    """Whether its columns do not mean what it was partitioned by: that goes, and so must every older snapshot, for it
    could not be read any more."""


def plan_partition_change(
    fields: Sequence[Field], names: Sequence[str], specs: Sequence[Spec], was: Sequence[Field]
) -> PartitionChange:
    """Of a table with these columns, to be partitioned by some of them, that `was` another; `specs` are all that its
    metadata has."""
    highest = max((field["field-id"] for spec in specs for field in spec["fields"]), default=FIRST_PARTITION - 1)
    numbers = {field["name"]: field["id"] for field in fields}
    apart = [
        {"source-id": numbers[name], "field-id": highest + at, "name": name, "transform": IDENTITY}
        for at, name in enumerate(names, start=1)
    ]
    held = [spec for spec in specs if spec["fields"]]
    types, before = ({field["id"]: field["type"] for field in some} for some in (fields, was))
    same = all(types[part["source-id"]] == before.get(part["source-id"]) for part in apart)
    same = same and all(_sources(spec["fields"]) == _sources(apart) for spec in held)
    return PartitionChange(spec={"spec-id": 0, "fields": apart}, drops_snapshots=bool(held) and not same)


def _sources(parts: Sequence[Mapping[str, Any]]) -> list[tuple[int, str, str]]:
    return [(part["source-id"], part["name"], part["transform"]) for part in parts]


def partition_json(values: Mapping[str, pa.Scalar], numbers: Mapping[str, int]) -> str:
    """The values of one partition as Iceberg reads them, each by the number that it has there."""
    said = {str(numbers[name]): value.as_py() for name, value in values.items()}
    return json.dumps(said, default=lambda moment: moment.isoformat())


def refuse_iceberg_names(schema: TableSchema) -> None:
    """Refuse columns that no lake table can have, or that Iceberg has names of its own for."""
    refuse_names(schema)
    for name in schema.names:
        if name.lower() in RESERVED:
            raise TableUnusable(
                "a column has a name that is Iceberg's own",
                table=schema.table,
                column=name,
                hint="Give the column another name in `tables.rules` (`columns:`), or exclude the table.",
            )


def schema_json(fields: Sequence[Field]) -> str:
    """The columns as Iceberg reads them."""
    return json.dumps({"type": "struct", "schema-id": 0, "fields": list(fields)})


def file_fields(schema: TableSchema) -> pa.Schema:
    """The fields of a file with these columns, each with its number."""
    pairs = zip(schema.row_fields(), fresh_fields(schema.columns), strict=True)
    return pa.schema([_numbered(field, told["id"], told["type"]) for field, told in pairs])


def _numbered(field: pa.Field, number: int, told: Any) -> pa.Field:
    kind = field.type
    if isinstance(told, dict):
        kind = pa.list_(_numbered(kind.value_field, told["element-id"], told["element"]))
    return pa.field(field.name, kind, metadata={_NUMBER: str(number).encode()})
