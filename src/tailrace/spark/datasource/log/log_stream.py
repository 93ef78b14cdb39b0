"""What streams of a change log have in common, whatever Spark asks them: offsets, rows, and what is done.

An offset is a commit's number and the log's id, so a checkpoint fits one log and no other, and whatever is killed, the
same offsets mean the same rows. A commit is never split. What the log may let go of is what lies before the `start`
of the next micro-batch: that is the end of one Spark has noted as done. `commit` says nothing more: it comes late, and
not at all while nothing happens.

One process of the driver's runs all of this, one call after the other, except `read`, which runs in tasks. Everything
is opened when it is first used: Spark makes the reader in several processes, and pickles it. A capture leaves a slot at
the source, which keeps that from discarding its log: so what is known to be refused is refused before one is started.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn, Protocol

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from tailrace.changelog.format.schemas import TableSelector
from tailrace.changelog.read.commit_wait import wait_for_commit
from tailrace.changelog.read.consumers import Consumer
from tailrace.changelog.read.offsets import EARLIEST, LogOffset, refuse_past_start
from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import LogForeign, LogUnreachable, LogUnusable, TailraceError
from tailrace.spark.datasource.log.log_part import read_part
from tailrace.spark.datasource.log.log_plan import LogPlanner
from tailrace.spark.datasource.log.log_schema import LogFrame
from tailrace.spark.datasource.option_values import without_traceback
from tailrace.spark.session.arrow_types import arrow_schema
from tailrace.storage import files
from tailrace.storage.files import LogPath

HEARTBEAT_SECONDS = 30.0
"""A stream that waits says so often enough that the log does not take it for gone."""
OWN_CONSUMER = "spark"
"""Of a stream that captures for itself, unless it is given another."""
_CHECKPOINT_HINT = "Give the query a `checkpointLocation` of its own."

Offset = dict[str, Any]


class Capture(Protocol):
    """Whoever writes the log while the stream runs. Plain data until it is started, for Spark pickles it."""

    def start(self) -> None:
        """Begin to capture; returns once the log is there, and is of this source."""

    def catch_up(self) -> None:
        """Return once the log has everything that was committed before the start."""

    def check(self) -> None:
        """Raise what has ended it; start it again if it was killed."""

    def stop(self) -> None:
        """End it, and let go of the source."""


class LogStream(DataSourceStreamReader):
    """The log, step by step. How Spark asks for the next step is for others to say."""

    def __init__(self, frame: LogFrame, schema: StructType, capture: Capture | None = None) -> None:
        self._frame = frame
        self._schema = schema
        self._capture = capture
        self._planner: LogPlanner | None = None
        self._consumer: Consumer | None = None
        self._said_at = 0.0
        self._idle_since: tuple[Offset, float] | None = None
        """After which place there was nothing at the last look, and since when."""
        self._target: int | None = None

    # Where to.

    def initialOffset(self) -> Offset:
        with without_traceback:
            view = self._opened()
            if self._capture is not None and self._frame.options.start != EARLIEST:
                # What was committed before the query is its past, though nobody may have captured it until now.
                self._capture.catch_up()
            place = view.start_offset()
            self._acknowledge(place)
            return self._offset(place)

    def _latest(self, start: Offset, *, limited: bool) -> Offset:
        """How far to go from where everything before is done; `start` itself, if there is nothing to go for."""
        self._wait_if_idle(start)
        place = self._place(start)
        view = self._opened()
        if self._capture is not None:
            self._capture.check()
        newest = view.newest() if self._target is None else max(self._target, place.commit)
        end = view.next_end(place, newest, limited=limited)
        # Commits that bring nothing of ours are behind us as well; of others we are told by `start`.
        self._acknowledge(place if end > place.commit else max(place, LogOffset(newest)))
        if end > place.commit:
            self._idle_since = None
            return self._offset(LogOffset(end))
        if self._idle_since is None or self._idle_since[0] != start:
            self._idle_since = start, time.monotonic()
        return start

    def _wait_if_idle(self, start: Offset) -> None:
        """Spark asks again every 10 ms, and where the log is in a store every look is a request that is paid for."""
        if self._idle_since is not None and self._idle_since[0] == start and files.is_remote(self._opened().log.path):
            wait_for_commit(self._opened().log.path, start["commit"] + 1, time.monotonic() - self._idle_since[1])

    # What is there.

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        with without_traceback:
            begin, upto = self._place(start), self._place(end)
            return (
                [InputPartition(part) for part in self._opened().plan_parts(begin, upto.commit)] if begin < upto else []
            )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_part(self._frame, partition.value, arrow_schema(self._schema))

    # What is done.

    def commit(self, end: Offset) -> None:
        """Nothing: see above."""

    def stop(self) -> None:
        try:
            if self._capture is not None:
                self._capture.stop()
        finally:
            if self._consumer is not None:
                self._consumer.save()

    def _acknowledge(self, place: LogOffset, *, at_once: bool = False) -> None:
        """The log may let go of what lies before; said at most every second, and now and then while it stays."""
        reached = (place.commit, place.seq)
        begun, consumer = self._consumer is None, self._stored_consumer(place)
        if consumer is None:
            return
        moved = (consumer.commit, consumer.seq) != reached
        if begun or (moved and (at_once or self._target is not None)):
            consumer.jump_to(*reached)  # a query that ends by itself may be gone before the next second
        elif moved or time.monotonic() > self._said_at + HEARTBEAT_SECONDS:
            consumer.advance_to(*reached)
            self._said_at = time.monotonic()

    def _stored_consumer(self, place: LogOffset) -> Consumer | None:
        """Our place in the log, this one if there was none; None for a stream without a name."""
        # A log of its own has nobody else to keep it.
        name = self._frame.options.consumer or (OWN_CONSUMER if self._capture is not None else None)
        if name is not None and self._consumer is None:
            start = (place.commit, place.seq)
            self._consumer = Consumer.open(self._opened().log.path, name, wanted=self._table_selector(), start=start)
        return self._consumer

    def _table_selector(self) -> TableSelector | None:
        table = self._frame.options.table
        if table is None or self._capture is not None:
            return None
        return TableSelector(self._opened().log.schemas, table, may_come=True)

    # Offsets, and the places they stand for.

    def _offset(self, place: LogOffset) -> Offset:
        found: Offset = {"log": self._opened().log.log_id, "commit": place.commit}
        return found | {"seq": place.seq} if place.seq else found

    def _place(self, offset: Offset) -> LogOffset:
        if self._planner is None and self._capture is not None:
            self._refuse_foreign(offset, _id_of(self._frame.options.log_path))
        log = self._opened().log
        self._refuse_foreign(offset, log.log_id)
        place = LogOffset(offset["commit"], offset.get("seq", 0))
        if place.commit > log.newest():
            raise LogForeign(
                "the checkpoint is ahead of the log: the log was put back from a copy",
                log=log.path,
                checkpoint=place.commit,
                newest=log.newest(),
                hint=f"Restore the newer log; or read the tables as a whole. {_CHECKPOINT_HINT}",
            )
        return place

    def _refuse_foreign(self, offset: Offset, found: str | None) -> None:
        if offset.get("log") != found:
            raise LogForeign(
                "the checkpoint is of another log" if found else "the log that the checkpoint is of is not here",
                log=self._frame.options.log,
                id=found or "none",
                checkpoint=offset.get("log"),
                hint=f"{_CHECKPOINT_HINT} Or give `log` the folder that the checkpoint is of.",
            )

    def _opened(self) -> LogPlanner:
        if self._planner is None:
            if self._capture is not None:
                if _id_of(self._frame.options.log_path) is None:
                    refuse_past_start(self._frame.options.start)
                # Spark ends this process with a signal that would leave no time to end another.
                signal.signal(signal.SIGTERM, _interrupt)
                self._capture.start()
            self._planner = LogPlanner(self._frame)
        return self._planner


class RefusedStream(DataSourceStreamReader):
    """A stream that cannot be. Whatever Spark asks first is answered with why: were that raised when the reader is
    made, Spark's own loop would stumble over having none, and tell of that last."""

    def __init__(self, error: TailraceError) -> None:
        self._error = error

    def initialOffset(self) -> Offset:
        raise self._error.with_traceback(None)

    def latestOffset(self) -> Offset:  # type: ignore[override] # as a source has it that takes no limits
        raise self._error.with_traceback(None)

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        raise self._error.with_traceback(None)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        raise self._error.with_traceback(None)


def _id_of(path: LogPath) -> str | None:
    """Of the log that is there; None if it is none yet, or nothing is in it."""
    try:
        log = ChangeLog.open(path)
    except LogUnreachable:
        raise  # what is in it is not known
    except LogUnusable:
        return None
    return log.log_id if log.newest() else None


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    """Have Spark's own loop call `stop`."""
    sys.exit(0)
