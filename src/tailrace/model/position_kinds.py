"""The positions of every kind of source, as values: each has one text, and reads it back.

A text that is not one is refused, never mended: a position read wrong would skip rows or bring them again. Whether one
position follows another is asked of `reaches` and `covers`, never of their texts. Positions of one history have an
order; sets of GTIDs only a partial one, so of two positions neither may reach the other; texts of a source's own none,
so that `reaches` lets any follow any, and only of equal ones is it certain that one covers the other.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from typing_extensions import TypeVar

from tailrace.errors import ConfigError
from tailrace.model.position import Lsn, invalid_position_error

TEXT_CHARACTERS_MAX = 1 << 20
"""A set of GTIDs can be long; this is far beyond any."""
_BINLOG_BEGIN = 4
"""Below it lie the file's magic bytes."""
_SIGNED_64_MAX = (1 << 63) - 1
_16_MAX, _32_MAX, _64_MAX = (1 << 16) - 1, (1 << 32) - 1, (1 << 64) - 1

_BINLOG = re.compile(r"([^\s/\\:\x00-\x1f\x7f]+)\.([0-9]{6,10}):([0-9]{1,19})")
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_TAG = re.compile(r"[a-z_][a-z0-9_]{0,31}")
_INTERVAL = re.compile(r"([0-9]{1,19})(?:-([0-9]{1,19}))?")
_MARIADB = re.compile(r"([0-9]{1,10})-([0-9]{1,10})-([0-9]{1,20})")
_SQLSERVER = re.compile(r"([0-9A-Fa-f]{8}):([0-9A-Fa-f]{8}):([0-9A-Fa-f]{4})")
_SQLSERVER_BINARY = re.compile(r"0[xX]([0-9A-Fa-f]{8})([0-9A-Fa-f]{8})([0-9A-Fa-f]{4})")


class PositionType(enum.Enum):
    """How a source counts. The value is what stands in stored records."""

    POSTGRESQL_LSN = "postgresql-lsn"
    MYSQL_BINLOG = "mysql-binlog"
    """File and offset, of MySQL or MariaDB."""
    MYSQL_GTID = "mysql-gtid"
    MARIADB_GTID = "mariadb-gtid"
    SQLSERVER_LSN = "sqlserver-lsn"
    CUSTOM = "custom"
    """A source of someone's own."""


@dataclass(frozen=True)
class BinlogPosition:
    """A file of MySQL's or MariaDB's binary log, and the offset in it of the next event."""

    file: str
    offset: int

    def __post_init__(self) -> None:
        found = _BINLOG.fullmatch(str(self))
        is_number = isinstance(self.offset, int)
        if not found or not is_number or not int(found.group(2)) or not _BINLOG_BEGIN <= self.offset <= _SIGNED_64_MAX:
            raise invalid_position_error(
                "a binary log position",
                str(self),
                f"It looks like mysql-bin.000042:1547, with an offset of {_BINLOG_BEGIN} or more.",
            )

    @classmethod
    def parse(cls, text: str) -> BinlogPosition:
        found = _BINLOG.fullmatch(text) if isinstance(text, str) else None
        if not found:
            raise invalid_position_error("a binary log position", text, "It looks like mysql-bin.000042:1547.")
        return cls(f"{found.group(1)}.{found.group(2)}", int(found.group(3)))

    def __str__(self) -> str:
        return f"{self.file}:{self.offset}"

    def reaches(self, other: BinlogPosition) -> bool:
        """By the number of the file, which grows beyond six digits; files of another name are another log's."""
        (mine, number), (theirs, before) = (item.file.rsplit(".", 1) for item in (self, other))
        return mine == theirs and (int(number), self.offset) >= (int(before), other.offset)


Intervals: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class MysqlGtidSet:
    """The transactions of MySQL that were taken: of each server (and tag), intervals of numbers, both ends included."""

    executed: Mapping[tuple[str, str], Intervals]
    """By UUID and tag (empty: none); intervals are in order, and none touches the next."""

    def __post_init__(self) -> None:
        ordered = {key: _joined(self.executed[key]) for key in sorted(self.executed)}
        if not ordered:
            raise invalid_position_error(
                "a set of GTIDs", "", "An empty set says nothing: is `gtid_mode` on at the server?"
            )
        for (uuid, tag), intervals in ordered.items():
            fits = all(1 <= first <= last < _SIGNED_64_MAX for first, last in intervals)
            if not (intervals and fits and _UUID.fullmatch(uuid) and (not tag or _TAG.fullmatch(tag))):
                raise _not_gtids(_written(ordered))
        object.__setattr__(self, "executed", MappingProxyType(ordered))

    @classmethod
    def parse(cls, text: str) -> MysqlGtidSet:
        """As `gtid_executed` shows it, with spaces or line breaks between servers, and with tags (MySQL 8.3)."""
        found: dict[tuple[str, str], list[tuple[int, int]]] = {}
        if not isinstance(text, str):
            raise _not_gtids(text)
        for part in text.lower().split(","):
            uuid, *items = part.strip().split(":")
            tag, told = "", 0
            for item in items:
                if interval := _INTERVAL.fullmatch(item):
                    first = int(interval.group(1))
                    last = int(interval.group(2) or first)
                    if last < first:
                        raise _not_gtids(text)
                    found.setdefault((uuid, tag), []).append((first, last))
                    told += 1
                elif _TAG.fullmatch(item) and (told or not tag):
                    tag, told = item, 0
                else:
                    raise _not_gtids(text)
            if not told:
                if not text.strip():
                    break
                raise _not_gtids(text)
        return cls({key: tuple(intervals) for key, intervals in found.items()})

    def __str__(self) -> str:
        return _written(self.executed)

    def __hash__(self) -> int:
        return hash(str(self))

    def __reduce__(self) -> tuple[object, ...]:
        return MysqlGtidSet, (dict(self.executed),)

    def reaches(self, other: MysqlGtidSet) -> bool:
        """Whether it has everything that the other has."""
        return all(
            any(first <= low and high <= last for first, last in self.executed.get(key, ()))
            for key, intervals in other.executed.items()
            for low, high in intervals
        )


