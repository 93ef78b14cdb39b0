"""Keeps what loads made of the tables, by `tables.keep_seed`, for as long as a rebuild could start from it.

Nothing here holds the log back, and nothing that goes wrong here stops a table: a seed that cannot be kept is missed
only by a rebuild, and said in the log. One that the log no longer brings to its end is dropped.
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
"""Between two looks for seeds that are of no use any more."""


class LoadKeeper:
    """The seeds of one applying process, and of those before it."""

    def __init__(self, how: bool | Literal["copy"], layout: LakeLayout, lives: TableRegistry) -> None:
        self._how, self._lives = how, lives
        self._seeds = KeptLoadStore(layout.root, lives.log.log_id)
        self._due = 0.0

    @property
    def loads_in_use(self) -> set[str] | None:
        """The loads that a rebuild may ask about: those that tables come from, and those of which something is kept.
        None while a table does not say where it stands."""
        lives = list(self._lives.tables.values())
        if any(life.applied_position is None and life.error is not None for life in lives):
            return None
        cursors = [life.applied_position for life in lives] + [
            seed.commit_record.applied_position for seed in self._seeds.all()
        ]
        return {cursor.load for cursor in cursors if cursor is not None and cursor.load is not None}

    def keep(self, life: ManagedTable, load: str) -> None:
        """Keep the version of the table that the load has landed as, if it has; may be repeated."""
        if self._how is False:
            return
        try:
            landed = next((base for base in rebuild_bases(life.location) if base.loaded), None)
            if landed is None or landed.commit_record.applied_position.load != load:
                return  # nothing differed, so there was nothing to commit
            staged = self._staged(life.location, load, landed.version)
            if staged is None:
                return  # only what differed was written; the seed of before is still one
            made = self._seeds.keep_load(
                life.location, landed.version, landed.commit_record, copies=self._how == "copy", staged=staged
            )
        except (TailraceError, DeltaError, OSError, ValueError, KeyError, pa.ArrowException) as error:
            hint = "write `keep_seed: copy` where the disk knows no hard links, or `keep_seed: false`"
            log.warning("no seed kept", extra={"table": str(life.table), "why": _reason(error), "hint": hint})
            return
        if made is None:
            log.info("no seed kept", extra={"table": str(life.table), "why": "deletion vectors or column mapping"})

    def _staged(self, place: TableLocation, load: str, version: int) -> list[StagedFile] | None:
        """The files that an Iceberg table has from a load; None if they are not all that it has. A Delta table lists
        its files by itself."""
        if place.catalog is None:
            return []
        chunks = self._lives.load_store.staged_chunks(load)
        files = [file for number in sorted(chunks) for file in chunks[number].files]
        said = place.catalog.metadata(place.path.absolute())
        return files if said is not None and IcebergMetadata(place.path, said).is_load_of(version, files) else None

    def run_if_due(self) -> None:
        """Drop seeds that no rebuild can start from, now and then."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + LOOK_SECONDS
        for seed in self._seeds.all():
            if self._how is False or self._is_outdated(seed):
                seed.drop()
                log.info("seed dropped", extra={"table": str(seed.commit_record.schema.table)})

    def _is_outdated(self, seed: KeptLoad) -> bool:
        """Whether the log no longer holds all that came after it."""
        cursor, shape, index = seed.commit_record.applied_position, seed.commit_record.schema, self._lives.index
        try:
            since = self._lives.complete_from(shape.table)
        except TailraceError:
            return False  # not known now
        if since is not None and cursor.position < since:
            return True
        return index.trimmed_after_position(self._lives.log_numbers_of(shape), cursor.seq, cursor.position) is not None


def _reason(error: Exception) -> str:
    if isinstance(error, TailraceError):
        return error.headline
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
