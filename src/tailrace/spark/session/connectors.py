"""Spark's connectors for Delta and Iceberg: where their jars come from, and what a session needs to have one.

The jars come as Spark users know it, by Maven coordinates; whoever names a connector in `spark.settings`, or has its
jars in place, keeps their own.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyspark

from tailrace.errors import Unsupported
from tailrace.tables.iceberg.catalogs import SPARK_CATALOG, Catalog

CONNECTORS = {"4.1": "io.delta:delta-spark_4.1_2.13:4.4.0", "4.2": "io.delta:delta-spark_4.2_2.13:4.4.0"}
"""By the line of Spark that each was built for and tested with; another line refuses it in the middle of a merge."""
ICEBERG_CONNECTORS = {"4.1": "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0"}
"""The same, for Iceberg tables."""

_PACKAGES = "spark.jars.packages"
_EXTENSIONS = "spark.sql.extensions"
_OWN_EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
_ICEBERG_EXTENSION = "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"
_DRIVERS = {"postgresql": "org.postgresql:postgresql:42.7.14", "sqlite": "org.xerial:sqlite-jdbc:3.54.1.0"}
"""For a JDBC catalog, by what stands after `jdbc:` in its URL."""
_REDACTION, _SECRET_OPTIONS = "spark.sql.redaction.options.regex", "(?i)url|uri|credential|header"
"""Which settings of a catalog Spark shows to nobody, besides what it takes for secret by itself."""
_DEFAULTS = {
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # A table's list of files is worked on in as many tasks; 50, as it would be, cost seconds a commit on one machine.
    "spark.databricks.delta.snapshotPartitions": "2",
}

TABLE_SETTINGS = {
    # Who commits meanwhile fails us, whatever it was.
    "spark.databricks.delta.maxCommitAttempts": "0",
    # The position moves also where no row does.
    "spark.databricks.delta.skipRecordingEmptyCommits": "false",
    # What is merged comes from files, the same however often it is read.
    "spark.databricks.delta.merge.materializeSource": "none",
    # Tables hold instants, and their files what every reader understands alike.
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.int96RebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.inferTimestampNTZ.enabled": "true",
    "spark.sql.ansi.enabled": "true",
    # What replaces a table's rows replaces them in every partition.
    "spark.sql.sources.partitionOverwriteMode": "static",
}
"""Of the session that writes a table."""


def connector_settings(given: Mapping[str, str]) -> dict[str, str]:
    """The settings of a session that has the connector, with what was given; refuses a Spark that has none."""
    settings = dict(given)
    if not _named(settings, "delta-spark"):
        instead = "or use `tables.engine: delta-rs`, which needs none; "
        _fetch(settings, _coordinates(CONNECTORS, "Delta", instead))
    _extend(settings, _OWN_EXTENSION)
    for name, value in _DEFAULTS.items():
        settings.setdefault(name, value)
    return settings


def iceberg_settings(given: Mapping[str, str], catalog: Catalog) -> dict[str, str]:
    """The same for tables of a catalog, whose own settings each table's session has."""
    settings = dict(given)
    if not _named(settings, "iceberg-spark-runtime"):
        _fetch(settings, _coordinates(ICEBERG_CONNECTORS, "Iceberg", ""))
    kind = catalog.uri.split(":")[1] if catalog.kind == "jdbc" else ""
    if kind in _DRIVERS and not _named(settings, _DRIVERS[kind].split(":")[1]):
        _fetch(settings, _DRIVERS[kind])
    _extend(settings, _ICEBERG_EXTENSION)
    settings.setdefault(_REDACTION, _SECRET_OPTIONS)
    return settings


def catalog_settings(catalog: Catalog) -> dict[str, str]:
    """What a session must know of a catalog."""
    said = {"type": catalog.kind, "cache-enabled": "false", **catalog.properties}
    if catalog.kind != "rest":
        said["warehouse"] = str(catalog.root.absolute())
    elif catalog.warehouse:
        said["warehouse"] = catalog.warehouse
    if catalog.kind != "hadoop":
        said["uri"] = catalog.uri
    if catalog.kind == "jdbc":
        said.setdefault("jdbc.schema-version", "V1")
    prefix = f"spark.sql.catalog.{SPARK_CATALOG}"
    own = {f"{prefix}.{name}": value for name, value in said.items()}
    return {prefix: "org.apache.iceberg.spark.SparkCatalog", **own}


def _named(settings: Mapping[str, str], artefact: str) -> bool:
    return any(artefact in settings.get(name, "") for name in (_PACKAGES, "spark.jars"))


def _fetch(settings: dict[str, str], coordinates: str) -> None:
    packages = [settings[_PACKAGES]] if settings.get(_PACKAGES) else []
    settings[_PACKAGES] = ",".join([*packages, coordinates])


def _extend(settings: dict[str, str], extension: str) -> None:
    extensions = [name for name in settings.get(_EXTENSIONS, "").split(",") if name]
    settings[_EXTENSIONS] = ",".join(dict.fromkeys([*extensions, extension]))


def _coordinates(connectors: Mapping[str, str], format: str, instead: str) -> str:
    line = ".".join(pyspark.__version__.split(".")[:2])
    if line in connectors:
        return connectors[line]
    lines = ", ".join(sorted(connectors))
    raise Unsupported(
        f"this version of Spark has no {format} connector that was tested",
        pyspark=pyspark.__version__,
        hint=f"Install a pyspark that has one ({lines}), e.g. `pip install 'pyspark=={max(connectors)}.*'`; "
        f"{instead}or name a connector in `spark.settings`.",
    )
