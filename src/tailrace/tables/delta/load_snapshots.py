"""Keep the files of a load, for rebuilds.

    <lake>/.tailrace/seeds/<log id>/<table>/<load id>/

A rebuild can start from a kept load even if the table's folder is lost. A kept load is a Delta table of one commit,
whatever the table's own format is. Its files are links to those of the version that the load committed. Its commit is
the record: columns, position, table spec, partitions and the size of each file. It has neither deletion vectors nor
column mapping, because a load's files need neither.

So a kept load is complete once its commit exists. What a crash leaves without a commit is ignored, and removed with the
next one that is kept. A new kept load is complete before an old one is removed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from tailrace import failpoints
from tailrace.errors import TableUnusable
from tailrace.model.schema import TableId, table_token
from tailrace.tables.delta.commit_log import CommitRecord, data_path, own_versions
from tailrace.tables.delta.features import NO_FEATURES, features_of
from tailrace.tables.delta.hardlinks import link_files, link_staged
from tailrace.tables.delta.raw_commit import is_readable_without_log
from tailrace.tables.evolve.recast_columns import retained_columns
from tailrace.tables.iceberg.table import DATA as ICEBERG_DATA
from tailrace.tables.location import TableLocation
from tailrace.tables.spec import LoadOrigin
from tailrace.tables.staging import StagedFile
from tailrace.tables.table_folder import LINK_TARGETS, find_folder

_NAME = re.compile(r"[A-Za-z0-9_-]+")
KEPT_VERSION = 0
"""The one version of a kept load."""


@dataclass(frozen=True, kw_only=True)
class KeptLoad:
    """A kept load that is complete, according to its record."""

    folder: Path
    commit_record: CommitRecord

    @property
    def is_intact(self) -> bool:
        """True if its files exist, each with its recorded size."""
        try:
            adds = pa.table(DeltaTable(str(self.folder), version=KEPT_VERSION).get_add_actions(flatten=True))
            names, sizes = adds.column("path").to_pylist(), adds.column("size_bytes").to_pylist()
            actual = [(self.folder / data_path(name)).stat().st_size for name in names]
        except (DeltaError, OSError):
            return False
        return bool(actual == sizes)

    def drop(self) -> None:
        """Remove it, record first: without its record it no longer counts."""
        with suppress(OSError):
            (self.folder / "_delta_log" / f"{KEPT_VERSION:020d}.json").unlink()
        shutil.rmtree(self.folder, ignore_errors=True)


class KeptLoadStore:
    """The kept loads of one log's tables, in one lake."""

    def __init__(self, lake: Path, log_id: str) -> None:
        self._folder, self._log_id = lake.absolute() / LINK_TARGETS / "seeds" / log_id, log_id

    def of(self, table: TableId) -> list[KeptLoad]:
        """Return those of one table, newest first.

        There are two only after a crash between keeping a new one and removing the old one.
        """
        found = self._below(self._folder / table_token(table))
        return sorted(
            found,
            key=lambda kept_load: (
                kept_load.commit_record.applied_position.seq,
                kept_load.commit_record.applied_position.position,
            ),
            reverse=True,
        )

    def all(self) -> Iterator[KeptLoad]:
        """Yield those of every table."""
        for folder in _folders(self._folder):
            yield from self._below(folder)

    def keep_load(
        self,
        location: TableLocation,
        version: int,
        record: CommitRecord,
        *,
        copies: bool,
        staged: Sequence[StagedFile] = (),
    ) -> KeptLoad | None:
        """Keep the version that a load committed, and remove older kept loads of the table.

        Returns None, and keeps nothing, if the version's files alone do not say which rows it has. For an Iceberg table
        the files are those that the load has staged. May be repeated. An `OSError` says why its files cannot be linked,
        or copied if `copies` is set.
        """
        load, table_folder = record.applied_position.load, self._folder / table_token(record.schema.table)
        if load is None or not _NAME.fullmatch(load):
            raise ValueError("a kept load's id must have only letters, digits, dashes and underscores")
        found = {kept_load.folder.name: kept_load for kept_load in self._below(table_folder)}
        if load not in found:
            new = self._make(location, version, record, table_folder / load, staged, copies=copies)
            if new is None:
                return None
            found[load] = new
        for folder in _folders(table_folder):
            if folder.name in found and folder.name != load:
                found[folder.name].drop()
            elif folder.name != load:
                shutil.rmtree(folder, ignore_errors=True)
        return found[load]

    def _make(
        self,
        location: TableLocation,
        version: int,
        record: CommitRecord,
        target: Path,
        staged: Sequence[StagedFile],
        *,
        copies: bool,
    ) -> KeptLoad | None:
        folder, table = location.path.absolute() / ICEBERG_DATA, None
        if location.catalog is None:
            found = find_folder(location.path.absolute())
            if found is None:
                raise FileNotFoundError("the table no longer exists")
            folder, table = found, DeltaTable(str(found), version=version)
            if features_of(table).any and not is_readable_without_log(found, table):
                return None
        name = record.applied_position.load or ""
        shutil.rmtree(target, ignore_errors=True)  # leftovers of a crash
        target.mkdir(parents=True)
        try:
            if table is None:
                files = link_staged(folder, staged, target, name, copies=copies)
            else:
                files = link_files(folder, table, target, name, copies=copies)
            failpoints.hit("seed.linked")
            kept_location = replace(
                location, path=target, spec=record.spec, engine="delta-rs", features=NO_FEATURES, catalog=None
            )
            retained = [] if table is None else retained_columns(table, record.spec.stored_schema(record.schema))
            kept_location.open().commit_load(
                record.schema, files, record.applied_position, origin=origin_of(record), kept=retained
            )
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
        return KeptLoad(folder=target, commit_record=record)

    def _below(self, folder: Path) -> Iterator[KeptLoad]:
        """Yield the kept loads in a folder. One with an unreadable record is ignored."""
        for entry in _folders(folder):
            with suppress(TableUnusable):
                for _, record in own_versions(entry, KEPT_VERSION, self._log_id):
                    yield KeptLoad(folder=entry, commit_record=record)


def origin_of(record: CommitRecord) -> LoadOrigin:
    """Return the origin of rows that are rebuilt at this position."""
    applied = record.applied_position
    return LoadOrigin(seq=applied.seq, position=str(applied.position), read_at=record.latest_time)


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if entry.is_dir())
    except OSError:
        return []
