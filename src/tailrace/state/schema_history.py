"""Every shape that tables have had: what was made, what changed, what went, and when.

What must stay true of every history, and `tailrace.testing.schema_history_checks` checks it:

- A version is there before its first row is delivered (`state.feeding` sees to it), and never changes. Versions of one
  table are counted from 1 without a gap; only the oldest ever go.
- Telling the shape that a table has already adds nothing.
- The newest version of a table is always kept. Asking for what is gone is an error, never "there was none".
- A table that has the name of another, but not its number at the source, was made anew: the other one was dropped. One
  that has the number of another, but not its name, was renamed.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, Protocol, Self

from tailrace.errors import ConfigError, StateTrimmed
from tailrace.model.catalogue_facts import CatalogueFacts
from tailrace.model.evolution import Evolution, SchemaChange, SchemaChangeKind, compare_schemas, same_version
from tailrace.model.position_kinds import Position, PositionType, parse_position, position_type_of
from tailrace.model.schema import TableId, TableSchema

KEEP_LAST = 256


class SchemaEvent(enum.Enum):
    """What happened to the table. The value is what stands in stored records."""

    CREATE = "create"
    """It was made, or seen for the first time."""
    ALTER = "alter"
    DROP = "drop"
    """It went, or has another name now."""


@dataclass(frozen=True, kw_only=True)
class SchemaVersion:
    """One version of one table's shape."""

    table: TableId
    version: int
    event: SchemaEvent
    schema: TableSchema
    """Of a table that was dropped, the last one."""
    evolution: Evolution | None = None
    """What became of the table since the version before; None: there was none to compare with."""
    ddl: str | None = None
    """The statement, where the source tells it."""
    time: datetime | None = None
    """When the transaction of its first row was committed; None: not known any more."""
    position: Position | None = None
    """Of that transaction; None: not known, or not yet."""

    def to_json(self) -> dict[str, Any]:
        time = self.time and self.time.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        return {
            "schema": self.table.schema,
            "table": self.table.name,
            "version": self.version,
            "event": self.event.value,
            "time": time,
            "position_type": self.position and position_type_of(self.position).value,
            "position": self.position and str(self.position),
            "ddl": self.ddl,
            "evolution": self.evolution and self.evolution.to_json(),
            "shape": self.schema.to_json(),
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> SchemaVersion:
        position = stored["position"]
        return cls(
            table=TableId.from_json(stored),
            version=stored["version"],
            event=SchemaEvent(stored["event"]),
            schema=TableSchema.from_json(stored["shape"]),
            evolution=Evolution.from_json(stored["evolution"]) if stored["evolution"] else None,
            ddl=stored["ddl"],
            time=datetime.fromisoformat(stored["time"]) if stored["time"] else None,
            position=parse_position(PositionType(stored["position_type"]), position) if position else None,
        )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class Retention:
    """How many versions of each table are kept; what either limit lets go, goes. The newest always stays."""

    keep_last: int | None = KEEP_LAST
    max_age: timedelta | None = None
    """A version goes once the one after it is older. That is looked at when the table changes next, and at a start."""

    def __post_init__(self) -> None:
        if self.keep_last is None and self.max_age is None:
            raise ConfigError("a retention without a limit keeps everything", hint="Say so: `retention=None`.")
        if self.keep_last is not None and not _is_whole(self.keep_last):
            raise ConfigError("`keep_last` is not a whole number", hint="Use 1 or more.")
        if self.keep_last is not None and self.keep_last < 1:
            raise ConfigError("the newest version is always kept", keep_last=self.keep_last, hint="Use 1 or more.")
        if self.max_age is not None and not isinstance(self.max_age, timedelta):
            raise ConfigError("`max_age` is no time", hint="For example `timedelta(days=90)`.")
        if self.max_age is not None and self.max_age < timedelta(0):
            raise ConfigError("an age is not negative", hint="For example `timedelta(days=90)`.")

    def outdated(self, versions: Sequence[SchemaVersion], now: datetime) -> int:
        """How many of the oldest may go."""
        by_count = max(0, len(versions) - self.keep_last) if self.keep_last is not None else 0
        if self.max_age is None:
            return by_count
        limit = now - self.max_age
        by_age = 0
        while by_age < len(versions) - 1 and _known(versions[by_age + 1].time) < limit:
            by_age += 1
        return max(by_count, by_age)


DEFAULT_RETENTION = Retention()


class SchemaHistory(Protocol):
    """Keeps what is told. Any thread may call it. What was told is durable when the call returns."""

    retention: Retention | None
    """None: everything is kept, and grows with every change of a table's shape."""

    def record(
        self,
        shape: TableSchema,
        *,
        time: datetime | None = None,
        position: Position | None = None,
        ddl: str | None = None,
    ) -> SchemaVersion:
        """The version that is this shape: the newest, if it is the same, or else a new one. `time` is now, if not
        given."""

    def drop(
        self, table: TableId, *, time: datetime | None = None, position: Position | None = None, ddl: str | None = None
    ) -> SchemaVersion | None:
        """The table went. None if it was never there; told again, nothing is added."""

    def latest(self, table: TableId) -> SchemaVersion | None:
        """The newest version, which may be its drop; None if it was never there."""

    def at_version(self, table: TableId, version: int) -> SchemaVersion:
        """The version of this number."""

    def at_time(self, table: TableId, time: datetime) -> SchemaVersion | None:
        """The one that was in force then; None if the table was not there yet."""

    def versions(self, table: TableId) -> tuple[SchemaVersion, ...]:
        """All that are kept, oldest first."""

    def tables(self) -> tuple[TableId, ...]:
        """The tables there are versions of, in order."""


class _Happened(NamedTuple):
    """When and where it was told, and by what statement."""

    time: datetime | None
    position: Position | None
    ddl: str | None


class MemorySchemaHistory:
    """Versions for as long as the process lives; `FileSchemaHistory` keeps them."""

    def __init__(self, *, retention: Retention | None = DEFAULT_RETENTION) -> None:
        if retention is not None and not isinstance(retention, Retention):
            raise ConfigError(
                "`retention` is none", found=type(retention).__name__, hint="Give `Retention(keep_last=…)`, or None."
            )
        self.retention = retention
        self._kept: dict[TableId, list[SchemaVersion]] = {}
        self._tables: dict[int, TableId] = {}
        """By the source's number: who has it now."""
        self._facts: dict[TableId, CatalogueFacts] = {}
        """What was told last of its newest version."""
        self._one_at_a_time = threading.RLock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What one that keeps them elsewhere does besides.

    def close(self) -> None:
        """Let the next owner in."""

    def _add(self, version: SchemaVersion) -> None:
        """Make the version durable."""

    def _let_go(self, versions: Sequence[SchemaVersion]) -> None:
        """Remove the oldest versions of a table."""

    def _look(self) -> None:
        """Take notice of what others have written."""

    # ---- telling -----------------------------------------------------------------------------------------

    def record(
        self,
        shape: TableSchema,
        *,
        time: datetime | None = None,
        position: Position | None = None,
        ddl: str | None = None,
    ) -> SchemaVersion:
        if not isinstance(shape, TableSchema):
            raise ConfigError(
                "that is no shape of a table", found=type(shape).__name__, hint="Give the `TableSchema` that rows have."
            )
        return self._record(shape, _happened(time, position, ddl))

    def import_version(
        self, shape: TableSchema, *, time: datetime | None, position: Position | None, evolution: Evolution | None
    ) -> SchemaVersion:
        """Record what somebody else has kept: of what is old the time may not be known, and what became of the table
        is known already."""
        return self._record(shape, _Happened(time, position, None), evolution)

    def _record(self, shape: TableSchema, happened: _Happened, evolution: Evolution | None = None) -> SchemaVersion:
        with self._one_at_a_time:
            self._look()
            table, latest = shape.table, self._latest(shape.table)
            known = latest is not None and latest.event is not SchemaEvent.DROP
            if latest is not None and known and same_version(self._told(latest), shape):
                if shape.facts is not None:
                    self._facts[table] = shape.facts  # a TRUNCATE of today is not blamed on an ALTER of tomorrow
                return latest
            before = self._told(latest) if latest is not None and known else None
            if before is not None and before.relation != shape.relation:
                self._keep(happened, SchemaEvent.DROP, before, table)
                before = None
            origin = self._origin(shape) if before is None else None
            if origin is not None:
                before = self._told(origin)
                if origin.event is not SchemaEvent.DROP:
                    gone = _renamed(origin.table, table)
                    self._keep(happened, SchemaEvent.DROP, origin.schema, origin.table, gone)
            if before is None:
                return self._keep(happened, SchemaEvent.CREATE, shape, table)
            return self._keep(happened, SchemaEvent.ALTER, shape, table, evolution or compare_schemas(before, shape))

    def drop(
        self, table: TableId, *, time: datetime | None = None, position: Position | None = None, ddl: str | None = None
    ) -> SchemaVersion | None:
        _require_table(table)
        happened = _happened(time, position, ddl)
        with self._one_at_a_time:
            self._look()
            latest = self._latest(table)
            if latest is None or latest.event is SchemaEvent.DROP:
                return latest
            return self._keep(happened, SchemaEvent.DROP, latest.schema, table)

    def _origin(self, shape: TableSchema) -> SchemaVersion | None:
        """The newest version of the table that had this one's number under another name."""
        named = self._tables.get(shape.relation)
        latest = self._latest(named) if named is not None and named != shape.table else None
        if latest is None or latest.schema.relation != shape.relation:
            return None
        if latest.event is not SchemaEvent.DROP:
            return latest
        # Its drop may have been told already, just before whoever told it died.
        return latest if latest.evolution == _renamed(latest.table, shape.table) else None

    def _told(self, latest: SchemaVersion) -> TableSchema:
        return replace(latest.schema, facts=self._facts.get(latest.table, latest.schema.facts))

    def _keep(
        self,
        happened: _Happened,
        event: SchemaEvent,
        shape: TableSchema,
        table: TableId,
        evolution: Evolution | None = None,
    ) -> SchemaVersion:
        latest = self._latest(table)
        version = SchemaVersion(
            table=table,
            version=latest.version + 1 if latest else 1,
            event=event,
            schema=shape,
            evolution=evolution,
            ddl=happened.ddl,
            time=happened.time,
            position=happened.position,
        )
        self._add(version)
        self._take(version)
        if self.retention is not None:
            self._trim(table, self.retention)
        return version

    def _take(self, version: SchemaVersion) -> None:
        self._kept.setdefault(version.table, []).append(version)
        self._facts.pop(version.table, None)
        if version.event is not SchemaEvent.DROP:
            self._tables[version.schema.relation] = version.table
        else:
            self._tables.setdefault(version.schema.relation, version.table)

    def _trim(self, table: TableId, retention: Retention) -> None:
        kept = self._kept[table]
        gone = retention.outdated(kept, datetime.now(UTC))
        if gone:
            self._let_go(kept[:gone])
            del kept[:gone]

    # ---- asking ------------------------------------------------------------------------------------------

    def latest(self, table: TableId) -> SchemaVersion | None:
        _require_table(table)
        with self._one_at_a_time:
            self._look()
            return self._latest(table)

    def at_version(self, table: TableId, version: int) -> SchemaVersion:
        kept = self.versions(table)
        for item in kept:
            if item.version == version:
                return item
        if kept and _is_whole(version) and 0 < version < kept[0].version:
            raise _gone(kept)
        raise ConfigError(
            "the table has no such version",
            table=table,
            version=version,
            hint=f"It has {kept[0].version} to {kept[-1].version}." if kept else "Nothing is known of the table.",
        )

    def at_time(self, table: TableId, time: datetime) -> SchemaVersion | None:
        kept, then = self.versions(table), _with_zone(time)
        for item in reversed(kept):
            if _known(item.time) <= then:
                return item
        if kept and kept[0].version > 1:
            raise _gone(kept)
        return None

    def versions(self, table: TableId) -> tuple[SchemaVersion, ...]:
        _require_table(table)
        with self._one_at_a_time:
            self._look()
            return tuple(self._kept.get(table, ()))

    def tables(self) -> tuple[TableId, ...]:
        with self._one_at_a_time:
            self._look()
            return tuple(sorted(self._kept))

    def _latest(self, table: TableId) -> SchemaVersion | None:
        kept = self._kept.get(table)
        return kept[-1] if kept else None


def _gone(kept: Sequence[SchemaVersion]) -> StateTrimmed:
    first = kept[0]
    return StateTrimmed(
        "older versions of the table's shape are no longer kept",
        table=first.table,
        first=first.version,
        time=first.time,
        hint="Keep more of them: see `Retention`.",
    )


def _renamed(old: TableId, new: TableId) -> Evolution:
    return Evolution(
        changes=(SchemaChange(kind=SchemaChangeKind.RENAME_TABLE, old=str(old), new=str(new)),), rewritten=False
    )


def _happened(time: datetime | None, position: Position | None, ddl: str | None) -> _Happened:
    if position is not None:
        position_type_of(position)
    if ddl is not None and not isinstance(ddl, str):
        raise ConfigError("`ddl` is no text", found=type(ddl).__name__, hint="Give the statement, or nothing.")
    return _Happened(datetime.now(UTC) if time is None else _with_zone(time), position, ddl)


def _with_zone(time: datetime) -> datetime:
    if not isinstance(time, datetime) or time.tzinfo is None:
        raise ConfigError("a version's time needs a zone", hint="For example `datetime.now(UTC)`.")
    return time.astimezone(UTC)


def _require_table(table: object) -> None:
    """A text is no table's name: of nothing that is asked for by one would anything be known."""
    if not isinstance(table, TableId):
        raise ConfigError(
            "a table is not named by a `TableId`",
            found=type(table).__name__,
            hint='Give schema and name apart: `TableId("public", "orders")`.',
        )


def _known(time: datetime | None) -> datetime:
    """One that is not known any more lies before all that are."""
    return time or datetime.min.replace(tzinfo=UTC)
