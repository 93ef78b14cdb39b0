"""Find what a lake table can be rebuilt from, and rebuild a Delta table.

The new table is made next to the old one, or at its path, and swapped in. (For Iceberg:
`spark/writers/iceberg_rebuild.py`.)

Invariant: the table is not touched before the one commit that swaps. After it, the table is the new one with its
position. Data files are shared, not copied. A version or a kept load is restored by links to its files. The new table
gets its files by links under names of their own. A crash before the swap leaves files that no commit names; the next
rebuild removes them.
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
    """A version of the table, or a kept load, that a rebuild may start from."""

    version: int
    commit_record: CommitRecord
    loaded: bool
    """True if it is exactly what a load committed, without later changes."""
    recast: bool
    """True if its schema differs from that of the first version at the same position."""
    kept_load: KeptLoad | None = None
    """The kept load, if it is not a version of the table."""


def rebuild_bases_with(location: TableLocation, kept_loads: list[KeptLoad]) -> Iterator[RebuildBase]:
    """Yield all bases, newest first; at the same position, the table's own version is first."""
    remaining = [
        RebuildBase(
            version=KEPT_VERSION, commit_record=kept_load.commit_record, loaded=True, recast=False, kept_load=kept_load
        )
        for kept_load in kept_loads
    ]
    for base in rebuild_bases(location):
        while remaining and not base.commit_record.applied_position.covers(remaining[0].commit_record.applied_position):
            yield remaining.pop(0)
        yield base
    yield from remaining


def rebuild_bases(location: TableLocation) -> Iterator[RebuildBase]:
    """Yield the versions that this log made, newest first. Others' changes between them do not matter."""
    groups = (list(group) for _, group in groupby(_own_versions(location), key=lambda item: item[1].applied_position))
    newer = next(groups, None)
    while newer is not None:
        older = next(groups, None)
        first, load = newer[-1][0], newer[-1][1].applied_position.load
        loaded = load is not None and (older is None or older[0][1].applied_position.load != load)
        for version, record in newer:
            recast = not record.schema.same_with_facts(newer[-1][1].schema)
            yield RebuildBase(version=version, commit_record=record, loaded=loaded and version == first, recast=recast)
        newer = older


def _own_versions(location: TableLocation) -> Iterator[tuple[int, CommitRecord]]:
    if location.catalog is not None:
        metadata = location.catalog.metadata(location.path.absolute())
        return iter(()) if metadata is None else IcebergMetadata(location.path, metadata).own_versions(location.log_id)
    folder = find_folder(location.path.absolute())
    return iter(()) if folder is None else own_versions(folder, _open(folder).version(), location.log_id)


class DeltaTableRebuild:
    """One rebuild of one Delta table. Use it in a `with` block, which removes all leftovers."""

    def __init__(self, location: TableLocation) -> None:
        self._target, self._path = location, location.path
        self._is_new = find_folder(location.path.absolute()) is None
        self._folder = make_folder(location.path.absolute())
        self._id = uuid.uuid4().hex[:12]
        self.location = replace(
            location, path=self._folder / REBUILT / self._id, engine="delta-rs", features=NO_FEATURES
        )
        """Location of the new table; delta-rs makes it for every engine."""

    def __enter__(self) -> DeltaTableRebuild:
        self._clear()
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()
        if self._is_new:
            with suppress(OSError):  # not empty if the rebuild has made the table
                self._folder.rmdir()

    def _clear(self) -> None:
        shutil.rmtree(self._folder / REBUILT, ignore_errors=True)
        discard(self._path, PREFIX)

    def restore_base(self, base: RebuildBase) -> int:
        """Make the new table what the base was; return its number of rows."""
        folder = self._folder if base.kept_load is None else base.kept_load.folder
        table = _open(folder, base.version)
        refuse_features(self._path, table, base.commit_record.spec.partition_by)
        try:
            self.location.path.mkdir(parents=True)
            files = link_files(folder, table, self.location.path, f"base-{self._id}", copies=True)
        except OSError as error:
            raise unreadable(self._path, error) from error
        return self._commit_files(self.location, table, base.commit_record, files, base.commit_record.applied_position)

    def swap(self, position: AppliedPosition) -> int:
        """Replace the table by the new one, at this position; return its number of rows."""
        new = _open(self.location.path)
        _, record = next(own_versions(self.location.path, new.version(), self._target.log_id))
        failpoints.hit("rebuild.replayed")
        try:
            files = link_files(self.location.path, new, self._folder, f"{PREFIX}-{self._id}", copies=True)
        except OSError as error:
            raise unreadable(self._path, error) from error
        failpoints.hit("rebuild.linked")
        return self._commit_files(self._target, new, record, files, position)

    def _commit_files(
        self,
        location: TableLocation,
        table: DeltaTable,
        record: CommitRecord,
        files: list[StagedFile],
        position: AppliedPosition,
    ) -> int:
        """Replace a table's contents by files of another table, with all their recorded facts."""
        retained = retained_columns(table, location.spec.stored_schema(record.schema))
        return location.open().commit_load(
            record.schema, files, position, origin=origin_of(replace(record, applied_position=position)), kept=retained
        )


def _open(folder: Path, version: int | None = None) -> DeltaTable:
    try:
        return DeltaTable(str(folder), version=version)
    except (DeltaError, OSError) as error:
        raise unreadable(folder, error) from error
