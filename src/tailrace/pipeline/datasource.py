"""Choose what `format("cdc")` reads, and who captures.

- With `log` it reads a change log, as a stream or as a range.
- Without `log` it reads a table of a database as it is now.
- A stream with `url` as well has its log captured by a separate process.

Spark makes the source to learn its columns, pickles it, and asks for readers in other processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pyspark
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from tailrace.errors import ConfigError, TailraceError, Unsupported
from tailrace.spark.datasource.log.log_options import LOG_HINT, LogOptions, is_log_read
from tailrace.spark.datasource.log.log_part import LogBatchReader
from tailrace.spark.datasource.log.log_schema import LogFrame, resolve_frame
from tailrace.spark.datasource.log.log_stream import RefusedStream
from tailrace.spark.datasource.log.stream_41 import Spark41StreamReader
from tailrace.spark.datasource.option_values import as_option_error, option_error, without_traceback
from tailrace.spark.datasource.table_patterns import TablePattern
from tailrace.spark.session.arrow_types import spark_schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tailrace.spark.datasource.log.log_stream import Capture

FORMAT = "cdc"


class CdcSource(DataSource):
    """The data source `format("cdc")`.

    Spark finds it through the module `pyspark_cdc`. `tailrace.register(spark)` registers it at once.
    """

    _frame: LogFrame | None = None
    """Columns of a log read. They stay with the source when Spark pickles it."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        with without_traceback:
            return self._columns()

    def _columns(self) -> StructType:
        if not is_log_read(self.options):
            # Imported only here: a task that reads a log has no use for the database's code.
            from tailrace.spark.datasource.table.table_options import ReadOptions
            from tailrace.spark.datasource.table.table_read import snapshot_schema

            return snapshot_schema(ReadOptions.parse(self.options))
        options = LogOptions.parse(self.options)
        try:
            self._frame = resolve_frame(options)
        except TailraceError as error:
            raise as_option_error(error) from None
        return spark_schema(self._frame.fields)

    def reader(self, schema: StructType) -> DataSourceReader:
        if not is_log_read(self.options):
            from tailrace.spark.datasource.table.table_options import ReadOptions
            from tailrace.spark.datasource.table.table_read import TableBatchReader

            return TableBatchReader(ReadOptions.parse(self.options), schema)
        with without_traceback:
            frame = self._resolved_frame()
            frame.options.refuse_for_read()
        return LogBatchReader(frame, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        try:
            if not is_log_read(self.options):
                raise option_error("log", "is missing", LOG_HINT)
            frame = self._resolved_frame()
            frame.options.refuse_for_stream()
            return _stream_reader(frame.options)(frame, schema, capture_of(frame.options))
        except TailraceError as error:
            return RefusedStream(error)

    def _resolved_frame(self) -> LogFrame:
        if self._frame is None:
            raise ConfigError("a change log has its own columns", hint="Leave out `.schema(…)`.")
        return self._frame


def _stream_reader(options: LogOptions) -> Callable[[LogFrame, StructType, Capture | None], DataSourceStreamReader]:
    """Return the reader class for this Spark.

    Spark 4.1, which Iceberg tables need, lacks only limits on how much to read at once.
    """
    try:
        from tailrace.spark.datasource.log.stream_42 import LogStreamReader
    except ModuleNotFoundError as exc:
        if not (exc.name or "").startswith("pyspark."):
            raise
    else:
        return LogStreamReader
    if options.rows_max is not None or options.bytes_max is not None:
        raise Unsupported(
            "this Spark cannot limit a micro-batch: limits need Spark 4.2",
            pyspark=pyspark.__version__,
            hint="Leave out `maxRowsPerTrigger` and `maxBytesPerTrigger`. Or run the query with a newer Spark: the log "
            "and the checkpoint are the same for all.",
        )
    return Spark41StreamReader


def capture_of(options: LogOptions) -> Capture | None:
    """Return the capture that the stream runs; None if a pipeline captures."""
    if options.url is None:
        return None
    from tailrace.pipeline.capture.embedded_capture import EmbeddedCapture

    tables = options.tables if options.table is None else [TablePattern.of(options.table)]
    return EmbeddedCapture(
        url=options.url,
        log=options.log,
        endpoint=options.endpoint,
        region=options.region,
        tables=tuple(pattern.to_setting for pattern in tables),
    )


def register(spark: SparkSession) -> None:
    """Register `format("cdc")` with a session. Where the package is installed, Spark finds it without this."""
    spark.dataSource.register(CdcSource)
