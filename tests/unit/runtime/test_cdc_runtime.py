"""The runtime as a library: stable batches, tokens that count once, a position that is always true."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tailrace.capture.memory.source import MemoryCapture, batch_of
from tailrace.capture.port import Stream
from tailrace.changelog.write.writer import LogWriter
from tailrace.errors import (
    AckRefused,
    ConfigError,
    PositionLost,
    RuntimeRefused,
    SinkRejected,
    SinkUnready,
    SourceUnreachable,
    StateCorrupt,
    StateForeign,
    StateFull,
    TailraceError,
    Unacknowledged,
)
from tailrace.model.batch import ChangeBatch
from tailrace.model.change import Operation
from tailrace.model.position import ZERO, Lsn
from tailrace.model.schema import Column, TableId
from tailrace.runtime import injected_changes, loop, observers
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.observers import Fact, StreamOpened, Verdict
from tailrace.runtime.output_batch import Ack, Batch, BatchKind, Limits, Transactions
from tailrace.runtime.position_store import LogSink
from tailrace.runtime.runtime_state import State
from tailrace.runtime.sinks import MemorySink, Rejected
from tailrace.state.checkpoint import Checkpoint, seed_checkpoint
from tailrace.state.checkpoint_stores import MemoryCheckpointStore
from tailrace.state.schema_history import MemorySchemaHistory
from tests.support.changes import SHOP
from tests.support.runtimes import Opened, inserts, keys_of, until
from tests.support.windows import named


class Store(MemoryCheckpointStore):
    """A store that fails on demand, and notes the confirmed position at each save."""

    def __init__(self, source: MemoryCapture) -> None:
        super().__init__()
        self.failures: list[TailraceError] = []
        self.confirmed_before: list[object] = []
        self._source = source

    def save(self, key: str, checkpoint: Checkpoint) -> None:
        self.confirmed_before.append(self._source.confirmed)
        if self.failures:
            raise self.failures.pop()
        super().save(key, checkpoint)


@pytest.fixture
def source() -> MemoryCapture:
    return MemoryCapture()


@pytest.fixture
def store(source: MemoryCapture) -> Store:
    return Store(source)


@pytest.fixture
def runtime(source: MemoryCapture, store: Store) -> Iterator[CdcRuntime]:
    made = CdcRuntime(source, store)
    made.start()
    yield made
    if made.state is State.RUNNING:
        made.force_stop()


def one_each(source: MemoryCapture, store: Store) -> CdcRuntime:
    """Return a runtime whose batches have one transaction."""
    made = CdcRuntime(source, store, limits=Limits(rows=1))
    made.start()
    return made


def unreachable() -> SourceUnreachable:
    return SourceUnreachable("the line is dead", hint="It is tried again.")


# --- polling and acknowledging -------------------------------------------------------------------------------


def test_the_same_batch_is_returned_until_it_is_acknowledged(source: MemoryCapture, runtime: CdcRuntime) -> None:
    source.commit(inserts(1))
    first = runtime.poll()
    source.commit(inserts(2))
    assert runtime.poll() is first
    runtime.commit(first.ack)
    assert keys_of(runtime.poll()) == [2]


def test_an_empty_batch_is_normal_and_needs_no_acknowledgement(runtime: CdcRuntime) -> None:
    batch = runtime.poll(0.0)
    assert (batch.kind, batch.rows, batch.ack) == (BatchKind.EMPTY, 0, None)
    runtime.commit(batch.ack)
    assert runtime.rows_committed == 0


def test_the_checkpoint_is_durable_before_the_source_confirms(
    source: MemoryCapture, store: Store, runtime: CdcRuntime
) -> None:
    end = source.commit(inserts(1))
    runtime.commit(runtime.poll().ack)
    assert store.confirmed_before[-1] == ZERO
    saved = store.load("default")
    assert saved is not None
    assert (saved.position, saved.transaction, source.confirmed) == (end, "1", end)


def test_a_checkpoint_that_cannot_be_saved_leaves_the_batch_unacknowledged(
    source: MemoryCapture, store: Store, runtime: CdcRuntime
) -> None:
    source.commit(inserts(1))
    batch = runtime.poll()
    store.failures = [StateFull("disk full", hint="Free space.")]
    with pytest.raises(StateFull):
        runtime.commit(batch.ack)
    assert (source.confirmed, runtime.rows_committed) == (ZERO, 0)
    assert runtime.poll() is batch
    runtime.commit(batch.ack)
    assert runtime.rows_committed == 1


def test_a_token_counts_once(source: MemoryCapture, store: Store) -> None:
    runtime = one_each(source, store)
    source.commit(inserts(1))
    source.commit(inserts(2))
    batch = runtime.poll()
    runtime.commit(batch.ack)
    with pytest.raises(AckRefused):
        runtime.commit(batch.ack)
    second = runtime.poll()
    with pytest.raises(AckRefused, match="used"):
        runtime.commit(batch.ack)
    assert runtime.poll() is second, "nothing was acknowledged"
    runtime.force_stop()


def test_a_token_of_another_runtime_is_refused(source: MemoryCapture, runtime: CdcRuntime) -> None:
    other = CdcRuntime(source, MemoryCheckpointStore())
    other.start()
    source.commit(inserts(1))
    foreign = other.poll().ack
    runtime.poll()
    with pytest.raises(AckRefused, match="another runtime"):
        runtime.commit(foreign)
    other.force_stop()


def test_a_made_up_token_is_refused(source: MemoryCapture, runtime: CdcRuntime) -> None:
    source.commit(inserts(1))
    batch = runtime.poll()
    assert batch.ack is not None
    with pytest.raises(AckRefused):
        runtime.commit(Ack(batch.ack.runtime, batch.ack.number + 1))
    with pytest.raises(AckRefused, match="not an ack token"):
        runtime.commit(batch)  # type: ignore[arg-type] # the batch instead of its `ack`: an easy slip


def test_rows_are_numbered_without_a_gap_and_the_same_when_repeated(source: MemoryCapture, store: Store) -> None:
    first = one_each(source, store)
    for n in range(3):
        source.commit(inserts(n, n + 10))
    first.commit(first.poll().ack)
    unacknowledged = [event.seq for event in first.poll().events()]
    first.force_stop()
    again = one_each(source, store)
    assert [event.seq for event in again.poll().events()] == unacknowledged == [2, 3]
    assert again.rows_committed == 2
    again.force_stop()


def test_two_tables_of_one_transaction_are_delivered_in_order(source: MemoryCapture, runtime: CdcRuntime) -> None:
    other = named("public", "others", 20)
    source.commit(inserts(1), inserts(2, 3, schema=other))
    source.commit(inserts(4))
    events = list(runtime.poll().events())
    assert [(event.seq, event.table, event.values["id"]) for event in events] == [
        (0, "public.things", 1),
        (1, "public.others", 2),
        (2, "public.others", 3),
        (3, "public.things", 4),
    ]


# --- a part of a batch -----------------------------------------------------------------------------------------


def test_a_prefix_can_be_acknowledged_and_the_rest_is_next(source: MemoryCapture, store: Store) -> None:
    ends = [source.commit(inserts(n)) for n in range(4)]
    runtime = CdcRuntime(source, store)
    runtime.start()
    batch = runtime.poll()
    assert batch.rows == 4
    runtime.commit(batch.ack, rows=3)
    assert (source.confirmed, runtime.rows_committed) == (ends[2], 3)
    rest = runtime.poll()
    assert (keys_of(rest), [event.seq for event in rest.events()]) == ([3], [3])
    with pytest.raises(AckRefused):
        runtime.commit(batch.ack)
    runtime.commit(rest.ack)
    assert source.confirmed == ends[3]
    runtime.stop()


def test_acknowledging_more_rows_than_there_are_is_refused(source: MemoryCapture, runtime: CdcRuntime) -> None:
    source.commit(inserts(1))
    batch = runtime.poll()
    for rows in (-1, 2, 0.5, "1", True):  # a quotient, say
        with pytest.raises(ConfigError):
            runtime.commit(batch.ack, rows=rows)  # type: ignore[arg-type] # what a user may write
    runtime.commit(batch.ack, rows=0)
    assert runtime.poll() is batch
    assert runtime.control.status().unacknowledged == 1


def test_after_a_part_of_a_transaction_only_the_rest_is_next_but_the_position_waits(
    source: MemoryCapture, store: Store
) -> None:
    first = source.commit(inserts(0))
    end = source.commit(inserts(*range(1, 6)))
    runtime = CdcRuntime(source, store)
    runtime.start()
    batch = runtime.poll()
    runtime.commit(batch.ack, rows=3)
    assert (source.confirmed, runtime.rows_committed) == (first, 1)
    with pytest.raises(Unacknowledged) as refused:
        runtime.stop()
    assert refused.value.fields["in_part"] == 2
    rest = runtime.poll()
    assert keys_of(rest) == [3, 4, 5]
    runtime.commit(rest.ack)
    assert (source.confirmed, runtime.rows_committed) == (end, 6)
    runtime.stop()


# --- limits ------------------------------------------------------------------------------------------------------


def test_transactions_are_whole_in_a_batch_even_if_one_is_larger(source: MemoryCapture, store: Store) -> None:
    source.commit(inserts(1))
    source.commit(inserts(*range(10, 20)))
    source.commit(inserts(2, 3))
    runtime = CdcRuntime(source, store, limits=Limits(rows=4))
    runtime.start()
    sizes = []
    while (batch := runtime.poll(0.0)).rows:
        sizes.append(batch.rows)
        runtime.commit(batch.ack)
    assert sizes == [1, 10, 2]
    runtime.stop()


@pytest.mark.parametrize("part_rows", [None, 4], ids=["at once", "in parts"])
def test_a_large_transaction_is_split_if_allowed(store: Store, part_rows: int | None) -> None:
    source = MemoryCapture(part_rows_max=part_rows)
    store._source = source
    before = source.commit(inserts(1))
    source.commit(inserts(*range(10, 20)))
    last = source.commit(inserts(2))
    runtime = CdcRuntime(source, store, limits=Limits(rows=4, transactions=Transactions.SPLIT))
    runtime.start()
    seen = []
    while (batch := runtime.poll(0.0)).rows:
        runtime.commit(batch.ack)
        seen.append((batch.rows, batch.partial, source.confirmed))
    assert [rows for rows, _, _ in seen] == [1, 4, 4, 3]
    assert [partial for _, partial, _ in seen] == [False, True, True, False]
    assert [confirmed for _, _, confirmed in seen] == [before, before, before, last]
    assert (source.confirmed, runtime.rows_committed) == (last, 12)
    runtime.stop()


def test_a_transaction_read_in_parts_is_handed_out_whole(store: Store) -> None:
    source = MemoryCapture(part_rows_max=3, window_transactions_max=2)
    source.commit(inserts(1))
    end = source.commit(inserts(*range(10, 20)))
    runtime = CdcRuntime(source, store)
    runtime.start()
    batch = runtime.poll()
    while batch.rows < 11:
        runtime.commit(batch.ack)
        batch = runtime.poll()
        assert batch.rows in (0, 10)
        if batch.rows:
            break
    events = list(batch.events())
    assert {event.position for event in events[-10:]} == {str(end)}
    assert [event.seq for event in events] == list(range(11 - len(events), 11))
    runtime.commit(batch.ack)
    assert source.confirmed == end
    runtime.stop()


def test_a_transaction_too_large_to_gather_is_a_clear_error(store: Store) -> None:
    source = MemoryCapture(part_rows_max=3)
    source.commit(inserts(*range(10)))
    runtime = CdcRuntime(source, store, limits=Limits(transaction_bytes=100))
    runtime.start()
    with pytest.raises(ConfigError, match="too large") as refused:
        runtime.poll()
    assert "SPLIT" in refused.value.hint
    runtime.force_stop()


def test_a_batch_is_bounded_by_bytes(source: MemoryCapture, store: Store) -> None:
    for n in range(10):
        source.commit(inserts(n))
    size = inserts(1).data.nbytes
    runtime = CdcRuntime(source, store, limits=Limits(bytes=4 * size))
    runtime.start()
    assert 1 <= runtime.poll().rows <= 4
    runtime.force_stop()


def test_a_batch_waits_for_more_rows_up_to_its_limit(source: MemoryCapture, store: Store) -> None:
    runtime = CdcRuntime(source, store, limits=Limits(rows=2, seconds=240.0))
    runtime.start()
    source.commit(inserts(1))
    later = threading.Timer(0.1, lambda: source.commit(inserts(2)))
    later.start()
    assert keys_of(runtime.poll()) == [1, 2]
    later.join()
    runtime.force_stop()


def test_limits_of_zero_are_refused() -> None:
    with pytest.raises(ConfigError):
        Limits(rows=0)


# --- starting and stopping -------------------------------------------------------------------------------------


def test_a_running_runtime_cannot_be_started_and_an_idle_one_not_polled(source: MemoryCapture, store: Store) -> None:
    runtime = CdcRuntime(source, store)
    for call in (runtime.poll, runtime.stop, runtime.force_stop, lambda: runtime.commit(None)):
        with pytest.raises(RuntimeRefused):
            call()
    runtime.start()
    with pytest.raises(RuntimeRefused, match="running"):
        runtime.start()
    runtime.stop()
    assert runtime.state is State.STOPPED
    runtime.start()
    runtime.stop()


def test_a_runtime_can_be_started_after_a_failed_start(source: MemoryCapture, store: Store) -> None:
    heard: list[Fact] = []
    runtime = CdcRuntime(source, store, observers=(heard.append,))
    store.failures = [StateFull("disk full", hint="Free space.")]
    with pytest.raises(StateFull) as raised:
        runtime.start()
    assert heard == [observers.StartFailed(error=raised.value)]
    assert runtime.state is State.IDLE
    runtime.start()
    source.commit(inserts(1))
    assert keys_of(runtime.poll()) == [1]
    runtime.force_stop()


def test_a_checkpoint_of_another_source_is_refused(source: MemoryCapture, store: Store) -> None:
    CdcRuntime(source, store).start()
    with pytest.raises(StateForeign):
        CdcRuntime(MemoryCapture(), store).start()


@pytest.mark.parametrize("metadata", [{}, {"from": "debezium"}, {"rows": 1200, "snapshot": "done"}])
def test_a_runtime_begins_at_a_checkpoint_saved_by_hand(
    source: MemoryCapture, store: Store, metadata: dict[str, object]
) -> None:
    at = source.commit(inserts(1))
    source.commit(inserts(2))
    seed_checkpoint(store, "default", Checkpoint(source_type="memory", position=at, metadata=metadata))
    runtime = CdcRuntime(source, store)
    runtime.start()
    batch = runtime.poll()
    assert keys_of(batch) == [2]
    runtime.commit(batch.ack)
    assert runtime.rows_committed == 1
    runtime.stop()


@pytest.mark.parametrize("metadata", [{"runtime": 2, "rows": "x"}, {"runtime": 2}, {"runtime": 3, "rows": 1}])
def test_unreadable_metadata_of_a_runtime_is_an_error(
    source: MemoryCapture, store: Store, metadata: dict[str, object]
) -> None:
    store.save("default", Checkpoint(source_type="memory", position=source.commit(inserts(1)), metadata=metadata))
    with pytest.raises(StateCorrupt) as caught:
        CdcRuntime(source, store).start()
    newer = metadata["runtime"] == 3
    assert ("the version of Tailrace that wrote it" in caught.value.hint) is newer
    assert ("`delete` it" in caught.value.hint) is not newer


def test_a_checkpoint_saved_by_hand_keeps_the_name_of_its_source(source: MemoryCapture, store: Store) -> None:
    at = source.commit(inserts(1))
    source.commit(inserts(2))
    store.save("default", Checkpoint(source_type="mysource", position=at))
    runtime = CdcRuntime(Opened(source.live), store)
    runtime.start()
    runtime.commit(runtime.poll().ack)
    saved = store.load("default")
    assert saved is not None
    assert (saved.source_type, saved.position) == ("mysource", source.end)
    runtime.stop()


def test_the_committed_count_continues_after_a_restart(source: MemoryCapture, store: Store) -> None:
    runtime = CdcRuntime(source, store)
    runtime.start()
    source.commit(inserts(1, 2, 3))
    runtime.commit(runtime.poll().ack)
    runtime.stop()
    again = CdcRuntime(source, store)
    again.start()
    assert again.rows_committed == 3
    again.stop()


def test_stop_refuses_while_rows_are_unacknowledged_and_says_how_many(
    source: MemoryCapture, runtime: CdcRuntime
) -> None:
    source.commit(inserts(1, 2))
    runtime.poll()
    runtime.enqueue(inserts(7))
    with pytest.raises(Unacknowledged) as refused:
        runtime.stop()
    assert (refused.value.fields["handed_out"], refused.value.fields["injected"]) == (2, 1)
    assert runtime.state is State.RUNNING


def test_force_stop_returns_all_that_was_not_acknowledged(store: Store) -> None:
    source = MemoryCapture(part_rows_max=3, window_transactions_max=3)
    for n in range(3):
        source.commit(inserts(n))
    source.commit(inserts(*range(10, 20)))
    runtime = CdcRuntime(source, store, limits=Limits(rows=2, seconds=0.0))
    runtime.start()
    batch = runtime.poll()
    runtime.enqueue(inserts(99))
    drained = runtime.force_stop()
    assert drained.in_flight is batch
    assert sum(window.rows for window in drained.buffered) == 1
    assert [len(item) for item in drained.injected] == [1]
    assert source.confirmed == ZERO
    assert runtime.state is State.STOPPED


def test_drain_and_stop_acknowledges_first(source: MemoryCapture, runtime: CdcRuntime) -> None:
    end = source.commit(inserts(1))
    runtime.poll()
    drained = runtime.drain_and_stop()
    assert drained.in_flight is None
    assert (source.confirmed, runtime.rows_committed) == (end, 1)


# --- injected changes --------------------------------------------------------------------------------------------


def test_injected_rows_are_first_and_have_no_position(source: MemoryCapture, runtime: CdcRuntime) -> None:
    source.commit(inserts(1))
    runtime.enqueue(inserts(50, 51))
    injected = runtime.poll()
    assert (injected.kind, keys_of(injected), injected.ack) == (BatchKind.INJECTED, [50, 51], None)
    batch = runtime.poll()
    assert keys_of(batch) == [1]
    runtime.commit(batch.ack)
    assert runtime.rows_committed == 1
    runtime.stop()


def test_too_many_injected_batches_are_refused(runtime: CdcRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(injected_changes, "INJECTED_MAX", 2)
    runtime.enqueue(inserts(1))
    runtime.enqueue(inserts(2))
    with pytest.raises(RuntimeRefused):
        runtime.enqueue(inserts(3))
    runtime.force_stop()


# --- a source that breaks, a quiet one ---------------------------------------------------------------------------


def test_a_source_that_breaks_between_polls_loses_and_repeats_nothing(source: MemoryCapture, store: Store) -> None:
    runtime = one_each(source, store)
    source.commit(inserts(1))
    batch = runtime.poll()
    source.break_next_read(unreachable())
    source.commit(inserts(2))
    assert runtime.poll() is batch
    runtime.commit(batch.ack)
    found: list[object] = []
    for _ in range(100):
        batch = runtime.poll()
        found += keys_of(batch)
        runtime.commit(batch.ack)
        if found:
            break
    assert found == [2]
    runtime.stop()


def test_a_source_that_breaks_in_the_middle_of_a_transaction_begins_it_again(store: Store) -> None:
    source = MemoryCapture(part_rows_max=3)
    runtime = CdcRuntime(source, store, limits=Limits(rows=3, transactions=Transactions.SPLIT))
    runtime.start()
    end = source.commit(inserts(*range(10)))
    first = runtime.poll()
    runtime.commit(first.ack)
    source.break_next_read(unreachable())
    seen: list[tuple[list[object], bool, int]] = []
    while source.confirmed < end:
        batch = runtime.poll()
        if batch.rows:
            seen.append((keys_of(batch), batch.restarts, next(batch.events()).seq))
        runtime.commit(batch.ack)
    assert seen[0] == ([0, 1, 2], True, 0)
    assert [key for keys, _, _ in seen for key in keys] == list(range(10))
    assert runtime.rows_committed == 10
    runtime.stop()


def test_a_source_that_stays_away_is_stalled_and_then_an_error(source: MemoryCapture, store: Store) -> None:
    runtime = CdcRuntime(source, store, retry_seconds_max=0.2)
    runtime.start()
    for _ in range(50):
        source.break_next_read(unreachable())
    assert runtime.poll().kind is BatchKind.EMPTY
    health = runtime.health()
    assert (health.verdict, health.reason, health.remedy) == (Verdict.STALLED, "the line is dead", "It is tried again.")
    with pytest.raises(SourceUnreachable):
        poll_often(runtime)
    runtime.force_stop()


def poll_often(runtime: CdcRuntime) -> None:
    for _ in range(100):
        runtime.poll()


def test_a_quiet_source_is_confirmed(source: MemoryCapture, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lesson 12 for the runtime: with nothing to deliver, the source's log can still be discarded."""
    monkeypatch.setattr(loop, "IDLE_SECONDS_MAX", 0.0)
    runtime = CdcRuntime(source, store)
    runtime.start()
    end = source.quiet(1000)
    assert runtime.poll(0.0).kind is BatchKind.EMPTY
    saved = store.load("default")
    assert saved is not None
    assert (saved.position, source.confirmed) == (end, end)
    runtime.stop()


