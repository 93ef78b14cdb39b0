"""Read our position from an Iceberg table's snapshots, and find out who made later snapshots.

The summary of each of our snapshots has the position, so rows and position are one. A rollback to an older snapshot of
ours also moves the position back. A snapshot is a foreign write unless it says that it only rewrote files (`replace`)
and adds no more rows than it removes. The position's schema is long and seldom changes. So it is stored as a table
property under its digest, and each snapshot names the digest.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailrace.errors import ConfigError, ForeignWrite, TableUnusable
from tailrace.model.schema import TableId
from tailrace.tables.delta.commit_log import METADATA_KEY, REPLACE_HINT, CommitRecord
from tailrace.tables.iceberg.schema_mapping import IDENTITY, Field, Spec
from tailrace.tables.staging import StagedFile

OWNER = "tailrace.log"
"""The property with the id of the log that owns the table."""
SCHEMA_PROPERTY_PREFIX = "tailrace.shape."
"""Prefix of the property that has a schema; its digest follows."""
TOKEN = "tailrace.token"
"""Summary key of the token by which we recognize our snapshot."""
LOADED_SUMMARY_KEY = "tailrace.landed"
"""Summary key of the digest of a load's staged files, the table's only files then."""
REPLACED = "replace"
"""Iceberg's operation for a snapshot with other files and the same rows."""
SNAPSHOTS_MAX = 10_000

_NOT_OF_A_COPY = frozenset(["current-snapshot-id", "statistics", "partition-statistics"])
_PATH_PROPERTIES = ("write.data.path", "write.metadata.path", "write.object-storage.", "write.folder-storage.")
"""Properties with paths to which files of the table are written."""

Summary = dict[str, str]
Properties = dict[str, str]


def summary_and_properties(record: CommitRecord, token: str) -> tuple[Summary, Properties]:
    """Return the summary of a snapshot at this position, and the table properties it needs."""
    stored = json.loads(record.text())
    schema = json.dumps(stored["schema"], sort_keys=True)
    digest = hashlib.sha256(schema.encode()).hexdigest()[:16]
    text = json.dumps({**stored, "schema": digest})
    return {METADATA_KEY: text, TOKEN: token}, {SCHEMA_PROPERTY_PREFIX + digest: schema, OWNER: record.log}


def files_digest(files: Sequence[StagedFile]) -> str:
    """Return the digest of these files for a summary."""
    names = "\n".join(sorted(file.path for file in files))
    return hashlib.sha256(names.encode()).hexdigest() if files else ""


