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

POLL_SECONDS = 0.02


class WakeSource:
    """Says to one query at a time how far the log has grown: `ahead` tells up to where to go after a commit."""

    def __init__(self, ahead: Callable[[int], int], after: int) -> None:
        self._ahead = ahead
        self._said = self._done = after
        self._free = threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(0.5)

    def start(
        self, spark: SparkSession, checkpoint: Path, on_batch: Callable[[DataFrame, int], None]
    ) -> StreamingQuery:
        """Start a query that listens. Each of its micro-batches says how far to go, and is to be answered."""
        host, port = self._server.getsockname()
        lines = spark.readStream.format("socket").option("host", host).option("port", port).load()
        # By its address: a cluster's own file system would take a bare path for one of its own.
        place = checkpoint.absolute().as_uri()
        return lines.writeStream.foreachBatch(on_batch).option("checkpointLocation", place).start()

    def announced_commit(self) -> int | None:
        """The commit to go to at least, known without a Spark job that reads it; None: a query begins with a
        micro-batch that says nothing."""
        return self._said if self._said > self._done else None

    @property
    def answered_commit(self) -> int:
        """The commit that was last answered."""
        return self._done

    def acknowledge(self, end: int) -> None:
        """The work up to there is done; the next number may be said."""
        self._done = max(self._done, end)
        self._free.set()

    def serve(self, stopping: threading.Event) -> None:
        """Talk to whoever listens, until told to stop; a query that is started again comes anew."""
        while not stopping.is_set():
            try:
                listener, _ = self._server.accept()
            except OSError:  # nobody came
                continue
            with listener:
                self._serve_listener(listener, stopping)
        self._server.close()

    def _serve_listener(self, listener: socket.socket, stopping: threading.Event) -> None:
        while not stopping.is_set():
            end = self._ahead(self._done)
            if end <= self._done:
                stopping.wait(POLL_SECONDS)
                continue
            self._free.clear()
            self._said = end
            try:
                listener.sendall(f"{end}\n".encode())
            except OSError:  # it has gone
                return
            while not self._free.wait(POLL_SECONDS) and not stopping.is_set():
                if _has_hung_up(listener):
                    return


def _has_hung_up(listener: socket.socket) -> bool:
    """Spark never says a word, so an end is all that can come."""
    try:
        return listener.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