# --- the whole loop ------------------------------------------------------------------------------------------------


class Failing(MemorySink):
    """A sink that fails or rejects on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[TailraceError] = []
        self.rejections: list[Rejected] = []

    def write(self, batch: Batch) -> tuple[()]:
        super().write(batch)
        rejected, self.rejections = self.rejections, []
        return tuple(rejected)  # type: ignore[return-value] # the memory sink itself rejects nothing

    def flush(self, caught_up: bool) -> None:
        if self.failures:
            self._unflushed.clear()
            raise self.failures.pop()
        super().flush(caught_up)


class FlushRecorder(MemorySink):
    """A sink that notes its rows and `caught_up` at each flush; it can fail at a flush without new rows."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int, bool]] = []
        self.fails = True

    def flush(self, caught_up: bool) -> None:
        super().flush(caught_up)
        if self.fails and self.told and self.told[-1][0] == self.rows:
            self.fails = False
            raise SinkUnready("not now")
        self.told.append((self.rows, caught_up))


@pytest.mark.parametrize("tables", [(), (SHOP.table,)])
def test_a_sink_is_flushed_as_caught_up_when_nothing_is_waiting_also_after_a_snapshot(
    tables: tuple[TableId, ...],
) -> None:
    source, sink, streams = MemoryCapture(keep_tables=True), FlushRecorder(), []
    for number in range(3):
        source.commit(inserts(number))

    def note(fact: Fact) -> None:
        if isinstance(fact, StreamOpened):
            streams.append(fact)

    runtime = CdcRuntime(
        source, MemoryCheckpointStore(), snapshot_tables=tables, limits=Limits(rows=2), observers=[note]
    )
    polls = iter(range(20))  # or it would wait for ever
    runtime.run(sink, lambda: (3, True) in sink.told or next(polls, None) is None)
    assert sink.told == [(2, False), *([(3, False)] if tables else []), (3, True)]
    assert sink.rows == 3
    assert len(streams) == 1, "it is not the stream that has failed"


