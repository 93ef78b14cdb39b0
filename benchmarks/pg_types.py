"""pg-types: how fast wide rows of every common type are brought into the durable change log.

Ours reads 160,000 inserts and 40,000 updates of 40 columns (200 transactions of 1,000 changes) into the change log; the
peer is `pg_recvlogical` to /dev/null. The columns are integers, floats, numerics with and without limits, texts,
booleans, bytea, dates, times and timestamps with and without a zone, interval, uuid, json and jsonb, network
addresses, arrays of integers, texts, numerics and timestamps, an enum, a domain, ranges, a point, money, bits and a
tsvector; seven of them are null in some rows, and arrays have nulls inside. The peer copies a row of some 900 bytes at
once, while ours must find and convert 40 values: seven tenths of its rate must remain.

For this to be fair the rules of pg-stream hold, and:
- the values differ from row to row and have the lengths of ordinary data, so none is converted once and used again;
- an update sends the whole row, as the server does it for any update of a row without large values;
- every type that ours reads as its exact text counts as it is: the bench does not choose types that have a kernel.
  xml alone is missing, for the server of the bench is built without it.
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
