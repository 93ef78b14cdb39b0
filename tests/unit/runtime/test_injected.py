"""Changes of the caller's own: never lost to a sink that fails, never mistaken for a change of the source."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tailrace.capture.memory import MemoryCapture, batch_of
from tailrace.errors import ConfigError, SinkUnready
from tailrace.model.batch import ChangeBatch
from tailrace.model.change import Operation
from tailrace.model.event import Event
from tailrace.model.mirror import Mirror
from tailrace.runtime import observing
from tailrace.runtime.batch import Batch, Kind
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.observing import Fact
from tailrace.runtime.sinks import MemorySink
from tailrace.state.checkpoints import MemoryCheckpointStore
from tests.support.changes import SHOP
from tests.support.runtimes import inserts, keys_of, until
from tests.support.transforms import PEOPLE, changed, person
from tests.support.transforms import batch as stored


@pytest.fixture
def source() -> MemoryCapture:
    return MemoryCapture()


class Failing(MemorySink):
    """Raises what it was given, at write or at flush."""

    def __init__(self, at: str, *errors: Exception) -> None:
        super().__init__()
        self.at, self.errors = at, list(errors)

    def write(self, batch: Batch) -> tuple[()]:
        self._fail("write")
        return super().write(batch)

    def flush(self, caught_up: bool) -> None:
        self._fail("flush")
        super().flush(caught_up)

    def _fail(self, at: str) -> None:
        if self.errors and at == self.at:
            self._unflushed.clear()
            raise self.errors.pop()


@pytest.mark.parametrize("at", ["write", "flush"])
def test_a_sink_that_fails_for_a_moment_is_given_them_again_and_the_stream_is_left_alone(
    source: MemoryCapture, at: str
) -> None:
    heard: list[Fact] = []
    sink = Failing(at, SinkUnready("full", hint="Wait."), SinkUnready("full", hint="Wait."))
    runtime = CdcRuntime(source, MemoryCheckpointStore(), observers=(heard.append,))
    runtime.start()
    runtime.poll(0.0)
    runtime.enqueue(inserts(50, 51))
    source.commit(inserts(1))
    runtime.run(sink, until(lambda: sink.rows == 3))
    assert [event.values["id"] for event in sink.events()] == [50, 51, 1]
    assert [type(fact) for fact in heard].count(observing.StreamOpened) == 1
    assert [type(fact) for fact in heard].count(observing.Lost) == 2


def test_a_sink_that_breaks_leaves_them_to_the_next_run(source: MemoryCapture) -> None:
    runtime = CdcRuntime(source, MemoryCheckpointStore())
    runtime.start()
    runtime.enqueue(inserts(50))
    with pytest.raises(ValueError, match="a defect"):
        runtime.run(Failing("write", ValueError("a defect")), until(lambda: False))
    sink = MemorySink()
    runtime.run(sink, until(lambda: sink.rows == 1))
    assert [event.values["id"] for event in sink.events()] == [50]


def test_their_numbers_are_no_ones_elses_and_stay_when_they_come_again(source: MemoryCapture) -> None:
    source.commit(inserts(1, 2))
    runtime = CdcRuntime(source, MemoryCheckpointStore())
    runtime.start()
    runtime.enqueue(inserts(50, 51))
    runtime.enqueue(inserts(52))
    numbers = []
    for _ in range(2):
        batch = runtime.poll()
        numbers.append([event.seq for event in batch.events()])
        runtime._injected.put_back()
    assert numbers[0] == numbers[1]
    found = [event.seq for batch in (runtime.poll(), runtime.poll()) for event in batch.events()]
    assert found == sorted(set(found))
    assert max(found) < 0
    assert [event.seq for event in runtime.poll().events()] == [0, 1]
    runtime.force_stop()


def test_they_pass_the_callers_function(source: MemoryCapture) -> None:
    def failing(batch: ChangeBatch) -> ChangeBatch:
        if faults:
            raise faults.pop()
        return batch

    faults = [ValueError("a defect")]
    runtime = CdcRuntime(source, MemoryCheckpointStore(), transform=failing)
    runtime.start()
    runtime.enqueue(inserts(50))
    with pytest.raises(ValueError, match="a defect"):
        runtime.poll()
    assert keys_of(runtime.poll()) == [50]
    runtime.stop()


def test_an_event_can_be_injected_as_it_came(source: MemoryCapture) -> None:
    runtime = CdcRuntime(source, MemoryCheckpointStore())
    runtime.start()
    given = [
        *stored(
            changed(Operation.UPDATE, person(2, "b"), before=person(1, "a"), moved_from={"id": 1}),
            changed(Operation.UPDATE, person(2, "b"), before=person(2, "a"), unchanged=["mail"]),
            changed(Operation.INSERT, person(3), unfit={"amount": "NaN"}),
        ).events(),
        *batch_of(SHOP, (Operation.TRUNCATE, {})).events(),
    ]  # fmt: skip
    for event in given:
        runtime.enqueue(event)
        batch = runtime.poll()
        found = next(batch.events())
        assert batch.kind is Kind.INJECTED
        assert (found.values, found.before, found.moved_from) == (event.values, event.before, event.moved_from)
        assert (found.unchanged, found.unfit, found.operation) == (event.unchanged, event.unfit, event.operation)
        assert found.row_write() == event.row_write()
        assert (batch.batches[0].moves, batch.batches[0].truncates, batch.batches[0].unfit) == (
            int(event.moved_from is not None), int(event.operation is Operation.TRUNCATE), len(event.unfit),
        )  # fmt: skip
    runtime.stop()


def test_half_of_a_change_of_key_is_refused_and_both_halves_keep_the_large_value(source: MemoryCapture) -> None:
    runtime = CdcRuntime(source, MemoryCheckpointStore())
    runtime.start()
    rows = stored(
        changed(Operation.INSERT, person(1, "large")),
        changed(Operation.DELETE, person(1)),
        changed(Operation.INSERT, person(2), moved_from={"id": 1}, unchanged=["mail"]),
    )
    for half in tuple(rows.events())[1:]:
        with pytest.raises(ConfigError, match="half of a change of key"):
            runtime.enqueue(half)
    runtime.enqueue(rows)
    mirror = Mirror()
    for event in runtime.poll().events():
        mirror.apply(event.row_write())
    assert [row["mail"] for row in mirror.rows.values()] == ["large"]
    runtime.stop()


def test_an_event_made_by_hand_can_be_injected(source: MemoryCapture) -> None:
    runtime = CdcRuntime(source, MemoryCheckpointStore())
    runtime.start()
    runtime.enqueue(Event(
        operation=Operation.INSERT, table=str(PEOPLE.table), seq=0, position=None, transaction=0,
        values={"id": 7, "mail": "x"}, unchanged=(), before=None, moved_from=None, schema=PEOPLE,
        committed_at=datetime(2026, 1, 1, tzinfo=UTC),
    ))  # fmt: skip
    event = next(runtime.poll().events())
    assert (event.values["id"], event.values["country"]) == (7, None)
    assert event.committed_at == datetime(2026, 1, 1, tzinfo=UTC)
    runtime.stop()
