"""Lake tables of the engine under test: delta-rs, or by `TAILRACE_TEST_ENGINE` Spark's Delta connector (`spark`) or its
Iceberg connector (`iceberg`).

The same tests hold all to the same promises. `tools/engines.py` runs them with the others, each in an environment of
its own: there is no connector for the Spark that everything else is tested with. What a table holds is read by somebody
else than the engine: delta-rs, or pyiceberg.

Iceberg tables list themselves, or by `TAILRACE_TEST_CATALOG` are listed in a database of SQLite (`jdbc`) or by a server
(`rest`). That is one list for the whole process, wherever tests put their tables.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import sqlite3
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tailrace.tables.delta.features import Features
from tailrace.tables.delta.table import DeltaRsTable
from tailrace.tables.iceberg.catalogs import Catalog, CatalogKind, local_path, newest_file
from tailrace.tables.iceberg.commit_log import IcebergMetadata
from tailrace.tables.iceberg.table import DATA, STAGED, IcebergTable
from tailrace.tables.location import TableLocation
from tailrace.tables.spec import DELETED, ICEBERG_DELETED, PLAIN_MIRROR, TableSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tailrace.spark.writers.delta_writer import SparkDeltaTable
    from tailrace.spark.writers.engine import SparkEngine
    from tailrace.spark.writers.iceberg_writer import SparkIcebergTable

    AnyTable = DeltaRsTable | SparkDeltaTable | SparkIcebergTable

ENGINE = os.environ.get("TAILRACE_TEST_ENGINE", "delta-rs")
IS_ICEBERG = ENGINE == "iceberg"
IS_SPARK = ENGINE == "spark" or IS_ICEBERG
"""Whether a commit is several jobs, and takes seconds."""
FEATURES_SAID = os.environ.get("TAILRACE_TEST_FEATURES", "").split()
"""What tables are made with, by the names of the settings; only Spark's connector writes them."""
FEATURES = Features(**dict.fromkeys(FEATURES_SAID, True))
CATALOG = cast("CatalogKind", os.environ.get("TAILRACE_TEST_CATALOG", "hadoop"))
LIST = "catalog.db"
"""The file of a database that lists tables, whoever is asked for it."""
only_spark = pytest.mark.skipif(ENGINE != "spark", reason="needs Spark's Delta connector: `make engines` runs it")
only_iceberg = pytest.mark.skipif(not IS_ICEBERG, reason="needs Spark's Iceberg connector: `make engines` runs it")
only_connectors = pytest.mark.skipif(not IS_SPARK, reason="needs one of Spark's connectors: `make engines` runs it")
not_spark = pytest.mark.skipif(IS_SPARK, reason="of delta-rs alone")


def of_delta(why: str) -> pytest.MarkDecorator:
    """What is no promise of every table, and why."""
    return pytest.mark.skipif(IS_ICEBERG, reason=f"of Delta tables alone: {why}")


