"""Each fault happens at its call, and a runtime keeps its promise whatever happens."""

from __future__ import annotations

import time

import pytest

from tailrace.capture.memory.source import MemoryCapture
from tailrace.capture.port import PreparedSource, Scannable
from tailrace.errors import ConfigError, ProtocolViolation, SourceUnreachable, StateCorrupt, StateUnusable
from tailrace.model.position import ZERO, Lsn
from tailrace.runtime import intake
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.sinks import MemorySink
from tailrace.state.checkpoint import Checkpoint
from tailrace.state.checkpoint_stores import MemoryCheckpointStore
from tailrace.testing.checks import ContractBroken
from tailrace.testing.faults import (
    FaultyStore,
    InjectedFault,
    corrupt,
    delay,
    duplicate,
    fail,
    faulty_source,
    lose,
    slow,
)
from tailrace.testing.store_checks import check_checkpoint_store
from tests.support.runtimes import inserts, keys_of, until


def at(position: int) -> Checkpoint:
    return Checkpoint(source_type="postgresql", position=Lsn(position))


def faulty(*faults: InjectedFault) -> FaultyStore:
    return FaultyStore(MemoryCheckpointStore(), *faults)


def position(store: FaultyStore) -> int | None:
    found = store.load("k")
    return found.position.value if found is not None and isinstance(found.position, Lsn) else None


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "RETRY_SECONDS_FIRST", 0.0)


def test_a_store_fails_before_it_acts_or_after() -> None:
    store = faulty(fail("save", at=2), fail("save", at=3, acted=True))
    store.save("k", at(1))
    for expected in (1, 3):
        with pytest.raises(StateUnusable):
            store.save("k", at(3))
        assert position(store) == expected
    assert store.struck == ["fail save", "fail save"]


def test_a_store_is_slow_and_acts() -> None:
    store = faulty(slow("save", seconds=0.05))
    began = time.monotonic()
    store.save("k", at(1))
    assert time.monotonic() - began >= 0.05
    assert position(store) == 1


def test_a_damaged_checkpoint_cannot_be_read_until_it_is_saved_again() -> None:
    store = faulty(corrupt("save"), corrupt("load", at=3))
    store.save("k", at(1))
    with pytest.raises(StateCorrupt):
        store.load("k")
    store.save("k", at(2))
    assert position(store) == 2
    with pytest.raises(StateCorrupt):
        store.load("k")


def test_a_store_loses_what_it_reported_as_saved() -> None:
    store = faulty(lose("save", at=2), lose("delete"), lose("load", at=4))
    store.save("k", at(1))
    store.save("k", at(2))
    assert position(store) == 1
    assert store.delete("k")
    assert position(store) == 1
    store.save("k", at(3))
    assert position(store) == 3
    assert store.load("k") is None


def test_a_store_acts_twice_or_late() -> None:
    store = faulty(duplicate("save"), delay("save", at=2, calls=2))
    store.save("k", at(1))
    store.save("k", at(2))
    assert position(store) == 1
    assert position(store) == 2, "two calls later"
    assert store.list() == ("k",)
    assert store.all()["k"].position == Lsn(2)


def test_an_impossible_fault_is_refused() -> None:
    for wrong in (
        lambda: faulty(duplicate("load")),
        lambda: faulty_source(MemoryCapture(), corrupt("confirm")),
        lambda: fail("save", at=0),
    ):
        with pytest.raises(ConfigError):
            wrong()


def test_the_suite_for_stores_finds_a_store_that_loses() -> None:
    with pytest.raises(ContractBroken, match="loaded as it was"):
        check_checkpoint_store(lambda: (lambda store: lambda: store)(faulty(lose("save", at=1, times=1000))))


SOURCE_FAULTS = {
    "fail": (fail("read", at=2), fail("live"), fail("confirm", at=3)),
    "slow": (slow("read", seconds=0.01, times=3), slow("confirm", seconds=0.01)),
    "lose": (lose("read", at=1), lose("read", at=4), lose("confirm", at=2)),
    "duplicate": (duplicate("read", times=3), duplicate("confirm", times=3)),
    "delay": (delay("read", calls=3), delay("read", at=3), delay("confirm", calls=2)),
}


@pytest.mark.parametrize("kind", SOURCE_FAULTS)
def test_every_row_arrives_once_and_in_order_whatever_the_source_does(kind: str) -> None:
    inner = MemoryCapture()
    source = faulty_source(inner, *SOURCE_FAULTS[kind])
    for n in range(6):
        inner.commit(inserts(n))
    sink, store = MemorySink(), MemoryCheckpointStore()
    CdcRuntime(source, store).run(sink, until(lambda: sink.rows >= 6 and inner.confirmed > ZERO))
    assert [event.values["id"] for event in sink.events()] == list(range(6))
    assert {name.split()[0] for name in source.struck} == {kind}
    assert len(source.struck) == sum(fault.times for fault in SOURCE_FAULTS[kind]), "all of them were met"


def test_invalid_bytes_end_the_loop_and_are_not_skipped() -> None:
    inner = MemoryCapture()
    first = inner.commit(inserts(1))
    source, sink, store = faulty_source(inner, corrupt("read", at=2)), MemorySink(), MemoryCheckpointStore()
    runtime = CdcRuntime(source, store)
    with pytest.raises(ProtocolViolation):
        runtime.run(sink, lambda: sink.rows == 1 and inner.end == first and inner.commit(inserts(2)) == ZERO)
    assert inner.confirmed == first
    CdcRuntime(source, store).run(sink, until(lambda: sink.rows == 2))
    assert [event.values["id"] for event in sink.events()] == [1, 2]


def test_a_checkpoint_whose_answer_was_lost_repeats_nothing() -> None:
    """It was saved, and the runtime does not know: the batch stays, and is acknowledged again."""
    source, store = MemoryCapture(), faulty(fail("save", at=2, acted=True))
    source.commit(inserts(1, 2))
    runtime = CdcRuntime(source, store)
    runtime.start()
    batch = runtime.poll()
    with pytest.raises(StateUnusable):
        runtime.commit(batch.ack)
    assert source.confirmed == ZERO
    assert runtime.poll() is batch
    runtime.commit(batch.ack)
    assert keys_of(runtime.poll(0.0)) == []
    assert runtime.rows_committed == 2
    assert source.confirmed == source.end
    runtime.stop()


def test_a_source_with_faults_can_do_what_the_source_can() -> None:
    source = faulty_source(MemoryCapture(keep_tables=True))
    assert isinstance(source, PreparedSource)
    assert isinstance(source, Scannable)
    assert source.capabilities.live
    broken = faulty_source(MemoryCapture(), fail("live", error=SourceUnreachable("mine", hint="Wait.")))
    with pytest.raises(SourceUnreachable, match="mine"):
        broken.live(ZERO)