def test_the_loop_runs_until_stop_is_set(source: MemoryCapture, store: Store) -> None:
    sink = MemorySink()
    end = [source.commit(inserts(n)) for n in range(20)][-1]
    runtime = CdcRuntime(source, store, limits=Limits(rows=3))
    runtime.run(sink, until(lambda: sink.rows == 20))
    assert [event.values["id"] for event in sink.events()] == list(range(20))
    assert (source.confirmed, runtime.state) == (end, State.STOPPED)
    stop = threading.Event()
    stop.set()
    runtime.run(sink, stop)
    assert sink.rows == 20


def test_a_flush_that_fails_for_a_moment_acknowledges_nothing_and_is_tried_again(
    source: MemoryCapture, store: Store
) -> None:
    sink = Failing()
    sink.failures = [SinkUnready("full", hint="Wait.") for _ in range(2)]
    source.commit(inserts(1, 2))
    runtime = CdcRuntime(source, store)
    runtime.run(sink, until(lambda: sink.rows == 2))
    assert [event.seq for event in sink.events()] == [0, 1]
    assert runtime.rows_committed == 2
    assert all(confirmed == ZERO for confirmed in store.confirmed_before)


def test_rejected_rows_end_the_loop_without_on_rejected(source: MemoryCapture, store: Store) -> None:
    sink = Failing()
    bad = Rejected(table=SHOP.table, seq=0, reason="too wide")
    sink.rejections = [bad]
    source.commit(inserts(1))
    with pytest.raises(SinkRejected):
        CdcRuntime(source, store).run(sink, lambda: False)
    assert source.confirmed == ZERO
    sink.rejections = [bad]
    aside: list[Rejected] = []
    heard: list[Fact] = []
    runtime = CdcRuntime(source, store, observers=(heard.append,))
    runtime.run(sink, until(lambda: source.confirmed > ZERO), on_rejected=aside.extend)
    assert aside == [bad]
    assert observers.RowsRejected(rows=1, tables=(SHOP.table,), reason="too wide") in heard


