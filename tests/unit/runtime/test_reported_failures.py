"""Every failure is reported to observers and in the health, also if it is not our own error."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tailrace.capture.memory.source import MemoryCapture
from tailrace.capture.port import Stream
from tailrace.errors import RuntimeFailed, StateFull, TailraceError
from tailrace.model.batch import ChangeBatch
from tailrace.model.position import Lsn
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.observers import Fact, Failed, Lost, PollFailed, StartFailed, Stopped, Verdict
from tailrace.runtime.output_batch import Batch
from tailrace.runtime.runtime_state import State
from tailrace.runtime.sinks import MemorySink
from tailrace.state.checkpoint import Checkpoint
from tailrace.state.checkpoint_stores import MemoryCheckpointStore
from tests.support.runtimes import inserts, keys_of

SECRET = "a value of a row"


@pytest.fixture
def source() -> MemoryCapture:
    made = MemoryCapture()
    made.commit(inserts(1))
    return made


def failing(rows: ChangeBatch) -> ChangeBatch:
    raise ValueError(SECRET)


def reported(heard: list[Fact], kind: type[Failed | StartFailed | PollFailed]) -> list[TailraceError]:
    return [fact.error for fact in heard if isinstance(fact, kind)]


def test_any_error_of_a_poll_is_a_stall_and_is_reported(source: MemoryCapture) -> None:
    heard: list[Fact] = []
    runtime = CdcRuntime(source, MemoryCheckpointStore(), transform=failing, observers=(heard.append,))
    runtime.start()
    for _ in range(2):
        with pytest.raises(ValueError, match=SECRET) as raised:
            runtime.poll()
        health = runtime.health()
        assert health.verdict is Verdict.STALLED
        assert health.reason.startswith("unexpected ValueError in failing (test_reported_failures.py:")
        assert "Fix the code that raised it" in health.remedy
    errors = reported(heard, PollFailed)
    assert [type(error) for error in errors] == [RuntimeFailed, RuntimeFailed]
    assert errors[-1].__cause__ is raised.value
    assert not [fact for fact in heard if SECRET in str(fact)], "the text may hold a row's values"
    runtime._transform = None
    assert keys_of(runtime.poll()) == [1]
    assert runtime.health().verdict is Verdict.HEALTHY
    runtime.force_stop()


def test_an_unexpected_error_of_a_custom_source_is_reported(source: MemoryCapture) -> None:
    class Mine:
        def live(self, after: Lsn) -> Stream:
            raise OSError("the line is dead")

    heard: list[Fact] = []
    runtime = CdcRuntime(Mine(), MemoryCheckpointStore(), observers=(heard.append,))
    runtime.start()
    with pytest.raises(OSError, match="dead"):
        runtime.poll()
    assert [error.code for error in reported(heard, PollFailed)] == ["runtime-failed"]
    assert runtime.health().verdict is Verdict.STALLED
    runtime.stop()


@pytest.mark.parametrize("where", ["write", "flush", "stopping"])
def test_any_error_that_ends_a_loop_is_reported(source: MemoryCapture, where: str) -> None:
    def fail() -> bool:
        raise OSError("disk")

    class Broken(MemorySink):
        def write(self, batch: Batch) -> tuple[()]:
            _ = fail() if where == "write" else None
            return super().write(batch)

        def flush(self, caught_up: bool) -> None:
            _ = fail() if where == "flush" else None

    heard: list[Fact] = []
    stopping: Callable[[], bool] = fail if where == "stopping" else lambda: False
    runtime = CdcRuntime(source, MemoryCheckpointStore(), observers=(heard.append,))
    with pytest.raises(OSError, match="disk"):
        runtime.run(Broken(), stopping)
    assert [(error.code, type(error.__cause__)) for error in reported(heard, Failed)] == [("runtime-failed", OSError)]
    assert [type(fact) for fact in heard[-2:]] == [Stopped, Failed]


def test_an_interrupted_loop_has_not_failed(source: MemoryCapture) -> None:
    def interrupted() -> bool:
        raise KeyboardInterrupt

    heard: list[Fact] = []
    with pytest.raises(KeyboardInterrupt):
        CdcRuntime(source, MemoryCheckpointStore(), observers=(heard.append,)).run(MemorySink(), interrupted)
    assert not reported(heard, Failed)
    assert isinstance(heard[-1], Stopped)


@pytest.mark.parametrize("call", ["load", "save"])
def test_any_error_of_a_start_is_reported(source: MemoryCapture, call: str) -> None:
    class Store(MemoryCheckpointStore):
        broken = True

        def load(self, key: str) -> Checkpoint | None:
            if self.broken and call == "load":
                raise OSError("the share is gone")
            return super().load(key)

        def save(self, key: str, checkpoint: Checkpoint) -> None:
            if self.broken and call == "save":
                raise OSError("the share is gone")
            super().save(key, checkpoint)

    heard: list[Fact] = []
    store = Store()
    runtime = CdcRuntime(source, store, observers=(heard.append,))
    with pytest.raises(OSError, match="share"):
        runtime.start()
    assert [error.code for error in reported(heard, StartFailed)] == ["runtime-failed"]
    assert runtime.state is State.IDLE
    store.broken = False
    runtime.start()
    runtime.stop()


def test_our_own_error_is_reported_unchanged(source: MemoryCapture) -> None:
    full = StateFull("disk full", hint="Free space.")

    def fails(rows: ChangeBatch) -> ChangeBatch:
        raise full

    heard: list[Fact] = []
    runtime = CdcRuntime(
        source, MemoryCheckpointStore(), transform=fails, observers=(heard.append,), retry_seconds_max=0.0
    )
    with pytest.raises(StateFull):
        runtime.run(MemorySink(), lambda: False)
    assert reported(heard, PollFailed)[0] is reported(heard, Failed)[0] is full
    assert len([fact for fact in heard if isinstance(fact, Lost)]) <= 1


class Clinging(MemoryCapture):
    """A source whose streams cannot be closed."""

    def live(self, after: Lsn) -> Stream:
        stream = super().live(after)

        def close() -> None:
            raise OSError("the line is dead")

        stream.close = close  # type: ignore[method-assign] # the fault that is meant
        return stream


def test_unacknowledged_rows_are_returned_although_the_stream_cannot_be_closed() -> None:
    source, heard = Clinging(), list[Fact]()
    source.commit(inserts(1))
    runtime = CdcRuntime(source, MemoryCheckpointStore(), observers=(heard.append,))
    runtime.start()
    assert keys_of(runtime.poll()) == [1]
    runtime.enqueue(inserts(7))
    drained = runtime.force_stop()
    assert drained.in_flight is not None
    assert keys_of(drained.in_flight) == [1]
    assert [rows.data.num_rows for rows in drained.injected] == [1], "they come nowhere else"
    assert runtime.state is State.STOPPED
    assert [error.code for error in reported(heard, Failed)] == ["runtime-failed"]


def test_the_error_that_ended_a_run_is_not_hidden_by_a_failing_close() -> None:
    class Broken(MemorySink):
        def write(self, batch: Batch) -> tuple[()]:
            raise ValueError(SECRET)

    source, heard = Clinging(), list[Fact]()
    source.commit(inserts(1))
    runtime = CdcRuntime(source, MemoryCheckpointStore(), observers=(heard.append,))
    runtime.start()
    with pytest.raises(ValueError, match=SECRET):
        runtime.run(Broken(), lambda: False)
    assert len(reported(heard, Failed)) == 2, "both are told"
    assert runtime.state is State.STOPPED
