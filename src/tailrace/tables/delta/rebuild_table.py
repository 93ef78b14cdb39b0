"""What a lake table can be made anew from; and a Delta table made anew beside itself, or where it was, and swapped in.
(An Iceberg table: `spark/writers/iceberg_rebuild.py`.)

What must stay true: until the one commit that swaps, the table is not touched, and after it the table is the new one
with its position. Data files are shared, not copied: a version, or a kept seed, is made again by links to its files,
and the new table takes its files over by links, under names of their own. What dies before the swap leaves files that
no commit names; the next rebuild removes them.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from tailrace import failpoints
from tailrace.tables.delta.commit_log import CommitRecord, own_versions
from tailrace.tables.delta.features import NO_FEATURES
from tailrace.tables.delta.hardlinks import link_files
from tailrace.tables.delta.load_snapshots import KEPT_VERSION, KeptLoad, origin_of
from tailrace.tables.delta.schema_mapping import refuse_features
from tailrace.tables.evolve.recast_columns import retained_columns
from tailrace.tables.iceberg.commit_log import IcebergMetadata
from tailrace.tables.location import TableLocation
from tailrace.tables.port import AppliedPosition
from tailrace.tables.staging import StagedFile, discard
from tailrace.tables.table_folder import REBUILT, find_folder, make_folder, unreadable

PREFIX = "rebuild"


@dataclass(frozen=True, kw_only=True)
class RebuildBase:
    """A version of the table, or a kept seed of it, that a rebuild may start from."""

    version: int
    commit_record: CommitRecord
    loaded: bool
    """Whether it is what a load has landed, and no change more."""
    recast: bool
    """Whether it has another shape than the first version that stood where it does."""
    kept_load: KeptLoad | None = None
    """Where it is not a version of the table."""


def rebuild_bases_with(place: TableLocation, seeds: list[KeptLoad]) -> Iterator[RebuildBase]:
    """All that there is to start from, newest first; of two that stand at one place the table's own version."""
    left = [
        RebuildBase(version=KEPT_VERSION, commit_record=seed.commit_record, loaded=True, recast=False, kept_load=seed)
        for seed in seeds
    ]
    for base in rebuild_bases(place):
        while left and not base.commit_record.applied_position.covers(left[0].commit_record.applied_position):
            yield left.pop(0)
        yield base
    yield from left


def rebuild_bases(place: TableLocation) -> Iterator[RebuildBase]:
    """The versions that this log made, newest first. What others did between them does not matter."""
    standing = (list(some) for _, some in groupby(_own_versions(place), key=lambda item: item[1].applied_position))
    newer = next(standing, None)
    while newer is not None:
        older = next(standing, None)
        first, load = newer[-1][0], newer[-1][1].applied_position.load
        landed = load is not None and (older is None or older[0][1].applied_position.load != load)
        for version, position in newer:
            recast = not position.schema.same_with_facts(newer[-1][1].schema)
            yield RebuildBase(
                version=version, commit_record=position, loaded=landed and version == first, recast=recast
            )
        newer = older


def _own_versions(place: TableLocation) -> Iterator[tuple[int, CommitRecord]]:
    if place.catalog is not None:
        said = place.catalog.metadata(place.path.absolute())
        return iter(()) if said is None else IcebergMetadata(place.path, said).own_versions(place.log_id)
    folder = find_folder(place.path.absolute())
    return iter(()) if folder is None else own_versions(folder, _open(folder).version(), place.log_id)


class DeltaTableRebuild:
    """One rebuild of one Delta table. Use it in a `with` block: nothing is left behind."""

    def __init__(self, place: TableLocation) -> None:
        self._place, self._path = place, place.path
        self._is_new = find_folder(place.path.absolute()) is None
        self._folder = make_folder(place.path.absolute())
        self._id = uuid.uuid4().hex[:12]
        self.location = replace(place, path=self._folder / REBUILT / self._id, engine="delta-rs", features=NO_FEATURES)
        """Where the new table is made, by delta-rs for every engine."""

    def __enter__(self) -> DeltaTableRebuild:
        self._clear()
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()
        if self._is_new:
            with suppress(OSError):  # it holds the table now, unless nothing came of that
                self._folder.rmdir()

    def _clear(self) -> None:
        shutil.rmtree(self._folder / REBUILT, ignore_errors=True)
        discard(self._path, PREFIX)

    def restore_base(self, base: RebuildBase) -> int:
        """Make the new table what the version was; how many rows that is."""
        folder = self._folder if base.kept_load is None else base.kept_load.folder
        table = _open(folder, base.version)
        refuse_features(self._path, table, base.commit_record.spec.partition_by)
        try:
            self.location.path.mkdir(parents=True)
            files = link_files(folder, table, self.location.path, f"base-{self._id}", copies=True)
        except OSError as error:
            raise unreadable(self._path, error) from error
        return self._land(self.location, table, base.commit_record, files, base.commit_record.applied_position)

    def swap(self, cursor: AppliedPosition) -> int:
        """Make the table the new one, at this position; how many rows it has."""
        new = _open(self.location.path)
        _, here = next(own_versions(self.location.path, new.version(), self._place.log_id))
        failpoints.hit("rebuild.replayed")
        try:
            files = link_files(self.location.path, new, self._folder, f"{PREFIX}-{self._id}", copies=True)
        except OSError as error:
            raise unreadable(self._path, error) from error
        failpoints.hit("rebuild.linked")
        return self._land(self._place, new, here, files, cursor)

    def _land(
        self,
        place: TableLocation,
        table: DeltaTable,
        was: CommitRecord,
        files: list[StagedFile],
        cursor: AppliedPosition,
    ) -> int:
        """Make files of one table all that another holds, with all that is known of them."""
        kept = retained_columns(table, place.spec.stored_schema(was.schema))
        return place.open().commit_load(
            was.schema, files, cursor, origin=origin_of(replace(was, applied_position=cursor)), kept=kept
        )


def _open(folder: Path, version: int | None = None) -> DeltaTable:
    try:
        return DeltaTable(str(folder), version=version)
    except (DeltaError, OSError) as error:
        raise unreadable(folder, error) from error
