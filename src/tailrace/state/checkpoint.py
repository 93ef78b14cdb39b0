"""Checkpoints: a capture's stored position, and the port of the stores that keep it.

Every store keeps these promises, and `tailrace.testing.store_checks` checks them:

- `load` returns what `save` stored. Once `save` has returned, a store in memory keeps it
  until the process ends, and a store in files keeps it through a crash of the machine.
- None means that nothing was ever saved under the key. An unreadable checkpoint is an error.
- A position never goes back. The same position may be saved again with other metadata: a snapshot makes progress while
  the stream's position stays.
- A key is usable as a file name. Every call that takes a key checks it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from tailrace.errors import ConfigError, PositionRewound, StateCorrupt, StateError, StateForeign
from tailrace.model.position_kinds import Position, PositionType, parse_position, position_type_of, reaches

KEY_BYTES_MAX = 150
"""Longest key, in UTF-8 bytes. With the suffix of a temporary file it still is a valid file name."""
METADATA_BYTES_MAX = 1 << 20
_NAME_CHARACTERS_MAX = 200
_SEPARATORS = "/\\"
_COUNTS = {
    "postgresql": {PositionType.POSTGRESQL_LSN},
    "mysql": {PositionType.MYSQL_BINLOG, PositionType.MYSQL_GTID},
    "mariadb": {PositionType.MYSQL_BINLOG, PositionType.MARIADB_GTID},
    "sqlserver": {PositionType.SQLSERVER_LSN},
}
"""Position types of each known source. Any other source may use any type."""


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A position up to which everything is durable at the sink."""

    source_type: str
    """One of `postgresql`, `mysql`, `mariadb`, `sqlserver`, or a name of your own."""
    position: Position
    time: datetime = field(default_factory=_now)
    """Time at which the position was reached."""
    transaction: str | None = None
    """The last transaction up to the position, as the source names it."""
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """A JSON object of the caller's own, stored unchanged."""

    def __post_init__(self) -> None:
        _require_name("source_type", self.source_type, "postgresql")
        if self.transaction is not None:
            _require_name("transaction", self.transaction, "731")
        if self.position_type not in _COUNTS.get(self.source_type, set(PositionType)):
            raise ConfigError(
                "checkpoint has a position type that its source does not use",
                source_type=self.source_type,
                position_type=self.position_type.value,
                hint=f"Use {' or '.join(sorted(kind.value for kind in _COUNTS[self.source_type]))}.",
            )
        if not isinstance(self.time, datetime) or self.time.tzinfo is None:
            raise ConfigError("checkpoint's time has no time zone", hint="Give one, for example `datetime.now(UTC)`.")
        object.__setattr__(self, "time", self.time.astimezone(UTC))
        object.__setattr__(self, "metadata", _copied(self.metadata))

    @property
    def position_type(self) -> PositionType:
        return position_type_of(self.position)

    @property
    def age_seconds(self) -> float:
        """Seconds since the position was reached; 0 if our clock is behind."""
        return max(0.0, (_now() - self.time).total_seconds())

    @classmethod
    def parse(
        cls,
        *,
        source_type: str,
        position_type: str,
        position: str,
        transaction: str | None = None,
        time: datetime | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Return a checkpoint made of texts, from a person or a file; refuse invalid ones."""
        try:
            kind = PositionType(position_type)
        except ValueError:
            known = ", ".join(kind.value for kind in PositionType)
            raise ConfigError("position type is unknown", text=position_type, hint=f"Use one of {known}.") from None
        return cls(
            source_type=source_type,
            position=parse_position(kind, position),
            transaction=transaction,
            time=time or _now(),
            metadata=metadata or {},
        )

    def require_follows(self, saved: Checkpoint | None) -> None:
        """Refuse to replace a checkpoint that this one does not follow. Every `save` calls this first."""
        if saved is None:
            return
        if (self.source_type, self.position_type) != (saved.source_type, saved.position_type):
            raise StateForeign(
                "saved checkpoint belongs to another source",
                saved=f"{saved.source_type}, {saved.position_type.value}",
                given=f"{self.source_type}, {self.position_type.value}",
                hint="Give each source its own key. To use this key for the new source, `delete` the checkpoint first.",
            )
        if not reaches(self.position, saved.position):
            raise PositionRewound(
                "new position does not follow the saved one",
                saved=_short(saved.position),
                given=_short(self.position),
                hint="Check whether two processes use this key, or the source was set back to an older state. To go "
                "back on purpose, `delete` the checkpoint and call `seed_checkpoint`.",
            )

    def to_json(self) -> dict[str, Any]:
        return {
            "source_type": self.source_type,
            "position_type": self.position_type.value,
            "position": str(self.position),
            "time": self.time.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "transaction": self.transaction,
            "metadata": dict(self.metadata),
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Checkpoint:
        """Return the checkpoint that `to_json` wrote.

        Anything else is damage, and an error: it never counts as a missing checkpoint.
        """
        try:
            return parse_checkpoint(stored)
        except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
            raise StateCorrupt(
                f"checkpoint cannot be read: {unreadable_reason(error)}",
                hint="Restore it from a copy. Without one, `delete` it and call `seed_checkpoint` with a position that "
                "the sink certainly has.",
            ) from error


def parse_checkpoint(stored: Mapping[str, Any]) -> Checkpoint:
    """Return the checkpoint that `to_json` wrote.

    Raise ConfigError, ValueError, KeyError, TypeError or AttributeError for anything else.
    """
    checkpoint = Checkpoint.parse(
        source_type=stored["source_type"],
        position_type=stored["position_type"],
        position=stored["position"],
        time=datetime.fromisoformat(stored["time"]),
        transaction=stored["transaction"],
        metadata=stored["metadata"],
    )
    if not isinstance(stored["metadata"], Mapping):
        # Null would read as the empty metadata of a hand-made checkpoint, and a runtime would count from zero again.
        raise ValueError("its metadata is not a JSON object")
    return checkpoint


def unreadable_reason(error: Exception) -> str:
    """Return why a record cannot be read, in words."""
    match error:
        case ConfigError():
            return error.message
        case KeyError():
            return f"it lacks `{error.args[0]}`"
        case TypeError() | AttributeError():
            return "a value in it has the wrong type"
    return str(error)


class CheckpointStore(Protocol):
    """A store of one checkpoint per key. Any thread may call it; a call changes only its own key."""

    def save(self, key: str, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint under the key, after `require_follows` has accepted it.

        It is durable when this returns. When this raises, the store has the old checkpoint or the new one, and nothing
        else.
        """

    def load(self, key: str) -> Checkpoint | None:
        """Return the last checkpoint saved, or None if there is none. An unreadable one is an error."""

    def delete(self, key: str) -> bool:
        """Remove the checkpoint, readable or not; return whether there was one."""

    def list(self) -> tuple[str, ...]:
        """Return all keys, sorted."""

    def all(self) -> dict[str, Checkpoint]:
        """Return every checkpoint by its key, sorted by key."""


def check_key(key: str) -> str:
    """Return the key if it is valid, else refuse it."""
    if not isinstance(key, str):
        raise ConfigError(
            "checkpoint key is not a string", found=type(key).__name__, hint="Use one such as `shop-orders`."
        )
    wrong = ""
    if not key:
        wrong = "is empty"
    elif any(separator in key for separator in _SEPARATORS):
        wrong = "has a path separator in it"
    elif key.startswith("."):
        wrong = "begins with a dot"
    elif not key.isprintable():
        wrong = "has a character that is not printable"
    elif len(key.encode()) > KEY_BYTES_MAX:
        wrong = f"has more than {KEY_BYTES_MAX} bytes"
    if wrong:
        raise ConfigError(
            f"checkpoint key {wrong}", key=ascii(key[:KEY_BYTES_MAX]), hint="Use one such as `shop-orders`."
        )
    return key


def require_checkpoint(value: object) -> None:
    """Refuse anything that is not a checkpoint. Every `save` may call this first."""
    if not isinstance(value, Checkpoint):
        raise ConfigError(
            "value to save is not a checkpoint",
            found=type(value).__name__,
            hint="Pass `Checkpoint(source_type=…, position=…)`, or `Checkpoint.parse(…)` for texts.",
        )


def seed_checkpoint(store: CheckpointStore, key: str, checkpoint: Checkpoint) -> None:
    """Save the first checkpoint under a key by hand; refuse a key that has one.

    This is how a capture continues where another tool has stopped.
    """
    require_checkpoint(checkpoint)
    saved = store.load(check_key(key))
    if saved is not None:
        raise StateError(
            "key has a checkpoint already",
            key=key,
            position=_short(saved.position),
            hint="To replace it, `delete` it first.",
        )
    store.save(key, checkpoint)


def _copied(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy, as it will be read back. The caller cannot change it."""
    try:
        text = json.dumps(dict(metadata), allow_nan=False, ensure_ascii=False)
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError):
        # The reason stays out: it may quote a value.
        raise ConfigError(
            "checkpoint's metadata is not a JSON object",
            hint="Use only what JSON has: strings, numbers, lists and so on.",
        ) from None
    if size > METADATA_BYTES_MAX:
        raise ConfigError(
            "checkpoint's metadata is too large", bytes=size, hint=f"Keep it below {METADATA_BYTES_MAX:,} bytes."
        )
    copied: dict[str, Any] = json.loads(text)
    return copied


def _require_name(what: str, name: str, example: str) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= _NAME_CHARACTERS_MAX or not name.isprintable():
        raise ConfigError(
            f"checkpoint's {what} is not printable text of 1 to {_NAME_CHARACTERS_MAX} characters",
            hint=f'Use one such as `"{example}"`.',
        )


def _short(position: Position) -> str:
    text = str(position)
    return text if len(text) <= _NAME_CHARACTERS_MAX else f"{text[:_NAME_CHARACTERS_MAX]}…"
