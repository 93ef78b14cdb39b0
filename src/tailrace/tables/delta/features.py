"""Read and write the log's facts about deletion vectors and column mapping.

With deletion vectors a file may hold rows that the table no longer has. With column mapping its columns may have other
names than the table's. Spark's connector writes such tables. delta-rs can read them, but does not write what these
features require. So commits that need no rows are made in `raw_commit.py`.
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
"""Features that any table with named features may have; readers need not know them."""
_KNOWN = {VECTORS, MAPPING, NTZ, VARIANT, *_ALWAYS}

_ENABLED = "delta.enableDeletionVectors"
_MODE = "delta.columnMapping.mode"
_LAST_ID = "delta.columnMapping.maxColumnId"
_ID = "delta.columnMapping.id"
_PHYSICAL = "delta.columnMapping.physicalName"

Field = dict[str, Any]
"""One column as in Delta's log."""


@dataclass(frozen=True, kw_only=True)
class Features:
    """The features of a table that not every reader supports."""

    deletion_vectors: bool = False
    column_mapping: bool = False

    @property
    def any(self) -> bool:
        return self.deletion_vectors or self.column_mapping

    @property
    def names(self) -> tuple[str, ...]:
        """The features' names in Delta."""
        return tuple(name for name, has in ((VECTORS, self.deletion_vectors), (MAPPING, self.column_mapping)) if has)


NO_FEATURES = Features()
"""The files hold exactly the table's rows, under its column names."""


def features_of(table: DeltaTable) -> Features:
    """Return the table's features."""
    known = set(table.protocol().reader_features or ())
    mode = table.metadata().configuration.get(_MODE, "none")
    return Features(deletion_vectors=VECTORS in known, column_mapping=MAPPING in known or mode != "none")


def refuse_for_delta_rs(path: Path, features: Features, *, ours: bool) -> None:
    """Refuse a table that delta-rs would write wrongly.

    `ours` is true if only Tailrace has changed it.
    """
    if features.any:
        spark_hint = "Set `tables.engine: spark` to continue with it. Or make the table again without them. "
        raise TableUnusable(
            "the table has features that `engine: delta-rs` does not write",
            path=path,
            features=", ".join(features.names),
            hint=(spark_hint if ours else "") + REPLACE_HINT,
        )


def refuse_unknown(path: Path, table: DeltaTable) -> None:
    """Refuse a table whose log may have requirements that this code does not know."""
    protocol = table.protocol()
    unknown = {*(protocol.reader_features or ()), *(protocol.writer_features or ())} - _KNOWN
    if unknown:
        raise TableUnusable(
            "the table has features that this version does not know",
            path=path,
            features=", ".join(sorted(unknown)),
            hint="Move the table's folder away. Then the table is reloaded.",
        )


def protocol_of(features: Features, columns: Sequence[Column]) -> dict[str, Any]:
    """Return the requirements that a table has of readers and writers."""
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
    """Return a table's metadata with these columns.

    Known facts that do not concern the features stay. The partition columns stay too, unless given.
    """
    old = None if table is None else table.metadata()
    settings = (
        {}
        if old is None
        else {name: value for name, value in old.configuration.items() if name not in (_ENABLED, _MODE, _LAST_ID)}
    )
    if partition_by is None:
        partition_by = () if old is None else old.partition_columns
    if features.deletion_vectors:
        settings[_ENABLED] = "true"
    if features.column_mapping:
        settings |= {_MODE: "name", _LAST_ID: str(max([_last_id(table), *(f["metadata"][_ID] for f in fields)]))}
    named = {} if old is None else {"name": old.name, "description": old.description}
    return {
        "id": str(uuid.uuid4() if old is None else old.id),
        **named,
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": list(fields)}),
        "partitionColumns": list(partition_by),
        "configuration": settings | configuration,
        "createdTime": now if old is None else old.created_time,
    }


def fields_of(table: DeltaTable) -> list[Field]:
    """Return the table's columns."""
    return list(json.loads(table.schema().to_json())["fields"])


def loaded_fields(table: DeltaTable | None, features: Features, schema: TableSchema) -> list[Field]:
    """Return the columns of a load's files, which have the table's own names."""
    fields = list(json.loads(delta_fields(schema).to_json())["fields"])
    if features.column_mapping:
        last = _last_id(table)
        for number, field in enumerate(fields, last + 1):
            field["metadata"] = {_ID: number, _PHYSICAL: field["name"]}
    return fields


def recast_fields(table: DeltaTable, plan: RecastColumns, schema: TableSchema) -> list[Field]:
    """Return the columns after a recast that keeps the files.

    Each kept column keeps its name in the files. A new one gets a name that no file may have had before.
    """
    old_fields = {field["name"]: field for field in fields_of(table)}
    fields, last = list(json.loads(delta_fields(schema).to_json())["fields"]), _last_id(table)
    for field, old_name in zip(fields, plan.source_names, strict=True):
        if old_name is not None:
            field["metadata"] = old_fields[old_name]["metadata"]
        else:
            last += 1
            field["metadata"] = {_ID: last, _PHYSICAL: f"col-{uuid.uuid4()}"}
    return fields


def physical_names(table: DeltaTable) -> dict[str, str]:
    """Map the table's columns to their names in its files."""
    return {field["name"]: field["metadata"].get(_PHYSICAL, field["name"]) for field in fields_of(table)}


def _last_id(table: DeltaTable | None) -> int:
    return 0 if table is None else int(table.metadata().configuration.get(_LAST_ID, "0"))
