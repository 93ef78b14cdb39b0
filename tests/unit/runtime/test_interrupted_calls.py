"""An interrupted call, as by Ctrl-C or a signal's handler, loses and doubles no row.

A tracer plays the handler: it raises at one line of the runtime after another, until none is left.
"""

from __future__ import annotations

import itertools
import linecache
import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow as pa
import pytest

from tailrace.capture.memory.source import MemoryCapture
from tailrace.errors import AckRefused
from tailrace.model.event import Event
from tailrace.model.mirror import Mirror
from tailrace.runtime import loop
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.output_batch import Batch, BatchKind, Limits
from tailrace.state.checkpoint_stores import MemoryCheckpointStore
from tailrace.testing.changes import changes, delete, insert, table, update

RUNTIME = str(Path(loop.__file__).parent)
LINES_APART = 31
"""Lines between two that are tried. Neighbours seldom differ, and all lines take minutes."""
ORDERS = table("public.orders", id=pa.int64(), status=pa.string())
EXPECTED = {1: "paid", 3: "new", 4: "new", 5: "new", 6: "late"}


class Interrupting:
    """A context that raises before the runtime's n-th line."""

    def __init__(self, line: int, error: type[BaseException]) -> None:
        self._line, self._error = line, error
        self.passed = 0

    def __enter__(self) -> None:
        sys.settrace(self._traced if self.passed < self._line else None)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _traced(self, frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(RUNTIME):
            return None
        # Python looks for signals at calls and loops: none comes between the note that it is done and the return.
        if event == "line" and linecache.getline(file, frame.f_lineno).strip() != "return batch":
            self.passed += 1
            if self.passed == self._line:
                raise self._error
        return self._traced


class Caller:
    """A caller that takes every batch in parts and keeps each row it ever received."""

    def __init__(self, runtime: CdcRuntime, around: AbstractContextManager[None]) -> None:
        self._runtime, self.around = runtime, around
        self.given: dict[int, Event] = {}
        self.injected: set[object] = set()

    def step(self) -> Batch:
        with self.around:
            batch = self._runtime.poll(0.0)
        for event in batch.events():
            if batch.kind is BatchKind.INJECTED:
                self.injected.add(event.values["id"])
            else:
                known = self.given.setdefault(event.seq, event)
                assert (known.operation, known.values) == (event.operation, event.values), "one number, two rows"
        with self.around:
            self._runtime.commit(batch.ack, rows=1 if batch.rows > 1 else None)
        return batch

    def finish(self) -> None:
        while self.step().kind is not BatchKind.EMPTY or self._runtime.control.status().snapshot:
            pass

    @property
    def rows(self) -> dict[object, object]:
        """The table that the rows make, applied in the order of their numbers."""
        mirror = Mirror()
        for seq in sorted(self.given):
            mirror.apply(self.given[seq].row_write())
        return {row["id"]: row["status"] for row in mirror.rows.values()}


def new(*ids: int) -> list[Any]:
    return [insert({"id": n, "status": "new"}) for n in ids]


def made(way: str) -> tuple[MemoryCapture, CdcRuntime]:
    """Return a source and a runtime that has some of everything still to do."""
    source = MemoryCapture(keep_tables=True)
    source.commit(changes(ORDERS, *new(1, 2, 3)))
    source.commit(changes(ORDERS, update({"id": 1, "status": "paid"}), *new(4)))
    read: dict[str, Any] = {
        "stream": {},
        "snapshot": {"snapshot_tables": [ORDERS.table]},
        "beside": {"incremental_snapshot": [ORDERS.table]},
    }[way]
    runtime = CdcRuntime(source, MemoryCheckpointStore(), limits=Limits(rows=2), **read)
    runtime.start()
    source.commit(changes(ORDERS, *new(5), delete({"id": 2})))
    source.commit(changes(ORDERS, insert({"id": 6, "status": "late"})))
    runtime.enqueue(changes(ORDERS, *new(77)))
    return source, runtime


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
@pytest.mark.parametrize("way", ["stream", "snapshot", "beside"])
def test_every_row_arrives_under_its_own_number_wherever_a_call_is_interrupted(
    way: str, error: type[BaseException]
) -> None:
    for line in itertools.count(1, LINES_APART):
        source, runtime = made(way)
        interrupting = Interrupting(line, error)
        caller = Caller(runtime, interrupting)
        with suppress(error):
            caller.finish()
        caller.around = nullcontext()
        caller.finish()
        assert caller.rows == EXPECTED, f"line {line}"
        assert caller.injected == {77}, f"line {line}"
        assert runtime.position == source.end, f"line {line}"
        if way == "stream":
            assert runtime.rows_committed == len(caller.given), f"line {line}"
        runtime.stop()
        if interrupting.passed < line:
            return


def test_a_batch_acknowledged_by_an_interrupted_call_is_not_the_current_one() -> None:
    class Store(MemoryCheckpointStore):
        def save(self, key: str, checkpoint: Any) -> None:
            super().save(key, checkpoint)
            if checkpoint.position == source.end:
                raise KeyboardInterrupt

    source = MemoryCapture()
    source.commit(changes(ORDERS, *new(1, 2)))
    runtime = CdcRuntime(source, Store())
    runtime.start()
    batch = runtime.poll()
    with pytest.raises(KeyboardInterrupt):
        runtime.commit(batch.ack)
    with pytest.raises(AckRefused):
        runtime.commit(batch.ack)
    assert runtime.poll(0.0).kind is BatchKind.EMPTY
    assert (runtime.position, runtime.rows_committed) == (source.end, 2)
    runtime.stop()
