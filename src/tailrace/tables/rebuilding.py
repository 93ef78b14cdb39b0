"""A lake table made anew beside itself, and swapped in.

What must stay true: until the one commit that swaps, the table is not touched, and after it the table is the new one
with its position. Data files are shared, not copied: a version is made again by links to its files, and the new table
takes its files over by links, under names of their own. What dies before the swap leaves files that no commit names;
the next rebuild removes them.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from tailrace import failpoints
from tailrace.errors import TableUnusable
from tailrace.tables.base import Cursor
from tailrace.tables.deltalog import (
    REPLACE_HINT,
    Position,
    data_path,
    fsync,
    own_versions,
    stats_of,
    sync_folders,
)
from tailrace.tables.deltashape import parts_of, refuse_features
from tailrace.tables.features import PLAIN_FILES
from tailrace.tables.folder import find_folder, unreadable
from tailrace.tables.forms import Origin
from tailrace.tables.layout import Place
from tailrace.tables.partitions import folder_of, texts_of
from tailrace.tables.recast import kept_columns
from tailrace.tables.staging import StagedFile, discard

FOLDER, PREFIX = "_rebuild", "rebuild"
"""Readers and writers of Delta tables pass over a folder whose name begins so."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """A version of the table that a rebuild may start from."""

    version: int
    position: Position
    loaded: bool
    """Whether it is what a load has landed, and no change more."""
    recast: bool
    """Whether it has another shape than the first version that stood where it does."""


def bases(place: Place) -> Iterator[Base]:
    """The versions that this log made, newest first. What others did between them does not matter."""
    folder = _folder(place.path)
    found = own_versions(folder, _open(folder).version(), place.log_id)
    standing = (list(some) for _, some in groupby(found, key=lambda item: item[1].cursor))
    newer = next(standing, None)
    while newer is not None:
        older = next(standing, None)
        first, load = newer[-1][0], newer[-1][1].cursor.load
        landed = load is not None and (older is None or older[0][1].cursor.load != load)
        for version, position in newer:
            recast = not position.schema.same_as(newer[-1][1].schema)
            yield Base(version=version, position=position, loaded=landed and version == first, recast=recast)
        newer = older


class Rebuilding:
    """One rebuild of one table. Use it in a `with` block: nothing is left behind."""

    def __init__(self, place: Place) -> None:
        self._place, self._path = place, place.path
        self._folder = _folder(place.path)
        self._id = uuid.uuid4().hex[:12]
        self.made_at = replace(
            place, path=self._folder / FOLDER / self._id, engine="delta-rs", features=PLAIN_FILES
        )
        """Where the new table is made, by delta-rs for every engine."""

    def __enter__(self) -> Rebuilding:
        self._clear()
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()

    def _clear(self) -> None:
        shutil.rmtree(self._folder / FOLDER, ignore_errors=True)
        discard(self._path, PREFIX)

    def begin(self, base: Base) -> int:
        """Make the new table what the version was; how many rows that is."""
        table = _open(self._folder, base.version)
        refuse_features(self._path, table, base.position.form.partition_by)
        try:
            self.made_at.path.mkdir(parents=True)
            files = _linked(self._folder, table, self.made_at.path, f"base-{self._id}")
        except OSError as error:
            raise unreadable(self._path, error) from error
        return self._land(self.made_at, table, base.position, files, base.position.cursor)

    def swap(self, cursor: Cursor) -> int:
        """Make the table the new one, at this position; how many rows it has."""
        new = _open(self.made_at.path)
        _, here = next(own_versions(self.made_at.path, new.version(), self._place.log_id))
        failpoints.hit("rebuild.replayed")
        try:
            files = _linked(self.made_at.path, new, self._folder, f"{PREFIX}-{self._id}")
        except OSError as error:
            raise unreadable(self._path, error) from error
        failpoints.hit("rebuild.linked")
        return self._land(self._place, new, here, files, cursor)

    def _land(
        self, place: Place, table: DeltaTable, was: Position, files: list[StagedFile], cursor: Cursor
    ) -> int:
        """Make files of one table all that another holds, with all that is known of them."""
        kept = kept_columns(table, place.form.stored(was.schema))
        origin = Origin(seq=cursor.seq, position=str(cursor.position), read_at=was.clock)
        return place.open().land(was.schema, files, cursor, origin=origin, kept=kept)


def _folder(path: Path) -> Path:
    folder = find_folder(path.absolute())
    if folder is None:
        raise TableUnusable("there is no lake table to rebuild", path=path, hint=REPLACE_HINT)
    return folder


def _open(folder: Path, version: int | None = None) -> DeltaTable:
    try:
        return DeltaTable(str(folder), version=version)
    except (DeltaError, OSError) as error:
        raise unreadable(folder, error) from error


def _linked(folder: Path, table: DeltaTable, into: Path, name: str) -> list[StagedFile]:
    """The table's files under new names in another folder."""
    adds = pa.table(table.get_add_actions(flatten=True))
    names = [data_path(path) for path in adds.column("path").to_pylist()]
    parts = parts_of(table)
    stats = stats_of(folder, table.version(), set(names))
    rows = adds.column("num_records").to_pylist()
    made = []
    for number, (old, count) in enumerate(zip(names, rows, strict=True)):
        values = texts_of(parts.get(old, {}))
        new = str(Path(folder_of(values)) / f"part-{name}-{number:06d}.parquet")
        (into / new).parent.mkdir(parents=True, exist_ok=True)
        _link(folder / old, into / new)
        counted, size = json.dumps({"numRecords": count}), (into / new).stat().st_size
        made.append(StagedFile(path=new, size=size, rows=count, stats=stats.get(old, counted), values=values))
    sync_folders(into, [file.path for file in made])
    return made


def _link(old: Path, new: Path) -> None:
    """A second name, or a copy where the file system has none."""
    try:
        os.link(old, new)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(old, new)
        fsync(new)
