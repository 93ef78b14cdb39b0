"""The loop's order is the guarantee: a failure anywhere repeats a window, never skips one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tailrace.capture.memory.source import MemoryCapture
from tailrace.capture.port import Stream
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write.writer import LogWriter
from tailrace.errors import LogFull, LogUnusable, PositionLost, SourceUnreachable, TailraceError
from tailrace.model.batch import Window
from tailrace.model.position import ZERO, Lsn
from tailrace.runtime import intake, loop
from tests.support.runtimes import LONG_SECONDS, LogLoop, inserts, until
from tests.support.windows import ids


class Sink:
    """A sink that keeps windows, fails on demand, and notes the confirmed position for each."""

    def __init__(self, source: MemoryCapture) -> None:
        self.position = ZERO
        self.windows: list[Window] = []
        self.confirmed_before: list[Lsn] = []
        self.failures: list[Exception] = []
        self._source = source

    def append(self, window: Window) -> None:
        self.confirmed_before.append(self._source.confirmed)
        if self.failures:
            raise self.failures.pop()
        assert window.start == self.position
        self.windows.append(window)
        self.position = window.end

    @property
    def keys(self) -> list[object]:
        return [key for window in self.windows for _, key in ids(window.batches)]


class Source(MemoryCapture):
    """A memory source that notes when it was opened and whether every stream was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[float] = []
        self.open_streams = 0
        self.refusals: list[TailraceError] = []

    def live(self, after: Lsn) -> Stream:
        self.opened.append(time.monotonic())
        if self.refusals:
            raise self.refusals.pop()
        self.open_streams += 1
        return Watched(super().live(after), self)


class Watched:
    """A stream that notes that it was closed."""

    def __init__(self, inner: Stream, source: Source) -> None:
        self._inner, self._source = inner, source

    def read(self, after: Lsn, wait_seconds: float) -> Window | None:
        return self._inner.read(after, wait_seconds)

    def confirm(self, position: Lsn) -> None:
        self._inner.confirm(position)

    def close(self) -> None:
        self._source.open_streams -= 1
        self._inner.close()


@pytest.fixture
def source() -> Iterator[Source]:
    made = Source()
    yield made
    assert made.open_streams == 0, "a stream was left open"


@pytest.fixture
def sink(source: Source) -> Sink:
    return Sink(source)


