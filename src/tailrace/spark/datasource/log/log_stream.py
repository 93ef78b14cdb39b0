"""Common part of streams over a change log, for every Spark version. Offsets, rows, and finished work.

An offset is a commit's number and the log's id. So a checkpoint fits one log and no other. After any kill the same
offsets mean the same rows. A commit is never split. The log may trim what lies before the `start` of the next
micro-batch, because that is the end of a batch that Spark has recorded as done. `commit` adds nothing to this: Spark
calls it late, and not at all while nothing happens.

One process of the driver runs all of this, one call after the other, except `read`, which runs in tasks. Everything is
opened when it is first used, because Spark makes the reader in several processes, and pickles it. A capture leaves a
slot at the source, which keeps the source from discarding its log. So what is known to be refused is refused before a
capture is started.
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
"""Interval at which a waiting stream renews its consumer.

Without this the log would take the consumer for gone.
"""
OWN_CONSUMER = "spark"
"""Name of the consumer of a stream that captures for itself, unless it is given another."""
_CHECKPOINT_HINT = "Give the query a `checkpointLocation` of its own."

Offset = dict[str, Any]


class Capture(Protocol):
    """The capture that writes the log while the stream runs.

    It is plain data until it is started, because Spark pickles it.
    """

    def start(self) -> None:
        """Begin to capture; return once the log exists, and is of this source."""

    def catch_up(self) -> None:
        """Return once the log has everything that was committed before the start."""

    def check(self) -> None:
        """Raise the error that ended it; start it again if it was killed."""

    def stop(self) -> None:
        """Stop capturing, and release the source."""


class LogStream(DataSourceStreamReader):
    """A stream over the log, step by step. Subclasses answer how their Spark asks for the next step."""

    def __init__(self, frame: LogFrame, schema: StructType, capture: Capture | None = None) -> None:
        self._frame = frame
        self._schema = schema
        self._capture = capture
        self._planner: LogPlanner | None = None
        self._consumer: Consumer | None = None
        self._stored_at = 0.0
        self._idle_since: tuple[Offset, float] | None = None
        """The offset after which the last look found nothing, and since when."""
        self._target: int | None = None

    # How far to read.

    def initialOffset(self) -> Offset:
        with without_traceback:
            planner = self._opened()
            if self._capture is not None and self._frame.options.start != EARLIEST:
                # What was committed before the query lies in its past, even if it was not captured until now.
                self._capture.catch_up()
            offset = planner.start_offset()
            self._acknowledge(offset)
            return self._offset(offset)

    def _latest(self, start: Offset, *, limited: bool) -> Offset:
        """Return how far to read from an offset before which everything is done.

        If there is nothing to read, it is the offset itself.
        """
        self._wait_if_idle(start)
        offset = self._log_offset(start)
        planner = self._opened()
        if self._capture is not None:
            self._capture.check()
        newest = planner.newest() if self._target is None else max(self._target, offset.commit)
        end = planner.next_end(offset, newest, limited=limited)
        # Commits without requested rows are done as well. Of the others, `start` says which are done.
        self._acknowledge(offset if end > offset.commit else max(offset, LogOffset(newest)))
        if end > offset.commit:
            self._idle_since = None
            return self._offset(LogOffset(end))
        if self._idle_since is None or self._idle_since[0] != start:
            self._idle_since = start, time.monotonic()
        return start

    def _wait_if_idle(self, start: Offset) -> None:
        """Wait for a log in an object store, if the last look found nothing.

        Spark asks again every 10 ms, and there every look is a request that costs money.
        """
        if self._idle_since is not None and self._idle_since[0] == start and files.is_remote(self._opened().log.path):
            wait_for_commit(self._opened().log.path, start["commit"] + 1, time.monotonic() - self._idle_since[1])

    # Rows.

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        with without_traceback:
            begin, upto = self._log_offset(start), self._log_offset(end)
            return (
                [InputPartition(part) for part in self._opened().plan_parts(begin, upto.commit)] if begin < upto else []
            )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_part(self._frame, partition.value, arrow_schema(self._schema))

    # What is done, for the log to trim.

    def commit(self, end: Offset) -> None:
        """Do nothing: see the module."""

    def stop(self) -> None:
        try:
            if self._capture is not None:
                self._capture.stop()
        finally:
            if self._consumer is not None:
                self._consumer.save()

    def _acknowledge(self, offset: LogOffset, *, at_once: bool = False) -> None:
        """Let the log trim what lies before an offset.

        This is stored at most every second, and now and then while the offset stays.
        """
        reached = (offset.commit, offset.seq)
        is_new, consumer = self._consumer is None, self._stored_consumer(offset)
        if consumer is None:
            return
        moved = (consumer.commit, consumer.seq) != reached
        if is_new or (moved and (at_once or self._target is not None)):
            consumer.jump_to(*reached)  # a query that ends on its own may be gone before the next second
        elif moved or time.monotonic() > self._stored_at + HEARTBEAT_SECONDS:
            consumer.advance_to(*reached)
            self._stored_at = time.monotonic()

    def _stored_consumer(self, offset: LogOffset) -> Consumer | None:
        """Return the stream's consumer, stored at this offset if it is new.

        None for a stream without a name.
        """
        # Nobody else keeps the rows of a log that the stream itself captures.
        name = self._frame.options.consumer or (OWN_CONSUMER if self._capture is not None else None)
        if name is not None and self._consumer is None:
            start = (offset.commit, offset.seq)
            self._consumer = Consumer.open(self._opened().log.path, name, wanted=self._table_selector(), start=start)
        return self._consumer

    def _table_selector(self) -> TableSelector | None:
        table = self._frame.options.table
        if table is None or self._capture is not None:
            return None
        return TableSelector(self._opened().log.schemas, table, may_come=True)

    # Spark's offsets, and those of the log.

    def _offset(self, offset: LogOffset) -> Offset:
        mapping: Offset = {"log": self._opened().log.log_id, "commit": offset.commit}
        return mapping | {"seq": offset.seq} if offset.seq else mapping

    def _log_offset(self, offset: Offset) -> LogOffset:
        if self._planner is None and self._capture is not None:
            self._refuse_foreign(offset, _id_of(self._frame.options.log_path))
        log = self._opened().log
        self._refuse_foreign(offset, log.log_id)
        log_offset = LogOffset(offset["commit"], offset.get("seq", 0))
        if log_offset.commit > log.newest():
            raise LogForeign(
                "the checkpoint is ahead of the log: the log was restored from a copy",
                log=log.path,
                checkpoint=log_offset.commit,
                newest=log.newest(),
                hint=f"Restore the newer log; or read the tables as a whole, and begin again. {_CHECKPOINT_HINT}",
            )
        return log_offset

    def _refuse_foreign(self, offset: Offset, log_id: str | None) -> None:
        if offset.get("log") != log_id:
            raise LogForeign(
                "the checkpoint belongs to another log" if log_id else "the log of the checkpoint is not here",
                log=self._frame.options.log,
                id=log_id or "none",
                checkpoint=offset.get("log"),
                hint=f"{_CHECKPOINT_HINT} Or set `log` to the folder of the checkpoint's log.",
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
    """A stream that raises its error at Spark's first call.

    An error raised while the reader is made would make Spark's own loop fail without a reader, and report that last.
    """

    def __init__(self, error: TailraceError) -> None:
        self._error = error

    def initialOffset(self) -> Offset:
        raise self._error.with_traceback(None)

    def latestOffset(self) -> Offset:  # type: ignore[override] # the signature of a source without limits
        raise self._error.with_traceback(None)

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        raise self._error.with_traceback(None)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        raise self._error.with_traceback(None)


def _id_of(path: LogPath) -> str | None:
    """Return the log's id. None if there is no log yet, or nothing is in it."""
    try:
        log = ChangeLog.open(path)
    except LogUnreachable:
        raise  # what is in it is not known
    except LogUnusable:
        return None
    return log.log_id if log.newest() else None


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    """Make Spark's own loop call `stop`."""
    sys.exit(0)
