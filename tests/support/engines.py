"""Lake tables of the engine under test: delta-rs, or by `TAILRACE_TEST_ENGINE` Spark's Delta connector (`spark`) or its
Iceberg connector (`iceberg`).

The same tests hold all to the same promises. `tools/engines.py` runs them with the others, each in an environment of
its own: there is no connector for the Spark that everything else is tested with. What a table holds is read by somebody
else than the engine: delta-rs, or pyiceberg.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tailrace.tables.catalogs import Catalog, newest_file
from tailrace.tables.delta import DeltaRsTable
from tailrace.tables.features import Features
from tailrace.tables.forms import DELETED, ICEBERG_DELETED, PLAIN, Form
from tailrace.tables.iceberg import STAGED, IcebergTable
from tailrace.tables.iceberglog import Metadata
from tailrace.tables.layout import Place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tailrace.spark.delta_engine import SparkDeltaTable
    from tailrace.spark.driving import SparkEngine
    from tailrace.spark.iceberg_engine import SparkIcebergTable

    AnyTable = DeltaRsTable | SparkDeltaTable | SparkIcebergTable

ENGINE = os.environ.get("TAILRACE_TEST_ENGINE", "delta-rs")
IS_ICEBERG = ENGINE == "iceberg"
IS_SPARK = ENGINE == "spark" or IS_ICEBERG
"""Whether a commit is several jobs, and takes seconds."""
FEATURES_SAID = os.environ.get("TAILRACE_TEST_FEATURES", "").split()
"""What tables are made with, by the names of the settings; only Spark's connector writes them."""
FEATURES = Features(**dict.fromkeys(FEATURES_SAID, True))
only_spark = pytest.mark.skipif(ENGINE != "spark", reason="needs Spark's Delta connector: `make engines` runs it")
only_iceberg = pytest.mark.skipif(not IS_ICEBERG, reason="needs Spark's Iceberg connector: `make engines` runs it")
only_delta = pytest.mark.skipif(IS_ICEBERG, reason="of Delta tables alone")
not_spark = pytest.mark.skipif(IS_SPARK, reason="of delta-rs alone")


def examples(count: int) -> int:
    """How many a property is tried with: a merge by Spark takes seconds."""
    return max(2, count // 8) if IS_SPARK else count


FORMAT = "iceberg" if IS_ICEBERG else "delta"
MARK = ICEBERG_DELETED if IS_ICEBERG else DELETED
"""The column of marked deletes."""


def form_here(form: Form) -> Form:
    """The form, as settings would have it for the engine under test."""
    if not form.soft_delete:
        return form
    return replace(form, mark=MARK, partition_by=tuple(MARK if n == DELETED else n for n in form.partition_by))


def open_table(path: Path, log_id: str, form: Form = PLAIN, features: Features = FEATURES) -> AnyTable:
    """A lake table of the engine under test."""
    form = form_here(form)
    if not IS_SPARK:
        return DeltaRsTable(path, log_id, form)
    if IS_ICEBERG:
        from tailrace.spark.iceberg_engine import SparkIcebergTable

        return SparkIcebergTable(session(), path, log_id, folder_catalog(path), form)
    from tailrace.spark.delta_engine import SparkDeltaTable

    return SparkDeltaTable(session(), path, log_id, form, features)


def iceberg_table(place: Place) -> SparkIcebergTable:
    """An Iceberg table of a pipeline's."""
    from tailrace.spark.iceberg_engine import SparkIcebergTable

    assert place.catalog is not None
    return SparkIcebergTable(session(), place.path, place.log_id, place.catalog, place.form)


def folder_catalog(path: Path) -> Catalog:
    """The plainest catalog of a table that lies here."""
    return Catalog(kind="hadoop", root=path.absolute().parent.parent)


def rows_of(folder: Path) -> pa.Table:
    """What a table holds, as somebody else reads it; the column of marks has one name here."""
    if not IS_ICEBERG:
        return pa.table(DeltaTable(str(folder.resolve())).scan())
    from pyiceberg.table import StaticTable

    found = StaticTable.from_metadata(str(newest_file(folder / "metadata"))).scan().to_arrow()
    return found.rename_columns([DELETED if name == MARK else name for name in found.column_names])


def spark_rows(folder: Path) -> pa.Table:
    """The same, as Spark reads it."""
    if not IS_ICEBERG:
        return pa.table(session().read.format("delta").load(str(folder)).toArrow())
    spark = session().newSession()
    spark.conf.set("spark.sql.catalog.other", "org.apache.iceberg.spark.SparkCatalog")
    spark.conf.set("spark.sql.catalog.other.type", "hadoop")
    spark.conf.set("spark.sql.catalog.other.warehouse", str(folder_catalog(folder).root))
    return pa.table(spark.table(f"other.`{folder.parent.name}`.`{folder.name}`").toArrow())


def metadata_of(folder: Path) -> Metadata:
    """What an Iceberg table says of itself."""
    found = IcebergTable(folder, "", folder_catalog(folder)).metadata()
    assert found is not None
    return found


def partitions_of(folder: Path) -> dict[Path, dict[str, object]]:
    """The data files of an Iceberg table, and the values that it says they are of."""
    from pyiceberg.table import StaticTable

    found = StaticTable.from_metadata(str(newest_file(folder / "metadata"))).inspect.data_files()
    return {Path(file["file_path"]): file["partition"] for file in found.to_pylist()}


def commits_of(folder: Path) -> int:
    """How many commits a table has had since it was made."""
    if not IS_ICEBERG:
        return DeltaTable(str(folder.resolve())).version()
    return len(history_of(metadata_of(folder))) - 1


def history_of(metadata: Metadata) -> list[int]:
    """The snapshots that the newest came from, and itself."""
    parents = {item["snapshot-id"]: item.get("parent-snapshot-id") for item in metadata.said["snapshots"]}
    found, number = list[int](), metadata.snapshot
    while number is not None:
        found, number = [number, *found], parents.get(number)
    return found


def staging(folder: Path) -> Path:
    """Where files of a load are staged."""
    return folder / STAGED if IS_ICEBERG else folder


def engine_lines() -> str:
    """What settings say below `tables:` for the engine under test."""
    if IS_ICEBERG:
        return "  format: iceberg\n"
    said = "".join(f"  {name}: true\n" for name in FEATURES_SAID)
    return f"  engine: spark\n{said}" if IS_SPARK else ""


@functools.cache
def spark_engine() -> SparkEngine:
    """What does the work of its tables."""
    from tailrace.spark.driving import SparkEngine

    return SparkEngine(session(), Catalog(kind="hadoop", root=Path("/")) if IS_ICEBERG else None)


@functools.cache
def session() -> SparkSession:
    """One Spark with the connector for the whole process."""
    from tailrace.spark.connector import connector_settings, iceberg_settings
    from tailrace.spark.session import Jvm

    scratch = Path(tempfile.mkdtemp(prefix="tailrace-engine-"))
    lite = Catalog(kind="jdbc", root=Path("/"), uri="jdbc:sqlite:")  # so that its driver is there
    settings = iceberg_settings({}, lite) if IS_ICEBERG else connector_settings({})
    jvm = Jvm("tests", scratch, scratch / "spark.log", settings=settings)
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    atexit.register(jvm.kill)
    return jvm.open_session()