def for_seconds(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


def unreachable() -> SourceUnreachable:
    return SourceUnreachable("the line is dead", hint="It is tried again.")


def full() -> LogFull:
    return LogFull("disk full", hint="Free space.")


# --- one step ----------------------------------------------------------------------------------------------


@pytest.fixture
def steps(source: Source, sink: Sink) -> Iterator[LogLoop]:
    """Return the loop, to be run turn by turn."""
    made = LogLoop(source.live, sink)
    made.runtime.start()
    yield made
    made.runtime.force_stop()


def test_nothing_is_confirmed_until_the_log_has_it(source: Source, sink: Sink, steps: LogLoop) -> None:
    source.commit(inserts(1))
    sink.failures = [OSError("disk")]
    with pytest.raises(OSError, match="disk"):
        steps.step()
    assert source.confirmed == ZERO


def test_a_window_whose_append_failed_is_repeated(source: Source, sink: Sink, steps: LogLoop) -> None:
    first = source.commit(inserts(1, 2))
    source.commit(inserts(3))
    sink.failures = [OSError("disk")]
    with pytest.raises(OSError, match="disk"):
        steps.step()
    assert steps.step() == 2
    assert (sink.keys, source.confirmed) == ([1, 2], first)


def test_the_source_confirms_only_after_each_append(source: Source, sink: Sink, steps: LogLoop) -> None:
    ends = [source.commit(inserts(n)) for n in range(3)]
    for _ in range(3):
        steps.step()
    assert sink.confirmed_before == [ZERO, *ends[:2]]
    assert source.confirmed == ends[2]


def test_a_quiet_window_that_is_not_due_is_neither_appended_nor_confirmed(
    source: Source, sink: Sink, steps: LogLoop
) -> None:
    end = source.quiet(100)
    assert steps.step() is None
    assert steps.progress.source_end == end
    assert (sink.windows, source.confirmed) == ([], ZERO)


def test_a_quiet_window_that_is_due_moves_log_and_source(source: Source, sink: Sink) -> None:
    steps = LogLoop(source.live, sink, idle_seconds_max=0.0)
    steps.runtime.start()
    end = source.quiet(100)
    steps.step()
    assert (sink.position, source.confirmed) == (end, end)
    steps.runtime.stop()


def test_an_empty_read_is_no_window(steps: LogLoop) -> None:
    assert steps.step() is None


# --- the loop ----------------------------------------------------------------------------------------------


def test_everything_arrives_once_and_in_order_while_a_writer_writes(source: Source, sink: Sink) -> None:
    def write() -> None:
        for n in range(200):
            source.commit(inserts(n))
            if n % 50 == 0:
                source.break_next_read(unreachable())

    writer = threading.Thread(target=write)
    runtime = LogLoop(source.live, sink)
    writer.start()
    runtime.run(until(lambda: len(sink.windows) == 200))
    writer.join()
    assert sink.keys == list(range(200))
    assert runtime.progress.rows == runtime.progress.transactions == 200
    assert source.confirmed == sink.position == source.end


def test_a_crash_between_append_and_confirm_repeats_nothing(source: Source, sink: Sink) -> None:
    first = source.commit(inserts(1))
    stream = source.live(ZERO)
    window = stream.read(ZERO, 0.0)
    assert window is not None
    sink.append(window)  # and here the process dies
    stream.close()
    second = source.commit(inserts(2))
    LogLoop(source.live, sink).run(until(lambda: sink.position == second))
    assert sink.keys == [1, 2]
    assert sink.confirmed_before[-1] == first, "a start confirms what the log already has"


def test_a_failing_log_stops_the_loop_and_the_source_keeps_everything(source: Source, sink: Sink) -> None:
    source.commit(inserts(1))
    end = source.commit(inserts(2))
    sink.failures = [LogUnusable("read-only", hint="Mount it writable.")]
    with pytest.raises(LogUnusable):
        LogLoop(source.live, sink).run(lambda: False)
    assert source.confirmed == ZERO
    LogLoop(source.live, sink).run(until(lambda: sink.position == end))
    assert sink.keys == [1, 2]


def test_the_loop_waits_for_a_full_log_and_loses_nothing(source: Source, sink: Sink) -> None:
    source.commit(inserts(1))
    end = source.commit(inserts(2))
    sink.failures = [full(), full()]
    runtime = LogLoop(source.live, sink)
    runtime.run(until(lambda: sink.position == end))
    assert sink.keys == [1, 2]
    assert max(sink.confirmed_before) < end
    assert runtime.progress.reconnects == 2
    assert runtime.progress.last_error is None


def test_a_log_that_stays_full_is_given_up_although_the_source_answers(
    source: Source, sink: Sink, caplog: pytest.LogCaptureFixture
) -> None:
    """Between two attempts the source is briefly quiet; that must not end the outage."""
    source.commit(inserts(1))
    sink.failures = [full() for _ in range(1000)]
    silent = 0

    class SilentAtFirst(Watched):
        def read(self, after: Lsn, wait_seconds: float) -> Window | None:
            nonlocal silent
            silent += 1
            return None if silent % 2 else super().read(after, wait_seconds)

    def live(after: Lsn) -> Stream:
        stream = source.live(after)
        assert isinstance(stream, Watched)
        return SilentAtFirst(stream._inner, source)

    with pytest.raises(LogFull):
        LogLoop(live, sink, retry_seconds_max=0.3).run(for_seconds(LONG_SECONDS))
    assert source.confirmed == ZERO
    message = [record for record in caplog.records if record.levelname == "ERROR"]
    assert message, "a person must look"
    assert vars(message[0])["hint"] == "Free space."


def test_an_unexpected_error_is_not_swallowed(source: Source, sink: Sink) -> None:
    source.commit(inserts(1))
    sink.failures = [ValueError("a defect")]
    with pytest.raises(ValueError, match="a defect"):
        LogLoop(source.live, sink).run(lambda: False)
    assert source.confirmed == ZERO


def test_the_loop_stops_when_stop_is_set(source: Source, sink: Sink) -> None:
    source.commit(inserts(1))
    LogLoop(source.live, sink).run(lambda: True)
    assert source.opened == []


def test_the_real_log_is_a_sink(source: Source, tmp_path: Path) -> None:
    log = LogWriter(tmp_path / "log", source.identity)
    end = [source.commit(inserts(n, n + 100)) for n in range(5)][-1]
    LogLoop(source.live, log).run(until(lambda: log.position == end))
    log.close()
    found = ids(list(ChangeLog.open(tmp_path / "log").follow(0)))
    assert found == [(2 * n + k + 1, n + 100 * k) for n in range(5) for k in range(2)]
    assert source.confirmed == end


# --- a quiet source ----------------------------------------------------------------------------------------


def test_a_quiet_source_is_confirmed_after_enough_bytes(source: Source, sink: Sink) -> None:
    source.quiet(loop.IDLE_BYTES_MAX - 1)
    runtime = LogLoop(source.live, sink)
    runtime.run(for_seconds(0.2))
    assert sink.windows == []
    end = source.quiet(1)
    runtime.run(until(lambda: source.confirmed == end))
    assert [(window.is_empty, window.end) for window in sink.windows] == [(True, end)]


def test_a_quiet_source_is_confirmed_after_enough_time(
    source: Source, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "IDLE_SECONDS_MAX", 0.3)
    end = source.quiet(1)
    began = time.monotonic()
    LogLoop(source.live, sink).run(until(lambda: source.confirmed == end))
    assert time.monotonic() - began >= 0.3
    assert len(sink.windows) == 1


def test_a_quiet_source_is_not_saved_at_every_poll(source: Source, sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "IDLE_SECONDS_MAX", 0.25)
    seen = 0

    def stopping() -> bool:
        nonlocal seen
        seen += 1
        source.quiet(1)
        return seen > 40

    began = time.monotonic()
    LogLoop(source.live, sink).run(stopping)
    assert 1 <= len(sink.windows) <= (time.monotonic() - began) / 0.25 + 1


def test_reaching_the_target_is_saved_at_once(source: Source, sink: Sink) -> None:
    target = source.quiet(50)
    end = source.quiet(50)
    runtime = LogLoop(source.live, sink, target=target)
    assert not runtime.caught_up
    runtime.run(until(lambda: runtime.caught_up))
    assert sink.position == end
    source.quiet(50)
    runtime.run(for_seconds(0.1))
    assert len(sink.windows) == 1


def test_a_target_in_the_middle_of_changes_is_reached_with_them(source: Source, sink: Sink) -> None:
    source.commit(inserts(1))
    target = source.commit(inserts(2))
    source.commit(inserts(3))
    runtime = LogLoop(source.live, sink, target=target)
    runtime.run(until(lambda: runtime.caught_up))
    assert sink.keys[:2] == [1, 2]


def test_without_a_target_the_loop_is_never_caught_up(source: Source, sink: Sink) -> None:
    assert not LogLoop(source.live, sink).caught_up


# --- a source that breaks ----------------------------------------------------------------------------------


def test_a_broken_source_is_opened_again_and_nothing_is_lost_or_repeated(source: Source, sink: Sink) -> None:
    source.commit(inserts(1))
    runtime = LogLoop(source.live, sink)
    runtime.run(until(lambda: sink.keys == [1]))
    source.break_next_read(unreachable())
    source.commit(inserts(2))
    runtime.run(until(lambda: sink.keys == [1, 2]))
    assert runtime.progress.reconnects == 1
    assert runtime.progress.last_error is None


def test_a_source_that_cannot_be_opened_is_tried_again(source: Source, sink: Sink) -> None:
    source.refusals = [unreachable(), unreachable()]
    source.commit(inserts(1))
    LogLoop(source.live, sink).run(until(lambda: sink.keys == [1]))
    assert len(source.opened) == 3


def test_waits_between_attempts_grow_up_to_a_limit(source: Source, sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "RETRY_SECONDS_FIRST", 0.1)
    monkeypatch.setattr(intake, "RETRY_SECONDS_MAX", 0.4)
    pauses: list[float] = []

    def after(last: intake.Outage | None, error: TailraceError) -> intake.Outage:
        pauses.append((outage := began(last, error)).pause_seconds)
        return outage

    began = intake.Outage.after
    monkeypatch.setattr(intake.Outage, "after", after)
    source.refusals = [unreachable() for _ in range(5)]
    source.commit(inserts(1))
    LogLoop(source.live, sink).run(until(lambda: sink.keys == [1]))
    waits = [later - earlier for earlier, later in zip(source.opened, source.opened[1:], strict=False)]
    for wait, least in zip(waits, (0.1, 0.2, 0.4, 0.4, 0.4), strict=True):
        assert wait >= least
    assert pauses == [0.1, 0.2, 0.4, 0.4, 0.4]


@pytest.mark.slow
def test_waits_begin_small_again_after_a_success(source: Source, sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "RETRY_SECONDS_FIRST", 0.03)
    source.refusals = [unreachable() for _ in range(7)]
    source.commit(inserts(1))
    runtime = LogLoop(source.live, sink)

    breaks = iter([unreachable()])

    def stopping() -> bool:
        if sink.keys == [1] and (fault := next(breaks, None)):
            source.break_next_read(fault)
            source.commit(inserts(2))
        return sink.keys == [1, 2]

    runtime.run(stopping)
    assert source.opened[8] - source.opened[7] < 3  # it would be 3.84 if the waits had gone on growing


def test_an_error_that_needs_a_person_is_raised_at_once(source: Source, sink: Sink) -> None:
    source.break_next_read(PositionLost("gone", hint="Begin again."))
    with pytest.raises(PositionLost):
        LogLoop(source.live, sink).run(lambda: False)
    assert len(source.opened) == 1


def test_the_loop_gives_up_after_its_retry_time(source: Source, sink: Sink) -> None:
    source.refusals = [unreachable() for _ in range(100)]
    runtime = LogLoop(source.live, sink, retry_seconds_max=0.4)
    began = time.monotonic()
    with pytest.raises(SourceUnreachable):
        runtime.run(lambda: False)
    assert 0.4 <= time.monotonic() - began < LONG_SECONDS
    assert len(source.opened) > 1
    assert runtime.progress.last_error is not None


def test_an_outage_that_ended_does_not_count_towards_the_next(source: Source, sink: Sink) -> None:
    """The source is idle in between: there is no window, but every read succeeds."""
    runtime = LogLoop(source.live, sink, retry_seconds_max=2.0)
    source.break_next_read(unreachable())
    runtime.run(for_seconds(2.5))
    source.break_next_read(unreachable())
    runtime.run(until(lambda: runtime.progress.reconnects == 2))


def test_a_wait_ends_when_stop_is_set(source: Source, sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "RETRY_SECONDS_FIRST", 800.0)
    source.refusals = [unreachable()]
    began = time.monotonic()
    LogLoop(source.live, sink).run(for_seconds(0.3))
    assert time.monotonic() - began < LONG_SECONDS
    assert len(source.opened) == 1


def test_progress_has_the_furthest_position_of_the_source(source: Source, sink: Sink) -> None:
    source.commit(inserts(1, 2))
    end = source.quiet(500)
    runtime = LogLoop(source.live, sink)
    runtime.run(until(lambda: runtime.progress.source_end == end))
    assert (runtime.progress.transactions, runtime.progress.rows) == (1, 2)
    assert sink.position < end
