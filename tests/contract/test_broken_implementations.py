"""The suites for users detect wrong stores, histories and sinks, each with one broken promise that is easily made."""

from __future__ import annotations

import json
import time
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tailrace import (
    Checkpoint,
    FileCheckpointStore,
    FileSchemaHistory,
    JsonlSink,
    MemorySchemaHistory,
    Rejected,
    Retention,
    check_key,
)
from tailrace.model.event import Delete, Event, Merge, Replace
from tailrace.model.mirror import Mirror
from tailrace.model.schema import TableId, TableSchema
from tailrace.runtime.output_batch import Batch
from tailrace.testing import schema_history_checks, sink_checks, store_checks
from tailrace.testing.checks import ContractBroken
from tailrace.testing.sink_checks import SinkAt

# --- stores -------------------------------------------------------------------------------------------------


class Store:
    """A correct store, over a dictionary in place of a disk."""

    def __init__(self, disk: dict[str, str]) -> None:
        self._disk = disk

    def at(self, key: str) -> str:
        """Return the key's name on the disk."""
        return key

    def kept(self, checkpoint: Checkpoint, before: Checkpoint | None) -> Checkpoint:
        """Return what is written for it."""
        return checkpoint

    def save(self, key: str, checkpoint: Checkpoint) -> None:
        before = self.load(key)
        checkpoint.require_follows(before)
        self._disk[self.at(key)] = json.dumps(self.kept(checkpoint, before).to_json())

    def load(self, key: str) -> Checkpoint | None:
        text = self._disk.get(self.at(check_key(key)))
        return None if text is None else Checkpoint.from_json(json.loads(text))

    def delete(self, key: str) -> bool:
        return self._disk.pop(self.at(check_key(key)), None) is not None

    def list(self) -> tuple[str, ...]:
        return tuple(sorted(self._disk))

    def all(self) -> dict[str, Checkpoint]:
        return {key: Checkpoint.from_json(json.loads(text)) for key, text in sorted(self._disk.items())}


class IgnoresCase(Store):
    def at(self, key: str) -> str:
        return next((known for known in self._disk if known.lower() == key.lower()), key)


class IgnoresSpaces(Store):
    def at(self, key: str) -> str:
        return next((known for known in self._disk if known.rstrip() == key.rstrip()), key)


class Normalizes(Store):
    def at(self, key: str) -> str:
        return unicodedata.normalize("NFC", key)


class JoinsMetadata(Store):
    def kept(self, checkpoint: Checkpoint, before: Checkpoint | None) -> Checkpoint:
        return replace(checkpoint, metadata={**(before.metadata if before else {}), **checkpoint.metadata})


class KeepsTheTransaction(Store):
    def kept(self, checkpoint: Checkpoint, before: Checkpoint | None) -> Checkpoint:
        return replace(checkpoint, transaction=checkpoint.transaction or (before.transaction if before else None))


class KeepsTheTime(Store):
    def kept(self, checkpoint: Checkpoint, before: Checkpoint | None) -> Checkpoint:
        return replace(checkpoint, time=before.time if before else checkpoint.time)


class SavesOnlyMoves(Store):
    def kept(self, checkpoint: Checkpoint, before: Checkpoint | None) -> Checkpoint:
        stays = before is not None and before.position == checkpoint.position and before.metadata
        return before if stays and before is not None else checkpoint


class LosesMuch(Store):
    def kept(self, checkpoint: Checkpoint, before: Checkpoint | None) -> Checkpoint:
        return replace(checkpoint, metadata={}) if len(str(checkpoint.metadata)) > 65_535 else checkpoint


class RefusesLongPositions(Store):
    def kept(self, checkpoint: Checkpoint, before: Checkpoint | None) -> Checkpoint:
        if len(str(checkpoint.position)) > 255:
            raise OSError("value too long")
        return checkpoint


class MakesFloats(Store):
    def load(self, key: str) -> Checkpoint | None:
        text = self._disk.get(check_key(key))
        return None if text is None else Checkpoint.from_json(json.loads(text, parse_int=float))


class TakesOtherKinds(Store):
    def save(self, key: str, checkpoint: Checkpoint) -> None:
        before = self.load(key)
        if before is not None and before.source_type == checkpoint.source_type == "mysql":
            self.delete(key)
            if before.position_type == checkpoint.position_type:
                super().save(key, before)
        super().save(key, checkpoint)


