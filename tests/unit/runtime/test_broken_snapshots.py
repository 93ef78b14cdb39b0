"""Snapshots that keep breaking: the stream continues, and nothing blocks forever."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tailrace.capture.memory.memory_tables import MemoryScan
from tailrace.capture.memory.source import MemoryCapture
from tailrace.errors import ConfigError, SourceRewritten, SourceSlow, SourceUnreachable, TailraceError
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.observers import Fact, Lost, SnapshotBegun, SnapshotEnded, Verdict
from tailrace.runtime.output_batch import BatchKind, Limits
from tailrace.state.checkpoint_stores import MemoryCheckpointStore
from tests.support.changes import SHOP
from tests.support.runtimes import LONG_SECONDS, inserts, keys_of
from tests.support.windows import named

OTHER = named("public", "others", 20)
REWRITTEN = SourceRewritten("the table was changed while it was read", hint="Nothing to do.")
SLOW = SourceSlow("another session has locked the table", hint="Wait.")


@pytest.fixture
def source() -> MemoryCapture:
    made = MemoryCapture(keep_tables=True, chunk_rows=10)
    made.commit(inserts(*range(5)))
    made.commit(inserts(100, schema=OTHER))
    return made


@pytest.fixture
def store() -> MemoryCheckpointStore:
    return MemoryCheckpointStore()


@pytest.fixture
def breaks(monkeypatch: pytest.MonkeyPatch) -> Callable[[TailraceError | None], None]:
    """Make every chunk fail with this error; None makes it work again."""
    read = MemoryScan.next

    def breaks(error: TailraceError | None) -> None:
        def broken(scan: MemoryScan, rows_max: int) -> object:
            if error is not None:
                raise error
            return read(scan, rows_max)

        monkeypatch.setattr(MemoryScan, "next", broken)

    return breaks


def run(runtime: CdcRuntime, enough: Callable[[], bool], kind: BatchKind = BatchKind.STREAM) -> list[object]:
    """Poll and acknowledge until enough; return the keys of this kind of batch."""
    found: list[object] = []
    deadline = time.monotonic() + LONG_SECONDS
    while not enough():
        assert time.monotonic() < deadline, runtime.control.status()
        batch = runtime.poll(0.01)
        found += keys_of(batch) if batch.kind is kind else []
        runtime.commit(batch.ack)
    return found


def of(heard: list[Fact], kind: type[Fact]) -> list[Fact]:
    return [fact for fact in heard if isinstance(fact, kind)]


def recorded(store: MemoryCheckpointStore) -> object:
    saved = store.load("default")
    assert saved is not None
    return saved.metadata["snapshot"]


@pytest.mark.slow
def test_an_incremental_snapshot_that_keeps_breaking_is_given_up_and_the_stream_continues(
    source: MemoryCapture, store: MemoryCheckpointStore, breaks: Callable[[TailraceError | None], None]
) -> None:
    heard: list[Fact] = []
    runtime = CdcRuntime(source, store, observers=(heard.append,), retry_seconds_max=4.0)
    runtime.start()
    run(runtime, lambda: runtime.position == source.end)
    breaks(REWRITTEN)
    wanted = runtime.control.snapshot(SHOP.table)
    run(runtime, lambda: len(of(heard, SnapshotBegun)) > 1)
    for n in range(500, 503):  # each while it breaks
        source.commit(inserts(n))
        assert run(runtime, lambda: runtime.position == source.end) == [n]
    assert runtime.control.status().snapshot is not None
    assert runtime.health().verdict is Verdict.STALLED
    run(runtime, lambda: bool(of(heard, SnapshotEnded)))
    assert [(fact.id, fact.error) for fact in heard if isinstance(fact, SnapshotEnded)] == [(wanted, REWRITTEN)]
    assert len(of(heard, Lost)) == len(of(heard, SnapshotBegun)) - 1 > 1, "it was taken up again"
    assert runtime.progress.reconnects == 0, "the stream was not touched"
    assert recorded(store) is None
    assert runtime.health().verdict is not Verdict.STALLED
    runtime.stop()


@pytest.mark.slow
def test_a_bulk_snapshot_that_resumes_and_reads_nothing_is_an_outage_that_ends(
    source: MemoryCapture, store: MemoryCheckpointStore, breaks: Callable[[TailraceError | None], None]
) -> None:
    heard: list[Fact] = []
    runtime = CdcRuntime(source, store, snapshot_tables=(SHOP.table,), observers=(heard.append,), retry_seconds_max=2.0)
    breaks(REWRITTEN)
    runtime.start()
    with pytest.raises(SourceRewritten):
        run(runtime, lambda: False)
    assert len(of(heard, SnapshotBegun)) > 1, "it was taken up again"
    breaks(None)
    assert run(runtime, lambda: runtime.rows_committed == 5, BatchKind.SNAPSHOT) == list(range(5))
    assert runtime.health().verdict is Verdict.HEALTHY
    runtime.stop()


@pytest.mark.parametrize("bulk", [True, False])
def test_a_snapshot_that_keeps_breaking_can_be_stopped(
    source: MemoryCapture, store: MemoryCheckpointStore, breaks: Callable[[TailraceError | None], None], bulk: bool
) -> None:
    heard: list[Fact] = []
    runtime = CdcRuntime(source, store, observers=(heard.append,), snapshot_tables=(SHOP.table,) if bulk else ())
    breaks(REWRITTEN)
    runtime.start()
    if not bulk:
        runtime.control.snapshot(SHOP.table)
    run(runtime, lambda: bool(of(heard, Lost)))
    runtime.control.stop_snapshot()
    begun = len(of(heard, SnapshotBegun))
    run(runtime, lambda: bool(of(heard, SnapshotEnded)))
    assert len(of(heard, SnapshotBegun)) == begun, "it was not taken up once more"
    assert [(fact.stopped, fact.error) for fact in heard if isinstance(fact, SnapshotEnded)] == [(True, None)]
    assert recorded(store) is None
    source.commit(inserts(500))
    assert run(runtime, lambda: runtime.position == source.end)[-1] == 500
    runtime.stop()


def test_a_snapshot_that_cannot_resume_does_not_block_the_start_and_resumes_later(
    source: MemoryCapture, store: MemoryCheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = CdcRuntime(source, store, limits=Limits(rows=2))
    runtime.start()
    run(runtime, lambda: runtime.position == source.end)
    runtime.control.snapshot(SHOP.table)
    run(runtime, lambda: runtime.rows_committed == 8)
    runtime.force_stop()

    def locked(record: object) -> MemoryScan | None:
        raise SLOW

    again = CdcRuntime(source, store)
    with monkeypatch.context() as patch:
        patch.setattr(source, "resume_scan", locked)
        again.start()
        source.commit(inserts(500))
        assert run(again, lambda: again.position == source.end) == [500]
        assert again.health().reason == SLOW.message
    assert run(again, lambda: again.control.status().snapshot is None, BatchKind.SNAPSHOT) == [2, 3, 4, 500]
    again.stop()


@pytest.mark.slow
def test_a_snapshot_that_cannot_begin_yet_waits_while_the_stream_continues(
    source: MemoryCapture, store: MemoryCheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Fact] = []
    runtime = CdcRuntime(source, store, observers=(heard.append,), retry_seconds_max=2.0)
    runtime.start()

    def locked(*_: object, **__: object) -> MemoryScan:
        raise SLOW

    with monkeypatch.context() as patch:
        patch.setattr(source, "scan", locked)
        first = runtime.control.snapshot(SHOP.table)
        for n in range(500, 503):
            source.commit(inserts(n))
            assert run(runtime, lambda: runtime.position == source.end)[-1] == n
        run(runtime, lambda: bool(of(heard, SnapshotEnded)))
        second = runtime.control.snapshot(OTHER.table)
        run(runtime, lambda: of(heard, Lost)[-1] is not of(heard, Lost)[0])
    assert run(runtime, lambda: len(of(heard, SnapshotEnded)) == 2, BatchKind.SNAPSHOT) == [100]
    ended = [(fact.id, fact.error) for fact in heard if isinstance(fact, SnapshotEnded)]
    assert ended == [(first, SLOW), (second, None)], "too long, and after a while"
    assert runtime.progress.reconnects == 0
    runtime.stop()


@pytest.mark.slow
def test_a_source_lost_with_its_snapshot_sets_the_wait_and_the_snapshot_stays_saved(
    source: MemoryCapture, store: MemoryCheckpointStore, breaks: Callable[[TailraceError | None], None]
) -> None:
    lost = SourceUnreachable("the line is dead", hint="It is tried again.")
    heard: list[Fact] = []
    runtime = CdcRuntime(source, store, observers=(heard.append,), retry_seconds_max=2.0)
    runtime.start()
    run(runtime, lambda: runtime.position == source.end)
    breaks(lost)
    for _ in range(50):
        source.break_next_read(lost)
    runtime.control.snapshot(SHOP.table)
    with pytest.raises(SourceUnreachable):
        run(runtime, lambda: False)
    assert not of(heard, SnapshotEnded)
    assert recorded(store) is not None
    runtime.force_stop()


def test_a_condition_that_is_not_a_string_is_refused(source: MemoryCapture, store: MemoryCheckpointStore) -> None:
    runtime = CdcRuntime(source, store)
    with pytest.raises(ConfigError, match="condition"):
        runtime.control.snapshot(SHOP.table, where=5)  # type: ignore[arg-type] # that is what is refused
