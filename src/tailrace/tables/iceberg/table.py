"""Read an Iceberg table's position, contents and owner, without Java.

Only the connector writes rows and commits (`spark/writers/iceberg_writer.py`). Each of its commits is a
compare-and-swap on the metadata that was read. An object holds only plain data, so Spark may send it to its workers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tailrace.errors import TableUnusable
from tailrace.model.schema import TableId, TableSchema
from tailrace.tables.delta.commit_log import REPLACE_HINT, CommitRecord
from tailrace.tables.iceberg.catalogs import Catalog
from tailrace.tables.iceberg.commit_log import IcebergMetadata
from tailrace.tables.iceberg.schema_mapping import columns_of
from tailrace.tables.port import AppliedPosition
from tailrace.tables.spec import PLAIN_MIRROR, TableSpec
from tailrace.tables.table_errors import location_taken, not_loaded, refuse_other_spec
from tailrace.tables.table_folder import AWAY_HINT, SCRATCH, refuse_inside, unreadable
from tailrace.tables.table_paths import folder_taken

METADATA, DATA = "metadata", "data"
"""The folders that the connector makes in a table's folder."""
STAGED = "_staged"
"""Folder in a table's folder for a load's files. The table gets them under another name."""
REBUILT = "rebuilt"
"""Folder in a table's folder for rebuilds.

The name is not hidden: Iceberg may remove files in it that no snapshot names.
"""

_OURS = re.compile(rf"\..*|{METADATA}|{DATA}|{STAGED}|{REBUILT}|{SCRATCH}")
"""Leftovers of a dead load or rebuild, and the hidden files that operating systems add."""


@dataclass(frozen=True, kw_only=True)
class OpenedIceberg:
    """The table after one commit."""

    metadata: IcebergMetadata
    commit_record: CommitRecord


class IcebergTable:
    """The reading part of a table of one change log."""

    def __init__(self, path: Path, log_id: str, catalog: Catalog, spec: TableSpec = PLAIN_MIRROR) -> None:
        self._path, self._log_id, self._spec = path.absolute(), log_id, spec
        self._catalog = catalog

    def applied_position(self) -> AppliedPosition | None:
        return None if (opened := self._open()) is None else opened.commit_record.applied_position

    def schema(self) -> TableSchema | None:
        return None if (opened := self._open()) is None else opened.commit_record.schema

    def replay_id(self) -> str | None:
        """Return the id of the last replay that appended rows."""
        return None if (opened := self._open()) is None else opened.commit_record.replay_id

    def columns(self) -> list[str]:
        """Return the names of all columns, including those that the source has dropped."""
        return list(columns_of(self.opened().metadata.fields))

    def rows(self) -> int:
        return 0 if (found := self.metadata()) is None else found.rows()

    def version(self) -> int | None:
        """Return the newest snapshot's id, by which readers select it. None if there is no table."""
        return None if (found := self.metadata()) is None else found.snapshot

    def identity(self, _version: int | None = None) -> str | None:
        """Return the table's id; a table that was made again has another one.

        A snapshot's id belongs to one table only, so the version does not matter.
        """
        return None if (found := self.metadata()) is None else str(found.document["table-uuid"])

    def refuse_foreign(self, table: TableId) -> None:
        """Raise what a load of this source table would raise before it begins."""
        found = self.metadata()
        if found is None:
            refuse_inside(self._path, REBUILT)
            return
        if found.owner != self._log_id:
            raise location_taken(self._path, found.owner)
        if (made_of := found.source()) not in (None, table):
            raise folder_taken(self._path, made_of, table)

    def metadata(self) -> IcebergMetadata | None:
        """Return the newest commit's metadata; None without a table. Refuses other contents."""
        found = self._catalog.metadata(self._path)
        if found is not None:
            return IcebergMetadata(self._path, found)
        try:
            strays = [entry.name for entry in self._path.iterdir() if not _OURS.fullmatch(entry.name)]
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise unreadable(self._path, exc) from exc
        if strays:
            raise TableUnusable(
                "the folder holds something that is not an Iceberg table",
                path=self._path,
                found=min(strays),
                hint=AWAY_HINT,
            )
        return None

    def opened(self) -> OpenedIceberg:
        """Open the table; refuse one without a position of this log."""
        opened = self._open()
        if opened is None:
            raise not_loaded(self._path)
        return opened

    def _open(self) -> OpenedIceberg | None:
        """Open the newest version; None if it has no position of this log."""
        metadata = self.metadata()
        if metadata is None or metadata.owner != self._log_id:
            return None
        record = metadata.commit_record()
        refuse_other_spec(self._path, self._spec, record)
        if metadata.partition_by != list(self._spec.partition_by):
            raise TableUnusable(
                "someone else changed what the table is partitioned by",
                path=self._path,
                found=", ".join(metadata.partition_by),
                hint=REPLACE_HINT,
            )
        return OpenedIceberg(metadata=metadata, commit_record=record)