def test_the_log_stores_its_own_position_and_accepts_no_other_sink(source: MemoryCapture, tmp_path: Path) -> None:
    log = LogWriter(tmp_path / "log", source.identity)
    runtime = CdcRuntime(source, LogSink(log))
    with pytest.raises(ConfigError):
        runtime.run(MemorySink(), lambda: True)
    log.close()


# --- control, observers, health ------------------------------------------------------------------------------------


def test_observers_get_every_event_and_cannot_disturb(source: MemoryCapture, store: Store) -> None:
    heard: list[Fact] = []

    def failing(_: Fact) -> None:
        raise ValueError("an observer's own trouble")

    runtime = CdcRuntime(source, store, observers=(failing, heard.append))
    runtime.start()
    source.commit(inserts(1))
    runtime.commit(runtime.poll().ack)
    runtime.enqueue(inserts(2))
    runtime.poll()
    runtime.control.pause()
    runtime.poll(0.0)
    runtime.control.resume()
    runtime.poll(0.0)
    source.break_next_read(unreachable())
    runtime.poll()
    runtime.stop()
    assert [type(fact) for fact in heard] == [
        observers.Started,
        observers.StreamOpened,
        observers.SchemaSeen,
        observers.Delivered,
        observers.Committed,
        observers.Delivered,
        observers.Paused,
        observers.Resumed,
        observers.Lost,
        observers.Stopped,
    ]


