"""Parse and check the options of a read or a stream of a change log.

Spark asks for the columns before it says whether it reads or streams. So options that only one of them takes are
refused when that is known.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tailrace.changelog.read.consumers import consumer_path
from tailrace.changelog.read.offsets import (
    EARLIEST,
    END_OPTION,
    LATEST,
    OFFSET_EXAMPLES,
    START_OPTION,
    OffsetOption,
    parse_offset_option,
)
from tailrace.errors import ConfigError
from tailrace.model.batch import ChangeBatch
from tailrace.model.schema import TableId
from tailrace.spark.datasource.option_values import (
    LOG_OPTIONS,
    canonical_options,
    option_error,
    parse_choice,
    parse_count,
    parse_size,
    parse_source_url,
    parse_table_name,
)
from tailrace.spark.datasource.table_patterns import TablePattern, parse_table_patterns
from tailrace.storage import files
from tailrace.storage.files import LogPath
from tailrace.storage.objects import ENDPOINT, STORES_HINT, ObjectPath

ROWS_PER_PARTITION = 250_000
PARTITIONS_MAX = 10_000
LOG_OF_CHECKPOINT = "tailrace-log"
"""Folder of a stream's own log inside its query's checkpoint, unless `log` names another."""
LOG_HINT = (
    "A stream needs a change log. Set `log` to the folder or `s3://…` of one that a pipeline writes. Or set `url` and "
    "let the stream capture one: into `log` or, with `checkpointLocation` given here as well as for the query, next "
    "to the checkpoint."
)
_ENDPOINT_HINT = (
    "For example: https://minio.example:9000. Credentials come from the environment of driver and executors, or from "
    "the machines' role."
)
_SHARED_OPTIONS = ("url", "table", "maxPartitions")
_STREAM_OPTIONS = ("url", "maxRowsPerTrigger", "maxBytesPerTrigger", "consumer", "onSchemaChange")
_READ_OPTIONS = (END_OPTION,)


class RowFormat(enum.Enum):
    """The format of a DataFrame's rows."""

    TYPED = "typed"
    """The change's own columns, then the table's."""
    ENVELOPE = "envelope"
    """The same columns for all tables; a row is one value."""
    CHANGELOG = "changelog"
    """The columns of Spark's own `changes` and Delta's change data feed."""


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """The log to read, the rows to read of it, and their format.

    Tasks receive all of it. Credentials of an object store are not part of it.
    """

    log: str
    endpoint: str | None = None
    region: str | None = None
    url: str | None = field(default=None, repr=False)
    table: TableId | None = None
    tables: tuple[TablePattern, ...] = ()
    """Patterns of tables, where `table` is not given."""
    row_format: RowFormat = RowFormat.TYPED
    start: OffsetOption = EARLIEST
    end: OffsetOption = LATEST
    rows_max: int | None = None
    bytes_max: int | None = None
    with_envelope: bool = False
    """Rows with a schema that the DataFrame lacks are delivered in a column of their own."""
    consumer: str | None = None
    rows_per_partition: int = ROWS_PER_PARTITION
    partitions_max: int = PARTITIONS_MAX
    given: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> LogOptions:
        values = canonical_options(options, LOG_OPTIONS)
        log = _log_location(values)
        store = {"endpoint": _endpoint(values, log), "region": _region(values, log)}
        table = parse_table_name("table", values["table"]) if "table" in values else None
        tables = parse_table_patterns("tables", values["tables"]) if "tables" in values else ()
        if (table is None) == (not tables):
            raise ConfigError(
                "the options `table` and `tables` are both given"
                if tables
                else "either the option `table` or the option `tables` is needed",
                hint=f"{'Leave out one: ' if tables else ''}`table` gives the columns of one table, `tables` one "
                "envelope for many: public.orders, public.*",
            )
        consumer = values.get("consumer")
        if consumer is not None:
            _refuse_bad_name(log, consumer)
        if "url" in values and log.startswith("memory://"):
            raise option_error(
                "url",
                "needs a log that other processes can open, as the capture does",
                "Set `log` to a folder or an `s3://…` address.",
            )
        return cls(
            log=log,
            **store,
            url=parse_source_url(values["url"]) if "url" in values else None,
            table=table,
            tables=tables,
            row_format=_row_format(values, one=table is not None),
            start=_parse_offset(START_OPTION, values.get(START_OPTION, EARLIEST)),
            end=_parse_offset(END_OPTION, values.get(END_OPTION, LATEST)),
            rows_max=_limit(parse_count, "maxRowsPerTrigger", values),
            bytes_max=_limit(parse_size, "maxBytesPerTrigger", values),
            with_envelope=_with_envelope(values),
            consumer=consumer,
            rows_per_partition=parse_count("rowsPerPartition", values.get("rowsPerPartition", str(ROWS_PER_PARTITION))),
            partitions_max=parse_count("maxPartitions", values.get("maxPartitions", str(PARTITIONS_MAX))),
            given=frozenset(values),
        )

    @property
    def log_path(self) -> LogPath:
        """The log's path, which any process can open."""
        return files.parse_log_path(self.log, endpoint=self.endpoint, region=self.region)

    def refuse_for_read(self) -> None:
        """Refuse options that `spark.read` does not take."""
        self._refuse(_STREAM_OPTIONS, "is for streams", "Leave it out, or use `spark.readStream`.")

    def refuse_for_stream(self) -> None:
        """Refuse options that `spark.readStream` does not take."""
        self._refuse(_READ_OPTIONS, "is for reads", "A stream does not end: leave it out, or use `spark.read`.")

    def _refuse(self, names: tuple[str, ...], why: str, hint: str) -> None:
        for name in names:
            if name in self.given:
                raise option_error(name, why, hint)

    def names_explicitly(self, table: TableId) -> bool:
        """Return whether a table is requested by its name, not only by a pattern."""
        return self.table is not None or any(pattern.table == table for pattern in self.tables)

    def matches(self, table: TableId) -> bool:
        """Return whether a table of this name is requested."""
        if self.table is not None:
            return table == self.table
        return any(pattern.matches(table) for pattern in self.tables)

    def matches_rows(self, batch: ChangeBatch) -> bool:
        """Return whether rows were written under a requested name. Their table may have had others."""
        return self.matches(batch.schema.table)


