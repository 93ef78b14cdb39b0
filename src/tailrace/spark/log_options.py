"""What a read or a stream of a change log is told: the options as they are written, each refused that cannot be meant.

Spark asks for the columns before it says whether a read or a stream is meant, so what only one of them takes is refused
when that is known.
"""

from __future__ import annotations

import enum
import fnmatch
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tailrace.changelog.consumers import consumer_path
from tailrace.changelog.places import EARLIEST, EXAMPLES, LATEST, Point, parse_point
from tailrace.errors import ConfigError
from tailrace.model.schema import TableId
from tailrace.spark.option_values import (
    choice,
    column_names,
    count,
    named,
    refused,
    size,
    source_url,
    table_name,
)

ROWS_PER_PARTITION = 250_000
PARTITIONS_MAX = 10_000
OPTIONS = (
    "log", "path", "checkpointLocation", "url", "table", "tables", "shape", "startingPosition", "endingPosition",
    "maxRowsPerTrigger", "maxBytesPerTrigger", "onSchemaChange", "consumer", "rowsPerPartition", "maxPartitions",
)  # fmt: skip
LOG_OF_CHECKPOINT = "tailrace-log"
"""Where a stream's own log lies in the folder of its query's checkpoint, unless it is given another."""
LOG_HINT = (
    "A stream needs a change log. Give `log` the folder of one that a pipeline writes, or its `s3://…`; or, with "
    "`url`, have one captured: into the folder that `log` names or, with `checkpointLocation` here as well as for the "
    "query, beside the checkpoint."
)
_OF_BOTH = ("url", "table", "maxPartitions")
_OF_STREAMS = ("url", "maxRowsPerTrigger", "maxBytesPerTrigger", "consumer", "onSchemaChange")
_OF_READS = ("endingPosition",)


class Shape(enum.Enum):
    """What the rows of a DataFrame look like."""

    TYPED = "typed"
    """A change's own columns, then the table's."""
    ENVELOPE = "envelope"
    """The same for all tables; a row is one value."""
    CHANGELOG = "changelog"
    """As Spark's own `changes` and Delta's change feed have them."""


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """Which log, what of it, and how."""

    log: str
    url: str | None = field(default=None, repr=False)
    table: TableId | None = None
    tables: tuple[str, ...] = ()
    """Names or globs, where there is no one table."""
    shape: Shape = Shape.TYPED
    start: Point = EARLIEST
    end: Point = LATEST
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
        found = named(given, OPTIONS)
        log = _log(found)
        table = table_name("table", found["table"]) if "table" in found else None
        tables = column_names("tables", found["tables"]) if "tables" in found else ()
        if (table is None) == (not tables):
            raise ConfigError(
                "either the option `table` or the option `tables` is needed",
                hint="`table` gives the columns of one table, `tables` one envelope for many: public.orders, public.*",
            )
        consumer = found.get("consumer")
        if consumer is not None:
            consumer_path(Path(log), consumer)  # refuses what cannot be one
        if "url" in found and "://" in log:
            raise refused(
                "url", "needs a log in a folder: a capture beside a stream writes into no other",
                "Give `log` a folder; or capture into the store with `tailrace capture`, and leave out `url`.",
            )  # fmt: skip
        return cls(
            log=log, url=source_url(found["url"]) if "url" in found else None,
            table=table, tables=tables, shape=_shape(found, one=table is not None),
            start=_point("startingPosition", found.get("startingPosition", EARLIEST)),
            end=_point("endingPosition", found.get("endingPosition", LATEST)),
            rows_max=_limit(count, "maxRowsPerTrigger", found), bytes_max=_limit(size, "maxBytesPerTrigger", found),
            with_envelope=_with_envelope(found), consumer=consumer,
            rows_per_partition=count("rowsPerPartition", found.get("rowsPerPartition", str(ROWS_PER_PARTITION))),
            partitions_max=count("maxPartitions", found.get("maxPartitions", str(PARTITIONS_MAX))),
            given=frozenset(found),
        )  # fmt: skip

    def refuse_for_read(self) -> None:
        """Refuse what `spark.read` does not take."""
        self._refuse(_OF_STREAMS, "is for streams", "Leave it out, or use `spark.readStream`.")

    def refuse_for_stream(self) -> None:
        """Refuse what `spark.readStream` does not take."""
        self._refuse(_OF_READS, "is for reads", "A stream does not end: leave it out, or use `spark.read`.")

    def _refuse(self, names: tuple[str, ...], why: str, hint: str) -> None:
        for name in names:
            if name in self.given:
                raise refused(name, why, hint)

    def takes(self, table: TableId) -> bool:
        """Whether a table of this name is asked for."""
        if self.table is not None:
            return table == self.table
        return any(fnmatch.fnmatchcase(str(table), glob) for glob in self.tables)


def is_of_log(given: Mapping[str, str]) -> bool:
    """Whether a change log is meant, and not a table of a database as it is."""
    return any(name in given for name in OPTIONS if name not in _OF_BOTH)


def _limit(value: Callable[[str, str], int], name: str, found: Mapping[str, str]) -> int | None:
    return value(name, found[name]) if name in found else None


def _log(found: Mapping[str, str]) -> str:
    """Where the log is: as `log` says or, which is the same, `load(…)`; else beside the query's checkpoint."""
    given = {name: found.get(name, "").strip() for name in ("log", "path", "checkpointLocation")}
    if given["log"] and given["path"] and _place(given["log"]) != _place(given["path"]):
        raise refused("log", "names another log than `load(…)` does", "Give one of them.")
    if not (given["log"] or given["path"] or given["checkpointLocation"]):
        raise refused("log", "is missing", LOG_HINT)
    return _place(given["log"] or given["path"] or f"{given['checkpointLocation'].rstrip('/')}/{LOG_OF_CHECKPOINT}")


def _place(text: str) -> str:
    """Tasks have other working folders than the driver. Spark writes folders as URLs too."""
    text = re.sub(r"^file:(//)?(?=/)", "", text)
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


def _point(name: str, text: str) -> Point:
    found = parse_point(text)
    if found is None:
        raise refused(name, "is no place in a log", EXAMPLES)
    return found


def _shape(found: Mapping[str, str], *, one: bool) -> Shape:
    default = Shape.TYPED if one else Shape.ENVELOPE
    shape = Shape(choice("shape", found.get("shape", default.value), [shape.value for shape in Shape]))
    if not one and shape is not Shape.ENVELOPE:
        raise refused("shape", "is not one for many tables", "Name one with `table`, or leave `shape` out.")
    return shape


def _with_envelope(found: Mapping[str, str]) -> bool:
    wanted = choice("onSchemaChange", found.get("onSchemaChange", "stop"), ["stop", "envelope"]) == "envelope"
    if wanted and found.get("shape", Shape.TYPED.value).strip().lower() != Shape.TYPED.value:
        raise refused("onSchemaChange", "is for typed columns", "An envelope takes any; the change feed cannot.")
    return wanted
