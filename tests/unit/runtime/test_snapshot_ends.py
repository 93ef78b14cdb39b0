"""A snapshot ends with its last acknowledgement, or once no row is known to follow."""

from __future__ import annotations

import pytest

from tailrace.capture.memory.source import MemoryCapture, batch_of
from tailrace.errors import StateFull
from tailrace.model.change import Operation
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.observers import Committed, Fact, SnapshotEnded
from tailrace.runtime.output_batch import BatchKind, Limits
from tailrace.state.checkpoint import Checkpoint
from tailrace.state.checkpoint_stores import MemoryCheckpointStore
from tests.support.changes import SHOP
from tests.support.runtimes import inserts, keys_of
from tests.support.windows import named

OTHER = named("public", "others", 20)


class Store(MemoryCheckpointStore):
    """A store that refuses to save while it is full."""

    full = False

    def save(self, key: str, checkpoint: Checkpoint) -> None:
        if self.full:
            raise StateFull("disk full", hint="Free space.")
        super().save(key, checkpoint)

    @property
    def snapshot(self) -> object:
        """The snapshot in the saved checkpoint."""
        saved = self.load("default")
        assert saved is not None
        return saved.metadata["snapshot"]


@pytest.fixture
def source() -> MemoryCapture:
    """Return a source with one table with rows, and one whose last row was deleted."""
    made = MemoryCapture(keep_tables=True, chunk_rows=10)
    made.commit(inserts(*range(3)))
    made.commit(inserts(7, schema=OTHER))
    made.commit(batch_of(OTHER, (Operation.DELETE, {"id": 7})))
    return made


@pytest.fixture
def store() -> Store:
    return Store()


def ended(heard: list[Fact]) -> list[tuple[int, bool]]:
    return [(fact.rows, fact.stopped) for fact in heard if isinstance(fact, SnapshotEnded)]


def test_the_last_acknowledgement_ends_a_snapshot(source: MemoryCapture, store: Store) -> None:
    heard: list[Fact] = []
    tables = (OTHER.table, SHOP.table)
    runtime = CdcRuntime(source, store, snapshot_tables=tables, limits=Limits(rows=2), observers=(heard.append,))
    runtime.start()
    runtime.commit(runtime.poll().ack)
    assert store.snapshot is not None
    runtime.commit(runtime.poll().ack, rows=0)
    runtime.commit(runtime.poll().ack)
    assert ended(heard) == [(3, False)]
    assert isinstance(heard[-2], Committed)
    assert store.snapshot is None
    runtime.stop()
    again = CdcRuntime(source, store)
    again.start()
    source.commit(inserts(500))
    assert keys_of(again.poll()) == [500], "the stream goes on from its moment"
    again.force_stop()


def test_acknowledging_a_part_of_the_last_batch_does_not_end_a_snapshot(source: MemoryCapture, store: Store) -> None:
    heard: list[Fact] = []
    runtime = CdcRuntime(source, store, snapshot_tables=(SHOP.table,), observers=(heard.append,))
    runtime.start()
    runtime.commit(runtime.poll().ack, rows=2)
    assert store.snapshot is not None
    runtime.force_stop()
    again = CdcRuntime(source, store, snapshot_tables=(SHOP.table,), observers=(heard.append,))
    again.start()
    batch = again.poll()
    assert keys_of(batch) == [2]
    again.commit(batch.ack)
    assert ended(heard) == [(3, False)]
    again.stop()


def test_a_snapshot_whose_last_table_is_empty_ends_at_the_poll_without_rows(
    source: MemoryCapture, store: Store
) -> None:
    heard: list[Fact] = []
    runtime = CdcRuntime(source, store, snapshot_tables=(SHOP.table, OTHER.table), observers=(heard.append,))
    runtime.start()
    while (batch := runtime.poll()).kind is not BatchKind.EMPTY:
        runtime.commit(batch.ack)
    assert ended(heard) == [(3, False)]
    assert store.snapshot is None
    runtime.stop()
    again = CdcRuntime(source, store)
    again.start()
    again.stop()


def test_a_requested_snapshot_ends_with_its_last_acknowledgement_too(source: MemoryCapture, store: Store) -> None:
    heard: list[Fact] = []
    runtime = CdcRuntime(source, store, observers=(heard.append,))
    runtime.start()
    runtime.commit(runtime.poll().ack)
    runtime.control.snapshot(SHOP.table)
    batch = runtime.poll()
    assert batch.kind is BatchKind.SNAPSHOT
    runtime.commit(batch.ack)
    assert ended(heard) == [(3, False)]
    assert runtime.control.status().snapshot is None
    runtime.control.snapshot(SHOP.table)
    assert runtime.poll().kind is BatchKind.SNAPSHOT, "and the next one begins"
    runtime.force_stop()


@pytest.mark.parametrize("still_full", [False, True])
def test_an_end_that_could_not_be_saved_is_saved_by_the_stop(
    source: MemoryCapture, store: Store, caplog: pytest.LogCaptureFixture, still_full: bool
) -> None:
    heard: list[Fact] = []
    tables = (SHOP.table, OTHER.table)
    runtime = CdcRuntime(source, store, snapshot_tables=tables, observers=(heard.append,))
    runtime.start()
    runtime.commit(runtime.poll().ack)
    store.full = True
    assert runtime.poll(0.0).kind is BatchKind.EMPTY
    assert not ended(heard)
    store.full = still_full
    runtime.stop()
    assert bool(ended(heard)) != still_full
    assert (store.snapshot is not None) == still_full
    assert any("could not be saved" in record.message for record in caplog.records) == still_full
    store.full = False
    again = CdcRuntime(source, store, snapshot_tables=tables, observers=(heard.append,))
    again.start()
    assert again.poll(0.0).kind is BatchKind.EMPTY, "nothing comes again"
    again.stop()
    assert ended(heard) == [(3, False)]
