"""Deletion vectors and column mapping: what a table has of them, and what its log says then.

With deletion vectors a file may hold rows that the table no longer has; with column mapping its columns may bear other
names than the table's. Spark's connector writes such tables. delta-rs reads them, but what it writes is not what the
features ask for, so commits that need no rows are made in `featured.py`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from tailrace.errors import TableUnusable
from tailrace.model.schema import Column, TableSchema
from tailrace.tables.delta.commit_log import REPLACE_HINT
from tailrace.tables.delta.schema_mapping import NTZ, VARIANT, delta_fields, is_naive
from tailrace.tables.evolve.recast_columns import RecastColumns

VECTORS = "deletionVectors"
MAPPING = "columnMapping"
_ALWAYS = ("appendOnly", "invariants")
"""What every table may have that names its features; readers need not know them."""
_KNOWN = {VECTORS, MAPPING, NTZ, VARIANT, *_ALWAYS}

_ENABLED = "delta.enableDeletionVectors"
_MODE = "delta.columnMapping.mode"
_LAST_ID = "delta.columnMapping.maxColumnId"
_ID = "delta.columnMapping.id"
_PHYSICAL = "delta.columnMapping.physicalName"

Field = dict[str, Any]
"""One column, as Delta's log has it."""


@dataclass(frozen=True, kw_only=True)
class Features:
    """What a table has that not every reader knows."""

    deletion_vectors: bool = False
    column_mapping: bool = False

    @property
    def any(self) -> bool:
        return self.deletion_vectors or self.column_mapping

    @property
    def names(self) -> tuple[str, ...]:
        """As Delta calls them."""
        return tuple(name for name, has in ((VECTORS, self.deletion_vectors), (MAPPING, self.column_mapping)) if has)


NO_FEATURES = Features()
"""Files hold what the table holds, under the same names."""


def features_of(table: DeltaTable) -> Features:
    """What the table has."""
    known = set(table.protocol().reader_features or ())
    mode = table.metadata().configuration.get(_MODE, "none")
    return Features(deletion_vectors=VECTORS in known, column_mapping=MAPPING in known or mode != "none")


def refuse_for_delta_rs(path: Path, found: Features, *, ours: bool) -> None:
    """Refuse a table that delta-rs would write wrongly; `ours`: nobody else has changed it."""
    if found.any:
        go_on = "Set `tables.engine: spark`, which goes on with it; or have it made anew without them: "
        raise TableUnusable(
            "the table has features that `engine: delta-rs` does not write",
            path=path,
            features=", ".join(found.names),
            hint=(go_on if ours else "") + REPLACE_HINT,
        )


def refuse_unknown(path: Path, table: DeltaTable) -> None:
    """Refuse a table whose log may ask for more than what is written here."""
    protocol = table.protocol()
    others = {*(protocol.reader_features or ()), *(protocol.writer_features or ())} - _KNOWN
    if others:
        raise TableUnusable(
            "the table has features that nobody here knows",
            path=path,
            features=", ".join(sorted(others)),
            hint="Move the table's folder away: the table is loaded anew.",
        )


def protocol_of(features: Features, columns: Sequence[Column]) -> dict[str, Any]:
    """What readers and writers of a table must know."""
    needed = [*features.names, *([NTZ] if any(map(is_naive, columns)) else [])]
    if not needed:
        return {"minReaderVersion": 1, "minWriterVersion": 2}
    return {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": needed,
        "writerFeatures": [*needed, *_ALWAYS],
    }


def metadata_of(
    table: DeltaTable | None,
    features: Features,
    fields: Sequence[Field],
    now: int,
    partition_by: Sequence[str] | None = None,
    **configuration: str,
) -> dict[str, Any]:
    """What a table is, with these columns; what is known of it and does not concern the features stays, and so does
    what it is partitioned by unless that is said."""
    was = None if table is None else table.metadata()
    settings = (
        {}
        if was is None
        else {name: value for name, value in was.configuration.items() if name not in (_ENABLED, _MODE, _LAST_ID)}
    )
    if partition_by is None:
        partition_by = () if was is None else was.partition_columns
    if features.deletion_vectors:
        settings[_ENABLED] = "true"
    if features.column_mapping:
        settings |= {_MODE: "name", _LAST_ID: str(max([_last_id(table), *(f["metadata"][_ID] for f in fields)]))}
    named = {} if was is None else {"name": was.name, "description": was.description}
    return {
        "id": str(uuid.uuid4() if was is None else was.id),
        **named,
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": list(fields)}),
        "partitionColumns": list(partition_by),
        "configuration": settings | configuration,
        "createdTime": now if was is None else was.created_time,
    }


def fields_of(table: DeltaTable) -> list[Field]:
    """The columns that the table has."""
    return list(json.loads(table.schema().to_json())["fields"])


def loaded_fields(table: DeltaTable | None, features: Features, schema: TableSchema) -> list[Field]:
    """Columns of files that bear the table's own names, and that are all that it holds."""
    fields = list(json.loads(delta_fields(schema).to_json())["fields"])
    if features.column_mapping:
        last = _last_id(table)
        for number, field in enumerate(fields, last + 1):
            field["metadata"] = {_ID: number, _PHYSICAL: field["name"]}
    return fields


def recast_fields(table: DeltaTable, laid: RecastColumns, schema: TableSchema) -> list[Field]:
    """Columns after a recast of a table whose files stay: each is in them what it was, and one that is new is none
    that any of them may have held before."""
    held = {field["name"]: field for field in fields_of(table)}
    fields, last = list(json.loads(delta_fields(schema).to_json())["fields"]), _last_id(table)
    for field, old in zip(fields, laid.source_names, strict=True):
        if old is not None:
            field["metadata"] = held[old]["metadata"]
        else:
            last += 1
            field["metadata"] = {_ID: last, _PHYSICAL: f"col-{uuid.uuid4()}"}
    return fields


def physical_names(table: DeltaTable) -> dict[str, str]:
    """What the table's columns are called in its files."""
    return {field["name"]: field["metadata"].get(_PHYSICAL, field["name"]) for field in fields_of(table)}


def _last_id(table: DeltaTable | None) -> int:
    return 0 if table is None else int(table.metadata().configuration.get(_LAST_ID, "0"))
