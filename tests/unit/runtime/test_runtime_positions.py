"""The runtime works with every position type, through snapshots, parts, restarts and losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailrace.capture.memory.source import MemoryCapture
from tailrace.changelog.write.writer import LogWriter
from tailrace.errors import ConfigError, PositionRewound, SourceUnreachable, StateForeign
from tailrace.model.batch import Window
from tailrace.model.position import ZERO, Lsn
from tailrace.model.position_kinds import CustomPosition, MariadbGtidSet, position_type_of
from tailrace.runtime import loop
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.output_batch import Batch, Limits, Transactions
from tailrace.runtime.output_batch import BatchKind as BatchKind
from tailrace.runtime.position_store import LogSink
from tailrace.state.checkpoint import Checkpoint, seed_checkpoint
from tailrace.state.checkpoint_stores import FileCheckpointStore, MemoryCheckpointStore
from tailrace.state.schema_history import MemorySchemaHistory
from tailrace.testing.faults import InjectedFault, duplicate, faulty_source
from tailrace.transforms.rules import Filter, Transforms
from tests.support.changes import SHOP
from tests.support.counted import KINDS, Counted, Kind
from tests.support.runtimes import inserts, keys_of

PARTS = Limits(rows=3, transactions=Transactions.SPLIT)


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind[Any]:
    return KINDS[request.param]


@pytest.fixture
def memory() -> MemoryCapture:
    made = MemoryCapture(keep_tables=True, chunk_rows=4, part_rows_max=4)
    made.commit(inserts(*range(10)))
    return made


def started(memory: MemoryCapture, kind: Kind[Any], store: Any, **given: Any) -> CdcRuntime[Any]:
    made = CdcRuntime(Counted(memory, kind), store, limits=PARTS, **given)
    made.start()
    return made


def take(runtime: CdcRuntime[Any], rows: int | None = None, polls: int = 12) -> list[Batch]:
    """Return the batches, each acknowledged, or so many rows of each."""
    found = []
    for _ in range(polls):
        batch = runtime.poll(0.0)
        if batch.rows:
            found.append(batch)
        runtime.commit(batch.ack, rows=None if rows is None else min(rows, batch.rows))
    return found


def keys(batches: list[Batch], kind: BatchKind) -> list[object]:
    return [key for batch in batches if batch.kind is kind for key in keys_of(batch)]


def test_a_runtime_reads_tables_streams_and_continues_after_a_restart(
    memory: MemoryCapture, kind: Kind[Any], tmp_path: Path
) -> None:
    history = MemorySchemaHistory()
    with FileCheckpointStore(tmp_path) as store:
        runtime = started(memory, kind, store, schema_history=history, snapshot_tables=(SHOP.table,))
        assert runtime.position == kind.count(memory.end)
        read = take(runtime, polls=2)
        runtime.force_stop()
        memory.commit(inserts(*range(20, 30)))  # larger than a part, and than a batch
        memory.commit(inserts(30, 31))
        memory.commit(inserts(32))
        runtime = started(memory, kind, store, schema_history=history, snapshot_tables=(SHOP.table,))
        while (batch := runtime.poll(0.0)).kind is not BatchKind.STREAM:
            read += [batch] if batch.rows else []
            runtime.commit(batch.ack)
        assert set(keys(read, BatchKind.SNAPSHOT)) >= set(range(10))
        first = [(event.seq, event.values["id"]) for event in batch.events()]
        runtime.force_stop()
    with FileCheckpointStore(tmp_path) as store:
        runtime = started(memory, kind, store, schema_history=history, snapshot_tables=(SHOP.table,))
        while (batch := runtime.poll(0.0)).kind is not BatchKind.STREAM:
            runtime.commit(batch.ack)
        assert [(event.seq, event.values["id"]) for event in batch.events()] == first, "it was not acknowledged"
        streamed = keys([batch], BatchKind.STREAM)
        runtime.commit(batch.ack)
        streamed += keys(take(runtime), BatchKind.STREAM)
        assert streamed == [*range(20, 33)]
        assert runtime.position == kind.count(memory.end)
        assert memory.confirmed == memory.end
        runtime.stop()
        saved = store.load("default")
    assert saved is not None
    assert (saved.position, saved.metadata["snapshot"]) == (kind.count(memory.end), None)
    version = history.latest(SHOP.table)
    assert version is not None
    assert type(version.position) is type(kind.count(ZERO))


def test_a_part_of_a_batch_moves_the_position_to_the_last_whole_transaction(kind: Kind[Any]) -> None:
    memory, store = MemoryCapture(window_transactions_max=9), MemoryCheckpointStore()
    ends = [memory.commit(inserts(n)) for n in range(3)]
    runtime = started(memory, kind, store)
    runtime.commit(runtime.poll(0.0).ack, rows=2)
    assert (runtime.position, memory.confirmed) == (kind.count(ends[1]), ends[1])
    rest = runtime.poll(0.0)
    assert (keys_of(rest), rest.end) == ([2], kind.count(ends[2]))
    runtime.force_stop()


def test_rows_that_rules_drop_are_passed(kind: Kind[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "IDLE_SECONDS_MAX", 0.0)
    memory, store = MemoryCapture(), MemoryCheckpointStore()
    rules = Transforms(rules=(Filter(where="id > 1"),))
    runtime = started(memory, kind, store, transforms=rules)
    for n in (0, 2, 1, 1, 3, 0):
        memory.commit(inserts(n))
    assert keys(take(runtime, polls=30), BatchKind.STREAM) == [2, 3]
    assert (runtime.position, memory.confirmed) == (kind.count(memory.end), memory.end)
    runtime.stop()


def test_a_source_that_repeats_windows_and_breaks_delivers_each_row_once(kind: Kind[Any]) -> None:
    memory, store = MemoryCapture(), MemoryCheckpointStore()
    faults: tuple[InjectedFault, ...] = (duplicate("read", at=1), duplicate("read", at=3))
    runtime = CdcRuntime(faulty_source(Counted(memory, kind), *faults), store)
    runtime.start()
    for n in range(3):
        memory.commit(inserts(n))
    found = take(runtime, polls=1)
    memory.break_next_read(SourceUnreachable("gone", hint="Wait."))
    memory.commit(inserts(3))
    while len(keys(found, BatchKind.STREAM)) < 4:
        batch = runtime.poll()
        found += [batch] if batch.rows else []
        runtime.commit(batch.ack)
    assert keys(found, BatchKind.STREAM) == [0, 1, 2, 3]
    runtime.stop()


def test_a_quiet_source_moves_the_position_and_reaches_the_target(
    kind: Kind[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "IDLE_BYTES_MAX", 1 << 60)
    memory, store = MemoryCapture(), MemoryCheckpointStore()
    memory.commit(inserts(1))
    target = memory.quiet(1000)
    runtime = started(memory, kind, store, target=kind.count(target))
    before = runtime.caught_up
    take(runtime)
    assert (before, runtime.caught_up) == (False, True)
    assert memory.confirmed == target
    runtime.stop()


@pytest.mark.parametrize(("saved", "given"), [("mysql-binlog", "custom"), ("custom", "postgresql-lsn")])
def test_a_checkpoint_of_another_kind_is_refused(saved: str, given: str) -> None:
    memory, store = MemoryCapture(), MemoryCheckpointStore()
    position = KINDS[saved].count(Lsn(7))
    seed_checkpoint(store, "default", Checkpoint(source_type="mine", position=position))
    runtime = CdcRuntime(Counted(memory, KINDS[given]), store)
    with pytest.raises(StateForeign, match="positions of another kind than the source") as caught:
        runtime.start()
    assert caught.value.fields["found"] == position_type_of(position).value
    assert caught.value.fields["expected"] == position_type_of(KINDS[given].count(ZERO)).value
    assert store.load("default") is not None, "and stays as it was"


class Mixed:
    """A source that declares PostgreSQL positions and returns windows with others."""

    def live(self, after: Lsn) -> Mixed:
        return self

    def read(self, after: Lsn, wait_seconds: float) -> Window[CustomPosition]:
        return Window(start=CustomPosition("0"), end=CustomPosition("1"))

    def confirm(self, position: Lsn) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def test_a_source_with_positions_of_another_kind_than_declared_is_refused() -> None:
    memory = MemoryCapture()
    memory.commit(inserts(1))
    source, store = Counted(memory, KINDS["custom"]), MemoryCheckpointStore()
    source.beginning = KINDS["mysql-gtid"].count(ZERO)
    with pytest.raises(ConfigError, match="of another type than its own"):
        CdcRuntime(source, store).start()
    assert store.load("default") is None
    mixed: Any = Mixed()
    runtime = CdcRuntime(mixed, store)
    runtime.start()
    with pytest.raises(ConfigError, match="of another type than its own"):
        runtime.poll()
    runtime.force_stop()


def test_a_transaction_set_that_lacks_acknowledged_ones_is_not_saved() -> None:
    """Sets have only a partial order: one that does not contain the one before is refused."""
    memory, store = MemoryCapture(), MemoryCheckpointStore()
    sets = {ZERO: "0-1-1", memory.commit(inserts(1)): "0-1-5", memory.commit(inserts(2)): "7-1-1"}
    texts = {text: lsn for lsn, text in sets.items()}
    kind = Kind("mariadb", lambda lsn: MariadbGtidSet.parse(sets[lsn]), lambda at: texts[str(at)])
    runtime = CdcRuntime(Counted(memory, kind), store, limits=Limits(rows=1))
    runtime.start()
    runtime.commit(runtime.poll().ack)
    batch = runtime.poll()
    assert keys_of(batch) == [2]
    with pytest.raises(PositionRewound):
        runtime.commit(batch.ack)
    assert (str(runtime.position), runtime.poll()) == ("0-1-5", batch)
    runtime.force_stop()


def test_a_change_log_refuses_positions_that_it_cannot_keep(tmp_path: Path) -> None:
    memory = MemoryCapture()
    log = LogWriter(tmp_path / "log", memory.identity)
    runtime = CdcRuntime(Counted(memory, KINDS["mysql-binlog"]), LogSink(log))
    with pytest.raises(ConfigError, match="change log cannot keep positions"):
        runtime.start()
    assert log.commit == 0, "and nothing was written"
    log.close()
