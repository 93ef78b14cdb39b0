"""Lessons of other change data capture tools, as far as they concern the runtime.

Lessons that need a real server are in tests/integration/test_runtime_lessons.py and
tests/integration/test_runtime.py.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tailrace.capture.memory.source import MemoryCapture, batch_of
from tailrace.errors import AckRefused, ConfigError, PositionRewound, SinkError, StateBusy, StateCorrupt
from tailrace.model.change import Operation
from tailrace.model.mirror import Mirror
from tailrace.model.position import ZERO
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.observers import Fact
from tailrace.runtime.output_batch import Batch, BatchKind, Limits
from tailrace.runtime.sinks import JsonlSink, MemorySink, TableRouter
from tailrace.state.checkpoint import Checkpoint
from tailrace.state.checkpoint_stores import FileCheckpointStore, MemoryCheckpointStore
from tailrace.state.schema_history import MemorySchemaHistory
from tailrace.state.schema_history_stores import FileSchemaHistory
from tests.support.changes import SHOP, insert, move, update
from tests.support.runtimes import inserts, keys_of
from tests.support.windows import batch, named


@pytest.fixture
def source() -> MemoryCapture:
    return MemoryCapture()


def test_lesson_1_an_acknowledgement_never_passes_a_batch_that_failed(source: MemoryCapture) -> None:
    """Neither a step of the caller in between nor a later token passes it."""
    runtime = CdcRuntime(source, MemoryCheckpointStore(), limits=Limits(rows=1))
    runtime.start()
    source.commit(inserts(1))
    failed = runtime.poll()  # a transform, or a sink, raises here
    source.commit(inserts(2))
    assert runtime.poll() is failed
    assert failed.ack is not None
    with pytest.raises(AckRefused):
        runtime.commit(type(failed.ack)(failed.ack.runtime, failed.ack.number + 1))
    assert source.confirmed == ZERO
    runtime.force_stop()


def test_lesson_1_a_loop_whose_sink_fails_for_good_delivers_nothing_after_it(source: MemoryCapture) -> None:
    class Broken(MemorySink):
        def write(self, batch: Batch) -> tuple[()]:
            if 2 in keys_of(batch):
                raise SinkError("it does not take this", hint="Mend it.")
            return super().write(batch)

    ends = [source.commit(inserts(n)) for n in (1, 2, 3)]
    sink, store = Broken(), MemoryCheckpointStore()
    for _ in range(3):
        with pytest.raises(SinkError):
            CdcRuntime(source, store, limits=Limits(rows=1)).run(sink, lambda: False)
    assert [event.values["id"] for event in sink.events()] == [1]
    assert source.confirmed == ends[0]


def test_lesson_3_acknowledging_part_of_a_transaction_never_moves_the_position_past_it(source: MemoryCapture) -> None:
    first = source.commit(inserts(1))
    source.commit(inserts(2, 3, 4))
    store = MemoryCheckpointStore()
    runtime = CdcRuntime(source, store)
    runtime.start()
    batch = runtime.poll()
    runtime.commit(batch.ack, rows=3)
    saved = store.load("default")
    assert saved is not None
    assert saved.position == source.confirmed == first
    runtime.force_stop()
    again = CdcRuntime(source, store)
    again.start()
    assert keys_of(again.poll()) == [2, 3, 4], "the whole of it comes again"
    again.force_stop()


def test_lesson_4_a_window_larger_than_a_batch_is_read_to_its_end() -> None:
    source = MemoryCapture(window_transactions_max=1000)
    for n in range(100):
        source.commit(inserts(n))
    runtime = CdcRuntime(source, MemoryCheckpointStore(), limits=Limits(rows=7))
    runtime.start()
    found: list[object] = []
    while (batch := runtime.poll(0.0)).rows:
        assert batch.rows <= 7
        found += keys_of(batch)
        runtime.commit(batch.ack)
    assert found == list(range(100))
    assert source.confirmed == source.end
    runtime.stop()


def test_lesson_5_the_source_confirms_only_after_sink_and_checkpoint_are_durable(source: MemoryCapture) -> None:
    order: list[str] = []

    class Sink(MemorySink):
        def flush(self, caught_up: bool) -> None:
            order.append(f"flush {source.confirmed}")
            super().flush(caught_up)

    class Store(MemoryCheckpointStore):
        def save(self, key: str, checkpoint: Checkpoint) -> None:
            order.append(f"save {source.confirmed}")
            super().save(key, checkpoint)

    end = source.commit(inserts(1))
    CdcRuntime(source, Store()).run(Sink(), lambda: source.confirmed == end)
    assert order[-2:] == [f"flush {ZERO}", f"save {ZERO}"]


def test_lesson_6_two_quick_updates_of_one_row_both_arrive(source: MemoryCapture) -> None:
    for name in ("one", "two"):
        source.commit(batch_of(SHOP, (Operation.UPDATE, {"id": 1, "name": name})))
    runtime = CdcRuntime(source, MemoryCheckpointStore())
    runtime.start()
    assert [event.values["name"] for event in runtime.poll().events()] == ["one", "two"]
    runtime.force_stop()


def test_lesson_9_a_paused_stream_sees_resume_at_once_and_stays_open(source: MemoryCapture) -> None:
    runtime = CdcRuntime(source, MemoryCheckpointStore())
    runtime.start()
    runtime.poll(0.0)
    runtime.control.pause()
    source.commit(inserts(1))
    assert runtime.poll(0.05).kind is BatchKind.EMPTY
    assert runtime._intake.is_open, "the stream's own thread goes on answering"
    later = threading.Timer(0.1, runtime.control.resume)
    later.start()
    began = time.monotonic()
    batch = runtime.poll(240.0)
    assert keys_of(batch) == [1]
    assert time.monotonic() - began < 200
    later.join()
    runtime.force_stop()


def test_lesson_13_all_observers_get_every_event_and_their_errors_are_logged(
    source: MemoryCapture, caplog: pytest.LogCaptureFixture
) -> None:
    heard: dict[str, list[Fact]] = {"first": [], "second": [], "third": []}

    def first(fact: Fact) -> None:
        heard["first"].append(fact)
        raise ValueError("a value of a row")

    def second(fact: Fact) -> None:
        heard["second"].append(fact)
        raise OSError("gone")

    runtime = CdcRuntime(source, MemoryCheckpointStore(), observers=(first, second, heard["third"].append))
    source.commit(inserts(1))
    runtime.run(MemorySink(), lambda: source.confirmed == source.end)
    assert heard["first"] == heard["second"] == heard["third"]
    reported = [type(fact).__name__ for fact in heard["third"]]
    assert reported == ["Started", "StreamOpened", "SchemaSeen", "Delivered", "Committed", "Stopped"]
    seen = [(vars(line)["fact"], vars(line)["reason"].split(" (")[0]) for line in caplog.records]
    assert seen == [
        (fact, reason)
        for fact in reported
        for reason in ("unexpected ValueError in first", "unexpected OSError in second")
    ]
    assert "a value of a row" not in caplog.text


def test_lesson_14_written_means_that_bytes_were_written(source: MemoryCapture, tmp_path: Path) -> None:
    """When the source confirms, every byte is in the file."""
    sink = JsonlSink(tmp_path / "out")
    end = source.commit(inserts(1, 2, 3))

    def stopping() -> bool:
        lines = (tmp_path / "out" / "00000001.jsonl").read_text().splitlines()
        assert source.confirmed == ZERO or len(lines) == 3
        return source.confirmed == end

    CdcRuntime(source, MemoryCheckpointStore()).run(sink, stopping)
    sink.close()
    assert len((tmp_path / "out" / "00000001.jsonl").read_text().splitlines()) == 3


def test_lesson_16_a_checkpoint_that_cannot_be_read_is_an_error(source: MemoryCapture, tmp_path: Path) -> None:
    source.commit(inserts(1))
    with FileCheckpointStore(tmp_path / "state") as store:
        runtime = CdcRuntime(source, store)
        runtime.start()
        runtime.commit(runtime.poll().ack)
        runtime.stop()
        file = tmp_path / "state" / "default.json"
        file.write_bytes(file.read_bytes()[:-20])
        with pytest.raises(StateCorrupt):
            CdcRuntime(source, store).start()


def mirrored(sink: MemorySink) -> dict[tuple[object, ...], dict[str, object]]:
    """Return the table that follows everything the sink was given."""
    mirror = Mirror()
    for event in sink.events():
        mirror.apply(event.row_write())
    return mirror.rows


def test_lesson_2_writes_made_during_the_first_load_all_arrive() -> None:
    source = MemoryCapture(keep_tables=True, chunk_rows=2)
    source.commit(inserts(*range(10)))
    sink = MemorySink()
    runtime = CdcRuntime(source, MemoryCheckpointStore(), snapshot_tables=(SHOP.table,), limits=Limits(rows=2))
    runtime.start()
    for number in range(30):
        batch = runtime.poll(0.0)
        sink.write(batch)
        sink.flush(True)
        runtime.commit(batch.ack)
        if number < 8:  # into what was read, what was not, and behind all of it
            changed = {"id": number, "name": f"x{number}"}
            source.commit(batch_of(SHOP, (Operation.UPDATE, changed), (Operation.DELETE, {"id": 9 - number})))
            source.commit(inserts(100 + number))
    assert mirrored(sink) == source._view()[0].get(SHOP.table).mirror.rows
    runtime.stop()


def test_lesson_10_an_unsent_value_never_overwrites_one_even_in_the_batch_of_its_insert(source: MemoryCapture) -> None:
    source.commit(
        batch(
            SHOP,
            insert(1, name="a", big="large", n=1),
            update(1, name="b", n=2, unchanged=("big",)),
            update(2, name="never seen", unchanged=("big",)),
        )
    )
    sink = MemorySink()
    CdcRuntime(source, MemoryCheckpointStore()).run(sink, lambda: sink.rows == 3)
    assert mirrored(sink) == {(1,): {"id": 1, "name": "b", "big": "large", "n": 2}}, "and no half row is made"


def test_lesson_11_the_same_name_in_two_schemas_stays_apart(source: MemoryCapture) -> None:
    """It holds also if both read alike, with a dot in a name."""
    tables = [named("a.b", "c", 1), named("a", "b.c", 2), named("b", "c", 3)]
    source.commit(*(inserts(n, schema=schema) for n, schema in enumerate(tables)))
    sinks, history = [MemorySink() for _ in tables], MemorySchemaHistory()
    router = TableRouter({schema.table: sink for schema, sink in zip(tables, sinks, strict=True)})
    CdcRuntime(source, MemoryCheckpointStore(), history).run(router, lambda: all(sink.rows for sink in sinks))
    assert [[event.values["id"] for event in sink.events()] for sink in sinks] == [[0], [1], [2]]
    assert set(history.tables()) == {schema.table for schema in tables}


def test_lesson_12_a_quiet_source_can_discard_its_log(source: MemoryCapture) -> None:
    """All writes are to tables that are not captured."""
    store = MemoryCheckpointStore()
    runtime = CdcRuntime(source, store)
    runtime.start()
    for _ in range(3):
        end = source.quiet(17 << 20)
        assert runtime.poll(0.0).kind is BatchKind.EMPTY
        assert source.confirmed == end
        saved = store.load("default")
        assert saved is not None
        assert saved.position == end, "and it is on record first"
    runtime.stop()


@pytest.mark.parametrize("key", ["../elsewhere", "/etc/passwd", "..", "a/b", "a\0b", ""])
def test_lesson_15_a_key_that_leads_out_of_the_folder_is_refused_on_load_and_save(
    key: str, source: MemoryCapture, tmp_path: Path
) -> None:
    with FileCheckpointStore(tmp_path / "state") as store:
        with pytest.raises(ConfigError):
            CdcRuntime(source, store, key=key)
        for act in (store.load, store.delete, lambda key: store.save(key, Checkpoint(source_type="x", position=ZERO))):
            with pytest.raises(ConfigError):
                act(key)


def test_lesson_15_no_table_name_leads_out_of_a_schema_history(source: MemoryCapture, tmp_path: Path) -> None:
    schema = named("../..", "../../gone", 1)
    source.commit(inserts(1, schema=schema))
    with FileSchemaHistory(tmp_path / "deep" / "shapes") as history:
        runtime = CdcRuntime(source, MemoryCheckpointStore(), history)
        runtime.start()
        runtime.commit(runtime.poll().ack)
        runtime.stop()
        assert history.tables() == (schema.table,)
    files = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.parts[:2] for path in files} == {("deep", "shapes")}


def test_lesson_17_a_key_update_leaves_no_old_row_behind(source: MemoryCapture) -> None:
    source.commit(batch(SHOP, insert(1, name="a"), insert(5), *move(1, 2, name="b"), *move(2, 3, name="c")))
    source.commit(batch(SHOP, *move(3, 1, name="d")))
    sink = MemorySink()
    CdcRuntime(source, MemoryCheckpointStore()).run(sink, lambda: sink.rows == 8)
    assert {key: row["name"] for key, row in mirrored(sink).items()} == {(5,): None, (1,): "d"}


def test_lesson_22_one_of_two_writers_of_a_folder_is_refused(source: MemoryCapture, tmp_path: Path) -> None:
    """The lease refuses the second store; in a shared store a position never goes back."""
    source.commit(inserts(1))
    with FileCheckpointStore(tmp_path / "state") as store:
        first, second = CdcRuntime(source, store), CdcRuntime(source, store)
        first.start()
        second.start()
        stale = second.poll()
        with pytest.raises(StateBusy):
            FileCheckpointStore(tmp_path / "state")
        first.commit(first.poll().ack)
        end = source.commit(inserts(2))
        first.commit(first.poll().ack)
        with pytest.raises(PositionRewound):
            second.commit(stale.ack)
        saved = store.load("default")
        assert saved is not None
        assert saved.position == source.confirmed == end
        second.force_stop()
        first.stop()