class DeletesFirst(Store):
    def kept(self, checkpoint: Checkpoint, before: Checkpoint | None) -> Checkpoint:
        if before is not None:
            self._disk.popitem()
            time.sleep(0.0005)
        return checkpoint


WRONG_STORES = [
    IgnoresCase, IgnoresSpaces, Normalizes, JoinsMetadata, KeepsTheTransaction, KeepsTheTime, SavesOnlyMoves, LosesMuch,
    RefusesLongPositions, MakesFloats, TakesOtherKinds, DeletesFirst,
]  # fmt: skip


def place_of(store: Callable[[Any], Any]) -> Callable[[], Callable[[], Any]]:
    def place() -> Callable[[], Any]:
        disk: dict[Any, Any] = {}
        return lambda: store(disk)

    return place


def test_a_correct_store_passes() -> None:
    store_checks.check_checkpoint_store(place_of(Store))


@pytest.mark.parametrize("wrong", WRONG_STORES)
def test_a_wrong_store_fails(wrong: type[Store]) -> None:
    with pytest.raises(ContractBroken):
        store_checks.check_checkpoint_store(place_of(wrong))


class WritesAtTheEnd(FileCheckpointStore):
    """Writes to the disk only when it is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._new: dict[str, Checkpoint] = {}

    def save(self, key: str, checkpoint: Checkpoint) -> None:
        checkpoint.require_follows(self.load(key))
        self._new[key] = checkpoint

    def load(self, key: str) -> Checkpoint | None:
        return self._new.get(key) or super().load(key)

    def close(self) -> None:
        for key, checkpoint in self._new.items():
            super().save(key, checkpoint)
        super().close()


def test_a_store_that_is_durable_only_after_an_orderly_end_fails(tmp_path: Path) -> None:
    (outlives,) = store_checks.DURABLE
    outlives(lambda: FileCheckpointStore(tmp_path / "right"))
    with pytest.raises(ContractBroken, match="survive a killed process"):
        outlives(lambda: WritesAtTheEnd(tmp_path / "wrong"))


def test_a_store_that_raises_in_the_killed_process_fails(tmp_path: Path) -> None:
    (outlives,) = store_checks.DURABLE
    with pytest.raises(ContractBroken, match="it failed in another process"):
        outlives(lambda: FileCheckpointStore(tmp_path / "nowhere", read_only=True))


# --- histories ----------------------------------------------------------------------------------------------


class KnowsSchemas(MemorySchemaHistory):
    """Takes a schema that the table ever had for the current one."""

    def record(self, schema: TableSchema, **details: Any) -> Any:
        known = [version for version in self.versions(schema.table) if version.schema == schema]
        return known[0] if known else super().record(schema, **details)


def test_a_history_that_reuses_an_old_version_fails() -> None:
    def place() -> Callable[[], KnowsSchemas]:
        history = KnowsSchemas(retention=Retention(keep_last=schema_history_checks.KEEP_LAST))
        return lambda: history

    with pytest.raises(ContractBroken, match="a schema that the table had before"):
        schema_history_checks.check_schema_history(place)


def test_a_history_that_outlives_its_process_passes(tmp_path: Path) -> None:
    (outlives,) = schema_history_checks.DURABLE
    outlives(lambda: FileSchemaHistory(tmp_path / "right"))
    history = MemorySchemaHistory()
    with pytest.raises(ContractBroken, match="was killed"):
        outlives(lambda: history)


# --- sinks --------------------------------------------------------------------------------------------------


class Numbered:
    """A correct sink: rows by their numbers."""

    def __init__(self, kept: dict[int, Event]) -> None:
        self._kept = kept
        self._unflushed: dict[int, Event] = {}

    def takes(self, event: Event) -> bool:
        return True

    def write(self, batch: Batch) -> Sequence[Rejected]:
        self._unflushed |= {event.seq: event for event in batch.events() if self.takes(event)}
        return ()

    def flush(self, caught_up: bool) -> None:
        self._kept |= self._unflushed
        self._unflushed.clear()


class NoSnapshots(Numbered):
    def takes(self, event: Event) -> bool:
        return event.operation.value != "read"


class OnlyHigherNumbers(Numbered):
    def takes(self, event: Event) -> bool:
        return event.seq > max(self._kept, default=-1)


class OnlyWithAPosition(Numbered):
    def takes(self, event: Event) -> bool:
        return event.position is not None


class NeedsAPosition(Numbered):
    def takes(self, event: Event) -> bool:
        assert event.position is not None
        return True


def numbered(sink: type[Numbered]) -> Callable[[], Callable[[], SinkAt]]:
    def place() -> Callable[[], SinkAt]:
        kept: dict[int, Event] = {}
        return lambda: SinkAt(sink(kept), kept=lambda: sorted(kept))

    return place


def test_a_correct_sink_passes() -> None:
    sink_checks.check_sink(numbered(Numbered), *sink_checks.EXACTLY_ONCE)


@pytest.mark.parametrize("wrong", [NoSnapshots, OnlyHigherNumbers, OnlyWithAPosition, NeedsAPosition])
def test_a_sink_that_lacks_rows_of_one_origin_fails(wrong: type[Numbered]) -> None:
    with pytest.raises(ContractBroken, match="rows are stored whatever their origin") as raised:
        sink_checks.check_sink(numbered(wrong), *sink_checks.EXACTLY_ONCE)
    assert isinstance(raised.value.__cause__, AssertionError) == (wrong is NeedsAPosition)


def lines_in(folder: Path) -> list[int]:
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    return [json.loads(line)["seq"] for line in lines]


class FlushesAtTheEnd(JsonlSink):
    def flush(self, caught_up: bool) -> None:
        """Do nothing: rows are written on close."""

    def close(self) -> None:
        super().flush(True)
        super().close()


def test_a_sink_that_is_durable_only_after_an_orderly_end_fails(tmp_path: Path) -> None:
    (outlives,) = sink_checks.DURABLE
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    outlives(lambda: SinkAt(JsonlSink(right), kept=lambda: lines_in(right)))
    with pytest.raises(ContractBroken, match="was killed"):
        outlives(lambda: SinkAt(FlushesAtTheEnd(wrong), kept=lambda: lines_in(wrong)))


class Mirroring:
    """A correct mirror: the last state of each row."""

    def __init__(self, tables: dict[TableId, Mirror]) -> None:
        self._tables = tables

    def wanted(self, event: Event, mirror: Mirror) -> bool:
        return True

    def in_order(self, events: list[Event]) -> list[Event]:
        return events

    def write(self, batch: Batch) -> Sequence[Rejected]:
        for event in self.in_order(list(batch.events())):
            mirror = self._tables.setdefault(event.schema.table, Mirror())
            if self.wanted(event, mirror):
                mirror.apply(event.row_write())
        return ()

    def flush(self, caught_up: bool) -> None:
        """Nothing is durable here."""


class InsertsWhatIsNew(Mirroring):
    def wanted(self, event: Event, mirror: Mirror) -> bool:
        there = event.key is not None and tuple(event.key.values()) in mirror.rows
        return not (there and event.operation.value in ("insert", "read"))


class WithoutSnapshots(Mirroring):
    def wanted(self, event: Event, mirror: Mirror) -> bool:
        return event.operation.value != "read"


class DeletesLast(Mirroring):
    def in_order(self, events: list[Event]) -> list[Event]:
        return sorted(events, key=lambda event: isinstance(event.row_write(), Delete))


class NullsUnsentValues(Mirroring):
    def wanted(self, event: Event, mirror: Mirror) -> bool:
        if isinstance(event.row_write(), Merge):
            mirror.apply(Replace(key=event.key, row=event.values))
            return False
        return True


def mirroring(sink: type[Mirroring]) -> Callable[[], Callable[[], SinkAt]]:
    def place() -> Callable[[], SinkAt]:
        tables: dict[TableId, Mirror] = {}
        return lambda: SinkAt(sink(tables), rows=lambda shape: list(tables[shape.table].rows.values()))

    return place


def test_a_correct_mirror_passes() -> None:
    sink_checks.check_sink(mirroring(Mirroring))


@pytest.mark.parametrize("wrong", [InsertsWhatIsNew, WithoutSnapshots, DeletesLast, NullsUnsentValues])
def test_a_wrong_mirror_fails(wrong: type[Mirroring]) -> None:
    with pytest.raises(ContractBroken):
        sink_checks.check_sink(mirroring(wrong))


@pytest.mark.parametrize("check", [store_checks.check_checkpoint_store, schema_history_checks.check_schema_history])
def test_what_is_not_a_check_is_refused(check: Callable[..., None]) -> None:
    with pytest.raises(Exception, match="not a `Check`"):
        check(place_of(Store), 3)
