"""Schema history: every version of every table's schema, with the time it was made.

Every history keeps these promises, and `tailrace.testing.schema_history_checks` checks them:

- A version is stored before its first row is delivered (`state.recorded_stream` does that), and never changes. The
  versions of one table are counted from 1 without a gap; only the oldest are ever removed.
- Recording the schema that a table has already adds nothing.
- The newest version of a table is always kept. Asking for a removed version is an error, never the answer that there
  was none.
- A table with the name of another, but not its number at the source, was created again: the other one was dropped. A
  table with the number of another, but not its name, was renamed.
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
    """One event in a table's history. The value is written to stored records."""

    CREATE = "create"
    """The table was created, or seen for the first time."""
    ALTER = "alter"
    DROP = "drop"
    """The table was dropped, or has another name now."""


@dataclass(frozen=True, kw_only=True)
class SchemaVersion:
    """One version of one table's schema."""

    table: TableId
    version: int
    event: SchemaEvent
    schema: TableSchema
    """The schema; for a dropped table, its last one."""
    evolution: Evolution | None = None
    """Changes since the version before; None if there was none to compare with."""
    ddl: str | None = None
    """The DDL statement, if the source reports it."""
    time: datetime | None = None
    """Time at which the transaction of its first row was committed; None if no longer known."""
    position: Position | None = None
    """Position of that transaction; None if not known, or not known yet."""

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
    """Rules for removing old versions. Either limit removes versions; the newest always stays."""

    keep_last: int | None = KEEP_LAST
    max_age: timedelta | None = None
    """A version is removed once its successor is older than this.

    Ages are checked at the table's next change, and when the history is opened.
    """

    def __post_init__(self) -> None:
        if self.keep_last is None and self.max_age is None:
            raise ConfigError("retention has no limit", hint="To keep every version, pass `retention=None`.")
        if self.keep_last is not None and not _is_whole(self.keep_last):
            raise ConfigError("`keep_last` is not a whole number", hint="Use 1 or more.")
        if self.keep_last is not None and self.keep_last < 1:
            raise ConfigError(
                "`keep_last` is less than 1: the newest version is always kept",
                keep_last=self.keep_last,
                hint="Use 1 or more.",
            )
        if self.max_age is not None and not isinstance(self.max_age, timedelta):
            raise ConfigError("`max_age` is not a timedelta", hint="Use one such as `timedelta(days=90)`.")
        if self.max_age is not None and self.max_age < timedelta(0):
            raise ConfigError("`max_age` is negative", hint="Use one such as `timedelta(days=90)`.")

    def outdated(self, versions: Sequence[SchemaVersion], now: datetime) -> int:
        """Return how many of the oldest versions may be removed."""
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
    """A store of schema versions. Any thread may call it. What is recorded is durable when the call returns."""

    retention: Retention | None
    """Rules for removing old versions. None keeps all, and grows with every schema change."""

    def record(
        self,
        schema: TableSchema,
        *,
        time: datetime | None = None,
        position: Position | None = None,
        ddl: str | None = None,
    ) -> SchemaVersion:
        """Return the version with this schema: the newest if equal, else a new one.

        `time` is now by default.
        """

    def drop(
        self, table: TableId, *, time: datetime | None = None, position: Position | None = None, ddl: str | None = None
    ) -> SchemaVersion | None:
        """Record that the table was dropped; return the version, None for an unknown table.

        A second call adds nothing.
        """

    def latest(self, table: TableId) -> SchemaVersion | None:
        """Return the newest version, which may be its drop; None if the table is unknown."""

    def at_version(self, table: TableId, version: int) -> SchemaVersion:
        """Return the version with this number."""

    def at_time(self, table: TableId, time: datetime) -> SchemaVersion | None:
        """Return the version in force then; None if the table was not there yet."""

    def versions(self, table: TableId) -> tuple[SchemaVersion, ...]:
        """Return all versions that are kept, oldest first."""

    def tables(self) -> tuple[TableId, ...]:
        """Return the tables that have versions, sorted."""


class _Occurrence(NamedTuple):
    """Time, position and statement of a recorded change."""

    time: datetime | None
    position: Position | None
    ddl: str | None


