"""Spark's Java process with what the pipeline's tables need of it: a connector, where one writes them."""

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
    """An empty folder for whoever holds the applier's lease. It begins with the log's id, so that what a killed
    predecessor left is found; and it is nobody else's, so that one whose place was taken does not remove ours when it
    ends."""
    begins = f"tailrace-{os.getuid()}-{change_log.log_id}"
    for left in Path(tempfile.gettempdir()).glob(f"{begins}*"):
        shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{begins}-"))


def spark_log(settings: PipelineSettings) -> Path:
    """Where Spark writes what it has to say."""
    return files.scratch_folder(settings.log.path / "status") / "spark.log"


def start_jvm(settings: PipelineSettings, scratch: Path) -> Jvm:
    """The process; a connector's jars are fetched if they are not there."""
    catalog, by_spark = settings.tables.layout.catalog, settings.tables.written_by_spark
    given = settings.spark.settings
    if catalog is not None:
        given = iceberg_settings(given, catalog)
    elif by_spark:
        given = connector_settings(given)
    try:
        return Jvm(
            settings.name,
            scratch,
            spark_log(settings),
            master=settings.spark.master,
            settings=given,
            readers=settings.load.connections,
        )
    except PySparkRuntimeError as exc:
        if not by_spark:
            raise
        which = "Delta" if catalog is None else "Iceberg"
        raise TableFailed(
            f"Spark did not start with its {which} connector",
            packages=given.get("spark.jars.packages"),
            hint=f"Can this machine fetch the jars? See {spark_log(settings)}. Another place for them can be named in "
            "`spark.settings` (spark.jars.repositories, spark.jars.ivySettings, spark.jars).",
        ) from exc


class LazySpark:
    """A session that is started when it is first asked for, and ended here if it was."""

    def __init__(self, settings: PipelineSettings, change_log: ChangeLog, given: SparkSession | None) -> None:
        self._settings, self._log, self._session = settings, change_log, given
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
