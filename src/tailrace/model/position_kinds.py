"""The positions of every kind of source, as values. Each has one text and is parsed from it.

An invalid text is refused, never corrected: a position read wrong would skip rows or repeat them. `reaches` and
`covers` compare positions; their texts are never compared. Positions of one history are ordered. Sets of GTIDs have
only a partial order, so of two sets neither may reach the other. Custom texts have no order: `reaches` lets any follow
any, and only for equal ones it is certain that one covers the other.
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
"""Far beyond any set of GTIDs, which can be long."""
_BINLOG_BEGIN = 4
"""The file's magic bytes are below it."""
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
    """The kind of positions that a source has. The value is the one stored in records."""

    POSTGRESQL_LSN = "postgresql-lsn"
    MYSQL_BINLOG = "mysql-binlog"
    """File and offset, of MySQL or MariaDB."""
    MYSQL_GTID = "mysql-gtid"
    MARIADB_GTID = "mariadb-gtid"
    SQLSERVER_LSN = "sqlserver-lsn"
    CUSTOM = "custom"
    """A source with positions of its own."""


@dataclass(frozen=True)
class BinlogPosition:
    """A file of MySQL's or MariaDB's binary log, and the next event's offset."""

    file: str
    offset: int

    def __post_init__(self) -> None:
        match = _BINLOG.fullmatch(str(self))
        is_number = isinstance(self.offset, int)
        if not match or not is_number or not int(match.group(2)) or not _BINLOG_BEGIN <= self.offset <= _SIGNED_64_MAX:
            raise invalid_position_error(
                "a binary log position",
                str(self),
                f"It looks like mysql-bin.000042:1547, with an offset of {_BINLOG_BEGIN} or more.",
            )

    @classmethod
    def parse(cls, text: str) -> BinlogPosition:
        match = _BINLOG.fullmatch(text) if isinstance(text, str) else None
        if not match:
            raise invalid_position_error("a binary log position", text, "It looks like mysql-bin.000042:1547.")
        return cls(f"{match.group(1)}.{match.group(2)}", int(match.group(3)))

    def __str__(self) -> str:
        return f"{self.file}:{self.offset}"

    def reaches(self, other: BinlogPosition) -> bool:
        """Compare by the file's number, which grows beyond six digits. A file of another name is in another log."""
        (mine, number), (theirs, before) = (item.file.rsplit(".", 1) for item in (self, other))
        return mine == theirs and (int(number), self.offset) >= (int(before), other.offset)


Intervals: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class MysqlGtidSet:
    """The transactions that MySQL executed: per server (and tag), intervals of numbers, both ends included."""

    executed: Mapping[tuple[str, str], Intervals]
    """By UUID and tag (empty: no tag). Intervals are in order, and none touches the next."""

    def __post_init__(self) -> None:
        ordered = {key: _joined(self.executed[key]) for key in sorted(self.executed)}
        if not ordered:
            raise invalid_position_error(
                "a set of GTIDs", "", "An empty set has no position. Check that `gtid_mode` is on at the server."
            )
        for (uuid, tag), intervals in ordered.items():
            fits = all(1 <= first <= last < _SIGNED_64_MAX for first, last in intervals)
            if not (intervals and fits and _UUID.fullmatch(uuid) and (not tag or _TAG.fullmatch(tag))):
                raise _not_gtids(_written(ordered))
        object.__setattr__(self, "executed", MappingProxyType(ordered))

    @classmethod
    def parse(cls, text: str) -> MysqlGtidSet:
        """Parse `gtid_executed`, with spaces or line breaks between servers, and with tags (MySQL 8.3)."""
        executed: dict[tuple[str, str], list[tuple[int, int]]] = {}
        if not isinstance(text, str):
            raise _not_gtids(text)
        for part in text.lower().split(","):
            uuid, *items = part.strip().split(":")
            tag, count = "", 0
            for item in items:
                if interval := _INTERVAL.fullmatch(item):
                    first = int(interval.group(1))
                    last = int(interval.group(2) or first)
                    if last < first:
                        raise _not_gtids(text)
                    executed.setdefault((uuid, tag), []).append((first, last))
                    count += 1
                elif _TAG.fullmatch(item) and (count or not tag):
                    tag, count = item, 0
                else:
                    raise _not_gtids(text)
            if not count:
                if not text.strip():
                    break
                raise _not_gtids(text)
        return cls({key: tuple(intervals) for key, intervals in executed.items()})

    def __str__(self) -> str:
        return _written(self.executed)

    def __hash__(self) -> int:
        return hash(str(self))

    def __reduce__(self) -> tuple[object, ...]:
        return MysqlGtidSet, (dict(self.executed),)

    def reaches(self, other: MysqlGtidSet) -> bool:
        """Return whether it has everything that the other has."""
        return all(
            any(first <= low and high <= last for first, last in self.executed.get(key, ()))
            for key, intervals in other.executed.items()
            for low, high in intervals
        )