def test_health_says_what_is_wrong_and_what_to_do(source: MemoryCapture, store: Store) -> None:
    runtime = CdcRuntime(source, store, stalled_seconds=0.0)
    assert runtime.health().verdict is Verdict.NOT_RUNNING
    runtime.start()
    assert runtime.health().verdict is Verdict.STALLED
    runtime._stalled_seconds = 60.0
    assert runtime.health().verdict is Verdict.HEALTHY
    source.commit(inserts(1))
    runtime.poll()
    assert runtime.health().verdict is Verdict.HEALTHY
    runtime._stalled_seconds = 0.0
    assert "not been acknowledged" in runtime.health().reason
    runtime.force_stop()
    assert runtime.control.status().state == "stopped"


def test_a_new_schema_is_in_the_history_before_its_first_row_is_handed_out(source: MemoryCapture, store: Store) -> None:
    history = MemorySchemaHistory()
    runtime = CdcRuntime(source, store, history, limits=Limits(rows=1))
    runtime.start()
    source.commit(inserts(1))
    wider = replace(SHOP, columns=(*SHOP.columns, Column(name="extra", source_type="text", type=pa.string())))
    source.commit(inserts(2, schema=wider))
    runtime.commit(runtime.poll().ack)
    assert [version.schema for version in history.versions(SHOP.table)] == [SHOP]
    runtime.poll()
    assert [version.schema for version in history.versions(SHOP.table)] == [SHOP, wider]
    runtime.force_stop()


