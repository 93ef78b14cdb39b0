"""Which tables the log knows, and every version of their shape, each written before its first row.

A table's number is given once and never again; a version's file never changes. So a row's (table, version)
says for ever how to read it.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from tailrace import failpoints
from tailrace.changelog import files
from tailrace.errors import LogCorrupt
from tailrace.model.schema import TableSchema

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Version:
    """One version of one table's shape, as the log numbers it."""

    table: int
    version: int
    schema: TableSchema
    arrow: pa.Schema
    """Of a stored change, with every optional column."""


class Schemas:
    """The log's `schemas` folder. One writer; any number of readers, who find new files as they need them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._versions: dict[tuple[int, int], Version] = {}
        self._tables: dict[int, int] = {}  # relation -> table
        self._latest: dict[int, Version] = {}

    def load(self) -> None:
        """Read everything there is."""
        for path in sorted(self._folder.glob("*/*.json")):
            if not path.name.startswith("."):
                self._keep(self._read(path))

    def get(self, table: int, version: int) -> Version:
        """The named version; it stands in its file since before its first row."""
        known = self._versions.get((table, version))
        if known is None:
            known = self._read(self._path(table, version))
            self._keep(known)
        return known

    def latest(self) -> list[Version]:
        """The newest known version of every table."""
        return [self._latest[table] for table in sorted(self._latest)]

    def record(self, schema: TableSchema) -> Version:
        """The version that is this shape, durable when this returns."""
        table = self._tables.get(schema.relation)
        latest = self._latest.get(table) if table is not None else None
        if latest is not None and latest.schema == schema:
            return latest
        if table is None:
            table = max(self._latest, default=0) + 1
        version = Version(
            table=table,
            version=latest.version + 1 if latest else 1,
            schema=schema,
            arrow=schema.change_schema(),
        )
        stored = {"format": FORMAT, "table": table, "version": version.version, **schema.to_json()}
        stored["crc"] = _checksum(stored)
        path = self._path(table, version.version)
        with files.explained(path):
            path.parent.mkdir(exist_ok=True)
            files.sync_folder(self._folder)
            files.create(path, json.dumps(stored, indent=1, ensure_ascii=False).encode())
        failpoints.hit("log.schema_recorded")
        self._keep(version)
        return version

    def _keep(self, version: Version) -> None:
        self._versions[version.table, version.version] = version
        self._tables[version.schema.relation] = version.table
        known = self._latest.get(version.table)
        if known is None or known.version < version.version:
            self._latest[version.table] = version

    def _path(self, table: int, version: int) -> Path:
        return self._folder / str(table) / f"{version}.json"

    def _read(self, path: Path) -> Version:
        try:
            stored = json.loads(path.read_bytes())
            if stored.pop("crc") != _checksum(stored):
                raise ValueError("it does not match its checksum")
            if stored["format"] != FORMAT:
                raise ValueError("it has a format this version does not know")
            if path != self._path(stored["table"], stored["version"]):
                raise ValueError("it belongs to another place")
            schema = TableSchema.from_json(stored)
            return Version(
                table=stored["table"], version=stored["version"], schema=schema, arrow=schema.change_schema()
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException) as error:
            raise LogCorrupt(
                f"a table's shape cannot be read: {error}",
                path=path,
                hint="Restore the file from a copy of the log, or start a new log.",
            ) from error


def _checksum(stored: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(stored, sort_keys=True, separators=(",", ":")).encode())
