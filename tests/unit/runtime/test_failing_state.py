"""A checkpoint store or a schema history that fails briefly: no row is skipped, nothing blocks."""

from __future__ import annotations

from datetime import datetime

import pytest

from tailrace.capture.memory.source import MemoryCapture
from tailrace.capture.port import SourceId
from tailrace.errors import SourceTableMissing, StateFull, Unacknowledged, Unsupported
from tailrace.model.position import ZERO, Lsn
from tailrace.model.position_kinds import Position
from tailrace.model.schema import TableSchema
from tailrace.runtime import observers
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.observers import Fact
from tailrace.runtime.output_batch import BatchKind, Limits, Transactions
from tailrace.runtime.sinks import MemorySink
from tailrace.state.checkpoint import Checkpoint
from tailrace.state.checkpoint_stores import MemoryCheckpointStore
from tailrace.state.schema_history import MemorySchemaHistory, SchemaVersion
from tailrace.testing.faults import FaultyStore, fail
from tailrace.transforms.rules import Filter, Transforms
from tests.support.changes import SHOP
from tests.support.runtimes import inserts, keys_of, until


def full() -> StateFull:
    return StateFull("disk full", hint="Free space.")


class Store(MemoryCheckpointStore):
    """A checkpoint store that fails so many times."""

    failures = 0

    def save(self, key: str, checkpoint: Checkpoint) -> None:
        if self.failures:
            self.failures -= 1
            raise full()
        super().save(key, checkpoint)

    @property
    def snapshot(self) -> object:
        """The snapshot in the saved checkpoint."""
        saved = self.load("default")
        assert saved is not None
        return saved.metadata["snapshot"]


class History(MemorySchemaHistory):
    """A schema history that fails so many times."""

    failures = 1

    def record(
        self,
        shape: TableSchema,
        *,
        time: datetime | None = None,
        position: Position | None = None,
        ddl: str | None = None,
    ) -> SchemaVersion:
        if self.failures:
            self.failures -= 1
            raise full()
        return super().record(shape, time=time, position=position, ddl=ddl)


@pytest.fixture
def source() -> MemoryCapture:
    return MemoryCapture(keep_tables=True, chunk_rows=3, window_transactions_max=10)


@pytest.fixture
def store() -> Store:
    return Store()


def received(runtime: CdcRuntime, kind: BatchKind, polls: int = 12) -> list[object]:
    """Return the keys of all batches of a kind, each acknowledged."""
    found: list[object] = []
    for _ in range(polls):
        batch = runtime.poll(0.06)
        found += keys_of(batch) if batch.kind is kind else []
        runtime.commit(batch.ack)
    return found


# --- a schema history ----------------------------------------------------------------------------------------------


def test_rows_the_history_failed_on_are_handed_out_by_the_next_poll(source: MemoryCapture, store: Store) -> None:
    runtime = CdcRuntime(source, store, History(), limits=Limits(rows=1))
    runtime.start()
    for n in range(4):
        source.commit(inserts(n))
    with pytest.raises(StateFull):
        runtime.poll()
    assert received(runtime, BatchKind.STREAM) == [0, 1, 2, 3]
    assert source.confirmed == source.end
    runtime.stop()


def test_the_loop_waits_for_the_history_and_loses_nothing(source: MemoryCapture, store: Store) -> None:
    for n in range(4):
        source.commit(inserts(n))
    sink = MemorySink()
    runtime = CdcRuntime(source, store, History(), limits=Limits(rows=1))
    runtime.run(sink, until(lambda: sink.rows >= 4))
    assert [event.values["id"] for event in sink.events()] == [0, 1, 2, 3]
    assert [event.seq for event in sink.events()] == [0, 1, 2, 3]


def test_rows_of_a_snapshot_wait_for_the_history_too(source: MemoryCapture, store: Store) -> None:
    source.commit(inserts(*range(5)))
    runtime = CdcRuntime(source, store, History(), snapshot_tables=(SHOP.table,))
    runtime.start()
    with pytest.raises(StateFull):
        runtime.poll()
    assert received(runtime, BatchKind.SNAPSHOT) == list(range(5))
    runtime.stop()


