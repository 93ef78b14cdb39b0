"""Spark's connectors for Delta and Iceberg. Where to get their jars, and the settings of a session with one.

The jars are fetched by Maven coordinates, as Spark users know them. A connector named in `spark.settings`, or whose
jars are there, is kept.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyspark

from tailrace.errors import Unsupported
from tailrace.tables.iceberg.catalogs import SPARK_CATALOG, Catalog

CONNECTORS = {"4.1": "io.delta:delta-spark_4.1_2.13:4.4.0", "4.2": "io.delta:delta-spark_4.2_2.13:4.4.0"}
"""Delta connectors, by the Spark line that each was built for and tested with. Another line fails in the middle of a
merge."""
ICEBERG_CONNECTORS = {"4.1": "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0"}
"""Iceberg connectors, by the Spark line."""

_PACKAGES = "spark.jars.packages"
_EXTENSIONS = "spark.sql.extensions"
_OWN_EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
_ICEBERG_EXTENSION = "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"
_DRIVERS = {"postgresql": "org.postgresql:postgresql:42.7.14", "sqlite": "org.xerial:sqlite-jdbc:3.54.1.0"}
"""Drivers for a JDBC catalog, by what follows `jdbc:` in its URL."""
_REDACTION, _SECRET_OPTIONS = "spark.sql.redaction.options.regex", "(?i)url|uri|credential|header"
"""Settings of a catalog that Spark hides, in addition to those it hides by default."""
_DEFAULTS = {
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # Tasks that process a table's list of files. The default, 50, costs seconds for each commit on one machine.
    "spark.databricks.delta.snapshotPartitions": "2",
}

TABLE_SETTINGS = {
    # Any other commit meanwhile makes ours fail.
    "spark.databricks.delta.maxCommitAttempts": "0",
    # A commit may change the position only, and no row.
    "spark.databricks.delta.skipRecordingEmptyCommits": "false",
    # The rows to merge come from files, and are the same however often they are read.
    "spark.databricks.delta.merge.materializeSource": "none",
    # Tables hold instants, in files that every reader understands in the same way.
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.int96RebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.inferTimestampNTZ.enabled": "true",
    "spark.sql.ansi.enabled": "true",
    # A write that replaces a table's rows replaces them in every partition.
    "spark.sql.sources.partitionOverwriteMode": "static",
}
"""Settings of the session that writes a table."""


def connector_settings(configured: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a session with the Delta connector. Refuse a Spark that has none."""
    settings = dict(configured)
    if not _is_configured(settings, "delta-spark"):
        instead = "or use `tables.engine: delta-rs`, which needs none; "
        _add_package(settings, _coordinates(CONNECTORS, "Delta", instead))
    _add_extension(settings, _OWN_EXTENSION)
    for name, value in _DEFAULTS.items():
        settings.setdefault(name, value)
    return settings


def iceberg_settings(configured: Mapping[str, str], catalog: Catalog) -> dict[str, str]:
    """Return the settings of a session with the Iceberg connector.

    The catalog's own settings are set in each table's session.
    """
    settings = dict(configured)
    if not _is_configured(settings, "iceberg-spark-runtime"):
        _add_package(settings, _coordinates(ICEBERG_CONNECTORS, "Iceberg", ""))
    kind = catalog.uri.split(":")[1] if catalog.kind == "jdbc" else ""
    if kind in _DRIVERS and not _is_configured(settings, _DRIVERS[kind].split(":")[1]):
        _add_package(settings, _DRIVERS[kind])
    _add_extension(settings, _ICEBERG_EXTENSION)
    settings.setdefault(_REDACTION, _SECRET_OPTIONS)
    return settings


def catalog_settings(catalog: Catalog) -> dict[str, str]:
    """Return the settings with which a session knows a catalog."""
    options = {"type": catalog.kind, "cache-enabled": "false", **catalog.properties}
    if catalog.kind != "rest":
        options["warehouse"] = str(catalog.root.absolute())
    elif catalog.warehouse:
        options["warehouse"] = catalog.warehouse
    if catalog.kind != "hadoop":
        options["uri"] = catalog.uri
    if catalog.kind == "jdbc":
        options.setdefault("jdbc.schema-version", "V1")
    prefix = f"spark.sql.catalog.{SPARK_CATALOG}"
    prefixed = {f"{prefix}.{name}": value for name, value in options.items()}
    return {prefix: "org.apache.iceberg.spark.SparkCatalog", **prefixed}


def _is_configured(settings: Mapping[str, str], artefact: str) -> bool:
    return any(artefact in settings.get(name, "") for name in (_PACKAGES, "spark.jars"))


def _add_package(settings: dict[str, str], coordinates: str) -> None:
    packages = [settings[_PACKAGES]] if settings.get(_PACKAGES) else []
    settings[_PACKAGES] = ",".join([*packages, coordinates])


def _add_extension(settings: dict[str, str], extension: str) -> None:
    extensions = [name for name in settings.get(_EXTENSIONS, "").split(",") if name]
    settings[_EXTENSIONS] = ",".join(dict.fromkeys([*extensions, extension]))


def _coordinates(connectors: Mapping[str, str], format: str, instead: str) -> str:
    line = ".".join(pyspark.__version__.split(".")[:2])
    if line in connectors:
        return connectors[line]
    lines = ", ".join(sorted(connectors))
    raise Unsupported(
        f"this version of Spark has no tested {format} connector",
        pyspark=pyspark.__version__,
        hint=f"Install a pyspark that has one ({lines}), e.g. `pip install 'pyspark=={max(connectors)}.*'`; "
        f"{instead}or name a connector in `spark.settings`.",
    )
