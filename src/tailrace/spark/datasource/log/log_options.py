"""What a read or a stream of a change log is told: the options as they are written, each refused that cannot be meant.

Spark asks for the columns before it says whether a read or a stream is meant, so what only one of them takes is refused
when that is known.
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
"""Where a stream's own log lies in the folder of its query's checkpoint, unless it is given another."""
LOG_HINT = (
    "A stream needs a change log. Give `log` the folder of one that a pipeline writes, or its `s3://…`; or, with "
    "`url`, have one captured: where `log` says or, with `checkpointLocation` here as well as for the query, beside "
    "the checkpoint."
)
_ENDPOINT_HINT = (
    "For example: https://minio.example:9000. Credentials come from the environment of driver and executors, or are "
    "the machines' role."
)
_OF_BOTH = ("url", "table", "maxPartitions")
_OF_STREAMS = ("url", "maxRowsPerTrigger", "maxBytesPerTrigger", "consumer", "onSchemaChange")
_OF_READS = (END_OPTION,)


class RowFormat(enum.Enum):
    """What the rows of a DataFrame look like."""

    TYPED = "typed"
    """A change's own columns, then the table's."""
    ENVELOPE = "envelope"
    """The same for all tables; a row is one value."""
    CHANGELOG = "changelog"
    """As Spark's own `changes` and Delta's change feed have them."""


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """Which log, what of it, and how. All of it is sent to the tasks; the credentials of a store are not among it."""

    log: str
    endpoint: str | None = None
    region: str | None = None
    url: str | None = field(default=None, repr=False)
    table: TableId | None = None
    tables: tuple[TablePattern, ...] = ()
    """Where there is no one table."""
    row_format: RowFormat = RowFormat.TYPED
    start: OffsetOption = EARLIEST
    end: OffsetOption = LATEST
    rows_max: int | None = None
    bytes_max: int | None = None
    with_envelope: bool = False
    """Rows of a shape that the DataFrame does not have come in a column of their own."""
    consumer: str | None = None
    rows_per_partition: int = ROWS_PER_PARTITION
    partitions_max: int = PARTITIONS_MAX
    given: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> LogOptions:
        found = canonical_options(given, LOG_OPTIONS)
        log = _log(found)
        store = {"endpoint": _endpoint(found, log), "region": _region(found, log)}
        table = parse_table_name("table", found["table"]) if "table" in found else None
        tables = parse_table_patterns("tables", found["tables"]) if "tables" in found else ()
        if (table is None) == (not tables):
            raise ConfigError(
                "the options `table` and `tables` are both given"
                if tables
                else "either the option `table` or the option `tables` is needed",
                hint=f"{'Leave out one: ' if tables else ''}`table` gives the columns of one table, `tables` one "
                "envelope for many: public.orders, public.*",
            )
        consumer = found.get("consumer")
        if consumer is not None:
            _refuse_no_name(log, consumer)
        if "url" in found and log.startswith("memory://"):
            raise option_error(
                "url", "needs a log that other processes see: the capture is one", "Give `log` a folder, or `s3://…`."
            )
        return cls(
            log=log,
            **store,
            url=parse_source_url(found["url"]) if "url" in found else None,
            table=table,
            tables=tables,
            row_format=_row_format(found, one=table is not None),
            start=_point(START_OPTION, found.get(START_OPTION, EARLIEST)),
            end=_point(END_OPTION, found.get(END_OPTION, LATEST)),
            rows_max=_limit(parse_count, "maxRowsPerTrigger", found),
            bytes_max=_limit(parse_size, "maxBytesPerTrigger", found),
            with_envelope=_with_envelope(found),
            consumer=consumer,
            rows_per_partition=parse_count("rowsPerPartition", found.get("rowsPerPartition", str(ROWS_PER_PARTITION))),
            partitions_max=parse_count("maxPartitions", found.get("maxPartitions", str(PARTITIONS_MAX))),
            given=frozenset(found),
        )

    @property
    def log_path(self) -> LogPath:
        """The log, for whoever opens it, in whichever process."""
        return files.parse_log_path(self.log, endpoint=self.endpoint, region=self.region)

    def refuse_for_read(self) -> None:
        """Refuse what `spark.read` does not take."""
        self._refuse(_OF_STREAMS, "is for streams", "Leave it out, or use `spark.readStream`.")

    def refuse_for_stream(self) -> None:
        """Refuse what `spark.readStream` does not take."""
        self._refuse(_OF_READS, "is for reads", "A stream does not end: leave it out, or use `spark.read`.")

    def _refuse(self, names: tuple[str, ...], why: str, hint: str) -> None:
        for name in names:
            if name in self.given:
                raise option_error(name, why, hint)

    def names_explicitly(self, table: TableId) -> bool:
        """Whether a table that is asked for is so by its name, and not by a pattern alone."""
        return self.table is not None or any(pattern.table == table for pattern in self.tables)

    def matches(self, table: TableId) -> bool:
        """Whether a table of this name is asked for."""
        if self.table is not None:
            return table == self.table
        return any(pattern.matches(table) for pattern in self.tables)

    def matches_rows(self, batch: ChangeBatch) -> bool:
        """Whether rows were written under a name that is asked for: their table may have had others."""
        return self.matches(batch.schema.table)


def is_log_read(given: Mapping[str, str]) -> bool:
    """Whether a change log is meant, and not a table of a database as it is."""
    return any(name in given for name in LOG_OPTIONS if name not in _OF_BOTH)


def _refuse_no_name(log: str, consumer: str) -> None:
    try:
        consumer_path(Path(log), consumer)
    except ConfigError as error:
        raise option_error("consumer", f"cannot be used: {error.message}", error.hint) from None


def _limit(value: Callable[[str, str], int], name: str, found: Mapping[str, str]) -> int | None:
    return value(name, found[name]) if name in found else None


def _log(found: Mapping[str, str]) -> str:
    """Where the log is: as `log` says or, which is the same, `load(…)`; else beside the query's checkpoint."""
    given = {name: found.get(name, "").strip() for name in ("log", "path", "checkpointLocation")}
    if given["log"] and given["path"] and _place(given["log"]) != _place(given["path"]):
        raise option_error("log", "names another log than `load(…)` does", "Give one of them.")
    if not (given["log"] or given["path"] or given["checkpointLocation"]):
        raise option_error("log", "is missing", _without_log(found))
    if given["log"] or given["path"]:
        return _place(given["log"] or given["path"])
    try:
        return _place(f"{given['checkpointLocation'].rstrip('/')}/{LOG_OF_CHECKPOINT}")
    except ConfigError:
        raise option_error(
            "checkpointLocation",
            "is where no log can lie",
            f"Give `log` a place of its own; the query's checkpoint may stay there. {STORES_HINT}",
        ) from None


