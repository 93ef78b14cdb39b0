"""A script gives the same windows each time, with the lag, breaks and schemas that it declares."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tailrace.errors import ConfigError, SourceUnreachable
from tailrace.model.event import Merge, Nothing
from tailrace.model.schema import TableId
from tailrace.runtime import intake
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.sinks import MemorySink
from tailrace.state.checkpoint_stores import MemoryCheckpointStore
from tailrace.state.schema_history import MemorySchemaHistory, SchemaEvent
from tailrace.testing.changes import altered, changes, delete, insert, move, table, truncate, update
from tailrace.testing.scripted_source import Behind, Break, Quiet, ScriptedSource, Transaction
from tests.support.runtimes import until

ORDERS = table("public.orders", id=pa.int64(), status=pa.string(), note=pa.string())
MORE = altered(ORDERS, add={"total": pa.int32()}, drop=("note",), rename={"status": "state"})


def insert_transaction(n: int) -> Transaction:
    return Transaction(changes(ORDERS, insert({"id": n})))


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "RETRY_SECONDS_FIRST", 0.0)


def test_a_whole_script_runs_through_a_runtime_without_a_clock_or_a_thread() -> None:
    source = ScriptedSource(
        insert_transaction(1),
        Break(SourceUnreachable("gone", hint="Wait.")),
        Quiet(100),
        Behind(2, insert_transaction(2), insert_transaction(3)),
        Transaction(changes(MORE, insert({"id": 4, "state": "new", "total": 7}))),
    )
    sink, history = MemorySink(), MemorySchemaHistory()
    runtime = CdcRuntime(source, MemoryCheckpointStore(), history)
    runtime.run(sink, until(lambda: source.played and source.confirmed == source.end))
    assert [event.values["id"] for event in sink.events()] == [1, 2, 3, 4]
    assert runtime.progress.reconnects == 1
    assert [version.schema.names for version in history.versions(ORDERS.table)] == [ORDERS.names, MORE.names]


def test_two_tables_of_a_script_are_two_in_the_schema_history() -> None:
    one, other = table("public.a", id=pa.int64()), table("public.b", id=pa.int64())
    source = ScriptedSource(*(Transaction(changes(shape, insert({"id": 1}))) for shape in (one, other, one)))
    history, sink = MemorySchemaHistory(), MemorySink()
    CdcRuntime(source, MemoryCheckpointStore(), history).run(sink, until(lambda: sink.rows == 3))
    for shape in (one, other):
        assert [version.event for version in history.versions(shape.table)] == [SchemaEvent.CREATE]


def test_a_table_has_the_same_number_each_time_and_no_other_has_it() -> None:
    names = [f"{schema}.t{number}" for schema in ("public", "shop") for number in range(500)]
    numbers = [table(name, id=pa.int64()).relation for name in names]
    assert len(set(numbers)) == len(names)
    assert numbers == [table(name, v=pa.string()).relation for name in names]
    assert table("public.a", relation=7, id=pa.int64()).relation == 7


def test_a_lagging_reader_sees_the_lag_and_gets_nothing_for_that_many_reads() -> None:
    source = ScriptedSource(Behind(2, insert_transaction(1), Quiet(1000)))
    stream = source.live(source.confirmed)
    assert source.lag().retained_bytes == 0
    found = [stream.read(source.confirmed, 0.0) for _ in range(3)]
    assert [window.rows if window else None for window in found] == [None, None, 1]
    lag = source.lag().retained_bytes
    assert lag is not None
    assert lag > 1000


def test_a_step_is_played_only_when_the_one_before_was_delivered() -> None:
    source = ScriptedSource(insert_transaction(1), insert_transaction(2))
    stream = source.live(source.confirmed)
    first = stream.read(source.confirmed, 0.0)
    assert first is not None
    assert stream.read(source.confirmed, 0.0) == first, "it was not taken"
    assert not source.played
    second = stream.read(first.end, 0.0)
    assert second is not None
    assert [event.values["id"] for batch in second.batches for event in batch.events()] == [2]
    assert source.played


def test_changes_are_built_as_a_server_sends_them() -> None:
    given = changes(
        ORDERS,
        update({"id": 1, "status": "x"}, unchanged=("note",)),
        move({"id": 1}, {"id": 2}, unchanged=("note",)),
        delete({"id": 2}),
        truncate(),
    )
    writes = [type(event.row_write()) for event in given.events()]
    assert writes[:3] == [Merge, Nothing, Merge]
    assert (given.moves, given.truncates) == (1, 1)
    assert table("a.b.c", id=pa.int64()).table == TableId("a.b", "c")
    assert MORE.names == ["id", "state", "total"]


@pytest.mark.parametrize("wrong", [
    lambda: changes(ORDERS), lambda: changes(ORDERS, insert({"nosuch": 1})), lambda: altered(ORDERS, drop=("id",)),
    lambda: altered(ORDERS, rename={"nosuch": "x"}),
])  # fmt: skip
def test_a_change_that_no_server_would_send_is_refused(wrong) -> None:  # type: ignore[no-untyped-def] # any of them
    with pytest.raises(ConfigError):
        wrong()
