"""The loop with transactions in parts: nothing is confirmed before the end, lost or doubled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.capture.memory.source import MemoryCapture
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write.writer import LogWriter
from tailrace.errors import LogUnusable, SourceUnreachable, TailraceError
from tailrace.model.batch import Window
from tailrace.model.position import ZERO, Lsn
from tailrace.runtime import loop
from tests.support.changes import SHOP
from tests.support.runtimes import LogLoop, inserts, until
from tests.support.windows import ids

LARGE = list(range(100, 110))
PART = 3


class Sink:
    """A sink that keeps parts until their transaction ends, and fails on demand before or after it wrote."""

    def __init__(self, source: MemoryCapture) -> None:
        self.position = ZERO
        self.keys: list[object] = []
        self.aside: list[object] = []
        self.appended: list[tuple[int, bool]] = []
        self.confirmed_before: list[Lsn] = []
        self.failures: dict[int, Exception] = {}
        """Failures by the number of the append that meets them."""
        self._source = source
        self._calls = 0

    def append(self, window: Window) -> None:
        self._calls += 1
        self.confirmed_before.append(self._source.confirmed)
        assert window.start == self.position
        if not window.continues:
            self.aside.clear()
        if self._calls in self.failures:
            raise self.failures[self._calls]
        self.appended.append((window.rows, window.open))
        self.aside += [key for _, key in ids(window.batches)]
        if not window.open:
            self.keys += self.aside
            self.aside.clear()
            self.position = window.end


@pytest.fixture
def source() -> MemoryCapture:
    return MemoryCapture(window_transactions_max=2, part_rows_max=PART)


@pytest.fixture
def sink(source: MemoryCapture) -> Sink:
    return Sink(source)


def write(source: MemoryCapture) -> Lsn:
    """Commit a small transaction, a large one, and a small one again."""
    source.commit(inserts(1))
    source.commit(inserts(*LARGE))
    return source.commit(inserts(2, 3))


WRITTEN = [1, *LARGE, 2, 3]


def unreachable() -> SourceUnreachable:
    return SourceUnreachable("the line is dead", hint="It is tried again.")


# --- one step ----------------------------------------------------------------------------------------------


def test_a_part_is_appended_and_nothing_is_confirmed(source: MemoryCapture, sink: Sink) -> None:
    end = source.commit(inserts(*LARGE))
    steps = LogLoop(source.live, sink)
    steps.runtime.start()
    for n in range(3):
        assert steps.step() == PART
        assert (sink.position, source.confirmed) == (ZERO, ZERO)
        assert sink.aside == LARGE[: (n + 1) * PART]
    steps.step()
    assert (sink.keys, sink.position, source.confirmed) == (LARGE, end, end)
    steps.runtime.stop()


# --- the loop ----------------------------------------------------------------------------------------------


def test_large_transactions_arrive_once_and_in_order(source: MemoryCapture, sink: Sink) -> None:
    end = write(source)
    runtime = LogLoop(source.live, sink)
    runtime.run(until(lambda: sink.position == end))
    assert sink.keys == WRITTEN
    assert sink.appended == [(1, False), (3, True), (3, True), (3, True), (3, False)]
    assert (runtime.progress.rows, runtime.progress.transactions) == (13, 3)
    assert source.confirmed == end


def test_progress_counts_the_rows_of_a_part_at_once(source: MemoryCapture, sink: Sink) -> None:
    source.commit(inserts(*LARGE))
    runtime = LogLoop(source.live, sink)
    seen: list[int] = []

    def stopping() -> bool:
        seen.append(runtime.progress.rows)
        return len(sink.appended) == 2

    runtime.run(stopping)
    assert sorted(set(seen)) == [0, PART, 2 * PART]
    assert (runtime.progress.transactions, runtime.progress.source_end) == (0, ZERO)


@pytest.mark.parametrize("failing", [2, 3, 4, 5], ids=["first", "second", "third", "finish"])
def test_a_sink_that_fails_for_a_moment_gets_the_whole_transaction_again(
    source: MemoryCapture, sink: Sink, failing: int
) -> None:
    end = write(source)
    sink.failures = {failing: unreachable()}
    runtime = LogLoop(source.live, sink)
    runtime.run(until(lambda: sink.position == end))
    assert sink.keys == WRITTEN
    assert runtime.progress.rows == len(WRITTEN), "what came again was not counted twice"
    assert max(sink.confirmed_before[:5]) < end


@pytest.mark.parametrize("failing", [2, 3, 4, 5], ids=["first", "second", "third", "finish"])
def test_a_log_that_fails_stops_the_loop_and_the_source_keeps_the_whole_transaction(
    source: MemoryCapture, sink: Sink, failing: int
) -> None:
    end = write(source)
    sink.failures = {failing: LogUnusable("read-only", hint="Mount it writable.")}
    with pytest.raises(LogUnusable):
        LogLoop(source.live, sink).run(lambda: False)
    assert sink.keys == [1]
    assert source.confirmed == sink.position
    LogLoop(source.live, sink).run(until(lambda: sink.position == end))
    assert sink.keys == WRITTEN


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_source_that_breaks_between_two_parts_loses_and_repeats_nothing(
    source: MemoryCapture, sink: Sink, parts: int
) -> None:
    end = write(source)
    faults: list[TailraceError] = [unreachable()]

    def stopping() -> bool:
        if faults and len(sink.appended) == 1 + parts:
            source.break_next_read(faults.pop())
        return sink.position == end

    runtime = LogLoop(source.live, sink)
    runtime.run(until(stopping))
    assert sink.keys == WRITTEN
    assert (runtime.progress.reconnects, runtime.progress.rows) == (1, len(WRITTEN))


def test_a_stop_between_two_parts_makes_the_next_run_repeat_the_transaction(source: MemoryCapture, sink: Sink) -> None:
    end = write(source)
    runtime = LogLoop(source.live, sink)
    runtime.run(until(lambda: sink.aside == LARGE[: 2 * PART]))
    assert sink.keys == [1]
    runtime.run(until(lambda: sink.position == end))
    assert sink.keys == WRITTEN
    assert runtime.progress.rows == len(WRITTEN)


def test_the_loop_is_caught_up_only_when_the_large_transaction_has_ended(source: MemoryCapture, sink: Sink) -> None:
    source.commit(inserts(1))
    target = source.commit(inserts(*LARGE))
    runtime = LogLoop(source.live, sink, target=target)
    seen: list[tuple[bool, bool]] = []

    def stopping() -> bool:
        seen.append((bool(sink.aside), runtime.caught_up))
        return runtime.caught_up

    runtime.run(until(stopping))
    assert (True, False) in seen
    assert (True, True) not in seen
    assert sink.keys == [1, *LARGE]


def test_a_quiet_source_is_still_confirmed_after_a_large_transaction(
    source: MemoryCapture, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part is no commit: the time since the last commit keeps counting."""
    monkeypatch.setattr(loop, "IDLE_SECONDS_MAX", 0.2)
    write(source)
    end = source.quiet(1)
    LogLoop(source.live, sink).run(until(lambda: source.confirmed == end))
    assert sink.keys == WRITTEN
    assert sink.appended[-1] == (0, False)


def test_the_real_log_takes_a_large_transaction_as_one_commit(source: MemoryCapture, tmp_path: Path) -> None:
    log = LogWriter(tmp_path / "log", source.identity)
    end = write(source)
    LogLoop(source.live, log).run(until(lambda: log.position == end))
    log.close()
    found = ids([batch for batch in ChangeLog.open(tmp_path / "log").follow(0) if batch.schema.table == SHOP.table])
    assert [key for _, key in found] == WRITTEN
    assert source.confirmed == end
