"""Start Spark's Java process with the connector that the pipeline's tables need."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import TableFailed
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.spark.session.connectors import connector_settings, iceberg_settings
from tailrace.spark.session.session import Jvm
from tailrace.storage import files


def make_scratch(change_log: ChangeLog) -> Path:
    """Return an empty folder for the process that holds the applier's lease.

    Its name begins with the log's id, so that leftovers of a killed predecessor are found and removed. The rest is
    unique: a process that lost the lease removes only its own folder when it ends.
    """
    prefix = f"tailrace-{os.getuid()}-{change_log.log_id}"
    for leftover in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}-"))


def spark_log(settings: PipelineSettings) -> Path:
    """Return the path of Spark's own log file."""
    return files.scratch_folder(settings.log.path / "status") / "spark.log"


def start_jvm(settings: PipelineSettings, scratch: Path) -> Jvm:
    """Start the process; fetch a connector's jars if they are missing."""
    catalog, by_spark = settings.tables.layout.catalog, settings.tables.written_by_spark
    spark_settings = settings.spark.settings
    if catalog is not None:
        spark_settings = iceberg_settings(spark_settings, catalog)
    elif by_spark:
        spark_settings = connector_settings(spark_settings)
    try:
        return Jvm(
            settings.name,
            scratch,
            spark_log(settings),
            master=settings.spark.master,
            settings=spark_settings,
            readers=settings.load.connections,
        )
    except PySparkRuntimeError as exc:
        if not by_spark:
            raise
        connector = "Delta" if catalog is None else "Iceberg"
        raise TableFailed(
            f"Spark did not start with its {connector} connector",
            packages=spark_settings.get("spark.jars.packages"),
            hint=f"Check that this machine can fetch the jars: see {spark_log(settings)}. Name another source "
            "in `spark.settings` (spark.jars.repositories, spark.jars.ivySettings, spark.jars).",
        ) from exc


class LazySpark:
    """A Spark session that starts on first use.

    It is ended here if it was started here.
    """

    def __init__(self, settings: PipelineSettings, change_log: ChangeLog, session: SparkSession | None) -> None:
        self._settings, self._log, self._session = settings, change_log, session
        self._scratch: Path | None = None
        self._jvm: Jvm | None = None

    def __enter__(self) -> LazySpark:
        return self

    def get(self) -> SparkSession:
        if self._session is None:
            self._scratch = make_scratch(self._log)
            self._jvm = start_jvm(self._settings, self._scratch)
            self._session = self._jvm.open_session()
        return self._session

    def __exit__(self, *_: object) -> None:
        if self._jvm is not None:
            with suppress(Exception):  # the process may be gone already
                self.get().stop()
            self._jvm.kill()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
