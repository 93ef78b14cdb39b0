"""How far a capture has come, and the port of whoever keeps that.

What must stay true of every store, and `tailrace.testing.store_checks` checks it:

- What `save` was given is what `load` gives back, and once `save` has returned it outlives what the store promises to
  outlive: a process for one in memory, a crash of the machine for one in files.
- None means that nothing was ever saved under the key. A checkpoint that cannot be read is an error.
- A position never goes back. One that stays may be saved again, with other metadata: a snapshot moves on while the
  stream's position stands.
- A key is one file's name, or could be: it is checked wherever it is given.
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
"""In UTF-8: with what stands around it when a file is written aside, it is still a name that a disk takes."""
METADATA_BYTES_MAX = 1 << 20
_NAME_CHARACTERS_MAX = 200
_SEPARATORS = "/\\"
_COUNTS = {
    "postgresql": {PositionType.POSTGRESQL_LSN},
    "mysql": {PositionType.MYSQL_BINLOG, PositionType.MYSQL_GTID},
    "mariadb": {PositionType.MYSQL_BINLOG, PositionType.MARIADB_GTID},
    "sqlserver": {PositionType.SQLSERVER_LSN},
}
"""What each known source counts in; any other may count as it likes."""


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Everything up to `position` is durable at the sink."""

    source_type: str
    """`postgresql`, `mysql`, `mariadb`, `sqlserver`, or the name of a source of your own."""
    position: Position
    time: datetime = field(default_factory=_now)
    """When it was reached."""
    transaction: str | None = None
    """The last transaction it holds, as the source names it."""
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What else whoever saves it must know again: a JSON object, kept as it is."""

    def __post_init__(self) -> None:
        _require_name("source_type", self.source_type, "postgresql")
        if self.transaction is not None:
            _require_name("transaction", self.transaction, "731")
        if self.position_type not in _COUNTS.get(self.source_type, set(PositionType)):
            raise ConfigError(
                "this source does not count in such positions",
                source_type=self.source_type,
                position_type=self.position_type.value,
                hint=f"It has {' or '.join(sorted(kind.value for kind in _COUNTS[self.source_type]))}.",
            )
        if not isinstance(self.time, datetime) or self.time.tzinfo is None:
            raise ConfigError("a checkpoint's time needs a zone", hint="For example `datetime.now(UTC)`.")
        object.__setattr__(self, "time", self.time.astimezone(UTC))
        object.__setattr__(self, "metadata", _copied(self.metadata))

    @property
    def position_type(self) -> PositionType:
        return position_type_of(self.position)

    @property
    def age_seconds(self) -> float:
        """How long ago it was reached; 0 where our clock is behind."""
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
        """From texts, as a person or a file gives them; nonsense is refused."""
        try:
            kind = PositionType(position_type)
        except ValueError:
            known = ", ".join(kind.value for kind in PositionType)
            raise ConfigError("not a type of positions", text=position_type, hint=f"There are {known}.") from None
        return cls(
            source_type=source_type,
            position=parse_position(kind, position),
            transaction=transaction,
            time=time or _now(),
            metadata=metadata or {},
        )

    def require_follows(self, saved: Checkpoint | None) -> None:
        """Refuse to stand in the place of a checkpoint that it does not follow. Every `save` asks this first."""
        if saved is None:
            return
        if (self.source_type, self.position_type) != (saved.source_type, saved.position_type):
            raise StateForeign(
                "the checkpoint under this key is of another source",
                saved=f"{saved.source_type}, {saved.position_type.value}",
                given=f"{self.source_type}, {self.position_type.value}",
                hint="Give each source a key of its own. To begin anew under this one, `delete` it first.",
            )
        if not reaches(self.position, saved.position):
            raise PositionRewound(
                "the position does not follow the one that is saved",
                saved=_short(saved.position),
                given=_short(self.position),
                hint="Two processes may use one key, or the source was put back to an older state. To go back on "
                "purpose, `delete` the checkpoint and seed it anew.",
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
        """What `to_json` gave. Anything else is damage: it is never taken for no checkpoint."""
        try:
            return parse_checkpoint(stored)
        except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
            raise StateCorrupt(
                f"a checkpoint cannot be read: {unreadable_reason(error)}",
                hint="Restore it from a copy. Without one, `delete` it and seed it with a position that the sink "
                "certainly has.",
            ) from error


def parse_checkpoint(stored: Mapping[str, Any]) -> Checkpoint:
    """What `to_json` gave; ConfigError, or ValueError and what goes with it, for anything else."""
    found = Checkpoint.parse(
        source_type=stored["source_type"],
        position_type=stored["position_type"],
        position=stored["position"],
        time=datetime.fromisoformat(stored["time"]),
        transaction=stored["transaction"],
        metadata=stored["metadata"],
    )
    if not isinstance(stored["metadata"], Mapping):
        # None at all would be taken for those of one that was seeded, and whoever counts by them begin at zero again.
        raise ValueError("its metadata is no JSON object")
    return found


def unreadable_reason(error: Exception) -> str:
    """Why a record cannot be read, in words."""
    match error:
        case ConfigError():
            return error.message
        case KeyError():
            return f"it lacks `{error.args[0]}`"
        case TypeError() | AttributeError():
            return "something in it is of another type"
    return str(error)


class CheckpointStore(Protocol):
    """Keeps one checkpoint for each key. Any thread may call it; what one key is told never touches another."""

    def save(self, key: str, checkpoint: Checkpoint) -> None:
        """Put it in the place of the one before, once `require_follows` has let it. Durable when this returns; when it
        raises, the one before or the new one is there, and nothing else."""

    def load(self, key: str) -> Checkpoint | None:
        """The last one saved; None if there is none. One that cannot be read is an error."""

    def delete(self, key: str) -> bool:
        """Forget it, readable or not; whether there was one."""

    def list(self) -> tuple[str, ...]:
        """The keys there are, in order."""

    def all(self) -> dict[str, Checkpoint]:
        """Every checkpoint by its key, in order."""


def check_key(key: str) -> str:
    """The key, if it can be one."""
    if not isinstance(key, str):
        raise ConfigError("a checkpoint's key is no text", found=type(key).__name__, hint="For example: `shop-orders`.")
    wrong = ""
    if not key:
        wrong = "is empty"
    elif any(separator in key for separator in _SEPARATORS):
        wrong = "has a separator in it"
    elif key.startswith("."):
        wrong = "begins with a dot"
    elif not key.isprintable():
        wrong = "has a character that cannot be seen"
    elif len(key.encode()) > KEY_BYTES_MAX:
        wrong = f"has more than {KEY_BYTES_MAX} bytes"
    if wrong:
        raise ConfigError(
            f"a checkpoint's key {wrong}", key=ascii(key[:KEY_BYTES_MAX]), hint="For example: `shop-orders`."
        )
    return key


def require_checkpoint(given: object) -> None:
    """Refuse to save what is none. Every `save` may ask this first."""
    if not isinstance(given, Checkpoint):
        raise ConfigError(
            "that is no checkpoint",
            found=type(given).__name__,
            hint="Give `Checkpoint(source_type=…, position=…)`, or `Checkpoint.parse(…)` of texts.",
        )


def seed_checkpoint(store: CheckpointStore, key: str, checkpoint: Checkpoint) -> None:
    """Save the first checkpoint by hand, as when another tool's place is taken. Refused where there is one."""
    require_checkpoint(checkpoint)
    saved = store.load(check_key(key))
    if saved is not None:
        raise StateError(
            "there is a checkpoint under this key already",
            key=key,
            position=_short(saved.position),
            hint="If it is to go, `delete` it first.",
        )
    store.save(key, checkpoint)


def _copied(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """As it will be read back, and nobody else's to change."""
    try:
        text = json.dumps(dict(metadata), allow_nan=False, ensure_ascii=False)
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError):
        # Not why: the reason may quote a value.
        raise ConfigError(
            "a checkpoint's metadata is no JSON object", hint="It holds texts, numbers, lists and the like."
        ) from None
    if size > METADATA_BYTES_MAX:
        raise ConfigError(
            "a checkpoint's metadata is too large", bytes=size, hint=f"It may have {METADATA_BYTES_MAX:,} bytes."
        )
    copied: dict[str, Any] = json.loads(text)
    return copied


def _require_name(what: str, name: str, example: str) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= _NAME_CHARACTERS_MAX or not name.isprintable():
        raise ConfigError(
            f"a checkpoint's {what} is printable text of 1 to {_NAME_CHARACTERS_MAX} characters",
            hint=f'For example `"{example}"`.',
        )


def _short(position: Position) -> str:
    text = str(position)
    return text if len(text) <= _NAME_CHARACTERS_MAX else f"{text[:_NAME_CHARACTERS_MAX]}…"
