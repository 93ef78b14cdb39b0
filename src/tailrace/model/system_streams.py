"""The streams that are not tables of the source: schema versions, and messages of applications.

They are read like tables, by the names `schema` and `message`. A `schema` record with `_seq` n gives the schema of a
table's rows from row n on. It takes no `_seq` of its own, so the tables' rows stay densely numbered. A `message` record
is a change like any other and takes one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tailrace.model import change
from tailrace.model.change import Operation
from tailrace.model.schema import Column, Identity, TableId, TableSchema

SCHEMA_STREAM_NUMBER = 0
"""The log's number for the `schema` stream; the source's tables, and messages, count from 1."""


def _stream(name: str, relation: int, columns: Sequence[tuple[str, pa.DataType]]) -> TableSchema:
    return TableSchema(
        table=TableId("", name),
        relation=relation,
        columns=tuple(Column(name=named, source_type="", type=kind) for named, kind in columns),
        key=(),
        identity=Identity.NONE,
    )


SCHEMA_STREAM = _stream("schema", -1, [
    ("table", pa.int64()), ("version", pa.int32()), ("schema_name", pa.string()), ("table_name", pa.string()),
    ("definition", pa.string()),
])  # fmt: skip
"""One record for each version of each table's schema.

`definition` is the content of `schemas/<table>/<version>.json`: the schema, and the changes since the version before.
"""

MESSAGE_STREAM = _stream("message", -2, [
    ("prefix", pa.string()), ("content", pa.binary()), ("transactional", pa.bool_()),
])  # fmt: skip
"""One record for each message, in the order of the source's log."""

SYSTEM_STREAMS = frozenset(stream.table.name for stream in (SCHEMA_STREAM, MESSAGE_STREAM))
"""The names by which readers request them."""


def is_system(schema: TableSchema) -> bool:
    """Return whether this is one of the streams above."""
    return schema.relation < 0


@dataclass(frozen=True, kw_only=True)
class SchemaAnnouncement:
    """A schema that is in force from a row on. The other fields are those of that row."""

    table: int
    version: int
    schema: TableSchema
    definition: dict[str, Any]
    """The content of its file."""
    seq: int
    position: str | None
    """None while the row's transaction has not ended."""
    tx: int
    tx_index: int
    committed_at: int


def announcement_rows(announcements: Sequence[SchemaAnnouncement]) -> pa.RecordBatch:
    """Return the records of the `schema` stream."""
    fields = SCHEMA_STREAM.change_schema()
    columns: dict[str, list[object]] = {
        change.OP: [Operation.SCHEMA.value] * len(announcements),
        change.SEQ: [item.seq for item in announcements],
        change.POSITION: [item.position for item in announcements],
        change.TX: [item.tx for item in announcements],
        change.TX_INDEX: [item.tx_index for item in announcements],
        change.COMMITTED_AT: [item.committed_at for item in announcements],
        "table": [item.table for item in announcements],
        "version": [item.version for item in announcements],
        "schema_name": [item.schema.table.schema for item in announcements],
        "table_name": [item.schema.table.name for item in announcements],
        "definition": [json.dumps(item.definition, ensure_ascii=False) for item in announcements],
    }
    if any(item.position is None for item in announcements):
        del columns[change.POSITION]
    kept = [field for field in fields if field.name in columns]
    return pa.RecordBatch.from_arrays(
        [pa.array(columns[field.name], field.type) for field in kept], schema=pa.schema(kept)
    )