def test_a_history_without_retention_is_warned_about(
    source: MemoryCapture, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = CdcRuntime(source, store, MemorySchemaHistory(retention=None))
    runtime.start()
    assert any("grows" in record.message for record in caplog.records)
    runtime.stop()


# --- a function of one's own ---------------------------------------------------------------------------------------


def secret(batch: ChangeBatch) -> ChangeBatch:
    """Replace each name."""
    place = batch.data.schema.get_field_index("name")
    hidden = pa.array(["***"] * len(batch), pa.string())
    return replace(batch, data=batch.data.set_column(place, batch.data.schema.field(place), hidden))


def people(*keys: int) -> ChangeBatch:
    return batch_of(SHOP, *[(Operation.INSERT, {"id": key, "name": f"name {key}"}) for key in keys])


def names_of(batch: Batch) -> set[object]:
    return {event.values["name"] for event in batch.events()}


def test_stream_and_snapshot_pass_the_same_function_also_the_rest_of_a_batch(store: Store) -> None:
    """Lesson 8 for the runtime."""
    source = MemoryCapture(keep_tables=True)
    source.commit(people(1, 2, 3))
    runtime = CdcRuntime(source, store, snapshot_tables=(SHOP.table,), transform=secret)
    runtime.start()
    source.commit(people(4))
    source.commit(people(5, 6))
    seen: list[object] = []
    while len(seen) < 6:
        batch = runtime.poll()
        assert names_of(batch) <= {"***"}
        seen += keys_of(batch)[:1]
        runtime.commit(batch.ack, rows=min(1, batch.rows))
    assert seen == [1, 2, 3, 4, 5, 6]
    runtime.stop()


def test_lesson_1_a_transform_that_fails_lets_nothing_pass(source: MemoryCapture, store: Store) -> None:
    faults = [ValueError("a defect"), ValueError("again")]

    def failing(batch: ChangeBatch) -> ChangeBatch:
        if 2 in batch.data.column("id").to_pylist() and faults:
            raise faults.pop()
        return secret(batch)

    first = source.commit(people(1))
    for key in (2, 3):
        source.commit(people(key))
    runtime = CdcRuntime(source, store, limits=Limits(rows=1), transform=failing)
    runtime.start()
    batch = runtime.poll()
    runtime.commit(batch.ack)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"a defect|again"):
            runtime.poll()
        with pytest.raises(AckRefused):
            runtime.commit(batch.ack)
        assert source.confirmed == first
    assert (keys_of(runtime.poll()), names_of(runtime.poll())) == ([2], {"***"})
    runtime.commit(runtime.poll().ack)
    assert keys_of(runtime.poll()) == [3]
    runtime.force_stop()


