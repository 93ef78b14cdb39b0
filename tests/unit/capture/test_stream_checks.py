"""Windows of a stream are checked against the port's promises before they are used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from tailrace.capture.memory.source import MemoryCapture
from tailrace.errors import ConfigError
from tailrace.model.batch import AnyWindow, Window
from tailrace.model.position import ZERO, Lsn
from tailrace.model.position_kinds import CustomPosition
from tailrace.runtime.loop import CdcRuntime
from tailrace.state.checkpoint_stores import MemoryCheckpointStore
from tailrace.state.recorded_stream import RecordedStream
from tailrace.state.schema_history import MemorySchemaHistory
from tailrace.testing.changes import changes, insert, table
from tailrace.transforms.rules import Null
from tailrace.transforms.transform_plan import TransformPlan
from tailrace.transforms.transformed_stream import TransformedStream

ORDERS = table("public.orders", id=pa.int64(), status=pa.string())


class OneWindow:
    """A source that delivers one window."""

    def __init__(self, given: Any) -> None:
        self.given = given
        self.confirmed = ZERO

    def live(self, after: Lsn) -> OneWindow:
        return self

    def read(self, after: Lsn, wait_seconds: float) -> Any:
        return self.given

    def confirm(self, position: Lsn) -> None:
        self.confirmed = position

    def close(self) -> None: ...


def sound() -> AnyWindow:
    source = MemoryCapture()
    source.commit(changes(ORDERS, insert({"id": 1}), insert({"id": 2})))
    window = source.live(ZERO).read(ZERO, 0.0)
    assert window is not None
    return window


def with_rows(change: Callable[[pa.RecordBatch], pa.RecordBatch]) -> AnyWindow:
    window = sound()
    (batch,) = window.batches
    return replace(window, batches=(replace(batch, data=change(batch.data)),))


@pytest.mark.parametrize("rules", [None, [Null(columns=("status",))]], ids=["plain", "with rules"])
@pytest.mark.parametrize(("given", "said"), [
    (3, "`read\\(…\\)` is not a `Window`"), (sound().batches[0], "is not a `Window`"),
    (replace(sound(), rows=0), "number of rows .*says=0, has=2"), (replace(sound(), rows=1), "says=1, has=2"),
    (replace(sound(), start=Lsn(7)), "changes are missing"),
    (replace(sound(), end=CustomPosition("7")), "of another type than its own"),
    (replace(sound(), batches=(3,)), "`batches` is not a `ChangeBatch`"),  # type: ignore[arg-type] # that is the mistake
    (with_rows(lambda data: data.slice(0, 0)), "a batch without rows"),
    (with_rows(lambda data: data.drop_columns(["_tx"])), "rows lack .*columns=_tx"),
    (with_rows(lambda data: data.drop_columns(["_position"])), "rows lack .*columns=_position"),
    (with_rows(lambda data: data.drop_columns(["status"])), "rows lack .*columns=status"),
    (with_rows(lambda data: data.set_column(1, data.schema.field(1), pa.array([5, 9]))), "not numbered consecutively"),
])  # fmt: skip
def test_a_window_that_breaks_a_promise_is_refused_and_delivers_nothing(given: Any, said: str, rules: Any) -> None:
    source = OneWindow(given)
    runtime: CdcRuntime = CdcRuntime(source, MemoryCheckpointStore(), transforms=rules)
    runtime.start()
    for _ in range(2):
        with pytest.raises(ConfigError, match=said) as raised:
            runtime.poll(0.0)
        assert raised.value.hint
    assert (runtime.position, source.confirmed) == (ZERO, ZERO)
    source.given = sound()
    assert runtime.poll(0.0).rows == 2
    runtime.force_stop()


def test_a_part_of_a_transaction_needs_no_position() -> None:
    whole = with_rows(lambda data: data.drop_columns(["_position"]))
    part = replace(whole, end=whole.start, transactions=0, open=True, last_committed_at=None)
    runtime: CdcRuntime = CdcRuntime(OneWindow(part), MemoryCheckpointStore())
    runtime.start()
    assert runtime.poll(0.0).rows == 0, "it is gathered"
    runtime.force_stop()


def test_an_empty_window_moves_the_position() -> None:
    source = OneWindow(Window(start=ZERO, end=Lsn(1 << 30)))
    runtime: CdcRuntime = CdcRuntime(source, MemoryCheckpointStore())
    runtime.start()
    runtime.poll(0.0)
    assert runtime.position == Lsn(1 << 30)
    runtime.stop()


@pytest.mark.parametrize("given", [None, 3, object()], ids=["none", "a number", "an object"])
def test_what_is_not_a_stream_is_refused_wherever_one_is_opened(given: Any) -> None:
    class Source:
        def live(self, after: Lsn) -> Any:
            return given

    runtime: CdcRuntime = CdcRuntime(Source(), MemoryCheckpointStore())
    runtime.start()
    acts: tuple[Callable[[], object], ...] = (
        runtime.poll,
        lambda: RecordedStream(given, MemorySchemaHistory()),
        lambda: TransformedStream(given, TransformPlan([])),
    )
    for act in acts:
        with pytest.raises(ConfigError, match="lacks=read, confirm, close") as raised:
            act()
        assert "`confirm(position)`" in raised.value.hint
    runtime.force_stop()
