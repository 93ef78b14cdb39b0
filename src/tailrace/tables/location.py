"""Lay out the lake. Decides which lake table belongs to a source table, and opens it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tailrace.model.schema import TableId
from tailrace.tables.delta.commit_log import is_newest_version
from tailrace.tables.delta.features import NO_FEATURES, Features
from tailrace.tables.delta.table import DeltaRsTable
from tailrace.tables.iceberg.catalogs import Catalog
from tailrace.tables.iceberg.table import STAGED, IcebergTable
from tailrace.tables.spec import PLAIN_MIRROR, TableSpec
from tailrace.tables.staging import FILE_BYTES
from tailrace.tables.table_folder import find_folder
from tailrace.tables.table_paths import TEMPLATE, table_path

Engine = Literal["delta-rs", "spark"]
"""The writer of rows: delta-rs, on one machine, or one of Spark's connectors."""


@dataclass(frozen=True, kw_only=True)
class TableLocation:
    """Location of one lake table of one change log. Plain data: Spark may send it to its workers."""

    path: Path
    log_id: str
    spec: TableSpec = PLAIN_MIRROR
    engine: Engine = "delta-rs"
    features: Features = NO_FEATURES
    """Features that a load gives the table. Then only Spark's connector can write it."""
    catalog: Catalog | None = None
    """Catalog of an Iceberg table; None for a Delta table."""
    file_bytes: int = FILE_BYTES
    """Target size of a data file."""

    @property
    def staging(self) -> Path:
        """The folder for files of a load that are not part of the table yet."""
        return self.path if self.catalog is None else self.path / STAGED

    def open(self) -> DeltaRsTable:
        """Return the Delta table, whether it exists or not.

        Work that needs no rows is the same for every engine. With Spark, work that changes rows is done by
        `spark/writers/engine.py`.
        """
        assert self.catalog is None, "an Iceberg table's commits are made by Spark"
        features = self.features if self.engine == "spark" else None
        return DeltaRsTable(self.path, self.log_id, self.spec, features, self.file_bytes)

    def open_for_reading(self) -> DeltaRsTable | IcebergTable:
        """Return the table for reading its state only."""
        if self.catalog is None:
            return self.open()
        return IcebergTable(self.path, self.log_id, self.catalog, self.spec)

    def is_newest_version(self, version: int) -> bool:
        """Return whether this is certainly the table's newest version.

        A cheap check, for Delta tables only.
        """
        folder = find_folder(self.path) if self.catalog is None else None
        return folder is not None and is_newest_version(folder, version)


@dataclass(frozen=True, kw_only=True)
class LakeLayout:
    """The layout of one pipeline's lake tables."""

    root: Path
    spec_of: Callable[[TableId], TableSpec] = lambda _: PLAIN_MIRROR
    """Return the table spec of a source table."""
    path_template_of: Callable[[TableId], str] = lambda _: TEMPLATE
    """Return the template of a source table's folder."""
    pipeline: str = ""
    engine: Engine = "delta-rs"
    features_of: Callable[[TableId], Features] = lambda _: NO_FEATURES
    catalog: Catalog | None = None
    file_bytes: int = FILE_BYTES

    def location(self, table: TableId, log_id: str) -> TableLocation:
        """Return one table's location; refuse a name that no folder can have."""
        return TableLocation(
            path=self.path(table),
            log_id=log_id,
            spec=self.spec_of(table),
            engine=self.engine,
            features=self.features_of(table),
            catalog=self.catalog,
            file_bytes=self.file_bytes,
        )

    def path(self, table: TableId) -> Path:
        """Return the folder of one table."""
        return table_path(self.root, table, self.path_template_of(table), self.pipeline)