@dataclass(frozen=True)
class IcebergMetadata:
    """The metadata of a table after one commit."""

    path: Path
    document: Mapping[str, Any]

    @property
    def properties(self) -> Mapping[str, str]:
        return dict(self.document.get("properties", {}))

    @property
    def owner(self) -> str | None:
        """The log that owns the table; None if it is not ours."""
        return self.properties.get(OWNER)

    @property
    def snapshot(self) -> int | None:
        """The id of the newest snapshot."""
        number = self.document.get("current-snapshot-id")
        return None if number in (None, -1) else int(number)

    @property
    def fields(self) -> list[Field]:
        """The current columns."""
        now = self.document["current-schema-id"]
        return next(list(schema["fields"]) for schema in self.document["schemas"] if schema["schema-id"] == now)

    @property
    def last_number(self) -> int:
        """The highest id that a column ever had."""
        return int(self.document["last-column-id"])

    @property
    def specs(self) -> list[Spec]:
        """All present and past partition specs."""
        return list(self.document["partition-specs"])

    @property
    def partition_by(self) -> list[str]:
        """The partition columns of new files.

        A transform other than `identity` is named with its column.
        """
        current = self.document["default-spec-id"]
        fields = next(spec["fields"] for spec in self.specs if spec["spec-id"] == current)
        return [
            part["name"] if part["transform"] == IDENTITY else f"{part['transform']} {part['name']}" for part in fields
        ]

    def rows(self) -> int:
        """Return the row count of the newest snapshot."""
        return 0 if self.snapshot is None else _row_count(self._snapshot(self.snapshot)["summary"])

    def commit_record(self) -> CommitRecord:
        """Return our newest record; refuse if others have written since."""
        owner = self.owner
        for snapshot in self._ancestors():
            record = self._record_in(snapshot)
            if record is None and _only_rewrites(snapshot["summary"]):
                continue
            if record is None or record.log != owner:
                raise ForeignWrite(
                    "someone else changed the table",
                    path=self.path,
                    operation=snapshot["summary"].get("operation", "unknown"),
                    version=snapshot["snapshot-id"],
                    hint=f"Only Tailrace may write its tables. {REPLACE_HINT}",
                )
            if snapshot.get("schema-id") != self.document["current-schema-id"]:
                raise ForeignWrite(
                    "someone else changed the table's columns",
                    path=self.path,
                    version=snapshot["snapshot-id"],
                    hint=f"Only Tailrace may write its tables. {REPLACE_HINT}",
                )
            return record
        raise TableUnusable(
            "the table no longer holds the snapshot with our position", path=self.path, hint=REPLACE_HINT
        )

    def has_in_summary(self, name: str, value: str) -> bool:
        """Return whether a snapshot's summary has this entry."""
        return any(snapshot["summary"].get(name) == value for snapshot in self._ancestors())

    def is_load_of(self, number: int, files: Sequence[StagedFile]) -> bool:
        """Return whether a snapshot holds exactly these staged files."""
        summary = self._snapshot(number)["summary"]
        return bool(summary.get(LOADED_SUMMARY_KEY) == files_digest(files)) if files else _row_count(summary) == 0

    def source(self) -> TableId | None:
        """Return the source table that it was last made from; None if unknown."""
        try:
            record = next(
                (parsed for snapshot in self._ancestors() if (parsed := self._record_in(snapshot)) is not None), None
            )
        except TableUnusable:
            return None
        return None if record is None else record.schema.table

    def own_versions(self, log_id: str) -> Iterator[tuple[int, CommitRecord]]:
        """Yield the snapshots that this log's commits made, newest first, while the table lists them.

        A snapshot that was only staged is not among them: nobody has checked that it follows its stated parent.
        """
        published = {self.snapshot, *(entry["snapshot-id"] for entry in self.document.get("snapshot-log", ()))}
        snapshots = {snapshot["snapshot-id"]: snapshot for number in published for snapshot in self._ancestors(number)}
        for number, snapshot in sorted(
            snapshots.items(), key=lambda pair: int(pair[1]["sequence-number"]), reverse=True
        ):
            with contextlib.suppress(TableUnusable):
                if (record := self._record_in(snapshot)) is not None and record.log == log_id:
                    yield number, record

    def copy_as_of(self, number: int | None, location: Path, partition_by: Sequence[str]) -> dict[str, Any]:
        """Return metadata for a copy of this table in another folder.

        The copy is as this table was at a snapshot, or empty without one. What is written to the copy can become part
        of this table.
        """
        base = None if number is None else self._snapshot(number)
        schema = self.document["current-schema-id"] if base is None else base["schema-id"]
        fields = next(item["fields"] for item in self.document["schemas"] if item["schema-id"] == schema)
        specs = [spec for spec in self.specs if _is_valid_for(spec, fields)]
        usable = [
            spec["spec-id"] for spec in specs if base is None or _partition_columns(spec, fields) == list(partition_by)
        ]
        if not usable:
            raise TableUnusable("the table cannot be partitioned as it was", path=self.path, hint=REPLACE_HINT)
        default = self.document["default-spec-id"]
        others = {name: value for name, value in self.document.items() if name not in _NOT_OF_A_COPY}
        properties = {name: value for name, value in self.properties.items() if not name.startswith(_PATH_PROPERTIES)}
        refs = {"current-snapshot-id": number, "refs": {"main": {"snapshot-id": number, "type": "branch"}}}
        return {
            **others,
            **(refs if base else {"refs": {}}),
            "location": str(location),
            "properties": properties,
            "current-schema-id": schema,
            "default-spec-id": default if default in usable else max(usable),
            "partition-specs": specs,
            "snapshots": [base] if base else [],
            "snapshot-log": [],
            "metadata-log": [],
        }

    def orphan_snapshots(self) -> list[int]:
        """Return our snapshots that no commit made part of the table."""
        ancestors = {snapshot["snapshot-id"] for snapshot in self._ancestors()}
        named = {ref["snapshot-id"] for ref in self.document.get("refs", {}).values()}
        return [
            snapshot["snapshot-id"]
            for snapshot in self.document.get("snapshots", ())
            if TOKEN in snapshot["summary"]
            and "wap.id" in snapshot["summary"]
            and snapshot["snapshot-id"] not in ancestors | named
        ]

    def _record_in(self, snapshot: Mapping[str, Any]) -> CommitRecord | None:
        text = snapshot["summary"].get(METADATA_KEY)
        if text is None:
            return None
        try:
            stored = json.loads(text)
            stored["schema"] = json.loads(self.properties[SCHEMA_PROPERTY_PREFIX + stored["schema"]])
            return CommitRecord.parse(json.dumps(stored))
        except (ValueError, KeyError, TypeError, ConfigError) as exc:
            raise TableUnusable(
                "a snapshot of the table cannot be read",
                path=self.path,
                version=snapshot["snapshot-id"],
                hint=REPLACE_HINT,
            ) from exc

    def _ancestors(self, number: int | None = None) -> Iterator[Mapping[str, Any]]:
        """Yield a snapshot and those before it, while the table has them.

        Starts at the newest by default.
        """
        number = number or self.snapshot
        for _ in range(SNAPSHOTS_MAX):
            found = None if number is None else self._find(number)
            if found is None:
                return
            yield found
            number = found.get("parent-snapshot-id")

    def _snapshot(self, number: int) -> Mapping[str, Any]:
        found = self._find(number)
        assert found is not None, "the newest is held"
        return found

    def _find(self, number: int) -> Mapping[str, Any] | None:
        return self._by_number.get(number)

    @functools.cached_property
    def _by_number(self) -> dict[int, Mapping[str, Any]]:
        return {item["snapshot-id"]: item for item in self.document.get("snapshots", ())}


def _only_rewrites(summary: Mapping[str, Any]) -> bool:
    """Return whether a snapshot has the same rows as the one before it.

    There may be fewer records, because deleted rows are not rewritten.
    """
    added, removed = summary.get("added-records", 0), summary.get("deleted-records", 0)
    return summary.get("operation") == REPLACED and int(added) <= int(removed)


def _row_count(summary: Mapping[str, Any]) -> int:
    """Return the row count of a snapshot."""
    return int(summary.get("total-records", 0)) - int(summary.get("total-position-deletes", 0))


def _is_valid_for(spec: Spec, fields: Sequence[Field]) -> bool:
    """Return whether a table with these columns can have this partition spec."""
    return {part.get("source-id") for part in spec["fields"]} <= {field["id"] for field in fields}


def _partition_columns(spec: Spec, fields: Sequence[Field]) -> list[str]:
    """Return the partition columns' names among these columns."""
    names = {field["id"]: field["name"] for field in fields}
    return [names[part["source-id"]] if part["transform"] == IDENTITY else "" for part in spec["fields"]]
