"""What a read of `format("cdc")` is told: the options as they are written, and what one task is to do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tailrace.capture.postgres.chunks import CHUNK_BYTES, Chunk
from tailrace.errors import ConfigError
from tailrace.model.schema import TableId, TableSchema

SNAPSHOT_SECONDS = 3600.0
IDLE_SECONDS = 60.0
PARTITIONS_MAX = 10_000
ANEW = "Make the DataFrame anew, with `spark.read`, and use it at once"

_OPTIONS = (
    "url", "table", "columns", "where", "chunkBytes", "maxPartitions", "snapshotSeconds", "idleSeconds",
)  # fmt: skip
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_QUOTED = r'"(?:[^"]|"")+"'
_COLUMN = rf'\s*(?:{_QUOTED}|[^\s",][^",]*)\s*'


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
        known = {name.lower(): name for name in _OPTIONS}
        for name in given:
            if name.lower() not in known:
                raise _refused(name, "is not known", f"The options are {', '.join(_OPTIONS)}.")
        found = {known[name.lower()]: value for name, value in given.items()}
        for name in ("url", "table"):
            if not found.get(name, "").strip():
                raise _refused(name, "is missing", f'.option("{name}", …)')
        # A list of settings such as `host=… password=…` would be taken for a name in messages.
        if not re.match(r"postgres(ql)?://", found["url"]):
            raise _refused("url", "is not a URL of PostgreSQL", "For example: postgresql://user@host:5432/database")
        return cls(
            url=found["url"], table=_table(found["table"]),
            columns=_columns(found["columns"]) if "columns" in found else None,
            where=found.get("where"),
            chunk_bytes=_size("chunkBytes", found.get("chunkBytes", str(CHUNK_BYTES))),
            partitions_max=_count("maxPartitions", found.get("maxPartitions", str(PARTITIONS_MAX))),
            snapshot_seconds=_seconds("snapshotSeconds", found.get("snapshotSeconds", str(SNAPSHOT_SECONDS))),
            idle_seconds=_seconds("idleSeconds", found.get("idleSeconds", str(IDLE_SECONDS))),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ReadPart:
    """Chunks that one task reads, and all that it must know for that but how to connect."""

    schema: TableSchema
    chunks: tuple[Chunk, ...]
    condition: str | None = field(repr=False)
    snapshot: str
    number: str
    """Of the snapshot's holder."""
    seconds_max: float


def _refused(name: str, why: str, hint: str) -> ConfigError:
    return ConfigError(f"the option `{name}` {why}", hint=hint)


def _table(text: str) -> TableId:
    match = re.fullmatch(rf"({_QUOTED}|[^\".]+)\.({_QUOTED}|[^\".]+)", text.strip())
    if match is None:
        raise _refused(
            "table", "is not the name of a table with its schema",
            'For example: public.orders. A name with a dot in it is quoted: "a.b"."c".',
        )  # fmt: skip
    return TableId(_unquoted(match[1]), _unquoted(match[2]))


def _columns(text: str) -> tuple[str, ...]:
    if not re.fullmatch(rf"{_COLUMN}(,{_COLUMN})*", text):
        raise _refused(
            "columns", "is not a list of names", 'For example: id, state, total. Quoted: "a, b", "c".'
        )
    names = tuple(_unquoted(name.strip()) for name in re.findall(rf"(?:{_QUOTED}|[^\",])+", text))
    if len(set(names)) < len(names):
        raise _refused("columns", "names a column twice", "Name each once.")
    return names


def _unquoted(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name


def _size(name: str, text: str) -> int:
    match = re.fullmatch(r"([0-9]+) ?([A-Za-z]*)", text.strip())
    unit = match and {unit.lower(): size for unit, size in _UNITS.items()}.get(match[2].lower())
    if match is None or not unit or not 0 < int(match[1]) * unit < 1 << 60:
        raise _refused(name, "is not a size", f"For example: 64MiB; the units are {', '.join(filter(None, _UNITS))}.")
    return int(match[1]) * unit


def _count(name: str, text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text.strip()):
        raise _refused(name, "is not a whole number above 0", "For example: 200")
    return int(text)


def _seconds(name: str, text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", text.strip()) or float(text) <= 0:
        raise _refused(name, "is not a number of seconds", "For example: 3600")
    return float(text)