def is_log_read(options: Mapping[str, str]) -> bool:
    """Return whether the options mean a change log, and not a table of a database."""
    return any(name in options for name in LOG_OPTIONS if name not in _SHARED_OPTIONS)


def _refuse_bad_name(log: str, consumer: str) -> None:
    try:
        consumer_path(Path(log), consumer)
    except ConfigError as error:
        raise option_error("consumer", f"cannot be used: {error.message}", error.hint) from None


def _limit(parse: Callable[[str, str], int], name: str, values: Mapping[str, str]) -> int | None:
    return parse(name, values[name]) if name in values else None


def _log_location(values: Mapping[str, str]) -> str:
    """Return the log's location. `log` and `load(…)` mean the same; else it is next to the query's checkpoint."""
    paths = {name: values.get(name, "").strip() for name in ("log", "path", "checkpointLocation")}
    if paths["log"] and paths["path"] and _normalised(paths["log"]) != _normalised(paths["path"]):
        raise option_error("log", "names another log than `load(…)` does", "Give one of them.")
    if not (paths["log"] or paths["path"] or paths["checkpointLocation"]):
        raise option_error("log", "is missing", _missing_log_hint(values))
    if paths["log"] or paths["path"]:
        return _normalised(paths["log"] or paths["path"])
    try:
        return _normalised(f"{paths['checkpointLocation'].rstrip('/')}/{LOG_OF_CHECKPOINT}")
    except ConfigError:
        raise option_error(
            "checkpointLocation",
            "is a location where no log can be",
            f"Give `log` a location of its own; the query's checkpoint may stay there. {STORES_HINT}",
        ) from None


def _missing_log_hint(values: Mapping[str, str]) -> str:
    """Return the hint for a missing log. It is not known yet whether Spark reads or streams."""
    if "url" not in values:
        return LOG_HINT
    log_options = " and ".join(f"`{name}`" for name in values if name not in _SHARED_OPTIONS)
    return f"{LOG_HINT} To read a database table, which has no log, give `url` and one `table`, and no {log_options}."


def _normalised(text: str) -> str:
    """Return one spelling for one location.

    Tasks have other working folders than the driver. Spark writes folders as URLs too, and `s3://` as `s3a://`.
    """
    text = re.sub(r"^file:(//)?(?=/)", "", text)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text) or "://" in text:
        return str(ObjectPath.parse(text))
    return os.path.abspath(os.path.expanduser(text))


def _endpoint(values: Mapping[str, str], log: str) -> str | None:
    text = _store_option("logEndpoint", values, log)
    if text is not None and not ENDPOINT.fullmatch(text):
        raise option_error("logEndpoint", "is not the address of an S3 server and nothing else", _ENDPOINT_HINT)
    return text


def _region(values: Mapping[str, str], log: str) -> str | None:
    text = _store_option("logRegion", values, log)
    if text is not None and not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text):
        raise option_error("logRegion", "is not the name of a region", "For example: eu-central-1")
    return text


def _store_option(name: str, values: Mapping[str, str], log: str) -> str | None:
    if name in values and "://" not in log:
        raise option_error(name, "is for a log in an object store, and this log is a folder", "Leave it out.")
    return values[name].strip() if name in values else None


def _parse_offset(name: str, text: str) -> OffsetOption:
    option = parse_offset_option(text)
    if option is None:
        raise option_error(name, "is not a position in a log", OFFSET_EXAMPLES)
    return option


def _row_format(values: Mapping[str, str], *, one: bool) -> RowFormat:
    default = RowFormat.TYPED if one else RowFormat.ENVELOPE
    row_format = RowFormat(
        parse_choice("shape", values.get("shape", default.value), [row_format.value for row_format in RowFormat])
    )
    if not one and row_format is not RowFormat.ENVELOPE:
        raise option_error("shape", "cannot be used for many tables", "Name one with `table`, or leave `shape` out.")
    return row_format


def _with_envelope(values: Mapping[str, str]) -> bool:
    with_envelope = (
        parse_choice("onSchemaChange", values.get("onSchemaChange", "stop"), ["stop", "envelope"]) == "envelope"
    )
    if with_envelope and _row_format(values, one="table" in values) is not RowFormat.TYPED:
        raise option_error(
            "onSchemaChange",
            "is for typed columns",
            "Leave it out: an envelope takes any schema, and the change feed cannot.",
        )
    return with_envelope