class MemorySchemaHistory:
    """A schema history that lasts as long as the process; `FileSchemaHistory` is the durable one."""

    def __init__(self, *, retention: Retention | None = DEFAULT_RETENTION) -> None:
        if retention is not None and not isinstance(retention, Retention):
            raise ConfigError(
                "`retention` is not a `Retention`",
                found=type(retention).__name__,
                hint="Pass `Retention(keep_last=…)`, or None.",
            )
        self.retention = retention
        self._versions: dict[TableId, list[SchemaVersion]] = {}
        self._tables: dict[int, TableId] = {}
        """The table that has each source number now."""
        self._facts: dict[TableId, CatalogueFacts] = {}
        """Catalogue facts that were recorded last for a table's newest version."""
        self._one_at_a_time = threading.RLock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Hooks for a history that stores its versions elsewhere.

    def close(self) -> None:
        """Release the history to its next owner."""

    def _add(self, version: SchemaVersion) -> None:
        """Make the version durable."""

    def _remove(self, versions: Sequence[SchemaVersion]) -> None:
        """Remove the oldest versions of a table."""

    def _refresh(self) -> None:
        """Take in what another process has written."""

    # ---- recording ----------------------------------------------------------------------------------------

    def record(
        self,
        schema: TableSchema,
        *,
        time: datetime | None = None,
        position: Position | None = None,
        ddl: str | None = None,
    ) -> SchemaVersion:
        if not isinstance(schema, TableSchema):
            raise ConfigError(
                "value to record is not a table schema",
                found=type(schema).__name__,
                hint="Pass the rows' `TableSchema`.",
            )
        return self._record(schema, _occurrence(time, position, ddl))

    def import_version(
        self, schema: TableSchema, *, time: datetime | None, position: Position | None, evolution: Evolution | None
    ) -> SchemaVersion:
        """Record a version from another history, with its evolution.

        The time of an old version may be unknown.
        """
        return self._record(schema, _Occurrence(time, position, None), evolution)

    def _record(
        self, schema: TableSchema, occurrence: _Occurrence, evolution: Evolution | None = None
    ) -> SchemaVersion:
        with self._one_at_a_time:
            self._refresh()
            table, latest = schema.table, self._latest(schema.table)
            known = latest is not None and latest.event is not SchemaEvent.DROP
            if latest is not None and known and same_version(self._with_current_facts(latest), schema):
                if schema.facts is not None:
                    self._facts[table] = schema.facts  # or a later ALTER would be blamed for today's TRUNCATE
                return latest
            before = self._with_current_facts(latest) if latest is not None and known else None
            if before is not None and before.relation != schema.relation:
                self._append(occurrence, SchemaEvent.DROP, before, table)
                before = None
            origin = self._origin(schema) if before is None else None
            if origin is not None:
                before = self._with_current_facts(origin)
                if origin.event is not SchemaEvent.DROP:
                    rename = _renamed(origin.table, table)
                    self._append(occurrence, SchemaEvent.DROP, origin.schema, origin.table, rename)
            if before is None:
                return self._append(occurrence, SchemaEvent.CREATE, schema, table)
            return self._append(
                occurrence, SchemaEvent.ALTER, schema, table, evolution or compare_schemas(before, schema)
            )

    def drop(
        self, table: TableId, *, time: datetime | None = None, position: Position | None = None, ddl: str | None = None
    ) -> SchemaVersion | None:
        _require_table(table)
        occurrence = _occurrence(time, position, ddl)
        with self._one_at_a_time:
            self._refresh()
            latest = self._latest(table)
            if latest is None or latest.event is SchemaEvent.DROP:
                return latest
            return self._append(occurrence, SchemaEvent.DROP, latest.schema, table)

    def _origin(self, schema: TableSchema) -> SchemaVersion | None:
        """Return the newest version of the table that had this one's number under another name."""
        named = self._tables.get(schema.relation)
        latest = self._latest(named) if named is not None and named != schema.table else None
        if latest is None or latest.schema.relation != schema.relation:
            return None
        if latest.event is not SchemaEvent.DROP:
            return latest
        # Its drop may be recorded already, if the process was killed right after it.
        return latest if latest.evolution == _renamed(latest.table, schema.table) else None

    def _with_current_facts(self, latest: SchemaVersion) -> TableSchema:
        return replace(latest.schema, facts=self._facts.get(latest.table, latest.schema.facts))

    def _append(
        self,
        occurrence: _Occurrence,
        event: SchemaEvent,
        schema: TableSchema,
        table: TableId,
        evolution: Evolution | None = None,
    ) -> SchemaVersion:
        latest = self._latest(table)
        version = SchemaVersion(
            table=table,
            version=latest.version + 1 if latest else 1,
            event=event,
            schema=schema,
            evolution=evolution,
            ddl=occurrence.ddl,
            time=occurrence.time,
            position=occurrence.position,
        )
        self._add(version)
        self._index_version(version)
        if self.retention is not None:
            self._trim(table, self.retention)
        return version

    def _index_version(self, version: SchemaVersion) -> None:
        self._versions.setdefault(version.table, []).append(version)
        self._facts.pop(version.table, None)
        if version.event is not SchemaEvent.DROP:
            self._tables[version.schema.relation] = version.table
        else:
            self._tables.setdefault(version.schema.relation, version.table)

    def _trim(self, table: TableId, retention: Retention) -> None:
        versions = self._versions[table]
        outdated = retention.outdated(versions, datetime.now(UTC))
        if outdated:
            self._remove(versions[:outdated])
            del versions[:outdated]

    # ---- queries -----------------------------------------------------------------------------------------

    def latest(self, table: TableId) -> SchemaVersion | None:
        _require_table(table)
        with self._one_at_a_time:
            self._refresh()
            return self._latest(table)

    def at_version(self, table: TableId, version: int) -> SchemaVersion:
        kept = self.versions(table)
        for item in kept:
            if item.version == version:
                return item
        if kept and _is_whole(version) and 0 < version < kept[0].version:
            raise _trimmed_error(kept)
        raise ConfigError(
            "table has no such version",
            table=table,
            version=version,
            hint=f"Use one from {kept[0].version} to {kept[-1].version}."
            if kept
            else "Check the table's name: it has no version.",
        )

    def at_time(self, table: TableId, time: datetime) -> SchemaVersion | None:
        kept, then = self.versions(table), _with_zone(time)
        for item in reversed(kept):
            if _known(item.time) <= then:
                return item
        if kept and kept[0].version > 1:
            raise _trimmed_error(kept)
        return None

    def versions(self, table: TableId) -> tuple[SchemaVersion, ...]:
        _require_table(table)
        with self._one_at_a_time:
            self._refresh()
            return tuple(self._versions.get(table, ()))

    def tables(self) -> tuple[TableId, ...]:
        with self._one_at_a_time:
            self._refresh()
            return tuple(sorted(self._versions))

    def _latest(self, table: TableId) -> SchemaVersion | None:
        kept = self._versions.get(table)
        return kept[-1] if kept else None


