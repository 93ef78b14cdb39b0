"""Wake the work with a stream of commit numbers.

They say how far the log has grown, and carry no data. Spark reads the stream from a socket of ours, with a source of
its own that needs no Python. A source in Python would need three processes, a second of each start, and memory. Spark
calls the socket source unfit for production, because lost lines cannot be read again. Here each table has its own
applied position. So after a lost line the next line wakes the work, or the next sweep. A micro-batch covers a bounded
number of rows, and the next number is sent when it is done.
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
    """Sends to one query at a time how far the log has grown.

    `ahead` returns the commit to go to after a commit.
    """

    def __init__(self, ahead: Callable[[int], int], after: int) -> None:
        self._ahead = ahead
        self._announced = self._answered = after
        self._free = threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(0.5)

    def start(
        self, spark: SparkSession, checkpoint: Path, on_batch: Callable[[DataFrame, int], None]
    ) -> StreamingQuery:
        """Start a query that listens.

        Each of its micro-batches says how far to go, and has to be acknowledged.
        """
        host, port = self._server.getsockname()
        lines = spark.readStream.format("socket").option("host", host).option("port", port).load()
        # As a URI: with a bare path Spark would use the cluster's own file system.
        address = checkpoint.absolute().as_uri()
        return lines.writeStream.foreachBatch(on_batch).option("checkpointLocation", address).start()

    def announced_commit(self) -> int | None:
        """Return the commit to go to at least; None if nothing was announced.

        This needs no Spark job that reads the number. A query begins with a micro-batch that announces nothing.
        """
        return self._announced if self._announced > self._answered else None

    @property
    def answered_commit(self) -> int:
        """The last commit that was acknowledged."""
        return self._answered

    def acknowledge(self, end: int) -> None:
        """Record that the work up to a commit is done. The next number may then be sent."""
        self._answered = max(self._answered, end)
        self._free.set()

    def serve(self, stopping: threading.Event) -> None:
        """Serve the query that connects, until asked to stop. A query that is started again connects again."""
        while not stopping.is_set():
            try:
                listener, _ = self._server.accept()
            except OSError:  # nobody has connected
                continue
            with listener:
                self._serve_listener(listener, stopping)
        self._server.close()

    def _serve_listener(self, listener: socket.socket, stopping: threading.Event) -> None:
        while not stopping.is_set():
            end = self._ahead(self._answered)
            if end <= self._answered:
                stopping.wait(POLL_SECONDS)
                continue
            self._free.clear()
            self._announced = end
            try:
                listener.sendall(f"{end}\n".encode())
            except OSError:  # it has gone
                return
            while not self._free.wait(POLL_SECONDS) and not stopping.is_set():
                if _has_hung_up(listener):
                    return


def _has_hung_up(listener: socket.socket) -> bool:
    """Return whether the listener has closed. Spark never sends anything, so only an end can arrive."""
    try:
        return listener.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
