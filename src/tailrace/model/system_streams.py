"""The streams that are not tables of the source: what happened to shapes, and what applications said.

They are read like tables, by the names `schema` and `message`. A `schema` record with `_seq` n says which shape
rows of a table have from row n on; it takes no `_seq` of its own, so the tables' rows stay densely numbered. A
`message` record is a change like any other and does.
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
"""One record for each version of each table's shape; `definition` is what `schemas/<table>/<version>.json` says: the
shape, and what became of the table since the version before."""

MESSAGE_STREAM = _stream("message", -2, [
    ("prefix", pa.string()), ("content", pa.binary()), ("transactional", pa.bool_()),
])  # fmt: skip
"""One record for each message, in the order of the source's log."""

SYSTEM_STREAMS = frozenset(stream.table.name for stream in (SCHEMA_STREAM, MESSAGE_STREAM))
"""What they are asked for by."""


def is_system(schema: TableSchema) -> bool:
    """Whether this is one of the streams above."""
    return schema.relation < 0


@dataclass(frozen=True, kw_only=True)
class SchemaAnnouncement:
    """A shape that is in force from a row on; the other fields are that row's."""

    table: int
    version: int
    schema: TableSchema
    definition: dict[str, Any]
    """What its file says of it."""
    seq: int
    position: str | None
    """None while the row's transaction has not ended."""
    tx: int
    tx_index: int
    committed_at: int


def announcement_rows(found: Sequence[SchemaAnnouncement]) -> pa.RecordBatch:
    """The records of the `schema` stream."""
    fields = SCHEMA_STREAM.change_schema()
    columns: dict[str, list[object]] = {
        change.OP: [Operation.SCHEMA.value] * len(found),
        change.SEQ: [item.seq for item in found],
        change.POSITION: [item.position for item in found],
        change.TX: [item.tx for item in found],
        change.TX_INDEX: [item.tx_index for item in found],
        change.COMMITTED_AT: [item.committed_at for item in found],
        "table": [item.table for item in found],
        "version": [item.version for item in found],
        "schema_name": [item.schema.table.schema for item in found],
        "table_name": [item.schema.table.name for item in found],
        "definition": [json.dumps(item.definition, ensure_ascii=False) for item in found],
    }
    if any(item.position is None for item in found):
        del columns[change.POSITION]
    kept = [field for field in fields if field.name in columns]
    return pa.RecordBatch.from_arrays(
        [pa.array(columns[field.name], field.type) for field in kept], schema=pa.schema(kept)
    )
