"""A stream of rows handed to delta-rs from the thread that reads them.

What the reading raises reaches the caller as it is, and nothing is committed then.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any

import pyarrow as pa

from tailrace import failpoints

BATCHES_IN_FLIGHT_MAX = 4
HANDOVER_SECONDS = 0.2

_ABORT = object()


class _Aborted(Exception):
    """Ends a stream in an error, so that nothing is committed; never leaves this module."""


def pump(
    fields: pa.Schema, batches: Iterable[pa.RecordBatch], write: Callable[[pa.RecordBatchReader], None]
) -> None:
    """Read in the caller's thread, write in another.

    delta-rs pulls a stream from inside its own runtime, where nothing else that uses the runtime, such as a
    scan, may be called; and what `batches` raises must reach the caller as it is.
    """
    handover: queue.Queue[Any] = queue.Queue(BATCHES_IN_FLIGHT_MAX)

    def pulled() -> Iterator[pa.RecordBatch]:
        while (batch := handover.get()) is not None:
            if batch is _ABORT:
                raise _Aborted
            yield batch
        failpoints.hit("table.before_commit")

    with ThreadPoolExecutor(max_workers=1) as writer:
        written = writer.submit(write, pa.RecordBatchReader.from_batches(fields, pulled()))
        try:
            for batch in batches:
                _hand(handover, batch, written)
        except BaseException:
            _hand(handover, _ABORT, written)
            wait_for([written])
            raise
        _hand(handover, None, written)
        written.result()


def _hand(handover: queue.Queue[Any], batch: object, written: Future[None]) -> None:
    """Give the writer a batch; if it has ended, its error is raised."""
    while True:
        if written.done():
            written.result()
            return
        try:
            handover.put(batch, timeout=HANDOVER_SECONDS)
            return
        except queue.Full:
            continue