# --- a transaction that is half acknowledged -------------------------------------------------------------------------


@pytest.mark.parametrize(("limits", "rows"), [(Limits(), 2), (Limits(rows=4, transactions=Transactions.SPLIT), None)])
def test_no_chunk_is_handed_out_in_the_middle_of_a_transaction(
    source: MemoryCapture, store: Store, limits: Limits, rows: int | None
) -> None:
    """Its rows would get the numbers of rows that are repeated after a crash."""
    runtime = CdcRuntime(source, store, limits=limits)
    runtime.start()
    source.commit(inserts(*range(6)))
    batch = runtime.poll()
    seqs = [event.seq for event in batch.events()][:rows]
    runtime.commit(batch.ack, rows=rows)
    runtime.control.snapshot(SHOP.table)
    rest = runtime.poll()
    assert rest.kind is BatchKind.STREAM
    assert seqs + [event.seq for event in rest.events()] == list(range(6))
    runtime.commit(rest.ack)
    assert received(runtime, BatchKind.SNAPSHOT, 4) == list(range(6))
    assert runtime.rows_committed == 12
    runtime.stop()


def test_no_chunk_uses_the_numbers_of_rows_that_were_handed_out(source: MemoryCapture, store: Store) -> None:
    runtime = CdcRuntime(source, store)
    runtime.start()
    for n in range(3):
        source.commit(inserts(n))
    runtime.commit(runtime.poll().ack, rows=1)
    runtime.control.snapshot(SHOP.table)
    rest = runtime.poll()
    assert (rest.kind, keys_of(rest)) == (BatchKind.STREAM, [1, 2])
    runtime.force_stop()


def test_the_end_of_a_transaction_whose_rows_are_acknowledged_is_not_lost_with_its_checkpoint(store: Store) -> None:
    source = MemoryCapture(part_rows_max=2)
    first_two = Transforms(rules=(Filter(name="first two", where="id < 2"),))
    split = Limits(rows=2, transactions=Transactions.SPLIT)
    runtime = CdcRuntime(source, store, limits=split, transforms=first_two)
    runtime.start()
    end = source.commit(inserts(*range(4)))
    runtime.commit(runtime.poll().ack)
    store.failures = 1
    with pytest.raises(StateFull):
        runtime.poll()
    assert source.confirmed == ZERO
    runtime.poll(0.0)
    assert (source.confirmed, runtime.rows_committed) == (end, 2)
    runtime.stop()


# --- the beginning and the end of a snapshot ----------------------------------------------------------------------


@pytest.fixture
def heard() -> list[Fact]:
    return []


@pytest.fixture
def runtime(source: MemoryCapture, store: Store, heard: list[Fact]) -> CdcRuntime:
    """A runtime that has acknowledged five rows."""
    source.commit(inserts(*range(5)))
    made = CdcRuntime(source, store, observers=(heard.append,))
    made.start()
    received(made, BatchKind.STREAM, 2)
    return made


def reported(heard: list[Fact]) -> list[str]:
    kinds = (observers.SnapshotBegun, observers.SnapshotEnded)
    return [f"{type(fact).__name__} {fact.id}" for fact in heard if isinstance(fact, kinds)]


def test_a_snapshot_whose_start_cannot_be_saved_begins_later(
    store: Store, runtime: CdcRuntime, heard: list[Fact]
) -> None:
    snapshot = runtime.control.snapshot(SHOP.table)
    store.failures = 1
    assert runtime.poll(0.0).kind is BatchKind.EMPTY
    assert runtime.health().reason == "disk full"
    assert received(runtime, BatchKind.SNAPSHOT) == list(range(5))
    assert reported(heard) == [f"SnapshotBegun {snapshot}", f"SnapshotEnded {snapshot}"]
    assert store.snapshot is None
    runtime.stop()


