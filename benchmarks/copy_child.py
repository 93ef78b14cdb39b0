"""The process that `pg_copy.py` measures: read one table into Arrow, then print what it took as a line of JSON.

usage: python -m benchmarks.copy_child ours|adbc URL

The clock starts before the connection is opened and stops with the last batch.
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from psycopg import sql

from benchmarks.ours import memory_peak_bytes
from benchmarks.workloads import PUBLICATION
from tailrace.capture.postgres.catalogue import Catalogue
from tailrace.capture.postgres.connect import connect
from tailrace.capture.postgres.copy import copy_rows
from tailrace.capture.postgres.warm import warm_kernels
from tailrace.model.schema import TableId

SECONDS_MAX = 600.0


def main() -> int:
    """Warm up, read under the clock, report."""
    who, url = sys.argv[1:]
    if who == "ours":
        warm_kernels()
        batches = _ours(url)
    else:
        batches = _adbc(importlib.import_module("adbc_driver_postgresql.dbapi"), url)
    cpu, wall = _cpu_seconds(), time.perf_counter()
    # A copy of the key, because a part of a batch keeps the whole.
    keys = [batch.column(0).to_numpy().copy() for batch in batches]
    wall, cpu = time.perf_counter() - wall, _cpu_seconds() - cpu
    report = {
        "rows": sum(map(len, keys)),
        "keys": sum(int(some.sum()) for some in keys),
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "memory_peak_bytes": memory_peak_bytes("self"),
    }
    print(json.dumps(report), flush=True)
    return 0


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _ours(url: str) -> Iterator[pa.RecordBatch]:
    with connect(url) as connection:
        connection.execute("begin isolation level repeatable read read only")
        schema = Catalogue(connection).describe(TableId("public", "orders"), (PUBLICATION,))
        source = sql.SQL("from only public.orders")
        yield from copy_rows(connection, schema, source, deadline=time.monotonic() + SECONDS_MAX)


def _adbc(dbapi: Any, url: str) -> Iterator[pa.RecordBatch]:
    with dbapi.connect(url) as connection, connection.cursor() as cursor:
        cursor.execute("select * from orders")
        yield from cursor.fetch_record_batch()


if __name__ == "__main__":
    sys.exit(main())