def examples(count: int) -> int:
    """How many a property is tried with: a merge by Spark takes seconds."""
    return max(2, count // 8) if IS_SPARK else count


FORMAT = "iceberg" if IS_ICEBERG else "delta"
MARK = ICEBERG_DELETED if IS_ICEBERG else DELETED
"""The column of marked deletes."""


def form_here(form: TableSpec) -> TableSpec:
    """The form, as settings would have it for the engine under test."""
    if not form.soft_delete:
        return form
    return replace(
        form, deleted_column=MARK, partition_by=tuple(MARK if n == DELETED else n for n in form.partition_by)
    )


def open_table(path: Path, log_id: str, form: TableSpec = PLAIN_MIRROR, features: Features = FEATURES) -> AnyTable:
    """A lake table of the engine under test."""
    form = form_here(form)
    if not IS_SPARK:
        return DeltaRsTable(path, log_id, form)
    if IS_ICEBERG:
        from tailrace.spark.writers.iceberg_writer import SparkIcebergTable

        return SparkIcebergTable(session(), path, log_id, catalog_of(path), form)
    from tailrace.spark.writers.delta_writer import SparkDeltaTable

    return SparkDeltaTable(session(), path, log_id, form, features)


def place_of(path: Path, log_id: str, form: TableSpec = PLAIN_MIRROR) -> TableLocation:
    """The same table, as a pipeline hands it out with work."""
    place = TableLocation(path=path, log_id=log_id, spec=form_here(form))
    if IS_ICEBERG:
        return replace(place, catalog=catalog_of(path))
    return replace(place, engine="spark", features=FEATURES) if IS_SPARK else place


def iceberg_table(place: TableLocation) -> SparkIcebergTable:
    """An Iceberg table of a pipeline's."""
    from tailrace.spark.writers.iceberg_writer import SparkIcebergTable

    assert place.catalog is not None
    return SparkIcebergTable(session(), place.path, place.log_id, place.catalog, place.spec)


def catalog_of(path: Path) -> Catalog:
    """Of the Iceberg table that lies here."""
    root = path.absolute().parent.parent
    return Catalog(kind="hadoop", root=root) if CATALOG == "hadoop" else Catalog(kind=CATALOG, root=root, uri=_uri())


@functools.cache
def _uri() -> str:
    """Of what lists all tables."""
    if CATALOG == "jdbc":
        return f"jdbc:sqlite:{_scratch() / LIST}"
    from tests.support.rest_catalog import rest_catalog

    server = rest_catalog(session(), _scratch() / LIST)
    uri = server.__enter__()
    atexit.register(server.__exit__, None, None, None)
    return uri


def rows_of(folder: Path) -> pa.Table:
    """What a table holds, as somebody else reads it; the column of marks has one name here."""
    if not IS_ICEBERG:
        return pa.table(DeltaTable(str(folder.resolve())).scan())
    from pyiceberg.table import StaticTable

    found = StaticTable.from_metadata(str(metadata_file(folder))).scan().to_arrow()
    return found.rename_columns([DELETED if name == MARK else name for name in found.column_names])


def spark_rows(folder: Path) -> pa.Table:
    """The same, as Spark reads it."""
    if not IS_ICEBERG:
        return pa.table(session().read.format("delta").load(str(folder)).toArrow())
    spark, catalog = others_session(folder)
    return pa.table(spark.table(f"{catalog}.`{folder.parent.name}`.`{folder.name}`").toArrow())


def others_session(folder: Path) -> tuple[SparkSession, str]:
    """A session that knows the catalog of an Iceberg table as somebody else would, and what it is called there."""
    spark, catalog = session().newSession(), catalog_of(folder)
    # The list that a database has says by which name, so that there is no other.
    called = "tailrace" if CATALOG == "jdbc" else "other"
    said = {
        "hadoop": {"warehouse": str(catalog.root)},
        "jdbc": {"warehouse": str(catalog.root), "uri": catalog.uri, "jdbc.schema-version": "V1"},
        "rest": {"uri": catalog.uri},
    }
    spark.conf.set(f"spark.sql.catalog.{called}", "org.apache.iceberg.spark.SparkCatalog")
    for name, value in {"type": CATALOG, **said[CATALOG]}.items():
        spark.conf.set(f"spark.sql.catalog.{called}.{name}", value)
    return spark, called


def metadata_file(folder: Path) -> Path:
    """What the newest commit of an Iceberg table wrote last."""
    if CATALOG == "hadoop":
        found = newest_file(folder / "metadata")
        assert found is not None
        return found
    asked = "select metadata_location from iceberg_tables where table_namespace = ? and table_name = ?"
    with contextlib.closing(sqlite3.connect(_scratch() / LIST)) as lite:
        (location,) = lite.execute(asked, (folder.parent.name, folder.name)).fetchone()
    return local_path(location)


def metadata_of(folder: Path) -> IcebergMetadata:
    """What an Iceberg table says of itself."""
    found = IcebergTable(folder, "", catalog_of(folder)).metadata()
    assert found is not None
    return found


def partitions_of(folder: Path) -> dict[Path, dict[str, object]]:
    """The data files of an Iceberg table, and the values that it says they are of."""
    from pyiceberg.table import StaticTable

    table = StaticTable.from_metadata(str(metadata_file(folder)))
    snapshot = table.current_snapshot()
    if snapshot is None or not snapshot.manifests(table.io):
        return {}  # pyiceberg cannot show the files of a table that has none
    found = table.inspect.data_files()
    return {Path(file["file_path"]): file["partition"] for file in found.to_pylist()}


def commits_of(folder: Path) -> int:
    """How many commits a table has had since it was made."""
    if not IS_ICEBERG:
        return DeltaTable(str(folder.resolve())).version()
    return len(history_of(metadata_of(folder))) - 1


def history_of(metadata: IcebergMetadata) -> list[int]:
    """The snapshots that the newest came from, and itself."""
    parents = {item["snapshot-id"]: item.get("parent-snapshot-id") for item in metadata.document["snapshots"]}
    found, number = list[int](), metadata.snapshot
    while number is not None:
        found, number = [number, *found], parents.get(number)
    return found


def newest_version(folder: Path) -> int | None:
    """What readers call the newest version by."""
    if not IS_ICEBERG:
        return DeltaTable(str(folder.resolve())).version()
    return metadata_of(folder).snapshot


COMMITS_FOLDER = "metadata" if IS_ICEBERG else "_delta_log"
"""Below a table's folder."""


def data_folder(folder: Path) -> Path:
    """Where a table's files of rows lie."""
    return folder / DATA if IS_ICEBERG else folder


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
    from tailrace.spark.writers.engine import SparkEngine

    return SparkEngine(session(), Catalog(kind="hadoop", root=Path("/")) if IS_ICEBERG else None)


@functools.cache
def session() -> SparkSession:
    """One Spark with the connector for the whole process."""
    from tailrace.spark.session.connectors import connector_settings, iceberg_settings
    from tailrace.spark.session.session import Jvm

    scratch = _scratch()
    settings = {} if IS_ICEBERG else connector_settings({})
    for uri in ("jdbc:sqlite:", "jdbc:postgresql:") if IS_ICEBERG else ():  # so that their drivers are there
        settings = iceberg_settings(settings, Catalog(kind="jdbc", root=Path("/"), uri=uri))
    jvm = Jvm("tests", scratch, scratch / "spark.log", settings=settings)
    atexit.register(jvm.kill)
    try:
        return jvm.open_session()
    except BaseException:  # who asks again starts another
        jvm.kill()
        raise


@functools.cache
def _scratch() -> Path:
    scratch = Path(tempfile.mkdtemp(prefix="tailrace-engine-"))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    return scratch
