"""What wakes the work: a stream of commit numbers that says how far the log has grown, and carries no data.

Spark reads it from a socket of ours, with a source of its own that needs no Python: one in Python would take three
processes, a second of each start and a place in memory. Spark calls that source unfit for production because lines that
are lost cannot be read again. Where a table stands is the table's own business, so here a lost line means being woken
by the next, or by whoever sweeps up. A micro-batch covers a bounded number of rows, and the next number is said when
it is done.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tailrace.changelog.reader import ChangeLog

ROWS_MAX = 500_000
"""In one micro-batch, unless a single commit has more."""
LOOK_SECONDS = 0.02


class Wake:
    """Says to one query at a time how far the log has grown."""

    def __init__(self, log: Path, after: int) -> None:
        self._log = ChangeLog.open(log)
        self._done = after
        self._free = threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(0.5)

    def start(
        self, spark: SparkSession, checkpoint: Path, on_batch: Callable[[DataFrame, int], None]
    ) -> StreamingQuery:
        """Start a query that listens. Each of its micro-batches says how far to go, and is to be answered."""
        host, port = self._server.getsockname()
        lines = spark.readStream.format("socket").option("host", host).option("port", port).load()
        return lines.writeStream.foreachBatch(on_batch).option("checkpointLocation", str(checkpoint)).start()

    def heard(self, batch: DataFrame) -> int | None:
        """The commit to go to; None: a query begins with a micro-batch that says nothing."""
        return max((int(row["value"]) for row in batch.collect()), default=None)

    def answer(self, end: int) -> None:
        """The work up to there is done; the next number may be said."""
        self._done = max(self._done, end)
        self._free.set()

    def speak(self, stopping: threading.Event) -> None:
        """Talk to whoever listens, until told to stop; a query that is started again comes anew."""
        while not stopping.is_set():
            try:
                listener, _ = self._server.accept()
            except OSError:  # nobody came
                continue
            with listener:
                self._tell(listener, stopping)
        self._server.close()

    def _tell(self, listener: socket.socket, stopping: threading.Event) -> None:
        said = self._done
        while not stopping.is_set():
            end = self._log.bounded(said, ROWS_MAX)
            if end <= said:
                stopping.wait(LOOK_SECONDS)
                continue
            self._free.clear()
            try:
                listener.sendall(f"{end}\n".encode())
            except OSError:  # it has gone
                return
            while not self._free.wait(LOOK_SECONDS) and not stopping.is_set():
                if _has_hung_up(listener):
                    return
            said = self._done


def _has_hung_up(listener: socket.socket) -> bool:
    """Spark never says a word, so an end is all that can come."""
    listener.setblocking(False)
    try:
        return listener.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        listener.setblocking(True)