def _trimmed_error(kept: Sequence[SchemaVersion]) -> StateTrimmed:
    first = kept[0]
    return StateTrimmed(
        "older versions of the table's schema are no longer kept",
        table=first.table,
        first=first.version,
        time=first.time,
        hint="Ask for this version or a later one. To keep more, see `Retention`.",
    )


def _renamed(old: TableId, new: TableId) -> Evolution:
    return Evolution(
        changes=(SchemaChange(kind=SchemaChangeKind.RENAME_TABLE, old=str(old), new=str(new)),), rewritten=False
    )


def _occurrence(time: datetime | None, position: Position | None, ddl: str | None) -> _Occurrence:
    if position is not None:
        position_type_of(position)
    if ddl is not None and not isinstance(ddl, str):
        raise ConfigError("`ddl` is not a string", found=type(ddl).__name__, hint="Pass the statement, or None.")
    return _Occurrence(datetime.now(UTC) if time is None else _with_zone(time), position, ddl)


def _with_zone(time: datetime) -> datetime:
    if not isinstance(time, datetime) or time.tzinfo is None:
        raise ConfigError("version's time has no time zone", hint="Pass one such as `datetime.now(UTC)`.")
    return time.astimezone(UTC)


def _require_table(table: object) -> None:
    """Refuse anything but a `TableId`: a lookup by a string would never find anything."""
    if not isinstance(table, TableId):
        raise ConfigError(
            "table is not a `TableId`",
            found=type(table).__name__,
            hint='Pass schema and name separately: `TableId("public", "orders")`.',
        )


def _known(time: datetime | None) -> datetime:
    """Return the time, or the earliest time if it is unknown."""
    return time or datetime.min.replace(tzinfo=UTC)
