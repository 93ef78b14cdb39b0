"""An Iceberg table made anew beside itself by Spark, and swapped in: the port of `tasks/rebuild_backend.py`.

The new table lies in a folder of its own below the table's, `rebuilt/<id>/table`, and is listed in no catalog but that
folder. It begins as a copy of the table's metadata as of one snapshot: no file is copied, for metadata names files by
their whole path. What is applied to it adds snapshots, numbered on from those of the table. The swap is one commit of
the table, which takes these snapshots over; or, where there is no table, the one that lists it.

Files of the new table stay where they are: the table's snapshots name them, and whoever expires those removes them.
Until just before the swap a mark in the folder says that nobody does: what a kill has left goes with the next rebuild
if it has the mark, and is left alone if it has not.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyspark.sql import DataFrame, SparkSession

from tailrace import failpoints
from tailrace.errors import ForeignWrite
from tailrace.model import change
from tailrace.spark.writers.iceberg_writer import PROPERTIES, SparkIcebergTable
from tailrace.tables.delta.commit_log import fsync
from tailrace.tables.delta.hardlinks import link_files
from tailrace.tables.delta.load_snapshots import KeptLoad, origin_of
from tailrace.tables.delta.rebuild_table import RebuildBase
from tailrace.tables.evolve.schema_plan import Recast
from tailrace.tables.iceberg.catalogs import Catalog
from tailrace.tables.iceberg.commit_log import IcebergMetadata
from tailrace.tables.iceberg.table import METADATA, REBUILT
from tailrace.tables.location import TableLocation
from tailrace.tables.port import AppliedPosition
from tailrace.tables.table_folder import unreadable
from tailrace.tasks.apply import read_change_batches
from tailrace.tasks.fold_files import fold_range
from tailrace.tasks.rebuild_backend import FILES_REMOVED, ApplyRangeResult, RebuildSession, refuse_refetch
from tailrace.tasks.work import ApplyWork

UNFINISHED = "unfinished"
"""The mark."""


class IcebergRebuildBackend:
    """Of an Iceberg table; Spark is asked for when it is needed."""

    def __init__(self, place: TableLocation, spark: Callable[[], SparkSession]) -> None:
        self._place, self._spark = place, spark

    @cached_property
    def _table(self) -> SparkIcebergTable:
        return _opened(self._spark(), self._place)

    def why_unavailable(self, base: RebuildBase) -> str | None:
        return None if self._table.has_files(base.version) else FILES_REMOVED

    def open_rebuild(self) -> AbstractContextManager[RebuildSession]:
        return _IcebergRebuildSession(self._spark(), self._place, self._table)


class _IcebergRebuildSession:
    def __init__(self, spark: SparkSession, place: TableLocation, table: SparkIcebergTable) -> None:
        assert place.catalog is not None, "whoever calls knows"
        self._spark, self._place, self._table = spark, place, table
        self._around = place.path.absolute() / REBUILT
        self._folder = self._around / uuid.uuid4().hex[:12]
        catalog = Catalog(kind="hadoop", root=self._around, version=place.catalog.version)
        self.location = replace(place, path=self._folder / "table", catalog=catalog)
        self._seen: IcebergMetadata | None = None
        self._handed_over = False

    def __enter__(self) -> _IcebergRebuildSession:
        for left in self._around.glob(f"*/{UNFINISHED}"):
            shutil.rmtree(left.parent, ignore_errors=True)
        _write_file(self._folder / UNFINISHED, "")
        return self

    def __exit__(self, *_: object) -> None:
        if not self._handed_over:
            shutil.rmtree(self._folder, ignore_errors=True)
        for folder in (self._around, self._place.path):
            with suppress(OSError):  # it holds something, unless nothing came of it
                folder.rmdir()

    @cached_property
    def _new(self) -> SparkIcebergTable:
        return _opened(self._spark, self.location)

    def restore_base(self, base: RebuildBase) -> int:
        self._table.refuse_foreign(base.commit_record.schema.table)
        self._seen = self._table.metadata()
        version = None if base.kept_load is not None else base.version
        if self._seen is not None:
            said = self._seen.copy_as_of(version, self.location.path, self._place.spec.partition_by)
            said["properties"] |= PROPERTIES
            _write_file(self.location.path / METADATA / "v1.metadata.json", json.dumps(said))
        if base.kept_load is not None:
            self._commit_load(base.kept_load)
        return self._new.rows()

    def _commit_load(self, seed: KeptLoad) -> None:
        name = f"base-{self._folder.name}"
        try:
            files = link_files(seed.folder, DeltaTable(str(seed.folder)), self.location.staging, name, copies=True)
        except (DeltaError, OSError) as error:
            raise unreadable(seed.folder, error) from error
        position = seed.commit_record
        self._new.commit_load(position.schema, files, position.applied_position, origin=origin_of(position))
        shutil.rmtree(self.location.staging, ignore_errors=True)

    def evolve(self, recast: Recast, expected: AppliedPosition) -> None:
        self._new.evolve(recast, expected)

    def apply(self, work: ApplyWork, *, mixed: bool) -> ApplyRangeResult:
        cursor = work.position_after
        if work.until is not None:
            numbers = [batch.column(change.SEQ)[-1].as_py() for batch in read_change_batches(work, work.expected.seq)]
            if not numbers:
                return ApplyRangeResult(applied_position=work.expected, changes=0)
            cursor = replace(work.expected, seq=numbers[-1])

        def refuse(_: DataFrame) -> DataFrame:
            refuse_refetch(work.table)

        with self._new.scratch() as scratch:
            folded = fold_range(work, scratch, self._in_tasks)
            applied = self._new.apply_files(
                work.schema, folded, work.expected, cursor, touch=True, given=refuse if mixed else None
            )
        return ApplyRangeResult(applied_position=applied.applied_position, changes=folded.changes)

    def _in_tasks(self, task: Callable[[Any], Any], works: Any) -> Any:
        return self._spark.sparkContext.parallelize(works, len(works)).map(task).collect()

    def swap(self, cursor: AppliedPosition) -> int:
        self._new.set_position(cursor)
        rows = self._new.rows()
        failpoints.hit("rebuild.replayed")
        commits, seen = self._table.commits, self._seen
        if seen is None:
            commit = partial(commits.register, self._to_list())
        else:
            commit = partial(commits.take_over, seen, self._new.commits.current())
        for name in ("v*.json", "version-hint.text", ".*.crc"):  # it is no table of its own any more
            for file in (self.location.path / METADATA).glob(name):
                file.unlink()
        (self._folder / UNFINISHED).unlink()
        fsync(self._folder)
        self._handed_over = True
        failpoints.hit("rebuild.linked")
        try:
            self._table.run_swap(commit)
        except ForeignWrite:  # so that nothing of it is in the table
            self._handed_over = False
            raise
        return rows

    def _to_list(self) -> Path:
        """What a catalog is to list: the new table, as one that lies where the table is to be."""
        assert self.location.catalog is not None, "one of its own"
        said = self.location.catalog.metadata(self.location.path)
        assert said is not None, "it was begun"
        file = self.location.path / METADATA / f"00000-{uuid.uuid4()}.metadata.json"
        _write_file(file, json.dumps({**said, "location": self._table.commits.location, "metadata-log": []}))
        return file


def _write_file(file: Path, content: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        fsync(file)
    except OSError as error:
        raise unreadable(file, error) from error


def _opened(spark: SparkSession, place: TableLocation) -> SparkIcebergTable:
    assert place.catalog is not None, "whoever calls knows"
    return SparkIcebergTable(spark, place.path, place.log_id, place.catalog, place.spec, place.file_bytes)
