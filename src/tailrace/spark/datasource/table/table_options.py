"""What a read of `format("cdc")` is told: the options as they are written, and what one task is to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tailrace.capture.postgres.chunks import CHUNK_BYTES, Chunk
from tailrace.errors import ConfigError
from tailrace.model.schema import TableId, TableSchema
from tailrace.spark.datasource.option_values import (
    TABLE_OPTIONS,
    canonical_options,
    option_error,
    parse_column_names,
    parse_count,
    parse_seconds,
    parse_size,
    parse_source_url,
    parse_table_name,
)

SNAPSHOT_SECONDS = 3600.0
IDLE_SECONDS = 60.0
PARTITIONS_MAX = 10_000
RECREATE_HINT = "Make the DataFrame anew, with `spark.read`, and use it at once"


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What a read is of, and what it may take of the source."""

    url: str = field(repr=False)
    table: TableId
    columns: tuple[str, ...] | None
    where: str | None = field(repr=False)
    chunk_bytes: int
    partitions_max: int
    snapshot_seconds: float
    idle_seconds: float

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> ReadOptions:
        """The options as they are written, each refused that cannot be meant."""
        found = canonical_options(given, TABLE_OPTIONS)
        if not found.get("url", "").strip():
            raise ConfigError(
                "neither the option `url` nor the option `log` is given",
                hint="A table of a database as it is has `url` and `table`; a change log, as a stream or as a range, "
                "has `log`, and `table` or `tables`. A stream that captures for itself has `url` and `log`.",
            )
        if not found.get("table", "").strip():
            raise option_error("table", "is missing", '.option("table", …)')
        return cls(
            url=parse_source_url(found["url"]),
            table=parse_table_name("table", found["table"]),
            columns=parse_column_names("columns", found["columns"]) if "columns" in found else None,
            where=found.get("where"),
            chunk_bytes=parse_size("chunkBytes", found.get("chunkBytes", str(CHUNK_BYTES))),
            partitions_max=parse_count("maxPartitions", found.get("maxPartitions", str(PARTITIONS_MAX))),
            snapshot_seconds=parse_seconds("snapshotSeconds", found.get("snapshotSeconds", str(SNAPSHOT_SECONDS))),
            idle_seconds=parse_seconds("idleSeconds", found.get("idleSeconds", str(IDLE_SECONDS))),
        )


@dataclass(frozen=True, kw_only=True)
class TableReadPart:
    """Chunks that one task reads, and all that it must know for that but how to connect."""

    schema: TableSchema
    chunks: tuple[Chunk, ...]
    condition: str | None = field(repr=False)
    snapshot: str
    snapshot_id: str
    """Of the snapshot's holder."""
    seconds_max: float
