"""pg-types: how fast wide rows of every common type reach the durable change log.

Ours reads 160,000 inserts and 40,000 updates of 40 columns (200 transactions of 1,000 changes) into the change log. The
peer is `pg_recvlogical` to /dev/null. The columns have these types:

- integers, floats, numerics with and without limits, money and booleans;
- texts, bytea, bits, uuid, json and jsonb, an enum and a domain;
- dates, times and timestamps with and without a zone, and interval;
- network addresses, ranges, a point and a tsvector;
- arrays of integers, texts, numerics and timestamps.

Seven of the columns are null in some rows, and arrays have nulls inside. The peer copies a row of some 900 bytes at
once, while ours must find and convert 40 values. So ours must reach seven tenths of its rate.

For this to be fair the rules of pg-stream hold, and:
- the values differ from row to row and have the lengths of ordinary data, so none is converted once and used again;
- an update sends the whole row, as the server does it for any update of a row without large values;
- every type that ours reads as its exact text counts too: the bench does not select types that have a kernel.
  Only xml is missing, because the server of the bench is built without it.
"""

from __future__ import annotations

from benchmarks import workloads
from benchmarks.postgres import PostgresBench
from benchmarks.recvlogical import PgRecvlogical

BENCH = PostgresBench(
    name="pg-types",
    must_reach=0.7,
    unit="changes/s",
    workload=workloads.types,
    rows=200_000,
    peer=PgRecvlogical(),
    about=__doc__,
)
