"""Injected changes: never lost to a failing sink, never mistaken for a change of the source."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from tailrace.capture.memory.source import MemoryCapture, batch_of
from tailrace.errors import ConfigError, SinkUnready
from tailrace.model.batch import ChangeBatch
from tailrace.model.change import Operation
from tailrace.model.event import Delete, Event
from tailrace.model.mirror import Mirror
from tailrace.model.schema import Identity
from tailrace.runtime import observers
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.observers import Fact
from tailrace.runtime.output_batch import Batch, BatchKind
from tailrace.runtime.sinks import MemorySink
from tailrace.state.checkpoint_stores import MemoryCheckpointStore
from tailrace.transforms.rules import Filter, Transforms
from tests.support.changes import SHOP
from tests.support.runtimes import inserts, keys_of, until
from tests.support.transforms import PEOPLE, changed, person
from tests.support.transforms import batch as stored


@pytest.fixture
def source() -> MemoryCapture:
    return MemoryCapture()


class Failing(MemorySink):
    """A sink that raises the given errors, at write or at flush."""

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
def test_a_sink_that_fails_briefly_gets_injected_rows_again_and_the_stream_stays_open(
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
    assert [type(fact) for fact in heard].count(observers.StreamOpened) == 1
    assert [type(fact) for fact in heard].count(observers.Lost) == 2


def test_injected_rows_survive_a_broken_sink_until_the_next_run(source: MemoryCapture) -> None:
    runtime = CdcRuntime(source, MemoryCheckpointStore())
    runtime.start()
    runtime.enqueue(inserts(50))
    with pytest.raises(ValueError, match="a defect"):
        runtime.run(Failing("write", ValueError("a defect")), until(lambda: False))
    sink = MemorySink()
    runtime.run(sink, until(lambda: sink.rows == 1))
    assert [event.values["id"] for event in sink.events()] == [50]


def test_injected_rows_have_unique_numbers_that_stay_when_they_are_repeated(source: MemoryCapture) -> None:
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


def test_injected_rows_pass_the_callers_function(source: MemoryCapture) -> None:
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


def test_a_received_event_can_be_injected_unchanged(source: MemoryCapture) -> None:
    runtime = CdcRuntime(source, MemoryCheckpointStore())
    runtime.start()
    given = [
        *stored(
            changed(Operation.UPDATE, person(2, "b"), before=person(1, "a"), moved_from={"id": 1}),
            changed(Operation.UPDATE, person(2, "b"), before=person(2, "a"), unchanged=["mail"]),
            changed(Operation.INSERT, person(3), unfit={"amount": "NaN"}),
        ).events(),
        *batch_of(SHOP, (Operation.TRUNCATE, {}), (Operation.DELETE, {"id": 4})).events(),
        *batch_of(replace(SHOP, identity=Identity.FULL), (Operation.DELETE, {"id": 4, "name": "x"})).events(),
    ]
    for event in given:
        runtime.enqueue(event)
        batch = runtime.poll()
        found = next(batch.events())
        assert batch.kind is BatchKind.INJECTED
        assert (found.values, found.before, found.moved_from) == (event.values, event.before, event.moved_from)
        assert (found.unchanged, found.unfit, found.operation) == (event.unchanged, event.unfit, event.operation)
        assert found.row_write() == event.row_write()
        assert (batch.batches[0].moves, batch.batches[0].truncates, batch.batches[0].unfit) == (
            int(event.moved_from is not None),
            int(event.operation is Operation.TRUNCATE),
            len(event.unfit),
        )
    runtime.stop()


def test_an_injected_delete_by_key_is_not_dropped_by_a_filter(source: MemoryCapture) -> None:
    """A key does not say whether the row was wanted: an unsent value is not null."""
    wanted = Transforms(rules=(Filter(where="name == 'x'"),))
    runtime = CdcRuntime(source, MemoryCheckpointStore(), transforms=wanted)
    runtime.start()
    (event,) = batch_of(SHOP, (Operation.DELETE, {"id": 4})).events()
    runtime.enqueue(event)
    assert [found.row_write() for found in runtime.poll().events()] == [Delete(key={"id": 4})]
    runtime.stop()


def test_half_of_a_key_move_is_refused_and_both_halves_keep_the_large_value(source: MemoryCapture) -> None:
    runtime = CdcRuntime(source, MemoryCheckpointStore())
    runtime.start()
    rows = stored(
        changed(Operation.INSERT, person(1, "large")),
        changed(Operation.DELETE, person(1)),
        changed(Operation.INSERT, person(2), moved_from={"id": 1}, unchanged=["mail"]),
    )
    for half in tuple(rows.events())[1:]:
        with pytest.raises(ConfigError, match="half of a key move"):
            runtime.enqueue(half)
    with pytest.raises(ConfigError, match="half of a key move"):
        runtime.enqueue(replace(rows, data=rows.data.slice(2, 1)))
    runtime.enqueue(rows)
    mirror = Mirror()
    for event in runtime.poll().events():
        mirror.apply(event.row_write())
    assert [row["mail"] for row in mirror.rows.values()] == ["large"]
    runtime.stop()


def test_an_event_made_by_hand_can_be_injected(source: MemoryCapture) -> None:
    runtime = CdcRuntime(source, MemoryCheckpointStore())
    runtime.start()
    runtime.enqueue(
        Event(
            operation=Operation.INSERT,
            table=str(PEOPLE.table),
            seq=0,
            position=None,
            transaction=0,
            values={"id": 7, "mail": "x"},
            unchanged=(),
            before=None,
            moved_from=None,
            schema=PEOPLE,
            committed_at=datetime(2026, 1, 1, tzinfo=UTC),
        )
    )
    event = next(runtime.poll().events())
    assert (event.values["id"], event.values["country"]) == (7, None)
    assert event.committed_at == datetime(2026, 1, 1, tzinfo=UTC)
    runtime.stop()


def test_injected_rows_have_no_position_whatever_they_had_before(source: MemoryCapture) -> None:
    runtime = CdcRuntime(source, MemoryCheckpointStore())
    runtime.start()
    source.commit(inserts(1))
    batch = runtime.poll()
    (event,) = batch.events()
    assert event.position
    runtime.commit(batch.ack)
    runtime.enqueue(event)
    runtime.enqueue(batch.batches[0])
    assert [injected.position for _ in range(2) for injected in runtime.poll().events()] == ["", ""]
    runtime.stop()


def test_a_loop_that_ends_reports_undelivered_rows_and_the_next_start_delivers_them(
    source: MemoryCapture, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Fact] = []
    runtime = CdcRuntime(source, MemoryCheckpointStore(), observers=[heard.append])
    runtime.start()
    runtime.enqueue(inserts(1, 2))
    sink = MemorySink()
    runtime.run(sink, lambda: True)
    stopped = [fact for fact in heard if isinstance(fact, observers.Stopped)]
    assert [fact.injected for fact in stopped] == [2]
    assert ["were not delivered" in record.message for record in caplog.records] == [True]
    runtime.run(sink, lambda: sink.rows == 2)
    assert sorted(event.values["id"] for event in sink.events()) == [1, 2]
    assert [fact.injected for fact in heard if isinstance(fact, observers.Stopped)] == [2, 0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"values": {"zap": 1}}, "no such column .*zap"),
        ({"values": {"id": "x"}}, "not have its column's type"),
        ({"operation": "insert"}, "`operation` is not a `Operation`"),
        ({"schema": 3}, "`schema` is not a `TableSchema`"),
    ],
    ids=str,
)
def test_an_event_that_cannot_be_a_row_is_refused_where_it_is_injected(
    source: MemoryCapture, change: dict[str, Any], said: str
) -> None:
    source.commit(inserts(1))
    runtime = CdcRuntime(source, MemoryCheckpointStore())
    runtime.start()
    (event,) = runtime.poll().events()
    with pytest.raises(ConfigError, match=said) as raised:
        runtime.enqueue(replace(event, **change))
    assert raised.value.hint
    assert runtime.force_stop().injected == ()


def test_a_batch_without_metadata_columns_is_refused(source: MemoryCapture) -> None:
    runtime = CdcRuntime(source, MemoryCheckpointStore())
    runtime.start()
    own = inserts(1).data.select(SHOP.names)
    with pytest.raises(ConfigError, match=r"rows lack .*_op, _seq") as raised:
        runtime.enqueue(ChangeBatch(schema=SHOP, data=own))
    assert "batch_of" in raised.value.hint
    runtime.stop()
