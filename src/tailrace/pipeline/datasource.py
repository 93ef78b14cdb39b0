"""`format("cdc")`: which of the three is meant, and who captures.

With `log` it is a change log, as a stream or as a range; without, a table of a database as it is. With `url` as well a
stream has its log captured by a process beside it. Spark makes the source to learn its columns, pickles it, and asks
for readers in other processes.
"""

from __future__ import annotations

import glob
from typing import TYPE_CHECKING

import pyspark
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from tailrace.errors import ConfigError, Unsupported
from tailrace.spark.log_frame import Frame, look
from tailrace.spark.log_options import LogOptions, is_of_log
from tailrace.spark.log_read import LogReader
from tailrace.spark.option_values import refused

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tailrace.spark.stream import Capture, LogStreamReader

FORMAT = "cdc"


class CdcSource(DataSource):
    """`format("cdc")`. Spark finds it by itself (`pyspark_cdc`); `tailrace.register(spark)` does the same at once."""

    _frame: Frame | None = None
    """Of a log; stays with the source when Spark pickles it."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        if not is_of_log(self.options):
            # The database's own code is loaded by those who read it: a task over a log has no use for it.
            from tailrace.spark.read import snapshot_schema
            from tailrace.spark.read_options import ReadOptions

            return snapshot_schema(ReadOptions.parse(self.options))
        self._frame = look(LogOptions.parse(self.options))
        return from_arrow_schema(self._frame.fields)

    def reader(self, schema: StructType) -> DataSourceReader:
        if not is_of_log(self.options):
            from tailrace.spark.read import CdcReader
            from tailrace.spark.read_options import ReadOptions

            return CdcReader(ReadOptions.parse(self.options), schema)
        frame = self._seen()
        frame.options.refuse_for_read()
        return LogReader(frame, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        if "log" not in self.options:
            raise refused(
                "log", "is missing",
                "A stream needs a change log: one that a pipeline writes or, with `url`, a folder for one of its own. "
                "Spark does not tell a source where its checkpoint lies, so it cannot lie there by itself.",
            )  # fmt: skip
        made = _stream_reader()
        frame = self._seen()
        frame.options.refuse_for_stream()
        return made(frame, schema, capture_of(frame.options))

    def _seen(self) -> Frame:
        if self._frame is None:
            raise ConfigError("a change log has columns of its own", hint="Leave out `.schema(…)`.")
        return self._frame


def _stream_reader() -> type[LogStreamReader]:
    """Spark 4.1, which Iceberg tables need, cannot tell a source how much to read, and has all else that is in here."""
    try:
        from tailrace.spark.stream import LogStreamReader
    except ModuleNotFoundError as exc:
        if not (exc.name or "").startswith("pyspark."):
            raise
        raise Unsupported(
            "a stream of changes needs Spark 4.2 or newer", pyspark=pyspark.__version__,
            hint="Run the query with a newer Spark; the log is the same for all.",
        ) from exc  # fmt: skip
    return LogStreamReader


def capture_of(options: LogOptions) -> Capture | None:
    """Who captures beside the stream; nobody, if a pipeline does."""
    if options.url is None:
        return None
    from tailrace.pipeline.beside import Beside

    tables = [glob.escape(str(options.table))] if options.table is not None else list(options.tables)
    return Beside(url=options.url, log=options.log, tables=tuple("*.*" if name == "*" else name for name in tables))


def register(spark: SparkSession) -> None:
    """Make `format("cdc")` known to a session. Where the package is installed Spark finds it without this."""
    spark.dataSource.register(CdcSource)