def test_a_function_that_removes_rows_is_refused(source: MemoryCapture, store: Store) -> None:
    runtime = CdcRuntime(source, store, transform=lambda batch: replace(batch, data=batch.data.slice(1)))
    runtime.start()
    source.commit(people(1, 2))
    with pytest.raises(ConfigError, match="added or removed rows"):
        runtime.poll()
    assert runtime.force_stop().buffered[0].rows == 2


@pytest.mark.parametrize("odd", [lambda _: None, lambda batch: batch.data], ids=["nothing", "record batch"])
def test_a_function_that_returns_no_batch_is_refused_with_what_to_return(
    source: MemoryCapture, store: Store, odd: Any
) -> None:
    runtime = CdcRuntime(source, store, transform=odd)
    runtime.start()
    source.commit(people(1, 2))
    with pytest.raises(ConfigError, match="did not return a batch") as raised:
        runtime.poll()
    assert "dataclasses.replace" in raised.value.hint
    runtime.force_stop()


def test_a_sink_that_fails_in_the_middle_of_a_transaction_gets_that_part_again_and_the_count_is_right(
    store: Store,
) -> None:
    source = MemoryCapture(part_rows_max=3)
    end = source.commit(inserts(*range(10)))
    sink = Failing()
    sink.failures = [SinkUnready("full", hint="Wait.")]
    runtime = CdcRuntime(source, store, limits=Limits(rows=3, transactions=Transactions.SPLIT))
    fails = iter([False, True, False, False, True])

    def stopping() -> bool:
        sink.failures = [SinkUnready("full", hint="Wait.")] if next(fails, False) else []
        return source.confirmed == end

    runtime.run(sink, until(stopping))
    assert [event.seq for event in sink.events()] == list(range(10))
    assert [event.values["id"] for event in sink.events()] == list(range(10))
    assert runtime.rows_committed == 10


