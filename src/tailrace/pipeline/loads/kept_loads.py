"""Keep the table versions that loads committed, for later rebuilds, as `tables.keep_seed` says.

Nothing here holds back the log's retention, and no error here stops a table. A load that cannot be kept is only missing
for a rebuild, and a warning says so. A kept load is dropped once the log lacks changes after it.
"""

from __future__ import annotations

import logging
import time
from typing import Literal

import pyarrow as pa
from deltalake.exceptions import DeltaError

from tailrace.errors import TailraceError
from tailrace.pipeline.tables.managed_table import ManagedTable
from tailrace.pipeline.tables.registry import TableRegistry
from tailrace.tables.delta.load_snapshots import KeptLoad, KeptLoadStore
from tailrace.tables.delta.rebuild_table import rebuild_bases
from tailrace.tables.iceberg.commit_log import IcebergMetadata
from tailrace.tables.location import LakeLayout, TableLocation
from tailrace.tables.staging import StagedFile

log = logging.getLogger(__name__)

LOOK_SECONDS = 60.0
"""Seconds between two searches for outdated kept loads."""


class LoadKeeper:
    """Kept loads of one applying process and of earlier ones."""

    def __init__(self, mode: bool | Literal["copy"], layout: LakeLayout, registry: TableRegistry) -> None:
        self._mode, self._registry = mode, registry
        self._kept_loads = KeptLoadStore(layout.root, registry.log.log_id)
        self._due = 0.0

    @property
    def loads_in_use(self) -> set[str] | None:
        """Loads whose records a rebuild may need. They are those that tables come from, and the kept ones.

        None while the applied position of a table cannot be read.
        """
        registry = list(self._registry.tables.values())
        if any(managed.applied_position is None and managed.error is not None for managed in registry):
            return None
        positions = [managed.applied_position for managed in registry] + [
            kept.commit_record.applied_position for kept in self._kept_loads.all()
        ]
        return {position.load for position in positions if position is not None and position.load is not None}

    def keep(self, managed: ManagedTable, load: str) -> None:
        """Keep the table version that the load committed, if it did; may be repeated."""
        if self._mode is False:
            return
        try:
            base = next((base for base in rebuild_bases(managed.location) if base.loaded), None)
            if base is None or base.commit_record.applied_position.load != load:
                return  # no row differed, so the load made no commit
            staged = self._staged_files(managed.location, load, base.version)
            if staged is None:
                return  # only differing rows were written; the earlier kept load stays usable
            kept_load = self._kept_loads.keep_load(
                managed.location, base.version, base.commit_record, copies=self._mode == "copy", staged=staged
            )
        except (TailraceError, DeltaError, OSError, ValueError, KeyError, pa.ArrowException) as error:
            hint = "if the disk has no hard links, set `keep_seed: copy`; or set `keep_seed: false`"
            log.warning(
                "load not kept for rebuilds", extra={"table": str(managed.table), "why": _reason(error), "hint": hint}
            )
            return
        if kept_load is None:
            log.info(
                "load not kept for rebuilds",
                extra={"table": str(managed.table), "why": "deletion vectors or column mapping"},
            )

    def _staged_files(self, location: TableLocation, load: str, version: int) -> list[StagedFile] | None:
        """Return the files that an Iceberg table has from a load.

        None means that it has others too. The list is empty for a Delta table, which lists its files itself.
        """
        if location.catalog is None:
            return []
        chunks = self._registry.load_store.staged_chunks(load)
        files = [file for number in sorted(chunks) for file in chunks[number].files]
        metadata = location.catalog.metadata(location.path.absolute())
        return (
            files
            if metadata is not None and IcebergMetadata(location.path, metadata).is_load_of(version, files)
            else None
        )

    def run_if_due(self) -> None:
        """Drop kept loads that no rebuild can start from, every `LOOK_SECONDS`."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + LOOK_SECONDS
        for kept in self._kept_loads.all():
            if self._mode is False or self._is_outdated(kept):
                kept.drop()
                log.info("kept load dropped", extra={"table": str(kept.commit_record.schema.table)})

    def _is_outdated(self, kept: KeptLoad) -> bool:
        """Return whether the log lacks changes after the kept load."""
        applied, schema, index = kept.commit_record.applied_position, kept.commit_record.schema, self._registry.index
        try:
            since = self._registry.complete_from(schema.table)
        except TailraceError:
            return False  # not known now
        if since is not None and applied.position < since:
            return True
        return (
            index.trimmed_after_position(self._registry.log_numbers_of(schema), applied.seq, applied.position)
            is not None
        )


def _reason(error: Exception) -> str:
    if isinstance(error, TailraceError):
        return error.headline
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