def _written(executed: Mapping[tuple[str, str], Intervals]) -> str:
    servers: dict[str, str] = {}
    for (uuid, tag), intervals in executed.items():
        numbers = [f"{first}-{last}" if last > first else str(first) for first, last in intervals]
        servers[uuid] = ":".join([servers.get(uuid, uuid), *([tag] if tag else []), *numbers])
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
    """A position of MariaDB: per replication domain the last transaction, as server and sequence number."""

    last: Mapping[int, tuple[int, int]]
    """By domain: the server that created it, and its number."""

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
        """Parse `gtid_binlog_pos`; a domain occurs in it once."""
        last: dict[int, tuple[int, int]] = {}
        for part in text.split(",") if isinstance(text, str) else ("",):
            match = _MARIADB.fullmatch(part.strip())
            if not match:
                raise invalid_position_error(
                    "a GTID position of MariaDB", text, "It looks like 0-1-100 or 0-1-100,7-2-5."
                )
            domain, server, number = map(int, match.groups())
            if domain in last:
                raise invalid_position_error(
                    "a GTID position of MariaDB",
                    text,
                    f"Domain {domain} occurs twice: use `gtid_binlog_pos`, not `gtid_binlog_state`.",
                )
            last[domain] = (server, number)
        return cls(last)

    def __str__(self) -> str:
        return ",".join(f"{domain}-{server}-{number}" for domain, (server, number) in self.last.items())

    def __hash__(self) -> int:
        return hash(str(self))

    def __reduce__(self) -> tuple[object, ...]:
        return MariadbGtidSet, (dict(self.last),)

    def reaches(self, other: MariadbGtidSet) -> bool:
        """Return whether each domain of the other is here, and as far.

        The same number from two servers means two histories.
        """
        return all(
            domain in self.last and (self.last[domain][1] > number or self.last[domain] == (server, number))
            for domain, (server, number) in other.last.items()
        )


@dataclass(frozen=True)
class SqlServerLsn:
    """A position in SQL Server's log: virtual file, block, slot."""

    file: int
    block: int
    slot: int

    def __post_init__(self) -> None:
        parts = (self.file, self.block, self.slot)
        limits = (_32_MAX, _32_MAX, _16_MAX)
        if not all(isinstance(part, int) and 0 <= part <= limit for part, limit in zip(parts, limits, strict=True)):
            raise ConfigError(
                "a log sequence number of SQL Server must have 80 bits",
                parts=parts,
                hint='Parse its text: `SqlServerLsn.parse("0000002d:00000048:0003")`.',
            )
        if not (self.file or self.block or self.slot):
            raise invalid_position_error(
                "a log sequence number of SQL Server",
                str(self),
                "Check the capture instance: `sys.fn_cdc_get_min_lsn` returns zero for one that does not exist.",
            )

    @classmethod
    def parse(cls, text: str) -> SqlServerLsn:
        """Parse both of the server's texts: `0x0000002D000000480003` and `0000002d:00000048:0003`."""
        is_text = isinstance(text, str)
        match = (_SQLSERVER.fullmatch(text) or _SQLSERVER_BINARY.fullmatch(text)) if is_text else None
        if not match:
            raise invalid_position_error(
                "a log sequence number of SQL Server",
                text,
                "It looks like 0000002d:00000048:0003 or 0x0000002D000000480003.",
            )
        file, block, slot = (int(part, 16) for part in match.groups())
        return cls(file, block, slot)

    def __str__(self) -> str:
        return f"{self.file:08x}:{self.block:08x}:{self.slot:04x}"

    def reaches(self, other: SqlServerLsn) -> bool:
        return (self.file, self.block, self.slot) >= (other.file, other.block, other.slot)


@dataclass(frozen=True)
class CustomPosition:
    """A position that only its source understands.

    Two that are whole numbers are ordered. Others are only equal or not, so a rewind among them cannot be detected.
    """

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
"""The position type of a source; PostgreSQL's by default."""
P_co = TypeVar("P_co", bound=Position, default=Lsn, covariant=True)
"""The same, for values that a source only returns."""

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
    """Return the type of this position."""
    kind = _TYPES.get(type(position))
    if kind is None:
        raise ConfigError(
            "the value is not a position",
            found=type(position).__name__,
            hint='Create one from its text: `Lsn.parse("16/B374D848")`, `CustomPosition("42")`, `Checkpoint.parse(…)`.',
        )
    return kind


def parse_position(kind: PositionType, text: str) -> Position:
    """Return the position that this text means; refuse anything else."""
    if not isinstance(text, str):
        raise ConfigError(
            "the text of a position must be a string", type=kind.value, found=type(text).__name__, hint="Give a text."
        )
    if len(text) > TEXT_CHARACTERS_MAX:
        raise ConfigError(
            "the text of a position is too long",
            type=kind.value,
            characters=len(text),
            hint=f"Give {TEXT_CHARACTERS_MAX:,} characters at most.",
        )
    return _PARSERS[kind](text)


def reaches(new: Position, old: Position) -> bool:
    """Return whether `new` equals `old` or is after it. Positions of two types never do."""
    if isinstance(new, Lsn):
        return isinstance(old, Lsn) and new >= old
    return type(new) is type(old) and new.reaches(old)  # type: ignore[arg-type] # both are of the one type


def covers(position: Position, other: Position) -> bool:
    """Return whether everything up to `other` certainly is at or before `position`.

    A source that delivers `other` again then repeats itself, and a target `other` has been reached.
    """
    return position == other or (reaches(position, other) and not reaches(other, position))


def bytes_between(start: Position, end: Position) -> int:
    """Return the bytes of source log between two positions; 0 where they cannot say."""
    return end - start if isinstance(start, Lsn) and isinstance(end, Lsn) else 0


def _not_gtids(text: object) -> ConfigError:
    return invalid_position_error("a set of GTIDs", text, "It looks like 3e11fa47-71ca-11e1-9e33-c80aa9429562:1-77.")
