"""Our position in an Iceberg table's own snapshots, and who made the snapshots after it.

The position stands in the summary of every snapshot of ours, so rows and position are one: whoever sets the table back
to an older snapshot of ours takes its position back, too. A snapshot is somebody else's unless it says that it only
wrote files anew (`replace`) and brings no more rows than it takes out. The shape that a position speaks of is long, and
seldom changes, so it stands among the table's properties under its digest, and each snapshot names that.
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
"""The property that says whose table it is."""
SCHEMA_PROPERTY_PREFIX = "tailrace.shape."
"""Of each shape that a snapshot names, before its digest."""
TOKEN = "tailrace.token"
"""In a summary: by it we know our snapshot again."""
LOADED_SUMMARY_KEY = "tailrace.landed"
"""In a summary: which staged files a load has made all that the table holds."""
REPLACED = "replace"
"""What Iceberg calls a snapshot that has other files and the same rows."""
SNAPSHOTS_MAX = 10_000

_NOT_OF_A_COPY = frozenset(["current-snapshot-id", "statistics", "partition-statistics"])
_PLACES = ("write.data.path", "write.metadata.path", "write.object-storage.", "write.folder-storage.")
"""Properties that say where files of the table are written."""

Summary = dict[str, str]
Properties = dict[str, str]


def summary_and_properties(position: CommitRecord, token: str) -> tuple[Summary, Properties]:
    """What a snapshot at this position says of itself, and what the table must say beside it."""
    stored = json.loads(position.text())
    shape = json.dumps(stored["schema"], sort_keys=True)
    digest = hashlib.sha256(shape.encode()).hexdigest()[:16]
    text = json.dumps({**stored, "schema": digest})
    return {METADATA_KEY: text, TOKEN: token}, {SCHEMA_PROPERTY_PREFIX + digest: shape, OWNER: position.log}


def files_digest(files: Sequence[StagedFile]) -> str:
    """How a summary calls these files."""
    names = "\n".join(sorted(file.path for file in files))
    return hashlib.sha256(names.encode()).hexdigest() if files else ""


@dataclass(frozen=True)
class IcebergMetadata:
    """What one commit made of a table."""

    path: Path
    document: Mapping[str, Any]

    @property
    def properties(self) -> Mapping[str, str]:
        return dict(self.document.get("properties", {}))

    @property
    def owner(self) -> str | None:
        """The log whose table it is; None if it is none of ours."""
        return self.properties.get(OWNER)

    @property
    def snapshot(self) -> int | None:
        """The number of the newest snapshot."""
        number = self.document.get("current-snapshot-id")
        return None if number in (None, -1) else int(number)

    @property
    def fields(self) -> list[Field]:
        """The columns as they are now."""
        now = self.document["current-schema-id"]
        return next(list(schema["fields"]) for schema in self.document["schemas"] if schema["schema-id"] == now)

    @property
    def last_number(self) -> int:
        """The highest that a column ever had."""
        return int(self.document["last-column-id"])

    @property
    def specs(self) -> list[Spec]:
        """All that the table is partitioned by, and was."""
        return list(self.document["partition-specs"])

    @property
    def partition_by(self) -> list[str]:
        """The columns that new files are apart by; of what is not a column as it is, its name."""
        now = self.document["default-spec-id"]
        parts = next(spec["fields"] for spec in self.specs if spec["spec-id"] == now)
        return [
            part["name"] if part["transform"] == IDENTITY else f"{part['transform']} {part['name']}" for part in parts
        ]

    def rows(self) -> int:
        """How many there are, as the newest snapshot counts them."""
        return 0 if self.snapshot is None else _counted(self._snapshot(self.snapshot)["summary"])

    def commit_record(self) -> CommitRecord:
        """Of a table of ours; refuse if others wrote since."""
        owner = self.owner
        for found in self._back():
            position = self._stated(found)
            if position is None and _only_rewrites(found["summary"]):
                continue
            if position is None or position.log != owner:
                raise ForeignWrite(
                    "someone else changed the table",
                    path=self.path,
                    operation=found["summary"].get("operation", "unknown"),
                    version=found["snapshot-id"],
                    hint=f"A table of ours is written by Tailrace alone. {REPLACE_HINT}",
                )
            if found.get("schema-id") != self.document["current-schema-id"]:
                raise ForeignWrite(
                    "someone else changed the table's columns",
                    path=self.path,
                    version=found["snapshot-id"],
                    hint=f"A table of ours is written by Tailrace alone. {REPLACE_HINT}",
                )
            return position
        raise TableUnusable(
            "the table no longer holds the snapshot with our position", path=self.path, hint=REPLACE_HINT
        )

    def has_in_summary(self, name: str, value: str) -> bool:
        """Whether a snapshot of the table has this in its summary."""
        return any(found["summary"].get(name) == value for found in self._back())

    def is_load_of(self, number: int, files: Sequence[StagedFile]) -> bool:
        """Whether these staged files are all that a snapshot holds."""
        summary = self._snapshot(number)["summary"]
        return bool(summary.get(LOADED_SUMMARY_KEY) == files_digest(files)) if files else _counted(summary) == 0

    def source(self) -> TableId | None:
        """The source table that it was last made of; None where that cannot be told."""
        try:
            found = next((stated for item in self._back() if (stated := self._stated(item)) is not None), None)
        except TableUnusable:
            return None
        return None if found is None else found.schema.table

    def own_versions(self, log_id: str) -> Iterator[tuple[int, CommitRecord]]:
        """The snapshots that this log's commits made, newest first, as far as the table still lists them. One that was
        only staged is none: nobody has seen to it that it follows what it says it does."""
        published = {self.snapshot, *(entry["snapshot-id"] for entry in self.document.get("snapshot-log", ()))}
        found = {item["snapshot-id"]: item for number in published for item in self._back(number)}
        for number, item in sorted(found.items(), key=lambda pair: int(pair[1]["sequence-number"]), reverse=True):
            with contextlib.suppress(TableUnusable):
                if (position := self._stated(item)) is not None and position.log == log_id:
                    yield number, position

    def copy_as_of(self, number: int | None, location: Path, partition_by: Sequence[str]) -> dict[str, Any]:
        """What the metadata of a table says that lies elsewhere and is as this one was at a snapshot, or that has
        nothing, and goes on from there: what is written to it can become part of this one."""
        base = None if number is None else self._snapshot(number)
        schema = self.document["current-schema-id"] if base is None else base["schema-id"]
        fields = next(item["fields"] for item in self.document["schemas"] if item["schema-id"] == schema)
        specs = [spec for spec in self.specs if _fits(spec, fields)]
        mine = [spec["spec-id"] for spec in specs if base is None or _parts_of(spec, fields) == list(partition_by)]
        if not mine:
            raise TableUnusable("the table cannot be partitioned as it was", path=self.path, hint=REPLACE_HINT)
        now = self.document["default-spec-id"]
        left = {name: value for name, value in self.document.items() if name not in _NOT_OF_A_COPY}
        kept = {name: value for name, value in self.properties.items() if not name.startswith(_PLACES)}
        here = {"current-snapshot-id": number, "refs": {"main": {"snapshot-id": number, "type": "branch"}}}
        return {
            **left,
            **(here if base else {"refs": {}}),
            "location": str(location),
            "properties": kept,
            "current-schema-id": schema,
            "default-spec-id": now if now in mine else max(mine),
            "partition-specs": specs,
            "snapshots": [base] if base else [],
            "snapshot-log": [],
            "metadata-log": [],
        }

    def orphan_snapshots(self) -> list[int]:
        """Snapshots that were ours to be, and that no commit made part of the table."""
        mine = {item["snapshot-id"] for item in self._back()}
        named = {ref["snapshot-id"] for ref in self.document.get("refs", {}).values()}
        return [
            item["snapshot-id"]
            for item in self.document.get("snapshots", ())
            if TOKEN in item["summary"] and "wap.id" in item["summary"] and item["snapshot-id"] not in mine | named
        ]

    def _stated(self, snapshot: Mapping[str, Any]) -> CommitRecord | None:
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

    def _back(self, number: int | None = None) -> Iterator[Mapping[str, Any]]:
        """A snapshot, by default the newest, the one before it, and so on, as far as the table holds them."""
        number = number or self.snapshot
        for _ in range(SNAPSHOTS_MAX):
            found = None if number is None else self._found(number)
            if found is None:
                return
            yield found
            number = found.get("parent-snapshot-id")

    def _snapshot(self, number: int) -> Mapping[str, Any]:
        found = self._found(number)
        assert found is not None, "the newest is held"
        return found

    def _found(self, number: int) -> Mapping[str, Any] | None:
        return self._by_number.get(number)

    @functools.cached_property
    def _by_number(self) -> dict[int, Mapping[str, Any]]:
        return {item["snapshot-id"]: item for item in self.document.get("snapshots", ())}


def _only_rewrites(summary: Mapping[str, Any]) -> bool:
    """Whether a snapshot has the rows of the one before it. What was struck out of a file is not written anew, so there
    may be fewer."""
    added, gone = summary.get("added-records", 0), summary.get("deleted-records", 0)
    return summary.get("operation") == REPLACED and int(added) <= int(gone)


def _counted(summary: Mapping[str, Any]) -> int:
    """The rows of a snapshot."""
    return int(summary.get("total-records", 0)) - int(summary.get("total-position-deletes", 0))


def _fits(spec: Spec, fields: Sequence[Field]) -> bool:
    """Whether a table of these columns can have files that are apart so."""
    return {part.get("source-id") for part in spec["fields"]} <= {field["id"] for field in fields}


def _parts_of(spec: Spec, fields: Sequence[Field]) -> list[str]:
    """What files are apart by, each by the name that its column has among these."""
    names = {field["id"]: field["name"] for field in fields}
    return [names[part["source-id"]] if part["transform"] == IDENTITY else "" for part in spec["fields"]]
