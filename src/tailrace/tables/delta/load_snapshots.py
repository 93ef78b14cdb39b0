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
from tailrace.changelog.format.coverage import token
from tailrace.errors import TableUnusable
from tailrace.model.schema import TableId
from tailrace.tables.delta.commit_log import Position, data_path, own_versions
from tailrace.tables.delta.features import PLAIN_FILES, features_of
from tailrace.tables.delta.hardlinks import link_files, link_staged
from tailrace.tables.delta.raw_commit import files_tell_all
from tailrace.tables.evolve.recast_columns import kept_columns
from tailrace.tables.iceberg.table import DATA as ICEBERG_DATA
from tailrace.tables.location import Place
from tailrace.tables.spec import Origin
from tailrace.tables.staging import StagedFile
from tailrace.tables.table_folder import ASIDE, find_folder

_NAME = re.compile(r"[A-Za-z0-9_-]+")
ONLY = 0
"""The one version that a seed has."""


@dataclass(frozen=True, kw_only=True)
class KeptSeed:
    """A seed that is whole, as far as its own record tells."""

    folder: Path
    position: Position

    @property
    def sound(self) -> bool:
        """Whether its files are there, each as long as it was."""
        try:
            adds = pa.table(DeltaTable(str(self.folder), version=ONLY).get_add_actions(flatten=True))
            names, sizes = adds.column("path").to_pylist(), adds.column("size_bytes").to_pylist()
            found = [(self.folder / data_path(name)).stat().st_size for name in names]
        except (DeltaError, OSError):
            return False
        return bool(found == sizes)

    def drop(self) -> None:
        """Without its record it is none, whatever else is left of it."""
        with suppress(OSError):
            (self.folder / "_delta_log" / f"{ONLY:020d}.json").unlink()
        shutil.rmtree(self.folder, ignore_errors=True)


class KeptSeeds:
    """The seeds of the tables of one log, in one lake."""

    def __init__(self, lake: Path, log_id: str) -> None:
        self._folder, self._log_id = lake.absolute() / ASIDE / "seeds" / log_id, log_id

    def of(self, table: TableId) -> list[KeptSeed]:
        """Those of one table, the newest first; there are two only where a crash came between a new and an old one."""
        found = self._below(self._folder / token(table))
        return sorted(found, key=lambda seed: (seed.position.cursor.seq, seed.position.cursor.position), reverse=True)

    def all(self) -> Iterator[KeptSeed]:
        """Those of every table."""
        for folder in _folders(self._folder):
            yield from self._below(folder)

    def keep(
        self, place: Place, version: int, position: Position, *, copies: bool, staged: Sequence[StagedFile] = ()
    ) -> KeptSeed | None:
        """Keep a version that a load has landed as; older seeds of the table go. None, and nothing is kept: its files
        alone do not say which rows it has. An Iceberg table's are those that the load has staged.

        May be repeated. An `OSError` says why its files cannot be linked, or copied if that is wished.
        """
        load, around = position.cursor.load, self._folder / token(position.schema.table)
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
        self, place: Place, version: int, position: Position, at: Path, staged: Sequence[StagedFile], *, copies: bool
    ) -> KeptSeed | None:
        folder, table = place.path.absolute() / ICEBERG_DATA, None
        if place.catalog is None:
            found = find_folder(place.path.absolute())
            if found is None:
                raise FileNotFoundError("there is no table any more")
            folder, table = found, DeltaTable(str(found), version=version)
            if features_of(table).any and not files_tell_all(found, table):
                return None
        name = position.cursor.load or ""
        shutil.rmtree(at, ignore_errors=True)  # what a crash has left
        at.mkdir(parents=True)
        try:
            if table is None:
                files = link_staged(folder, staged, at, name, copies=copies)
            else:
                files = link_files(folder, table, at, name, copies=copies)
            failpoints.hit("seed.linked")
            mine = replace(place, path=at, form=position.form, engine="delta-rs", features=PLAIN_FILES, catalog=None)
            kept = [] if table is None else kept_columns(table, position.form.stored(position.schema))
            mine.open().land(position.schema, files, position.cursor, origin=origin_of(position), kept=kept)
        except BaseException:
            shutil.rmtree(at, ignore_errors=True)
            raise
        return KeptSeed(folder=at, position=position)

    def _below(self, folder: Path) -> Iterator[KeptSeed]:
        """Seeds in a folder. One whose record cannot be read is none."""
        for one in _folders(folder):
            with suppress(TableUnusable):
                for _, position in own_versions(one, ONLY, self._log_id):
                    yield KeptSeed(folder=one, position=position)


def origin_of(position: Position) -> Origin:
    """Where the rows of a table come from that is made anew at this position."""
    cursor = position.cursor
    return Origin(seq=cursor.seq, position=str(cursor.position), read_at=position.clock)


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if entry.is_dir())
    except OSError:
        return []
