"""What an Iceberg table says of itself, without Java: where it stands, what it holds, and whose it is.

Rows and commits are the connector's business (`spark/writers/iceberg_writer.py`): it alone writes in here, and
whatever it commits is a compare-and-swap on what was looked at. An object holds names and a form and nothing else, so
Spark may send it to its workers."""

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
"""The folders that the connector makes in that of a table."""
STAGED = "_staged"
"""Below a table's folder: files that a load has written, and that the table gets by their other name."""
REBUILT = "rebuilt"
"""There, too. Not a hidden name: what Iceberg finds there that no snapshot names may be removed by it."""

_OURS = re.compile(rf"\..*|{METADATA}|{DATA}|{STAGED}|{REBUILT}|{SCRATCH}")
"""What a load or a rebuild that died leaves behind, and the hidden files that systems add."""


@dataclass(frozen=True, kw_only=True)
class OpenedIceberg:
    """The table as it stood after one commit."""

    metadata: IcebergMetadata
    commit_record: CommitRecord


class IcebergTable:
    """The reading half of a table of one change log."""

    def __init__(self, path: Path, log_id: str, catalog: Catalog, form: TableSpec = PLAIN_MIRROR) -> None:
        self._path, self._log_id, self._form = path.absolute(), log_id, form
        self._catalog = catalog

    def applied_position(self) -> AppliedPosition | None:
        return None if (opened := self._open()) is None else opened.commit_record.applied_position

    def schema(self) -> TableSchema | None:
        return None if (opened := self._open()) is None else opened.commit_record.schema

    def replay_id(self) -> str | None:
        """The name of the dead letters that came in last, where their own changes did."""
        return None if (opened := self._open()) is None else opened.commit_record.replay_id

    def columns(self) -> list[str]:
        """All that it holds, by name, those included that the source has dropped."""
        return list(columns_of(self.opened().metadata.fields))

    def rows(self) -> int:
        return 0 if (found := self.metadata()) is None else found.rows()

    def version(self) -> int | None:
        """The number of the newest snapshot, by which readers ask for it; None if there is no table."""
        return None if (found := self.metadata()) is None else found.snapshot

    def identity(self, _version: int | None = None) -> str | None:
        """Which table it is: one that is made anew has another. A snapshot's number is no other table's."""
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
        """What its newest commit made of it; None if there is no table. Refuses a place that holds something else."""
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
        """The table as it stands; refuses where `cursor` is None."""
        opened = self._open()
        if opened is None:
            raise not_loaded(self._path)
        return opened

    def _open(self) -> OpenedIceberg | None:
        """The table as it is now; None if it holds no position of this log."""
        found = self.metadata()
        if found is None or found.owner != self._log_id:
            return None
        position = found.commit_record()
        refuse_other_spec(self._path, self._form, position)
        if found.partition_by != list(self._form.partition_by):
            raise TableUnusable(
                "someone else changed what the table is partitioned by",
                path=self._path,
                found=", ".join(found.partition_by),
                hint=REPLACE_HINT,
            )
        return OpenedIceberg(metadata=found, commit_record=position)