class FailingConfirm(MemoryCapture):
    """A source whose streams break at a confirm, so many times."""

    faults: list[TailraceError]

    def live(self, after: Lsn) -> Stream:
        stream, faults = super().live(after), self.faults
        confirm = stream.confirm

        def confirmed(position: Lsn) -> None:
            if position > ZERO and faults:
                raise faults.pop()
            confirm(position)

        stream.confirm = confirmed  # type: ignore[method-assign] # it breaks there
        return stream


@pytest.mark.parametrize("error", [unreachable(), PositionLost("gone", hint="Begin again.")], ids=["retry", "person"])
def test_a_source_that_breaks_at_confirm_loses_and_repeats_nothing(store: Store, error: TailraceError) -> None:
    source = FailingConfirm(window_transactions_max=10)
    source.faults = [error]
    for n in range(3):
        source.commit(inserts(2 * n, 2 * n + 1))
    runtime = CdcRuntime(source, store)
    runtime.start()
    batch = runtime.poll()
    with nullcontext() if isinstance(error, SourceUnreachable) else pytest.raises(PositionLost):
        runtime.commit(batch.ack, rows=3 if isinstance(error, SourceUnreachable) else 2)
    seen: list[object] = []
    while source.confirmed < source.end:
        batch = runtime.poll()
        seen += keys_of(batch)
        runtime.commit(batch.ack)
    assert seen == list(range(6))[-len(seen) :]
    assert len(seen) == (3 if isinstance(error, SourceUnreachable) else 4)
    assert runtime.rows_committed == 6
    runtime.stop()


def test_a_prefix_that_ends_in_a_transaction_counts_although_the_source_cannot_confirm(store: Store) -> None:
    source = FailingConfirm(window_transactions_max=10)
    source.faults = [PositionLost("gone", hint="Begin again.")]
    source.commit(inserts(0, 1))
    source.commit(inserts(2, 3, 4))
    runtime = CdcRuntime(source, store)
    runtime.start()
    with pytest.raises(PositionLost):
        runtime.commit(runtime.poll().ack, rows=3)
    assert (runtime.rows_committed, runtime.control.status().unacknowledged) == (2, 3)
    batch = runtime.poll()
    assert [(event.seq, event.values["id"]) for event in batch.events()] == [(3, 3), (4, 4)]
    runtime.commit(batch.ack)
    assert (runtime.rows_committed, runtime.progress.rows) == (5, 5)
    runtime.stop()


def test_a_prefix_whose_checkpoint_cannot_be_saved_is_not_acknowledged(
    source: MemoryCapture, store: Store, runtime: CdcRuntime
) -> None:
    for n in range(3):
        source.commit(inserts(n))
    batch = runtime.poll()
    store.failures = [StateFull("disk full", hint="Free space.")]
    with pytest.raises(StateFull):
        runtime.commit(batch.ack, rows=2)
    assert runtime.poll() is batch
    runtime.commit(batch.ack)
    assert (runtime.poll(0.0).rows, runtime.rows_committed) == (0, 3)
