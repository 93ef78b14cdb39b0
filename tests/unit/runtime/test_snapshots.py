"""Snapshots in the runtime: bulk and incremental, resumed after the acknowledged rows, never outdated."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from tailrace.capture.memory.source import MemoryCapture, batch_of
from tailrace.changelog.write.writer import LogWriter
from tailrace.errors import (
    ConfigError,
    SourceTableMissing,
    SourceUnreachable,
    StateCorrupt,
    StateFull,
    Unacknowledged,
    Unsupported,
)
from tailrace.model.batch import ChangeBatch
from tailrace.model.change import Operation
from tailrace.runtime import observers
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.observers import Fact
from tailrace.runtime.output_batch import Batch, BatchKind, Limits
from tailrace.runtime.position_store import LogSink
from tailrace.state.checkpoint import Checkpoint
from tailrace.state.checkpoint_stores import MemoryCheckpointStore
from tests.support.changes import KEYLESS, SHOP
from tests.support.runtimes import inserts, keys_of
from tests.support.windows import named

OTHER = named("public", "others", 20)
TABLES = (SHOP.table, OTHER.table)


@pytest.fixture
def source() -> MemoryCapture:
    made = MemoryCapture(keep_tables=True, chunk_rows=10)
    made.commit(inserts(*range(25)))
    made.commit(inserts(*range(100, 103), schema=OTHER))
    return made


@pytest.fixture
def store() -> MemoryCheckpointStore:
    return MemoryCheckpointStore()


def started(source: MemoryCapture, store: MemoryCheckpointStore, **given: object) -> CdcRuntime:
    made = CdcRuntime(source, store, limits=Limits(rows=4), **given)  # type: ignore[arg-type] # passed on
    made.start()
    return made


def take(runtime: CdcRuntime, polls: int = 60) -> list[Batch]:
    """Return all batches, each acknowledged."""
    found = []
    for _ in range(polls):
        batch = runtime.poll(0.0)
        if batch.rows:
            found.append(batch)
        runtime.commit(batch.ack)
    return found


def keys(batches: list[Batch], kind: BatchKind) -> list[object]:
    return [key for batch in batches if batch.kind is kind for key in keys_of(batch)]


def test_all_rows_are_read_then_the_stream_continues_from_there(
    source: MemoryCapture, store: MemoryCheckpointStore
) -> None:
    runtime = started(source, store, snapshot_tables=TABLES)
    source.commit(inserts(500))
    found = take(runtime)
    assert keys(found, BatchKind.SNAPSHOT) == [*range(25), 100, 101, 102]
    assert keys(found, BatchKind.STREAM) == [500]
    assert {event.operation for batch in found[:3] for event in batch.events()} == {Operation.READ}
    assert [event.seq for batch in found for event in batch.events()] == list(range(29))
    assert runtime.rows_committed == 29
    assert max(batch.rows for batch in found) == 4
    runtime.stop()


def test_the_position_is_saved_before_the_first_row(source: MemoryCapture, store: MemoryCheckpointStore) -> None:
    runtime = started(source, store, snapshot_tables=TABLES)
    saved = store.load("default")
    assert saved is not None
    assert saved.metadata["snapshot"]["rows"] == 0
    assert saved.position == source.end
    runtime.force_stop()


def test_a_killed_snapshot_continues_and_repeats_no_acknowledged_row(
    source: MemoryCapture, store: MemoryCheckpointStore
) -> None:
    runtime = started(source, store, snapshot_tables=TABLES)
    runtime.commit(runtime.poll().ack)
    runtime.poll()  # and here it dies
    source.commit(batch_of(SHOP, *((Operation.UPDATE, {"id": key, "name": "new"}) for key in (1, 20))))
    again = started(source, store, snapshot_tables=TABLES)
    found = take(again)
    assert keys(found, BatchKind.SNAPSHOT) == [*range(4, 25), 100, 101, 102]
    assert keys(found, BatchKind.STREAM) == [1, 20], "what was written since comes from the stream"
    assert again.rows_committed == 4 + 24 + 2
    again.stop()


def test_a_part_of_a_snapshot_batch_can_be_acknowledged(source: MemoryCapture, store: MemoryCheckpointStore) -> None:
    runtime = started(source, store, snapshot_tables=TABLES)
    batch = runtime.poll()
    runtime.commit(batch.ack, rows=1)
    rest = runtime.poll()
    assert keys_of(rest) == [1, 2, 3]
    runtime.force_stop()
    again = started(source, store, snapshot_tables=TABLES)
    assert keys_of(again.poll()) == [1, 2, 3, 4]
    again.force_stop()


def test_a_source_that_cannot_continue_a_snapshot_begins_it_again_and_logs_it(
    store: MemoryCheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    source = MemoryCapture(keep_tables=True)
    rows = [(Operation.INSERT, {"a": n, "b": "x"}) for n in range(10)]
    source.commit(batch_of(KEYLESS, *rows))
    runtime = started(source, store, snapshot_tables=(KEYLESS.table,))
    runtime.commit(runtime.poll().ack)
    runtime.force_stop()
    source.commit(batch_of(KEYLESS, rows[0]))
    again = started(source, store, snapshot_tables=(KEYLESS.table,))
    assert any("begins again" in record.message for record in caplog.records)
    found = take(again)
    assert sum(batch.rows for batch in found if batch.kind is BatchKind.SNAPSHOT) == 11
    assert keys_count(found, BatchKind.STREAM) == 0, "what the new snapshot has does not come again"
    again.stop()


def keys_count(batches: list[Batch], kind: BatchKind) -> int:
    return sum(batch.rows for batch in batches if batch.kind is kind)


def test_an_incremental_snapshot_and_the_stream_take_turns(source: MemoryCapture, store: MemoryCheckpointStore) -> None:
    runtime = started(source, store, incremental_snapshot=TABLES)
    for n in range(3):
        source.commit(inserts(500 + n))
    found = take(runtime)
    kinds = [batch.kind for batch in found]
    assert BatchKind.STREAM in kinds[: kinds.index(BatchKind.SNAPSHOT) + 5], "the stream does not wait for all of it"
    assert set(range(25)) <= set(keys(found, BatchKind.SNAPSHOT))
    assert set(keys(found, BatchKind.STREAM)) == {*range(25), 100, 101, 102, 500, 501, 502}
    runtime.stop()


def test_lesson_2_a_row_that_is_read_is_never_older_than_what_was_delivered(
    source: MemoryCapture, store: MemoryCheckpointStore
) -> None:
    """A commit that waits for a standby is in the stream and in no snapshot: its chunk waits."""
    runtime = started(source, store)
    take(runtime)
    source.hidden_transactions.add(3)
    runtime.control.snapshot(SHOP.table)
    runtime.poll(0.0)
    source.commit(batch_of(SHOP, (Operation.UPDATE, {"id": 24, "name": "new"})))
    delivered = False
    for _ in range(30):
        batch = runtime.poll(0.0)
        if batch.kind is BatchKind.SNAPSHOT and delivered:
            raise AssertionError("read in a snapshot that does not see what was delivered")
        runtime.commit(batch.ack)
        delivered = delivered or batch.kind is BatchKind.STREAM
        if delivered and not runtime._snapshots._in_chunk:
            break
    assert delivered
    assert take(runtime, 5) == []
    source.hidden_transactions.clear()
    found = take(runtime)
    assert {event.values["name"] for batch in found for event in batch.events() if event.values["id"] == 24} == {"new"}
    runtime.stop()


def test_a_requested_snapshot_can_be_stopped(source: MemoryCapture, store: MemoryCheckpointStore) -> None:
    heard: list[Fact] = []
    runtime = started(source, store, observers=(heard.append,))
    take(runtime)
    first, second = runtime.control.snapshot(SHOP.table), runtime.control.snapshot(OTHER.table)
    batch = runtime.poll(0.0)
    assert batch.kind is BatchKind.SNAPSHOT
    assert first in str(runtime.control.status().snapshot)
    runtime.commit(batch.ack)
    runtime.control.stop_snapshot(first)
    found = take(runtime)
    assert keys(found, BatchKind.SNAPSHOT) == [100, 101, 102]
    ended = [fact for fact in heard if isinstance(fact, observers.SnapshotEnded)]
    assert [(fact.id, fact.stopped) for fact in ended] == [(first, True), (second, False)]
    runtime.control.stop_snapshot()
    runtime.poll(0.0)
    runtime.control.snapshot(OTHER.table)
    assert keys(take(runtime), BatchKind.SNAPSHOT) == [100, 101, 102], "an order to stop is not for what comes later"
    runtime.stop()


def test_stop_snapshot_returns_whether_there_was_one(source: MemoryCapture, store: MemoryCheckpointStore) -> None:
    runtime = started(source, store)
    take(runtime)
    stop = runtime.control.stop_snapshot
    assert not stop()
    first, second = runtime.control.snapshot(SHOP.table), runtime.control.snapshot(OTHER.table)
    batch = runtime.poll(0.0)
    assert stop(second), "it waits"
    assert stop(first), "it is under way"
    runtime.commit(batch.ack)
    assert keys(take(runtime), BatchKind.SNAPSHOT) == []
    assert not stop(first)
    assert not stop("0123456789ab")
    for odd in (7, "public.orders", "", SHOP.table, ["0123456789ab"]):
        with pytest.raises(ConfigError, match="snapshot id is not valid") as raised:
            stop(cast("str", odd))
        assert "`control.snapshot(…)` has returned" in raised.value.hint
    runtime.stop()


def test_the_end_of_a_snapshot_stopped_while_it_waited_is_reported_too(
    source: MemoryCapture, store: MemoryCheckpointStore
) -> None:
    heard: list[Fact] = []
    runtime = started(source, store, observers=(heard.append,))
    take(runtime)
    first, second, third = (runtime.control.snapshot(SHOP.table) for _ in range(3))
    batch = runtime.poll(0.0)
    runtime.control.stop_snapshot(second)
    runtime.commit(batch.ack)
    runtime.control.stop_snapshot()
    assert keys(take(runtime), BatchKind.SNAPSHOT) == []
    ended = [(fact.id, fact.stopped, fact.rows) for fact in heard if isinstance(fact, observers.SnapshotEnded)]
    assert sorted(ended) == sorted([(first, True, batch.rows), (second, True, 0), (third, True, 0)])
    runtime.stop()


def test_a_snapshot_requested_after_a_stop_is_read_even_without_a_poll_between(
    source: MemoryCapture, store: MemoryCheckpointStore
) -> None:
    runtime = started(source, store)
    take(runtime)
    runtime.control.snapshot(SHOP.table)
    runtime.control.stop_snapshot()
    runtime.control.snapshot(OTHER.table)
    assert keys(take(runtime), BatchKind.SNAPSHOT) == [100, 101, 102]
    under_way = runtime.control.snapshot(SHOP.table)
    runtime.commit(runtime.poll(0.0).ack)
    runtime.control.stop_snapshot(under_way)
    runtime.control.snapshot(OTHER.table)
    assert keys(take(runtime), BatchKind.SNAPSHOT) == [100, 101, 102]
    runtime.stop()


def test_a_bulk_snapshot_can_be_stopped_and_the_stream_begins_at_its_position(
    source: MemoryCapture, store: MemoryCheckpointStore
) -> None:
    heard: list[Fact] = []
    runtime = started(source, store, snapshot_tables=TABLES, observers=(heard.append,))
    runtime.commit(runtime.poll().ack)
    source.commit(inserts(50))
    runtime.control.stop_snapshot()
    found = take(runtime)
    assert (keys(found, BatchKind.SNAPSHOT), keys(found, BatchKind.STREAM)) == ([], [50])
    assert [fact.stopped for fact in heard if isinstance(fact, observers.SnapshotEnded)] == [True]
    runtime.stop()
    again = started(source, store)
    assert take(again) == [], "and nothing of it is on record"
    again.stop()


def test_batches_of_a_snapshot_are_bounded_by_bytes_too(source: MemoryCapture, store: MemoryCheckpointStore) -> None:
    runtime = CdcRuntime(source, store, snapshot_tables=TABLES)
    runtime.start()
    chunk = runtime.poll()
    assert chunk.rows == 10
    size = chunk.batches[0].data.nbytes
    runtime.force_stop()
    runtime = CdcRuntime(source, store, snapshot_tables=TABLES, limits=Limits(rows=1000, bytes=size // 2))
    runtime.start()
    found = take(runtime)
    assert keys(found, BatchKind.SNAPSHOT) == [*range(25), 100, 101, 102]
    assert max(batch.rows for batch in found) == 5
    assert max(batch.batches[0].data.nbytes for batch in found) <= size
    runtime.stop()


def test_acknowledged_rows_of_a_snapshot_are_reported(source: MemoryCapture, store: MemoryCheckpointStore) -> None:
    heard: list[Fact] = []
    runtime = started(source, store, snapshot_tables=TABLES, observers=(heard.append,))
    runtime.commit(runtime.poll().ack, rows=3)
    assert [fact.rows for fact in heard if isinstance(fact, observers.Committed)] == [3]
    runtime.force_stop()


def test_an_incremental_snapshot_continues_after_a_crash(source: MemoryCapture, store: MemoryCheckpointStore) -> None:
    runtime = started(source, store)
    take(runtime)
    runtime.control.snapshot(SHOP.table)
    batch = runtime.poll(0.0)
    runtime.commit(batch.ack)
    runtime.force_stop()
    again = started(source, store)
    assert keys(take(again), BatchKind.SNAPSHOT) == list(range(4, 25))
    again.stop()


def test_a_broken_snapshot_is_resumed(
    source: MemoryCapture, store: MemoryCheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = started(source, store, snapshot_tables=TABLES)
    runtime.commit(runtime.poll().ack)
    scan = runtime._snapshots._scan
    assert scan is not None

    def broken(_: int) -> None:
        raise SourceUnreachable("the line is dead", hint="It is tried again.")

    monkeypatch.setattr(scan, "next", broken)
    found: list[Batch] = []
    while len(keys(found, BatchKind.SNAPSHOT)) < 24:
        batch = runtime.poll()
        found.append(batch)
        runtime.commit(batch.ack)
    assert keys(found, BatchKind.SNAPSHOT) == [*range(4, 25), 100, 101, 102]
    runtime.stop()


def test_incompatible_snapshot_settings_are_refused(source: MemoryCapture, store: MemoryCheckpointStore) -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        started(source, store, snapshot_tables=TABLES, incremental_snapshot=TABLES)
    runtime = started(source, store, snapshot_tables=TABLES)
    runtime.force_stop()
    with pytest.raises(ConfigError, match="no snapshot tables"):
        started(source, store)
    with pytest.raises(ConfigError, match="middle of a snapshot"):
        started(source, store, incremental_snapshot=TABLES)
    with pytest.raises(ConfigError, match="other tables"):
        started(source, store, snapshot_tables=(SHOP.table,))
    again = CdcRuntime(source, store, snapshot_tables=TABLES)
    again.start()
    again.force_stop()


def test_a_snapshot_in_a_checkpoint_that_cannot_be_read_is_an_error(
    source: MemoryCapture, store: MemoryCheckpointStore
) -> None:
    runtime = started(source, store, snapshot_tables=TABLES)
    runtime.force_stop()
    saved = store.load("default")
    assert saved is not None
    for broken in ({}, {"id": 1}):
        metadata = {**saved.metadata, "snapshot": broken}
        store.save("default", Checkpoint(source_type="memory", position=saved.position, metadata=metadata))
        with pytest.raises(StateCorrupt):
            started(source, store, snapshot_tables=TABLES)


def test_a_source_that_cannot_read_tables_is_refused(store: MemoryCheckpointStore) -> None:
    with pytest.raises(Unsupported):
        started(MemoryCapture(), store, snapshot_tables=TABLES)


def test_a_snapshot_needs_tables_and_a_condition_needs_one(source: MemoryCapture, store: MemoryCheckpointStore) -> None:
    runtime = started(source, store)
    with pytest.raises(ConfigError):
        runtime.control.snapshot()
    with pytest.raises(ConfigError):
        runtime.control.snapshot(*TABLES, where="id > 1")
    runtime.stop()


def test_a_table_named_by_a_string_is_refused_before_anything_is_read(
    source: MemoryCapture, store: MemoryCheckpointStore
) -> None:
    name = str(SHOP.table)
    for given in ({"snapshot_tables": [name]}, {"incremental_snapshot": name}):
        with pytest.raises(ConfigError, match="TableId"):
            started(source, store, **given)
    runtime = started(source, store)
    with pytest.raises(ConfigError, match="TableId"):
        runtime.control.snapshot(name)  # type: ignore[arg-type] # that is what is refused
    runtime.stop()


def test_a_requested_snapshot_that_fails_does_not_disturb_the_stream(
    source: MemoryCapture, store: MemoryCheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Fact] = []
    runtime = started(source, store, observers=(heard.append,))
    take(runtime)
    runtime.control.snapshot(named("public", "nowhere", 9).table)
    runtime.control.snapshot(SHOP.table, where="id > 1")
    last = runtime.control.snapshot(SHOP.table)
    source.commit(inserts(900))
    runtime.commit(runtime.poll(0.0).ack)
    while runtime._snapshots._scan is None:
        runtime.commit(runtime.poll(0.0).ack)

    def refused(_: int) -> None:
        raise SourceTableMissing("it was dropped", hint="Was it?")

    monkeypatch.setattr(runtime._snapshots._scan, "next", refused)
    source.commit(inserts(901))
    assert keys(take(runtime), BatchKind.STREAM)[-1] == 901
    codes = [fact.error.code for fact in heard if isinstance(fact, observers.SnapshotEnded) and fact.error]
    assert codes == ["source-table-missing", "unsupported", "source-table-missing"]
    assert [fact.id for fact in heard if isinstance(fact, observers.SnapshotEnded)][-1] == last
    saved = store.load("default")
    assert saved is not None
    assert saved.metadata["snapshot"] is None, "the next start does not stumble over it"
    runtime.stop()


def test_an_incremental_snapshot_of_a_dropped_table_does_not_block_the_start(
    source: MemoryCapture, store: MemoryCheckpointStore
) -> None:
    runtime = started(source, store)
    take(runtime)
    runtime.control.snapshot(SHOP.table)
    runtime.commit(runtime.poll(0.0).ack)
    runtime.force_stop()
    assert source._tables is not None
    del source._tables._tables[SHOP.table]
    again = started(source, store)
    assert again.control.status().snapshot is None
    again.stop()


def test_a_log_cannot_store_the_progress_of_a_snapshot(source: MemoryCapture, tmp_path: Path) -> None:
    log = LogWriter(tmp_path / "log", source.identity)
    with pytest.raises(ConfigError):
        CdcRuntime(source, LogSink(log), snapshot_tables=TABLES)
    runtime = CdcRuntime(source, LogSink(log))
    with pytest.raises(Unsupported):
        runtime.control.snapshot(SHOP.table)
    log.close()


def test_a_checkpoint_that_cannot_be_saved_leaves_rows_that_were_read_unacknowledged(source: MemoryCapture) -> None:
    class Store(MemoryCheckpointStore):
        full = False

        def save(self, key: str, checkpoint: Checkpoint) -> None:
            if self.full:
                raise StateFull("disk full", hint="Free space.")
            super().save(key, checkpoint)

    store = Store()
    runtime = started(source, store, snapshot_tables=TABLES)
    batch = runtime.poll()
    store.full = True
    for rows in (None, 2):
        with pytest.raises(StateFull):
            runtime.commit(batch.ack, rows=rows)
        assert runtime.poll() is batch
    store.full = False
    found = [batch]
    runtime.commit(batch.ack)
    found += take(runtime)
    assert keys(found, BatchKind.SNAPSHOT) == [*range(25), 100, 101, 102]
    assert runtime.rows_committed == 28
    runtime.stop()


def test_a_prefix_is_acknowledged_although_a_transform_refuses_the_rest(
    source: MemoryCapture, store: MemoryCheckpointStore
) -> None:
    refuses = False

    def transform(batch: ChangeBatch) -> ChangeBatch:
        if refuses:
            raise ArithmeticError("not these")
        return batch

    runtime = started(source, store, snapshot_tables=TABLES, transform=transform)
    batch = runtime.poll()
    refuses = True
    runtime.commit(batch.ack, rows=1)
    assert runtime.rows_committed == 1
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            runtime.poll()
    with pytest.raises(Unacknowledged, match="handed_out=3"):
        runtime.stop()
    refuses = False
    rest = runtime.poll()
    assert (keys_of(rest), [event.seq for event in rest.events()]) == ([1, 2, 3], [1, 2, 3])
    runtime.commit(rest.ack)
    assert keys(take(runtime), BatchKind.SNAPSHOT) == [*range(4, 25), 100, 101, 102]
    runtime.stop()


def test_the_rest_of_a_snapshot_batch_cannot_be_acknowledged_before_the_next_poll(
    source: MemoryCapture, store: MemoryCheckpointStore
) -> None:
    runtime = started(source, store, snapshot_tables=TABLES)
    runtime.commit(runtime.poll().ack, rows=1)
    assert runtime.control.status().unacknowledged == 3
    runtime.control.pause()
    assert runtime.poll(0.0).kind is BatchKind.EMPTY
    drained = runtime.drain_and_stop()
    assert (drained.in_flight, [window.rows for window in drained.buffered]) == (None, [3])
    assert runtime.rows_committed == 1, "what was not polled again is not acknowledged"


def test_rows_after_the_rest_of_a_batch_have_later_numbers_although_a_snapshot_took_some(
    store: MemoryCheckpointStore,
) -> None:
    source = MemoryCapture(keep_tables=True)
    source.commit(inserts(1))
    runtime = CdcRuntime(source, store, incremental_snapshot=[SHOP.table])
    runtime.start()
    runtime.commit(runtime.poll(0.0).ack)  # the row that was read, which is number 0
    source.commit(inserts(2, 3))
    batch = runtime.poll(0.0)
    assert [event.seq for event in batch.events()] == [1, 2, 3]
    runtime.commit(batch.ack, rows=1)
    source.commit(inserts(4))
    rest = runtime.poll(0.0)
    assert [(event.seq, event.values["id"]) for event in rest.events()] == [(2, 2), (3, 3), (4, 4)]
    assert rest.transactions == 2


def test_rows_returned_by_a_stop_have_the_numbers_they_would_have_been_delivered_with(
    store: MemoryCheckpointStore,
) -> None:
    source = MemoryCapture(keep_tables=True, window_transactions_max=2)
    source.commit(inserts(1))
    runtime = CdcRuntime(source, store, incremental_snapshot=[SHOP.table], limits=Limits(rows=1))
    runtime.start()
    runtime.commit(runtime.poll(0.0).ack)  # the row that was read, which is number 0
    source.commit(inserts(2))
    assert [event.seq for event in runtime.poll(0.0).events()] == [1]
    (window,) = runtime.force_stop().buffered
    assert [seq for rows in window.batches for seq in rows.data.column("_seq").to_pylist()] == [2]
