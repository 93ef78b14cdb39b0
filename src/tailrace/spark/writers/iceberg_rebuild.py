"""Rebuild an Iceberg table with Spark, in its own folder, and swap it in. Implements `tasks/rebuild_backend.py`.

The new table is in a folder below the table's, `rebuilt/<id>/table`, and no catalog lists it but that folder. It begins
as a copy of the table's metadata as of one snapshot. No file is copied, because metadata names files by their whole
path. Applying changes adds snapshots, numbered on from those of the table. The swap is one commit of the table, which
takes these snapshots over; where there is no table, it is the commit that lists the new one.

Files of the new table stay where they are. The table's snapshots name them, and expiring those snapshots removes them.
Until just before the swap, a marker in the folder says that no table names its files. After a kill, the next rebuild
removes the folder if it has the marker, and leaves it alone otherwise.
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
"""Name of the marker."""


class IcebergRebuildBackend:
    """The rebuild backend of an Iceberg table. It starts Spark only when it is needed."""

    def __init__(self, location: TableLocation, spark: Callable[[], SparkSession]) -> None:
        self._location, self._spark = location, spark

    @cached_property
    def _table(self) -> SparkIcebergTable:
        return _opened(self._spark(), self._location)

    def why_unavailable(self, base: RebuildBase) -> str | None:
        return None if self._table.has_files(base.version) else FILES_REMOVED

    def open_rebuild(self) -> AbstractContextManager[RebuildSession]:
        return _IcebergRebuildSession(self._spark(), self._location, self._table)


class _IcebergRebuildSession:
    def __init__(self, spark: SparkSession, location: TableLocation, table: SparkIcebergTable) -> None:
        assert location.catalog is not None, "the caller checks that"
        self._spark, self._location, self._table = spark, location, table
        self._rebuilt_folder = location.path.absolute() / REBUILT
        self._folder = self._rebuilt_folder / uuid.uuid4().hex[:12]
        catalog = Catalog(kind="hadoop", root=self._rebuilt_folder, version=location.catalog.version)
        self.location = replace(location, path=self._folder / "table", catalog=catalog)
        self._metadata: IcebergMetadata | None = None
        self._swapped = False

    def __enter__(self) -> _IcebergRebuildSession:
        for marker in self._rebuilt_folder.glob(f"*/{UNFINISHED}"):
            shutil.rmtree(marker.parent, ignore_errors=True)
        _write_file(self._folder / UNFINISHED, "")
        return self

    def __exit__(self, *_: object) -> None:
        if not self._swapped:
            shutil.rmtree(self._folder, ignore_errors=True)
        for folder in (self._rebuilt_folder, self._location.path):
            with suppress(OSError):  # it is not empty, unless the rebuild came to nothing
                folder.rmdir()

    @cached_property
    def _new(self) -> SparkIcebergTable:
        return _opened(self._spark, self.location)

    def restore_base(self, base: RebuildBase) -> int:
        self._table.refuse_foreign(base.commit_record.schema.table)
        self._metadata = self._table.metadata()
        version = None if base.kept_load is not None else base.version
        if self._metadata is not None:
            document = self._metadata.copy_as_of(version, self.location.path, self._location.spec.partition_by)
            document["properties"] |= PROPERTIES
            _write_file(self.location.path / METADATA / "v1.metadata.json", json.dumps(document))
        if base.kept_load is not None:
            self._commit_load(base.kept_load)
        return self._new.rows()

    def _commit_load(self, kept_load: KeptLoad) -> None:
        name = f"base-{self._folder.name}"
        try:
            files = link_files(
                kept_load.folder, DeltaTable(str(kept_load.folder)), self.location.staging, name, copies=True
            )
        except (DeltaError, OSError) as error:
            raise unreadable(kept_load.folder, error) from error
        record = kept_load.commit_record
        self._new.commit_load(record.schema, files, record.applied_position, origin=origin_of(record))
        shutil.rmtree(self.location.staging, ignore_errors=True)

    def evolve(self, recast: Recast, expected: AppliedPosition) -> None:
        self._new.evolve(recast, expected)

    def apply(self, work: ApplyWork, *, mixed: bool) -> ApplyRangeResult:
        reached = work.position_after
        if work.until is not None:
            numbers = [batch.column(change.SEQ)[-1].as_py() for batch in read_change_batches(work, work.expected.seq)]
            if not numbers:
                return ApplyRangeResult(applied_position=work.expected, changes=0)
            reached = replace(work.expected, seq=numbers[-1])

        def refuse(_: DataFrame) -> DataFrame:
            refuse_refetch(work.table)

        with self._new.scratch() as scratch:
            folded = fold_range(work, scratch, self._in_tasks)
            applied = self._new.apply_files(
                work.schema, folded, work.expected, reached, touch=True, refetch=refuse if mixed else None
            )
        return ApplyRangeResult(applied_position=applied.applied_position, changes=folded.changes)

    def _in_tasks(self, task: Callable[[Any], Any], works: Any) -> Any:
        return self._spark.sparkContext.parallelize(works, len(works)).map(task).collect()

    def swap(self, position: AppliedPosition) -> int:
        self._new.set_position(position)
        rows = self._new.rows()
        failpoints.hit("rebuild.replayed")
        commits, seen = self._table.commits, self._metadata
        if seen is None:
            commit = partial(commits.register, self._metadata_to_register())
        else:
            commit = partial(commits.take_over, seen, self._new.commits.current())
        for name in ("v*.json", "version-hint.text", ".*.crc"):  # the new table is no table of its own any more
            for file in (self.location.path / METADATA).glob(name):
                file.unlink()
        (self._folder / UNFINISHED).unlink()
        fsync(self._folder)
        self._swapped = True
        failpoints.hit("rebuild.linked")
        try:
            self._table.run_swap(commit)
        except ForeignWrite:  # nothing of the new table is in the table
            self._swapped = False
            raise
        return rows

    def _metadata_to_register(self) -> Path:
        """Return the metadata file for the catalog. It describes the new table at its final location."""
        assert self.location.catalog is not None, "one of its own"
        document = self.location.catalog.metadata(self.location.path)
        assert document is not None, "the rebuild has begun"
        file = self.location.path / METADATA / f"00000-{uuid.uuid4()}.metadata.json"
        _write_file(file, json.dumps({**document, "location": self._table.commits.location, "metadata-log": []}))
        return file


def _write_file(file: Path, content: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        fsync(file)
    except OSError as error:
        raise unreadable(file, error) from error


def _opened(spark: SparkSession, location: TableLocation) -> SparkIcebergTable:
    assert location.catalog is not None, "the caller checks that"
    return SparkIcebergTable(
        spark, location.path, location.log_id, location.catalog, location.spec, location.file_bytes
    )