def _written(taken: Mapping[tuple[str, str], Intervals]) -> str:
    servers: dict[str, str] = {}
    for (uuid, tag), intervals in taken.items():
        told = [f"{first}-{last}" if last > first else str(first) for first, last in intervals]
        servers[uuid] = ":".join([servers.get(uuid, uuid), *([tag] if tag else []), *told])
    return ",".join(servers.values())


def _joined(intervals: Intervals) -> Intervals:
    joined: list[tuple[int, int]] = []
    for first, last in sorted(intervals):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return tuple(joined)


@dataclass(frozen=True)
class MariadbGtidSet:
    """A position of MariaDB: of each replication domain the last transaction, by server and sequence number."""

    last: Mapping[int, tuple[int, int]]
    """By domain: the server that made it, and its number."""

    def __post_init__(self) -> None:
        fits = all(
            0 <= domain <= _32_MAX and 1 <= server <= _32_MAX and 1 <= number <= _64_MAX
            for domain, (server, number) in self.last.items()
        )
        if not self.last or not fits:
            raise invalid_position_error(
                "a GTID position of MariaDB", str(self), "It looks like 0-1-100 or 0-1-100,7-2-5."
            )
        object.__setattr__(self, "last", MappingProxyType({domain: self.last[domain] for domain in sorted(self.last)}))

    @classmethod
    def parse(cls, text: str) -> MariadbGtidSet:
        """As `gtid_binlog_pos` shows it; a domain stands in it once."""
        found: dict[int, tuple[int, int]] = {}
        for part in text.split(",") if isinstance(text, str) else ("",):
            one = _MARIADB.fullmatch(part.strip())
            if not one:
                raise invalid_position_error(
                    "a GTID position of MariaDB", text, "It looks like 0-1-100 or 0-1-100,7-2-5."
                )
            domain, server, number = map(int, one.groups())
            if domain in found:
                raise invalid_position_error(
                    "a GTID position of MariaDB",
                    text,
                    f"Domain {domain} stands in it twice: take `gtid_binlog_pos`, not `gtid_binlog_state`.",
                )
            found[domain] = (server, number)
        return cls(found)

    def __str__(self) -> str:
        return ",".join(f"{domain}-{server}-{number}" for domain, (server, number) in self.last.items())

    def __hash__(self) -> int:
        return hash(str(self))

    def __reduce__(self) -> tuple[object, ...]:
        return MariadbGtidSet, (dict(self.last),)

    def reaches(self, other: MariadbGtidSet) -> bool:
        """Whether each domain of the other is here, and as far. One number by two servers is two histories."""
        return all(
            domain in self.last and (self.last[domain][1] > number or self.last[domain] == (server, number))
            for domain, (server, number) in other.last.items()
        )


@dataclass(frozen=True)
class SqlServerLsn:
    """A place in SQL Server's log: virtual file, block, slot."""

    file: int
    block: int
    slot: int

    def __post_init__(self) -> None:
        parts = (self.file, self.block, self.slot)
        limits = (_32_MAX, _32_MAX, _16_MAX)
        if not all(isinstance(part, int) and 0 <= part <= limit for part, limit in zip(parts, limits, strict=True)):
            raise ConfigError(
                "a log sequence number of SQL Server has 80 bits",
                parts=parts,
                hint='Read its text: `SqlServerLsn.parse("0000002d:00000048:0003")`.',
            )
        if not (self.file or self.block or self.slot):
            raise invalid_position_error(
                "a log sequence number of SQL Server",
                str(self),
                "Zero is what `sys.fn_cdc_get_min_lsn` answers for a capture instance that is not there.",
            )

    @classmethod
    def parse(cls, text: str) -> SqlServerLsn:
        """Both forms the server knows: `0x0000002D000000480003` and `0000002d:00000048:0003`."""
        is_text = isinstance(text, str)
        found = (_SQLSERVER.fullmatch(text) or _SQLSERVER_BINARY.fullmatch(text)) if is_text else None
        if not found:
            raise invalid_position_error(
                "a log sequence number of SQL Server",
                text,
                "It looks like 0000002d:00000048:0003 or 0x0000002D000000480003.",
            )
        file, block, slot = (int(part, 16) for part in found.groups())
        return cls(file, block, slot)

    def __str__(self) -> str:
        return f"{self.file:08x}:{self.block:08x}:{self.slot:04x}"

    def reaches(self, other: SqlServerLsn) -> bool:
        return (self.file, self.block, self.slot) >= (other.file, other.block, other.slot)


