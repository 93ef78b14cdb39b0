"""Parse the options of a database read, and describe each task's part."""

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
RECREATE_HINT = "Create the DataFrame again, with `spark.read`, and use it at once"


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """The table to read, and what the read may take of the source."""

    url: str = field(repr=False)
    table: TableId
    columns: tuple[str, ...] | None
    where: str | None = field(repr=False)
    chunk_bytes: int
    partitions_max: int
    snapshot_seconds: float
    idle_seconds: float

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> ReadOptions:
        """Parse the options; refuse each that is invalid."""
        values = canonical_options(options, TABLE_OPTIONS)
        if not values.get("url", "").strip():
            raise ConfigError(
                "neither the option `url` nor the option `log` is given",
                hint="For a database table give `url` and `table`. For a change log, as a stream or as a range, give "
                "`log`, and `table` or `tables`; for a stream that captures for itself, `url` as well.",
            )
        if not values.get("table", "").strip():
            raise option_error("table", "is missing", 'Name the table: .option("table", …)')
        return cls(
            url=parse_source_url(values["url"]),
            table=parse_table_name("table", values["table"]),
            columns=parse_column_names("columns", values["columns"]) if "columns" in values else None,
            where=values.get("where"),
            chunk_bytes=parse_size("chunkBytes", values.get("chunkBytes", str(CHUNK_BYTES))),
            partitions_max=parse_count("maxPartitions", values.get("maxPartitions", str(PARTITIONS_MAX))),
            snapshot_seconds=parse_seconds("snapshotSeconds", values.get("snapshotSeconds", str(SNAPSHOT_SECONDS))),
            idle_seconds=parse_seconds("idleSeconds", values.get("idleSeconds", str(IDLE_SECONDS))),
        )


@dataclass(frozen=True, kw_only=True)
class TableReadPart:
    """Chunks that one task reads, and all that it needs for that except the connection."""

    schema: TableSchema
    chunks: tuple[Chunk, ...]
    condition: str | None = field(repr=False)
    snapshot: str
    snapshot_id: str
    """Number of the snapshot's holder."""
    seconds_max: float
