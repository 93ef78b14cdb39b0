"""Runtimes for tests: the loop as a pipeline runs it, and the same over a memory source with a checkpoint store."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tailrace.capture.memory.source import batch_of
from tailrace.capture.port import Stream
from tailrace.model.batch import ChangeBatch
from tailrace.model.change import Operation
from tailrace.model.position import Lsn
from tailrace.model.schema import TableSchema
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.output_batch import Batch
from tailrace.runtime.position_store import DurableLog, LogSink
from tailrace.runtime.runtime_state import Progress
from tests.support.changes import SHOP

LONG_SECONDS = 120.0


class Opened:
    """What opens streams, and nothing else."""

    def __init__(self, live: Callable[[Lsn], Stream]) -> None:
        self._live = live

    def live(self, after: Lsn) -> Stream:
        return self._live(after)


class LogLoop:
    """The loop over a log, as a pipeline runs it."""

    def __init__(self, live: Callable[[Lsn], Stream], log: DurableLog, **given: Any) -> None:
        self._sink = LogSink(log)
        self.runtime = CdcRuntime(Opened(live), self._sink, **given)

    def run(self, stopping: Callable[[], bool]) -> None:
        self.runtime.run(self._sink, stopping)

    def step(self, wait_seconds: float = 0.0) -> int | None:
        """One turn of it by hand; how many rows that was, None if there was nothing."""
        batch = self.runtime.poll(wait_seconds)
        if batch.ack is None:
            return None
        self._sink.write(batch)
        self.runtime.commit(batch.ack)
        return batch.rows

    @property
    def progress(self) -> Progress:
        return self.runtime.progress

    @property
    def caught_up(self) -> bool:
        return self.runtime.caught_up


def inserts(*keys: int, schema: TableSchema = SHOP) -> ChangeBatch:
    return batch_of(schema, *[(Operation.INSERT, {"id": key}) for key in keys])


def until(reached: Callable[[], bool]) -> Callable[[], bool]:
    """Stop when it is so; a test that waits for ever fails instead."""
    deadline = time.monotonic() + LONG_SECONDS

    def stopping() -> bool:
        assert time.monotonic() < deadline, "it never came"
        return reached()

    return stopping


def keys_of(batch: Batch) -> list[object]:
    """The ids of its rows, in order."""
    return [event.values["id"] for event in batch.events()]