@dataclass(frozen=True)
class CustomPosition:
    """A position that only its source understands. Two that are whole numbers have an order; others are only equal or
    not, so that a rewind among them cannot be seen."""

    text: str

    def __post_init__(self) -> None:
        is_text = isinstance(self.text, str)
        if not is_text or not 0 < len(self.text) <= TEXT_CHARACTERS_MAX or not self.text.isprintable():
            raise invalid_position_error("a position", self.text, "It is printable text, and not empty.")

    def __str__(self) -> str:
        return self.text

    def reaches(self, other: CustomPosition) -> bool:
        if self._number is None or other._number is None:
            return True
        return self._number >= other._number

    @property
    def _number(self) -> tuple[int, str] | None:
        if not (self.text.isascii() and self.text.isdigit()):
            return None
        digits = self.text.lstrip("0")
        return len(digits), digits  # in the order of the numbers, however long they are


Position: TypeAlias = Lsn | BinlogPosition | MysqlGtidSet | MariadbGtidSet | SqlServerLsn | CustomPosition

P = TypeVar("P", bound=Position, default=Lsn)
"""What a source counts in; where nobody says, as PostgreSQL does."""
P_co = TypeVar("P_co", bound=Position, default=Lsn, covariant=True)
"""The same of what a source gives."""

_TYPES: dict[type, PositionType] = {
    Lsn: PositionType.POSTGRESQL_LSN,
    BinlogPosition: PositionType.MYSQL_BINLOG,
    MysqlGtidSet: PositionType.MYSQL_GTID,
    MariadbGtidSet: PositionType.MARIADB_GTID,
    SqlServerLsn: PositionType.SQLSERVER_LSN,
    CustomPosition: PositionType.CUSTOM,
}


_PARSERS: dict[PositionType, Callable[[str], Position]] = {
    PositionType.POSTGRESQL_LSN: Lsn.parse,
    PositionType.MYSQL_BINLOG: BinlogPosition.parse,
    PositionType.MYSQL_GTID: MysqlGtidSet.parse,
    PositionType.MARIADB_GTID: MariadbGtidSet.parse,
    PositionType.SQLSERVER_LSN: SqlServerLsn.parse,
    PositionType.CUSTOM: CustomPosition,
}


def position_type_of(position: Position) -> PositionType:
    """How this position counts."""
    kind = _TYPES.get(type(position))
    if kind is None:
        raise ConfigError(
            "that is no position",
            found=type(position).__name__,
            hint='Make one of its text: `Lsn.parse("16/B374D848")`, `CustomPosition("42")`, `Checkpoint.parse(…)`.',
        )
    return kind


def parse_position(kind: PositionType, text: str) -> Position:
    """The position that this text is; anything else is refused."""
    if not isinstance(text, str):
        raise ConfigError("a position's text is none", type=kind.value, found=type(text).__name__, hint="Give a text.")
    if len(text) > TEXT_CHARACTERS_MAX:
        raise ConfigError(
            "a position is not that long",
            type=kind.value,
            characters=len(text),
            hint=f"It has {TEXT_CHARACTERS_MAX:,} characters at most.",
        )
    return _PARSERS[kind](text)


def reaches(new: Position, old: Position) -> bool:
    """Whether `new` is `old`, or lies behind it. Positions of two types never do."""
    if isinstance(new, Lsn):
        return isinstance(old, Lsn) and new >= old
    return type(new) is type(old) and new.reaches(old)  # type: ignore[arg-type] # both are of the one type


def covers(position: Position, other: Position) -> bool:
    """Whether everything up to `other` certainly lies at or before `position`: a source that gives it again repeats
    itself, and a target that it is was reached."""
    return position == other or (reaches(position, other) and not reaches(other, position))


def bytes_between(start: Position, end: Position) -> int:
    """How much of the source's log lies between two positions; 0 where they do not tell."""
    return end - start if isinstance(start, Lsn) and isinstance(end, Lsn) else 0


def _not_gtids(text: object) -> ConfigError:
    return invalid_position_error("a set of GTIDs", text, "It looks like 3e11fa47-71ca-11e1-9e33-c80aa9429562:1-77.")
