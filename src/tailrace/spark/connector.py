"""Spark's Delta connector: where its jars come from, and what a session needs to have it.

The jars come as Spark users know it, by Maven coordinates; whoever names a connector in `spark.settings`, or has its
jars in place, keeps their own.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyspark

from tailrace.errors import Unsupported

CONNECTORS = {"4.2": "io.delta:delta-spark_4.2_2.13:4.4.0"}
"""By the line of Spark that each was built for and tested with; another line refuses it in the middle of a merge."""

_PACKAGES = "spark.jars.packages"
_EXTENSIONS = "spark.sql.extensions"
_OWN_EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
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
}
"""Of the session that writes a table."""


def connector_settings(given: Mapping[str, str]) -> dict[str, str]:
    """The settings of a session that has the connector, with what was given; refuses a Spark that has none."""
    settings = dict(given)
    named = any("delta-spark" in settings.get(name, "") for name in (_PACKAGES, "spark.jars"))
    if not named:
        packages = [settings[_PACKAGES]] if settings.get(_PACKAGES) else []
        settings[_PACKAGES] = ",".join([*packages, _coordinates()])
    extensions = [name for name in settings.get(_EXTENSIONS, "").split(",") if name]
    settings[_EXTENSIONS] = ",".join(dict.fromkeys([*extensions, _OWN_EXTENSION]))
    for name, value in _DEFAULTS.items():
        settings.setdefault(name, value)
    return settings


def _coordinates() -> str:
    line = ".".join(pyspark.__version__.split(".")[:2])
    if line in CONNECTORS:
        return CONNECTORS[line]
    lines = ", ".join(sorted(CONNECTORS))
    raise Unsupported(
        "this version of Spark has no Delta connector that was tested", pyspark=pyspark.__version__,
        hint=f"Install a pyspark that has one ({lines}), e.g. `pip install 'pyspark=={max(CONNECTORS)}.*'`; or use "
        "`tables.engine: delta-rs`, which needs none; or name a connector in `spark.settings`.",
    )  # fmt: skip