def _without_log(found: Mapping[str, str]) -> str:
    """Nobody knows yet whether a read or a stream is meant."""
    if "url" not in found:
        return LOG_HINT
    of_logs = " and ".join(f"`{name}`" for name in found if name not in _OF_BOTH)
    return f"{LOG_HINT} A read of a table as it is has no log: it takes `url` and one `table`, and no {of_logs}."


def _place(text: str) -> str:
    """One spelling for one place. Tasks have other working folders than the driver. Spark writes folders as URLs too,
    and `s3://` as `s3a://`."""
    text = re.sub(r"^file:(//)?(?=/)", "", text)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text) or "://" in text:
        return str(ObjectPath.parse(text))
    return os.path.abspath(os.path.expanduser(text))


def _endpoint(found: Mapping[str, str], log: str) -> str | None:
    text = _of_store("logEndpoint", found, log)
    if text is not None and not ENDPOINT.fullmatch(text):
        raise option_error("logEndpoint", "is not the address of an S3 server alone", _ENDPOINT_HINT)
    return text


def _region(found: Mapping[str, str], log: str) -> str | None:
    text = _of_store("logRegion", found, log)
    if text is not None and not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text):
        raise option_error("logRegion", "is not the name of a region", "For example: eu-central-1")
    return text


def _of_store(name: str, found: Mapping[str, str], log: str) -> str | None:
    if name in found and "://" not in log:
        raise option_error(name, "is for a log in an object store, and this one is a folder", "Leave it out.")
    return found[name].strip() if name in found else None


def _point(name: str, text: str) -> OffsetOption:
    found = parse_offset_option(text)
    if found is None:
        raise option_error(name, "is no place in a log", OFFSET_EXAMPLES)
    return found


def _row_format(found: Mapping[str, str], *, one: bool) -> RowFormat:
    default = RowFormat.TYPED if one else RowFormat.ENVELOPE
    shape = RowFormat(parse_choice("shape", found.get("shape", default.value), [shape.value for shape in RowFormat]))
    if not one and shape is not RowFormat.ENVELOPE:
        raise option_error("shape", "is not one for many tables", "Name one with `table`, or leave `shape` out.")
    return shape


def _with_envelope(found: Mapping[str, str]) -> bool:
    wanted = parse_choice("onSchemaChange", found.get("onSchemaChange", "stop"), ["stop", "envelope"]) == "envelope"
    if wanted and _row_format(found, one="table" in found) is not RowFormat.TYPED:
        raise option_error("onSchemaChange", "is for typed columns", "An envelope takes any; the change feed cannot.")
    return wanted
