"""How the lake is laid out: which table of the source becomes which table of the lake, and how that is opened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tailrace.model.schema import TableId
from tailrace.tables.delta.commit_log import stands_at
from tailrace.tables.delta.features import PLAIN_FILES, Features
from tailrace.tables.delta.table import DeltaRsTable
from tailrace.tables.iceberg.catalogs import Catalog
from tailrace.tables.iceberg.table import STAGED, IcebergTable
from tailrace.tables.spec import PLAIN, Form
from tailrace.tables.staging import FILE_BYTES
from tailrace.tables.table_folder import find_folder
from tailrace.tables.table_paths import TEMPLATE, table_path

Engine = Literal["delta-rs", "spark"]
"""Who writes rows: delta-rs, on one machine, or Spark's Delta connector."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One lake table of one change log. Plain data: Spark may send it to its workers."""

    path: Path
    log_id: str
    form: Form = PLAIN
    engine: Engine = "delta-rs"
    features: Features = PLAIN_FILES
    """What it gets when it is loaded; only Spark's connector can write it then."""
    catalog: Catalog | None = None
    """Of an Iceberg table; None: it is a Delta table."""
    file_bytes: int = FILE_BYTES
    """The size of file that is aimed at."""

    @property
    def staging(self) -> Path:
        """The folder of files that a load writes, before they are part of the table."""
        return self.path if self.catalog is None else self.path / STAGED

    def open(self) -> DeltaRsTable:
        """The Delta table, whether it is there or not. What needs no rows is the same for every engine; with another
        than delta-rs, work that changes rows is done by `spark/writers/engine.py`."""
        assert self.catalog is None, "an Iceberg table's commits are made by Spark"
        features = self.features if self.engine == "spark" else None
        return DeltaRsTable(self.path, self.log_id, self.form, features, self.file_bytes)

    def look(self) -> DeltaRsTable | IcebergTable:
        """The table, to be asked where it stands."""
        if self.catalog is None:
            return self.open()
        return IcebergTable(self.path, self.log_id, self.catalog, self.form)

    def stands_at(self, version: int) -> bool:
        """Whether this is certainly the table's newest version; a cheap question, and of Delta tables only."""
        folder = find_folder(self.path) if self.catalog is None else None
        return folder is not None and stands_at(folder, version)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the tables of one pipeline lie."""

    root: Path
    form_of: Callable[[TableId], Form] = lambda _: PLAIN
    """What each table is to be,"""
    name_of: Callable[[TableId], str] = lambda _: TEMPLATE
    """and the template of its folder."""
    pipeline: str = ""
    engine: Engine = "delta-rs"
    features_of: Callable[[TableId], Features] = lambda _: PLAIN_FILES
    catalog: Catalog | None = None
    file_bytes: int = FILE_BYTES

    def place(self, table: TableId, log_id: str) -> Place:
        """Of one table; refuses a name that no folder can have."""
        return Place(
            path=self.path(table),
            log_id=log_id,
            form=self.form_of(table),
            engine=self.engine,
            features=self.features_of(table),
            catalog=self.catalog,
            file_bytes=self.file_bytes,
        )

    def path(self, table: TableId) -> Path:
        """The folder of one table."""
        return table_path(self.root, table, self.name_of(table), self.pipeline)
