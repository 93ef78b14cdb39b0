"""What a load made of a table, kept aside: a rebuild may start from it, whatever has become of the table's folder.

    <lake>/.tailrace/seeds/<log id>/<table>/<load id>/

A kept seed is a Delta table of one commit, whatever the table's own format is. Its files are links to those of the
version that the load landed as, and its commit is the record: columns, position, form, partitions, and the size of each
file. It has neither deletion vectors nor column mapping, whatever the table has: as a load lands them, files need
neither. So a seed is whole once its commit is there; what a crash has left without one is none, and goes with the next
that is kept. A newer one is whole before an older one goes.
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
"""The one version that a seed has."""


@dataclass(frozen=True, kw_only=True)
class KeptLoad:
    """A seed that is whole, as far as its own record tells."""

    folder: Path
    commit_record: CommitRecord

    @property
    def is_intact(self) -> bool:
        """Whether its files are there, each as long as it was."""
        try:
            adds = pa.table(DeltaTable(str(self.folder), version=KEPT_VERSION).get_add_actions(flatten=True))
            names, sizes = adds.column("path").to_pylist(), adds.column("size_bytes").to_pylist()
            found = [(self.folder / data_path(name)).stat().st_size for name in names]
        except (DeltaError, OSError):
            return False
        return bool(found == sizes)

    def drop(self) -> None:
        """Without its record it is none, whatever else is left of it."""
        with suppress(OSError):
            (self.folder / "_delta_log" / f"{KEPT_VERSION:020d}.json").unlink()
        shutil.rmtree(self.folder, ignore_errors=True)


class KeptLoadStore:
    """The seeds of the tables of one log, in one lake."""

    def __init__(self, lake: Path, log_id: str) -> None:
        self._folder, self._log_id = lake.absolute() / LINK_TARGETS / "seeds" / log_id, log_id

    def of(self, table: TableId) -> list[KeptLoad]:
        """Those of one table, the newest first; there are two only where a crash came between a new and an old one."""
        found = self._below(self._folder / table_token(table))
        return sorted(
            found,
            key=lambda seed: (seed.commit_record.applied_position.seq, seed.commit_record.applied_position.position),
            reverse=True,
        )

    def all(self) -> Iterator[KeptLoad]:
        """Those of every table."""
        for folder in _folders(self._folder):
            yield from self._below(folder)

    def keep_load(
        self,
        place: TableLocation,
        version: int,
        position: CommitRecord,
        *,
        copies: bool,
        staged: Sequence[StagedFile] = (),
    ) -> KeptLoad | None:
        """Keep a version that a load has landed as; older seeds of the table go. None, and nothing is kept: its files
        alone do not say which rows it has. An Iceberg table's are those that the load has staged.

        May be repeated. An `OSError` says why its files cannot be linked, or copied if that is wished.
        """
        load, around = position.applied_position.load, self._folder / table_token(position.schema.table)
        if load is None or not _NAME.fullmatch(load):
            raise ValueError("a load whose files are kept has a name, of letters and digits")
        found = {seed.folder.name: seed for seed in self._below(around)}
        if load not in found:
            made = self._make(place, version, position, around / load, staged, copies=copies)
            if made is None:
                return None
            found[load] = made
        for folder in _folders(around):
            if folder.name in found and folder.name != load:
                found[folder.name].drop()
            elif folder.name != load:
                shutil.rmtree(folder, ignore_errors=True)
        return found[load]

    def _make(
        self,
        place: TableLocation,
        version: int,
        position: CommitRecord,
        at: Path,
        staged: Sequence[StagedFile],
        *,
        copies: bool,
    ) -> KeptLoad | None:
        folder, table = place.path.absolute() / ICEBERG_DATA, None
        if place.catalog is None:
            found = find_folder(place.path.absolute())
            if found is None:
                raise FileNotFoundError("there is no table any more")
            folder, table = found, DeltaTable(str(found), version=version)
            if features_of(table).any and not is_readable_without_log(found, table):
                return None
        name = position.applied_position.load or ""
        shutil.rmtree(at, ignore_errors=True)  # what a crash has left
        at.mkdir(parents=True)
        try:
            if table is None:
                files = link_staged(folder, staged, at, name, copies=copies)
            else:
                files = link_files(folder, table, at, name, copies=copies)
            failpoints.hit("seed.linked")
            mine = replace(place, path=at, spec=position.spec, engine="delta-rs", features=NO_FEATURES, catalog=None)
            kept = [] if table is None else retained_columns(table, position.spec.stored_schema(position.schema))
            mine.open().commit_load(
                position.schema, files, position.applied_position, origin=origin_of(position), kept=kept
            )
        except BaseException:
            shutil.rmtree(at, ignore_errors=True)
            raise
        return KeptLoad(folder=at, commit_record=position)

    def _below(self, folder: Path) -> Iterator[KeptLoad]:
        """Seeds in a folder. One whose record cannot be read is none."""
        for one in _folders(folder):
            with suppress(TableUnusable):
                for _, position in own_versions(one, KEPT_VERSION, self._log_id):
                    yield KeptLoad(folder=one, commit_record=position)


def origin_of(position: CommitRecord) -> LoadOrigin:
    """Where the rows of a table come from that is made anew at this position."""
    cursor = position.applied_position
    return LoadOrigin(seq=cursor.seq, position=str(cursor.position), read_at=position.latest_time)


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if entry.is_dir())
    except OSError:
        return []
