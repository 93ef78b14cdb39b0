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
from tailrace.pipeline.tables.registry import Lives, TableLife
from tailrace.tables.delta.load_snapshots import KeptSeed, KeptSeeds
from tailrace.tables.delta.rebuild_table import bases
from tailrace.tables.iceberg.commit_log import Metadata
from tailrace.tables.location import Layout, Place
from tailrace.tables.staging import StagedFile

log = logging.getLogger(__name__)

LOOK_SECONDS = 60.0
"""Between two looks for seeds that are of no use any more."""


class SeedKeeping:
    """The seeds of one applying process, and of those before it."""

    def __init__(self, how: bool | Literal["copy"], layout: Layout, lives: Lives) -> None:
        self._how, self._lives = how, lives
        self._seeds = KeptSeeds(layout.root, lives.log.log_id)
        self._due = 0.0

    @property
    def loads(self) -> set[str] | None:
        """The loads that a rebuild may ask about: those that tables come from, and those of which something is kept.
        None while a table does not say where it stands."""
        lives = list(self._lives.tables.values())
        if any(life.cursor is None and life.error is not None for life in lives):
            return None
        cursors = [life.cursor for life in lives] + [seed.position.cursor for seed in self._seeds.all()]
        return {cursor.load for cursor in cursors if cursor is not None and cursor.load is not None}

    def keep(self, life: TableLife, load: str) -> None:
        """Keep the version of the table that the load has landed as, if it has; may be repeated."""
        if self._how is False:
            return
        try:
            landed = next((base for base in bases(life.place) if base.loaded), None)
            if landed is None or landed.position.cursor.load != load:
                return  # nothing differed, so there was nothing to commit
            staged = self._staged(life.place, load, landed.version)
            if staged is None:
                return  # only what differed was written; the seed of before is still one
            made = self._seeds.keep(
                life.place, landed.version, landed.position, copies=self._how == "copy", staged=staged
            )
        except (TailraceError, DeltaError, OSError, ValueError, KeyError, pa.ArrowException) as error:
            hint = "write `keep_seed: copy` where the disk knows no hard links, or `keep_seed: false`"
            log.warning("no seed kept", extra={"table": str(life.table), "why": _reason(error), "hint": hint})
            return
        if made is None:
            log.info("no seed kept", extra={"table": str(life.table), "why": "deletion vectors or column mapping"})

    def _staged(self, place: Place, load: str, version: int) -> list[StagedFile] | None:
        """The files that an Iceberg table has from a load; None if they are not all that it has. A Delta table lists
        its files by itself."""
        if place.catalog is None:
            return []
        chunks = self._lives.seeds.staged(load)
        files = [file for number in sorted(chunks) for file in chunks[number].files]
        said = place.catalog.metadata(place.path.absolute())
        return files if said is not None and Metadata(place.path, said).landed(version, files) else None

    def look(self) -> None:
        """Drop seeds that no rebuild can start from, now and then."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + LOOK_SECONDS
        for seed in self._seeds.all():
            if self._how is False or self._is_outdated(seed):
                seed.drop()
                log.info("seed dropped", extra={"table": str(seed.position.schema.table)})

    def _is_outdated(self, seed: KeptSeed) -> bool:
        """Whether the log no longer holds all that came after it."""
        cursor, shape, index = seed.position.cursor, seed.position.schema, self._lives.index
        try:
            since = self._lives.since(shape.table)
        except TailraceError:
            return False  # not known now
        if since is not None and cursor.position < since:
            return True
        return index.lacks_after(self._lives.numbers_of(shape), cursor.seq, cursor.position) is not None


def _reason(error: Exception) -> str:
    if isinstance(error, TailraceError):
        return error.headline
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