def test_a_snapshot_whose_last_rows_cannot_be_acknowledged_ends_when_they_are(
    store: Store, runtime: CdcRuntime, heard: list[Fact]
) -> None:
    snapshot = runtime.control.snapshot(SHOP.table)
    runtime.commit(runtime.poll(0.0).ack)
    runtime.poll(0.0)  # the stream's turn
    last = runtime.poll(0.0)
    assert keys_of(last) == [3, 4]
    store.failures = 1
    with pytest.raises(StateFull):
        runtime.commit(last.ack)
    assert runtime.poll(0.0) is last
    assert reported(heard) == [f"SnapshotBegun {snapshot}"]
    assert store.snapshot is not None
    runtime.commit(last.ack)
    assert reported(heard) == [f"SnapshotBegun {snapshot}", f"SnapshotEnded {snapshot}"]
    assert store.snapshot is None
    runtime.stop()


def test_a_snapshot_whose_stop_cannot_be_saved_stops_later(
    store: Store, runtime: CdcRuntime, heard: list[Fact]
) -> None:
    snapshot = runtime.control.snapshot(SHOP.table)
    runtime.commit(runtime.poll(0.0).ack)
    runtime.control.stop_snapshot()
    store.failures = 1
    for _ in range(3):
        assert runtime.poll(0.0).kind is BatchKind.EMPTY
    assert store.failures == 0
    assert reported(heard) == [f"SnapshotBegun {snapshot}"]
    assert received(runtime, BatchKind.SNAPSHOT) == []
    assert reported(heard) == [f"SnapshotBegun {snapshot}", f"SnapshotEnded {snapshot}"]
    assert store.snapshot is None
    runtime.stop()


def test_a_snapshot_that_is_given_up_stays_until_its_end_is_saved(
    store: Store, runtime: CdcRuntime, heard: list[Fact], source: MemoryCapture
) -> None:
    snapshot = runtime.control.snapshot(SHOP.table)
    runtime.commit(runtime.poll(0.0).ack)
    assert runtime._snapshots._scan is not None

    def gone(_: int) -> None:
        raise SourceTableMissing("it was dropped", hint="Was it?")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(runtime._snapshots._scan), "next", lambda _scan, rows: gone(rows))
        store.failures = 1
        with pytest.raises(StateFull):
            runtime.poll(0.0)
        assert reported(heard) == [f"SnapshotBegun {snapshot}"]
        source.commit(inserts(9))
        assert received(runtime, BatchKind.STREAM) == [9]
    assert reported(heard)[-1] == f"SnapshotEnded {snapshot}"
    assert store.snapshot is None
    runtime.stop()


# --- stopping -----------------------------------------------------------------------------------------------------


def test_stop_counts_the_rest_of_a_partly_acknowledged_batch(source: MemoryCapture, store: Store) -> None:
    runtime = CdcRuntime(source, store)
    runtime.start()
    for n in range(4):
        source.commit(inserts(n))
    runtime.commit(runtime.poll().ack, rows=1)
    with pytest.raises(Unacknowledged) as refused:
        runtime.stop()
    assert refused.value.fields["handed_out"] == 3
    assert runtime.control.status().unacknowledged == 3
    runtime.commit(runtime.poll().ack)
    runtime.stop()


# --- a first start ------------------------------------------------------------------------------------------------


class Slotted(MemoryCapture):
    """A source that creates something at its server for a new stream."""

    slots = 0

    def prepare(self, position: Lsn | None, origin: SourceId | None = None) -> Lsn | None:
        self.slots += position is None
        return super().prepare(position, origin)

    def unprepare(self) -> None:
        self.slots -= 1


def test_a_first_start_that_fails_leaves_nothing_at_the_source(store: Store) -> None:
    source = Slotted()
    with pytest.raises(Unsupported):
        CdcRuntime(source, store, snapshot_tables=(SHOP.table,)).start()
    assert source.slots == 0
    runtime = CdcRuntime(source, store)
    store.failures = 1
    with pytest.raises(StateFull):
        runtime.start()
    assert source.slots == 0
    runtime.start()
    runtime.stop()
    assert source.slots == 1


def test_a_failed_first_start_whose_checkpoint_was_saved_keeps_what_it_made() -> None:
    source = Slotted()
    runtime = CdcRuntime(source, FaultyStore(MemoryCheckpointStore(), fail("save", error=full(), acted=True)))
    with pytest.raises(StateFull):
        runtime.start()
    assert source.slots == 1
    runtime.start()
    runtime.stop()
